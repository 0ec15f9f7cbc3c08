//! A change after which a rule suddenly denies far more keys is rolled back automatically. The
//! tests of `tidegate-control` cover the single cases; here, real servers share a store.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rules::change::ChangeState;
use tidegate_rules::store::AlarmSubject;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

use crate::fixture::{AUTHOR, ControlFixture, by, check, metrics, passed, per_user, serve, wait_for};
use crate::support::raw::{Reply, request, send};

/// Time within which a server has looked at denials for a minute.
const BASELINE_TIME_MAX: Duration = Duration::from_mins(4);

fn post(server: &Server, target: &str, body: &Value) -> Reply {
    send(server.address("admin"), &request("POST", target, &[], Some(&body.to_string())))
}

fn get(server: &Server, target: &str) -> Value {
    let reply = send(server.address("admin"), &request("GET", target, &[], None));
    serde_json::from_str(&reply.body).expect("JSON")
}

fn operations(limit: u32) -> Value {
    let body: Value = serde_json::from_str(&per_user(limit)).expect("JSON");
    json!([{ "do": "put", "kind": "rule", "name": "per_user", "body": body }])
}

/// The answer to a plan of another limit.
fn plan(server: &Server, limit: u32) -> Value {
    let reply = post(server, "/v1/rules/plan", &json!({ "operations": operations(limit) }));
    assert_eq!(reply.status, 200, "{}", reply.body);
    serde_json::from_str(&reply.body).expect("JSON")
}

/// Users with requests: more than a jump needs.
const USERS: usize = 20;

fn users() -> impl Iterator<Item = String> {
    (0..USERS).map(|user| format!("user-{user}"))
}

fn applied(fixture: &ControlFixture) -> Vec<String> {
    fixture.audit().into_iter().filter(|(_, action)| action == "change.apply").map(|(by, _)| by).collect()
}

#[test]
fn an_absurd_rule_is_rolled_back_and_everyone_can_see_it() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(1_000_000))]);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |at: usize| serve(&url, &folder.path().join(at.to_string()), &[]);
    let servers: Vec<Server> = (0..2).map(start).collect();
    let all_hold = |version: &str| servers.iter().for_each(|server| wait_for(server, version));
    all_hold("r1e0");
    // Each server needs a minute of requests to compare with.
    for server in &servers {
        wait_until("a baseline", BASELINE_TIME_MAX, || {
            for server in &servers {
                assert_eq!(users().filter(|user| passed(server, user, 1) == 1).count(), USERS);
            }
            plan(server, 1)["watch"]["rules"] == json!(["per_user"])
        });
    }

    let absurd = fixture.put(&[("per_user", &per_user(1))]);
    let state = || fixture.state(absurd.id);
    all_hold("r2e0");
    for server in &servers {
        assert!(passed(server, "user-0", 212) <= 1);
    }
    wait_until("the change to be undone", START_TIME_MAX, || {
        for server in &servers {
            users().for_each(|user| drop(check(server, &user)));
        }
        state() == ChangeState::RolledBack
    });
    all_hold("r3e0");
    assert!(servers.iter().all(|server| passed(server, "user-0", 10) == 10));

    assert_eq!(applied(&fixture), [AUTHOR, AUTHOR, "tidegate: automatic"], "one of the servers, and once");
    fixture.runtime.block_on(fixture.store.verify_audit(None)).expect("the audit holds");
    let count =
        |server: &&Server| metrics(server).contains("tidegate_rules_rollbacks_total{outcome=\"done\"} 1\n");
    assert_eq!(servers.iter().filter(count).count(), 1);
    // Every server tells of it, also the one that did nothing.
    for server in &servers {
        wait_until("the rollback to be seen", START_TIME_MAX, || {
            !get(server, "/v1/rules")["last_automatic_rollback"].is_null()
        });
        let seen = get(server, "/v1/rules")["last_automatic_rollback"].clone();
        assert_eq!((&seen["change"], &seen["revision"]), (&json!(absurd.id), &json!(3)), "{seen}");
        assert!(seen["reason"].as_str().is_some_and(|reason| reason.contains("per_user")), "{seen}");
        assert_eq!(get(server, "/v1/status")["rules"]["last_automatic_rollback"], seen);
        let notices = get(server, "/v1/why?key=user:user-0")["notices"].clone();
        assert_eq!((&notices[0]["kind"], &notices[0]["rollback"]), (&json!("automatic_rollback"), &seen));
    }
}

#[test]
fn an_alarm_of_any_server_is_shown_with_its_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let change = fixture.put(&[("per_user", &per_user(5))]);
    let alarm = fixture.store.put_alarm(AlarmSubject::Change(change.id), "many keys", by());
    fixture.runtime.block_on(alarm).expect("put");
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_until("the alarm to be seen", START_TIME_MAX, || !get(&server, "/v1/rules")["last_alarm"].is_null());
    let alarm = get(&server, "/v1/rules")["last_alarm"].clone();
    assert_eq!((&alarm["change"], &alarm["reason"]), (&json!(change.id), &json!("many keys")));
    assert_eq!(get(&server, "/v1/status")["rules"]["last_alarm"], alarm);
    assert_eq!(get(&server, "/v1/rules/history")["changes"][0]["alarm"], alarm);
    assert_eq!(get(&server, &format!("/v1/rules/changes/{}", change.id))["change"]["alarm"], alarm);
    let notice = get(&server, "/v1/why?key=user:bob")["notices"][0].clone();
    assert_eq!((&notice["kind"], &notice["alarm"]), (&json!("alarm"), &alarm));
}

#[test]
fn a_first_rule_is_not_watched_and_its_author_is_told() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let server = serve(&url, &folder.path().join("data"), &[]);
    let question = json!({ "operations": operations(5), "confirmed": true });
    let reply = post(&server, "/v1/rules/apply", &question);
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answer: Value = serde_json::from_str(&reply.body).expect("JSON");
    assert_eq!(answer["watch"], Value::Null);
    let not_watched = "rule \"per_user\" is new: it has no earlier denials to compare with";
    assert_eq!(answer["not_watched"], json!(not_watched));
    assert_eq!(passed(&server, "bob", 400), 5);
    assert_eq!(get(&server, "/v1/rules")["last_automatic_rollback"], Value::Null);
}

#[test]
fn a_rollback_and_a_deletion_say_what_they_remove_and_ask() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let server = serve(&url, &folder.path().join("data"), &[]);
    let first = post(&server, "/v1/rules/apply", &json!({ "operations": operations(5), "confirmed": true }));
    assert_eq!(first.status, 200, "{}", first.body);
    let back = json!({ "rollback": { "to_revision": 0 } });
    let planned = post(&server, "/v1/rules/plan", &back);
    assert_eq!(planned.status, 200, "{}", planned.body);
    let planned: Value = serde_json::from_str(&planned.body).expect("JSON");
    assert_eq!((&planned["effect"]["needs"], &planned["undoes"]), (&json!("confirmation"), &json!([1])));
    assert_eq!(
        (&planned["diff"][0]["does"], &planned["diff"][0]["name"]),
        (&json!("delete"), &json!("per_user"))
    );
    let delete = json!({
        "operations": [{ "do": "delete", "kind": "rule", "name": "per_user" }], "base_revision": 1,
    });
    for (target, question, words) in [
        (
            "/v1/rules/rollback",
            json!({ "to_revision": 0, "base_revision": 1 }),
            "confirmed: the rollback removes rule \"per_user\"; ",
        ),
        (
            "/v1/rules/rollback",
            json!({ "change": 1, "base_revision": 1 }),
            "confirmed: the rollback removes rule \"per_user\"; ",
        ),
        ("/v1/rules/apply", delete, "confirmed: the change removes rule \"per_user\"; "),
    ] {
        let reply = post(&server, target, &question);
        let problem: Value = serde_json::from_str(&reply.body).expect("JSON");
        assert_eq!(reply.status, 409, "{problem}");
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.starts_with(words)), "{problem}");
    }
    assert_eq!(get(&server, "/v1/rules")["revision"], json!(1), "nothing happened");
    let again = json!({ "to_revision": 0, "base_revision": 0, "confirmed": true });
    assert_eq!(post(&server, "/v1/rules/rollback", &again).status, 409, "planned against other rows");
    let meant = json!({ "to_revision": 0, "base_revision": 1, "confirmed": true });
    let reply = post(&server, "/v1/rules/rollback", &meant);
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert_eq!(get(&server, "/v1/rules")["rows"], json!([]));
    for wrong in
        [json!({}), json!({ "rollback": {} }), json!({ "rollback": { "change": 1, "to_revision": 0 } })]
    {
        let reply = post(&server, "/v1/rules/plan", &wrong);
        assert!(reply.status == 400 && reply.body.contains("one of the two is needed"), "{}", reply.body);
    }
}
