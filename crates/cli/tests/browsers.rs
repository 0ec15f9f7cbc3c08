//! Web pages in a browser on the machine of a server without tokens: they change nothing, and read
//! nothing. Programs keep working.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod support;

use std::process::{Command, Output};

use serde_json::{Value, json};
use support::raw::{Reply, request, send};
use support::{serve, tidegate, token_entry, tool, write};
use tempfile::TempDir;
use tidegate_testkit::Server;

type Fields = &'static [(&'static str, &'static str)];

/// Requests of a browser for a page of another site, and the status of the answer.
const ATTACKS: [(&str, Fields, u16); 9] = [
    ("a form", &[("content-type", "application/x-www-form-urlencoded")], 415),
    ("a form of plain text", &[("content-type", "text/plain")], 415),
    ("a form with files", &[("content-type", "multipart/form-data; boundary=b")], 415),
    ("a body without a type", &[("content-type", "")], 415),
    ("another name", &[("host", "evil.example:8090")], 403),
    ("another site", &[("origin", "http://evil.example")], 403),
    ("a sandbox", &[("origin", "null")], 403),
    ("another port", &[("origin", "http://localhost:3000"), ("host", "localhost:8090")], 403),
    ("a browser without an origin", &[("sec-fetch-site", "cross-site")], 403),
];

/// A server without tokens, on a rule store of its own.
fn open_server(more: &[&str]) -> (Server, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let rules = format!("sqlite:{}", folder.path().join("rules.db").display());
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&[&["--rules", &rules, "--data-dir", &data], more].concat());
    (server, folder)
}

fn ask(server: &Server, listener: &str, method: &str, path: &str, fields: Fields, body: &Value) -> Reply {
    let body = body.to_string();
    let body = (method == "POST").then_some(body.as_str());
    send(server.address(listener), &request(method, path, fields, body))
}

fn read(server: &Server, path: &str) -> Value {
    let reply = ask(server, "admin", "GET", path, &[], &Value::Null);
    assert_eq!(reply.status, 200, "{path}: {}", reply.body);
    serde_json::from_str(&reply.body).unwrap()
}

fn rule() -> Value {
    json!({"confirmed": true, "operations": [
        {"do": "put", "kind": "rule", "name": "a", "body": {"key": ["user"], "limit": 1, "period": "1h"}},
    ]})
}

fn block() -> Value {
    json!({"action": "block", "for": "1m", "confirmed": true})
}

fn vip() -> Value {
    json!({"namespace": "emails", "identifier": "vip", "limit": 0, "duration": 60_000})
}

#[test]
fn pages_of_other_sites_change_nothing() {
    let (server, _folder) = open_server(&[]);
    let before = ["/v1/rules", "/v1/emergencies", "/v1/audit"].map(|path| read(&server, path));
    for (page, fields, status) in ATTACKS {
        for (listener, path, body) in [
            ("admin", "/v1/rules/apply", rule()),
            ("admin", "/v1/rules/plan", rule()),
            ("admin", "/v1/rules/a/shadow", json!({})),
            ("admin", "/v1/emergencies", block()),
            ("admin", "/v1/check", json!({"dimensions": {"user": "a"}})),
            ("http", "/v2/ratelimit.setOverride", vip()),
            ("http", "/v2/ratelimit.deleteOverride", json!({"namespace": "emails", "identifier": "vip"})),
        ] {
            let reply = ask(&server, listener, "POST", path, fields, &body);
            assert_eq!(reply.status, status, "{page}: {path}: {}", reply.body);
            let field = if status == 415 { "content-type" } else { fields[0].0 };
            assert!(reply.body.contains(&format!("{field}: ")), "{page}: {}", reply.body);
        }
    }
    for fields in [&[("origin", "http://evil.example")][..], &[("host", "evil.example")]] {
        let reply = send(server.address("admin"), &request("DELETE", "/v1/emergencies/a", fields, None));
        assert_eq!(reply.status, 403, "{fields:?}: {}", reply.body);
    }
    assert_eq!(["/v1/rules", "/v1/emergencies", "/v1/audit"].map(|path| read(&server, path)), before);
}

#[test]
fn a_name_that_leads_to_loopback_reads_nothing() {
    let (server, _folder) = open_server(&[]);
    for path in
        ["/v1/status", "/v1/rules", "/v1/rules/history", "/v1/audit", "/metrics", "/v1/why", "/v1/bounds"]
    {
        let reply = ask(&server, "admin", "GET", path, &[("host", "evil.example:8090")], &Value::Null);
        assert_eq!(reply.status, 403, "{path}: {}", reply.body);
        assert!(reply.body.contains("host: ") && reply.body.contains("allowed_hosts"), "{}", reply.body);
    }
    // The target may name the host too.
    let absolute = ask(&server, "admin", "GET", "http://evil.example/v1/status", &[], &Value::Null);
    assert_eq!(absolute.status, 403, "{}", absolute.body);
    // Probes reveal nothing, and name the server as they like.
    for path in ["/healthz", "/readyz"] {
        assert_eq!(ask(&server, "admin", "GET", path, &[("host", "10.0.0.1")], &Value::Null).status, 200);
    }
}

#[test]
fn allowed_hosts_are_names_of_the_server() {
    let (server, _folder) = open_server(&["--allowed-hosts", "gate.example,Other.example"]);
    for (host, status) in [("gate.example", 200), ("other.example:8090", 200), ("evil.example", 403)] {
        let bytes = request("GET", "/v1/status", &[("host", host)], None);
        assert_eq!(send(server.address("admin"), &bytes).status, status, "{host}");
    }
    let own = [("host", "gate.example"), ("origin", "https://gate.example")];
    let body = rule().to_string();
    let reply = send(server.address("admin"), &request("POST", "/v1/rules/apply", &own, Some(&body)));
    assert_eq!(reply.status, 200, "its own page: {}", reply.body);
}

#[test]
fn the_command_line_and_curl_keep_working() {
    let (server, folder) = open_server(&[]);
    let admin = server.url("admin", "");
    let run = |arguments: &[&str]| {
        let output = tidegate(&[arguments, &["--server", &admin]].concat()).output().unwrap();
        assert!(output.status.success(), "{arguments:?}: {output:?}");
    };
    let rules = write(
        folder.path(),
        "rules.toml",
        "[[rules]]\nname = 'a'\nkey = ['user']\nlimit = 5\nperiod = '1h'\n",
    );
    run(&["rules", "apply", &rules, "--yes"]);
    run(&["check", "user=alice"]);
    run(&["status"]);
    // As the documentation has it: curl calls the body a form.
    let public = |path: &str| server.url("http", path);
    let check = r#"{"dimensions": {"user": "alice"}}"#;
    curl(&["-s", &public("/v1/check"), "-d", check]);
    let limit = r#"{"namespace":"emails","identifier":"alice","limit":10,"duration":60000}"#;
    curl(&["-s", &public("/v2/ratelimit.limit"), "-d", limit]);
    let set = public("/v2/ratelimit.setOverride");
    curl(&["-s", &set, "-H", "content-type: application/json", "-d", &vip().to_string()]);
    let got = ask(
        &server,
        "http",
        "POST",
        "/v2/ratelimit.getOverride",
        &[],
        &json!({"namespace": "emails", "identifier": "vip"}),
    );
    assert_eq!(got.status, 200, "{}", got.body);
    // A proxy passes on the origin of its visitor.
    let visitor = [
        ("origin", "http://shop.example"),
        ("host", "shop.example"),
        ("sec-fetch-site", "cross-site"),
        ("x-forwarded-method", "GET"),
        ("x-forwarded-uri", "/"),
        ("x-forwarded-host", "shop.example"),
    ];
    assert_eq!(send(server.address("http"), &request("GET", "/forward-auth", &visitor, None)).status, 200);
}

#[test]
fn tokens_take_the_place_of_names() {
    let folder = tempfile::tempdir().unwrap();
    let config = write(folder.path(), "tidegate.toml", &token_entry("dan", "", "admin"));
    let (server, _folder) = open_server(&["--config", &config]);
    let of = |more: &[(&'static str, &'static str)]| {
        [&[("authorization", "Bearer dan"), ("host", "gate.example")][..], more].concat()
    };
    let get = |fields: &[(&str, &str)]| {
        send(server.address("admin"), &request("GET", "/v1/status", fields, None)).status
    };
    assert_eq!(get(&of(&[])), 200);
    let set = |fields: &[(&str, &str)]| {
        let body = vip().to_string();
        send(server.address("http"), &request("POST", "/v2/ratelimit.setOverride", fields, Some(&body)))
            .status
    };
    assert_eq!(set(&of(&[("content-type", "text/plain")])), 200, "a page has no token");
    let apply = |fields: &[(&str, &str)]| {
        let body = rule().to_string();
        send(server.address("admin"), &request("POST", "/v1/rules/apply", fields, Some(&body))).status
    };
    assert_eq!(apply(&of(&[("origin", "http://evil.example")])), 403);
    assert_eq!(apply(&of(&[])), 200);
}

fn curl(arguments: &[&str]) -> Output {
    let output =
        Command::new(tool("curl")).args(["--fail", "--max-time", "60"]).args(arguments).output().unwrap();
    assert!(output.status.success(), "{arguments:?}: {output:?}");
    output
}
