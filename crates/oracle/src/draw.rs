//! Random limits and clocks: over the whole documented range, concentrated where bugs are likely.

use std::time::Duration;

use tidegate_core::{Algorithm, Limit};

use crate::difference::{Difference, caught};
use crate::exact::Exact;
use crate::history::Clock;
use crate::ranges::{DRAIN_US_MAX, PERIOD_US_MAX, Spec};
use crate::rng::Rng;

const COUNT_MAX: u64 = u32::MAX as u64;

/// Small, prime, round, and the largest: 4,294,967,291 is the largest prime of 32 bits.
const AMOUNTS: [u64; 20] = [
    1,
    1,
    2,
    3,
    5,
    7,
    10,
    60,
    97,
    100,
    1_000,
    1_009,
    7_919,
    10_000,
    65_537,
    1_000_000,
    1_000_003,
    2_147_483_647,
    4_294_967_291,
    COUNT_MAX,
];

/// Amounts and bursts that no limit may have.
const COUNTS_OUT_OF_RANGE: [u64; 4] = [1 << 32, 1 << 53, 1 << 63, u64::MAX];

/// Around the ends, round and prime.
const PERIODS_US: [u64; 20] = [
    1,
    2,
    3,
    7,
    10,
    97,
    1_000,
    1_009,
    999_983,
    1_000_000,
    1_000_003,
    10_000_000,
    60_000_000,
    3_600_000_000,
    3_600_000_011,
    86_400_000_000,
    30 * 86_400_000_000,
    PERIOD_US_MAX - 1,
    PERIOD_US_MAX,
    PERIOD_US_MAX,
];

/// Upper bound of histories on the monotonic line, in microseconds. Every probe of the highest
/// level (twice 3,660 days) then stays short of the line's end at 2^51 us.
pub(crate) const MONO_US_MAX: u64 = (1 << 51) - 1 - 2 * DRAIN_US_MAX - 2 * PERIOD_US_MAX;

/// A limit that can be built, after any number that rightly could not.
pub(crate) fn limit(rng: &mut Rng, algorithm: Algorithm) -> Result<(Spec, Limit), (Spec, Difference)> {
    loop {
        let spec = spec(rng, algorithm);
        if let Some(limit) = caught(|| spec.check()).map_err(|difference| (spec, difference))? {
            return Ok((spec, limit));
        }
    }
}

fn spec(rng: &mut Rng, algorithm: Algorithm) -> Spec {
    let (amount, period) = (amount(rng), period(rng));
    let burst = match algorithm {
        Algorithm::Gcra => burst(rng, amount, period),
        Algorithm::SlidingWindow => rng.one_in(64).then(|| rng.any_length(COUNT_MAX)),
    };
    Spec { algorithm, amount, period, burst }
}

fn amount(rng: &mut Rng) -> u64 {
    match rng.below(64) {
        0 => 0,
        1 => rng.pick(&COUNTS_OUT_OF_RANGE),
        2..=39 => rng.pick(&AMOUNTS),
        _ => rng.any_length(COUNT_MAX),
    }
}

fn period(rng: &mut Rng) -> Duration {
    match rng.below(64) {
        0 => rng.pick(&[
            Duration::ZERO,
            Duration::from_nanos(1),
            Duration::from_nanos(1_000_000_001),
            Duration::from_micros(PERIOD_US_MAX + 1),
            Duration::from_micros(PERIOD_US_MAX) + Duration::from_nanos(1),
            Duration::MAX,
        ]),
        1..=39 => Duration::from_micros(rng.pick(&PERIODS_US)),
        _ => Duration::from_micros(rng.any_length(PERIOD_US_MAX)),
    }
}

fn burst(rng: &mut Rng, amount: u64, period: Duration) -> Option<u64> {
    let most = largest_burst(amount, period);
    match rng.below(32) {
        0..=7 => None,
        8..=11 => Some(1),
        12..=13 => Some(2),
        14..=15 => Some(amount),
        16..=17 => Some(amount.saturating_mul(2).min(most)),
        18..=20 => Some(most),
        21 => Some(most + 1),
        22 => Some(rng.pick(&[0, COUNTS_OUT_OF_RANGE[0], COUNTS_OUT_OF_RANGE[3]])),
        23..=27 => Some(rng.any_length(most)),
        _ => Some(rng.any_length(1_000).min(most)),
    }
}

/// Returns the largest allowed burst: any for a limit of 0, which never drains.
fn largest_burst(amount: u64, period: Duration) -> u64 {
    if amount == 0 {
        return COUNT_MAX;
    }
    let period_us = u64::try_from(period.as_micros()).unwrap_or(u64::MAX).max(1);
    let most = (Exact::from(DRAIN_US_MAX) * Exact::from(amount)).floor_div(period_us.into());
    most.min(COUNT_MAX.into()).to_u64()
}

/// Clocks that start at 0, soon after, or anywhere; the wall clock often near the edge of a cell.
pub(crate) fn clock(rng: &mut Rng, period_us: u64) -> Clock {
    let mono_us = match rng.below(4) {
        0 => 0,
        1 => rng.any_length(period_us),
        _ => rng.any_length(MONO_US_MAX / 2),
    };
    let anywhere = if rng.one_in(8) { 0 } else { rng.any_length((1 << 51) - 1) };
    let edge_us = anywhere - anywhere % period_us;
    let wall_us = match rng.below(4) {
        0 => edge_us,
        1 => edge_us + period_us - 1,
        _ => anywhere,
    };
    Clock { mono_us, wall_us }
}
