//! Messages between replicators.

use std::sync::Arc;

use tidegate_core::origin::Component;

/// The identity of a batch: its replicator, and its number among the batches to one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchId {
    /// Number of the replicator. It changes each time that a node becomes replicator.
    pub incarnation: u64,
    /// 1, 2, 3 and so on. A batch that is sent again keeps its number.
    pub sequence: u64,
}

/// Changes of a region, and the freshness of its knowledge of peers.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Its identity.
    pub id: BatchId,
    /// How fresh all of this is.
    pub freshness: BatchFreshness,
    /// Changed components. An empty batch states that there are no changes.
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
    /// Its changed components.
    pub components: Vec<Component>,
}

/// Freshness of a batch. Clocks of two machines are never compared: each value is an age, or a
/// reading of the receiver's own clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchFreshness {
    /// Sequence number up to which the sender knows that all its batches are merged. The ages below
    /// therefore depend only on the batches after it.
    pub after: u64,
    /// The receiver's clock, as last received by the sender. The batch is younger than this
    /// reading, however long it was in flight.
    pub echo_us: u64,
    /// A receiver that has merged this batch and all before it knows every component marked dirty
    /// at least this long ago. `None` until the sender has gathered from every partition.
    pub age_us: Option<u64>,
    /// The same for all usage, including usage charged while isolated. It grows while the sender's
    /// region is isolated, because the region does not publish such usage yet.
    pub settled_age_us: Option<u64>,
    /// Highest last-heard age among the sender's peers. `None` while the sender has never heard one
    /// of them.
    pub last_heard_age_us: Option<u64>,
}

/// Confirms that a batch is merged completely.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// The merged batch.
    pub id: BatchId,
    /// Clock of the receiver that merged the batch. The sender echoes it in its next batch.
    pub clock_us: u64,
}
