//! Rates of the last seconds: requests, denials, and decisions without the origin.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;
use utoipa::ToSchema;

use crate::metrics::Stopwatch;
use crate::shared::Shared;

/// Interval between two samples of the counters.
const SAMPLE_EVERY: Duration = Duration::from_secs(1);

/// Samples that are kept: rates are those of this many intervals. More: smoother; later.
const SAMPLES_MAX: usize = 10;

/// Decisions since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DecisionTotals {
    pub(crate) all: u64,
    pub(crate) denied: u64,
    /// Decisions of the fallback: `local`, `open` and `closed`.
    pub(crate) without_origin: u64,
    pub(crate) shed: u64,
}

/// Rates of the last seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, ToSchema)]
pub(crate) struct RateReport {
    /// The time that the rates are of; 0 before the first sample.
    pub(crate) seconds: f64,
    pub(crate) requests_per_second: f64,
    pub(crate) denied_per_second: f64,
    /// Decisions of the fallback, because the origin did not reply.
    pub(crate) without_origin_per_second: f64,
    /// Checks that were not decided, because the server is overloaded.
    pub(crate) shed_per_second: f64,
}

/// Samples of the counters, the latest last.
#[derive(Debug, Default)]
pub(crate) struct Rates {
    samples: Mutex<VecDeque<(Stopwatch, DecisionTotals)>>,
}

impl Rates {
    fn sample(&self, at: Stopwatch, totals: DecisionTotals) {
        let mut samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        samples.push_back((at, totals));
        if samples.len() > SAMPLES_MAX {
            samples.pop_front();
        }
    }

    /// Returns the rates between the oldest sample and now.
    pub(crate) fn report(&self, totals: DecisionTotals) -> RateReport {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((at, before)) = samples.front() else { return RateReport::default() };
        rates(*before, totals, at.taken())
    }
}

fn rates(before: DecisionTotals, now: DecisionTotals, time: Duration) -> RateReport {
    let seconds = time.as_secs_f64();
    if seconds <= 0.0 {
        return RateReport::default();
    }
    // A hundredth is enough for people.
    let rounded = |value: f64| (value * 100.0).round() / 100.0;
    let rate = |of: fn(&DecisionTotals) -> u64| {
        let count = u32::try_from(of(&now).saturating_sub(of(&before))).unwrap_or(u32::MAX);
        rounded(f64::from(count) / seconds)
    };
    RateReport {
        seconds: rounded(seconds),
        requests_per_second: rate(|totals| totals.all),
        denied_per_second: rate(|totals| totals.denied),
        without_origin_per_second: rate(|totals| totals.without_origin),
        shed_per_second: rate(|totals| totals.shed),
    }
}

/// Samples the counters until the server stops.
pub(crate) async fn watch(shared: Arc<Shared>, stop: CancellationToken) {
    let mut ticks = interval(SAMPLE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => shared.telemetry.rates.sample(Stopwatch::start(), shared.decision_totals()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_those_between_the_oldest_sample_and_now() {
        let totals = |all, denied| DecisionTotals { all, denied, without_origin: denied, shed: 1 };
        let report = rates(totals(10, 1), totals(35, 2), Duration::from_secs(10));
        let expected = RateReport {
            seconds: 10.0,
            requests_per_second: 2.5,
            denied_per_second: 0.1,
            without_origin_per_second: 0.1,
            shed_per_second: 0.0,
        };
        assert_eq!(report, expected);
        assert_eq!(rates(totals(1, 1), totals(9, 9), Duration::ZERO), RateReport::default());
    }

    #[test]
    fn old_samples_are_dropped() {
        let rates = Rates::default();
        assert_eq!(rates.report(DecisionTotals::default()), RateReport::default());
        for all in 0..100 {
            rates.sample(Stopwatch::start(), DecisionTotals { all, ..DecisionTotals::default() });
        }
        let samples = rates.samples.lock().expect("not poisoned");
        assert_eq!((samples.len(), samples[0].1.all), (SAMPLES_MAX, 90));
    }
}
