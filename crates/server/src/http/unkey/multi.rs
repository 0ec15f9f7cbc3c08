//! `POST /v2/ratelimit.multiLimit`: several limits, all charged or none.

use serde::Serialize;
use tidegate::LIMITS_PER_CHECK_MAX;
use utoipa::ToSchema;

use super::direct::{LimitRequest, LimitStatus, ResolvedLimit, ValidLimitRequest, count, sheds};
use super::fields::{FieldError, Problems};
use super::{Envelope, ErrorEnvelope, Refusal, answered, body};
use crate::auth::Principal;
use crate::decider::SourcedDecision;
use crate::http::object::Object;
use crate::http::{HttpRequest, HttpResponse, Problem};

/// Largest number of limits in one request: Unkey's maximum, if one decision allows as many.
const LIMITS_MAX: usize = if LIMITS_PER_CHECK_MAX < 100 { LIMITS_PER_CHECK_MAX } else { 100 };

/// The decision on a request.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct MultiData<'r> {
    /// Whether every limit lets the request pass. If not, none is charged.
    passed: bool,
    /// The status of each limit, in the order of the request.
    limits: Vec<CheckData<'r>>,
}

/// The status of one limit.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct CheckData<'r> {
    namespace: &'r str,
    identifier: &'r str,
    /// Whether this limit lets the request pass.
    passed: bool,
    /// How much may pass in each window.
    limit: u32,
    /// How much more could pass now.
    remaining: u32,
    /// Milliseconds since the Unix epoch. For a denial: the first instant at which this limit would
    /// let the same request pass. Otherwise: the time at which the whole limit is available again.
    reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    override_id: Option<&'r str>,
}

impl<'r> CheckData<'r> {
    fn new(wanted: &'r ValidLimitRequest<'_>, standing: LimitStatus<'r>) -> Self {
        let LimitStatus { passed, limit, remaining, reset_ms, override_id } = standing;
        let (namespace, identifier) = (&wanted.namespace, &wanted.identifier);
        Self { namespace, identifier, passed, limit, remaining, reset: reset_ms, override_id }
    }
}

/// Checks several limits as one.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.multiLimit",
    operation_id = "ratelimit.multiLimit",
    request_body = Vec<LimitRequest<'static>>,
    responses(
        (status = 200, description = "Decided; `passed` says how", body = Envelope<MultiData<'static>>),
        (status = "4XX", description = "Not decided", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) async fn answer(
    req: &HttpRequest<'_>,
    principal: Principal,
) -> Result<HttpResponse, Refusal> {
    let wanted = read(req)?;
    let find = |wanted| ResolvedLimit::find(req.shared, principal.tenant, wanted);
    let gated = wanted.iter().map(find).collect::<Result<Vec<_>, Problem>>()?;
    let wall_us = req.shared.decider.limiter.wall_us();
    if sheds(req) {
        let limits = gated.iter().map(|gated| CheckData::new(gated.wanted, gated.untouched(wall_us)));
        return Ok(answered(MultiData { passed: true, limits: limits.collect() }));
    }
    let placements: Vec<_> = gated.iter().map(|gated| gated.placement(req, principal.tenant)).collect();
    let questions: Vec<_> =
        gated.iter().zip(&placements).map(|(gated, placement)| gated.region_check(placement)).collect();
    let decided = req.shared.decider.check_all(&questions).await;
    let SourcedDecision { decision, source, .. } =
        decided.map_err(|error| Problem::bad_request(error.to_string()))?;
    count(req, principal.tenant, &gated, decision.outcomes(), source);
    let limits = gated
        .iter()
        .zip(decision.outcomes())
        .map(|(gated, outcome)| CheckData::new(gated.wanted, gated.decided(outcome, wall_us)));
    let mut answer = answered(MultiData { passed: decision.is_allowed(), limits: limits.collect() });
    req.set_decision_headers(&mut answer, &decision, source);
    Ok(answer)
}

fn read<'b>(req: &'b HttpRequest<'_>) -> Result<Vec<ValidLimitRequest<'b>>, Refusal> {
    let requests = body::<Vec<Object<LimitRequest<'b>>>>(req)?;
    if !(1..=LIMITS_MAX).contains(&requests.len()) {
        let message = format!("body: {} limits is outside 1 to {LIMITS_MAX}", requests.len());
        return Err(vec![FieldError::new("body", message)].into());
    }
    let mut problems = Problems::default();
    let mut wanted = Vec::with_capacity(requests.len());
    for (at, Object(request)) in requests.into_iter().enumerate() {
        problems.element = Some(at);
        wanted.push(request.checked(&mut problems));
    }
    Ok(problems.or(wanted)?)
}
