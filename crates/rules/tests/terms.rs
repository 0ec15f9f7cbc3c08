//! The terms of a rule for a key: alone, with a template, under overrides, and in an emergency.

#![allow(clippy::expect_used, reason = "helpers of tests may panic as tests may")]

use std::time::Duration;

use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::{Class, Dimensions, Mode, RuleSet};

const FILE: &str = r#"
    [[templates]]
    name = "pro"
    class = "cost"
    limit = 100
    period = "1h"
    burst = 20

    [[rules]]
    name = "last"
    priority = -1
    key = []
    limit = 1
    period = "1s"

    [[rules]]
    name = "calls"
    template = "pro"
    key = ["user"]
    period = "1m"

    [[rules]]
    name = "addresses"
    key = ["ip"]
    limit = 5
    period = "1s"
    algorithm = "sliding_window"

    [[rules]]
    name = "first"
    priority = 3
    key = []
    limit = 1
    period = "1s"

    [[overrides]]
    name = "alice"
    rule = "calls"
    key = ["alice"]
    limit = 1000
    period = "1d"
    mode = "shadow"

    [[overrides]]
    name = "few"
    rule = "calls"
    key = ["b*"]
    limit = 3

    [[overrides]]
    name = "bob, while it lasts"
    rule = "calls"
    key = ["bob"]
    limit = 7
    burst = 9
    expires = 1_000_000_000_050

    [[overrides]]
    name = "home"
    rule = "addresses"
    key = ["2001:db8:1:2::7"]
    limit = 50
"#;

/// Returns the limit, burst, period and mode of one rule for a request, and the override in force.
fn terms<'s>(
    set: &'s RuleSet,
    rule: &str,
    request: &Dimensions<'_>,
    now_ms: u64,
) -> (u32, u32, Duration, Mode, Option<&'s str>) {
    let found = set.matching("", request, now_ms).find(|found| *found.rule.name == *rule);
    let terms = found.expect("it applies").terms;
    (terms.limit.amount(), terms.limit.burst(), terms.limit.period(), terms.mode, terms.override_name)
}

fn user(name: &str) -> Dimensions<'_> {
    Dimensions::new([("user", name)]).expect("good dimensions")
}

#[test]
fn rule_inherits_unset_fields_from_its_template() {
    let set = RuleSet::parse(FILE).expect("a good file");
    let calls = set.rules().iter().find(|rule| &*rule.name == "calls").expect("it is there");
    assert_eq!((calls.class, calls.limit.amount(), calls.limit.burst()), (Class::Cost, 100, 20));
    assert_eq!(calls.limit.period(), Duration::from_mins(1));
}

#[test]
fn rules_of_a_file_come_by_priority_and_then_as_they_were_written() {
    let set = RuleSet::parse(FILE).expect("a good file");
    let request = Dimensions::new([("user", "a"), ("ip", "10.0.0.1")]).expect("good dimensions");
    let names: Vec<_> = set.matching("", &request, 0).map(|found| &*found.rule.name).collect();
    assert_eq!(names, ["first", "calls", "addresses", "last"]);
}

#[test]
fn override_replaces_its_fields_and_inherits_the_rest() {
    let set = RuleSet::parse(FILE).expect("a good file");
    let (minute, day) = (Duration::from_mins(1), Duration::from_hours(24));
    let of = |name: &str, now_ms| terms(&set, "calls", &user(name), now_ms);
    assert_eq!(of("alice", 0), (1_000, 20, day, Mode::Shadow, Some("alice")));
    // Of a burst of 20 it gets no more than it has.
    assert_eq!(of("bert", 0), (3, 3, minute, Mode::Enforce, Some("few")));
    assert_eq!(of("bob", 1_000_000_000_049), (7, 9, minute, Mode::Enforce, Some("bob, while it lasts")));
    assert_eq!(of("bob", 1_000_000_000_050), (3, 3, minute, Mode::Enforce, Some("few")));
    assert_eq!(of("zoe", 0), (100, 20, minute, Mode::Enforce, None));
}

#[test]
fn an_override_of_an_address_is_for_all_that_counts_as_it() {
    let set = RuleSet::parse(FILE).expect("a good file");
    for (address, limit) in [("2001:db8:1:2::9", 50), ("2001:db8:1:3::9", 5)] {
        let mut request = Dimensions::default();
        request.add_address(address.parse().expect("an address")).expect("the first");
        assert_eq!(terms(&set, "addresses", &request, 0).0, limit, "{address}");
    }
}

fn emergencies(given: &[(&str, &str)]) -> RuleSet {
    let rule = |name: &str, rest: &str| RuleRow {
        kind: RowKind::Rule,
        name: name.to_owned(),
        body: format!(r#"{{"key":["user"],"limit":10,"period":"1m"{rest}}}"#),
        version: 5,
    };
    let rows = vec![rule("calls", ""), rule("windows", r#","algorithm":"sliding_window","mode":"shadow""#)];
    let row =
        |(id, body): &(&str, &str)| EmergencyRow { id: (*id).into(), body: (*body).into(), expires_ms: 60 };
    let rule_rows =
        RuleRows { rows: rows.into(), emergencies: given.iter().map(row).collect(), ..RuleRows::default() };
    RuleSet::compile(&rule_rows, None, 0).expect("valid rules")
}

/// Returns the limit, the mode and the emergency in force, by rule.
fn in_force<'s>(set: &'s RuleSet, name: &str, now_ms: u64) -> Vec<(u32, Mode, Option<&'s str>)> {
    let request = user(name);
    let terms = set.matching("", &request, now_ms).map(|found| {
        assert_eq!(found.terms.limit.algorithm(), found.rule.limit.algorithm());
        assert_eq!(found.rule.version, 5);
        (found.terms.limit.amount(), found.terms.mode, found.terms.emergency.map(|found| found.id))
    });
    terms.collect()
}

#[test]
fn an_emergency_goes_before_everything_until_it_ends() {
    let usual = [(10, Mode::Enforce, None), (10, Mode::Shadow, None)];
    let all = emergencies(&[("e", r#"{"action":"block","reason":"attack","by":"ops","created_ms":1}"#)]);
    assert_eq!(in_force(&all, "a", 59), [(0, Mode::Enforce, Some("e")); 2]);
    assert_eq!(in_force(&all, "a", 60), usual);
    let slow = emergencies(&[("e", r#"{"action":"limit","limit":2,"period":"1s","when":{"user":"m*"}}"#)]);
    assert_eq!(in_force(&slow, "mallory", 0), [(2, Mode::Enforce, Some("e")); 2]);
    assert_eq!(in_force(&slow, "alice", 0), usual);
    let free = emergencies(&[("e", r#"{"action":"allow","rule":"calls","key":["alice"]}"#)]);
    assert_eq!(in_force(&free, "alice", 0), [(10, Mode::Shadow, Some("e")), (10, Mode::Shadow, None)]);
    assert_eq!(in_force(&free, "bob", 0), usual);
}

#[test]
fn other_emergencies_are_put_before_a_set_that_stays() {
    let row = |id: &str, body: &str| EmergencyRow { id: id.into(), body: body.into(), expires_ms: 60 };
    let usual = [(10, Mode::Enforce, None), (10, Mode::Shadow, None)];
    let before = emergencies(&[("e", r#"{"action":"block"}"#)]);
    let stop = row("stop", r#"{"action":"block","rule":"windows","key":["a"]}"#);
    let after = before.with_emergencies(3, &[stop, row("old", r#"{"action":"allow"}"#)], 0).expect("good");
    assert_eq!(after.version(), "r0e3");
    assert_eq!(in_force(&after, "a", 0)[1], (0, Mode::Enforce, Some("stop")));
    assert_eq!(in_force(&after, "b", 0)[1], (10, Mode::Shadow, Some("old")));
    assert_eq!(in_force(&before, "b", 0), [(0, Mode::Enforce, Some("e")); 2], "the earlier set is unchanged");
    assert_eq!(in_force(&after.with_emergencies(4, &[], 0).expect("good"), "a", 0), usual);
    for (body, problem) in [
        (r#"{"action":"block","rule":"none"}"#, "emergencies[\"e\"].rule: there is no rule \"none\""),
        (r#"{"action":"block","rule":"calls","key":[]}"#, "emergencies[\"e\"].key: "),
        (r#"{"action":"stop"}"#, "emergencies[\"e\"].action: "),
        ("[]", "emergencies[\"e\"]: "),
        ("{", "emergencies[\"e\"]"),
    ] {
        let problems = before.with_emergencies(3, &[row("e", body)], 0).expect_err(body).to_string();
        assert!(problems.starts_with(problem), "{problem}: {problems}");
    }
    let over = row("e", r#"{"action":"block","rule":"gone"}"#);
    assert!(before.with_emergencies(3, &[over], 60).is_ok(), "an expired emergency needs no rule");
    let many: Vec<_> = (0..257).map(|at| row(&at.to_string(), r#"{"action":"block"}"#)).collect();
    let problems = before.with_emergencies(3, &many, 0).expect_err("too many").to_string();
    assert_eq!(problems, "emergencies: 257 is outside 0 to 256");
}

#[test]
fn block_precedes_other_emergencies_then_the_most_specific() {
    let set = emergencies(&[
        ("slow", r#"{"action":"limit","limit":2,"period":"1s"}"#),
        ("free", r#"{"action":"allow","when":{"user":"al*"}}"#),
        ("stop", r#"{"action":"block","when":{"user":"*x"}}"#),
    ]);
    let ids = |name| in_force(&set, name, 0).first().and_then(|terms| terms.2);
    assert_eq!([ids("bob"), ids("alice"), ids("alex")], [Some("slow"), Some("free"), Some("stop")]);
}

#[test]
fn rule_set_dimensions_include_those_of_emergencies() {
    let set = emergencies(&[("e", r#"{"action":"block","tenant":"acme","when":{"header.x-key":"a"}}"#)]);
    assert!(set.dimensions_used("acme").contains("header.x-key"));
    assert!(!set.dimensions_used("").contains("header.x-key"));
}

#[test]
fn a_rule_without_dimensions_still_needs_those_of_emergencies() {
    let rule = |key: &str| RuleRow {
        kind: RowKind::Rule,
        name: "all".to_owned(),
        body: format!(r#"{{"tenant":"acme","key":{key},"limit":10,"period":"1m"}}"#),
        version: 1,
    };
    let body = r#"{"action":"block","when":{"path":"/admin"}}"#;
    let emergency = EmergencyRow { id: "e".into(), body: body.into(), expires_ms: 60 };
    let rule_rows =
        RuleRows { rows: vec![rule("[]")].into(), emergencies: vec![emergency], ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, 0).expect("valid rows");
    assert!(set.dimensions_used("acme").contains("path"));
    assert!(set.dimensions_used("other").is_empty(), "a tenant without rules needs no dimension");
}
