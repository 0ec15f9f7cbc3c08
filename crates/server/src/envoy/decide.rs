//! What becomes of a request: one answer for each of its descriptors, and one for all of them.
//!
//! Limits that are enforced decide as one: all are charged, or none is. Those in shadow mode come after, and are
//! charged if the request passes. Those that always charge come first, whatever the others say.

use envoy_types::pb::envoy::config::core::v3::HeaderValue;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{
    Code, DescriptorStatus, RateLimit,
};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::Duration;
use tidegate::headers::headers;
use tidegate::region::Question;
use tidegate::{Decision, Gate, LIMITS_PER_CHECK_MAX, Outcome as LimitOutcome, Retry};
use tidegate_record::Key;
use tidegate_rules::Class;

use super::Descriptors;
use super::tree::{
    DOMAIN_BYTES_MAX, ENTRIES_MAX, KEY_BYTES_MAX, Mode, Parts, VALUE_BYTES_MAX, limit_of, period, replaced,
    told, unit_part,
};
use crate::auth::TenantIndex;
use crate::deciding::{Decided, Decider, question};
use crate::journal::{Note, decisive};
use crate::load;
use crate::metrics::{Outcome, Rung, Surface};
use crate::rules::shed_outcome;
use crate::shared::Shared;

/// The most descriptors of a request. Higher: more work in one go, which others wait for.
pub(crate) const DESCRIPTORS_MAX: usize = 1_024;

/// Envoy's checks say nothing of what they protect.
const CLASS: Class = Class::Comfort;

/// Why a request is not decided.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It makes no sense.
    Wrong(String),
    /// It asks for limits from files, and the server was given none.
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
        shared.metrics.decided(Surface::Envoy, CLASS, shed_outcome(CLASS), Rung::Shed, 1);
        return Ok(unlooked(request));
    }
    let descriptors = shared.descriptors.load();
    let overrides = overrides(shared, &descriptors, tenant, request)?;
    let name = shared.tenant(tenant).name.as_bytes();
    let placement = shared.decider.placement(&[name, request.domain.as_bytes()]);
    let plans = plans(&descriptors, tenant, request, &overrides, &placement)?;
    let ruling = rule(shared, &plans).await?;
    shared.metrics.decided(Surface::Envoy, CLASS, ruling.outcome(&plans), ruling.rung, 1);
    take_down(shared, tenant, request, &plans, &ruling);
    Ok(respond(&plans, ruling))
}

/// Takes a decision down, if that is due: under the limit that decided it, if any did.
fn take_down(
    shared: &Shared,
    tenant: TenantIndex,
    request: &RateLimitRequest,
    plans: &[Plan<'_>],
    ruling: &Ruling<'_>,
) {
    let outcome = ruling.outcome(plans);
    let Some(recorder) = shared.recorder_for(outcome) else { return };
    let is_shadow = outcome == Outcome::ShadowDenied;
    let asked =
        request.descriptors.iter().zip(plans).zip(&ruling.outcomes).filter_map(|((asked, plan), said)| {
            let (Plan::Limited(limited), Some(said)) = (plan, said) else { return None };
            let decides = limited.part != Part::Refund && (limited.part == Part::Shadow) == is_shadow;
            decides.then_some((asked, limited, *said))
        });
    let asked: Vec<_> = asked.collect();
    let decided = decisive(asked.iter().map(|(_, _, said)| said)).and_then(|at| asked.get(at));
    let entries = || {
        let entries = decided.into_iter().flat_map(|(descriptor, ..)| &descriptor.entries);
        entries.map(|entry| (entry.key.as_str(), entry.value.as_str()))
    };
    let mut key = Key::default();
    entries().for_each(|(name, value)| key.add(name, value));
    let note = Note {
        tenant,
        surface: Surface::Envoy,
        key,
        cost: decided.map_or(0, |(_, limited, _)| limited.hits),
        outcome,
        said: decided.map(|(_, _, said)| *said),
        rung: ruling.rung,
        rule_version: 0,
        set_version: "",
        replaced_by: "",
    };
    shared.take_down(recorder, &note, [("domain", request.domain.as_str())].into_iter().chain(entries()));
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
struct Override {
    gate: Gate,
    requests_per_unit: u32,
    unit: Unit,
}

/// The limits that came with the request, by descriptor; empty if none did. As with envoyproxy/ratelimit, they count
/// in domains that are known only; a server that was told of none takes any.
fn overrides(
    shared: &Shared,
    descriptors: &Descriptors,
    tenant: TenantIndex,
    request: &RateLimitRequest,
) -> Result<Vec<Option<Override>>, Refusal> {
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
        let gate = envoy.with_limit(limit).with_name(told(&name));
        Ok(Some(Override { gate, requests_per_unit: given.requests_per_unit, unit }))
    };
    request.descriptors.iter().enumerate().map(read).collect()
}

/// What a limit that came with the request is called: its keys, without the values.
fn name(domain: &str, descriptor: &RateLimitDescriptor) -> String {
    let mut name = domain.to_owned();
    for entry in &descriptor.entries {
        name.push('.');
        name.push_str(&entry.key);
    }
    name
}

/// What is to be done for one descriptor.
enum Plan<'p> {
    /// No limit applies.
    Free,
    /// One applies that lets everything pass.
    Unlimited,
    Limited(Limited<'p>),
}

struct Limited<'p> {
    question: Question<'p, 'p>,
    hits: u64,
    part: Part,
    name: &'p str,
    requests_per_unit: u32,
    unit: Unit,
}

/// What part a limit has in the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Enforced,
    Quota,
    Shadow,
    /// Nothing is asked: hits have happened. They are charged, and what they were too many for is over its limit.
    Always,
    /// Nothing is asked: hits are given back.
    Refund,
}

impl<'p> Limited<'p> {
    /// The same question for another cost.
    fn costing(&self, cost: u64) -> Question<'p, 'p> {
        self.question.clone().cost(cost)
    }

    /// Whether this is enforced, and charges something: those decide together.
    fn is_charged(&self) -> bool {
        self.part == Part::Enforced && self.hits > 0
    }
}

fn plans<'p>(
    descriptors: &'p Descriptors,
    tenant: TenantIndex,
    request: &'p RateLimitRequest,
    overrides: &'p [Option<Override>],
    placement: &'p [u8],
) -> Result<Vec<Plan<'p>>, Refusal> {
    let mut rules = Vec::new();
    let mut plans = Vec::with_capacity(request.descriptors.len());
    for (at, descriptor) in request.descriptors.iter().enumerate() {
        if let Some(given) = overrides.get(at).and_then(Option::as_ref) {
            plans.push(Plan::Limited(given.planned(request, descriptor, placement)));
            continue;
        }
        let mut parts = Parts::new();
        parts.push(request.domain.as_bytes());
        // The place of the unit, which is known when the rule is.
        parts.push(b"");
        let Some(rule) = descriptors.domains.find(&request.domain, &descriptor.entries, &mut parts) else {
            plans.push(Plan::Free);
            continue;
        };
        if !rule.replaces.is_empty() {
            rules.push(rule);
        }
        let Some(quota) = &rule.quota else {
            plans.push(Plan::Unlimited);
            continue;
        };
        // Each rule has a gate for every tenant there is.
        let Some(gate) = quota.gates.get(tenant) else { return Err(Refusal::NothingLoaded) };
        parts[1] = unit_part(quota.unit);
        let hits = hits(request, descriptor);
        plans.push(Plan::Limited(Limited {
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
            if matches!(plan, Plan::Limited(limited) if replaced.contains(limited.name)) {
                *plan = Plan::Free;
            }
        }
    }
    Ok(plans)
}

impl Override {
    fn planned<'p>(
        &'p self,
        request: &'p RateLimitRequest,
        descriptor: &'p RateLimitDescriptor,
        placement: &'p [u8],
    ) -> Limited<'p> {
        let entries =
            descriptor.entries.iter().flat_map(|entry| [entry.key.as_bytes(), entry.value.as_bytes()]);
        let parts: Parts<'_> =
            [request.domain.as_bytes(), unit_part(self.unit)].into_iter().chain(entries).collect();
        let hits = hits(request, descriptor);
        Limited {
            question: question(&self.gate, &parts).placed_by(placement).cost(hits),
            hits,
            part: part(Mode::Enforce, descriptor),
            name: "",
            requests_per_unit: self.requests_per_unit,
            unit: self.unit,
        }
    }
}

/// What a descriptor costs: as it says itself, where 0 only looks, or as the request says, where 0 is not set.
fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> u64 {
    match &descriptor.hits_addend {
        Some(own) => own.value,
        None => u64::from(request.hits_addend).max(1),
    }
}

fn part(mode: Mode, descriptor: &RateLimitDescriptor) -> Part {
    match mode {
        _ if descriptor.is_negative_hits => Part::Refund,
        Mode::Enforce => Part::Enforced,
        Mode::Quota => Part::Quota,
        Mode::Shadow => Part::Shadow,
        Mode::Always => Part::Always,
    }
}

/// What the limits say, all together.
struct Ruling<'p> {
    allowed: bool,
    /// By descriptor; nothing where nothing was asked.
    outcomes: Vec<Option<LimitOutcome<'p>>>,
    /// The header fields that tell of it.
    telling: Vec<HeaderValue>,
    /// What it rests on: the least that any of the limits does.
    rung: Rung,
}

impl Ruling<'_> {
    fn outcome(&self, plans: &[Plan<'_>]) -> Outcome {
        let would_deny = plans.iter().zip(&self.outcomes).any(|(plan, outcome)| {
            matches!(plan, Plan::Limited(Limited { part: Part::Shadow, .. }))
                && outcome.as_ref().is_some_and(|outcome| !outcome.is_allowed())
        });
        match self.allowed {
            false => Outcome::Denied,
            true if would_deny => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        }
    }
}

async fn rule<'p>(shared: &Shared, plans: &[Plan<'p>]) -> Result<Ruling<'p>, Refusal> {
    // Known before anything is charged: what is refused must not cost anything either.
    let is_charged = |plan: &&Plan<'_>| matches!(plan, Plan::Limited(planned) if planned.is_charged());
    let as_one = plans.iter().filter(is_charged).count();
    if as_one > LIMITS_PER_CHECK_MAX {
        return Err(too_many(as_one));
    }
    let mut ruling = Ruling {
        allowed: true,
        outcomes: vec![None; plans.len()],
        telling: Vec::new(),
        rung: if shared.decider.region.is_some() { Rung::Regional } else { Rung::Local },
    };
    charge_always(shared, plans, &mut ruling).await?;
    look(shared, plans, &mut ruling).await?;
    if ruling.allowed {
        let quotas = rule_quotas(shared, plans, &mut ruling).await?;
        if ruling.allowed {
            charge(shared, plans, &mut ruling).await?;
        }
        if !ruling.allowed {
            // What is denied is not charged.
            for limited in quotas {
                shared.decider.refund(&limited.question);
            }
        }
    }
    rest(&shared.decider, plans, &mut ruling).await?;
    Ok(ruling)
}

/// Limits that hits are charged to whatever becomes of the request, and that are looked at then.
async fn charge_always<'p>(
    shared: &Shared,
    plans: &[Plan<'p>],
    ruling: &mut Ruling<'p>,
) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let Plan::Limited(limited) = plan else { continue };
        if limited.part == Part::Always && limited.hits > 0 {
            shared.decider.charge(&limited.question);
            let decided = check_as_one(&shared.decider, &[limited.costing(0)]).await?;
            ruling.note_at(shared, at, &decided);
        }
    }
    Ok(())
}

/// Limits that are only looked at: they come before what is charged, since a denial of theirs must not cost anything.
async fn look<'p>(shared: &Shared, plans: &[Plan<'p>], ruling: &mut Ruling<'p>) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let Plan::Limited(limited) = plan else { continue };
        if matches!(limited.part, Part::Enforced | Part::Always) && limited.hits == 0 {
            let decided = judge(&shared.decider, limited).await?;
            ruling.note_at(shared, at, &decided);
        }
    }
    Ok(())
}

/// Limits in quota mode: the request is denied if all of them are over. Gives what was charged.
async fn rule_quotas<'a, 'p>(
    shared: &Shared,
    plans: &'a [Plan<'p>],
    ruling: &mut Ruling<'p>,
) -> Result<Vec<&'a Limited<'p>>, Refusal> {
    let mut charged = Vec::new();
    let mut denied: Option<Decided<'p>> = None;
    let mut passed: Option<Decided<'p>> = None;
    for (at, plan) in plans.iter().enumerate() {
        let Plan::Limited(limited) = plan else { continue };
        if limited.part != Part::Quota {
            continue;
        }
        let decided = judge(&shared.decider, limited).await?;
        ruling.outcomes[at] = decided.decision.outcomes().first().copied();
        if decided.decision.is_allowed() {
            charged.push(limited);
            passed.get_or_insert(decided);
        } else {
            denied.get_or_insert(decided);
        }
    }
    if let Some(decided) = passed.or(denied) {
        ruling.note(shared, &decided);
    }
    Ok(charged)
}

/// One limit on its own. A look asks whether one more would pass, and charges nothing.
async fn judge<'p>(decider: &Decider, planned: &Limited<'p>) -> Result<Decided<'p>, Refusal> {
    let seen = check_as_one(decider, std::slice::from_ref(&planned.question)).await?;
    let left = || seen.decision.outcomes().first().is_some_and(|outcome| outcome.remaining() > 0);
    if planned.hits > 0 || left() {
        return Ok(seen);
    }
    let one = planned.costing(1);
    let said = check_as_one(decider, std::slice::from_ref(&one)).await?;
    if said.decision.is_allowed() {
        // Something drained in between.
        decider.refund(&one);
    }
    Ok(said)
}

async fn check_as_one<'p>(decider: &Decider, questions: &[Question<'p, '_>]) -> Result<Decided<'p>, Refusal> {
    decider.check_all(questions).await.map_err(|_| too_many(questions.len()))
}

fn too_many(limits: usize) -> Refusal {
    Refusal::Wrong(format!(
        "descriptors: {limits} are under limits, at most {LIMITS_PER_CHECK_MAX} may be decided as one"
    ))
}

/// Enforced limits that charge: all of them, or none.
async fn charge<'p>(shared: &Shared, plans: &[Plan<'p>], ruling: &mut Ruling<'p>) -> Result<(), Refusal> {
    let charged = || {
        plans.iter().enumerate().filter_map(|(at, plan)| match plan {
            Plan::Limited(limited) if limited.is_charged() => Some((at, &limited.question)),
            _ => None,
        })
    };
    let questions: Vec<Question<'p, 'p>> = charged().map(|(_, question)| question.clone()).collect();
    if questions.is_empty() {
        return Ok(());
    }
    let decided = check_as_one(&shared.decider, &questions).await?;
    for ((at, _), outcome) in charged().zip(decided.decision.outcomes()) {
        ruling.outcomes[at] = Some(*outcome);
    }
    ruling.note(shared, &decided);
    Ok(())
}

/// What decides nothing: limits in shadow mode, hits that are given back, and what was not reached after a denial.
async fn rest<'p>(decider: &Decider, plans: &[Plan<'p>], ruling: &mut Ruling<'p>) -> Result<(), Refusal> {
    for (at, plan) in plans.iter().enumerate() {
        let Plan::Limited(planned) = plan else { continue };
        let said = match planned.part {
            Part::Shadow if ruling.allowed => judge(decider, planned).await?,
            Part::Refund => {
                decider.refund(&planned.question);
                check_as_one(decider, &[planned.costing(0)]).await?
            }
            _ if ruling.outcomes[at].is_none() => check_as_one(decider, &[planned.costing(0)]).await?,
            _ => continue,
        };
        ruling.outcomes[at] = said.decision.outcomes().first().copied();
    }
    Ok(())
}

impl<'p> Ruling<'p> {
    /// Takes a decision into account. A denial is told before anything that passed, and the limits that were charged
    /// before those that were not.
    fn note(&mut self, shared: &Shared, decided: &Decided<'_>) {
        let denies = !decided.decision.is_allowed();
        if denies || self.allowed {
            self.telling = fields(shared, &decided.decision);
        }
        self.allowed &= !denies;
        self.rung = self.rung.worse(decided.rung);
    }

    /// The same of a decision on the one limit of a descriptor.
    fn note_at(&mut self, shared: &Shared, at: usize, decided: &Decided<'p>) {
        self.outcomes[at] = decided.decision.outcomes().first().copied();
        self.note(shared, decided);
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

fn respond(plans: &[Plan<'_>], ruling: Ruling<'_>) -> RateLimitResponse {
    let statuses = plans.iter().zip(&ruling.outcomes).map(|(plan, outcome)| status(plan, outcome.as_ref()));
    RateLimitResponse {
        overall_code: code(ruling.allowed),
        statuses: statuses.collect(),
        response_headers_to_add: ruling.telling,
        ..RateLimitResponse::default()
    }
}

fn status(plan: &Plan<'_>, outcome: Option<&LimitOutcome<'_>>) -> DescriptorStatus {
    let (Plan::Limited(limited), Some(outcome)) = (plan, outcome) else {
        let limit_remaining = if matches!(plan, Plan::Unlimited) { u32::MAX } else { 0 };
        return DescriptorStatus { code: code(true), limit_remaining, ..DescriptorStatus::default() };
    };
    let allowed = outcome.is_allowed() || matches!(limited.part, Part::Shadow | Part::Refund);
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

/// Whole seconds, rounded up, since that is what Envoy tells its clients: until the same request would pass, if it was
/// denied, else until the meter is as good as new. What will never pass is told a whole unit: it is to wait, and 0 would
/// say that it need not.
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

/// The answer to a request that nobody has the time to look at: it passes.
fn unlooked(request: &RateLimitRequest) -> RateLimitResponse {
    let passed = DescriptorStatus { code: code(true), ..DescriptorStatus::default() };
    RateLimitResponse {
        overall_code: code(true),
        statuses: vec![passed; request.descriptors.len()],
        ..RateLimitResponse::default()
    }
}
