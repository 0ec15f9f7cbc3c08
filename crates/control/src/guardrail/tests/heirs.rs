//! Overrides that a change does not name, of a rule that it names.

use std::collections::BTreeSet;

use super::*;

const PER_MINUTE: &str = r#""limit":100,"period":"1m""#;
const SAME_PER_HOUR: &str = r#""limit":6000,"period":"1h""#;

fn rule(fields: &str) -> String {
    format!(r#"{{"key":["user"],{fields}}}"#)
}

/// A rule with these overrides, beside another one that has some too.
fn with_overrides(body: &str, overrides: &[String]) -> RuleRows {
    let other = row(RowKind::Override, "other", r#"{"rule":"b","key":["*"],"limit":1000}"#);
    let overrides =
        overrides.iter().enumerate().map(|(at, body)| row(RowKind::Override, &format!("p{at:03}"), body));
    let rules = [row(RowKind::Rule, "a", body), row(RowKind::Rule, "b", &rule(PER_MINUTE)), other];
    let mut rows: Vec<RuleRow> = rules.into_iter().chain(overrides).collect();
    rows.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    RuleRows { revision: 1, rows: rows.into(), ..RuleRows::default() }
}

/// Returns the consent that a change needs without a measurement, the rules it touches, and those
/// that are watched.
fn judged(rule_rows: &RuleRows, change: &[Operation]) -> (ChangeNeeds, Vec<String>, BTreeSet<String>) {
    let set = RuleSet::compile(rule_rows, None, NOW_MS).expect("compiles");
    let change_plan = ChangePlan::new(&set, rule_rows, change, None, NOW_MS).expect("compiles");
    let watched = tightened((&set, change_plan.after()), rule_rows, change, NOW_MS);
    assert_eq!(watched, change_plan.scope().stricter());
    let effect = ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default());
    (effect.needs, effect.touched, watched.known)
}

/// Returns the consent for a change of a rule with these overrides.
fn needs((before, after): (&str, &str), overrides: &[String]) -> ChangeNeeds {
    let change = [put(RowKind::Rule, "a", &rule(after))];
    let (needs, touched, watched) = judged(&with_overrides(&rule(before), overrides), &change);
    assert!(watched.iter().all(|rule| touched.contains(rule)), "{watched:?}: {touched:?}");
    assert_eq!(
        !watched.is_empty(),
        needs != ChangeNeeds::Nothing,
        "what may deny more is watched: {watched:?}"
    );
    needs
}

fn keys(count: usize, fields: &str) -> Vec<String> {
    (0..count).map(|at| over(&format!(r#""key":["u{at}"],{fields}"#))).collect()
}

#[test]
fn a_period_that_overrides_have_from_their_rule_is_compared_for_each_of_them() {
    let slower = |overrides: &[String]| needs((PER_MINUTE, SAME_PER_HOUR), overrides);
    assert_eq!(slower(&[]), ChangeNeeds::Nothing, "the same rate, and a larger burst");
    assert_eq!(slower(&[over(r#""key":["*"],"limit":1000"#)]), ChangeNeeds::Approver);
    assert_eq!(slower(&[over(r#""key":["u*"],"limit":1000,"tenant":"acme""#)]), ChangeNeeds::Approver);
    assert_eq!(
        [1, 10, 11].map(|count| slower(&keys(count, r#""limit":1000"#))),
        [ChangeNeeds::Confirmation, ChangeNeeds::Confirmation, ChangeNeeds::Approver]
    );
    // Not affected: overrides with their own period, in shadow mode, or with a limit of 0.
    for fields in [r#""limit":1000,"period":"1m""#, r#""limit":1000,"mode":"shadow""#, r#""limit":0"#] {
        assert_eq!(slower(&keys(11, fields)), ChangeNeeds::Nothing, "{fields}");
    }
    let longer = (PER_MINUTE, r#""limit":150,"period":"90s""#);
    assert_eq!(
        needs(longer, &[over(r#""key":["*"],"limit":1000"#)]),
        ChangeNeeds::Confirmation,
        "more than half is left"
    );
}

#[test]
fn a_burst_that_overrides_have_from_their_rule_is_compared_for_each_of_them() {
    let wide = [over(r#""key":["*"],"limit":1000"#)];
    let burst = |burst: u32| format!(r#"{PER_MINUTE},"burst":{burst}"#);
    assert_eq!(needs((PER_MINUTE, &burst(60)), &[]), ChangeNeeds::Approver);
    assert_eq!(needs((PER_MINUTE, &burst(60)), &wide), ChangeNeeds::Approver);
    // The rule now sets its default burst: it stays the same, but its overrides change.
    assert_eq!(needs((PER_MINUTE, &burst(100)), &[]), ChangeNeeds::Nothing);
    assert_eq!(needs((PER_MINUTE, &burst(100)), &wide), ChangeNeeds::Approver);
    assert_eq!(needs((PER_MINUTE, &burst(100)), &keys(1, r#""limit":1000"#)), ChangeNeeds::Confirmation);
    assert_eq!(needs((&burst(100), PER_MINUTE), &wide), ChangeNeeds::Nothing);
}

#[test]
fn template_change_reaches_overrides_of_its_rules() {
    let mut rule_rows =
        with_overrides(r#"{"key":["user"],"template":"t"}"#, &[over(r#""key":["*"],"limit":1000"#)]);
    let says = |fields: &str| format!("{{{fields}}}");
    let template = row(RowKind::Template, "t", &says(PER_MINUTE));
    rule_rows.rows = [template].into_iter().chain(rule_rows.rows.iter().cloned()).collect();
    let change = [put(RowKind::Template, "t", &says(SAME_PER_HOUR))];
    let (needs, touched, watched) = judged(&rule_rows, &change);
    assert_eq!((needs, touched, watched.len()), (ChangeNeeds::Approver, vec!["a".to_owned()], 1));
}

#[test]
fn an_override_that_is_named_too_is_counted_once_and_as_the_change_has_it() {
    let there = keys(10, r#""limit":1000"#);
    let rule_rows = with_overrides(&rule(PER_MINUTE), &there);
    let slower = || put(RowKind::Rule, "a", &rule(SAME_PER_HOUR));
    let with = |fields: &str| {
        let named = put(RowKind::Override, "p000", &over(&format!(r#""key":["u0"],{fields}"#)));
        judged(&rule_rows, &[slower(), named]).0
    };
    assert_eq!(with(r#""limit":1000"#), ChangeNeeds::Confirmation, "ten, and not eleven");
    let eleventh = put(RowKind::Override, "p010", &over(r#""key":["u10"],"limit":1"#));
    assert_eq!(judged(&rule_rows, &[slower(), eleventh]).0, ChangeNeeds::Approver, "ten, and one more");
    let one = with_overrides(&rule(PER_MINUTE), &there[..1]);
    let mended = put(RowKind::Override, "p000", &over(r#""key":["u0"],"limit":1000,"period":"1m""#));
    assert_eq!(judged(&one, &[slower(), mended]).0, ChangeNeeds::Nothing);
}
