//! Envoy's rate limit service, called by a real Envoy, by Google's gRPC client, and over HTTP.

#![allow(
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    reason = "a helper of tests may panic as a test may"
)]

mod support;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};
use support::examples::{example, fill};
use support::{serve, tool};
use tidegate_testkit::{Process, START_TIME_MAX, Server, free_port, wait_for_port, wait_until};

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Returns the example's descriptors, with a limit that no test outlasts.
fn descriptors() -> String {
    fill(
        &example("descriptors.yaml"),
        "unit: minute, requests_per_unit: 60",
        "unit: hour, requests_per_unit: 3",
    )
}

/// A folder with a descriptor file, for a server to read.
fn descriptor_file(text: &str) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("edge.yaml");
    std::fs::write(&path, text).expect("written");
    (folder, path)
}

fn start(path: &Path) -> Server {
    serve(&["--envoy-descriptors", path.to_str().expect("text")])
}

struct HttpAnswer {
    status: u16,
    head: String,
    body: String,
}

impl HttpAnswer {
    fn header(&self, name: &str) -> Option<&str> {
        let line = self.head.lines().find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then_some(value)
        });
        line.map(str::trim)
    }

    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

/// Sends one request over HTTP/1.1; returns `None` without a response.
fn try_http(address: SocketAddr, head: &str, body: &str) -> Option<HttpAnswer> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(START_TIME_MAX)).expect("a time limit");
    let length = body.len();
    write!(
        stream,
        "{head}\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(HttpAnswer { status, head: head.to_owned(), body: body.to_owned() })
}

fn http(address: SocketAddr, head: &str, body: &str) -> HttpAnswer {
    try_http(address, head, body).expect("an answer")
}

/// Starts an upstream that answers every request with 200.
fn upstream() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            let mut lines = BufReader::new(&stream).lines();
            while lines.next().is_some_and(|line| line.is_ok_and(|line| !line.is_empty())) {}
            let _ =
                (&stream).write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
        }
    });
    port
}

/// A real Envoy before the upstream.
fn envoy(folder: &Path, upstream: u16, grpc: SocketAddr, failure_mode_deny: bool) -> (Process, SocketAddr) {
    let port = free_port();
    let config = fill(&example("envoy.yaml"), "port_value: 10000", &format!("port_value: {port}"));
    let config = fill(&config, "port_value: 3000", &format!("port_value: {upstream}"));
    let config = fill(&config, "port_value: 8081", &format!("port_value: {}", grpc.port()));
    let config =
        fill(&config, "failure_mode_deny: false", &format!("failure_mode_deny: {failure_mode_deny}"));
    // A busy machine may take longer than Envoy waits by default.
    let config = fill(&config, "timeout: 0.25s", "timeout: 1s");
    let path = folder.join(format!("envoy-{failure_mode_deny}.yaml"));
    std::fs::write(&path, config).expect("written");
    let log = std::fs::File::create(folder.join(format!("envoy-{failure_mode_deny}.log"))).expect("a log");
    let mut command = Command::new(tool("envoy"));
    command.arg("-c").arg(&path).args(["--concurrency", "1", "--disable-hot-restart", "-l", "warning"]);
    command.stdout(Stdio::null()).stderr(log);
    let process = Process::spawn(&mut command);
    let address = SocketAddr::from(([127, 0, 0, 1], port));
    wait_for_port("envoy", address);
    (process, address)
}

fn through(proxy: SocketAddr, user: &str) -> HttpAnswer {
    http(proxy, &format!("GET / HTTP/1.1\r\nx-user: {user}"), "")
}

#[test]
fn real_envoy_enforces_the_decisions() {
    let (folder, path) = descriptor_file(&descriptors());
    let mut server = start(&path);
    let upstream = upstream();
    let (_open, open) = envoy(folder.path(), upstream, server.address("grpc"), false);
    let (_closed, closed) = envoy(folder.path(), upstream, server.address("grpc"), true);

    for left in ["2", "1", "0"] {
        let passed = through(open, "alice");
        assert_eq!((passed.status, passed.header("x-ratelimit-remaining")), (200, Some(left)));
    }
    // Both proxies call one server.
    for proxy in [open, closed] {
        let denied = through(proxy, "alice");
        assert_eq!(denied.status, 429);
        assert_eq!(denied.header("x-envoy-ratelimited"), Some("true"));
        assert_eq!(denied.header("x-ratelimit-limit"), Some("3"));
        assert_eq!(denied.header("x-ratelimit-denied-by"), Some("edge.user"));
        assert_eq!(denied.header("ratelimit-policy"), Some(r#""edge.user";q=3;w=3600"#));
        let wait: u32 = denied.header("retry-after").and_then(|wait| wait.parse().ok()).expect("seconds");
        assert!((1..=1200).contains(&wait), "{wait}");
    }
    assert_eq!(through(open, "bob").status, 200, "another user has a limit of their own");
    for _ in 0..5 {
        assert_eq!(through(open, "root").status, 200);
    }

    assert_eq!(server.process.terminate(), Some(0));
    assert_eq!(through(open, "alice").status, 200, "fails open");
    assert_eq!(through(closed, "bob").status, 500, "fails closed");
}

#[test]
fn a_changed_file_counts_and_a_bad_one_does_not() {
    let (_folder, path) = descriptor_file(&descriptors());
    let server = start(&path);
    let limit = || {
        let body = json!({"domain": "edge",
            "descriptors": [{"entries": [{"key": "user", "value": "a"}], "hitsAddend": "0"}]});
        let answer = http(server.address("http"), "POST /json HTTP/1.1", &body.to_string());
        answer.json()["statuses"][0]["currentLimit"]["requestsPerUnit"].clone()
    };
    assert_eq!(limit(), 3);
    std::fs::write(&path, fill(&descriptors(), "3 }", "40 }")).expect("written");
    wait_until("the new file", START_TIME_MAX, || limit() == 40);
    std::fs::write(&path, "domain: edge\ndescriptors: [{keys: user}]").expect("written");
    let refused = || {
        let metrics = http(server.address("admin"), "GET /metrics HTTP/1.1", "").body;
        metrics.lines().any(|line| {
            line.contains("reloads")
                && line.contains("descriptors")
                && line.contains("refused")
                && line.ends_with(" 1")
        })
    };
    wait_until("the bad file to be refused", START_TIME_MAX, refused);
    assert_eq!(limit(), 40);
}

#[test]
fn invalid_descriptor_file_is_reported_before_listening() {
    let (_folder, path) =
        descriptor_file("domain: edge\ndescriptors: [{keys: user}, {key: k, rate_limits: {}}]");
    let output = support::tidegate(&["serve", "--check-config", "--data-dir", "none", "--envoy-descriptors"])
        .arg(&path)
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(64));
    let words = String::from_utf8(output.stderr).expect("text");
    assert!(words.contains("edge.yaml: descriptors[0].keys: unknown key 'keys'"), "{words}");
    assert!(words.contains("edge.yaml: descriptors[1].rate_limits: unknown key 'rate_limits'"), "{words}");
}

/// Makes calls with Google's gRPC client.
fn grpc(server: &Server, calls: &Value) -> Vec<Value> {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut child = Command::new(tool("python"))
        .arg(here.join("tests/envoy/ask.py"))
        .arg(server.address("grpc").to_string())
        .arg(here.join("../server/proto"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("python runs");
    let mut stdin = child.stdin.take().expect("piped");
    stdin.write_all(calls.to_string().as_bytes()).expect("it reads all before it writes");
    drop(stdin);
    let output = child.wait_with_output().expect("python ends");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {errors}"))
}

fn user(name: &str) -> Value {
    json!({"domain": "edge", "descriptors": [{"entries": [{"key": "user", "value": name}]}]})
}

#[test]
fn a_grpc_client_gets_decisions_and_exact_errors() {
    let (_folder, path) = descriptor_file(&descriptors());
    let server = start(&path);
    let asked = |request: Value| json!({"path": SHOULD_RATE_LIMIT, "request": request});
    let health = "/grpc.health.v1.Health/Check";
    let list_services = "3a012a";
    let calls = json!([
        asked(user("alice")),
        asked(user("root")),
        asked(json!({"domain": "edge",
            "descriptors": [{"entries": [{"key": "user", "value": "alice"}], "hitsAddend": "3"}]})),
        asked(json!({"descriptors": [{"entries": [{"key": "k", "value": "v"}]}]})),
        asked(json!({"domain": "edge"})),
        asked(json!({"domain": "edge", "descriptors": [{"limit": {"requestsPerUnit": 1}}]})),
        {"path": SHOULD_RATE_LIMIT, "raw": "0a05656467"},
        {"path": SHOULD_RATE_LIMIT, "raw": "00".repeat(256 * 1024 + 1)},
        {"path": "/envoy.service.ratelimit.v3.RateLimitService/Other", "raw": ""},
        {"path": health, "raw": ""},
        {"path": health, "raw": "0a0178"},
        {"path": "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "raw": list_services, "stream": true},
        {"path": "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            "raw": list_services, "stream": true},
    ]);
    let answers = grpc(&server, &calls);
    let status = &answers[0]["response"]["statuses"][0];
    assert_eq!(answers[0]["response"]["overallCode"], "OK");
    assert_eq!(status["currentLimit"], json!({"requestsPerUnit": 3, "unit": "HOUR"}));
    assert_eq!((&status["limitRemaining"], &status["durationUntilReset"]), (&json!(2), &json!("1200s")));
    assert_eq!(
        answers[1]["response"],
        json!({"overallCode": "OK", "statuses": [{"code": "OK", "limitRemaining": u32::MAX}]})
    );
    assert_eq!(answers[2]["response"]["overallCode"], "OVER_LIMIT");
    let error = |at: usize| {
        (answers[at]["code"].as_str().expect("a code"), answers[at]["details"].as_str().expect("words"))
    };
    assert_eq!(
        error(3),
        ("INVALID_ARGUMENT", "domain: rate limit domain must not be empty; allowed are 1 to 256 bytes")
    );
    assert_eq!(
        error(4),
        (
            "INVALID_ARGUMENT",
            "descriptors: rate limit descriptor list must not be empty; allowed are 1 to 1024"
        )
    );
    assert_eq!(
        error(5),
        ("INVALID_ARGUMENT", "descriptors[0].limit.unit: 0 is not a unit of time; allowed are 1 to 7")
    );
    assert_eq!(error(6).0, "INVALID_ARGUMENT");
    assert_eq!(error(7), ("RESOURCE_EXHAUSTED", "a message has at most 262144 bytes"));
    assert_eq!(error(8).0, "UNIMPLEMENTED");
    assert_eq!(answers[9]["raw"], "0801", "serving");
    assert_eq!(error(10), ("NOT_FOUND", "service: \"x\" is not here"));
    for reflected in [&answers[11], &answers[12]] {
        let names = reflected["text"].as_str().unwrap_or_else(|| panic!("{reflected}"));
        assert!(names.contains("envoy.service.ratelimit.v3.RateLimitService"), "{names}");
    }
}

#[test]
fn tokens_select_their_tenants() {
    let (folder, path) = descriptor_file(&descriptors());
    let hash_of = |token: &str| tidegate_server::auth::TokenHash::of(token.as_bytes()).to_string();
    let config = format!(
        "[[tenants]]\nname = \"a\"\n[[tenants]]\nname = \"b\"\n\
         [[tokens]]\nname = \"one\"\nhash = \"{}\"\ntenant = \"a\"\n\
         [[tokens]]\nname = \"two\"\nhash = \"{}\"\ntenant = \"b\"\n",
        hash_of("tg_one"),
        hash_of("tg_two"),
    );
    let config_path = folder.path().join("tidegate.toml");
    std::fs::write(&config_path, config).expect("written");
    let server = serve(&[
        "--envoy-descriptors",
        path.to_str().expect("text"),
        "--config",
        config_path.to_str().expect("text"),
    ]);
    let call = |token: Option<&str>| {
        let metadata: Vec<_> =
            token.map(|token| ["authorization".to_owned(), format!("Bearer {token}")]).into_iter().collect();
        json!({"path": SHOULD_RATE_LIMIT, "request": user("alice"), "metadata": metadata})
    };
    let calls = json!([
        call(Some("tg_one")),
        call(Some("tg_one")),
        call(Some("tg_two")),
        call(None),
        call(Some("tg_three")),
        {"path": "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", "raw": "3a012a", "stream": true},
    ]);
    let answers = grpc(&server, &calls);
    let left = |at: usize| answers[at]["response"]["statuses"][0]["limitRemaining"].clone();
    assert_eq!([left(0), left(1), left(2)], [2, 1, 2]);
    for at in [3, 4, 5] {
        assert_eq!(answers[at]["code"], "UNAUTHENTICATED");
        assert_eq!(answers[at]["details"], "authorization: no `Bearer` token that this server knows");
    }
    assert_eq!(http(server.address("http"), "POST /json HTTP/1.1", "{}").status, 401);
}

#[test]
fn json_over_http_is_answered_with_200_or_429() {
    let (_folder, path) = descriptor_file(&descriptors());
    let server = start(&path);
    let ask = |body: &str| http(server.address("http"), "POST /json HTTP/1.1", body);
    let passed = ask(&user("alice").to_string());
    assert_eq!(passed.status, 200);
    assert_eq!(passed.header("x-ratelimit-remaining"), Some("2"));
    let told = passed.json();
    assert_eq!(told["overallCode"], "OK");
    let expected = json!([{
        "code": "OK",
        "currentLimit": {"requestsPerUnit": 3, "unit": "HOUR"},
        "limitRemaining": 2,
        "durationUntilReset": "1200s",
    }]);
    assert_eq!(told["statuses"], expected);

    let snake =
        r#"{"domain":"edge","descriptors":[{"entries":[{"key":"user","value":"alice"}],"hits_addend":2}]}"#;
    assert_eq!(ask(snake).status, 200);
    let denied = ask(&user("alice").to_string());
    assert_eq!((denied.status, denied.header("x-ratelimit-denied-by")), (429, Some("edge.user")));
    assert_eq!(denied.json()["statuses"][0]["code"], "OVER_LIMIT");
    assert_eq!(http(server.address("http"), "GET /json HTTP/1.1", "").status, 405);
}

#[test]
fn invalid_json_is_named_with_allowed_values() {
    let (_folder, path) = descriptor_file(&descriptors());
    let server = start(&path);
    let ask = |body: &str| http(server.address("http"), "POST /json HTTP/1.1", body);
    let entry = r#""descriptors":[{"entries":[{"key":"k","value":"v"}]}]"#;
    for (body, words) in [
        ("", "body: EOF while parsing a value at line 1 column 0".to_owned()),
        ("[]", "body: a list is not an object with domain, descriptors and hitsAddend".to_owned()),
        (
            r#"{"domain":5}"#,
            "domain: invalid type: integer `5`, \
             expected a string at line 1 column 11; allowed is a text of 1 to 256 bytes"
                .to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[{"entries":[{"key":"k","value":"v"},{"key":1}]}]}"#,
            "descriptors[0].entries[1].key: invalid type: integer `1`, expected a string at line 1 column 76; \
             allowed is \
             a text of 0 to 256 bytes"
                .to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[{"hits_addend":-1}]}"#,
            "descriptors[0].hits_addend: a whole number, or one as text at line 1 column 50; allowed is 0 to \
             18446744073709551615"
                .to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[{"limit":{"unit":{}}}]}"#,
            "descriptors[0].limit.unit: the name or the number of a unit at line 1 column 52; \
             allowed are SECOND, MINUTE, \
             HOUR, DAY, WEEK, MONTH and YEAR"
                .to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[5]}"#,
            "descriptors[0]: invalid type: integer `5`, expected an object at line 1 column 33".to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[[[["user","x"]],null,null,false]]}"#,
            "descriptors[0]: invalid type: sequence, expected an object at line 1 column 32".to_owned(),
        ),
        (r#"{"domain":"#, "body: EOF while parsing a value at line 1 column 10".to_owned()),
        (
            r#"{"domian":"edge"}"#,
            "domian: unknown field `domian`, \
             expected one of `domain`, `descriptors`, `hitsAddend`, `hits_addend` at line 1 \
             column 9"
                .to_owned(),
        ),
        (r#"{"domain":"edge"}"#,
            "descriptors: rate limit descriptor list must not be empty; allowed are 1 to 1024".to_owned()),
        (&format!("{{{entry}}}"), "domain: rate limit domain must not be empty; allowed are 1 to 256 bytes".to_owned()),
        (
            &format!(r#"{{"domain":"edge","hitsAddend":4294967296,{entry}}}"#),
            "hitsAddend: 4294967296 is outside 0 to 4294967295".to_owned(),
        ),
        (
            &format!(r#"{{"domain":"edge","hitsAddend":"-1",{entry}}}"#),
            "hitsAddend: -1 is outside 0 to 4294967295".to_owned(),
        ),
        (
            r#"{"domain":"edge","descriptors":[{"limit":{"requestsPerUnit":1,"unit":"FORTNIGHT"}}]}"#,
            "descriptors[0].limit.unit: \"FORTNIGHT\" is not a unit of time; \
             allowed are SECOND, MINUTE, HOUR, DAY, WEEK, \
             MONTH and YEAR"
                .to_owned(),
        ),
    ] {
        let answer = ask(body);
        assert_eq!(
            (answer.status, answer.header("content-type")),
            (400, Some("application/problem+json")),
            "{body}"
        );
        assert_eq!(answer.json()["detail"], Value::String(words), "{body}");
    }
}
