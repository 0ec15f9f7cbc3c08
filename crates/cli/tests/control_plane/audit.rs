//! A server verifies the audit of its store for one request at a time.

use std::thread::JoinHandle;

use tidegate_testkit::{Postgres, START_TIME_MAX, Traffic, wait_until};

use crate::fixture::{ControlFixture, serve, wait_for};
use crate::support::raw::{begin, finish, request};

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
