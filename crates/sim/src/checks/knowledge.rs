//! The usage that regions have published, and the part of it that their peers have charged.

use tidegate_core::Algorithm;
use tidegate_core::origin::{ComponentTotals, MergeRequest, OriginMeter, Partition, RegionId};

use crate::history::History;
use crate::node::name;
use crate::world::{Region, region_id};

/// The usage of a key that a region has to publish at some moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeyKnowledge {
    /// The region of the component.
    pub(super) of: usize,
    pub(super) key: usize,
    pub(super) incarnation: u64,
    pub(super) charged: u64,
    /// For a sliding window: the cell, and the units counted in it.
    pub(super) cell: u64,
    pub(super) current: u64,
}

/// Returns all usage that regions have to publish to each other now.
pub(crate) fn to_publish(regions: &[Region], keys: usize) -> Vec<KeyKnowledge> {
    let places = (0..regions.len()).flat_map(|of| (0..keys).map(move |key| (of, key)));
    let usage = |(of, key): (usize, usize)| {
        let meter = regions[of].store.contents.meter(key)?;
        let [incarnation, charged, _, _, _, current, _, _, _, _, flags, _] = meter.region_state_numbers()?;
        let is_open = flags % 2 == 1;
        let cell = meter.numbers()[2];
        is_open.then_some(KeyKnowledge { of, key, incarnation, charged, cell, current })
    };
    places.filter_map(usage).collect()
}

/// Returns the totals that a region has charged for a component of a peer, also if they have
/// expired. An expired component that arrives again is not charged again, and the peer may drop its
/// dirty meter.
pub(super) fn charged_for(
    history: &History,
    regions: &[Region],
    observer: usize,
    (of, key, incarnation): (usize, usize, u64),
) -> Option<ComponentTotals> {
    let partition = regions[observer].store.contents.partition_of(key);
    let known = charged_totals(partition, region_id(of), &name(key), incarnation);
    let forgotten = history.forgotten.get(&(observer, region_id(of), key, incarnation)).copied();
    known.into_iter().chain(forgotten).max_by_key(ComponentTotals::numbers)
}

/// Returns the totals that a partition has charged for a component.
fn charged_totals(
    partition: &Partition,
    from: RegionId,
    name: &[u8],
    incarnation: u64,
) -> Option<ComponentTotals> {
    let mut all = partition.meter(name)?.seen();
    all.find(|(of, named, _)| (*of, *named) == (from, incarnation)).map(|(_, _, totals)| totals)
}

/// Units charged to a meter that still count.
pub(crate) fn owed(meter: Option<&OriginMeter>) -> u64 {
    let Some(meter) = meter else { return 0 };
    let [level, _, _, current, previous, ..] = meter.numbers();
    match meter.terms().algorithm() {
        Algorithm::Gcra => level.div_ceil(meter.terms().period()),
        Algorithm::SlidingWindow => current.max(previous),
    }
}

/// Units in a merge that are new to a partition. `None` for sliding windows, where the number
/// depends on the time.
pub(crate) fn news(partition: &Partition, merge: &MergeRequest) -> Option<u64> {
    let mut news = 0;
    for component in &merge.components {
        let ComponentTotals::Drained { charged, level, .. } = component.totals else { return None };
        news += match charged_totals(partition, merge.from, &component.key, component.incarnation) {
            Some(ComponentTotals::Drained { charged: known, .. }) => charged.saturating_sub(known),
            _ => charged.min(level),
        };
    }
    Some(news)
}
