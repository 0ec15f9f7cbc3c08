//! The cases: how many keys, how they are drawn, and the one limit that every contender enforces.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;

/// Exponent of the Zipf distribution, the usual one for the popularity of cached objects.
pub(crate) const ZIPF_EXPONENT: f64 = 0.99;

/// A named case of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Case {
    /// One key.
    #[value(name = "hot")]
    Hot,
    /// 1M keys, drawn uniformly.
    #[value(name = "uniform_1m")]
    Uniform1M,
    /// 10M keys, drawn from Zipf.
    #[value(name = "zipf_10m")]
    Zipf10M,
    /// 100M keys, drawn uniformly.
    #[value(name = "uniform_100m")]
    Uniform100M,
    /// 100M keys, drawn from Zipf.
    #[value(name = "zipf_100m")]
    Zipf100M,
    /// 100M keys in four scopes, drawn from Zipf, one key of each scope per request.
    #[value(name = "four_zipf_100m")]
    FourZipf100M,
}

impl Case {
    pub(crate) const fn workload(self) -> Workload {
        match self {
            Self::Hot => Workload::new("hot", 1, Draw::Uniform, HOT_QUOTA),
            Self::Uniform1M => Workload::new("uniform_1m", 1_000_000, Draw::Uniform, WIDE_QUOTA),
            Self::Zipf10M => Workload::new("zipf_10m", 10_000_000, Draw::Zipf, WIDE_QUOTA),
            Self::Uniform100M => Workload::new("uniform_100m", 100_000_000, Draw::Uniform, WIDE_QUOTA),
            Self::Zipf100M => Workload::new("zipf_100m", 100_000_000, Draw::Zipf, WIDE_QUOTA),
            Self::FourZipf100M => {
                let zipf = Workload::new("four_zipf_100m", 100_000_000, Draw::Zipf, WIDE_QUOTA);
                Workload { limits: 4, ..zipf }
            }
        }
    }
}

/// Low enough that every contender both allows and denies the one key.
const HOT_QUOTA: Quota = Quota { count: 1_000_000, seconds: 1 };

/// High enough that even the most popular key is allowed. The period is longer than a run: a store
/// that drops idle keys after one period would otherwise drop keys that must be live. The count
/// does not divide the period, so limiters that round have to round.
const WIDE_QUOTA: Quota = Quota { count: 35_999_993, seconds: 3600 };

/// How the keys of the sample stream are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Draw {
    Uniform,
    Zipf,
}

/// `count` checks per period, all of which may come at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) count: u32,
    pub(crate) seconds: u32,
}

impl Quota {
    pub(crate) fn period(self) -> Duration {
        Duration::from_secs(self.seconds.into())
    }

    /// Time in which one check is earned back.
    pub(crate) fn interval(self) -> Duration {
        self.period() / self.count
    }
}

impl fmt::Display for Quota {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} per {} s, all at once if unused", self.count, self.seconds)
    }
}

/// The load of a case.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workload {
    pub(crate) case: &'static str,
    pub(crate) keys: u64,
    /// Limits, and so keys, per request; the keys are split evenly between them.
    pub(crate) limits: usize,
    pub(crate) draw: Draw,
    pub(crate) quota: Quota,
}

impl Workload {
    const fn new(case: &'static str, keys: u64, draw: Draw, quota: Quota) -> Self {
        Self { case, keys, limits: 1, draw, quota }
    }

    /// Returns the number of keys of each limit of a request.
    pub(crate) fn keys_per_limit(&self) -> u64 {
        self.keys / self.limits as u64
    }

    /// The key number of a limit's key: the limits of a request have keys of their own.
    pub(crate) fn key(&self, limit: usize, key_of_limit: u64) -> u64 {
        limit as u64 * self.keys_per_limit() + key_of_limit
    }

    /// Returns the number of keys, in millions from a million on, for notes.
    pub(crate) fn keys_short(&self) -> String {
        if self.keys >= 1_000_000 { format!("{}M", self.keys / 1_000_000) } else { self.keys.to_string() }
    }
}
