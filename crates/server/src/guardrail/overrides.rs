//! Overrides of a change: whether one may deny what passes, for some key.
//!
//! What holds for a key is asked of both sets. A pattern stands for many keys: of those that it may take over, or leave to
//! others, each may have been under any other pattern of the rule, so it is compared with all of them.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value};
use tidegate_rules::Mode;
use tidegate_rules::book::{Book, Kind};
use tidegate_rules::change::Operation;

use super::meter::Rate;
use super::trial::{Compared, Named};

/// What holds for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Terms {
    rate: Rate,
    mode: Mode,
}

impl Terms {
    /// Whether all passes that passes under others.
    fn covers(self, was: Self) -> bool {
        match (was.mode, self.mode) {
            (_, Mode::Shadow) => true,
            (Mode::Shadow, Mode::Enforce) => false,
            (Mode::Enforce, Mode::Enforce) => self.rate.covers(was.rate),
        }
    }

    fn half_of(self, was: Self) -> Option<f64> {
        self.rate.half_of(was.rate).filter(|_| [self.mode, was.mode] == [Mode::Enforce; 2])
    }
}

/// Which keys an override is for, and when.
#[derive(Clone, Debug, PartialEq)]
struct Over {
    rule: String,
    tenant: Option<String>,
    key: Vec<String>,
    priority: i64,
    expires: Value,
}

impl Over {
    /// Reads a body that was checked before.
    fn read(body: &str) -> Option<Self> {
        let body: Value = serde_json::from_str(body).ok()?;
        let text = |field: &str| body[field].as_str().map(str::to_owned);
        let key = body["key"].as_array()?.iter().filter_map(Value::as_str).map(str::to_owned).collect();
        let priority = body["priority"].as_i64().unwrap_or(0);
        let expires = body["expires"].clone();
        Some(Self { rule: text("rule")?, tenant: text("tenant"), key, priority, expires })
    }

    fn is_wild(&self) -> bool {
        self.key.iter().any(|part| part.contains('*'))
    }

    /// Whether it is for every key.
    fn is_for_all(&self) -> bool {
        self.key.iter().all(|part| part.bytes().all(|byte| byte == b'*'))
    }

    /// What holds for its keys. A pattern is told as what holds for its own text: whatever describes that describes all that
    /// the pattern does.
    fn terms(&self, set: &Named<'_>) -> Option<Terms> {
        let position = *set.positions.get(self.rule.as_str())?;
        let rule = set.set.rules().get(position)?;
        let tenant = self.tenant.as_deref().or(rule.tenant.as_deref()).unwrap_or_default();
        let key: Vec<&str> = self.key.iter().map(String::as_str).collect();
        let terms = set.set.usual_terms(position, tenant, &key, set.now_ms)?;
        Some(Terms { rate: Rate::of(&terms.limit), mode: terms.mode })
    }
}

/// What holds for keys that no override has to itself: by rule, the terms of its patterns that differ.
type Patterns = HashMap<String, Vec<Terms>>;

/// The overrides that a change is about, beside those that are there.
pub(super) struct Overrides<'s> {
    before: &'s Named<'s>,
    after: &'s Named<'s>,
    changed: Vec<(Option<Over>, Option<Over>)>,
    cut_short: HashSet<String>,
    patterns_before: Patterns,
    patterns_after: Patterns,
}

impl<'s> Overrides<'s> {
    pub(super) fn new(
        before: &'s Named<'s>,
        after: &'s Named<'s>,
        book: &Book,
        operations: &[Operation],
    ) -> Self {
        let operations = operations.iter().filter(|operation| operation.row().0 == Kind::Override);
        let names: HashSet<&str> = operations.clone().map(|operation| operation.row().1).collect();
        let overrides = || book.rows.iter().filter(|row| row.kind == Kind::Override);
        let there = overrides().filter(|row| names.contains(row.name.as_str()));
        let there: HashMap<&str, &str> = there.map(|row| (row.name.as_str(), row.body.as_str())).collect();
        let is_cut_short = |operation: &&Operation| {
            there.get(operation.row().1).is_some_and(|old| !lasts(old, operation.body()))
        };
        let cut_short = operations.clone().filter(is_cut_short);
        let cut_short = cut_short.map(|operation| operation.row().1.to_owned()).collect();
        let changed: Vec<(Option<Over>, Option<Over>)> = operations
            .map(|operation| {
                let old = there.get(operation.row().1).copied().and_then(Over::read);
                (old, operation.body().and_then(Over::read))
            })
            .collect();
        let wild = changed.iter().flat_map(|(old, new)| old.iter().chain(new)).filter(|over| over.is_wild());
        let wild: HashSet<&str> = wild.map(|over| over.rule.as_str()).collect();
        // All overrides are only gone through where patterns change.
        let others = overrides()
            .filter(|row| !wild.is_empty() && row.body.contains('*') && !names.contains(row.name.as_str()));
        let others = others.filter_map(|row| Over::read(&row.body));
        let others: Vec<Over> = others.filter(|over| wild.contains(over.rule.as_str())).collect();
        let olds = changed.iter().filter_map(|(old, _)| old.as_ref());
        let news = changed.iter().filter_map(|(_, new)| new.as_ref());
        let patterns_before = patterns(others.iter().chain(olds), before);
        let patterns_after = patterns(others.iter().chain(news), after);
        Self { before, after, changed, cut_short, patterns_before, patterns_after }
    }

    /// Finds the rules that overrides touch, and those that may deny more by them.
    pub(super) fn compare(&self, found: &mut Compared) {
        found.cut_short.extend(self.cut_short.iter().cloned());
        for (old, new) in &self.changed {
            let rules: BTreeSet<&String> = old.iter().chain(new).map(|over| &over.rule).collect();
            if self.may_deny_more(old.as_ref(), new.as_ref()) {
                let left = new.as_ref().and_then(|new| self.left_to_all(new));
                for rule in &rules {
                    found.note_tighter(rule, left);
                }
            }
            found.touched.extend(rules.into_iter().cloned());
        }
    }

    fn may_deny_more(&self, old: Option<&Over>, new: Option<&Over>) -> bool {
        match (old, new) {
            (None, None) => false,
            // Other keys, or another time: what that means takes somebody who knows.
            (Some(old), Some(new)) if old != new => true,
            (Some(_), Some(new)) => is_tighter(new.terms(self.before), new.terms(self.after)),
            (None, Some(new)) => {
                let is = new.terms(self.after);
                others(new, self.before, &self.patterns_before).any(|was| is_tighter(was, is))
            }
            (Some(old), None) => {
                let was = old.terms(self.before);
                others(old, self.after, &self.patterns_after).any(|is| is_tighter(was, is))
            }
        }
    }

    /// The part that an override for every key leaves of what passed the rule, if that is half or less.
    fn left_to_all(&self, new: &Over) -> Option<f64> {
        let (was, is) = new.terms(self.before).zip(new.terms(self.after))?;
        is.half_of(was).filter(|_| new.is_for_all())
    }
}

/// When an override ends by itself, of a body that was checked before.
pub(super) fn end_ms(body: &str) -> Option<u64> {
    serde_json::from_str::<Value>(body).ok()?["expires"].as_u64()
}

/// Whether an override is there for as long as it was, and says the same, or allows more.
fn lasts(old: &str, new: Option<&str>) -> bool {
    let read = |body: &str| serde_json::from_str::<Map<String, Value>>(body).ok();
    let (Some(mut old), Some(mut new)) = (read(old), new.and_then(read)) else { return false };
    let mut taken = |field: &str| [old.remove(field), new.remove(field)].map(|value| value?.as_u64());
    let [old_ms, new_ms] = taken("expires").map(|end_ms| end_ms.unwrap_or(u64::MAX));
    let [old_limit, new_limit] = taken("limit");
    new_ms >= old_ms && new_limit >= old_limit && old == new
}

/// What holds for keys of an override in a set that does not have it.
fn others(over: &Over, set: &Named<'_>, patterns: &Patterns) -> impl Iterator<Item = Option<Terms>> {
    let patterns = patterns.get(&over.rule).filter(|_| over.is_wild()).into_iter().flatten();
    [over.terms(set)].into_iter().chain(patterns.copied().map(Some))
}

/// Whether a key may be denied what it was not. A rule that is gone denies nothing.
fn is_tighter(was: Option<Terms>, is: Option<Terms>) -> bool {
    match (was, is) {
        (_, None) => false,
        (None, Some(is)) => is.mode == Mode::Enforce,
        (Some(was), Some(is)) => !is.covers(was),
    }
}

fn patterns<'o>(overrides: impl Iterator<Item = &'o Over>, set: &Named<'_>) -> Patterns {
    let mut patterns = Patterns::new();
    for over in overrides.filter(|over| over.is_wild()) {
        let known = patterns.entry(over.rule.clone()).or_default();
        known.extend(over.terms(set).filter(|terms| !known.contains(terms)));
    }
    patterns
}
