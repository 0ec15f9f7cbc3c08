//! Decides a request under the rules that apply to it.

use std::borrow::Cow;

use arrayvec::ArrayVec;
use tidegate::{Gate, LIMITS_PER_CHECK_MAX, Outcome};
use tidegate_control::{EmergencyTag, KeyOutcome, RuleKeys};
use tidegate_record::RecordKey;
use tidegate_rules::{Dimensions, EmergencyTerms, KEY_PARTS_MAX, Mode, Rule, RuleMatch};

use super::{CheckRole, RecordSubject, RequestContext, RequestDecision, RoleCheck, ShedRequest};
use crate::auth::TenantIndex;
use crate::decider::check_of_parts;
use crate::metrics::Surface;
use crate::rules::ActiveRules;
use crate::shared::Shared;

/// The most rules that an answer names whose dimensions the request lacks.
const LACKING_MAX: usize = 5;

/// The most rules that are searched for them. Higher: more time for a request without limits.
const LACKING_LOOKED_AT_MAX: usize = 32;

/// A request, with the rules that apply to it.
#[derive(Debug)]
pub(crate) struct MatchedRequest<'r, 'd> {
    active: &'r ActiveRules,
    tenant: TenantIndex,
    request: &'d Dimensions<'d>,
    /// Rules in shadow mode come last.
    rules: Vec<MatchedRule<'r, 'd>>,
    /// The number of rules that are enforced.
    enforced: usize,
    placement: Vec<u8>,
}

/// A rule that applies to a request, with its effective terms.
#[derive(Debug)]
pub(crate) struct MatchedRule<'r, 'd> {
    pub(crate) matched: RuleMatch<'r, 'd>,
    /// How many units above its limit may pass at most.
    pub(crate) bound: u64,
    pub(crate) keys: &'r RuleKeys,
    pub(crate) gate: Cow<'r, Gate>,
}

/// Why rules did not decide.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RulesError {
    /// More rules apply than one request may be under.
    TooManyRules {
        /// How many apply.
        rules: usize,
    },
    Shed(ShedRequest),
}

impl MatchedRule<'_, '_> {
    fn is_enforced(&self) -> bool {
        self.matched.terms.mode == Mode::Enforce
    }

    /// Notes the outcome for the key, by which changes of the rule are judged.
    fn note(&self, shared: &Shared, tenant: TenantIndex, is_allowed: bool) {
        let terms = &self.matched.terms;
        let outcome = match (terms.emergency, terms.mode) {
            // A request that an emergency let pass says nothing about the rule.
            (Some(_), _) if is_allowed => return,
            (Some(emergency), _) => KeyOutcome::DeniedByEmergency(EmergencyTag::of(emergency.id)),
            (None, _) if is_allowed => KeyOutcome::Allowed,
            (None, Mode::Enforce) => KeyOutcome::Denied,
            (None, Mode::Shadow) => KeyOutcome::DeniedInShadow,
        };
        let key = (shared.tenant(tenant).name.as_str(), self.matched.key.iter().copied());
        self.keys.note(&shared.key_memory, key, outcome);
    }
}

impl<'r, 'd> MatchedRequest<'r, 'd> {
    /// Of the rules in shadow mode it checks at most as many as one request may have enforced, so
    /// that no request takes longer than an enforced one.
    pub(crate) fn new(
        active: &'r ActiveRules,
        tenant: TenantIndex,
        request: &'d Dimensions<'d>,
        rules: impl Iterator<Item = MatchedRule<'r, 'd>>,
        placement: Vec<u8>,
    ) -> Self {
        let (mut rules, mut shadows): (Vec<_>, Vec<_>) = rules.partition(MatchedRule::is_enforced);
        let enforced = rules.len();
        shadows.truncate(LIMITS_PER_CHECK_MAX);
        rules.append(&mut shadows);
        Self { active, tenant, request, rules, enforced, placement }
    }

    /// Decides the request under all rules that apply to it.
    pub(crate) async fn decide(
        &self,
        shared: &Shared,
        surface: Surface,
        cost: u64,
    ) -> Result<RequestDecision<'_>, RulesError> {
        let enforced = &self.rules[..self.enforced];
        let class = enforced.iter().map(|rule| rule.matched.rule.class).max().unwrap_or_default();
        let context = RequestContext { shared, tenant: self.tenant, surface, class };
        let admission = context.admit(|| self.subject(None, cost)).map_err(RulesError::Shed)?;
        if enforced.len() > LIMITS_PER_CHECK_MAX {
            // Each rule notes a denial. Otherwise the change that caused it would not be rolled
            // back. No rule decided, so the record has the key of the first.
            for rule in enforced {
                rule.note(shared, self.tenant, false);
            }
            admission.refuse(|| self.subject(Some(0), cost));
            return Err(self.too_many());
        }
        let now_ms = shared.now_ms();
        let checks: Vec<_> = self.rules.iter().map(|rule| self.check(rule, cost, now_ms)).collect();
        let decision = admission.decide(&checks, |at| self.subject(at, cost)).await;
        let decision = decision.map_err(|_| self.too_many())?;
        // A fallback depends on the origin, so its denials must not undo a change of the rule.
        if decision.is_fallback() {
            return Ok(decision);
        }
        for (rule, outcome) in self.outcomes(&decision) {
            rule.note(shared, self.tenant, outcome.is_allowed());
        }
        Ok(decision)
    }

    /// Returns the rules that were checked, with their outcomes; those in shadow mode come last.
    pub(crate) fn outcomes<'m>(
        &'m self,
        decision: &RequestDecision<'m>,
    ) -> impl Iterator<Item = (&'m MatchedRule<'r, 'd>, Outcome<'m>)> {
        let rules = self.rules.iter().enumerate();
        rules.filter_map(|(at, rule)| Some((rule, *decision.outcome_of(at)?)))
    }

    /// Returns the version of the rule set.
    pub(crate) fn version(&self) -> &'r str {
        self.active.set().version()
    }

    /// Returns the emergency that blocked the request, if one did.
    pub(crate) fn block(&self, decision: &RequestDecision<'_>) -> Option<EmergencyTerms<'r>> {
        let decided_by = decision.decided_by.filter(|_| !decision.is_allowed())?;
        let emergency = self.rules.get(decided_by)?.matched.terms.emergency;
        emergency.filter(|emergency| emergency.is_block)
    }

    /// Returns rules of the tenant that lack dimensions of the request, with these dimensions.
    pub(crate) fn lacking(&self, tenant: &str) -> Vec<(&'r Rule, Vec<&'r str>)> {
        let lacking = |rule: &'r Rule| {
            let mut names: Vec<&str> =
                rule.dimensions_used().filter(|name| self.request.get(name).is_none()).collect();
            names.sort_unstable();
            names.dedup();
            (!names.is_empty()).then_some((rule, names))
        };
        let rules = self.active.set().rules_for(tenant).take(LACKING_LOOKED_AT_MAX);
        rules.filter_map(|(_, rule)| lacking(rule)).take(LACKING_MAX).collect()
    }

    /// Whether the tenant has rules.
    pub(crate) fn has_rules(&self, tenant: &str) -> bool {
        self.active.set().has_rules_for(tenant)
    }

    fn too_many(&self) -> RulesError {
        RulesError::TooManyRules { rules: self.enforced }
    }

    fn check<'m>(&'m self, rule: &'m MatchedRule<'r, 'd>, cost: u64, now_ms: u64) -> RoleCheck<'m, 'm> {
        let matched = &rule.matched;
        let parts: ArrayVec<&[u8], KEY_PARTS_MAX> = matched.key.iter().map(|part| part.as_bytes()).collect();
        // A rule without a key counts all its requests together.
        let parts = if parts.is_empty() { &[&b""[..]][..] } else { &parts };
        let check = check_of_parts(&rule.gate, parts).cost(cost);
        // A limit across placements has a placement of its own.
        let crosses = self.active.set().crosses(matched.rule);
        RoleCheck {
            check: if crosses { check } else { check.placed_by(&self.placement) },
            role: if rule.is_enforced() { CheckRole::Enforced } else { CheckRole::Shadow },
            is_probe: false,
            is_block: matched.terms.emergency.is_some_and(|emergency| emergency.is_block),
            ends_us: matched.terms.emergency.map(|emergency| {
                // The rules were matched a moment ago, so the emergency may just have ended.
                emergency.expires_ms.saturating_sub(now_ms).max(1).saturating_mul(1_000)
            }),
        }
    }

    /// Names the request in its record, with the rule that decided, if any.
    fn subject(&self, at: Option<usize>, cost: u64) -> RecordSubject<'_, impl Iterator<Item = (&str, &str)>> {
        let matched = at.and_then(|at| self.rules.get(at)).map(|rule| &rule.matched);
        let mut key = RecordKey::default();
        for name in matched.iter().flat_map(|matched| matched.rule.key.iter()) {
            key.add(name, self.request.get(name).unwrap_or_default());
        }
        let emergency = matched.and_then(|matched| matched.terms.emergency);
        let override_name = matched.and_then(|matched| matched.terms.override_name);
        let dimensions = self.active.dimensions_used(self.tenant).iter();
        RecordSubject {
            key,
            cost,
            rule_version: matched.map_or(0, |matched| matched.rule.version),
            set_version: self.active.set().version(),
            replaced_by: emergency.map(|emergency| emergency.id).or(override_name).unwrap_or_default(),
            until_ms: emergency.map(|emergency| emergency.expires_ms),
            dimensions: dimensions.filter_map(|name| Some((name.as_str(), self.request.get(name)?))),
        }
    }
}
