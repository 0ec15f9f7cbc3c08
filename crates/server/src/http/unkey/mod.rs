//! Unkey's HTTP API: limits in the request, and overrides of them. It accepts only `POST` and JSON.
//! Every response has an envelope with the id of the request. A denial has status 200, and
//! `success` is false.

pub(super) mod direct;
mod fields;
pub(super) mod limit;
pub(super) mod multi;
pub(super) mod overrides;
mod request_id;

use ::http::{Method, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

use super::browser::{refuse_body_type, refuse_foreign_host, refuse_foreign_origin};
use super::object::Object;
use super::{HttpRequest, HttpResponse, Problem, read_json, text, timed};
use crate::auth::Role;
use crate::metrics::Surface;

use self::fields::FieldError;
use self::request_id::RequestId;

/// The prefix of all paths of the API.
pub(super) const PREFIX: &str = "/v2/";

/// The metadata of every response.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    /// Unique to the request.
    #[schema(value_type = String)]
    request_id: RequestId,
}

/// A successful response.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Envelope<T> {
    meta: Meta,
    data: T,
}

/// The response to a request that failed.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorEnvelope<'e> {
    meta: Meta,
    error: ErrorBody<'e>,
}

/// The problem of the request, in the format of RFC 9457.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorBody<'e> {
    title: &'e str,
    detail: &'e str,
    status: u16,
    r#type: &'static str,
    /// Each problem of a request that makes no sense; with status 400 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<&'e [FieldError]>,
}

/// The reason why a request failed.
#[derive(Debug)]
pub(super) struct Refusal {
    /// Boxed: refusals are rare, and every decision would carry the room for one.
    problem: Box<Problem>,
    errors: Vec<FieldError>,
}

impl From<Problem> for Refusal {
    fn from(problem: Problem) -> Self {
        let mut errors = Vec::new();
        if problem.status == StatusCode::BAD_REQUEST {
            errors.push(FieldError::new("body", problem.detail.as_str()));
        }
        Self { problem: Box::new(problem), errors }
    }
}

impl From<Vec<FieldError>> for Refusal {
    fn from(errors: Vec<FieldError>) -> Self {
        let messages: Vec<&str> = errors.iter().map(|error| error.message.as_str()).collect();
        Self { problem: Box::new(Problem::bad_request(messages.join("; "))), errors }
    }
}

impl From<Refusal> for HttpResponse {
    fn from(refusal: Refusal) -> Self {
        let Refusal { problem, errors } = refusal;
        let status = problem.status;
        let body = ErrorEnvelope {
            meta: Meta { request_id: RequestId::next() },
            error: ErrorBody {
                title: status.canonical_reason().unwrap_or("Error"),
                detail: &problem.detail,
                status: status.as_u16(),
                r#type: "about:blank",
                errors: (status == StatusCode::BAD_REQUEST).then_some(&errors),
            },
        };
        let body = serde_json::to_vec(&body).unwrap_or_default();
        problem.answer_with("application/json", body)
    }
}

/// A request that is refused before it is read.
pub(super) fn refuse(problem: Problem) -> HttpResponse {
    Refusal::from(problem).into()
}

/// The endpoints of the API.
#[derive(Clone, Copy)]
enum Endpoint {
    Limit,
    MultiLimit,
    GetOverride,
    ListOverrides,
    SetOverride,
    DeleteOverride,
}

impl Endpoint {
    fn at(path: &str) -> Option<Self> {
        Some(match path.strip_prefix(PREFIX)?.strip_prefix("ratelimit.")? {
            "limit" => Self::Limit,
            "multiLimit" => Self::MultiLimit,
            "getOverride" => Self::GetOverride,
            "listOverrides" => Self::ListOverrides,
            "setOverride" => Self::SetOverride,
            "deleteOverride" => Self::DeleteOverride,
            _ => return None,
        })
    }

    /// Returns the required role: clients get decisions, viewers read overrides, operators change
    /// them.
    fn role(self) -> Role {
        match self {
            Self::Limit | Self::MultiLimit => Role::Client,
            Self::GetOverride | Self::ListOverrides => Role::Viewer,
            Self::SetOverride | Self::DeleteOverride => Role::Operator,
        }
    }

    async fn answer(self, req: &HttpRequest<'_>) -> Result<HttpResponse, Refusal> {
        let principal = req.principal(self.role())?;
        if self.role() == Role::Operator && req.shared.credentials.load().is_open() {
            refuse_foreign_host(req)?;
            refuse_foreign_origin(req)?;
            refuse_body_type(req)?;
        }
        match self {
            Self::Limit => limit::answer(req, principal).await,
            Self::MultiLimit => multi::answer(req, principal).await,
            Self::GetOverride => overrides::get(req, principal),
            Self::ListOverrides => overrides::list(req, principal),
            // Boxed, so that the future of a decision needs no room for the operations of
            // operators.
            Self::SetOverride => Box::pin(overrides::set(req, principal)).await,
            Self::DeleteOverride => Box::pin(overrides::delete(req, principal)).await,
        }
    }
}

/// Serves a request below [`PREFIX`].
pub(super) async fn answer(req: &HttpRequest<'_>) -> HttpResponse {
    let path = req.parts.uri.path();
    let Some(endpoint) = Endpoint::at(path) else {
        return refuse(Problem::new(StatusCode::NOT_FOUND, format!("there is nothing at {path}")));
    };
    if req.parts.method != Method::POST {
        return refuse(Problem::wrong_method(&Method::POST));
    }
    let answer = async |req: &HttpRequest<'_>| endpoint.answer(req).await.unwrap_or_else(HttpResponse::from);
    // The latency metric covers decisions only, not the requests of operators.
    if endpoint.role() == Role::Client {
        timed(req, Surface::Direct, answer).await
    } else {
        answer(req).await
    }
}

/// The body of a request, as far as it has the right shape.
fn body<'b, T: serde::Deserialize<'b>>(req: &'b HttpRequest<'_>) -> Result<T, Refusal> {
    read_json(&req.body).map_err(|error| Problem::bad_request(format!("body: {error}")).into())
}

/// The same, of a request that is one object.
fn object<'b, T: serde::Deserialize<'b>>(req: &'b HttpRequest<'_>) -> Result<T, Refusal> {
    body(req).map(|Object(request)| request)
}

/// Wraps the data of a response.
fn enveloped(data: impl Serialize) -> HttpResponse {
    written(&Envelope { meta: Meta { request_id: RequestId::next() }, data })
}

fn written(value: &impl Serialize) -> HttpResponse {
    let mut body = Vec::with_capacity(ANSWER_BYTES);
    match serde_json::to_writer(&mut body, value) {
        Ok(()) => text(StatusCode::OK, "application/json", body),
        Err(error) => refuse(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// Capacity for the response to one limit, so that its buffer does not grow.
const ANSWER_BYTES: usize = 192;

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::time::Duration;

    use ::http::Request;
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use serde_json::Value;
    use tidegate::{Clock as _, ManualClock};

    use super::*;
    use crate::fuzzing::small_config;
    use crate::shared::Shared;

    #[tokio::test]
    async fn the_times_of_a_reply_count_from_its_decision() {
        let clock = Arc::new(ManualClock::new());
        clock.set(1, 1_800_000_000_000_000);
        let mut config = small_config(Some("origin = 'memory'"));
        let shared = Shared::on_clock(&mut config, Arc::clone(&clock)).expect("fits");
        let limit = r#"{"namespace":"n","identifier":"a","limit":9,"duration":60000}"#;
        let several = format!("[{}]", limit.replace("\"a\"", "\"b\""));
        for (endpoint, body, place) in
            [("limit", limit, "/data/reset"), ("multiLimit", several.as_str(), "/data/limits/0/reset")]
        {
            let request = Request::post(format!("{PREFIX}ratelimit.{endpoint}"));
            let (parts, ()) = request.body(()).expect("a request").into_parts();
            let peer = ([127, 0, 0, 1], 1).into();
            let req = HttpRequest::new(&shared, peer, parts, body.to_owned().into());
            let mut pending = pin!(answer(&req));
            assert!(pending.as_mut().now_or_never().is_none(), "a new key waits for the origin");
            clock.advance(Duration::from_mins(10));
            let (parts, body) = pending.await.into_parts();
            let body = body.collect().await.expect("whole").to_bytes();
            let body: Value = serde_json::from_slice(&body).expect("JSON");
            let reset_ms = body.pointer(place).and_then(Value::as_u64).expect("a reset");
            assert!(reset_ms >= clock.now().wall_us() / 1_000, "{endpoint}: reset before the decision");
            let header: u64 = parts.headers["x-ratelimit-reset"].to_str().expect("text").parse().expect("s");
            assert_eq!(header, reset_ms.div_ceil(1_000), "{endpoint}: header and body");
        }
    }
}
