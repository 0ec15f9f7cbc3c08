//! The end of a world: its promises are compared with its results.

use tidegate_core::Algorithm;
use tidegate_core::origin::{Lapse, Terms};

use super::{EPOCH_US, SECOND_US, World};
use crate::bucket::{Judge, JudgedUsage};
use crate::node::partition_of;
use crate::report::{Curve, Report, Steady, Violation};
use crate::scenario::{Faults, Scenario, Shape};
use crate::swarm::PLENTY_PER_S;

/// Least admissions of a world that `is_well`, in hundredths of the admissions of one bucket.
const WELL_PERCENT: u64 = 97;

/// The largest share of a load below the limit that such a world denies, in thousandths.
const FALSE_DENIALS_PER_MILLE: u64 = 3;

/// The largest share of requests that wait at half of a roomy limit, in hundredths; and the
/// fleets and limits that this is promised for.
const WAITED_PERCENT: u64 = 15;
const NODES_MAX: usize = 16;
const BUSY_PER_S: u64 = 100;

/// The smallest burst that both are promised for. Of a smaller one, a unit that is on its way is a
/// large part.
const BURST_MIN: u32 = 10;

impl World<'_> {
    /// Checks all promises, and returns the report.
    pub(super) fn judge(mut self) -> Report {
        let meters = self.scenario.meters();
        let judged: Vec<JudgedUsage> = (0..meters).map(|meter| self.watch.judged(meter)).collect();
        self.watch.judge_denials();
        let mut violations = self.watch.take_violations();
        for (meter, judge) in judged.iter().enumerate() {
            violations.extend(self.judge_bound(meter, judge));
            violations.extend(self.judge_conservation(meter, judge));
        }
        violations.extend(self.watch.judge_parts());
        let admitted = judged.iter().take(self.scenario.keys).map(JudgedUsage::filled).sum();
        let ideal = (0..self.scenario.keys).map(|key| self.watch.ideal(key)).sum();
        violations.extend(self.judge_share(admitted, ideal));
        violations.extend(self.judge_denials());
        violations.extend(self.judge_waits());
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
            passed_before_denial: self.tally.passed_before_denial,
            waited: self.tally.waited,
            unanswered: self.tally.unanswered,
            alone: self.tally.alone,
            longest_wait_us: self.tally.longest_wait_us,
            admitted,
            ideal,
            steady: self.watch.steady(),
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
        let (bursts, units) = match self.scenario.lapse {
            Lapse::Counted => (self.unnoticed[usize::from(partition_of(meter, self.scenario.shared))], 0),
            Lapse::Forgiven => (u64::from(faults.losses + faults.wipes), self.watch.written_off(meter)),
        };
        let units = units + self.watch.above_alone(meter);
        let tolerance = self.rule_editions.all(meter).iter().map(Terms::tolerance).max().unwrap_or(0);
        (bursts + steps) * self.rule_editions.capacity(meter) + units + tolerance
    }

    fn judge_bound(&self, meter: usize, judged: &JudgedUsage) -> Option<Violation> {
        let ((excess, at_us), allowed) = (judged.worst(), self.surplus(meter));
        let at_us = at_us.saturating_sub(EPOCH_US);
        (excess > allowed).then_some(Violation::Bound { key: meter, excess, allowed, at_us })
    }

    /// Checks that every admission is charged once. A written-off grant is charged if it counts as
    /// used. If it is forgiven, it is charged only when a later report makes it an admission. A
    /// node that dies may leave usage unreported, and admissions of the origin not received. After
    /// lost writes, as many units may be missing or be reported again. If its clock is set forward,
    /// the origin expires sessions, takes this for lost writes, and may receive reports twice.
    fn judge_conservation(&self, key: usize, judged: &JudgedUsage) -> Option<Violation> {
        let faults = &self.scenario.faults;
        let untold = self.watch.left_unsaid(key) + self.watch.refunded_again(key);
        let is_well = self.tally.faults == 0 && faults.loss_ppm + faults.slow_ppm == 0;
        let has_lost = faults.losses + faults.wipes > 0 || self.watch.has_forgotten_sessions();
        let (wasted, open) = if has_lost {
            // A late report may be of a grant that the store forgot, and the store may have
            // forgotten refunds as well.
            (self.watch.written_off(key), self.watch.unheard(key))
        } else {
            let alive = self.nodes.iter().map(|node| node.id).collect();
            (self.watch.wasted(key), self.watch.stranded(key, &alive))
        };
        let (lost, again) = (self.watch.lost_of(key), self.watch.again(key));
        let (fewer, more) = match self.scenario.lapse {
            Lapse::Counted if is_well => (0, 0),
            Lapse::Counted => (untold + lost, wasted + open + lost + again),
            Lapse::Forgiven => (wasted + untold + lost, open + lost + again),
        };
        let [charged, back, held] = self.store.kept.counts(key, self.scenario.shared);
        let charged = charged.saturating_sub(back);
        let admitted = judged.filled() + self.watch.owes(key);
        // The grant of a node that died still counts as used.
        let is_lost = admitted > charged + held + fewer || charged > admitted + more;
        is_lost.then_some(Violation::Conservation { key, admitted, charged, fewer, more })
    }

    /// Checks that a world that `is_well` admits nearly as much as one bucket would, if it counts
    /// from the start. A world with a warm-up is judged by its steady load.
    fn judge_share(&self, admitted: u64, ideal: u64) -> Option<Violation> {
        let Steady { ideal: steady_ideal, admitted: steady, .. } = self.watch.steady();
        let (admitted, ideal) =
            if self.scenario.steady_from_us > 0 { (steady, steady_ideal) } else { (admitted, ideal) };
        let is_starved = self.is_well() && admitted * 100 < ideal * WELL_PERCENT;
        is_starved.then_some(Violation::Starved { admitted, ideal })
    }

    /// Checks that a world that `is_well` admits a load that one bucket would admit in full.
    fn judge_denials(&self) -> Option<Violation> {
        let Steady { offered, ideal, admitted, .. } = self.watch.steady();
        let denied = offered.saturating_sub(admitted);
        let is_false =
            self.is_well() && ideal == offered && denied * 1_000 > offered * FALSE_DENIALS_PER_MILLE;
        is_false.then_some(Violation::FalseDenials { offered, denied })
    }

    /// In a world that is well, nodes decide a busy key by their grants while at most half of a
    /// roomy limit is used.
    fn judge_waits(&self) -> Option<Violation> {
        let Scenario { limit, nodes, requests, length_us, .. } = self.scenario;
        let per_second = u64::from(limit.amount()) * SECOND_US / limit.period_us();
        let is_half = 2 * requests * SECOND_US <= per_second * length_us;
        let is_roomy = *nodes <= NODES_MAX && u64::from(limit.burst()) >= 10 * *nodes as u64;
        let is_busy = self.scenario.shape == Shape::Poisson && per_second >= BUSY_PER_S;
        let waited = self.tally.waited;
        let is_slow =
            self.is_well() && is_half && is_roomy && is_busy && waited * 100 > requests * WAITED_PERCENT;
        is_slow.then_some(Violation::Waits { requests: *requests, waited })
    }

    /// Whether no fault occurs, requests come steadily and cost one unit, and the limit is a bucket
    /// of ten units or more.
    fn is_well(&self) -> bool {
        let scenario = self.scenario;
        let limit = &scenario.limit;
        scenario.faults == Faults::default()
            && matches!(scenario.shape, Shape::Steady | Shape::Poisson)
            && scenario.updates_per_s_max == PLENTY_PER_S
            && (scenario.cost_max, scenario.large_ppm + scenario.charges_ppm) == (1, 0)
            && !scenario.shared
            && limit.burst() >= BURST_MIN
            && limit.algorithm() == Algorithm::Gcra
    }

    /// The busiest key over time.
    fn curve(&self) -> Curve {
        let mut judge = Judge::new(self.rule_editions.first(0));
        let point = |(at_us, cost): &(u64, u64)| {
            judge.fill(*at_us, *cost);
            (at_us.saturating_sub(EPOCH_US), judge.level())
        };
        let points = self.watch.admissions(0).iter().map(point).collect();
        Curve { points, limit: self.rule_editions.first(0).capacity(), surplus: self.surplus(0) }
    }
}
