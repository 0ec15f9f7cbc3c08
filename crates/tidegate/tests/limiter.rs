//! The guarantees of the limiter, tested through its public API.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{HOUR, MICROSECOND, MINUTE, SECOND, both, gcra, limiter, passes, remaining, window};
use tidegate::{
    BuildError, Check, Decision, LIMITS_INLINE_MAX, LIMITS_PER_CHECK_MAX, Limiter, Outcome, Retry,
    TooManyLimits, UnknownName,
};

#[test]
fn limits_are_found_by_name_and_unknown_names_are_errors() {
    let (limiter, _) = limiter(&[("a", gcra(1, SECOND)), ("b", window(2, MINUTE))]);
    let b = limiter.gate("b").unwrap();
    assert_eq!((b.name(), b.limit()), ("b", &window(2, MINUTE)));
    assert_eq!(limiter.gate("c").unwrap_err(), UnknownName::Limit("c".to_owned()));
    assert_eq!(limiter.gate_of("t", "a").unwrap_err(), UnknownName::Tenant("t".to_owned()));
    assert_eq!(limiter.stats_of("t").unwrap_err().to_string(), r#"tenant: there is none called "t""#);
}

#[test]
fn a_name_given_twice_is_an_error() {
    let limit = gcra(1, SECOND);
    let twice = Limiter::builder().limit("a", limit).limit("b", limit).limit("a", limit).build();
    assert!(matches!(twice, Err(BuildError::LimitTwice(name)) if name == "a"));
    let twice = Limiter::builder().tenant("t", 1).tenant("t", 2).build();
    assert!(matches!(twice, Err(BuildError::TenantTwice(name)) if name == "t"));
}

#[test]
#[should_panic(expected = "this gate is of another limiter")]
fn a_gate_of_another_limiter_is_a_mistake_that_shows() {
    let (one, _) = limiter(&[("a", gcra(1, HOUR))]);
    let (other, _) = limiter(&[("a", gcra(1, HOUR))]);
    let _ = other.check(one.gate("a").unwrap().key("x"));
}

#[test]
fn keys_and_limits_are_counted_apart() {
    let (limiter, _) = limiter(&[("a", gcra(1, HOUR)), ("b", gcra(1, HOUR))]);
    let (a, b) = (limiter.gate("a").unwrap(), limiter.gate("b").unwrap());
    let all_different =
        [a.key("x"), a.key("y"), b.key("x"), a.parts(&[b"x", b"y"]), a.parts(&[b"xy"]), a.key("")];
    for ask in all_different {
        assert_eq!(passes(&limiter, ask, 9), 1);
    }
    assert!(!limiter.check(a.parts(&[b"x"])).is_allowed(), "one part is the key itself");
}

#[test]
fn a_denied_request_passes_when_its_wait_is_over_and_not_a_microsecond_earlier() {
    for limit in both(7, SECOND) {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        clock.advance(Duration::from_micros(123_457));
        assert!(limiter.check(gate.key("x").cost(7)).is_allowed());
        let wait = limiter.check(gate.key("x").cost(3)).retry_after().unwrap();
        clock.advance(wait.saturating_sub(MICROSECOND));
        assert!(!limiter.check(gate.key("x").cost(3)).is_allowed(), "{limit:?}");
        clock.advance(MICROSECOND);
        assert!(limiter.check(gate.key("x").cost(3)).is_allowed(), "{limit:?}");
    }
}

#[test]
fn several_limits_are_charged_together_or_not_at_all() {
    for (first, second) in both(5, HOUR).into_iter().zip(both(3, HOUR)) {
        let (limiter, _) = limiter(&[("first", first), ("second", second)]);
        let (first, second) = (limiter.gate("first").unwrap(), limiter.gate("second").unwrap());
        let ask = |cost| [first.key("x").cost(cost), second.key("x").cost(cost)];
        assert!(limiter.check_all(&ask(2)).unwrap().is_allowed());
        let denied = limiter.check_all(&ask(2)).unwrap();
        assert_eq!(denied_by(&denied), Some("second"));
        assert_eq!(lefts(denied.outcomes()), [3, 1], "an allowing limit reports its `remaining`");
        assert_eq!(remaining(&limiter, first.key("x")), 3);
        assert_eq!(remaining(&limiter, second.key("x")), 1);
    }
}

#[test]
fn a_request_is_denied_by_the_limit_that_denies_longest() {
    let limits = [("second", gcra(1, SECOND)), ("hour", window(1, HOUR)), ("minute", gcra(1, MINUTE))];
    let (limiter, _) = limiter(&[&limits[..], &[("blocked", gcra(0, SECOND))]].concat());
    let gates = ["second", "hour", "minute", "blocked"].map(|name| limiter.gate(name).unwrap());
    let [second, hour, minute, blocked] = gates.each_ref().map(|gate| gate.key("x"));
    let by = |asks: &[Check<'_>]| {
        let decision = limiter.check_all(asks).unwrap();
        (denied_by(&decision).map(str::to_owned), decision.retry_after())
    };
    assert_eq!(by(&[second, hour, minute]), (None, None));
    assert_eq!(by(&[second, minute]), (Some("minute".to_owned()), Some(MINUTE)));
    // Both cells of the window have to go: the rest of this hour, and all of the next.
    assert_eq!(by(&[second, hour, minute]), (Some("hour".to_owned()), Some(2 * HOUR)));
    assert_eq!(by(&[hour, minute.cost(2), second]), (Some("minute".to_owned()), None), "never is longest");
    assert_eq!(by(&[minute.cost(2), blocked]), (Some("blocked".to_owned()), None));
}

#[test]
fn a_request_under_no_limits_passes() {
    let (limiter, _) = limiter(&[]);
    let decision = limiter.check_all(&[]).unwrap();
    assert!(decision.is_allowed() && decision.outcomes().is_empty());
}

#[test]
fn a_key_named_twice_in_one_request_is_charged_twice_or_not_at_all() {
    for limit in both(3, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let twice = [gate.key("x"), gate.key("x")];
        assert_eq!(lefts(limiter.check_all(&twice).unwrap().outcomes()), [2, 1]);
        assert!(!limiter.check_all(&twice).unwrap().is_allowed());
        assert_eq!(remaining(&limiter, gate.key("x")), 1);
    }
}

#[test]
fn more_limits_than_a_check_may_have_is_an_error_that_charges_nothing() {
    let (limiter, _) = limiter(&[("a", gcra(1_000, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    let asks = [gate.key("x"); LIMITS_PER_CHECK_MAX + 1];
    let error = TooManyLimits { limits: LIMITS_PER_CHECK_MAX + 1, limits_max: LIMITS_PER_CHECK_MAX };
    assert_eq!(limiter.check_all(&asks).unwrap_err(), error);
    assert_eq!(remaining(&limiter, gate.key("x")), 1_000);
    assert!(limiter.check_all(&asks[1..]).unwrap().is_allowed());
    assert_eq!(remaining(&limiter, gate.key("x")), 1_000 - u32::try_from(LIMITS_PER_CHECK_MAX).unwrap());
}

#[test]
fn checks_in_a_batch_are_decided_in_order_and_each_once() {
    for limit in both(20, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let asks: Vec<_> = (0..50).map(|at| gate.key(if at % 2 == 0 { "x" } else { "y" })).collect();
        let mut lefts = Vec::new();
        limiter.check_each(asks, |at, outcome| {
            assert_eq!(at, lefts.len());
            assert_eq!(outcome.is_allowed(), at < 40, "{at}");
            lefts.push(outcome.remaining());
        });
        let expected: Vec<u32> = (0..50).map(|at| 19_u32.saturating_sub(at / 2)).collect();
        assert_eq!(lefts, expected);
        limiter.check_each([], |_, _| panic!("nothing was asked"));
    }
}

#[test]
fn requests_in_a_batch_are_decided_in_order_and_each_whole() {
    for limit in both(20, HOUR) {
        let (limiter, _) = limiter(&[("a", limit), ("b", gcra(1_000, HOUR))]);
        let (a, b) = (limiter.gate("a").unwrap(), limiter.gate("b").unwrap());
        // Requests of two limits, of one and of none, to get groups of different sizes.
        let asks = [a.key("x"), b.key("y")];
        let requests = (0..90).map(|at| asks.into_iter().skip(at % 3));
        let mut decided = 0;
        limiter.check_all_each(requests, |at, decision| {
            assert_eq!(at, decided);
            let decision = decision.unwrap();
            assert_eq!(decision.outcomes().len(), 2 - at % 3);
            assert_eq!(decision.is_allowed(), at % 3 > 0 || at < 60, "{at}");
            decided += 1;
        });
        // Twenty with both limits and thirty with the second alone; the ten that the first denied
        // are charged to neither.
        assert_eq!((decided, remaining(&limiter, b.key("y"))), (90, 950));
        limiter.check_all_each(Vec::<[Check<'_>; 2]>::new(), |_, _| panic!("nothing was asked"));
    }
}

#[test]
fn a_request_of_too_many_limits_in_a_batch_is_an_error_of_its_own() {
    let (limiter, _) = limiter(&[("a", gcra(100, HOUR))]);
    let gate = limiter.gate("a").unwrap();
    let limits = [1, LIMITS_INLINE_MAX + 1, LIMITS_INLINE_MAX, 0];
    let requests = limits.map(|limits| std::iter::repeat_n(gate.key("x"), limits));
    let mut results = Vec::new();
    limiter.check_all_each(requests, |_, decision| results.push(decision.map(|it| it.outcomes().len())));
    let error = TooManyLimits { limits: LIMITS_INLINE_MAX + 1, limits_max: LIMITS_INLINE_MAX };
    assert_eq!(results, [Ok(1), Err(error), Ok(LIMITS_INLINE_MAX), Ok(0)]);
    assert_eq!(remaining(&limiter, gate.key("x")), 100 - u32::try_from(LIMITS_INLINE_MAX + 1).unwrap());
}

#[test]
fn requests_of_many_limits_are_all_or_nothing_too() {
    for limit in both(3, HOUR) {
        let (limiter, _) = limiter(&[("a", limit), ("b", gcra(1_000, HOUR))]);
        let (a, b) = (limiter.gate("a").unwrap(), limiter.gate("b").unwrap());
        let users: Vec<String> = (0..99).map(|at| format!("user {at}")).collect();
        let asks: Vec<_> = users.iter().map(|user| b.key(user)).chain([a.key("x")]).collect();
        for left in [2, 1, 0] {
            let decision = limiter.check_all(&asks).unwrap();
            assert_eq!((decision.outcomes().len(), decision.outcomes()[99].remaining()), (100, left));
        }
        let denied = limiter.check_all(&asks).unwrap();
        assert_eq!(denied.denied_by().unwrap().gate().name(), "a");
        assert!(users.iter().all(|user| remaining(&limiter, b.key(user)) == 997));
    }
}

#[test]
fn usage_under_one_limit_counts_under_its_replacement() {
    let (limiter, clock) = limiter(&[]);
    let minute = Duration::from_mins(1);
    let seven = limiter.gate_with("", "api", gcra(7, minute)).unwrap();
    for _ in 0..7 {
        assert!(limiter.check(seven.key("x")).is_allowed());
    }
    // The time to drain stays a minute at any rate.
    for amount in [1, 2, 3, 5, 6_000_000, 4_294_967_295] {
        let other = seven.with_limit(gcra(amount, minute));
        let outcome = limiter.check(other.key("x"));
        assert!(!outcome.is_allowed(), "{amount}");
        assert_eq!(outcome.reset_after(), minute, "{amount}");
    }
    clock.advance(Duration::from_secs(30));
    let half =
        |amount: u64| limiter.check(seven.with_limit(gcra(amount, minute)).key("x").cost(0)).remaining();
    assert_eq!((half(2), half(10), half(1_000)), (1, 5, 500));
    // A gate of the same name uses the same meters.
    let again = limiter.gate_with("", "api", gcra(10, minute)).unwrap();
    assert_eq!(remaining(&limiter, again.key("x")), 5);
}

#[test]
#[should_panic(expected = "the algorithm of a gate cannot change")]
fn a_gate_keeps_its_algorithm() {
    let (limiter, _) = limiter(&[]);
    let gate = limiter.gate_with("", "api", gcra(7, HOUR)).unwrap();
    let _ = gate.with_limit(window(7, HOUR));
}

#[test]
fn a_cost_of_0_looks_and_changes_nothing() {
    for limit in both(2, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        assert_eq!((0..9).map(|_| remaining(&limiter, gate.key("x"))).max(), Some(2));
        assert_eq!(limiter.stats().live, 0, "a check of cost 0 creates no meter");
        assert_eq!(passes(&limiter, gate.key("x"), 9), 2);
        assert!(
            limiter.check(gate.key("x").cost(0)).is_allowed(),
            "a check of cost 0 is allowed at a full meter"
        );
    }
}

#[test]
fn a_cost_above_the_burst_never_passes_and_costs_nothing() {
    for limit in [gcra(100, HOUR).with_burst(5).unwrap(), window(5, HOUR)] {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        for cost in [6, 1 << 32, 1 << 53, u64::MAX] {
            let outcome = limiter.check(gate.key("x").cost(cost));
            assert_eq!(outcome.verdict().retry(), Some(Retry::CostAboveBurst), "{cost}");
            assert_eq!((outcome.retry_after(), outcome.remaining()), (None, 5));
            clock.advance(HOUR);
        }
        assert!(limiter.check(gate.key("x").cost(5)).is_allowed());
    }
}

#[test]
fn a_limit_of_0_blocks_everything() {
    for limit in both(0, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        for cost in [0, 1, u64::MAX] {
            let outcome = limiter.check(gate.key("x").cost(cost));
            assert_eq!(outcome.verdict().retry(), Some(Retry::Blocked));
            assert_eq!((outcome.remaining(), outcome.retry_after()), (0, None));
        }
    }
}

#[test]
fn refund_returns_at_most_the_spent_units() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let _ = limiter.check(gate.key("x").cost(8));
        limiter.refund(gate.key("x").cost(3));
        assert_eq!(remaining(&limiter, gate.key("x")), 5);
        limiter.refund(gate.key("x").cost(u64::MAX));
        limiter.refund(gate.key("new").cost(3));
        assert_eq!(remaining(&limiter, gate.key("x")), 10);
        assert_eq!(remaining(&limiter, gate.key("new")), 10);
    }
}

#[test]
fn a_charge_goes_into_debt_that_has_to_drain_first() {
    let cases = [
        (gcra(10, MINUTE), Duration::from_secs(6 * (25 + 1 - 10))),
        // The next window sees 25 fade until 9 are left of it.
        (window(10, MINUTE), MINUTE + Duration::from_millis(38_400)),
    ];
    for (limit, wait) in cases {
        let (limiter, clock) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        limiter.charge(gate.key("x").cost(5));
        limiter.charge(gate.key("x").cost(20));
        let denied = limiter.check(gate.key("x"));
        assert_eq!((denied.remaining(), denied.retry_after()), (0, Some(wait)), "{limit:?}");
        clock.advance(wait);
        assert_eq!(passes(&limiter, gate.key("x"), 9), 1, "{limit:?}");
    }
}

#[test]
fn raise_lifts_a_meter_and_never_lowers_it() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let _ = limiter.check(gate.key("x").cost(4));
        for (used, left) in [(3, 6), (7, 3), (7, 3), (5, 3), (u64::MAX, 0)] {
            limiter.raise(gate.key("x").cost(used));
            assert_eq!(remaining(&limiter, gate.key("x")), left, "raised to {used}");
        }
    }
}

#[test]
fn reset_clears_the_usage_of_one_key() {
    for limit in both(10, HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        limiter.charge(gate.key("x").cost(u64::MAX));
        limiter.charge(gate.key("y").cost(4));
        limiter.reset(gate.key("x"));
        assert_eq!(remaining(&limiter, gate.key("x")), 10);
        assert_eq!(remaining(&limiter, gate.key("y")), 6);
    }
}

#[test]
fn tenants_are_counted_apart_and_none_can_crowd_out_another() {
    let described = Limiter::builder().limit("a", gcra(2, HOUR)).memory_bytes(1 << 16);
    let limiter = described.tenant("small", 1).tenant("large", 3).build().unwrap();
    let small = limiter.gate_of("small", "a").unwrap();
    let large = limiter.gate_of("large", "a").unwrap();
    let nobody = limiter.gate("a").unwrap();
    assert_eq!(passes(&limiter, small.key("x"), 1), 1);
    for key in 0..100_000_u32 {
        let _ = limiter.check(large.key(key.to_le_bytes()).cost(2));
    }
    assert!(
        limiter.stats_of("large").unwrap().spilled > 0,
        "more keys at their limit than there is room for"
    );
    assert_eq!(remaining(&limiter, small.key("x")), 1);
    assert_eq!(remaining(&limiter, nobody.key("x")), 2);
    assert_eq!(limiter.stats_of("small").unwrap().live, 1);
}

#[test]
fn extreme_costs_never_panic_and_never_admit_more_than_the_limit() {
    const LIMIT: u64 = 10;
    let costs = [0, 1, LIMIT, LIMIT + 1, 1 << 53, u64::MAX];
    for limit in both(LIMIT, HOUR) {
        for (first, second) in costs.into_iter().flat_map(|a| costs.map(|b| (a, b))) {
            let (limiter, _) = limiter(&[("a", limit)]);
            let gate = limiter.gate("a").unwrap();
            let ask = |cost| gate.key("x").cost(cost);
            let changes: [fn(&Limiter, Check<'_>); 4] =
                [Limiter::charge, Limiter::raise, Limiter::refund, Limiter::reset];
            for change in changes {
                change(&limiter, ask(first));
                let left = u64::from(remaining(&limiter, ask(0)));
                let outcome = limiter.check_all(&[ask(second)]).unwrap();
                // A check of cost 0 may be denied while the meter is in debt, and changes nothing
                // either way.
                let as_told = second == 0 || outcome.is_allowed() == (second <= left);
                assert!(as_told, "{first} then {second} of {left}");
                let after = if outcome.is_allowed() { left - second } else { left };
                assert_eq!(u64::from(remaining(&limiter, ask(0))), after);
            }
        }
    }
}

fn denied_by<'g>(decision: &Decision<'g>) -> Option<&'g str> {
    decision.denied_by().map(|outcome| outcome.gate().name())
}

fn lefts(outcomes: &[Outcome<'_>]) -> Vec<u32> {
    outcomes.iter().map(Outcome::remaining).collect()
}
