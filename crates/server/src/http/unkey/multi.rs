//! `POST /v2/ratelimit.multiLimit`: several limits, all charged or none.

use serde::Serialize;
use tidegate::LIMITS_PER_CHECK_MAX;
use tidegate_rules::RuleSet;
use utoipa::ToSchema;

use super::direct::{DirectLimit, LimitRequest, decide, wall_us};
use super::fields::{FieldError, Problems};
use super::limit::LimitData;
use super::{Envelope, ErrorEnvelope, Refusal, body, enveloped};
use crate::auth::{Principal, TenantIndex};
use crate::http::object::Object;
use crate::http::{HttpRequest, HttpResponse};
use crate::pipeline::RequestDecision;

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
    fn new(of: &'r DirectLimit<'_, '_>, status: &LimitData<'r>) -> Self {
        let LimitData { success: passed, limit, remaining, reset, override_id } = *status;
        Self {
            namespace: &of.namespace,
            identifier: &of.identifier,
            passed,
            limit,
            remaining,
            reset,
            override_id,
        }
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
    let rules = req.shared.rules.load();
    let limits = read(req, (rules.set(), req.shared.now_ms()), principal.tenant)?;
    let first = limits.first().ok_or_else(|| outside(0))?;
    let decision = decide(req, principal.tenant, first, &limits).await?;
    let wall_us = wall_us(req, decision.as_ref());
    let outcome = |at: usize| decision.as_ref().and_then(|decision| decision.outcome_of(at));
    let statuses = limits.iter().enumerate();
    let statuses = statuses.map(|(at, limit)| CheckData::new(limit, &limit.status(outcome(at), wall_us)));
    let passed = decision.as_ref().is_none_or(RequestDecision::is_allowed);
    let mut answer = enveloped(MultiData { passed, limits: statuses.collect() });
    if let Some(decision) = &decision {
        req.set_decision_headers(&mut answer, decision);
    }
    Ok(answer)
}

fn read<'b, 'r>(
    req: &'b HttpRequest<'_>,
    in_force: (&'r RuleSet, u64),
    tenant: TenantIndex,
) -> Result<Vec<DirectLimit<'b, 'r>>, Refusal> {
    let requests = body::<Vec<Object<LimitRequest<'b>>>>(req)?;
    if requests.len() > LIMITS_MAX {
        return Err(outside(requests.len()));
    }
    let mut problems = Problems::default();
    let mut fields = Vec::with_capacity(requests.len());
    for (at, Object(request)) in requests.into_iter().enumerate() {
        problems.element = Some(at);
        fields.push(request.read(&mut problems));
    }
    let limits = problems.or(fields)?.into_iter();
    let limits = limits.map(|fields| fields.resolve(req.shared, in_force, tenant));
    Ok(limits.collect::<Result<_, _>>()?)
}

/// The problem of a request with too few or too many limits.
fn outside(count: usize) -> Refusal {
    vec![FieldError::new("body", format!("body: {count} limits is outside 1 to {LIMITS_MAX}"))].into()
}
