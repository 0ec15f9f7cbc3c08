//! Unkey's HTTP API: limits that come with the request, and overrides of them. `POST` only, JSON only, every answer in
//! an envelope that names the request. A denial is an answer: 200, and `success` is false.

pub(super) mod direct;
mod fields;
pub(super) mod limit;
pub(super) mod multi;
pub(super) mod overrides;
mod request_id;

use ::http::{Method, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

use super::{Answer, Asked, Problem, Reply, read_json, text, timed};
use crate::metrics::Surface;

use self::fields::FieldError;
use self::request_id::RequestId;

/// What all paths of the API begin with.
pub(super) const PREFIX: &str = "/v2/";

/// What every answer has beside its data.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub(super) struct Meta {
    /// Unique to the request.
    #[schema(value_type = String)]
    request_id: RequestId,
}

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct Envelope<T> {
    meta: Meta,
    data: T,
}

/// A request that was not answered.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorEnvelope<'e> {
    meta: Meta,
    error: ErrorBody<'e>,
}

/// What was wrong with it, as RFC 9457 has it.
#[derive(Debug, Serialize, ToSchema)]
pub(super) struct ErrorBody<'e> {
    title: &'e str,
    detail: &'e str,
    status: u16,
    r#type: &'e str,
    /// Each problem of a request that makes no sense; with status 400 only.
    #[serde(skip_serializing_if = "Option::is_none")]
    errors: Option<&'e [FieldError]>,
}

/// Why there is no answer.
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

impl From<Refusal> for Answer {
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
pub(super) fn refuse(problem: Problem) -> Answer {
    Refusal::from(problem).into()
}

/// Answers a request below [`PREFIX`].
pub(super) fn reply(asked: &Asked<'_>) -> Reply {
    let path = asked.parts.uri.path().strip_prefix(PREFIX).unwrap_or_default();
    let handle: fn(&Asked<'_>) -> Result<Reply, Refusal> = match path {
        "ratelimit.limit" => |asked| Ok(decided(asked, limit::answer)),
        "ratelimit.multiLimit" => |asked| Ok(decided(asked, multi::answer)),
        "ratelimit.setOverride" => overrides::set,
        "ratelimit.getOverride" => |asked| overrides::get(asked).map(Reply::Ready),
        "ratelimit.deleteOverride" => overrides::delete,
        "ratelimit.listOverrides" => overrides::list,
        _ => |asked| {
            let detail = format!("there is nothing at {}", asked.parts.uri.path());
            Err(Problem::new(StatusCode::NOT_FOUND, detail).into())
        },
    };
    if path_is_known(path) && asked.parts.method != Method::POST {
        return Reply::Ready(refuse(Problem::wrong_method(&Method::POST)));
    }
    handle(asked).unwrap_or_else(|refusal| Reply::Ready(refusal.into()))
}

fn path_is_known(path: &str) -> bool {
    matches!(
        path.strip_prefix("ratelimit."),
        Some("limit" | "multiLimit" | "setOverride" | "getOverride" | "deleteOverride" | "listOverrides")
    )
}

/// Notes how long a decision took.
fn decided(asked: &Asked<'_>, decide: fn(&Asked<'_>) -> Result<Answer, Refusal>) -> Reply {
    timed(asked, Surface::Direct, |asked| decide(asked).unwrap_or_else(Answer::from)).into()
}

/// The body of a request, as far as it has the right shape.
fn body<'b, T: serde::Deserialize<'b>>(asked: &'b Asked<'_>) -> Result<T, Refusal> {
    read_json(&asked.body).map_err(|error| Problem::bad_request(format!("body: {error}")).into())
}

/// Wraps the data of an answer.
fn answered(data: impl Serialize) -> Answer {
    written(&Envelope { meta: Meta { request_id: RequestId::next() }, data })
}

fn written(value: &impl Serialize) -> Answer {
    let mut body = Vec::with_capacity(ANSWER_BYTES);
    match serde_json::to_writer(&mut body, value) {
        Ok(()) => text(StatusCode::OK, "application/json", body),
        Err(error) => refuse(Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())),
    }
}

/// Room for the answer to one limit, so that its buffer does not have to grow.
const ANSWER_BYTES: usize = 192;
