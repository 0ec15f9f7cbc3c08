//! Decides an Envoy request: one status for each descriptor, and one code for the request.

use std::borrow::Cow;
use std::cell::LazyCell;
use std::collections::HashSet;

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
use tidegate::{Gate, LIMITS_PER_CHECK_MAX, Outcome, Retry};
use tidegate_record::RecordKey;
use tidegate_rules::{Class, SecretHeaders, secret_digest};

use super::Descriptors;
use super::tree::{
    DOMAIN_BYTES_MAX, ENTRIES_MAX, KEY_BYTES_MAX, Mode, Parts, VALUE_BYTES_MAX, header_name, limit_of,
    period, replaced, unit_part,
};
use crate::auth::TenantIndex;
use crate::decider::check_of_parts;
use crate::metrics::Surface;
use crate::pipeline::{CheckRole, RecordSubject, RequestContext, RequestDecision, RoleCheck};
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
    check_request(request)?;
    let context = RequestContext { shared, tenant, surface: Surface::Envoy, class: CLASS };
    // Not before the admission: a digest takes longer than to shed the request.
    let kept = LazyCell::new(|| without_credentials(request, &shared.protocol.secret_headers));
    let Ok(admission) = context.admit(|| subject(&kept, None)) else { return Ok(shed_response(request)) };
    let kept = &**kept;
    let descriptors = shared.rules.descriptors.load();
    let request_limits = request_limits(shared, &descriptors, tenant, request)?;
    let name = shared.tenant(tenant).name.as_bytes();
    let placement = shared.decider.placement(&[name, request.domain.as_bytes()]);
    let checks = DescriptorChecks::new(&descriptors, tenant, (request, kept), &request_limits, &placement)?;
    let decision = admission.decide(&checks.checks, |at| subject(kept, at.map(|at| checks.at(at)))).await;
    let decision = decision.map_err(|error| too_many(error.limits))?;
    Ok(checks.response(shared, &decision))
}

/// Returns the request with digests in place of credentials. Descriptor files are compared with the
/// values themselves.
fn without_credentials<'r>(
    request: &'r RateLimitRequest,
    secrets: &SecretHeaders,
) -> Cow<'r, RateLimitRequest> {
    let mut entries = request.descriptors.iter().flat_map(|descriptor| &descriptor.entries);
    if !entries.any(|entry| secrets.is_secret(&entry.key)) {
        return Cow::Borrowed(request);
    }
    let mut kept = request.clone();
    for entry in kept.descriptors.iter_mut().flat_map(|descriptor| &mut descriptor.entries) {
        if secrets.is_secret(&entry.key) {
            entry.value = secret_digest(&entry.key, &entry.value);
        }
    }
    Cow::Owned(kept)
}

fn check_request(request: &RateLimitRequest) -> Result<(), Refusal> {
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
fn request_limits(
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

/// The checks of a request, and the statuses of its descriptors without the decision.
struct DescriptorChecks<'p> {
    /// By descriptor. Those with a check have a current limit.
    statuses: Vec<DescriptorStatus>,
    /// In the order of the descriptors that have one.
    checks: Vec<RoleCheck<'p, 'p>>,
}

impl<'p> DescriptorChecks<'p> {
    fn new(
        descriptors: &'p Descriptors,
        tenant: TenantIndex,
        (request, kept): (&RateLimitRequest, &'p RateLimitRequest),
        request_limits: &'p [Option<RequestLimit>],
        placement: &'p [u8],
    ) -> Result<Self, Refusal> {
        let count = request.descriptors.len();
        let mut all = Self { statuses: Vec::with_capacity(count), checks: Vec::with_capacity(count) };
        let mut replacing = Vec::new();
        for (at, (descriptor, kept_descriptor)) in
            request.descriptors.iter().zip(&kept.descriptors).enumerate()
        {
            if let Some(given) = request_limits.get(at).and_then(Option::as_ref) {
                let limit = limit("", given.requests_per_unit, given.unit);
                all.add(given.check(kept, kept_descriptor, placement), limit);
                continue;
            }
            let mut parts = Parts::new();
            parts.push(kept.domain.as_bytes());
            // The place of the unit, which is known when the rule is.
            parts.push(b"");
            let (entries, kept_entries) = (&descriptor.entries, &kept_descriptor.entries);
            let Some(rule) = descriptors.domains.find(&request.domain, entries, kept_entries, &mut parts)
            else {
                all.statuses.push(passed(0));
                continue;
            };
            if !rule.replaces.is_empty() {
                replacing.push(rule);
            }
            let Some(quota) = &rule.quota else {
                // The limit that applies is unlimited.
                all.statuses.push(passed(u32::MAX));
                continue;
            };
            // Each rule has a gate for every tenant there is.
            let Some(gate) = quota.gates.get(tenant) else { return Err(Refusal::NothingLoaded) };
            parts[1] = unit_part(quota.unit);
            let check = check_of_parts(gate, &parts).placed_by(placement);
            all.add(
                role_check(check, hits(request, descriptor), role(rule.mode, descriptor)),
                limit(&rule.name, quota.requests_per_unit, quota.unit),
            );
        }
        if !replacing.is_empty() {
            all.free(&replaced(replacing.into_iter()));
        }
        Ok(all)
    }

    fn add(&mut self, check: RoleCheck<'p, 'p>, limit: RateLimit) {
        self.checks.push(check);
        self.statuses.push(DescriptorStatus { current_limit: Some(limit), ..passed(0) });
    }

    /// Removes the checks of the limits that others replace.
    fn free(&mut self, replaced: &HashSet<&str>) {
        let statuses = self.statuses.iter_mut();
        let mut limited = statuses.filter(|status| status.current_limit.is_some());
        self.checks.retain(|_| {
            let limit = limited.next().map(|status| &mut status.current_limit);
            limit.and_then(|limit| limit.take_if(|limit| replaced.contains(limit.name.as_str()))).is_none()
        });
    }

    /// Returns the cost of a check, and the index of its descriptor.
    fn at(&self, check: usize) -> (u64, usize) {
        let limited = self.statuses.iter().enumerate().filter(|(_, status)| status.current_limit.is_some());
        let descriptor = limited.map(|(at, _)| at).nth(check);
        (self.checks.get(check).map_or(0, RoleCheck::cost), descriptor.unwrap_or_default())
    }

    fn response(self, shared: &Shared, decision: &RequestDecision<'_>) -> RateLimitResponse {
        let mut checked = self.checks.iter().enumerate();
        let with_outcome = |status: DescriptorStatus| {
            let Some(limit) = &status.current_limit else { return status };
            let Some((at, check)) = checked.next() else { return passed(0) };
            let Some(outcome) = decision.outcome_of(at) else { return passed(0) };
            let is_allowed =
                outcome.is_allowed() || matches!(check.role, CheckRole::Shadow | CheckRole::Refund);
            DescriptorStatus {
                code: code(is_allowed),
                limit_remaining: outcome.remaining(),
                duration_until_reset: Some(until_reset(limit.unit(), outcome)),
                ..status
            }
        };
        RateLimitResponse {
            overall_code: code(decision.is_allowed()),
            statuses: self.statuses.into_iter().map(with_outcome).collect(),
            response_headers_to_add: fields(shared, decision),
            ..RateLimitResponse::default()
        }
    }
}

/// Names the request in its record: by the cost and the index of the descriptor whose limit
/// decided, if any did.
fn subject(
    request: &RateLimitRequest,
    decided_by: Option<(u64, usize)>,
) -> RecordSubject<'_, impl Iterator<Item = (&str, &str)>> {
    let descriptor = decided_by.and_then(|(_, at)| request.descriptors.get(at));
    let entries = descriptor.into_iter().flat_map(|descriptor| &descriptor.entries);
    let entries = entries.map(|entry| (entry.key.as_str(), entry.value.as_str()));
    let mut key = RecordKey::default();
    entries.clone().for_each(|(name, value)| key.add(name, value));
    let domain = [("domain", request.domain.as_str())];
    RecordSubject::new(key, decided_by.map_or(0, |(cost, _)| cost), domain.into_iter().chain(entries))
}

/// A limit, as the status of its descriptor shows it.
fn limit(name: &str, requests_per_unit: u32, unit: Unit) -> RateLimit {
    RateLimit { name: name.to_owned(), requests_per_unit, unit: unit.into() }
}

impl RequestLimit {
    fn check<'p>(
        &'p self,
        request: &RateLimitRequest,
        descriptor: &RateLimitDescriptor,
        placement: &'p [u8],
    ) -> RoleCheck<'p, 'p> {
        let entries =
            descriptor.entries.iter().flat_map(|entry| [entry.key.as_bytes(), entry.value.as_bytes()]);
        let parts: Parts<'_> =
            [request.domain.as_bytes(), unit_part(self.unit)].into_iter().chain(entries).collect();
        let check = check_of_parts(&self.gate, &parts).placed_by(placement);
        role_check(check, hits(request, descriptor), role(Mode::Enforce, descriptor))
    }
}

/// A descriptor of no hits is denied if one more hit would be.
fn role_check<'p>(check: RegionCheck<'p, 'p>, hits: u64, role: CheckRole) -> RoleCheck<'p, 'p> {
    RoleCheck { check: check.cost(hits), role, is_probe: hits == 0, is_block: false, ends_us: None }
}

/// Returns the cost of a descriptor. Its own value prevails, and 0 only reads. In the request's
/// value, 0 means unset, so the cost is 1.
fn hits(request: &RateLimitRequest, descriptor: &RateLimitDescriptor) -> u64 {
    match &descriptor.hits_addend {
        Some(own) => own.value,
        None => u64::from(request.hits_addend).max(1),
    }
}

fn role(mode: Mode, descriptor: &RateLimitDescriptor) -> CheckRole {
    match mode {
        _ if descriptor.is_negative_hits => CheckRole::Refund,
        Mode::Enforce => CheckRole::Enforced,
        Mode::Quota => CheckRole::Quota,
        Mode::Shadow => CheckRole::Shadow,
        Mode::Always => CheckRole::Always,
    }
}

fn too_many(limits: usize) -> Refusal {
    Refusal::Wrong(format!(
        "descriptors: {limits} are under limits, at most {LIMITS_PER_CHECK_MAX} may be decided as one"
    ))
}

fn fields(shared: &Shared, decision: &RequestDecision<'_>) -> Vec<HeaderValue> {
    let field = |(name, value): (http::HeaderName, http::HeaderValue)| HeaderValue {
        key: name.as_str().to_owned(),
        value: value.to_str().unwrap_or_default().to_owned(),
        raw_value: Vec::new(),
    };
    let fields = headers(&decision.headline.decision, decision.wall_us, shared.protocol.reset);
    fields.into_iter().map(field).collect()
}

/// Returns the status of a descriptor without a check.
fn passed(limit_remaining: u32) -> DescriptorStatus {
    DescriptorStatus { code: code(true), limit_remaining, ..DescriptorStatus::default() }
}

/// Returns the time until reset in whole seconds, rounded up, as Envoy sends it to clients. For a
/// denial it is the time until the same request would pass, otherwise until the meter is empty. A
/// request that can never pass gets a whole unit, because 0 would invite a retry at once.
fn until_reset(unit: Unit, outcome: &Outcome<'_>) -> Duration {
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
fn shed_response(request: &RateLimitRequest) -> RateLimitResponse {
    RateLimitResponse {
        overall_code: code(true),
        statuses: vec![passed(0); request.descriptors.len()],
        ..RateLimitResponse::default()
    }
}
