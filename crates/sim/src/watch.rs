//! Checkers that look on while the world runs.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::Algorithm;
use tidegate_core::origin::{self, Call, NodeId, OriginMeter, Partition, Reply, Terms};

use crate::bucket::Judge;
use crate::node::meter_of;
use crate::report::Violation;
use crate::rulebook::Rulebook;
use crate::scenario::{Charge, Scenario};
use crate::world::EPOCH_US;

/// By how much more than its deadline a request may wait, in sixteenths of it: clocks may run slow.
const LATE_SIXTEENTHS: u64 = 1;

/// How long a key that could pass may be denied beside the time that its bucket takes to drain four times, µs: what a dead
/// node held is lost first, and drains then.
const LOCKED_OUT_US: u64 = 5_000_000;

/// One lane of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Lane {
    pub(crate) node: usize,
    pub(crate) life: u32,
    pub(crate) partition: u16,
}

/// A call, and when it was first sent.
type Flight = (Arc<Call>, u64);

/// What is known about one meter.
struct Seen {
    terms: Terms,
    /// What passed: when, and what it cost.
    admissions: Vec<(u64, u64)>,
    /// What one bucket would have let pass.
    ideal: Judge,
    /// When something last passed.
    passed_us: u64,
    /// How many grants a node heard were written off.
    lapses: u64,
}

/// A denial that looks as if the key was locked out.
struct Denial {
    key: usize,
    meters: Vec<usize>,
    at_us: u64,
    /// When something last went wrong.
    troubled_us: u64,
}

/// Everything that checkers remember.
pub(crate) struct Watch {
    meters: Vec<Seen>,
    under_way: BTreeMap<Lane, Flight>,
    /// When calls were decided, and in which life of the store.
    decided: BTreeMap<(u16, NodeId, u64), (u64, u64)>,
    deadline_us: u64,
    troubled_us: u64,
    denials: Vec<Denial>,
    /// Whether the way between nodes and origin is good enough for a key to get what it may.
    is_reachable: bool,
    violations: Vec<Violation>,
}

impl Watch {
    pub(crate) fn new(scenario: &Scenario, book: &Rulebook, deadline_us: u64) -> Self {
        let seen = |meter| {
            let terms = book.widest(meter);
            Seen { terms, admissions: Vec::new(), ideal: Judge::new(terms), passed_us: 0, lapses: 0 }
        };
        Self {
            meters: (0..scenario.meters()).map(seen).collect(),
            under_way: BTreeMap::new(),
            decided: BTreeMap::new(),
            deadline_us,
            troubled_us: 0,
            denials: Vec::new(),
            is_reachable: scenario.faults.loss_ppm + scenario.faults.slow_ppm == 0,
            violations: Vec::new(),
        }
    }

    /// One of each kind is enough: the first says most.
    fn report(&mut self, violation: Violation) {
        let same = |known: &Violation| known.is_like(&violation);
        if !self.violations.iter().any(same) {
            self.violations.push(violation);
        }
    }

    pub(crate) fn take_violations(&mut self) -> Vec<Violation> {
        std::mem::take(&mut self.violations)
    }

    /// Something goes wrong until this time.
    pub(crate) fn troubled(&mut self, until_us: u64) {
        self.troubled_us = self.troubled_us.max(until_us);
    }

    pub(crate) fn offered(&mut self, charges: impl Iterator<Item = Charge>, true_us: u64) {
        charges.for_each(|Charge { meter, cost }| self.meters[meter].ideal.offer(true_us, cost));
    }

    pub(crate) fn admitted(&mut self, charges: impl Iterator<Item = Charge>, true_us: u64) {
        for Charge { meter, cost } in charges {
            let seen = &mut self.meters[meter];
            seen.admissions.push((true_us, cost));
            seen.passed_us = seen.passed_us.max(true_us - EPOCH_US);
        }
    }

    /// Nobody is denied for long what one bucket would let pass. What passed at the origin may not be known here yet, so this
    /// only notes whom to look at in the end.
    pub(crate) fn denied(&mut self, key: usize, charges: impl Iterator<Item = Charge>, now_us: u64) {
        let charges: Vec<Charge> = charges.collect();
        let is_small =
            charges.iter().all(|charge| charge.cost * 2 <= self.meters[charge.meter].terms.burst());
        let meters = charges.iter().map(|charge| charge.meter).collect();
        let denial = Denial { key, meters, at_us: now_us, troubled_us: self.troubled_us };
        let last = |meter: &usize| self.meters[*meter].passed_us;
        if self.is_reachable && is_small && self.is_locked_out(&denial, last).is_some() {
            self.denials.push(denial);
        }
    }

    /// Since when one bucket would have let a denied request pass, if that is long.
    fn is_locked_out(&self, denial: &Denial, last_us: impl Fn(&usize) -> u64) -> Option<u64> {
        let free_us = |meter: &usize| last_us(meter) + 4 * drain_us(&self.meters[*meter].terms);
        let since_us = denial.meters.iter().map(free_us).max().unwrap_or(0).max(denial.troubled_us);
        (denial.at_us > since_us + LOCKED_OUT_US).then_some(since_us)
    }

    /// Looks at the denials again, now that everything is known and admissions are in order. One denial is none: what passed
    /// for someone who had stopped waiting is on its way back. A key is locked out if it is denied for long.
    pub(crate) fn judge_denials(&mut self) {
        let mut first: BTreeMap<(usize, u64), u64> = BTreeMap::new();
        for denial in std::mem::take(&mut self.denials) {
            let last = |meter: &usize| {
                let admissions = &self.meters[*meter].admissions;
                let before = admissions.partition_point(|(at_us, _)| *at_us <= EPOCH_US + denial.at_us);
                admissions[..before].last().map_or(0, |(at_us, _)| at_us - EPOCH_US)
            };
            let Some(since_us) = self.is_locked_out(&denial, last) else { continue };
            let first_us = *first.entry((denial.key, since_us)).or_insert(denial.at_us);
            if denial.at_us > first_us + LOCKED_OUT_US {
                self.report(Violation::LockedOut { key: denial.key, at_us: denial.at_us, since_us });
            }
        }
    }

    /// Nobody waits beyond the deadline.
    pub(crate) fn waited(&mut self, waited_us: u64) {
        let most_us = self.deadline_us + self.deadline_us * LATE_SIXTEENTHS / 16;
        if waited_us > most_us {
            self.report(Violation::Late { waited_us, most_us });
        }
    }

    pub(crate) fn is_under_way(&self, lane: Lane, sequence: u64) -> bool {
        self.under_way(lane) == Some(sequence)
    }

    pub(crate) fn under_way(&self, lane: Lane) -> Option<u64> {
        self.under_way.get(&lane).map(|(call, _)| call.sequence)
    }

    /// A lane has one call under way.
    pub(crate) fn sent(&mut self, lane: Lane, call: &Arc<Call>, now_us: u64) {
        match self.under_way.get(&lane).map(|(call, _)| call.sequence) {
            Some(before) if before == call.sequence => return,
            Some(_) => self.report(Violation::Stampede { node: lane.node }),
            None => {}
        }
        self.under_way.insert(lane, (Arc::clone(call), now_us));
    }

    /// The call that this is the answer to, if it was under way.
    pub(crate) fn answered(&mut self, lane: Lane, sequence: u64) -> Option<Flight> {
        if self.is_under_way(lane, sequence) { self.under_way.remove(&lane) } else { None }
    }

    pub(crate) fn lapsed(&mut self, call: &Call, reply: &Reply) {
        for (update, told) in call.updates.iter().zip(&reply.told) {
            self.meters[meter_of(&update.key)].lapses += u64::from(told.lapsed);
        }
    }

    /// Whether this life of the store has decided this call before: then its answer is that of the first time.
    pub(crate) fn was_decided(&self, partition: u16, call: &Call) -> bool {
        let decided = self.decided.get(&(partition, call.node, call.sequence));
        decided.is_some_and(|(_, boot)| *boot == call.store.boot)
    }

    /// When a call was decided, by the true time: an answer may be that of the first time.
    pub(crate) fn decided(&mut self, partition: u16, call: &Call, is_fresh: bool, true_us: u64) -> u64 {
        let now = (true_us, call.store.boot);
        let decided = self.decided.entry((partition, call.node, call.sequence)).or_insert(now);
        if is_fresh {
            *decided = now;
        }
        decided.0
    }

    /// Whenever a grant is made, what was charged and what is held is at most what the limit allows.
    pub(crate) fn granted(&mut self, partition: &Partition, call: &Call, reply: &Reply) {
        for (update, told) in call.updates.iter().zip(&reply.told) {
            let Some(meter) = partition.meter(&update.key).filter(|_| told.grant > update.keep) else {
                continue;
            };
            let of_cell = |cell| meter.terms().algorithm() == Algorithm::Gcra || cell == told.cell;
            let held: u64 = meter
                .holders()
                .filter(|(_, holding)| of_cell(holding.cell))
                .map(|(_, holding)| holding.amount)
                .sum();
            if meter.level() + held * meter.terms().period() > meter.terms().full() {
                self.report(Violation::Overcommitted { key: meter_of(&update.key) });
            }
        }
    }

    /// What passes at the origin is charged to all of its meters, and nothing else is: compared with the same call without
    /// the requests that wait. What the node `said` counts, whatever the origin `heard`.
    pub(crate) fn charged_whole(
        &mut self,
        mut before: Partition,
        after: &Partition,
        (said, heard): (&Call, &Call),
        reply: &Reply,
    ) {
        let silent = Call { asks: Vec::new(), ..heard.clone() };
        if before.apply(reply.now_us, &silent).is_err() {
            return;
        }
        for (place, update) in said.updates.iter().enumerate() {
            let charged =
                |partition: &Partition| partition.meter(&update.key).map_or(0, OriginMeter::charged);
            let costs = |ask: &origin::Ask| {
                let here = ask.charges.iter().filter(|charge| usize::from(charge.meter) == place);
                here.map(|charge| charge.cost).sum::<u64>()
            };
            let asks = said.asks.iter().zip(&reply.asks);
            let passed: u64 = asks.map(|(ask, decided)| u64::from(decided.passed) * costs(ask)).sum();
            if charged(after) - charged(&before) != passed {
                self.report(Violation::Torn { key: meter_of(&update.key) });
            }
        }
    }

    pub(crate) fn lapses(&self, meter: usize) -> u64 {
        self.meters[meter].lapses
    }

    /// What was admitted on a meter, judged in the order in which it was.
    pub(crate) fn judged(&mut self, meter: usize) -> Judge {
        let seen = &mut self.meters[meter];
        let mut judge = Judge::new(seen.terms);
        seen.admissions.sort_unstable();
        seen.admissions.iter().for_each(|(at_us, cost)| judge.fill(*at_us, *cost));
        judge
    }

    pub(crate) fn admissions(&self, meter: usize) -> &[(u64, u64)] {
        &self.meters[meter].admissions
    }

    pub(crate) fn ideal(&self, meter: usize) -> u64 {
        self.meters[meter].ideal.filled()
    }
}

/// How long a full meter takes to be as good as new.
fn drain_us(terms: &Terms) -> u64 {
    match terms.algorithm() {
        Algorithm::Gcra => terms.full() / terms.amount().max(1) * terms.tick_us(),
        Algorithm::SlidingWindow => 2 * terms.period() * terms.tick_us(),
    }
}
