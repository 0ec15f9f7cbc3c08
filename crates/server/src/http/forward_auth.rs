//! `/forward-auth`: a proxy asks whether a request may pass, and describes it by header fields.
//!
//! If a rule needs a field that is missing or contradictory, the request is refused, not decided
//! without the dimension. Otherwise an odd description would be a way around a limit.

use std::borrow::Cow;
use std::net::IpAddr;
use std::sync::Once;

use ::http::{HeaderMap, Response, StatusCode};
use serde::{Deserialize, Serialize};
use tidegate::Decision;
use tidegate::headers::{PROBLEM_CONTENT_TYPE, problem_body};
use tidegate_rules::{ADDRESS, Dimensions, DimensionsError, HEADER_PREFIX};
use utoipa::ToSchema;

use super::answer::ProblemBody;
use super::path::normal_path;
use super::{HttpRequest, HttpResponse, Problem, text};
use crate::address;
use crate::auth::Role;
use crate::metrics::Surface;
use crate::pipeline::RequestDecision;
use crate::pipeline::rules::RulesError;

/// A property of the original request, and the header fields that may carry it. Traefik and Caddy
/// send the first; configurations of nginx commonly use the others.
struct ForwardedField {
    dimension: &'static str,
    fields: &'static [&'static str],
    field_name: &'static str,
}

const METHOD: ForwardedField = ForwardedField {
    dimension: "method",
    fields: &["x-forwarded-method", "x-original-method"],
    field_name: "X-Forwarded-Method, X-Original-Method",
};
const PATH: ForwardedField = ForwardedField {
    dimension: "path",
    fields: &["x-forwarded-uri", "x-original-uri", "x-original-url"],
    field_name: "X-Forwarded-Uri, X-Original-URI, X-Original-URL",
};
const HOST: ForwardedField =
    ForwardedField { dimension: "host", fields: &["x-forwarded-host"], field_name: "X-Forwarded-Host" };

/// Decides the request that a proxy describes by header fields. All methods have the same effect.
#[utoipa::path(
    get,
    path = "/forward-auth",
    operation_id = "forwardAuth",
    params(
        ("deny_status" = Option<u16>, Query, description = "The status of a denial: 403 or 429, the default"),
        ("X-Forwarded-Method" = Option<String>, Header,
            description = "Where rules look at `method`; or X-Original-Method"),
        (
            "X-Forwarded-Uri" = Option<String>,
            Header,
            description = "Where rules look at `path`; or X-Original-URI, or X-Original-URL"
        ),
        ("X-Forwarded-Host" = Option<String>, Header, description = "Where rules look at `host`"),
        ("X-Forwarded-For" = Option<String>, Header,
            description = "Of trusted proxies, where rules look at `ip`; or Forwarded"),
    ),
    responses(
        (status = 200, description = "May pass; empty, with the rate limit fields"),
        (
            status = 429,
            description = "May not pass",
            body = QuotaExceeded,
            content_type = "application/problem+json",
        ),
        (
            status = 403,
            description = "May not pass, where `deny_status` is 403",
            body = QuotaExceeded,
            content_type = "application/problem+json",
        ),
        (
            status = 431,
            description = "A value that a rule looks at is too long",
            body = ProblemBody<'static>,
            content_type = "application/problem+json",
        ),
        (status = "4XX", description = "Not decided", body = ProblemBody<'static>,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn answer(req: &HttpRequest<'_>) -> HttpResponse {
    decide(req).await.unwrap_or_else(HttpResponse::from)
}

async fn decide(req: &HttpRequest<'_>) -> Result<HttpResponse, Problem> {
    let principal = req.principal(Role::Client)?;
    let deny_status = deny_status(req.parts.uri.query())?;
    let rules = req.shared.rules.load();
    let request = describe(req, rules.dimensions_used(principal.tenant))?;
    let matched = rules.match_request(req.shared, principal.tenant, &request);
    match matched.decide(req.shared, Surface::ForwardAuth, 1).await {
        Ok(decision) => Ok(respond(req, &decision, deny_status)),
        Err(RulesError::Shed(shed)) if shed.is_allowed() => Ok(Response::default()),
        Err(error) => Err(error.into()),
    }
}

/// Reads the status of a denial. nginx accepts 403, and treats 429 as an error of this server.
/// Other parameters are ignored, because by default Caddy adds the query of the original request.
fn deny_status(query: Option<&str>) -> Result<StatusCode, Problem> {
    let mut parameters = query.unwrap_or_default().split('&');
    match parameters.find_map(|parameter| parameter.strip_prefix("deny_status=")) {
        None | Some("429") => Ok(StatusCode::TOO_MANY_REQUESTS),
        Some("403") => Ok(StatusCode::FORBIDDEN),
        Some(other) => Err(Problem::bad_request(format!("deny_status: {other:?} is neither 403 nor 429"))),
    }
}

/// Returns the dimensions that rules use. Unused dimensions are not read, so they cost nothing and
/// cannot be wrong.
fn describe<'h>(req: &'h HttpRequest<'_>, used: &'h [String]) -> Result<Dimensions<'h>, Problem> {
    let headers = &req.parts.headers;
    let mut request = Dimensions::keeping_secret(&req.shared.protocol.secret_headers);
    for name in used {
        let added = match name.as_str() {
            ADDRESS => request.add_address(client_address(req)),
            "method" => request.add(
                name.into(),
                read_field(headers, &METHOD, |value| latin(value).to_ascii_uppercase())?.into(),
            ),
            "path" => request.add(name.into(), read_field(headers, &PATH, normal_path)?.into()),
            "host" => request.add(name.into(), read_field(headers, &HOST, normal_host)?.into()),
            other => match other.strip_prefix(HEADER_PREFIX).and_then(|field| header(headers, field)) {
                Some(value) => request.add(name.into(), value),
                // Clients need not send a field. And other dimensions are those of callers that
                // name them themselves.
                None => Ok(()),
            },
        };
        added.map_err(|error| refuse(&error))?;
    }
    Ok(request)
}

/// A value that is too long to be looked at does not pass: it would be a way around every rule that
/// looks at it.
fn refuse(error: &DimensionsError) -> Problem {
    let status = match error {
        DimensionsError::Value { .. } => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        DimensionsError::TooMany(_) | DimensionsError::Name(_) | DimensionsError::Twice(_) => {
            StatusCode::BAD_REQUEST
        }
    };
    Problem::new(status, error.to_string())
}

/// Returns the common value of the fields. A proxy sets one of them; the others may come from the
/// client, so they must agree.
fn read_field(
    headers: &HeaderMap,
    what: &ForwardedField,
    read: fn(&[u8]) -> String,
) -> Result<String, Problem> {
    let ForwardedField { dimension, fields, field_name } = what;
    let mut values =
        fields.iter().flat_map(|field| headers.get_all(*field)).map(|value| read(value.as_bytes()));
    let first = values.next().ok_or_else(|| {
        Problem::bad_request(format!(
            "{dimension}: rules look at it, and the request has none of {field_name}"
        ))
    })?;
    if values.any(|value| value != first) {
        return Err(Problem::bad_request(format!("{dimension}: {field_name} say different things")));
    }
    Ok(first)
}

/// A host without its port, in small letters, without the dot of the root: all of them name the
/// same.
fn normal_host(value: &[u8]) -> String {
    let host = latin(value).to_ascii_lowercase();
    let name = match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => &host,
    };
    name.strip_suffix('.').unwrap_or(name).to_owned()
}

/// A header field, its lines joined as HTTP has it.
fn header<'h>(headers: &'h HeaderMap, field: &str) -> Option<Cow<'h, str>> {
    let mut lines = headers.get_all(field).iter().map(|line| latin(line.as_bytes()));
    let first = lines.next()?;
    Some(lines.fold(first, |joined, line| Cow::Owned(format!("{joined}, {line}"))))
}

/// Converts bytes to text. If they are not valid UTF-8, each byte becomes a letter of Latin-1, so
/// that different invalid bytes stay different.
fn latin(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) => Cow::Borrowed(text),
        Err(_) => bytes.iter().map(|byte| char::from(*byte)).collect::<String>().into(),
    }
}

fn client_address(req: &HttpRequest<'_>) -> IpAddr {
    static UNTRUSTED: Once = Once::new();
    static SILENT: Once = Once::new();
    let (peer, headers) = (req.peer.ip(), &req.parts.headers);
    match (address::is_trusted(peer, &req.shared.protocol.trusted_proxies), address::is_forwarded(headers)) {
        (false, _) => UNTRUSTED.call_once(|| {
            tracing::warn!(%peer, "forward-auth is asked by a peer that is not among trusted_proxies: all its \
                 clients count as one address, its own. Add it to trusted_proxies");
        }),
        (true, false) => SILENT.call_once(|| {
            tracing::warn!(%peer, "forward-auth is asked by a proxy that sends neither X-Forwarded-For nor Forwarded: \
                 all its clients count as one address, its own");
        }),
        (true, true) => {}
    }
    address::client(peer, headers, &req.shared.protocol.trusted_proxies)
}

fn respond(req: &HttpRequest<'_>, decision: &RequestDecision<'_>, deny_status: StatusCode) -> HttpResponse {
    let mut answer = if decision.is_allowed() {
        Response::default()
    } else {
        text(deny_status, PROBLEM_CONTENT_TYPE, denial(&decision.headline.decision, deny_status))
    };
    req.set_decision_headers(&mut answer, decision);
    answer
}

/// A denial, as the draft of the rate limit fields has it.
#[derive(Debug, Deserialize, Serialize, ToSchema)]
struct QuotaExceeded {
    r#type: String,
    title: String,
    status: u16,
    /// The rules that denied.
    #[serde(rename = "violated-policies")]
    violated_policies: Vec<String>,
}

/// The problem of a 429, with the status that is really sent.
fn denial(decision: &Decision<'_>, status: StatusCode) -> String {
    let body = problem_body(decision);
    let problem = serde_json::from_str::<QuotaExceeded>(&body);
    let respond = problem.and_then(|mut problem| {
        problem.status = status.as_u16();
        serde_json::to_string(&problem)
    });
    respond.unwrap_or(body)
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::sync::Arc;
    use std::time::Duration;

    use ::http::Request;
    use bytes::Bytes;
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt;
    use tidegate_rules::RuleSet;

    use super::*;
    use crate::fuzzing::small_config;
    use crate::load;
    use crate::rules::ActiveRules;
    use crate::shared::Shared;

    type Fields<'f> = &'f [(&'f str, &'f str)];

    fn server(rules: &str) -> Shared {
        let shared = Shared::new(&mut small_config(None)).expect("fits");
        let set = RuleSet::parse(rules).expect("good rules");
        let rules = ActiveRules::new(set, &shared).expect("fits");
        shared.rules.store(Arc::new(rules));
        shared
    }

    fn rule(lines: &str) -> String {
        format!("[[rules]]\nname = 'a'\nlimit = 2\nperiod = '1m'\n{lines}\n")
    }

    fn ask(shared: &Shared, peer: &str, query: &str, fields: Fields<'_>) -> (u16, HeaderMap, String) {
        let mut request = Request::get(format!("/forward-auth{query}"));
        for (name, value) in fields {
            request = request.header(*name, value.as_bytes());
        }
        let (parts, ()) = request.body(()).expect("a request").into_parts();
        let peer = SocketAddr::new(peer.parse().expect("an address"), 4711);
        let req = HttpRequest::new(shared, peer, parts, Bytes::new());
        // Without an origin, a decision never waits.
        let (parts, body) = answer(&req).now_or_never().expect("answered at once").into_parts();
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        let body = runtime.block_on(body.collect()).expect("whole").to_bytes();
        (parts.status.as_u16(), parts.headers, String::from_utf8(body.to_vec()).expect("text"))
    }

    fn status(shared: &Shared, fields: Fields<'_>) -> u16 {
        ask(shared, "127.0.0.1", "", fields).0
    }

    #[test]
    fn denial_uses_the_status_that_the_proxy_expects() {
        let shared = server(&rule("key = ['ip']"));
        let from = [("x-forwarded-for", "192.0.2.7")];
        for left in ["1", "0"] {
            let (status, headers, body) = ask(&shared, "127.0.0.1", "", &from);
            assert_eq!((status, body.as_str()), (200, ""));
            assert_eq!(headers["x-ratelimit-remaining"], left);
        }
        let title = "Request cannot be satisfied as assigned quota has been exceeded";
        for (query, denied) in
            [("", 429), ("?deny_status=429", 429), ("?deny_status=403", 403), ("?a=b&c", 429)]
        {
            let (status, headers, body) = ask(&shared, "127.0.0.1", query, &from);
            assert_eq!(status, denied, "{query}");
            assert_eq!(headers["content-type"], "application/problem+json");
            assert_eq!(headers["retry-after"], "30");
            assert_eq!(headers["ratelimit-policy"], "\"a\";q=2;w=60");
            assert_eq!(headers["x-ratelimit-denied-by"], "a");
            let problem: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!((&problem["status"], &problem["title"]), (&denied.into(), &title.into()));
        }
    }

    #[test]
    fn invalid_forward_auth_requests_are_rejected_with_a_reason() {
        let shared = server(&rule("key = ['method', 'path', 'host', 'header.x-key']"));
        let long = "x".repeat(1_025);
        let (method, path, host) =
            (("x-forwarded-method", "GET"), ("x-forwarded-uri", "/"), ("x-forwarded-host", "a"));
        let long_path = format!("/{long}");
        let cases: &[(&str, Fields<'_>, u16, &str)] = &[
            ("?deny_status=500", &[], 400, "deny_status: \"500\" is neither 403 nor 429"),
            ("?deny_status=", &[], 400, "deny_status: \"\" is neither 403 nor 429"),
            (
                "",
                &[path, host],
                400,
                "method: rules look at it, and the request has none of X-Forwarded-Method, X-Original-Method",
            ),
            (
                "",
                &[method, host],
                400,
                "path: rules look at it, and the request has none of X-Forwarded-Uri, X-Original-URI, X-Original-URL",
            ),
            (
                "",
                &[method, path],
                400,
                "host: rules look at it, and the request has none of X-Forwarded-Host",
            ),
            (
                "",
                &[method, path, host, ("x-original-uri", "/b")],
                400,
                "path: X-Forwarded-Uri, X-Original-URI, X-Original-URL say different things",
            ),
            (
                "",
                &[method, path, host, ("x-forwarded-uri", "/b")],
                400,
                "path: X-Forwarded-Uri, X-Original-URI, X-Original-URL say different things",
            ),
            (
                "",
                &[method, path, host, ("x-original-method", "PUT")],
                400,
                "method: X-Forwarded-Method, X-Original-Method say different things",
            ),
            (
                "",
                &[method, ("x-forwarded-uri", &long_path), host],
                431,
                "dimensions.path: 1026 bytes is outside 0 to 1024",
            ),
            (
                "",
                &[method, path, host, ("x-key", &long)],
                431,
                "dimensions.header.x-key: 1025 bytes is outside 0 to 1024",
            ),
        ];
        for (query, fields, status, detail) in cases {
            let (got, headers, body) = ask(&shared, "127.0.0.1", query, fields);
            assert_eq!(got, *status, "{detail}");
            assert_eq!(headers["content-type"], "application/problem+json");
            let problem: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!(problem["detail"], *detail);
        }
        // Two fields with the same value are accepted, and a field that no rule uses may have any
        // length.
        let fine = [method, path, host, ("x-original-url", "http://a//./?q"), ("x-other", &long)];
        assert_eq!(status(&shared, &fine), 200);
    }

    #[test]
    fn a_limit_counts_every_spelling_of_a_path() {
        let shared = server(&rule("key = ['path']\nwhen = { path = '/login', method = 'POST' }"));
        let post = |uri: &str| status(&shared, &[("x-forwarded-method", "POST"), ("x-forwarded-uri", uri)]);
        assert_eq!(["/login", "//login?x=1", "/%6cogin", "/a/../login"].map(post), [200, 200, 429, 429]);
        assert_eq!(status(&shared, &[("x-forwarded-method", "post"), ("x-forwarded-uri", "/login")]), 429);
        assert_eq!(post("/logins"), 200);
    }

    #[test]
    fn a_limit_counts_every_spelling_of_a_host() {
        let shared = server(&rule("key = ['host']\nwhen = { host = 'example.com' }"));
        let ask = |host: &str| status(&shared, &[("x-forwarded-host", host)]);
        assert_eq!(
            ["example.com", "Example.COM:443", "example.com.", "example.com.:80"].map(ask),
            [200, 200, 429, 429]
        );
        assert_eq!(normal_host(b"[2001:db8::1]:80"), "[2001:db8::1]");
        assert_eq!(normal_host(b"[2001:db8::1]"), "[2001:db8::1]");
    }

    #[test]
    fn a_header_field_is_known_by_any_spelling_of_its_name() {
        let shared = server(&rule("key = ['header.X-Api-Key']"));
        let keyed = |key: &str| status(&shared, &[("x-api-key", key)]);
        assert_eq!(["k", "k", "k", "l"].map(keyed), [200, 200, 429, 200]);
        // The rule does not count requests without the field.
        assert_eq!([(); 4].map(|()| status(&shared, &[])), [200; 4]);
        let twice = [("x-api-key", "k"), ("x-api-key", "l")];
        assert_eq!([(); 3].map(|()| status(&shared, &twice)), [200, 200, 429]);
    }

    #[test]
    fn clients_are_counted_by_the_hop_that_is_theirs() {
        let shared = server(&rule("key = ['ip']"));
        let from = |list: &str| status(&shared, &[("x-forwarded-for", list)]);
        assert_eq!(["192.0.2.7", "1.1.1.1, 192.0.2.7", "2.2.2.2, 192.0.2.7"].map(from), [200, 200, 429]);
        let v6 = ["2001:db8::1", "2001:db8::2", "[2001:db8::3]:80", "2001:db8:0:1::1"];
        assert_eq!(v6.map(from), [200, 200, 429, 200]);
        // A stranger's word does not count: all its clients are one.
        let stranger = |list: &str| ask(&shared, "198.51.100.1", "", &[("x-forwarded-for", list)]).0;
        assert_eq!(["192.0.2.1", "192.0.2.2", "192.0.2.3"].map(stranger), [200, 200, 429]);
    }

    #[test]
    fn networks_are_compared_with_the_whole_address() {
        let shared = server(&rule("key = ['ip']\nwhen = { ip = ['203.0.113.0/24', '2001:db8::1'] }"));
        let from = |list: &str| {
            ask(&shared, "127.0.0.1", "", &[("x-forwarded-for", list)]).1.contains_key("ratelimit")
        };
        let req = ["203.0.113.9", "203.0.114.9", "2001:db8::1", "2001:db8::2"];
        assert_eq!(req.map(from), [true, false, true, false]);
    }

    #[test]
    fn a_busy_server_lets_comfort_pass_and_nothing_else() {
        for (class, expected) in [("comfort", 200), ("cost", 503), ("security", 503)] {
            let shared = server(&rule(&format!("key = []\nclass = '{class}'")));
            (0..load::LATE_LOOKS).for_each(|_| load::note(Duration::from_secs(1)));
            let (status, headers, _) = ask(&shared, "127.0.0.1", "", &[]);
            load::note(Duration::ZERO);
            assert_eq!(status, expected, "{class}");
            assert_eq!(headers.contains_key("retry-after"), expected == 503);
        }
    }
}
