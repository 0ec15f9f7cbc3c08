//! What nodes and origins say to each other.
//!
//! A node has one lane to each partition of an origin, and one call under way in a lane. A call carries everything that
//! the node has to say about meters of that partition (what it used, what it keeps, what it would like to hold) and the
//! requests that wait for a word of the origin. It is applied whole or not at all, and at most once: a call that is sent
//! again, because nobody knows what became of it or because its answer is late, gets the answer of the first time, as long as that is
//! remembered ([`SESSION_RETENTION_US`](super::SESSION_RETENTION_US) after it was last asked for).
//!
//! Answers are absolute. A node takes only the answer to the call that is under way.

use super::terms::Terms;

/// A node: drawn at random whenever a process starts, so that none is ever mistaken for its predecessor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(pub u64);

/// Which store answers, so that one that may have lost writes is told from one that has all.
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
    /// Who calls.
    pub node: NodeId,
    /// Which call of this lane it is: 1, 2, 3 and so on. One that is sent again keeps its number.
    pub sequence: u64,
    /// The last call of this lane that was answered; 0 if none was. A store that knows less has lost writes.
    pub acknowledged: u64,
    /// For how long the node has known the origin, µs, whichever partition answered it; 0 if none has. A store that remembers
    /// nothing, and has been there for less, has lost everything.
    pub known_us: u64,
    /// The store as the node knows it.
    pub store: StoreId,
    /// What the node says about meters, each at most once.
    pub updates: Vec<MeterUpdate>,
    /// The requests that wait, decided in this order.
    pub checks: Vec<CheckGroup>,
}

/// What a node says about one meter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MeterUpdate {
    /// The meter's name, unambiguous within the partition.
    pub key: Box<[u8]>,
    /// The limit, as the node knows it.
    pub terms: Terms,
    /// What was admitted from the grant and not yet reported, in units.
    pub used: u64,
    /// What was admitted without a grant, or is charged whatever the limit says, in units: it counts from now on, in the
    /// present cell, whether or not the node holds anything and whatever becomes of lapsed grants.
    pub owed: u64,
    /// What is given back of what was charged earlier, in units.
    pub refund: u64,
    /// When that was charged, by the origin's clock: what of it has drained since is not given back. 0 gives back all.
    pub refund_of_us: u64,
    /// What of the grant the node goes on spending while the call is under way.
    pub keep: u64,
    /// What the node would like to hold afterwards; 0 for nothing.
    pub want: u64,
    /// How long it would like to hold it, µs.
    pub life_us: u64,
    /// The cell in which it was used or charged: the last one that the origin named.
    pub cell: u64,
}

/// Requests that wait for this call: `count` of the same kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckGroup {
    /// What each of them costs under each of its limits, every meter at most once.
    pub charges: Vec<Charge>,
    /// How many there are.
    pub count: u32,
}

/// What a request costs under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Charge {
    /// The meter: a place in [`Call::updates`].
    pub meter: u16,
    /// Units.
    pub cost: u64,
}

/// The answer to a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CallReply {
    /// What the origin says about each meter of the call, in the same order.
    pub meters: Vec<MeterReply>,
    /// What became of each ask of the call, in the same order.
    pub checks: Vec<CheckReply>,
    /// The origin's clock when it decided, µs: what nodes measure their skew by.
    pub now_us: u64,
    /// Whether the origin has lost writes since this lane was last answered.
    pub lost: bool,
}

/// What an origin says about one meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each says something of its own, and all travel as flags")]
pub struct MeterReply {
    /// What the node holds from now on: all of it, not what was added.
    pub grant: u64,
    /// For how long from the moment the call was sent, µs.
    pub life_us: u64,
    /// Units that are neither charged nor held by a node.
    pub room: u64,
    /// Units that are not charged, of the burst or of the regional part: held or not.
    pub remaining: u64,
    /// When there will be a unit for someone again, if nothing else comes, µs from now; 0 if there is one.
    pub wait_us: u64,
    /// The cell that the grant is of.
    pub cell: u64,
    /// How many nodes hold or want a part of it, this one included.
    pub holders: u32,
    /// Whether there is nothing left to grant: no unit is left, or the node was granted less than
    /// it wants and less is left than the other nodes use until they report again.
    pub exhausted: bool,
    /// Whether what it had held was written off before this call came.
    pub lapsed: bool,
    /// Whether someone needs what it holds.
    pub recall: bool,
    /// Whether this counts what all regions use; not for a limit of this region alone, nor while another is not heard of.
    pub is_global: bool,
}

/// In place of a meter: the origin has no room for one that these are under, and does not decide them. Nothing of them was charged, and
/// nothing else is lost by that.
pub const UNDECIDED: u16 = u16::MAX;

/// What became of requests that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckReply {
    /// How many pass.
    pub passed: u32,
    /// The meter that denied the others: a place in [`Call::updates`]. Of several, the one that denies longest. [`UNDECIDED`] if none
    /// did.
    pub denied_by: u16,
    /// When one of the others would pass, if nothing else comes, µs from now.
    pub retry_us: u64,
}
