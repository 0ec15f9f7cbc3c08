//! The store of a region: its partitions, its lives and its clock.

use std::collections::BTreeMap;

use tidegate_core::origin::{Call, NodeId, OriginMeter, Partition, StoreId};

use crate::node::name;
use crate::scenario::Scenario;

/// Reading of the origins' clocks when the world begins, µs: a realistic date.
pub(crate) const EPOCH_US: u64 = 1_800_000_000_000_000;

/// The life of the store in which the world begins.
pub(crate) const FIRST_BOOT: u64 = 1;

/// The contents of a store, as a snapshot copies them.
#[derive(Clone)]
pub(crate) struct StoreContents {
    pub(crate) partitions: Vec<Partition>,
    /// Whether each partition was called since it was empty.
    pub(crate) called: Vec<bool>,
    /// Totals of expired meters: units charged, with written-off grants that count as used, and
    /// units given back.
    pub(crate) forgotten: BTreeMap<usize, [u64; 2]>,
    /// The partition of each meter.
    places: Vec<u16>,
}

impl StoreContents {
    pub(crate) fn nothing(scenario: &Scenario) -> Self {
        let count = scenario.partitions();
        Self {
            partitions: vec![Partition::default(); count],
            called: vec![false; count],
            forgotten: BTreeMap::new(),
            places: (0..scenario.meters()).map(|meter| scenario.partition_of(meter)).collect(),
        }
    }

    /// The partition of a meter.
    pub(crate) fn partition_of(&self, meter: usize) -> &Partition {
        &self.partitions[usize::from(self.places[meter])]
    }

    pub(crate) fn meter(&self, meter: usize) -> Option<&OriginMeter> {
        self.partition_of(meter).meter(&name(meter))
    }

    /// Returns the total charges of a meter, the units given back, and the units that nodes hold in
    /// grants.
    pub(crate) fn counts(&self, meter: usize) -> [u64; 3] {
        let [charged, back] = self.forgotten.get(&meter).copied().unwrap_or_default();
        let Some(meter) = self.meter(meter) else { return [charged, back, 0] };
        [charged + meter.charged(), back + meter.refunded(), meter.held()]
    }
}

/// The store of a region.
pub(crate) struct Store {
    pub(crate) contents: StoreContents,
    /// The contents that a loss of writes restores.
    pub(crate) snapshot: StoreContents,
    /// Time of the last expiry in each partition, µs by the origin's clock.
    pub(crate) forgot_us: Vec<u64>,
    /// Times that each partition returned without data and its first caller could not notice.
    pub(crate) unnoticed: Vec<u64>,
    /// When calls were decided, by the true time, and in which life of the store.
    decided: BTreeMap<(u16, NodeId, u64), (u64, u64)>,
    pub(crate) paused_until_us: u64,
    pub(crate) boot: u64,
    /// When this life of it began.
    booted_us: u64,
    /// Offset of the store's clock from the time since the world began, µs.
    pub(crate) epoch_us: u64,
}

impl Store {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let nothing = StoreContents::nothing(scenario);
        Self {
            snapshot: nothing.clone(),
            contents: nothing,
            forgot_us: vec![0; scenario.partitions()],
            unnoticed: vec![0; scenario.partitions()],
            decided: BTreeMap::new(),
            paused_until_us: 0,
            boot: FIRST_BOOT,
            booted_us: 0,
            epoch_us: EPOCH_US,
        }
    }

    /// Returns the identity of the store after its last restart.
    pub(crate) fn id(&self, now_us: u64) -> StoreId {
        StoreId { lineage: 1, boot: self.boot, parent: 0, up_us: now_us - self.booted_us }
    }

    /// Begins another life with these contents.
    pub(crate) fn begin_anew(&mut self, now_us: u64, contents: StoreContents) {
        self.contents = contents;
        (self.boot, self.booted_us) = (self.boot + 1, now_us);
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
}
