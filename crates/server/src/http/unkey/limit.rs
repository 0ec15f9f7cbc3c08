//! `POST /v2/ratelimit.limit`: one limit.

use serde::Serialize;
use tidegate::headers::set_outcome_headers;
use utoipa::ToSchema;

use super::direct::{LimitRequest, LimitStatus, ResolvedLimit, count, sheds};
use super::fields::Problems;
use super::{Envelope, ErrorEnvelope, Refusal, answered, object};
use crate::auth::Principal;
use crate::http::{HttpRequest, HttpResponse, Problem};

/// The decision on a request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct LimitData<'r> {
    /// Whether it may pass.
    success: bool,
    /// How much may pass in each window.
    limit: u32,
    /// How much more could pass now.
    remaining: u32,
    /// Milliseconds since the Unix epoch. For a denial: the first instant at which the same request
    /// would pass. Otherwise: the time at which the whole limit is available again.
    reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    override_id: Option<&'r str>,
}

impl<'r> From<LimitStatus<'r>> for LimitData<'r> {
    fn from(LimitStatus { passed, limit, remaining, reset_ms, override_id }: LimitStatus<'r>) -> Self {
        Self { success: passed, limit, remaining, reset: reset_ms, override_id }
    }
}

/// Checks a limit.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.limit",
    operation_id = "ratelimit.limit",
    request_body = LimitRequest<'static>,
    responses(
        (status = 200, description = "Decided; `success` says how", body = Envelope<LimitData<'static>>),
        (status = "4XX", description = "Not decided", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) async fn answer(
    req: &HttpRequest<'_>,
    principal: Principal,
) -> Result<HttpResponse, Refusal> {
    let mut problems = Problems::default();
    let wanted = object::<LimitRequest<'_>>(req)?.checked(&mut problems);
    let wanted = problems.or(wanted)?;
    let gated = ResolvedLimit::find(req.shared, principal.tenant, &wanted)?;
    let wall_us = req.shared.decider.limiter.wall_us();
    if sheds(req) {
        return Ok(answered(LimitData::from(gated.untouched(wall_us))));
    }
    let placement = gated.placement(req, principal.tenant);
    let decided = req.shared.decider.check(gated.region_check(&placement)).await;
    let (outcome, source) = decided.map_err(|error| Problem::bad_request(error.to_string()))?;
    count(req, principal.tenant, std::slice::from_ref(&gated), &[outcome], source);
    let mut answer = answered(LimitData::from(gated.decided(&outcome, wall_us)));
    set_outcome_headers(answer.headers_mut(), &outcome, wall_us, req.shared.reset);
    req.set_source_header(&mut answer, source);
    Ok(answer)
}
