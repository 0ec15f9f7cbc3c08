//! Decision sources, and decisions without the origin.

use crate::class::Class;
use crate::limit::Limit;
use crate::table::DecidingMeter;

/// The state that a decision rests on, from the best to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DecisionSource {
    /// The region's origin, which counts the usage of all regions: its grant, its last reply, or
    /// its decision.
    Global,
    /// The same for a limit of this region alone, or for the regional share while a peer counts as
    /// lost.
    Regional,
    /// The node's own memory: it has no origin, or spends its node share of the limit, by the
    /// configured or the observed number of nodes.
    Local,
    /// A meter that many keys share, because the table has no room for more.
    Overflow,
    /// A coarse meter that all requests of the tenant share: the limit fails open.
    Open,
    /// Nothing: there was no room even for the overflow meter, or too many limits apply to one
    /// request.
    Refused,
    /// Nothing: the limit fails closed by its class.
    Closed,
    /// Nothing: the server is overloaded.
    Shed,
}

impl From<DecidingMeter> for DecisionSource {
    fn from(meter: DecidingMeter) -> Self {
        match meter {
            DecidingMeter::Own => Self::Local,
            DecidingMeter::Overflow => Self::Overflow,
            DecidingMeter::Refused => Self::Refused,
        }
    }
}

impl DecisionSource {
    /// All sources.
    pub const ALL: [Self; 8] = [
        Self::Global,
        Self::Regional,
        Self::Local,
        Self::Overflow,
        Self::Open,
        Self::Refused,
        Self::Closed,
        Self::Shed,
    ];

    /// Returns the name in answers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Regional => "regional",
            Self::Local => "local",
            Self::Overflow => "overflow",
            Self::Open => "open",
            Self::Refused => "refused",
            Self::Closed => "closed",
            Self::Shed => "shed",
        }
    }
}

impl Class {
    /// The decision source of a limit without its origin. `paid` matters for [`Class::Cost`] only.
    pub const fn without_origin(self, paid: bool) -> DecisionSource {
        match self {
            Self::Comfort => DecisionSource::Local,
            Self::Cost if paid => DecisionSource::Open,
            Self::Cost | Self::Security => DecisionSource::Closed,
        }
    }
}

/// The state for a decision without the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FallbackState {
    /// How many processes share the limit, this one included.
    pub processes: u32,
    /// Units that were left of it, if a recent reply of the origin states them.
    pub remaining: Option<u64>,
}

/// A process's part of a limit by the source [`DecisionSource::Local`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeShare {
    /// The part.
    pub limit: Limit,
    /// Units of it that count as used: units that all nodes have used are not there for each of
    /// them to use again.
    pub spent: u64,
}

impl NodeShare {
    /// Returns the part of `limit` for one node in this state.
    pub fn new(limit: &Limit, state: FallbackState) -> Self {
        let FallbackState { processes, remaining } = state;
        let part = limit.part(processes);
        let remaining = remaining.map_or(u64::MAX, |remaining| remaining / u64::from(processes.max(1)));
        Self { limit: part, spent: u64::from(part.burst()).saturating_sub(remaining) }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn hundred() -> Limit {
        Limit::gcra(100, Duration::from_secs(1)).expect("in range")
    }

    fn alone(processes: u32, remaining: Option<u64>) -> (u32, u64) {
        let NodeShare { limit, spent } = NodeShare::new(&hundred(), FallbackState { processes, remaining });
        (limit.burst(), spent)
    }

    #[test]
    fn each_node_has_its_share_of_the_remaining_units() {
        assert_eq!(alone(4, None), (25, 0));
        assert_eq!(alone(4, Some(40)), (25, 15));
        assert_eq!(alone(4, Some(0)), (25, 25));
        assert_eq!(alone(1, Some(1_000)), (100, 0));
        assert_eq!(alone(1_000, Some(100)), (1, 1), "a share is not rounded up above the remaining units");
    }

    #[test]
    fn only_comfort_falls_back_to_local_and_only_paid_fails_open() {
        let rungs = Class::ALL.map(|class| [false, true].map(|paid| class.without_origin(paid)));
        assert_eq!(
            rungs,
            [
                [DecisionSource::Local, DecisionSource::Local],
                [DecisionSource::Closed, DecisionSource::Open],
                [DecisionSource::Closed, DecisionSource::Closed]
            ]
        );
    }
}
