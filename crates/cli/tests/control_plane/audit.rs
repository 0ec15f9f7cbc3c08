//! A server verifies the audit of its store for one request at a time, and compares it with the
//! checkpoint of its last snapshot.

use std::fs::File;
use std::path::Path;
use std::thread::JoinHandle;

use sqlx::{AssertSqlSafe, Connection as _, SqliteConnection};
use tidegate_rules::audit::Checkpoint;
use tidegate_rules::snapshot::load_last_good;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, Traffic, wait_until};

use crate::fixture::{ControlFixture, metrics, passed, per_user, serve, wait_for, wait_for_metric};
use crate::support::raw::{begin, finish, request, send};
use crate::support::tidegate;

#[test]
fn the_audit_is_verified_by_one_at_a_time() {
    let postgres = Postgres::start();
    let (_ground, proxy, url) = ControlFixture::behind_a_proxy(&postgres);
    let folder = tempfile::tempdir().expect("a folder");
    let server = serve(&url, folder.path(), &[]);
    wait_for(&server, "r1e0");
    let verify = || begin(server.address("admin"), &request("GET", "/v1/audit/verify", &[], None));

    // The proxy stops the query for the entries.
    proxy.set(Traffic::QuestionsUpTo(b"SELECT sequence"));
    let both = [verify(), verify()].map(|asked| std::thread::spawn(|| finish(asked)));
    wait_until("one of them to be refused", START_TIME_MAX, || both.iter().any(JoinHandle::is_finished));
    proxy.set(Traffic::Pass);
    let mut replies = both.map(|reply| reply.join().expect("an answer"));
    replies.sort_by_key(|reply| reply.status);
    assert_eq!(replies.each_ref().map(|reply| reply.status), [200, 503], "{replies:?}");
    assert!(replies[0].body.contains(r#""holds":true"#), "{}", replies[0].body);
    assert!(replies[1].body.contains("one at a time"), "{}", replies[1].body);
}

/// Takes the last change back, with its rows, its entries and the recorded end.
const CUT_OFF: &str = "DELETE FROM tidegate_audit WHERE sequence > 2; \
     DELETE FROM tidegate_changes WHERE id = 2; \
     UPDATE tidegate_rows SET version = 1, revision = 1, body = REPLACE(body, '2', '3'); \
     UPDATE tidegate_heads SET revision = 1, change_count = 1, audit_count = 2, \
     audit_hash = (SELECT hash FROM tidegate_audit WHERE sequence = 2)";

fn tamper(fixture: &ControlFixture, url: &str, sql: &str) {
    fixture.runtime.block_on(async {
        let mut connection = SqliteConnection::connect(url).await.expect("a connection");
        sqlx::raw_sql(AssertSqlSafe(sql.to_owned())).execute(&mut connection).await.expect("done");
    });
}

fn last_checkpoint(folder: &Path) -> Option<Checkpoint> {
    load_last_good(folder).expect("reads").snapshot?.checkpoint
}

fn audit_verify(server: &Server, more: &[&str]) -> (Option<i32>, String) {
    let url = server.url("admin", "");
    let output =
        tidegate(&[&["audit", "verify", "--server", &url], more].concat()).output().expect("it runs");
    let text = [output.stdout, output.stderr].concat();
    (output.status.code(), String::from_utf8(text).expect("text"))
}

#[test]
fn a_server_names_rows_that_were_edited_in_its_store() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(2))]);
    let server = serve(&url, folder.path(), &[]);
    let (status, text) = audit_verify(&server, &[]);
    assert_eq!(status, Some(0), "{text}");
    tamper(&fixture, &url, "UPDATE tidegate_rows SET body = REPLACE(body, '2', '999')");
    let (status, text) = audit_verify(&server, &[]);
    assert_eq!(status, Some(1), "{text}");
    assert!(text.contains(r#"rule "per_user" (revision 1) was edited: body"#), "{text}");
    let (_, json) = audit_verify(&server, &["--json"]);
    let wanted = r#"{"kind":"rule","name":"per_user","revision":1,"way":{"edited":["body"]}}"#;
    assert!(json.contains(wanted), "{json}");
}

#[test]
fn a_cut_off_audit_is_noticed_by_the_checkpoint_of_the_last_snapshot() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(3))]);
    fixture.put(&[("per_user", &per_user(2))]);
    let end = fixture.runtime.block_on(fixture.store.checkpoint()).expect("an end");
    let output = folder.path().join("output");
    let snapshots = folder.path().join("rules");
    let start = || {
        let mut command = tidegate(&[]);
        command.stderr(File::create(&output).expect("a file"));
        let data = folder.path().to_string_lossy().into_owned();
        Server::start_as(command, &["--rules", &url, "--data-dir", &data])
    };
    let mut server = start();
    wait_until("a snapshot", START_TIME_MAX, || last_checkpoint(&snapshots).is_some());
    assert_eq!(last_checkpoint(&snapshots), Some(end.clone()));
    assert!(metrics(&server).contains("tidegate_rules_audit_broken 0\n"));
    assert_eq!(server.process.terminate(), Some(0));
    let log = std::fs::read_to_string(&output).expect("a log");
    assert!(log.contains(&end.to_string()), "the log has the checkpoint: {log}");

    tamper(&fixture, &url, CUT_OFF);
    let mut server = start();
    wait_for_metric(&server, "tidegate_rules_audit_broken 1");
    assert_eq!(passed(&server, "bob", 5), 3, "it goes on deciding");
    let ready = send(server.address("admin"), &request("GET", "/readyz", &[], None));
    let sentence =
        "the audit of the rule store does not continue the last checkpoint: audit: entry 3 is missing";
    assert_eq!(ready.status, 200);
    assert!(ready.body.contains(sentence), "{}", ready.body);
    let status = tidegate(&["status", "--server", &server.url("admin", "")]).output().expect("it runs");
    assert!(String::from_utf8_lossy(&status.stdout).contains(sentence), "{status:?}");
    let (code, text) = audit_verify(&server, &[]);
    assert_eq!(code, Some(0), "the store holds in itself: {text}");
    for given in
        [snapshots.to_string_lossy().into_owned(), format!("{}/{}", snapshots.display(), newest(&snapshots))]
    {
        let (code, text) = audit_verify(&server, &["--snapshot", &given]);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains("audit: entry 3 is missing"), "{text}");
    }
    // The proof outlives the server and its next snapshots.
    let before = newest(&snapshots);
    fixture.put(&[("per_user", &per_user(4))]);
    wait_for(&server, "r2e0");
    assert_eq!(server.process.terminate(), Some(0));
    assert_ne!(newest(&snapshots), before, "the last change is in a snapshot");
    assert_eq!(last_checkpoint(&snapshots), Some(end));
    let log = std::fs::read_to_string(&output).expect("a log");
    assert!(log.contains("ERROR") && log.contains("does not continue its checkpoint"), "{log}");
}

/// The name of the newest file of a folder of snapshots.
fn newest(folder: &Path) -> String {
    let files = std::fs::read_dir(folder).expect("a folder");
    let names = files.map(|file| file.expect("a file").file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".snapshot")).max().expect("a snapshot")
}
