//! A world for each seed.

mod one_region;
mod several_regions;

use std::time::Duration;

use fastrand::Rng;
use tidegate_core::{Limit, LimitError};

use crate::scenario::Scenario;

/// The kind of worlds that seeds draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Worlds {
    /// Of one region, with faults between nodes and origin.
    OneRegion,
    /// Of two to eight regions that count together, attacked, with faults between them.
    SeveralRegions,
}

/// How large the worlds of a sweep are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// About how long each lasts, µs.
    pub length_us: u64,
    /// About how many requests come in each; of an attacker, if there is one.
    pub requests: u64,
}

impl Worlds {
    /// The world of a seed.
    pub fn scenario(self, seed: u64, size: Size) -> Scenario {
        match self {
            Self::OneRegion => one_region::scenario_of(seed, size),
            Self::SeveralRegions => several_regions::scenario_of(seed, size),
        }
    }
}

fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(0..of.len())]
}

/// A GCRA limit.
pub(crate) fn bucket(amount: u64, period: Duration, burst: u64) -> Limit {
    in_range(Limit::gcra(amount, period).and_then(|limit| limit.with_burst(burst)))
}

fn window(amount: u64, period: Duration) -> Limit {
    in_range(Limit::sliding_window(amount, period))
}

/// Replaces a limit that is out of range, as for worlds of millions of requests per second.
fn in_range(limit: Result<Limit, LimitError>) -> Limit {
    limit
        .or_else(|_| Limit::gcra(1, Duration::from_secs(1)))
        .unwrap_or_else(|_| unreachable!("one per second"))
}
