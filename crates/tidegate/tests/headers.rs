//! Decisions as header fields, to the letter; read back with the parser of structured fields where
//! they are one.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{HOUR, MINUTE, SECOND, gcra, limiter, window};
use http::{HeaderMap, HeaderValue};
use sfv::{BareItem, List, ListEntry, Parser};
use tidegate::headers::{ResetStyle, headers, problem_body, set_headers};
use tidegate::{Check, Decision, Gate, LIMITS_INLINE_MAX, Limit, Limiter};

/// Half a second past a whole one, so that an instant that is not rounded up is noticed.
const WALL_US: u64 = 1_000_000_000_500_000;

/// The fields of a decision, as text.
fn fields(decision: &Decision<'_>, reset: ResetStyle) -> Vec<(String, String)> {
    let text = |value: HeaderValue| value.to_str().unwrap().to_owned();
    headers(decision, WALL_US, reset)
        .into_iter()
        .map(|(name, value)| (name.to_string(), text(value)))
        .collect()
}

/// Asserts that a request of `cost` under these limits gets exactly these fields. Each limit comes
/// with the units spent before.
fn assert_fields(limits: &[(&str, Limit, u64)], cost: u64, expected: &[(&str, &str)]) {
    let named: Vec<_> = limits.iter().map(|&(name, limit, _)| (name, limit)).collect();
    let (limiter, _) = limiter(&named);
    let gates: Vec<_> = limits.iter().map(|(name, ..)| limiter.gate(name).unwrap()).collect();
    for (gate, (.., spent)) in gates.iter().zip(limits) {
        limiter.charge(gate.key("x").cost(*spent));
    }
    let asks: Vec<_> = gates.iter().map(|gate| gate.key("x").cost(cost)).collect();
    let made = fields(&limiter.check_all(&asks).unwrap(), ResetStyle::Epoch);
    let made: Vec<_> = made.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    assert_eq!(made, expected);
}

#[test]
fn allowed_request_has_remaining_and_reset_headers() {
    assert_fields(
        &[("permin", gcra(50, MINUTE), 0)],
        38,
        &[
            ("ratelimit-policy", r#""permin";q=50;w=60"#),
            ("ratelimit", r#""permin";r=12;t=46"#), // 38 take 45.6 s to drain
            ("x-ratelimit-limit", "50"),
            ("x-ratelimit-remaining", "12"),
            ("x-ratelimit-reset", "1000000047"), // half a second and 45.6 s later
            ("x-ratelimit-policy", "50;w=60"),
        ],
    );
}

#[test]
fn several_limits_are_all_listed_and_the_one_with_the_least_share_left_matters_most() {
    assert_fields(
        &[("perhr", window(1_000, HOUR), 600), ("permin", gcra(50, MINUTE), 0)],
        10,
        &[
            ("ratelimit-policy", r#""perhr";q=1000;w=3600, "permin";q=50;w=60"#),
            ("ratelimit", r#""perhr";r=390;t=7200, "permin";r=40;t=12"#),
            ("x-ratelimit-limit", "1000"), // 39% are less than 80%, though 390 are more than 40
            ("x-ratelimit-remaining", "390"),
            ("x-ratelimit-reset", "1000007201"),
            ("x-ratelimit-policy", "1000;w=3600"),
        ],
    );
}

#[test]
fn of_equal_shares_the_first_limit_matters_most() {
    assert_fields(
        &[("a", gcra(10, MINUTE), 4), ("b", gcra(100, MINUTE), 49)],
        1,
        &[
            ("ratelimit-policy", r#""a";q=10;w=60, "b";q=100;w=60"#),
            ("ratelimit", r#""a";r=5;t=30, "b";r=50;t=30"#),
            ("x-ratelimit-limit", "10"),
            ("x-ratelimit-remaining", "5"),
            ("x-ratelimit-reset", "1000000031"),
            ("x-ratelimit-policy", "10;w=60"),
        ],
    );
}

#[test]
fn a_share_is_one_of_the_burst_and_not_of_the_amount() {
    assert_fields(
        &[("a", gcra(100, MINUTE).with_burst(20).unwrap(), 4), ("b", gcra(100, MINUTE), 59)],
        1,
        &[
            ("ratelimit-policy", r#""a";q=100;w=60, "b";q=100;w=60"#),
            ("ratelimit", r#""a";r=15;t=3, "b";r=40;t=36"#),
            ("x-ratelimit-limit", "100"),
            ("x-ratelimit-remaining", "40"), // 40 of 100 are less than 15 of 20
            ("x-ratelimit-reset", "1000000037"),
            ("x-ratelimit-policy", "100;w=60"),
        ],
    );
}

#[test]
fn a_denial_lists_the_limits_that_denied_and_when_they_would_not() {
    assert_fields(
        &[("perhr", gcra(1_000, HOUR), 100), ("permin", gcra(50, MINUTE), 49)],
        2,
        &[
            ("ratelimit-policy", r#""perhr";q=1000;w=3600, "permin";q=50;w=60"#),
            ("ratelimit", r#""permin";r=1;t=2"#), // 1.2 s
            ("x-ratelimit-limit", "50"),
            ("x-ratelimit-remaining", "1"),
            ("x-ratelimit-reset", "1000000002"),
            ("x-ratelimit-policy", "50;w=60"),
            ("x-ratelimit-denied-by", "permin"),
            ("retry-after", "2"),
        ],
    );
}

#[test]
fn of_several_denials_the_longest_is_the_time_to_wait() {
    assert_fields(
        &[("permin", gcra(50, MINUTE), 50), ("perhr", gcra(10, HOUR), 10), ("persec", gcra(9, SECOND), 9)],
        1,
        &[
            ("ratelimit-policy", r#""permin";q=50;w=60, "perhr";q=10;w=3600, "persec";q=9;w=1"#),
            ("ratelimit", r#""permin";r=0;t=2, "perhr";r=0;t=360, "persec";r=0;t=1"#),
            ("x-ratelimit-limit", "10"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "1000000361"),
            ("x-ratelimit-policy", "10;w=3600"),
            ("x-ratelimit-denied-by", "perhr"),
            ("retry-after", "360"),
        ],
    );
}

#[test]
fn never_allowed_request_has_no_retry_header() {
    assert_fields(
        &[("large", gcra(50, MINUTE), 48), ("small", window(3, MINUTE), 0)],
        4,
        &[
            ("ratelimit-policy", r#""large";q=50;w=60, "small";q=3;w=60"#),
            ("ratelimit", r#""large";r=2;t=3, "small";r=3"#),
            ("x-ratelimit-limit", "3"),
            ("x-ratelimit-remaining", "3"),
            ("x-ratelimit-policy", "3;w=60"),
            ("x-ratelimit-denied-by", "small"),
        ],
    );
}

#[test]
fn a_limit_of_0_is_given_no_time() {
    for limit in [gcra(0, MINUTE), window(0, MINUTE)] {
        assert_fields(
            &[("closed", limit, 0)],
            1,
            &[
                ("ratelimit-policy", r#""closed";q=0;w=60"#),
                ("ratelimit", r#""closed";r=0"#),
                ("x-ratelimit-limit", "0"),
                ("x-ratelimit-remaining", "0"),
                ("x-ratelimit-policy", "0;w=60"),
                ("x-ratelimit-denied-by", "closed"),
            ],
        );
    }
}

#[test]
fn parts_of_a_second_count_as_a_whole_one() {
    assert_fields(
        &[("quick", gcra(1, Duration::from_millis(1)), 1)],
        1,
        &[
            ("ratelimit-policy", r#""quick";q=1;w=1"#),
            ("ratelimit", r#""quick";r=0;t=1"#),
            ("x-ratelimit-limit", "1"),
            ("x-ratelimit-remaining", "0"),
            ("x-ratelimit-reset", "1000000001"),
            ("x-ratelimit-policy", "1;w=1"),
            ("x-ratelimit-denied-by", "quick"),
            ("retry-after", "1"),
        ],
    );
}

#[test]
fn a_decision_under_no_limits_has_no_fields() {
    assert_fields(&[], 1, &[]);
}

#[test]
fn reset_can_be_a_delta_in_seconds() {
    let (limiter, _) = limiter(&[("permin", gcra(50, MINUTE))]);
    let gate = limiter.gate("permin").unwrap();
    let reset = |cost| {
        let decision = limiter.check_all(&[gate.key("x").cost(cost)]).unwrap();
        let fields = fields(&decision, ResetStyle::Delta);
        fields.into_iter().find(|(name, _)| name == "x-ratelimit-reset").map(|(_, value)| value)
    };
    assert_eq!(reset(38).as_deref(), Some("46"));
    assert_eq!(reset(38).as_deref(), Some("32"), "the wait of the denial: 26 units of 1.2 s");
    assert_eq!(reset(51), None);
}

#[test]
fn reset_beyond_the_time_range_is_clamped() {
    let (limiter, _) = limiter(&[("permin", gcra(50, MINUTE))]);
    let gate = limiter.gate("permin").unwrap();
    let decision = limiter.check_all(&[gate.key("x")]).unwrap();
    let mut made = HeaderMap::new();
    set_headers(&mut made, &decision, u64::MAX, ResetStyle::Epoch);
    assert_eq!(made["x-ratelimit-reset"], u64::MAX.div_ceil(1_000_000).to_string());
}

#[test]
fn fields_that_are_there_already_are_replaced() {
    let (limiter, _) = limiter(&[("permin", gcra(50, MINUTE))]);
    let gate = limiter.gate("permin").unwrap();
    let decision = limiter.check_all(&[gate.key("x")]).unwrap();
    let mut made = HeaderMap::new();
    made.append("ratelimit", HeaderValue::from_static("stale"));
    made.append("ratelimit", HeaderValue::from_static("staler"));
    made.append("content-type", HeaderValue::from_static("text/plain"));
    set_headers(&mut made, &decision, WALL_US, ResetStyle::Epoch);
    assert_eq!(made.get_all("ratelimit").iter().collect::<Vec<_>>(), [r#""permin";r=49;t=2"#]);
    assert_eq!(made["content-type"], "text/plain");
}

/// Names of limits, and their form on the wire.
const NAMES: [(&str, &str); 11] = [
    ("per_user", "per_user"),
    ("per user, per day", "per user, per day"),
    (r#"say "hi""#, r#"say "hi""#),
    (r"back\slash", r"back\slash"),
    ("größe", "gr%C3%B6%C3%9Fe"),
    ("限", "%E9%99%90"),
    ("100%", "100%25"),
    ("%25", "%2525"),
    ("two\r\nlines: x", "two%0D%0Alines: x"),
    ("\0\u{7f}", "%00%7F"),
    ("", ""),
];

/// Passes denials by all of [`NAMES`] to `then`, as many at a time as one request may have, with
/// their form on the wire.
fn denied_by_all(limiter: &Limiter, then: impl Fn(&Decision<'_>, &[&str])) {
    for names in NAMES.chunks(LIMITS_INLINE_MAX) {
        let gates: Vec<Gate> = names.iter().map(|(name, _)| limiter.gate(name).unwrap()).collect();
        let asks: Vec<Check<'_>> = gates.iter().map(|gate| gate.key("x").cost(2)).collect();
        let wire: Vec<&str> = names.iter().map(|(_, wire)| *wire).collect();
        then(&limiter.check_all(&asks).unwrap(), &wire);
    }
}

#[test]
fn any_name_survives_the_structured_fields() {
    let (limiter, _) = limiter(&NAMES.map(|(name, _)| (name, gcra(1, MINUTE))));
    denied_by_all(&limiter, |decision, wire| {
        let fields = fields(decision, ResetStyle::Epoch);
        for (field, value) in &fields[..2] {
            assert_eq!(names_in(value), wire, "{field}");
        }
    });
}

#[test]
fn any_name_can_be_the_one_that_denied() {
    for (name, wire) in NAMES {
        let (limiter, _) = limiter(&[(name, gcra(0, MINUTE))]);
        let gate = limiter.gate(name).unwrap();
        let decision = limiter.check_all(&[gate.key("x")]).unwrap();
        let fields = fields(&decision, ResetStyle::Epoch);
        let denied_by = fields.iter().find(|(name, _)| name == "x-ratelimit-denied-by");
        assert_eq!(denied_by.map(|(_, value)| value.as_str()), Some(wire));
    }
}

#[test]
fn the_problem_names_the_limits_that_denied_as_the_fields_do() {
    let (limiter, _) = limiter(&NAMES.map(|(name, _)| (name, gcra(1, MINUTE))));
    denied_by_all(&limiter, |decision, wire| {
        let problem: serde_json::Value = serde_json::from_str(&problem_body(decision)).unwrap();
        let expected = serde_json::json!({
            "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
            "title": "Request cannot be satisfied as assigned quota has been exceeded",
            "status": 429,
            "violated-policies": wire,
        });
        assert_eq!(problem, expected);
    });
}

#[test]
fn the_problem_leaves_out_limits_that_would_have_allowed() {
    let (limiter, _) = limiter(&[("a", gcra(1, MINUTE)), ("b", gcra(9, MINUTE)), ("c", gcra(1, HOUR))]);
    let gates = ["a", "b", "c"].map(|name| limiter.gate(name).unwrap());
    let asks = gates.each_ref().map(|gate| gate.key("x").cost(2));
    let body = problem_body(&limiter.check_all(&asks).unwrap());
    let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(problem["violated-policies"], serde_json::json!(["a", "c"]));
}

#[test]
fn request_after_retry_after_is_allowed() {
    let limits = [("odd", gcra(7, SECOND)), ("min", window(13, MINUTE)), ("slow", gcra(3, 7 * SECOND))];
    let (limiter, clock) = limiter(&limits);
    let gates = limits.map(|(name, _)| limiter.gate(name).unwrap());
    let mut denials = 0;
    for round in 0..500_u64 {
        clock.advance(Duration::from_micros(round * 7_919 % 900_001));
        let asks = [0, 1, 2].map(|at| gates[at].key("x").cost(1 + (round + at as u64) % 3));
        let decision = limiter.check_all(&asks).unwrap();
        let mut made = HeaderMap::new();
        set_headers(&mut made, &decision, limiter.wall_us(), ResetStyle::Epoch);
        let Some(wait) = made.get("retry-after") else {
            assert!(decision.is_allowed());
            continue;
        };
        let wait: u64 = wait.to_str().unwrap().parse().unwrap();
        let ends = parameters(made["ratelimit"].to_str().unwrap(), "t");
        assert_eq!(ends.iter().max(), Some(&i64::try_from(wait).unwrap()));
        clock.advance(Duration::from_secs(wait));
        assert!(limiter.check_all(&asks).unwrap().is_allowed(), "round {round}: too early after {wait} s");
        denials += 1;
    }
    assert!(denials > 100, "only {denials} requests had to wait");
}

fn parse(list: &str) -> Vec<sfv::Item> {
    let entries: List = Parser::new(list).parse().unwrap();
    let item = |entry| match entry {
        ListEntry::Item(item) => item,
        ListEntry::InnerList(list) => panic!("an inner list: {list:?}"),
    };
    entries.into_iter().map(item).collect()
}

fn names_in(list: &str) -> Vec<String> {
    let name = |item: sfv::Item| item.bare_item.as_string().unwrap().as_str().to_owned();
    parse(list).into_iter().map(name).collect()
}

fn parameters(list: &str, name: &str) -> Vec<i64> {
    let value = |item: &sfv::Item| match item.params.get(name) {
        Some(BareItem::Integer(value)) => Some(i64::from(*value)),
        _ => None,
    };
    parse(list).iter().filter_map(value).collect()
}
