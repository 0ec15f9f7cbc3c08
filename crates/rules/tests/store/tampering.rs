//! Edits behind the back of the store, which the audit finds.

use tidegate_rules::audit::{ALTERATIONS_NAMED_MAX, ChainBreak, Checkpoint};
use tidegate_rules::change::{ChangeNeeds, Operation, Proposal};
use tidegate_rules::rows::{EmergencyRow, RowKind};
use tidegate_rules::store::{Credential, OverrideLimit, OverrideWrite, Rollback, Store, StoreError};

use super::suite::{TestDatabase, apply, by, proposal, put};

/// Tables with a copy, from which a case restores the store.
const TABLES: [&str; 7] = ["heads", "rows", "changes", "emergencies", "credentials", "makers", "audit"];

async fn save(test_database: &TestDatabase) {
    for table in TABLES {
        test_database.tamper(&format!("CREATE TABLE saved_{table} AS SELECT * FROM tidegate_{table}")).await;
    }
}

async fn restore(test_database: &TestDatabase) {
    for table in TABLES {
        let restore =
            format!("DELETE FROM tidegate_{table}; INSERT INTO tidegate_{table} SELECT * FROM saved_{table}");
        test_database.tamper(&restore).await;
    }
}

/// Returns what a verification names.
async fn altered(store: &Store) -> Vec<String> {
    match store.verify_audit(None).await {
        Err(StoreError::Altered(found)) => found.named().iter().map(ToString::to_string).collect(),
        Ok(_) => Vec::new(),
        Err(error) => panic!("{error}"),
    }
}

/// A store with a row of each kind, and with changes in several states.
async fn busy(test_database: &TestDatabase) -> Store {
    let store = test_database.store().await;
    let kind = RowKind::Template;
    let body = r#"{"limit":9,"period":"1m"}"#.to_owned();
    apply(&store, vec![put("a", 1), Operation::Put { kind, name: "plan".to_owned(), body }]).await;
    let raised = apply(&store, vec![put("a", 2), put("b", 1)]).await;
    apply(&store, vec![put("c", 1)]).await;
    apply(&store, vec![Operation::Delete { kind: RowKind::Rule, name: "c".to_owned() }]).await;
    let undo = store.restoring(Rollback::Change(raised.id), "").await.expect("a rollback");
    store.apply_new(&undo, false, by("bob")).await.expect("undone");
    let effect = Some(r#"{"rules":[]}"#.to_owned());
    let waits = Proposal { needs: ChangeNeeds::Approver, effect, ..proposal(0, vec![put("d", 1)]) };
    let waiting = store.propose(&waits, by("ada")).await.expect("kept");
    store.approve(waiting.id, by("bob")).await.expect("approved");
    store.wait_again(waiting.id, r#"{"rules":["d"]}"#, by("bob")).await.expect("waits");
    let write = |identifier: &str, amount: Option<u32>| OverrideWrite {
        tenant: "acme".to_owned(),
        namespace: "emails".to_owned(),
        identifier: identifier.to_owned(),
        limit: amount.map(|amount| OverrideLimit { amount, period_ms: 60_000 }),
        by: "token:ops".to_owned(),
        now_ms: 1,
    };
    let writes = [write("vip", Some(5)), write("vip", Some(6)), write("eve", Some(7)), write("eve", None)];
    store.write_overrides(&writes).await.expect("written");
    let emergency = |id: &str| EmergencyRow {
        id: id.to_owned(),
        body: r#"{"action":"block"}"#.to_owned(),
        expires_ms: by("").now_ms + 1_000,
    };
    for id in ["fire", "flood", "over"] {
        store.put_emergency(&emergency(id), by("ada")).await.expect("put");
    }
    store.renew_emergency("flood", by("").now_ms + 2_000, by("ada")).await.expect("renewed");
    store.end_emergency("over", by("ada")).await.expect("ended");
    for (name, digits) in [("ci", "0a"), ("bot", "0b"), ("gone", "0c")] {
        store.put_credential(&credential(name, digits), by("ada")).await.expect("made");
    }
    store.revoke_credential(&"0c".repeat(32), by("ada")).await.expect("revoked");
    store
}

fn credential(name: &str, digits: &str) -> Credential {
    Credential {
        hash: digits.repeat(32),
        name: name.to_owned(),
        tenant: String::new(),
        role: "viewer".to_owned(),
        created_ms: 7,
        expires_ms: None,
    }
}

/// The parts that a verification names if the operations of the first change are not proven.
const UNPROVEN: [&str; 2] = [
    r#"change "1" (revision 1) was edited: operations"#,
    r#"template "plan" (revision 1) is not proven: change 1 wrote it"#,
];

/// Edits of rows and changes, and what a verification names.
const EDITS_OF_RULES: &[(&str, &[&str])] = &[
    (
        r#"UPDATE tidegate_rows SET body = '{"key":["user"],"limit":999,"period":"1m"}' WHERE name = 'a'"#,
        &[r#"rule "a" (revision 5) was edited: body"#],
    ),
    (
        "UPDATE tidegate_rows SET version = 1, revision = 1 WHERE name = 'a'",
        &[r#"rule "a" (revision 5) was edited: version, revision"#],
    ),
    ("DELETE FROM tidegate_rows WHERE name = 'plan'", &[r#"template "plan" (revision 1) was removed"#]),
    (
        "INSERT INTO tidegate_rows (kind, name, body, version, revision) VALUES ('rule', 'z', '{}', 1, 1)",
        &[r#"rule "z" was added"#],
    ),
    ("UPDATE tidegate_rows SET body = '{}' WHERE name = 'c'", &[r#"rule "c" (revision 4) was edited: body"#]),
    (
        "UPDATE tidegate_rows SET body = REPLACE(body, '\"limit\":6', '\"limit\":60') WHERE kind = 'override'",
        &[r#"override "ovr_VIP" (revision 1) was edited: body"#],
    ),
    (
        "UPDATE tidegate_rows SET target = 'x' WHERE target IS NOT NULL",
        &[r#"override "ovr_VIP" (revision 1) was edited: target"#],
    ),
    (
        "UPDATE tidegate_rows SET target = NULL WHERE target IS NOT NULL",
        &[r#"override "ovr_VIP" (revision 1) was edited: target"#],
    ),
    (
        "UPDATE tidegate_rows SET namespace = 'x', tenant = NULL, wildcard = 1 WHERE target IS NOT NULL",
        &[r#"override "ovr_VIP" (revision 1) was edited: namespace, tenant, wildcard"#],
    ),
    (
        "UPDATE tidegate_rows SET tenant = 'x' WHERE name = 'a'",
        &[r#"rule "a" (revision 5) was edited: tenant"#],
    ),
    ("UPDATE tidegate_changes SET operations = REPLACE(operations, '9', '8') WHERE id = 1", &UNPROVEN),
    (
        "UPDATE tidegate_changes SET operations = REPLACE(operations, '9', '8') WHERE id = 1; \
             UPDATE tidegate_rows SET body = REPLACE(body, '9', '8') WHERE name = 'plan'",
        &UNPROVEN,
    ),
    (
        "DELETE FROM tidegate_changes WHERE id = 1",
        &[
            r#"change "1" (revision 1) was removed"#,
            r#"template "plan" (revision 1) is not proven: change 1 wrote it"#,
        ],
    ),
    (
        "UPDATE tidegate_changes SET operations = REPLACE(operations, '1', '7') WHERE id = 6",
        &[r#"change "6" was edited: operations"#],
    ),
    (
        "UPDATE tidegate_changes SET restores = REPLACE(restores, '1', '7') WHERE id = 2",
        &[r#"change "2" (revision 2) was edited: restores"#],
    ),
    (
        "UPDATE tidegate_changes SET state = 'proposed', effect = '{}' WHERE id = 6",
        &[r#"change "6" was edited: state, effect"#],
    ),
    (
        "UPDATE tidegate_changes SET author = 'eve', reason = 'none', operation_count = 9 WHERE id = 3",
        &[r#"change "3" (revision 3) was edited: author, reason, operation_count"#],
    ),
    (
        "UPDATE tidegate_changes SET approver = 'eve', approved_ms = 1, state = 'proposed' WHERE id = 6",
        &[r#"change "6" was edited: state, approver"#],
    ),
    ("UPDATE tidegate_changes SET needs = 'nothing' WHERE id = 6", &[r#"change "6" was edited: needs"#]),
    (
        "INSERT INTO tidegate_changes SELECT 77, state, needs, base_revision, author, reason, created_ms, \
             operation_count, operations, effect, undoes, approver, approved_ms, revision, restores \
             FROM tidegate_changes WHERE id = 6",
        &[r#"change "77" was added"#],
    ),
];

/// Edits of the other tables.
const OTHER_EDITS: &[(&str, &[&str])] = &[
    (
        r#"UPDATE tidegate_emergencies SET body = '{"action":"allow"}', expires_ms = expires_ms + 1
               WHERE id = 'fire'"#,
        &[r#"emergency "fire" (revision 1) was edited: body, expires_ms"#],
    ),
    (
        "DELETE FROM tidegate_emergencies WHERE id = 'flood'",
        &[r#"emergency "flood" (revision 4) was removed"#],
    ),
    (
        "UPDATE tidegate_emergencies SET id = 'other' WHERE id = 'fire'",
        &[r#"emergency "fire" (revision 1) was removed"#, r#"emergency "other" was added"#],
    ),
    (
        "UPDATE tidegate_credentials SET role = 'admin' WHERE name = 'ci'",
        &[r#"credential "ci" (revision 1) was edited: role"#],
    ),
    (
        "UPDATE tidegate_credentials SET created_ms = 8, expires_ms = 9 WHERE name = 'bot'",
        &[r#"credential "bot" (revision 2) was edited: created_ms, expires_ms"#],
    ),
    (
        "UPDATE tidegate_credentials SET hash = 'x' WHERE name = 'ci'",
        &[r#"credential "ci" (revision 1) was removed"#, r#"credential "ci" was added"#],
    ),
    ("DELETE FROM tidegate_makers WHERE name = 'ci'", &[r#"maker "ci by ada" was removed"#]),
    (
        "UPDATE tidegate_makers SET made_by = 'eve', change_count = 0 WHERE name = 'gone'",
        &[r#"maker "gone by ada" was removed"#, r#"maker "gone by eve" was added"#],
    ),
    (
        "UPDATE tidegate_makers SET change_count = 0 WHERE name = 'bot'",
        &[r#"maker "bot by ada" was edited: change_count"#],
    ),
    (
        "UPDATE tidegate_heads SET revision = 4, change_count = 9",
        &[r#"heads "heads" (revision 5) was edited: revision, change_count"#],
    ),
    (
        "UPDATE tidegate_heads SET emergency_revision = 1, credential_revision = 9",
        &[r#"heads "heads" (revision 5) was edited: emergency_revision, credential_revision"#],
    ),
];

pub(crate) async fn edits_of_the_tables_are_named(test_database: &TestDatabase) {
    let store = busy(test_database).await;
    assert_eq!(altered(&store).await, [""; 0]);
    save(test_database).await;
    let vip = override_name(&store).await;
    for (sql, wanted) in EDITS_OF_RULES.iter().chain(OTHER_EDITS) {
        test_database.tamper(sql).await;
        let mut wanted: Vec<String> = wanted.iter().map(|line| line.replace("ovr_VIP", &vip)).collect();
        let mut found = altered(&store).await;
        wanted.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, wanted, "{sql}");
        restore(test_database).await;
        assert_eq!(altered(&store).await, [""; 0], "{sql}");
    }
}

/// The name of the only override.
async fn override_name(store: &Store) -> String {
    let rule_rows = store.load().await.expect("loads");
    let found = rule_rows.rows.iter().find(|row| row.kind == RowKind::Override);
    found.expect("an override").name.clone()
}

pub(crate) async fn many_edits_are_counted(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, (0..ALTERATIONS_NAMED_MAX + 5).map(|number| put(&format!("r{number:03}"), 1)).collect())
        .await;
    test_database.tamper("UPDATE tidegate_rows SET version = 9").await;
    let Err(StoreError::Altered(found)) = store.verify_audit(None).await else { panic!("not found") };
    assert_eq!((found.named().len(), found.count()), (ALTERATIONS_NAMED_MAX, ALTERATIONS_NAMED_MAX + 5));
    let message = found.to_string();
    assert!(
        message.starts_with("audit: the store has 105 parts that its audit does not prove: "),
        "{message}"
    );
    assert!(message.ends_with("; and 5 more"), "{message}");
}

pub(crate) async fn entries_of_an_earlier_version_still_verify(test_database: &TestDatabase) {
    let store = test_database.store().await;
    test_database.tamper(include_str!("earlier_audit.sql")).await;
    assert_eq!(store.verify_audit(None).await.expect("holds").count, 3);
    apply(&store, vec![put("b", 1)]).await;
    assert_eq!(store.verify_audit(None).await.expect("holds").count, 5);
    test_database.tamper("UPDATE tidegate_rows SET body = '{}' WHERE name = 'a'").await;
    test_database.tamper("UPDATE tidegate_changes SET operations = '[]' WHERE id = 1").await;
    // Without its operations, the column with their number cannot be checked.
    let named = [
        r#"change "1" (revision 1) was edited: operations"#,
        r#"rule "a" (revision 1) is not proven: change 1 wrote it"#,
    ];
    assert_eq!(altered(&store).await, named);
}

pub(crate) async fn an_audit_without_its_checkpoint_is_noticed(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let nothing = Checkpoint::default();
    assert_eq!(store.checkpoint_after(&nothing).await.expect("empty"), nothing);
    apply(&store, vec![put("a", 1)]).await;
    let earlier = store.checkpoint_after(&nothing).await.expect("holds");
    apply(&store, vec![put("b", 1)]).await;
    let known = store.checkpoint_after(&earlier).await.expect("holds");
    assert_eq!((earlier.count, known.count), (2, 4));
    save(test_database).await;
    let found = async || match store.checkpoint_after(&known).await {
        Err(StoreError::Audit(found)) => found,
        other => panic!("{other:?}"),
    };
    // The whole change is taken back, with its traces.
    let cut = "DELETE FROM tidegate_audit WHERE sequence > 2; DELETE FROM tidegate_changes WHERE id = 2; \
        DELETE FROM tidegate_rows WHERE name = 'b'; UPDATE tidegate_heads SET revision = 1, change_count = 1, \
        audit_count = 2, audit_hash = (SELECT hash FROM tidegate_audit WHERE sequence = 2)";
    test_database.tamper(cut).await;
    assert_eq!(store.verify_audit(None).await.expect("it holds in itself"), earlier);
    assert_eq!(found().await, ChainBreak::CutOff { missing: 3, count: 4 });
    apply(&store, vec![put("c", 1)]).await;
    apply(&store, vec![put("d", 1)]).await;
    assert_eq!(found().await, ChainBreak::Rewritten { sequence: 4 });
    restore(test_database).await;
    assert_eq!(store.checkpoint_after(&known).await.expect("restored"), known);
    test_database.tamper("DELETE FROM tidegate_audit WHERE sequence = 4").await;
    assert_eq!(found().await, ChainBreak::CutOff { missing: 4, count: 4 });
}
