//! Overrides of namespaces, as clients write them.

use tidegate_rules::change::Operation;
use tidegate_rules::rows::{RowKind, RuleRow};
use tidegate_rules::store::{
    ApplyConditions, CheckedRevision, OverrideLimit, OverrideOutcome, OverrideQuota, OverrideWrite, Rollback,
    Store, StoreError,
};
use tidegate_rules::{LOOSE_WILDCARDS_MAX, NamespaceOverrides, RuleSet, WILDCARDS_PER_TARGET_MAX};

use super::suite::{TestDatabase, apply, by, proposal, put};

fn set(tenant: &str, identifier: &str, amount: u32) -> OverrideWrite {
    OverrideWrite {
        tenant: tenant.to_owned(),
        namespace: "emails".to_owned(),
        identifier: identifier.to_owned(),
        limit: Some(OverrideLimit { amount, period_ms: 60_000 }),
        by: "token:ops".to_owned(),
        now_ms: 1,
    }
}

fn delete(tenant: &str, identifier: &str) -> OverrideWrite {
    OverrideWrite { limit: None, by: "token:other".to_owned(), ..set(tenant, identifier, 0) }
}

async fn write(store: &Store, writes: &[OverrideWrite]) -> Vec<OverrideOutcome> {
    store.write_overrides(writes).await.expect("written").1
}

async fn limit(store: &Store, identifier: &str) -> Option<u32> {
    let set = RuleSet::compile(&store.load().await.expect("loads"), None, 0).expect("valid rows");
    set.namespace_override("acme", "emails", identifier, 0).map(|found| found.limit)
}

fn row_of(name: &str, body: &str) -> Operation {
    Operation::Put { kind: RowKind::Override, name: name.to_owned(), body: body.to_owned() }
}

const VIP: &str = r#"{"tenant":"acme","namespace":"emails","identifier":"vip-*","limit":5,"period":"1m"}"#;

pub(crate) async fn clients_write_overrides_without_a_change(test_database: &TestDatabase) {
    let (store, other) = (test_database.store().await, test_database.store().await);
    let long = "é".repeat(512);
    let writes = [
        set("acme", "vip-*", 5),
        set("acme", "vip-*", 6),
        set("other", "vip-*", 7),
        delete("acme", "gone"),
        set("acme", &long, 8),
        set("acme", "\0'%", 9),
    ];
    let outcomes = write(&store, &writes).await;
    let names: Vec<(&str, u32)> = outcomes
        .iter()
        .filter_map(|outcome| match outcome {
            OverrideOutcome::Set { name, version } => Some((name.as_str(), *version)),
            _ => None,
        })
        .collect();
    assert_eq!(names.iter().map(|(_, version)| *version).collect::<Vec<_>>(), [1, 2, 1, 1, 1]);
    assert_eq!((names[0].0, names[0].0 == names[2].0), (names[1].0, false), "one name for each target");
    assert_eq!(outcomes[3], OverrideOutcome::NotThere);
    let revisions = other.revisions().await.expect("heads");
    assert_eq!((revisions.revision, revisions.override_revision), (0, 1), "all in one transaction");
    assert_eq!(limit(&other, "vip-1").await, Some(6));
    assert_eq!((limit(&other, &long).await, limit(&other, "\0'%").await), (Some(8), Some(9)));

    let (_, changes) = other.override_changes(0).await.expect("read");
    assert_eq!(changes.len(), 4);
    assert_eq!(write(&store, &[delete("acme", "vip-*")]).await, [OverrideOutcome::Deleted]);
    let (revisions, changes) = other.override_changes(1).await.expect("read");
    assert_eq!((revisions.override_revision, changes.len(), changes[0].body.clone()), (2, 1, None));
    assert_eq!(limit(&other, "vip-1").await, None);
    let again = write(&store, &[set("acme", "vip-*", 1)]).await;
    let kept = OverrideOutcome::Set { name: names[0].0.to_owned(), version: 4 };
    assert_eq!(again, [kept], "no version is used again");

    let entries = store.audit(0, 100).await.expect("an audit");
    let actions: Vec<(&str, &str)> =
        entries.iter().map(|entry| (entry.actor.as_str(), entry.action.as_str())).collect();
    assert_eq!(actions[0], ("token:ops", "override.set"));
    assert_eq!(actions[5], ("token:other", "override.delete"));
    store.verify_audit(None).await.expect("the audit holds");
    assert_eq!(store.history(10, None).await.expect("read"), [], "no change was proposed");
}

pub(crate) async fn concurrent_writes_of_one_override_leave_the_last(test_database: &TestDatabase) {
    let stores = [test_database.store().await, test_database.store().await];
    let writes = (0..20).map(|at| {
        let store = stores[at % 2].clone();
        let amount = u32::try_from(at).expect("few");
        tokio::spawn(async move { store.write_overrides(&[set("acme", "vip", amount)]).await })
    });
    let mut last = (0, 0);
    for (amount, write) in (0..).zip(writes.collect::<Vec<_>>()) {
        let (_, outcomes) = write.await.expect("ends").expect("written");
        let [OverrideOutcome::Set { version, .. }] = outcomes[..] else { panic!("{outcomes:?}") };
        last = last.max((version, amount));
    }
    assert_eq!(last.0, 20, "each is one version");
    for store in &stores {
        assert_eq!(limit(store, "vip").await, Some(last.1));
    }
}

pub(crate) async fn overrides_of_clients_are_in_conflict_with_no_change(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1)]).await;
    let checked = Some(CheckedRevision { revision: 1, emergency_revision: 0 });
    let conditions = ApplyConditions { confirmed: false, checked };
    write(&store, &[set("acme", "vip-*", 7)]).await;
    let change = proposal(1, vec![put("a", 2)]);
    let change = store.apply_new(&change, conditions, by("ada")).await.expect("no conflict");
    assert_eq!(change.revision, Some(2));

    // A change cannot give another name to an override that a client has set meanwhile.
    let conflict = store.apply_new(&proposal(2, vec![row_of("mine", VIP)]), false, by("ada")).await;
    assert!(matches!(conflict, Err(StoreError::Conflict(_))), "{conflict:?}");
    assert_eq!(limit(&store, "vip-1").await, Some(7));
    // It may write that row, and clients may write it again under the same name.
    let name = store.load().await.expect("loads").rows_behind(Some(RowKind::Override), None)[0].name.clone();
    apply(&store, vec![row_of(&name, VIP)]).await;
    assert_eq!(limit(&store, "vip-1").await, Some(5));
    let written = write(&store, &[set("acme", "vip-*", 8)]).await;
    assert_eq!(written, [OverrideOutcome::Set { name, version: 3 }]);

    // A row of a change keeps its name when a client sets it.
    apply(&store, vec![row_of("people's", &VIP.replace("vip", "pro"))]).await;
    let written = write(&store, &[set("acme", "pro-*", 9)]).await;
    assert_eq!(written, [OverrideOutcome::Set { name: "people's".to_owned(), version: 2 }]);
    assert_eq!(limit(&store, "pro-1").await, Some(9));
}

pub(crate) async fn rollbacks_leave_overrides_of_clients_alone(test_database: &TestDatabase) {
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1)]).await;
    let change = apply(&store, vec![put("a", 2), row_of("vip", VIP)]).await;
    write(&store, &[set("acme", "vip-*", 7), set("acme", "x", 1)]).await;
    let rollback = store.restoring(Rollback::Change(change.id), "").await.expect("no conflict");
    assert_eq!(rollback.operations, [put("a", 1)]);
    store.apply_new(&rollback, false, by("ada")).await.expect("applies");
    assert_eq!((limit(&store, "vip-1").await, limit(&store, "x").await), (Some(7), Some(1)));
    let rollback = store.restoring(Rollback::ToRevision(0), "").await.expect("no conflict");
    store.apply_new(&rollback, false, by("ada")).await.expect("applies");
    let rows = store.load().await.expect("loads").rows;
    assert!(rows.iter().all(RuleRow::is_namespace_override), "{rows:?}");
    assert_eq!((limit(&store, "vip-1").await, limit(&store, "x").await), (Some(7), Some(1)));
}

pub(crate) async fn overrides_have_a_maximum_in_the_store(test_database: &TestDatabase) {
    let store = test_database.store().await;
    let loose: Vec<_> = (0..=LOOSE_WILDCARDS_MAX).map(|at| set("acme", &format!("*{at}*"), 1)).collect();
    let outcomes = write(&store, &loose).await;
    assert_eq!(outcomes.last(), Some(&OverrideOutcome::Full(OverrideQuota::LooseWildcards)));
    let wild = WILDCARDS_PER_TARGET_MAX - LOOSE_WILDCARDS_MAX;
    let wild: Vec<_> = (0..=wild).map(|at| set("acme", &format!("{at}*"), 1)).collect();
    let outcomes = write(&store, &wild).await;
    assert_eq!(outcomes.last(), Some(&OverrideOutcome::Full(OverrideQuota::Wildcards)));
    // One that is there may be set again, and others have room.
    for one in [set("acme", "*0*", 2), set("acme", "exact", 1), set("other", "*0*", 1)] {
        let outcomes = write(&store, &[one]).await;
        assert!(matches!(outcomes[..], [OverrideOutcome::Set { .. }]), "{outcomes:?}");
    }
    let rows = store.load().await.expect("loads").rows;
    let overrides = NamespaceOverrides::compile(&rows, 0).expect("what the store takes is valid");
    assert_eq!(overrides.len(), WILDCARDS_PER_TARGET_MAX + 2);
    // A change that was planned before cannot exceed it either.
    let body = VIP.replace("vip-*", "*more*");
    let refused = store.apply_new(&proposal(0, vec![row_of("more", &body)]), false, by("ada")).await;
    assert!(matches!(refused, Err(StoreError::TooManyOverrides(OverrideQuota::Wildcards))), "{refused:?}");
}
