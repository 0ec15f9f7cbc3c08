//! Mistakes that others have made, made on purpose: a checker that does not notice them checks nothing.

/// A known mistake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// A call whose fate is unknown is made anew instead of repeated: counted twice.
    RepeatIsNew,
    /// What a node used is lost when a call fails.
    DropsOnFailure,
    /// The origin writes grants off when its holders still spend them.
    ImpatientOrigin,
    /// The holder's time begins when the answer comes, not when the call was sent.
    HolderStartsLate,
    /// A grant whose holder was not heard of is handed to the next one, although it must count as used.
    ForgetsLapsed,
    /// A node that stops does not report what it used.
    StopsWithoutFlush,
    /// After a loss of data the origin begins as if nothing had been used.
    TrustsLostData,
    /// A late report is charged to the cell in which it comes.
    WrongCell,
    /// Answers are added to what is held, instead of replacing it.
    Deltas,
}

impl Bug {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::RepeatIsNew,
        Self::DropsOnFailure,
        Self::ImpatientOrigin,
        Self::HolderStartsLate,
        Self::ForgetsLapsed,
        Self::StopsWithoutFlush,
        Self::TrustsLostData,
        Self::WrongCell,
        Self::Deltas,
    ];
}
