//! What the origins of several regions tell each other.
//!
//! A region publishes what it charged itself, and nothing else, as sums that only grow: a component for each meter, known by
//! the meter's name, the region and the incarnation of its counting. Whoever gets one charges what is new in it, without a
//! test, since it has been admitted. So a component may come late, twice, or before an earlier one.
//!
//! A region that has not heard of the others for too long counts on its standing part of each limit and on nothing else.
//! What it admits there is no one's excess, and is told to the others when they are heard of again, as far as it has not
//! drained.

use super::partition::{CallError, UPDATES_PER_CALL_MAX};
use super::terms::Terms;
use crate::limit::Algorithm;

/// A region, by the hash of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RegionId(pub u64);

/// How a limit is counted together with other regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossRegionTerms {
    /// How much is charged before the others hear of it, in units. Higher: fewer keys travel; that much more may be admitted
    /// by each region that the others know nothing of.
    pub publish_threshold: u64,
    /// What drains of this region's standing part in a tick, in drops. A part of which nothing drains admits nothing.
    pub share_amount: u64,
    /// What may be taken of this region's standing part at once, in units.
    pub share_capacity: u64,
    /// What is owed beyond the capacity at most, in units, by a limit that forgives: more is forgotten when it is heard of. At
    /// least all that regions may admit before they hear of each other, or the long-run rate is more than the limit's.
    pub debt_max: u64,
}

/// The part of `whole` that is due to the one at place `own` of `weights`. The parts of all are whole numbers, and together
/// they are the whole.
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

/// What one region charged to a meter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// The meter's name.
    pub key: Box<[u8]>,
    /// The limit, as that region knows it.
    pub terms: Terms,
    /// When that region began to count, by its origin's clock. Sums begin anew with it.
    pub incarnation: u64,
    /// What it counted since.
    pub totals: ComponentTotals,
}

/// What a region counted, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComponentTotals {
    /// Of a limit that drains.
    Drained {
        /// All that was charged.
        charged: u64,
        /// All that was given back of it before it had drained.
        refunded: u64,
        /// What of it has not drained, rounded up: what is charged by who knows nothing of this component.
        level: u64,
    },
    /// Of a sliding window. What is given back is not told: it is over with its window.
    Cells {
        /// The present cell.
        cell: u64,
        /// What was charged in it.
        current: u64,
        /// What was charged in the one before.
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
    /// For how long all regions count as heard of, µs: then this one counts on its standing parts. It takes nothing back of what
    /// was said before.
    pub connected_for_us: u64,
    /// Whether all that the others charged is here that is older than regions may be silent, also what they charged to their standing
    /// parts. Only then this one counts on the whole; without, it stays on its standing parts, and tells what it charged to them.
    pub settled: bool,
    /// From when on: the origin's own clock when this was said, as far as the replicator knows it, and at least that. 0 while it
    /// does not.
    pub clock_us: u64,
    /// Every mark up to this one is dropped: all regions have what it stands for.
    pub trim: u64,
    /// Components are gathered whose marks come after this one; 0 for all that are still marked.
    pub after: u64,
    /// How many at most, up to [`UPDATES_PER_CALL_MAX`].
    pub most: u16,
}

/// What a partition has to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoundReply {
    /// Components, in the order of their marks.
    pub components: Vec<Component>,
    /// The mark up to which everything was gathered: what to ask for things after the next time. It may be below the one that
    /// was asked for, when the store has lost writes: then what was told has to be told again.
    pub upto: u64,
    /// Whether there is more after it.
    pub more: bool,
    /// Whether what was charged to standing parts is among what was told, or is still to come if there is more: all regions were heard of.
    pub includes_isolated: bool,
    /// The origin's clock, µs.
    pub now_us: u64,
}

/// Components of a peer region that a replicator brings to a partition of its own region. The
/// replicator never brings components of its own region: they would be charged twice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MergeRequest {
    /// The region that says so.
    pub from: RegionId,
    /// What it says, each meter at most once.
    pub components: Vec<Component>,
}

/// What became of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeReply {
    /// What was charged, in units.
    pub charged: u64,
    /// How many components brought nothing new.
    pub stale: u32,
    /// The origin's clock, µs.
    pub now_us: u64,
}

impl MergeRequest {
    /// Whether it makes sense, whatever the state of an origin: every origin checks this before anything else.
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
