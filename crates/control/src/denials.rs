//! Keys that rules deny before and after a change, to detect a change that was a mistake.
//!
//! A change is judged by the distinct keys that it newly denies, never by the number of requests:
//! a client that sends many requests counts as one key. Keys without an allowed request before the
//! change do not count, so a client cannot invent them afterwards.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tidegate_rules::Mode;
use tidegate_rules::rows::EmergencyRow;

use crate::guardrail::{ApprovedEffect, StricterRules};
use crate::key_baseline::{KeyBaseline, KeyTally, as_float};
use crate::node::NodeRules;
use crate::rule_keys::{EmergencyTag, RuleKeys, SLOTS_MAX, TenantKeys};
use crate::watch::{UnwatchedReason, WatchForecast};

/// Interval between two looks at the denials. Shorter: a mistake is rolled back earlier; all rules
/// are scanned more often.
pub const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How long a change is watched, and about how long before it is compared with.
pub(super) const WATCHED_MS: u64 = 5 * 60 * 1_000;

pub(super) const LOOKS_PER_MINUTE: u32 = 12;
pub(super) const LOOK_MS: u64 = 60_000 / LOOKS_PER_MINUTE as u64;

/// Denied keys a minute that are so many times those before are a jump. The same holds for the
/// looks in which a single key is denied.
pub(super) const JUMP: u32 = 10;

/// Minimum number of newly denied keys of a jump. Lower: detects mistakes on rules with few keys; a
/// client with a few keys undoes a change.
pub(super) const KEYS_MIN: usize = 10;

/// Minimum share of a rule's active keys that are newly denied in a jump, in percent. Below it, the
/// rule does its job.
pub(super) const KEYS_PERCENT_MIN: usize = 5;

/// Multiple of a rule's approved share of denials up to which there is no jump.
const APPROVED_TIMES: f64 = 2.0;

/// Maximum age of the baselines of an earlier change that a later change of the rule is compared
/// with. Longer: a series of mistakes is noticed for longer; new keys of a rule that changes every
/// few minutes do not count for longer.
const BASELINE_MS_MAX: u64 = 3 * WATCHED_MS;

/// Rules of one change that are watched; the first by name.
const RULES_MAX: usize = 10_000;

/// Slots of all baselines, one byte each, with some 20 bytes more for their rules. Beyond, the
/// earliest changes are no longer watched. Higher: more memory, 80 MB for these.
const WATCHED_SLOTS_MAX: usize = 4 * SLOTS_MAX;

/// Maximum number of watched changes. Beyond it, the earliest are dropped. Higher: more at once;
/// every look counts the keys of each.
const CHANGES_MAX: usize = 1_000;

/// The watched changes.
#[derive(Debug, Default)]
pub(super) struct Denials {
    /// Number of looks so far.
    look: u64,
    watched: Vec<WatchedChange>,
    /// In the order in which they came into force.
    emergencies: Vec<WatchedEmergency>,
}

/// An emergency that came into force a short time ago and denies requests.
#[derive(Debug)]
struct WatchedEmergency {
    id: String,
    /// When it was declared, by the clock of the server that declared it.
    created_ms: u64,
    /// When it came into force on this server.
    since_ms: u64,
    since_look: u64,
    is_alarmed: bool,
}

/// An emergency that denies many keys.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct EmergencyJump {
    pub(super) emergency: String,
    /// When it was declared. Servers tell declarations of one id apart by it.
    pub(super) created_ms: u64,
    rule: String,
    tally: KeyTally,
}

impl fmt::Display for EmergencyJump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { emergency, rule, tally: KeyTally { denied, active, .. }, .. } = self;
        write!(
            f,
            "emergency {emergency:?} denies {denied} of {active} keys of rule {rule:?}; it ends by itself"
        )
    }
}

/// The reason why a jump raises an alarm and is not undone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AlarmCause {
    /// The change touches this rule of class `security`: a client may want it undone.
    Security(String),
    /// Another person approved the change.
    Approved,
    /// The change enforces this rule for the first time, with the terms that it had in shadow mode.
    FirstEnforcement(String),
    /// The change is for several tenants, and only keys of this one are newly denied.
    OneTenant(String),
}

impl fmt::Display for AlarmCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Security(rule) => write!(f, "rule {rule:?} has class security"),
            Self::Approved => f.write_str("another person approved it"),
            Self::FirstEnforcement(rule) => {
                write!(f, "rule {rule:?} is enforced with the terms that it had in shadow mode")
            }
            Self::OneTenant(tenant) => {
                write!(f, "it is for several tenants, and only keys of tenant {tenant:?} are newly denied")
            }
        }
    }
}

/// A change to be watched.
#[derive(Debug)]
pub(super) struct ChangeWatch {
    pub(super) change: u64,
    pub(super) applied_ms: u64,
    /// The first look of the change.
    pub(super) since_look: u64,
    /// The rules that it may have made stricter, each with the tenant that it concerns; `None` if
    /// it concerns several.
    pub(super) rules: HashMap<String, Option<Arc<str>>>,
    /// The rules among them that had the same terms in shadow mode. A jump of these undoes nothing.
    pub(super) shadowed: BTreeSet<String>,
    pub(super) approved: Option<ApprovedEffect>,
    /// The reason why it is never undone.
    pub(super) alarm: Option<AlarmCause>,
}

#[derive(Debug)]
struct WatchedChange {
    change: u64,
    applied_ms: u64,
    alarm: Option<AlarmCause>,
    is_alarmed: bool,
    /// The revision at which the rules do not compile without the change.
    refused_at: Option<u64>,
    /// Whether the failed rollback is logged already.
    is_logged: bool,
    rules: HashMap<Box<str>, WatchedRule>,
}

/// A rule that a change touched.
#[derive(Debug)]
struct WatchedRule {
    /// The tenant that the change of the rule concerns; `None` for several.
    tenant: Option<Arc<str>>,
    /// Whether the rule had the same terms in shadow mode.
    is_shadowed: bool,
    /// Approved share of newly denied requests.
    approved: f64,
    /// The look from which on denials count.
    since_look: u64,
    /// By tenant.
    baselines: Arc<[KeyBaseline]>,
    /// When the change was applied that the baselines precede.
    baselines_ms: u64,
}

/// A change after which a rule denies far more keys than before.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DenialJump {
    pub(super) change: u64,
    pub(super) rule: String,
    /// The tenant that the change of the rule concerns; `None` for several.
    pub(super) tenant: Option<Arc<str>>,
    /// Keys that the rule newly denies.
    pub(super) denied: usize,
    /// Keys with requests in the same minute, of those that it let pass before.
    pub(super) active: usize,
    /// The reason why the change is not undone.
    pub(super) alarm: Option<AlarmCause>,
}

impl fmt::Display for DenialJump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { change, rule, denied, active, .. } = self;
        write!(
            f,
            "rule {rule:?} newly denies {denied} of {active} keys within five minutes of change {change}"
        )
    }
}

impl WatchedEmergency {
    fn jump(&self, rule: &str, tally: KeyTally) -> EmergencyJump {
        let (emergency, created_ms) = (self.id.clone(), self.created_ms);
        EmergencyJump { emergency, created_ms, rule: rule.to_owned(), tally }
    }
}

impl Denials {
    /// Ends a look and returns its jumps, the latest change first, because it may depend on an
    /// earlier one. Changes are watched for `WATCHED_MS`.
    pub(super) fn look(&mut self, rules: &impl NodeRules, now_ms: u64) -> Vec<DenialJump> {
        let jumps = self.jumps();
        self.watched.retain(|watched| now_ms < watched.applied_ms.saturating_add(WATCHED_MS));
        self.emergencies.retain(|watched| now_ms < watched.since_ms.saturating_add(WATCHED_MS));
        rules.counted().for_each(|(_, keys)| keys.end_look());
        self.look += 1;
        jumps
    }

    /// Separates the marks of replaced rules from later ones. Returns the first look of the new
    /// rules.
    pub(super) fn note_replaced(&self, rules: &impl NodeRules) -> u64 {
        rules.counted().for_each(|(_, keys)| keys.fold_look());
        self.look
    }

    /// Watches the emergencies that came into force, except those that only allow requests, and
    /// those that were declared long ago. A renewed emergency is not watched again. The store
    /// bounds the number of emergencies.
    pub(super) fn watch_emergencies(&mut self, before: &[EmergencyRow], now: &[EmergencyRow], now_ms: u64) {
        self.emergencies.retain(|watched| now.iter().any(|row| row.id == watched.id));
        let is_known =
            |row: &EmergencyRow| before.iter().any(|known| (&known.id, &known.body) == (&row.id, &row.body));
        for row in now.iter().filter(|row| !is_known(row)) {
            let Some(EmergencyFields { action, created_ms }) = EmergencyFields::read(row) else { continue };
            let is_watched =
                |watched: &WatchedEmergency| (&watched.id, watched.created_ms) == (&row.id, created_ms);
            let is_old = created_ms > 0 && created_ms.saturating_add(WATCHED_MS) <= now_ms;
            if action == "allow" || is_old || self.emergencies.iter().any(is_watched) {
                continue;
            }
            self.emergencies.retain(|watched| watched.id != row.id);
            self.emergencies.push(WatchedEmergency {
                id: row.id.clone(),
                created_ms,
                since_ms: now_ms,
                since_look: self.look,
                is_alarmed: false,
            });
        }
    }

    /// When the first of the watched emergencies was declared; `None` without any.
    pub(super) fn first_emergency_ms(&self) -> Option<u64> {
        self.emergencies.iter().map(|watched| watched.created_ms).filter(|created_ms| *created_ms > 0).min()
    }

    /// Returns the emergencies that deny many keys of a rule and raised no alarm, each with the
    /// rule of the most denied keys.
    pub(super) fn emergency_jumps(&self, rules: &impl NodeRules) -> Vec<EmergencyJump> {
        let watched = || self.emergencies.iter().filter(|watched| !watched.is_alarmed);
        let mut jumps: Vec<EmergencyJump> = Vec::new();
        if watched().next().is_none() {
            return jumps;
        }
        for (rule, keys) in rules.counted().filter(|(_, keys)| !keys.is_empty()) {
            let (tenants, mut counts) = (keys.tenants(), HashMap::new());
            for keys in &tenants {
                keys.sample.count_blocked(&mut counts);
            }
            let has_many = |tag: &EmergencyTag| counts.get(tag).is_some_and(|count| *count >= KEYS_MIN);
            for watched in watched().filter(|watched| has_many(&EmergencyTag::of(&watched.id))) {
                let tally = self.tally_blocked(watched, &tenants);
                if tally.denied < KEYS_MIN || !is_large_share(&tally) {
                    continue;
                }
                let jump = watched.jump(&rule.name, tally);
                match jumps.iter_mut().find(|known| known.emergency == watched.id) {
                    Some(known) if known.tally.denied < tally.denied => *known = jump,
                    Some(_) => {}
                    None => jumps.push(jump),
                }
            }
        }
        jumps
    }

    fn tally_blocked(&self, watched: &WatchedEmergency, tenants: &[TenantKeys]) -> KeyTally {
        let (tag, looks) = (EmergencyTag::of(&watched.id), self.looks_since(watched.since_look));
        let mut all = KeyTally::default();
        for tally in tenants.iter().map(|keys| keys.sample.blocked(tag, looks)) {
            all.active += tally.active;
            all.denied += tally.denied;
        }
        all
    }

    /// Notes that an emergency raised an alarm. It raises no other one.
    pub(super) fn note_emergency_alarm(&mut self, id: &str) {
        for watched in self.emergencies.iter_mut().filter(|watched| watched.id == id) {
            watched.is_alarmed = true;
        }
    }

    /// Number of looks since `since`, the present one included.
    fn looks_since(&self, since: u64) -> u32 {
        u32::try_from(self.look.saturating_sub(since) + 1).unwrap_or(u32::MAX)
    }

    /// The age of a mark before the first look, in looks from the present one.
    pub(super) fn looks_ago(&self, before_first: u64) -> u32 {
        self.looks_since(0).saturating_add(u32::try_from(before_first).unwrap_or(u32::MAX))
    }

    /// Attributes the denials of a rule to its latest change, and to the one before if that is
    /// rolled back.
    fn jumps(&self) -> Vec<DenialJump> {
        let mut later: HashSet<&str> = HashSet::new();
        let mut jumps = Vec::new();
        for watched in self.watched.iter().rev() {
            jumps.extend(watched.jump(self, &later));
            later.extend(watched.rules.keys().map(|rule| &**rule));
        }
        jumps
    }

    /// Watches a change. Returns the changes that are dropped to make room.
    pub(super) fn watch(&mut self, new: ChangeWatch, in_force: &impl NodeRules) -> Vec<u64> {
        let ChangeWatch { change, applied_ms, since_look, rules, shadowed, approved, alarm } = new;
        if self.is_watched(change) {
            return Vec::new();
        }
        let looks = self.looks_since(since_look);
        let touched = in_force.counted().filter(|(rule, _)| rules.contains_key(&*rule.name));
        // A rule in shadow mode denies nothing. Its shadow traffic judges its next enforcement.
        let (enforced, idle): (Vec<_>, Vec<_>) = touched.partition(|(rule, _)| rule.mode == Mode::Enforce);
        self.acquit(idle.into_iter().map(|(rule, _)| &*rule.name));
        let mut found: Vec<_> = enforced.into_iter().map(|(rule, keys)| (rule.name.clone(), keys)).collect();
        found.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let touched = |(name, keys): (Box<str>, &RuleKeys)| {
            let tenant = rules.get(&*name).cloned().flatten();
            let (baselines, baselines_ms) =
                self.baselines(&name, keys, tenant.as_deref(), (looks, applied_ms))?;
            let approved = approved.as_ref().map_or(0.0, |approved| approved.share_of(&name));
            let is_shadowed = shadowed.contains(&*name) && !self.is_in_question(&name);
            let rule = WatchedRule { tenant, is_shadowed, approved, since_look, baselines, baselines_ms };
            Some((name, rule))
        };
        let rules: HashMap<_, _> = found.into_iter().take(RULES_MAX).filter_map(touched).collect();
        // A change that makes nothing stricter cannot be a mistake, and must not displace one that
        // may be.
        if rules.is_empty() {
            return Vec::new();
        }
        let (refused_at, is_logged, is_alarmed) = (None, false, false);
        self.watched.push(WatchedChange {
            change,
            applied_ms,
            alarm,
            is_alarmed,
            refused_at,
            is_logged,
            rules,
        });
        self.make_room()
    }

    /// Returns the baselines of a rule, of one tenant or all, and when they end; `None` if there is
    /// none. If another unapproved change of the rule is watched, they are those before it, or a
    /// first mistake would justify a second. A series of changes begins anew after a while.
    fn baselines(
        &self,
        rule: &str,
        keys: &RuleKeys,
        tenant: Option<&str>,
        (looks, applied_ms): (u32, u64),
    ) -> Option<(Arc<[KeyBaseline]>, u64)> {
        let is_recent =
            |earlier: &WatchedRule| applied_ms < earlier.baselines_ms.saturating_add(BASELINE_MS_MAX);
        let mut earlier = self.in_question(rule).filter(|earlier| earlier.tenant.as_deref() == tenant);
        if let Some(earlier) = earlier.find(|earlier| is_recent(earlier)) {
            return Some((Arc::clone(&earlier.baselines), earlier.baselines_ms));
        }
        let all = keys.tenants().into_iter();
        let of_change = all.filter(|keys| tenant.is_none_or(|tenant| *keys.tenant == *tenant));
        let baselines: Arc<[_]> = of_change.filter_map(|keys| KeyBaseline::take(&keys, looks)).collect();
        (!baselines.is_empty()).then_some((baselines, applied_ms))
    }

    /// Stops watching rules for all changes.
    fn acquit<'r>(&mut self, rules: impl Iterator<Item = &'r str>) {
        for rule in rules {
            self.watched.iter_mut().for_each(|watched| drop(watched.rules.remove(rule)));
        }
        self.watched.retain(|watched| !watched.rules.is_empty());
    }

    fn make_room(&mut self) -> Vec<u64> {
        let mut slots: usize = self.watched.iter().map(WatchedChange::slots).sum();
        let mut changes = self.watched.len();
        let is_too_many = |watched: &&WatchedChange| {
            let is_too_many = slots > WATCHED_SLOTS_MAX || changes > CHANGES_MAX;
            slots -= watched.slots();
            changes -= 1;
            is_too_many
        };
        let gone = self.watched.iter().take_while(is_too_many).count();
        self.watched.drain(..gone).map(|watched| watched.change).collect()
    }

    /// Stops watching a change, or its rules that concern a tenant. The denials that it caused do
    /// not count against other changes.
    pub(super) fn forget(&mut self, change: u64, tenant: Option<&str>) {
        let Some(watched) = self.watched.iter_mut().find(|watched| watched.change == change) else { return };
        let is_gone = |rule: &WatchedRule| tenant.is_none() || rule.tenant.as_deref() == tenant;
        let gone: HashSet<Box<str>> =
            watched.rules.extract_if(|_, rule| is_gone(rule)).map(|(name, _)| name).collect();
        self.watched.retain(|watched| !watched.rules.is_empty());
        for watched in &mut self.watched {
            for (_, rule) in watched.rules.iter_mut().filter(|(name, _)| gone.contains(*name)) {
                rule.since_look = self.look;
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
            !std::mem::replace(&mut watched.is_logged, true)
        })
    }

    /// Notes that a change raised an alarm. It raises no other one.
    pub(super) fn note_alarm(&mut self, change: u64) {
        for watched in self.watched.iter_mut().filter(|watched| watched.change == change) {
            watched.is_alarmed = true;
        }
    }

    /// Returns the rules of a change that would be watched, and the reason for those that would
    /// not. `rekeyed` are the rules that get another key, `idle` those
    /// that deny nothing after the change.
    pub(super) fn forecast(
        &self,
        touched: &[String],
        stricter: &StricterRules,
        rekeyed: &HashSet<String>,
        idle: &HashSet<String>,
        in_force: &impl NodeRules,
    ) -> WatchForecast {
        let (mut forecast, mut revertible, mut first_shadowed) = (WatchForecast::default(), false, None);
        let keys: HashMap<&str, &RuleKeys> = in_force
            .counted()
            .filter(|(rule, _)| touched.binary_search_by(|name| name.as_str().cmp(&rule.name)).is_ok())
            .map(|(rule, keys)| (&*rule.name, keys))
            .collect();
        for rule in touched {
            if idle.contains(rule) {
                // There is nothing to undo.
            } else if stricter.new.contains(rule) {
                forecast.leave_out(rule, UnwatchedReason::New);
            } else if !stricter.has_precedent(rule) && !self.is_in_question(rule) {
                // The change only relaxes the rule.
            } else if rekeyed.contains(rule) {
                forecast.leave_out(rule, UnwatchedReason::OtherKey);
            } else if let Some(reason) = self.unwatched(rule, keys.get(rule.as_str()).copied()) {
                forecast.leave_out(rule, reason);
            } else if forecast.rule_count < RULES_MAX {
                forecast.add(rule);
                revertible |= !stricter.shadowed.contains(rule) || self.is_in_question(rule);
                first_shadowed = first_shadowed.or_else(|| stricter.shadowed.get(rule));
            }
        }
        match first_shadowed.filter(|_| !revertible) {
            Some(rule) => forecast.alarm_only(AlarmCause::FirstEnforcement(rule.clone())),
            None => forecast,
        }
    }

    /// Returns the reason why a rule cannot be judged now.
    fn unwatched(&self, rule: &str, keys: Option<&RuleKeys>) -> Option<UnwatchedReason> {
        let is_without_memory = keys.is_some_and(RuleKeys::is_without_memory);
        let known: Vec<usize> = if let Some(earlier) = self.in_question(rule).next() {
            earlier.baselines.iter().map(KeyBaseline::known).collect()
        } else {
            let keys = keys.into_iter().flat_map(RuleKeys::tenants);
            let priors = keys.map(|keys| keys.sample.prior_marks(1));
            let priors = priors.filter(|prior| prior.looks >= LOOKS_PER_MINUTE);
            priors.map(|prior| prior.known()).collect()
        };
        match known.iter().sum() {
            _ if known.is_empty() && is_without_memory => Some(UnwatchedReason::NoMemory),
            _ if known.is_empty() => Some(UnwatchedReason::NoBaseline),
            keys if keys < KEYS_MIN => Some(UnwatchedReason::FewKeys(keys)),
            _ => None,
        }
    }

    /// Whether an unapproved change of the rule is watched.
    pub(super) fn is_in_question(&self, rule: &str) -> bool {
        self.in_question(rule).next().is_some()
    }

    fn in_question(&self, rule: &str) -> impl Iterator<Item = &WatchedRule> {
        let touched = self.watched.iter().filter(|watched| watched.alarm != Some(AlarmCause::Approved));
        touched.filter_map(move |watched| watched.rules.get(rule))
    }
}

impl WatchedChange {
    /// Number of slots that the baselines of the change refer to.
    fn slots(&self) -> usize {
        self.rules.values().flat_map(|rule| rule.baselines.iter()).map(KeyBaseline::len).sum()
    }

    /// Returns the rule with the most newly denied keys among the rules that jump, without rules of
    /// a later change. A change that raised an alarm may still jump to be undone.
    fn jump(&self, denials: &Denials, later: &HashSet<&str>) -> Option<DenialJump> {
        let tallies = self.rules.iter().map(|(name, rule)| (name, rule, rule.tallies(denials)));
        let tallies: Vec<_> = tallies.collect();
        let several = tallies.iter().filter(|(_, rule, _)| rule.tenant.is_none());
        let only = only_tenant(several.flat_map(|(.., tallies)| tallies));
        let own = tallies.iter().filter(|(name, ..)| !later.contains(&***name));
        let jumps = own.filter_map(|(name, rule, tallies)| {
            let all = rule.jump(tallies)?;
            let one = only.filter(|_| rule.tenant.is_none());
            let one = one.map(|tenant| AlarmCause::OneTenant(tenant.to_owned()));
            let first = rule.is_shadowed.then(|| AlarmCause::FirstEnforcement(name.to_string()));
            Some(DenialJump {
                change: self.change,
                rule: name.to_string(),
                tenant: rule.tenant.clone(),
                denied: all.denied,
                active: all.active,
                alarm: self.alarm.clone().or(first).or(one),
            })
        });
        let jumps = jumps.filter(|jump| jump.alarm.is_none() || !self.is_alarmed);
        jumps.max_by_key(|jump| (jump.alarm.is_none(), jump.denied))
    }
}

impl WatchedRule {
    /// Counts the keys of each tenant in the last minute.
    fn tallies(&self, denials: &Denials) -> Vec<(&str, KeyTally)> {
        let looks = denials.looks_since(self.since_look);
        self.baselines.iter().map(|one| (&*one.tenant, one.tally(looks))).collect()
    }

    /// Returns the keys of all tenants together if they jump.
    fn jump(&self, tallies: &[(&str, KeyTally)]) -> Option<KeyTally> {
        let mut all = KeyTally::default();
        for (_, tally) in tallies {
            all.active += tally.active;
            all.denied += tally.denied;
            all.denied_before += tally.denied_before;
        }
        let (active, denied) = (as_float(all.active), as_float(all.denied));
        let is_jump = all.denied >= KEYS_MIN
            && is_large_share(&all)
            // Ten times as many may be more than there are: then half of all keys suffice.
            && denied > (f64::from(JUMP) * all.denied_before).min(active / 2.0)
            && denied > APPROVED_TIMES * self.approved * active;
        is_jump.then_some(all)
    }
}

/// Returns the tenant with newly denied keys if it is the only one of several with traffic.
fn only_tenant<'t>(tallies: impl Iterator<Item = &'t (&'t str, KeyTally)>) -> Option<&'t str> {
    let (mut active, mut affected) = (HashSet::new(), HashSet::new());
    for (tenant, tally) in tallies.filter(|(_, tally)| tally.active > 0) {
        active.insert(*tenant);
        if tally.denied > 0 && is_large_share(tally) {
            affected.insert(*tenant);
        }
    }
    let only = affected.iter().next().copied();
    only.filter(|_| active.len() > 1 && affected.len() == 1)
}

/// The fields of an emergency that select whether it is watched.
#[derive(Deserialize)]
struct EmergencyFields {
    action: String,
    #[serde(default)]
    created_ms: u64,
}

impl EmergencyFields {
    /// Reads a body that was checked before.
    fn read(row: &EmergencyRow) -> Option<Self> {
        serde_json::from_str(&row.body).ok()
    }
}

fn is_large_share(tally: &KeyTally) -> bool {
    tally.denied * 100 >= tally.active * KEYS_PERCENT_MIN
}

#[cfg(test)]
pub(crate) mod tests;
