//! Mistakes of other systems, made on purpose. A checker that does not notice them checks nothing.

use std::fmt;

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A call with an unknown outcome is sent as a new call instead of being repeated.
    RepeatIsNew,
    /// A node's usage is lost when its call is sent again.
    DropsOnFailure,
    /// Reports that do not fit into a queue are dropped.
    DropsWhenFull,
    /// The origin writes grants off that their holders still spend.
    ImpatientOrigin,
    /// The life of a grant begins at the node when the reply arrives, not when the call was sent.
    HolderStartsLate,
    /// A lapsed grant goes to the next node, although it must count as used.
    ForgetsLapsed,
    /// The giver makes a grant smaller while its holder spends it.
    GiverShrinks,
    /// A grant outlives its window, so its usage is charged to a window that is over.
    OutlivesWindow,
    /// A node that stops does not report its usage.
    StopsWithoutFlush,
    /// After lost writes the origin starts as if there had been no usage.
    TrustsLostData,
    /// A node adds the grant of a reply to its own instead of replacing it.
    Deltas,
    /// A reply hides the usage that occurred while it was in flight.
    AnswerHidesUse,
    /// A node takes the reply to an earlier call for the reply to the call in flight.
    TakesAnyAnswer,
    /// All requests of a check group pass if one does.
    OneForAll,
    /// A request under several limits is decided and charged by one of them.
    DecidesByHalf,
    /// A request is charged the cost of its first limit under all of its limits.
    OneCostForAll,
    /// Of many requests for one cold key, each makes a call of its own.
    EveryoneAsks,
    /// A request waits until the origin replies, however long that takes.
    HangsWithStore,
    /// A request without a reply of the origin passes.
    FailsOpen,
    /// After its clock was set back, the origin stands still until the clock reaches the old
    /// reading again.
    TimeStandsStill,
    /// A limit that begins to count in another way has another slot at a node, and the same meter
    /// at the origin.
    SlotOfLimit,
    /// Usage charged without a check is reported as spent from a grant.
    OwedIsUsed,
    /// The origin keeps the old limit if the new version allows less.
    IgnoresLowerLimit,
    /// A late report of a lapsed grant that counts as used is charged again.
    ChargesWrittenOff,
    /// A node without its origin spends the full limit instead of its node share.
    WholeLimitAlone,
    /// A node does not report the usage that it admitted without the origin.
    AloneUntold,
    /// The origin expires meters before their charges have drained.
    ForgetsEarly,
    /// The origin divides the room equally between nodes, regardless of their demand.
    DividesEqually,
    /// A node takes an origin that granted less than the node wants for exhausted.
    ExhaustedTooEarly,
    /// A node spends the room that is left for all nodes, in addition to its grant.
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
    /// Whether it is a mistake in how room is divided: such a mistake shows where many nodes share
    /// a busy key.
    pub(crate) fn is_of_division(self) -> bool {
        matches!(self, Self::DividesEqually | Self::ExhaustedTooEarly)
    }
}

impl fmt::Display for Bug {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RepeatIsNew => "a repeated call counts as a new one",
            Self::DropsOnFailure => "usage is lost when a call is repeated",
            Self::DropsWhenFull => "usage is dropped when a queue is full",
            Self::ImpatientOrigin => "the origin forgets grants that nodes still spend",
            Self::HolderStartsLate => "a node counts the life of a grant from the reply",
            Self::ForgetsLapsed => "a lapsed grant does not count as used",
            Self::GiverShrinks => "the origin shrinks a grant",
            Self::OutlivesWindow => "a grant outlives its window",
            Self::StopsWithoutFlush => "a node stops without a report",
            Self::TrustsLostData => "an origin that lost writes trusts its data",
            Self::Deltas => "a reply is added to the grant",
            Self::AnswerHidesUse => "a reply hides usage since the report",
            Self::TakesAnyAnswer => "an old reply is taken for the present one",
            Self::OneForAll => "one decision admits all waiting checks",
            Self::DecidesByHalf => "one of several limits decides",
            Self::OneCostForAll => "a request costs the same under all of its limits",
            Self::EveryoneAsks => "each of many cold requests makes a call",
            Self::HangsWithStore => "requests wait for a stalled store",
            Self::FailsOpen => "a check without a reply passes",
            Self::TimeStandsStill => "a clock that was set back does not advance",
            Self::SlotOfLimit => "a changed limit has another slot at a node",
            Self::OwedIsUsed => "owed units are reported as spent from a grant",
            Self::IgnoresLowerLimit => "a limit that becomes lower is ignored",
            Self::ChargesWrittenOff => "written-off usage is charged again when it is reported",
            Self::WholeLimitAlone => "a node without the origin spends the whole limit",
            Self::AloneUntold => "usage without the origin is never reported",
            Self::ForgetsEarly => "the origin forgets undrained usage",
            Self::DividesEqually => "free units are divided equally, regardless of demand",
            Self::ExhaustedTooEarly => "a grant below the requested amount counts as exhausted",
            Self::RoomCountedTwice => "a node spends free units besides its grant",
        })
    }
}
