//! Changes judged by distinct keys, look by look.

use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::rule_keys::KeyOutcome::{self, Allowed, Denied, DeniedInShadow};
use crate::test_node::TestRules;

const NOW_MS: u64 = 1_000_000;

/// Looks before the change: a little more than a minute.
const BASELINE_LOOKS: u64 = 13;

/// A change of rules of several tenants.
pub(crate) fn watch_of(
    change: u64,
    since_look: u64,
    rules: HashMap<String, Option<Arc<str>>>,
) -> ChangeWatch {
    ChangeWatch {
        change,
        applied_ms: NOW_MS,
        since_look,
        rules,
        shadowed: BTreeSet::new(),
        approved: None,
        alarm: None,
    }
}

/// Watched rules, with keys that pass for a little more than a minute.
struct Fixture {
    rules: TestRules,
    denials: Denials,
}

impl Fixture {
    fn new() -> Self {
        Self { rules: TestRules::of(&["a", "b"]), denials: Denials::default() }
    }

    /// Rule `a` lets these keys pass in each look before a change.
    fn settled(tenants: &[(&str, Range<u32>)]) -> Self {
        let mut fixture = Self::new();
        for _ in 0..BASELINE_LOOKS {
            fixture.allow(tenants);
            assert_eq!(fixture.look(), []);
        }
        fixture
    }

    fn note(&self, tenants: &[(&str, Range<u32>)], outcome: KeyOutcome) {
        for (tenant, keys) in tenants {
            self.rules.note_keys("a", (tenant, keys.clone()), outcome);
        }
    }

    fn allow(&self, tenants: &[(&str, Range<u32>)]) {
        self.note(tenants, Allowed);
    }

    fn look(&mut self) -> Vec<DenialJump> {
        self.denials.look(&self.rules, NOW_MS)
    }

    /// Watches a change of rule `a` for several tenants, in force from now on.
    fn watch(&mut self, change: u64) {
        self.watch_as(change, |watch| watch);
    }

    fn watch_as(&mut self, change: u64, with: impl FnOnce(ChangeWatch) -> ChangeWatch) {
        let since_look = self.denials.note_replaced(&self.rules);
        let watch = with(watch_of(change, since_look, [("a".to_owned(), None)].into()));
        assert_eq!(self.denials.watch(watch, &self.rules), [0_u64; 0]);
    }

    /// Denies these keys for a look.
    fn deny(&mut self, tenants: &[(&str, Range<u32>)]) -> Vec<DenialJump> {
        self.note(tenants, Denied);
        self.look()
    }
}

#[test]
fn ten_distinct_keys_are_a_jump_and_nine_are_none() {
    let denied = |keys: u32| {
        let mut fixture = Fixture::settled(&[("", 0..100)]);
        fixture.watch(7);
        fixture.allow(&[("", 0..100)]);
        fixture.deny(&[("", 0..keys)])
    };
    assert_eq!(denied(9), []);
    let jumps = denied(10);
    assert_eq!(jumps.len(), 1);
    let words = "rule \"a\" newly denies 10 of 100 keys within five minutes of change 7";
    assert_eq!((jumps[0].to_string().as_str(), jumps[0].alarm.as_ref()), (words, None));
}

#[test]
fn a_small_share_of_the_active_keys_is_no_jump() {
    let denied = |keys: u32| {
        let mut fixture = Fixture::settled(&[("", 0..400)]);
        fixture.watch(7);
        fixture.allow(&[("", 0..400)]);
        fixture.deny(&[("", 0..keys)]).len()
    };
    assert_eq!([19, 20].map(denied), [0, 1], "five percent");
}

#[test]
fn keys_that_were_not_seen_before_the_change_do_not_count() {
    let mut fixture = Fixture::settled(&[("", 0..100)]);
    fixture.watch(7);
    assert_eq!(fixture.deny(&[("", 1_000..100_000)]), []);
    assert_eq!(fixture.deny(&[("", 0..100)]).len(), 1, "nor do they push out known keys");
}

#[test]
fn without_a_minute_of_requests_before_a_change_there_is_no_jump() {
    let jumps = |looks: usize| {
        let mut fixture = Fixture::new();
        for _ in 0..looks {
            fixture.allow(&[("", 0..100)]);
            fixture.look();
        }
        fixture.watch(7);
        fixture.deny(&[("", 0..100)]).len()
    };
    assert_eq!([0, 1, 11, 12].map(jumps), [0, 0, 0, 1]);
}

#[test]
fn a_key_must_be_denied_in_ten_times_as_many_looks() {
    let jumps = |denied_before: u64, looks_after: usize| {
        let mut fixture = Fixture::new();
        // Five minutes, with a denial of each key in the first looks.
        for look in 0..60 {
            fixture.allow(&[("", 0..100)]);
            if look < denied_before {
                fixture.note(&[("", 0..100)], Denied);
            }
            fixture.look();
        }
        fixture.watch(7);
        (0..looks_after).map(|_| fixture.deny(&[("", 0..100)]).len()).sum::<usize>()
    };
    assert_eq!([jumps(1, 2), jumps(1, 3)], [0, 1], "from 0.2 a minute to 3");
    assert_eq!([jumps(5, 10), jumps(5, 11)], [0, 1]);
    assert_eq!(jumps(6, 60), 0, "it was at its limit before");
}

#[test]
fn as_many_keys_as_were_denied_before_are_no_jump() {
    let mut fixture = Fixture::new();
    for look in 0..60 {
        fixture.allow(&[("", 0..300)]);
        // In each look others are denied: 24 of 300 in a minute.
        fixture.note(&[("", 2 * look..2 * look + 2)], Denied);
        fixture.look();
    }
    fixture.watch(7);
    fixture.allow(&[("", 0..300)]);
    assert_eq!(fixture.deny(&[("", 200..240)]), [], "of those that were not denied before");
    assert_eq!(fixture.deny(&[("", 120..300)]).len(), 1, "more than half");
}

#[test]
fn shadow_denials_count_before_a_change_and_not_after_it() {
    let jumps = |outcome: KeyOutcome, after: KeyOutcome| {
        let mut fixture = Fixture::settled(&[("", 0..100)]);
        for _ in 0..2 {
            fixture.note(&[("", 0..100)], outcome);
            fixture.look();
        }
        fixture.watch(7);
        fixture.note(&[("", 0..100)], after);
        fixture.look().len()
    };
    assert_eq!(jumps(Allowed, Denied), 1);
    assert_eq!(jumps(DeniedInShadow, Denied), 0, "as expected");
    assert_eq!(jumps(Allowed, DeniedInShadow), 0, "the requests passed");
}

#[test]
fn change_for_several_tenants_is_undone_by_more_than_one() {
    let all = [("east", 0..50), ("west", 0..50)];
    let mut fixture = Fixture::settled(&all);
    fixture.watch(7);
    fixture.allow(&all);
    let jumps = fixture.deny(&[("east", 0..50)]);
    assert_eq!(jumps.len(), 1);
    assert_eq!(jumps[0].alarm, Some(AlarmCause::OneTenant("east".to_owned())));
    fixture.denials.note_alarm(7);
    assert_eq!(fixture.deny(&[("west", 0..2)]), [], "a small share of another");
    let jumps = fixture.deny(&[("west", 0..3)]);
    assert_eq!((jumps.len(), jumps[0].alarm.as_ref()), (1, None), "it is undone after an alarm");
    // Only one tenant has requests.
    let mut fixture = Fixture::settled(&[("east", 0..50)]);
    fixture.watch(7);
    assert_eq!(fixture.deny(&[("east", 0..50)])[0].alarm, None);
}

#[test]
fn change_of_one_tenant_is_judged_by_its_keys() {
    let all = [("east", 0..50), ("west", 0..50)];
    let mut fixture = Fixture::settled(&all);
    fixture
        .watch_as(7, |watch| ChangeWatch { rules: [("a".to_owned(), Some("east".into()))].into(), ..watch });
    assert_eq!(fixture.deny(&[("west", 0..50)]), []);
    let jumps = fixture.deny(&[("east", 0..50)]);
    assert_eq!((jumps[0].tenant.as_deref(), &jumps[0].alarm), (Some("east"), &None));
}

#[test]
fn rules_of_several_tenants_that_change_together_are_judged_together() {
    let mut fixture = Fixture::new();
    for _ in 0..BASELINE_LOOKS {
        fixture.rules.note_keys("a", ("east", 0..50), Allowed);
        fixture.rules.note_keys("b", ("west", 0..50), Allowed);
        fixture.look();
    }
    let rules = ["a", "b"].map(|rule| (rule.to_owned(), None)).into();
    fixture.watch_as(7, |watch| ChangeWatch { rules, ..watch });
    fixture.rules.note_keys("b", ("west", 0..50), Allowed);
    assert_eq!(fixture.deny(&[("east", 0..50)])[0].alarm, Some(AlarmCause::OneTenant("east".to_owned())));
}

#[test]
fn an_alarm_is_raised_once() {
    let mut fixture = Fixture::settled(&[("", 0..100)]);
    let cause = AlarmCause::Security("a".to_owned());
    fixture.watch_as(7, |watch| ChangeWatch { alarm: Some(cause.clone()), ..watch });
    assert_eq!(fixture.deny(&[("", 0..100)])[0].alarm, Some(cause));
    fixture.denials.note_alarm(7);
    assert_eq!(fixture.deny(&[("", 0..100)]), []);
}

#[test]
fn keys_up_to_twice_the_approved_share_are_no_jump() {
    let jumps = |newly_denied: u32, keys: u32| {
        let effect = format!(
            r#"{{"measured":{{"records":100,"requests":100,"newly_denied":{newly_denied},"newly_allowed":0,
            "newly_denied_percent":{newly_denied},
            "rules":[{{"rule":"a","requests":100,"newly_denied":{newly_denied}}}]}}}}"#
        );
        let mut fixture = Fixture::settled(&[("", 0..100)]);
        let (approved, alarm) = (ApprovedEffect::read(&effect), Some(AlarmCause::Approved));
        fixture.watch_as(7, |watch| ChangeWatch { approved, alarm, ..watch });
        fixture.allow(&[("", 0..100)]);
        fixture.deny(&[("", 0..keys)]).len()
    };
    assert_eq!([jumps(60, 100), jumps(20, 40), jumps(20, 41)], [0, 0, 1]);
}

#[test]
fn the_latest_change_is_undone_first_and_none_is_tried_twice_at_a_revision() {
    let changes = |jumps: Vec<DenialJump>| jumps.iter().map(|jump| jump.change).collect::<Vec<_>>();
    let mut fixture = Fixture::settled(&[("", 0..100)]);
    fixture.watch(7);
    fixture.watch(8);
    assert_eq!(changes(fixture.deny(&[("", 0..100)])), [8], "of two that touched it");
    let denials = &mut fixture.denials;
    assert!(!denials.is_refused(7, 3));
    assert_eq!([3, 4].map(|revision| denials.refuse(7, Some(revision))), [true, false], "told once");
    assert_eq!([3, 4, 5].map(|revision| denials.is_refused(7, revision)), [false, true, false]);
    assert!(!denials.refuse(7, None) && !denials.is_refused(7, 4), "tried again with every look");
    denials.forget(8, None);
    assert_eq!(fixture.look(), [], "that was another's");
    assert_eq!(changes(fixture.deny(&[("", 0..100)])), [7], "and this is its own");
}

#[test]
fn denials_of_a_watched_change_are_not_the_next_baseline() {
    let jumps = |alarm: Option<AlarmCause>| {
        let mut fixture = Fixture::settled(&[("", 0..100)]);
        fixture.watch_as(7, |watch| ChangeWatch { alarm, ..watch });
        for _ in 0..12 {
            fixture.deny(&[("", 0..100)]);
        }
        fixture.watch(8);
        fixture.deny(&[("", 0..100)]).iter().map(|jump| jump.change).collect::<Vec<_>>()
    };
    assert_eq!(jumps(None), [8]);
    assert_eq!(jumps(Some(AlarmCause::Approved)), [0_u64; 0], "another person knew of it");
}

#[test]
fn a_series_of_changes_gets_a_new_baseline_in_time() {
    let jumps = |minutes: u64| {
        let mut fixture = Fixture::settled(&[("", 0..100)]);
        fixture.watch(0);
        for change in 1..=minutes {
            for _ in 0..LOOKS_PER_MINUTE {
                fixture.allow(&[("", 0..100)]);
                fixture.deny(&[("", 0..100)]);
            }
            let applied_ms = NOW_MS + change * 60_000;
            fixture.watch_as(change, |watch| ChangeWatch { applied_ms, ..watch });
        }
        fixture.deny(&[("", 0..100)]).len()
    };
    assert_eq!([jumps(14), jumps(15)], [1, 0], "the keys were denied all the while");
}

#[test]
fn few_keys_of_a_held_baseline_are_a_reason() {
    let mut fixture = Fixture::settled(&[("", 0..9)]);
    fixture.watch(7);
    for _ in 0..BASELINE_LOOKS {
        fixture.allow(&[("", 0..100)]);
        fixture.look();
    }
    let stricter = StricterRules { known: BTreeSet::from(["a".to_owned()]), ..StricterRules::default() };
    let forecast = fixture.denials.forecast(
        &["a".to_owned()],
        &stricter,
        &HashSet::new(),
        &HashSet::new(),
        &fixture.rules,
    );
    let reason = forecast.not_watched().expect("a reason");
    assert!(reason.contains("had requests of 9 keys"), "{reason}");
}

#[test]
fn changes_are_watched_for_five_minutes_and_the_earliest_make_room() {
    let mut fixture = Fixture::settled(&[("", 0..100)]);
    fixture.watch_as(7, |watch| ChangeWatch { applied_ms: NOW_MS - WATCHED_MS, ..watch });
    fixture.look();
    assert!(!fixture.denials.is_watched(7), "too long ago");
    fixture.watch_as(8, |watch| ChangeWatch { rules: HashMap::new(), ..watch });
    assert!(!fixture.denials.is_watched(8), "it makes nothing stricter");
    let gone: Vec<u64> = (0..CHANGES_MAX as u64 + 2)
        .flat_map(|change| {
            let watch = watch_of(change, BASELINE_LOOKS + 1, [("a".to_owned(), None)].into());
            fixture.denials.watch(watch, &fixture.rules)
        })
        .collect();
    assert_eq!((gone, fixture.denials.watched.len()), (vec![0, 1], CHANGES_MAX));
}

#[test]
fn a_part_of_a_change_is_forgotten_alone() {
    let mut fixture = Fixture::settled(&[("east", 0..50)]);
    let rules = [("a".to_owned(), Some("east".into()))];
    fixture.watch_as(7, |watch| ChangeWatch { rules: rules.into(), ..watch });
    fixture.denials.forget(7, Some("west"));
    assert!(fixture.denials.is_watched(7));
    fixture.denials.forget(7, Some("east"));
    assert!(!fixture.denials.is_watched(7));
}

#[test]
fn forecast_lists_the_rules_to_be_watched() {
    let names = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>();
    let rules = TestRules::of(&["few", "known", "raised", "rekeyed", "shadowed", "unused"]);
    let mut denials = Denials::default();
    for _ in 0..BASELINE_LOOKS {
        rules.note_keys("few", ("", 0..9), Allowed);
        for rule in ["known", "raised", "rekeyed", "shadowed"] {
            rules.note_keys(rule, ("", 0..10), Allowed);
        }
        denials.look(&rules, NOW_MS);
    }
    let stricter = StricterRules {
        known: names(&["few", "known", "rekeyed", "unused"]).into_iter().collect(),
        new: names(&["new"]).into_iter().collect(),
        shadowed: BTreeSet::from(["shadowed".to_owned()]),
    };
    let rekeyed = names(&["rekeyed"]).into_iter().collect();
    let forecast =
        |touched: &[&str]| denials.forecast(&names(touched), &stricter, &rekeyed, &HashSet::new(), &rules);
    let all = forecast(&["known", "new", "raised"]);
    assert_eq!(all.to_json().expect("watched")["rules"], serde_json::json!(["known"]));
    let action = |touched: &[&str]| forecast(touched).to_json().expect("watched")["action"].clone();
    assert_eq!([action(&["shadowed"]), action(&["known", "shadowed"])], ["alarm", "rollback"]);
    for (rule, reason) in [
        ("new", "is new: "),
        ("unused", "has no request"),
        ("rekeyed", "gets another key"),
        ("few", "had requests of 9 keys in the last five minutes on this server: a jump needs 10"),
    ] {
        let forecast = forecast(&[rule]);
        assert_eq!(forecast.to_json(), None);
        let told = forecast.not_watched().expect("a reason");
        assert!(told.starts_with(&format!("rule {rule:?} {reason}")), "{told}");
    }
    assert_eq!(forecast(&["raised"]).not_watched().as_deref(), Some("no rule denies more than before"));
}

proptest! {
    /// Requests of fewer keys than the floor, and of invented keys, undo nothing, without an alarm.
    #[test]
    fn fewer_keys_than_the_floor_undo_nothing(
        known in 9_u32..40,
        looks in prop::collection::vec((0_u32..9, 0_u32..9, 1_u32..40, any::<bool>()), 1..60),
    ) {
        let mut fixture = Fixture::settled(&[("", 0..known), ("east", 0..3)]);
        fixture.watch(7);
        for (from, to, times, are_invented) in looks {
            for _ in 0..times {
                fixture.note(&[("", from.min(to)..from.max(to) + 1)], Denied);
            }
            if are_invented {
                fixture.note(&[("", 1_000..1_100), ("west", 0..50)], Denied);
            }
            prop_assert_eq!(fixture.look(), []);
        }
    }
}
