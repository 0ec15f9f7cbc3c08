//! Injects known mistakes between nodes, origins and replicators, never into the shipped code.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tidegate_core::FallbackState;
use tidegate_core::origin::{
    CONNECTED_US_MAX, Call, CallReply, Component, ComponentTotals, Lapse, MergeRequest, MeterUpdate, NodeId,
    OriginMeter, Partition, RoundReply, RoundRequest, StoreId,
};
use tidegate_replication::{Batch, PEER_TIMEOUT_DEFAULT_US};

use crate::bug::Bug;
use crate::memory::TOO_EARLY_US;
use crate::node::meter_of;
use crate::rule_editions::RuleEditions;
use crate::scenario::Scenario;

/// Life of a grant as a mistaken node assumes it, µs.
const LIFE_US: u64 = 1_000_000;

/// The injector of one known mistake, or of none.
pub(crate) struct Spoiler {
    pub(crate) bug: Option<Bug>,
    /// Last sequence numbers of calls that count as new ones.
    sequences: BTreeMap<(NodeId, u16), u64>,
    /// The latest time that the origin's clock showed.
    latest_us: u64,
    /// Batches that arrived before, by receiving region.
    came: BTreeSet<(usize, u64, u64)>,
    /// The first incarnation of each component, by region and key.
    incarnations: BTreeMap<(usize, Box<[u8]>), u64>,
}

impl Spoiler {
    pub(crate) fn new(bug: Option<Bug>) -> Self {
        Self {
            bug,
            sequences: BTreeMap::new(),
            latest_us: 0,
            came: BTreeSet::new(),
            incarnations: BTreeMap::new(),
        }
    }

    /// Returns the calls that leave a node when it sends one, for the first time or again.
    pub(crate) fn on_send(&self, call: &Arc<Call>, again: bool) -> Vec<Arc<Call>> {
        match self.bug {
            Some(Bug::DropsOnFailure) if again => {
                let mut call = Call::clone(call);
                call.updates.iter_mut().for_each(|update| update.used = 0);
                vec![Arc::new(call)]
            }
            Some(Bug::EveryoneAsks) if !again => {
                let waiting = call.checks.iter().map(|ask| u64::from(ask.count)).sum::<u64>().max(1);
                let numbered = |sequence| Arc::new(Call { sequence, ..Call::clone(call) });
                (call.sequence..call.sequence + waiting).map(numbered).collect()
            }
            _ => vec![Arc::clone(call)],
        }
    }

    /// Changes a call as it arrives at the origin.
    pub(crate) fn at_origin(
        &mut self,
        call: &mut Call,
        (partition, here): (u16, &Partition),
        origin_us: u64,
        (scenario, rule_editions): (&Scenario, &RuleEditions),
    ) {
        let node = call.node;
        let updates = call.updates.iter_mut();
        match self.bug {
            Some(Bug::RepeatIsNew) => {
                let sequence = self.sequences.entry((call.node, partition)).or_default();
                *sequence += 1;
                (call.sequence, call.acknowledged) = (*sequence, 0);
            }
            Some(Bug::TrustsLostData) => {
                (call.acknowledged, call.known_us) = (0, 0);
                call.store = StoreId { lineage: 1, boot: 1, parent: 0, up_us: 0 };
            }
            Some(Bug::ForgetsLapsed) => {
                for update in updates {
                    if let Some(rule) = rule_editions.of_terms(&update.terms) {
                        update.terms = rule.with_lapse(scenario, Lapse::Forgiven);
                    }
                }
            }
            Some(Bug::IgnoresLowerLimit) => updates.for_each(|update| {
                let first = rule_editions.rule(0, meter_of(&update.key));
                if update.terms.capacity() < first.terms.capacity() {
                    update.terms = first.with_version(scenario, update.terms.version());
                }
            }),
            Some(Bug::ChargesWrittenOff) => {
                let is_held = |update: &MeterUpdate| {
                    let mut holders = here.meter(&update.key).into_iter().flat_map(OriginMeter::holders);
                    holders.any(|(holder, node_grant)| holder == node && node_grant.until_us > origin_us)
                };
                let counted = updates.filter(|update| update.terms.lapse() == Lapse::Counted);
                counted.filter(|update| !is_held(update)).for_each(|update| update.owed += update.used);
            }
            // Equal wants have equal parts of the room.
            Some(Bug::DividesEqually) => updates.filter(|update| update.want > 0).for_each(|update| {
                update.want = update.terms.capacity();
            }),
            Some(Bug::ImpatientOrigin) => updates.for_each(|update| update.life_us = 0),
            Some(Bug::GiverShrinks) => updates.for_each(|update| update.keep /= 2),
            Some(Bug::DropsWhenFull) => updates.skip(1).for_each(|update| update.used = 0),
            Some(Bug::OwedIsUsed) => updates.for_each(|update| {
                update.used = update.used.saturating_add(std::mem::take(&mut update.owed));
            }),
            Some(Bug::DecidesByHalf) => call.checks.iter_mut().for_each(|ask| ask.charges.truncate(1)),
            Some(Bug::OneCostForAll) => call.checks.iter_mut().for_each(|ask| {
                let first = ask.charges.first().map_or(0, |charge| charge.cost);
                ask.charges.iter_mut().for_each(|charge| charge.cost = first);
            }),
            _ => {}
        }
    }

    /// Returns the state that the fallback of a node uses.
    pub(crate) fn fallback_state(&self, known: FallbackState) -> FallbackState {
        match self.bug {
            Some(Bug::WholeLimitAlone) => FallbackState { processes: 1, remaining: None },
            _ => known,
        }
    }

    /// Returns the time that the origin uses, µs.
    pub(crate) fn origin_us(&mut self, clock_us: u64) -> u64 {
        self.latest_us = self.latest_us.max(clock_us);
        if self.bug == Some(Bug::TimeStandsStill) { self.latest_us } else { clock_us }
    }

    /// Returns the time by which an origin expires meters, µs.
    pub(crate) fn over_us(&self, origin_us: u64) -> u64 {
        if self.bug == Some(Bug::ForgetsEarly) { origin_us + TOO_EARLY_US } else { origin_us }
    }

    /// Returns the sequence number of the call to which a node assigns a reply.
    pub(crate) fn answers_call(&self, sequence: u64, in_flight: Option<u64>) -> u64 {
        match self.bug {
            Some(Bug::TakesAnyAnswer) => in_flight.unwrap_or(sequence),
            _ => sequence,
        }
    }

    /// Changes the reply to a call that was in flight for `away_us`.
    pub(crate) fn on_reply(&self, reply: &mut CallReply, call: &Call, away_us: u64) {
        let meter_reply = reply.meters.iter_mut();
        match self.bug {
            Some(Bug::ImpatientOrigin | Bug::OutlivesWindow) => {
                meter_reply.for_each(|meter_reply| meter_reply.life_us = LIFE_US);
            }
            Some(Bug::HolderStartsLate) => {
                meter_reply
                    .filter(|meter_reply| meter_reply.grant > 0)
                    .for_each(|meter_reply| meter_reply.life_us += away_us);
            }
            Some(Bug::Deltas) => {
                meter_reply
                    .zip(&call.updates)
                    .for_each(|(meter_reply, update)| meter_reply.grant += update.keep);
            }
            Some(Bug::ExhaustedTooEarly) => {
                meter_reply.zip(&call.updates).for_each(|(meter_reply, update)| {
                    meter_reply.exhausted |= meter_reply.grant < update.want;
                });
            }
            Some(Bug::RoomCountedTwice) => {
                meter_reply.for_each(|meter_reply| meter_reply.grant += meter_reply.room);
            }
            Some(Bug::AnswerHidesUse) => meter_reply.for_each(|meter_reply| meter_reply.lapsed = true),
            Some(Bug::OneForAll) => {
                let checks = reply.checks.iter_mut().zip(&call.checks);
                checks
                    .filter(|(decided, _)| decided.passed > 0)
                    .for_each(|(decided, ask)| decided.passed = ask.count);
            }
            _ => {}
        }
    }

    /// Returns the request that reaches the origin. Its replicator has heard all peers within
    /// `last_heard_age_us`.
    pub(crate) fn round(
        &self,
        region: usize,
        round: &RoundRequest,
        last_heard_age_us: Option<u64>,
    ) -> RoundRequest {
        match self.bug {
            Some(Bug::PairNotParted) => {
                let connected_for_us = last_heard_age_us
                    .map_or(0, |last_heard_age_us| PEER_TIMEOUT_DEFAULT_US.saturating_sub(last_heard_age_us));
                RoundRequest { connected_for_us, settled: true, ..*round }
            }
            Some(Bug::NeverParts) => {
                RoundRequest { connected_for_us: CONNECTED_US_MAX, settled: true, ..*round }
            }
            Some(Bug::OneNeverParts) if region == 0 => {
                RoundRequest { connected_for_us: CONNECTED_US_MAX, settled: true, ..*round }
            }
            Some(Bug::SettlesAtOnce) => RoundRequest { settled: true, ..*round },
            Some(Bug::NeverSettles) if region == 0 => RoundRequest { settled: false, ..*round },
            Some(Bug::NobodySettles) => RoundRequest { settled: false, ..*round },
            Some(Bug::TrimsEarly) => RoundRequest { trim: round.after, ..*round },
            _ => *round,
        }
    }

    /// Changes the reply of an origin to its replicator.
    pub(crate) fn on_gathered(&mut self, gathered: &mut RoundReply, region: usize, partition: &Partition) {
        if self.bug == Some(Bug::ThresholdOnLevel) {
            gathered.components.retain(is_level_high);
        }
        for component in &mut gathered.components {
            self.spoil_component(component, region, partition);
        }
    }

    fn spoil_component(&mut self, component: &mut Component, region: usize, partition: &Partition) {
        let Some(meter) = partition.meter(&component.key) else { return };
        let ComponentTotals::Drained { charged, level, .. } = &mut component.totals else { return };
        match self.bug {
            Some(Bug::RepublishesForeign) => {
                let foreign: u64 = meter.seen().map(|(_, _, totals)| totals.numbers()[0]).sum();
                (*charged, *level) = (*charged + foreign, *level + foreign);
            }
            Some(Bug::PublishesGrants) => {
                (*charged, *level) = (*charged + meter.held(), *level + meter.held());
            }
            Some(Bug::HealingChargesPart) => *charged = (*charged).max(meter.charged()),
            Some(Bug::KeepsIncarnation) => {
                let first = self.incarnations.entry((region, component.key.clone()));
                component.incarnation = *first.or_insert(component.incarnation);
            }
            _ => {}
        }
    }

    /// Whether a batch came before, as far as that makes a difference.
    pub(crate) fn is_repeat(&mut self, region: usize, batch: &Batch) -> bool {
        self.bug == Some(Bug::ChargesRepeats)
            && !self.came.insert((region, batch.id.incarnation, batch.id.sequence))
    }

    /// Whether a batch is acknowledged before it is merged.
    pub(crate) fn acknowledges_early(&self) -> bool {
        self.bug == Some(Bug::AcknowledgesEarly)
    }

    /// Returns the components of a peer as the origin merges them.
    pub(crate) fn merge(&self, sent: &MergeRequest, partition: &Partition, is_repeat: bool) -> MergeRequest {
        let mut request = sent.clone();
        for component in &mut request.components {
            let meter = partition.meter(&component.key);
            let seen = meter.and_then(|meter| {
                let mut all = meter.seen();
                all.find(|(from, name, _)| (*from, *name) == (sent.from, component.incarnation))
            });
            let ComponentTotals::Drained { charged, level, .. } = &mut component.totals else { continue };
            match (self.bug, seen) {
                (Some(Bug::ChargesRepeats), Some((_, _, totals))) if is_repeat => {
                    *charged = totals.numbers()[0] + (*level).max(1);
                }
                (Some(Bug::MergeAdds), Some((_, _, totals))) => *charged += totals.numbers()[0],
                (Some(Bug::ColdBySum), None) => *level = *charged,
                _ => {}
            }
        }
        request
    }
}

/// Whether as much has not drained as has to be untold.
fn is_level_high(component: &Component) -> bool {
    let publish_threshold =
        component.terms.cross_region().map_or(0, |cross_region| cross_region.publish_threshold);
    match component.totals {
        ComponentTotals::Drained { level, .. } => level >= publish_threshold,
        ComponentTotals::Cells { .. } => true,
    }
}
