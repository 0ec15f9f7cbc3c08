//! The table as its users see it: requests of many limits, under threads, under pressure.
#![cfg(not(loom))]
#![expect(
    clippy::expect_used,
    clippy::cast_possible_truncation,
    reason = "a helper of tests may panic as a test may"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use tidegate_core::{
    Check, CheckOutcome, DecidingMeter, KeySpace, LIMITS_PER_REQUEST_MAX, Limit, Now, RequestVerdict, Retry,
    Secret, Shares, Table, TooManyLimits, Verdict,
};

const NOW: Now = Now::from_micros(1_000_000, 1_000_000);
const UNASKED: CheckOutcome =
    CheckOutcome { verdict: Verdict::Allow { remaining: 0, reset_after_us: 0 }, source: DecidingMeter::Own };

struct World {
    table: Table,
    space: KeySpace,
}

impl World {
    fn new(bytes: usize) -> Self {
        let space = KeySpace::new(&Secret::from_bytes([5; 16]), Shares::FIRST, "limit");
        Self { table: Table::new(bytes, &Shares::single()).expect("large enough"), space }
    }

    fn ask<'a>(&'a self, limit: &'a Limit, key: u64, cost: u64) -> Check<'a> {
        Check { limit, space: &self.space, digest: self.space.digest(&[&key.to_le_bytes()]), cost }
    }

    fn used(&self, limit: &Limit, key: u64) -> u64 {
        self.table.used(NOW, &self.ask(limit, key, 0))
    }
}

fn per_hour(amount: u64) -> Limit {
    Limit::gcra(amount, Duration::from_hours(1)).expect("in range")
}

#[test]
fn a_request_of_the_most_limits_is_all_or_nothing() {
    let world = World::new(1 << 20);
    let limit = per_hour(2);
    let keys = LIMITS_PER_REQUEST_MAX as u64;
    let asks: Vec<_> = (0..keys).map(|key| world.ask(&limit, key, 1)).collect();
    let mut answers = vec![UNASKED; LIMITS_PER_REQUEST_MAX];
    for _ in 0..2 {
        assert_eq!(world.table.check_all(NOW, &asks, &mut answers), Ok(RequestVerdict::Allowed));
    }
    // The refund makes all keys but the last deny: still nothing may be charged.
    world.table.refund(NOW, &world.ask(&limit, keys - 1, 1));
    assert_eq!(world.table.check_all(NOW, &asks, &mut answers), Ok(RequestVerdict::Denied { by: 0 }));
    assert!((0..keys - 1).all(|key| world.used(&limit, key) == 2));
    assert_eq!(world.used(&limit, keys - 1), 1);
    assert_eq!(answers[LIMITS_PER_REQUEST_MAX - 1].verdict.remaining(), 1);
}

#[test]
fn more_limits_than_there_is_room_for_are_an_error_that_charges_nothing() {
    let world = World::new(1 << 20);
    let limit = per_hour(10);
    let asks = vec![world.ask(&limit, 1, 1); LIMITS_PER_REQUEST_MAX + 1];
    let error = |limits, limits_max| Err(TooManyLimits { limits, limits_max });
    let mut answers = vec![UNASKED; 300];
    assert_eq!(world.table.check_all(NOW, &asks, &mut answers), error(129, 128));
    assert_eq!(world.table.check_all(NOW, &asks[..3], &mut answers[..2]), error(3, 2));
    assert_eq!(world.used(&limit, 1), 0);
}

#[test]
fn a_request_of_no_limits_is_allowed() {
    assert_eq!(World::new(1 << 20).table.check_all(NOW, &[], &mut []), Ok(RequestVerdict::Allowed));
}

#[test]
fn longest_denial_decides_and_other_limits_report_remaining() {
    let world = World::new(1 << 20);
    let (hourly, daily) = (per_hour(1), Limit::gcra(1, Duration::from_hours(24)).expect("in range"));
    let roomy = per_hour(50);
    for (limit, key) in [(&hourly, 1), (&daily, 2)] {
        assert!(world.table.check(NOW, &world.ask(limit, key, 1)).verdict.is_allowed());
    }
    let asks = [world.ask(&roomy, 0, 1), world.ask(&hourly, 1, 1), world.ask(&daily, 2, 1)];
    let mut answers = [UNASKED; 3];
    assert_eq!(world.table.check_all(NOW, &asks, &mut answers), Ok(RequestVerdict::Denied { by: 2 }));
    assert_eq!(answers[0].verdict, Verdict::Allow { remaining: 50, reset_after_us: 0 });
    assert!(!answers[1].verdict.is_allowed());
}

/// Threads check single keys, whole requests and reservations on few keys, at one instant.
#[test]
fn threads_never_admit_more_than_the_limit_nor_half_a_request() {
    const THREADS: u64 = 4;
    const LIMIT: u64 = 5_000;
    let world = World::new(1 << 16);
    let limit = per_hour(LIMIT);
    let admitted: [AtomicU64; 3] = Default::default();
    let count = |key: usize, cost: u64| admitted[key].fetch_add(cost, Ordering::Relaxed);
    thread::scope(|scope| {
        for thread in 0..THREADS {
            let (world, limit, count) = (&world, &limit, &count);
            scope.spawn(move || {
                for round in 0..20_000u64 {
                    act(world, limit, (thread * 7 + round) % 5, count);
                }
            });
        }
    });
    for (key, admitted) in admitted.iter().enumerate() {
        assert_eq!(world.used(&limit, key as u64), admitted.load(Ordering::Relaxed), "key {key}");
        assert_eq!(
            admitted.load(Ordering::Relaxed),
            LIMIT,
            "key {key}: the limit is used up and not exceeded"
        );
    }
}

/// One of the ways to spend, chosen by `way`.
fn act(world: &World, limit: &Limit, way: u64, count: &impl Fn(usize, u64) -> u64) {
    let all = [2, 0, 1].map(|key| world.ask(limit, key, 1));
    match way {
        0..=2 => {
            if world.table.check(NOW, &world.ask(limit, way, 1)).verdict.is_allowed() {
                count(way as usize, 1);
            }
        }
        3 => {
            if world.table.check_all(NOW, &all, &mut [UNASKED; 3]) == Ok(RequestVerdict::Allowed) {
                for key in 0..3 {
                    count(key, 1);
                }
            }
        }
        _ => {
            let ask = world.ask(limit, 1, 3);
            let answer = world.table.reserve(NOW, &ask);
            if answer.verdict.is_allowed() {
                world.table.commit(NOW, &ask, answer.source, 1);
                count(1, 1);
            }
        }
    }
}

#[test]
fn keys_that_cannot_be_held_are_decided_together_also_in_requests() {
    let world = World::new(1 << 14);
    let limit = Limit::gcra(1, Duration::from_hours(1)).expect("in range");
    let mut answers = [UNASKED; 2];
    let allowed = (0..2_000u64).filter(|pair| {
        let asks = [world.ask(&limit, 2 * pair, 1), world.ask(&limit, 2 * pair + 1, 1)];
        world.table.check_all(NOW, &asks, &mut answers) == Ok(RequestVerdict::Allowed)
    });
    let allowed = allowed.count() as u64;
    let stats = world.table.stats(Shares::FIRST);
    assert!(allowed * 2 <= stats.slots, "{allowed} pairs in {} slots", stats.slots);
    assert!(stats.spilled > 1_000, "{stats:?}");
    assert_eq!(answers[0].source, DecidingMeter::Overflow);
}

#[test]
fn a_table_that_is_sized_for_its_keys_holds_them() {
    const KEYS: u64 = 300_000;
    let world = World::new(KEYS as usize * 49);
    let limit = per_hour(10);
    for key in 0..KEYS {
        world.table.check(NOW, &world.ask(&limit, key, 1));
    }
    let stats = world.table.stats(Shares::FIRST);
    assert!(stats.live > KEYS - KEYS / 2_000, "{stats:?}");
    assert_eq!(stats.live + stats.evicted_in_use, KEYS);
    assert_eq!((0..KEYS).map(|key| world.used(&limit, key)).sum::<u64>(), stats.live);
}

#[test]
fn new_keys_of_one_request_find_room_wherever_single_ones_do() {
    for bytes in [3 << 10, 16 << 10, 64 << 10] {
        let world = World::new(bytes);
        let limit = per_hour(100);
        let mut answers = [UNASKED; 8];
        for key in 0..bytes as u64 {
            world.table.check(NOW, &world.ask(&limit, key, 5));
        }
        for request in 1..1_000u64 {
            let asks: [_; 8] = std::array::from_fn(|at| world.ask(&limit, request << 32 | at as u64, 1));
            assert_eq!(
                world.table.check_all(NOW, &asks, &mut answers),
                Ok(RequestVerdict::Allowed),
                "{bytes} {request}"
            );
            assert!(
                answers.iter().all(|answer| answer.source == DecidingMeter::Own),
                "{bytes} {request} {answers:?}"
            );
        }
    }
}

#[test]
fn operations_without_debt_create_no_meter() {
    let world = World::new(1 << 16);
    for limit in [per_hour(10), Limit::sliding_window(10, Duration::from_hours(1)).expect("in range")] {
        world.table.refund(NOW, &world.ask(&limit, 1, 5));
        world.table.charge(NOW, &world.ask(&limit, 2, 0));
        world.table.merge(NOW, &world.ask(&limit, 3, 0));
        world.table.check(NOW, &world.ask(&limit, 4, 0));
        world.table.check(NOW, &world.ask(&limit, 5, 11));
    }
    assert_eq!(world.table.stats(Shares::FIRST).live, 0);
}

/// Spends `cost` under one limit, then looks under another: the remaining units, once alone and
/// once within a request of two limits.
fn remaining_after_change(before: &Limit, cost: u64, after: &Limit) -> [u32; 2] {
    [false, true].map(|in_request| {
        let (world, after) = (World::new(1 << 20), &after.keeping_units());
        let check = world.ask(before, 1, cost);
        assert!(world.table.check(NOW, &check).verdict.is_allowed(), "{before:?} {cost}");
        if !in_request {
            return world.table.check(NOW, &world.ask(after, 1, 0)).verdict.remaining();
        }
        let mut answers = [UNASKED; 2];
        let asks = [world.ask(after, 1, 0), world.ask(after, 2, 0)];
        world.table.check_all(NOW, &asks, &mut answers).expect("two limits fit");
        assert_eq!(answers[1].verdict.remaining(), after.burst(), "another key has its whole burst");
        answers[0].verdict.remaining()
    })
}

#[test]
fn a_changed_amount_keeps_the_units_that_were_spent() {
    for (before, cost, after, remaining) in
        [(2, 2, 200, 198), (7, 5, 13, 8), (200, 150, 151, 1), (200, 150, 2, 0)]
    {
        let found = remaining_after_change(&per_hour(before), cost, &per_hour(after));
        assert_eq!(found, [remaining; 2], "{cost} of {before}, then {after}");
    }
}

#[test]
fn a_changed_period_never_loses_units_and_adds_at_most_a_quarter() {
    let limit = |seconds: u64| Limit::gcra(100, Duration::from_secs(seconds)).expect("in range");
    for (before, after) in [(60, 3_600), (3_600, 60), (60, 1), (10, 60), (1, 86_400)] {
        for remaining in remaining_after_change(&limit(before), 40, &limit(after)) {
            assert!((50..=60).contains(&remaining), "{before} s to {after} s leaves {remaining}");
        }
    }
}

#[test]
fn a_limit_that_comes_with_the_request_keeps_the_time_to_drain() {
    let world = World::new(1 << 20);
    assert!(world.table.check(NOW, &world.ask(&per_hour(2), 1, 1)).verdict.is_allowed());
    // Half an hour to drain is a hundred units of two hundred per hour.
    assert_eq!(world.table.check(NOW, &world.ask(&per_hour(200), 1, 0)).verdict.remaining(), 100);
}

#[test]
fn a_denied_request_drains_at_the_new_rate() {
    let world = World::new(1 << 20);
    let (before, after) = (per_hour(2), per_hour(3).keeping_units());
    assert!(world.table.check(NOW, &world.ask(&before, 1, 2)).verdict.is_allowed());
    // Two units of a burst of three are spent: a request of two waits for one unit, twenty minutes.
    let retry = world.table.check(NOW, &world.ask(&after, 1, 2)).verdict.retry();
    let wait_us = 1_200_000_000;
    assert_eq!(retry, Some(Retry::After(wait_us)));
    let later = |us: u64| Now::from_micros(1_000_000 + us, 1_000_000 + us);
    assert!(!world.table.check(later(wait_us - 1), &world.ask(&after, 1, 2)).verdict.is_allowed());
    assert!(world.table.check(later(wait_us), &world.ask(&after, 1, 2)).verdict.is_allowed());
}
