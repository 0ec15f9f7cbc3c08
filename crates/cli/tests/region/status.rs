//! The state of an origin that fails: in `/v1/status`, in `/readyz`, and in decisions.

use serde_json::{Value, json};
use tidegate_testkit::{Redis, START_TIME_MAX, Server, ask, wait_until};

use crate::client::{metric, start_region};
use crate::support::raw::{request, send};

const RULES: &str = "
    [[rules]]
    name = 'per_user'
    key = ['user']
    limit = 2
    period = '1h'

    [[rules]]
    name = 'logins'
    class = 'security'
    key = ['ip']
    limit = 2
    period = '1h'
";

fn get(server: &Server, target: &str) -> (u16, String) {
    let reply = send(server.address("admin"), &request("GET", target, &[], None));
    (reply.status, reply.body)
}

fn status(server: &Server) -> Value {
    serde_json::from_str(&get(server, "/v1/status").1).expect("JSON")
}

/// Waits for a state of the origin, and returns the status.
fn wait_for_origin(server: &Server, state: &str) -> Value {
    wait_until(&format!("the origin to be {state}"), START_TIME_MAX, || {
        status(server)["origin"]["state"] == state
    });
    status(server)
}

fn check(server: &Server, dimension: &str) -> Value {
    let body = json!({ "dimensions": { dimension: "192.0.2.1" } }).to_string();
    let reply = send(server.address("http"), &request("POST", "/v1/check", &[], Some(&body)));
    serde_json::from_str(&reply.body).expect("JSON")
}

#[test]
fn origin_failure_is_reported_with_address_and_cause_before_any_request() {
    let guarded = Redis::start(&[]);
    ask::<String>(&guarded, &["CONFIG", "SET", "requirepass", "right"]);
    let plain = Redis::start(&[]);
    let (guarded, plain) = (guarded.port(), plain.port());
    for (origin, address, cause, public_cause) in [
        (
            format!("redis://:wrong@127.0.0.1:{guarded}"),
            format!("redis://127.0.0.1:{guarded}"),
            "the password of the address",
            "the origin refused the user name or the password",
        ),
        (
            format!("redis://127.0.0.1:{guarded}"),
            format!("redis://127.0.0.1:{guarded}"),
            "NOAUTH",
            "the origin requires a password",
        ),
        (
            "redis://nowhere.invalid:6379".to_owned(),
            "redis://nowhere.invalid:6379".to_owned(),
            "lookup address",
            "the host name has no address",
        ),
        (
            format!("rediss://127.0.0.1:{plain}"),
            format!("rediss://127.0.0.1:{plain}"),
            "use redis://",
            "the origin does not reply to a TLS handshake",
        ),
    ] {
        let fleet = start_region(&origin, RULES, 1);
        let server = &fleet.servers[0];
        // A busy machine may time out first.
        wait_until("the cause to be known", START_TIME_MAX, || {
            let seen = &status(server)["origin"];
            seen["state"] == "down" && seen["cause"].as_str().is_some_and(|text| text.contains(cause))
        });
        assert_eq!(status(server)["origin"]["address"], json!(address));
        let (code, ready) = get(server, "/readyz");
        assert_eq!(code, 200, "the server still decides");
        let lines: Vec<&str> = ready.lines().collect();
        assert!(lines[0] == "ready" && lines[1].ends_with(public_cause), "{ready}");
        let (_, host_and_port) = address.split_once("://").expect("a scheme");
        let (host, port) = host_and_port.rsplit_once(':').expect("a port");
        assert!(!ready.contains(host) && !ready.contains(&format!(":{port}")), "{ready}");
        let status = status(server);
        let full = status["degraded"][0].as_str().expect("a text");
        assert!(full.contains(&address) && full.contains(cause), "{full}");
        assert!(!ready.contains("wrong") && !status.to_string().contains("wrong"));
        assert_eq!(metric(server, "tidegate_origin_up"), 0);
    }
}

/// Returns the output of a configuration check, and that on standard error.
fn check_config(origin: &str) -> (String, String) {
    let check = ["serve", "--check-config", "--data-dir", "none", "--origin", origin];
    let output = crate::support::tidegate(&check).output().expect("it runs");
    assert_eq!(output.status.code(), Some(0), "a server starts without its origin: {output:?}");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("text");
    (text(output.stdout), text(output.stderr))
}

#[test]
fn configuration_check_contacts_the_origin_and_names_the_cause() {
    let guarded = Redis::start(&[]);
    ask::<String>(&guarded, &["CONFIG", "SET", "requirepass", "right"]);
    let (plain, evicting) = (Redis::start(&[]), Redis::start(&["--maxmemory-policy", "allkeys-lru"]));
    for (origin, cause) in [
        (format!("redis://:wrong@127.0.0.1:{}", guarded.port()), "the password of the address"),
        ("redis://nowhere.invalid:6379".to_owned(), "lookup address"),
        ("redis://127.0.0.1:1".to_owned(), "Connection refused"),
        (format!("rediss://127.0.0.1:{}", plain.port()), "use redis://"),
        (evicting.url(), "maxmemory-policy is allkeys-lru, expected noeviction"),
    ] {
        // A busy machine may time out first.
        wait_until(&format!("{cause} of {origin}"), START_TIME_MAX, || {
            let (printed, aside) = check_config(&origin);
            let lines: Vec<&str> = printed.lines().collect();
            assert_eq!((lines.len(), lines[0]), (3, "the configuration is valid"), "{printed}");
            assert!(lines[2].starts_with("the origin does not work as expected"), "{printed}");
            assert!(aside.starts_with("contacting the origin redis"), "{aside}");
            assert!(!printed.contains("wrong@") && !aside.contains("wrong@"), "{printed}{aside}");
            lines[1].starts_with("origin: redis") && lines[1].contains(cause)
        });
    }
    wait_until("an origin without problems", START_TIME_MAX, || {
        let (printed, _) = check_config(&plain.url());
        printed.starts_with("the configuration is valid\norigin: redis://127.0.0.1:")
            && printed.ends_with(": up\n")
    });
}

#[test]
fn refused_edit_of_a_file_is_reported_until_it_is_mended() {
    let folder = tempfile::tempdir().expect("a folder");
    let edit = |text: &str| crate::support::write(folder.path(), "rules.toml", text);
    let rules = edit(RULES);
    let server = crate::support::serve(&["--rules", &rules]);
    let degraded = || status(&server)["degraded"].clone();
    assert_eq!(degraded(), json!([]));
    edit(&RULES.replace("limit = 2", "limit = -2"));
    wait_until("the edit to be refused", START_TIME_MAX, || degraded() != json!([]));
    let reasons = degraded();
    let reason = reasons[0].as_str().expect("a text");
    let first = "line 5: rules[0].limit: -2 is outside 0 to 4294967295; the last valid file stays in force";
    assert!(
        reason.starts_with(&format!("the last edit of the rules file {rules} is refused since 20")),
        "{reason}"
    );
    assert!(reason.ends_with(first), "{reason}");
    let (code, ready) = get(&server, "/readyz");
    assert_eq!(code, 200, "the server still decides");
    let lines: Vec<&str> = ready.lines().collect();
    assert!(
        lines[0] == "ready" && lines[1].starts_with("the last edit of the rules file rules.toml "),
        "{ready}"
    );
    assert!(lines[1].ends_with(first), "{ready}");
    assert_eq!(metric(&server, "tidegate_reloads_total{file=\"rules\",result=\"refused\"}"), 1);
    edit(RULES);
    wait_until("the edit to be mended", START_TIME_MAX, || degraded() == json!([]));
}

#[test]
fn outage_is_told_apart_from_a_limit_and_ends_with_its_cause_kept() {
    let mut redis = Redis::start(&[]);
    let fleet = start_region(&redis.url(), RULES, 1);
    let server = &fleet.servers[0];
    let healthy = wait_for_origin(server, "up");
    assert_eq!((&healthy["degraded"], &healthy["origin"]["cause"]), (&json!([]), &Value::Null));
    assert_eq!(healthy["region"]["name"], "test");
    // On a busy machine, the fallback may decide the first request.
    wait_until("a denial by the limit", START_TIME_MAX, || {
        let answer = check(server, "user");
        answer["decision"] == "deny" && answer["reason"] == "limit"
    });

    redis.kill();
    wait_until("a decision without the origin", START_TIME_MAX, || {
        check(server, "ip")["reason"] == "origin_unreachable"
    });
    let closed = check(server, "ip");
    assert_eq!((&closed["decision"], &closed["source"]), (&json!("deny"), &json!("closed")));
    let down = wait_for_origin(server, "down");
    assert!(down["degraded"][0].as_str().is_some_and(|text| text.contains("is down since")), "{down}");
    wait_until("the rate of the fallback", START_TIME_MAX, || {
        check(server, "ip");
        status(server)["rates"]["without_origin_per_second"].as_f64().is_some_and(|rate| rate > 0.0)
    });

    redis.restart();
    let up = wait_for_origin(server, "up");
    assert_eq!(up["degraded"], json!([]));
    assert!(up["origin"]["cause"].is_string(), "the last cause stays");
}

#[test]
fn store_that_may_evict_is_reported() {
    let redis = Redis::start(&["--maxmemory-policy", "allkeys-lru"]);
    let fleet = start_region(&redis.url(), RULES, 1);
    let status = wait_for_origin(&fleet.servers[0], "up");
    assert_eq!(status["origin"]["eviction_policy"], "allkeys-lru");
    let (code, ready) = get(&fleet.servers[0], "/readyz");
    assert!(code == 200 && ready.contains("maxmemory-policy is allkeys-lru, expected noeviction"), "{ready}");
}

#[test]
fn status_of_a_server_without_origin_names_listeners_and_rules() {
    let folder = tempfile::tempdir().expect("a folder");
    let rules = crate::support::write(folder.path(), "rules.toml", RULES);
    let server = crate::support::serve(&["--rules", &rules]);
    let status = status(&server);
    assert_eq!((&status["origin"], &status["region"]), (&Value::Null, &Value::Null));
    assert_eq!((&status["ready"], &status["degraded"]), (&json!(true), &json!([])));
    assert_eq!((&status["rules"]["source"], &status["rules"]["location"]), (&json!("file"), &json!(rules)));
    assert_eq!((&status["rules"]["rules"], &status["rules"]["revision"]), (&json!(2), &Value::Null));
    let listeners = status["listeners"].as_array().expect("a list");
    for name in ["http", "grpc", "resp", "admin"] {
        let address = json!(server.address(name).to_string());
        assert!(
            listeners.iter().any(|one| one["name"] == name && one["address"] == address),
            "{listeners:?}"
        );
    }
    assert_eq!(check(&server, "user")["reason"], Value::Null, "its own memory is no outage");
}
