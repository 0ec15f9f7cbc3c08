//! Decides a request under the rules that apply to it.

use std::borrow::Cow;

use arrayvec::ArrayVec;
use tidegate::{Gate, LIMITS_PER_CHECK_MAX, Outcome as LimitOutcome};
use tidegate_control::RuleCount;
use tidegate_record::RecordKey;
use tidegate_rules::{Dimensions, EffectiveTerms, EmergencyTerms, KEY_PARTS_MAX, Key, Mode, Rule};

use super::record::RecordedDecision;
use super::{CheckRole, PlannedCheck, RecordSubject, RequestContext, RequestDecision, Shed};
use crate::auth::TenantIndex;
use crate::decider::check_of_parts;
use crate::metrics::{DecisionSource, Surface};
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
    pub(crate) rule: &'r Rule,
    pub(crate) terms: EffectiveTerms<'r>,
    /// How many units above its limit may pass at most.
    pub(crate) bound: u64,
    pub(crate) count: &'r RuleCount,
    pub(crate) key: Key<'d>,
    pub(crate) gate: Cow<'r, Gate>,
}

/// The decision of all rules on a request.
#[derive(Debug)]
pub(crate) struct RulesDecision<'m, 'r, 'd> {
    pub(crate) decision: RequestDecision<'m>,
    matched: &'m MatchedRequest<'r, 'd>,
}

/// Why rules did not decide.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum RulesError {
    /// More rules apply than one request may be under.
    TooManyRules {
        /// How many apply.
        rules: usize,
    },
    Shed(Shed),
}

impl MatchedRule<'_, '_> {
    fn is_enforced(&self) -> bool {
        self.terms.mode == Mode::Enforce
    }

    fn count(&self, is_allowed: bool) {
        // A denial by an emergency is not a denial of the rule.
        if self.terms.emergency.is_some() {
            return;
        }
        if self.is_enforced() {
            self.count.count(is_allowed);
        } else {
            self.count.count_in_shadow(is_allowed);
        }
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
    ) -> Result<RulesDecision<'_, 'r, 'd>, RulesError> {
        let enforced = &self.rules[..self.enforced];
        let class = enforced.iter().map(|matched| matched.rule.class).max().unwrap_or_default();
        let context = RequestContext { shared, tenant: self.tenant, surface, class };
        let admission = context.admit().map_err(|shed| {
            let recorded = RecordedDecision::of_limit(shed.is_allowed(), None, (DecisionSource::Shed, None));
            context.record(&recorded, || self.subject(None, cost));
            RulesError::Shed(shed)
        })?;
        if enforced.len() > LIMITS_PER_CHECK_MAX {
            // Each rule counts a denial. Otherwise the change that caused it would not be rolled
            // back. No rule decided, so the record has the key of the first.
            for matched in enforced {
                matched.count(false);
            }
            admission.refuse(|| self.subject(Some(0), cost));
            return Err(self.too_many());
        }
        let now_ms = shared.now_ms();
        let checks: Vec<_> = self.rules.iter().map(|matched| self.check(matched, cost, now_ms)).collect();
        let decision = admission.decide(&checks, |at| self.subject(at, cost)).await;
        let decision = decision.map_err(|_| self.too_many())?;
        for (matched, outcome) in self.rules.iter().zip(&decision.outcomes) {
            matched.count(outcome.as_ref().is_none_or(LimitOutcome::is_allowed));
        }
        Ok(RulesDecision { decision, matched: self })
    }

    fn too_many(&self) -> RulesError {
        RulesError::TooManyRules { rules: self.enforced }
    }

    fn check<'m>(&'m self, matched: &'m MatchedRule<'r, 'd>, cost: u64, now_ms: u64) -> PlannedCheck<'m, 'm> {
        let parts: ArrayVec<&[u8], KEY_PARTS_MAX> = matched.key.iter().map(|part| part.as_bytes()).collect();
        // A rule without a key counts all its requests together.
        let parts = if parts.is_empty() { &[&b""[..]][..] } else { &parts };
        let check = check_of_parts(&matched.gate, parts).cost(cost);
        // A limit across placements has a placement of its own.
        let crosses = self.active.set().crosses(matched.rule);
        PlannedCheck {
            check: if crosses { check } else { check.placed_by(&self.placement) },
            role: if matched.is_enforced() { CheckRole::Enforced } else { CheckRole::Shadow },
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
        let matched = at.and_then(|at| self.rules.get(at));
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

impl<'m, 'r, 'd> RulesDecision<'m, 'r, 'd> {
    /// Returns the rules that were checked, with their outcomes; those in shadow mode come last.
    pub(crate) fn rules(&self) -> impl Iterator<Item = (&'m MatchedRule<'r, 'd>, &LimitOutcome<'m>)> {
        let rules = self.matched.rules.iter().zip(&self.decision.outcomes);
        rules.filter_map(|(matched, outcome)| Some((matched, outcome.as_ref()?)))
    }

    /// Returns the version of the rule set.
    pub(crate) fn version(&self) -> &'r str {
        self.matched.active.set().version()
    }

    /// Returns rules of the tenant that lack dimensions of the request, with these dimensions.
    pub(crate) fn lacking(&self, tenant: &str) -> Vec<(&'r Rule, Vec<&'r str>)> {
        let MatchedRequest { active, request, .. } = self.matched;
        let lacking = |rule: &'r Rule| {
            let mut names: Vec<&str> =
                rule.dimensions_used().filter(|name| request.get(name).is_none()).collect();
            names.sort_unstable();
            names.dedup();
            (!names.is_empty()).then_some((rule, names))
        };
        let rules = active.set().rules_for(tenant).take(LACKING_LOOKED_AT_MAX);
        rules.filter_map(|(_, rule)| lacking(rule)).take(LACKING_MAX).collect()
    }

    /// Whether the tenant has rules.
    pub(crate) fn has_rules(&self, tenant: &str) -> bool {
        self.matched.active.set().has_rules_for(tenant)
    }

    /// Returns the emergency that blocked the request, if one did.
    pub(crate) fn block(&self) -> Option<EmergencyTerms<'r>> {
        let decided_by = self.decision.decided_by.filter(|_| !self.decision.is_allowed())?;
        self.matched.rules.get(decided_by)?.terms.emergency.filter(|emergency| emergency.is_block)
    }
}
