//! `GET /openapi.json`: what the HTTP listener answers, described from the types that it reads and writes.

use std::sync::LazyLock;

use ::http::StatusCode;
use bytes::Bytes;
use utoipa::OpenApi;
use utoipa::openapi::path::{OperationBuilder, PathItem};
use utoipa::openapi::{HttpMethod, ResponseBuilder};

use super::{Answer, Asked, check, text, unkey};

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Tidegate",
        description = "A rate limiter. Every path takes `Authorization: Bearer TOKEN` on a server that has tokens."
    ),
    paths(
        check::answer,
        unkey::limit::answer,
        unkey::multi::answer,
        unkey::overrides::set,
        unkey::overrides::get,
        unkey::overrides::delete,
        unkey::overrides::list,
    )
)]
struct Description;

static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| document().into());

/// Answers with the description.
pub(super) fn answer(_: &Asked<'_>) -> Answer {
    text(StatusCode::OK, "application/json", DOCUMENT.clone())
}

/// A description is made of constants, so it can be written.
fn document() -> Vec<u8> {
    let mut description = Description::openapi();
    let paths = &mut description.paths.paths;
    paths.insert(
        "/json".to_owned(),
        operation(
            HttpMethod::Post,
            "Envoy's rate limit request in proto-JSON (envoy.service.ratelimit.v3.RateLimitRequest)",
            &[("200", "May pass: RateLimitResponse"), ("429", "May not: RateLimitResponse")],
        ),
    );
    paths.insert(
        "/forward-auth".to_owned(),
        operation(
            HttpMethod::Get,
            "Forward-auth: decides the request that the X-Forwarded-* fields describe",
            &[("200", "May pass"), ("403", "May not, where a proxy asked for 403"), ("429", "May not")],
        ),
    );
    paths.insert(
        "/openapi.json".to_owned(),
        operation(HttpMethod::Get, "This description", &[("200", "OpenAPI 3.1")]),
    );
    serde_json::to_vec(&description).unwrap_or_default()
}

fn operation(method: HttpMethod, about: &str, answers: &[(&str, &str)]) -> PathItem {
    let operation =
        answers.iter().fold(OperationBuilder::new().summary(Some(about)), |operation, (code, what)| {
            operation.response(*code, ResponseBuilder::new().description(*what).build())
        });
    PathItem::new(method, operation)
}
