//! Changes and emergencies of one author, one after the other, on a store and a clock of the test.

use std::sync::Arc;
use std::time::Duration;

use tidegate_rules::change::{Change, ChangeNeeds, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::snapshot::Snapshot;
use tidegate_rules::store::{Attribution, Store};

use crate::changes::ChangeOutcome;
use crate::consent::ChangeKind;
use crate::control::{Control, LoadDepth};
use crate::guardrail::{ChangeEffect, Consent};
use crate::node::Node as _;
use crate::test_node::{TestClock, TestNode};
use crate::tests::put;

/// A node with two people who may approve changes.
struct SeriesFixture {
    clock: TestClock,
    node: Arc<TestNode>,
    control: Arc<Control<TestNode>>,
    store: Store,
}

impl SeriesFixture {
    async fn new() -> Self {
        let clock = TestClock::new();
        let node = TestNode::start(clock.clone(), None);
        node.set_approvers(&["ada", "bob"]);
        let store = Store::open(&"sqlite::memory:".parse().expect("an address")).await.expect("opens");
        let control = Control::new(store.clone(), Snapshot::default(), None, &node);
        control.take_rows(LoadDepth::First).await.expect("loaded");
        Self { clock, node, control, store }
    }

    async fn plan(&self, operations: &[Operation], by: &str) -> ChangeEffect {
        let rule_rows = self.control.current().await.expect("rows");
        let plan = self.control.plan(&rule_rows, (ChangeKind::Edit, operations), by).await;
        plan.expect("a plan").effect
    }

    /// Makes a change as its author confirms it. Returns it if it is applied, else the reason.
    async fn make(&self, operation: Operation, by: &str) -> Result<Change, String> {
        let rule_rows = self.control.current().await.expect("rows");
        let operations = vec![operation];
        let effect = self.plan(&operations, by).await;
        let proposal = Proposal::new(rule_rows.revision, "a test", operations);
        let made = self.control.make(&rule_rows, proposal, &effect, true, by).await.expect("made");
        self.control.refresh().await.expect("in force");
        match made {
            ChangeOutcome::Applied(change) => Ok(change),
            ChangeOutcome::Waiting(_) => Err(effect.because),
        }
    }

    async fn emergency(&self, id: &str, range: &str, by: &str) -> Option<Consent> {
        let row = self.row(id, &format!(r#"{{"action":"block","when":{{"ip":"{range}"}},"by":"{by}"}}"#));
        self.consent(&row, by).await
    }

    async fn consent(&self, row: &EmergencyRow, by: &str) -> Option<Consent> {
        self.control.emergency_consent(row, by).await.expect("judged")
    }

    fn row(&self, id: &str, body: &str) -> EmergencyRow {
        EmergencyRow { id: id.to_owned(), body: body.to_owned(), expires_ms: self.node.now_ms() + 60_000 }
    }
}

/// A rule whose burst stays, so that only its rate falls.
fn api(limit: u32) -> Operation {
    let body = format!(r#"{{"key":["user"],"limit":{limit},"burst":1000,"period":"1h"}}"#);
    put(RowKind::Rule, "api", &body)
}

/// From 1,000 to 2, each more than half of the one before.
const STEPS: [u32; 11] = [570, 325, 185, 105, 60, 34, 19, 11, 6, 4, 3];

#[tokio::test]
async fn eleven_confirmed_steps_do_not_replace_an_approval() {
    let fixture = SeriesFixture::new().await;
    fixture.make(api(1_000), "ada").await.expect("the store is new");
    fixture.make(api(STEPS[0]), "ada").await.expect("more than half is left");
    for limit in STEPS[1..].iter().copied() {
        let because = fixture.make(api(limit), "ada").await.expect_err("it waits");
        let percent = 100.0 - f64::from(limit) / 10.0;
        let words = format!("lowers rule \"api\" from 1,000 to {limit} since 08:00 UTC, by {percent:.1} %; ");
        assert!(because.starts_with(&words), "{because}");
    }
    assert_eq!(fixture.node.limit("api"), STEPS[0]);
    // Another person starts from the rules in force.
    fixture.make(api(STEPS[1]), "carol").await.expect("more than half is left");
}

#[tokio::test]
async fn series_ends_after_a_day_or_with_an_approval() {
    let fixture = SeriesFixture::new().await;
    fixture.make(api(1_000), "ada").await.expect("the store is new");
    fixture.make(api(570), "ada").await.expect("more than half is left");
    fixture.clock.advance(Duration::from_hours(24));
    fixture.make(api(325), "ada").await.expect_err("a day ago");
    fixture.clock.advance(Duration::from_millis(1));
    fixture.make(api(325), "ada").await.expect("more than a day ago");
    let rule_rows = fixture.control.current().await.expect("rows");
    let operations = vec![api(100)];
    let effect = fixture.plan(&operations, "ada").await;
    let proposal = Proposal::new(rule_rows.revision, "a test", operations);
    let made = fixture.control.make(&rule_rows, proposal, &effect, true, "ada").await.expect("made");
    let ChangeOutcome::Waiting(change) = made else { panic!("{made:?}") };
    let bob = fixture.control.attribution("bob").expect("a running node");
    fixture.store.approve(change.id, bob).await.expect("approved");
    fixture.store.apply(change.id, true, bob).await.expect("applied");
    fixture.control.refresh().await.expect("in force");
    fixture.make(api(60), "ada").await.expect("bob agreed to 100");
}

#[tokio::test]
async fn deleted_security_rule_waits_or_is_named_where_nobody_could_approve() {
    let fixture = SeriesFixture::new().await;
    let login = r#"{"key":["user"],"limit":5,"period":"1m","class":"security"}"#;
    fixture.make(put(RowKind::Rule, "login", login), "ada").await.expect("the store is new");
    let delete = || Operation::Delete { kind: RowKind::Rule, name: "login".to_owned() };
    let because = fixture.make(delete(), "ada").await.expect_err("it waits");
    assert!(because.contains("deletes security rule \"login\""), "{because}");
    fixture.node.set_approvers(&["ada"]);
    let alone = fixture.plan(&[delete()], "ada").await;
    assert_eq!(alone.needs, ChangeNeeds::Confirmation);
    assert!(alone.because.contains("deletes security rule \"login\""), "{}", alone.because);
    fixture.make(delete(), "ada").await.expect("confirmed");
}

#[tokio::test]
async fn halves_of_the_address_space_need_an_approver() {
    let fixture = SeriesFixture::new().await;
    for (range, needs) in [
        ("203.0.113.7", None),
        ("10.1.0.0/16", None),
        ("10.0.0.0/15", Some(ChangeNeeds::Confirmation)),
        ("0.0.0.0/1", Some(ChangeNeeds::Approver)),
        ("128.0.0.0/1", Some(ChangeNeeds::Approver)),
        ("::/1", Some(ChangeNeeds::Approver)),
    ] {
        let consent = fixture.emergency("e", range, "ada").await;
        assert_eq!(consent.map(|consent| consent.needs), needs, "{range}");
    }
    fixture.node.set_approvers(&[]);
    let alone = fixture.emergency("e", "0.0.0.0/1", "ada").await.expect("consent");
    assert_eq!(alone.needs, ChangeNeeds::Confirmation, "no approver exists: {}", alone.because);
}

#[tokio::test]
async fn block_of_many_addresses_is_not_narrowed_by_a_method() {
    let fixture = SeriesFixture::new().await;
    let by_user = r#"{"key":["user"],"limit":5,"period":"1m"}"#;
    fixture.make(put(RowKind::Rule, "api", by_user), "ada").await.expect("the store is new");
    for (when, needs) in [
        (r#"{"ip":"0.0.0.0/1","method":["GET","POST"]}"#, Some(ChangeNeeds::Approver)),
        (r#"{"ip":"0.0.0.0/1","user":"bob"}"#, None),
    ] {
        let body = format!(r#"{{"action":"block","rule":"api","when":{when}}}"#);
        let consent = fixture.consent(&fixture.row("e", &body), "ada").await;
        assert_eq!(consent.map(|consent| consent.needs), needs, "{when}");
    }
}

#[tokio::test]
async fn active_blocks_of_an_author_count_together() {
    let fixture = SeriesFixture::new().await;
    let body = |range: &str| format!(r#"{{"action":"block","when":{{"ip":"{range}"}},"by":"ada"}}"#);
    let act = || Attribution { by: "ada", now_ms: fixture.node.now_ms() };
    for (id, range) in [("a", "10.0.0.0/9"), ("b", "12.0.0.0/9")] {
        let consent = fixture.emergency(id, range, "ada").await.expect("consent");
        assert_eq!(consent.needs, ChangeNeeds::Confirmation, "{}", consent.because);
        fixture.store.put_emergency(&fixture.row(id, &body(range)), act()).await.expect("put");
    }
    let third = fixture.emergency("c", "14.0.0.0/9", "ada").await.expect("consent");
    let words = "the blocks of its author cover 25,165,824 IPv4 addresses, more than the 16,777,216 of a /8";
    assert_eq!((third.needs, third.because.as_str()), (ChangeNeeds::Approver, words));
    let again = fixture.emergency("b", "12.0.0.0/9", "ada").await.expect("consent");
    assert_eq!(again.needs, ChangeNeeds::Confirmation, "it replaces itself");
    let other = fixture.emergency("c", "14.0.0.0/9", "eve").await.expect("consent");
    assert_eq!(other.needs, ChangeNeeds::Confirmation, "of another author");
}

#[tokio::test]
async fn emergency_that_lifts_a_security_rule_needs_an_approver() {
    let fixture = SeriesFixture::new().await;
    let login = r#"{"key":["user"],"limit":5,"period":"1m","class":"security"}"#;
    fixture.make(put(RowKind::Rule, "login", login), "ada").await.expect("the store is new");
    for (body, is_asked) in [
        (r#"{"action":"allow"}"#, true),
        (r#"{"action":"allow","rule":"login"}"#, true),
        (r#"{"action":"allow","rule":"login","key":["*"]}"#, true),
        (r#"{"action":"limit","limit":11,"period":"1m","rule":"login"}"#, true),
        (r#"{"action":"allow","rule":"login","key":["bob"]}"#, false),
        (r#"{"action":"limit","limit":10,"period":"1m","rule":"login"}"#, false),
        (r#"{"action":"allow","rule":"another"}"#, false),
        (r#"{"action":"allow","when":{"method":["GET","POST","PUT","DELETE"]}}"#, true),
        (r#"{"action":"allow","rule":"login","when":{"method":"POST"}}"#, true),
        (r#"{"action":"allow","when":{"user":"bob"}}"#, true),
        (r#"{"action":"allow","rule":"login","when":{"user":["bob","eve"]}}"#, false),
        (
            r#"{"action":"allow","rule":"login","when":{"user":["1","2","3","4","5","6","7","8","9","a","b"]}}"#,
            true,
        ),
        (r#"{"action":"allow","when":{"ip":"192.0.2.0/24"}}"#, false),
        (r#"{"action":"allow","when":{"ip":"0.0.0.0/1","method":"GET"}}"#, true),
    ] {
        let consent = fixture.consent(&fixture.row("e", body), "ada").await;
        assert_eq!(consent.is_some_and(|consent| consent.needs == ChangeNeeds::Approver), is_asked, "{body}");
    }
}
