//! The meters of a back-test: core decides every request, one by one or in steps of a stream.

use tidegate_core::{Limit, Meter, Now, Verdict};

/// Steps in which the requests of a stream between two records are decided at most. Further ones
/// get the share of the later half of the steps, and the meter rests meanwhile. Higher: more exact
/// for keys with few records and many requests; a plan takes longer.
const STEPS_MAX: u64 = 64;

/// A step is at most this part of a burst, because core decides it as one moment. Higher: more
/// exact; more steps.
const STEPS_PER_BURST: u64 = 8;

/// Unlogged requests of a key that come evenly from one moment to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Stream {
    pub(super) from_ms: u64,
    pub(super) to_ms: u64,
    pub(super) requests: u64,
    /// Cost of each request.
    pub(super) cost: u64,
}

impl Stream {
    /// Returns how many of the requests have come at a time.
    fn came_by(&self, at_ms: u64) -> u64 {
        let span_ms = self.to_ms.saturating_sub(self.from_ms).max(1);
        let passed_ms = at_ms.clamp(self.from_ms, self.to_ms) - self.from_ms;
        part(self.requests, passed_ms, span_ms)
    }
}

/// Returns `whole * numerator / denominator`.
fn part(whole: u64, numerator: u64, denominator: u64) -> u64 {
    let scaled = u128::from(whole) * u128::from(numerator) / u128::from(denominator.max(1));
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

/// The modelled state of one key under one limit.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyMeter {
    limit: Limit,
    meter: Meter,
    /// The time at which its clock starts.
    start_us: u64,
    /// The time up to which the stream is decided.
    at_ms: u64,
    /// Time that the meter rested, because the requests of a stream were not decided one by one.
    rested_us: u64,
    /// Requests of the stream since the last call of `share`, all and passed.
    came: u64,
    passed: u64,
}

impl KeyMeter {
    /// An empty meter at a time, or at the start of its stream if that is earlier.
    pub(super) fn new(limit: Limit, stream: &Stream, at_ms: u64) -> Self {
        let at_ms = if stream.requests > 0 { stream.from_ms.min(at_ms) } else { at_ms };
        let start_us = at_ms * 1_000;
        Self { limit, meter: Meter::empty(&limit), start_us, at_ms, rested_us: 0, came: 0, passed: 0 }
    }

    /// Returns a reading of the meter's clock: the time of the log, without the times of rest.
    fn now(&self, at_us: u64) -> Now {
        let at_us = at_us.saturating_sub(self.rested_us);
        Now::from_micros(at_us.saturating_sub(self.start_us), at_us)
    }

    /// Advances to a time under a limit, with the requests of the stream until then.
    pub(super) fn advance(&mut self, limit: &Limit, stream: &Stream, at_ms: u64) {
        if self.limit != *limit {
            // The spent units stay the same under another limit.
            let now = self.now(self.at_ms * 1_000);
            let used = self.meter.used(&self.limit, now);
            self.meter = Meter::empty(limit).merge(limit, now, used);
            self.limit = *limit;
        }
        let came = stream.came_by(at_ms) - stream.came_by(self.at_ms);
        let from_us = self.at_ms.max(stream.from_ms) * 1_000;
        let to_us = at_ms.min(stream.to_ms) * 1_000;
        self.at_ms = self.at_ms.max(at_ms);
        if came > 0 {
            self.flow(stream.cost, came, (from_us, to_us));
        }
    }

    /// Decides requests that come evenly over a time.
    fn flow(&mut self, cost: u64, came: u64, (from_us, to_us): (u64, u64)) {
        let span_us = to_us.saturating_sub(from_us);
        let step = self.step(cost, came, span_us);
        let (mut done, mut passed) = (0, 0);
        let mut half = (0, 0);
        for index in 0..STEPS_MAX {
            if done == came {
                break;
            }
            if index == STEPS_MAX / 2 {
                half = (done, passed);
            }
            let requests = step.min(came - done);
            done += requests;
            passed += self.decide_all(requests, cost, from_us + part(span_us, done, came));
        }
        if done < came {
            let rest = came - done;
            passed += part(rest, passed - half.1, done - half.0);
            self.rested_us += part(span_us, rest, came);
        }
        self.came += came;
        self.passed += passed;
    }

    /// Returns how many requests of a stream make up one step. Either their cost or the units that
    /// drain meanwhile are a small part of a burst, so the moment within the step does not matter.
    fn step(&self, cost: u64, came: u64, span_us: u64) -> u64 {
        let (cost, burst) = (cost.max(1), u64::from(self.limit.burst()));
        let units = (burst / STEPS_PER_BURST).max(cost);
        let drain_us = part(units, self.limit.period_us(), u64::from(self.limit.amount()));
        (units / cost).max(part(came, drain_us, span_us))
    }

    /// Decides requests at one moment, and returns how many of them pass.
    fn decide_all(&mut self, requests: u64, cost: u64, at_us: u64) -> u64 {
        let now = self.now(at_us);
        let (verdict, after) = self.meter.decide(&self.limit, now, requests.saturating_mul(cost));
        match verdict {
            Verdict::Allow { .. } => {
                self.meter = after;
                requests
            }
            Verdict::Deny { remaining, .. } => {
                let passed = (u64::from(remaining) / cost.max(1)).min(requests);
                self.meter = self.meter.decide(&self.limit, now, passed * cost).1;
                passed
            }
        }
    }

    /// Whether a request of this cost passes now.
    pub(super) fn has_room(&self, cost: u64) -> bool {
        self.meter.decide(&self.limit, self.now(self.at_ms * 1_000), cost).0.is_allowed()
    }

    /// Charges a request that passed.
    pub(super) fn charge(&mut self, cost: u64) {
        self.meter = self.meter.charge(&self.limit, self.now(self.at_ms * 1_000), cost);
    }

    /// Returns the requests of the stream since the last call, all and passed.
    pub(super) fn take_flow(&mut self) -> (u64, u64) {
        (std::mem::take(&mut self.came), std::mem::take(&mut self.passed))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MINUTE_MS: u64 = 60_000;

    fn per_minute(amount: u64, burst: u64) -> Limit {
        Limit::gcra(amount, Duration::from_mins(1))
            .and_then(|limit| limit.with_burst(burst))
            .expect("in range")
    }

    /// Decides requests of cost 1 without a stream.
    fn passed(limit: &Limit, at_ms: &[u64]) -> Vec<bool> {
        let mut meter = KeyMeter::new(*limit, &Stream::default(), 0);
        let mut pass = |at_ms: u64| {
            meter.advance(limit, &Stream::default(), at_ms);
            let has_room = meter.has_room(1);
            if has_room {
                meter.charge(1);
            }
            has_room
        };
        at_ms.iter().map(|at_ms| pass(*at_ms)).collect()
    }

    #[test]
    fn a_meter_takes_its_burst_and_leaks() {
        let at = [1_000, 1_000, 1_000, 1_000, 1_999, 2_000, 2_000, 4_000, 4_000];
        let expected = [true, true, true, false, false, true, false, true, true];
        assert_eq!(passed(&per_minute(60, 3), &at), expected);
        assert!(!KeyMeter::new(per_minute(0, 3), &Stream::default(), 0).has_room(0), "blocked");
        assert!(!KeyMeter::new(per_minute(60, 3), &Stream::default(), 0).has_room(4), "more than the burst");
    }

    #[test]
    fn a_sliding_window_fades() {
        let limit = Limit::sliding_window(2, Duration::from_mins(1)).expect("in range");
        let at = [0, 0, 1, MINUTE_MS, MINUTE_MS + MINUTE_MS / 2, 2 * MINUTE_MS - 1];
        assert_eq!(passed(&limit, &at), [true, true, false, false, true, false]);
    }

    #[test]
    fn spent_units_stay_when_the_limit_changes() {
        let (before, after) = (per_minute(60, 10), per_minute(6, 10));
        let mut meter = KeyMeter::new(before, &Stream::default(), 0);
        meter.advance(&before, &Stream::default(), 1_000);
        meter.charge(8);
        meter.advance(&after, &Stream::default(), 1_000);
        assert!(meter.has_room(2) && !meter.has_room(3));
    }

    #[test]
    fn stream_passes_the_burst_and_the_drained_units() {
        let limit = per_minute(10, 10);
        for (per_minute, expected) in [(5, 50), (10, 100), (110, 110), (1_100, 110), (1_000_000, 110)] {
            let (from_ms, to_ms) = (MINUTE_MS, 11 * MINUTE_MS);
            let stream = Stream { from_ms, to_ms, requests: 10 * per_minute, cost: 1 };
            let mut meter = KeyMeter::new(limit, &stream, 20 * MINUTE_MS);
            meter.advance(&limit, &stream, 20 * MINUTE_MS);
            let (came, passed) = meter.take_flow();
            assert_eq!(came, 10 * per_minute);
            assert!(passed.abs_diff(expected) <= 3, "{per_minute}: {passed}");
            assert_eq!(meter.take_flow(), (0, 0), "it is over");
        }
    }
}
