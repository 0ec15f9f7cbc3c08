//! What rules deny, before a change and after it: how one that was a mistake is known.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use crate::rules::GatedRules;

/// How often denials are looked at. More often: a mistake is undone earlier; all rules are gone through more often.
pub(super) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long a change is watched, and how long before it is compared with.
const WATCHED_MS: u64 = 5 * 60 * 1_000;

const LOOKS_PER_MINUTE: usize = 12;
const MINUTES_BEFORE: usize = 5;

/// Denials a minute that are so many times those before are a jump.
const JUMP: f64 = 10.0;

/// Fewer denials a minute are no jump, whatever there was before. Lower: a mistake is noticed on servers with little traffic;
/// a new rule that rightly stops somebody is taken for one.
const DENIALS_MIN: u64 = 100;

/// Denials of a smaller part of a rule's requests, in percent, are no jump: it does what it is for.
const DENIED_PERCENT_MIN: u64 = 1;

/// Rules whose denials are remembered for each minute, some 60 bytes each. Those beyond are not judged.
const REMEMBERED_MAX: usize = 100_000;

/// Changes that are watched at once: the latest. More: more memory.
const CHANGES_MAX: usize = 100;

/// Rules of one change that are watched, some 200 bytes each; the first by name.
const RULES_MAX: usize = 10_000;

/// What rules denied lately, and the changes that are watched.
#[derive(Debug, Default)]
pub(super) struct Denials {
    /// Of the last minutes, the latest first; the first of them is not over.
    minutes: VecDeque<Minute>,
    /// Looks in the minute that is not over.
    looks: usize,
    watched: Vec<Watched>,
}

/// Denials by rule.
#[derive(Debug, Default)]
struct Minute {
    denied: HashMap<Box<str>, u64>,
    /// Whether there were more rules than can be remembered.
    is_partial: bool,
}

#[derive(Debug)]
struct Watched {
    change: u64,
    applied_ms: u64,
    rules: HashMap<Box<str>, Touched>,
}

/// A rule that a change touched.
#[derive(Debug)]
struct Touched {
    before_per_minute: f64,
    /// Denials and requests of each look, for a minute, the latest first.
    looks: VecDeque<(u64, u64)>,
}

/// A change whose rule denies far more than before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Jump {
    pub(super) change: u64,
    pub(super) rule: String,
    pub(super) before_per_minute: f64,
    pub(super) denied: u64,
}

impl Denials {
    /// Takes what rules counted. A set that was just replaced still has some to give.
    pub(super) fn take_from(&mut self, rules: &GatedRules) {
        if self.minutes.is_empty() {
            self.minutes.push_front(Minute::default());
        }
        for (rule, count) in rules.counts() {
            let (denied, asked) = count.take();
            if denied > 0 || asked > 0 {
                self.note(&rule.name, u64::from(denied), u64::from(asked));
            }
        }
    }

    fn note(&mut self, rule: &str, denied: u64, asked: u64) {
        if let Some(minute) = self.minutes.front_mut().filter(|_| denied > 0) {
            minute.add(rule, denied);
        }
        for touched in self.watched.iter_mut().filter_map(|watched| watched.rules.get_mut(rule)) {
            if let Some(look) = touched.looks.front_mut() {
                *look = (look.0 + denied, look.1 + asked);
            }
        }
    }

    /// Ends a look: what jumped in it, and changes that are watched no longer.
    pub(super) fn look(&mut self, now_ms: u64) -> Vec<Jump> {
        let jumps = self.watched.iter().filter_map(Watched::jump).collect();
        self.watched.retain(|watched| now_ms < watched.applied_ms.saturating_add(WATCHED_MS));
        for touched in self.watched.iter_mut().flat_map(|watched| watched.rules.values_mut()) {
            touched.looks.push_front((0, 0));
            touched.looks.truncate(LOOKS_PER_MINUTE);
        }
        self.looks += 1;
        if self.looks == LOOKS_PER_MINUTE {
            self.looks = 0;
            self.minutes.push_front(Minute::default());
            self.minutes.truncate(MINUTES_BEFORE + 1);
        }
        jumps
    }

    /// Watches the rules that a change touched.
    pub(super) fn watch(&mut self, change: u64, applied_ms: u64, rules: impl IntoIterator<Item = String>) {
        let touched = |rule: String| {
            let before_per_minute = self.before_per_minute(&rule)?;
            Some((rule.into_boxed_str(), Touched { before_per_minute, looks: VecDeque::from([(0, 0)]) }))
        };
        let rules = rules.into_iter().take(RULES_MAX).filter_map(touched).collect();
        self.watched.push(Watched { change, applied_ms, rules });
        if self.watched.len() > CHANGES_MAX {
            self.watched.remove(0);
        }
    }

    pub(super) fn forget(&mut self, change: u64) {
        self.watched.retain(|watched| watched.change != change);
    }

    /// Has the requests of the rules counted that are watched, and of no others.
    pub(super) fn mark(&self, rules: &GatedRules) {
        let names: HashSet<&str> =
            self.watched.iter().flat_map(|watched| watched.rules.keys()).map(|name| &**name).collect();
        for (rule, count) in rules.counts() {
            count.watch(!names.is_empty() && names.contains(&*rule.name));
        }
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
}

impl Watched {
    fn jump(&self) -> Option<Jump> {
        let jumps = self.rules.iter().filter_map(|(rule, touched)| {
            let Touched { before_per_minute, looks } = touched;
            let (denied, asked) = looks.iter().fold((0, 0), |sum, look| (sum.0 + look.0, sum.1 + look.1));
            let is_jump = denied >= DENIALS_MIN
                && denied.saturating_mul(100) >= asked.saturating_mul(DENIED_PERCENT_MIN)
                && as_float(denied) > JUMP * before_per_minute;
            let (change, rule, before_per_minute) = (self.change, rule.to_string(), *before_per_minute);
            is_jump.then_some(Jump { change, rule, before_per_minute, denied })
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
    fn looks(denials: &mut Denials, count: usize, (denied, asked): (u64, u64)) -> Vec<Jump> {
        let mut jumps = Vec::new();
        for _ in 0..count {
            denials.take_from(&GatedRules::default());
            denials.note("a", denied, asked);
            jumps = denials.look(NOW_MS);
        }
        jumps
    }

    fn after(before: (usize, (u64, u64)), look: (u64, u64)) -> Vec<Jump> {
        let mut denials = Denials::default();
        looks(&mut denials, before.0, before.1);
        denials.watch(7, NOW_MS, ["a".to_owned()]);
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
    fn only_the_rules_of_changes_of_the_last_minutes_are_watched() {
        let mut denials = Denials::default();
        denials.watch(7, NOW_MS, ["b".to_owned()]);
        assert_eq!(looks(&mut denials, 20, (100, 100)), [], "another rule");
        denials.watch(8, NOW_MS - WATCHED_MS, ["a".to_owned()]);
        denials.look(NOW_MS);
        assert_eq!(denials.watched.len(), 1, "too long ago");
        denials.watch(9, NOW_MS, ["a".to_owned()]);
        denials.forget(9);
        assert_eq!(denials.watched.len(), 1);
        for change in 10..300 {
            denials.watch(change, NOW_MS, []);
        }
        assert_eq!((denials.watched.len(), denials.watched[0].change), (CHANGES_MAX, 200));
    }

    #[test]
    fn what_may_not_be_remembered_is_not_judged() {
        let mut denials = Denials::default();
        looks(&mut denials, 1, (1, 1));
        for rule in 0..REMEMBERED_MAX {
            denials.note(&rule.to_string(), 1, 1);
        }
        assert_eq!(denials.before_per_minute("another"), None);
        assert_eq!(denials.before_per_minute("a"), Some(1.0));
    }
}
