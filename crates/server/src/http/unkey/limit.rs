//! `POST /v2/ratelimit.limit`: one limit.

use serde::Serialize;
use tidegate::headers::set_outcome_headers;
use tidegate_rules::Class;
use utoipa::ToSchema;

use super::direct::{Gated, LimitRequest, reset_ms};
use super::fields::Problems;
use super::{Envelope, ErrorEnvelope, Refusal, answered, body};
use crate::auth::Role;
use crate::http::{Answer, Asked};
use crate::load;
use crate::metrics::{Outcome, Rung, Surface};
use crate::rules::shed_outcome;

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
pub(in crate::http) fn answer(asked: &Asked<'_>) -> Result<Answer, Refusal> {
    let principal = asked.principal(Role::Client)?;
    let mut problems = Problems::default();
    let wanted = body::<LimitRequest<'_>>(asked)?.checked(&mut problems);
    if !problems.errors.is_empty() {
        return Err(problems.errors.into());
    }
    let gated = Gated::find(asked.shared, principal.tenant, &wanted)?;
    let class = Class::Comfort;
    let metrics = &asked.shared.metrics;
    let wall_us = asked.shared.limiter.wall_us();
    if load::sheds(class) {
        metrics.decided(Surface::Direct, class, shed_outcome(class), Rung::Shed, 1);
        return Ok(answered(shed(&gated, wall_us)));
    }
    let outcome = asked.shared.limiter.check(gated.ask());
    let decided = if outcome.is_allowed() { Outcome::Allowed } else { Outcome::Denied };
    metrics.decided(Surface::Direct, class, decided, Rung::from(outcome.source()), 1);
    let mut answer = answered(LimitData {
        success: outcome.is_allowed(),
        limit: gated.limit(),
        remaining: outcome.remaining(),
        reset: reset_ms(&outcome, wall_us),
        override_id: gated.override_id(),
    });
    set_outcome_headers(answer.headers_mut(), &outcome, wall_us, asked.shared.reset);
    Ok(answer)
}

/// Checks pass when there is no time for them, as if nothing had been spent.
fn shed<'g>(gated: &'g Gated<'_, '_>, wall_us: u64) -> LimitData<'g> {
    LimitData {
        success: true,
        limit: gated.limit(),
        remaining: gated.limit(),
        reset: wall_us.div_ceil(1_000),
        override_id: gated.override_id(),
    }
}
