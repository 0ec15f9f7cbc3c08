//! Mistakes of other systems, made on purpose. A checker that does not notice them checks nothing.

use std::fmt;

use crate::swarm::Worlds;

macro_rules! bugs {
    (
        $(#[$meta:meta])*
        $visibility:vis enum $Bug:ident {
            $($(#[$doc:meta])* $variant:ident: $($worlds:ident)|+ => $text:literal,)*
        }
    ) => {
        $(#[$meta])*
        $visibility enum $Bug {
            $($(#[$doc])* $variant,)*
        }

        impl $Bug {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$variant,)*];

            /// The worlds that have to notice it.
            pub fn worlds(self) -> &'static [Worlds] {
                match self {
                    $(Self::$variant => &[$(Worlds::$worlds),+],)*
                }
            }
        }

        impl fmt::Display for $Bug {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $text,)*
                })
            }
        }
    };
}

bugs! {
    /// A known mistake.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Bug {
        /// A call with an unknown outcome is sent as a new call instead of being repeated.
        RepeatIsNew: OneRegion => "a repeated call counts as a new one",
        /// A node's usage is lost when its call is sent again.
        DropsOnFailure: OneRegion => "usage is lost when a call is repeated",
        /// Reports that do not fit into a queue are dropped.
        DropsWhenFull: OneRegion => "usage is dropped when a queue is full",
        /// The origin writes grants off that their holders still spend.
        ImpatientOrigin: OneRegion => "the origin forgets grants that nodes still spend",
        /// The life of a grant begins at the node when the reply arrives, not when the call was
        /// sent.
        HolderStartsLate: OneRegion => "a node counts the life of a grant from the reply",
        /// A lapsed grant goes to the next node, although it must count as used.
        ForgetsLapsed: OneRegion => "a lapsed grant does not count as used",
        /// The giver makes a grant smaller while its holder spends it.
        GiverShrinks: OneRegion => "the origin shrinks a grant",
        /// A grant outlives its window, so its usage is charged to a window that is over.
        OutlivesWindow: OneRegion => "a grant outlives its window",
        /// A node that stops does not report its usage.
        StopsWithoutFlush: OneRegion => "a node stops without a report",
        /// After lost writes the origin starts as if there had been no usage.
        TrustsLostData: OneRegion => "an origin that lost writes trusts its data",
        /// A node adds the grant of a reply to its own instead of replacing it.
        Deltas: OneRegion => "a reply is added to the grant",
        /// A reply hides the usage that occurred while it was in flight.
        AnswerHidesUse: OneRegion => "a reply hides usage since the report",
        /// A node takes the reply to an earlier call for the reply to the call in flight.
        TakesAnyAnswer: OneRegion => "an old reply is taken for the present one",
        /// All requests of a check group pass if one does.
        OneForAll: OneRegion => "one decision admits all waiting checks",
        /// A request under several limits is decided and charged by one of them.
        DecidesByHalf: OneRegion => "one of several limits decides",
        /// A request is charged the cost of its first limit under all of its limits.
        OneCostForAll: OneRegion => "a request costs the same under all of its limits",
        /// Of many requests for one cold key, each makes a call of its own.
        EveryoneAsks: OneRegion => "each of many cold requests makes a call",
        /// A request waits until the origin replies, however long that takes.
        HangsWithStore: OneRegion => "requests wait for a stalled store",
        /// A request without a reply of the origin passes.
        FailsOpen: OneRegion => "a check without a reply passes",
        /// After its clock was set back, the origin stands still until the clock reaches the old
        /// reading again.
        TimeStandsStill: OneRegion => "a clock that was set back does not advance",
        /// A limit that begins to count in another way has another slot at a node, and the same
        /// meter at the origin.
        SlotOfLimit: OneRegion => "a changed limit has another slot at a node",
        /// Usage charged without a check is reported as spent from a grant.
        OwedIsUsed: OneRegion => "owed units are reported as spent from a grant",
        /// The origin keeps the old limit if the new version allows less.
        IgnoresLowerLimit: OneRegion => "a limit that becomes lower is ignored",
        /// A late report of a lapsed grant that counts as used is charged again.
        ChargesWrittenOff: OneRegion => "written-off usage is charged again when it is reported",
        /// A node without its origin spends the full limit instead of its node share.
        WholeLimitAlone: OneRegion => "a node without the origin spends the whole limit",
        /// A node does not report the usage that it admitted without the origin.
        AloneUntold: OneRegion => "usage without the origin is never reported",
        /// The origin expires meters before their charges have drained.
        ForgetsEarly: OneRegion | SeveralRegions => "the origin forgets undrained usage",
        /// The origin divides the room equally between nodes, regardless of their demand.
        DividesEqually: OneRegion => "free units are divided equally, regardless of demand",
        /// A node takes an origin that granted less than the node wants for exhausted.
        ExhaustedTooEarly: OneRegion => "a grant below the requested amount counts as exhausted",
        /// A node spends the room that is left for all nodes, in addition to its grant.
        RoomCountedTwice: OneRegion => "a node spends free units besides its grant",
        /// A region publishes the usage of peers as its own.
        RepublishesForeign: SeveralRegions => "usage of peers is published as own usage",
        /// A region publishes unspent grants as usage.
        PublishesGrants: SeveralRegions => "grants are published as usage",
        /// A component is added to the known one instead of merged by maximum.
        MergeAdds: SeveralRegions => "components are added, not merged by their maximum",
        /// A batch that arrives twice is charged twice.
        ChargesRepeats: SeveralRegions => "a repeated batch is charged twice",
        /// Of a component that is not known, all that was ever used is charged.
        ColdBySum: SeveralRegions => "a new component is charged with its whole past usage",
        /// A third region stays connected when two regions lose each other.
        PairNotParted: SeveralRegions => "a third region does not notice a partition of two others",
        /// No region becomes isolated when it hears no peer.
        NeverParts: SeveralRegions => "regions that hear no peer stay connected",
        /// One of the regions never falls back to its part.
        OneNeverParts: SeveralRegions => "one region that hears no peer stays connected",
        /// A region becomes connected as soon as it hears all peers, before their usage while
        /// isolated has arrived.
        SettlesAtOnce: SeveralRegions => "a region is connected before peers have published their share usage",
        /// One of the regions stays on its regional share forever.
        NeverSettles: SeveralRegions => "one region stays isolated for ever",
        /// All of them do.
        NobodySettles: SeveralRegions => "all regions stay isolated for ever",
        /// The regional share of an isolated region is the full limit.
        PartIsWhole: SeveralRegions => "a regional share is the whole limit",
        /// Regions publish all usage at once, below the publish threshold too.
        NoThreshold: SeveralRegions => "components below the threshold are published",
        /// The publish threshold is compared with the level, not with the unpublished usage.
        ThresholdOnLevel: SeveralRegions => "the threshold applies to the level, not to unpublished usage",
        /// After a cut, the units that were admitted from a regional share are charged to all
        /// regions.
        HealingChargesPart: SeveralRegions => "after a partition the regional shares are charged",
        /// Dirty meters are dropped when a round has read them, not when all peers have
        /// acknowledged them.
        TrimsEarly: SeveralRegions => "dirty marks are dropped before all peers have acknowledged",
        /// A batch is acknowledged before it is merged.
        AcknowledgesEarly: SeveralRegions => "a batch is acknowledged before it is merged",
        /// Sums that were lost go on under their old name.
        KeepsIncarnation: SeveralRegions => "lost totals continue under their old incarnation",
        /// Debt beyond the limit is dropped at once.
        ForgivesAll: SeveralRegions => "debt beyond the limit is forgotten",
        /// Debt beyond the limit has no maximum, even if the limit forgives.
        ForgivesNothing: SeveralRegions => "debt beyond the limit is unbounded",
    }
}

impl Bug {
    /// Whether it is a mistake in how room is divided: such a mistake shows where many nodes share
    /// a busy key.
    pub(crate) fn is_of_division(self) -> bool {
        matches!(self, Self::DividesEqually | Self::ExhaustedTooEarly)
    }
}
