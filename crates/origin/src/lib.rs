//! A region's shared store of meters.
//!
//! Nodes request grants from an [`Origin`] and report their usage. One pure function,
//! [`Partition::apply`](tidegate_core::origin::Partition::apply), defines the effect of a call.
//! [`MemoryOrigin`] runs that function. [`RedisOrigin`](redis::RedisOrigin) runs a script that is
//! tested against it, call by call.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use siphasher::sip::SipHasher13;
use tidegate_core::origin::{Call, CallError, CallReply, MergeReply, MergeRequest, RoundReply, RoundRequest};

mod memory;
pub mod redis;

pub use memory::{METERS_PER_PARTITION_MAX, MemoryOrigin};

/// How many parts an origin has. A call is about one of them, and a cluster spreads them over its
/// servers. More: larger clusters are used evenly; fewer meters in each call, and so more calls for
/// the same keys. Every node of a region must agree on this number, and on [`partition_of`]: to
/// change either is to forget every meter.
pub const PARTITIONS: u16 = 256;

/// The future reply to a call.
pub type OriginFuture<'a, T = CallReply> = Pin<Box<dyn Future<Output = Result<T, OriginError>> + Send + 'a>>;

/// A region's shared store of meters.
pub trait Origin: Send + Sync {
    /// Makes a call to a partition. The caller may repeat it, even while it is in flight: the
    /// origin applies it once, and each attempt gets the first reply. The origin determines the
    /// store's identity itself and ignores [`Call::store`].
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a>;

    /// Makes a call again that is under way and late, by another way than [`call`](Self::call) if
    /// there is one.
    fn hedge<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.call(partition, call)
    }

    /// Gathers the components that a partition has to publish, and extends the time for which the
    /// region counts as connected. May be repeated.
    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply>;

    /// Charges the usage of a peer region. May be repeated: usage that is charged already is not
    /// charged again.
    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply>;

    /// Acquires, renews or releases the replicator lease. If another node holds it, returns that
    /// node's measured lag.
    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply>;

    /// Checks that the store accepts calls, before a request depends on it. Changes nothing. A
    /// probe of a store with several shards may check some of them; repeated probes check all.
    fn probe(&self) -> OriginFuture<'_, ProbeReply> {
        Box::pin(async { Ok(ProbeReply::default()) })
    }
}

/// The store's reply to a probe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProbeReply {
    /// The eviction policy of the store, if it is another than `noeviction`: an evicted meter
    /// counts as unused.
    pub eviction_policy: Option<String>,
}

/// A node's request to acquire, renew or release the replicator lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseRequest {
    /// The process that makes the request.
    pub holder: u64,
    /// For how long from now it would be, µs; with 0 it gives it up.
    pub for_us: u64,
    /// Lag until peers know of a change here, µs. The origin stores it only if this node holds the
    /// lease, because only the replicator can measure it.
    pub lag_us: u64,
}

/// The origin's reply to a [`LeaseRequest`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseReply {
    /// Whether the requesting node holds the lease now.
    pub is_held: bool,
    /// Lag that the replicator last reported, µs; 0 if there is none.
    pub lag_us: u64,
}

/// The reason why a call has no reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OriginError {
    /// The call is invalid, or a later call of its session was applied. It was not applied and
    /// never will be.
    Refused(CallError),
    /// The call was not applied, for certain.
    NotApplied(String),
    /// The call may have been applied or not. A repeat is safe, and the only way to find out.
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

/// Returns the partition of a placement: SipHash-1-3 under a key of zeros, equal on every node of a
/// region. A client that chooses placements can fill one partition. This slows the partition down,
/// but never changes a decision about a key that is known there. If a store has no room for new
/// keys, the class of their limits decides.
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
