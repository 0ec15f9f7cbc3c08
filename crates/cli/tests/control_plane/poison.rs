//! What must not be in force is refused whole.

use tidegate_testkit::Postgres;

use crate::ground::{Ground, passed, per_user, serve, wait_for, wait_for_metric};
use crate::support::tidegate;

#[test]
fn a_poisonous_change_is_refused_whole_and_servers_stay() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let ground = Ground::open(&url);
    ground.put(&[("per_user", &per_user(2))]);
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&url, folder.path(), &[]);
    wait_for(&server, "r1e0");

    ground.put(&[("per_user", &per_user(50)), ("poison", r#"{"key":[""],"limit":-1}"#)]);
    wait_for_metric(&server, "tidegate_rules_reloads_total{outcome=\"refused\"} 1");
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 2);

    // An emergency does not wait for the book to be good.
    ground.block("per_user");
    wait_for(&server, "r1e1");
    assert_eq!(passed(&server, "carol", 1), 0);

    ground.put(&[("poison", &per_user(1))]);
    wait_for(&server, "r3e1");
}

#[test]
fn nothing_starts_with_a_poisonous_book_but_from_a_snapshot() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let ground = Ground::open(&url);
    ground.put(&[("per_user", &per_user(2))]);
    let mut server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    assert_eq!(server.process.terminate(), Some(0));
    ground.put(&[("poison", "{}")]);
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
