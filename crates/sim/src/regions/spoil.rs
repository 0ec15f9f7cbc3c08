//! Where known mistakes are made: on the way between origins and couriers, never inside what is shipped.

use std::collections::{BTreeMap, BTreeSet};

use tidegate_core::origin::{Component, Gathered, Merge, Partition, Round, Sums, WHOLE_US_MAX};
use tidegate_courier::{Batch, SILENCE_MAX_US};

use super::bug::RegionBug;
use crate::memory::TOO_EARLY_US;

/// Makes one known mistake, or none.
pub(super) struct Spoiler {
    bug: Option<RegionBug>,
    /// Batches that came before, by who got them.
    came: BTreeSet<(usize, u64, u64)>,
    /// The first name of each component, by region and key.
    names: BTreeMap<(usize, Box<[u8]>), u64>,
}

impl Spoiler {
    pub(super) fn new(bug: Option<RegionBug>) -> Self {
        Self { bug, came: BTreeSet::new(), names: BTreeMap::new() }
    }

    /// What a courier asks of its origin, which has heard of all of its peers within `silence_us`.
    pub(super) fn round(&self, region: usize, round: &Round, silence_us: Option<u64>) -> Round {
        match self.bug {
            Some(RegionBug::PairNotParted) => {
                let whole_for_us =
                    silence_us.map_or(0, |silence_us| SILENCE_MAX_US.saturating_sub(silence_us));
                Round { whole_for_us, settled: true, ..*round }
            }
            Some(RegionBug::NeverParts) => Round { whole_for_us: WHOLE_US_MAX, settled: true, ..*round },
            Some(RegionBug::OneNeverParts) if region == 0 => {
                Round { whole_for_us: WHOLE_US_MAX, settled: true, ..*round }
            }
            Some(RegionBug::SettlesAtOnce) => Round { settled: true, ..*round },
            Some(RegionBug::NeverSettles) if region == 0 => Round { settled: false, ..*round },
            Some(RegionBug::NobodySettles) => Round { settled: false, ..*round },
            Some(RegionBug::TrimsEarly) => Round { trim: round.after, ..*round },
            _ => *round,
        }
    }

    /// By which time an origin drops what is over.
    pub(super) fn over_us(&self, origin_us: u64) -> u64 {
        if self.bug == Some(RegionBug::ForgetsEarly) { origin_us + TOO_EARLY_US } else { origin_us }
    }

    /// What an origin tells its courier.
    pub(super) fn on_gathered(&mut self, gathered: &mut Gathered, region: usize, partition: &Partition) {
        if self.bug == Some(RegionBug::ThresholdOnLevel) {
            gathered.components.retain(is_level_high);
        }
        for component in &mut gathered.components {
            self.on_told(component, region, partition);
        }
    }

    fn on_told(&mut self, component: &mut Component, region: usize, partition: &Partition) {
        let Some(meter) = partition.meter(&component.key) else { return };
        let Sums::Drained { charged, level, .. } = &mut component.sums else { return };
        match self.bug {
            Some(RegionBug::RepublishesForeign) => {
                let foreign: u64 = meter.seen().map(|(_, _, sums)| sums.numbers()[0]).sum();
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

    /// What an origin makes of what another region says.
    pub(super) fn merge(&self, said: &Merge, partition: &Partition, is_repeat: bool) -> Merge {
        let mut heard = said.clone();
        for component in &mut heard.components {
            let meter = partition.meter(&component.key);
            let seen = meter.and_then(|meter| {
                let mut all = meter.seen();
                all.find(|(from, name, _)| (*from, *name) == (said.from, component.incarnation))
            });
            let Sums::Drained { charged, level, .. } = &mut component.sums else { continue };
            match (self.bug, seen) {
                (Some(RegionBug::ChargesRepeats), Some((_, _, sums))) if is_repeat => {
                    *charged = sums.numbers()[0] + (*level).max(1);
                }
                (Some(RegionBug::MergeAdds), Some((_, _, sums))) => *charged += sums.numbers()[0],
                (Some(RegionBug::ColdBySum), None) => *level = *charged,
                _ => {}
            }
        }
        heard
    }
}

/// Whether as much has not drained as has to be untold.
fn is_level_high(component: &Component) -> bool {
    let hide = component.terms.abroad().map_or(0, |abroad| abroad.hide);
    match component.sums {
        Sums::Drained { level, .. } => level >= hide,
        Sums::Cells { .. } => true,
    }
}
