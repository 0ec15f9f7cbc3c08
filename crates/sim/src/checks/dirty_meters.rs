//! A dirty meter is dropped only after all peers know its usage, or after `DIRTY_RETENTION_US`.

use tidegate_core::origin::{ComponentTotals, DIRTY_RETENTION_US, OriginMeter};

use super::knowledge::charged_for;
use super::{AppliedRound, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::scenario::{SECOND_US, Scenario};
use crate::store::EPOCH_US;
use crate::world::Region;

struct DirtyMeters;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(DirtyMeters))
}

impl Checker for DirtyMeters {
    fn promise(&self) -> &'static str {
        "dirty meters"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Round(round) = seen else { return None };
        let (region, at_us) = (round.region, history.now_us);
        let partition = &round.regions[region].store.contents.partitions[round.partition];
        let is_old = |stamp: u64| stamp + DIRTY_RETENTION_US <= EPOCH_US + at_us + SECOND_US;
        let is_dirty = |name: &[u8]| partition.dirty_meters().any(|(_, marked)| marked == name);
        let dropped = round.marked.iter().filter(|(stamp, name)| !is_old(*stamp) && !is_dirty(name));
        let mut unknown = dropped.filter(|(_, name)| {
            partition.meter(name).is_some_and(|meter| is_unknown(history, round, meter_of(name), meter))
        });
        unknown.next().map(|(_, name)| {
            let key = meter_of(name);
            format!("region {region}, key {key}: the dirty mark was dropped too early, at {at_us} us")
        })
    }
}

/// Whether a peer lacks usage that the region of a round counted of a key.
fn is_unknown(history: &History, round: &AppliedRound<'_>, key: usize, meter: &OriginMeter) -> bool {
    let AppliedRound { regions, region, .. } = *round;
    let mut peers = (0..regions.len()).filter(|peer| *peer != region && regions[*peer].losses == 0);
    peers.any(|peer| !knows(history, regions, peer, (region, key), meter))
}

/// Whether a region knows all usage that another one counted of a key, or knew it until that was
/// over.
fn knows(
    history: &History,
    regions: &[Region],
    observer: usize,
    (of, key): (usize, usize),
    meter: &OriginMeter,
) -> bool {
    let Some(numbers) = meter.region_state_numbers() else { return true };
    let [incarnation, charged, _, _, _, current, previous, ..] = numbers;
    let cell = meter.numbers()[2];
    match charged_for(history, regions, observer, (of, key, incarnation)) {
        None => charged == 0,
        Some(ComponentTotals::Drained { charged: known, .. }) => known >= charged,
        Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known == cell => of_it >= current,
        Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known + 1 == cell => {
            current == 0 && of_it >= previous
        }
        Some(ComponentTotals::Cells { cell: known, .. }) => known > cell || current + previous == 0,
    }
}
