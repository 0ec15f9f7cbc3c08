//! Overrides that nobody names, of a rule that a change does.

use std::collections::BTreeSet;

use super::*;

const PER_MINUTE: &str = r#""limit":100,"period":"1m""#;
const SAME_PER_HOUR: &str = r#""limit":6000,"period":"1h""#;

fn rule(fields: &str) -> String {
    format!(r#"{{"key":["user"],{fields}}}"#)
}

/// A rule with these overrides, beside another one that has some too.
fn with_overrides(body: &str, overrides: &[String]) -> Book {
    let other = row(Kind::Override, "other", r#"{"rule":"b","key":["*"],"limit":1000}"#);
    let overrides =
        overrides.iter().enumerate().map(|(at, body)| row(Kind::Override, &format!("p{at:03}"), body));
    let rules = [row(Kind::Rule, "a", body), row(Kind::Rule, "b", &rule(PER_MINUTE)), other];
    let mut rows: Vec<Row> = rules.into_iter().chain(overrides).collect();
    rows.sort_by(|a, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
    Book { revision: 1, rows: rows.into(), ..Book::default() }
}

/// What a change takes of which nothing can be measured, which rules it touches, and which are watched for it.
fn judged(book: &Book, change: &[Operation]) -> (Needs, Vec<String>, BTreeSet<String>) {
    let set = RuleSet::compile(book, None, NOW_MS).expect("compiles");
    let trial = Trial::new(&set, book, change, None, NOW_MS).expect("compiles");
    let watched = tightened((&set, trial.after()), book, change, NOW_MS);
    let effect = Effect::unknown(trial.scope(), Unknown::NoLog, &Approved::default());
    (effect.needs, effect.touched, watched)
}

/// What it takes that a rule says something else, with these overrides.
fn needs((before, after): (&str, &str), overrides: &[String]) -> Needs {
    let change = [put(Kind::Rule, "a", &rule(after))];
    let (needs, touched, watched) = judged(&with_overrides(&rule(before), overrides), &change);
    assert!(watched.iter().all(|rule| touched.contains(rule)), "{watched:?}: {touched:?}");
    assert_eq!(!watched.is_empty(), needs != Needs::Nothing, "what may deny more is watched: {watched:?}");
    needs
}

fn keys(count: usize, fields: &str) -> Vec<String> {
    (0..count).map(|at| over(&format!(r#""key":["u{at}"],{fields}"#))).collect()
}

#[test]
fn a_period_that_overrides_have_from_their_rule_is_compared_for_each_of_them() {
    let slower = |overrides: &[String]| needs((PER_MINUTE, SAME_PER_HOUR), overrides);
    assert_eq!(slower(&[]), Needs::Nothing, "the same rate, and a larger burst");
    assert_eq!(slower(&[over(r#""key":["*"],"limit":1000"#)]), Needs::Approver);
    assert_eq!(slower(&[over(r#""key":["u*"],"limit":1000,"tenant":"acme""#)]), Needs::Approver);
    assert_eq!(
        [1, 10, 11].map(|count| slower(&keys(count, r#""limit":1000"#))),
        [Needs::Confirmation, Needs::Confirmation, Needs::Approver]
    );
    // Not theirs: what they say themselves, and what stops nobody.
    for fields in [r#""limit":1000,"period":"1m""#, r#""limit":1000,"mode":"shadow""#, r#""limit":0"#] {
        assert_eq!(slower(&keys(11, fields)), Needs::Nothing, "{fields}");
    }
    let longer = (PER_MINUTE, r#""limit":150,"period":"90s""#);
    assert_eq!(
        needs(longer, &[over(r#""key":["*"],"limit":1000"#)]),
        Needs::Confirmation,
        "more than half is left"
    );
}

#[test]
fn a_burst_that_overrides_have_from_their_rule_is_compared_for_each_of_them() {
    let wide = [over(r#""key":["*"],"limit":1000"#)];
    let burst = |burst: u32| format!(r#"{PER_MINUTE},"burst":{burst}"#);
    assert_eq!(needs((PER_MINUTE, &burst(60)), &[]), Needs::Confirmation);
    assert_eq!(needs((PER_MINUTE, &burst(60)), &wide), Needs::Approver);
    // What followed from the limit is said now: the rule is the same, and its overrides are not.
    assert_eq!(needs((PER_MINUTE, &burst(100)), &[]), Needs::Nothing);
    assert_eq!(needs((PER_MINUTE, &burst(100)), &wide), Needs::Approver);
    assert_eq!(needs((PER_MINUTE, &burst(100)), &keys(1, r#""limit":1000"#)), Needs::Confirmation);
    assert_eq!(needs((&burst(100), PER_MINUTE), &wide), Needs::Nothing);
}

#[test]
fn what_a_template_says_is_passed_on_to_overrides_of_its_rules() {
    let mut book =
        with_overrides(r#"{"key":["user"],"template":"t"}"#, &[over(r#""key":["*"],"limit":1000"#)]);
    let says = |fields: &str| format!("{{{fields}}}");
    let template = row(Kind::Template, "t", &says(PER_MINUTE));
    book.rows = [template].into_iter().chain(book.rows.iter().cloned()).collect();
    let change = [put(Kind::Template, "t", &says(SAME_PER_HOUR))];
    let (needs, touched, watched) = judged(&book, &change);
    assert_eq!((needs, touched, watched.len()), (Needs::Approver, vec!["a".to_owned()], 1));
}

#[test]
fn an_override_that_is_named_too_is_counted_once_and_as_the_change_has_it() {
    let there = keys(10, r#""limit":1000"#);
    let book = with_overrides(&rule(PER_MINUTE), &there);
    let slower = || put(Kind::Rule, "a", &rule(SAME_PER_HOUR));
    let with = |fields: &str| {
        let named = put(Kind::Override, "p000", &over(&format!(r#""key":["u0"],{fields}"#)));
        judged(&book, &[slower(), named]).0
    };
    assert_eq!(with(r#""limit":1000"#), Needs::Confirmation, "ten, and not eleven");
    let eleventh = put(Kind::Override, "p010", &over(r#""key":["u10"],"limit":1"#));
    assert_eq!(judged(&book, &[slower(), eleventh]).0, Needs::Approver, "ten, and one more");
    let one = with_overrides(&rule(PER_MINUTE), &there[..1]);
    let mended = put(Kind::Override, "p000", &over(r#""key":["u0"],"limit":1000,"period":"1m""#));
    assert_eq!(judged(&one, &[slower(), mended]).0, Needs::Nothing);
}
