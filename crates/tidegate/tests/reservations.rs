//! The guarantees of reservations: reserved units count, and are charged or given back exactly
//! once.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{HOUR, MICROSECOND, both, gcra, limiter, passes, remaining, window};
use tidegate::{
    Check, LIMITS_INLINE_MAX, Limiter, RESERVATION_US_MAX, RESERVATIONS_MAX, Reservation, ReserveError,
    ReserveOutcome, TooManyLimits,
};

const LAPSE: Duration = Duration::from_micros(RESERVATION_US_MAX);

fn hold<'l, 'g>(limiter: &'l Limiter, asks: &[Check<'g>]) -> Reservation<'l, 'g> {
    match limiter.reserve(asks) {
        Ok(ReserveOutcome::Held(held)) => held,
        other => panic!("not held: {other:?}"),
    }
}

#[test]
fn reservation_counts_at_once_and_is_charged_by_commit() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let held = hold(&limiter, &[gate.key("x").cost(4)]);
        assert_eq!(held.decision().outcomes()[0].remaining(), 6);
        assert_eq!(passes(&limiter, gate.key("x"), 99), 6);
        held.commit();
        assert_eq!(remaining(&limiter, gate.key("x")), 0);
        limiter.refund(gate.key("x").cost(10));
        assert_eq!(remaining(&limiter, gate.key("x")), 10, "all of it had become use");
    }
}

#[test]
fn a_commit_of_the_actual_cost_charges_less_or_more() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        hold(&limiter, &[gate.key("less").cost(4)]).commit_actual(1);
        assert_eq!(remaining(&limiter, gate.key("less")), 9);
        hold(&limiter, &[gate.key("none").cost(4)]).commit_actual(0);
        assert_eq!(remaining(&limiter, gate.key("none")), 10);
        hold(&limiter, &[gate.key("more").cost(4)]).commit_actual(12);
        limiter.refund(gate.key("more").cost(3));
        assert_eq!(remaining(&limiter, gate.key("more")), 1, "12 were charged");
        hold(&limiter, &[gate.key("most").cost(4)]).commit_actual(u64::MAX);
        assert_eq!(remaining(&limiter, gate.key("most")), 0);
    }
}

#[test]
fn each_limit_of_a_reservation_can_be_charged_differently() {
    let (limiter, _) = limiter(&[("calls", gcra(10, HOUR)), ("tokens", window(1_000, HOUR))]);
    let (calls, tokens) = (limiter.gate("calls").unwrap(), limiter.gate("tokens").unwrap());
    let held = hold(&limiter, &[calls.key("x"), tokens.key("x").cost(400)]);
    held.commit_with(|at, reserved| if at == 0 { reserved } else { 250 });
    assert_eq!(remaining(&limiter, calls.key("x")), 9);
    assert_eq!(remaining(&limiter, tokens.key("x")), 750);
}

#[test]
fn dropping_or_cancelling_gives_everything_back() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let _ = limiter.check(gate.key("x").cost(3));
        drop(hold(&limiter, &[gate.key("x").cost(7), gate.key("y")]));
        hold(&limiter, &[gate.key("x").cost(7), gate.key("y")]).cancel();
        assert_eq!(remaining(&limiter, gate.key("x")), 7);
        assert_eq!(remaining(&limiter, gate.key("y")), 10);
    }
}

#[test]
fn a_denied_reservation_sets_nothing_aside() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit), ("b", gcra(2, HOUR))]);
        let (a, b) = (limiter.gate("a").unwrap(), limiter.gate("b").unwrap());
        let ReserveOutcome::Denied(decision) = limiter.reserve(&[a.key("x"), b.key("x").cost(3)]).unwrap()
        else {
            panic!("3 of 2 were set aside")
        };
        assert_eq!(decision.denied_by().unwrap().gate().name(), "b");
        assert_eq!(remaining(&limiter, a.key("x")), 10);
        assert_eq!(remaining(&limiter, b.key("x")), 2);
    }
}

#[test]
fn a_reset_leaves_reservations_to_their_owners() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let _ = limiter.check(gate.key("x").cost(5));
        let held = hold(&limiter, &[gate.key("x").cost(4)]);
        limiter.reset(gate.key("x"));
        assert_eq!(remaining(&limiter, gate.key("x")), 6);
        drop(held);
        assert_eq!(remaining(&limiter, gate.key("x")), 10);
    }
}

#[test]
fn a_forgotten_reservation_is_given_back_when_its_time_is_over() {
    for limit in both(10, HOUR) {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        std::mem::forget(hold(&limiter, &[gate.key("x").cost(4)]));
        clock.advance(LAPSE.saturating_sub(MICROSECOND));
        limiter.sweep();
        assert_eq!(remaining(&limiter, gate.key("x")), 6, "not before");
        clock.advance(MICROSECOND);
        limiter.sweep();
        assert_eq!(remaining(&limiter, gate.key("x")), 10);
    }
}

#[test]
fn asking_for_a_reservation_finds_the_room_of_those_that_lapsed() {
    let (limiter, clock) = limiter(&[("a", gcra(10, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    std::mem::forget(hold(&limiter, &[gate.key("x").cost(10)]));
    assert!(matches!(limiter.reserve(&[gate.key("x")]), Ok(ReserveOutcome::Denied(_))));
    clock.advance(LAPSE);
    hold(&limiter, &[gate.key("x").cost(10)]).commit();
}

#[test]
fn a_late_commit_is_still_charged_and_takes_nothing_from_another() {
    for limit in both(10, HOUR) {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let late = hold(&limiter, &[gate.key("x").cost(4)]);
        clock.advance(LAPSE);
        let held = hold(&limiter, &[gate.key("x").cost(5)]);
        assert_eq!(remaining(&limiter, gate.key("x")), 5, "a lapsed reservation is free again");
        late.commit_actual(3);
        assert_eq!(remaining(&limiter, gate.key("x")), 2);
        drop(held);
        assert_eq!(remaining(&limiter, gate.key("x")), 7);
    }
}

#[test]
fn a_late_drop_gives_nothing_back_that_belongs_to_another() {
    for limit in both(10, HOUR) {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let late = hold(&limiter, &[gate.key("x").cost(4)]);
        clock.advance(LAPSE);
        let held = hold(&limiter, &[gate.key("x").cost(6)]);
        drop(late);
        assert_eq!(remaining(&limiter, gate.key("x")), 4);
        held.commit();
    }
}

#[test]
fn one_reservation_too_many_is_an_error_and_leaves_nothing_behind() {
    let most = u32::try_from(RESERVATIONS_MAX).unwrap();
    let (limiter, _) = limiter(&[("a", gcra(u64::from(most) + 5, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    let mut held: Vec<_> = (0..most).map(|_| hold(&limiter, &[gate.key("x")])).collect();
    for _ in 0..3 {
        assert_eq!(limiter.reserve(&[gate.key("x"), gate.key("y")]).unwrap_err(), ReserveError::TooManyOpen);
    }
    assert_eq!(remaining(&limiter, gate.key("x")), 5);
    assert_eq!(remaining(&limiter, gate.key("y")), most + 5);
    held.pop();
    held.push(hold(&limiter, &[gate.key("x")]));
    drop(held);
    assert_eq!(remaining(&limiter, gate.key("x")), most + 5);
}

#[test]
fn more_limits_than_a_reservation_may_have_is_an_error_that_sets_nothing_aside() {
    let (limiter, _) = limiter(&[("a", gcra(100, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    let asks = [gate.key("x"); LIMITS_INLINE_MAX + 1];
    let error = TooManyLimits { limits: asks.len(), limits_max: LIMITS_INLINE_MAX };
    assert_eq!(limiter.reserve(&asks).unwrap_err(), ReserveError::TooManyLimits(error));
    assert_eq!(remaining(&limiter, gate.key("x")), 100);
}

#[test]
fn extreme_costs_are_denied_or_settled_without_a_trace() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        for (cost, held) in
            [(0, true), (1, true), (10, true), (11, false), (1 << 53, false), (u64::MAX, false)]
        {
            let reserved = limiter.reserve(&[gate.key("x").cost(cost)]).unwrap();
            assert_eq!(matches!(reserved, ReserveOutcome::Held(_)), held, "{cost}");
            drop(reserved);
            assert_eq!(remaining(&limiter, gate.key("x")), 10, "{cost}");
        }
    }
}

#[test]
fn a_panic_while_the_actual_cost_is_worked_out_gives_everything_back() {
    let (limiter, _) = limiter(&[("a", gcra(10, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    let held = hold(&limiter, &[gate.key("x").cost(4)]);
    let commit = std::panic::AssertUnwindSafe(|| held.commit_with(|_, _| panic!("the bill is lost")));
    assert!(std::panic::catch_unwind(commit).is_err());
    assert_eq!(remaining(&limiter, gate.key("x")), 10);
}
