//! What rules deny, before a change and after it: how one that was a mistake is known.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::guardrail::ApprovedEffect;
use crate::rules::{ActiveRules, RuleTally};

/// How often denials are looked at. More often: a mistake is undone earlier; all rules are gone through more often.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long a change is watched, and how long before it is compared with.
pub(super) const WATCHED_MS: u64 = 5 * 60 * 1_000;

const LOOKS_PER_MINUTE: usize = 12;
const MINUTES_BEFORE: usize = 5;

/// Denials a minute that are so many times those before are a jump.
const JUMP: f64 = 10.0;

/// Fewer denials a minute are no jump, whatever there was before. Lower: a mistake is noticed on servers with little traffic;
/// a new rule that rightly stops somebody is taken for one.
const DENIALS_MIN: u64 = 100;

/// Denials of a smaller part of a rule's requests, in percent, are no jump: it does what it is for.
const DENIED_PERCENT_MIN: u64 = 1;

/// What somebody approved is no jump, up to so many times the share that a rule was expected to deny.
const APPROVED_TIMES: f64 = 2.0;

/// Rules whose denials are remembered for each minute, some 60 bytes each. Those beyond are not judged.
pub(super) const REMEMBERED_MAX: usize = 100_000;

/// Rules of one change that are watched, some 200 bytes each; the first by name.
const RULES_MAX: usize = 10_000;

/// Rules that are watched at once, of all changes. Beyond, the earliest changes are no longer. Higher: more memory, 20 MB for these.
const WATCHED_RULES_MAX: usize = 100_000;
const _: () = assert!(RULES_MAX <= WATCHED_RULES_MAX, "the latest change is always watched");

/// Changes that are watched at once. Beyond, the earliest are no longer. Higher: more at once; each is looked up for every rule that denied
/// something, with each look.
const CHANGES_MAX: usize = 1_000;

/// What rules denied lately, and the changes that are watched.
#[derive(Debug, Default)]
pub(super) struct Denials {
    /// Of the last minutes, the latest first; the first of them is not over.
    minutes: VecDeque<Minute>,
    /// Looks in the minute that is not over.
    looks: usize,
    /// What was denied since rules were replaced, while it is not known what to watch of that.
    aside: Option<PausedCounts>,
    watched: Vec<WatchedChange>,
}

/// Denials by rule, also those in shadow mode: a rule that is enforced then denies no more than it said it would.
#[derive(Debug, Default)]
struct Minute {
    denied: HashMap<Box<str>, u64>,
    /// Whether there were more rules than can be remembered.
    is_partial: bool,
}

/// What was denied meanwhile, in so many looks.
#[derive(Debug, Default)]
struct PausedCounts {
    minute: Minute,
    looks: usize,
}

#[derive(Debug)]
struct WatchedChange {
    change: u64,
    applied_ms: u64,
    /// At which revision the rules would have made no sense without it.
    refused_at: Option<u64>,
    /// Whether somebody was told that it cannot be undone.
    is_told: bool,
    rules: HashMap<Box<str>, WatchedRule>,
}

/// A rule that a change touched.
#[derive(Debug)]
struct WatchedRule {
    before_per_minute: f64,
    /// The share that somebody approved.
    approved: f64,
    /// Denials and requests of each look, for a minute, the latest first. None until its requests are counted: what it denied before that
    /// would be all of them.
    looks: VecDeque<(u64, u64)>,
}

/// A change whose rule denies far more than before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DenialJump {
    pub(super) change: u64,
    pub(super) rule: String,
    pub(super) before_per_minute: f64,
    pub(super) denied: u64,
}

impl Denials {
    /// Takes what rules counted. A set that was just replaced still has some to give.
    pub(super) fn take_from(&mut self, rules: &ActiveRules) {
        if self.minutes.is_empty() {
            self.minutes.push_front(Minute::default());
        }
        for (rule, count) in rules.counts() {
            let did = count.take();
            if did != RuleTally::default() {
                self.note(&rule.name, did);
            }
        }
    }

    fn note(&mut self, rule: &str, did: RuleTally) {
        let RuleTally { denied, shadow_denied, asked } = did;
        let aside = self.aside.as_mut().map(|aside| &mut aside.minute);
        let minute = aside.or(self.minutes.front_mut());
        if let Some(minute) = minute.filter(|_| denied + shadow_denied > 0) {
            minute.add(rule, denied + shadow_denied);
        }
        for touched in self.watched.iter_mut().filter_map(|watched| watched.rules.get_mut(rule)) {
            if let Some(look) = touched.looks.front_mut() {
                *look = (look.0 + denied, look.1 + asked);
            }
        }
    }

    /// Ends a look: what jumped in it, the latest change first, since it may need what an earlier one made. Changes are
    /// watched for a while.
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

    /// So many looks are over, less than a minute of them.
    fn pass(&mut self, looks: usize) {
        self.looks += looks;
        if self.looks >= LOOKS_PER_MINUTE {
            self.looks -= LOOKS_PER_MINUTE;
            self.minutes.push_front(Minute::default());
            self.minutes.truncate(MINUTES_BEFORE + 1);
        }
    }

    /// Keeps what is denied from now on apart from what was denied before: a change that came into force is compared with the latter,
    /// however long the store takes to say which change that is.
    pub(super) fn set_aside(&mut self) {
        self.aside.get_or_insert_default();
    }

    /// Goes on as before: all changes that came into force are known. What was denied meanwhile counts as long as it took, up to a minute: however
    /// long that was, nobody denied so much in one.
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
            minute.denied.iter().for_each(|(rule, denied)| current.add(rule, *denied));
            self.pass(looks);
        }
    }

    /// What a rule denies is held against the latest change of it, and against the one before if that is undone.
    fn jumps(&self) -> Vec<DenialJump> {
        let mut later: HashSet<&str> = HashSet::new();
        let mut jumps = Vec::new();
        for watched in self.watched.iter().rev() {
            jumps.extend(watched.jump(&later));
            later.extend(watched.rules.keys().map(|rule| &**rule));
        }
        jumps
    }

    /// Remembers what rules denied before this server started, in as long a time as a change is compared with.
    pub(super) fn recall(&mut self, denied: HashMap<Box<str>, u64>) {
        if self.minutes.is_empty() {
            self.minutes.push_front(Minute::default());
        }
        self.minutes.push_back(Minute { denied, is_partial: false });
        self.minutes.resize_with(MINUTES_BEFORE + 1, Minute::default);
    }

    /// Watches the rules that a change may have made stricter, of which somebody may have approved what it does. The changes that are
    /// no longer watched for that.
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
        // One that makes nothing stricter is nobody's mistake, and pushes out none that may be.
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

    /// Watches a change no longer. What its rules denied by it is no other's.
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

    /// Whether a change could not be undone at a revision: then it is not tried again.
    pub(super) fn is_refused(&self, change: u64, revision: u64) -> bool {
        self.watched.iter().any(|watched| watched.change == change && watched.refused_at == Some(revision))
    }

    /// Notes that a change could not be undone, and says whether that is news. At the revision that is named it is not tried
    /// again; without one it is, with every look.
    pub(super) fn refuse(&mut self, change: u64, at: Option<u64>) -> bool {
        let watched = self.watched.iter_mut().find(|watched| watched.change == change);
        watched.is_some_and(|watched| {
            watched.refused_at = at;
            !std::mem::replace(&mut watched.is_told, true)
        })
    }

    /// Begins to hold against changes what their rules do, whose requests are counted from now on.
    pub(super) fn begin(&mut self, rules: &ActiveRules) {
        self.mark(rules);
        self.take_from(rules);
        let all = self.watched.iter_mut().flat_map(|watched| watched.rules.values_mut());
        all.filter(|touched| touched.looks.is_empty()).for_each(|touched| touched.looks.push_front((0, 0)));
    }

    /// Has the requests of the rules counted that are watched, and of no others.
    pub(super) fn mark(&self, rules: &ActiveRules) {
        let names: HashSet<&str> =
            self.watched.iter().flat_map(|watched| watched.rules.keys()).map(|name| &**name).collect();
        for (rule, count) in rules.counts() {
            count.watch(!names.is_empty() && names.contains(&*rule.name));
        }
    }

    /// Whether a rule is watched by a change that nobody approved.
    pub(super) fn is_in_question(&self, rule: &str) -> bool {
        self.in_question(rule).next().is_some()
    }

    fn in_question(&self, rule: &str) -> impl Iterator<Item = &WatchedRule> {
        let touched = self.watched.iter().filter_map(move |watched| watched.rules.get(rule));
        touched.filter(|touched| touched.approved <= 0.0)
    }

    /// What a rule denied a minute before a change. What it denies by another one that is in question is no measure: a second
    /// mistake would be right by the first.
    fn before_change(&self, rule: &str) -> Option<f64> {
        let before = self.in_question(rule).map(|touched| touched.before_per_minute);
        Some(before.fold(self.before_per_minute(rule)?, f64::min))
    }

    /// What a rule denied in the minutes that are known; nothing if that may not be all.
    fn before_per_minute(&self, rule: &str) -> Option<f64> {
        let denied: u64 = self.minutes.iter().filter_map(|minute| minute.denied.get(rule)).sum();
        let is_partial = self.minutes.iter().any(|minute| minute.is_partial);
        if is_partial && denied == 0 {
            return None;
        }
        let looks = self.minutes.len().saturating_sub(1) * LOOKS_PER_MINUTE + self.looks;
        // Of less than a minute it is not concluded that there would have been more.
        Some(as_float(denied) / (as_float(looks as u64) / as_float(LOOKS_PER_MINUTE as u64)).max(1.0))
    }
}

impl Minute {
    fn add(&mut self, rule: &str, denied: u64) {
        if let Some(count) = self.denied.get_mut(rule) {
            *count += denied;
        } else if self.denied.len() < REMEMBERED_MAX {
            self.denied.insert(rule.into(), denied);
        } else {
            self.is_partial = true;
        }
    }

    /// What was denied in some looks out of these, as if it was evenly.
    fn last(&mut self, some: usize, looks: usize) {
        let part = |denied: u64| denied.saturating_mul(some as u64) / (looks as u64).max(1);
        self.denied.values_mut().for_each(|denied| *denied = part(*denied));
    }
}

impl WatchedChange {
    /// The rule that denies most of those that jump, if any do, but for those of a later change.
    fn jump(&self, later: &HashSet<&str>) -> Option<DenialJump> {
        let own = self.rules.iter().filter(|(rule, _)| !later.contains(&***rule));
        let jumps = own.filter_map(|(rule, touched)| {
            let WatchedRule { before_per_minute, approved, looks } = touched;
            let (denied, asked) = looks.iter().fold((0, 0), |sum, look| (sum.0 + look.0, sum.1 + look.1));
            let is_jump = denied >= DENIALS_MIN
                && denied.saturating_mul(100) >= asked.saturating_mul(DENIED_PERCENT_MIN)
                && as_float(denied) > JUMP * before_per_minute
                && as_float(denied) > APPROVED_TIMES * approved * as_float(asked);
            let (change, rule, before_per_minute) = (self.change, rule.to_string(), *before_per_minute);
            is_jump.then_some(DenialJump { change, rule, before_per_minute, denied })
        });
        jumps.max_by_key(|jump| jump.denied)
    }
}

#[expect(clippy::cast_precision_loss, reason = "nobody denies that much in a minute")]
fn as_float(count: u64) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_000_000;

    /// Notes the same for so many looks; what jumped in the last of them.
    fn looks(denials: &mut Denials, count: usize, (denied, asked): (u64, u64)) -> Vec<DenialJump> {
        let mut jumps = Vec::new();
        for _ in 0..count {
            denials.take_from(&ActiveRules::default());
            denials.note("a", RuleTally { denied, shadow_denied: 0, asked });
            jumps = denials.look(NOW_MS);
        }
        jumps
    }

    /// Watches a change whose rules are counted from now on.
    fn watch<const RULES: usize>(
        denials: &mut Denials,
        change: (u64, u64),
        rules: [&str; RULES],
        approved: Option<&ApprovedEffect>,
    ) -> Vec<u64> {
        let gone = denials.watch(change, rules.map(str::to_owned), approved);
        denials.begin(&ActiveRules::default());
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
        // Long ago does not count, and half a minute is not made into a whole one.
        assert_eq!(after((0, (0, 0)), (9, 100)).len(), 1);
        assert_eq!(after((6, (2, 100)), (10, 100)), []);
    }

    #[test]
    fn few_denials_and_a_small_part_are_no_jump() {
        assert_eq!(after((0, (0, 0)), (8, 8)), [], "96 a minute");
        assert_eq!(after((0, (0, 0)), (10, 1_001)), [], "less than a percent");
        assert_eq!(after((0, (0, 0)), (10, 1_000)).len(), 1);
    }

    #[test]
    fn what_a_rule_would_have_denied_in_shadow_mode_is_no_jump_when_it_does() {
        let enforced_after = |shadow_denied: u64| {
            let mut denials = Denials::default();
            denials.take_from(&ActiveRules::default());
            denials.note("a", RuleTally { shadow_denied, ..RuleTally::default() });
            denials.look(NOW_MS);
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            looks(&mut denials, LOOKS_PER_MINUTE, (100, 200)).len()
        };
        assert_eq!([0, 119, 120].map(enforced_after), [1, 1, 0]);
        // While it is in shadow mode it denies nobody.
        let mut denials = Denials::default();
        watch(&mut denials, (7, NOW_MS), ["a"], None);
        denials.take_from(&ActiveRules::default());
        denials.note("a", RuleTally { shadow_denied: 1_000, ..RuleTally::default() });
        assert_eq!(denials.look(NOW_MS), []);
    }

    #[test]
    fn what_somebody_approved_is_no_jump_up_to_twice_as_much() {
        let effect = |newly_denied: u32| {
            let measured = format!(
                r#"{{"records":100,"requests":100,"newly_denied":{newly_denied},"newly_allowed":0,
                "newly_denied_percent":{newly_denied},"rules":[{{"rule":"a","requests":100,"newly_denied":{newly_denied}}}]}}"#
            );
            ApprovedEffect::read(&format!(r#"{{"measured":{measured}}}"#)).expect("measured")
        };
        let jumps = |approved: Option<&ApprovedEffect>, rule: &str, look: (u64, u64)| {
            let mut denials = Denials::default();
            watch(&mut denials, (7, NOW_MS), ["a", "b"], approved);
            denials.take_from(&ActiveRules::default());
            denials.note(rule, RuleTally { denied: look.0, asked: look.1, shadow_denied: 0 });
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
        let mut denials = Denials::default();
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
        let gone: Vec<_> =
            (300..310).flat_map(|change| denials.watch((change, NOW_MS), many(change), None)).collect();
        assert_eq!(
            (gone, watched(&denials)),
            (vec![7], (300..310).collect()),
            "the earliest goes, and is told"
        );
        let mut denials = Denials::default();
        let gone: Vec<_> = (0..CHANGES_MAX as u64 + 2)
            .flat_map(|change| denials.watch((change, NOW_MS), ["a".to_owned()], None))
            .collect();
        assert_eq!((gone, denials.watched.len()), (vec![0, 1], CHANGES_MAX), "however small");
    }

    /// What is denied before requests are counted would look like all of them.
    #[test]
    fn what_a_rule_denied_before_its_requests_were_counted_is_not_held_against_a_change() {
        let jumps = |begins: bool| {
            let mut denials = Denials::default();
            denials.take_from(&ActiveRules::default());
            denials.watch((7, NOW_MS), ["a".to_owned()], None);
            if begins {
                denials.begin(&ActiveRules::default());
            }
            denials.note("a", RuleTally { denied: 300, shadow_denied: 0, asked: 1 });
            denials.look(NOW_MS).len()
        };
        assert_eq!([false, true].map(jumps), [0, 1]);
    }

    #[test]
    fn what_is_denied_before_a_change_is_known_is_not_what_was_denied_before_it() {
        let jumps = |is_aside: bool| {
            let mut denials = Denials::default();
            looks(&mut denials, 12, (1, 100));
            if is_aside {
                denials.set_aside();
            }
            // The store is gone for two minutes.
            looks(&mut denials, 24, (100, 100));
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            denials.go_on();
            looks(&mut denials, LOOKS_PER_MINUTE, (100, 100)).len()
        };
        assert_eq!([false, true].map(jumps), [0, 1]);
    }

    #[test]
    fn what_was_set_aside_is_what_was_denied_before_the_next_change() {
        let mut denials = Denials::default();
        looks(&mut denials, 12, (0, 100));
        denials.set_aside();
        looks(&mut denials, 12, (5, 100));
        assert_eq!(denials.before_per_minute("a"), Some(0.0));
        denials.go_on();
        // Of two minutes, one in which it denied nothing.
        assert_eq!(denials.before_per_minute("a"), Some(30.0));
    }

    #[test]
    fn what_was_denied_in_a_long_time_was_not_denied_in_a_minute() {
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
        let mut denials = Denials::default();
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
    fn what_a_change_denies_is_no_measure_for_the_next() {
        let jumps = |approved: Option<&ApprovedEffect>| {
            let mut denials = Denials::default();
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
    fn what_was_denied_before_a_start_is_compared_with() {
        let jumps = |before: u64| {
            let mut denials = Denials::default();
            denials.recall(HashMap::from([("a".into(), before)]));
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            // It is watched once, however often it is found.
            watch(&mut denials, (7, NOW_MS), ["a"], None);
            looks(&mut denials, 1, (100, 100)).len()
        };
        // In five minutes.
        assert_eq!([0, 49, 50].map(jumps), [1, 1, 0]);
    }

    #[test]
    fn what_may_not_be_remembered_is_not_judged() {
        let mut denials = Denials::default();
        looks(&mut denials, 1, (1, 1));
        for rule in 0..REMEMBERED_MAX {
            denials.note(&rule.to_string(), RuleTally { denied: 1, shadow_denied: 0, asked: 1 });
        }
        assert_eq!(denials.before_per_minute("another"), None);
        assert_eq!(denials.before_per_minute("a"), Some(1.0));
    }
}
