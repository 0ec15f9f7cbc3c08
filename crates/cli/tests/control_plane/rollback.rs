//! A change that suddenly denies what passed before is undone by itself.

use tidegate_rules::change::{ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::RowKind;
use tidegate_rules::store::Attribution;
use tidegate_testkit::{Postgres, START_TIME_MAX, Server, wait_until};

use crate::fixture::{AUTHOR, ControlFixture, by, check, metrics, passed, per_user, put, serve, wait_for};

#[test]
fn an_absurd_rule_is_rolled_back_and_the_audit_says_so() {
    let postgres = Postgres::start();
    let url = postgres.url("postgres");
    let fixture = ControlFixture::open(&url);
    fixture.put(&[("per_user", &per_user(1_000_000))]);
    let folder = tempfile::tempdir().expect("a folder");
    let start = |at: usize| serve(&url, &folder.path().join(at.to_string()), &[]);
    let servers: Vec<Server> = (0..2).map(start).collect();
    let all_hold = |version: &str| servers.iter().for_each(|server| wait_for(server, version));
    all_hold("r1e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 10) == 10));

    let absurd = fixture.put(&[("per_user", &per_user(1))]);
    let state = || fixture.runtime.block_on(fixture.store.change(absurd.id)).expect("a change").state;
    wait_until("the change to be undone", START_TIME_MAX, || {
        for server in &servers {
            (0..20).for_each(|_| drop(check(server, "bob")));
        }
        state() == ChangeState::RolledBack
    });
    all_hold("r3e0");
    assert!(servers.iter().all(|server| passed(server, "bob", 10) == 10));

    assert_eq!(applied(&fixture), [AUTHOR, AUTHOR, "tidegate: automatic"], "one of the servers, and once");
    fixture.runtime.block_on(fixture.store.verify_audit(None)).expect("the audit holds");
    let count =
        |server: &&Server| metrics(server).contains("tidegate_rules_rollbacks_total{outcome=\"done\"} 1\n");
    assert_eq!(servers.iter().filter(count).count(), 1);
}

fn applied(fixture: &ControlFixture) -> Vec<String> {
    fixture.audit().into_iter().filter(|(_, action)| action == "change.apply").map(|(by, _)| by).collect()
}

/// A server of a store, and something that makes it deny.
fn denying(folder: &tempfile::TempDir, make: impl FnOnce(&ControlFixture)) -> (ControlFixture, Server) {
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let server = serve(&url, &folder.path().join("data"), &[]);
    make(&fixture);
    wait_for(&server, "r2e0");
    (fixture, server)
}

fn deny_until(what: &str, server: &Server, is_so: impl Fn() -> bool) {
    wait_until(what, START_TIME_MAX, || {
        (0..20).for_each(|_| drop(check(server, "bob")));
        is_so()
    });
}

#[test]
fn what_other_rows_need_is_not_rolled_back_until_they_do_not() {
    let folder = tempfile::tempdir().expect("a folder");
    let (fixture, server) = denying(&folder, |fixture| {
        fixture.put(&[("per_user", &per_user(1)), ("other", r#"{"key":["team"],"limit":9,"period":"1h"}"#)]);
        fixture.make(vec![put(RowKind::Override, "vip", r#"{"rule":"other","key":["carol"],"limit":50}"#)]);
    });
    deny_until("the change to be tried to undo", &server, || {
        metrics(&server).contains("tidegate_rules_rollbacks_total{outcome=\"refused\"} 1\n")
    });
    // Without its rule the override would make no sense, and everything would be refused from now on.
    assert_eq!(applied(&fixture), [AUTHOR; 2]);
    fixture.make(vec![Operation::Delete { kind: RowKind::Override, name: "vip".to_owned() }]);
    deny_until("the change to be undone", &server, || applied(&fixture).len() == 4);
    assert_eq!(applied(&fixture).last().map(String::as_str), Some("tidegate: automatic"));
    wait_for(&server, "r4e0");
    assert!(metrics(&server).contains("tidegate_rules_reloads_total{outcome=\"refused\"} 0\n"));
}

#[test]
fn a_change_is_rolled_back_with_what_needs_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let (fixture, server) = denying(&folder, |fixture| {
        fixture.put(&[("per_user", &per_user(1))]);
        fixture.make(vec![put(
            RowKind::Override,
            "vip",
            r#"{"rule":"per_user","key":["carol"],"limit":50}"#,
        )]);
    });
    deny_until("both changes to be undone", &server, || applied(&fixture).len() == 4);
    wait_for(&server, "r4e0");
    assert_eq!(*fixture.runtime.block_on(fixture.store.load()).expect("loads").rows, []);
}

/// A store whose rules were made long ago.
fn settled(url: &str, rules: &[(&str, &str)]) -> ControlFixture {
    let fixture = ControlFixture::open(url);
    let proposal = Proposal {
        base_revision: 0,
        reason: "a test".to_owned(),
        operations: rules.iter().map(|(name, body)| put(RowKind::Rule, name, body)).collect(),
        effect: None,
        needs: ChangeNeeds::Nothing,
        undoes: Vec::new(),
    };
    let long_ago = Attribution { now_ms: by().now_ms - 3_600_000, ..by() };
    fixture.runtime.block_on(fixture.store.apply_new(&proposal, false, long_ago)).expect("applied");
    fixture
}

#[test]
fn of_several_changes_of_a_rule_none_that_is_absurd_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = settled(&url, &[("per_user", &per_user(1_000_000))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    // A good one, and two that are not.
    let changes = [2_000_000, 1, 2].map(|limit| fixture.put(&[("per_user", &per_user(limit))]).id);
    wait_for(&server, "r4e0");
    deny_until("the absurd ones to be undone", &server, || applied(&fixture).len() == 6);
    wait_for(&server, "r6e0");
    assert_eq!(passed(&server, "bob", 10), 10, "the first of them is not in force again");
    let state = |id: u64| fixture.runtime.block_on(fixture.store.change(id)).expect("a change").state;
    assert_eq!(changes.map(state), [ChangeState::Applied, ChangeState::RolledBack, ChangeState::RolledBack]);
    assert!(metrics(&server).contains("tidegate_rules_rollbacks_total{outcome=\"done\"} 2\n"));
}

#[test]
fn what_somebody_changed_further_is_left_alone_and_counted() {
    let folder = tempfile::tempdir().expect("a folder");
    let (fixture, server) = denying(&folder, |fixture| {
        fixture.put(&[("per_user", &per_user(1)), ("other", r#"{"key":["team"],"limit":9,"period":"1h"}"#)]);
        fixture.put(&[("other", r#"{"key":["team"],"limit":10,"period":"1h"}"#)]);
    });
    deny_until("the change to be tried to undo", &server, || {
        metrics(&server).contains("tidegate_rules_rollbacks_total{outcome=\"refused\"} 1\n")
    });
    assert_eq!(applied(&fixture), [AUTHOR; 2]);
}

#[test]
fn a_change_that_lets_pass_more_is_not_undone_by_whoever_asks_too_much() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = settled(&url, &[("per_user", &per_user(1))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    let raised = fixture.put(&[("per_user", &per_user(2))]);
    wait_for(&server, "r2e0");
    fixture.put(&[("beside", BESIDE)]);
    wait_for(&server, "r3e0");
    deny_until("the new rule to be undone", &server, || applied(&fixture).len() == 4);
    wait_for(&server, "r4e0");
    let state = fixture.runtime.block_on(fixture.store.change(raised.id)).expect("a change").state;
    assert_eq!(state, ChangeState::Applied);
    assert_eq!(passed(&server, "carol", 5), 2);
}

#[test]
fn a_change_of_a_moment_ago_is_watched_after_a_start() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = settled(&url, &[("per_user", &per_user(1_000_000)), ("raised", &per_user(1))]);
    fixture.put(&[("per_user", &per_user(1))]);
    let raised = fixture.put(&[("raised", &per_user(2))]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    deny_until("the change to be undone", &server, || applied(&fixture).len() == 4);
    assert_eq!(applied(&fixture).last().map(String::as_str), Some("tidegate: automatic"));
    let state = fixture.runtime.block_on(fixture.store.change(raised.id)).expect("a change").state;
    assert_eq!(state, ChangeState::Applied, "it lets pass more");
}

/// A rule beside the one that a test is about, whose change nobody approved: when that is undone, both were looked at.
const BESIDE: &str = r#"{"key":["user"],"limit":1,"period":"1h"}"#;

#[test]
fn what_somebody_approved_is_not_undone_while_it_does_what_was_approved() {
    let folder = tempfile::tempdir().expect("a folder");
    let (fixture, server) = denying(&folder, |fixture| {
        approved(fixture, &per_user(1), 99.5);
        fixture.put(&[("beside", BESIDE)]);
    });
    deny_until("what nobody approved to be undone", &server, || applied(&fixture).len() == 3);
    wait_for(&server, "r3e0");
    assert_eq!(passed(&server, "carol", 5), 1, "what was approved holds");
    let state = fixture.runtime.block_on(fixture.store.change(1)).expect("a change").state;
    assert_eq!(state, ChangeState::Applied);
}

#[test]
fn what_denies_more_than_somebody_approved_is_undone() {
    let folder = tempfile::tempdir().expect("a folder");
    let (fixture, server) = denying(&folder, |fixture| {
        fixture.put(&[("per_user", &per_user(1_000_000))]);
        approved(fixture, &per_user(1), 10.0);
    });
    deny_until("the change to be undone", &server, || applied(&fixture).len() == 3);
    wait_for(&server, "r3e0");
    assert_eq!(passed(&server, "bob", 10), 10);
}

/// A rule that somebody else approved, expecting that it newly denies so much.
fn approved(fixture: &ControlFixture, body: &str, percent: f64) {
    let effect = format!(
        r#"{{"measured":{{"records":1000,"requests":100,"newly_denied":{percent},"newly_allowed":0,
        "newly_denied_percent":{percent},"rules":[{{"rule":"per_user","requests":100,"newly_denied":{percent}}}]}}}}"#
    );
    fixture.runtime.block_on(async {
        let base_revision = fixture.store.revisions().await.expect("heads").revision;
        let proposal = Proposal {
            base_revision,
            reason: "a test".to_owned(),
            operations: vec![put(RowKind::Rule, "per_user", body)],
            effect: Some(effect),
            needs: ChangeNeeds::Approver,
            undoes: Vec::new(),
        };
        let change = fixture.store.propose(&proposal, by()).await.expect("proposed");
        let other = Attribution { by: "bob", ..by() };
        fixture.store.approve(change.id, other).await.expect("approved");
        fixture.store.apply(change.id, false, by()).await.expect("applied");
    });
}

#[test]
fn a_rule_that_denies_what_it_said_in_shadow_mode_is_not_undone() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let shadow = r#"{"key":["user"],"limit":1,"period":"1h","mode":"shadow"}"#;
    fixture.put(&[("per_user", shadow)]);
    let server = serve(&url, &folder.path().join("data"), &[]);
    wait_for(&server, "r1e0");
    assert_eq!(passed(&server, "bob", 300), 300);
    fixture.put(&[("per_user", &per_user(1))]);
    // A request that one of them denies is not charged to the other: this has to deny by itself.
    fixture.put(&[("beside", &per_user(0))]);
    wait_for(&server, "r3e0");
    // Enough for a jump, and fewer than ten times as many as before.
    assert_eq!(passed(&server, "bob", 200), 0);
    wait_until("what is new to be undone", START_TIME_MAX, || applied(&fixture).len() == 4);
    wait_for(&server, "r4e0");
    assert_eq!(passed(&server, "carol", 5), 1, "it goes on denying");
    let book = fixture.runtime.block_on(fixture.store.load()).expect("loads");
    assert_eq!(book.rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["per_user"]);
}

#[test]
fn what_an_emergency_is_about_is_undone_when_that_is_over() {
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let fixture = ControlFixture::open(&url);
    let server = serve(&url, &folder.path().join("data"), &[]);
    fixture.put(&[("per_user", &per_user(1))]);
    fixture.emergency(r#"{"action":"allow","rule":"per_user","key":["vip"]}"#);
    wait_for(&server, "r1e1");
    deny_until("the change to be tried to undo", &server, || {
        metrics(&server).contains("tidegate_rules_rollbacks_total{outcome=\"refused\"} 1\n")
    });
    assert_eq!(applied(&fixture), [AUTHOR], "a rule in an emergency is not deleted");
    fixture.runtime.block_on(fixture.store.end_emergency("stop", by())).expect("ended");
    deny_until("the change to be undone", &server, || applied(&fixture).len() == 2);
    assert_eq!(applied(&fixture).last().map(String::as_str), Some("tidegate: automatic"));
    wait_for(&server, "r2e2");
    let told = metrics(&server);
    assert!(told.contains("tidegate_rules_rollbacks_total{outcome=\"refused\"} 1\n"), "told once");
}
