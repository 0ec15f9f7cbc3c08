//! The results of a world.

use std::fmt;

use crate::trace::Trace;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Violation {
    /// More was admitted than the limit and its surplus allow.
    Bound {
        /// Which key.
        key: usize,
        /// Units above the limit.
        excess: u64,
        /// Units that its surplus allows.
        allowed: u64,
        /// When, µs after the world began.
        at_us: u64,
    },
    /// The charges at the origin do not match the admissions.
    Conservation {
        /// Which key.
        key: usize,
        /// Units admitted.
        admitted: u64,
        /// Units charged at the origin, less those given back.
        charged: u64,
        /// How many fewer may be charged than admitted.
        fewer: u64,
        /// How many more may be charged than admitted.
        more: u64,
    },
    /// The origin expired a meter that still counted.
    Forgot {
        /// Which meter.
        key: usize,
        /// When, µs after the world began.
        at_us: u64,
    },
    /// A node that was left alone let pass more than its part.
    Part {
        /// Which meter.
        key: usize,
        /// Units above its part.
        excess: u64,
    },
    /// The origin held more than the limit when it made a grant.
    Overcommitted {
        /// Which key.
        key: usize,
    },
    /// Less was admitted than a region without faults should.
    Starved {
        /// Units admitted.
        admitted: u64,
        /// Units that one bucket would have admitted.
        ideal: u64,
    },
    /// Requests were denied that one bucket would have admitted, in a world without faults.
    FalseDenials {
        /// Units requested.
        offered: u64,
        /// Units denied.
        denied: u64,
    },
    /// Requests waited for the origin although it could have granted their nodes enough.
    Waits {
        /// Requests.
        requests: u64,
        /// Requests that waited.
        waited: u64,
    },
    /// A request under several limits was charged to some of them only.
    Torn {
        /// Which meter.
        key: usize,
    },
    /// A node had more than one call in flight in a session.
    Stampede {
        /// Which node.
        node: usize,
    },
    /// A request waited longer than the deadline.
    Late {
        /// How long it waited.
        waited_us: u64,
        /// How long it might.
        most_us: u64,
    },
    /// A key was denied for long although one bucket would have let it pass.
    LockedOut {
        /// Which key.
        key: usize,
        /// When it was denied, µs after the world began.
        at_us: u64,
        /// Since when one bucket would have been as good as new.
        since_us: u64,
    },
    /// The origin did not answer a request although no fault was active.
    Unheard {
        /// Which key.
        key: usize,
        /// When it was given up, µs after the world began.
        at_us: u64,
        /// Time of the last fault, µs.
        since_us: u64,
    },
    /// A request was never answered.
    Forgotten {
        /// How many.
        requests: u64,
    },
}

impl Violation {
    /// Whether the same promise is broken.
    pub fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// The promise that is broken, in a word.
    pub fn promise(&self) -> &'static str {
        match self {
            Self::Bound { .. } => "bound",
            Self::Conservation { .. } => "conservation",
            Self::Forgot { .. } => "memory",
            Self::Part { .. } => "node share",
            Self::Overcommitted { .. } => "invariant",
            Self::Starved { .. } => "share",
            Self::FalseDenials { .. } => "false denials",
            Self::Waits { .. } => "local decisions",
            Self::Torn { .. } => "atomicity",
            Self::Stampede { .. } => "one call",
            Self::Late { .. } => "deadline",
            Self::LockedOut { .. } => "lock-out",
            Self::Unheard { .. } => "reachability",
            Self::Forgotten { .. } => "answers",
        }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bound { key, excess, allowed, at_us } => {
                write!(
                    f,
                    "key {key}: {excess} admitted above the limit at {at_us} us, the bound is {allowed}"
                )
            }
            Self::Conservation { key, admitted, charged, fewer, more } => {
                write!(
                    f,
                    "key {key}: {admitted} admitted and {charged} charged; allowed difference: {fewer} fewer \
                     to {more} more"
                )
            }
            Self::Forgot { key, at_us } => {
                write!(f, "key {key}: forgotten at {at_us} us, with undrained usage")
            }
            Self::Part { key, excess } => {
                write!(f, "key {key}: a node without the origin admitted {excess} more than its node share")
            }
            Self::Overcommitted { key } => write!(f, "key {key}: granted more than the free units"),
            Self::Starved { admitted, ideal } => {
                write!(f, "{admitted} admitted, where one bucket would have admitted {ideal}")
            }
            Self::FalseDenials { offered, denied } => {
                write!(f, "{denied} of {offered} denied, where one bucket would have admitted all")
            }
            Self::Waits { requests, waited } => {
                write!(f, "{waited} of {requests} waited for the origin at half of the limit or less")
            }
            Self::Torn { key } => write!(f, "key {key}: charged to some of its limits only"),
            Self::Stampede { node } => write!(f, "node {node}: more than one call in flight in a session"),
            Self::Late { waited_us, most_us } => {
                write!(f, "a request waited {waited_us} us, the maximum is {most_us} us")
            }
            Self::LockedOut { key, at_us, since_us } => {
                write!(f, "key {key}: denied at {at_us} us, although it owed nothing since {since_us} us")
            }
            Self::Unheard { key, at_us, since_us } => {
                write!(
                    f,
                    "key {key}: no reply at {at_us} us, although no fault was active since {since_us} us"
                )
            }
            Self::Forgotten { requests } => write!(f, "{requests} requests were never answered"),
        }
    }
}

/// The busiest key from [`Scenario::steady_from_us`](crate::Scenario::steady_from_us) on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Steady {
    /// Requests.
    pub requests: u64,
    /// Units requested.
    pub offered: u64,
    /// Units admitted.
    pub admitted: u64,
    /// Units that one bucket would have admitted.
    pub ideal: u64,
    /// Requests denied while more than 3 % of the limit was free, counted where
    /// [`Scenario::keeps_refusals`](crate::Scenario::keeps_refusals) is set.
    pub false_denials: u64,
}

/// The admissions of a key over time.
#[derive(Clone, Debug)]
pub struct Curve {
    /// Time of each admission, µs after the world began, and the units that counted against the
    /// limit then.
    pub points: Vec<(u64, u64)>,
    /// Units that the limit and its tolerance allow.
    pub limit: u64,
    /// Units that may be admitted above that after the faults of the world.
    pub surplus: u64,
}

/// The results of a world.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// How long it lasted.
    pub simulated_us: u64,
    /// Requests.
    pub requests: u64,
    /// Requests that passed.
    pub passed: u64,
    /// Requests that passed before the first denial, if there was one.
    pub passed_before_denial: Option<u64>,
    /// Requests that waited for the origin.
    pub waited: u64,
    /// Requests that the origin did not answer in time.
    pub unanswered: u64,
    /// Requests among those that passed by their node's part of the limit.
    pub alone: u64,
    /// The longest that one waited, µs.
    pub longest_wait_us: u64,
    /// Units admitted.
    pub admitted: u64,
    /// Units that one bucket for each key would have admitted.
    pub ideal: u64,
    /// The busiest key in steady load.
    pub steady: Steady,
    /// Calls, repeats not counted, and meters spoken of in them.
    pub calls: u64,
    /// Meters spoken of in all calls.
    pub updates: u64,
    /// Injected faults.
    pub faults: u64,
    /// Promises that were broken.
    pub violations: Vec<Violation>,
    /// The busiest key over time.
    pub curve: Curve,
    /// The trace of events.
    pub trace: Trace,
}
