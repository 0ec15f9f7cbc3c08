//! Replication between regions.
//!
//! Every region has its own origin, and its nodes call no other. One node of each region is the
//! replicator. Five times a second, it sends the region's usage to the peer regions, and it merges
//! their usage into its own origin. It also reports to its origin for how long the peers count as
//! heard. After the peer timeout, the region is isolated and spends only its regional share of each
//! limit.
//!
//! [`Rounds`] decides each step of a replicator without doing I/O. [`wire`] defines the message
//! format. With the feature `net`, [`Replicator`] executes the steps.

use siphasher::sip::SipHasher13;
use tidegate_core::origin::RegionId;

mod forward;
mod message;
mod rounds;
pub mod wire;

#[cfg(feature = "net")]
mod net;

pub use forward::{
    FORWARD_CHECKS_MAX, ForwardAction, ForwardDecision, ForwardHandler, ForwardReply, ForwardRequest,
    ForwardedCheck, owner_of,
};
pub use message::{Ack, Batch, BatchFreshness, BatchId, ComponentGroup};
pub use rounds::{
    BATCH_BYTES_MAX, BATCH_COMPONENTS_MAX, BATCHES_IN_FLIGHT_MAX, GATHER_MAX, INTERVAL_US, LAG_ALARM_US,
    OUTBOX_BYTES_MAX, PEER_TIMEOUT_DEFAULT_US, PEERS_MAX, PartitionRound, PeerState, Rounds, RoundsConfig,
};

#[cfg(feature = "net")]
pub use net::{
    Forwarder, PeerCertificates, PeerConfig, PeerCounts, PeerStatus, ReplicationStatus, Replicator,
    ReplicatorConfig, ReplicatorError,
};

/// The region of a name: SipHash-1-3 under a key of zeros, which every region computes alike.
pub fn region_id(name: &str) -> RegionId {
    RegionId(SipHasher13::new().hash(name.as_bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_ids_are_stable() {
        // Another value would make strangers of regions that run different releases.
        assert_eq!(
            ["eu", "us-east-1"].map(region_id),
            [3_408_816_740_430_925_289, 9_050_860_724_234_040_885].map(RegionId)
        );
    }
}
