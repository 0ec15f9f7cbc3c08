//! The history of a world: the facts that checkers compare with the promises.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::origin::{
    Call, ComponentTotals, MeterUpdate, NodeGrant, NodeId, OriginMeter, Partition, RegionId,
    SESSION_RETENTION_US, Terms,
};
use tidegate_core::{Algorithm, Now};

use crate::bucket::{Era, Judge, JudgedUsage};
use crate::checks::{AppliedCall, Observation};
use crate::node::meter_of;
use crate::report::Steady;
use crate::rule_editions::{RuleEditions, is_same};
use crate::scenario::{Charge, Scenario};
use crate::store::{EPOCH_US, FIRST_BOOT};

/// The history of one meter, in all regions together.
pub(crate) struct MeterHistory {
    /// The limits that it is under before and after a change.
    pub(crate) terms: [Terms; 2],
    /// The limits that the origin had to count by after the first.
    eras: Vec<Era>,
    /// The highest version of the limit that anyone brought to this life of the store, and which
    /// life that is.
    version: u64,
    boot: u64,
    /// Units charged without a check.
    pub(crate) owed: u64,
    /// Admissions: true time in µs, and cost. In order of time after the end of the world.
    pub(crate) admissions: Vec<(u64, u64)>,
    /// The admissions of one bucket that sees all requests.
    ideal: Judge,
    /// Time of the last admission in each region, µs after the world began.
    pub(crate) passed_us: Vec<u64>,
    /// Units of grants that the origin wrote off, and the units of these that nodes reported
    /// later.
    pub(crate) written_off: u64,
    late: u64,
    /// Grants that the origin wrote off, as nodes learn of it.
    pub(crate) lapses: u64,
    /// Units that a store lost: charges and grants.
    pub(crate) lost: u64,
    /// Units that were charged again, and refunded again, by calls of sessions that the store had
    /// expired, as it may.
    again: u64,
    refunded_again: u64,
    /// Units that nodes let pass by their own parts.
    alone: u64,
    /// Units admitted or charged without the origin that nodes have not reported yet, and the
    /// maximum of these.
    untold: u64,
    pub(crate) untold_most: u64,
}

impl MeterHistory {
    fn new(terms: [Terms; 2], regions: usize) -> Self {
        Self {
            terms,
            eras: Vec::new(),
            version: terms[0].version(),
            boot: 0,
            owed: 0,
            admissions: Vec::new(),
            ideal: Judge::new(terms[0]),
            passed_us: vec![0; regions],
            written_off: 0,
            late: 0,
            lapses: 0,
            lost: 0,
            again: 0,
            refunded_again: 0,
            alone: 0,
            untold: 0,
            untold_most: 0,
        }
    }

    /// Time of the last admission, µs after the world began.
    pub(crate) fn last_passed_us(&self) -> u64 {
        self.passed_us.iter().copied().max().unwrap_or(0)
    }

    /// Units that one bucket would have admitted.
    pub(crate) fn ideal(&self) -> u64 {
        self.ideal.filled()
    }

    /// Units of written-off grants without those that nodes reported later. The rest was not used,
    /// or was used by a node that died before its report.
    pub(crate) fn wasted(&self) -> u64 {
        self.written_off.saturating_sub(self.late)
    }

    /// Judges the admissions, which are in order of time.
    pub(crate) fn judged(&self) -> JudgedUsage {
        JudgedUsage::new(self.terms[0], &self.eras, &self.admissions)
    }
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

    /// Returns the state of all meters of a call.
    pub(crate) fn of_call(partition: &Partition, call: &Call, origin_us: u64) -> Vec<Self> {
        let before = |update: &MeterUpdate| Self::new(partition.meter(&update.key), call.node, origin_us);
        call.updates.iter().map(before).collect()
    }

    /// Units that a call of `node` wrote off.
    fn written_off(&self, node: NodeId, after: &OriginMeter) -> u64 {
        let is_held = |of: NodeId| of != node && after.holders().any(|(holder, _)| holder == of);
        self.over.iter().filter(|(of, _)| !is_held(*of)).map(|(_, amount)| amount).sum()
    }
}

/// The history of a world.
pub(crate) struct History {
    /// Time since the world began, µs.
    pub(crate) now_us: u64,
    pub(crate) meters: Vec<MeterHistory>,
    /// Units that passed at the origin, by requesting node and meter.
    open: BTreeMap<(NodeId, usize), OpenUnits>,
    /// Units that each node has not reported yet, by meter.
    untold: BTreeMap<(NodeId, usize), u64>,
    /// Time of the last call of each session, by region, partition and node, µs by the origin's
    /// clock, and the number of sessions that the origin may have expired.
    sessions: BTreeMap<(usize, u16, NodeId), u64>,
    forgotten_sessions: usize,
    /// The nodes that died.
    crashed: BTreeSet<NodeId>,
    /// Usage that nodes admitted from their node shares, each by its own clock. `None` if limits
    /// change, or if the wall clocks of nodes step.
    pub(crate) parts: Option<BTreeMap<(NodeId, usize), Judge>>,
    /// A node's part of each limit.
    part_terms: Vec<Terms>,
    /// Until when the last fault lasted, µs after the world began.
    pub(crate) troubled_us: u64,
    /// From when on the steady load is measured, by the true time; the units that one bucket had
    /// admitted by then.
    steady_from_us: u64,
    ideal_before: Option<u64>,
    offered: Steady,
    /// Refused requests for the busiest key: time in µs, and cost. Recorded if the load is at most
    /// the limit.
    refusals: Option<Vec<(u64, u64)>>,
    /// Totals that regions had charged for components that have since expired there: by charging
    /// region, publishing region, meter and incarnation.
    pub(crate) forgotten: BTreeMap<(usize, RegionId, usize, u64), ComponentTotals>,
    /// Components that have expired in their own region, so there is no more usage to publish: by
    /// region, meter and incarnation.
    pub(crate) over: BTreeSet<(usize, usize, u64)>,
    /// Whether each partition of a region was connected at its last reply, and how many times it
    /// became isolated.
    is_connected: BTreeMap<(usize, u16), bool>,
    isolations: BTreeMap<(usize, u16), u64>,
}

impl History {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let rules = RuleEditions::new(scenario, 0, None);
        let processes = u32::try_from(scenario.nodes).unwrap_or(u32::MAX);
        let part = |meter| Terms::new(&rules.rule(0, meter).limit.part(processes), 0, scenario.lapse(), 1);
        let is_steady = scenario.faults.rule_changes + scenario.faults.node_steps == 0;
        let meters = 0..scenario.meters();
        let history = |meter| MeterHistory::new(rules.all(meter), scenario.region_count());
        Self {
            now_us: 0,
            meters: meters.clone().map(history).collect(),
            open: BTreeMap::new(),
            untold: BTreeMap::new(),
            sessions: BTreeMap::new(),
            forgotten_sessions: 0,
            crashed: BTreeSet::new(),
            parts: is_steady.then(BTreeMap::new),
            part_terms: meters.map(part).collect(),
            troubled_us: 0,
            steady_from_us: EPOCH_US + scenario.steady_from_us,
            ideal_before: None,
            offered: Steady::default(),
            refusals: scenario.keeps_refusals.then(Vec::new),
            forgotten: BTreeMap::new(),
            over: BTreeSet::new(),
            is_connected: BTreeMap::new(),
            isolations: BTreeMap::new(),
        }
    }

    /// Records an observation.
    pub(crate) fn record(&mut self, seen: &Observation<'_>) {
        match *seen {
            Observation::Offered { charges, true_us } => self.offered(charges, true_us),
            Observation::Admitted { region, charges, true_us } => self.admitted(region, charges, true_us),
            Observation::Refused { key, cost, true_us } => {
                if let Some(refusals) = self.refusals.as_mut().filter(|_| key == 0) {
                    refusals.push((true_us, cost));
                }
            }
            Observation::Owed { node, charges } => self.owed(node, charges),
            Observation::PassedAlone { node, now, charges } => self.passed_alone(node, now, charges),
            Observation::Heard { node, charges } => {
                for charge in charges {
                    self.open.entry((node, charge.meter)).or_default().passed -= charge.cost.cast_signed();
                }
            }
            Observation::Crashed { node } => {
                self.crashed.insert(node);
            }
            Observation::Troubled { until_us } => self.troubled_us = self.troubled_us.max(until_us),
            Observation::Applied(call) => self.applied(call),
            Observation::Expired { region, meter, was, .. } => self.expired(region, meter, was),
            Observation::ExpiredSessions { region, partition, origin_us } => {
                self.expired_sessions(region, partition, origin_us);
            }
            Observation::Lost { meter, units } => self.meters[meter].lost += units,
            _ => {}
        }
    }

    /// Puts the admissions into order of time, after the end of the world.
    pub(crate) fn close(&mut self, now_us: u64) {
        self.now_us = now_us;
        self.meters.iter_mut().for_each(|seen| seen.admissions.sort_unstable());
    }

    fn offered(&mut self, charges: &[Charge], true_us: u64) {
        let is_steady = true_us >= self.steady_from_us;
        if self.ideal_before.is_none() && is_steady {
            self.ideal_before = Some(self.meters[0].ideal.filled());
        }
        for Charge { meter, cost } in charges {
            self.meters[*meter].ideal.offer(true_us, *cost);
            if *meter == 0 && is_steady {
                self.offered.requests += 1;
                self.offered.offered += cost;
            }
        }
    }

    fn admitted(&mut self, region: usize, charges: &[Charge], true_us: u64) {
        for Charge { meter, cost } in charges {
            let seen = &mut self.meters[*meter];
            seen.admissions.push((true_us, *cost));
            let passed_us = &mut seen.passed_us[region];
            *passed_us = (*passed_us).max(true_us - EPOCH_US);
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
    fn passed_alone(&mut self, node: NodeId, now: Now, charges: &[Charge]) {
        for &Charge { meter, cost } in charges {
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
    fn owed(&mut self, node: NodeId, charges: &[Charge]) {
        for Charge { meter, cost } in charges {
            self.meters[*meter].owed += cost;
            self.note_untold(node, *meter, *cost);
        }
    }

    fn note_untold(&mut self, node: NodeId, meter: usize, cost: u64) {
        *self.untold.entry((node, meter)).or_default() += cost;
        let seen = &mut self.meters[meter];
        seen.untold += cost;
        seen.untold_most = seen.untold_most.max(seen.untold);
    }

    /// Units of a meter that dead nodes have not reported. A node that stops in order reports all
    /// usage.
    pub(crate) fn left_unsaid(&self, meter: usize) -> u64 {
        let of_dead = |(node, of): &(NodeId, usize)| *of == meter && self.crashed.contains(node);
        self.untold.iter().filter(|(of, _)| of_dead(of)).map(|(_, units)| units).sum()
    }

    /// Records the reply of an origin to a call.
    fn applied(&mut self, call: &AppliedCall<'_>) {
        self.sessions.insert((call.region, call.partition, call.sent.node), call.origin_us);
        if call.is_fresh {
            self.decided(call);
        } else {
            self.repeated(call);
        }
    }

    fn decided(&mut self, call: &AppliedCall<'_>) {
        let AppliedCall { region, partition, sent, .. } = *call;
        let meters = sent.updates.iter().zip(call.before).zip(&call.reply.meters);
        for ((update, before), meter_reply) in meters {
            let meter = meter_of(&update.key);
            self.reported(sent.node, meter, update);
            self.meters[meter].lapses += u64::from(meter_reply.lapsed);
            let was_connected = self.is_connected.insert((region, partition), meter_reply.is_global);
            if was_connected == Some(true) && !meter_reply.is_global {
                *self.isolations.entry((region, partition)).or_default() += 1;
            }
            let Some(after) = call.after.meter(&update.key) else { continue };
            self.counted_by(call, (meter, after), update, before.held);
            let seen = &mut self.meters[meter];
            seen.written_off += before.written_off(sent.node, after);
            seen.late += if before.has_own { 0 } else { update.used };
        }
        self.passed(call);
    }

    /// Records the usage admitted without the origin that a call reports.
    fn reported(&mut self, node: NodeId, meter: usize, update: &MeterUpdate) {
        let Some(untold) = self.untold.get_mut(&(node, meter)) else { return };
        let told = update.owed.min(*untold);
        *untold -= told;
        self.meters[meter].untold -= told;
    }

    /// Records the limit by which the origin has to count a meter of a call: the highest version in
    /// this life of the store, regardless of the code under test. Nodes may spend earlier grants
    /// under the old limit. After lost writes, the amount of those grants is unknown.
    fn counted_by(
        &mut self,
        call: &AppliedCall<'_>,
        (meter, after): (usize, &OriginMeter),
        update: &MeterUpdate,
        held: u64,
    ) {
        let seen = &mut self.meters[meter];
        let known = if call.boot == seen.boot { seen.version } else { 0 };
        seen.boot = call.boot;
        seen.version = known.max(after.terms().version()).max(update.terms.version());
        let terms = seen.terms[RuleEditions::edition_of(seen.version)];
        let before = seen.eras.last().map_or(&seen.terms[0], |era| &era.terms);
        if !is_same(before, &terms) {
            let most = seen.terms.iter().map(Terms::capacity).max().unwrap_or(0);
            let held = if call.boot > FIRST_BOOT { most } else { held };
            seen.eras.push(Era { from_us: call.true_us, terms, held });
        }
    }

    /// Records the charges of a call that was decided before.
    fn repeated(&mut self, call: &AppliedCall<'_>) {
        for (update, before) in call.sent.updates.iter().zip(call.before) {
            let meter = call.after.meter(&update.key);
            let seen = &mut self.meters[meter_of(&update.key)];
            seen.again += meter.map_or(0, OriginMeter::charged).saturating_sub(before.charged);
            seen.refunded_again += meter.map_or(0, OriginMeter::refunded).saturating_sub(before.refunded);
        }
    }

    /// Records the units that passed at the origin, and the units given back because no request
    /// waited for them any more.
    fn passed(&mut self, call: &AppliedCall<'_>) {
        let AppliedCall { sent, reply, .. } = *call;
        for (ask, decided) in sent.checks.iter().zip(&reply.checks) {
            for charge in &ask.charges {
                let update = &sent.updates[usize::from(charge.meter)];
                let units = u64::from(decided.passed) * charge.cost;
                self.open_of(sent.node, &update.key).passed += units.cast_signed();
            }
        }
        for update in sent.updates.iter().filter(|update| update.refund > 0) {
            self.open_of(sent.node, &update.key).given_back += update.refund.cast_signed();
        }
    }

    fn open_of(&mut self, node: NodeId, key: &[u8]) -> &mut OpenUnits {
        self.open.entry((node, meter_of(key))).or_default()
    }

    /// Records a meter that an origin expired. Its grants are written off with it, and peers need
    /// not receive its usage. `forgotten` retains the totals that it had charged for peers.
    fn expired(&mut self, region: usize, meter: usize, was: &OriginMeter) {
        self.meters[meter].written_off += was.held();
        if let Some([incarnation, ..]) = was.region_state_numbers() {
            self.over.insert((region, meter, incarnation));
        }
        for (from, incarnation, totals) in was.seen() {
            let known = self.forgotten.entry((region, from, meter, incarnation)).or_insert(totals);
            *known = std::cmp::max_by_key(*known, totals, ComponentTotals::numbers);
        }
    }

    /// Records that an origin expired state, including sessions without a call for
    /// `SESSION_RETENTION_US`, by its clock.
    fn expired_sessions(&mut self, region: usize, partition: u16, origin_us: u64) {
        let is_over = |seen_us: u64| seen_us + SESSION_RETENTION_US <= origin_us;
        let is_here = |at: usize, of: u16| (at, of) == (region, partition);
        let before = self.sessions.len();
        self.sessions.retain(|(at, of, _), seen_us| !is_here(*at, *of) || !is_over(*seen_us));
        self.forgotten_sessions += before - self.sessions.len();
    }

    /// Whether the origin may have expired the session of a node that continues. The origin takes
    /// this for lost writes.
    pub(crate) fn has_forgotten_sessions(&self) -> bool {
        self.forgotten_sessions > 0
    }

    /// Units that were charged again because the origin had expired a session.
    pub(crate) fn again(&self, meter: usize) -> u64 {
        if self.has_forgotten_sessions() { self.meters[meter].again } else { 0 }
    }

    /// Units that were refunded again because the origin had expired a session.
    pub(crate) fn refunded_again(&self, meter: usize) -> u64 {
        if self.has_forgotten_sessions() { self.meters[meter].refunded_again } else { 0 }
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

    /// The number of isolations of the partition that became isolated most often.
    pub(crate) fn isolations(&self) -> u64 {
        self.isolations.values().copied().max().unwrap_or(0)
    }
}
