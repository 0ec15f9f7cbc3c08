//! Checkers that look on while the world runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidegate_core::origin::{
    self, Call, CallReply, MeterUpdate, NodeGrant, NodeId, OriginMeter, Partition, SESSION_RETENTION_US,
    Terms,
};
use tidegate_core::{Algorithm, Now};

use crate::bucket::{Era, Judge, JudgedUsage};
use crate::memory::still_counts;
use crate::node::meter_of;
use crate::report::{Steady, Violation};
use crate::rule_editions::{RuleEditions, is_same};
use crate::scenario::{Charge, Scenario};
use crate::world::{EPOCH_US, FIRST_BOOT};

/// By how much more than its deadline a request may wait, in sixteenths of it: clocks may run slow.
const LATE_SIXTEENTHS: u64 = 1;

/// Longest denial of a key that could pass, beyond the time in which its bucket drains four times,
/// µs. The grant of a dead node lapses first, and drains then.
const LOCKED_OUT_US: u64 = 5_000_000;

/// One way between a node and the origin that is quick, µs: to wait for a call that is under way,
/// and then for one's own, takes less than the deadline.
const QUICK_US: u64 = 1_000;

/// One session of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SessionId {
    pub(crate) node: usize,
    pub(crate) life: u32,
    pub(crate) partition: u16,
}

/// A call, and when it was first sent.
type Flight = (Arc<Call>, u64);

/// The observed history of one meter.
struct MeterHistory {
    /// The limits that it is under before and after a change.
    terms: [Terms; 2],
    /// The limits that the origin had to count by after the first.
    eras: Vec<Era>,
    /// The highest version of the limit that anyone brought to this life of the store, and which
    /// life that is.
    version: u64,
    boot: u64,
    /// Units charged without a check.
    owed: u64,
    /// Admissions: time in µs, and cost.
    admissions: Vec<(u64, u64)>,
    /// The admissions of one bucket that sees all requests.
    ideal: Judge,
    /// Time of the last admission, µs.
    passed_us: u64,
    /// Units of grants that the origin wrote off, and those of them that nodes spent and reported
    /// later.
    written_off: u64,
    late: u64,
    /// Units that a store lost: charges and grants.
    lost: u64,
    /// Units that were charged again, and refunded again, by calls of sessions that the store had
    /// expired, as it may.
    again: u64,
    refunded_again: u64,
    /// Units that nodes let pass by their own parts.
    alone: u64,
    /// Units admitted or charged without the origin that nodes have not reported yet, and the
    /// maximum of these.
    untold: u64,
    untold_most: u64,
}

/// Units that passed at the origin and that the node has not received yet, and units that were
/// given back. Negative if a store lost the admission.
#[derive(Clone, Copy, Default)]
struct OpenUnits {
    passed: i64,
    given_back: i64,
}

/// The origin's state of a meter before a call.
pub(crate) struct MeterBefore {
    /// Units that had been charged, and refunded.
    charged: u64,
    refunded: u64,
    /// Units that nodes hold in grants.
    held: u64,
    /// Grants past their end: node and units.
    over: Vec<(NodeId, u64)>,
    /// Whether it had a grant of the caller that was not.
    has_own: bool,
}

impl MeterBefore {
    fn new(meter: Option<&OriginMeter>, node: NodeId, origin_us: u64) -> Self {
        let is_over = |node_grant: &NodeGrant| node_grant.until_us <= origin_us;
        let holders = || meter.into_iter().flat_map(OriginMeter::holders);
        let over = holders().filter(|(_, node_grant)| is_over(node_grant));
        Self {
            charged: meter.map_or(0, OriginMeter::charged),
            refunded: meter.map_or(0, OriginMeter::refunded),
            held: meter.map_or(0, OriginMeter::held),
            over: over.map(|(node, node_grant)| (node, node_grant.amount)).collect(),
            has_own: holders().any(|(holder, node_grant)| holder == node && !is_over(&node_grant)),
        }
    }

    /// Units that a call of `node` wrote off.
    fn written_off(&self, node: NodeId, after: &OriginMeter) -> u64 {
        let is_held = |of: NodeId| of != node && after.holders().any(|(holder, _)| holder == of);
        self.over.iter().filter(|(of, _)| !is_held(*of)).map(|(_, amount)| amount).sum()
    }
}

/// A denial that looks as if the key was locked out.
struct Denial {
    key: usize,
    meters: Vec<usize>,
    at_us: u64,
    /// Time of the last fault, µs.
    troubled_us: u64,
    /// Time in which the largest unreported usage until then drains, µs: the origin may receive it
    /// all at once.
    owed_us: u64,
}

/// The state of all checkers.
pub(crate) struct Watch {
    meters: Vec<MeterHistory>,
    in_flight: BTreeMap<SessionId, Flight>,
    /// Units that passed at the origin, by requesting node and meter.
    open: BTreeMap<(NodeId, usize), OpenUnits>,
    /// Units that each node has not reported yet, by meter.
    untold: BTreeMap<(NodeId, usize), u64>,
    /// Time of the last call of each session, µs by the origin's clock, and the number of sessions
    /// that the origin may have expired.
    sessions: BTreeMap<(u16, NodeId), u64>,
    forgotten_sessions: usize,
    /// The nodes that died.
    crashed: BTreeSet<NodeId>,
    /// Usage that nodes admitted from their node shares, each by its own clock. `None` if limits
    /// change, or if the wall clocks of nodes step.
    parts: Option<BTreeMap<(NodeId, usize), Judge>>,
    /// A node's part of each limit.
    part_terms: Vec<Terms>,
    /// When calls were decided, and in which life of the store.
    decided: BTreeMap<(u16, NodeId, u64), (u64, u64)>,
    deadline_us: u64,
    troubled_us: u64,
    denials: Vec<Denial>,
    /// Whether the network between nodes and origin is good enough for a key to get its full limit.
    is_reachable: bool,
    /// Whether two calls one after the other are over before a request is given up.
    is_quick: bool,
    /// Whether some units are charged without a check.
    has_debt: bool,
    /// From when on the steady load is measured, by the true time; the units that one bucket had
    /// admitted by then.
    steady_from_us: u64,
    ideal_before: Option<u64>,
    offered: Steady,
    /// Refused requests for the busiest key: time in µs, and cost. Recorded if the load is at most
    /// the limit.
    refusals: Option<Vec<(u64, u64)>>,
    violations: Vec<Violation>,
}

impl Watch {
    pub(crate) fn new(scenario: &Scenario, rule_editions: &RuleEditions, deadline_us: u64) -> Self {
        let seen = |meter| {
            let first = rule_editions.first(meter);
            MeterHistory {
                terms: rule_editions.all(meter),
                eras: Vec::new(),
                version: first.version(),
                boot: 0,
                owed: 0,
                admissions: Vec::new(),
                ideal: Judge::new(first),
                passed_us: 0,
                written_off: 0,
                late: 0,
                lost: 0,
                again: 0,
                refunded_again: 0,
                alone: 0,
                untold: 0,
                untold_most: 0,
            }
        };
        let processes = u32::try_from(scenario.nodes).unwrap_or(u32::MAX);
        let part =
            |meter| Terms::new(&rule_editions.rule(0, meter).limit.part(processes), 0, scenario.lapse, 1);
        let is_steady = scenario.faults.rule_changes + scenario.faults.node_steps == 0;
        Self {
            meters: (0..scenario.meters()).map(seen).collect(),
            in_flight: BTreeMap::new(),
            open: BTreeMap::new(),
            untold: BTreeMap::new(),
            sessions: BTreeMap::new(),
            forgotten_sessions: 0,
            crashed: BTreeSet::new(),
            parts: is_steady.then(BTreeMap::new),
            part_terms: (0..scenario.meters()).map(part).collect(),
            decided: BTreeMap::new(),
            deadline_us,
            troubled_us: 0,
            denials: Vec::new(),
            is_reachable: scenario.faults.loss_ppm + scenario.faults.slow_ppm == 0,
            is_quick: scenario.delay_us <= QUICK_US,
            has_debt: scenario.charges_ppm > 0,
            steady_from_us: EPOCH_US + scenario.steady_from_us,
            ideal_before: None,
            offered: Steady::default(),
            refusals: scenario.keeps_refusals.then(Vec::new),
            violations: Vec::new(),
        }
    }

    /// Records a violation. The first one of each kind is enough, because it is the most
    /// informative.
    fn report(&mut self, violation: Violation) {
        let same = |known: &Violation| known.is_like(&violation);
        if !self.violations.iter().any(same) {
            self.violations.push(violation);
        }
    }

    pub(crate) fn take_violations(&mut self) -> Vec<Violation> {
        std::mem::take(&mut self.violations)
    }

    /// Records a fault that lasts until this time.
    pub(crate) fn troubled(&mut self, until_us: u64) {
        self.troubled_us = self.troubled_us.max(until_us);
    }

    pub(crate) fn offered(&mut self, charges: impl Iterator<Item = Charge>, true_us: u64) {
        let is_steady = true_us >= self.steady_from_us;
        if self.ideal_before.is_none() && is_steady {
            self.ideal_before = Some(self.meters[0].ideal.filled());
        }
        for Charge { meter, cost } in charges {
            self.meters[meter].ideal.offer(true_us, cost);
            if meter == 0 && is_steady {
                self.offered.requests += 1;
                self.offered.offered += cost;
            }
        }
    }

    pub(crate) fn admitted(&mut self, charges: impl Iterator<Item = Charge>, true_us: u64) {
        for Charge { meter, cost } in charges {
            let seen = &mut self.meters[meter];
            seen.admissions.push((true_us, cost));
            seen.passed_us = seen.passed_us.max(true_us - EPOCH_US);
        }
    }

    /// Notes that a request did not pass.
    pub(crate) fn refused(&mut self, key: usize, cost: u64, true_us: u64) {
        if let Some(refusals) = self.refusals.as_mut().filter(|_| key == 0) {
            refusals.push((true_us, cost));
        }
    }

    /// The busiest key's share of one bucket in steady load, and the refusals that one bucket would
    /// not have made.
    pub(crate) fn steady(&self) -> Steady {
        let seen = &self.meters[0];
        let from_us = self.steady_from_us;
        let is_steady = |(at_us, _): &&(u64, u64)| *at_us >= from_us;
        let admitted = seen.admissions.iter().filter(is_steady).map(|(_, cost)| cost).sum();
        let ideal = seen.ideal.filled() - self.ideal_before.unwrap_or(0);
        let mut refusals = self.refusals.clone().unwrap_or_default();
        refusals.sort_unstable();
        let mut truth = Judge::new(seen.terms[0]);
        let mut admissions = seen.admissions.iter().peekable();
        let mut false_denials = 0;
        for (at_us, cost) in &refusals {
            while let Some((admitted_us, units)) = admissions.next_if(|(admitted_us, _)| admitted_us <= at_us)
            {
                truth.fill(*admitted_us, *units);
            }
            let counts = *at_us >= from_us && truth.has_room(*at_us, *cost);
            false_denials += u64::from(counts);
        }
        Steady { admitted, ideal, false_denials, ..self.offered }
    }

    /// Records the usage that a node admitted from its node shares, by its own clock.
    pub(crate) fn passed_alone(&mut self, node: NodeId, now: Now, charges: impl Iterator<Item = Charge>) {
        for Charge { meter, cost } in charges {
            self.meters[meter].alone += cost;
            self.note_untold(node, meter, cost);
            let Some(parts) = &mut self.parts else { continue };
            let terms = self.part_terms[meter];
            let at_us = match terms.algorithm() {
                Algorithm::Gcra => now.mono_us(),
                Algorithm::SlidingWindow => now.wall_us(),
            };
            parts.entry((node, meter)).or_insert_with(|| Judge::new(terms)).fill(at_us, cost);
        }
    }

    /// Checks that no node without the origin admitted more than its node share.
    pub(crate) fn judge_parts(&self) -> Option<Violation> {
        let mut parts = self.parts.iter().flatten();
        let (meter, excess) =
            parts.find_map(|((_, meter), judge)| (judge.excess() > 0).then(|| (*meter, judge.excess())))?;
        Some(Violation::Part { key: meter, excess })
    }

    /// Units that may pass above the limit of a meter because of node shares. At the last admission
    /// of the origin, the limit held for all reported usage, so unreported usage comes on top. From
    /// then on nodes admit at most their node shares. The rates of these add up to at most that of
    /// the limit. So each node adds the burst of its share, once in its life.
    pub(crate) fn above_alone(&self, meter: usize) -> u64 {
        let MeterHistory { alone, untold_most, .. } = &self.meters[meter];
        let Some(parts) = &self.parts else { return *alone };
        let nodes = parts.keys().filter(|(_, of)| *of == meter).count() as u64;
        (untold_most + nodes * self.part_terms[meter].burst()).min(*alone)
    }

    /// Records units charged without a check.
    pub(crate) fn owed(&mut self, node: NodeId, charges: impl Iterator<Item = Charge>) {
        for Charge { meter, cost } in charges {
            self.meters[meter].owed += cost;
            self.note_untold(node, meter, cost);
        }
    }

    fn note_untold(&mut self, node: NodeId, meter: usize, cost: u64) {
        *self.untold.entry((node, meter)).or_default() += cost;
        let seen = &mut self.meters[meter];
        seen.untold += cost;
        seen.untold_most = seen.untold_most.max(seen.untold);
    }

    /// Records the usage admitted without the origin that a call reports.
    pub(crate) fn note_report(&mut self, call_sent: &Call) {
        for update in &call_sent.updates {
            let meter = meter_of(&update.key);
            let Some(untold) = self.untold.get_mut(&(call_sent.node, meter)) else { continue };
            let meter_reply = update.owed.min(*untold);
            *untold -= meter_reply;
            self.meters[meter].untold -= meter_reply;
        }
    }

    /// Records that a node died, and reports no more.
    pub(crate) fn crashed(&mut self, node: NodeId) {
        self.crashed.insert(node);
    }

    /// Units of a meter that dead nodes have not reported. A node that stops in order reports all
    /// usage.
    pub(crate) fn left_unsaid(&self, meter: usize) -> u64 {
        let of_dead = |(node, of): &(NodeId, usize)| *of == meter && self.crashed.contains(node);
        self.untold.iter().filter(|(of, _)| of_dead(of)).map(|(_, units)| units).sum()
    }

    /// Returns the origin's state of the meters of a call before the call arrives.
    pub(crate) fn before(partition: &Partition, call: &Call, origin_us: u64) -> Vec<MeterBefore> {
        let before =
            |update: &MeterUpdate| MeterBefore::new(partition.meter(&update.key), call.node, origin_us);
        call.updates.iter().map(before).collect()
    }

    /// Records the limits by which the origin has to count the meters of a call: the highest
    /// version in this life of the store, regardless of the code under test. Nodes may spend
    /// earlier grants under the old limit. After lost writes, the amount of those grants is
    /// unknown.
    pub(crate) fn counted_by(
        &mut self,
        partition: &Partition,
        (call_sent, before): (&Call, &[MeterBefore]),
        boot: u64,
        true_us: u64,
    ) {
        for (update, MeterBefore { held, .. }) in call_sent.updates.iter().zip(before) {
            let Some(meter) = partition.meter(&update.key) else { continue };
            let seen = &mut self.meters[meter_of(&update.key)];
            let has_lost = boot > FIRST_BOOT;
            let known = if boot == seen.boot { seen.version } else { 0 };
            seen.boot = boot;
            seen.version = known.max(meter.terms().version()).max(update.terms.version());
            let terms = seen.terms[RuleEditions::edition_of(seen.version)];
            let before = seen.eras.last().map_or(&seen.terms[0], |era| &era.terms);
            if !is_same(before, &terms) {
                let most = seen.terms.iter().map(Terms::capacity).max().unwrap_or(0);
                let held = if has_lost { most } else { *held };
                seen.eras.push(Era { from_us: true_us, terms, held });
            }
        }
    }

    /// Checks that the origin answers every request except just after a fault, if calls are quick
    /// and none is lost.
    pub(crate) fn unanswered(&mut self, key: usize, now_us: u64) {
        let since_us = self.troubled_us;
        if self.is_reachable && self.is_quick && now_us > since_us + LOCKED_OUT_US {
            self.report(Violation::Unheard { key, at_us: now_us, since_us });
        }
    }

    /// Records a key that seems to be denied for long although one bucket would admit it.
    /// `judge_denials` checks it in the end, because admissions at the origin may not be known here
    /// yet.
    pub(crate) fn denied(&mut self, key: usize, charges: impl Iterator<Item = Charge>, now_us: u64) {
        let charges: Vec<Charge> = charges.collect();
        let burst = |meter: usize| self.meters[meter].terms.iter().map(Terms::burst).min().unwrap_or(0);
        let is_small = charges.iter().all(|charge| charge.cost * 2 <= burst(charge.meter));
        let meters = charges.iter().map(|charge| charge.meter).collect();
        let owed_us = |charge: &Charge| {
            let MeterHistory { untold_most, terms, .. } = &self.meters[charge.meter];
            untold_most * unit_us(terms)
        };
        let owed_us = charges.iter().map(owed_us).max().unwrap_or(0);
        let denial = Denial { key, meters, at_us: now_us, troubled_us: self.troubled_us, owed_us };
        let last = |meter: &usize| self.meters[*meter].passed_us;
        if self.is_reachable && !self.has_debt && is_small && self.is_locked_out(&denial, last).is_some() {
            self.denials.push(denial);
        }
    }

    /// Since when one bucket would have let a denied request pass, if that is long.
    fn is_locked_out(&self, denial: &Denial, last_us: impl Fn(&usize) -> u64) -> Option<u64> {
        let drain_us = |meter: &usize| self.meters[*meter].terms.iter().map(drain_us).max().unwrap_or(0);
        // Usage admitted without the origin is reported all at once, and drains first.
        let free_us = |meter: &usize| last_us(meter) + 4 * drain_us(meter) + denial.owed_us;
        let since_us = denial.meters.iter().map(free_us).max().unwrap_or(0).max(denial.troubled_us);
        (denial.at_us > since_us + LOCKED_OUT_US).then_some(since_us)
    }

    /// Checks the recorded denials again, now that all admissions are known and in order. A key is
    /// locked out if it is denied for long. A single denial does not count: units admitted for an
    /// abandoned request are on their way back.
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

    /// Checks that no request waits beyond the deadline.
    pub(crate) fn waited(&mut self, waited_us: u64) {
        let most_us = self.deadline_us + self.deadline_us * LATE_SIXTEENTHS / 16;
        if waited_us > most_us {
            self.report(Violation::Late { waited_us, most_us });
        }
    }

    pub(crate) fn is_in_flight(&self, session: SessionId, sequence: u64) -> bool {
        self.in_flight(session) == Some(sequence)
    }

    pub(crate) fn in_flight(&self, session: SessionId) -> Option<u64> {
        self.in_flight.get(&session).map(|(call, _)| call.sequence)
    }

    /// Checks that a session has one call in flight.
    pub(crate) fn sent(&mut self, session: SessionId, call: &Arc<Call>, now_us: u64) {
        match self.in_flight.get(&session).map(|(call, _)| call.sequence) {
            Some(before) if before == call.sequence => return,
            Some(_) => self.report(Violation::Stampede { node: session.node }),
            None => {}
        }
        self.in_flight.insert(session, (Arc::clone(call), now_us));
    }

    /// Returns the call that a reply belongs to, if it was in flight.
    pub(crate) fn answered(&mut self, session: SessionId, sequence: u64) -> Option<Flight> {
        if self.is_in_flight(session, sequence) { self.in_flight.remove(&session) } else { None }
    }

    /// Records the grants that a call wrote off, and the usage that it reports of a grant written
    /// off before.
    pub(crate) fn lapsed(&mut self, partition: &Partition, call_sent: &Call, before: &[MeterBefore]) {
        for (update, before) in call_sent.updates.iter().zip(before) {
            let Some(meter) = partition.meter(&update.key) else { continue };
            let seen = &mut self.meters[meter_of(&update.key)];
            seen.written_off += before.written_off(call_sent.node, meter);
            seen.late += if before.has_own { 0 } else { update.used };
        }
    }

    /// Checks that an expired meter no longer counts. Its grants are written off with it.
    pub(crate) fn forgot(&mut self, meter: usize, was: &OriginMeter, origin_us: u64, now_us: u64) {
        self.meters[meter].written_off += was.held();
        if still_counts(was, origin_us) {
            self.report(Violation::Forgot { key: meter, at_us: now_us });
        }
    }

    /// Records that a call of a session reached the origin.
    pub(crate) fn call_received(&mut self, partition: u16, node: NodeId, origin_us: u64) {
        self.sessions.insert((partition, node), origin_us);
    }

    /// Records that the origin expired state, including sessions without a call for
    /// `SESSION_RETENTION_US`, by its clock.
    pub(crate) fn forgot_sessions(&mut self, partition: u16, origin_us: u64) {
        let is_over = |seen_us: u64| seen_us + SESSION_RETENTION_US <= origin_us;
        let before = self.sessions.len();
        self.sessions.retain(|(of, _), seen_us| *of != partition || !is_over(*seen_us));
        self.forgotten_sessions += before - self.sessions.len();
    }

    /// Whether the origin may have expired the session of a node that continues. The origin takes
    /// this for lost writes.
    pub(crate) fn has_forgotten_sessions(&self) -> bool {
        self.forgotten_sessions > 0
    }

    /// Records the charges of a call that was decided before.
    pub(crate) fn repeated(&mut self, partition: &Partition, call_sent: &Call, before: &[MeterBefore]) {
        for (update, before) in call_sent.updates.iter().zip(before) {
            let meter = partition.meter(&update.key);
            let seen = &mut self.meters[meter_of(&update.key)];
            seen.again += meter.map_or(0, OriginMeter::charged).saturating_sub(before.charged);
            seen.refunded_again += meter.map_or(0, OriginMeter::refunded).saturating_sub(before.refunded);
        }
    }

    /// Units that were charged again because the origin had expired a session.
    pub(crate) fn again(&self, meter: usize) -> u64 {
        if self.has_forgotten_sessions() { self.meters[meter].again } else { 0 }
    }

    /// Units that were refunded again because the origin had expired a session.
    pub(crate) fn refunded_again(&self, meter: usize) -> u64 {
        if self.has_forgotten_sessions() { self.meters[meter].refunded_again } else { 0 }
    }

    /// Records the units of a meter that a store lost: charges and grants.
    pub(crate) fn lost(&mut self, meter: usize, units: u64) {
        self.meters[meter].lost += units;
    }

    /// Units that a store lost.
    pub(crate) fn lost_of(&self, meter: usize) -> u64 {
        self.meters[meter].lost
    }

    /// Records the units that passed at the origin, and the units given back because no request
    /// waited for them any more.
    pub(crate) fn passed(&mut self, call_sent: &Call, reply: &CallReply) {
        for (ask, decided) in call_sent.checks.iter().zip(&reply.checks) {
            for charge in &ask.charges {
                let update = &call_sent.updates[usize::from(charge.meter)];
                let units = u64::from(decided.passed) * charge.cost;
                self.open_of(call_sent.node, &update.key).passed += units.cast_signed();
            }
        }
        for update in call_sent.updates.iter().filter(|update| update.refund > 0) {
            self.open_of(call_sent.node, &update.key).given_back += update.refund.cast_signed();
        }
    }

    fn open_of(&mut self, node: NodeId, key: &[u8]) -> &mut OpenUnits {
        self.open.entry((node, meter_of(key))).or_default()
    }

    /// Records that a node received the admission of its request by the origin.
    pub(crate) fn heard(&mut self, node: NodeId, charges: impl Iterator<Item = Charge>) {
        for Charge { meter, cost } in charges {
            self.open.entry((node, meter)).or_default().passed -= cost.cast_signed();
        }
    }

    /// Units that passed at the origin for nodes that are not among `alive`, and that were neither
    /// received nor given back.
    pub(crate) fn stranded(&self, meter: usize, alive: &BTreeSet<NodeId>) -> u64 {
        let of_dead = |(node, of): &(NodeId, usize)| *of == meter && !alive.contains(node);
        let open = self.open.iter().filter(|(of, _)| of_dead(of));
        open.map(|(_, open)| u64::try_from(open.passed - open.given_back).unwrap_or(0)).sum()
    }

    /// Units that passed at the origin and that no node received, whether or not they were given
    /// back.
    pub(crate) fn unheard(&self, meter: usize) -> u64 {
        let open = self.open.iter().filter(|((_, of), _)| *of == meter);
        open.map(|(_, open)| u64::try_from(open.passed).unwrap_or(0)).sum()
    }

    /// Whether this life of the store has decided this call before. Its reply is then the first
    /// one.
    pub(crate) fn was_decided(&self, partition: u16, call: &Call) -> bool {
        let decided = self.decided.get(&(partition, call.node, call.sequence));
        decided.is_some_and(|(_, boot)| *boot == call.store.boot)
    }

    /// Returns the true time at which a call was decided, µs: the reply to a repeated call is the
    /// first one.
    pub(crate) fn decided(&mut self, partition: u16, call: &Call, is_fresh: bool, true_us: u64) -> u64 {
        let now = (true_us, call.store.boot);
        let decided = self.decided.entry((partition, call.node, call.sequence)).or_insert(now);
        if is_fresh {
            *decided = now;
        }
        decided.0
    }

    /// Checks that whenever the origin makes a grant, charges and grants together are within the
    /// limit.
    pub(crate) fn granted(&mut self, partition: &Partition, call: &Call, reply: &CallReply) {
        for (update, meter_reply) in call.updates.iter().zip(&reply.meters) {
            let Some(meter) = partition.meter(&update.key).filter(|_| meter_reply.grant > update.keep) else {
                continue;
            };
            let of_cell = |cell| meter.terms().algorithm() == Algorithm::Gcra || cell == meter_reply.cell;
            let held: u64 = meter
                .holders()
                .filter(|(_, node_grant)| of_cell(node_grant.cell))
                .map(|(_, node_grant)| node_grant.amount)
                .sum();
            if meter.level() + held * meter.terms().period() > meter.terms().full() {
                self.report(Violation::Overcommitted { key: meter_of(&update.key) });
            }
        }
    }

    /// Checks that an admission at the origin is charged to all of its meters, and nothing else is.
    /// The reference is the same call without its checks. The costs are those of `call_sent`, even
    /// if the origin `heard` others.
    pub(crate) fn charged_whole(
        &mut self,
        mut before: Partition,
        after: &Partition,
        (call_sent, heard): (&Call, &Call),
        reply: &CallReply,
    ) {
        let silent = Call { checks: Vec::new(), ..heard.clone() };
        if before.apply(reply.now_us, &silent).is_err() {
            return;
        }
        for (place, update) in call_sent.updates.iter().enumerate() {
            let charged =
                |partition: &Partition| partition.meter(&update.key).map_or(0, OriginMeter::charged);
            let costs = |ask: &origin::CheckGroup| {
                let here = ask.charges.iter().filter(|charge| usize::from(charge.meter) == place);
                here.map(|charge| charge.cost).sum::<u64>()
            };
            let checks = call_sent.checks.iter().zip(&reply.checks);
            let passed: u64 = checks.map(|(ask, decided)| u64::from(decided.passed) * costs(ask)).sum();
            if charged(after) - charged(&before) != passed {
                self.report(Violation::Torn { key: meter_of(&update.key) });
            }
        }
    }

    /// Units of grants that the origin wrote off.
    pub(crate) fn written_off(&self, meter: usize) -> u64 {
        self.meters[meter].written_off
    }

    /// The same without units that nodes reported later. The rest was not used, or was used by a
    /// node that died before its report.
    pub(crate) fn wasted(&self, meter: usize) -> u64 {
        let MeterHistory { written_off, late, .. } = &self.meters[meter];
        written_off.saturating_sub(*late)
    }

    /// Judges the admissions of a meter in order of time.
    pub(crate) fn judged(&mut self, meter: usize) -> JudgedUsage {
        let seen = &mut self.meters[meter];
        seen.admissions.sort_unstable();
        JudgedUsage::new(seen.terms[0], &seen.eras, &seen.admissions)
    }

    /// Units charged without a check.
    pub(crate) fn owes(&self, meter: usize) -> u64 {
        self.meters[meter].owed
    }

    pub(crate) fn admissions(&self, meter: usize) -> &[(u64, u64)] {
        &self.meters[meter].admissions
    }

    pub(crate) fn ideal(&self, meter: usize) -> u64 {
        self.meters[meter].ideal.filled()
    }
}

/// How long a unit takes to drain, under the slowest of these.
fn unit_us(terms: &[Terms]) -> u64 {
    let unit_us = |terms: &Terms| terms.period().div_ceil(terms.amount().max(1)) * terms.tick_us();
    terms.iter().map(unit_us).max().unwrap_or(0)
}

/// How long a full meter takes to be as good as new.
fn drain_us(terms: &Terms) -> u64 {
    match terms.algorithm() {
        Algorithm::Gcra => terms.full() / terms.amount().max(1) * terms.tick_us(),
        Algorithm::SlidingWindow => 2 * terms.period() * terms.tick_us(),
    }
}
