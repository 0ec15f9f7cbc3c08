//! The store is gone: servers go on, and start from what they kept.

use tidegate_testkit::Postgres;

use crate::ground::{Ground, passed, per_user, serve, wait_for, wait_for_metric};
use crate::support::raw::{request, send};
use crate::support::tidegate;

#[test]
fn a_server_goes_on_and_starts_without_its_store() {
    let mut postgres = Postgres::start();
    let url = postgres.url("postgres");
    Ground::open(&url).put(&[("per_user", &per_user(2))]);
    let folder = tempfile::tempdir().expect("a folder");
    let mut server = serve(&url, folder.path(), &[]);
    wait_for(&server, "r1e0");

    postgres.kill();
    wait_for_metric(&server, "tidegate_rules_store_up 0");
    assert_eq!(passed(&server, "bob", 5), 2);
    let ready = send(server.address("admin"), &request("GET", "/readyz", &[], None));
    assert_eq!(ready.status, 200);
    assert_eq!(server.process.terminate(), Some(0));

    let server = serve(&url, folder.path(), &[]);
    wait_for(&server, "r1e0");
    wait_for_metric(&server, "tidegate_rules_store_up 0");
    assert_eq!(passed(&server, "bob", 5), 2);

    // It is followed once it is there.
    postgres.restart();
    let ground = Ground::open(&url);
    ground.put(&[("per_user", &per_user(4))]);
    wait_for(&server, "r2e0");
    wait_for_metric(&server, "tidegate_rules_store_up 1");
}

#[test]
fn without_a_store_and_a_snapshot_nothing_starts() {
    let folder = tempfile::tempdir().expect("a folder");
    let data = folder.path().to_string_lossy();
    let url = format!("postgres://ada:secret@127.0.0.1:{}/rules", tidegate_testkit::free_port());
    for (snapshots, words) in [("none", "rules_snapshots is \"none\""), (&*data, "there is no snapshot in ")]
    {
        let arguments = ["--rules", &url, "--data-dir", &data, "--rules-snapshots", snapshots];
        let output = tidegate(&[&["serve"], &arguments[..]].concat()).output().expect("it runs");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains("rules: the store cannot be reached: postgres://ada@127.0.0.1"), "{said}");
        assert!(said.contains(words) && !said.contains("secret"), "{said}");
    }
}
