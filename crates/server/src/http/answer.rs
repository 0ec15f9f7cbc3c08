//! Responses, and problems as responses.

use std::cell::Cell;

use ::http::header::{ALLOW, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use ::http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode};
use bytes::Bytes;
use http_body_util::Full;
use serde::{Deserialize, Serialize};
use tidegate::LIMITS_PER_CHECK_MAX;
use tidegate::headers::PROBLEM_CONTENT_TYPE;
use utoipa::ToSchema;

use crate::auth::Role;
use crate::metrics::MemoryLimit;
use crate::pipeline::rules::RulesError;
use crate::request_memory::ReadFailure;

/// A complete response.
pub(crate) type HttpResponse = Response<Full<Bytes>>;

/// Capacity for the header fields of a decision and its other fields. A smaller map would grow
/// while they are added.
const FIELDS: usize = 9;

/// Capacity for the body of a decision under one or two rules, so that it does not grow.
const BODY_BYTES: usize = 512;

thread_local! {
    /// The header map of an earlier request. It is empty, and has the capacity that the next
    /// response needs.
    static SPARE: Cell<HeaderMap> = Cell::new(HeaderMap::new());
}

/// Keeps an unused map for its capacity, unless that is far more than a response needs. Every
/// connection keeps the capacity of its last response.
pub(super) fn spare(mut map: HeaderMap) {
    if map.capacity() <= 4 * FIELDS {
        map.clear();
        SPARE.set(map);
    }
}

/// Text of some media type.
pub(crate) fn text(status: StatusCode, media: &'static str, body: impl Into<Bytes>) -> HttpResponse {
    let mut answer = Response::new(Full::new(body.into()));
    *answer.status_mut() = status;
    *answer.headers_mut() = SPARE.take();
    answer.headers_mut().reserve(FIELDS);
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media));
    answer
}

/// A value as JSON.
pub(crate) fn json(status: StatusCode, value: &impl Serialize) -> HttpResponse {
    let mut body = Vec::with_capacity(BODY_BYTES);
    match serde_json::to_writer(&mut body, value) {
        Ok(()) => text(status, "application/json", body),
        Err(error) => Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into(),
    }
}

/// Parses JSON. A body that is valid UTF-8 as a whole is not validated again string by string.
pub(crate) fn read_json<'b, T: Deserialize<'b>>(body: &'b [u8]) -> serde_json::Result<T> {
    match std::str::from_utf8(body) {
        Ok(text) => serde_json::from_str(text),
        // Reports the position of the invalid byte.
        Err(_) => serde_json::from_slice(body),
    }
}

/// A request that got no decision, as RFC 9457 has it.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    pub(crate) detail: String,
    field: Option<(HeaderName, HeaderValue)>,
}

/// A problem, in the format of RFC 9457.
#[derive(Serialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct ProblemBody<'p> {
    r#type: &'static str,
    title: &'static str,
    status: u16,
    detail: &'p str,
}

impl Problem {
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: detail.into(), field: None }
    }

    pub(crate) fn bad_request(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    pub(crate) fn unauthorized() -> Self {
        let problem =
            Self::new(StatusCode::UNAUTHORIZED, "authorization: no `Bearer` token that this server knows");
        problem.with_field(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
    }

    pub(crate) fn forbidden(role: Role) -> Self {
        Self::new(
            StatusCode::FORBIDDEN,
            format!("authorization: this needs the role {:?} or a higher one", role.as_str()),
        )
    }

    /// A token of one tenant has no access to data of all tenants.
    pub(crate) fn for_operators() -> Self {
        Self::new(StatusCode::FORBIDDEN, "authorization: this needs a token without a tenant")
    }

    /// The server has more to do than it can.
    pub(crate) fn overloaded() -> Self {
        let problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded: not decided");
        problem.with_field(RETRY_AFTER, HeaderValue::from_static("1"))
    }

    /// The listener has as many connections as it may, and none of them is idle.
    pub(crate) fn full() -> Self {
        let detail = "connections: the admin listener is full, so only /healthz and /readyz are answered";
        let problem = Self::new(StatusCode::SERVICE_UNAVAILABLE, detail);
        problem.with_field(RETRY_AFTER, HeaderValue::from_static("1"))
    }

    pub(crate) fn wrong_method(allowed: &Method) -> Self {
        let problem =
            Self::new(StatusCode::METHOD_NOT_ALLOWED, format!("method: only {allowed} is answered here"));
        let allowed = if *allowed == Method::GET { "GET, HEAD" } else { allowed.as_str() };
        match HeaderValue::from_str(allowed) {
            Ok(value) => problem.with_field(ALLOW, value),
            Err(_) => problem,
        }
    }

    /// Returns the response, with a body in the format of the surface.
    pub(crate) fn answer_with(self, media: &'static str, body: impl Into<Bytes>) -> HttpResponse {
        let mut answer = text(self.status, media, body);
        if let Some((name, value)) = self.field {
            answer.headers_mut().insert(name, value);
        }
        answer
    }

    /// Adds a header field to the response.
    pub(crate) fn with_field(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.field = Some((name, value));
        self
    }
}

impl From<RulesError> for Problem {
    fn from(error: RulesError) -> Self {
        match error {
            RulesError::Shed(_) => Self::overloaded(),
            // The author of the rules has to correct them.
            RulesError::TooManyRules { rules } => Self::new(
                StatusCode::INTERNAL_SERVER_ERROR,
                format!("rules: {rules} apply to this request, at most {LIMITS_PER_CHECK_MAX} may"),
            ),
        }
    }
}

impl From<ReadFailure> for Problem {
    fn from(failure: ReadFailure) -> Self {
        let status = match failure {
            ReadFailure::TimedOut => StatusCode::REQUEST_TIMEOUT,
            ReadFailure::Memory(MemoryLimit::Tenant | MemoryLimit::Address) => StatusCode::TOO_MANY_REQUESTS,
            ReadFailure::Memory(MemoryLimit::Total) => StatusCode::SERVICE_UNAVAILABLE,
        };
        let problem = Self::new(status, failure.to_string());
        match failure {
            ReadFailure::TimedOut => problem,
            ReadFailure::Memory(_) => problem.with_field(RETRY_AFTER, HeaderValue::from_static("1")),
        }
    }
}

impl From<Problem> for HttpResponse {
    fn from(problem: Problem) -> Self {
        let body = ProblemBody {
            r#type: "about:blank",
            title: problem.status.canonical_reason().unwrap_or("Error"),
            status: problem.status.as_u16(),
            detail: &problem.detail,
        };
        let body = serde_json::to_vec(&body).unwrap_or_default();
        problem.answer_with(PROBLEM_CONTENT_TYPE, body)
    }
}
