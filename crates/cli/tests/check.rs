//! `POST /v1/check` of a real server: invalid requests and their exact responses, and the isolation
//! of tenants.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use support::raw::{Reply, request, send};
use support::{serve, token_entry, write};
use tidegate_testkit::Server;

const RULES: &str = "
    [[rules]]
    name = 'per_user'
    key = ['user']
    limit = 2
    period = '1h'
";

fn problem(status: u16, title: &str, detail: &str) -> String {
    let detail = serde_json::to_string(detail).expect("text");
    format!(r#"{{"type":"about:blank","title":"{title}","status":{status},"detail":{detail}}}"#)
}

/// Sends a request that must be refused, and compares the exact response.
fn assert_refused(server: &Server, body: &str, detail: &str) {
    let reply = send(server.address("http"), &request("POST", "/v1/check", &[], Some(body)));
    assert_eq!(reply.status, 400, "{body}: {}", reply.body);
    assert_eq!(reply.body, problem(400, "Bad Request", detail), "{body}");
    assert_eq!(reply.header("content-type"), Some("application/problem+json"));
}

#[test]
fn malformed_body_gets_an_exact_error() {
    let server = serve(&[]);
    for (body, why) in [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{", "EOF while parsing an object at line 1 column 1"),
        ("nonsense", "expected ident at line 1 column 2"),
        ("[]", "invalid type: sequence, expected an object at line 1 column 0"),
        ("[{},1,200]", "invalid type: sequence, expected an object at line 1 column 0"),
        ("{}", "missing field `dimensions` at line 1 column 2"),
        (r#"{"dimensions":{},"dimensions":{}}"#, "duplicate field `dimensions` at line 1 column 29"),
        (r#"{"dimensions":{}} x"#, "trailing characters at line 1 column 19"),
    ] {
        assert_refused(&server, body, &format!("body: {why}"));
    }
}

#[test]
fn invalid_fields_are_named_with_allowed_values() {
    let server = serve(&[]);
    let field = |name: &str, value: &str| format!(r#"{{"dimensions":{{}},"{name}":{value}}}"#);
    for (cost, why) in [
        ("-1", "invalid value: integer `-1`, expected u64 at line 1 column 26"),
        ("1.5", "invalid type: floating point `1.5`, expected u64 at line 1 column 27"),
        (
            "18446744073709551616",
            "invalid type: floating point `1.8446744073709552e+19`, expected u64 at line 1 column 44",
        ),
    ] {
        let detail = format!("cost: {why}; allowed is a whole number from 0 to 18446744073709551615");
        assert_refused(&server, &field("cost", cost), &detail);
    }
    let why = "invalid value: integer `70000`, expected u16 at line 1 column 36; allowed are 200 and 429";
    assert_refused(&server, &field("deny_status", "70000"), &format!("deny_status: {why}"));
    assert_refused(&server, &field("deny_status", "403"), "deny_status: 403 is neither 200 nor 429");
    let expected = "expected one of `dimensions`, `cost`, `deny_status` at line 1 column 24";
    assert_refused(&server, &field("price", "1"), &format!("price: unknown field `price`, {expected}"));
}

#[test]
fn invalid_dimensions_are_named_with_allowed_values() {
    let server = serve(&[]);
    let refused = |dimensions: &str, detail: &str| {
        assert_refused(&server, &format!(r#"{{"dimensions":{dimensions}}}"#), detail);
    };
    for (dimensions, why) in [
        ("\"user\"", "invalid type: string \"user\", expected a map at line 1 column 20"),
        (r#"{"user":7}"#, "invalid type: integer `7`, expected a string at line 1 column 23"),
    ] {
        refused(dimensions, &format!("dimensions: {why}; allowed is an object of names and texts"));
    }
    for (name, told) in [("", ""), ("us er", "us er"), (&"n".repeat(65), &"n".repeat(64))] {
        let allowed = "1 to 64 of the characters a-z, A-Z, 0-9, _, - and .";
        let detail = format!("dimensions: the name {told:?} is not {allowed}");
        refused(&format!(r#"{{"{name}":"x"}}"#), &detail);
    }
    refused(r#"{"user":"a","user":"b"}"#, "dimensions.user: given twice");
    let long = "x".repeat(1_025);
    refused(&format!(r#"{{"user":"{long}"}}"#), "dimensions.user: 1025 bytes is outside 0 to 1024");
    let many: Vec<String> = (0..33).map(|at| format!(r#""d{at}":"x""#)).collect();
    refused(&format!("{{{}}}", many.join(",")), "dimensions: 33 is outside 0 to 32");
}

#[test]
fn rejected_request_is_not_charged() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&["--rules", &write(folder.path(), "rules.toml", RULES)]);
    let twice = r#"{"dimensions":{"user":"x","user":"y"}}"#;
    assert_refused(&server, twice, "dimensions.user: given twice");
    assert_refused(
        &server,
        r#"{"dimensions":{"user":"x"},"deny_status":403}"#,
        "deny_status: 403 is neither 200 nor 429",
    );
    let reply = check(&server, "", r#"{"dimensions":{"user":"x"}}"#);
    assert_eq!((reply.status, reply.header("x-ratelimit-remaining")), (200, Some("1")));
}

#[test]
fn missing_paths_wrong_methods_and_large_bodies_get_errors() {
    let server = serve(&[]);
    let address = server.address("http");
    let no_body = send(address, &request("POST", "/v1/check", &[], None));
    assert_eq!(
        no_body.body,
        problem(400, "Bad Request", "body: EOF while parsing a value at line 1 column 0")
    );

    let not_found = send(address, &request("POST", "/v1/chekc", &[], Some("{}")));
    assert_eq!(not_found.status, 404);
    assert_eq!(not_found.body, problem(404, "Not Found", "there is nothing at /v1/chekc"));

    for method in ["GET", "PUT", "DELETE", "BREW"] {
        let wrong_method = send(address, &request(method, "/v1/check", &[], None));
        assert_eq!((wrong_method.status, wrong_method.header("allow")), (405, Some("POST")), "{method}");
        assert_eq!(
            wrong_method.body,
            problem(405, "Method Not Allowed", "method: only POST is answered here")
        );
    }

    let most = 512 << 10;
    let too_large = send(address, &request("POST", "/v1/check", &[], Some(&" ".repeat(most + 1))));
    assert_eq!(too_large.status, 413);
    assert_eq!(too_large.body, problem(413, "Payload Too Large", "body: more than 524288 bytes"));
    let question = r#"{"dimensions":{}}"#;
    let largest = format!("{question}{}", " ".repeat(most - question.len()));
    assert_eq!(send(address, &request("POST", "/v1/check", &[], Some(&largest))).status, 200);
}

#[test]
fn cost_above_the_burst_is_denied_without_retry() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&["--rules", &write(folder.path(), "rules.toml", RULES)]);
    let body = r#"{"dimensions":{"user":"a"},"cost":18446744073709551615,"deny_status":429}"#;
    let reply = check(&server, "", body);
    assert_eq!((reply.status, reply.header("retry-after")), (429, None));
    let answer: serde_json::Value = serde_json::from_str(&reply.body).expect("JSON");
    assert_eq!((&answer["denied_by"], &answer["rules"][0]["never"]), (&"per_user".into(), &true.into()));
}

#[test]
fn an_address_counts_however_it_is_spelled() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = "[[rules]]\nname = 'per_address'\nkey = ['ip']\nlimit = 1\nperiod = '1h'\n";
    let server = serve(&["--rules", &write(folder.path(), "rules.toml", rules)]);
    let status = |ip: &str| {
        let body = format!(r#"{{"dimensions":{{"ip":"{ip}"}},"deny_status":429}}"#);
        check(&server, "", &body).status
    };
    assert_eq!(status("2001:db8::1"), 200);
    for same in ["2001:DB8::1", "2001:db8:0::1", "2001:db8::2"] {
        assert_eq!(status(same), 429, "{same}");
    }
    assert_eq!([status("2001:db8:0:1::1"), status("192.0.2.1"), status("::ffff:192.0.2.1")], [200, 200, 429]);
}

#[test]
fn a_token_opens_its_tenant_and_no_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let config = [
        "[[tenants]]\nname = 'a'\n[[tenants]]\nname = 'b'\n".to_owned(),
        token_entry("token-of-a", "a", "client"),
        token_entry("token-of-b", "b", "client"),
        token_entry("viewer-of-a", "a", "viewer"),
        token_entry("viewer-of-all", "", "viewer"),
    ];
    let config = write(folder.path(), "config.toml", &config.concat());
    let rules = write(folder.path(), "rules.toml", RULES);
    let server = serve(&["--config", &config, "--rules", &rules]);

    let same_user = r#"{"dimensions":{"user":"x"},"deny_status":429}"#;
    let asks = |token: &str| check(&server, token, same_user).status;
    assert_eq!([asks("token-of-a"), asks("token-of-a"), asks("token-of-a")], [200, 200, 429]);
    assert_eq!([asks("token-of-b"), asks("token-of-b"), asks("token-of-b")], [200, 200, 429]);
    // Another token of the same tenant counts with it.
    assert_eq!(asks("viewer-of-a"), 429);

    for wrong in ["", "token-of-c", "token-of-a2", "token-of-", "TOKEN-OF-A"] {
        let reply = check(&server, wrong, same_user);
        assert_eq!((reply.status, reply.header("www-authenticate")), (401, Some("Bearer")), "{wrong}");
        let detail = "authorization: no `Bearer` token that this server knows";
        assert_eq!(reply.body, problem(401, "Unauthorized", detail));
    }
    let metrics = |token: &str| {
        let authorization = format!("Bearer {token}");
        let fields = [("Authorization", authorization.as_str())];
        send(server.address("admin"), &request("GET", "/metrics", &fields, None))
    };
    let forbidden = metrics("token-of-a");
    let detail = "authorization: this needs the role \"viewer\" or a higher one";
    assert_eq!((forbidden.status, forbidden.body), (403, problem(403, "Forbidden", detail)));
    // Metrics cover all tenants, so a tenant's token may not read them.
    let forbidden = metrics("viewer-of-a");
    let detail = "authorization: this needs a token without a tenant";
    assert_eq!((forbidden.status, forbidden.body), (403, problem(403, "Forbidden", detail)));
    assert_eq!(metrics("viewer-of-all").status, 200);
}

fn check(server: &Server, token: &str, body: &str) -> Reply {
    let authorization = format!("Bearer {token}");
    let fields = [("Authorization", authorization.as_str())];
    let fields = if token.is_empty() { &fields[..0] } else { &fields[..] };
    send(server.address("http"), &request("POST", "/v1/check", fields, Some(body)))
}
