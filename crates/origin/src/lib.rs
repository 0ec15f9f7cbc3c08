//! A region's shared store of meters.
//!
//! Nodes ask an [`Origin`] for grants and report what they used of them. What an origin does with a call is decided by one
//! pure function, [`Partition::apply`](tidegate_core::origin::Partition::apply): [`MemoryOrigin`] runs it, and
//! [`RedisOrigin`](redis::RedisOrigin) runs a script that is tested against it, call by call.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use siphasher::sip::SipHasher13;
use tidegate_core::origin::{Call, CallError, CallReply, MergeReply, MergeRequest, RoundReply, RoundRequest};

mod memory;
pub mod redis;

pub use memory::{METERS_PER_PARTITION_MAX, MemoryOrigin};

/// How many parts an origin has. A call is about one of them, and a cluster spreads them over its servers. More: larger
/// clusters are used evenly; fewer meters in each call, and so more calls for the same keys. Every node of a region must agree
/// on this number, and on [`partition_of`]: to change either is to forget every meter.
pub const PARTITIONS: u16 = 256;

/// The answer to a call, when it comes.
pub type OriginFuture<'a, T = CallReply> = Pin<Box<dyn Future<Output = Result<T, OriginError>> + Send + 'a>>;

/// A region's shared store of meters.
pub trait Origin: Send + Sync {
    /// Makes a call to a partition. It may be made again, also while it is under way: it is applied once, and each gets the
    /// answer of the first time. The store answers for itself, whatever [`Call::store`] says.
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a>;

    /// Makes a call again that is under way and late, by another way than [`call`](Self::call) if there is one.
    fn hedge<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.call(partition, call)
    }

    /// Gathers what a partition has to tell other regions, and says for how long they count as heard of. May be repeated.
    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply>;

    /// Charges what another region charged. May be repeated: what was charged is not charged again.
    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply>;

    /// Takes, or keeps, what only one replicator of a region has; and tells whoever has it not what that one measured.
    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply>;
}

/// A node's request to acquire, renew or release the replicator lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// Which process it is.
    pub holder: u64,
    /// For how long from now it would be, µs; with 0 it gives it up.
    pub for_us: u64,
    /// How late other regions hear of this one, µs. Counts if it is the replicator, which alone can tell.
    pub lag_us: u64,
}

/// The origin's answer to a [`LeaseRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseReply {
    /// Whether whoever asked is the replicator now.
    pub is_held: bool,
    /// How late other regions hear of this one, µs, as the replicator last said; 0 if none did.
    pub lag_us: u64,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OriginError {
    /// The call makes no sense, or a later one of its lane was applied. It was not applied, and never will be.
    Refused(CallError),
    /// The call was not applied, for certain.
    NotApplied(String),
    /// Nobody knows whether the call was applied. To make it again is safe, and the only way to find out.
    Unknown(String),
}

impl fmt::Display for OriginError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(error) => write!(f, "the call was refused: {error}"),
            Self::NotApplied(why) => write!(f, "the call was not applied: {why}"),
            Self::Unknown(why) => write!(f, "the call may have been applied: {why}"),
        }
    }
}

impl std::error::Error for OriginError {}

impl From<CallError> for OriginError {
    fn from(error: CallError) -> Self {
        Self::Refused(error)
    }
}

/// The partition of a placement: SipHash-1-3 under a key of zeros, which every node of a region computes alike. Who chooses
/// placements can fill one partition with them: what that costs is the speed of this partition, never a decision about a key that is
/// known there. A store that has no room for further keys leaves the decision about those to the class of their limits.
#[allow(clippy::cast_possible_truncation, reason = "below PARTITIONS")]
pub fn partition_of(placement: &[u8]) -> u16 {
    (SipHasher13::new().hash(placement) % u64::from(PARTITIONS)) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_stay_where_they_are() {
        // Another value would part the nodes of one release from those of the next.
        assert_eq!([&b""[..], b"a", b"workspace/42"].map(partition_of), [44, 19, 222]);
    }

    #[test]
    fn placements_spread_evenly() {
        let mut counts = vec![0u32; usize::from(PARTITIONS)];
        for placement in 0..25_600u32 {
            counts[usize::from(partition_of(&placement.to_le_bytes()))] += 1;
        }
        assert!(counts.iter().all(|count| (50..=160).contains(count)), "{counts:?}");
    }
}
