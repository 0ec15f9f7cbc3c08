//! `POST /json`: Envoy's rate limit service for clients that have only HTTP. The messages are the
//! same, in the JSON of proto3.

use ::http::StatusCode;
use ::http::{HeaderName, HeaderValue};
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::rate_limit::Unit;
use envoy_types::pb::envoy::service::ratelimit::v3::rate_limit_response::{Code, DescriptorStatus};
use envoy_types::pb::envoy::service::ratelimit::v3::{RateLimitRequest, RateLimitResponse};
use envoy_types::pb::google::protobuf::UInt64Value;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use super::answer::ProblemBody;
use super::object::Object;
use super::{HttpRequest, HttpResponse, Problem, json};
use crate::auth::Role;
use crate::envoy::{
    DESCRIPTORS_MAX, DOMAIN_BYTES_MAX, ENTRIES_MAX, KEY_BYTES_MAX, Refusal, VALUE_BYTES_MAX, decide,
};

/// A rate limit request. The JSON of proto3 accepts either name of a field, and a number also as
/// text.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    deny_unknown_fields,
    rename_all = "camelCase",
    expecting = "an object with domain, descriptors and hitsAddend"
)]
#[schema(as = RateLimitRequest)]
struct RequestBody {
    #[serde(default)]
    #[schema(required = true, min_length = 1, max_length = 256)]
    domain: String,
    #[serde(default, deserialize_with = "objects")]
    #[schema(required = true, min_items = 1, max_items = 1024)]
    descriptors: Vec<DescriptorBody>,
    #[serde(default, alias = "hits_addend")]
    hits_addend: Option<Number>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(
    deny_unknown_fields,
    rename_all = "camelCase",
    expecting = "an object with entries, limit, hitsAddend and isNegativeHits"
)]
#[schema(as = RateLimitDescriptor)]
struct DescriptorBody {
    #[serde(default, deserialize_with = "objects")]
    entries: Vec<EntryBody>,
    #[serde(default, deserialize_with = "object_or_nothing")]
    limit: Option<OverrideBody>,
    #[serde(default, alias = "hits_addend")]
    hits_addend: Option<Number>,
    #[serde(default, alias = "is_negative_hits")]
    is_negative_hits: bool,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, expecting = "an object with key and value")]
#[schema(as = RateLimitDescriptorEntry)]
struct EntryBody {
    #[serde(default)]
    key: String,
    #[serde(default)]
    value: String,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase", expecting = "an object with requestsPerUnit and unit")]
#[schema(as = RateLimitOverride)]
struct OverrideBody {
    #[serde(default, alias = "requests_per_unit")]
    requests_per_unit: Option<Number>,
    #[serde(default)]
    unit: UnitBody,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "a whole number, or one as text")]
#[schema(as = NumberOrText)]
enum Number {
    Plain(u64),
    Text(String),
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(untagged, expecting = "the name or the number of a unit")]
#[schema(as = Unit)]
enum UnitBody {
    Name(String),
    Number(i32),
}

impl Default for UnitBody {
    fn default() -> Self {
        Self::Number(0)
    }
}

impl Number {
    fn read(self, field: &str, most: u64) -> Result<u64, Problem> {
        let outside = |what: &dyn std::fmt::Display| {
            Problem::bad_request(format!("{field}: {what} is outside 0 to {most}"))
        };
        let number = match self {
            Self::Plain(number) => number,
            Self::Text(text) => text.parse().map_err(|_| outside(&text))?,
        };
        if number > most { Err(outside(&number)) } else { Ok(number) }
    }
}

impl RequestBody {
    fn read(self) -> Result<RateLimitRequest, Problem> {
        let descriptors = self.descriptors.into_iter().enumerate().map(|(at, body)| body.read(at));
        Ok(RateLimitRequest {
            domain: self.domain,
            descriptors: descriptors.collect::<Result<_, _>>()?,
            hits_addend: small(self.hits_addend, "hitsAddend")?,
        })
    }
}

impl DescriptorBody {
    fn read(self, at: usize) -> Result<RateLimitDescriptor, Problem> {
        let hits = self.hits_addend.map(|hits| hits.read(&format!("descriptors[{at}].hitsAddend"), u64::MAX));
        let entry = |body: EntryBody| Entry { key: body.key, value: body.value };
        Ok(RateLimitDescriptor {
            entries: self.entries.into_iter().map(entry).collect(),
            limit: self.limit.map(|limit| limit.read(at)).transpose()?,
            hits_addend: hits.transpose()?.map(|value| UInt64Value { value }),
            is_negative_hits: self.is_negative_hits,
        })
    }
}

impl OverrideBody {
    fn read(self, at: usize) -> Result<RateLimitOverride, Problem> {
        let field = format!("descriptors[{at}].limit.requestsPerUnit");
        let unit = match self.unit {
            UnitBody::Number(number) => number,
            UnitBody::Name(name) => Unit::from_str_name(&name).map(i32::from).ok_or_else(|| {
                Problem::bad_request(format!(
                    "descriptors[{at}].limit.unit: {name:?} is not a unit of time; allowed {UNITS}"
                ))
            })?,
        };
        Ok(RateLimitOverride { requests_per_unit: small(self.requests_per_unit, &field)?, unit })
    }
}

fn small(number: Option<Number>, field: &str) -> Result<u32, Problem> {
    let read = number.map(|number| number.read(field, u32::MAX.into())).transpose()?;
    Ok(read.and_then(|number| u32::try_from(number).ok()).unwrap_or_default())
}

/// A rate limit response. As in proto3, fields that are 0 or empty are left out.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RateLimitResponse)]
struct ResponseBody<'r> {
    overall_code: &'static str,
    statuses: Vec<StatusBody<'r>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    response_headers_to_add: Vec<HeaderBody<'r>>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = DescriptorStatus)]
struct StatusBody<'r> {
    code: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    current_limit: Option<LimitBody<'r>>,
    #[serde(skip_serializing_if = "is_zero")]
    limit_remaining: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    duration_until_reset: Option<String>,
}

#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RateLimit)]
struct LimitBody<'r> {
    #[serde(skip_serializing_if = "str::is_empty")]
    name: &'r str,
    #[serde(skip_serializing_if = "is_zero")]
    requests_per_unit: u32,
    unit: &'static str,
}

#[derive(Debug, Serialize, ToSchema)]
#[schema(as = HeaderValue)]
struct HeaderBody<'r> {
    key: &'r str,
    value: &'r str,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks it so")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl<'r> From<&'r RateLimitResponse> for ResponseBody<'r> {
    fn from(response: &'r RateLimitResponse) -> Self {
        let headers = response.response_headers_to_add.iter();
        Self {
            overall_code: response.overall_code().as_str_name(),
            statuses: response.statuses.iter().map(StatusBody::from).collect(),
            response_headers_to_add: headers
                .map(|header| HeaderBody { key: &header.key, value: &header.value })
                .collect(),
        }
    }
}

impl<'r> From<&'r DescriptorStatus> for StatusBody<'r> {
    fn from(status: &'r DescriptorStatus) -> Self {
        let limit = status.current_limit.as_ref();
        Self {
            code: status.code().as_str_name(),
            current_limit: limit.map(|limit| LimitBody {
                name: &limit.name,
                requests_per_unit: limit.requests_per_unit,
                unit: limit.unit().as_str_name(),
            }),
            limit_remaining: status.limit_remaining,
            duration_until_reset: status.duration_until_reset.map(|reset| format!("{}s", reset.seconds)),
        }
    }
}

/// Envoy's rate limit request, as JSON.
#[utoipa::path(
    post,
    path = "/json",
    operation_id = "shouldRateLimit",
    request_body = RequestBody,
    responses(
        (status = 200, description = "May pass", body = ResponseBody<'static>),
        (status = 429, description = "May not pass", body = ResponseBody<'static>),
        (status = "4XX", description = "Not decided", body = ProblemBody<'static>,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn answer(req: &HttpRequest<'_>) -> HttpResponse {
    decided(req).await.unwrap_or_else(HttpResponse::from)
}

/// Reads a list of objects. Serde would otherwise also accept a list of lists.
fn objects<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Vec<T>, D::Error> {
    let objects = Vec::<Object<T>>::deserialize(deserializer)?;
    Ok(objects.into_iter().map(|Object(read)| read).collect())
}

/// The same for one that may be missing.
fn object_or_nothing<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    Ok(Option::<Object<T>>::deserialize(deserializer)?.map(|Object(read)| read))
}

/// The request in a body.
fn read(body: &[u8]) -> Result<RateLimitRequest, Problem> {
    // Serde would accept a list of the fields' values as the fields.
    if body.trim_ascii_start().first() == Some(&b'[') {
        return Err(Problem::bad_request(
            "body: a list is not an object with domain, descriptors and hitsAddend",
        ));
    }
    let read: Result<RequestBody, _> = serde_json::from_slice(body);
    read.map_err(|error| Problem::bad_request(in_words(body, &error)))?.read()
}

/// Describes the problem of a body. Parses it a second time to find the place: speed does not
/// matter for an invalid request.
fn in_words(body: &[u8], error: &serde_json::Error) -> String {
    if !error.is_data() {
        return format!("body: {error}");
    }
    let mut again = serde_json::Deserializer::from_slice(body);
    let located = serde_path_to_error::deserialize::<_, RequestBody>(&mut again).err();
    let path = located.map(|error| error.path().to_string()).filter(|path| path != "." && path != "?");
    let path = path.map_or_else(|| "body".to_owned(), |path| path.trim_end_matches(".?").to_owned());
    match allowed(&path) {
        None => format!("{path}: {error}"),
        Some(allowed) => format!("{path}: {error}; allowed {allowed}"),
    }
}

const UNITS: &str = "are SECOND, MINUTE, HOUR, DAY, WEEK, MONTH and YEAR";

/// Describes the values that a field allows.
fn allowed(path: &str) -> Option<String> {
    let field = path.rsplit('.').next().unwrap_or(path);
    let is_below = field != path;
    Some(match field {
        "domain" => format!("is a text of 1 to {DOMAIN_BYTES_MAX} bytes"),
        "descriptors" => format!("is a list of 1 to {DESCRIPTORS_MAX} objects"),
        "entries" => format!("is a list of 0 to {ENTRIES_MAX} objects with key and value"),
        "key" => format!("is a text of 0 to {KEY_BYTES_MAX} bytes"),
        "value" => format!("is a text of 0 to {VALUE_BYTES_MAX} bytes"),
        "hitsAddend" | "hits_addend" if is_below => format!("is 0 to {}", u64::MAX),
        "hitsAddend" | "hits_addend" | "requestsPerUnit" | "requests_per_unit" => {
            format!("is 0 to {}", u32::MAX)
        }
        "isNegativeHits" | "is_negative_hits" => "are true and false".to_owned(),
        "unit" => UNITS.to_owned(),
        _ => return None,
    })
}

async fn decided(req: &HttpRequest<'_>) -> Result<HttpResponse, Problem> {
    let principal = req.principal(Role::Client)?;
    let request = read(&req.body)?;
    let response = decide(req.shared, principal.tenant, &request).await.map_err(|refusal| {
        let status = match refusal {
            Refusal::Wrong(_) => StatusCode::BAD_REQUEST,
            Refusal::NothingLoaded => StatusCode::SERVICE_UNAVAILABLE,
        };
        Problem::new(status, refusal.to_string())
    })?;
    Ok(respond(&response))
}

/// Writes the header fields twice: into the body, and as fields of the response for clients that do
/// not read the body.
fn respond(response: &RateLimitResponse) -> HttpResponse {
    let denied = response.overall_code() == Code::OverLimit;
    let status = if denied { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK };
    let mut answer = json(status, &ResponseBody::from(response));
    for header in &response.response_headers_to_add {
        if let (Ok(name), Ok(value)) =
            (HeaderName::try_from(&header.key), HeaderValue::try_from(&header.value))
        {
            answer.headers_mut().insert(name, value);
        }
    }
    answer
}
