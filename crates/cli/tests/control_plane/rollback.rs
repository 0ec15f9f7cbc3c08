//! A change that suddenly denies what passed before is undone by itself.

use tidegate_rules::change::State;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

use crate::ground::{AUTHOR, Ground, check, metrics, passed, per_user, serve, wait_for};

#[test]
fn an_absurd_rule_is_rolled_back_and_the_audit_says_so() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let ground = Ground::open(&url);
    ground.put(&[("per_user", &per_user(1_000_000))]);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |at: usize| serve(&url, &folder.path().join(at.to_string()), &[]);
    let servers: Vec<Server> = (0..2).map(start).collect();
    let all_hold = |version: &str| servers.iter().for_each(|server| wait_for(server, version));
    all_hold("r1e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 10) == 10));

    let absurd = ground.put(&[("per_user", &per_user(1))]);
    let state = || ground.runtime.block_on(ground.store.change(absurd.id)).expect("a change").state;
    wait_until("the change to be undone", START_TIME_MAX, || {
        for server in &servers {
            (0..20).for_each(|_| drop(check(server, "bob")));
        }
        state() == State::RolledBack
    });
    all_hold("r3e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 10) == 10));

    let applied: Vec<String> =
        ground.audit().into_iter().filter(|(_, action)| action == "change.apply").map(|(by, _)| by).collect();
    assert_eq!(applied, [AUTHOR, AUTHOR, "tidegate: automatic"], "one of the servers, and once");
    ground.runtime.block_on(ground.store.verify_audit(None)).expect("the audit holds");
    let count = |server: &&Server| metrics(server).contains("tidegate_rules_rollbacks_total 1\n");
    assert_eq!(servers.iter().filter(count).count(), 1);
}
