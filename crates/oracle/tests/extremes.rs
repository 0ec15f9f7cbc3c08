//! Extremes that random histories seldom draw: costs past 32 bits, and a limit of 0 with the
//! largest burst.

#![expect(clippy::unwrap_used, reason = "a helper of tests may panic as a test may")]

use std::time::Duration;

use tidegate_core::{Limit, Meter, Now};

const NOW: Now = Now::from_micros(0, 0);

/// A million units per microsecond: 2^32 of them drain in 4,295 us.
fn fast() -> (Limit, Meter) {
    let limit = Limit::gcra(1_000_000, Duration::from_micros(1)).unwrap();
    (limit, Meter::empty(&limit))
}

#[test]
fn a_charge_of_2_to_the_32_is_owed_for_4295_us() {
    let (limit, key) = fast();
    let key = key.charge(&limit, NOW, 1 << 32);
    assert_eq!(key.used(&limit, NOW), 1 << 32);
    assert_eq!(key.decide(&limit, NOW, 0).0.reset_after_us(), 4_295);
}

#[test]
fn a_refund_of_2_to_the_32_leaves_the_rest_of_a_debt() {
    let (limit, key) = fast();
    let key = (0..4).fold(key, |key, _| key.charge(&limit, NOW, 1 << 31));
    assert_eq!(key.refund(&limit, NOW, 1 << 32).used(&limit, NOW), 1 << 32);
}

#[test]
fn a_refund_of_everything_empties_both_cells() {
    let limit = Limit::sliding_window(10, Duration::from_micros(100)).unwrap();
    let full = Meter::empty(&limit).charge(&limit, NOW, u32::MAX.into());
    let next = Now::from_micros(100, 100);
    let key = full.charge(&limit, next, 5).refund(&limit, next, u64::MAX);
    assert_eq!(key.used(&limit, next), 0);
}

#[test]
fn a_limit_of_0_may_have_any_burst_and_period() {
    let year = Duration::from_hours(366 * 24);
    let limit = Limit::gcra(0, year).and_then(|limit| limit.with_burst(u32::MAX.into()));
    assert_eq!(limit.map(|limit| limit.burst()), Ok(u32::MAX));
}
