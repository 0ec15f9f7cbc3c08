//! The decision log of a real server: it explains the denials of every surface, to their own tenant
//! only, also after a restart.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]
#![allow(unreachable_pub, reason = "what test programs share is public in each of them")]

mod support;

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::Output;

use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;
use support::raw::{Reply, request, send};
use support::{serve, tidegate, token_entry, write};
use tidegate_testkit::{HttpListener, Redis, START_TIME_MAX, Server, wait_until};

const RULES: &str = "
    [[rules]]
    name = 'per_user'
    version = 7
    key = ['user']
    limit = 2
    period = '1h'

    [[rules]]
    name = 'maybe'
    mode = 'shadow'
    key = ['ip']
    limit = 1
    period = '1h'
";

fn ask(server: &Server, path: &str, body: &str) -> Reply {
    send(server.address("http"), &request("POST", path, &[], Some(body)))
}

fn check(server: &Server, user: &str) -> Reply {
    ask(
        server,
        "/v1/check",
        &format!(r#"{{"dimensions":{{"user":"{user}","ip":"192.0.2.{}"}}}}"#, user.len()),
    )
}

fn why(server: &Server, more: &[&str]) -> Output {
    let url = server.url("admin", "");
    tidegate(&[&["why", "--server", &url], more].concat()).output().expect("it runs")
}

/// The records about a key, once there are so many.
fn records(server: &Server, key: &str, count: usize) -> Vec<Value> {
    let mut found = Vec::new();
    wait_until(&format!("{count} records of {key}"), START_TIME_MAX, || {
        let output = why(server, &["--key", key, "--json"]);
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{output:?}"));
        answer["records"].as_array().expect("records").clone_into(&mut found);
        assert_eq!(output.status.code(), Some(if found.is_empty() { 2 } else { 0 }));
        found.len() == count
    });
    found
}

/// Returns the replies to a Redis client.
fn redis(server: &Server, commands: &str, answers: usize) -> String {
    let mut stream = TcpStream::connect(server.address("resp")).expect("connects");
    stream.write_all(commands.as_bytes()).expect("sends");
    let (mut text, mut bytes) = (String::new(), [0; 1024]);
    while text.matches('*').count() < answers || !text.ends_with("\r\n") {
        let n = stream.read(&mut bytes).expect("answers");
        text.push_str(std::str::from_utf8(&bytes[..n]).expect("text"));
    }
    text
}

#[test]
fn record_of_a_direct_limit_names_its_override_and_the_version() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().to_string_lossy().into_owned();
    let server = serve(&["--data-dir", &data, "--log-sample", "0"]);
    let body =
        |limit: u32| format!(r#"{{"namespace":"mail","identifier":"eve","limit":{limit},"duration":60000}}"#);
    for limit in [5, 0] {
        assert_eq!(ask(&server, "/v2/ratelimit.setOverride", &body(limit)).status, 200);
    }
    assert_eq!(ask(&server, "/v2/ratelimit.limit", &body(1)).status, 200);
    let denied = &records(&server, "eve", 1)[0];
    assert_eq!((&denied["rule"], &denied["rule_version"]), (&"mail".into(), &2.into()));
    assert!(denied["replaced_by"].as_str().is_some_and(|id| id.starts_with("ovr_")), "{denied}");
}

#[test]
fn denials_of_every_surface_are_explained() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&["--rules", &rules, "--data-dir", &data, "--log-sample", "0", "--workers", "1"]);

    for _ in 0..3 {
        assert_eq!(check(&server, "42").status, 200);
    }
    let found = records(&server, "user:42", 2);
    let denied = &found[0];
    assert_eq!((&denied["verdict"], &denied["surface"]), (&"denied".into(), &"check".into()));
    assert_eq!((&denied["rule"], &denied["rule_version"]), (&"per_user".into(), &7.into()));
    assert_eq!((&denied["level"], &denied["remaining"], &denied["cost"]), (&2.into(), &0.into(), &1.into()));
    assert_eq!(denied["limit"], serde_json::json!({ "amount": 2, "burst": 2, "period_ms": 3_600_000 }));
    assert!(denied["retry_ms"].as_u64().is_some_and(|ms| (1..=1_800_000).contains(&ms)), "{denied}");
    assert_eq!((&denied["source"], &denied["region"]), (&"local".into(), &"".into()));
    assert_eq!(denied["dimensions"], serde_json::json!({ "user": "42", "ip": "192.0.2.2" }));
    assert!(denied["set_version"].as_str().is_some_and(|version| !version.is_empty()));
    // The first passed and was not sampled. A rule in shadow mode would have denied the second. The
    // third was denied.
    let verdicts: Vec<_> = found.iter().map(|record| record["verdict"].as_str().expect("text")).collect();
    assert_eq!(verdicts, ["denied", "shadow_denied"]);
    assert_eq!((&found[1]["rule"], &found[1]["key"]), (&"maybe".into(), &"ip:192.0.2.2".into()));

    for _ in 0..2 {
        let body = r#"{"namespace":"mail","identifier":"bob","limit":1,"duration":60000}"#;
        assert_eq!(ask(&server, "/v2/ratelimit.limit", body).status, 200);
    }
    let found = records(&server, "bob", 1);
    assert_eq!((&found[0]["surface"], &found[0]["rule"]), (&"direct".into(), &"mail".into()));

    // The first command takes the slow path, because its limit is not known yet. The others are
    // decided at once.
    redis(&server, &"CL.THROTTLE carol 0 1 60\r\n".repeat(3), 3);
    assert_eq!(records(&server, "carol", 2)[0]["surface"], "resp");

    let entries =
        r#"[{"entries":[{"key":"plan","value":"free"}],"limit":{"requests_per_unit":1,"unit":"HOUR"}}]"#;
    for _ in 0..2 {
        ask(&server, "/json", &format!(r#"{{"domain":"shop","descriptors":{entries}}}"#));
    }
    let found = records(&server, "plan:free", 1);
    assert_eq!((&found[0]["surface"], &found[0]["rule"]), (&"envoy".into(), &"shop.plan".into()));

    let metrics = || send(server.address("admin"), &request("GET", "/metrics", &[], None)).body;
    wait_until("all denials to be counted", START_TIME_MAX, || {
        metrics().contains("tidegate_log_records_total{kind=\"denial\"} 5\n")
    });
    assert!(metrics().contains("tidegate_log_dropped_total{kind=\"denial\"} 0\n"), "{}", metrics());
}

#[test]
fn denial_is_explained_in_text_after_a_restart() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let arguments = ["--rules", &rules, "--data-dir", &data, "--log-sample", "1"];
    let mut server = serve(&arguments);
    for _ in 0..3 {
        check(&server, "42");
    }
    // The log keeps the last decisions before a stop.
    assert_eq!(server.process.terminate(), Some(0));
    let server = serve(&arguments);
    records(&server, "user:42", 3);
    let output = why(&server, &["--key", "user:42"]);
    let text = String::from_utf8(output.stdout).expect("text");
    for words in [
        "user:42 denied at 2",
        ": limit of rule per_user (version 7, rules ",
        "2 per 3600s, 2 used, 0 remaining, cost 1; a retry ",
        "Decision source: local, node ",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
    let nothing = why(&server, &["--key", "user:7", "--at", "2026-01-01T00:00:00Z"]);
    assert_eq!(nothing.status.code(), Some(2));
    let similar = why(&server, &["--key", "42"]);
    assert_eq!(similar.status.code(), Some(2));
    let text = String::from_utf8(similar.stdout).expect("text");
    assert!(text.contains("records exist for similar keys: --key user:42"), "{text}");
    for (flag, value, words) in [
        ("--at", "yesterday", "'yesterday' for '--at <TIME>': expected RFC 3339"),
        ("--window", "2h", "window: 7200s is outside"),
        ("--records", "0", "records: \"0\" is not a number from 1 to 100"),
        ("--tenant", "nobody", "tenant: there is none named \"nobody\""),
    ] {
        let output = why(&server, &["--key", "user:42", flag, value]);
        assert_eq!(output.status.code(), Some(64), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(words), "{output:?}");
    }
}

#[test]
fn keys_near_their_limit_are_listed() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&["--rules", &rules, "--data-dir", &data]);
    for _ in 0..5 {
        check(&server, "42");
    }
    check(&server, "calm");
    let url = server.url("admin", "");
    let heavy = |more: &[&str]| {
        let output = tidegate(&[&["heavy", "--server", &url], more].concat()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stdout).expect("text")
    };
    // One of two minutes is half of them.
    let keys = || {
        let answer: Value = serde_json::from_str(&heavy(&["--minutes", "2", "--json"])).expect("JSON");
        answer["keys"].as_array().expect("keys").clone()
    };
    let is_meant = |key: &Value| (&key["key"], &key["denied"]) == (&"user:42".into(), &3.into());
    wait_until("the key to be listed with all its denials", START_TIME_MAX, || keys().iter().any(is_meant));
    let keys = keys();
    let found = keys.iter().find(|key| is_meant(key)).expect("listed");
    assert_eq!((&found["rule"], &found["level_percent_max"]), (&"per_user".into(), &100.into()));
    assert!(heavy(&["--minutes", "2"]).contains("user:42"));
    assert!(keys.iter().all(|key| key["key"] != "user:calm"), "{keys:?}");
    // The key was near its limit in the present minute only.
    let reason = heavy(&["--minutes", "60"]);
    assert!(
        reason.starts_with("no heavy keys: no key was near a limit in 30 of the last 60 minutes. "),
        "{reason}"
    );
    assert!(
        reason.contains(" are denials; ") && reason.contains("With `--minutes 2`, 1 minute is enough"),
        "{reason}"
    );
    for limit in ["0", "1001", "all"] {
        let path = format!("/v1/heavy?limit={limit}");
        let refused = send(server.address("admin"), &request("GET", &path, &[], None));
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert!(
            refused.body.contains("limit: ") && refused.body.contains("from 1 to 1000"),
            "{}",
            refused.body
        );
    }
    for _ in 0..5 {
        check(&server, "43");
    }
    let first = || heavy(&["--minutes", "2", "--limit", "1"]);
    wait_until("another to be left out", START_TIME_MAX, || first().contains(" more keys: raise --limit"));
}

#[test]
fn a_tenant_sees_its_own_decisions_only() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let config = [
        "tenants = [{ name = 'acme' }, { name = 'other' }]\n",
        &token_entry("asks", "acme", "client"),
        &token_entry("looks", "acme", "viewer"),
        &token_entry("spies", "other", "viewer"),
        &token_entry("runs", "", "viewer"),
    ]
    .concat();
    let config = write(folder.path(), "tidegate.toml", &config);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let server = serve(&["--config", &config, "--rules", &rules, "--data-dir", &data]);
    let bearer = |token: &str| format!("Bearer {token}");
    for _ in 0..3 {
        let asks = bearer("asks");
        let body = r#"{"dimensions":{"user":"42"}}"#;
        let asked = request("POST", "/v1/check", &[("authorization", &asks)], Some(body));
        assert_eq!(send(server.address("http"), &asked).status, 200);
    }
    let count = |token: &str, path: &str| {
        let token = bearer(token);
        let reply = send(server.address("admin"), &request("GET", path, &[("authorization", &token)], None));
        let body: Value = serde_json::from_str(&reply.body).expect("JSON");
        (reply.status, body["records"].as_array().map_or(0, Vec::len))
    };
    let path = "/v1/why?key=user%3A42";
    wait_until("its own to be found", START_TIME_MAX, || count("looks", path) == (200, 1));
    assert_eq!(count("asks", path), (403, 0), "a client may not look");
    assert_eq!(count("spies", path), (200, 0));
    assert_eq!(count("spies", "/v1/why?key=user%3A42&tenant=acme"), (403, 0));
    assert_eq!(count("spies", "/v1/heavy?tenant=acme"), (403, 0));
    assert_eq!(count("looks", "/v1/why?key=user%3A42&tenant=acme"), (200, 1));
    assert_eq!(count("runs", path), (200, 0));
    assert_eq!(count("runs", "/v1/why?key=user%3A42&tenant=acme"), (200, 1));
}

#[test]
fn server_without_a_decision_log_reports_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().join("data").to_string_lossy().into_owned();
    for arguments in [&["--data-dir", "none"][..], &["--data-dir", &data, "--decision-log", "off"]] {
        let server = serve(arguments);
        let output = why(&server, &["--key", "user:42"]);
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains("the decision log is off"), "{output:?}");
    }
    assert!(!folder.path().join("data/decisions.db").exists());
}

fn export(data: &str, out: &str, more: &[&str]) -> Output {
    let arguments = [&["log", "export", "--data-dir", data, "--out", out], more].concat();
    tidegate(&arguments).output().expect("it runs")
}

/// The keys in a Parquet file, in order.
fn exported_keys(path: &str) -> Vec<String> {
    let reader = SerializedFileReader::new(File::open(path).expect("a file")).expect("Parquet");
    let key = |row: parquet::record::Row| {
        let key = row.get_column_iter().find(|(name, _)| *name == "key").map(|(_, field)| field.to_string());
        key.expect("a key").trim_matches('"').to_owned()
    };
    reader.get_row_iter(None).expect("rows").map(|row| key(row.expect("a row"))).collect()
}

#[test]
fn the_log_is_exported_while_a_server_writes_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let out = folder.path().join("log.parquet").to_string_lossy().into_owned();
    let server = serve(&["--rules", &rules, "--data-dir", &data, "--log-sample", "0", "--workers", "1"]);
    for user in ["42", "42", "42", "7"] {
        assert_eq!(check(&server, user).status, 200);
    }
    records(&server, "user:42", 2);
    let done = export(&data, &out, &["--json"]);
    assert_eq!(done.status.code(), Some(0), "{done:?}");
    let answer: Value = serde_json::from_slice(&done.stdout).expect("JSON");
    assert_eq!(answer, serde_json::json!({ "records": 2, "file": out }));
    assert_eq!(exported_keys(&out), ["ip:192.0.2.2", "user:42"]);

    // As milliseconds, it would be in 1970.
    assert_eq!(export(&data, &out, &["--to", "4000000000"]).status.code(), Some(0));
    assert_eq!(exported_keys(&out), ["ip:192.0.2.2", "user:42"]);
    // No records of another tenant or another time; an existing file is replaced.
    for none in [&["--tenant", "other"][..], &["--to", "2020-01-01T00:00:00Z"]] {
        assert_eq!(export(&data, &out, none).status.code(), Some(0));
        assert_eq!(exported_keys(&out), Vec::<String>::new());
    }
    for (wrong, status, problem) in [
        (&["--from", "yesterday"][..], 64, "error: invalid value 'yesterday' for '--from <TIME>'"),
        (&["--from", "now", "--to", "2020-01-01T00:00:00Z"], 64, "error: from: is after"),
    ] {
        let failed = export(&data, &out, wrong);
        assert_eq!(failed.status.code(), Some(status), "{failed:?}");
        assert!(String::from_utf8_lossy(&failed.stderr).starts_with(problem), "{failed:?}");
    }
    let earlier = why(&server, &["--key", "user:42", "--at", "1795126330", "--json"]);
    let answer: Value = serde_json::from_slice(&earlier.stdout).expect("JSON");
    assert_eq!(answer["at"], "2026-11-19T22:12:10.000Z");
    let nowhere = folder.path().join("nowhere").to_string_lossy().into_owned();
    let failed = export(&nowhere, &out, &[]);
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    assert!(!folder.path().join("log.parquet.part").exists(), "no half of a file is left");
    assert_eq!(exported_keys(&out), Vec::<String>::new(), "what was there stays");
}

#[test]
fn denials_reach_a_collector_and_are_counted() {
    let collector = HttpListener::start(|_, _| tidegate_testkit::Reply::new(200, "{}"));
    let folder = tempfile::tempdir().expect("a folder");
    let rules = write(folder.path(), "rules.toml", RULES);
    let data = folder.path().join("data").to_string_lossy().into_owned();
    let given = ["--rules", &rules, "--data-dir", &data, "--log-sample", "0", "--log-otlp", &collector.url()];
    let server = serve(&[&given[..], &["--log-otlp-headers", "x-team=edge"]].concat());
    for _ in 0..3 {
        assert_eq!(check(&server, "42").status, 200);
    }
    let metrics = || send(server.address("admin"), &request("GET", "/metrics", &[], None)).body;
    wait_until("both to be delivered", START_TIME_MAX, || {
        metrics().contains("tidegate_log_otlp_records_total{outcome=\"sent\"} 2")
    });
    assert!(metrics().contains("tidegate_log_otlp_records_total{outcome=\"dropped\"} 0"));
    let heard = collector.heard();
    assert_eq!(heard[0].header("x-team"), Some("edge"));
    let sent: String = heard.iter().map(|heard| String::from_utf8_lossy(&heard.body).into_owned()).collect();
    assert!(sent.contains("user:42 denied by per_user"), "{sent}");
}

/// The bytes of all files below a folder.
fn bytes_below(folder: &Path) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        bytes.extend(if path.is_dir() { bytes_below(&path) } else { std::fs::read(&path).expect("read") });
    }
    bytes
}

#[test]
fn credentials_leave_a_request_as_digests_only() {
    const RULES: &str = "
        [[rules]]
        name = 'per_token'
        key = ['header.authorization']
        limit = 2
        period = '1h'

        [[rules]]
        name = 'per_session'
        key = ['header.x-session', 'header.x-plan']
        limit = 2
        period = '1h'

        [[overrides]]
        name = 'important'
        rule = 'per_token'
        key = ['Bearer vip-*']
        limit = 4
    ";
    const SECRETS: [&str; 4] = ["tok3n-of-ann", "s3ssion-of-ann", "vip-tok3n", "tok3n-of-envoy"];
    let (redis, folder) = (Redis::start(&[]), tempfile::tempdir().expect("a folder"));
    let (rules, data) = (write(folder.path(), "rules.toml", RULES), folder.path().join("data"));
    let output = folder.path().join("output");
    let mut command = tidegate(&[]);
    command.env("TIDEGATE_LOG", "debug").stderr(File::create(&output).expect("a file"));
    let (data_dir, origin) = (data.to_string_lossy().into_owned(), redis.url());
    let server = Server::start_as(
        command,
        &[
            &["--rules", &rules, "--data-dir", &data_dir, "--log-sample", "1"][..],
            &["--origin", &origin, "--secret-headers", "X-Session"][..],
        ]
        .concat(),
    );
    let statuses = |fields: &[(&str, &str)], count| -> Vec<u16> {
        let asked = request("GET", "/forward-auth", fields, None);
        (0..count).map(|_| send(server.address("http"), &asked).status).collect()
    };
    let [token, session, vip, descriptor] = SECRETS.map(|secret| format!("Bearer {secret}"));
    assert_eq!(statuses(&[("authorization", &token)], 3), [200, 200, 429]);
    assert_eq!(statuses(&[("x-session", &session), ("x-plan", "free")], 3), [200, 200, 429]);
    assert_eq!(statuses(&[("authorization", &vip)], 5), [200, 200, 200, 200, 429]);
    let lacking = format!(r#"{{"dimensions":{{"header.authorization":"{token}"}}}}"#);
    assert!(ask(&server, "/v1/check", &lacking).body.contains(r#""decision":"deny""#));
    let entry = format!(r#"{{"key":"authorization","value":"{descriptor}"}}"#);
    let limit = r#"{"requests_per_unit":1,"unit":"HOUR"}"#;
    let body = format!(r#"{{"domain":"shop","descriptors":[{{"entries":[{entry}],"limit":{limit}}}]}}"#);
    assert_eq!([(); 2].map(|()| ask(&server, "/json", &body).status), [200, 429]);

    let token_key = format!("header.authorization:{token}");
    let denied = &records(&server, &token_key, 4)[0];
    assert_eq!((&denied["verdict"], &denied["rule"]), (&"denied".into(), &"per_token".into()));
    let hidden = denied["key"].as_str().expect("text").to_owned();
    assert!(hidden.starts_with("header.authorization:sha256:"), "{hidden}");
    records(&server, &hidden, 4);
    records(&server, &format!("header.x-session:{session},header.x-plan:free"), 3);
    assert_eq!(records(&server, &format!("header.authorization:{vip}"), 5)[0]["replaced_by"], "important");

    records(&server, &format!("authorization:{descriptor}"), 2);

    let read = |path: &str| send(server.address("admin"), &request("GET", path, &[], None)).body;
    let why = read(&format!("/v1/why?key={}", token_key.replace(' ', "%20")));
    let answers = ["/v1/heavy?minutes=2", "/metrics", "/v1/status", "/readyz"].map(read).concat();
    let kept: Vec<u8> = redis.keys().into_iter().flat_map(|(key, _)| key).collect();
    drop(server);
    let log = std::fs::read(&output).expect("the output");
    assert!(!kept.is_empty() && !log.is_empty());
    let places = [bytes_below(&data), why.into_bytes(), answers.into_bytes(), kept, log];
    for secret in SECRETS {
        for (at, bytes) in places.iter().enumerate() {
            let is_there = bytes.windows(secret.len()).any(|found| found == secret.as_bytes());
            assert!(!is_there, "{secret} is in place {at}");
        }
    }
}
