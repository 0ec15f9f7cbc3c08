//! Mistakes in replication, made on purpose.

use std::fmt;

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionBug {
    /// A region publishes the usage of peers as its own.
    RepublishesForeign,
    /// A region publishes unspent grants as usage.
    PublishesGrants,
    /// A component is added to the known one instead of merged by maximum.
    MergeAdds,
    /// A batch that arrives twice is charged twice.
    ChargesRepeats,
    /// Of a component that is not known, all that was ever used is charged.
    ColdBySum,
    /// A third region stays connected when two regions lose each other.
    PairNotParted,
    /// No region becomes isolated when it hears no peer.
    NeverParts,
    /// One of the regions never falls back to its part.
    OneNeverParts,
    /// A region becomes connected as soon as it hears all peers, before their usage while isolated
    /// has arrived.
    SettlesAtOnce,
    /// One of the regions stays on its regional share forever.
    NeverSettles,
    /// All of them do.
    NobodySettles,
    /// The regional share of an isolated region is the full limit.
    PartIsWhole,
    /// Regions publish all usage at once, below the publish threshold too.
    NoThreshold,
    /// The publish threshold is compared with the level, not with the unpublished usage.
    ThresholdOnLevel,
    /// After a cut, the units that were admitted from a regional share are charged to all regions.
    HealingChargesPart,
    /// Dirty meters are dropped when a round has read them, not when all peers have acknowledged
    /// them.
    TrimsEarly,
    /// A batch is acknowledged before it is merged.
    AcknowledgesEarly,
    /// Sums that were lost go on under their old name.
    KeepsIncarnation,
    /// Debt beyond the limit is dropped at once.
    ForgivesAll,
    /// Debt beyond the limit has no maximum, even if the limit forgives.
    ForgivesNothing,
    /// Origins expire meters before their charges have drained.
    ForgetsEarly,
}

impl RegionBug {
    /// All of them.
    pub const ALL: [Self; 21] = [
        Self::RepublishesForeign,
        Self::PublishesGrants,
        Self::MergeAdds,
        Self::ChargesRepeats,
        Self::ColdBySum,
        Self::PairNotParted,
        Self::NeverParts,
        Self::OneNeverParts,
        Self::SettlesAtOnce,
        Self::NeverSettles,
        Self::NobodySettles,
        Self::PartIsWhole,
        Self::NoThreshold,
        Self::ThresholdOnLevel,
        Self::HealingChargesPart,
        Self::TrimsEarly,
        Self::AcknowledgesEarly,
        Self::KeepsIncarnation,
        Self::ForgivesAll,
        Self::ForgivesNothing,
        Self::ForgetsEarly,
    ];
}

impl fmt::Display for RegionBug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RepublishesForeign => "usage of peers is published as own usage",
            Self::PublishesGrants => "grants are published as usage",
            Self::MergeAdds => "components are added, not merged by their maximum",
            Self::ChargesRepeats => "a repeated batch is charged twice",
            Self::ColdBySum => "a new component is charged with its whole past usage",
            Self::PairNotParted => "a third region does not notice a partition of two others",
            Self::NeverParts => "regions that hear no peer stay connected",
            Self::OneNeverParts => "one region that hears no peer stays connected",
            Self::SettlesAtOnce => "a region is connected before peers have published their share usage",
            Self::NeverSettles => "one region stays isolated for ever",
            Self::NobodySettles => "all regions stay isolated for ever",
            Self::PartIsWhole => "a regional share is the whole limit",
            Self::NoThreshold => "components below the threshold are published",
            Self::ThresholdOnLevel => "the threshold applies to the level, not to unpublished usage",
            Self::HealingChargesPart => "after a partition the regional shares are charged",
            Self::TrimsEarly => "dirty marks are dropped before all peers have acknowledged",
            Self::AcknowledgesEarly => "a batch is acknowledged before it is merged",
            Self::KeepsIncarnation => "lost totals continue under their old incarnation",
            Self::ForgivesAll => "debt beyond the limit is forgotten",
            Self::ForgivesNothing => "debt beyond the limit is unbounded",
            Self::ForgetsEarly => "origins forget undrained usage",
        })
    }
}
