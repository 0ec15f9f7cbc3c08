//! The end of a world: what was promised, against what came of it.

use tidegate_core::Algorithm;
use tidegate_core::origin::{Lapse, OriginMeter};

use super::{EPOCH_US, World};
use crate::bucket::Judge;
use crate::node::{name, partition_of};
use crate::report::{Curve, Report, Violation};
use crate::scenario::{Faults, Shape};
use crate::swarm::PLENTY_PER_S;

/// What share of what one bucket would admit a world that is well admits at least, in hundredths.
const WELL_PERCENT: u64 = 97;

impl World<'_> {
    /// Judges everything, and says what came of it.
    pub(super) fn judge(mut self) -> Report {
        let meters = self.scenario.meters();
        let judged: Vec<Judge> = (0..meters).map(|meter| self.watch.judged(meter)).collect();
        self.watch.judge_denials();
        let mut violations = self.watch.take_violations();
        for (meter, judge) in judged.iter().enumerate() {
            violations.extend(self.judge_bound(meter, judge));
            violations.extend(self.judge_conservation(meter, judge));
        }
        let admitted = judged.iter().take(self.scenario.keys).map(Judge::filled).sum();
        let ideal = (0..self.scenario.keys).map(|key| self.watch.ideal(key)).sum();
        violations.extend(self.judge_share(admitted, ideal));
        let requests = self.waiting.len() as u64;
        if requests > 0 {
            violations.push(Violation::Forgotten { requests });
        }
        for node in std::mem::take(&mut self.nodes) {
            self.count(&node);
        }
        Report {
            seed: self.scenario.seed,
            simulated_us: self.scenario.length_us,
            requests: self.scenario.requests,
            passed: self.tally.passed,
            waited: self.tally.waited,
            unanswered: self.tally.unanswered,
            longest_wait_us: self.tally.longest_wait_us,
            admitted,
            ideal,
            calls: self.tally.calls,
            updates: self.tally.updates,
            faults: self.tally.faults,
            violations,
            curve: self.curve(),
            trace: self.trace,
        }
    }

    /// Units that may be admitted above the limit of a meter.
    fn surplus(&self, meter: usize) -> u64 {
        let faults = &self.scenario.faults;
        let steps = u64::from(faults.origin_steps);
        let bursts = match self.scenario.lapse {
            Lapse::Counted => steps,
            Lapse::Forgiven => {
                self.watch.lapses(meter) + u64::from(faults.crashes) + u64::from(faults.losses) + steps
            }
        };
        bursts * self.book.widest(meter).capacity()
    }

    fn judge_bound(&self, meter: usize, judge: &Judge) -> Option<Violation> {
        let (excess, allowed) = (judge.excess(), self.surplus(meter));
        let at_us = judge.worst_us().saturating_sub(EPOCH_US);
        (excess > allowed).then_some(Violation::Bound { key: meter, excess, allowed, at_us })
    }

    fn judge_conservation(&self, key: usize, judge: &Judge) -> Option<Violation> {
        let faults = &self.scenario.faults;
        if faults.losses > 0 {
            return None;
        }
        let crashed = u64::from(faults.crashes) * self.book.widest(key).capacity();
        let is_well = self.tally.faults == 0 && faults.loss_ppm + faults.slow_ppm == 0;
        let (fewer, more) = match self.scenario.lapse {
            Lapse::Counted if is_well => (0, 0),
            Lapse::Counted => (0, u64::MAX),
            Lapse::Forgiven => (crashed, crashed),
        };
        let partition = partition_of(key, self.scenario.shared);
        let meter = self.store.partitions[usize::from(partition)].meter(&name(key));
        let charged = meter.map_or(0, |meter| meter.charged() - meter.refunded().min(meter.charged()));
        let held = meter.map_or(0, OriginMeter::held);
        let admitted = judge.filled();
        // What a node that died held still counts as used.
        let is_lost = admitted > charged + held + fewer || charged > admitted.saturating_add(more);
        is_lost.then_some(Violation::Conservation { key, admitted, charged, fewer, more })
    }

    /// In a world that is well, a region admits nearly what one bucket would.
    fn judge_share(&self, admitted: u64, ideal: u64) -> Option<Violation> {
        let scenario = self.scenario;
        let is_well = scenario.faults == Faults::default()
            && (scenario.shape, scenario.updates_per_s_max) == (Shape::Steady, PLENTY_PER_S)
            && (scenario.cost_max, scenario.large_ppm, scenario.shared) == (1, 0, false);
        let limit = &scenario.limit;
        let is_roomy = limit.burst() >= 10 * scenario.nodes as u32 && limit.algorithm() == Algorithm::Gcra;
        let is_starved = is_well && is_roomy && admitted * 100 < ideal * WELL_PERCENT;
        is_starved.then_some(Violation::Starved { admitted, ideal })
    }

    /// The busiest key over time.
    fn curve(&self) -> Curve {
        let mut judge = Judge::new(self.book.widest(0));
        let point = |(at_us, cost): &(u64, u64)| {
            judge.fill(*at_us, *cost);
            (at_us.saturating_sub(EPOCH_US), judge.level())
        };
        let points = self.watch.admissions(0).iter().map(point).collect();
        Curve { points, limit: self.book.widest(0).capacity(), surplus: self.surplus(0) }
    }
}
