//! What replicators say to each other.

use std::sync::Arc;

use tidegate_core::origin::Component;

/// Which batch it is: of which replicator, and which of its batches to this peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchId {
    /// The replicator: another number each time that somebody becomes one.
    pub incarnation: u64,
    /// 1, 2, 3 and so on. A batch that is sent again keeps its number.
    pub sequence: u64,
}

/// What changed in a region, and how much is known there of others.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Which batch it is.
    pub id: BatchId,
    /// How fresh all of this is.
    pub freshness: BatchFreshness,
    /// What changed. A batch without changes says that there are none.
    pub groups: Vec<Arc<ComponentGroup>>,
}

impl Batch {
    /// How many components there are in it.
    pub fn components(&self) -> usize {
        self.groups.iter().map(|group| group.components.len()).sum()
    }
}

/// Components of one partition.
#[derive(Clone, Debug, PartialEq)]
pub struct ComponentGroup {
    /// The partition, which is the same one in every region.
    pub partition: u16,
    /// What changed in it.
    pub components: Vec<Component>,
}

/// How fresh a batch is. Instants of two machines are never compared: everything is an age, or the receiver's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchFreshness {
    /// Every batch of this replicator up to this one is merged, as the sender knows: what the news says of batches before its own
    /// is about those that follow.
    pub after: u64,
    /// The receiver's clock as the sender was last told it: the batch is younger than that, however long it was under way.
    pub echo_us: u64,
    /// Everything that was marked at least this long ago is known to whoever has merged this batch and those before it.
    /// Nothing while the sender has not yet looked everywhere.
    pub age_us: Option<u64>,
    /// The same of all that was charged, also to standing parts. It grows while the sender's region counts on those, of which it tells
    /// nothing.
    pub settled_age_us: Option<u64>,
    /// For how long the most silent of the sender's peers has been silent. Nothing while one was never heard of.
    pub last_heard_age_us: Option<u64>,
}

/// A batch was merged, whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// Which one.
    pub id: BatchId,
    /// The clock of whoever merged it: to be given back with the next batch.
    pub clock_us: u64,
}
