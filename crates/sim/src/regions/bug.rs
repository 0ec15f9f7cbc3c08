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
            Self::RepublishesForeign => "what other regions used is told as the own",
            Self::PublishesGrants => "grants are told as if they were used",
            Self::MergeAdds => "what is told is added, not merged by its maximum",
            Self::ChargesRepeats => "a batch that comes twice is charged twice",
            Self::ColdBySum => "a region that is new is charged with its whole past",
            Self::PairNotParted => "a third region does not notice that two are cut",
            Self::NeverParts => "regions that hear nobody go on as before",
            Self::OneNeverParts => "one region that hears nobody goes on as before",
            Self::SettlesAtOnce => "a region goes on before others have told what they charged to parts",
            Self::NeverSettles => "one region stays on its part for ever",
            Self::NobodySettles => "all regions stay on their parts for ever",
            Self::PartIsWhole => "a standing part is the whole limit",
            Self::NoThreshold => "everything is told, however little it is",
            Self::ThresholdOnLevel => "the threshold is on the level, not on what is untold",
            Self::HealingChargesPart => "after a cut the standing parts are charged",
            Self::TrimsEarly => "marks are dropped before all regions have answered",
            Self::AcknowledgesEarly => "a batch is acknowledged before it is merged",
            Self::KeepsIncarnation => "sums that were lost go on under their old name",
            Self::ForgivesAll => "what is owed beyond the limit is forgotten",
            Self::ForgivesNothing => "what is owed beyond the limit has no end",
            Self::ForgetsEarly => "origins forget what has not drained",
        })
    }
}
