//! The replicator between regions.
//!
//! Every region has an origin of its own, and its nodes speak to no other. One process of each region, the replicator, carries
//! what the region used to the origins of the others, five times a second, and brings what they used to its own. It also tells
//! its origin for how long the others count as heard of: a region that has not heard of them for too long falls back to its
//! standing part of each limit.
//!
//! What a replicator does is decided by [`Rounds`], which does nothing itself, and written as [`wire`] says. With the feature
//! `net`, [`Replicator`] carries it out.

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
    fn regions_stay_who_they_are() {
        // Another value would make strangers of regions that run different releases.
        assert_eq!(
            ["eu", "us-east-1"].map(region_id),
            [3_408_816_740_430_925_289, 9_050_860_724_234_040_885].map(RegionId)
        );
    }
}
