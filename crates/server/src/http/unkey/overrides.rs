//! `POST /v2/ratelimit.setOverride`, `.getOverride`, `.deleteOverride` and `.listOverrides`.

use std::sync::Arc;

use ::http::header::RETRY_AFTER;
use ::http::{HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use tidegate_rules::overrides::Override;
use tidegate_rules::pattern::Pattern;
use utoipa::ToSchema;

use super::direct::{DURATION_MS_MIN, LIMIT_MAX};
use super::fields::{FieldValue, Problems};
use super::request_id::RequestId;
use super::{Envelope, ErrorEnvelope, Meta, Refusal, enveloped, object, written};
use crate::auth::Principal;
use crate::http::{HttpRequest, HttpResponse, Problem};
use crate::overrides::{OverrideError, new_id};

/// The longest window of an override: the longest that a limit may have, 366 days.
const DURATION_MS_MAX: u64 = 366 * 24 * 3_600 * 1_000;
/// The longest page of a list.
const PAGE_MAX: u64 = 100;
/// The default length of a page.
const PAGE_DEFAULT: u64 = 10;
/// The most `*` of one pattern: each may have to be tried at every place of an identifier, for
/// every check.
const STARS_MAX: usize = 4;
/// Retry time for a tenant with too many waiting writes, in seconds. A write takes milliseconds.
const BUSY_RETRY_S: HeaderValue = HeaderValue::from_static("1");
/// Prefix of a cursor, so that it never looks empty, regardless of the pattern that it continues
/// after.
const CURSOR_PREFIX: char = '>';

/// An override to set.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct SetOverrideRequest<'b> {
    /// Where it applies.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    namespace: Option<FieldValue<'b>>,
    /// The identifiers that it applies to; `*` matches any characters.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    identifier: Option<FieldValue<'b>>,
    /// How much may pass in each window; 0 blocks.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 0, maximum = 4_294_967_295u64, required = true)]
    limit: Option<FieldValue<'b>>,
    /// The window in milliseconds.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 1_000, maximum = 31_622_400_000u64, required = true)]
    duration: Option<FieldValue<'b>>,
}

/// Which override.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct OverrideRequest<'b> {
    /// Where it applies.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    namespace: Option<FieldValue<'b>>,
    /// Its pattern, as it was set.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    identifier: Option<FieldValue<'b>>,
}

/// Which overrides.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct ListOverridesRequest<'b> {
    /// Where they apply.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    namespace: Option<FieldValue<'b>>,
    /// The cursor in the response with the previous page.
    #[serde(borrow)]
    #[schema(value_type = String, required = false)]
    cursor: Option<FieldValue<'b>>,
    /// The most overrides of the page.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 1, maximum = 100, default = 10, required = false)]
    limit: Option<FieldValue<'b>>,
}

/// The override that was set.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct SetOverrideData {
    /// Stays the same when the override is set again.
    override_id: String,
}

/// An override.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(in crate::http) struct OverrideData {
    override_id: String,
    /// The identifiers that it applies to; `*` matches any characters.
    identifier: String,
    /// How much may pass in each window; 0 blocks.
    limit: u32,
    /// The window in milliseconds.
    duration: u64,
}

/// An empty object.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct EmptyData {}

/// A page of overrides.
#[derive(Debug, Serialize, ToSchema)]
pub(in crate::http) struct OverrideList {
    meta: Meta,
    /// In the order of their identifiers.
    data: Vec<OverrideData>,
    pagination: Pagination,
}

/// The position after a page.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
struct Pagination {
    /// The cursor of the next page, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    cursor: Option<String>,
    /// Whether there is one.
    has_more: bool,
}

impl From<&Override> for OverrideData {
    fn from(of: &Override) -> Self {
        Self {
            override_id: of.id.clone(),
            identifier: of.identifier.as_str().to_owned(),
            limit: of.limit,
            duration: of.duration_ms,
        }
    }
}

/// Sets an override, in place of the one with the same identifier.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.setOverride",
    operation_id = "ratelimit.setOverride",
    request_body = SetOverrideRequest<'static>,
    responses(
        (status = 200, description = "Kept, and in force", body = Envelope<SetOverrideData>),
        (status = "4XX", description = "Not kept", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) async fn set(
    req: &HttpRequest<'_>,
    principal: Principal,
) -> Result<HttpResponse, Refusal> {
    let new = object::<SetOverrideRequest<'_>>(req)?.checked()?;
    let now_ms = req.shared.decider.limiter.wall_us() / 1_000;
    let kept = req.shared.direct.overrides.set(principal.tenant, new, now_ms).await;
    Ok(done(kept, |override_id| Ok(enveloped(SetOverrideData { override_id }))))
}

impl SetOverrideRequest<'_> {
    /// The override, in range and with an id of its own.
    fn checked(self) -> Result<Override, Refusal> {
        let mut problems = Problems::default();
        let namespace = problems.text("namespace", self.namespace).into_owned();
        let identifier = Pattern::new(problems.text("identifier", self.identifier));
        let stars = identifier.as_str().matches('*').count();
        if stars > STARS_MAX {
            problems.add("identifier", format_args!("{stars} of `*` is outside 0 to {STARS_MAX}"));
        }
        let limit = problems.number("limit", self.limit, 0, LIMIT_MAX);
        let limit = u32::try_from(limit).unwrap_or(u32::MAX);
        let duration_ms = problems.number("duration", self.duration, DURATION_MS_MIN, DURATION_MS_MAX);
        let (namespace, identifier) = problems.or((namespace, identifier))?;
        let id = new_id().map_err(|problem| Problem::new(StatusCode::INTERNAL_SERVER_ERROR, problem))?;
        Ok(Override { id, namespace, identifier, limit, duration_ms })
    }
}

/// Returns an override.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.getOverride",
    operation_id = "ratelimit.getOverride",
    request_body = OverrideRequest<'static>,
    responses(
        (status = 200, description = "The override", body = Envelope<OverrideData>),
        (status = "4XX", description = "There is none, or the request was refused", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) fn get(req: &HttpRequest<'_>, principal: Principal) -> Result<HttpResponse, Refusal> {
    let (namespace, pattern) = which(req)?;
    match req.shared.direct.overrides.of(principal.tenant).get(&namespace, &pattern) {
        Some(found) => Ok(enveloped(OverrideData::from(&*found))),
        None => Err(not_found(&namespace, &pattern).into()),
    }
}

/// Forgets an override.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.deleteOverride",
    operation_id = "ratelimit.deleteOverride",
    request_body = OverrideRequest<'static>,
    responses(
        (status = 200, description = "Forgotten, and not in force any more", body = Envelope<EmptyData>),
        (status = "4XX", description = "There is none, or the request was refused", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) async fn delete(
    req: &HttpRequest<'_>,
    principal: Principal,
) -> Result<HttpResponse, Refusal> {
    let (namespace, pattern) = which(req)?;
    let deleted =
        req.shared.direct.overrides.delete(principal.tenant, namespace.clone(), pattern.clone()).await;
    Ok(done(deleted, |was_there| {
        if was_there { Ok(enveloped(EmptyData {})) } else { Err(not_found(&namespace, &pattern)) }
    }))
}

/// Lists the overrides of a namespace, page by page.
#[utoipa::path(
    post,
    path = "/v2/ratelimit.listOverrides",
    operation_id = "ratelimit.listOverrides",
    request_body = ListOverridesRequest<'static>,
    responses(
        (status = 200, description = "A page", body = OverrideList),
        (status = "4XX", description = "The request was refused", body = ErrorEnvelope<'static>),
    )
)]
pub(in crate::http) fn list(req: &HttpRequest<'_>, principal: Principal) -> Result<HttpResponse, Refusal> {
    let request: ListOverridesRequest<'_> = object(req)?;
    let mut problems = Problems::default();
    let namespace = problems.text("namespace", request.namespace);
    let after = continued(&mut problems, request.cursor);
    let most = problems.number("limit", request.limit.or(Some(FieldValue::Whole(PAGE_DEFAULT))), 1, PAGE_MAX);
    let (namespace, after) = problems.or((namespace, after))?;
    let most = usize::try_from(most).unwrap_or(usize::MAX);
    // One more than requested shows whether there are more.
    let overrides = req.shared.direct.overrides.of(principal.tenant);
    let found = overrides.list(&namespace, after.as_deref(), most.saturating_add(1));
    Ok(written(&page(&found, most)))
}

fn which(req: &HttpRequest<'_>) -> Result<(String, String), Refusal> {
    let request: OverrideRequest<'_> = object(req)?;
    let mut problems = Problems::default();
    let namespace = problems.text("namespace", request.namespace).into_owned();
    let pattern = problems.text("identifier", request.identifier).into_owned();
    Ok(problems.or((namespace, pattern))?)
}

/// Returns the pattern after which a page begins. An empty cursor counts as missing.
fn continued(problems: &mut Problems, cursor: Option<FieldValue<'_>>) -> Option<String> {
    match cursor {
        None => return None,
        Some(FieldValue::Text(cursor)) if cursor.is_empty() => return None,
        Some(FieldValue::Text(cursor)) => {
            if let Some(after) = cursor.strip_prefix(CURSOR_PREFIX) {
                return Some(after.to_owned());
            }
        }
        Some(_) => {}
    }
    problems.add("cursor", "not one that an answer had in `pagination.cursor`");
    None
}

fn page(found: &[Arc<Override>], most: usize) -> OverrideList {
    let has_more = found.len() > most;
    let found = found.get(..most).unwrap_or(found);
    let last = found.last().filter(|_| has_more);
    let cursor = last.map(|last| format!("{CURSOR_PREFIX}{}", last.identifier.as_str()));
    OverrideList {
        meta: Meta { request_id: RequestId::next() },
        data: found.iter().map(|of| OverrideData::from(&**of)).collect(),
        pagination: Pagination { cursor, has_more },
    }
}

fn done<T>(
    result: Result<T, OverrideError>,
    respond: impl FnOnce(T) -> Result<HttpResponse, Problem>,
) -> HttpResponse {
    let response = result.map_err(|reason| problem(&reason)).and_then(respond);
    response.unwrap_or_else(|problem| Refusal::from(problem).into())
}

fn problem(reason: &OverrideError) -> Problem {
    match reason {
        OverrideError::Full(full) => Problem::bad_request(full.to_string()),
        OverrideError::Busy => Problem::new(StatusCode::TOO_MANY_REQUESTS, reason.to_string())
            .with_field(RETRY_AFTER, BUSY_RETRY_S),
        OverrideError::Stopping => Problem::new(StatusCode::SERVICE_UNAVAILABLE, reason.to_string()),
        OverrideError::Store(error) => {
            tracing::error!(%error, "an override was not written");
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "store: failed; nothing was changed")
        }
    }
}

fn not_found(namespace: &str, pattern: &str) -> Problem {
    let detail = format!("identifier: there is no override for {pattern:?} in the namespace {namespace:?}");
    Problem::new(StatusCode::NOT_FOUND, detail)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::BodyExt;
    use serde_json::{Value, json};

    /// Returns the response to a failed write: the status, the retry time and the error.
    async fn refused(reason: OverrideError) -> (u16, Option<HeaderValue>, Value) {
        let answer = done(Err::<(), _>(reason), |()| Ok(enveloped(EmptyData {})));
        let (parts, body) = answer.into_parts();
        let body = body.collect().await.expect("it is there").to_bytes();
        let mut body: Value = serde_json::from_slice(&body).expect("JSON");
        assert!(body["meta"]["requestId"].is_string(), "{body}");
        (parts.status.as_u16(), parts.headers.get(RETRY_AFTER).cloned(), body["error"].take())
    }

    #[tokio::test]
    async fn tenant_with_too_many_pending_writes_gets_retry_after() {
        let error = json!({
            "title": "Too Many Requests",
            "detail": "overrides: 128 writes of this tenant wait already, the most that may",
            "status": 429,
            "type": "about:blank",
        });
        assert_eq!(refused(OverrideError::Busy).await, (429, Some(BUSY_RETRY_S), error));
    }

    #[tokio::test]
    async fn a_server_that_stops_writes_no_more() {
        let (status, _, error) = refused(OverrideError::Stopping).await;
        assert_eq!((status, &error["detail"]), (503, &json!("overrides: the server is stopping")));
    }
}
