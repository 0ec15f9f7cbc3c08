//! Consent that a change needs, and the error of estimates.

mod approval;
mod credentials;
mod endings;
mod estimate;
mod heirs;
mod series;

use std::sync::Arc;

use tidegate_record::{DecisionRecord, LimitTerms, RecordVerdict};
use tidegate_rules::RuleSet;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};

use super::*;

const NOW_MS: u64 = 1_800_000_000_000;

fn row(kind: RowKind, name: &str, body: &str) -> RuleRow {
    RuleRow { kind, name: name.to_owned(), body: body.to_owned(), version: 1 }
}

fn put(kind: RowKind, name: &str, body: &str) -> Operation {
    Operation::Put { kind, name: name.to_owned(), body: body.to_owned() }
}

fn limit(amount: u32, more: &str) -> String {
    format!(r#"{{"key":["user"],"limit":{amount},"period":"1h"{more}}}"#)
}

fn rule_rows() -> RuleRows {
    RuleRows { revision: 1, rows: [row(RowKind::Rule, "a", &limit(100, ""))].into(), ..RuleRows::default() }
}

fn in_force() -> RuleSet {
    RuleSet::compile(&rule_rows(), None, NOW_MS).expect("compiles")
}

fn record(user: &str, at_ms: u64, sample_rate: f64) -> DecisionRecord {
    DecisionRecord {
        at_ms,
        tenant: String::new(),
        surface: "check".to_owned(),
        key: format!("user:{user}"),
        cost: 1,
        verdict: RecordVerdict::Allowed,
        rule: "a".to_owned(),
        rule_version: 1,
        set_version: "r1e0".to_owned(),
        replaced_by: String::new(),
        limit: LimitTerms::default(),
        remaining: 0,
        level: 0,
        retry_ms: None,
        source: "local".to_owned(),
        reason: "limit".to_owned(),
        until_ms: None,
        region: String::new(),
        node: "n".to_owned(),
        sample_rate,
        dimensions: vec![("user".to_owned(), user.to_owned())],
        dimensions_cut: false,
    }
}

/// Returns the effect of a change after `requests` simultaneous requests, of which 100 pass.
fn effect(operations: &[Operation], requests: u64) -> ChangeEffect {
    let mut test = back_test_of(operations, 1.0);
    for at in 0..requests {
        let verdict = if at < 100 { RecordVerdict::Allowed } else { RecordVerdict::Denied };
        assert!(test.take(&DecisionRecord { verdict, ..record("u", NOW_MS, 1.0) }));
    }
    test.finish()
}

fn back_test_of(operations: &[Operation], sample_rate: f64) -> back_test::BackTest {
    ChangePlan::new(&in_force(), &rule_rows(), operations, None, NOW_MS)
        .expect("compiles")
        .begin(sample_rate, Arc::default())
}

fn lowered(amount: u32, requests: u64) -> ChangeEffect {
    effect(&[put(RowKind::Rule, "a", &limit(amount, ""))], requests)
}

#[test]
fn newly_denied_share_determines_the_needed_consent() {
    for (amount, needs) in [
        (100, ChangeNeeds::Nothing),
        (95, ChangeNeeds::Nothing),
        (94, ChangeNeeds::Confirmation),
        (50, ChangeNeeds::Confirmation),
        (49, ChangeNeeds::Approver),
        (0, ChangeNeeds::Approver),
    ] {
        let effect = lowered(amount, 100);
        assert_eq!(effect.needs, needs, "{amount}: {}", effect.because);
    }
    let effect = lowered(94, 100);
    let measured = effect.measured.expect("measured");
    assert_eq!((measured.records, measured.requests, measured.newly_denied), (100, 100.0, 6.0));
    assert!(effect.because.starts_with("6.0 % of"), "{}", effect.because);
    assert_eq!(effect.touched, ["a"]);
}

#[test]
fn unmeasured_change_needs_the_consent_of_its_worst_case() {
    let of = |operation: Operation| effect(&[operation], 99);
    let rule = |body: &str| of(put(RowKind::Rule, "a", body)).needs;
    assert_eq!(rule(&limit(99, r#","burst":100"#)), ChangeNeeds::Confirmation);
    // Requests may cost as much as the burst, so any lower one may deny all of them.
    assert_eq!(rule(&limit(99, "")), ChangeNeeds::Approver);
    assert_eq!(rule(&limit(100, r#","burst":99"#)), ChangeNeeds::Approver);
    assert_eq!(rule(&limit(100, r#","regime":"share""#)), ChangeNeeds::Confirmation, "only a part is left");
    assert_eq!(
        rule(&limit(100, r#","class":"security""#)),
        ChangeNeeds::Confirmation,
        "another region decides"
    );
    assert_eq!(
        rule(&limit(100, r#","regime":"best_effort""#)),
        ChangeNeeds::Nothing,
        "as its class asks for"
    );
    // Changes that can only let more pass.
    assert_eq!(rule(&limit(101, "")), ChangeNeeds::Nothing);
    assert_eq!(rule(&limit(1, r#","mode":"shadow""#)), ChangeNeeds::Nothing);
    assert_eq!(rule(&limit(100, r#","when":{"user":"b*"}"#)), ChangeNeeds::Nothing, "some of those before");
    assert_eq!(rule(&limit(100, r#","tenant":"acme""#)), ChangeNeeds::Nothing, "some of those before");
    assert_eq!(of(put(RowKind::Rule, "new", &limit(1, r#","mode":"shadow""#))).needs, ChangeNeeds::Nothing);
    // Half of the limit or less counts like half of the passing requests.
    assert_eq!(rule(&limit(51, r#","burst":100"#)), ChangeNeeds::Confirmation);
    assert_eq!(rule(&limit(50, r#","burst":100"#)), ChangeNeeds::Approver);
    assert_eq!([50, 1, 0].map(|amount| rule(&limit(amount, ""))), [ChangeNeeds::Approver; 3]);
    assert_eq!(rule(&limit(100, r#","burst":50"#)), ChangeNeeds::Approver);
    assert_eq!(rule(r#"{"key":["user"],"limit":100,"period":"2h"}"#), ChangeNeeds::Approver);
    // Requests that were not counted like this before may all exceed the limit.
    assert_eq!(rule(r#"{"key":[],"limit":100,"period":"1h"}"#), ChangeNeeds::Approver);
    assert_eq!(of(put(RowKind::Rule, "new", &limit(1_000, ""))).needs, ChangeNeeds::Approver);
    let delete = of(Operation::Delete { kind: RowKind::Rule, name: "a".to_owned() });
    assert_eq!(delete.needs, ChangeNeeds::Nothing);
    assert!(delete.because.starts_with("nothing to measure"), "{}", delete.because);
    assert!(delete.measured.is_none());
}

#[test]
fn a_rule_of_which_nothing_is_known_is_enforced_for_others_by_two_people() {
    let needs = |before: &str, after: &str| {
        let body = |fields: &str| limit(100, fields);
        let rule_rows = RuleRows {
            revision: 1,
            rows: [row(RowKind::Rule, "a", &body(before))].into(),
            ..RuleRows::default()
        };
        let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
        let change = [put(RowKind::Rule, "a", &body(after))];
        let change_plan = ChangePlan::new(&set, &rule_rows, &change, None, NOW_MS).expect("compiles");
        ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default()).needs
    };
    let (get, post) = (r#","when":{"method":"GET"}"#, r#","when":{"method":"POST"}"#);
    assert_eq!(needs(r#","mode":"shadow""#, ""), ChangeNeeds::Approver);
    assert_eq!(needs(get, ""), ChangeNeeds::Approver);
    assert_eq!(needs(get, post), ChangeNeeds::Approver);
    assert_eq!(needs(get, r#","when":{"method":"GET","path":"/a*"}"#), ChangeNeeds::Nothing);
    assert_eq!(needs(r#","tenant":"acme""#, ""), ChangeNeeds::Approver);
    assert_eq!(needs(r#","tenant":"acme""#, r#","tenant":"other""#), ChangeNeeds::Approver);
}

#[test]
fn where_there_is_nobody_else_no_change_waits() {
    let alone: [fn(ChangeEffect) -> ChangeEffect; 3] =
        [ChangeEffect::for_one, ChangeEffect::for_first, ChangeEffect::for_only];
    for alone in alone {
        let unknown = lowered(50, 0);
        assert_eq!((unknown.needs, alone(unknown).needs), (ChangeNeeds::Approver, ChangeNeeds::Confirmation));
        let measured = lowered(0, 100);
        assert_eq!(
            (measured.needs, alone(measured).needs),
            (ChangeNeeds::Approver, ChangeNeeds::Confirmation)
        );
        // One rule has a measurement, the other has none.
        let new = || put(RowKind::Rule, "c", r#"{"key":["plan"],"limit":1,"period":"1h"}"#);
        let both = |amount: u32| of_two(&[put(RowKind::Rule, "a", &limit(amount, "")), new()], (200, 0));
        let harmless = both(101);
        assert!(
            harmless.measured.is_some() && harmless.needs == ChangeNeeds::Approver,
            "{}",
            harmless.because
        );
        assert_eq!([both(101), both(0)].map(|effect| alone(effect).needs), [ChangeNeeds::Confirmation; 2]);
    }
}

#[test]
fn overrides_and_other_rules_are_part_of_both_sides() {
    let allowed = put(RowKind::Override, "o", r#"{"rule":"a","key":["u"],"limit":1000}"#);
    let both = effect(&[put(RowKind::Rule, "a", &limit(1, "")), allowed], 200);
    assert_eq!(both.needs, ChangeNeeds::Nothing, "the only user has an override: {}", both.because);
    let measured = both.measured.expect("measured");
    assert_eq!((measured.newly_denied, measured.newly_allowed), (0.0, 100.0));
    // Requests of another rule are not part of the share.
    let other = effect(&[put(RowKind::Rule, "b", &limit(1, r#","when":{"user":"nobody"}"#))], 200);
    assert!(other.measured.is_none() && other.needs == ChangeNeeds::Approver, "{}", other.because);
}

#[test]
fn requests_under_too_many_rules_count_as_denied() {
    let generous = |at: usize| {
        put(
            RowKind::Rule,
            &at.to_string(),
            &limit(4_000_000_000, r#","when":{"user":"*"},"burst":4000000000"#),
        )
    };
    let more = |rules: usize| effect(&(0..rules).map(generous).collect::<Vec<_>>(), 100);
    // With the one that is there it is as many as can be.
    let most = tidegate_core::LIMITS_PER_REQUEST_MAX - 1;
    assert_eq!(more(most).needs, ChangeNeeds::Nothing, "{}", more(most).because);
    let too_many = more(most + 1);
    assert_eq!(too_many.needs, ChangeNeeds::Approver, "{}", too_many.because);
    let measured = too_many.measured.expect("measured");
    assert_eq!((measured.newly_denied, measured.newly_allowed), (100.0, 0.0));
}

/// Returns the consent that an override needs without a measurement, beside the existing ones.
fn unmeasured(there: &[(&str, &str)], operation: Operation) -> ChangeNeeds {
    let over = |(name, fields): &(&str, &str)| row(RowKind::Override, name, &over(fields));
    let rows = [row(RowKind::Rule, "a", &limit(100, ""))].into_iter().chain(there.iter().map(over)).collect();
    let rule_rows = RuleRows { revision: 1, rows, ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let change_plan = ChangePlan::new(&set, &rule_rows, &[operation], None, NOW_MS).expect("compiles");
    ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default()).needs
}

fn over(fields: &str) -> String {
    format!(r#"{{"rule":"a",{fields}}}"#)
}

#[test]
fn stricter_new_override_needs_consent() {
    let new =
        |there: &[(&str, &str)], fields: &str| unmeasured(there, put(RowKind::Override, "o", &over(fields)));
    for (fields, needs) in [
        (r#""key":["u"],"limit":100"#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":101"#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":101,"expires":1900000000000"#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":99"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":0"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":0,"mode":"shadow""#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":150,"period":"2h""#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":1000,"burst":1"#, ChangeNeeds::Confirmation),
        (r#""key":["u*"],"limit":99,"burst":100"#, ChangeNeeds::Confirmation),
        (r#""key":["u*"],"limit":99"#, ChangeNeeds::Approver),
        (r#""key":["u*"],"limit":50"#, ChangeNeeds::Approver),
        (r#""key":["*"],"limit":51,"burst":100"#, ChangeNeeds::Confirmation),
        (r#""key":["*"],"limit":50"#, ChangeNeeds::Approver),
    ] {
        assert_eq!(new(&[], fields), needs, "{fields}");
    }
    // With another override, the terms of a key differ from those of the rule.
    let wide = [("w", r#""key":["u*"],"limit":500"#)];
    for (fields, needs) in [
        (r#""key":["u"],"limit":499"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":500"#, ChangeNeeds::Nothing),
        (r#""key":["v"],"limit":100"#, ChangeNeeds::Nothing),
        (r#""key":["*u"],"limit":499,"burst":500"#, ChangeNeeds::Confirmation),
        (r#""key":["*u"],"limit":499"#, ChangeNeeds::Approver),
        (r#""key":["*u"],"limit":500"#, ChangeNeeds::Nothing),
        (r#""key":["*u"],"limit":250"#, ChangeNeeds::Approver),
        // A more specific override keeps its keys, unless the new one has priority.
        (r#""key":["*"],"limit":100"#, ChangeNeeds::Nothing),
        (r#""key":["*"],"limit":100,"priority":1"#, ChangeNeeds::Approver),
        (r#""key":["v*"],"limit":100"#, ChangeNeeds::Nothing),
    ] {
        assert_eq!(new(&wide, fields), needs, "{fields}");
    }
}

#[test]
fn stricter_change_or_removal_of_an_override_needs_consent() {
    let there = [("o", r#""key":["u"],"limit":500,"burst":20,"expires":1900000000000"#)];
    let changed = |fields: &str| unmeasured(&there, put(RowKind::Override, "o", &over(fields)));
    for (fields, needs) in [
        (r#""key":["u"],"limit":501,"burst":20,"expires":1900000000000"#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":1,"mode":"shadow","expires":1900000000000"#, ChangeNeeds::Nothing),
        (r#""key":["u"],"limit":499,"burst":20,"expires":1900000000000"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":600,"burst":19,"expires":1900000000000"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":600,"expires":1800000000001"#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":600,"expires":1900000000000,"tenant":"acme""#, ChangeNeeds::Confirmation),
        (r#""key":["u"],"limit":600,"expires":1900000000000,"priority":1"#, ChangeNeeds::Confirmation),
        (r#""key":["v"],"limit":600,"expires":1900000000000"#, ChangeNeeds::Confirmation),
    ] {
        assert_eq!(changed(fields), needs, "{fields}");
    }
    let gone = |fields: &str| {
        let there = [("o", fields)];
        unmeasured(&there, Operation::Delete { kind: RowKind::Override, name: "o".to_owned() })
    };
    assert_eq!(gone(r#""key":["u"],"limit":500"#), ChangeNeeds::Confirmation);
    assert_eq!(gone(r#""key":["u"],"limit":100"#), ChangeNeeds::Nothing);
    assert_eq!(gone(r#""key":["u"],"limit":1"#), ChangeNeeds::Nothing);
    // For many keys, which may be all that there are.
    assert_eq!(gone(r#""key":["*"],"limit":500"#), ChangeNeeds::Approver);
    assert_eq!(gone(r#""key":["u*"],"limit":200"#), ChangeNeeds::Approver);
    assert_eq!(gone(r#""key":["u*"],"limit":199"#), ChangeNeeds::Approver);
    assert_eq!(gone(r#""key":["u*"],"limit":199,"burst":100"#), ChangeNeeds::Confirmation);
    assert_eq!(gone(r#""key":["u*"],"limit":200,"tenant":"acme""#), ChangeNeeds::Approver);
    assert_eq!(
        gone(r#""key":["*"],"limit":1,"mode":"shadow""#),
        ChangeNeeds::Approver,
        "the rule is enforced"
    );
    assert_eq!(gone(r#""key":["*"],"limit":100"#), ChangeNeeds::Nothing);
}

#[test]
fn removed_wide_override_needs_consent_by_the_limits_behind_it() {
    let there =
        [("o", r#""key":["*"],"limit":500,"priority":2"#), ("w", r#""key":["u*"],"limit":100,"priority":1"#)];
    let delete = || Operation::Delete { kind: RowKind::Override, name: "o".to_owned() };
    assert_eq!(unmeasured(&there, delete()), ChangeNeeds::Approver);
    let wider = [there[0], ("w", r#""key":["*"],"limit":500,"tenant":"acme""#)];
    assert_eq!(
        unmeasured(&wider, delete()),
        ChangeNeeds::Approver,
        "what is left to one tenant helps no other"
    );
    let changed = |fields: &str| unmeasured(&there, put(RowKind::Override, "o", &over(fields)));
    for (fields, needs) in [
        (r#""key":["*"],"limit":251,"burst":500,"priority":2"#, ChangeNeeds::Confirmation),
        (r#""key":["*"],"limit":250,"burst":500,"priority":2"#, ChangeNeeds::Approver),
        (r#""key":["b*"],"limit":500,"priority":2"#, ChangeNeeds::Approver),
        (r#""key":["*"],"limit":500,"priority":2,"tenant":"acme""#, ChangeNeeds::Approver),
        (r#""key":["*"],"limit":500,"priority":2,"expires":1900000000000"#, ChangeNeeds::Approver),
        (r#""key":["*"],"limit":500,"priority":3"#, ChangeNeeds::Confirmation),
    ] {
        assert_eq!(changed(fields), needs, "{fields}");
    }
    // An override that lasts longer than before.
    let there = [("o", r#""key":["*"],"limit":10,"expires":1900000000000"#)];
    let lasts = put(RowKind::Override, "o", &over(r#""key":["*"],"limit":10"#));
    assert_eq!(unmeasured(&there, lasts), ChangeNeeds::Approver);
}

#[test]
fn a_rule_without_a_key_has_one_override_that_is_for_all() {
    let body = r#"{"key":[],"limit":100,"period":"1h"}"#;
    let over = row(RowKind::Override, "o", &over(r#""key":[],"limit":500"#));
    let rule_rows =
        RuleRows { revision: 1, rows: [row(RowKind::Rule, "a", body), over].into(), ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let delete = [Operation::Delete { kind: RowKind::Override, name: "o".to_owned() }];
    let change_plan = ChangePlan::new(&set, &rule_rows, &delete, None, NOW_MS).expect("compiles");
    let effect = ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default());
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
}

#[test]
fn many_keys_one_by_one_are_like_all_of_them() {
    let blocked = |keys: usize| {
        let one =
            |at| put(RowKind::Override, &format!("o{at}"), &over(&format!(r#""key":["u{at}"],"limit":0"#)));
        let change: Vec<Operation> = (0..keys).map(one).collect();
        let change_plan =
            ChangePlan::new(&in_force(), &rule_rows(), &change, None, NOW_MS).expect("compiles");
        ChangeEffect::unknown(change_plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default()).needs
    };
    assert_eq!([blocked(10), blocked(11)], [ChangeNeeds::Confirmation, ChangeNeeds::Approver]);
}

/// A rule beside that of users, for each team.
fn by_team(amount: u32) -> String {
    format!(r#"{{"key":["team"],"limit":{amount},"period":"1h"}}"#)
}

/// Returns the effect of a change of rules for users and for teams, after so many requests of each,
/// all of which passed.
fn of_two(operations: &[Operation], (users, teams): (u64, u64)) -> ChangeEffect {
    let rows = [row(RowKind::Rule, "a", &limit(100, "")), row(RowKind::Rule, "b", &by_team(100))].into();
    let rule_rows = RuleRows { revision: 1, rows, ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let mut test = ChangePlan::new(&set, &rule_rows, operations, None, NOW_MS)
        .expect("compiles")
        .begin(1.0, Arc::default());
    for at in 0..users {
        assert!(test.take(&record(&format!("u{at}"), NOW_MS, 1.0)));
    }
    for at in 0..teams {
        let dimensions = vec![("team".to_owned(), format!("t{at}"))];
        assert!(test.take(&DecisionRecord { rule: "b".to_owned(), dimensions, ..record("", NOW_MS, 1.0) }));
    }
    test.finish()
}

#[test]
fn denied_share_of_a_rule_is_not_diluted_by_other_rules() {
    let blocked_and_raised = [put(RowKind::Rule, "a", &limit(0, "")), put(RowKind::Rule, "b", &by_team(101))];
    let effect = of_two(&blocked_and_raised, (200, 20_000));
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
    assert!(
        effect.because.starts_with("100.0 % of the requests that pass rule \"a\" now"),
        "{}",
        effect.because
    );
    // Nor by requests that are denied anyway.
    let fewer = lowered(94, 1_000);
    assert!(
        fewer.because.starts_with("6.0 % of") && fewer.needs == ChangeNeeds::Confirmation,
        "{}",
        fewer.because
    );
}

#[test]
fn measurement_of_one_rule_does_not_cover_another() {
    let both =
        |amount: u32| [put(RowKind::Rule, "a", &limit(amount, "")), put(RowKind::Rule, "b", &by_team(101))];
    let few = of_two(&both(99), (99, 20_000));
    assert_eq!(few.needs, ChangeNeeds::Approver, "{}", few.because);
    assert!(
        few.because.contains("of rule \"a\" there is nothing to measure: the log has 99"),
        "{}",
        few.because
    );
    assert_eq!(of_two(&both(99), (100, 20_000)).needs, ChangeNeeds::Nothing);
    assert_eq!(of_two(&both(50), (99, 20_000)).needs, ChangeNeeds::Approver, "half of it");
    assert_eq!(of_two(&both(101), (0, 20_000)).needs, ChangeNeeds::Nothing, "nobody is denied more");
    // A measured effect counts, even if another one is unknown.
    let unknown = put(RowKind::Rule, "c", r#"{"key":["plan"],"limit":1,"period":"1h"}"#);
    let effect = of_two(&[put(RowKind::Rule, "a", &limit(0, "")), unknown], (200, 0));
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
}

#[test]
fn dimension_missing_from_the_log_is_not_harmless() {
    let by_plan = |amount: u32| {
        let body = format!(r#"{{"key":["plan"],"limit":{amount},"period":"1h"}}"#);
        effect(&[put(RowKind::Rule, "a", &body)], 100)
    };
    for amount in [100, 1] {
        let effect = by_plan(amount);
        assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
        assert!(effect.because.contains("the log has no \"plan\" of requests"), "{}", effect.because);
    }
    let new = effect(&[put(RowKind::Rule, "c", &limit(100, r#","when":{"path":"/*"}"#))], 100);
    assert_eq!(new.needs, ChangeNeeds::Approver);
    assert!(new.because.contains("the log has no \"path\" of requests"), "{}", new.because);
    let harmless =
        effect(&[put(RowKind::Rule, "c", &limit(1, r#","when":{"path":"/*"},"mode":"shadow""#))], 100);
    assert_eq!(harmless.needs, ChangeNeeds::Nothing, "{}", harmless.because);
}

#[test]
fn new_regime_or_algorithm_needs_confirmation() {
    for (fields, needs) in [
        (r#","regime":"share""#, ChangeNeeds::Confirmation),
        (r#","algorithm":"sliding_window""#, ChangeNeeds::Confirmation),
        (r#","regime":"best_effort""#, ChangeNeeds::Nothing),
        (r#","regime":"share","mode":"shadow""#, ChangeNeeds::Nothing),
    ] {
        let effect = effect(&[put(RowKind::Rule, "a", &limit(100, fields))], 100);
        assert_eq!(effect.needs, needs, "{fields}: {}", effect.because);
        assert!(effect.measured.is_some(), "{fields}");
    }
    let halved = effect(&[put(RowKind::Rule, "a", &limit(50, r#","regime":"share""#))], 100);
    assert_eq!(halved.needs, ChangeNeeds::Approver, "{}", halved.because);
    assert!(halved.because.contains("with other regions"), "{}", halved.because);
}

/// Returns the effect of a change from records of a log with this sample rate.
fn from_log(
    operations: &[Operation],
    sample_rate: f64,
    records: impl IntoIterator<Item = DecisionRecord>,
) -> ChangeEffect {
    let mut test = back_test_of(operations, sample_rate);
    for record in records {
        assert!(test.take(&record));
    }
    test.finish()
}

fn blocked() -> [Operation; 1] {
    [put(RowKind::Rule, "a", &limit(0, ""))]
}

/// Users with one record each, drawn from a thousand requests that passed.
fn strangers(count: u64) -> impl Iterator<Item = DecisionRecord> {
    (0..count)
        .map(|user| DecisionRecord { level: 1, ..record(&user.to_string(), NOW_MS + user * 20_000, 0.001) })
}

#[test]
fn block_is_measured_from_a_sample_of_distinct_keys() {
    let effect = from_log(&blocked(), 0.001, strangers(150));
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
    assert!(effect.because.starts_with("100.0 % of"), "{}", effect.because);
    let halved = from_log(&[put(RowKind::Rule, "a", &limit(50, ""))], 0.001, strangers(150));
    assert!(
        halved.because.starts_with("0.0 % of"),
        "nobody is known to have asked often: {}",
        halved.because
    );
}

#[test]
fn effect_uncertain_from_the_sample_needs_confirmation() {
    // No user has a second record, but some dozens may have made five requests.
    let effect = from_log(&[put(RowKind::Rule, "a", &limit(2, ""))], 0.001, strangers(150));
    assert_eq!(effect.needs, ChangeNeeds::Confirmation, "{}", effect.because);
    assert!(effect.because.contains(", or up to "), "{}", effect.because);
}

#[test]
fn minimum_is_counted_in_records_and_not_in_requests() {
    for few in [1, 99] {
        let effect = from_log(&blocked(), 0.001, strangers(few));
        assert_eq!(effect.needs, ChangeNeeds::Approver, "nobody knows that it is little");
        let words = format!("nothing to measure: the log has {few} records");
        assert!(effect.because.starts_with(&words) && effect.measured.is_none(), "{}", effect.because);
    }
}

#[test]
fn denials_do_not_count_towards_the_measured_passes() {
    let denied = |count: u64| {
        let of = |at: u64| DecisionRecord { verdict: RecordVerdict::Denied, ..record("u", NOW_MS + at, 1.0) };
        (0..count).map(of)
    };
    let is_measured = |(passed, count): (u64, u64)| {
        let lowered = [put(RowKind::Rule, "a", &limit(60, ""))];
        let effect = from_log(&lowered, 0.001, strangers(passed).chain(denied(count)));
        assert!(effect.measured.is_some() || effect.needs == ChangeNeeds::Approver, "{}", effect.because);
        effect.measured.is_some()
    };
    // Thousands may have passed, and it is their part that counts.
    assert_eq!([(0, 200), (50, 200), (150, 200)].map(is_measured), [false, false, true]);
    assert_eq!([(0, 20_000), (50, 20_000), (150, 20_000)].map(is_measured), [false, false, true]);
    let blocked = from_log(&blocked(), 0.001, strangers(150).chain(denied(20_000)));
    assert!(blocked.because.starts_with("100.0 % of"), "{}", blocked.because);
}

/// Of many shadow rules, only the first are evaluated. The verdicts of the others are unknown, and
/// do not count as passes.
#[test]
fn unevaluated_shadow_rule_does_not_count_as_allowing() {
    let crowd = |others: usize| {
        let in_shadow = |name: usize| {
            row(
                RowKind::Rule,
                &format!("a{name:03}"),
                &limit(100, r#","mode":"shadow","when":{"path":"/*"}"#),
            )
        };
        let last = row(RowKind::Rule, "b", &limit(0, r#","mode":"shadow","when":{"path":"/*"}"#));
        let rows: Vec<RuleRow> = (0..others).map(in_shadow).chain([last]).collect();
        RuleRows { revision: 1, rows: rows.into(), ..RuleRows::default() }
    };
    let newly_denied = |others: usize| {
        let rule_rows = crowd(others);
        let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
        let change = [put(RowKind::Rule, "b", &limit(0, r#","when":{"path":"/*"}"#))];
        let change_plan = ChangePlan::new(&set, &rule_rows, &change, None, NOW_MS).expect("compiles");
        let mut test = change_plan.begin(1.0, Arc::default());
        for at in 0..100 {
            let mut record = record(&format!("u{at}"), NOW_MS + at, 1.0);
            record.rule = "a000".to_owned();
            record.dimensions.push(("path".to_owned(), "/x".to_owned()));
            assert!(test.take(&record));
        }
        test.finish().measured.expect("measured").newly_denied
    };
    let asked = tidegate_core::LIMITS_PER_REQUEST_MAX;
    assert!(newly_denied(asked - 1).abs() < 1e-9, "asked, and it let all of them pass");
    assert!((newly_denied(asked) - 100.0).abs() < 1e-9, "never asked");
}

#[test]
fn shadow_verdicts_predict_the_enforced_rule() {
    let shadow = RuleRows {
        revision: 1,
        rows: [row(RowKind::Rule, "a", &limit(100, r#","mode":"shadow""#))].into(),
        ..RuleRows::default()
    };
    let set = RuleSet::compile(&shadow, None, NOW_MS).expect("compiles");
    let said = |verdict: RecordVerdict, count: u64| {
        (0..count).map(move |user| DecisionRecord { verdict, ..record(&user.to_string(), NOW_MS, 1.0) })
    };
    for (would_deny, needs) in
        [(5, ChangeNeeds::Nothing), (6, ChangeNeeds::Confirmation), (51, ChangeNeeds::Approver)]
    {
        let enforced = [put(RowKind::Rule, "a", &limit(100, ""))];
        let mut test = ChangePlan::new(&set, &shadow, &enforced, None, NOW_MS)
            .expect("compiles")
            .begin(1.0, Arc::default());
        for record in said(RecordVerdict::ShadowDenied, would_deny)
            .chain(said(RecordVerdict::Allowed, 100 - would_deny))
        {
            assert!(test.take(&record));
        }
        let effect = test.finish();
        assert_eq!(effect.needs, needs, "{}", effect.because);
        assert!(effect.because.starts_with(&format!("{would_deny}.0 % of")), "{}", effect.because);
    }
}

#[test]
fn records_of_other_rule_sets_count_only_as_requests() {
    // All were denied, which the rules in force would not have done.
    let denied = |user: u64| DecisionRecord {
        verdict: RecordVerdict::Denied,
        ..record(&user.to_string(), NOW_MS, 1.0)
    };
    let earlier = |user| DecisionRecord { set_version: "r0e0".to_owned(), ..denied(user) };
    let stopped = |user| DecisionRecord {
        set_version: "r1e1".to_owned(),
        replaced_by: "stop".to_owned(),
        ..denied(user)
    };
    for of in [&earlier as &dyn Fn(u64) -> DecisionRecord, &stopped] {
        let effect = from_log(&blocked(), 1.0, (0..100).map(of));
        assert!(effect.because.starts_with("100.0 % of"), "{}", effect.because);
    }
    let effect = from_log(&blocked(), 1.0, (0..100).map(denied));
    assert!(effect.because.starts_with("0.0 % of"), "they deny it already: {}", effect.because);
}

#[test]
fn unreadable_log_is_reported_and_needs_consent() {
    let unread = |amount: u32| {
        let change = [put(RowKind::Rule, "a", &limit(amount, ""))];
        let change_plan =
            ChangePlan::new(&in_force(), &rule_rows(), &change, None, NOW_MS).expect("compiles");
        let effect = ChangeEffect::unknown(
            change_plan.scope(),
            UnknownReason::LogUnreadable("a torn page".to_owned()),
            &ApprovedEffect::default(),
        );
        assert!(
            effect.because.contains("the decision log cannot be read (a torn page)"),
            "{}",
            effect.because
        );
        effect.needs
    };
    assert_eq!([60, 50, 0].map(unread), [ChangeNeeds::Approver; 3]);
}

#[test]
fn change_that_does_not_compile_is_rejected_with_all_reasons() {
    let wrong =
        [put(RowKind::Rule, "a", &limit(1, r#","burst":0"#)), put(RowKind::Override, "o", r#"{"rule":"x"}"#)];
    let problems =
        ChangePlan::new(&in_force(), &rule_rows(), &wrong, None, NOW_MS).expect_err("refused").to_string();
    assert!(
        problems.contains("rules[\"a\"].burst") && problems.contains("overrides[\"o\"].rule"),
        "{problems}"
    );
}
