//! Mistakes in what regions tell each other, made on purpose.

use std::fmt;

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegionBug {
    /// What other regions used is told as if it was the own.
    RepublishesForeign,
    /// What nodes hold and have not used is told.
    PublishesGrants,
    /// What is told is added to what is known, instead of taking its place where it is more.
    MergeAdds,
    /// A batch that comes twice is charged twice.
    ChargesRepeats,
    /// Of a component that is not known, all that was ever used is charged.
    ColdBySum,
    /// Where two regions are cut from each other, a third goes on as before.
    PairNotParted,
    /// No region that hears nobody falls back to its part.
    NeverParts,
    /// One of the regions never falls back to its part.
    OneNeverParts,
    /// A region counts on the whole as soon as it hears of all others, whatever they charged to their parts.
    SettlesAtOnce,
    /// One of the regions stays on its part for ever.
    NeverSettles,
    /// All of them do.
    NobodySettles,
    /// A region that hears nobody has all of the limit for its part.
    PartIsWhole,
    /// Everything is told at once, however little it is.
    NoThreshold,
    /// What is told depends on what has not drained, not on what has not been told.
    ThresholdOnLevel,
    /// After a cut, what was admitted of the standing part is charged to everyone.
    HealingChargesPart,
    /// Marks are dropped when they were read, not when all regions have answered to them.
    TrimsEarly,
    /// A batch is acknowledged before it is merged.
    AcknowledgesEarly,
    /// Sums that were lost go on under their old name.
    KeepsIncarnation,
    /// What is owed beyond the limit is forgotten at once.
    ForgivesAll,
    /// What is owed beyond the limit has no end, also where the limit forgives.
    ForgivesNothing,
    /// Origins forget meters before what was charged to them has drained.
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
