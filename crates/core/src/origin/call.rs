//! Calls from nodes to origins, and their replies.
//!
//! A node has one session with each partition of an origin, and one call in flight in a session. A
//! call carries the node's updates of meters (units used, kept and wanted) and the requests that
//! wait for the origin's decision. It is applied as a whole or not at all, and at most once. A call
//! is sent again if its fate is unknown or its reply is late. The repeated call gets the first
//! reply, as long as the session is stored ([`SESSION_RETENTION_US`](super::SESSION_RETENTION_US)
//! after the last attempt).
//!
//! Replies are absolute. A node accepts only the reply to the call in flight.

use super::terms::Terms;

/// The identity of a node: drawn at random at each start of a process, so a node is never mistaken
/// for its predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// The identity of a store. It reveals whether the store may have lost writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct StoreId {
    /// The place of the store: survives its restarts.
    pub lineage: u64,
    /// This life of the store: a restart or a promotion ends it.
    pub boot: u64,
    /// The life it took over from when it was promoted; 0 if it was not.
    pub parent: u64,
    /// How long this life of the store has lasted, µs.
    pub up_us: u64,
}

/// One call of a node to one partition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// The calling node.
    pub node: NodeId,
    /// Sequence number of the call in its session: 1, 2, 3 and so on. A repeated call keeps its
    /// number.
    pub sequence: u64,
    /// Sequence number of the last call of this session with a reply; 0 if none has one. A store
    /// with a lower stored number has lost writes.
    pub acknowledged: u64,
    /// How long the node has known the origin, µs, by replies of any partition; 0 before the first
    /// reply. An empty store that is up for less time has lost everything.
    pub known_us: u64,
    /// The store as the node knows it.
    pub store: StoreId,
    /// The node's updates of meters, each meter at most once.
    pub updates: Vec<MeterUpdate>,
    /// The requests that wait, decided in this order.
    pub checks: Vec<CheckGroup>,
}

/// A node's update of one meter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeterUpdate {
    /// The meter's name, unambiguous within the partition.
    pub key: Box<[u8]>,
    /// The limit, as the node knows it.
    pub terms: Terms,
    /// Units admitted from the grant and not reported yet.
    pub used: u64,
    /// Units admitted without a grant, or charged regardless of the limit. They count from now on,
    /// in the present cell, whether or not the node has a grant or a grant has lapsed.
    pub owed: u64,
    /// Units refunded of earlier charges.
    pub refund: u64,
    /// When the refunded units were charged, by the origin's clock, µs: units drained since are not
    /// refunded. 0 refunds all.
    pub refund_of_us: u64,
    /// Units of the grant that the node may still spend while the call is in flight.
    pub keep: u64,
    /// Units that the node wants as its grant afterwards; 0 for none.
    pub want: u64,
    /// How long it would like to hold it, µs.
    pub life_us: u64,
    /// The cell in which it was used or charged: the last one that the origin named.
    pub cell: u64,
}

impl MeterUpdate {
    /// An update that reports nothing and wants no grant.
    pub fn new(key: impl Into<Box<[u8]>>, terms: Terms) -> Self {
        Self {
            key: key.into(),
            terms,
            used: 0,
            owed: 0,
            refund: 0,
            refund_of_us: 0,
            keep: 0,
            want: 0,
            life_us: 0,
            cell: 0,
        }
    }
}

/// Requests that wait for this call: `count` of the same kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckGroup {
    /// Cost of each request under each of its limits, every meter at most once.
    pub charges: Vec<Charge>,
    /// How many there are.
    pub count: u32,
}

/// The cost of a request under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// The meter: a place in [`Call::updates`].
    pub meter: u16,
    /// Units.
    pub cost: u64,
}

/// The reply to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallReply {
    /// The reply on each meter of the call, in the same order.
    pub meters: Vec<MeterReply>,
    /// The reply on each check group of the call, in the same order.
    pub checks: Vec<CheckReply>,
    /// The origin's clock at the decision, µs. Nodes measure their clock skew by it.
    pub now_us: u64,
    /// Whether the origin has lost writes since the last reply in this session.
    pub lost: bool,
}

/// The reply of an origin on one meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each flag is independent, and all are encoded as bits")]
pub struct MeterReply {
    /// The node's whole grant from now on, in units, not an increment.
    pub grant: u64,
    /// For how long from the moment the call was sent, µs.
    pub life_us: u64,
    /// Units that are neither charged nor held by a node.
    pub room: u64,
    /// Units that are not charged, of the burst or of the regional part: held or not.
    pub remaining: u64,
    /// Time until a unit is free for a request, without further usage, µs from now; 0 if one is
    /// free.
    pub wait_us: u64,
    /// The cell that the grant is of.
    pub cell: u64,
    /// How many nodes hold or want a part of it, this one included.
    pub holders: u32,
    /// Whether the origin is exhausted. It refused a request of this call, or no unit is left, or
    /// both of these hold: the node got less than it wants, and less is left than the other nodes
    /// use until they report again.
    pub exhausted: bool,
    /// Whether the node's grant had lapsed before this call arrived.
    pub lapsed: bool,
    /// Whether a request of another node needs the grant.
    pub recall: bool,
    /// Whether the meter counts the usage of all regions. False for a limit of this region only,
    /// and while the region is not connected.
    pub is_global: bool,
}

/// Stands in place of a meter in `denied_by`: the origin has no room for a meter of these requests
/// and does not decide them. It charges none of them, and the rest of the call is applied.
pub const UNDECIDED: u16 = u16::MAX;

/// The decision on requests that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckReply {
    /// How many pass.
    pub passed: u32,
    /// The meter that denied the others, as an index into [`Call::updates`]. Of several, the one
    /// that denies longest. [`UNDECIDED`] if the origin did not decide them.
    pub denied_by: u16,
    /// Time until one of the others would pass, without further usage, µs from now.
    pub retry_us: u64,
}
