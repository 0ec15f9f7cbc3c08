//! Overrides of a change: whether one may deny passing requests of some key, and how many in the
//! worst case.
//!
//! The terms of a key come from both rule sets. A pattern stands for many keys. Another pattern of
//! the rule may match some of the keys that it gains or loses, so it is compared with all such
//! patterns.
//!
//! An override inherits the fields that it does not set from its rule. So a change of a rule may
//! change overrides that it does not name.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::{Map, Value};
use tidegate_rules::change::Operation;
use tidegate_rules::pattern::Pattern;
use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};
use tidegate_rules::{ADDRESS, AddressCover, Mode};

use super::plan::{AFTER_ALL_MS, NOTHING_LEFT, NamedRules, RuleDiff, Tightening};
use super::rate::{LoweredRate, Rate};
use super::security::{SECURITY_RAISE_MAX, Weakening, protects};

/// Maximum number of keys of a rule that a change may halve, or lift out of a security rule, one by
/// one, as an emergency may; more count as the whole rule. Higher: one person can deny more
/// customers without a measurement, or let in more attackers. Lower: a few keys already need a
/// second person.
pub(crate) const KEYS_MAX: usize = 10;

/// Terms that apply to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct KeyTerms {
    rate: Rate,
    mode: Mode,
}

impl KeyTerms {
    /// Whether these terms pass all requests that the other terms pass.
    fn covers(self, was: Self) -> bool {
        match (was.mode, self.mode) {
            (_, Mode::Shadow) => true,
            (Mode::Shadow, Mode::Enforce) => false,
            (Mode::Enforce, Mode::Enforce) => self.rate.covers(was.rate),
        }
    }
}

/// Terms of a key before and after the change; `None` without the rule.
#[derive(Clone, Copy, Debug)]
struct TermsChange {
    was: Option<KeyTerms>,
    is: Option<KeyTerms>,
}

impl TermsChange {
    /// Whether a key may get new denials. A deleted rule denies nothing.
    fn is_tighter(self) -> bool {
        match (self.was, self.is) {
            (_, None) => false,
            (None, Some(is)) => is.mode == Mode::Enforce,
            (Some(was), Some(is)) => !is.covers(was),
        }
    }

    /// Returns the part of the passing requests left in the worst case, if an unknown traffic may
    /// lose half or more. Without earlier enforcement that part is unknown, so nothing counts as
    /// left.
    fn left(self) -> Option<f64> {
        let is = self.is.filter(|is| is.mode == Mode::Enforce)?;
        match self.was {
            Some(KeyTerms { rate, mode: Mode::Enforce }) => is.rate.risky_part_of(rate),
            _ => Some(NOTHING_LEFT),
        }
    }

    /// Returns the lower limit of a key, if it was limited before.
    fn lowered(self) -> Option<LoweredRate> {
        let (was, is) = self.was.zip(self.is)?;
        let are_enforced = was.mode == Mode::Enforce && is.mode == Mode::Enforce;
        LoweredRate::new(was.rate, is.rate).filter(|_| are_enforced)
    }

    /// Whether a key of a security rule is lifted out of its limit.
    fn is_lifted(self) -> bool {
        let Some((was, is)) = self.was.zip(self.is) else { return false };
        let is_free = is.mode == Mode::Shadow || is.rate.exceeds(was.rate, SECURITY_RAISE_MAX);
        was.mode == Mode::Enforce && is_free
    }
}

/// The keys of an override, and the time for which it applies.
#[derive(Clone, Debug, PartialEq)]
struct OverrideScope {
    rule: String,
    tenant: Option<String>,
    key: Vec<Pattern>,
    priority: i64,
    expires_ms: Option<u64>,
}

impl OverrideScope {
    /// Reads a body that was checked before.
    fn read(body: &str) -> Option<Self> {
        let body: Value = serde_json::from_str(body).ok()?;
        let text = |field: &str| body[field].as_str().map(str::to_owned);
        let key = body["key"].as_array()?.iter().filter_map(Value::as_str).map(Pattern::new).collect();
        let priority = body["priority"].as_i64().unwrap_or(0);
        let expires_ms = body["expires"].as_u64();
        Some(Self { rule: text("rule")?, tenant: text("tenant"), key, priority, expires_ms })
    }

    /// Returns the dimensions of its key, each with the pattern of its values.
    fn parts<'o>(&'o self, set: &'o NamedRules<'_>) -> impl Iterator<Item = (&'o Arc<str>, &'o Pattern)> {
        set.rule(&self.rule).into_iter().flat_map(|rule| rule.key.iter().zip(&self.key))
    }

    fn is_wild(&self) -> bool {
        self.key.iter().any(Pattern::is_wild)
    }

    /// Whether it may apply to all keys that exist. Any pattern may, even a specific one such as
    /// `user:*`.
    fn may_be_for_all(&self) -> bool {
        self.is_wild() || self.key.is_empty()
    }

    /// Whether it applies to all keys of another one. A pattern that matches the text of another
    /// pattern matches all its keys.
    fn is_for_all_of(&self, other: &Self) -> bool {
        let mut parts = self.key.iter().zip(&other.key);
        (self.tenant.is_none() || self.tenant == other.tenant)
            && parts.all(|(own, of)| own.matches(of.as_str()))
    }

    /// Whether both may have a key in common.
    fn may_meet(&self, other: &Self) -> bool {
        let is_other_tenant = self.tenant.is_some() && other.tenant.is_some() && self.tenant != other.tenant;
        // Addresses have many spellings.
        let is_address = |part: &Pattern| part.as_str().parse::<IpAddr>().is_ok();
        let meet = |(own, of): (&Pattern, &Pattern)| is_address(own) || is_address(of) || own.may_meet(of);
        !is_other_tenant && self.key.iter().zip(&other.key).all(meet)
    }

    /// Returns the terms of its keys at a time. The text of a pattern stands for its keys: a
    /// pattern that matches the text matches all of them.
    fn terms_at(&self, set: &NamedRules<'_>, at_ms: u64) -> Option<KeyTerms> {
        let position = *set.positions.get(self.rule.as_str())?;
        let rule = set.set.rules().get(position)?;
        let tenant = self.tenant.as_deref().or(rule.tenant.as_deref()).unwrap_or_default();
        let key: Vec<&str> = self.key.iter().map(Pattern::as_str).collect();
        let terms = set.set.usual_terms(position, tenant, &key, at_ms)?;
        Some(KeyTerms { rate: Rate::of(&terms.limit), mode: terms.mode })
    }

    fn terms(&self, set: &NamedRules<'_>) -> Option<KeyTerms> {
        self.terms_at(set, set.now_ms)
    }

    /// Returns the addresses that it blocks. Another part of the key with a value narrows it to few
    /// requests.
    fn blocked(&self, set: &NamedRules<'_>) -> AddressCover {
        let mut cover = AddressCover::default();
        let is_block = |terms: KeyTerms| terms.mode == Mode::Enforce && terms.rate.is_blocked();
        let rule = set.rule(&self.rule).filter(|_| self.terms(set).is_some_and(is_block));
        let parts: Vec<(bool, &Pattern)> = rule
            .map(|rule| rule.key.iter().map(|name| **name == *ADDRESS).zip(&self.key).collect())
            .unwrap_or_default();
        if parts.iter().all(|(is_address, part)| *is_address || part.is_wild()) {
            let addresses = parts.iter().filter(|(is_address, _)| *is_address);
            addresses.for_each(|(_, part)| cover.add_pattern(part));
        }
        cover
    }
}

/// A pattern of a rule, before or after the change, and the changed terms of its keys.
#[derive(Debug)]
struct PatternChange {
    over: OverrideScope,
    turn: TermsChange,
}

/// The overrides of a change, beside the existing ones.
pub(super) struct ChangedOverrides<'s> {
    before: &'s NamedRules<'s>,
    after: &'s NamedRules<'s>,
    changed: Vec<(Option<OverrideScope>, Option<OverrideScope>)>,
    cut_short: HashSet<String>,
    /// By rule.
    patterns: HashMap<String, Vec<PatternChange>>,
    heirs: InheritingOverrides<'s>,
}

/// Overrides that inherit changed terms from a rule of the change, without being named by it.
struct InheritingOverrides<'s> {
    rows: &'s [RuleRow],
    rules: HashSet<&'s str>,
    named: HashSet<&'s str>,
}

impl<'s> InheritingOverrides<'s> {
    fn new(
        before: &NamedRules<'s>,
        after: &NamedRules<'s>,
        rows: &'s [RuleRow],
        named: HashSet<&'s str>,
    ) -> Self {
        let passes_on_other = |name: &&str| {
            let inherited_terms = |set: &NamedRules<'s>| set.set.inherited_terms(*set.positions.get(name)?);
            inherited_terms(before).zip(inherited_terms(after)).is_some_and(|(was, is)| was != is)
        };
        let rules = after.positions.keys().copied().filter(passes_on_other).collect();
        Self { rows, rules, named }
    }

    /// Returns the overrides. There may be a million, so they are scanned only if inherited terms
    /// change, and only those of such rules are parsed in full.
    fn iter(&self) -> impl Iterator<Item = OverrideScope> {
        let rows = if self.rules.is_empty() { &[] } else { self.rows };
        let is_heir = |row: &&RuleRow| {
            rule_of(&row.body).is_some_and(|rule| self.rules.contains(&*rule))
                && !self.named.contains(row.name.as_str())
        };
        rows.iter().filter(is_heir).filter_map(|row| OverrideScope::read(&row.body))
    }
}

/// Keys whose limits a change halves or lifts one by one: their number for each rule, and the
/// smallest part left.
#[derive(Default)]
struct Keys(BTreeMap<String, (usize, f64)>);

impl Keys {
    /// Takes a key, if that much is left of it.
    fn add(&mut self, rule: &str, left: Option<f64>) {
        let Some(left) = left else { return };
        let (count, least) = self.0.entry(rule.to_owned()).or_insert((0, left));
        *count += 1;
        *least = least.min(left);
    }

    /// Takes a lifted key, or an override of many.
    fn lift(&mut self, rule: &str, is_lifted: bool, is_for_all: bool) {
        if is_lifted {
            let (count, _) = self.0.entry(rule.to_owned()).or_insert((0, NOTHING_LEFT));
            *count += if is_for_all { KEYS_MAX + 1 } else { 1 };
        }
    }

    /// Returns the rules with so many of these keys that they count as the whole rule.
    fn many(&self) -> impl Iterator<Item = (&str, f64)> {
        let many = self.0.iter().filter(|(_, (count, _))| *count > KEYS_MAX);
        many.map(|(rule, (_, least))| (rule.as_str(), *least))
    }
}

impl<'s> ChangedOverrides<'s> {
    pub(super) fn new(
        before: &'s NamedRules<'s>,
        after: &'s NamedRules<'s>,
        rule_rows: &'s RuleRows,
        operations: &'s [Operation],
    ) -> Self {
        let operations = operations.iter().filter(|operation| operation.row().0 == RowKind::Override);
        let names: HashSet<&'s str> = operations.clone().map(|operation| operation.row().1).collect();
        let rows = rule_rows.rows_behind(Some(RowKind::Override), None);
        let there = rows.iter().filter(|row| names.contains(row.name.as_str()));
        let there: HashMap<&str, &str> = there.map(|row| (row.name.as_str(), row.body.as_str())).collect();
        let is_cut_short = |operation: &&Operation| {
            there.get(operation.row().1).is_some_and(|old| !lasts(old, operation.body()))
        };
        let cut_short = operations.clone().filter(is_cut_short);
        let cut_short = cut_short.map(|operation| operation.row().1.to_owned()).collect();
        let changed: Vec<(Option<OverrideScope>, Option<OverrideScope>)> = operations
            .map(|operation| {
                let old = there.get(operation.row().1).copied().and_then(OverrideScope::read);
                (old, operation.body().and_then(OverrideScope::read))
            })
            .collect();
        let wild = changed.iter().flat_map(|(old, new)| old.iter().chain(new)).filter(|over| over.is_wild());
        let wild: Vec<&OverrideScope> = wild.collect();
        let rules: HashSet<&str> = wild.iter().map(|over| over.rule.as_str()).collect();
        // All overrides are scanned only if patterns change.
        let others = rows
            .iter()
            .filter(|row| !rules.is_empty() && row.body.contains('*') && !names.contains(row.name.as_str()));
        let others = others.filter_map(|row| OverrideScope::read(&row.body));
        let others = others.filter(|over| over.is_wild() && rules.contains(over.rule.as_str()));
        let mut patterns: HashMap<String, Vec<PatternChange>> = HashMap::new();
        for over in others.chain(wild.into_iter().cloned()) {
            let turn = TermsChange { was: over.terms(before), is: over.terms(after) };
            patterns.entry(over.rule.clone()).or_default().push(PatternChange { over, turn });
        }
        let heirs = InheritingOverrides::new(before, after, rows, names);
        Self { before, after, changed, cut_short, patterns, heirs }
    }

    /// Finds the rules that overrides touch, and the rules that may deny more by these overrides.
    pub(super) fn compare(&self, found: &mut RuleDiff) {
        found.cut_short.extend(self.cut_short.iter().cloned());
        let (mut keys, mut lifted) = (Keys::default(), Keys::default());
        for (old, new) in &self.changed {
            let rules: BTreeSet<&String> = old.iter().chain(new).map(|over| &over.rule).collect();
            let turns = self.turns(old.as_ref(), new.as_ref());
            // Other keys or another time: a person must judge the result.
            let is_another = old.is_some() && new.is_some() && old != new;
            let is_for_all = old.iter().chain(new).any(OverrideScope::may_be_for_all);
            if is_another || turns.iter().any(|turn| turn.is_tighter()) {
                let left = turns.iter().filter_map(|turn| turn.left()).reduce(f64::min);
                let lowered = turns.iter().filter_map(|turn| turn.lowered());
                let lowered = lowered.reduce(|a, b| if b.part() < a.part() { b } else { a });
                for rule in &rules {
                    found.note_tighter(rule, Tightening { left: left.filter(|_| is_for_all), lowered });
                    keys.add(rule, left);
                }
                for over in old.iter().chain(new) {
                    found.note_named(&over.rule, over.parts(self.after));
                }
                if let Some(over) = new {
                    found.blocked.extend(&over.blocked(self.after));
                }
            }
            let is_lifted = turns.iter().any(|turn| turn.is_lifted());
            for rule in rules.iter().filter(|rule| self.before.rule(rule).is_some_and(protects)) {
                found.is_of_security = true;
                lifted.lift(rule, is_lifted, is_for_all);
            }
            found.touched.extend(rules.into_iter().cloned());
        }
        self.compare_heirs(found, &mut keys, &mut lifted);
        for (rule, _) in lifted.many() {
            found.note_weakened(rule, Weakening::Override);
        }
        for (rule, left) in keys.many() {
            found.note_tighter(rule, Tightening { left: Some(left), lowered: None });
        }
    }

    /// Does the same for overrides that inherit other terms. A rule that now sets its default burst
    /// stays the same, and only these overrides touch it.
    fn compare_heirs(&self, found: &mut RuleDiff, keys: &mut Keys, lifted: &mut Keys) {
        for over in self.heirs.iter() {
            let turn = self.turn(&over);
            if self.before.rule(&over.rule).is_some_and(protects) {
                lifted.lift(&over.rule, turn.is_lifted(), over.may_be_for_all());
            }
            if turn.is_tighter() {
                let (left, lowered) = (turn.left(), turn.lowered());
                let tightening = Tightening { left: left.filter(|_| over.may_be_for_all()), lowered };
                found.note_tighter(&over.rule, tightening);
                keys.add(&over.rule, left);
                found.note_named(&over.rule, over.parts(self.after));
                found.touched.insert(over.rule);
            }
        }
    }

    /// Returns how the terms of the keys of an override change.
    fn turns(&self, old: Option<&OverrideScope>, new: Option<&OverrideScope>) -> Vec<TermsChange> {
        match (old, new) {
            (Some(old), Some(new)) if old == new => vec![self.turn(new)],
            _ => {
                let gone = old.map(|old| self.turns_without(old)).unwrap_or_default();
                let come = new.map(|new| self.turns_with(new)).unwrap_or_default();
                let over = old.zip(new).map(|(old, new)| self.turns_in_time(old, new)).unwrap_or_default();
                [gone, come, over].concat()
            }
        }
    }

    fn turn(&self, over: &OverrideScope) -> TermsChange {
        TermsChange { was: over.terms(self.before), is: over.terms(self.after) }
    }

    /// The changes of the keys of a new override.
    fn turns_with(&self, new: &OverrideScope) -> Vec<TermsChange> {
        let own = self.turn(new);
        let met = self.met(new).map(|PatternChange { over, turn }| {
            if new.is_for_all_of(over) { *turn } else { TermsChange { was: turn.was, is: own.is } }
        });
        [own].into_iter().chain(met).collect()
    }

    /// The changes of the keys of a deleted override.
    fn turns_without(&self, old: &OverrideScope) -> Vec<TermsChange> {
        let own = self.turn(old);
        let met = self.met(old).map(|PatternChange { over, turn }| {
            if old.is_for_all_of(over) { *turn } else { TermsChange { was: own.was, is: turn.is } }
        });
        [own].into_iter().chain(met).collect()
    }

    /// Returns the same for another expiry: for the time that the override loses or gains.
    fn turns_in_time(&self, old: &OverrideScope, new: &OverrideScope) -> Vec<TermsChange> {
        let [old_ms, new_ms] = [old, new].map(|over| over.expires_ms.unwrap_or(u64::MAX));
        let sooner = TermsChange { was: old.terms(self.before), is: old.terms_at(self.after, AFTER_ALL_MS) };
        let later = TermsChange { was: new.terms_at(self.before, AFTER_ALL_MS), is: new.terms(self.after) };
        match new_ms.cmp(&old_ms) {
            std::cmp::Ordering::Less => vec![sooner],
            std::cmp::Ordering::Equal => Vec::new(),
            std::cmp::Ordering::Greater => vec![later],
        }
    }

    /// Returns the other patterns of the rule that may match keys of this one. Patterns that match
    /// all of its keys are left out: the terms of the pattern include theirs.
    fn met(&self, over: &OverrideScope) -> impl Iterator<Item = &PatternChange> {
        let patterns = self.patterns.get(&over.rule).filter(|_| over.is_wild()).into_iter().flatten();
        patterns.filter(|known| {
            let is_wider = known.over.is_for_all_of(over) && !over.is_for_all_of(&known.over);
            known.over.may_meet(over) && !is_wider
        })
    }
}

/// Returns the rule of an override from a validated body, without the other fields.
pub(super) fn rule_of(body: &str) -> Option<Cow<'_, str>> {
    #[derive(Deserialize)]
    struct RuleField<'b> {
        #[serde(borrow)]
        rule: Cow<'b, str>,
    }
    serde_json::from_str::<RuleField<'_>>(body).ok().map(|of| of.rule)
}

/// When an override ends by itself, of a body that was checked before.
pub(super) fn end_ms(body: &str) -> Option<u64> {
    serde_json::from_str::<Value>(body).ok()?["expires"].as_u64()
}

/// Whether an override lasts as long as before, with the same terms or a higher limit.
fn lasts(old: &str, new: Option<&str>) -> bool {
    let read = |body: &str| serde_json::from_str::<Map<String, Value>>(body).ok();
    let (Some(mut old), Some(mut new)) = (read(old), new.and_then(read)) else { return false };
    let mut taken = |field: &str| [old.remove(field), new.remove(field)].map(|value| value?.as_u64());
    let [old_ms, new_ms] = taken("expires").map(|end_ms| end_ms.unwrap_or(u64::MAX));
    let [old_limit, new_limit] = taken("limit");
    new_ms >= old_ms && new_limit >= old_limit && old == new
}
