//! `POST /v2/ratelimit.limit`: one limit.

use std::slice;

use serde::Serialize;
use utoipa::ToSchema;

use super::direct::{LimitRequest, LimitSearch, decide, wall_us};
use super::fields::Problems;
use super::{Envelope, ErrorEnvelope, Refusal, enveloped, object};
use crate::auth::Principal;
use crate::http::{HttpRequest, HttpResponse};

/// The decision on a request.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct LimitData<'r> {
    /// Whether it may pass.
    pub(super) success: bool,
    /// How much may pass in each window.
    pub(super) limit: u32,
    /// How much more could pass now.
    pub(super) remaining: u32,
    /// Milliseconds since the Unix epoch. For a denial: the first instant at which the same request
    /// would pass. Otherwise: the time at which the whole limit is available again.
    pub(super) reset: u64,
    /// The override that applied, if one did.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) override_id: Option<&'r str>,
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
    let (rules, mut problems) = (req.shared.rules.load(), Problems::default());
    let fields = object::<LimitRequest<'_>>(req)?.read(&mut problems);
    let fields = problems.or(fields)?;
    let mut search = LimitSearch::new(req, principal.tenant, rules.set(), &fields);
    let limit = search.limit(fields).await?;
    let decision = decide(search.admission, &limit, slice::from_ref(&limit)).await?;
    let outcome = decision.as_ref().and_then(|decision| decision.outcome_of(0));
    let mut answer = enveloped(limit.status(outcome, wall_us(req, decision.as_ref())));
    if let Some(decision) = &decision {
        req.set_decision_headers(&mut answer, decision);
    }
    Ok(answer)
}
