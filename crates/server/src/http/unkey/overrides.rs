//! `POST /v2/ratelimit.setOverride`, `.getOverride`, `.deleteOverride` and `.listOverrides`.

use ::http::header::RETRY_AFTER;
use ::http::{HeaderValue, StatusCode};
use serde::{Deserialize, Serialize};
use tidegate_control::OverrideWriteError;
use tidegate_rules::store::{OverrideLimit, OverrideOutcome, OverrideWrite, StoreError};
use tidegate_rules::{NamespaceOverride, OVERRIDE_PERIOD_MS_MAX, OVERRIDE_PERIOD_MS_MIN, check_stars};
use utoipa::ToSchema;

use super::direct::LIMIT_MAX;
use super::fields::{FieldValue, Problems};
use super::request_id::RequestId;
use super::{Envelope, ErrorEnvelope, Meta, Refusal, enveloped, object, written};
use crate::auth::Principal;
use crate::http::{HttpRequest, HttpResponse, Problem};
use crate::overrides::OverrideError;

/// The longest page of a list.
const PAGE_MAX: u64 = 100;
/// The default length of a page.
const PAGE_DEFAULT: u64 = 10;
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
    /// `fleet`: on every server of the rule store. `server`: on this server only.
    scope: &'static str,
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
    /// `fleet`: on every server of the rule store. `server`: on this server only.
    scope: &'static str,
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

impl OverrideData {
    fn new(of: &NamespaceOverride<'_>, scope: &'static str) -> Self {
        Self {
            override_id: of.name.to_owned(),
            identifier: of.identifier.to_owned(),
            limit: of.limit,
            duration: of.period_ms,
            scope,
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
    let scope = scope(req);
    let written = write(req, principal, (new.namespace, new.identifier), Some(new.limit)).await?;
    Ok(done(written, |outcome| match outcome {
        OverrideOutcome::Set { name: override_id, .. } => {
            Ok(enveloped(SetOverrideData { override_id, scope }))
        }
        other => Err(refused(&other)),
    }))
}

/// Writes an override of the caller's tenant.
async fn write(
    req: &HttpRequest<'_>,
    principal: Principal,
    (namespace, identifier): (String, String),
    limit: Option<OverrideLimit>,
) -> Result<Result<OverrideOutcome, OverrideError>, Refusal> {
    let (tenant, by) = (req.shared.tenant(principal.tenant).name.clone(), req.actor()?);
    let write = OverrideWrite { tenant, namespace, identifier, limit, by, now_ms: req.shared.now_ms() };
    Ok(req.shared.direct.overrides.write(principal.tenant, write).await)
}

/// The fields of an override to set, in range.
struct CheckedOverride {
    namespace: String,
    identifier: String,
    limit: OverrideLimit,
}

impl SetOverrideRequest<'_> {
    fn checked(self) -> Result<CheckedOverride, Refusal> {
        let mut problems = Problems::default();
        let namespace = problems.text("namespace", self.namespace).into_owned();
        let identifier = problems.text("identifier", self.identifier).into_owned();
        if let Err(problem) = check_stars(&identifier) {
            problems.add("identifier", problem);
        }
        let amount = problems.number("limit", self.limit, 0, LIMIT_MAX);
        let amount = u32::try_from(amount).unwrap_or(u32::MAX);
        let period_ms =
            problems.number("duration", self.duration, OVERRIDE_PERIOD_MS_MIN, OVERRIDE_PERIOD_MS_MAX);
        let limit = OverrideLimit { amount, period_ms };
        Ok(problems.or(CheckedOverride { namespace, identifier, limit })?)
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
    let rules = req.shared.rules.load();
    let tenant = &req.shared.tenant(principal.tenant).name;
    match rules.set().namespace_override_named(tenant, &namespace, &pattern, req.shared.now_ms()) {
        Some(found) => Ok(enveloped(OverrideData::new(&found, scope(req)))),
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
    let written = write(req, principal, (namespace.clone(), pattern.clone()), None).await?;
    Ok(done(written, |outcome| match outcome {
        OverrideOutcome::Deleted => Ok(enveloped(EmptyData {})),
        OverrideOutcome::NotThere => Err(not_deleted(req, principal, &namespace, &pattern)),
        other => Err(refused(&other)),
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
    let (rules, tenant) = (req.shared.rules.load(), &req.shared.tenant(principal.tenant).name);
    let page_of = (after.as_deref(), most.saturating_add(1));
    let found = rules.set().list_namespace_overrides(tenant, &namespace, page_of, req.shared.now_ms());
    Ok(written(&page(&found, most, scope(req))))
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

/// Where the overrides of this server apply.
fn scope(req: &HttpRequest<'_>) -> &'static str {
    req.shared.direct.overrides.scope().as_str()
}

fn page(found: &[NamespaceOverride<'_>], most: usize, scope: &'static str) -> OverrideList {
    let has_more = found.len() > most;
    let found = found.get(..most).unwrap_or(found);
    let last = found.last().filter(|_| has_more);
    let cursor = last.map(|last| format!("{CURSOR_PREFIX}{}", last.identifier));
    OverrideList {
        meta: Meta { request_id: RequestId::next() },
        data: found.iter().map(|of| OverrideData::new(of, scope)).collect(),
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
    let retry_later = |status| Problem::new(status, reason.to_string()).with_field(RETRY_AFTER, BUSY_RETRY_S);
    match reason {
        OverrideError::Full => Problem::bad_request(reason.to_string()),
        OverrideError::Busy => retry_later(StatusCode::TOO_MANY_REQUESTS),
        OverrideError::Unreached => retry_later(StatusCode::SERVICE_UNAVAILABLE),
        OverrideError::Stopping => Problem::new(StatusCode::SERVICE_UNAVAILABLE, reason.to_string()),
        OverrideError::Store(error) => {
            tracing::error!(%error, "an override was not written, or is not in force");
            match &**error {
                OverrideWriteError::NotInForce(_) => retry_later(StatusCode::SERVICE_UNAVAILABLE),
                OverrideWriteError::Store(StoreError::Busy | StoreError::Unreachable(_)) => {
                    let detail = "store: busy or unreachable; try again";
                    Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail)
                        .with_field(RETRY_AFTER, BUSY_RETRY_S)
                }
                OverrideWriteError::Store(_) => {
                    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "store: failed; nothing was changed")
                }
            }
        }
    }
}

/// The problem of a write that the store refused.
fn refused(outcome: &OverrideOutcome) -> Problem {
    match outcome {
        OverrideOutcome::Full(quota) => Problem::bad_request(quota.to_string()),
        OverrideOutcome::NameTaken(name) => {
            let detail =
                format!("overrides: another override of the rule store is named {name:?}: rename it");
            Problem::bad_request(detail)
        }
        // These are outcomes of the other kind of write.
        OverrideOutcome::Set { .. } | OverrideOutcome::Deleted | OverrideOutcome::NotThere => {
            Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "store: failed; nothing was changed")
        }
    }
}

/// The problem of a deletion of an override that the tenant has not set.
fn not_deleted(req: &HttpRequest<'_>, principal: Principal, namespace: &str, pattern: &str) -> Problem {
    let (rules, tenant) = (req.shared.rules.load(), &req.shared.tenant(principal.tenant).name);
    match rules.set().namespace_override_named(tenant, namespace, pattern, req.shared.now_ms()) {
        None => not_found(namespace, pattern),
        Some(found) => Problem::bad_request(format!(
            "identifier: the override {:?} is one of the rules, which only their author can delete",
            found.name
        )),
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
