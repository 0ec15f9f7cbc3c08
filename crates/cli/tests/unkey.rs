//! Unkey's HTTP API: its own clients, every wrong request, overrides that outlive the process, and
//! a description that is true.

#![allow(clippy::expect_used, clippy::panic, reason = "tests fail by it")]

mod support;

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use serde_json::{Value, json};
use support::raw::{begin, finish, request};
use support::{node_dir, serve, token_entry, tool, write};
use tidegate_testkit::{START_TIME_MAX, Server, wait_until};

const HOUR_MS: u64 = 3_600_000;

/// A client that does not validate its requests.
struct Client {
    agent: ureq::Agent,
    base: String,
    token: Option<String>,
}

/// The status, the body, and a few header fields.
struct UnkeyReply {
    status: u16,
    body: Value,
    headers: ureq::http::HeaderMap,
}

impl Client {
    fn of(server: &Server) -> Self {
        let agent = ureq::Agent::config_builder().http_status_as_error(false).build().into();
        Self { agent, base: server.url("http", ""), token: None }
    }

    fn with(self, token: &str) -> Self {
        Self { token: Some(token.to_owned()), ..self }
    }

    fn raw(&self, method: &str, path: &str, body: &str) -> UnkeyReply {
        let mut request = ureq::http::Request::builder().method(method).uri(format!("{}{path}", self.base));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let request = request.header("content-type", "application/json");
        let request = request.body(body.to_owned()).expect("a request");
        let mut answer = self.agent.run(request).expect("an answer");
        let text = answer.body_mut().read_to_string().expect("text");
        let body = serde_json::from_str(&text).unwrap_or(Value::String(text));
        UnkeyReply { status: answer.status().as_u16(), body, headers: answer.headers().clone() }
    }

    /// Calls an endpoint. If other tests keep the machine busy, the server sheds checks: these pass
    /// undecided, without `RateLimit` fields, and are repeated.
    fn post(&self, endpoint: &str, body: &Value) -> UnkeyReply {
        let ask = || self.raw("POST", &format!("/v2/ratelimit.{endpoint}"), &body.to_string());
        let mut replied = ask();
        wait_until("a decision", START_TIME_MAX, || {
            let is_decided = replied.status != 200
                || !matches!(endpoint, "limit" | "multiLimit")
                || replied.headers.contains_key("ratelimit");
            if !is_decided {
                replied = ask();
            }
            is_decided
        });
        replied
    }

    /// Returns the data of a response that must be successful.
    fn data(&self, endpoint: &str, body: &Value) -> Value {
        let replied = self.post(endpoint, body);
        assert_eq!(replied.status, 200, "{endpoint} {body}: {}", replied.body);
        assert!(replied.body["meta"]["requestId"].as_str().is_some_and(|id| id.starts_with("req_")));
        replied.body["data"].clone()
    }
}

fn limit(identifier: &str, limit: u64) -> Value {
    json!({"namespace": "n", "identifier": identifier, "limit": limit, "duration": HOUR_MS})
}

/// An override has the fields of a limit.
fn set(identifier: &str, most: u64) -> Value {
    limit(identifier, most)
}

fn which(identifier: &str) -> Value {
    json!({"namespace": "n", "identifier": identifier})
}

/// A configuration with a token for each role and for another tenant. Gives its path.
fn tokens(folder: &Path) -> String {
    let text = [
        "[[tenants]]\nname = 'acme'\n".to_owned(),
        token_entry("client", "", "client"),
        token_entry("viewer", "", "viewer"),
        token_entry("operator", "", "operator"),
        token_entry("acme", "acme", "admin"),
    ];
    write(folder, "tidegate.toml", &text.concat())
}

fn run_node(script: &str, server: &Server) {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/node").join(script);
    let ran = Command::new(tool("node"))
        .arg(&script)
        .arg(node_dir())
        .arg(server.url("http", ""))
        .arg("operator")
        .output()
        .expect("node runs");
    let (said, complained) = (String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr));
    assert!(ran.status.success() && said.trim() == "ok", "{said}{complained}");
}

#[test]
fn the_ratelimit_package_of_npm_works() {
    let folder = tempfile::tempdir().expect("a folder");
    run_node("unkey_ratelimit.cjs", &serve(&["--config", &tokens(folder.path())]));
}

#[test]
fn the_api_package_of_npm_works() {
    let folder = tempfile::tempdir().expect("a folder");
    run_node("unkey_api.cjs", &serve(&["--config", &tokens(folder.path())]));
}

#[test]
fn denial_is_a_success_reply_with_retry_after() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let allowed = client.post("limit", &limit("a", 1));
    assert_eq!(allowed.headers["ratelimit-policy"], "\"n\";q=1;w=3600");
    assert_eq!(allowed.headers["x-ratelimit-remaining"], "0");
    assert_eq!(allowed.headers["content-type"], "application/json");
    let denied = client.post("limit", &limit("a", 1));
    assert_eq!((denied.status, &denied.body["data"]["success"]), (200, &json!(false)));
    assert_eq!(denied.headers["x-ratelimit-denied-by"], "n");
    let retry: u64 = denied.headers["retry-after"].to_str().expect("text").parse().expect("seconds");
    let reset_ms = denied.body["data"]["reset"].as_u64().expect("a number");
    let reset_header: u64 =
        denied.headers["x-ratelimit-reset"].to_str().expect("text").parse().expect("seconds");
    assert!(retry > 0 && reset_ms.div_ceil(1_000) == reset_header, "{retry} {reset_ms} {reset_header}");
    // Other identifiers, namespaces and durations are other meters; another limit is not.
    assert_eq!(client.data("limit", &limit("b", 1))["success"], true);
    let elsewhere = json!({"namespace": "m", "identifier": "a", "limit": 1, "duration": HOUR_MS});
    assert_eq!(client.data("limit", &elsewhere)["success"], true);
    let longer = json!({"namespace": "n", "identifier": "a", "limit": 1, "duration": 2 * HOUR_MS});
    assert_eq!(client.data("limit", &longer)["success"], true);
    assert_eq!(client.data("limit", &limit("a", 3))["remaining"], 1);
}

#[test]
fn costs_that_can_never_pass_are_denied_and_blocks_block() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let mut dear = limit("a", 5);
    for cost in [6, 1_u64 << 53, u64::MAX] {
        dear["cost"] = json!(cost);
        let replied = client.data("limit", &dear);
        assert_eq!((&replied["success"], &replied["remaining"]), (&json!(false), &json!(5)), "{cost}");
    }
    dear["cost"] = json!(5);
    assert_eq!(client.data("limit", &dear)["remaining"], 0);
    let id = client.data("setOverride", &set("b", 0))["overrideId"].clone();
    let blocked = client.data("limit", &limit("b", 4_294_967_295));
    assert_eq!(
        (&blocked["success"], &blocked["limit"], &blocked["overrideId"]),
        (&json!(false), &json!(0), &id)
    );
}

#[test]
fn several_limits_are_charged_together_or_not_at_all() {
    let server = serve(&[]);
    let client = Client::of(&server);
    // The same key twice counts twice.
    let twice = client.data("multiLimit", &json!([limit("a", 2), limit("a", 2)]));
    assert_eq!(twice["passed"], true, "{twice}");
    let denied = client.data("multiLimit", &json!([limit("b", 2), limit("a", 2)]));
    assert_eq!((&denied["passed"], &denied["limits"][0]["passed"]), (&json!(false), &json!(true)));
    let mut look = limit("b", 2);
    look["cost"] = json!(0);
    assert_eq!(client.data("limit", &look)["remaining"], 2);
    let replied = client.post("multiLimit", &json!([limit("c", 2), limit("d", 3)]));
    assert_eq!(replied.headers["ratelimit-policy"], "\"n\";q=2;w=3600, \"n\";q=3;w=3600");
    assert_eq!(replied.body["data"]["limits"][1]["identifier"], "d");
}

#[test]
fn namespaces_may_choose_gcra() {
    let server = serve(&["--gcra-namespaces", "exact, pre*"]);
    let client = Client::of(&server);
    for (namespace, is_gcra) in [("exact", true), ("prefix", true), ("other", false)] {
        let ask = json!({"namespace": namespace, "identifier": "a", "limit": 3_600, "duration": HOUR_MS});
        let replied = client.post("limit", &ask);
        // One of 3,600 an hour drains in a second; a window forgets it only when it has passed.
        let wait: u64 = replied.headers["ratelimit"]
            .to_str()
            .expect("text")
            .rsplit_once("t=")
            .expect("a time")
            .1
            .parse()
            .expect("seconds");
        assert_eq!(wait <= 1, is_gcra, "{namespace}: {wait}");
    }
}

#[test]
fn overrides_apply_by_how_specific_they_are() {
    let server = serve(&[]);
    let client = Client::of(&server);
    for (pattern, most) in [("*", 10), ("vip*", 20), ("*admin", 30), ("vip_1", 40)] {
        client.data("setOverride", &set(pattern, most));
    }
    for (identifier, most) in [("x", 10), ("vip_2", 20), ("vip_admin", 30), ("vip_1", 40)] {
        assert_eq!(client.data("limit", &limit(identifier, 1))["limit"], most, "{identifier}");
    }
    let first = client.data("getOverride", &which("vip*"))["overrideId"].clone();
    let again = client.data("setOverride", &set("vip*", 21))["overrideId"].clone();
    assert_eq!(first, again, "an override that is set again keeps its id");
    assert_eq!(client.data("limit", &limit("vip_2", 1))["limit"], 21);
    client.data("deleteOverride", &which("vip*"));
    assert_eq!(client.data("limit", &limit("vip_2", 1))["limit"], 10);
}

#[test]
fn overrides_survive_a_kill_and_a_stop() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let mut server = serve(&["--data-dir", &data]);
    Client::of(&server).data("setOverride", &set("a*", 7));
    server.process.kill();

    let mut server = serve(&["--data-dir", &data]);
    let client = Client::of(&server);
    assert_eq!(client.data("limit", &limit("abc", 1))["limit"], 7);
    client.data("setOverride", &set("b", 8));
    client.data("deleteOverride", &which("a*"));
    assert_eq!(server.process.terminate(), Some(0));

    let server = serve(&["--data-dir", &data]);
    let client = Client::of(&server);
    assert_eq!(client.data("limit", &limit("abc", 1))["limit"], 1);
    assert_eq!(client.data("getOverride", &which("b"))["limit"], 8);
}

#[test]
fn overrides_of_a_rules_file_and_of_clients_are_in_force_together() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let text = |limit: u64| {
        format!(
            "rules = []\n[[overrides]]\nname='file'\nnamespace='n'\nidentifier='vip*'\nlimit={limit}\n\
             period='1h'\n"
        )
    };
    let rules = write(folder.path(), "rules.toml", &text(20));
    let start = || serve(&["--rules", &rules, "--data-dir", &data]);
    let server = start();
    let client = Client::of(&server);
    let limit_of =
        |client: &Client, identifier: &str| client.data("limit", &limit(identifier, 1))["limit"].clone();
    let answer = client.data("setOverride", &set("*", 10));
    assert_eq!(answer["scope"], "server");
    assert_eq!([limit_of(&client, "x"), limit_of(&client, "vip_1")], [10, 20]);
    assert_eq!(listed(&client, 10), ["*", "vip*"]);
    let found = client.data("getOverride", &which("vip*"));
    assert_eq!((&found["overrideId"], &found["scope"]), (&json!("file"), &json!("server")));
    assert_eq!(client.post("deleteOverride", &which("vip*")).status, 400, "it is in the file");

    // Another version of the file leaves the overrides of clients alone.
    write(folder.path(), "rules.toml", &text(30));
    wait_until("the file to be read again", START_TIME_MAX, || limit_of(&client, "vip_1") == 30);
    assert_eq!(limit_of(&client, "x"), 10);
    client.data("setOverride", &set("vip*", 40));
    assert_eq!(limit_of(&client, "vip_1"), 40, "that of the client comes first");
    drop(server);
    let server = start();
    let client = Client::of(&server);
    assert_eq!([limit_of(&client, "x"), limit_of(&client, "vip_1")], [10, 40]);
    client.data("deleteOverride", &which("vip*"));
    assert_eq!(limit_of(&client, "vip_1"), 30);
}

#[test]
fn a_second_server_on_the_same_folder_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().to_string_lossy().into_owned();
    let _first = serve(&["--data-dir", &data]);
    let mut command = support::tidegate(&["serve", "--data-dir", &data]);
    for listener in ["http", "grpc", "resp", "admin"] {
        command.args([format!("--{listener}-listen"), "127.0.0.1:0".to_owned()]);
    }
    let second = command.output().expect("it ends by itself");
    let complaint = String::from_utf8_lossy(&second.stderr);
    assert_eq!(second.status.code(), Some(64), "{complaint}");
    assert!(
        complaint.contains("is in use by another server") && complaint.contains("--data-dir DIR"),
        "{complaint}"
    );
    // A configuration check does not disturb the running server.
    let checked = command.arg("--check-config").output().expect("it ends by itself");
    assert!(checked.status.success(), "{}", String::from_utf8_lossy(&checked.stderr));
}

#[test]
fn tenants_neither_see_nor_influence_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&["--config", &tokens(folder.path())]);
    let (ours, theirs) = (Client::of(&server).with("operator"), Client::of(&server).with("acme"));
    ours.data("setOverride", &set("*", 5));
    assert_eq!(theirs.data("limit", &limit("a", 1))["limit"], 1);
    assert_eq!(theirs.post("getOverride", &which("*")).status, 404);
    assert_eq!(theirs.post("deleteOverride", &which("*")).status, 404);
    assert_eq!(theirs.data("listOverrides", &json!({"namespace": "n"})), json!([]));
    assert_eq!(ours.data("limit", &limit("a", 1))["remaining"], 4);
}

#[test]
fn acknowledged_write_is_visible_in_every_list() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&["--config", &tokens(folder.path())]);
    std::thread::scope(|scope| {
        for token in ["operator", "acme"] {
            let client = Client::of(&server).with(token);
            scope.spawn(move || {
                for most in 1..=25 {
                    client.data("setOverride", &set(&format!("{token}{most:02}"), most));
                    assert_eq!(listed(&client, 10).len() as u64, most, "{token}");
                }
                client.data("deleteOverride", &which(&format!("{token}10")));
                let expected = (1..=25).filter(|at| *at != 10).map(|at| format!("{token}{at:02}"));
                assert_eq!(listed(&client, 10), expected.collect::<Vec<_>>());
            });
        }
    });
}

/// Concurrent writes of one tenant: three times as many as may wait.
const FLOOD: usize = 384;

#[test]
fn a_tenant_that_floods_the_store_is_refused_and_the_others_are_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&["--config", &tokens(folder.path()), "--data-dir", &data]);
    let calm = Client::of(&server).with("operator");
    // The number of waiting writes depends on the speed of the disk. If a flood is accepted whole,
    // another follows.
    wait_until("a write to be refused", START_TIME_MAX, || {
        let flood: Vec<_> =
            (0..FLOOD).map(|at| begin_set(&server, "acme", &set(&format!("a{at}"), 1))).collect();
        calm.data("setOverride", &set("calm", 1));
        let replies: Vec<_> = flood.into_iter().map(finish).collect();
        let refused: Vec<_> = replies.iter().filter(|reply| reply.status != 200).collect();
        for reply in &refused {
            assert_eq!((reply.status, reply.header("retry-after")), (429, Some("1")), "{}", reply.body);
            let error = &serde_json::from_str::<Value>(&reply.body).expect("JSON")["error"];
            assert_eq!(
                error["detail"],
                "overrides: 128 writes of this tenant wait already, the most that may"
            );
        }
        !refused.is_empty()
    });
    // A refused tenant may write again later.
    Client::of(&server).with("acme").data("setOverride", &set("later", 1));
}

/// Sends a write, and does not wait for it.
fn begin_set(server: &Server, token: &str, body: &Value) -> std::net::TcpStream {
    let authorization = format!("Bearer {token}");
    let fields = [("Authorization", authorization.as_str())];
    let bytes = request("POST", "/v2/ratelimit.setOverride", &fields, Some(&body.to_string()));
    begin(server.address("http"), &bytes)
}

/// The identifiers of all overrides, page by page.
fn listed(client: &Client, per_page: usize) -> Vec<String> {
    let mut identifiers = Vec::new();
    let mut cursor = json!("");
    loop {
        let ask = json!({"namespace": "n", "limit": per_page, "cursor": cursor});
        let replied = client.post("listOverrides", &ask).body;
        let page = replied["data"].as_array().expect("a list");
        assert!(page.len() <= per_page, "{replied}");
        identifiers.extend(page.iter().filter_map(|of| of["identifier"].as_str()).map(str::to_owned));
        if replied["pagination"]["hasMore"] != true {
            return identifiers;
        }
        cursor = replied["pagination"]["cursor"].clone();
    }
}

#[test]
fn roles_determine_the_allowed_endpoints() {
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&["--config", &tokens(folder.path())]);
    Client::of(&server).with("operator").data("setOverride", &set("a", 5));
    let list = json!({"namespace": "n"});
    let endpoints = [
        ("limit", limit("b", 1), "client"),
        ("multiLimit", json!([limit("b", 9)]), "client"),
        ("getOverride", which("a"), "viewer"),
        ("listOverrides", list, "viewer"),
        ("setOverride", set("c", 1), "operator"),
        ("deleteOverride", which("c"), "operator"),
    ];
    let roles = ["client", "viewer", "operator"];
    for (endpoint, body, least) in &endpoints {
        let needed = roles.iter().position(|role| role == least).expect("a role");
        for (at, role) in roles.iter().enumerate() {
            let replied = Client::of(&server).with(role).post(endpoint, body);
            if at >= needed {
                assert_eq!(replied.status, 200, "{endpoint} as {role}: {}", replied.body);
            } else {
                let detail = format!("authorization: this needs the role {least:?} or a higher one");
                assert_error(&replied, 403, "Forbidden", &detail);
            }
        }
        for client in [Client::of(&server), Client::of(&server).with("nobody's")] {
            let replied = client.post(endpoint, body);
            assert_error(
                &replied,
                401,
                "Unauthorized",
                "authorization: no `Bearer` token that this server knows",
            );
            assert_eq!(replied.headers["www-authenticate"], "Bearer");
        }
    }
}

fn assert_error(replied: &UnkeyReply, status: u16, title: &str, detail: &str) {
    assert_eq!(replied.headers["content-type"], "application/json");
    let mut body = replied.body.clone();
    let id = body["meta"]["requestId"].take();
    assert!(id.as_str().is_some_and(|id| id.starts_with("req_")), "{body}");
    let mut error = body["error"].take();
    let errors = error.as_object_mut().expect("an object").remove("errors");
    assert_eq!(errors.is_some(), status == 400, "{errors:?}");
    let expected = json!({"title": title, "detail": detail, "status": status, "type": "about:blank"});
    assert_eq!((replied.status, error), (status, expected));
}

const TEXT: &str = "a text of 1 to 512 characters";
const LIMITS: &str = "1 to 4294967295";
const DURATIONS: &str = "1000 to 2592000000";

/// A limit with another value in one of its fields.
fn limit_with(field: &str, value: impl Into<Value>) -> Value {
    let mut body = limit("a", 1);
    body[field] = value.into();
    body
}

/// Invalid limits, and the error for each.
fn wrong_limits() -> Vec<(Value, String)> {
    let text = |field: &str, value: Value, why: &str| {
        (limit_with(field, value), format!("{field}: {}", why.replace("TEXT", TEXT)))
    };
    let number = |field: &str, value: Value, why: &str| {
        let range = if field == "limit" { LIMITS } else { DURATIONS };
        (limit_with(field, value), format!("{field}: {why} {range}"))
    };
    vec![
        text("namespace", json!(""), "0 characters is outside 1 to 512"),
        text("namespace", json!("x".repeat(513)), "513 characters is outside 1 to 512"),
        text("identifier", json!(""), "0 characters is outside 1 to 512"),
        text("identifier", json!(7), "a number is not TEXT"),
        text("identifier", json!(["a"]), "a list is not TEXT"),
        text("identifier", Value::Null, "missing; must be TEXT"),
        number("limit", json!(0), "0 is outside"),
        number("limit", json!(-1), "-1 is outside"),
        number("limit", json!(1_u64 << 32), "4294967296 is outside"),
        number("limit", json!(1.5), "1.5 is not a whole number from"),
        number("limit", json!("1"), "a text is not a whole number from"),
        number("limit", json!(true), "a boolean is not a whole number from"),
        number("limit", json!({"a": [1]}), "an object is not a whole number from"),
        number("duration", json!(999), "999 is outside"),
        number("duration", json!(2_592_000_001_u64), "2592000001 is outside"),
        text("cost", json!(-1), "-1 is outside 0 to 18446744073709551615"),
    ]
}

#[test]
fn invalid_limit_gets_an_exact_error() {
    let server = serve(&[]);
    let client = Client::of(&server);
    for (body, detail) in wrong_limits() {
        assert_error(&client.post("limit", &body), 400, "Bad Request", &detail);
        let replied = client.post("multiLimit", &json!([limit("a", 1), body]));
        assert_error(&replied, 400, "Bad Request", &format!("[1].{detail}"));
        let location = format!("body[1].{}", detail.split(':').next().expect("a field"));
        assert_eq!(replied.body["error"]["errors"][0]["location"], location);
    }
}

#[test]
fn all_problems_of_a_request_are_reported_together() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let missing = [
        format!("namespace: missing; must be {TEXT}"),
        format!("identifier: missing; must be {TEXT}"),
        format!("limit: missing; must be a whole number from {LIMITS}"),
        format!("duration: missing; must be a whole number from {DURATIONS}"),
    ];
    assert_error(&client.post("limit", &json!({})), 400, "Bad Request", &missing.join("; "));
    let replied = client.post("multiLimit", &json!([{}, limit("a", 1), {}]));
    let errors = replied.body["error"]["errors"].as_array().expect("a list");
    let locations: Vec<&str> = errors.iter().filter_map(|error| error["location"].as_str()).collect();
    let expected = |at: usize| {
        ["namespace", "identifier", "limit", "duration"].map(|field| format!("body[{at}].{field}"))
    };
    assert_eq!(locations, [expected(0), expected(2)].concat());
}

#[test]
fn invalid_override_gets_an_exact_error() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let page = |field: &str, value: Value| json!({"namespace": "n", field: value});
    let missing = |field: &str| format!("{field}: missing; must be {TEXT}");
    for (endpoint, body, detail) in [
        ("setOverride", limit_with("limit", -1), "limit: -1 is outside 0 to 4294967295"),
        ("setOverride", limit_with("duration", 999), "duration: 999 is outside 1000 to 31622400000"),
        ("setOverride", limit_with("identifier", ""), "identifier: 0 characters is outside 1 to 512"),
        ("setOverride", limit_with("identifier", "*a*b*c*d*"), "identifier: 5 of `*` is outside 0 to 4"),
        ("getOverride", json!({"namespace": "n"}), &missing("identifier")),
        ("deleteOverride", json!({"identifier": "n"}), &missing("namespace")),
        ("listOverrides", page("limit", json!(0)), "limit: 0 is outside 1 to 100"),
        ("listOverrides", page("limit", json!(101)), "limit: 101 is outside 1 to 100"),
        (
            "listOverrides",
            page("cursor", json!("x")),
            "cursor: not one that an answer had in `pagination.cursor`",
        ),
    ] {
        assert_error(&client.post(endpoint, &body), 400, "Bad Request", detail);
    }
    let gone = "identifier: there is no override for \"a\" in the namespace \"n\"";
    for endpoint in ["getOverride", "deleteOverride"] {
        assert_error(&client.post(endpoint, &which("a")), 404, "Not Found", gone);
    }
}

#[test]
fn there_is_a_least_and_a_most_of_limits() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let several = |count: usize| client.post("multiLimit", &Value::Array(vec![limit("a", 1_000); count]));
    assert_eq!((several(1).status, several(100).status), (200, 200));
    for count in [0, 101] {
        let detail = format!("body: {count} limits is outside 1 to 100");
        assert_error(&several(count), 400, "Bad Request", &detail);
    }
}

/// Bodies that are valid for no endpoint. The last two have the values of a limit without field
/// names.
const NO_REQUESTS: [&str; 10] = [
    "",
    "{",
    "null",
    "3",
    "\"a\"",
    "{\"namespace\":\"n\",\"nmae\":1}",
    "{\"limit\":1,\"limit\":1}",
    "[[]]",
    "[\"n\",\"a\",1,3600000,1]",
    "[[\"n\",\"a\",1,3600000,1]]",
];

#[test]
fn malformed_requests_are_rejected_in_the_same_format() {
    let server = serve(&[]);
    let client = Client::of(&server);
    for endpoint in ["limit", "multiLimit", "setOverride", "getOverride", "deleteOverride", "listOverrides"] {
        let path = format!("/v2/ratelimit.{endpoint}");
        for body in NO_REQUESTS {
            let replied = client.raw("POST", &path, body);
            let detail = replied.body["error"]["detail"].as_str().unwrap_or_default().to_owned();
            assert!(detail.starts_with("body: "), "{endpoint} {body}: {}", replied.body);
            assert_error(&replied, 400, "Bad Request", &detail);
        }
        let replied = client.raw("GET", &path, "");
        assert_error(&replied, 405, "Method Not Allowed", "method: only POST is answered here");
        assert_eq!(replied.headers["allow"], "POST");
        let large = client.raw("POST", &path, &" ".repeat((512 << 10) + 1));
        assert_error(&large, 413, "Payload Too Large", "body: more than 524288 bytes");
    }
    let nowhere = client.raw("POST", "/v2/ratelimit.nothing", "{}");
    assert_error(&nowhere, 404, "Not Found", "there is nothing at /v2/ratelimit.nothing");
}

#[test]
fn a_list_is_not_taken_for_an_object() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let list = json!(["n", "a", 1, HOUR_MS, 1]);
    let detail =
        |column: u32| format!("body: invalid type: sequence, expected an object at line 1 column {column}");
    assert_error(&client.post("limit", &list), 400, "Bad Request", &detail(0));
    assert_error(&client.post("multiLimit", &json!([list])), 400, "Bad Request", &detail(1));
    assert_error(&client.post("setOverride", &json!(["n", "a", 1, HOUR_MS])), 400, "Bad Request", &detail(0));
}

/// Paths with fields that are tested with their surfaces.
const OTHER_SURFACES: [&str; 2] = ["/json", "/forward-auth"];

/// Paths that only the admin listener serves.
const ADMIN_PATHS: [&str; 1] = ["/v1/status"];

#[test]
fn the_description_is_true() {
    let server = serve(&[]);
    let client = Client::of(&server);
    let document = client.raw("GET", "/openapi.json", "").body;
    assert!(document["openapi"].as_str().is_some_and(|version| version.starts_with("3.1")), "{document}");
    let paths = document["paths"].as_object().expect("paths");
    assert_eq!(paths.len(), 11, "{:?}", paths.keys());
    for (path, item) in paths.iter().filter(|(path, _)| !ADMIN_PATHS.contains(&path.as_str())) {
        // One of the paths deletes it.
        client.data("setOverride", &set("a", 5));
        for (method, operation) in item.as_object().expect("methods") {
            let replied = client.raw(&method.to_uppercase(), path, "");
            assert!(replied.status != 404 && replied.status != 405, "{method} {path}: {}", replied.status);
            let schema = operation["requestBody"]["content"]["application/json"].get("schema");
            if let Some(schema) = schema.filter(|_| !OTHER_SURFACES.contains(&path.as_str())) {
                check_operation(&client, &document, path, operation, schema);
            }
        }
    }
}

/// Checks that the endpoint accepts the described fields and no others, and that the response has
/// the described fields and no others.
fn check_operation(client: &Client, document: &Value, path: &str, operation: &Value, schema: &Value) {
    let is_list = schema["type"] == "array";
    let fields = resolve(document, if is_list { &schema["items"] } else { schema });
    let properties = fields["properties"].as_object().unwrap_or_else(|| panic!("{path}: {fields}"));
    let mut body = serde_json::Map::new();
    for name in properties.keys() {
        let value = match name.as_str() {
            "limit" => json!(5),
            "duration" => json!(HOUR_MS),
            "cost" => json!(1),
            "cursor" => json!(">"),
            "deny_status" => json!(200),
            "dimensions" => json!({"user": "a"}),
            "namespace" => json!("n"),
            "identifier" => json!("a"),
            other => panic!("{path}: {other} is described, and not known here"),
        };
        body.insert(name.clone(), value);
    }
    let wrapped = |body: &serde_json::Map<String, Value>| {
        let body = Value::Object(body.clone());
        let body = if is_list { json!([body]) } else { body };
        body.to_string()
    };
    let replied = client.raw("POST", path, &wrapped(&body));
    assert_eq!(replied.status, 200, "{path}: {}", replied.body);
    assert_described(
        document,
        &operation["responses"]["200"]["content"]["application/json"]["schema"],
        &replied.body,
    );
    for required in fields["required"].as_array().expect("some are") {
        let mut without = body.clone();
        without.remove(required.as_str().expect("text"));
        assert_eq!(client.raw("POST", path, &wrapped(&without)).status, 400, "{path} without {required}");
    }
    body.insert("undescribed".to_owned(), json!(1));
    assert_eq!(client.raw("POST", path, &wrapped(&body)).status, 400, "{path}");
}

fn assert_described(document: &Value, schema: &Value, value: &Value) {
    let schema = resolve(document, schema);
    match value {
        Value::Object(members) => {
            let described: BTreeSet<&String> =
                schema["properties"].as_object().map(|all| all.keys().collect()).unwrap_or_default();
            let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
            let unknown: Vec<_> = members.keys().filter(|name| !described.contains(name)).collect();
            assert!(unknown.is_empty(), "{unknown:?} not in {schema}");
            for name in required {
                assert!(members.contains_key(name), "{name} is required and not in {value}");
            }
            for (name, member) in members {
                assert_described(document, &schema["properties"][name.as_str()], member);
            }
        }
        Value::Array(elements) => {
            for element in elements {
                assert_described(document, &schema["items"], element);
            }
        }
        _ => {}
    }
}

fn resolve<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    // A member that may be null is one of its schema and null.
    let mut schemas = schema["oneOf"].as_array().into_iter().flatten();
    let schema = schemas.find(|one| one.get("$ref").is_some()).unwrap_or(schema);
    match schema["$ref"].as_str() {
        None => schema,
        Some(reference) => document.pointer(reference.trim_start_matches('#')).expect("it is there"),
    }
}
