//! Finds the rules that apply to a request, and decides under all of them.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use arc_swap::ArcSwap;
use arrayvec::ArrayVec;
use futures_util::future::join_all;
use tidegate::region::{MissingReply, RegionCheck, RegionPolicy};
use tidegate::{
    Algorithm, Decision, Gate, LIMITS_PER_CHECK_MAX, Limit, Outcome as LimitOutcome, UnknownName,
};
use tidegate_core::bound::{Faults, Fleet, Promise, bound};
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::{
    Class, Dimensions, EffectiveTerms, EmergencyTerms, FILE_BYTES_MAX, KEY_PARTS_MAX, Key, Mode, Rule,
    RuleMatch, RuleSet, TomlLines,
};

use crate::auth::TenantIndex;
use crate::decider::{Decider, SourcedDecision, question};
use crate::decision_log::{RecordDraft, decisive};
use crate::load;
use crate::metrics::{DecisionSource, Outcome, Surface};
use crate::reason::DecisionReason;
use crate::shared::{Shared, Tenant};

/// The most gates of a set, one for each rule and tenant it is for: a bound on their memory, some 200 bytes each.
const GATES_MAX: usize = 1_000_000;

/// A rule set with the gates of every tenant.
#[derive(Debug, Default)]
pub(crate) struct ActiveRules {
    set: RuleSet,
    gates: Arc<RuleGates>,
    /// By tenant: the dimensions that its rules look at.
    used: Vec<Vec<String>>,
}

/// The state of rules that does not depend on emergencies.
#[derive(Debug, Default)]
struct RuleGates {
    /// By tenant: the gates of the rules that are for it, by the rule's position, in order.
    of_tenants: Vec<Box<[(usize, Gate)]>>,
    /// By tenant: the dimensions that its rules look at, but for those that only emergencies do.
    used: Vec<Vec<String>>,
    /// By position of the rule: its counts of requests and denials.
    counts: Box<[RuleCount]>,
    bounds: ArcSwap<RuleBounds>,
}

/// How far rules may be passed, by their positions.
#[derive(Debug, Default)]
struct RuleBounds {
    units: Box<[u64]>,
    /// The fleet that the bounds are for.
    fleet: Option<Arc<Fleet>>,
}

impl RuleBounds {
    fn new(set: &RuleSet, fleet: Arc<Fleet>) -> Self {
        let units = set.rules().iter().map(|rule| most_above(rule, &rule.limit, &fleet)).collect();
        Self { units, fleet: Some(fleet) }
    }

    fn most_above(&self, position: usize, rule: &Rule, limit: &Limit) -> Option<u64> {
        if *limit == rule.limit {
            return self.units.get(position).copied();
        }
        self.fleet.as_ref().map(|fleet| most_above(rule, limit, fleet))
    }
}

/// The counts of a rule, for all workers. A read resets them. Denials are the rarer outcome, and
/// requests are counted only while the rule is watched. So an allowed request usually writes
/// nothing.
#[derive(Debug, Default)]
pub(crate) struct RuleCount {
    denied: AtomicU32,
    /// Requests that it would have denied in shadow mode.
    shadow_denied: AtomicU32,
    asked: AtomicU32,
    is_watched: AtomicBool,
    /// Whether there was a request, in either mode. Written once for each look.
    is_used: AtomicBool,
}

/// The counts of a rule over a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleTally {
    pub(crate) denied: u64,
    /// Denials in shadow mode, where the requests passed.
    pub(crate) shadow_denied: u64,
    /// Requests that it was enforced for, if they were counted.
    pub(crate) asked: u64,
    /// Whether there was a request, in either mode.
    pub(crate) is_used: bool,
}

impl RuleCount {
    #[inline]
    fn count(&self, is_allowed: bool) {
        self.note_use();
        if !is_allowed {
            self.denied.fetch_add(1, Ordering::Relaxed);
        }
        if self.is_watched.load(Ordering::Relaxed) {
            self.asked.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn count_in_shadow(&self, is_allowed: bool) {
        self.note_use();
        if !is_allowed {
            self.shadow_denied.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn note_use(&self) {
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether its requests are counted from now on.
    pub(crate) fn watch(&self, is_watched: bool) {
        // Most stay as they are: their cache lines are left alone.
        if self.is_watched.load(Ordering::Relaxed) != is_watched {
            self.is_watched.store(is_watched, Ordering::Relaxed);
        }
    }

    /// Returns the counts since the last call, and resets them.
    pub(crate) fn take(&self) -> RuleTally {
        // Most counts are 0: their cache lines are not written.
        let take = |count: &AtomicU32| match count.load(Ordering::Relaxed) {
            0 => 0,
            _ => u64::from(count.swap(0, Ordering::Relaxed)),
        };
        let (denied, shadow_denied) = (take(&self.denied), take(&self.shadow_denied));
        let is_used = self.is_used.load(Ordering::Relaxed) && self.is_used.swap(false, Ordering::Relaxed);
        RuleTally { denied, shadow_denied, asked: take(&self.asked), is_used }
    }
}

/// A request, with the rules that apply to it.
#[derive(Debug)]
pub(crate) struct MatchedRequest<'r, 'd> {
    rules: &'r ActiveRules,
    tenant: TenantIndex,
    request: &'d Dimensions<'d>,
    applying: Vec<ApplicableRule<'r, 'd>>,
    /// The placement of the request's meters.
    together: Vec<u8>,
}

#[derive(Debug)]
struct ApplicableRule<'r, 'd> {
    applied: AppliedRule<'r>,
    key: Key<'d>,
    gate: Cow<'r, Gate>,
}

/// A rule with its effective terms for a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AppliedRule<'r> {
    pub(crate) rule: &'r Rule,
    pub(crate) terms: EffectiveTerms<'r>,
    /// How many units above its limit may pass at most.
    pub(crate) bound: u64,
    count: &'r RuleCount,
}

/// One rule's word on a request.
#[derive(Debug)]
pub(crate) struct RuleOutcome<'r> {
    /// The rule.
    pub(crate) applied: AppliedRule<'r>,
    /// The outcome of its limit.
    pub(crate) outcome: LimitOutcome<'r>,
}

/// The decision of all rules on a request.
#[derive(Debug)]
pub(crate) struct RulesDecision<'r> {
    /// The decision under the enforced rules: all are charged, or none.
    pub(crate) decision: Decision<'r>,
    /// Those rules, in the order of the decision's outcomes.
    pub(crate) enforced: Vec<AppliedRule<'r>>,
    /// Rules in shadow mode.
    pub(crate) shadows: Vec<RuleOutcome<'r>>,
    /// The set's version.
    pub(crate) version: &'r str,
    /// The weakest source among the limits.
    pub(crate) source: DecisionSource,
    /// The reply that the decision had to do without.
    missing_reply: Option<MissingReply>,
}

/// Why rules did not decide.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RulesError {
    /// More rules apply than one request may be under.
    TooManyRules {
        /// How many apply.
        rules: usize,
    },
    /// The server has more to do than it can; the request was not looked at.
    Shed {
        /// The strictest class among the rules. Comfort passes, the others do not.
        class: Class,
    },
}

impl ActiveRules {
    /// Makes the gates of a set.
    pub(crate) fn new(set: RuleSet, shared: &Shared) -> Result<Self, String> {
        check_tenants(&set, &shared.tenants)?;
        let of_tenant = |tenant: &Tenant| {
            // There may be a million: they are not moved as more of them come.
            let mut gates = Vec::with_capacity(set.rules_for(&tenant.name).count());
            for (position, rule) in set.rules_for(&tenant.name) {
                gates.push((position, gate(&shared.decider, tenant, rule, rule.limit)?));
            }
            gates.sort_unstable_by_key(|(position, _)| *position);
            Ok(gates.into())
        };
        let of_tenants: Result<_, UnknownName> = shared.tenants.iter().map(of_tenant).collect();
        let of_tenants = of_tenants.map_err(|error| error.to_string())?;
        let counts = set.rules().iter().map(|_| RuleCount::default()).collect();
        let bounds = ArcSwap::from_pointee(RuleBounds::new(&set, shared.fleet_now()));
        let used =
            |tenant: &Tenant| set.rule_dimensions(&tenant.name).into_iter().map(str::to_owned).collect();
        let used = shared.tenants.iter().map(used).collect();
        Ok(Self::of_gates(Arc::new(RuleGates { of_tenants, used, counts, bounds }), set, shared))
    }

    /// The same rules, with the same gates, under other emergencies.
    pub(crate) fn with_emergencies(
        &self,
        (revision, rows): (u64, &[EmergencyRow]),
        shared: &Shared,
    ) -> Result<Self, String> {
        let set = self.set.with_emergencies(revision, rows, shared.now_ms());
        let set = set.map_err(|problems| problems.to_string())?;
        Ok(Self::of_gates(Arc::clone(&self.gates), set, shared))
    }

    fn of_gates(gates: Arc<RuleGates>, set: RuleSet, shared: &Shared) -> Self {
        let used = gates.used.iter().zip(&shared.tenants).map(|(used, tenant)| {
            let mut used = used.clone();
            // Emergencies change rules: a tenant without rules needs no dimension of theirs.
            if set.has_rules_for(&tenant.name) {
                used.extend(set.emergency_dimensions(&tenant.name).map(str::to_owned));
                used.sort_unstable();
                used.dedup();
            }
            used
        });
        Self { used: used.collect(), gates, set }
    }

    /// Computes the bounds in responses for this fleet.
    pub(crate) fn note_fleet(&self, fleet: Arc<Fleet>) {
        let known = self.gates.bounds.load();
        if !known.fleet.as_ref().is_some_and(|known| Arc::ptr_eq(known, &fleet)) {
            self.gates.bounds.store(Arc::new(RuleBounds::new(&self.set, fleet)));
        }
    }

    /// Returns all rules with their counts.
    pub(crate) fn counts(&self) -> impl Iterator<Item = (&Rule, &RuleCount)> {
        self.set.rules().iter().zip(&self.gates.counts)
    }

    /// Reads a rules file.
    pub(crate) fn load(path: &Path, shared: &Shared) -> Result<Self, String> {
        let text = read_text(path, FILE_BYTES_MAX)?;
        let located = |problem: String| {
            problem.lines().map(|line| format!("{}: {line}", path.display())).collect::<Vec<_>>().join("\n")
        };
        let set = RuleSet::parse(&text).map_err(|problems| located(problems.to_string()))?;
        let with_line = |problem| TomlLines::read(&text).locate(vec![problem]).join("\n");
        Self::new(set, shared).map_err(|problem| located(with_line(problem)))
    }

    /// The dimensions that the rules for a tenant look at.
    pub(crate) fn dimensions_used(&self, tenant: TenantIndex) -> &[String] {
        self.used.get(tenant).map(Vec::as_slice).unwrap_or_default()
    }

    /// The rules themselves.
    pub(crate) fn set(&self) -> &RuleSet {
        &self.set
    }

    /// Finds the rules that apply to a request.
    pub(crate) fn match_request<'r, 'd>(
        &'r self,
        shared: &Shared,
        tenant: TenantIndex,
        request: &'d Dimensions<'d>,
    ) -> MatchedRequest<'r, 'd> {
        let name = &shared.tenant(tenant).name;
        let now_ms = shared.decider.limiter.wall_us() / 1_000;
        let bounds = self.gates.bounds.load();
        let applying = self.set.matching(name, request, now_ms).filter_map(|found| {
            let gate = self.gate(shared, tenant, &found)?;
            let RuleMatch { rule, key, terms, position } = found;
            let count = self.gates.counts.get(position)?;
            let bound = bounds.most_above(position, rule, &terms.limit)?;
            Some(ApplicableRule { applied: AppliedRule { rule, terms, bound, count }, key, gate })
        });
        let together = self.together(&shared.decider, name, request);
        MatchedRequest { rules: self, tenant, request, applying: applying.collect(), together }
    }

    /// Returns the gate for the effective limit: the rule's own, or one of the same meters under
    /// another limit.
    fn gate<'r>(
        &'r self,
        shared: &Shared,
        tenant: TenantIndex,
        found: &RuleMatch<'r, '_>,
    ) -> Option<Cow<'r, Gate>> {
        let gates = self.gates.of_tenants.get(tenant)?;
        let at = gates.binary_search_by_key(&found.position, |(position, _)| *position).ok()?;
        let own = &gates[at].1;
        let (limit, usual) = (found.terms.limit, &found.rule.limit);
        if limit == *usual {
            return Some(Cow::Borrowed(own));
        }
        if limit.algorithm() == Algorithm::Gcra || limit.period_us() == usual.period_us() {
            return Some(Cow::Owned(own.with_limit(limit)));
        }
        // Windows of another period have meters of their own. The tenant is there: it has a gate.
        let other = gate(&shared.decider, shared.tenant(tenant), found.rule, limit);
        Some(other.map_or(Cow::Borrowed(own), Cow::Owned))
    }

    /// Returns the placement of a request's meters: by the dimension that places rules, or one for
    /// all of a tenant.
    fn together(&self, decider: &Decider, tenant: &str, request: &Dimensions<'_>) -> Vec<u8> {
        let placed_by = self.set.placement().and_then(|dimension| request.get(dimension));
        decider.placement(&[tenant.as_bytes(), placed_by.unwrap_or_default().as_bytes()])
    }
}

/// Whether a server with these tenants can take a set.
pub(crate) fn check_tenants(set: &RuleSet, tenants: &[Tenant]) -> Result<(), String> {
    let gates: usize = tenants.iter().map(|tenant| set.rules_for(&tenant.name).count()).sum();
    if gates > GATES_MAX {
        return Err(format!(
            "rules: {gates}, counted once for each tenant they are for, is outside 0 to {GATES_MAX}"
        ));
    }
    let known: HashSet<&str> = tenants.iter().map(|tenant| tenant.name.as_str()).collect();
    let mut named = set.rules().iter().filter_map(|rule| Some((rule, rule.tenant.as_deref()?)));
    match named.find(|(_, tenant)| !known.contains(tenant)) {
        None => Ok(()),
        Some((rule, tenant)) => {
            Err(format!("rules[{:?}].tenant: there is no [[tenants]] entry named {tenant:?}", rule.name))
        }
    }
}

/// Returns the gate of a rule, or of another limit for some of its keys. The meters belong to the
/// rule's name, not to the limit.
fn gate(decider: &Decider, tenant: &Tenant, rule: &Rule, limit: Limit) -> Result<Gate, UnknownName> {
    let gate = decider.gate(&tenant.name, &format!("rule:{}", rule.name), limit, policy(rule))?;
    Ok(gate.with_name(&*rule.name))
}

/// Returns the bound of a limit of a rule, in units, if every fault occurs once.
fn most_above(rule: &Rule, limit: &Limit, fleet: &Fleet) -> u64 {
    bound(&rule.promise(limit), fleet, &Faults::ONE_OF_EACH).total()
}

/// Logs warnings about rules that their authors may not have intended.
pub(crate) fn warn_of(set: &RuleSet, fleet: &Fleet) {
    for warning in set.warnings(fleet) {
        tracing::warn!(rules = set.version(), "{warning}");
    }
}

impl MatchedRequest<'_, '_> {
    /// Decides the request under all rules that apply to it.
    pub(crate) async fn decide(
        &self,
        shared: &Shared,
        surface: Surface,
        cost: u64,
    ) -> Result<RulesDecision<'_>, RulesError> {
        let decider = &shared.decider;
        let (enforced, shadows) = self.questions();
        let class = enforced.iter().map(|(applied, _)| applied.rule.class).max().unwrap_or_default();
        if load::sheds(class) {
            shared.metrics.decided(surface, class, shed_outcome(class), DecisionSource::Shed, 1);
            self.record_decision(
                shared,
                (surface, cost),
                shed_outcome(class),
                (DecisionSource::Shed, DecisionReason::Shed),
                (None, None),
            );
            return Err(RulesError::Shed { class });
        }
        if enforced.len() > LIMITS_PER_CHECK_MAX {
            return Err(self.refuse(shared, (surface, cost), class, &enforced));
        }
        let (enforced, questions): (Vec<AppliedRule<'_>>, Vec<RegionCheck<'_, '_>>) =
            enforced.into_iter().map(|(applied, question)| (applied, question.cost(cost))).unzip();
        let too_many = |_| RulesError::TooManyRules { rules: questions.len() };
        let SourcedDecision { decision, source, missing_reply } =
            decider.check_all(&questions).await.map_err(too_many)?;
        // A denied request is not charged, nor in shadow mode.
        let charged = if decision.is_allowed() { cost } else { 0 };
        let shadows = in_shadow(decider, shadows, charged).await;
        let version = self.rules.set.version();
        let rules_decision = RulesDecision { decision, enforced, shadows, version, source, missing_reply };
        for (applied, outcome) in rules_decision.enforced.iter().zip(rules_decision.decision.outcomes()) {
            // A denial by an emergency is not a denial of the rule.
            if applied.terms.emergency.is_none() {
                applied.count.count(outcome.is_allowed());
            }
        }
        for RuleOutcome { applied, outcome } in &rules_decision.shadows {
            if applied.terms.emergency.is_none() {
                applied.count.count_in_shadow(outcome.is_allowed());
            }
        }
        shared.metrics.decided(surface, class, rules_decision.outcome(), source, 1);
        self.record_decision(
            shared,
            (surface, cost),
            rules_decision.outcome(),
            (source, rules_decision.reason()),
            rules_decision.decided_by().unzip(),
        );
        Ok(rules_decision)
    }

    /// Refuses a request to which too many rules apply. Each of the rules counts a denial, and it
    /// is logged as one. Otherwise the change that caused it would not be rolled back.
    fn refuse(
        &self,
        shared: &Shared,
        asked: (Surface, u64),
        class: Class,
        enforced: &RuleChecks<'_, '_>,
    ) -> RulesError {
        for (applied, _) in enforced.iter().filter(|(applied, _)| applied.terms.emergency.is_none()) {
            applied.count.count(false);
        }
        shared.metrics.decided(asked.0, class, Outcome::Denied, DecisionSource::Refused, 1);
        // No rule decided, so the record has the key of the first.
        let first = enforced.first().map(|(applied, _)| *applied);
        let source = (DecisionSource::Refused, DecisionReason::NoRoom);
        self.record_decision(shared, asked, Outcome::Denied, source, (first, None));
        RulesError::TooManyRules { rules: enforced.len() }
    }

    /// Logs a decision if it is due, with the rule that decided, if any, and its outcome.
    fn record_decision(
        &self,
        shared: &Shared,
        (surface, cost): (Surface, u64),
        outcome: Outcome,
        (source, reason): (DecisionSource, DecisionReason),
        (applied, limit_outcome): (Option<AppliedRule<'_>>, Option<LimitOutcome<'_>>),
    ) {
        let Some(recorder) = shared.recorder_for(outcome) else { return };
        let mut key = tidegate_record::RecordKey::default();
        for name in applied.iter().flat_map(|applied| applied.rule.key.iter()) {
            key.add(name, self.request.get(name).unwrap_or_default());
        }
        let emergency = applied.and_then(|applied| applied.terms.emergency);
        let override_name = applied.and_then(|applied| applied.terms.override_name);
        let replaced_by = emergency.map(|emergency| emergency.id).or(override_name);
        let draft = RecordDraft {
            tenant: self.tenant,
            surface,
            key,
            cost,
            outcome,
            limit_outcome,
            source,
            reason,
            until_ms: emergency.map(|emergency| emergency.expires_ms),
            rule_version: applied.map_or(0, |applied| applied.rule.version),
            set_version: self.rules.set.version(),
            replaced_by: replaced_by.unwrap_or_default(),
        };
        let known_by = self.rules.dimensions_used(self.tenant).iter();
        let known_by = known_by.filter_map(|name| Some((name.as_str(), self.request.get(name)?)));
        shared.record_decision(recorder, &draft, known_by);
    }

    /// Returns the checks of the rules that apply: the enforced ones, and those in shadow mode.
    fn questions(&self) -> (RuleChecks<'_, '_>, RuleChecks<'_, '_>) {
        let questions = self.applying.iter().map(|applying| {
            let ApplicableRule { applied, key, gate } = applying;
            let parts: ArrayVec<&[u8], KEY_PARTS_MAX> = key.iter().map(|part| part.as_bytes()).collect();
            // A rule without a key counts all its requests together.
            let parts = if parts.is_empty() { &[&b""[..]][..] } else { &parts };
            // A limit across placements has a placement of its own.
            let question = question(gate, parts);
            let crosses = self.rules.set.crosses(applied.rule);
            (*applied, if crosses { question } else { question.placed_by(&self.together) })
        });
        questions.partition(|(applied, _)| applied.terms.mode == Mode::Enforce)
    }
}

type RuleChecks<'r, 'k> = Vec<(AppliedRule<'r>, RegionCheck<'r, 'k>)>;

/// Decides the rules in shadow mode. It checks at most as many as one request may have enforced, so
/// that no request takes longer than an enforced one. The checks are separate and run concurrently.
async fn in_shadow<'r>(
    decider: &Decider,
    mut shadows: RuleChecks<'r, '_>,
    cost: u64,
) -> Vec<RuleOutcome<'r>> {
    shadows.truncate(LIMITS_PER_CHECK_MAX);
    let asked = shadows.into_iter().map(|(applied, question)| async move {
        let limit_outcome = decider.check_all(&[question.cost(cost)]).await;
        // One limit is never too many.
        let outcome = limit_outcome.ok()?.decision.outcomes().first().copied()?;
        Some(RuleOutcome { applied, outcome })
    });
    join_all(asked).await.into_iter().flatten().collect()
}

/// How a region treats a rule.
fn policy(rule: &Rule) -> RegionPolicy {
    let Promise { class, paid, tolerance_ppm, regime, .. } = rule.promise(&rule.limit);
    // No set has a rule of a higher version.
    let version = u32::try_from(rule.version).unwrap_or(u32::MAX);
    RegionPolicy { class, paid, tolerance_ppm, regime, version }
}

impl<'r> RulesDecision<'r> {
    /// Returns the rule that decided, and its outcome: the one that denied or would have, otherwise
    /// the one with the least remaining.
    fn decided_by(&self) -> Option<(AppliedRule<'r>, LimitOutcome<'r>)> {
        if self.outcome() == Outcome::ShadowDenied {
            let at = decisive(self.shadows.iter().map(|shadow| &shadow.outcome))?;
            return self.shadows.get(at).map(|shadow| (shadow.applied, shadow.outcome));
        }
        let at = decisive(self.decision.outcomes())?;
        self.enforced.get(at).copied().zip(self.decision.outcomes().get(at).copied())
    }

    /// Returns the emergency that blocked the request, if one did.
    pub(crate) fn block(&self) -> Option<EmergencyTerms<'r>> {
        if self.decision.is_allowed() {
            return None;
        }
        let (applied, _) = self.decided_by()?;
        applied.terms.emergency.filter(|emergency| emergency.is_block)
    }

    pub(crate) fn reason(&self) -> DecisionReason {
        match self.block() {
            Some(_) => DecisionReason::Block,
            None => DecisionReason::of(self.source, self.missing_reply),
        }
    }

    /// Returns the outcome for metrics and records.
    pub(crate) fn outcome(&self) -> Outcome {
        let would_deny = self.shadows.iter().any(|shadow| !shadow.outcome.is_allowed());
        match self.decision.is_allowed() {
            false => Outcome::Denied,
            true if would_deny => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        }
    }
}

/// Returns the outcome of a shed check.
pub(crate) fn shed_outcome(class: Class) -> Outcome {
    if class == Class::Comfort { Outcome::Allowed } else { Outcome::Denied }
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> Result<String, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut text = String::new();
    // One byte above the maximum proves that the file is too long. The length of a pipe is unknown.
    let file = std::fs::File::open(path).map_err(problem)?;
    file.take(most as u64 + 1).read_to_string(&mut text).map_err(problem)?;
    if text.len() > most {
        return Err(format!("{}: more than {most} bytes", path.display()));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tidegate::ManualClock;
    use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};

    use super::*;
    use crate::config::Config;

    const STARTED_MS: u64 = 1_800_000_000_000;

    fn server() -> (Arc<ManualClock>, Shared) {
        let given = [("memory", "1MB"), ("data_dir", "none"), ("workers", "1")];
        let given: HashMap<String, String> =
            given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let clock = Arc::new(ManualClock::new());
        clock.set(1, STARTED_MS * 1_000);
        let mut config = Config::read(&given, None).expect("good");
        let shared = Shared::on_clock(&mut config, Arc::clone(&clock)).expect("fits");
        (clock, shared)
    }

    fn gated(shared: &Shared, text: &str) -> ActiveRules {
        ActiveRules::new(RuleSet::parse(text).expect("good rules"), shared).expect("fits")
    }

    /// How many requests of `user` pass, one after the other.
    fn passed(rules: &ActiveRules, shared: &Shared, user: &str) -> usize {
        let request = Dimensions::new([("user", user)]).expect("good dimensions");
        let passes = || {
            let case = rules.match_request(shared, 0, &request);
            let rules_decision = case.decide(shared, Surface::Check, 1).now_or_never().expect("no origin");
            rules_decision.expect("decided").decision.is_allowed()
        };
        // No limit in these tests lets more pass.
        (0..100).take_while(|_| passes()).count()
    }

    fn rule(lines: &str) -> String {
        format!("[[rules]]\nname='a'\nkey=['user']\nlimit=2\nperiod='1m'\n{lines}\n")
    }

    #[test]
    fn an_override_is_another_limit_on_the_same_meters() {
        let (clock, shared) = server();
        let over = "[[overrides]]\nname='o'\nrule='a'\nkey=['al*']\nlimit=6\n";
        for algorithm in ["gcra", "sliding_window"] {
            let plain = rule(&format!("algorithm='{algorithm}'"));
            let (before, after) = (gated(&shared, &plain), gated(&shared, &format!("{plain}{over}")));
            assert_eq!(passed(&before, &shared, "bob"), 2);
            assert_eq!(passed(&after, &shared, "bob"), 0, "what bob spent is still spent");
            assert_eq!(passed(&after, &shared, "alice"), 6, "{algorithm}");
            assert_eq!(passed(&before, &shared, "alice"), 0, "{algorithm}: alice spent more than all of it");
            clock.advance(Duration::from_mins(2));
        }
    }

    #[test]
    fn windows_of_another_period_begin_anew() {
        let (_clock, shared) = server();
        let over = "[[overrides]]\nname='o'\nrule='a'\nkey=['alice']\nlimit=6\nperiod='1h'\n";
        let rules = gated(&shared, &format!("{}{over}", rule("algorithm='sliding_window'")));
        assert_eq!([passed(&rules, &shared, "alice"), passed(&rules, &shared, "bob")], [6, 2]);
    }

    #[test]
    fn under_more_rules_than_can_be_asked_a_request_is_denied_by_each_of_them() {
        let (_clock, shared) = server();
        // Each half of the rules alone is valid.
        let rule = |at: usize| {
            let when = if at.is_multiple_of(2) { "path='/*'" } else { "user='*'" };
            format!("[[rules]]\nname='{at}'\nkey=['user']\nlimit=9\nperiod='1m'\nwhen={{{when}}}\n")
        };
        let rules = gated(&shared, &(0..=LIMITS_PER_CHECK_MAX).map(rule).collect::<String>());
        let request = Dimensions::new([("user", "bob"), ("path", "/")]).expect("good dimensions");
        let case = rules.match_request(&shared, 0, &request);
        let undecided = case.decide(&shared, Surface::Check, 1).now_or_never().expect("no origin");
        assert_eq!(undecided.map(|_| ()), Err(RulesError::TooManyRules { rules: LIMITS_PER_CHECK_MAX + 1 }));
        let denied: Vec<u64> = rules.counts().map(|(_, count)| count.take().denied).collect();
        assert_eq!(denied, [1; LIMITS_PER_CHECK_MAX + 1]);
        assert_eq!(passed(&rules, &shared, "carol"), 9, "without a path it is under half of them");
    }

    #[test]
    fn of_more_rules_in_shadow_mode_than_can_be_asked_the_first_are() {
        let (_clock, shared) = server();
        let rule = |at: usize| {
            let fields = "key=['user']\nlimit=1\nperiod='1m'\nmode='shadow'\nwhen={user='*'}";
            format!("[[rules]]\nname='{at}'\n{fields}\n")
        };
        let rules = gated(&shared, &(0..=LIMITS_PER_CHECK_MAX).map(rule).collect::<String>());
        let request = Dimensions::new([("user", "bob")]).expect("good dimensions");
        let case = rules.match_request(&shared, 0, &request);
        for is_allowed in [true, false] {
            let rules_decision = case.decide(&shared, Surface::Check, 1).now_or_never().expect("no origin");
            let rules_decision = rules_decision.expect("decided");
            assert!(rules_decision.decision.is_allowed() && rules_decision.enforced.is_empty());
            let asked: Vec<&str> =
                rules_decision.shadows.iter().map(|ruled| &*ruled.applied.rule.name).collect();
            assert_eq!(asked, (0..LIMITS_PER_CHECK_MAX).map(|at| at.to_string()).collect::<Vec<_>>());
            assert!(rules_decision.shadows.iter().all(|ruled| ruled.outcome.is_allowed() == is_allowed));
        }
    }

    #[test]
    fn an_override_that_ends_leaves_the_rule() {
        let (clock, shared) = server();
        let over = format!(
            "[[overrides]]\nname='o'\nrule='a'\nkey=['alice']\nlimit=0\nexpires={}\n",
            STARTED_MS + 5
        );
        let rules = gated(&shared, &format!("{}{over}", rule("")));
        assert_eq!(passed(&rules, &shared, "alice"), 0);
        clock.advance(Duration::from_millis(5));
        assert_eq!(passed(&rules, &shared, "alice"), 2);
    }

    #[test]
    fn an_emergency_goes_before_rules_until_it_ends() {
        let (clock, shared) = server();
        let body = r#"{"key":["user"],"limit":2,"period":"1m"}"#.to_owned();
        let rows = vec![RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body, version: 1 }];
        let emergency = |id: &str, body: &str, ms: u64| EmergencyRow {
            id: id.to_owned(),
            body: body.to_owned(),
            expires_ms: STARTED_MS + ms,
        };
        let emergencies = vec![
            emergency("stop", r#"{"action":"block","when":{"user":"mallory"}}"#, 5),
            emergency("free", r#"{"action":"allow","rule":"a","key":["vip-*"]}"#, 5),
        ];
        let rule_rows = RuleRows { revision: 1, emergency_revision: 1, rows: rows.into(), emergencies };
        let set = RuleSet::compile(&rule_rows, None, STARTED_MS).expect("a good book");
        let rules = ActiveRules::new(set, &shared).expect("fits");
        let each = || ["mallory", "vip-1", "bob"].map(|user| passed(&rules, &shared, user));
        let denied = || rules.counts().map(|(_, count)| count.take().denied).sum::<u64>();
        assert_eq!(each(), [0, 100, 2]);
        assert_eq!(denied(), 1, "what an emergency denies is not the rule's");
        clock.advance(Duration::from_millis(5));
        assert_eq!(each(), [2, 0, 0], "what passed meanwhile was counted");
        assert_eq!(denied(), 3);
    }
}
