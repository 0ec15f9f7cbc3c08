//! The results of a world of several regions.

use std::fmt;

use crate::trace::Trace;

/// A promise that was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RegionViolation {
    /// More was admitted in all regions together than the limit and its printed bound allow.
    Bound {
        /// Which key.
        key: usize,
        /// Units above the limit.
        excess: u64,
        /// Units that the bound allows.
        allowed: u64,
        /// When, µs after the world began.
        at_us: u64,
    },
    /// In the long run more was admitted than the limit allows, and a hundredth.
    Rate {
        /// Which key.
        key: usize,
        /// Units admitted.
        admitted: u64,
        /// Units that the limit allows in this time.
        limit: u64,
    },
    /// A component fell, or grew under a name that was given up.
    Fell {
        /// The region of the component.
        region: usize,
        /// Which key.
        key: usize,
        /// When.
        at_us: u64,
    },
    /// A region published more than it charged.
    Uncommitted {
        /// The publishing region.
        region: usize,
        /// Which key.
        key: usize,
        /// Units published.
        published: u64,
        /// Units charged there.
        committed: u64,
    },
    /// A merge charged another amount than the new usage.
    Import {
        /// The charging region.
        region: usize,
        /// Units charged.
        charged: u64,
        /// Units that were new.
        news: u64,
        /// When.
        at_us: u64,
    },
    /// A dirty meter was dropped before a peer had acknowledged it.
    Trimmed {
        /// The region of the dirty meter.
        region: usize,
        /// Which key.
        key: usize,
        /// When.
        at_us: u64,
    },
    /// A region did not know the usage of another one in time.
    Apart {
        /// The region that lacks the usage.
        region: usize,
        /// The region that published the usage.
        of: usize,
        /// Which key.
        key: usize,
        /// When.
        at_us: u64,
    },
    /// A region was not connected in time, or had not published the usage that it charged to its
    /// regional share.
    Unsettled {
        /// Which one.
        region: usize,
        /// Which key.
        key: usize,
        /// Whether it was connected.
        is_connected: bool,
        /// When.
        at_us: u64,
    },
    /// An origin expired a key that still counted.
    Forgot {
        /// Where.
        region: usize,
        /// Which key.
        key: usize,
        /// When.
        at_us: u64,
    },
    /// A region was connected while another one was isolated.
    Alone {
        /// The connected region.
        region: usize,
        /// Which one did not.
        other: usize,
        /// When.
        at_us: u64,
    },
    /// A user within the shares of all regions was locked out.
    LockedOut {
        /// Where.
        region: usize,
        /// Which key.
        key: usize,
        /// When it was denied, µs after the world began.
        at_us: u64,
        /// When it last passed.
        passed_us: u64,
    },
    /// A region published a key below the publish threshold, although no other region counts it.
    Chatty {
        /// The publishing region.
        region: usize,
        /// Which key.
        key: usize,
        /// Units published.
        published: u64,
        /// When.
        at_us: u64,
    },
    /// More was owed to other regions than a limit that forgives may owe.
    Owed {
        /// The region with the debt.
        region: usize,
        /// Which key.
        key: usize,
        /// Units that count.
        owed: u64,
        /// Units that may.
        most: u64,
        /// When.
        at_us: u64,
    },
    /// A key was denied for longer than its largest debt takes to drain.
    Debt {
        /// Where.
        region: usize,
        /// Which key.
        key: usize,
        /// When.
        at_us: u64,
    },
}

impl RegionViolation {
    /// Whether the same promise is broken.
    pub fn is_like(&self, other: &Self) -> bool {
        std::mem::discriminant(self) == std::mem::discriminant(other)
    }

    /// The promise that is broken, in a word.
    pub fn promise(&self) -> &'static str {
        match self {
            Self::Bound { .. } => "bound",
            Self::Rate { .. } => "rate",
            Self::Fell { .. } => "components",
            Self::Uncommitted { .. } => "published",
            Self::Import { .. } => "import",
            Self::Trimmed { .. } => "dirty meters",
            Self::Apart { .. } => "convergence",
            Self::Unsettled { .. } => "settling",
            Self::Forgot { .. } => "memory",
            Self::Alone { .. } => "isolation",
            Self::LockedOut { .. } => "ordinary",
            Self::Chatty { .. } => "threshold",
            Self::Owed { .. } => "cap",
            Self::Debt { .. } => "debt",
        }
    }
}

impl fmt::Display for RegionViolation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bound { key, excess, allowed, at_us } => write!(
                f,
                "key {key}: {excess} admitted above the limit at {at_us} us, the bound is {allowed}"
            ),
            Self::Rate { key, admitted, limit } => {
                write!(f, "key {key}: {admitted} admitted in the second half, where the limit is {limit}")
            }
            Self::Fell { region, key, at_us } => {
                write!(f, "region {region}, key {key}: a published component decreased at {at_us} us")
            }
            Self::Uncommitted { region, key, published, committed } => {
                write!(f, "region {region}, key {key}: {published} published and {committed} charged")
            }
            Self::Import { region, charged, news, at_us } => {
                write!(f, "region {region}: {charged} charged for components of {news} at {at_us} us")
            }
            Self::Trimmed { region, key, at_us } => {
                write!(f, "region {region}, key {key}: the dirty mark was dropped too early, at {at_us} us")
            }
            Self::Apart { region, of, key, at_us } => {
                write!(f, "region {region}, key {key}: usage of region {of} is incomplete at {at_us} us")
            }
            Self::Unsettled { region, key, is_connected: false, at_us } => {
                write!(f, "region {region}, key {key}: still isolated at {at_us} us")
            }
            Self::Unsettled { region, key, is_connected: true, at_us } => {
                write!(f, "region {region}, key {key}: share usage is not fully published at {at_us} us")
            }
            Self::Forgot { region, key, at_us } => {
                write!(f, "region {region}, key {key}: forgotten at {at_us} us, with undrained usage")
            }
            Self::Alone { region, other, at_us } => {
                write!(f, "region {region}: connected at {at_us} us, while region {other} is isolated")
            }
            Self::LockedOut { region, key, at_us, passed_us } => {
                write!(f, "region {region}, key {key}: denied at {at_us} us, and since {passed_us} us")
            }
            Self::Chatty { region, key, published, at_us } => {
                write!(
                    f,
                    "region {region}, key {key}: {published} published at {at_us} us, below the threshold"
                )
            }
            Self::Owed { region, key, owed, most, at_us } => {
                write!(f, "region {region}, key {key}: {owed} owed at {at_us} us, the maximum is {most}")
            }
            Self::Debt { region, key, at_us } => {
                write!(
                    f,
                    "region {region}, key {key}: denied at {at_us} us, longer than the largest debt drains"
                )
            }
        }
    }
}

/// How far a limit was passed, and how far it may be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reach {
    /// Units that were admitted above the limit in all regions together, in the worst interval.
    pub excess: u64,
    /// Units that may be, as it is printed.
    pub allowed: u64,
}

impl Reach {
    /// Over-admission relative to the printed bound, in thousandths.
    pub fn milli(&self) -> u64 {
        self.excess * 1_000 / self.allowed.max(1)
    }
}

/// The results of a world of several regions.
#[derive(Clone, Debug)]
pub struct RegionReport {
    /// The seed.
    pub seed: u64,
    /// How long it lasted, for all regions together, µs.
    pub simulated_us: u64,
    /// Requests.
    pub requests: u64,
    /// Requests that passed.
    pub passed: u64,
    /// Injected faults.
    pub faults: u64,
    /// Isolations of the region that became isolated most often.
    pub isolations: u64,
    /// Batches that were merged.
    pub batches: u64,
    /// Over-admission of the key that came closest to its printed bound.
    pub reach: Reach,
    /// Whether the world shows the long-run rate.
    pub is_rated: bool,
    /// Promises that were broken.
    pub violations: Vec<RegionViolation>,
    /// The trace of events.
    pub trace: Trace,
}
