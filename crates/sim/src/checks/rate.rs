//! The long-run rate of a flooded limit is at most 1 % above the limit.

use tidegate_core::Algorithm;

use super::{Checker, Ending};
use crate::scenario::{Attack, Scenario, Shape};
use crate::store::EPOCH_US;
use crate::world::ATTACKED;

/// Bursts that have to drain in the second half of a world before its rate is significant. Units in
/// transit between nodes, origins and regions are few compared with a burst, and a burst is a
/// hundredth of this.
const BURSTS: u64 = 100;

/// How much more than its rate may be admitted under a limit in the long run, in hundredths of it.
const MORE_PERCENT: f64 = 1.0;

/// At how many moments it is looked how much has passed.
const LOOKS: u64 = 200;

struct Rate;

/// Whether the second half of a world shows the long-run rate: demand always exceeds the limit,
/// many bursts drain, and no more faults occur. A sliding window does not qualify, because it may
/// exceed its limit in each window.
pub(crate) fn is_rated(scenario: &Scenario) -> bool {
    let Scenario { limit, shape, length_us, .. } = scenario;
    let is_flooded = *shape == Shape::Attack(Attack::Flood) && limit.algorithm() == Algorithm::Gcra;
    let is_long = scenario.drained(length_us / 2) >= BURSTS * u64::from(limit.burst());
    is_flooded && is_long && scenario.is_well_from(length_us / 2 - length_us / 10)
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if is_rated(scenario) { Some(Box::new(Rate)) } else { None }
}

impl Checker for Rate {
    fn promise(&self) -> &'static str {
        "rate"
    }

    /// The rate is the slope of a line through the units admitted by each moment of the second
    /// half.
    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let length_us = end.scenario.length_us;
        let (from_us, to_us) = (length_us / 2, length_us);
        let admissions = &end.history.meters[ATTACKED].admissions;
        let per_us = rate(admissions, EPOCH_US + from_us, EPOCH_US + to_us);
        let admitted = per_us * (to_us - from_us) as f64;
        let limit = end.scenario.drained(to_us - from_us);
        let is_above = admitted > limit as f64 * (1.0 + MORE_PERCENT / 100.0);
        is_above.then(|| {
            let admitted = admitted.ceil() as u64;
            format!("key {ATTACKED}: {admitted} admitted in the second half, where the limit is {limit}")
        })
    }
}

/// Returns the units admitted per microsecond: the slope of a line through the units admitted by
/// each moment. Waves average out.
fn rate(admissions: &[(u64, u64)], from_us: u64, to_us: u64) -> f64 {
    let (mut later, mut passed) = (admissions.iter().peekable(), 0);
    let mut look = |step: u64| {
        let at_us = from_us + (to_us - from_us) * step / LOOKS;
        while let Some((_, cost)) = later.next_if(|(when_us, _)| *when_us <= at_us) {
            passed += cost;
        }
        (at_us as f64, passed as f64)
    };
    let points: Vec<(f64, f64)> = (0..=LOOKS).map(&mut look).collect();
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / points.len() as f64;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let spread: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    points.iter().map(|point| (point.0 - x) * (point.1 - y)).sum::<f64>() / spread.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::SECOND_US;

    /// A unit every so many microseconds, and a burst at some time.
    fn admissions(every_us: u64, burst: (u64, u64)) -> Vec<(u64, u64)> {
        let mut all: Vec<(u64, u64)> =
            (0..1_000 * SECOND_US / every_us).map(|at| (at * every_us, 1)).collect();
        all.push(burst);
        all.sort_unstable();
        all
    }

    #[test]
    fn rate_is_a_long_run_average_without_an_earlier_burst() {
        for (every_us, burst) in [(10_000, (0, 0)), (10_000, (1, 5_000)), (9_800, (1, 0))] {
            let admissions = admissions(every_us, burst);
            let found = rate(&admissions, 500 * SECOND_US, 1_000 * SECOND_US) * every_us as f64;
            assert!((found - 1.0).abs() < 0.001, "{found} for one in {every_us} us");
        }
        let waves: Vec<(u64, u64)> = (0..1_000).map(|second| (second * SECOND_US, 100)).collect();
        let found = rate(&waves, 500 * SECOND_US, 1_000 * SECOND_US) * 10_000.0;
        assert!((found - 1.0).abs() < 0.001, "{found} in waves");
    }
}
