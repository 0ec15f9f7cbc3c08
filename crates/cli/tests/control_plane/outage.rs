//! Outages of the rule store: servers keep their rules, and start from snapshots.

use tidegate_rules::store::Credential;
use tidegate_server::auth::TokenHash;
use tidegate_testkit::{ObjectStore, Postgres, START_TIME_MAX, Server, wait_until};

use crate::fixture::{ControlFixture, by, metrics, passed, per_user, serve, wait_for, wait_for_metric};
use crate::support::raw::{request, send};
use crate::support::{tidegate, token_entry, write};

#[test]
fn a_server_goes_on_and_starts_without_its_store() {
    let mut postgres = Postgres::start();
    let url = postgres.url("postgres");
    ControlFixture::open(&url).put(&[("per_user", &per_user(2))]);
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
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(4))]);
    wait_for(&server, "r2e0");
    wait_for_metric(&server, "tidegate_rules_store_up 1");
}

#[test]
fn tokens_of_the_store_open_a_server_that_starts_without_it() {
    let mut postgres = Postgres::start();
    let url = postgres.url("postgres");
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let credential = |token: &str, expires_ms| Credential {
        hash: TokenHash::of(token.as_bytes()).to_string().replace("sha256:", ""),
        name: token.to_owned(),
        tenant: String::new(),
        role: "viewer".to_owned(),
        created_ms: by().now_ms,
        expires_ms,
    };
    let put = |fixture: &ControlFixture, credential: &Credential| {
        fixture.runtime.block_on(fixture.store.put_credential(credential, by())).expect("put");
    };
    let (kept, ending) = (credential("kept", None), credential("ending", Some(by().now_ms + 2_000)));
    put(&fixture, &kept);
    put(&fixture, &ending);
    let folder = tempfile::tempdir().expect("a folder");
    let config = write(folder.path(), "tidegate.toml", &token_entry("configured", "", "viewer"));
    let status = |server: &Server, token: &str| {
        let bearer = format!("Bearer {token}");
        send(server.address("admin"), &request("GET", "/metrics", &[("authorization", &bearer)], None)).status
    };
    let mut server = serve(&url, folder.path(), &["--config", &config]);
    assert_eq!(["configured", "kept", "other"].map(|token| status(&server, token)), [200, 200, 401]);
    assert_eq!(server.process.terminate(), Some(0));
    postgres.kill();

    let server = serve(&url, folder.path(), &["--config", &config]);
    assert_eq!(["configured", "kept", "other"].map(|token| status(&server, token)), [200, 200, 401]);
    wait_until("a token to end", START_TIME_MAX, || status(&server, "ending") == 401);

    // When the store is back, its state counts.
    postgres.restart();
    let fixture = ControlFixture::open(&url);
    put(&fixture, &credential("other", None));
    fixture.runtime.block_on(fixture.store.revoke_credential(&kept.hash, by())).expect("revoked");
    wait_until("the store to be heard", START_TIME_MAX, || {
        ["configured", "kept", "other"].map(|token| status(&server, token)) == [200, 401, 200]
    });
}

#[test]
fn a_store_that_was_lost_takes_no_rules_with_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, data) = (folder.path().join("rules.db"), folder.path().join("data"));
    let url = format!("sqlite:{}", file.display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    fixture.block("per_user");
    let mut server = serve(&url, &data, &[]);
    wait_for(&server, "r1e1");
    assert_eq!(server.process.terminate(), Some(0));
    fixture.runtime.block_on(fixture.store.close());
    std::fs::remove_file(&file).expect("lost");

    // Opening the lost store creates an empty one. Without rules, every request would pass.
    let server = serve(&url, &data, &["--rules-reconcile", "1s"]);
    wait_until("the empty store to be looked at twice", START_TIME_MAX, || {
        let refused = |count: u32| format!("tidegate_rules_reloads_total{{outcome=\"refused\"}} {count}\n");
        let metrics = metrics(&server);
        !metrics.contains(&refused(0)) && !metrics.contains(&refused(1))
    });
    wait_for(&server, "r1e1");
    assert_eq!(passed(&server, "bob", 5), 0);

    // A change of the new store counts, although it has the same revision.
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(4))]);
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 5), 4);
    fixture.block("per_user");
    wait_for(&server, "r1e1");
    assert_eq!(passed(&server, "dora", 5), 0);
}

#[test]
fn a_server_without_a_disk_starts_from_a_bucket() {
    let bucket = ObjectStore::start("books", |_| true);
    let mut postgres = Postgres::start();
    let url = postgres.url("postgres");
    let serve = |prefix: &str| {
        let mut command = tidegate(&[]);
        command.env("AWS_ENDPOINT_URL", bucket.url());
        command.env("AWS_ACCESS_KEY_ID", "AKIA").env("AWS_SECRET_ACCESS_KEY", "hunter2");
        Server::start_as(command, &["--rules", &url, "--rules-snapshots", &format!("s3://books/{prefix}")])
    };
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let (mut server, mut other) = (serve("eu/node-1"), serve("eu/node-2"));
    wait_until("the first snapshots", START_TIME_MAX, || bucket.objects().len() == 2);
    // A server writes its latest state when it stops.
    fixture.block("per_user");
    wait_for(&server, "r1e1");
    wait_for(&other, "r1e1");
    assert_eq!(server.process.terminate(), Some(0));
    assert_eq!(other.process.terminate(), Some(0));
    postgres.kill();
    // The latest of one is cut: the one before it counts.
    let latest = bucket.objects().keys().rfind(|key| key.starts_with("eu/node-2/")).cloned().expect("kept");
    bucket.objects().entry(latest).and_modify(|bytes| bytes.truncate(bytes.len() / 2));

    let (server, other) = (serve("eu/node-1"), serve("eu/node-2"));
    wait_for(&server, "r1e1");
    wait_for_metric(&server, "tidegate_rules_store_up 0");
    assert_eq!(passed(&server, "bob", 5), 0);
    wait_for(&other, "r1e0");
    assert_eq!(passed(&other, "bob", 5), 2);
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
