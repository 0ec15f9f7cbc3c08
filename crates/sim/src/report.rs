//! The results of a world.

use std::fmt;

use crate::trace::Trace;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    pub(crate) promise: &'static str,
    pub(crate) words: String,
}

impl Violation {
    /// The promise that is broken, in a word or two.
    pub fn promise(&self) -> &'static str {
        self.promise
    }

    /// Whether the same promise is broken.
    pub fn is_like(&self, other: &Self) -> bool {
        self.promise == other.promise
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.words)
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

/// How far a limit was passed, and how far it may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Units that were admitted above the limit in all regions together, in the worst interval.
    pub excess: u64,
    /// Units that may be.
    pub allowed: u64,
}

impl Reach {
    /// Over-admission relative to the bound, in thousandths.
    pub fn milli(&self) -> u64 {
        self.excess * 1_000 / self.allowed.max(1)
    }
}

/// The results of a world.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// How long it lasted, for all regions together, µs.
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
    /// Requests that passed by a node share.
    pub alone: u64,
    /// The longest that one waited, µs.
    pub longest_wait_us: u64,
    /// Units admitted.
    pub admitted: u64,
    /// Units that one bucket for each key would have admitted.
    pub ideal: u64,
    /// The busiest key in steady load.
    pub steady: Steady,
    /// Calls, without repeats.
    pub calls: u64,
    /// Meter updates in all calls.
    pub updates: u64,
    /// Injected faults.
    pub faults: u64,
    /// Isolations of the region that became isolated most often.
    pub isolations: u64,
    /// Batches that were merged.
    pub batches: u64,
    /// Over-admission of the key that came closest to its bound.
    pub reach: Reach,
    /// Whether the world shows the long-run rate.
    pub is_rated: bool,
    /// Promises that were broken.
    pub violations: Vec<Violation>,
    /// The busiest key over time.
    pub curve: Curve,
    /// The trace of events.
    pub trace: Trace,
}
