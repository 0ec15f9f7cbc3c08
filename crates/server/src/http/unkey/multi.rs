//! `POST /v2/ratelimit.multiLimit`: several limits, all charged or none.

use serde::Serialize;
use tidegate::headers::set_headers;
use tidegate::{Decision, LIMITS_PER_CHECK_MAX};
use tidegate_rules::Class;
use utoipa::ToSchema;

use super::direct::{Gated, LimitRequest, Wanted, reset_ms};
use super::fields::{FieldError, Problems};
use super::{Envelope, ErrorEnvelope, Refusal, answered, body};
use crate::auth::Role;
use crate::http::{Answer, Asked, Problem};
use crate::load;
use crate::metrics::{Outcome, Rung, Surface};
use crate::rules::shed_outcome;

/// The most limits of one request: what Unkey allows, as far as one decision takes it.
const LIMITS_MAX: usize = if LIMITS_PER_CHECK_MAX < 100 { LIMITS_PER_CHECK_MAX } else { 100 };

/// What became of the request.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct MultiData<'r> {
    /// Whether every limit lets it pass. If not, none was charged.
    passed: bool,
    /// What each limit says, in the order of the request.
    limits: Vec<CheckData<'r>>,
}

/// What one limit says.
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
    /// Milliseconds since the Unix epoch. Of a denial: the first instant at which this limit would let the same
    /// request pass. Otherwise: when the whole limit is there again.
    reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    override_id: Option<&'r str>,
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
pub(in crate::http) fn answer(asked: &Asked<'_>) -> Result<Answer, Refusal> {
    let principal = asked.principal(Role::Client)?;
    let wanted = read(asked)?;
    let find = |wanted| Gated::find(asked.shared, principal.tenant, wanted);
    let gated = wanted.iter().map(find).collect::<Result<Vec<_>, Problem>>()?;
    let (class, metrics) = (Class::Comfort, &asked.shared.metrics);
    let wall_us = asked.shared.limiter.wall_us();
    if load::sheds(class) {
        metrics.decided(Surface::Direct, class, shed_outcome(class), Rung::Shed, 1);
        return Ok(answered(shed(&gated, wall_us)));
    }
    let asks: Vec<_> = gated.iter().map(Gated::ask).collect();
    let decision =
        asked.shared.limiter.check_all(&asks).map_err(|error| Problem::bad_request(error.to_string()))?;
    let outcome = if decision.is_allowed() { Outcome::Allowed } else { Outcome::Denied };
    metrics.decided(Surface::Direct, class, outcome, rung(&decision), 1);
    let mut answer = answered(told(&gated, &decision, wall_us));
    set_headers(answer.headers_mut(), &decision, wall_us, asked.shared.reset);
    Ok(answer)
}

fn read<'b>(asked: &'b Asked<'_>) -> Result<Vec<Wanted<'b>>, Refusal> {
    let requests = body::<Vec<LimitRequest<'b>>>(asked)?;
    if !(1..=LIMITS_MAX).contains(&requests.len()) {
        let message = format!("body: {} limits is outside 1 to {LIMITS_MAX}", requests.len());
        return Err(vec![FieldError::new("body", message)].into());
    }
    let mut problems = Problems::default();
    let mut wanted = Vec::with_capacity(requests.len());
    for (at, request) in requests.into_iter().enumerate() {
        problems.element = Some(at);
        wanted.push(request.checked(&mut problems));
    }
    if problems.errors.is_empty() { Ok(wanted) } else { Err(problems.errors.into()) }
}

/// What the decision rests on: the least that any of its limits does.
fn rung(decision: &Decision<'_>) -> Rung {
    let rungs = decision.outcomes().iter().map(|outcome| Rung::from(outcome.source()));
    rungs.max_by_key(|rung| *rung as usize).unwrap_or(Rung::Local)
}

fn told<'g>(gated: &'g [Gated<'_, '_>], decision: &Decision<'_>, wall_us: u64) -> MultiData<'g> {
    let limits = gated.iter().zip(decision.outcomes()).map(|(gated, outcome)| CheckData {
        namespace: &gated.wanted.namespace,
        identifier: &gated.wanted.identifier,
        passed: outcome.is_allowed(),
        limit: gated.limit(),
        remaining: outcome.remaining(),
        reset: reset_ms(outcome, wall_us),
        override_id: gated.override_id(),
    });
    MultiData { passed: decision.is_allowed(), limits: limits.collect() }
}

/// Checks pass when there is no time for them, as if nothing had been spent.
fn shed<'g>(gated: &'g [Gated<'_, '_>], wall_us: u64) -> MultiData<'g> {
    let limits = gated.iter().map(|gated| CheckData {
        namespace: &gated.wanted.namespace,
        identifier: &gated.wanted.identifier,
        passed: true,
        limit: gated.limit(),
        remaining: gated.limit(),
        reset: wall_us.div_ceil(1_000),
        override_id: gated.override_id(),
    });
    MultiData { passed: true, limits: limits.collect() }
}
