//! Requirements for every rule store, on any database.

mod audit;

use sqlx::{AssertSqlSafe, Connection as _, PgConnection, SqliteConnection};
use tidegate_rules::audit::{ChainBreak, verify_lines};
use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, OPERATIONS_MAX, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::store::{
    AlarmSubject, ApplyConditions, Attribution, CREDENTIALS_MAX, CREDENTIALS_PAGE_MAX, CheckedRevision,
    Credential, EMERGENCY_MS_MAX, Rollback, Signal, Store, StoreError, StoreRevisions, WAITING_MAX, Watch,
};
use tidegate_rules::{EMERGENCIES_MAX, RuleSet};
use tidegate_testkit::START_TIME_MAX;

pub(crate) use super::tampering::{
    an_audit_without_its_checkpoint_is_noticed, edits_of_the_tables_are_named,
    entries_of_an_earlier_version_still_verify, many_edits_are_counted,
};

pub(crate) use super::overrides::{
    clients_write_overrides_without_a_change, concurrent_writes_of_one_override_leave_the_last,
    overrides_have_a_maximum_in_the_store, overrides_of_clients_are_in_conflict_with_no_change,
    rollbacks_leave_overrides_of_clients_alone,
};

pub(crate) use audit::{
    a_schema_of_a_later_version_is_refused, alarms_are_entries_of_the_audit_and_no_changes,
    alarms_stay_known_in_a_long_audit, an_export_of_the_audit_holds_elsewhere, servers_raise_an_alarm_once,
    tampering_with_the_tables_is_found,
};

/// An empty database that a case has to itself.
pub(crate) struct TestDatabase {
    pub(crate) url: String,
}

impl TestDatabase {
    /// Each has connections of its own, as another process would.
    pub(crate) async fn store(&self) -> Store {
        Store::open(&self.url.parse().expect("an address")).await.expect("opens")
    }

    /// A connection behind the store's back.
    async fn raw(&self) -> Raw {
        if self.url.starts_with("postgres:") {
            Raw::Postgres(PgConnection::connect(&self.url).await.expect("a connection"))
        } else {
            Raw::Sqlite(SqliteConnection::connect(&self.url).await.expect("a connection"))
        }
    }

    pub(crate) async fn tamper(&self, sql: &str) {
        self.raw().await.run(sql).await.expect("done");
    }
}

enum Raw {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
}

impl Raw {
    async fn run(&mut self, sql: &str) -> Result<(), sqlx::Error> {
        let sql = AssertSqlSafe(sql.to_owned());
        match self {
            Self::Sqlite(connection) => sqlx::raw_sql(sql).execute(connection).await.map(|_| ()),
            Self::Postgres(connection) => sqlx::raw_sql(sql).execute(connection).await.map(|_| ()),
        }
    }
}

const NOW_MS: u64 = 1_700_000_000_000;

pub(crate) fn by(name: &str) -> Attribution<'_> {
    Attribution { by: name, now_ms: NOW_MS }
}

pub(crate) fn put(name: &str, limit: u32) -> Operation {
    Operation::Put { kind: RowKind::Rule, name: name.to_owned(), body: body(limit) }
}

fn delete(name: &str) -> Operation {
    Operation::Delete { kind: RowKind::Rule, name: name.to_owned() }
}

fn body(limit: u32) -> String {
    format!(r#"{{"key": ["user"], "limit": {limit}, "period": "1m"}}"#)
}

fn rule(name: &str, limit: u32, version: u32) -> RuleRow {
    RuleRow { kind: RowKind::Rule, name: name.to_owned(), body: body(limit), version }
}

pub(crate) fn proposal(base_revision: u64, operations: Vec<Operation>) -> Proposal {
    Proposal::new(base_revision, "a test", operations)
}

fn needing(needs: ChangeNeeds, operations: Vec<Operation>) -> Proposal {
    Proposal { needs, ..proposal(0, operations) }
}

/// Applies operations to the latest revision.
pub(crate) async fn apply(store: &Store, operations: Vec<Operation>) -> Change {
    let base_revision = store.revisions().await.expect("heads").revision;
    store.apply_new(&proposal(base_revision, operations), false, by("ada")).await.expect("applies")
}

async fn roll_back(
    store: &Store,
    rollback: Rollback,
    reason: &str,
    act: Attribution<'_>,
) -> Result<Change, StoreError> {
    store.apply_new(&store.restoring(rollback, reason).await?, false, act).await
}

async fn rows(store: &Store) -> Vec<RuleRow> {
    store.load().await.expect("loads").rows.to_vec()
}

async fn audit_count(store: &Store) -> u64 {
    store.verify_audit(None).await.expect("the audit holds").count
}

fn refused<T: std::fmt::Debug>(outcome: Result<T, StoreError>) -> String {
    outcome.expect_err("refused").to_string()
}

pub(crate) async fn applied_rows_are_loaded_by_another_connection(test_database: &TestDatabase) {
    let (store, other) = (test_database.store().await, test_database.store().await);
    assert_eq!(other.load().await.expect("loads"), RuleRows::default());
    let names = ["per_user", "ünï \"'%", "Zeta", "a"];
    let kinds = [RowKind::Override, RowKind::Template, RowKind::Rule];
    let operation = |(kind, name): (RowKind, &str)| {
        let body = r#"{"é": "\u0000'%s", "limit": 1}"#.to_owned();
        Operation::Put { kind, name: name.to_owned(), body }
    };
    let all = kinds.iter().flat_map(|kind| names.map(|name| (*kind, name)));
    let change = apply(&store, all.map(operation).collect()).await;
    assert_eq!((change.revision, change.state, change.operation_count), (Some(1), ChangeState::Applied, 12));
    let emergency = EmergencyRow {
        id: "e".to_owned(),
        body: r#"{"action": "block"}"#.to_owned(),
        expires_ms: NOW_MS + 1,
    };
    store.put_emergency(&emergency, by("ada")).await.expect("put");
    let rule_rows = other.load().await.expect("loads");
    assert_eq!((rule_rows.revision, rule_rows.emergency_revision), (1, 1));
    assert_eq!(rule_rows.emergencies, [emergency]);
    let found: Vec<_> = rule_rows.rows.iter().map(|row| (row.kind, row.name.as_str(), row.version)).collect();
    let mut wanted: Vec<_> = kinds.iter().flat_map(|kind| names.map(|name| (*kind, name, 1))).collect();
    wanted.sort_unstable();
    assert_eq!(found, wanted);
    assert!(rule_rows.rows.iter().all(|row| row.body == r#"{"é": "\u0000'%s", "limit": 1}"#));
    assert_eq!(other.operations(change.id).await.expect("kept").len(), 12);
}

pub(crate) async fn versions_are_raised_row_by_row_and_never_used_again(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1), put("b", 1)]).await;
    apply(&store, vec![put("b", 2)]).await;
    assert_eq!(rows(&store).await, [rule("a", 1, 1), rule("b", 2, 2)]);
    apply(&store, vec![delete("b")]).await;
    assert_eq!(rows(&store).await, [rule("a", 1, 1)]);
    let change = apply(&store, vec![put("b", 3)]).await;
    assert_eq!(rows(&store).await, [rule("a", 1, 1), rule("b", 3, 4)]);
    assert_eq!(change.revision, Some(4));
}

pub(crate) async fn a_row_that_changed_in_the_meantime_is_a_conflict(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1), put("b", 1), put("c", 1)]).await;
    apply(&store, vec![put("a", 2), delete("b"), put("d", 1)]).await;
    for operations in [vec![put("a", 3)], vec![put("b", 3)], vec![delete("b")], vec![put("d", 3)]] {
        let name = operations[0].row().1.to_owned();
        let outcome = store.apply_new(&proposal(1, operations), false, by("ada")).await;
        let Err(StoreError::Conflict(rows)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].name.as_str(), rows[0].revision), (name.as_str(), 2));
    }
    let both =
        store.apply_new(&proposal(1, vec![put("c", 3), put("d", 3), put("a", 3)]), false, by("ada")).await;
    let message = "conflict: changed in the meantime: rule \"d\" (revision 2), rule \"a\" (revision 2); \
                   plan the change again, and send its `base_revision`";
    assert_eq!(refused(both), message);
    store
        .apply_new(&proposal(1, vec![put("c", 3)]), false, by("ada"))
        .await
        .expect("no other change of the row");
    let early = store.apply_new(&proposal(4, vec![put("c", 3)]), false, by("ada")).await;
    let message = "base_revision: 4 is outside 0 to 3, the latest revision; plan the change again, \
                   and send its `base_revision`";
    assert_eq!(refused(early), message);
}

pub(crate) async fn a_change_happens_whole_or_not_at_all(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1)]).await;
    let (before, audited) = (store.load().await.expect("loads"), audit_count(&store).await);
    let half = proposal(1, vec![put("a", 2), put("b", 2), delete("none"), delete("nobody")]);
    let message = "cannot delete rows that do not exist: rule \"none\", rule \"nobody\"";
    assert_eq!(refused(store.apply_new(&half, false, by("ada")).await), message);
    let kept = store.propose(&half, by("ada")).await.expect("may be kept");
    assert_eq!(refused(store.apply(kept.id, false, by("ada")).await), message);
    let twice = proposal(1, vec![put("a", 2), put("a", 3)]);
    assert!(matches!(store.propose(&twice, by("ada")).await, Err(StoreError::Invalid(_))));
    assert!(matches!(store.propose(&half, by("")).await, Err(StoreError::Invalid(_))));
    assert_eq!(store.load().await.expect("loads"), before);
    assert_eq!(audit_count(&store).await, audited + 1, "the proposal alone");
    assert_eq!(store.history(10, None).await.expect("history").len(), 2);
}

pub(crate) async fn the_largest_change_goes_through(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let all = |limit| (0..OPERATIONS_MAX).map(|number| put(&format!("r{number:05}"), limit)).collect();
    apply(&store, all(1)).await;
    apply(&store, all(2)).await;
    let rows = rows(&store).await;
    assert_eq!(rows.len(), OPERATIONS_MAX);
    assert!(rows.iter().all(|row| row.version == 2 && row.body == body(2)));
    roll_back(&store, Rollback::ToRevision(0), "too much", by("ada")).await.expect("all of it");
    assert_eq!(self::rows(&store).await, []);
}

pub(crate) async fn change_needing_approval_waits_for_another_actor(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let wanted = needing(ChangeNeeds::Approver, vec![put("a", 1)]);
    let at_once = store.apply_new(&wanted, true, by("ada")).await;
    let message = "change 1 needs the approval of another person than its author";
    assert_eq!(refused(at_once), message);
    let change = store.propose(&wanted, by("ada")).await.expect("kept");
    assert_eq!((change.id, change.state, change.approval), (1, ChangeState::Waiting, None));
    assert_eq!(refused(store.apply(1, true, by("bob")).await), message);
    assert_eq!(refused(store.approve(1, by("ada")).await), "change 1 cannot be approved by its author");
    assert_eq!(store.revisions().await.expect("heads"), StoreRevisions::default());
    let approved = store.approve(1, by("bob")).await.expect("approved");
    assert_eq!(
        (approved.state, approved.approval),
        (ChangeState::Proposed, Some(("bob".to_owned(), NOW_MS)))
    );
    assert_eq!(refused(store.approve(1, by("eve")).await), "change 1 is proposed");
    let applied = store.apply(1, false, by("ada")).await.expect("applies");
    assert_eq!((applied.state, applied.revision), (ChangeState::Applied, Some(1)));
    assert_eq!(refused(store.apply(1, false, by("ada")).await), "change 1 is applied");
    assert_eq!(rows(&store).await, [rule("a", 1, 1)]);
    assert_eq!(refused(store.approve(9, by("bob")).await), "there is no change 9");
}

pub(crate) async fn approved_change_with_a_new_effect_waits_again(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let wanted = needing(ChangeNeeds::Approver, vec![put("a", 1)]);
    store.propose(&wanted, by("ada")).await.expect("kept");
    assert_eq!(refused(store.wait_again(1, "{}", by("ada")).await), "change 1 is waiting");
    store.approve(1, by("bob")).await.expect("approved");
    let problem = refused(store.wait_again(1, "{", by("ada")).await);
    assert!(problem.starts_with("effect: "), "{problem}");
    let waits = store.wait_again(1, r#"{"more":1}"#, by("ada")).await.expect("waits");
    let effect = Some(r#"{"more":1}"#.to_owned());
    assert_eq!((waits.state, waits.approval, waits.effect), (ChangeState::Waiting, None, effect));
    let message = "change 1 needs the approval of another person than its author";
    assert_eq!(refused(store.apply(1, true, by("ada")).await), message);
    store.approve(1, by("bob")).await.expect("approved again");
    store.apply(1, false, by("ada")).await.expect("applies");
    assert_eq!(refused(store.wait_again(1, "{}", by("ada")).await), "change 1 is applied");
    let actions: Vec<String> =
        store.audit(0, 100).await.expect("an audit").into_iter().map(|entry| entry.action).collect();
    let did = ["propose", "approve", "wait", "approve", "apply"].map(|did| format!("change.{did}"));
    assert_eq!(actions, did);
}

pub(crate) async fn there_is_a_most_of_changes_that_wait(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let wanted = needing(ChangeNeeds::Approver, vec![put("a", 1)]);
    store.propose(&wanted, by("ada")).await.expect("kept");
    store.approve(1, by("bob")).await.expect("approved");
    for _ in 0..WAITING_MAX {
        store.propose(&wanted, by("ada")).await.expect("an approved change does not count as waiting");
    }
    let entries = audit_count(&store).await;
    let message = "changes: the maximum of 100 waiting changes is reached: approve or reject one";
    assert_eq!(refused(store.propose(&wanted, by("eve")).await), message);
    assert_eq!(refused(store.wait_again(1, "{}", by("ada")).await), message);
    assert_eq!(store.change(1).await.expect("there").state, ChangeState::Proposed);
    assert_eq!(refused(store.change(WAITING_MAX + 2).await), "there is no change 102");
    assert_eq!(
        (audit_count(&store).await, store.revisions().await.expect("heads")),
        (entries, StoreRevisions::default())
    );
    // A change that needs no approver has room.
    store.apply_new(&proposal(0, vec![put("b", 1)]), false, by("eve")).await.expect("applies");
    store.reject(2, "not now", by("ada")).await.expect("rejected");
    store.propose(&wanted, by("eve")).await.expect("there is room for one");
    assert_eq!(refused(store.propose(&wanted, by("eve")).await), message);
}

pub(crate) async fn the_tables_refuse_an_approval_of_ones_own(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let waiting =
        store.propose(&needing(ChangeNeeds::Approver, vec![put("a", 1)]), by("ada")).await.expect("kept");
    let mut raw = test_database.raw().await;
    let own = "UPDATE tidegate_changes SET state = 'proposed', approver = author, approved_ms = 1";
    let without = "UPDATE tidegate_changes SET state = 'applied', revision = 1, restores = '[]'";
    for sql in [own, without] {
        let error = raw.run(sql).await.expect_err("refused").to_string();
        assert!(error.to_lowercase().contains("check constraint"), "{error}");
    }
    assert_eq!(store.change(waiting.id).await.expect("kept"), waiting);
}

/// A credential with this name. All credentials with one name are equal.
fn credential(name: &str) -> Credential {
    Credential {
        hash: hash(name),
        name: name.to_owned(),
        tenant: String::new(),
        role: "admin".to_owned(),
        created_ms: NOW_MS,
        expires_ms: None,
    }
}

/// A hash that no other name of a test has.
fn hash(name: &str) -> String {
    let number = name.bytes().fold(0, |number, byte| number * 256 + u128::from(byte));
    format!("{number:064x}")
}

pub(crate) async fn credential_related_to_the_author_cannot_approve(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let made = async |name: &str, maker: &str| {
        store.put_credential(&credential(name), by(maker)).await.expect("made");
    };
    let wanted = needing(ChangeNeeds::Approver, vec![put("a", 1)]);
    made("second-ada", "ada").await;
    made("bob", "root").await;
    let id = store.propose(&wanted, by("ada")).await.expect("kept").id;
    made("late", "root").await;

    let related = |id| {
        format!(
            "change {id} cannot be approved by this actor: the credentials of approver and author are \
             related, by one maker or one of the other"
        )
    };
    assert_eq!(refused(store.approve(id, by("second-ada")).await), related(id));
    let later =
        format!("change {id} cannot be approved with a credential that was made after it was proposed");
    assert_eq!(refused(store.approve(id, by("late")).await), later);
    // A server that has not seen the revocation may still accept the credential. The approval is
    // refused all the same.
    for name in ["second-ada", "late"] {
        store.revoke_credential(&hash(name), by("ada")).await.expect("revoked");
    }
    assert_eq!(refused(store.approve(id, by("second-ada")).await), related(id));
    assert_eq!(refused(store.approve(id, by("late")).await), later);
    assert_eq!(store.change(id).await.expect("kept").state, ChangeState::Waiting);
    store.approve(id, by("bob")).await.expect("an unrelated approver");

    // The other way round: proposed with a credential that the approver made.
    let next = store.propose(&wanted, by("second-ada")).await.expect("kept").id;
    assert_eq!(refused(store.approve(next, by("ada")).await), related(next));
    store.approve(next, by("late")).await.expect("made before this one");
}

pub(crate) async fn locked_store_is_busy_and_readable(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let mut holder = test_database.raw().await;
    holder.run("BEGIN").await.expect("begun");
    holder.run("UPDATE tidegate_heads SET revision = 7").await.expect("locked");
    let wanted = proposal(0, vec![put("a", 1)]);
    let outcome = store.apply_new(&wanted, false, by("ada")).await;
    assert!(matches!(outcome, Err(StoreError::Busy)), "{outcome:?}");
    assert_eq!(store.load().await.expect("loads"), RuleRows::default());
    holder.run("ROLLBACK").await.expect("let go");
    store.apply_new(&wanted, false, by("ada")).await.expect("applies");
}

pub(crate) async fn change_needing_confirmation_is_not_applied_without_it(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let effect = Some(r#"{"denied": 0.07}"#.to_owned());
    let wanted = Proposal { effect: effect.clone(), ..needing(ChangeNeeds::Confirmation, vec![put("a", 1)]) };
    assert_eq!(refused(store.apply_new(&wanted, false, by("ada")).await), "change 1 needs a confirmation");
    let change = store.propose(&wanted, by("ada")).await.expect("kept");
    assert_eq!(refused(store.apply(change.id, false, by("ada")).await), "change 1 needs a confirmation");
    let applied = store.apply(change.id, true, by("ada")).await.expect("confirmed");
    assert_eq!((applied.state, applied.effect), (ChangeState::Applied, effect));
    let details: Vec<String> =
        store.audit(0, 10).await.expect("audit").into_iter().map(|entry| entry.detail).collect();
    assert!(details[1].contains(r#""confirmed":true"#), "{details:?}");
}

pub(crate) async fn rejected_change_is_never_applied(test_database: &TestDatabase) {
    let store = test_database.store().await;
    for needs in [ChangeNeeds::Nothing, ChangeNeeds::Approver] {
        let change = store.propose(&needing(needs, vec![put("a", 1)]), by("ada")).await.expect("kept");
        let rejected = store.reject(change.id, "no", by("ada")).await.expect("rejected");
        assert_eq!(rejected.state, ChangeState::Rejected);
        let message = format!("change {} is rejected", change.id);
        assert_eq!(refused(store.apply(change.id, true, by("bob")).await), message);
        assert_eq!(refused(store.approve(change.id, by("bob")).await), message);
        assert_eq!(refused(store.reject(change.id, "no", by("bob")).await), message);
    }
    let applied = apply(&store, vec![put("a", 1)]).await;
    assert_eq!(refused(store.reject(applied.id, "late", by("bob")).await), "change 3 is applied");
}

pub(crate) async fn rollback_restores_earlier_rows(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1), put("b", 1)]).await;
    let bad = apply(&store, vec![put("a", 2), delete("b"), put("c", 2)]).await;
    let change =
        roll_back(&store, Rollback::Change(bad.id), "denies too much", by("guard")).await.expect("undone");
    assert_eq!(
        (change.revision, change.state, change.undoes.as_slice()),
        (Some(3), ChangeState::Applied, &[2][..])
    );
    assert_eq!((change.author.as_str(), change.reason.as_str()), ("guard", "denies too much"));
    assert_eq!(rows(&store).await, [rule("a", 1, 3), rule("b", 1, 3)]);
    assert_eq!(store.change(bad.id).await.expect("kept").state, ChangeState::RolledBack);
    let again = roll_back(&store, Rollback::Change(bad.id), "", by("guard")).await;
    assert_eq!(refused(again), "change 2 is rolled_back");
    // A rollback is a change like any other.
    roll_back(&store, Rollback::Change(change.id), "it was right", by("ada")).await.expect("redone");
    assert_eq!(rows(&store).await, [rule("a", 2, 4), rule("c", 2, 3)]);
}

pub(crate) async fn a_rollback_of_one_change_minds_later_ones(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let first = apply(&store, vec![put("a", 1), put("b", 1)]).await;
    apply(&store, vec![put("b", 2)]).await;
    let outcome = roll_back(&store, Rollback::Change(first.id), "", by("ada")).await;
    let message = "conflict: changed in the meantime: rule \"b\" (revision 2); plan the change \
                   again, and send its `base_revision`";
    assert_eq!(refused(outcome), message);
    assert_eq!(rows(&store).await, [rule("a", 1, 1), rule("b", 2, 2)]);
}

pub(crate) async fn change_is_rolled_back_after_later_changes_are(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let undo = async |change: &Change| roll_back(&store, Rollback::Change(change.id), "", by("guard")).await;
    apply(&store, vec![put("a", 1), put("b", 1)]).await;
    let first = apply(&store, vec![put("a", 2), put("c", 2)]).await;
    let second = apply(&store, vec![put("a", 3)]).await;
    assert!(matches!(undo(&first).await, Err(StoreError::Conflict(_))), "a later change has the row");
    undo(&second).await.expect("undone");
    undo(&first).await.expect("the row has the version of the change again");
    assert_eq!(rows(&store).await, [rule("a", 1, 5), rule("b", 1, 1)]);

    // One row with another body is enough for a conflict.
    let both = apply(&store, vec![put("a", 5), put("b", 5)]).await;
    let other = apply(&store, vec![put("a", 6)]).await;
    apply(&store, vec![put("b", 6)]).await;
    undo(&other).await.expect("undone");
    assert!(matches!(undo(&both).await, Err(StoreError::Conflict(_))));
}

pub(crate) async fn a_rollback_to_a_revision_undoes_all_after_it(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1), put("b", 1)]).await;
    let wanted: Vec<_> = rows(&store).await.into_iter().map(|row| (row.name, row.body)).collect();
    apply(&store, vec![put("a", 2), put("c", 2)]).await;
    apply(&store, vec![put("a", 3), delete("b"), delete("c")]).await;
    let waiting =
        store.propose(&needing(ChangeNeeds::Approver, vec![put("z", 1)]), by("ada")).await.expect("kept");
    let proposed = store.restoring(Rollback::ToRevision(1), "back").await.expect("known");
    assert_eq!(proposed.operations, [put("a", 1), put("b", 1)], "c is gone already");
    let change = roll_back(&store, Rollback::ToRevision(1), "back", by("ada")).await.expect("undone");
    assert_eq!(change.undoes, [2, 3]);
    let found: Vec<_> = rows(&store).await.into_iter().map(|row| (row.name, row.body)).collect();
    assert_eq!(found, wanted);
    for (id, state) in [(1, ChangeState::Applied), (2, ChangeState::RolledBack), (3, ChangeState::RolledBack)]
    {
        assert_eq!(store.change(id).await.expect("kept").state, state);
    }
    assert_eq!(store.change(waiting.id).await.expect("kept").state, ChangeState::Waiting);
    let nothing = "nothing to roll back: every row is unchanged";
    assert_eq!(refused(roll_back(&store, Rollback::ToRevision(1), "", by("ada")).await), nothing);
    assert_eq!(refused(roll_back(&store, Rollback::ToRevision(4), "", by("ada")).await), nothing);
    let ahead = roll_back(&store, Rollback::ToRevision(5), "", by("ada")).await;
    assert_eq!(refused(ahead), "to_revision: 5 is outside 0 to 4, the latest revision");
}

pub(crate) async fn a_rollback_can_be_proposed_like_any_change(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let bad = apply(&store, vec![put("a", 1)]).await;
    let undoing = store.restoring(Rollback::Change(bad.id), "careful").await.expect("known");
    let undoing = Proposal { needs: ChangeNeeds::Approver, ..undoing };
    let change = store.propose(&undoing, by("ada")).await.expect("kept");
    assert_eq!(store.change(bad.id).await.expect("kept").state, ChangeState::Applied, "not yet");
    let other = Proposal { operations: vec![put("b", 1)], needs: ChangeNeeds::Nothing, ..undoing };
    let other = store.propose(&other, by("ada")).await.expect("kept");
    store.approve(change.id, by("bob")).await.expect("approved");
    store.apply(change.id, false, by("ada")).await.expect("applies");
    assert_eq!(store.change(bad.id).await.expect("kept").state, ChangeState::RolledBack);
    assert_eq!(
        refused(store.apply(other.id, false, by("ada")).await),
        "change 1 is rolled_back",
        "only once"
    );
    assert_eq!(rows(&store).await, []);
}

pub(crate) async fn history_is_paged(test_database: &TestDatabase) {
    let store = test_database.store().await;
    for number in 0..5 {
        apply(&store, vec![put("a", number + 1)]).await;
    }
    let ids = |changes: Vec<Change>| changes.into_iter().map(|change| change.id).collect::<Vec<_>>();
    assert_eq!(ids(store.history(2, None).await.expect("history")), [5, 4]);
    assert_eq!(ids(store.history(2, Some(4)).await.expect("history")), [3, 2]);
    assert_eq!(ids(store.history(u64::MAX, Some(2)).await.expect("history")), [1]);
    assert_eq!(ids(store.history(2, Some(1)).await.expect("history")), [0_u64; 0]);
}

pub(crate) async fn change_checked_against_an_old_revision_is_a_conflict(test_database: &TestDatabase) {
    let (store, other) = (test_database.store().await, test_database.store().await);
    apply(&store, vec![put("a", 1)]).await;
    // Both changes are checked against the same revision, and touch different rows.
    let checked = |rule_rows: &RuleRows| ApplyConditions {
        confirmed: false,
        checked: Some(CheckedRevision::from(rule_rows)),
    };
    let (mine, theirs) = (store.load().await.expect("loads"), other.load().await.expect("loads"));
    let one = store.apply_new(&proposal(1, vec![put("b", 1)]), checked(&mine), by("ada")).await;
    assert_eq!(one.expect("the first applies").revision, Some(2));
    let (before, audit) = (rows(&store).await, audit_count(&store).await);
    let two = other.apply_new(&proposal(1, vec![put("c", 1)]), checked(&theirs), by("bob")).await;
    assert_eq!(
        refused(two),
        "conflict: planned against revision 1 (emergencies 0), but the latest is 2 (emergencies 0): plan the \
         change again"
    );
    assert_eq!((rows(&store).await, audit_count(&store).await), (before, audit), "nothing of it is left");

    // A change must also be valid with the emergencies. Planned again, both apply.
    let seen = other.load().await.expect("loads");
    let kept = other.propose(&proposal(1, vec![put("c", 1)]), by("bob")).await.expect("kept");
    let emergency = EmergencyRow {
        id: "e".to_owned(),
        body: r#"{"action": "block"}"#.to_owned(),
        expires_ms: NOW_MS + 1,
    };
    store.put_emergency(&emergency, by("ada")).await.expect("put");
    let late = other.apply(kept.id, checked(&seen), by("bob")).await;
    assert!(matches!(late, Err(StoreError::Moved { .. })), "{late:?}");
    let seen = other.load().await.expect("loads");
    other.apply(kept.id, checked(&seen), by("bob")).await.expect("planned again");
    assert_eq!(rows(&store).await, [rule("a", 1, 1), rule("b", 1, 1), rule("c", 1, 1)]);
}

pub(crate) async fn a_rule_in_an_emergency_is_not_deleted(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let emergency = |rule: &str| EmergencyRow {
        id: "stop".to_owned(),
        body: format!(r#"{{"action": "block", "rule": {rule:?}}}"#),
        expires_ms: NOW_MS + 10,
    };
    assert_eq!(refused(store.put_emergency(&emergency("a"), by("ada")).await), "there is no rule \"a\"");
    let made = apply(&store, vec![put("a", 1), put("b", 1)]).await;
    store.put_emergency(&emergency("a"), by("ada")).await.expect("put");
    let message =
        "cannot delete rules with an active emergency, end it first: rule \"a\" (emergency \"stop\")";
    let gone = store.apply_new(&proposal(1, vec![delete("a"), delete("b")]), false, by("ada")).await;
    assert_eq!(refused(gone), message);
    let undone = roll_back(&store, Rollback::Change(made.id), "a test", by("ada")).await;
    assert_eq!(refused(undone), message, "nor by a rollback");
    apply(&store, vec![delete("b"), put("a", 2)]).await;
    // An expired emergency protects no rule, even while its row exists.
    let later = Attribution { by: "ada", now_ms: NOW_MS + 10 };
    store.apply_new(&proposal(2, vec![delete("a")]), false, later).await.expect("applies");
    let gone = EmergencyRow { expires_ms: NOW_MS + 20, ..emergency("a") };
    assert_eq!(refused(store.put_emergency(&gone, later).await), "there is no rule \"a\"");
}

pub(crate) async fn emergencies_have_a_way_of_their_own(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let emergency = |id: &str, expires_ms| EmergencyRow {
        id: id.to_owned(),
        body: r#"{"action": "block"}"#.to_owned(),
        expires_ms,
    };
    let hour = NOW_MS + EMERGENCY_MS_MAX;
    assert_eq!(store.put_emergency(&emergency("a", hour), by("ada")).await.expect("put"), 1);
    assert_eq!(store.put_emergency(&emergency("b", NOW_MS + 10), by("ada")).await.expect("put"), 2);
    for outside in [NOW_MS, hour + 1, u64::MAX] {
        let message = refused(store.put_emergency(&emergency("c", outside), by("ada")).await);
        assert!(message.starts_with(&format!("expires_ms: {outside} is outside ")), "{message}");
    }
    let broken = EmergencyRow { body: "[]".to_owned(), ..emergency("c", hour) };
    assert_eq!(refused(store.put_emergency(&broken, by("ada")).await), "body: must be a JSON object");
    let never = Attribution { by: "ada", now_ms: u64::MAX };
    assert!(matches!(store.end_emergency("a", never).await, Err(StoreError::Invalid(_))));
    let later = |ms| Attribution { by: "ada", now_ms: NOW_MS + ms };
    assert_eq!(store.renew_emergency("b", NOW_MS + 20, later(5)).await.expect("renewed"), 3);
    let kept = vec![emergency("a", hour), emergency("b", NOW_MS + 20)];
    assert_eq!(store.emergencies().await.expect("read"), (3, kept));
    assert_eq!(
        refused(store.renew_emergency("b", NOW_MS + 50, later(20)).await),
        "there is no emergency \"b\""
    );
    assert_eq!(store.put_emergency(&emergency("c", hour), later(20)).await.expect("put"), 4);
    let kept = vec![emergency("a", hour), emergency("c", hour)];
    assert_eq!(store.emergencies().await.expect("read"), (4, kept));
    assert_eq!(store.end_emergency("a", later(30)).await.expect("ended"), 5);
    assert_eq!(refused(store.end_emergency("a", later(30)).await), "there is no emergency \"a\"");
    let revisions = StoreRevisions { emergency_revision: 5, ..StoreRevisions::default() };
    assert_eq!(store.revisions().await.expect("heads"), revisions);
    let actions: Vec<String> =
        store.audit(0, 10).await.expect("audit").into_iter().map(|entry| entry.action).collect();
    let wanted = ["put", "put", "renew", "expire", "put", "end"].map(|action| format!("emergency.{action}"));
    assert_eq!(actions, wanted);
}

pub(crate) async fn an_emergency_fits_its_rule_as_it_is_at_that_moment(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let keyed = |key: &str| Operation::Put {
        kind: RowKind::Rule,
        name: "a".to_owned(),
        body: format!(r#"{{"key": {key}, "template": "pro"}}"#),
    };
    let template = Operation::Put {
        kind: RowKind::Template,
        name: "pro".to_owned(),
        body: r#"{"limit": 1, "period": "1m"}"#.to_owned(),
    };
    let emergency = |id: &str, key: &str| EmergencyRow {
        id: id.to_owned(),
        body: format!(r#"{{"action": "block", "rule": "a", "key": {key}}}"#),
        expires_ms: NOW_MS + 10,
    };
    let (user, both) = (emergency("user", r#"["u"]"#), emergency("both", r#"["u", "/"]"#));
    apply(&store, vec![template, keyed(r#"["user"]"#)]).await;
    // The author of emergency `user` has seen the rule before this change.
    apply(&store, vec![keyed(r#"["user", "path"]"#)]).await;
    let late = store.put_emergency(&user, by("ada")).await;
    assert!(matches!(late, Err(StoreError::Invalid(_))), "{late:?}");
    assert!(refused(late).starts_with("emergencies[\"user\"].key: "));
    store.put_emergency(&both, by("ada")).await.expect("put");
    assert_eq!(store.emergencies().await.expect("read"), (1, vec![both]));
}

pub(crate) async fn emergencies_that_came_at_once_look_at_no_more_header_fields_than_may_be(
    test_database: &TestDatabase,
) {
    let store = test_database.store().await;
    let emergency = |field: &str| EmergencyRow {
        id: field.to_owned(),
        body: format!(r#"{{"action": "block", "when": {{"header.{field}": "x"}}}}"#),
        expires_ms: NOW_MS + 10,
    };
    let rule = Operation::Put {
        kind: RowKind::Rule,
        name: "a".to_owned(),
        body: r#"{"key": ["header.of-a-rule"], "limit": 1, "period": "1m"}"#.to_owned(),
    };
    apply(&store, vec![rule]).await;
    for field in 1..15 {
        store.put_emergency(&emergency(&format!("f{field}")), by("ada")).await.expect("put");
    }
    // Each emergency is valid alone, but not both together.
    let (one, other) = (emergency("one"), emergency("other"));
    let both = tokio::join!(store.put_emergency(&one, by("ada")), store.put_emergency(&other, by("bo")));
    let ((Ok(_), late) | (late, Ok(_))) = both else { panic!("neither: {both:?}") };
    assert_eq!(refused(late), "rules: 17 different header.* dimensions is outside 0 to 16");
    let rule_rows = store.load().await.expect("read");
    assert_eq!(RuleSet::compile(&rule_rows, None, NOW_MS).err(), None, "every server compiles the rules");
    store.put_emergency(&emergency("f1"), by("ada")).await.expect("a header field that is used already");
    let blind = EmergencyRow { id: "all".to_owned(), body: r#"{"action": "block"}"#.to_owned(), ..one };
    store.put_emergency(&blind, by("ada")).await.expect("an emergency without header fields");
}

pub(crate) async fn there_is_a_most_of_emergencies_that_last(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let emergency = |id: usize, expires_ms| EmergencyRow {
        id: id.to_string(),
        body: r#"{"action": "block"}"#.to_owned(),
        expires_ms,
    };
    for id in 0..EMERGENCIES_MAX {
        store.put_emergency(&emergency(id, NOW_MS + 10), by("ada")).await.expect("put");
    }
    let another = store.put_emergency(&emergency(EMERGENCIES_MAX, NOW_MS + 10), by("ada")).await;
    assert_eq!(refused(another), "emergencies: the maximum of 256 is reached: end one");
    store.put_emergency(&emergency(7, NOW_MS + 10), by("ada")).await.expect("one of them again");
    let later = Attribution { by: "ada", now_ms: NOW_MS + 10 };
    store.put_emergency(&emergency(EMERGENCIES_MAX, NOW_MS + 20), later).await.expect("all others ended");
    assert_eq!(store.emergencies().await.expect("read").1.len(), 1);
}

pub(crate) async fn credentials_are_known_by_their_hash_only(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let credential = |digit: &str, name: &str| Credential {
        hash: digit.repeat(64),
        name: name.to_owned(),
        tenant: "acme".to_owned(),
        role: "admin".to_owned(),
        created_ms: NOW_MS,
        expires_ms: (digit == "a").then_some(NOW_MS + 5),
    };
    let (ci, ops) = (credential("a", "ci"), credential("b", "ops"));
    for new in [&ops, &ci] {
        store.put_credential(new, by("ada")).await.expect("kept");
    }
    assert_eq!(store.credentials().await.expect("read"), [ci.clone(), ops.clone()]);
    let token = Credential { hash: "tg_a-token-and-no-hash".to_owned(), ..ci.clone() };
    let message = refused(store.put_credential(&token, by("ada")).await);
    assert_eq!(message, "hash: must be a SHA-256 of 64 lower-case hexadecimal digits");
    let renamed = Credential { name: "zz".to_owned(), ..ci };
    store.put_credential(&renamed, by("ada")).await.expect("replaced");
    store.revoke_credential(&ops.hash, by("ada")).await.expect("revoked");
    assert_eq!(
        refused(store.revoke_credential(&ops.hash, by("ada")).await),
        "there is no credential with this hash"
    );
    assert_eq!(store.credentials().await.expect("read"), [renamed]);
    assert_eq!(store.revisions().await.expect("heads").credential_revision, 4);
    assert_eq!(audit_count(&store).await, 4);
}

pub(crate) async fn there_is_a_most_of_credentials_and_expired_ones_make_room(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let credential = |number: usize, expires_ms| Credential {
        hash: format!("{number:064x}"),
        name: format!("n{number}"),
        tenant: String::new(),
        role: "viewer".to_owned(),
        created_ms: NOW_MS,
        expires_ms,
    };
    // Two end; the rest is written at once, past the store, since one by one takes long.
    for number in [0, 1] {
        store.put_credential(&credential(number, Some(NOW_MS + 5)), by("ada")).await.expect("kept");
    }
    let row = |number| format!("('{number:064x}', 'n{number}', '', 'viewer', 1, NULL)");
    let rows: Vec<String> = (2..CREDENTIALS_MAX).map(row).collect();
    test_database.tamper(&format!("INSERT INTO tidegate_credentials VALUES {}", rows.join(", "))).await;

    let another = credential(CREDENTIALS_MAX, None);
    let message = "credentials: the maximum of 10000 is reached: revoke one";
    assert_eq!(refused(store.put_credential(&another, by("ada")).await), message);
    store.put_credential(&credential(7, None), by("ada")).await.expect("one of them again");
    let later = Attribution { by: "ada", now_ms: NOW_MS + 5 };
    store.put_credential(&another, later).await.expect("two have ended");
    let entries = store.audit(3, 10).await.expect("audit");
    let actions: Vec<&str> = entries.iter().map(|entry| entry.action.as_str()).collect();
    assert_eq!(actions, ["credential.expire", "credential.put"]);
    assert!(entries[0].detail.contains(r#""name":"n0""#) && entries[0].detail.contains(r#""name":"n1""#));

    let mut found: Vec<Credential> = Vec::new();
    loop {
        let after = found.last().map_or("", |last| last.hash.as_str()).to_owned();
        let page = store.credentials_after(&after, u64::MAX).await.expect("a page");
        assert!(page.len() as u64 <= CREDENTIALS_PAGE_MAX + 1);
        if page.is_empty() {
            break;
        }
        found.extend(page);
    }
    let mut all = store.credentials().await.expect("read");
    all.sort_unstable_by(|a, b| a.hash.cmp(&b.hash));
    assert_eq!((all.len(), all == found), (CREDENTIALS_MAX - 1, true));
}

/// Two processes' worth of connections write at once, and one reads all the while.
pub(crate) async fn writers_at_once_are_applied_one_after_the_other(test_database: &TestDatabase) {
    const EACH: u32 = 12;
    let stores = [test_database.store().await, test_database.store().await];
    let mut tasks = tokio::task::JoinSet::new();
    for (writer, store) in stores.iter().cloned().enumerate() {
        tasks.spawn(async move {
            for number in 0..EACH {
                // Each change has a row of its own, and all have one together.
                let own = put(&format!("w{writer}-{number:02}"), 1);
                loop {
                    let base = store.revisions().await.expect("heads").revision;
                    let wanted = proposal(base, vec![own.clone(), put("shared", number + 1)]);
                    match store.apply_new(&wanted, false, by("ada")).await {
                        Ok(_) => break,
                        Err(StoreError::Conflict(rows)) => assert_eq!(rows[0].name, "shared"),
                        Err(other) => panic!("{other}"),
                    }
                }
            }
        });
    }
    let reader = test_database.store().await;
    while !tasks.is_empty() {
        let rule_rows = reader.load().await.expect("loads");
        let own = rule_rows.rows.iter().filter(|row| row.name.starts_with('w')).count() as u64;
        assert_eq!(own, rule_rows.revision, "a load is a consistent snapshot");
        while let Some(done) = tasks.try_join_next() {
            done.expect("no panic");
        }
    }
    let shared = rows(&reader).await.into_iter().find(|row| row.name == "shared").expect("there");
    assert_eq!(shared.version, 2 * EACH);
    assert_eq!(audit_count(&reader).await, u64::from(2 * 2 * EACH));
}

async fn next(watch: &mut Watch) -> Signal {
    tokio::time::timeout(START_TIME_MAX, watch.next()).await.expect("a signal in time")
}

/// Waits for a signal after which the heads have these revisions.
pub(crate) async fn wait_for_heads(watch: &mut Watch, store: &Store, wanted: StoreRevisions) {
    loop {
        let signal = next(watch).await;
        if signal == Signal::MayHaveChanged
            && store.revisions().await.is_ok_and(|revisions| revisions == wanted)
        {
            return;
        }
    }
}

pub(crate) async fn watchers_are_notified_of_changes(test_database: &TestDatabase) {
    let (here, there) = (test_database.store().await, test_database.store().await);
    let (mut same, mut other) = (here.watch(1), there.watch(2));
    let mut wanted = StoreRevisions::default();
    for watch in [&mut same, &mut other] {
        assert_eq!(next(watch).await, Signal::MayHaveChanged, "once, to begin with");
    }
    apply(&here, vec![put("a", 1)]).await;
    wanted.revision = 1;
    wait_for_heads(&mut same, &here, wanted).await;
    wait_for_heads(&mut other, &there, wanted).await;
    let emergency = EmergencyRow {
        id: "e".to_owned(),
        body: r#"{"action": "block"}"#.to_owned(),
        expires_ms: NOW_MS + 1,
    };
    here.put_emergency(&emergency, by("ada")).await.expect("put");
    wanted.emergency_revision = 1;
    wait_for_heads(&mut same, &here, wanted).await;
    wait_for_heads(&mut other, &there, wanted).await;
}
