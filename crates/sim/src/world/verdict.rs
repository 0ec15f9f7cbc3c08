//! The end of a world: its promises are compared with its results.

use super::World;
use crate::bucket::{Judge, JudgedUsage};
use crate::checks::{Ending, allowed, is_rated};
use crate::history::MeterHistory;
use crate::report::{Curve, Reach, Report};
use crate::scenario::Shape;
use crate::store::EPOCH_US;

impl World<'_> {
    /// Checks all promises, and returns the report.
    pub(super) fn judge(mut self) -> Report {
        self.watch.history.close(self.now_us);
        let end = Ending {
            scenario: self.scenario,
            regions: &self.regions,
            history: &self.watch.history,
            tally: &self.tally,
            waiting: self.waiting.len(),
            judged: self.watch.history.meters.iter().map(MeterHistory::judged).collect(),
            steady: self.watch.history.steady(),
        };
        let violations = self.watch.checks.end(&end);
        let ((admitted, ideal), reach, curve) = (end.admitted_and_ideal(), reach(&end), curve(&end));
        let steady = end.steady;
        for node in self.regions.iter_mut().flat_map(|region| std::mem::take(&mut region.nodes)) {
            self.tally.count(&node);
        }
        let is_attacked = matches!(self.scenario.shape, Shape::Attack(_));
        Report {
            seed: self.scenario.seed,
            simulated_us: self.scenario.length_us * self.regions.len() as u64,
            requests: if is_attacked { self.tally.attacks } else { self.scenario.requests },
            passed: self.tally.passed,
            passed_before_denial: self.tally.passed_before_denial,
            waited: self.tally.waited,
            unanswered: self.tally.unanswered,
            alone: self.tally.alone,
            longest_wait_us: self.tally.longest_wait_us,
            admitted,
            ideal,
            steady,
            calls: self.tally.calls,
            updates: self.tally.updates,
            faults: self.tally.faults,
            isolations: self.watch.history.isolations(),
            batches: self.tally.batches,
            reach,
            is_rated: is_rated(self.scenario),
            violations,
            curve,
            trace: self.trace,
        }
    }
}

/// Over-admission of the key that came closest to its bound.
fn reach(end: &Ending<'_>) -> Reach {
    let of_key =
        |(key, judged): (usize, &JudgedUsage)| Reach { excess: judged.worst().0, allowed: allowed(end, key) };
    end.judged.iter().enumerate().map(of_key).max_by_key(Reach::milli).unwrap_or_default()
}

/// The busiest key over time.
fn curve(end: &Ending<'_>) -> Curve {
    let seen = &end.history.meters[0];
    let mut judge = Judge::new(seen.terms[0]);
    let point = |(at_us, cost): &(u64, u64)| {
        judge.fill(*at_us, *cost);
        (at_us.saturating_sub(EPOCH_US), judge.level())
    };
    let points = seen.admissions.iter().map(point).collect();
    Curve { points, limit: seen.terms[0].capacity(), surplus: allowed(end, 0) }
}
