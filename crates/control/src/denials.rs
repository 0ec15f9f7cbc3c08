//! Denials of rules before and after a change, to detect a change that was a mistake.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::guardrail::{ApprovedEffect, StricterRules};
use crate::node::NodeRules;
use crate::rule_count::RuleTally;
use crate::watch::{UnwatchedReason, WatchForecast};

/// Interval between two looks at the denials. Shorter: a mistake is rolled back earlier; all rules
/// are scanned more often.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long a change is watched, and how long before it is compared with.
pub(super) const WATCHED_MS: u64 = 5 * 60 * 1_000;

const LOOKS_PER_MINUTE: usize = 12;
const LOOK_MS: u64 = 60_000 / LOOKS_PER_MINUTE as u64;
const MINUTES_BEFORE: usize = 5;

/// Denials a minute that are so many times those before are a jump.
pub(super) const JUMP: u32 = 10;

/// Minimum denials per minute of a jump, at any rate before. Lower: detects mistakes on servers
/// with little traffic; a new rule that rightly denies is taken for a mistake.
pub(super) const DENIALS_MIN: u64 = 100;

/// Minimum share of a rule's requests that a jump denies, in percent. Below it, the rule does its
/// job.
pub(super) const DENIED_PERCENT_MIN: u64 = 1;

/// Multiple of a rule's approved share of denials up to which there is no jump.
const APPROVED_TIMES: f64 = 2.0;

/// Maximum number of rules with stored counts per minute, about 70 bytes each. Rules beyond it are
/// not judged.
pub(super) const REMEMBERED_MAX: usize = 100_000;

/// Rules of one change that are watched, some 200 bytes each; the first by name.
const RULES_MAX: usize = 10_000;

/// Rules that are watched at once, of all changes. Beyond, the earliest changes are no longer.
/// Higher: more memory, 20 MB for these.
const WATCHED_RULES_MAX: usize = 100_000;
const _: () = assert!(RULES_MAX <= WATCHED_RULES_MAX, "the latest change is always watched");

/// Maximum number of watched changes. Beyond it, the earliest are dropped. Higher: more at once;
/// every look searches each change for every rule with denials.
const CHANGES_MAX: usize = 1_000;

/// Recent denials of the rules, and the watched changes.
#[derive(Debug, Default)]
pub(super) struct Denials {
    /// Counts of the last minutes, the latest first. The first minute is not over.
    minutes: VecDeque<Minute>,
    /// Looks in the minute that is not over.
    looks: usize,
    /// Denials since the rules were replaced, until the server knows which changes to watch.
    aside: Option<PausedCounts>,
    watched: Vec<WatchedChange>,
}

/// The rules with requests in one minute.
#[derive(Debug, Default)]
struct Minute {
    rules: HashMap<Box<str>, MinuteCount>,
    /// Whether there were more rules than can be remembered.
    is_partial: bool,
}

/// Counts of a rule in one minute.
#[derive(Clone, Copy, Debug)]
struct MinuteCount {
    /// Shadow denials count too: a rule that is enforced later then denies no more than expected.
    denied: u64,
    /// The first look with a request, counted from the start of the minute.
    first_look: usize,
}

/// Counts of a rule in the decision log, before this server started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoggedCount {
    pub(super) denied: u64,
    /// Age of the oldest record, in milliseconds before the change.
    pub(super) age_ms: u64,
}

/// Denials counted aside, and the number of looks.
#[derive(Debug, Default)]
struct PausedCounts {
    minute: Minute,
    looks: usize,
}

#[derive(Debug)]
struct WatchedChange {
    change: u64,
    applied_ms: u64,
    /// The revision at which the rules do not compile without the change.
    refused_at: Option<u64>,
    /// Whether the failed rollback is logged already.
    is_told: bool,
    rules: HashMap<Box<str>, WatchedRule>,
}

/// A rule that a change touched.
#[derive(Debug)]
struct WatchedRule {
    before_per_minute: f64,
    /// Approved share of newly denied requests.
    approved: f64,
    /// Denials and requests of each look, for one minute, the latest first. Empty until requests
    /// are counted: earlier denials would look like 100 % of them.
    looks: VecDeque<(u64, u64)>,
}

/// A change after which a rule denies far more than before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DenialJump {
    pub(super) change: u64,
    pub(super) rule: String,
    pub(super) before_per_minute: f64,
    pub(super) denied: u64,
}

impl Denials {
    /// Takes the counts of the rules. A rule set that was just replaced may still have some.
    pub(super) fn take_from(&mut self, rules: &impl NodeRules) {
        if self.minutes.is_empty() {
            self.minutes.push_front(Minute::default());
        }
        for (rule, count) in rules.counted() {
            let did = count.take();
            if did != RuleTally::default() {
                self.note(&rule.name, did);
            }
        }
    }

    fn note(&mut self, rule: &str, did: RuleTally) {
        let RuleTally { denied, shadow_denied, requests, is_used: _ } = did;
        let aside = self.aside.as_mut().map(|aside| (&mut aside.minute, aside.looks));
        if let Some((minute, first_look)) = aside.or(self.minutes.front_mut().zip(Some(self.looks))) {
            minute.add(rule, MinuteCount { denied: denied + shadow_denied, first_look });
        }
        for touched in self.watched.iter_mut().filter_map(|watched| watched.rules.get_mut(rule)) {
            if let Some(look) = touched.looks.front_mut() {
                *look = (look.0 + denied, look.1 + requests);
            }
        }
    }

    /// Ends a look and returns its jumps, the latest change first, because it may depend on an
    /// earlier one. Changes are watched for `WATCHED_MS`.
    pub(super) fn look(&mut self, now_ms: u64) -> Vec<DenialJump> {
        let jumps = self.jumps();
        self.watched.retain(|watched| now_ms < watched.applied_ms.saturating_add(WATCHED_MS));
        for touched in self.watched.iter_mut().flat_map(|watched| watched.rules.values_mut()) {
            touched.looks.push_front((0, 0));
            touched.looks.truncate(LOOKS_PER_MINUTE);
        }
        match &mut self.aside {
            Some(aside) => aside.looks += 1,
            None => self.pass(1),
        }
        jumps
    }

    /// Moves on by this many looks, less than a minute of them.
    fn pass(&mut self, looks: usize) {
        self.looks += looks;
        if self.looks >= LOOKS_PER_MINUTE {
            self.looks -= LOOKS_PER_MINUTE;
            self.minutes.push_front(Minute::default());
            self.minutes.truncate(MINUTES_BEFORE + 1);
        }
    }

    /// Counts denials aside from now on. A new change is compared with the denials before it,
    /// however long the store takes to name the change.
    pub(super) fn set_aside(&mut self) {
        self.aside.get_or_insert_default();
    }

    /// Ends the separate count, because all changes in force are known. Its denials count for the
    /// time it took, or as the average of one minute if it took longer.
    pub(super) fn go_on(&mut self) {
        let Some(PausedCounts { mut minute, looks }) = self.aside.take() else { return };
        if looks >= LOOKS_PER_MINUTE {
            minute.last(LOOKS_PER_MINUTE, looks);
            self.minutes.insert(self.minutes.len().min(1), minute);
            self.minutes.truncate(MINUTES_BEFORE + 1);
            return;
        }
        if let Some(current) = self.minutes.front_mut() {
            current.is_partial |= minute.is_partial;
            for (rule, count) in &minute.rules {
                let first_look = count.first_look + self.looks;
                current.add(rule, MinuteCount { first_look, ..*count });
            }
            self.pass(looks);
        }
    }

    /// Attributes the denials of a rule to its latest change, and to the one before if that is
    /// rolled back.
    fn jumps(&self) -> Vec<DenialJump> {
        let mut later: HashSet<&str> = HashSet::new();
        let mut jumps = Vec::new();
        for watched in self.watched.iter().rev() {
            jumps.extend(watched.jump(&later));
            later.extend(watched.rules.keys().map(|rule| &**rule));
        }
        jumps
    }

    /// Adds the counts of rules before this server started, over the time that a change is compared
    /// with. All of them belong to the minute of the oldest record.
    pub(super) fn recall(&mut self, logged: HashMap<Box<str>, LoggedCount>) {
        self.minutes.resize_with(MINUTES_BEFORE + 1, Minute::default);
        for (rule, LoggedCount { denied, age_ms }) in logged {
            let looks = usize::try_from(age_ms / LOOK_MS).unwrap_or(usize::MAX);
            let looks = looks.min(MINUTES_BEFORE * LOOKS_PER_MINUTE);
            // The minute at `at` began `at` whole minutes before the current one.
            let at = looks.div_ceil(LOOKS_PER_MINUTE);
            let first_look = at * LOOKS_PER_MINUTE - looks;
            if let Some(minute) = self.minutes.get_mut(at) {
                minute.add(&rule, MinuteCount { denied, first_look });
            }
        }
    }

    /// Watches the rules that a change may have made stricter, with its approved effect, if any.
    /// Returns the changes that are dropped to make room.
    pub(super) fn watch(
        &mut self,
        (change, applied_ms): (u64, u64),
        rules: impl IntoIterator<Item = String>,
        approved: Option<&ApprovedEffect>,
    ) -> Vec<u64> {
        if self.is_watched(change) {
            return Vec::new();
        }
        let touched = |rule: String| {
            let before_per_minute = self.before_change(&rule)?;
            let approved = approved.map_or(0.0, |approved| approved.share_of(&rule));
            let touched = WatchedRule { before_per_minute, approved, looks: VecDeque::new() };
            Some((rule.into_boxed_str(), touched))
        };
        let rules: HashMap<_, _> = rules.into_iter().take(RULES_MAX).filter_map(touched).collect();
        // A change that makes nothing stricter cannot be a mistake, and must not displace one that
        // may be.
        if rules.is_empty() {
            return Vec::new();
        }
        self.watched.push(WatchedChange { change, applied_ms, refused_at: None, is_told: false, rules });
        self.make_room()
    }

    fn make_room(&mut self) -> Vec<u64> {
        let mut rules: usize = self.watched.iter().map(|watched| watched.rules.len()).sum();
        let mut changes = self.watched.len();
        let is_too_many = |watched: &&WatchedChange| {
            let is_too_many = rules > WATCHED_RULES_MAX || changes > CHANGES_MAX;
            rules -= watched.rules.len();
            changes -= 1;
            is_too_many
        };
        let gone = self.watched.iter().take_while(is_too_many).count();
        self.watched.drain(..gone).map(|watched| watched.change).collect()
    }

    /// Stops watching a change. The denials that it caused do not count against other changes.
    pub(super) fn forget(&mut self, change: u64) {
        let Some(at) = self.watched.iter().position(|watched| watched.change == change) else { return };
        let gone = self.watched.remove(at);
        for watched in &mut self.watched {
            for (_, touched) in watched.rules.iter_mut().filter(|(rule, _)| gone.rules.contains_key(*rule)) {
                touched.looks = VecDeque::from([(0, 0)]);
            }
        }
    }

    pub(super) fn is_watched(&self, change: u64) -> bool {
        self.watched.iter().any(|watched| watched.change == change)
    }

    /// Whether a change could not be undone at a revision: then there is no retry at that revision.
    pub(super) fn is_refused(&self, change: u64, revision: u64) -> bool {
        self.watched.iter().any(|watched| watched.change == change && watched.refused_at == Some(revision))
    }

    /// Notes that a change could not be rolled back, and returns whether that is new. With a
    /// revision, there is no retry at that revision; without one, every look retries.
    pub(super) fn refuse(&mut self, change: u64, at: Option<u64>) -> bool {
        let watched = self.watched.iter_mut().find(|watched| watched.change == change);
        watched.is_some_and(|watched| {
            watched.refused_at = at;
            !std::mem::replace(&mut watched.is_told, true)
        })
    }

    /// Starts to judge the watched changes, and counts the requests of their rules from now on.
    pub(super) fn begin(&mut self, rules: &impl NodeRules) {
        self.mark(rules);
        self.take_from(rules);
        let all = self.watched.iter_mut().flat_map(|watched| watched.rules.values_mut());
        all.filter(|touched| touched.looks.is_empty()).for_each(|touched| touched.looks.push_front((0, 0)));
    }

    /// Counts the requests of the watched rules, and of no others.
    pub(super) fn mark(&self, rules: &impl NodeRules) {
        let names: HashSet<&str> =
            self.watched.iter().flat_map(|watched| watched.rules.keys()).map(|name| &**name).collect();
        for (rule, count) in rules.counted() {
            count.watch(!names.is_empty() && names.contains(&*rule.name));
        }
    }

    /// Adds rules of a change to a forecast: whether they would be watched, and otherwise the reason.
    pub(super) fn forecast(
        &self,
        touched: &[String],
        stricter: &StricterRules,
        forecast: &mut WatchForecast,
    ) {
        for rule in touched {
            if stricter.new.contains(rule) {
                forecast.leave_out(rule, UnwatchedReason::New);
            } else if !stricter.known.contains(rule) && !self.is_in_question(rule) {
                // The change only relaxes the rule.
            } else if self.before_change(rule).is_none() {
                forecast.leave_out(rule, UnwatchedReason::NoBaseline);
            } else if forecast.rule_count < RULES_MAX {
                forecast.add(rule);
            }
        }
    }

    /// Whether an unapproved change of the rule is watched.
    pub(super) fn is_in_question(&self, rule: &str) -> bool {
        self.in_question(rule).next().is_some()
    }

    fn in_question(&self, rule: &str) -> impl Iterator<Item = &WatchedRule> {
        let touched = self.watched.iter().filter_map(move |watched| watched.rules.get(rule));
        touched.filter(|touched| touched.approved <= 0.0)
    }

    /// Returns the denials per minute of a rule before a change. Denials by another unapproved
    /// change do not count, or a first mistake would justify a second.
    fn before_change(&self, rule: &str) -> Option<f64> {
        let before = self.in_question(rule).map(|touched| touched.before_per_minute);
        Some(before.fold(self.before_per_minute(rule)?, f64::min))
    }

    /// Returns the baseline of a rule: its denials per minute since its first request in the stored
    /// minutes. `None` if that request is less than a minute old, or the counts may be incomplete.
    fn before_per_minute(&self, rule: &str) -> Option<f64> {
        let (mut denied, mut looks) = (0, 0);
        for (at, minute) in self.minutes.iter().enumerate() {
            if let Some(count) = minute.rules.get(rule) {
                denied += count.denied;
                looks = (self.looks + at * LOOKS_PER_MINUTE).saturating_sub(count.first_look);
            }
        }
        let is_partial = self.minutes.iter().any(|minute| minute.is_partial);
        if looks < LOOKS_PER_MINUTE || (is_partial && denied == 0) {
            return None;
        }
        Some(as_float(denied) / (as_float(looks as u64) / as_float(LOOKS_PER_MINUTE as u64)))
    }
}

impl Minute {
    fn add(&mut self, rule: &str, new: MinuteCount) {
        if let Some(count) = self.rules.get_mut(rule) {
            count.denied += new.denied;
            count.first_look = count.first_look.min(new.first_look);
        } else if self.rules.len() < REMEMBERED_MAX {
            self.rules.insert(rule.into(), new);
        } else {
            self.is_partial = true;
        }
    }

    /// Scales the denials of `looks` looks to the last `some` of them, as if they were evenly
    /// spread.
    fn last(&mut self, some: usize, looks: usize) {
        for count in self.rules.values_mut() {
            count.denied = count.denied.saturating_mul(some as u64) / (looks as u64).max(1);
            count.first_look = count.first_look.saturating_sub(looks - some);
        }
    }
}

impl WatchedChange {
    /// Returns the rule with the most denials among the rules that jump, without rules of a later
    /// change.
    fn jump(&self, later: &HashSet<&str>) -> Option<DenialJump> {
        let own = self.rules.iter().filter(|(rule, _)| !later.contains(&***rule));
        let jumps = own.filter_map(|(rule, touched)| {
            let WatchedRule { before_per_minute, approved, looks } = touched;
            let (denied, requests) = looks.iter().fold((0, 0), |sum, look| (sum.0 + look.0, sum.1 + look.1));
            let is_jump = denied >= DENIALS_MIN
                && denied.saturating_mul(100) >= requests.saturating_mul(DENIED_PERCENT_MIN)
                && as_float(denied) > f64::from(JUMP) * before_per_minute
                && as_float(denied) > APPROVED_TIMES * approved * as_float(requests);
            let (change, rule, before_per_minute) = (self.change, rule.to_string(), *before_per_minute);
            is_jump.then_some(DenialJump { change, rule, before_per_minute, denied })
        });
        jumps.max_by_key(|jump| jump.denied)
    }
}

#[expect(clippy::cast_precision_loss, reason = "denials of a minute are below 2^53")]
fn as_float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_node::TestRules;

    const NOW_MS: u64 = 1_000_000;

    /// Notes the same counts in `count` looks, and returns the jumps of the last.
    fn looks(denials: &mut Denials, count: usize, (denied, requests): (u64, u64)) -> Vec<DenialJump> {
        let mut jumps = Vec::new();
        for _ in 0..count {
            denials.take_from(&TestRules::default());
            denials.note("a", tally(denied, requests));
            jumps = denials.look(NOW_MS);
        }
        jumps
    }

    /// Watches a change and counts the requests of its rules from now on.
    fn tally(denied: u64, requests: u64) -> RuleTally {
        RuleTally { denied, requests, is_used: true, ..RuleTally::default() }
    }

    /// Denials with a minute of requests for each rule, none of them denied.
    fn with_baseline<const RULES: usize>(rules: [&str; RULES]) -> Denials {
        let mut denials = Denials::default();
        let baseline = |rule: &str| (rule.into(), LoggedCount { denied: 0, age_ms: 60_000 });
        denials.recall(rules.map(baseline).into());
        denials
    }

    fn watch<const RULES: usize>(
        denials: &mut Denials,
        change: (u64, u64),
        rules: [&str; RULES],
        approved: Option<&ApprovedEffect>,
    ) -> Vec<u64> {
        let gone = denials.watch(change, rules.map(str::to_owned), approved);
        denials.begin(&TestRules::default());
        gone
    }

    fn after(before: (usize, (u64, u64)), look: (u64, u64)) -> Vec<DenialJump> {
        let mut denials = Denials::default();
        looks(&mut denials, before.0, before.1);
        watch(&mut denials, (7, NOW_MS), ["a"], None);
        looks(&mut denials, LOOKS_PER_MINUTE, look)
    }

    #[test]
    fn ten_times_as_many_denials_are_a_jump() {
        let five_minutes = MINUTES_BEFORE * LOOKS_PER_MINUTE;
        let jumps = after((five_minutes, (10, 100)), (101, 1_000));
        assert_eq!(jumps.len(), 1, "{jumps:?}");
        assert_eq!((jumps[0].change, &*jumps[0].rule, jumps[0].denied), (7, "a", 1_212));
        assert!((jumps[0].before_per_minute - 120.0).abs() < 1e-9, "{jumps:?}");
        assert_eq!(after((five_minutes, (10, 100)), (100, 1_000)), []);
        assert_eq!(after((LOOKS_PER_MINUTE, (0, 100)), (9, 100)).len(), 1);
    }

    #[test]
    fn without_a_minute_of_requests_before_a_change_there_is_no_jump() {
        let jumps = |looks: usize| after((looks, (0, 100)), (100, 100)).len();
        assert_eq!([0, 1, LOOKS_PER_MINUTE - 1, LOOKS_PER_MINUTE].map(jumps), [0, 0, 0, 1]);
        // The server runs for long, and the rule has requests for half a minute only.
        let mut denials = Denials::default();
        for _ in 0..2 * LOOKS_PER_MINUTE {
            denials.take_from(&TestRules::default());
            denials.look(NOW_MS);
        }
        looks(&mut denials, LOOKS_PER_MINUTE / 2, (0, 100));
        assert_eq!(denials.before_per_minute("a"), None);
        looks(&mut denials, LOOKS_PER_MINUTE / 2, (10, 100));
        assert_eq!(denials.before_per_minute("a"), Some(60.0), "since its first request");
    }

    #[test]
    fn forecast_lists_the_rules_to_be_watched() {
        let names = |rules: &[&str]| rules.iter().map(|rule| (*rule).to_owned()).collect::<Vec<_>>();
        let stricter = StricterRules {
            known: names(&["known", "unused"]).into_iter().collect(),
            new: names(&["new"]).into_iter().collect(),
        };
        let mut denials = with_baseline(["known", "mended", "new", "raised"]);
        watch(&mut denials, (7, NOW_MS), ["mended"], None);
        let forecast = |rules: &[&str]| {
            let mut forecast = WatchForecast::default();
            denials.forecast(&names(rules), &stricter, &mut forecast);
            forecast
        };
        let all = forecast(&["known", "mended", "new", "raised", "unused"]);
        assert_eq!(all.to_json().expect("watched")["rules"], serde_json::json!(["known", "mended"]));
        assert!(all.not_watched().is_some_and(|text| text.starts_with("rule \"new\" is new: ")));
        let unused = forecast(&["unused"]);
        assert_eq!(unused.to_json(), None);
        assert!(unused.not_watched().is_some_and(|text| text.starts_with("rule \"unused\" has no request")));
        assert_eq!(forecast(&["raised"]).not_watched().as_deref(), Some("no rule denies more than before"));
    }

    #[test]
    fn few_denials_and_a_small_part_are_no_jump() {
        let minute = (LOOKS_PER_MINUTE, (0, 1_000));
        assert_eq!(after(minute, (8, 8)), [], "96 a minute");
        assert_eq!(after(minute, (10, 1_001)), [], "less than a percent");
        assert_eq!(after(minute, (10, 1_000)).len(), 1);
    }

    #[test]
    fn shadow_denials_are_no_jump_when_enforced() {
        let enforced_after = |shadow_denied: u64| {
            let mut denials = Denials::default();
            for look in 0..LOOKS_PER_MINUTE as u64 {
                denials.take_from(&TestRules::default());
                let shadow_denied = if look == 0 { shadow_denied } else { 0 };
                denials.note("a", RuleTally { shadow_denied, is_used: true, ..RuleTally::default() });
                denials.look(NOW_MS);
            }
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            looks(&mut denials, LOOKS_PER_MINUTE, (100, 200)).len()
        };
        assert_eq!([0, 119, 120].map(enforced_after), [1, 1, 0]);
        // In shadow mode the rule denies nothing.
        let mut denials = with_baseline(["a"]);
        watch(&mut denials, (7, NOW_MS), ["a"], None);
        denials.take_from(&TestRules::default());
        denials.note("a", RuleTally { shadow_denied: 1_000, is_used: true, ..RuleTally::default() });
        assert_eq!(denials.look(NOW_MS), []);
    }

    #[test]
    fn denials_up_to_twice_the_approved_share_are_no_jump() {
        let effect = |newly_denied: u32| {
            let measured = format!(
                r#"{{"records":100,"requests":100,"newly_denied":{newly_denied},"newly_allowed":0,
                "newly_denied_percent":{newly_denied},
                "rules":[{{"rule":"a","requests":100,"newly_denied":{newly_denied}}}]}}"#
            );
            ApprovedEffect::read(&format!(r#"{{"measured":{measured}}}"#)).expect("measured")
        };
        let jumps = |approved: Option<&ApprovedEffect>, rule: &str, look: (u64, u64)| {
            let mut denials = with_baseline(["a", "b"]);
            watch(&mut denials, (7, NOW_MS), ["a", "b"], approved);
            denials.take_from(&TestRules::default());
            denials.note(rule, tally(look.0, look.1));
            denials.look(NOW_MS).len()
        };
        assert_eq!(jumps(None, "a", (990, 1_000)), 1);
        assert_eq!(jumps(Some(&effect(60)), "a", (990, 1_000)), 0, "as it was approved");
        assert_eq!(jumps(Some(&effect(20)), "a", (400, 1_000)), 0);
        assert_eq!(jumps(Some(&effect(20)), "a", (401, 1_000)), 1, "more than twice as much");
        assert_eq!(jumps(Some(&effect(60)), "b", (990, 1_000)), 1, "another rule than was expected to");
        let unmeasured = ApprovedEffect::read(r#"{"measured":null}"#).expect("kept");
        assert_eq!(jumps(Some(&unmeasured), "a", (990, 1_000)), 1, "nobody knew how much");
    }

    #[test]
    fn only_the_rules_of_changes_of_the_last_minutes_are_watched() {
        let mut denials = with_baseline(["a", "b"]);
        watch(&mut denials, (7, NOW_MS), ["b"], None);
        assert_eq!(looks(&mut denials, 20, (100, 100)), [], "another rule");
        watch(&mut denials, (8, NOW_MS - WATCHED_MS), ["a"], None);
        denials.look(NOW_MS);
        assert_eq!(denials.watched.len(), 1, "too long ago");
        watch(&mut denials, (9, NOW_MS), ["a"], None);
        denials.forget(9);
        assert_eq!(denials.watched.len(), 1);
        for change in 10..300 {
            assert_eq!(watch(&mut denials, (change, NOW_MS), [], None), [0_u64; 0]);
        }
        let watched = |denials: &Denials| denials.watched.iter().map(|one| one.change).collect::<Vec<_>>();
        assert_eq!(watched(&denials), [7], "those that make nothing stricter push out none");
        let many = |change: u64| (0..RULES_MAX).map(move |rule| format!("{change}-{rule}"));
        let baseline = |rule: String| (rule.into(), LoggedCount { denied: 0, age_ms: 240_000 });
        denials.recall((300..310).flat_map(many).map(baseline).collect());
        let gone: Vec<_> =
            (300..310).flat_map(|change| denials.watch((change, NOW_MS), many(change), None)).collect();
        assert_eq!(
            (gone, watched(&denials)),
            (vec![7], (300..310).collect()),
            "the earliest goes, and is told"
        );
        let mut denials = with_baseline(["a"]);
        let gone: Vec<_> = (0..CHANGES_MAX as u64 + 2)
            .flat_map(|change| denials.watch((change, NOW_MS), ["a".to_owned()], None))
            .collect();
        assert_eq!((gone, denials.watched.len()), (vec![0, 1], CHANGES_MAX), "however small");
    }

    /// Denials before requests are counted would look like 100 % of them.
    #[test]
    fn denials_before_requests_are_counted_are_no_jump() {
        let jumps = |begins: bool| {
            let mut denials = with_baseline(["a"]);
            denials.take_from(&TestRules::default());
            denials.watch((7, NOW_MS), ["a".to_owned()], None);
            if begins {
                denials.begin(&TestRules::default());
            }
            denials.note("a", tally(300, 1));
            denials.look(NOW_MS).len()
        };
        assert_eq!([false, true].map(jumps), [0, 1]);
    }

    #[test]
    fn denials_during_a_store_outage_are_not_the_baseline() {
        let jumps = |is_aside: bool| {
            let mut denials = Denials::default();
            looks(&mut denials, 12, (1, 100));
            if is_aside {
                denials.set_aside();
            }
            // The store is unreachable for two minutes.
            looks(&mut denials, 24, (100, 100));
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            denials.go_on();
            looks(&mut denials, LOOKS_PER_MINUTE, (100, 100)).len()
        };
        assert_eq!([false, true].map(jumps), [0, 1]);
    }

    #[test]
    fn denials_set_aside_join_the_next_baseline() {
        let mut denials = Denials::default();
        looks(&mut denials, 12, (0, 100));
        denials.set_aside();
        looks(&mut denials, 12, (5, 100));
        assert_eq!(denials.before_per_minute("a"), Some(0.0));
        denials.go_on();
        // Two minutes, one of them without denials.
        assert_eq!(denials.before_per_minute("a"), Some(30.0));
    }

    #[test]
    fn denials_set_aside_count_per_minute() {
        let before = |looks_aside: usize| {
            let mut denials = Denials::default();
            looks(&mut denials, 5 * LOOKS_PER_MINUTE, (5, 100));
            denials.set_aside();
            looks(&mut denials, looks_aside, (5, 100));
            denials.go_on();
            denials.before_per_minute("a")
        };
        assert_eq!([0, 6, 12, 360].map(before), [Some(60.0); 4]);
    }

    #[test]
    fn the_latest_change_is_undone_first_and_none_is_tried_twice_at_a_revision() {
        let mut denials = with_baseline(["a", "b"]);
        for change in [7, 8] {
            watch(&mut denials, (change, NOW_MS), ["a"], None);
        }
        watch(&mut denials, (9, NOW_MS), ["b"], None);
        let changes = |jumps: Vec<DenialJump>| jumps.iter().map(|jump| jump.change).collect::<Vec<_>>();
        assert_eq!(changes(looks(&mut denials, 1, (100, 100))), [8], "of two that touched it");
        assert!(!denials.is_refused(7, 3));
        assert_eq!([3, 4].map(|revision| denials.refuse(7, Some(revision))), [true, false], "told once");
        assert_eq!([3, 4, 5].map(|revision| denials.is_refused(7, revision)), [false, true, false]);
        assert!(!denials.refuse(7, None) && !denials.is_refused(7, 4), "tried again with every look");
        assert!(!denials.is_refused(8, 4));
        denials.forget(8);
        assert_eq!(denials.look(NOW_MS), [], "that was another's");
        assert_eq!(changes(looks(&mut denials, 1, (100, 100))), [7], "and this is its own");
    }

    #[test]
    fn denials_of_a_watched_change_are_not_the_next_baseline() {
        let jumps = |approved: Option<&ApprovedEffect>| {
            let mut denials = with_baseline(["a"]);
            watch(&mut denials, (7, NOW_MS), ["a"], approved);
            looks(&mut denials, 6, (200, 1_000));
            watch(&mut denials, (8, NOW_MS), ["a"], None);
            let jumps = looks(&mut denials, 1, (200, 1_000));
            jumps.iter().map(|jump| jump.change).collect::<Vec<_>>()
        };
        assert_eq!(jumps(None), [8]);
        let kept = r#"{"measured":{"records":100,"requests":100,"newly_denied":90,"newly_allowed":0,
            "newly_denied_percent":90,"rules":[{"rule":"a","requests":100,"newly_denied":90}]}}"#;
        assert_eq!(jumps(ApprovedEffect::read(kept).as_ref()), [0_u64; 0], "somebody knew of it");
    }

    #[test]
    fn logged_denials_before_a_start_are_the_baseline() {
        let jumps = |before: u64| {
            let mut denials = Denials::default();
            denials.recall([("a".into(), LoggedCount { denied: before, age_ms: WATCHED_MS })].into());
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            // It is watched once, however often it is found.
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            looks(&mut denials, 1, (100, 100)).len()
        };
        // In five minutes.
        assert_eq!([0, 49, 50].map(jumps), [1, 1, 0]);
    }

    #[test]
    fn rules_beyond_the_memory_limit_have_no_baseline() {
        let mut denials = with_baseline(["b"]);
        looks(&mut denials, LOOKS_PER_MINUTE + 1, (1, 1));
        assert_eq!(denials.before_per_minute("b"), Some(0.0));
        for rule in 0..REMEMBERED_MAX {
            denials.note(&rule.to_string(), tally(1, 1));
        }
        assert_eq!(denials.before_per_minute("another"), None);
        assert_eq!(denials.before_per_minute("b"), None, "its denials may be missing");
        assert_eq!(denials.before_per_minute("a"), Some(12.0));
    }
}
