//! A series of small changes, costs, idle servers, address ranges and security rules.

use std::collections::BTreeMap;

use proptest::prelude::*;
use tidegate_rules::AddressCover;
use tidegate_rules::store::{AuthorChanges, EarlierRow};

use super::*;

/// When the first change of a series is made: 20:00 UTC.
const SINCE_MS: u64 = NOW_MS - 12 * 60 * 60 * 1_000;

/// The changes of one author within a day.
struct Series {
    rule_rows: RuleRows,
    earlier: BTreeMap<(RowKind, String), EarlierRow>,
    records: Vec<DecisionRecord>,
}

impl Series {
    fn new(rows: Vec<RuleRow>, records: Vec<DecisionRecord>) -> Self {
        let rule_rows = RuleRows { revision: 1, rows: rows.into(), ..RuleRows::default() };
        Self { rule_rows, earlier: BTreeMap::new(), records }
    }

    fn of_rule(body: &str, records: Vec<DecisionRecord>) -> Self {
        Self::new(vec![row(RowKind::Rule, "a", body)], records)
    }

    fn history(&self) -> AuthorHistory {
        let changes = AuthorChanges { rows: self.earlier.clone(), is_partial: false };
        AuthorHistory::new(changes, AddressCover::default())
    }

    /// Returns the effects of a change: alone, and with the earlier changes of its author.
    fn effects(&self, operations: &[Operation]) -> (ChangeEffect, ChangeEffect) {
        let set = RuleSet::compile(&self.rule_rows, None, NOW_MS).expect("compiles");
        let judged = |plan: ChangePlan| {
            if self.records.is_empty() {
                return ChangeEffect::unknown(plan.scope(), UnknownReason::NoLog, &ApprovedEffect::default());
            }
            let mut test = plan.begin(1.0, Arc::default());
            self.records.iter().for_each(|record| assert!(test.take(record)));
            test.finish()
        };
        let plan = || ChangePlan::new(&set, &self.rule_rows, operations, None, NOW_MS).expect("compiles");
        let together = plan().with_earlier(&self.history(), &self.rule_rows, operations, NOW_MS);
        let alone = judged(plan());
        let both = match together.expect("compiles") {
            None => judged(plan()),
            Some(together) => judged(plan()).or_with_earlier(judged(together)),
        };
        (alone, both)
    }

    /// Puts a change in force.
    fn apply(&mut self, operations: &[Operation]) {
        for operation in operations {
            let (kind, name) = operation.row();
            let body = self.rule_rows.row(kind, name).map(|row| row.body.clone());
            let row = EarlierRow { body, changed_ms: SINCE_MS };
            self.earlier.entry((kind, name.to_owned())).or_insert(row);
        }
        let revision = self.rule_rows.revision + 1;
        self.rule_rows = RuleRows { revision, ..with(&self.rule_rows, operations) };
    }
}

fn lower(amount: u32) -> [Operation; 1] {
    [put(RowKind::Rule, "a", &limit(amount, ""))]
}

/// One request of each of 100 users, and 100 of one more.
fn requests() -> Vec<DecisionRecord> {
    (0..100).map(|_| record("u", NOW_MS, 1.0)).collect()
}

#[test]
fn many_small_steps_need_the_consent_of_the_whole_way() {
    let mut series = Series::of_rule(&limit(100, ""), requests());
    let (mut amount, mut steps) = (100, 0);
    let mut needs = Vec::new();
    while amount > 19 {
        amount -= (amount / 20).max(1);
        let (alone, both) = series.effects(&lower(amount));
        assert_eq!(alone.needs, ChangeNeeds::Nothing, "{amount}: {}", alone.because);
        needs.push((amount, both.needs, both.because));
        series.apply(&lower(amount));
        steps += 1;
    }
    assert_eq!(steps, 41, "as small as no confirmation allows");
    let first = |wanted: ChangeNeeds| needs.iter().find(|(_, needs, _)| *needs == wanted).expect("some").0;
    assert_eq!((first(ChangeNeeds::Confirmation), first(ChangeNeeds::Approver)), (91, 48));
    let (_, last, because) = needs.last().expect("some");
    assert_eq!(*last, ChangeNeeds::Approver);
    assert!(
        because.starts_with("lowers rule \"a\" from 100 to 19 since 20:00 UTC, by 81.0 %; 81.0 %"),
        "{because}"
    );
}

#[test]
fn raised_limit_needs_nothing_after_a_series() {
    let mut series = Series::of_rule(&limit(100, ""), requests());
    series.apply(&lower(40));
    let (_, more) = series.effects(&lower(60));
    assert_eq!(more.needs, ChangeNeeds::Nothing, "{}", more.because);
    let (alone, less) = series.effects(&lower(39));
    assert_eq!((alone.needs, less.needs), (ChangeNeeds::Nothing, ChangeNeeds::Approver), "{}", less.because);
}

#[test]
fn override_of_another_author_does_not_prevent_the_comparison() {
    let mut series = Series::of_rule(&limit(100, ""), Vec::new());
    series.apply(&[put(RowKind::Rule, "b", &by_team(100))]);
    let of_other = row(RowKind::Override, "o", r#"{"rule":"b","key":["t"],"limit":9}"#);
    series.rule_rows.rows = series.rule_rows.rows.iter().cloned().chain([of_other]).collect();
    let slower = [put(RowKind::Rule, "b", r#"{"key":["team"],"limit":90,"burst":100,"period":"1h"}"#)];
    let (alone, both) = series.effects(&slower);
    assert_eq!((alone.needs, both.needs), (ChangeNeeds::Confirmation, ChangeNeeds::Approver));
}

#[test]
fn expensive_requests_are_denied_below_their_cost() {
    let costly = |cost: u64| DecisionRecord { cost, ..record("u", NOW_MS, 1.0) };
    for records in [Vec::new(), (0..99).map(|_| costly(60)).collect()] {
        let series = Series::of_rule(&limit(100, ""), records);
        let (effect, _) = series.effects(&lower(59));
        assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
        assert!(effect.because.contains("the costs of its requests are unknown"), "{}", effect.because);
        assert!(
            effect.because.ends_with("lowers rule \"a\" from 100 to 59, by 41.0 %"),
            "{}",
            effect.because
        );
    }
    // Measured, each of a user of its own.
    let of_users =
        |cost: u64| (0..100).map(move |at| DecisionRecord { cost, ..record(&at.to_string(), NOW_MS, 1.0) });
    for (cost, needs) in [(59, ChangeNeeds::Nothing), (60, ChangeNeeds::Approver)] {
        let (effect, _) = Series::of_rule(&limit(100, ""), of_users(cost).collect()).effects(&lower(59));
        assert_eq!(effect.needs, needs, "{cost}: {}", effect.because);
    }
}

#[test]
fn cheap_requests_of_a_sample_do_not_hide_expensive_ones() {
    let of = |burst: u32| limit(1_000_000_000, &format!(r#","burst":{burst}"#));
    let rule_rows =
        RuleRows { revision: 1, rows: [row(RowKind::Rule, "a", &of(100))].into(), ..RuleRows::default() };
    let set = RuleSet::compile(&rule_rows, None, NOW_MS).expect("compiles");
    let change = [put(RowKind::Rule, "a", &of(59))];
    let plan = ChangePlan::new(&set, &rule_rows, &change, None, NOW_MS).expect("compiles");
    let mut test = plan.begin(0.01, Arc::default());
    for at in 0..400 {
        let cost = if at % 2 == 0 { 1 } else { 60 };
        assert!(test.take(&DecisionRecord { cost, ..record("u", NOW_MS + at * 1_000, 0.01) }));
    }
    let effect = test.finish();
    let percent = effect.measured.expect("measured").newly_denied_percent;
    assert!((percent - 50.0).abs() < 2.0, "every other request costs 60: {percent}");
}

#[test]
fn idle_server_knows_nothing() {
    let effect = |span_ms: u64| {
        let plan = ChangePlan::new(&in_force(), &rule_rows(), &lower(99), None, NOW_MS).expect("compiles");
        let mut test = plan.begin(1.0, Arc::default()).requiring(EVIDENCE_MS);
        for at in 0..200 {
            assert!(test.take(&record(&at.to_string(), NOW_MS + span_ms * at / 199, 1.0)));
        }
        test.finish()
    };
    let made_up = effect(2_000);
    assert_eq!(made_up.needs, ChangeNeeds::Approver, "{}", made_up.because);
    assert!(made_up.because.contains("over 2 s, less than 300 s"), "{}", made_up.because);
    let used = effect(EVIDENCE_MS);
    assert_eq!(used.needs, ChangeNeeds::Nothing, "{}", used.because);
}

const LOGIN: &str = r#"{"key":["user"],"limit":10,"period":"1h","class":"security"}"#;

fn login(fields: &str) -> Operation {
    put(RowKind::Rule, "login", &format!(r#"{{"key":["user"],"period":"1h",{fields}}}"#))
}

#[test]
fn weakened_security_rule_needs_an_approver_whatever_the_traffic() {
    let records = (0..200)
        .map(|at| DecisionRecord { rule: "login".to_owned(), ..record(&at.to_string(), NOW_MS, 1.0) });
    let series = Series::new(vec![row(RowKind::Rule, "login", LOGIN)], records.collect());
    let gone = Operation::Delete { kind: RowKind::Rule, name: "login".to_owned() };
    let for_all = |fields: &str| put(RowKind::Override, "o", &format!(r#"{{"rule":"login",{fields}}}"#));
    for (operation, words) in [
        (gone, "deletes security rule \"login\"; "),
        (
            login(r#""limit":10,"class":"security","mode":"shadow""#),
            "takes security rule \"login\" out of enforcement; ",
        ),
        (login(r#""limit":10"#), "changes the class of rule \"login\" from security to comfort; "),
        (
            login(r#""limit":21,"class":"security""#),
            "raises security rule \"login\" from 10 to 21, more than 2 times; ",
        ),
        (
            login(r#""limit":10,"burst":21,"class":"security""#),
            "raises security rule \"login\" from a burst of 10 to 21",
        ),
        (
            login(r#""limit":10,"class":"security","when":{"user":"z*"}"#),
            "applies security rule \"login\" to fewer",
        ),
        (
            login(r#""limit":10,"class":"security","regime":"share""#),
            "weakens the regime of security rule \"login\" to share; ",
        ),
        (
            login(r#""limit":10,"class":"security","regime":"regional""#),
            "weakens the regime of security rule \"login\" to regional; ",
        ),
        (for_all(r#""key":["*"],"limit":21"#), "lifts security rule \"login\" for many keys: "),
        (
            for_all(r#""key":["*"],"limit":10,"mode":"shadow""#),
            "lifts security rule \"login\" for many keys: ",
        ),
    ] {
        let (effect, _) = series.effects(std::slice::from_ref(&operation));
        assert_eq!(effect.needs, ChangeNeeds::Approver, "{operation:?}: {}", effect.because);
        assert!(effect.because.starts_with(words), "{operation:?}: {}", effect.because);
        let alone = effect.for_one();
        assert_eq!(alone.needs, ChangeNeeds::Confirmation);
        assert!(alone.because.contains("\"login\""), "{}", alone.because);
    }
    for operation in [
        login(r#""limit":20,"class":"security""#),
        for_all(r#""key":["bob"],"limit":1000"#),
        put(RowKind::Rule, "other", &limit(1_000, r#","mode":"shadow""#)),
    ] {
        let (effect, _) = series.effects(std::slice::from_ref(&operation));
        assert_eq!(effect.needs, ChangeNeeds::Nothing, "{operation:?}: {}", effect.because);
    }
}

#[test]
fn security_rule_is_not_raised_in_small_steps() {
    let mut series = Series::new(vec![row(RowKind::Rule, "login", LOGIN)], Vec::new());
    let raised = |amount: u32| [login(&format!(r#""limit":{amount},"class":"security""#))];
    assert_eq!(series.effects(&raised(15)).1.needs, ChangeNeeds::Nothing);
    series.apply(&raised(15));
    let (alone, both) = series.effects(&raised(22));
    assert_eq!((alone.needs, both.needs), (ChangeNeeds::Nothing, ChangeNeeds::Approver));
    let words = "raises security rule \"login\" from 10 to 22 since 20:00 UTC, more than 2 times";
    assert!(both.because.contains(words), "{}", both.because);
}

#[test]
fn template_of_a_series_stays_while_rules_of_others_use_it() {
    let mut series = Series::of_rule(&limit(100, ""), requests());
    let template = put(RowKind::Template, "t", r#"{"limit":5,"period":"1h"}"#);
    series.apply(&[template]);
    // Another author uses it.
    let of_other = put(RowKind::Rule, "b", r#"{"key":["team"],"template":"t"}"#);
    series.rule_rows = RuleRows { revision: 3, ..with(&series.rule_rows, &[of_other]) };
    let (alone, both) = series.effects(&lower(99));
    assert_eq!((alone.needs, both.needs), (ChangeNeeds::Nothing, ChangeNeeds::Nothing), "{}", both.because);
}

/// Overrides that lift single users out of the login rule.
fn lifted(users: std::ops::Range<u32>) -> Vec<Operation> {
    let over = |user| format!(r#"{{"rule":"login","key":["u{user}"],"limit":1000}}"#);
    users.map(|user| put(RowKind::Override, &format!("o{user}"), &over(user))).collect()
}

#[test]
fn security_rule_is_not_lifted_key_by_key() {
    let mut series = Series::new(vec![row(RowKind::Rule, "login", LOGIN)], Vec::new());
    let words = "lifts security rule \"login\" for many keys";
    let (many, _) = series.effects(&lifted(0..11));
    assert!(many.needs == ChangeNeeds::Approver && many.because.contains(words), "{}", many.because);
    assert_eq!(series.effects(&lifted(0..10)).1.needs, ChangeNeeds::Nothing);
    series.apply(&lifted(0..10));
    let (alone, both) = series.effects(&lifted(10..11));
    assert_eq!((alone.needs, both.needs), (ChangeNeeds::Nothing, ChangeNeeds::Approver));
    assert!(both.because.contains(words), "{}", both.because);
}

#[test]
fn heirs_of_a_security_rule_are_not_lifted_with_its_period() {
    let rule = |amount: u32, period: &str| {
        format!(r#"{{"key":["user"],"limit":{amount},"burst":60,"period":"{period}","class":"security"}}"#)
    };
    let rows = vec![
        row(RowKind::Rule, "login", &rule(60, "1h")),
        row(RowKind::Override, "o", r#"{"rule":"login","key":["*"],"limit":60}"#),
    ];
    let series = Series::new(rows, Vec::new());
    let (effect, _) = series.effects(&[put(RowKind::Rule, "login", &rule(1, "1m"))]);
    assert_eq!(effect.needs, ChangeNeeds::Approver, "{}", effect.because);
    assert!(effect.because.contains("lifts security rule"), "{}", effect.because);
}

/// A rule that blocks a range.
fn block(name: &str, range: &str) -> Operation {
    let body = format!(r#"{{"key":["ip"],"limit":0,"period":"1h","when":{{"ip":"{range}"}}}}"#);
    put(RowKind::Rule, name, &body)
}

#[test]
fn blocked_range_needs_consent_by_its_size() {
    // None of the requests comes from a blocked range.
    let by_address = |at: u64| DecisionRecord {
        dimensions: vec![("ip".to_owned(), format!("192.0.2.{at}"))],
        ..record("", NOW_MS, 1.0)
    };
    let rows = || vec![row(RowKind::Rule, "a", r#"{"key":["ip"],"limit":100,"period":"1h"}"#)];
    let traffic = || (0..200).map(by_address).collect::<Vec<_>>();
    // The log shows nothing about a new rule without requests, so another rule gives the ranges.
    let over = |key: &str| [put(RowKind::Override, "o", &over(&format!(r#""key":["{key}"],"limit":0"#)))];
    let series = Series::new(rows(), traffic());
    for (key, needs) in [
        ("10.1.*", ChangeNeeds::Nothing),
        ("10.*", ChangeNeeds::Confirmation),
        ("1*.9", ChangeNeeds::Approver),
    ] {
        let (effect, _) = series.effects(&over(key));
        assert_eq!(effect.needs, needs, "{key}: {}", effect.because);
    }
    let consent = |ranges: &[&str]| {
        let mut cover = AddressCover::default();
        let networks = ranges.iter().map(|range| tidegate_rules::parse_network(range).expect("a network"));
        networks.for_each(|network| cover.add(network));
        consent_of_blocks(&cover)
    };
    for (ranges, needs) in [
        (&["10.1.0.0/16"][..], None),
        (&["10.0.0.0/15"], Some(ChangeNeeds::Confirmation)),
        (&["10.0.0.0/8"], Some(ChangeNeeds::Confirmation)),
        (&["10.0.0.0/8", "11.0.0.0/16"], Some(ChangeNeeds::Approver)),
        (&["0.0.0.0/1", "128.0.0.0/1"], Some(ChangeNeeds::Approver)),
        (&["2001:db8::/32"], None),
        (&["2001:db8::/31"], Some(ChangeNeeds::Confirmation)),
        (&["2000::/15"], Some(ChangeNeeds::Approver)),
    ] {
        assert_eq!(consent(ranges).map(|consent| consent.needs), needs, "{ranges:?}");
    }
    let halves = consent(&["0.0.0.0/1", "128.0.0.0/1"]).expect("consent").because;
    assert_eq!(
        halves,
        "the blocks of its author cover 4,294,967,296 IPv4 addresses, more than the 16,777,216 of a /8"
    );
}

#[test]
fn ranges_that_are_blocked_one_by_one_count_together() {
    let mut series = Series::of_rule(&limit(100, ""), Vec::new());
    for (at, range) in ["10.0.0.0/9", "12.0.0.0/9"].into_iter().enumerate() {
        let change = [block(&at.to_string(), range)];
        let (_, both) = series.effects(&change);
        assert!(!both.because.contains("of a /8"), "{}", both.because);
        series.apply(&change);
    }
    let third = [block("third", "14.0.0.0/9")];
    let plan = ChangePlan::new(
        &RuleSet::compile(&series.rule_rows, None, NOW_MS).expect("compiles"),
        &series.rule_rows,
        &third,
        None,
        NOW_MS,
    );
    let together = plan.expect("compiles").with_earlier(&series.history(), &series.rule_rows, &third, NOW_MS);
    let together = together.expect("compiles").expect("earlier changes");
    let consent = consent_of_blocks(&together.scope().blocked).expect("consent");
    assert_eq!(consent.needs, ChangeNeeds::Approver, "{}", consent.because);
}

/// A step of a series: a rule, and its new limit, burst, mode and class; `None` deletes it.
type Step = (bool, Option<(u32, Option<u32>, bool, bool)>);

fn operation((is_login, terms): Step) -> Operation {
    let name = if is_login { "login" } else { "a" };
    let Some((amount, burst, is_shadow, is_security)) = terms else {
        return Operation::Delete { kind: RowKind::Rule, name: name.to_owned() };
    };
    let burst = burst.map_or_else(String::new, |burst| format!(r#","burst":{burst}"#));
    let mode = if is_shadow { r#","mode":"shadow""# } else { "" };
    let class = if is_security { r#","class":"security","regime":"regional""# } else { "" };
    put(RowKind::Rule, name, &limit(amount, &format!("{burst}{mode}{class}")))
}

fn step() -> impl Strategy<Value = Step> {
    let terms =
        (1_u32..=120, proptest::option::of(1_u32..=120), proptest::bool::weighted(0.2), any::<bool>());
    (any::<bool>(), proptest::option::weighted(0.9, terms))
}

proptest! {
    #[test]
    fn series_needs_at_least_the_consent_of_its_start_and_end(
        steps in proptest::collection::vec(step(), 1..8),
        is_logged: bool,
    ) {
        let of_login = limit(30, r#","class":"security","regime":"regional""#);
        let rows = vec![row(RowKind::Rule, "a", &limit(100, "")), row(RowKind::Rule, "login", &of_login)];
        let records = (0..120).map(|at| DecisionRecord {
            cost: 1 + at % 3,
            ..record(&(at % 12).to_string(), NOW_MS + at * 10_000, 1.0)
        });
        let records: Vec<DecisionRecord> = if is_logged { records.collect() } else { Vec::new() };
        let start = Series::new(rows.clone(), records.clone());
        let mut series = Series::new(rows, records);
        let mut asked = 0;
        for step in steps {
            let operation = operation(step);
            let (kind, name) = operation.row();
            if operation.body().is_none() && series.rule_rows.row(kind, name).is_none() {
                continue;
            }
            let change = [operation];
            asked = asked.max(weight(series.effects(&change).1.needs));
            series.apply(&change);
        }
        let whole = series.history().operations(&start.rule_rows, &series.rule_rows, &[]);
        if !whole.is_empty() {
            let (single, _) = start.effects(&whole);
            prop_assert!(asked >= weight(single.needs), "{:?}: {}", single.needs, single.because);
        }
    }
}
