//! Decides an Envoy request: one status for each descriptor, and one code for the request.
//!
//! Enforced limits decide as one: all are charged, or none is. Limits in shadow mode come after
//! them, and are charged if the request passes. Limits that always charge come first, regardless of
//! the others.

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::Duration;
use tidegate::headers::headers;
use tidegate::region::RegionCheck;
use tidegate::{Decision, Gate, LIMITS_PER_CHECK_MAX, Outcome as LimitOutcome, Retry};
use tidegate_record::RecordKey;
use tidegate_rules::Class;

use super::Descriptors;
use super::tree::{
    DOMAIN_BYTES_MAX, ENTRIES_MAX, KEY_BYTES_MAX, Mode, Parts, VALUE_BYTES_MAX, header_name, limit_of,
    period, replaced, unit_part,
};
use crate::auth::TenantIndex;
use crate::decider::{Decider, SourcedDecision, question};
use crate::decision_log::{RecordDraft, decisive};
use crate::load;
use crate::metrics::{DecisionSource, Outcome, Surface};
use crate::reason::DecisionReason;
use crate::rules::shed_outcome;
use crate::shared::Shared;

/// The most descriptors of a request. Higher: more work in one go, which others wait for.
pub(crate) const DESCRIPTORS_MAX: usize = 1_024;

/// The class of all Envoy checks, because a request does not state one.
const CLASS: Class = Class::Comfort;

/// Why a request is not decided.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It makes no sense.
    Wrong(String),
    /// The request needs limits from descriptor files, and the server has none.
    NothingLoaded,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Wrong(what) => f.write_str(what),
            Self::NothingLoaded => {
                f.write_str("no rate limit configuration loaded: start the server with --envoy-descriptors")
            }
        }
    }
}

/// Decides a request of a tenant.
pub(crate) async fn decide(
    shared: &Shared,
    tenant: TenantIndex,
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, Refusal> {
    check(request)?;
    if load::sheds(CLASS) {
        shared.metrics.decided(Surface::Envoy, CLASS, shed_outcome(CLASS), DecisionSource::Shed, 1);
        return Ok(unlooked(request));
    }
    let descriptors = shared.descriptors.load();
    let overrides = overrides(shared, &descriptors, tenant, request)?;
    let name = shared.tenant(tenant).name.as_bytes();
    let placement = shared.decider.placement(&[name, request.domain.as_bytes()]);
    let plans = plans(&descriptors, tenant, request, &overrides, &placement)?;
    let envoy_decision = rule(shared, &plans).await?;
    shared.metrics.decided(Surface::Envoy, CLASS, envoy_decision.outcome(&plans), envoy_decision.source, 1);
    record_decision(shared, tenant, request, &plans, &envoy_decision);
    Ok(respond(&plans, envoy_decision))
}

/// Takes a decision down, if that is due: under the limit that decided it, if any did.
fn record_decision(
    shared: &Shared,
    tenant: TenantIndex,
    request: &RateLimitRequest,
    plans: &[DescriptorPlan<'_>],
    envoy_decision: &EnvoyDecision<'_>,
) {
    let outcome = envoy_decision.outcome(plans);
    let Some(recorder) = shared.recorder_for(outcome) else { return };
    let is_shadow = outcome == Outcome::ShadowDenied;
    let asked = request.descriptors.iter().zip(plans).zip(&envoy_decision.outcomes).filter_map(
        |((asked, plan), limit_outcome)| {
            let (DescriptorPlan::Check(limited), Some(limit_outcome)) = (plan, limit_outcome) else {
                return None;
            };
            let decides =
                limited.part != LimitRole::Refund && (limited.part == LimitRole::Shadow) == is_shadow;
            decides.then_some((asked, limited, *limit_outcome))
        },
    );
    let asked: Vec<_> = asked.collect();
    let decided =
        decisive(asked.iter().map(|(_, _, limit_outcome)| limit_outcome)).and_then(|at| asked.get(at));
    let entries = || {
        let entries = decided.into_iter().flat_map(|(descriptor, ..)| &descriptor.entries);
        entries.map(|entry| (entry.key.as_str(), entry.value.as_str()))
    };
    let mut key = RecordKey::default();
    entries().for_each(|(name, value)| key.add(name, value));
    let draft = RecordDraft {
        tenant,
        surface: Surface::Envoy,
        key,
        cost: decided.map_or(0, |(_, limited, _)| limited.hits),
        outcome,
        limit_outcome: decided.map(|(_, _, limit_outcome)| *limit_outcome),
        source: envoy_decision.source,
        reason: DecisionReason::of_source(envoy_decision.source, shared.decider.region.is_some()),
        until_ms: None,
        rule_version: 0,
        set_version: "",
        replaced_by: "",
    };
    shared.record_decision(
        recorder,
        &draft,
        [("domain", request.domain.as_str())].into_iter().chain(entries()),
    );
}

fn check(request: &RateLimitRequest) -> Result<(), Refusal> {
    let wrong = |what: String| Err(Refusal::Wrong(what));
    let count = request.descriptors.len();
    if request.domain.is_empty() {
        return wrong(format!(
            "domain: rate limit domain must not be empty; allowed are 1 to {DOMAIN_BYTES_MAX} bytes"
        ));
    }
    if request.domain.len() > DOMAIN_BYTES_MAX {
        return wrong(format!("domain: {} bytes is outside 1 to {DOMAIN_BYTES_MAX}", request.domain.len()));
    }
    if count == 0 {
        return wrong(format!(
            "descriptors: rate limit descriptor list must not be empty; allowed are 1 to {DESCRIPTORS_MAX}"
        ));
    }
    if count > DESCRIPTORS_MAX {
        return wrong(format!("descriptors: {count} is outside 1 to {DESCRIPTORS_MAX}"));
    }
    request.descriptors.iter().enumerate().try_for_each(|(at, descriptor)| check_entries(at, descriptor))
}

fn check_entries(at: usize, descriptor: &RateLimitDescriptor) -> Result<(), Refusal> {
    let outside = |what: String, most: usize| Refusal::Wrong(format!("{what} is outside 0 to {most}"));
    let count = descriptor.entries.len();
    if count > ENTRIES_MAX {
        return Err(outside(format!("descriptors[{at}].entries: {count}"), ENTRIES_MAX));
    }
    for (entry_at, entry) in descriptor.entries.iter().enumerate() {
        for (part, text, most) in
            [("key", &entry.key, KEY_BYTES_MAX), ("value", &entry.value, VALUE_BYTES_MAX)]
        {
            if text.len() > most {
                let place = format!("descriptors[{at}].entries[{entry_at}].{part}");
                return Err(outside(format!("{place}: {} bytes", text.len()), most));
            }
        }
    }
    Ok(())
}

/// A limit that came with the request.
struct RequestLimit {
    gate: Gate,
    requests_per_unit: u32,
    unit: Unit,
}

/// Returns the limits in the request, by descriptor; empty if there are none. As in
/// envoyproxy/ratelimit, they apply in known domains only. A server without domains accepts any.
fn overrides(
    shared: &Shared,
    descriptors: &Descriptors,
    tenant: TenantIndex,
    request: &RateLimitRequest,
) -> Result<Vec<Option<RequestLimit>>, Refusal> {
    let domains = &descriptors.domains;
    if domains.is_empty() && request.descriptors.iter().any(|descriptor| descriptor.limit.is_none()) {
        return Err(Refusal::NothingLoaded);
    }
    let given = request.descriptors.iter().any(|descriptor| descriptor.limit.is_some());
    if !given || !(domains.is_empty() || domains.contains(&request.domain)) {
        return Ok(Vec::new());
    }
    let envoy = &shared.tenant(tenant).envoy;
    let read = |(at, descriptor): (usize, &RateLimitDescriptor)| {
        let Some(given) = &descriptor.limit else { return Ok(None) };
        // Both enumerations of units have the same numbers.
        let unit = Unit::try_from(given.unit).unwrap_or(Unit::Unknown);
        let wrong = || {
            format!("descriptors[{at}].limit.unit: {} is not a unit of time; allowed are 1 to 7", given.unit)
        };
        let limit = limit_of(given.requests_per_unit, unit).ok_or_else(|| Refusal::Wrong(wrong()))?;
        let name = name(&request.domain, descriptor);
        let gate = envoy.with_limit(limit).with_name(header_name(&name));
        Ok(Some(RequestLimit { gate, requests_per_unit: given.requests_per_unit, unit }))
    };
    request.descriptors.iter().enumerate().map(read).collect()
}

/// Returns the name of a limit in the request: the domain and the keys, without the values.
fn name(domain: &str, descriptor: &RateLimitDescriptor) -> String {
    let mut name = domain.to_owned();
    for entry in &descriptor.entries {
        name.push('.');
        name.push_str(&entry.key);
    }
    name
}

/// The plan for one descriptor.
enum DescriptorPlan<'p> {
    /// No limit applies.
    Free,
    /// The limit that applies is unlimited.
    Unlimited,
    Check(PlannedCheck<'p>),
}

struct PlannedCheck<'p> {
    question: RegionCheck<'p, 'p>,
    hits: u64,
    part: LimitRole,
    name: &'p str,
    requests_per_unit: u32,
    unit: Unit,
}

/// The role of a limit in the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LimitRole {
    Enforced,
    Quota,
    Shadow,
    /// The hits have happened, so they are charged without a check. A limit that they exceed is
    /// over.
    Always,
    /// The hits are refunded without a check.
    Refund,
}

impl<'p> PlannedCheck<'p> {
    /// The same question for another cost.
    fn costing(&self, cost: u64) -> RegionCheck<'p, 'p> {
        self.question.clone().cost(cost)
    }

    /// Whether the limit is enforced and charges hits. Such limits decide together.
    fn is_charged(&self) -> bool {
        self.part == LimitRole::Enforced && self.hits > 0
    }
}

fn plans<'p>(
    descriptors: &'p Descriptors,
    tenant: TenantIndex,
    request: &'p RateLimitRequest,
    overrides: &'p [Option<RequestLimit>],
    placement: &'p [u8],
) -> Result<Vec<DescriptorPlan<'p>>, Refusal> {
    let mut rules = Vec::new();
    let mut plans = Vec::with_capacity(request.descriptors.len());
    for (at, descriptor) in request.descriptors.iter().enumerate() {
        if let Some(given) = overrides.get(at).and_then(Option::as_ref) {
            plans.push(DescriptorPlan::Check(given.planned(request, descriptor, placement)));
            continue;
        }
        let mut parts = Parts::new();
        parts.push(request.domain.as_bytes());
        // The place of the unit, which is known when the rule is.
        parts.push(b"");
        let Some(rule) = descriptors.domains.find(&request.domain, &descriptor.entries, &mut parts) else {
            plans.push(DescriptorPlan::Free);
            continue;
        };
        if !rule.replaces.is_empty() {
            rules.push(rule);
        }
        let Some(quota) = &rule.quota else {
            plans.push(DescriptorPlan::Unlimited);
            continue;
        };
        // Each rule has a gate for every tenant there is.
        let Some(gate) = quota.gates.get(tenant) else { return Err(Refusal::NothingLoaded) };
        parts[1] = unit_part(quota.unit);
        let hits = hits(request, descriptor);
        plans.push(DescriptorPlan::Check(PlannedCheck {
            question: question(gate, &parts).placed_by(placement).cost(hits),
            hits,
            part: part(rule.mode, descriptor),
            name: &rule.name,
            requests_per_unit: quota.requests_per_unit,
            unit: quota.unit,
        }));
    }
    if !rules.is_empty() {
        let replaced = replaced(rules.into_iter());
        for plan in &mut plans {
            if matches!(plan, DescriptorPlan::Check(limited) if replaced.contains(limited.name)) {
                *plan = DescriptorPlan::Free;
            }
        }
    }
    Ok(plans)
}

impl RequestLimit {
    fn planned<'p>(
        &'p self,
        request: &'p RateLimitRequest,
        descriptor: &'p RateLimitDescriptor,
        placement: &'p [u8],
    ) -> PlannedCheck<'p> {
        let entries =
            descriptor.entries.iter().flat_map(|entry| [entry.key.as_bytes(), entry.value.as_bytes()]);
        let parts: Parts<'_> =
            [request.domain.as_bytes(), unit_part(self.unit)].into_iter().chain(entries).collect();
        let hits = hits(request, descriptor);
        PlannedCheck {
            question: question(&self.gate, &parts).placed_by(placement).cost(hits),
            hits,
            part: part(Mode::Enforce, descriptor),
            name: "",
            requests_per_unit: self.requests_per_unit,
            unit: self.unit,
        }
    }
}

/// Returns the cost of a descriptor. Its own value prevails, and 0 only reads. In the request's
/// value, 0 means unset, so the cost is 1.
fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> u64 {
    match &descriptor.hits_addend {
        Some(own) => own.value,
        None => u64::from(request.hits_addend).max(1),
    }
}

fn part(mode: Mode, descriptor: &RateLimitDescriptor) -> LimitRole {
    match mode {
        _ if descriptor.is_negative_hits => LimitRole::Refund,
        Mode::Enforce => LimitRole::Enforced,
        Mode::Quota => LimitRole::Quota,
        Mode::Shadow => LimitRole::Shadow,
        Mode::Always => LimitRole::Always,
    }
}

/// The decision of all limits together.
struct EnvoyDecision<'p> {
    allowed: bool,
    /// Outcomes by descriptor; `None` without a check.
    outcomes: Vec<Option<LimitOutcome<'p>>>,
    /// The header fields that describe the decision.
    response_headers: Vec<HeaderValue>,
    /// The weakest source among the limits.
    source: DecisionSource,
}

impl EnvoyDecision<'_> {
    fn outcome(&self, plans: &[DescriptorPlan<'_>]) -> Outcome {
        let would_deny = plans.iter().zip(&self.outcomes).any(|(plan, outcome)| {
            matches!(plan, DescriptorPlan::Check(PlannedCheck { part: LimitRole::Shadow, .. }))
                && outcome.as_ref().is_some_and(|outcome| !outcome.is_allowed())
        });
        match self.allowed {
            false => Outcome::Denied,
            true if would_deny => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        }
    }
}

async fn rule<'p>(shared: &Shared, plans: &[DescriptorPlan<'p>]) -> Result<EnvoyDecision<'p>, Refusal> {
    // Counted before any charge, because a refused request must not cost anything.
    let is_charged =
        |plan: &&DescriptorPlan<'_>| matches!(plan, DescriptorPlan::Check(planned) if planned.is_charged());
    let as_one = plans.iter().filter(is_charged).count();
    if as_one > LIMITS_PER_CHECK_MAX {
        return Err(too_many(as_one));
    }
    let mut envoy_decision = EnvoyDecision {
        allowed: true,
        outcomes: vec![None; plans.len()],
        response_headers: Vec::new(),
        source: if shared.decider.region.is_some() {
            DecisionSource::Regional
        } else {
            DecisionSource::Local
        },
    };
    charge_always(shared, plans, &mut envoy_decision).await?;
    look(shared, plans, &mut envoy_decision).await?;
    if envoy_decision.allowed {
        let quotas = rule_quotas(shared, plans, &mut envoy_decision).await?;
        if envoy_decision.allowed {
            charge(shared, plans, &mut envoy_decision).await?;
        }
        if !envoy_decision.allowed {
            // A denied request is not charged.
            for limited in quotas {
                shared.decider.refund(&limited.question);
            }
        }
    }
    rest(&shared.decider, plans, &mut envoy_decision).await?;
    Ok(envoy_decision)
}

/// Charges the limits that always charge, whether or not the request passes, and then reads them.
async fn charge_always<'p>(
    shared: &Shared,
    plans: &[DescriptorPlan<'p>],
    envoy_decision: &mut EnvoyDecision<'p>,
) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let DescriptorPlan::Check(limited) = plan else { continue };
        if limited.part == LimitRole::Always && limited.hits > 0 {
            shared.decider.charge(&limited.question);
            let decided = check_as_one(&shared.decider, &[limited.costing(0)]).await?;
            envoy_decision.note_at(shared, at, &decided);
        }
    }
    Ok(())
}

/// Reads the limits with a cost of 0. They come before the charges, because a request that they
/// deny must not cost anything.
async fn look<'p>(
    shared: &Shared,
    plans: &[DescriptorPlan<'p>],
    envoy_decision: &mut EnvoyDecision<'p>,
) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let DescriptorPlan::Check(limited) = plan else { continue };
        if matches!(limited.part, LimitRole::Enforced | LimitRole::Always) && limited.hits == 0 {
            let decided = judge(&shared.decider, limited).await?;
            envoy_decision.note_at(shared, at, &decided);
        }
    }
    Ok(())
}

/// Decides limits in quota mode: the request is denied if all of them are over. Returns the limits
/// that were charged.
async fn rule_quotas<'a, 'p>(
    shared: &Shared,
    plans: &'a [DescriptorPlan<'p>],
    envoy_decision: &mut EnvoyDecision<'p>,
) -> Result<Vec<&'a PlannedCheck<'p>>, Refusal> {
    let mut charged = Vec::new();
    let mut denied: Option<SourcedDecision<'p>> = None;
    let mut passed: Option<SourcedDecision<'p>> = None;
    for (at, plan) in plans.iter().enumerate() {
        let DescriptorPlan::Check(limited) = plan else { continue };
        if limited.part != LimitRole::Quota {
            continue;
        }
        let decided = judge(&shared.decider, limited).await?;
        envoy_decision.outcomes[at] = decided.decision.outcomes().first().copied();
        if decided.decision.is_allowed() {
            charged.push(limited);
            passed.get_or_insert(decided);
        } else {
            denied.get_or_insert(decided);
        }
    }
    if let Some(decided) = passed.or(denied) {
        envoy_decision.add_decision(shared, &decided);
    }
    Ok(charged)
}

/// Decides one limit on its own. With a cost of 0, it decides whether one more hit would pass, and
/// charges nothing.
async fn judge<'p>(decider: &Decider, planned: &PlannedCheck<'p>) -> Result<SourcedDecision<'p>, Refusal> {
    let seen = check_as_one(decider, std::slice::from_ref(&planned.question)).await?;
    let left = || seen.decision.outcomes().first().is_some_and(|outcome| outcome.remaining() > 0);
    if planned.hits > 0 || left() {
        return Ok(seen);
    }
    let one = planned.costing(1);
    let limit_outcome = check_as_one(decider, std::slice::from_ref(&one)).await?;
    if limit_outcome.decision.is_allowed() {
        // A unit drained between the two checks.
        decider.refund(&one);
    }
    Ok(limit_outcome)
}

async fn check_as_one<'p>(
    decider: &Decider,
    questions: &[RegionCheck<'p, '_>],
) -> Result<SourcedDecision<'p>, Refusal> {
    decider.check_all(questions).await.map_err(|_| too_many(questions.len()))
}

fn too_many(limits: usize) -> Refusal {
    Refusal::Wrong(format!(
        "descriptors: {limits} are under limits, at most {LIMITS_PER_CHECK_MAX} may be decided as one"
    ))
}

/// Charges the enforced limits: all of them, or none.
async fn charge<'p>(
    shared: &Shared,
    plans: &[DescriptorPlan<'p>],
    envoy_decision: &mut EnvoyDecision<'p>,
) -> Result<(), Refusal> {
    let charged = || {
        plans.iter().enumerate().filter_map(|(at, plan)| match plan {
            DescriptorPlan::Check(limited) if limited.is_charged() => Some((at, &limited.question)),
            _ => None,
        })
    };
    let questions: Vec<RegionCheck<'p, 'p>> = charged().map(|(_, question)| question.clone()).collect();
    if questions.is_empty() {
        return Ok(());
    }
    let decided = check_as_one(&shared.decider, &questions).await?;
    for ((at, _), outcome) in charged().zip(decided.decision.outcomes()) {
        envoy_decision.outcomes[at] = Some(*outcome);
    }
    envoy_decision.add_decision(shared, &decided);
    Ok(())
}

/// Handles limits that decide nothing: shadow mode, refunds, and those that a denial left without a
/// check.
async fn rest<'p>(
    decider: &Decider,
    plans: &[DescriptorPlan<'p>],
    envoy_decision: &mut EnvoyDecision<'p>,
) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let DescriptorPlan::Check(planned) = plan else { continue };
        let limit_outcome = match planned.part {
            LimitRole::Shadow if envoy_decision.allowed => judge(decider, planned).await?,
            LimitRole::Refund => {
                decider.refund(&planned.question);
                check_as_one(decider, &[planned.costing(0)]).await?
            }
            _ if envoy_decision.outcomes[at].is_none() => {
                check_as_one(decider, &[planned.costing(0)]).await?
            }
            _ => continue,
        };
        envoy_decision.outcomes[at] = limit_outcome.decision.outcomes().first().copied();
    }
    Ok(())
}

impl<'p> EnvoyDecision<'p> {
    /// Adds a decision. The response headers describe a denial rather than passed limits, and
    /// charged limits rather than limits that were only read.
    fn add_decision(&mut self, shared: &Shared, decided: &SourcedDecision<'_>) {
        let denies = !decided.decision.is_allowed();
        if denies || self.allowed {
            self.response_headers = fields(shared, &decided.decision);
        }
        self.allowed &= !denies;
        self.source = self.source.worse(decided.source);
    }

    /// The same of a decision on the one limit of a descriptor.
    fn note_at(&mut self, shared: &Shared, at: usize, decided: &SourcedDecision<'p>) {
        self.outcomes[at] = decided.decision.outcomes().first().copied();
        self.add_decision(shared, decided);
    }
}

fn fields(shared: &Shared, decision: &Decision<'_>) -> Vec<HeaderValue> {
    let field = |(name, value): (http::HeaderName, http::HeaderValue)| HeaderValue {
        key: name.as_str().to_owned(),
        value: value.to_str().unwrap_or_default().to_owned(),
        raw_value: Vec::new(),
    };
    headers(decision, shared.decider.limiter.wall_us(), shared.reset).into_iter().map(field).collect()
}

fn respond(plans: &[DescriptorPlan<'_>], envoy_decision: EnvoyDecision<'_>) -> RateLimitResponse {
    let statuses =
        plans.iter().zip(&envoy_decision.outcomes).map(|(plan, outcome)| status(plan, outcome.as_ref()));
    RateLimitResponse {
        overall_code: code(envoy_decision.allowed),
        statuses: statuses.collect(),
        response_headers_to_add: envoy_decision.response_headers,
        ..RateLimitResponse::default()
    }
}

fn status(plan: &DescriptorPlan<'_>, outcome: Option<&LimitOutcome<'_>>) -> DescriptorStatus {
    let (DescriptorPlan::Check(limited), Some(outcome)) = (plan, outcome) else {
        let limit_remaining = if matches!(plan, DescriptorPlan::Unlimited) { u32::MAX } else { 0 };
        return DescriptorStatus { code: code(true), limit_remaining, ..DescriptorStatus::default() };
    };
    let allowed = outcome.is_allowed() || matches!(limited.part, LimitRole::Shadow | LimitRole::Refund);
    DescriptorStatus {
        code: code(allowed),
        current_limit: Some(RateLimit {
            name: limited.name.to_owned(),
            requests_per_unit: limited.requests_per_unit,
            unit: limited.unit.into(),
        }),
        limit_remaining: outcome.remaining(),
        duration_until_reset: Some(until_reset(limited.unit, outcome)),
        quota: None,
    }
}

/// Returns the time until reset in whole seconds, rounded up, as Envoy sends it to clients. For a
/// denial it is the time until the same request would pass, otherwise until the meter is empty. A
/// request that can never pass gets a whole unit, because 0 would invite a retry at once.
fn until_reset(unit: Unit, outcome: &LimitOutcome<'_>) -> Duration {
    let verdict = outcome.verdict();
    let wait = match verdict.retry().map(Retry::after_us) {
        None => std::time::Duration::from_micros(verdict.reset_after_us()),
        Some(Some(after_us)) => std::time::Duration::from_micros(after_us),
        Some(None) => period(unit).unwrap_or_default(),
    };
    let seconds = wait.as_micros().div_ceil(1_000_000);
    Duration { seconds: i64::try_from(seconds).unwrap_or(i64::MAX), nanos: 0 }
}

fn code(allowed: bool) -> i32 {
    if allowed { Code::Ok.into() } else { Code::OverLimit.into() }
}

/// Returns the response to a shed request: it passes.
fn unlooked(request: &RateLimitRequest) -> RateLimitResponse {
    let passed = DescriptorStatus { code: code(true), ..DescriptorStatus::default() };
    RateLimitResponse {
        overall_code: code(true),
        statuses: vec![passed; request.descriptors.len()],
        ..RateLimitResponse::default()
    }
}
