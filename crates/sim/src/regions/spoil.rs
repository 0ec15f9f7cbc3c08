//! Injects known mistakes between origins and replicators, never into the shipped code.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::origin::{
    CONNECTED_US_MAX, Component, ComponentTotals, MergeRequest, Partition, RoundReply, RoundRequest,
};
use tidegate_replication::{Batch, PEER_TIMEOUT_DEFAULT_US};

use super::bug::RegionBug;
use crate::memory::TOO_EARLY_US;

/// The injector of one known mistake, or of none.
pub(super) struct Spoiler {
    bug: Option<RegionBug>,
    /// Batches that arrived before, by receiving region.
    came: BTreeSet<(usize, u64, u64)>,
    /// The first name of each component, by region and key.
    names: BTreeMap<(usize, Box<[u8]>), u64>,
}

impl Spoiler {
    pub(super) fn new(bug: Option<RegionBug>) -> Self {
        Self { bug, came: BTreeSet::new(), names: BTreeMap::new() }
    }

    /// Returns the request that reaches the origin. Its replicator has heard all peers within
    /// `last_heard_age_us`.
    pub(super) fn round(
        &self,
        region: usize,
        round: &RoundRequest,
        last_heard_age_us: Option<u64>,
    ) -> RoundRequest {
        match self.bug {
            Some(RegionBug::PairNotParted) => {
                let connected_for_us = last_heard_age_us
                    .map_or(0, |last_heard_age_us| PEER_TIMEOUT_DEFAULT_US.saturating_sub(last_heard_age_us));
                RoundRequest { connected_for_us, settled: true, ..*round }
            }
            Some(RegionBug::NeverParts) => {
                RoundRequest { connected_for_us: CONNECTED_US_MAX, settled: true, ..*round }
            }
            Some(RegionBug::OneNeverParts) if region == 0 => {
                RoundRequest { connected_for_us: CONNECTED_US_MAX, settled: true, ..*round }
            }
            Some(RegionBug::SettlesAtOnce) => RoundRequest { settled: true, ..*round },
            Some(RegionBug::NeverSettles) if region == 0 => RoundRequest { settled: false, ..*round },
            Some(RegionBug::NobodySettles) => RoundRequest { settled: false, ..*round },
            Some(RegionBug::TrimsEarly) => RoundRequest { trim: round.after, ..*round },
            _ => *round,
        }
    }

    /// Returns the time by which an origin expires meters, µs.
    pub(super) fn over_us(&self, origin_us: u64) -> u64 {
        if self.bug == Some(RegionBug::ForgetsEarly) { origin_us + TOO_EARLY_US } else { origin_us }
    }

    /// Changes the reply of an origin to its replicator.
    pub(super) fn on_gathered(&mut self, gathered: &mut RoundReply, region: usize, partition: &Partition) {
        if self.bug == Some(RegionBug::ThresholdOnLevel) {
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
            Some(RegionBug::RepublishesForeign) => {
                let foreign: u64 = meter.seen().map(|(_, _, totals)| totals.numbers()[0]).sum();
                (*charged, *level) = (*charged + foreign, *level + foreign);
            }
            Some(RegionBug::PublishesGrants) => {
                (*charged, *level) = (*charged + meter.held(), *level + meter.held());
            }
            Some(RegionBug::HealingChargesPart) => *charged = (*charged).max(meter.charged()),
            Some(RegionBug::KeepsIncarnation) => {
                let name = self.names.entry((region, component.key.clone()));
                component.incarnation = *name.or_insert(component.incarnation);
            }
            _ => {}
        }
    }

    /// Whether a batch came before, as far as that makes a difference.
    pub(super) fn is_repeat(&mut self, region: usize, batch: &Batch) -> bool {
        self.bug == Some(RegionBug::ChargesRepeats)
            && !self.came.insert((region, batch.id.incarnation, batch.id.sequence))
    }

    /// Whether a batch is acknowledged before it is merged.
    pub(super) fn acknowledges_early(&self) -> bool {
        self.bug == Some(RegionBug::AcknowledgesEarly)
    }

    /// Returns the components of a peer as the origin merges them.
    pub(super) fn merge(&self, sent: &MergeRequest, partition: &Partition, is_repeat: bool) -> MergeRequest {
        let mut request = sent.clone();
        for component in &mut request.components {
            let meter = partition.meter(&component.key);
            let seen = meter.and_then(|meter| {
                let mut all = meter.seen();
                all.find(|(from, name, _)| (*from, *name) == (sent.from, component.incarnation))
            });
            let ComponentTotals::Drained { charged, level, .. } = &mut component.totals else { continue };
            match (self.bug, seen) {
                (Some(RegionBug::ChargesRepeats), Some((_, _, totals))) if is_repeat => {
                    *charged = totals.numbers()[0] + (*level).max(1);
                }
                (Some(RegionBug::MergeAdds), Some((_, _, totals))) => *charged += totals.numbers()[0],
                (Some(RegionBug::ColdBySum), None) => *level = *charged,
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
