//! An invalid change is refused as a whole.

use tidegate_rules::WILDCARDS_PER_TARGET_MAX;
use tidegate_rules::change::Operation;
use tidegate_rules::rows::RowKind;
use tidegate_testkit::Postgres;

use crate::fixture::{ControlFixture, passed, per_user, put, serve, wait_for, wait_for_metric};
use crate::support::raw::{request, send};
use crate::support::tidegate;

#[test]
fn a_poisonous_change_is_refused_whole_and_servers_stay() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&url, folder.path(), &[]);
    wait_for(&server, "r1e0");

    fixture.put(&[("per_user", &per_user(50)), ("poison", r#"{"key":[""],"limit":-1}"#)]);
    wait_for_metric(&server, "tidegate_rules_reloads_total{outcome=\"refused\"} 1");
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2);

    // An emergency comes into force although the rule set is invalid.
    fixture.block("per_user");
    wait_for(&server, "r1e1");
    assert_eq!(passed(&server, "carol", 1), 0);
    // The server reports a new emergency as in force, independent of the rule set.
    let declared = r#"{"action": "block", "rule": "per_user", "key": ["dan"]}"#;
    let declared = send(server.address("admin"), &request("POST", "/v1/emergencies", &[], Some(declared)));
    assert!(
        declared.status == 200 && declared.body.contains(r#""not_in_force":null"#),
        "{} {}",
        declared.status,
        declared.body
    );

    fixture.put(&[("poison", &per_user(1))]);
    wait_for(&server, "r3e2");
}

#[test]
fn overlapping_overrides_and_too_many_wildcards_move_no_server() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let folder = tempfile::tempdir().expect("a folder");
    let servers = ["a", "b"].map(|name| serve(&url, &folder.path().join(name), &[]));
    for server in &servers {
        wait_for(server, "r1e0");
    }
    let over = |name: &str, key: &str| {
        put(RowKind::Override, name, &format!(r#"{{"rule":"per_user","key":["{key}"],"limit":50}}"#))
    };
    let delete = |name: &str| Operation::Delete { kind: RowKind::Override, name: name.to_owned() };

    // Good rows that come with the bad ones are refused with them.
    let overlapping = vec![over("one", "bob"), over("other", "bob"), over("good", "carol")];
    let wildcards: Vec<Operation> = (0..=WILDCARDS_PER_TARGET_MAX)
        .map(|at| over(&format!("w{at}"), &format!("{at}-*")))
        .chain([over("good", "carol")])
        .collect();
    for (operations, refused) in [(overlapping, 1), (wildcards, 2)] {
        let mending = operations.iter().map(|operation| delete(operation.row().1)).collect();
        fixture.make(operations);
        for server in &servers {
            wait_for_metric(
                server,
                &format!("tidegate_rules_reloads_total{{outcome=\"refused\"}} {refused}"),
            );
            wait_for(server, &format!("r{}e0", 2 * refused - 1));
            for user in ["bob", "carol"] {
                assert_eq!(passed(server, &format!("{user}{refused}"), 5), 2, "the rule alone");
            }
            assert_eq!(passed(server, "carol", 5), if refused == 1 { 2 } else { 0 }, "nobody got 50");
        }
        fixture.make(mending);
        for server in &servers {
            wait_for(server, &format!("r{}e0", 2 * refused + 1));
        }
    }
}

#[test]
fn refused_rule_set_is_repaired_by_rollback_or_change() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    let poisonous = fixture.put(&[("poison", "{}")]);
    wait_for_metric(&server, "tidegate_rules_reloads_total{outcome=\"refused\"} 1");
    wait_for(&server, "r1e0");
    let ask = |path: &str, body: &str| send(server.address("admin"), &request("POST", path, &[], Some(body)));

    let harmless = r#"{"operations": [{"do": "delete", "kind": "rule", "name": "per_user"}]}"#;
    let refused = ask("/v1/rules/plan", harmless);
    assert_eq!(refused.status, 400, "{}", refused.body);
    assert!(refused.body.contains("poison"), "{}", refused.body);
    let rollback = format!(r#"{{"change": {}, "base_revision": 2, "confirmed": true}}"#, poisonous.id);
    let undone = ask("/v1/rules/rollback", &rollback);
    assert_eq!(undone.status, 200, "{}", undone.body);
    wait_for(&server, "r3e0");

    fixture.put(&[("poison", "{}")]);
    wait_for_metric(&server, "tidegate_rules_reloads_total{outcome=\"refused\"} 2");
    let mending = format!(
        r#"{{"operations": [{{"do": "put", "kind": "rule", "name": "poison", "body": {}}}],
        "base_revision": 4, "confirmed": true}}"#,
        per_user(9)
    );
    let mended = ask("/v1/rules/apply", &mending);
    assert_eq!(mended.status, 200, "{}", mended.body);
    wait_for(&server, "r5e0");
}

#[test]
fn server_with_invalid_rules_starts_only_from_a_snapshot() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let mut server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    assert_eq!(server.process.terminate(), Some(0));
    fixture.put(&[("poison", "{}")]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2);

    let new = folder.path().join("new");
    let output = tidegate(&["serve", "--rules", &url, "--data-dir", &new.to_string_lossy()]).output();
    let output = output.expect("it runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("rules[\"poison\"].key: missing") && said.contains("there is no snapshot"),
        "{said}"
    );
}
