//! Rules at work: which apply to a request, and what they decide together.

use std::borrow::Cow;
use std::collections::HashSet;
use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use arc_swap::ArcSwap;
use arrayvec::ArrayVec;
use futures_util::future::join_all;
use tidegate::region::{RegionCheck, RegionPolicy};
use tidegate::{
    Algorithm, Decision, Gate, LIMITS_PER_CHECK_MAX, Limit, Outcome as LimitOutcome, UnknownName,
};
use tidegate_core::bound::{Faults, Fleet, Promise, bound};
use tidegate_rules::rows::EmergencyRow;
use tidegate_rules::{
    Class, Dimensions, EffectiveTerms, FILE_BYTES_MAX, KEY_PARTS_MAX, Key, Mode, Rule, RuleMatch, RuleSet,
};

use crate::auth::TenantIndex;
use crate::decider::{Decider, SourcedDecision, question};
use crate::decision_log::{RecordDraft, decisive};
use crate::load;
use crate::metrics::{DecisionSource, Outcome, Surface};
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

/// What rules need to decide, whatever the emergencies.
#[derive(Debug, Default)]
struct RuleGates {
    /// By tenant: the gates of the rules that are for it, by the rule's position, in order.
    of_tenants: Vec<Box<[(usize, Gate)]>>,
    /// By tenant: the dimensions that its rules look at, but for those that only emergencies do.
    used: Vec<Vec<String>>,
    /// By position of the rule: how often it was asked and denied.
    counts: Box<[RuleCount]>,
    bounds: ArcSwap<RuleBounds>,
}

/// How far rules may be passed, by their positions.
#[derive(Debug, Default)]
struct RuleBounds {
    units: Box<[u64]>,
    /// By whom.
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

/// What a rule did, on every worker: whoever looks takes it away. Denials are the smaller part of what a rule says, and
/// requests are only counted while somebody wants to know, so that a rule that lets pass writes nothing.
#[derive(Debug, Default)]
pub(crate) struct RuleCount {
    denied: AtomicU32,
    /// What it would have denied, while in shadow mode.
    shadow_denied: AtomicU32,
    asked: AtomicU32,
    is_watched: AtomicBool,
}

/// What a rule did in a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleTally {
    pub(crate) denied: u64,
    /// In shadow mode: nobody was turned away.
    pub(crate) shadow_denied: u64,
    /// Requests that it was enforced for, if they were counted.
    pub(crate) asked: u64,
}

impl RuleCount {
    #[inline]
    fn count(&self, is_allowed: bool) {
        if !is_allowed {
            self.denied.fetch_add(1, Ordering::Relaxed);
        }
        if self.is_watched.load(Ordering::Relaxed) {
            self.asked.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn count_in_shadow(&self, is_allowed: bool) {
        if !is_allowed {
            self.shadow_denied.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Whether its requests are counted from now on.
    pub(crate) fn watch(&self, is_watched: bool) {
        // Most stay as they are: their cache lines are left alone.
        if self.is_watched.load(Ordering::Relaxed) != is_watched {
            self.is_watched.store(is_watched, Ordering::Relaxed);
        }
    }

    /// What it did since this was last asked.
    pub(crate) fn take(&self) -> RuleTally {
        // Most did nothing: their cache lines are left alone.
        let take = |count: &AtomicU32| match count.load(Ordering::Relaxed) {
            0 => 0,
            _ => u64::from(count.swap(0, Ordering::Relaxed)),
        };
        let (denied, shadow_denied) = (take(&self.denied), take(&self.shadow_denied));
        RuleTally { denied, shadow_denied, asked: take(&self.asked) }
    }
}

/// A request, with the rules that apply to it.
#[derive(Debug)]
pub(crate) struct MatchedRequest<'r, 'd> {
    rules: &'r ActiveRules,
    tenant: TenantIndex,
    request: &'d Dimensions<'d>,
    applying: Vec<ApplicableRule<'r, 'd>>,
    /// Where the meters of the request are kept together.
    together: Vec<u8>,
}

#[derive(Debug)]
struct ApplicableRule<'r, 'd> {
    applied: AppliedRule<'r>,
    key: Key<'d>,
    gate: Cow<'r, Gate>,
}

/// A rule, and what it comes to for a request.
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
    /// What its limit says.
    pub(crate) outcome: LimitOutcome<'r>,
}

/// What the rules say of a request, all together.
#[derive(Debug)]
pub(crate) struct RulesDecision<'r> {
    /// Under the rules that are enforced: all charged, or none.
    pub(crate) decision: Decision<'r>,
    /// Those rules, in the order of the decision's outcomes.
    pub(crate) enforced: Vec<AppliedRule<'r>>,
    /// Rules in shadow mode.
    pub(crate) shadows: Vec<RuleOutcome<'r>>,
    /// The set's version.
    pub(crate) version: &'r str,
    /// What the decision rests on: the least that any of its limits does.
    pub(crate) source: DecisionSource,
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
            // Where nothing is counted, nothing has to be found.
            if !used.is_empty() {
                used.extend(set.emergency_dimensions(&tenant.name).map(str::to_owned));
                used.sort_unstable();
                used.dedup();
            }
            used
        });
        Self { used: used.collect(), gates, set }
    }

    /// Has answers tell how far rules may be passed by these processes.
    pub(crate) fn note_fleet(&self, fleet: Arc<Fleet>) {
        let known = self.gates.bounds.load();
        if !known.fleet.as_ref().is_some_and(|known| Arc::ptr_eq(known, &fleet)) {
            self.gates.bounds.store(Arc::new(RuleBounds::new(&self.set, fleet)));
        }
    }

    /// All rules, with what each of them did.
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
        Self::new(set, shared).map_err(located)
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

    /// The gate of what a rule comes to: the rule's own, or one of the same meters under another limit.
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

    /// Where the meters of a request are kept together: by what the rules are placed by, or all those of a tenant.
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

/// The gate of a rule, or of another limit for some of its keys: a name stands for the same meters, whatever the limit.
fn gate(decider: &Decider, tenant: &Tenant, rule: &Rule, limit: Limit) -> Result<Gate, UnknownName> {
    let gate = decider.gate(&tenant.name, &format!("rule:{}", rule.name), limit, policy(rule))?;
    Ok(gate.with_name(&*rule.name))
}

/// How many units above a limit of a rule may pass, if everything goes wrong once.
fn most_above(rule: &Rule, limit: &Limit, fleet: &Fleet) -> u64 {
    bound(&rule.promise(limit), fleet, &Faults::ONE_OF_EACH).total()
}

/// Tells whoever looks after the server what the authors of rules may not have meant.
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
                DecisionSource::Shed,
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
        let SourcedDecision { decision, source } = decider.check_all(&questions).await.map_err(too_many)?;
        // What is denied is not charged, in shadow neither.
        let charged = if decision.is_allowed() { cost } else { 0 };
        let shadows = in_shadow(decider, shadows, charged).await;
        let version = self.rules.set.version();
        let rules_decision = RulesDecision { decision, enforced, shadows, version, source };
        for (applied, outcome) in rules_decision.enforced.iter().zip(rules_decision.decision.outcomes()) {
            // What an emergency denies says nothing of the rule.
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
            source,
            rules_decision.decided_by().unzip(),
        );
        Ok(rules_decision)
    }

    /// Turns a request away that is under more rules than can be asked. Whoever asked is denied by each of them: counted and
    /// taken down as that, or nobody would undo the change that did it.
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
        // None decided it: it is found by the key of the first.
        let first = enforced.first().map(|(applied, _)| *applied);
        self.record_decision(shared, asked, Outcome::Denied, DecisionSource::Refused, (first, None));
        RulesError::TooManyRules { rules: enforced.len() }
    }

    /// Takes a decision down, if that is due: under the rule that decided it, if any did, with what that said.
    fn record_decision(
        &self,
        shared: &Shared,
        (surface, cost): (Surface, u64),
        outcome: Outcome,
        source: DecisionSource,
        (applied, limit_outcome): (Option<AppliedRule<'_>>, Option<LimitOutcome<'_>>),
    ) {
        let Some(recorder) = shared.recorder_for(outcome) else { return };
        let mut key = tidegate_record::RecordKey::default();
        for name in applied.iter().flat_map(|applied| applied.rule.key.iter()) {
            key.add(name, self.request.get(name).unwrap_or_default());
        }
        let replaced_by = applied.and_then(|applied| applied.terms.emergency.or(applied.terms.override_name));
        let draft = RecordDraft {
            tenant: self.tenant,
            surface,
            key,
            cost,
            outcome,
            limit_outcome,
            source,
            rule_version: applied.map_or(0, |applied| applied.rule.version),
            set_version: self.rules.set.version(),
            replaced_by: replaced_by.unwrap_or_default(),
        };
        let known_by = self.rules.dimensions_used(self.tenant).iter();
        let known_by = known_by.filter_map(|name| Some((name.as_str(), self.request.get(name)?)));
        shared.record_decision(recorder, &draft, known_by);
    }

    /// The rules that apply, those that are enforced and those in shadow, with the questions to ask.
    fn questions(&self) -> (RuleChecks<'_, '_>, RuleChecks<'_, '_>) {
        let questions = self.applying.iter().map(|applying| {
            let ApplicableRule { applied, key, gate } = applying;
            let parts: ArrayVec<&[u8], KEY_PARTS_MAX> = key.iter().map(|part| part.as_bytes()).collect();
            // A rule without a key counts all its requests together.
            let parts = if parts.is_empty() { &[&b""[..]][..] } else { &parts };
            // A limit that crosses placements is kept in one of its own.
            let question = question(gate, parts);
            let crosses = self.rules.set.crosses(applied.rule);
            (*applied, if crosses { question } else { question.placed_by(&self.together) })
        });
        questions.partition(|(applied, _)| applied.terms.mode == Mode::Enforce)
    }
}

type RuleChecks<'r, 'k> = Vec<(AppliedRule<'r>, RegionCheck<'r, 'k>)>;

/// What rules in shadow mode say: the first that may be asked, so that no request takes longer than an enforced one may. Each is
/// asked for itself, and none of them waits for another.
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
    /// The rule that decided, and what its limit said: the one that denied, or would have; of those that let the request
    /// pass, the one with the least left.
    fn decided_by(&self) -> Option<(AppliedRule<'r>, LimitOutcome<'r>)> {
        if self.outcome() == Outcome::ShadowDenied {
            let at = decisive(self.shadows.iter().map(|shadow| &shadow.outcome))?;
            return self.shadows.get(at).map(|shadow| (shadow.applied, shadow.outcome));
        }
        let at = decisive(self.decision.outcomes())?;
        self.enforced.get(at).copied().zip(self.decision.outcomes().get(at).copied())
    }

    /// What is counted.
    pub(crate) fn outcome(&self) -> Outcome {
        let would_deny = self.shadows.iter().any(|shadow| !shadow.outcome.is_allowed());
        match self.decision.is_allowed() {
            false => Outcome::Denied,
            true if would_deny => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        }
    }
}

/// What becomes of a check that nobody has the time to decide.
pub(crate) fn shed_outcome(class: Class) -> Outcome {
    if class == Class::Comfort { Outcome::Allowed } else { Outcome::Denied }
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> Result<String, String> {
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut text = String::new();
    // One byte too many is enough to know that there are too many, however many there are: a pipe does not say.
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
        // Nothing here lets more pass.
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
        // Nothing is wrong with either half.
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
