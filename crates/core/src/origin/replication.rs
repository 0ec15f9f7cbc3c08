//! Messages between the origins of several regions.
//!
//! A region publishes only its own usage, as totals that only grow: a component for each meter,
//! identified by the meter's name, the region and the incarnation. The receiver charges the new
//! usage without a check, because it was admitted already. So a component may arrive late, twice or
//! out of order.
//!
//! An isolated region spends only its regional share of each limit. This usage exceeds no limit.
//! The region publishes its undrained part when all peers are heard again.

use super::partition::{CallError, UPDATES_PER_CALL_MAX};
use super::terms::Terms;
use crate::limit::Algorithm;

/// A region, by the hash of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// How a limit is counted together with other regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossRegionTerms {
    /// Units charged before the component is published. Higher: fewer keys are replicated; each
    /// region may admit that much more unknown to its peers.
    pub publish_threshold: u64,
    /// Drops of the regional share that drain per tick. A share with a rate of 0 admits nothing.
    pub share_amount: u64,
    /// Units of the regional share that may be used at once.
    pub share_capacity: u64,
    /// Maximum debt above the capacity, in units, of a limit with `Lapse::Forgiven`: usage of peers
    /// beyond it is dropped on arrival. It must cover all units that regions may admit before they
    /// hear each other. Otherwise the long-run rate is above that of the limit.
    pub debt_max: u64,
}

/// Returns the part of `whole` for index `own` of `weights`. All parts are integers, and their sum
/// is `whole`.
pub fn share_of(whole: u64, weights: &[u32], own: usize) -> u64 {
    let all: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    if all == 0 {
        return 0;
    }
    let before: u128 = weights.iter().take(own).map(|weight| u128::from(*weight)).sum();
    let weight = weights.get(own).map_or(0, |weight| u128::from(*weight));
    let upto = |weight: u128| u128::from(whole) * weight / all;
    u64::try_from(upto(before + weight) - upto(before)).unwrap_or(whole)
}

/// One region's own cumulative usage of one meter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// The meter's name.
    pub key: Box<[u8]>,
    /// The limit, as that region knows it.
    pub terms: Terms,
    /// When that region began to count, by its origin's clock. Sums begin anew with it.
    pub incarnation: u64,
    /// Totals since then.
    pub totals: ComponentTotals,
}

/// The totals of a region, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentTotals {
    /// Of a limit that drains.
    Drained {
        /// All that was charged.
        charged: u64,
        /// All that was given back of it before it had drained.
        refunded: u64,
        /// Undrained part of it, rounded up. A receiver without a record of this component charges
        /// it.
        level: u64,
    },
    /// Of a sliding window. Refunds are not published: their effect ends with the window.
    Cells {
        /// The present cell.
        cell: u64,
        /// Units charged in it.
        current: u64,
        /// Units charged in the cell before.
        previous: u64,
    },
}

impl ComponentTotals {
    /// The sums as three numbers, in the order in which they are declared.
    pub const fn numbers(&self) -> [u64; 3] {
        match *self {
            Self::Drained { charged, refunded, level } => [charged, refunded, level],
            Self::Cells { cell, current, previous } => [cell, current, previous],
        }
    }

    /// The sums that [`numbers`](Self::numbers) are of.
    pub const fn of_numbers(algorithm: Algorithm, numbers: [u64; 3]) -> Self {
        let [first, second, third] = numbers;
        match algorithm {
            Algorithm::Gcra => Self::Drained { charged: first, refunded: second, level: third },
            Algorithm::SlidingWindow => Self::Cells { cell: first, current: second, previous: third },
        }
    }
}

/// A replicator's request to a partition of its own region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoundRequest {
    /// How long all peers count as heard, µs; after that the region is isolated. A lower value does
    /// not shorten an earlier time, except when the region becomes connected.
    pub connected_for_us: u64,
    /// Whether all usage of peers older than the peer timeout has arrived, isolated usage included.
    /// Only then does the region become connected. Otherwise it settles: it spends its regional
    /// shares and publishes its isolated usage.
    pub settled: bool,
    /// Start of that time: a lower estimate of the origin's clock at this request, by the
    /// replicator. 0 while unknown.
    pub clock_us: u64,
    /// All peers have acknowledged the dirty meters up to this stamp, so they are dropped.
    pub trim: u64,
    /// Components with later stamps are gathered; 0 for all dirty meters.
    pub after: u64,
    /// How many at most, up to [`UPDATES_PER_CALL_MAX`].
    pub most: u16,
}

/// The reply of a partition to a replication round.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundReply {
    /// Components, in the order of their marks.
    pub components: Vec<Component>,
    /// Stamp up to which all components were gathered: `after` of the next request. It is below the
    /// requested `after` if the store has lost writes. Then published components have to be sent
    /// again.
    pub upto: u64,
    /// Whether there is more after it.
    pub more: bool,
    /// Whether isolated usage is among the components, or follows if `more` is set: the region is
    /// not isolated.
    pub includes_isolated: bool,
    /// The origin's clock, µs.
    pub now_us: u64,
}

/// Components of a peer region that a replicator brings to a partition of its own region. The
/// replicator never brings components of its own region: they would be charged twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeRequest {
    /// The peer region.
    pub from: RegionId,
    /// Its components, each meter at most once.
    pub components: Vec<Component>,
}

/// The result of a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeReply {
    /// Units charged.
    pub charged: u64,
    /// Number of components without new usage.
    pub stale: u32,
    /// The origin's clock, µs.
    pub now_us: u64,
}

impl MergeRequest {
    /// Validates the request independently of the origin's state. Every origin does this first.
    pub fn check(&self) -> Result<(), CallError> {
        let given = self.components.len();
        if given > UPDATES_PER_CALL_MAX {
            return Err(CallError::TooMany { given });
        }
        let mut places: Vec<usize> = (0..given).collect();
        places.sort_unstable_by_key(|place| &self.components[*place].key);
        let twice =
            places.windows(2).find(|pair| self.components[pair[0]].key == self.components[pair[1]].key);
        twice.map_or(Ok(()), |pair| Err(CallError::Twice { meter: pair[0] }))
    }
}
