//! `GET /openapi.json`: the description of the HTTP listener, generated from its request and
//! response types.

use std::sync::LazyLock;

use ::http::StatusCode;
use bytes::Bytes;
use utoipa::openapi::RefOr;
use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::security::{Http, HttpAuthScheme, SecurityRequirement, SecurityScheme};
use utoipa::{Modify, OpenApi};

use super::{HttpRequest, HttpResponse, check, envoy_json, forward_auth, text, unkey};

#[derive(OpenApi)]
#[openapi(
    info(title = "Tidegate", description = "A rate limiter."),
    modifiers(&Tokens, &Failures),
    paths(
        check::answer,
        unkey::limit::answer,
        unkey::multi::answer,
        unkey::overrides::set,
        unkey::overrides::get,
        unkey::overrides::delete,
        unkey::overrides::list,
        envoy_json::answer,
        forward_auth::answer,
        crate::admin::status::answer,
        answer,
    )
)]
struct Description;

static DOCUMENT: LazyLock<Bytes> = LazyLock::new(|| document().into());

/// This description.
#[utoipa::path(
    get,
    path = "/openapi.json",
    operation_id = "openapi",
    security(()),
    responses((status = 200, description = "OpenAPI 3.1", body = std::collections::HashMap<String, String>))
)]
pub(super) fn answer(_: &HttpRequest<'_>) -> HttpResponse {
    text(StatusCode::OK, "application/json", DOCUMENT.clone())
}

/// A description is made of constants, so it can be written.
fn document() -> Vec<u8> {
    serde_json::to_vec(&Description::openapi()).unwrap_or_default()
}

/// Adds the same authentication to all operations.
struct Tokens;

impl Modify for Tokens {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        const NAME: &str = "bearer";
        let mut scheme = Http::new(HttpAuthScheme::Bearer);
        scheme.description = Some("A server without tokens asks for none, and takes any".to_owned());
        let components = description.components.get_or_insert_default();
        components.add_security_scheme(NAME, SecurityScheme::Http(scheme));
        let none: [&str; 0] = [];
        description.security =
            Some(vec![SecurityRequirement::new(NAME, none), SecurityRequirement::default()]);
    }
}

/// Adds a 5XX response to each operation, in the format of its 4XX response.
struct Failures;

impl Modify for Failures {
    fn modify(&self, description: &mut utoipa::openapi::OpenApi) {
        for item in description.paths.paths.values_mut() {
            for operation in operations(item) {
                let answers = &mut operation.responses.responses;
                let Some(RefOr::T(refusal)) = answers.get("4XX") else { continue };
                let mut failure = refusal.clone();
                "Not done: the server's fault, or too much to do".clone_into(&mut failure.description);
                answers.entry("5XX".to_owned()).or_insert(RefOr::T(failure));
            }
        }
    }
}

/// The methods that are described.
fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [item.get.as_mut(), item.post.as_mut()].into_iter().flatten()
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use ::http::Request;
    use ::http::header::{AUTHORIZATION, CONTENT_TYPE};
    use http_body_util::BodyExt;
    use serde_json::{Value, json};
    use tidegate_rules::RuleSet;

    use super::*;
    use crate::auth::TokenHash;
    use crate::envoy::Descriptors;
    use crate::fuzzing::small_config;
    use crate::http::route;
    use crate::load;
    use crate::rules::ActiveRules;
    use crate::shared::Shared;

    const RULES: &str = "
        [[rules]]
        name = 'users'
        key = ['user']
        limit = 1
        period = '1h'
        [[rules]]
        name = 'clients'
        key = ['ip', 'header.x-key']
        limit = 1
        period = '1h'
        class = 'security'
    ";

    fn server(descriptors: &str) -> Shared {
        let token = |role: &str| {
            let hash = TokenHash::of(role.as_bytes());
            format!("[[tokens]]\nname = '{role}'\nrole = '{role}'\nhash = '{hash}'\n")
        };
        let file = [token("client"), token("viewer"), token("operator")].concat();
        let shared = Shared::new(&mut small_config(Some(&file))).expect("fits");
        let rules = ActiveRules::new(RuleSet::parse(RULES).expect("good rules"), &shared).expect("fits");
        shared.rules.store(Arc::new(rules));
        if !descriptors.is_empty() {
            let descriptors = Descriptors::parse(descriptors, &shared).expect("good descriptors");
            shared.rules.descriptors.store(Arc::new(descriptors));
        }
        shared
    }

    /// A request: the method, the target, the role of the caller, and the body.
    type Question<'q> = (&'q str, &'q str, &'q str, Value);

    /// A status, the type of the body, and the body.
    fn ask(shared: &Shared, (method, target, role, body): &Question<'_>) -> (u16, Option<String>, Value) {
        let mut request = Request::builder().method(*method).uri(*target).header("x-key", "k");
        if !role.is_empty() {
            request = request.header(AUTHORIZATION, format!("Bearer {role}"));
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        let peer = SocketAddr::from(([127, 0, 0, 1], 1));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(async {
            let request = HttpRequest::new(shared, peer, parts, body);
            let answer = match *target {
                "/v1/status" => crate::admin::route(&request).await,
                _ => route(&request).await,
            };
            let (head, body) = answer.into_parts();
            let body = body.collect().await.expect("whole").to_bytes();
            let media = head.headers.get(CONTENT_TYPE).and_then(|media| media.to_str().ok());
            let body =
                if body.is_empty() { Value::Null } else { serde_json::from_slice(&body).expect("JSON") };
            (head.status.as_u16(), media.map(str::to_owned), body)
        })
    }

    /// Returns the description of a response: by its exact status, or by its class of statuses.
    fn described<'d>(document: &'d Value, question: &Question<'_>, status: u16) -> &'d Value {
        let path = question.1.split('?').next().unwrap_or_default();
        let answers = &document["paths"][path][question.0.to_lowercase()]["responses"];
        let exact = answers.get(status.to_string());
        let found = exact.or_else(|| answers.get(format!("{}XX", status / 100)));
        found.unwrap_or_else(|| panic!("{question:?}: {status} is not in {answers}"))
    }

    /// Asserts that a value matches its schema: it has all required members, and no undescribed
    /// ones.
    fn holds(document: &Value, schema: &Value, value: &Value, is_open: bool) {
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.rsplit('/').next().unwrap_or_default();
            return holds(document, &document["components"]["schemas"][name], value, is_open);
        }
        for item in value.as_array().into_iter().flatten() {
            holds(document, &schema["items"], item, false);
        }
        let (Some(properties), Some(members)) = (schema["properties"].as_object(), value.as_object()) else {
            return;
        };
        for required in schema["required"].as_array().into_iter().flatten() {
            assert!(required.as_str().is_some_and(|name| members.contains_key(name)), "{required}: {value}");
        }
        for (name, member) in members {
            match properties.get(name) {
                Some(schema) => holds(document, schema, member, false),
                None => assert!(is_open, "{name} of {value} is not in {schema}"),
            }
        }
    }

    fn check(document: &Value, shared: &Shared, question: &Question<'_>, status: u16) {
        let (got, media, body) = ask(shared, question);
        assert_eq!(got, status, "{question:?}: {body}");
        let described = described(document, question, status);
        let Some(media) = media else {
            assert!(described.get("content").is_none(), "{question:?}: {described}");
            return;
        };
        let schema = described["content"].get(&media).map(|content| &content["schema"]);
        let schema = schema.unwrap_or_else(|| panic!("{question:?}: {media} is not in {described}"));
        // A problem may carry more members.
        holds(document, schema, &body, media == "application/problem+json");
    }

    #[test]
    fn every_answer_is_described() {
        let document: Value = serde_json::from_slice(&document()).expect("JSON");
        let shared =
            server("domain: d\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 1}}]");
        let user = json!({"dimensions": {"user": "a"}, "deny_status": 429});
        let envoy = json!({"domain": "d", "descriptors": [{"entries": [{"key": "k", "value": "v"}]}]});
        let limit = json!({"namespace": "n", "identifier": "a", "limit": 1, "duration": 60_000});
        let named = json!({"namespace": "n", "identifier": "a"});
        let table: &[(Question<'_>, u16)] = &[
            (("POST", "/v1/check", "client", user.clone()), 200),
            (("POST", "/v1/check", "client", user.clone()), 429),
            (("POST", "/v1/check", "client", json!({})), 400),
            (("POST", "/v1/check", "", user), 401),
            (("POST", "/json", "client", envoy.clone()), 200),
            (("POST", "/json", "client", envoy.clone()), 429),
            (("POST", "/json", "client", json!({"domain": 1})), 400),
            (("POST", "/json", "", envoy), 401),
            (("GET", "/forward-auth", "client", Value::Null), 200),
            (("GET", "/forward-auth", "client", Value::Null), 429),
            (("GET", "/forward-auth?deny_status=403", "client", Value::Null), 403),
            (("GET", "/forward-auth?deny_status=500", "client", Value::Null), 400),
            (("GET", "/forward-auth", "", Value::Null), 401),
            (("GET", "/openapi.json", "", Value::Null), 200),
            (("GET", "/v1/status", "viewer", Value::Null), 200),
            (("GET", "/v1/status", "client", Value::Null), 403),
            (("POST", "/v2/ratelimit.limit", "client", limit.clone()), 200),
            (("POST", "/v2/ratelimit.limit", "client", json!({})), 400),
            (("POST", "/v2/ratelimit.multiLimit", "client", json!([limit.clone()])), 200),
            (("POST", "/v2/ratelimit.multiLimit", "", json!([limit.clone()])), 401),
            (("POST", "/v2/ratelimit.setOverride", "operator", limit.clone()), 200),
            (("POST", "/v2/ratelimit.setOverride", "client", limit), 403),
            (("POST", "/v2/ratelimit.getOverride", "operator", named.clone()), 200),
            (("POST", "/v2/ratelimit.listOverrides", "operator", json!({"namespace": "n"})), 200),
            (("POST", "/v2/ratelimit.listOverrides", "operator", json!({})), 400),
            (("POST", "/v2/ratelimit.deleteOverride", "operator", named.clone()), 200),
            (("POST", "/v2/ratelimit.deleteOverride", "operator", named.clone()), 404),
            (("POST", "/v2/ratelimit.getOverride", "operator", named), 404),
        ];
        for (question, status) in table {
            check(&document, &shared, question, *status);
        }
        let paths = document["paths"].as_object().expect("paths");
        for path in paths.keys() {
            assert!(table.iter().any(|((_, target, ..), _)| target == path), "{path} is not asked here");
        }
    }

    #[test]
    fn answers_of_a_server_in_need_are_described() {
        let document: Value = serde_json::from_slice(&document()).expect("JSON");
        let shared = server("");
        let envoy = json!({"domain": "d", "descriptors": [{"entries": [{"key": "k", "value": "v"}]}]});
        check(&document, &shared, &("POST", "/json", "client", envoy), 503);
        (0..load::LATE_LOOKS).for_each(|_| load::note(Duration::from_secs(1)));
        let secured = json!({"dimensions": {"ip": "192.0.2.1", "header.x-key": "k"}});
        check(&document, &shared, &("POST", "/v1/check", "client", secured), 503);
        check(&document, &shared, &("GET", "/forward-auth", "client", Value::Null), 503);
        load::note(Duration::ZERO);
    }

    #[test]
    fn document_declares_bearer_authentication() {
        let document: Value = serde_json::from_slice(&document()).expect("JSON");
        let scheme = &document["components"]["securitySchemes"]["bearer"];
        assert_eq!((&scheme["type"], &scheme["scheme"]), (&json!("http"), &json!("bearer")));
        assert_eq!(document["security"], json!([{"bearer": []}, {}]));
        assert_eq!(document["paths"]["/openapi.json"]["get"]["security"], json!([{}]));
    }
}
