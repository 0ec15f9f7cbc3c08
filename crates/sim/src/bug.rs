//! Mistakes that others have made, made on purpose: a checker that does not notice them checks nothing.

use std::fmt;

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A call whose fate is unknown is made anew instead of repeated.
    RepeatIsNew,
    /// What a node used is lost when its call has to be sent again.
    DropsOnFailure,
    /// What does not fit into a queue is dropped.
    DropsWhenFull,
    /// The origin writes grants off that their holders still spend.
    ImpatientOrigin,
    /// The holder's time begins when the answer comes, not when the call was sent.
    HolderStartsLate,
    /// A grant whose holder was not heard of is handed to the next one, although it must count as used.
    ForgetsLapsed,
    /// The giver makes a grant smaller while its holder spends it.
    GiverShrinks,
    /// A grant outlives its window: what is spent of it is charged to a window that is over.
    OutlivesWindow,
    /// A node that stops does not report what it used.
    StopsWithoutFlush,
    /// After a loss of data the origin begins as if nothing had been used.
    TrustsLostData,
    /// Answers are added to what is held, instead of replacing it.
    Deltas,
    /// An answer hides what was used while it was on its way.
    AnswerHidesUse,
    /// A node takes the answer to an earlier call for that to the one under way.
    TakesAnyAnswer,
    /// Requests that were asked as one all pass if one does.
    OneForAll,
    /// A request under several limits is decided and charged by one of them.
    DecidesByHalf,
    /// A request is charged under each of its limits what it costs under the first.
    OneCostForAll,
    /// Of many requests for one cold key, each makes a call of its own.
    EveryoneAsks,
    /// A request waits for as long as the origin does not answer.
    HangsWithStore,
    /// What the origin does not answer passes.
    FailsOpen,
    /// An origin whose clock was set back waits until it has come by again.
    TimeStandsStill,
    /// A limit that begins to count in another way has another slot at a node, and the same meter at the origin.
    SlotOfLimit,
    /// What was charged without being asked about is reported as spent of a grant.
    OwedIsUsed,
    /// The origin goes on by the limit that was, where a new version of it allows less.
    IgnoresLowerLimit,
    /// What is reported of a grant that was written off, and counts as used, is charged once more.
    ChargesWrittenOff,
    /// A node that is left alone goes on with the whole limit.
    WholeLimitAlone,
    /// What a node let pass alone is told to nobody.
    AloneUntold,
    /// The origin forgets meters before what was charged to them has drained.
    ForgetsEarly,
    /// The origin divides the room equally between nodes, whatever their demand.
    DividesEqually,
    /// A node takes an origin that granted less than the node wants for exhausted.
    ExhaustedTooEarly,
    /// A node takes what is left for all nodes for granted, beside its grant.
    RoomCountedTwice,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 30] = [
        Self::RepeatIsNew,
        Self::DropsOnFailure,
        Self::DropsWhenFull,
        Self::ImpatientOrigin,
        Self::HolderStartsLate,
        Self::ForgetsLapsed,
        Self::GiverShrinks,
        Self::OutlivesWindow,
        Self::StopsWithoutFlush,
        Self::TrustsLostData,
        Self::Deltas,
        Self::AnswerHidesUse,
        Self::TakesAnyAnswer,
        Self::OneForAll,
        Self::DecidesByHalf,
        Self::OneCostForAll,
        Self::EveryoneAsks,
        Self::HangsWithStore,
        Self::FailsOpen,
        Self::TimeStandsStill,
        Self::SlotOfLimit,
        Self::OwedIsUsed,
        Self::IgnoresLowerLimit,
        Self::ChargesWrittenOff,
        Self::WholeLimitAlone,
        Self::AloneUntold,
        Self::ForgetsEarly,
        Self::DividesEqually,
        Self::ExhaustedTooEarly,
        Self::RoomCountedTwice,
    ];
}

impl Bug {
    /// Whether it is a mistake in how room is divided: such a mistake shows where many nodes share a busy key.
    pub(crate) fn is_of_division(self) -> bool {
        matches!(self, Self::DividesEqually | Self::ExhaustedTooEarly)
    }
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RepeatIsNew => "a repeated call counts as a new one",
            Self::DropsOnFailure => "use is lost when a call is sent again",
            Self::DropsWhenFull => "what does not fit into a queue is dropped",
            Self::ImpatientOrigin => "the origin forgets grants that are still spent",
            Self::HolderStartsLate => "the holder's time begins with the answer",
            Self::ForgetsLapsed => "a lapsed grant does not count as used",
            Self::GiverShrinks => "the giver makes a grant smaller",
            Self::OutlivesWindow => "a grant outlives its window",
            Self::StopsWithoutFlush => "a node stops without a report",
            Self::TrustsLostData => "an origin that lost writes trusts what it has",
            Self::Deltas => "answers are added to what is held",
            Self::AnswerHidesUse => "an answer hides what was used meanwhile",
            Self::TakesAnyAnswer => "an old answer is taken for the present one",
            Self::OneForAll => "one decision lets all who asked pass",
            Self::DecidesByHalf => "one of several limits decides",
            Self::OneCostForAll => "a request costs the same under all of its limits",
            Self::EveryoneAsks => "each of many cold requests makes a call",
            Self::HangsWithStore => "requests hang with the store",
            Self::FailsOpen => "what is not answered passes",
            Self::TimeStandsStill => "a clock set back stands still",
            Self::SlotOfLimit => "a changed limit has another slot at a node",
            Self::OwedIsUsed => "what is owed is reported as spent of a grant",
            Self::IgnoresLowerLimit => "a limit that becomes lower is ignored",
            Self::ChargesWrittenOff => "what was written off is charged again when it is reported",
            Self::WholeLimitAlone => "a node alone goes on with the whole limit",
            Self::AloneUntold => "what passed alone is told to nobody",
            Self::ForgetsEarly => "the origin forgets what has not drained",
            Self::DividesEqually => "room is divided equally, whatever the demand",
            Self::ExhaustedTooEarly => "a grant below its want counts as exhausted",
            Self::RoomCountedTwice => "a node spends the room beside its grant",
        })
    }
}
