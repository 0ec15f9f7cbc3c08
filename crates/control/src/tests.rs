//! Automatic rollback, look by look, on a store and a clock of the test's own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::snapshot::Snapshot;
use tidegate_rules::store::{Attribution, Store};

use crate::control::{Control, LoadDepth, Stopping};
use crate::denials::LOOK_EVERY;
use crate::guardrail::ApprovedEffect;
use crate::node::{ControlEvent, Node as _};
use crate::test_node::{TestClock, TestNode};

const LOOKS_PER_MINUTE: usize = 12;

/// A limit that no test exceeds.
const PLENTY: u32 = 1_000_000;

/// A node that follows a store, and whose time passes by hand.
pub(crate) struct Fixture {
    clock: TestClock,
    pub(crate) node: Arc<TestNode>,
    pub(crate) control: Arc<Control<TestNode>>,
    pub(crate) store: Store,
}

impl Fixture {
    pub(crate) async fn new() -> Self {
        let store = Store::open(&"sqlite::memory:".parse().expect("an address")).await.expect("opens");
        Self::start(TestClock::new(), store, None).await
    }

    /// Starts a node, with a decision log if there is a folder.
    async fn start(clock: TestClock, store: Store, folder: Option<&Path>) -> Self {
        let node = TestNode::start(clock.clone(), folder);
        let control = Control::new(store.clone(), Snapshot::default(), None, &node);
        control.take_rows(LoadDepth::First).await.expect("loaded");
        let fixture = Self { clock, node, control, store };
        fixture.look().await;
        fixture
    }

    pub(crate) fn by(&self) -> Attribution<'static> {
        Attribution { by: "ada", now_ms: self.node.now_ms() }
    }

    /// Applies a change, and puts it in force.
    async fn make(&self, operations: Vec<Operation>) -> Change {
        let base_revision = self.store.revisions().await.expect("revisions").revision;
        let proposal = Proposal::new(base_revision, "a test", operations);
        let change = self.store.apply_new(&proposal, false, self.by()).await.expect("applied");
        self.follow().await;
        change
    }

    pub(crate) async fn put(&self, rule: &str, body: &str) -> Change {
        self.make(vec![put(RowKind::Rule, rule, body)]).await
    }

    /// Applies a change of `per_user` that an approver expected to newly deny this share.
    async fn approve(&self, limit: u32, percent: u32) -> Change {
        let effect = format!(
            r#"{{"measured":{{"records":1000,"requests":100,"newly_denied":{percent},"newly_allowed":0,
            "newly_denied_percent":{percent},
            "rules":[{{"rule":"per_user","requests":100,"newly_denied":{percent}}}]}}}}"#
        );
        let base_revision = self.store.revisions().await.expect("revisions").revision;
        let operations = vec![put(RowKind::Rule, "per_user", &per_user(limit))];
        let (effect, needs) = (Some(effect), ChangeNeeds::Approver);
        let proposal = Proposal { effect, needs, ..Proposal::new(base_revision, "a test", operations) };
        let change = self.store.propose(&proposal, self.by()).await.expect("proposed");
        let bob = Attribution { by: "bob", ..self.by() };
        self.store.approve(change.id, bob).await.expect("approved");
        self.store.apply(change.id, false, self.by()).await.expect("applied");
        self.follow().await;
        change
    }

    /// Puts the content of the store in force.
    async fn follow(&self) {
        self.control.take_emergencies().await.expect("loaded");
        self.control.take_rows(LoadDepth::Heads).await.expect("loaded");
    }

    /// Lets the time between two looks pass, and looks.
    async fn look(&self) {
        self.clock.advance(LOOK_EVERY);
        self.control.look_once(Arc::clone(&self.node)).await;
        self.follow().await;
    }

    /// Looks for a minute without requests.
    async fn idle_minute(&self) {
        for _ in 0..LOOKS_PER_MINUTE {
            self.look().await;
        }
    }

    /// Looks for a minute, with a request before each look.
    async fn minute(&self) {
        for _ in 0..LOOKS_PER_MINUTE {
            self.node.count_requests("per_user", 1);
            self.look().await;
        }
    }

    /// Looks a few times, with many requests of one user before each look.
    async fn flood(&self) {
        for _ in 0..3 {
            self.node.count_requests("per_user", 400);
            self.look().await;
        }
    }

    async fn state(&self, change: &Change) -> ChangeState {
        self.store.change(change.id).await.expect("a change").state
    }

    /// The actors of applied changes, in order.
    async fn applied(&self) -> Vec<String> {
        let entries = self.store.audit(0, 1_000).await.expect("an audit");
        entries.into_iter().filter(|entry| entry.action == "change.apply").map(|entry| entry.actor).collect()
    }

    /// Whether the node made one rollback, and whether it could not make one.
    fn rollbacks(&self) -> (bool, bool) {
        let is_one = |event| self.node.count_of(event) == 1;
        (is_one(ControlEvent::RolledBack), is_one(ControlEvent::NotRolledBack))
    }
}

pub(crate) fn put(kind: RowKind, name: &str, body: &str) -> Operation {
    Operation::Put { kind, name: name.to_owned(), body: body.to_owned() }
}

pub(crate) fn per_user(limit: u32) -> String {
    format!(r#"{{"key":["user"],"limit":{limit},"period":"1h"}}"#)
}

const OTHER: &str = r#"{"key":["team"],"limit":9,"period":"1h"}"#;

/// A server with a generous rule that has had requests for a minute.
async fn settled() -> Fixture {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &per_user(PLENTY)).await;
    fixture.minute().await;
    fixture
}

#[tokio::test]
async fn a_first_rule_is_not_rolled_back() {
    let fixture = Fixture::new().await;
    fixture.idle_minute().await;
    let operations = vec![put(RowKind::Rule, "per_user", &per_user(1))];
    let rows = fixture.control.current().await.expect("rows");
    let planned = fixture.control.evaluate(&rows, &operations, ApprovedEffect::default()).await;
    let watch = planned.expect("planned").watch;
    assert_eq!(watch.to_json(), None);
    assert!(watch.not_watched().is_some_and(|text| text.starts_with("rule \"per_user\" is new: ")));
    let first = fixture.make(operations).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&first).await, ChangeState::Applied);
    // A second change in the first minute of the rule has no baseline either.
    let second = fixture.put("per_user", r#"{"key":["user"],"limit":1,"period":"2h"}"#).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&second).await, ChangeState::Applied);
    assert_eq!(fixture.control.last_rollback(), None);
}

#[tokio::test]
async fn an_absurd_change_is_rolled_back_and_that_can_be_seen() {
    let fixture = settled().await;
    let operations = vec![put(RowKind::Rule, "per_user", &per_user(1))];
    let rows = fixture.control.current().await.expect("rows");
    let planned = fixture.control.evaluate(&rows, &operations, ApprovedEffect::default()).await;
    let watch = planned.expect("planned").watch;
    assert_eq!(watch.to_json().expect("watched")["rules"], serde_json::json!(["per_user"]));
    assert_eq!(watch.not_watched(), None);
    let absurd = fixture.make(operations).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&absurd).await, ChangeState::RolledBack);
    assert_eq!(fixture.applied().await, ["ada", "ada", "tidegate: automatic"]);
    assert_eq!(fixture.node.limit("per_user"), PLENTY);
    let rollback = fixture.control.last_rollback().expect("seen");
    assert_eq!((rollback.change, rollback.rollback_change, rollback.revision), (absurd.id, 3, 3));
    assert!(rollback.reason.starts_with("denials of rule \"per_user\" went from 0 to 39"), "{rollback:?}");
    assert_eq!(fixture.rollbacks(), (true, false));
}

#[tokio::test]
async fn an_idle_rule_has_no_baseline() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &per_user(PLENTY)).await;
    fixture.idle_minute().await;
    fixture.idle_minute().await;
    let lowered = fixture.put("per_user", &per_user(1)).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::Applied);
}

#[tokio::test]
async fn change_with_dependent_rows_is_not_rolled_back() {
    let fixture = settled().await;
    let rules = [("per_user", &*per_user(1)), ("other", OTHER)];
    let lowered = fixture.make(rules.map(|(name, body)| put(RowKind::Rule, name, body)).into()).await;
    let vip = put(RowKind::Override, "vip", r#"{"rule":"other","key":["carol"],"limit":50}"#);
    fixture.make(vec![vip]).await;
    fixture.flood().await;
    // Without its rule the override would make no sense, and all rows would be refused.
    assert_eq!(fixture.applied().await, ["ada"; 3]);
    assert_eq!(fixture.rollbacks(), (false, true));
    fixture.make(vec![Operation::Delete { kind: RowKind::Override, name: "vip".to_owned() }]).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::RolledBack);
    assert_eq!(fixture.applied().await.last().map(String::as_str), Some("tidegate: automatic"));
}

#[tokio::test]
async fn change_is_rolled_back_with_its_dependent_changes() {
    let fixture = settled().await;
    let rules = [("per_user", &*per_user(1)), ("other", OTHER)];
    fixture.make(rules.map(|(name, body)| put(RowKind::Rule, name, body)).into()).await;
    let overrides = [
        ("vip", r#"{"rule":"other","key":["carol"],"limit":50}"#),
        ("guest", r#"{"rule":"per_user","key":["dave"],"limit":2}"#),
    ];
    fixture.make(overrides.map(|(name, body)| put(RowKind::Override, name, body)).into()).await;
    fixture.flood().await;
    fixture.flood().await;
    assert_eq!(fixture.applied().await[3..], ["tidegate: automatic"; 2]);
    let rows = fixture.store.load().await.expect("loads").rows;
    assert_eq!(rows.iter().map(|row| row.name.as_str()).collect::<Vec<_>>(), ["per_user"]);
    assert_eq!(fixture.node.limit("per_user"), PLENTY);
}

#[tokio::test]
async fn of_several_changes_of_a_rule_none_that_is_absurd_stays() {
    let fixture = settled().await;
    let mut changes = Vec::new();
    for limit in [2 * PLENTY, 1, 2] {
        changes.push(fixture.put("per_user", &per_user(limit)).await);
    }
    fixture.flood().await;
    fixture.flood().await;
    let mut states = Vec::new();
    for change in &changes {
        states.push(fixture.state(change).await);
    }
    assert_eq!(states, [ChangeState::Applied, ChangeState::RolledBack, ChangeState::RolledBack]);
    assert_eq!(fixture.node.limit("per_user"), 2 * PLENTY);
}

#[tokio::test]
async fn what_was_changed_further_is_left_alone_and_counted() {
    let fixture = settled().await;
    let rules = [("per_user", &*per_user(1)), ("other", OTHER)];
    fixture.make(rules.map(|(name, body)| put(RowKind::Rule, name, body)).into()).await;
    fixture.put("other", r#"{"key":["team"],"limit":10,"period":"1h"}"#).await;
    fixture.flood().await;
    assert_eq!(fixture.applied().await, ["ada"; 3]);
    assert_eq!(fixture.rollbacks(), (false, true));
}

#[tokio::test]
async fn a_change_that_lets_pass_more_is_not_undone() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &per_user(1)).await;
    fixture.minute().await;
    let raised = fixture.put("per_user", &per_user(2)).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&raised).await, ChangeState::Applied);
    assert_eq!(fixture.node.limit("per_user"), 2);
}

#[tokio::test]
async fn what_was_approved_is_not_undone_while_it_does_what_was_approved() {
    for (percent, state) in [(99, ChangeState::Applied), (10, ChangeState::RolledBack)] {
        let fixture = settled().await;
        let change = fixture.approve(1, percent).await;
        fixture.flood().await;
        assert_eq!(fixture.state(&change).await, state, "{percent} %");
    }
}

#[tokio::test]
async fn enforced_rule_within_its_shadow_denials_is_not_rolled_back() {
    for (shadow_requests, state) in [(300, ChangeState::Applied), (1, ChangeState::RolledBack)] {
        let fixture = Fixture::new().await;
        fixture.put("per_user", r#"{"key":["user"],"limit":1,"period":"1h","mode":"shadow"}"#).await;
        fixture.node.count_requests("per_user", shadow_requests);
        fixture.minute().await;
        let enforced = fixture.put("per_user", &per_user(1)).await;
        fixture.node.count_requests("per_user", 200);
        fixture.look().await;
        assert_eq!(fixture.state(&enforced).await, state, "{shadow_requests}");
    }
}

#[tokio::test]
async fn change_under_an_emergency_is_rolled_back_after_it_ends() {
    let fixture = settled().await;
    let rules = [("per_user", &*per_user(1)), ("other", OTHER)];
    let lowered = fixture.make(rules.map(|(name, body)| put(RowKind::Rule, name, body)).into()).await;
    let body = r#"{"action":"allow","rule":"other","key":["vip"]}"#.to_owned();
    let emergency = EmergencyRow { id: "stop".to_owned(), body, expires_ms: fixture.node.now_ms() + 600_000 };
    fixture.store.put_emergency(&emergency, fixture.by()).await.expect("put");
    fixture.follow().await;
    fixture.flood().await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::Applied, "its rule is in an emergency");
    assert_eq!(fixture.rollbacks(), (false, true), "told once");
    fixture.store.end_emergency("stop", fixture.by()).await.expect("ended");
    fixture.flood().await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::RolledBack);
}

/// A server that stops, and one that starts with its decision log after a change.
async fn restarted(minutes_before: usize) -> ChangeState {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = TestClock::new();
    let store = Store::open(&"sqlite::memory:".parse().expect("an address")).await.expect("opens");
    let first = Fixture::start(clock.clone(), store.clone(), Some(folder.path())).await;
    first.put("per_user", &per_user(PLENTY)).await;
    clock.advance(Duration::from_mins(10));
    for _ in 0..minutes_before {
        first.minute().await;
    }
    first.node.count_requests("per_user", 1);
    let lowered = first.put("per_user", &per_user(1)).await;
    // The log is complete on disk once the server is gone.
    drop(first);
    let second = Fixture::start(clock, store, Some(folder.path())).await;
    second.flood().await;
    second.state(&lowered).await
}

#[tokio::test]
async fn a_change_of_a_moment_ago_is_watched_after_a_start() {
    assert_eq!(restarted(1).await, ChangeState::RolledBack);
    assert_eq!(restarted(0).await, ChangeState::Applied, "the log has no minute before the change");
}

#[tokio::test]
async fn a_node_that_is_gone_acts_no_more() {
    let Fixture { node, control, .. } = Fixture::new().await;
    assert!(control.attribution("ada").is_ok_and(|attribution| attribution.now_ms == node.now_ms()));
    drop(node);
    assert_eq!(control.attribution("ada").err(), Some(Stopping), "the audit has no time without a clock");
}
