//! A block is told apart from a limit: in the answer to a check and in decision records.

use serde_json::{Value, json};
use tidegate_testkit::{START_TIME_MAX, Server, wait_until};

use crate::fixture::{ControlFixture, check, per_user, serve, wait_for};
use crate::support::raw::{request, send};

fn ask(server: &Server, method: &str, target: &str, body: Option<&str>) -> Value {
    let reply = send(server.address("admin"), &request(method, target, &[], body));
    assert_eq!(reply.status, 200, "{}", reply.body);
    serde_json::from_str(&reply.body).expect("JSON")
}

fn decision(server: &Server, user: &str) -> Value {
    serde_json::from_str(&check(server, user).body).expect("JSON")
}

#[test]
fn block_has_its_name_and_its_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    let body = r#"{"id":"attack","action":"block","when":{"user":"mallory"},"for":"10m"}"#;
    let emergency = ask(&server, "POST", "/v1/emergencies", Some(body))["emergency"].clone();
    wait_for(&server, "r1e1");

    let blocked = decision(&server, "mallory");
    assert_eq!((&blocked["decision"], &blocked["reason"]), (&json!("deny"), &json!("block")));
    let block = json!({ "id": "attack", "until": emergency["expires"], "until_ms": emergency["expires_ms"] });
    assert_eq!(blocked["block"], block);
    assert_eq!(blocked["rules"][0]["emergency_until_ms"], emergency["expires_ms"]);
    let rule = &blocked["rules"][0];
    let wait_ms = rule["retry_after_ms"].as_u64().expect("the time until the block ends");
    assert!((1..=600_000).contains(&wait_ms) && rule["never"] == false, "{rule}");
    let deny_429 = r#"{"dimensions":{"user":"mallory"},"deny_status":429}"#;
    let reply = send(server.address("http"), &request("POST", "/v1/check", &[], Some(deny_429)));
    let header: Option<u64> = reply.header("retry-after").and_then(|text| text.parse().ok());
    assert_eq!((reply.status, header.is_some_and(|s| (1..=600).contains(&s))), (429, true), "{header:?}");
    let limited: Vec<Value> = (0..3).map(|_| decision(&server, "bob")).collect();
    assert_eq!((&limited[2]["decision"], &limited[2]["reason"]), (&json!("deny"), &json!("limit")));
    assert!(limited.iter().all(|answer| answer["block"].is_null()), "{limited:?}");
    assert_eq!(limited[0]["reason"], Value::Null, "a request that passes needs no reason");

    let why = |key: &str| ask(&server, "GET", &format!("/v1/why?key={key}"), None);
    for (key, reason, until_ms) in
        [("user:mallory", "block", &emergency["expires_ms"]), ("user:bob", "limit", &Value::Null)]
    {
        wait_until("a record", START_TIME_MAX, || why(key)["records"] != json!([]));
        let answer = why(key);
        let record = &answer["records"][0];
        assert_eq!((&record["reason"], &record["until_ms"]), (&json!(reason), until_ms), "{record}");
        assert_eq!((&answer["similar"], &answer["notices"]), (&json!([]), &json!([])));
    }
    let unknown = why("mallory");
    assert_eq!((&unknown["records"], &unknown["similar"]), (&json!([]), &json!(["user:mallory"])));
}
