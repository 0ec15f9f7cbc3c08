//! An override that expires hides nothing of the terms that follow.

use super::*;

const MINUTE_MS: u64 = 60_000;
const DAY_MS: u64 = 24 * 60 * MINUTE_MS;

/// An override for some keys that ends after a time, if ever.
fn temporary(key: &str, amount: u32, lasts_ms: Option<u64>, more: &str) -> String {
    let end = lasts_ms.map(|ms| format!(r#","expires":{}"#, NOW_MS + ms)).unwrap_or_default();
    over(&format!(r#""key":["{key}"],"limit":{amount}{end}{more}"#))
}

/// Returns the effect of a change from requests that passed, with a rule of this limit and perhaps
/// an override for all keys.
fn from(
    (rule, there): (u32, Option<&str>),
    sample_rate: f64,
    records: impl IntoIterator<Item = DecisionRecord>,
    change: &[Operation],
) -> ChangeEffect {
    let over = there.map(|body| row(RowKind::Override, "o", body));
    let rows = [row(RowKind::Rule, "a", &limit(rule, ""))].into_iter().chain(over).collect();
    let rule_rows = RuleRows { revision: 1, rows, ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let change_plan = ChangePlan::new(&set, &rule_rows, change, None, NOW_MS).expect("compiles");
    let mut test = change_plan.begin(sample_rate, Arc::default());
    let replaced_by = there.map(|_| "o".to_owned()).unwrap_or_default();
    for record in records {
        assert!(test.take(&DecisionRecord { replaced_by: replaced_by.clone(), ..record }));
    }
    test.finish()
}

/// The same after so many requests of one user.
fn of(rule: u32, there: Option<&str>, requests: u64, change: &[Operation]) -> ChangeEffect {
    from((rule, there), 1.0, (0..requests).map(|_| record("u", NOW_MS, 1.0)), change)
}

fn to_rule(amount: u32) -> Operation {
    put(RowKind::Rule, "a", &limit(amount, ""))
}

fn to_over(name: &str, body: &str) -> Operation {
    put(RowKind::Override, name, body)
}

#[test]
fn expiring_override_does_not_hide_the_later_effect() {
    let lowered = |lasts_ms| [to_rule(1), to_over("o", &temporary("*", 1_000, lasts_ms, ""))];
    let effect = of(100, None, 100, &lowered(Some(10 * MINUTE_MS)));
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
    let words =
        "99.0 % of the requests that pass rule \"a\" now would be newly denied once overrides have ended";
    assert!(effect.because.starts_with(words), "{}", effect.because);
    let lasting = of(100, None, 100, &lowered(None));
    assert_eq!(lasting.needs, ChangeNeeds::Nothing, "{}", lasting.because);
    assert!(!lasting.because.contains("ended"), "{}", lasting.because);
    // A temporary higher limit needs no consent.
    let more = of(100, None, 100, &[to_over("o", &temporary("*", 1_000, Some(10 * MINUTE_MS), ""))]);
    assert_eq!(more.needs, ChangeNeeds::Nothing, "{}", more.because);
}

#[test]
fn shortened_override_is_compared_with_its_full_duration() {
    let soon = temporary("*", 1_000, Some(10 * MINUTE_MS), "");
    for there in [temporary("*", 1_000, Some(DAY_MS), ""), temporary("*", 1_000, None, "")] {
        let changed = |change: &[Operation]| of(1, Some(&there), 100, change).needs;
        assert_eq!(changed(&[to_over("o", &soon)]), ChangeNeeds::Approver, "{there}");
        let gone = Operation::Delete { kind: RowKind::Override, name: "o".to_owned() };
        assert_eq!(changed(&[gone, to_over("p", &soon)]), ChangeNeeds::Approver, "{there}");
        // The override gets a lower limit, behind another one with a temporary higher limit.
        let first = temporary("*u", 1_000, Some(10 * MINUTE_MS), r#","priority":1"#);
        let less = there.replace("1000", "1");
        assert_eq!(changed(&[to_over("o", &less), to_over("p", &first)]), ChangeNeeds::Approver, "{there}");
    }
    let there = temporary("*", 1_000, Some(DAY_MS), "");
    for longer in [
        temporary("*", 1_000, Some(7 * DAY_MS), ""),
        temporary("*", 2_000, Some(DAY_MS), ""),
        temporary("*", 1_000, None, ""),
    ] {
        let effect = of(1, Some(&there), 100, &[to_over("o", &longer)]);
        assert_eq!(effect.needs, ChangeNeeds::Nothing, "{longer}: {}", effect.because);
    }
}

#[test]
fn expiry_without_the_change_is_not_part_of_its_effect() {
    let there = temporary("*", 1_000, Some(DAY_MS), "");
    let lowered = |amount: u32| of(100, Some(&there), 1_000, &[to_rule(amount)]);
    // Of the thousand that pass now, a hundred would tomorrow.
    let effect = lowered(95);
    assert_eq!(effect.needs, ChangeNeeds::Nothing, "{}", effect.because);
    assert!(effect.because.starts_with("5.0 % of"), "{}", effect.because);
    // And yet a change behind it is seen.
    assert_eq!(
        [94, 1].map(|amount| lowered(amount).needs),
        [ChangeNeeds::Confirmation, ChangeNeeds::Approver]
    );
}

#[test]
fn level_under_an_override_does_not_count_after_its_expiry() {
    let there = temporary("*", 1_000, Some(DAY_MS), "");
    let spent = strangers(150).map(|record| DecisionRecord { level: 500, ..record });
    let effect = from((100, Some(&there)), 0.001, spent, &[to_rule(99)]);
    assert!(effect.because.starts_with("0.0 % of"), "{}", effect.because);
}

#[test]
fn the_strictest_of_several_that_end_one_after_the_other_counts() {
    let change = [
        to_over("first", &temporary("*", 1_000, Some(10 * MINUTE_MS), r#","priority":1"#)),
        to_over("then", &temporary("*u", 1, Some(DAY_MS), "")),
    ];
    let effect = of(100, None, 100, &change);
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
}
