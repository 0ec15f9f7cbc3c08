//! Automatic rollback, look by look, on a store and a clock of the test's own.

mod alarms;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::snapshot::Snapshot;
use tidegate_rules::store::{Attribution, Store};

use crate::consent::ChangeKind;
use crate::control::{Control, LoadDepth, Stopping};
use crate::denials::LOOK_EVERY;
use crate::guardrail::ApprovedEffect;
use crate::node::{ControlEvent, Node as _};
use crate::test_node::{TestClock, TestNode};

const LOOKS_PER_MINUTE: usize = 12;

/// A limit that no test exceeds.
const PLENTY: u32 = 1_000_000;

/// The users of a rule.
const USERS: Range<u32> = 0..30;

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
        self.approve_body(&per_user(limit), percent).await
    }

    async fn approve_body(&self, body: &str, percent: u32) -> Change {
        let effect = format!(
            r#"{{"measured":{{"records":1000,"requests":100,"newly_denied":{percent},"newly_allowed":0,
            "newly_denied_percent":{percent},
            "rules":[{{"rule":"per_user","requests":100,"newly_denied":{percent}}}]}}}}"#
        );
        let base_revision = self.store.revisions().await.expect("revisions").revision;
        let operations = vec![put(RowKind::Rule, "per_user", body)];
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

    /// Looks for a minute, with a request of each user before each look.
    async fn minute(&self) {
        self.minute_of(&[("", USERS)]).await;
    }

    /// Looks for a minute, with a request of each of these users of tenants before each look.
    async fn minute_of(&self, tenants: &[(&str, Range<u32>)]) {
        for _ in 0..LOOKS_PER_MINUTE {
            for (tenant, users) in tenants {
                self.node.note_users("per_user", (tenant, users.clone()), 1);
            }
            self.look().await;
        }
    }

    /// Looks a few times, with some requests of each user before each look.
    async fn flood(&self) {
        self.flood_of("", USERS, 14).await;
    }

    /// Looks a few times, with requests of these users of a tenant before each look.
    async fn flood_of(&self, tenant: &str, users: Range<u32>, requests: u32) {
        for _ in 0..3 {
            self.node.note_users("per_user", (tenant, users.clone()), requests);
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

    /// The changes with an alarm, the latest first.
    async fn alarms(&self) -> Vec<u64> {
        self.control.alarms().await.expect("alarms").iter().filter_map(|alarm| alarm.change).collect()
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
    let told =
        format!("rule \"per_user\" newly denies 30 of 30 keys within five minutes of change {}", absurd.id);
    assert_eq!((rollback.reason.as_str(), &rollback.tenant), (&*told, &None));
    assert_eq!(fixture.control.last_alarm(), None);
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
async fn approved_change_raises_an_alarm_once_it_denies_more_than_was_approved() {
    for (percent, alarms) in [(99, 0), (10, 1)] {
        let fixture = settled().await;
        let change = fixture.approve(1, percent).await;
        fixture.flood().await;
        assert_eq!(fixture.state(&change).await, ChangeState::Applied, "{percent} %");
        assert_eq!(fixture.alarms().await, vec![change.id; alarms], "{percent} %");
        assert_eq!(fixture.node.count_of(ControlEvent::Alarmed), alarms);
    }
}

#[tokio::test]
async fn first_enforcement_is_not_rolled_back_unless_its_terms_are_new() {
    let (applied, undone) = (ChangeState::Applied, ChangeState::RolledBack);
    for (shadow_limit, shadow_requests, state, alarms) in
        [(1, 10, applied, 0), (1, 1, applied, 1), (PLENTY, 10, undone, 0)]
    {
        let fixture = Fixture::new().await;
        let body = format!(r#"{{"key":["user"],"limit":{shadow_limit},"period":"1h","mode":"shadow"}}"#);
        fixture.put("per_user", &body).await;
        fixture.node.note_users("per_user", ("", USERS), shadow_requests);
        fixture.minute().await;
        let enforced = fixture.put("per_user", &per_user(1)).await;
        fixture.node.note_users("per_user", ("", USERS), 7);
        fixture.look().await;
        assert_eq!(fixture.state(&enforced).await, state, "{shadow_limit}, {shadow_requests}");
        assert_eq!(fixture.alarms().await, vec![enforced.id; alarms], "{shadow_limit}, {shadow_requests}");
    }
}

#[tokio::test]
async fn a_rule_that_is_tuned_in_shadow_mode_is_not_undone() {
    let fixture = settled().await;
    fixture.put("per_user", &per_user(PLENTY - 1)).await;
    fixture.put("per_user", r#"{"key":["user"],"limit":1,"period":"1h","mode":"shadow"}"#).await;
    fixture.node.note_users("per_user", ("", USERS), 10);
    fixture.minute().await;
    let enforced = fixture.put("per_user", &per_user(1)).await;
    fixture.flood().await;
    assert_eq!(fixture.state(&enforced).await, ChangeState::Applied);
    assert_eq!(fixture.rollbacks(), (false, false));
}

/// A rule of class `security`, in a mode.
fn guard(mode: &str) -> String {
    format!(r#"{{"key":["user"],"limit":1,"period":"1h","class":"security","mode":"{mode}"}}"#)
}

#[tokio::test]
async fn approved_security_rule_survives_212_requests_of_one_key() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &guard("shadow")).await;
    fixture.minute().await;
    let enforced = fixture.approve_body(&guard("enforce"), 1).await;
    fixture.flood_of("", 0..1, 212).await;
    assert_eq!(fixture.state(&enforced).await, ChangeState::Applied);
    assert_eq!(fixture.alarms().await, [0_u64; 0], "one key is no reason for an alarm");
}

#[tokio::test]
async fn change_of_a_security_rule_raises_an_alarm_that_every_server_shows() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &guard("shadow")).await;
    let other = Fixture::start(fixture.clock.clone(), fixture.store.clone(), None).await;
    fixture.minute().await;
    let enforced = fixture.put("per_user", &guard("enforce")).await;
    other.follow().await;
    fixture.flood().await;
    fixture.flood().await;
    assert_eq!(fixture.state(&enforced).await, ChangeState::Applied);
    assert_eq!(fixture.alarms().await, [enforced.id], "once");
    assert_eq!((fixture.node.count_of(ControlEvent::Alarmed), fixture.rollbacks()), (1, (false, false)));
    other.control.take_last_alarm().await.expect("read");
    for alarm in [&fixture, &other].map(|fixture| fixture.control.last_alarm().expect("an alarm")) {
        assert_eq!((alarm.change, &alarm.emergency), (Some(enforced.id), &None));
        let told = "rule \"per_user\" newly denies 30 of 30 keys within five minutes of change 2; it is not \
                    rolled back automatically, because rule \"per_user\" has class security";
        assert_eq!(alarm.reason, told);
    }
    fixture.store.verify_audit(None).await.expect("the audit holds");
}

#[tokio::test]
async fn revoked_override_stays_revoked_after_300_requests_of_its_holder() {
    let fixture = Fixture::new().await;
    let vip = put(RowKind::Override, "vip", r#"{"rule":"per_user","key":["u0"],"limit":1000}"#);
    fixture.make(vec![put(RowKind::Rule, "per_user", &per_user(1)), vip]).await;
    fixture.minute().await;
    let revoked =
        fixture.make(vec![Operation::Delete { kind: RowKind::Override, name: "vip".to_owned() }]).await;
    fixture.flood_of("", 0..1, 300).await;
    assert_eq!(fixture.state(&revoked).await, ChangeState::Applied);
    assert_eq!(fixture.rollbacks(), (false, false));
}

#[tokio::test]
async fn one_key_of_one_tenant_does_not_undo_a_change_for_all_tenants() {
    let all = [("", USERS), ("east", USERS), ("west", USERS)];
    for (users, alarms) in [(0..1, 0), (0..30, 1)] {
        let fixture = Fixture::new().await;
        fixture.put("per_user", &per_user(PLENTY)).await;
        fixture.minute_of(&all).await;
        let lowered = fixture.put("per_user", &per_user(1)).await;
        for (tenant, users) in &all {
            fixture.node.note_users("per_user", (tenant, users.clone()), 1);
        }
        fixture.flood_of("east", users, 1_000).await;
        assert_eq!(fixture.state(&lowered).await, ChangeState::Applied);
        assert_eq!(fixture.alarms().await, vec![lowered.id; alarms], "all keys of one tenant");
        // Now it denies keys of another tenant too.
        fixture.flood_of("east", USERS, 2).await;
        fixture.flood_of("west", USERS, 2).await;
        assert_eq!(fixture.state(&lowered).await, ChangeState::RolledBack);
    }
}

#[tokio::test]
async fn change_of_several_tenants_is_undone_for_the_tenant_that_it_harms() {
    let of = |tenant: &str, limit: u32| {
        let name = if tenant == "east" { "per_user" } else { "of_west" };
        let body = format!(r#"{{"key":["user"],"limit":{limit},"period":"1h","tenant":"{tenant}"}}"#);
        put(RowKind::Rule, name, &body)
    };
    let fixture = Fixture::new().await;
    fixture.make(vec![of("east", PLENTY), of("west", PLENTY)]).await;
    fixture.minute_of(&[("east", USERS)]).await;
    let lowered = fixture.make(vec![of("east", 1), of("west", 1)]).await;
    fixture.flood_of("east", USERS, 2).await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::Applied, "for the other tenant");
    assert_eq!(["per_user", "of_west"].map(|rule| fixture.node.limit(rule)), [PLENTY, 1]);
    let rollback = fixture.control.last_rollback().expect("seen");
    assert_eq!((rollback.change, rollback.tenant.as_deref()), (lowered.id, Some("east")));
    assert_eq!(fixture.rollbacks(), (true, false), "once");
}

#[tokio::test]
async fn override_of_a_tenant_is_undone_by_its_keys() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &per_user(PLENTY)).await;
    fixture.minute_of(&[("east", USERS), ("west", USERS)]).await;
    let body = r#"{"rule":"per_user","tenant":"east","key":["*"],"limit":1}"#;
    let lowered = fixture.make(vec![put(RowKind::Override, "east", body)]).await;
    fixture.flood_of("west", USERS, 2).await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::Applied);
    fixture.flood_of("east", USERS, 2).await;
    assert_eq!(fixture.state(&lowered).await, ChangeState::RolledBack);
    assert_eq!(fixture.control.last_rollback().expect("seen").tenant, None, "the change has no other rows");
}

#[tokio::test]
async fn plan_states_whether_a_jump_undoes_the_change() {
    let fixture = Fixture::new().await;
    fixture.put("per_user", &guard("shadow")).await;
    fixture.minute().await;
    let rows = fixture.control.current().await.expect("rows");
    let watch = async |body: &str| {
        let operations = [put(RowKind::Rule, "per_user", body)];
        let planned = fixture.control.plan(&rows, (ChangeKind::Edit, &operations), "ada").await;
        planned.expect("planned").watch
    };
    let watched = watch(&guard("enforce")).await.to_json().expect("watched");
    assert_eq!((&watched["action"], &watched["rules"]), (&"alarm".into(), &["per_user"].into()));
    let rekeyed = r#"{"key":["ip"],"limit":1,"period":"1h"}"#;
    let reason = watch(rekeyed).await.not_watched().expect("a reason");
    assert!(reason.starts_with("rule \"per_user\" gets another key"), "{reason}");
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
    first.node.note_users("per_user", ("", USERS), 1);
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
