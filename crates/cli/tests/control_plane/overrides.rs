//! Overrides of direct limits, set on one server and in force on all that follow the store.

use std::time::Duration;

use serde_json::{Value, json};
use tidegate_rules::change::Operation;
use tidegate_rules::rows::RowKind;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

use crate::fixture::{ControlFixture, passed, per_user, put, serve, wait_for};
use crate::support::raw::{Reply, request, send};

/// Time after which an override must be in force on the other servers.
const IN_FORCE_MAX: Duration = Duration::from_secs(1);

fn call(server: &Server, endpoint: &str, body: &Value) -> Reply {
    let path = format!("/v2/ratelimit.{endpoint}");
    send(server.address("http"), &request("POST", &path, &[], Some(&body.to_string())))
}

fn data(server: &Server, endpoint: &str, body: &Value) -> Value {
    let reply = call(server, endpoint, body);
    assert_eq!(reply.status, 200, "{endpoint} {body}: {}", reply.body);
    serde_json::from_str::<Value>(&reply.body).expect("JSON")["data"].take()
}

fn set(server: &Server, identifier: &str, limit: u64) -> Value {
    data(server, "setOverride", &fields(identifier, limit))
}

fn fields(identifier: &str, limit: u64) -> Value {
    json!({"namespace": "emails", "identifier": identifier, "limit": limit, "duration": 60_000})
}

/// The limit that applies to an identifier, and the override that it is from.
fn limit(server: &Server, identifier: &str) -> (u64, Value) {
    let decided = data(server, "limit", &fields(identifier, 1));
    (decided["limit"].as_u64().expect("a number"), decided["overrideId"].clone())
}

/// Sets on one server, deletes on the other, and starts both again.
fn overrides_reach_the_fleet(url: &str) {
    let folder = tempfile::tempdir().expect("a folder");
    let start = |name: &str| serve(url, &folder.path().join(name), &[]);
    let (one, other) = (start("one"), start("other"));
    let answer = set(&one, "vip-*", 70);
    assert_eq!(answer["scope"], "fleet");
    let id = &answer["overrideId"];
    assert_eq!(limit(&one, "vip-1"), (70, id.clone()), "in force before the answer");
    wait_until("the other server to have it", IN_FORCE_MAX, || limit(&other, "vip-1").0 == 70);
    assert_eq!(limit(&other, "vip-1").1, *id);
    let known = data(&other, "getOverride", &json!({"namespace": "emails", "identifier": "vip-*"}));
    let expected = json!({
        "overrideId": id, "identifier": "vip-*", "limit": 70, "duration": 60_000, "scope": "fleet",
    });
    assert_eq!(known, expected);

    set(&other, "gone", 5);
    drop((one, other));
    let (one, other) = (start("one"), start("other"));
    for server in [&one, &other] {
        assert_eq!((limit(server, "vip-1").0, limit(server, "gone").0), (70, 5), "after a restart");
    }
    data(&one, "deleteOverride", &json!({"namespace": "emails", "identifier": "gone"}));
    assert_eq!(limit(&one, "gone").0, 1);
    wait_until("the other server to have it no more", IN_FORCE_MAX, || limit(&other, "gone").0 == 1);
}

#[test]
fn an_override_set_on_one_server_is_in_force_on_all_of_a_file() {
    let folder = tempfile::tempdir().expect("a folder");
    overrides_reach_the_fleet(&format!("sqlite:{}", folder.path().join("rules.db").display()));
}

#[test]
fn an_override_set_on_one_server_is_in_force_on_all_of_postgres() {
    let postgres = Postgres::start();
    overrides_reach_the_fleet(&postgres.url("postgres"));
}

#[test]
fn concurrent_sets_of_one_override_have_one_winner_everywhere() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let servers = ["one", "other"].map(|name| serve(&url, &folder.path().join(name), &[]));
    let ids: Vec<Value> = std::thread::scope(|scope| {
        let set_all = |(at, server): (u64, _)| {
            scope
                .spawn(move || (0..25).map(|turn| set(server, "vip", 10 + 2 * turn + at)).collect::<Vec<_>>())
        };
        let writers: Vec<_> = (0..).zip(&servers).map(set_all).collect();
        writers.into_iter().flat_map(|writer| writer.join().expect("no panic")).collect()
    });
    assert!(ids.iter().all(|id| *id == ids[0]), "one override, one id");
    let fixture = ControlFixture::open(&url);
    let rows = fixture.runtime.block_on(fixture.store.load()).expect("loads").rows;
    assert_eq!((rows.len(), rows[0].version), (1, 50), "every write counts");
    let winner =
        serde_json::from_str::<Value>(&rows[0].body).expect("JSON")["limit"].as_u64().expect("a number");
    for server in &servers {
        wait_until("the winner to be in force", IN_FORCE_MAX, || limit(server, "vip").0 == winner);
    }
}

#[test]
fn overrides_of_clients_and_changes_of_rules_do_not_disturb_each_other() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let server = serve(&url, &folder.path().join("data"), &[]);
    set(&server, "vip", 7);
    fixture.put(&[("per_user", &per_user(2))]);
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2);
    set(&server, "vip", 8);
    assert_eq!(passed(&server, "bob", 5), 0, "spent units stay spent, also those of rules");

    // A change that was planned before the override was set is applied all the same.
    let plan = |operations: &Value| json!({ "operations": operations }).to_string();
    let operations = json!([
        {"do": "put", "kind": "rule", "name": "per_user", "body": {"key": ["user"], "limit": 3, "period": "1h"}},
    ]);
    let admin =
        |path: &str, body: &str| send(server.address("admin"), &request("POST", path, &[], Some(body)));
    let planned = admin("/v1/rules/plan", &plan(&operations));
    assert_eq!(planned.status, 200, "{}", planned.body);
    set(&server, "vip", 9);
    let apply = json!({ "operations": operations, "base_revision": 1, "confirmed": true }).to_string();
    let applied = admin("/v1/rules/apply", &apply);
    assert_eq!(applied.status, 200, "{}", applied.body);
    wait_for(&server, "r2e0");
    assert_eq!(limit(&server, "vip").0, 9);

    // A rollback of all changes takes away the rule, and leaves the override.
    let rollback = json!({ "to_revision": 0, "base_revision": 2, "confirmed": true }).to_string();
    let undone = admin("/v1/rules/rollback", &rollback);
    assert_eq!(undone.status, 200, "{}", undone.body);
    wait_for(&server, "r3e0");
    assert_eq!((limit(&server, "vip").0, passed(&server, "bob", 5)), (9, 5));
    let actions = fixture.audit();
    let sets = actions.iter().filter(|(by, action)| by == "local" && action == "override.set").count();
    assert_eq!(sets, 3, "{actions:?}");
}

#[test]
fn overrides_come_into_force_while_the_rules_are_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    fixture.put(&[("broken", r#"{"limit": 1}"#)]);
    wait_until("the rules to be refused", START_TIME_MAX, || {
        crate::fixture::metrics(&server).contains("tidegate_rules_reloads_total{outcome=\"refused\"} 1\n")
    });
    set(&server, "vip", 7);
    assert_eq!((limit(&server, "vip").0, passed(&server, "bob", 5)), (7, 2));
}

#[test]
fn a_change_may_hold_overrides_of_namespaces() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let server = serve(&url, &folder.path().join("data"), &[]);
    let body = r#"{"namespace":"emails","identifier":"vip-*","limit":70,"period":"1m"}"#;
    fixture.make(vec![put(RowKind::Override, "important", body)]);
    wait_until("it to be in force", START_TIME_MAX, || limit(&server, "vip-1") == (70, json!("important")));
    // It is for every tenant, so no tenant can delete it, and its own comes first.
    let which = json!({"namespace": "emails", "identifier": "vip-*"});
    let refused = call(&server, "deleteOverride", &which);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("which only their author can delete"), "{}", refused.body);
    set(&server, "vip-*", 5);
    assert_eq!(limit(&server, "vip-1").0, 5);
    data(&server, "deleteOverride", &which);
    assert_eq!(limit(&server, "vip-1").0, 70);
    fixture.make(vec![Operation::Delete { kind: RowKind::Override, name: "important".to_owned() }]);
    wait_until("it to be gone", START_TIME_MAX, || limit(&server, "vip-1").0 == 1);
}
