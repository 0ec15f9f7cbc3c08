//! Requirements for the audit of a rule store, and for its alarms.

use super::*;

/// Performs actions of several kinds, so that the audit has entries of each.
async fn eventful(test_database: &TestDatabase) -> Store {
    let store = test_database.store().await;
    let change = apply(&store, vec![put("a", 1)]).await;
    roll_back(&store, Rollback::Change(change.id), "", by("bob")).await.expect("undone");
    let waiting =
        store.propose(&needing(ChangeNeeds::Approver, vec![put("b", 1)]), by("ada")).await.expect("kept");
    store.approve(waiting.id, by("bob")).await.expect("approved");
    store.apply(waiting.id, false, by("ada")).await.expect("applies");
    let rejected =
        store.propose(&needing(ChangeNeeds::Nothing, vec![put("c", 1)]), by("ada")).await.expect("kept");
    store.reject(rejected.id, "no", by("bob")).await.expect("rejected");
    assert_eq!(audit_count(&store).await, 9);
    store
}

fn found<T: std::fmt::Debug>(outcome: Result<T, StoreError>) -> ChainBreak {
    match outcome {
        Err(StoreError::Audit(found)) => found,
        other => panic!("not found: {other:?}"),
    }
}

pub(crate) async fn tampering_with_the_tables_is_found(test_database: &TestDatabase) {
    let store = eventful(test_database).await;
    let kept = store.checkpoint().await.expect("a checkpoint");
    test_database.tamper("CREATE TABLE saved AS SELECT * FROM tidegate_audit").await;
    let changed = |sequence| ChainBreak::Changed { sequence };
    let cases = [
        ("UPDATE tidegate_audit SET actor = 'Ada' WHERE sequence = 4", changed(4)),
        ("UPDATE tidegate_audit SET at_ms = at_ms + 1 WHERE sequence = 9", changed(9)),
        ("UPDATE tidegate_audit SET detail = '{}' WHERE sequence = 1", changed(1)),
        ("DELETE FROM tidegate_audit WHERE sequence = 5", ChainBreak::OutOfPlace { expected: 5, found: 6 }),
        ("DELETE FROM tidegate_audit WHERE sequence = 1", ChainBreak::OutOfPlace { expected: 1, found: 2 }),
        ("DELETE FROM tidegate_audit WHERE sequence >= 8", ChainBreak::CutOff { missing: 8, count: 9 }),
        ("DELETE FROM tidegate_audit", ChainBreak::CutOff { missing: 1, count: 9 }),
        (
            "UPDATE tidegate_audit SET sequence = 100 WHERE sequence = 3; \
             UPDATE tidegate_audit SET sequence = 3 WHERE sequence = 6; \
             UPDATE tidegate_audit SET sequence = 6 WHERE sequence = 100",
            changed(3),
        ),
        (
            "INSERT INTO tidegate_audit SELECT 10, at_ms, actor, action, detail, previous, hash \
             FROM tidegate_audit WHERE sequence = 9",
            changed(10),
        ),
    ];
    // Unreadable entries are reported as well. PostgreSQL accepts only the negative time.
    let unreadable = [
        ("UPDATE tidegate_audit SET at_ms = -1 WHERE sequence = 4", changed(4)),
        ("UPDATE tidegate_audit SET at_ms = 'soon' WHERE sequence = 5", changed(5)),
        ("UPDATE tidegate_audit SET actor = CAST(x'6164e1' AS TEXT) WHERE sequence = 6", changed(6)),
        ("UPDATE tidegate_audit SET hash = x'00' WHERE sequence = 7", changed(7)),
        ("UPDATE tidegate_audit SET sequence = 'nine' WHERE sequence = 9", changed(9)),
    ];
    let taken = if test_database.url.starts_with("postgres:") { 1 } else { unreadable.len() };
    for (sql, wanted) in &unreadable[..taken] {
        test_database.tamper(sql).await;
        assert_eq!(found(store.audit(0, 100).await), *wanted, "{sql}");
        test_database
            .tamper("DELETE FROM tidegate_audit; INSERT INTO tidegate_audit SELECT * FROM saved")
            .await;
    }
    for (sql, wanted) in cases.into_iter().chain(unreadable.into_iter().take(taken)) {
        test_database.tamper(sql).await;
        assert_eq!(found(store.verify_audit(None).await), wanted, "{sql}");
        test_database
            .tamper("DELETE FROM tidegate_audit; INSERT INTO tidegate_audit SELECT * FROM saved")
            .await;
        assert_eq!(store.verify_audit(Some(&kept)).await.expect("restored"), kept);
    }
    // If the recorded end and the change were changed too, the checkpoint kept elsewhere reveals
    // the removal.
    test_database
        .tamper(
            "DELETE FROM tidegate_audit WHERE sequence = 9; UPDATE tidegate_heads SET audit_count = 8, \
             audit_hash = (SELECT hash FROM tidegate_audit WHERE sequence = 8); \
             UPDATE tidegate_changes SET state = 'proposed' WHERE id = 4",
        )
        .await;
    assert_eq!(audit_count(&store).await, 8);
    assert_eq!(found(store.verify_audit(Some(&kept)).await), ChainBreak::CutOff { missing: 9, count: 9 });
    apply(&store, vec![put("z", 1)]).await;
    assert_eq!(found(store.verify_audit(Some(&kept)).await), ChainBreak::Rewritten { sequence: 9 });
}

pub(crate) async fn alarms_are_entries_of_the_audit_and_no_changes(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let change = apply(&store, vec![put("a", 1)]).await;
    let again = AlarmSubject::Emergency("stop", 8);
    let subjects = [AlarmSubject::Change(change.id), AlarmSubject::Emergency("stop", 7), again, again];
    let mut new = Vec::new();
    for subject in subjects {
        new.push(store.put_alarm(subject, "many keys", by("ada")).await.expect("put"));
    }
    assert_eq!(new, [true, true, true, false], "one for each declaration");
    assert_eq!(store.revisions().await.expect("revisions").revision, 1);
    for limit in 1..=5 {
        apply(&store, vec![put("b", limit)]).await;
    }
    let alarms = store.alarms(10).await.expect("alarms");
    let details: Vec<&str> = alarms.iter().map(|entry| entry.detail.as_str()).collect();
    let of_change = format!(r#"{{"change":{},"reason":"many keys"}}"#, change.id);
    let of_emergency = |ms: u64| format!(r#"{{"created_ms":{ms},"emergency":"stop","reason":"many keys"}}"#);
    assert_eq!(details, [of_emergency(8), of_emergency(7), of_change], "the latest first");
    assert_eq!(store.alarms(1).await.expect("alarms").len(), 1);
    audit_count(&store).await;
}

pub(crate) async fn servers_raise_an_alarm_once(test_database: &TestDatabase) {
    let stores = [test_database.store().await, test_database.store().await];
    for change in 1..=20 {
        let alarm = |store: &Store| {
            let store = store.clone();
            tokio::spawn(async move {
                store.put_alarm(AlarmSubject::Change(change), "many keys", by("ada")).await
            })
        };
        let raised = [alarm(&stores[0]), alarm(&stores[1])];
        let mut new = 0;
        for raised in raised {
            new += u32::from(raised.await.expect("no panic").expect("put"));
        }
        assert_eq!(new, 1);
    }
    assert_eq!(stores[0].alarms(100).await.expect("alarms").len(), 20);
}

pub(crate) async fn alarms_stay_known_in_a_long_audit(test_database: &TestDatabase) {
    let store = test_database.store().await;
    store.put_alarm(AlarmSubject::Change(1), "many keys", by("ada")).await.expect("put");
    test_database.tamper("UPDATE tidegate_heads SET audit_count = 20000").await;
    assert_eq!(store.alarms(10).await.expect("alarms").len(), 1);
}

pub(crate) async fn an_export_of_the_audit_holds_elsewhere(test_database: &TestDatabase) {
    let store = eventful(test_database).await;
    let (mut text, mut after) = (String::new(), 0);
    loop {
        let page = store.audit(after, 4).await.expect("a page");
        let Some(last) = page.last() else { break };
        after = last.sequence;
        for entry in page {
            text.push_str(&entry.to_line().expect("a line"));
            text.push('\n');
        }
    }
    let kept = store.checkpoint().await.expect("a checkpoint").to_string().parse().expect("its line");
    assert_eq!(verify_lines(text.as_bytes(), Some(&kept)).expect("holds"), kept);
    let cut = text.lines().take(8).collect::<Vec<_>>().join("\n");
    assert!(verify_lines(cut.as_bytes(), Some(&kept)).is_err());
    // The heads state the end, regardless of the remaining entries.
    test_database.tamper("DELETE FROM tidegate_audit WHERE sequence > 6").await;
    let (left, end) = store.audit_and_end(4, 100).await.expect("a page");
    assert_eq!((left.len(), end), (2, kept));
}

pub(crate) async fn a_schema_of_a_later_version_is_refused(test_database: &TestDatabase) {
    drop(test_database.store().await);
    test_database
        .tamper(
            "INSERT INTO tidegate_migrations (version, description, success, checksum, execution_time) \
             SELECT 999, description, success, checksum, execution_time FROM tidegate_migrations \
             WHERE version = 1",
        )
        .await;
    let outcome = Store::open(&test_database.url.parse().expect("an address")).await;
    let message = refused(outcome);
    assert!(
        message.starts_with("rules: the store's schema: migration 999 was previously applied"),
        "{message}"
    );
}
