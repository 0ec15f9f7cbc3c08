//! Clocks that step: after any step, no key gains more than one burst, and none is locked out.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{HOUR, MINUTE, both, limiter, passes, remaining};
use tidegate::{Limit, Limiter, ManualClock, ReserveOutcome};

const HOUR_US: u64 = 3_600_000_000;
/// Both clocks start well after their zero, and not on the edge of any window.
const MONO_US: u64 = 5 * HOUR_US + 17;
const WALL_US: u64 = 480_000 * HOUR_US + 1_234_567;
const BURST: u32 = 10;

/// Limits with windows that a step of an hour shifts, or does not.
fn limits() -> impl Iterator<Item = Limit> {
    [MINUTE, 7 * MINUTE, HOUR, 24 * HOUR].into_iter().flat_map(|period| both(BURST.into(), period))
}

/// Where the clocks may be after a step: an hour back, as they were, an hour on.
fn steps() -> impl Iterator<Item = (u64, u64)> {
    let around = |at: u64| [at - HOUR_US, at, at + HOUR_US];
    around(MONO_US).into_iter().flat_map(move |mono| around(WALL_US).map(|wall| (mono, wall)))
}

/// Returns a limiter with a key that has spent its burst.
fn spent(limit: Limit) -> (Limiter, std::sync::Arc<ManualClock>) {
    let (limiter, clock) = limiter(&[("a", limit)]);
    clock.set(MONO_US, WALL_US);
    assert!(limiter.check(limiter.gate("a").unwrap().key("x").cost(BURST.into())).is_allowed());
    (limiter, clock)
}

#[test]
fn a_step_of_any_clock_by_an_hour_unlocks_at_most_one_burst() {
    for (limit, (mono, wall)) in limits().flat_map(|limit| steps().map(move |step| (limit, step))) {
        let (limiter, clock) = spent(limit);
        clock.set(mono, wall);
        let passed = passes(&limiter, limiter.gate("a").unwrap().key("x"), 100);
        assert!(passed <= BURST, "{passed} passed after {mono} {wall}: {limit:?}");
    }
}

#[test]
fn clock_step_of_an_hour_does_not_lock_out_keys() {
    for (limit, (mono, wall)) in limits().flat_map(|limit| steps().map(move |step| (limit, step))) {
        let (limiter, clock) = spent(limit);
        clock.set(mono, wall);
        let gate = limiter.gate("a").unwrap();
        passes(&limiter, gate.key("x"), 100);
        // Both cells have to go, and their edges moved by no more than the step.
        clock.advance(2 * limit.period() + HOUR.min(limit.period()));
        assert!(limiter.check(gate.key("x").cost(BURST.into())).is_allowed(), "{mono} {wall}: {limit:?}");
    }
}

#[test]
fn a_monotonic_clock_that_steps_back_unlocks_nothing_and_time_goes_on() {
    for limit in both(BURST.into(), HOUR) {
        let (limiter, clock) = spent(limit);
        let gate = limiter.gate("a").unwrap();
        let wait = limiter.check(gate.key("x")).retry_after().unwrap();
        clock.set(MONO_US - HOUR_US, WALL_US);
        assert!(!limiter.check(gate.key("x")).is_allowed());
        clock.advance(wait);
        assert!(limiter.check(gate.key("x")).is_allowed(), "{limit:?}");
    }
}

#[test]
fn a_wall_clock_that_goes_back_and_forth_unlocks_at_most_one_burst_in_all() {
    for limit in limits() {
        let (limiter, clock) = spent(limit);
        let gate = limiter.gate("a").unwrap();
        let walls = [WALL_US + HOUR_US, WALL_US, WALL_US - HOUR_US, WALL_US].into_iter().cycle();
        let passed: u32 = walls
            .take(40)
            .map(|wall| {
                clock.set(MONO_US, wall);
                passes(&limiter, gate.key("x"), 100)
            })
            .sum();
        assert!(passed <= BURST, "{passed} passed: {limit:?}");
    }
}

#[test]
fn the_wall_clock_means_nothing_to_gcra() {
    let (limiter, clock) = spent(Limit::gcra(BURST.into(), HOUR).unwrap());
    let gate = limiter.gate("a").unwrap();
    for wall in [0, WALL_US - HOUR_US, WALL_US + HOUR_US, u64::MAX] {
        clock.set(MONO_US, wall);
        assert!(!limiter.check(gate.key("x")).is_allowed(), "unlocked at {wall}");
    }
}

#[test]
fn a_small_step_back_is_no_time_at_all() {
    for limit in limits() {
        let (limiter, clock) = spent(limit);
        clock.set(MONO_US - 900_000, WALL_US - 900_000);
        assert_eq!(remaining(&limiter, limiter.gate("a").unwrap().key("x")), 0);
    }
}

#[test]
fn clocks_at_their_ends_never_panic() {
    let ends = [0, 1, MONO_US, 1 << 51, 1 << 53, u64::MAX - 1, u64::MAX];
    for limit in limits() {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        for (mono, wall) in ends.into_iter().flat_map(|mono| ends.map(|wall| (mono, wall))) {
            clock.set(mono, wall);
            limiter.charge(gate.key("x").cost(u64::MAX));
            limiter.raise(gate.key("x").cost(u64::MAX));
            limiter.refund(gate.key("x"));
            let _ = limiter.check_all(&[gate.key("x"), gate.key("y")]).unwrap();
            if let ReserveOutcome::Held(held) = limiter.reserve(&[gate.key("z")]).unwrap() {
                held.commit_actual(u64::MAX);
            }
            clock.advance(Duration::MAX);
        }
    }
}
