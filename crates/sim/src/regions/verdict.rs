//! The end of a world: its promises are compared with its results.

use tidegate_core::Algorithm;
use tidegate_core::bound::Faults;
use tidegate_core::origin::Terms;

use super::check;
use super::report::{Reach, RegionReport, RegionViolation as Violation};
use super::scenario::{ATTACKED, Attack, KEYS, RegionScenario as Scenario};
use super::world::{EPOCH_US, World};
use crate::bucket::Judge;

/// Bursts that have to drain in the second half of a world before its rate is significant. Units in
/// transit between nodes, origins and regions are few compared with a burst, and a burst is a
/// hundredth of this.
const BURSTS: u64 = 100;

/// How much more than its rate may be admitted under a limit in the long run, in hundredths of it.
const MORE_PERCENT: f64 = 1.0;

/// At how many moments it is looked how much has passed.
const LOOKS: u64 = 200;

impl World<'_> {
    /// Checks all promises, and returns the report.
    pub(super) fn judge(mut self) -> RegionReport {
        let mut violations = self.check.take_violations();
        let mut reach = Reach::default();
        for key in 0..KEYS {
            let judge = self.judged(key);
            let (excess, allowed) = (judge.excess(), self.allowed(key));
            let reached = Reach { excess, allowed };
            if reached.milli() >= reach.milli() {
                reach = reached;
            }
            if excess > allowed {
                let at_us = judge.worst_us().saturating_sub(EPOCH_US);
                violations.push(Violation::Bound { key, excess, allowed, at_us });
            }
        }
        let is_rated = self.is_rated();
        violations.extend(self.judge_rate().filter(|_| is_rated));
        violations.extend(self.judge_convergence());
        violations.extend(self.judge_settling());
        RegionReport {
            seed: self.scenario.seed,
            simulated_us: self.scenario.length_us * self.regions.len() as u64,
            requests: self.tally.requests,
            passed: self.tally.passed,
            faults: self.tally.faults,
            isolations: self.check.isolations(),
            batches: self.tally.batches,
            reach,
            is_rated,
            violations,
            trace: self.trace,
        }
    }

    /// Judges the admissions of a key in all regions by the limit without its tolerance. The bound
    /// contains the tolerance.
    fn judged(&mut self, key: usize) -> Judge {
        let terms = Terms::new(&self.scenario.limit, 0, self.scenario.lapse(), 1);
        let mut judge = Judge::new(terms);
        self.check.admissions(key).iter().for_each(|(at_us, cost)| judge.fill(EPOCH_US + at_us, *cost));
        judge
    }

    /// Units that may be admitted above the limit, as printed, after all that went wrong.
    fn allowed(&self, key: usize) -> u64 {
        let faults = &self.scenario.faults;
        let may_part = !faults.cuts.is_empty() || faults.is_wan_bad();
        let partitions = self.check.isolations().max(u64::from(may_part)) as u32;
        let lapses = self.check.lapses(key) as u32 + faults.crashes;
        let failovers = faults.losses + faults.wipes;
        self.scenario.bound(&Faults { lapses, failovers, partitions, ..Faults::NONE }).total()
    }

    /// Whether the second half of the world shows the long-run rate: demand always exceeds the
    /// limit, many bursts drain, and no more faults occur. A sliding window does not qualify,
    /// because it may exceed its limit in each window.
    fn is_rated(&self) -> bool {
        let Scenario { limit, attack, length_us, faults, .. } = self.scenario;
        let is_flooded = *attack == Attack::Flood && limit.algorithm() == Algorithm::Gcra;
        let is_long = self.drained(length_us / 2) >= BURSTS * u64::from(limit.burst());
        is_flooded && is_long && faults.is_well_from(length_us / 2 - length_us / 10)
    }

    /// Checks that the long-run rate is at most 1 % above the limit. The rate is the slope of a
    /// line through the units admitted by each moment of the second half.
    fn judge_rate(&mut self) -> Option<Violation> {
        let (from_us, to_us) = (self.scenario.length_us / 2, self.scenario.length_us);
        let per_us = rate(self.check.admissions(ATTACKED), from_us, to_us);
        let admitted = per_us * (to_us - from_us) as f64;
        let limit = self.drained(to_us - from_us);
        let is_above = admitted > limit as f64 * (1.0 + MORE_PERCENT / 100.0);
        is_above.then_some(Violation::Rate { key: ATTACKED, admitted: admitted.ceil() as u64, limit })
    }

    /// Checks that in the end every region knows the usage of all others.
    fn judge_convergence(&self) -> Option<Violation> {
        let known = check::known(&self.regions);
        let (region, of, key) = self.check.unknown(&self.regions, &known)?;
        Some(Violation::Apart { region, of, key, at_us: self.now_us })
    }

    /// Checks that in the end every region is connected, and has published the usage of its share.
    fn judge_settling(&self) -> Option<Violation> {
        let (region, key, is_connected) = check::unsettled(&self.regions, self.origin_us())?;
        Some(Violation::Unsettled { region, key, is_connected, at_us: self.now_us })
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

    const SECOND_US: u64 = 1_000_000;

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
