//! An approved change, and its effect by the time it is applied.

use tidegate_rules::change::TEXT_BYTES_MAX;

use super::*;

/// The approved effect as later plans of the change receive it.
fn kept(effect: &ChangeEffect) -> String {
    serde_json::to_string(effect).expect("text")
}

fn approved(kept: &str) -> Arc<ApprovedEffect> {
    Arc::new(ApprovedEffect::read(kept).expect("kept"))
}

/// Returns the effect of a change with this approval, from these requests, all of which passed.
fn judged(
    rule_rows: &RuleRows,
    change: &[Operation],
    approved: Arc<ApprovedEffect>,
    records: impl IntoIterator<Item = DecisionRecord>,
) -> ChangeEffect {
    let set = RuleSet::compile(rule_rows, None, NOW_MS).expect("compiles");
    let mut test =
        ChangePlan::new(&set, rule_rows, change, None, NOW_MS).expect("compiles").begin(1.0, approved);
    for record in records {
        assert!(test.take(&record));
    }
    test.finish()
}

fn lowered_again(amount: u32, approved: &Arc<ApprovedEffect>) -> bool {
    let records = (0..100).map(|_| record("u", NOW_MS, 1.0));
    let change = [put(RowKind::Rule, "a", &limit(amount, ""))];
    judged(&rule_rows(), &change, Arc::clone(approved), records).is_beyond
}

#[test]
fn a_change_that_denies_clearly_more_than_was_approved_is_beyond_it() {
    let approved = approved(&kept(&lowered(40, 100)));
    assert!((approved.share_of("a") - 0.6).abs() < 1e-9 && approved.share_of("b") <= 0.0);
    assert_eq!([40, 35, 34, 60].map(|amount| lowered_again(amount, &approved)), [false, false, true, false]);
    let nobody = Arc::default();
    assert!(lowered_again(40, &nobody), "nobody approved anything");
    assert!(!lowered_again(60, &nobody), "that takes no approval");
}

/// Returns the effect of a change that blocks all users and gives teams a template of `amount`. The
/// log has so many requests of users and of one team.
fn of_template(amount: u32, (users, teams): (u64, u64), approved: Arc<ApprovedEffect>) -> ChangeEffect {
    let rows = [
        row(RowKind::Template, "t", &format!(r#"{{"limit":{amount},"period":"1h"}}"#)),
        row(RowKind::Rule, "a", &limit(100, "")),
        row(RowKind::Rule, "b", &by_team(100)),
    ];
    let rule_rows = RuleRows { revision: 1, rows: rows.into(), ..RuleRows::default() };
    let change = [
        put(RowKind::Rule, "a", &limit(0, "")),
        put(RowKind::Rule, "b", r#"{"key":["team"],"template":"t"}"#),
    ];
    let users = (0..users).map(|user| record(&format!("u{user}"), NOW_MS, 1.0));
    let teams = (0..teams).map(|_| {
        let dimensions = vec![("team".to_owned(), "t".to_owned())];
        DecisionRecord { rule: "b".to_owned(), dimensions, ..record("", NOW_MS, 1.0) }
    });
    judged(&rule_rows, &change, approved, users.chain(teams))
}

#[test]
fn approved_effect_of_one_rule_does_not_cover_another() {
    let traffic = (200, 100);
    let first = of_template(100, traffic, Arc::default());
    assert!(first.because.starts_with("100.0 % of the requests that pass rule \"a\""), "{}", first.because);
    assert!(first.is_beyond, "nobody approved it yet");
    let approved = approved(&kept(&first));
    let again = |amount: u32| of_template(amount, traffic, Arc::clone(&approved)).is_beyond;
    // The total cannot grow, but a rule approved without denials can deny more. Up to half of its
    // requests needs no approval.
    assert_eq!([100, 60, 50, 49, 1, 0].map(again), [false, false, false, true, true, true]);
    let half = self::approved(&kept(&of_template(49, traffic, Arc::default())));
    let again = |amount: u32| of_template(amount, traffic, Arc::clone(&half)).is_beyond;
    assert_eq!([49, 44, 43].map(again), [false, false, true]);
}

#[test]
fn a_rule_that_cannot_be_measured_is_not_left_less_than_was_approved() {
    // One rule has too few records, or both have.
    for traffic in [(200, 99), (0, 0)] {
        let approved_at = |amount: u32| approved(&kept(&of_template(amount, traffic, Arc::default())));
        let again = |amount: u32, approved: &Arc<ApprovedEffect>| {
            of_template(amount, traffic, Arc::clone(approved)).is_beyond
        };
        let whole = approved_at(100);
        assert_eq!([100, 51, 50, 1].map(|amount| again(amount, &whole)), [false, true, true, true]);
        let half = approved_at(50);
        assert_eq!([51, 50, 49, 0].map(|amount| again(amount, &half)), [false, false, true, true]);
    }
    // A rule that can no longer be measured is compared by the part that it leaves.
    let measured = approved(&kept(&of_template(40, (200, 100), Arc::default())));
    assert!(!of_template(40, (200, 99), Arc::clone(&measured)).is_beyond);
    assert!(of_template(39, (200, 99), measured).is_beyond);
}

#[test]
fn without_another_approver_unknown_effects_do_not_wait_again() {
    let unknown = of_template(1, (0, 0), Arc::default());
    assert!(unknown.is_beyond);
    assert!(!unknown.for_one().is_beyond);
}

/// Returns rule rows with a rule for each user, and a change of all their limits to `amount`.
fn of_many(names: &[String], amount: u32) -> (RuleRows, Vec<Operation>) {
    let body = |user: usize, amount: u32| limit(amount, &format!(r#","when":{{"user":"{user}"}}"#));
    let all = || names.iter().enumerate();
    let rows = all().map(|(user, name)| row(RowKind::Rule, name, &body(user, 100))).collect();
    let change = all().map(|(user, name)| put(RowKind::Rule, name, &body(user, amount))).collect();
    (RuleRows { revision: 1, rows, ..RuleRows::default() }, change)
}

#[test]
fn approved_effect_is_stored_per_rule() {
    let names: Vec<String> = (0..3 * NAMES_MAX).map(|at| format!("r{at:02}")).collect();
    let (rule_rows, change) = of_many(&names, 40);
    let records = || {
        let of_user = |user: usize| (0..100).map(move |_| record(&user.to_string(), NOW_MS, 1.0));
        (0..names.len()).flat_map(of_user)
    };
    let first = judged(&rule_rows, &change, Arc::default(), records());
    assert_eq!(first.needs, ChangeNeeds::Approver, "{}", first.because);
    let approved = approved(&kept(&first));
    for name in &names {
        assert!((approved.share_of(name) - 0.6).abs() < 0.002, "{name}: {}", approved.share_of(name));
    }
    assert!(approved.share_of("another") <= 0.0);
    assert!(!judged(&rule_rows, &change, Arc::clone(&approved), records()).is_beyond);
    let (_, stricter) = of_many(&names, 34);
    assert!(judged(&rule_rows, &stricter, approved, records()).is_beyond);
}

#[test]
fn approved_effect_of_very_many_rules_fits_into_the_store() {
    let names: Vec<String> = (0..1_000).map(|at| format!("{at:04}{}", "\"".repeat(124))).collect();
    let (rule_rows, change) = of_many(&names, 0);
    let records = || (0..names.len()).map(|user| record(&user.to_string(), NOW_MS, 1.0));
    let first = kept(&judged(&rule_rows, &change, Arc::default(), records()));
    assert!(first.len() <= TEXT_BYTES_MAX, "{}", first.len());
    let approved = approved(&first);
    // Of those without a place of their own, the most of any of them.
    assert!(names.iter().all(|name| approved.share_of(name) >= 1.0));
    assert!(!judged(&rule_rows, &change, approved, records()).is_beyond);
}
