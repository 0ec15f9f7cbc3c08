//! `POST /v2/ratelimit.limit`: one limit.

use serde::Serialize;
use tidegate::headers::set_outcome_headers;
use utoipa::ToSchema;

use super::direct::{Gated, LimitRequest, Standing, count, sheds};
use super::fields::Problems;
use super::{Envelope, ErrorEnvelope, Refusal, answered, object};
use crate::auth::Principal;
use crate::http::{Answer, Asked, Problem};

/// What became of the request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct LimitData<'r> {
    /// Whether it may pass.
    success: bool,
    /// How much may pass in each window.
    limit: u32,
    /// How much more could pass now.
    remaining: u32,
    /// Milliseconds since the Unix epoch. Of a denial: the first instant at which the same request would pass.
    /// Otherwise: when the whole limit is there again.
    reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    override_id: Option<&'r str>,
}

impl<'r> From<Standing<'r>> for LimitData<'r> {
    fn from(Standing { passed, limit, remaining, reset_ms, override_id }: Standing<'r>) -> Self {
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
pub(in crate::http) async fn answer(asked: &Asked<'_>, principal: Principal) -> Result<Answer, Refusal> {
    let mut problems = Problems::default();
    let wanted = object::<LimitRequest<'_>>(asked)?.checked(&mut problems);
    let wanted = problems.or(wanted)?;
    let gated = Gated::find(asked.shared, principal.tenant, &wanted)?;
    let wall_us = asked.shared.decider.limiter.wall_us();
    if sheds(asked) {
        return Ok(answered(LimitData::from(gated.untouched(wall_us))));
    }
    let placement = gated.placement(asked, principal.tenant);
    let decided = asked.shared.decider.check(gated.question(&placement)).await;
    let (outcome, rung) = decided.map_err(|error| Problem::bad_request(error.to_string()))?;
    count(asked, principal.tenant, std::slice::from_ref(&gated), &[outcome], rung);
    let mut answer = answered(LimitData::from(gated.decided(&outcome, wall_us)));
    set_outcome_headers(answer.headers_mut(), &outcome, wall_us, asked.shared.reset);
    asked.tell_rung(&mut answer, rung);
    Ok(answer)
}
