//! The store of rules, on `SQLite` and on a real `PostgreSQL` that is killed and started again.

#![allow(clippy::expect_used, clippy::panic, reason = "a helper of tests may panic as a test may")]

mod actors;
mod overrides;
mod suite;
mod tampering;

use std::time::Duration;

use sqlx::Connection as _;
use suite::{TestDatabase, apply, by, proposal, put, wait_for_heads};
use tidegate_rules::store::{Address, AlarmSubject, CHANNEL, Signal, Store, StoreError, StoreRevisions};
use tidegate_testkit::{Postgres, Proxy, START_TIME_MAX, Traffic};

/// Every case of the suite: each a test of its own on `SQLite`, and all in turn on one
/// `PostgreSQL`, which takes a second to make.
macro_rules! on_both {
    ($($case:ident,)*) => {
        mod sqlite {
            $(
                #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
                async fn $case() {
                    let folder = tempfile::tempdir().expect("a folder");
                    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
                    super::suite::$case(&super::TestDatabase { url }).await;
                }
            )*
        }

        #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
        async fn postgres_does_all_that_sqlite_does() {
            let postgres = Postgres::start();
            $(
                println!("{}", stringify!($case));
                suite::$case(&test_database(&postgres, stringify!($case)).await).await;
            )*
        }
    };
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn actors_are_found_on_both_databases() {
    let (postgres, folder) = (Postgres::start(), tempfile::tempdir().expect("a folder"));
    let file = |name: &str| TestDatabase { url: format!("sqlite:{}", folder.path().join(name).display()) };
    actors::last_applied_change_of_an_author_is_found(&file("changes.db")).await;
    actors::last_applied_change_of_an_author_is_found(&test_database(&postgres, "changes").await).await;
    actors::related_actors_are_makers_and_all_that_they_made(&file("actors.db")).await;
    actors::related_actors_are_makers_and_all_that_they_made(&test_database(&postgres, "actors").await).await;
}

#[tokio::test]
async fn files_of_a_store_are_private() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().expect("a folder");
    let url = format!("sqlite:{}", folder.path().join("rules.db").display());
    let store = TestDatabase { url }.store().await;
    apply(&store, vec![put("a", 1)]).await;
    let entries = std::fs::read_dir(folder.path()).expect("a folder");
    let modes: Vec<(String, u32)> = entries
        .map(|entry| entry.expect("an entry"))
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.metadata().expect("known")))
        .map(|(name, metadata)| (name, metadata.permissions().mode() & 0o777))
        .collect();
    assert!(modes.iter().any(|(name, _)| name.ends_with("-wal")), "{modes:?}");
    assert!(modes.iter().all(|(_, mode)| *mode == 0o600), "{modes:?}");
}

on_both! {
    applied_rows_are_loaded_by_another_connection,
    versions_are_raised_row_by_row_and_never_used_again,
    a_row_that_changed_in_the_meantime_is_a_conflict,
    a_change_happens_whole_or_not_at_all,
    the_largest_change_goes_through,
    change_needing_approval_waits_for_another_actor,
    approved_change_with_a_new_effect_waits_again,
    there_is_a_most_of_changes_that_wait,
    the_tables_refuse_an_approval_of_ones_own,
    credential_related_to_the_author_cannot_approve,
    locked_store_is_busy_and_readable,
    change_needing_confirmation_is_not_applied_without_it,
    rejected_change_is_never_applied,
    rollback_restores_earlier_rows,
    a_rollback_of_one_change_minds_later_ones,
    change_is_rolled_back_after_later_changes_are,
    a_rollback_to_a_revision_undoes_all_after_it,
    a_rollback_can_be_proposed_like_any_change,
    history_is_paged,
    change_checked_against_an_old_revision_is_a_conflict,
    a_rule_in_an_emergency_is_not_deleted,
    emergencies_have_a_way_of_their_own,
    an_emergency_fits_its_rule_as_it_is_at_that_moment,
    emergencies_that_came_at_once_look_at_no_more_header_fields_than_may_be,
    there_is_a_most_of_emergencies_that_last,
    credentials_are_known_by_their_hash_only,
    there_is_a_most_of_credentials_and_expired_ones_make_room,
    writers_at_once_are_applied_one_after_the_other,
    clients_write_overrides_without_a_change,
    concurrent_writes_of_one_override_leave_the_last,
    overrides_of_clients_are_in_conflict_with_no_change,
    rollbacks_leave_overrides_of_clients_alone,
    overrides_have_a_maximum_in_the_store,
    watchers_are_notified_of_changes,
    tampering_with_the_tables_is_found,
    alarms_are_entries_of_the_audit_and_no_changes,
    servers_raise_an_alarm_once,
    alarms_stay_known_in_a_long_audit,
    edits_of_the_tables_are_named,
    many_edits_are_counted,
    entries_of_an_earlier_version_still_verify,
    an_audit_without_its_checkpoint_is_noticed,
    an_export_of_the_audit_holds_elsewhere,
    a_schema_of_a_later_version_is_refused,
}

async fn test_database(postgres: &Postgres, database: &str) -> TestDatabase {
    // Names of databases are truncated to 63 bytes. All names here are shorter.
    sql(postgres, &format!("CREATE DATABASE {database}")).await;
    TestDatabase { url: postgres.url(database) }
}

async fn sql(postgres: &Postgres, statement: &str) {
    let mut connection = sqlx::PgConnection::connect(&postgres.url("postgres")).await.expect("a connection");
    sqlx::raw_sql(sqlx::AssertSqlSafe(statement.to_owned())).execute(&mut connection).await.expect("done");
}

fn revision(revision: u64) -> StoreRevisions {
    StoreRevisions { revision, ..StoreRevisions::default() }
}

#[tokio::test]
async fn memory_is_a_store_for_as_long_as_it_is_open() {
    let test_database = TestDatabase { url: "sqlite::memory:".to_owned() };
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1)]).await;
    assert_eq!(store.clone().revisions().await.expect("heads"), revision(1));
    assert_eq!(test_database.store().await.revisions().await.expect("another"), StoreRevisions::default());
}

#[tokio::test]
async fn a_file_that_is_no_store_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let other = folder.path().join("notes.txt");
    std::fs::write(&other, "no database at all, and long enough to be seen as something else")
        .expect("written");
    for file in [other, folder.path().join("no/such/folder/rules.db")] {
        let address: Address = format!("sqlite:{}", file.display()).parse().expect("an address");
        let error = Store::open(&address).await.expect_err("no store").to_string();
        assert!(error.starts_with(&format!("rules: the store cannot be reached: {address}: ")), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_postgres_is_reported_and_recovers() {
    let mut postgres = Postgres::start();
    let test_database = test_database(&postgres, "rules").await;
    let store = test_database.store().await;
    let mut watch = store.watch(1);
    apply(&store, vec![put("a", 1)]).await;
    wait_for_heads(&mut watch, &store, revision(1)).await;
    postgres.kill();
    // The process of an open connection may outlive the server for a moment.
    let failed = async {
        loop {
            if let Err(error) = store.load().await {
                return error;
            }
        }
    };
    let error = tokio::time::timeout(START_TIME_MAX, failed).await.expect("killed");
    assert!(matches!(error, StoreError::Unreachable(_)), "{error:?}");
    assert!(error.to_string().starts_with("rules: the store cannot be reached: "), "{error}");
    let lost = async { while !matches!(watch.next().await, Signal::Lost(_)) {} };
    tokio::time::timeout(START_TIME_MAX, lost).await.expect("the watcher is notified");
    let error =
        Store::open(&test_database.url.parse().expect("an address")).await.expect_err("killed").to_string();
    assert!(error.contains("refused") && !error.contains("secret"), "{error}");
    postgres.restart();
    wait_for_heads(&mut watch, &store, revision(1)).await;
    apply(&store, vec![put("a", 2)]).await;
    wait_for_heads(&mut watch, &store, revision(2)).await;
    store.verify_audit(None).await.expect("nothing was lost");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disconnected_listener_catches_up_with_missed_changes() {
    let postgres = Postgres::start();
    let test_database = test_database(&postgres, "rules").await;
    let (store, writer) = (test_database.store().await, test_database.store().await);
    let mut watch = store.watch(1);
    wait_for_heads(&mut watch, &store, revision(0)).await;
    for number in 1..=3 {
        let cut = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%'";
        sql(&postgres, cut).await;
        apply(&writer, vec![put("a", number)]).await;
        wait_for_heads(&mut watch, &store, revision(u64::from(number))).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_notifies_watchers_that_do_not_poll() {
    let postgres = Postgres::start();
    let test_database = test_database(&postgres, "rules").await;
    let (store, writer) = (test_database.store().await, test_database.store().await);
    let mut watch = store.watch_looking(1, Some(Duration::from_hours(1)));
    // The first poll. After it the watch listens.
    wait_for_heads(&mut watch, &store, revision(0)).await;
    for number in 1..=2 {
        apply(&writer, vec![put("a", number)]).await;
        let signal =
            tokio::time::timeout(START_TIME_MAX, watch.next()).await.expect("the watcher is notified");
        assert_eq!(signal, Signal::MayHaveChanged);
        assert_eq!(store.revisions().await.expect("heads"), revision(u64::from(number)));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_that_takes_no_writes_is_still_followed() {
    let postgres = Postgres::start();
    let test_database = test_database(&postgres, "rules").await;
    let store = test_database.store().await;
    let mut watch = store.watch_looking(1, Some(Duration::from_millis(50)));
    wait_for_heads(&mut watch, &store, revision(0)).await;
    sql(&postgres, "ALTER SYSTEM SET default_transaction_read_only = on").await;
    sql(&postgres, "SELECT pg_reload_conf()").await;
    let mut change = 1;
    while store.put_alarm(AlarmSubject::Change(change), "many keys", by("ada")).await.is_ok() {
        change += 1;
    }
    test_database.tamper("BEGIN READ WRITE; UPDATE tidegate_heads SET revision = 7; COMMIT").await;
    let followed = async {
        loop {
            match watch.next().await {
                Signal::ReadOnly(_) if store.revisions().await.is_ok_and(|now| now == revision(7)) => break,
                Signal::MayHaveChanged | Signal::ReadOnly(_) => {}
                Signal::Lost(problem) => panic!("it is read: {problem}"),
            }
        }
    };
    tokio::time::timeout(START_TIME_MAX, followed).await.expect("the watcher is notified");
    sql(&postgres, "ALTER SYSTEM RESET default_transaction_read_only").await;
    sql(&postgres, "SELECT pg_reload_conf()").await;
    wait_for_heads(&mut watch, &store, revision(7)).await;
}

/// A database that is reached through a proxy.
async fn behind_a_proxy(postgres: &Postgres) -> (Proxy, TestDatabase) {
    let url = test_database(postgres, "rules").await.url;
    let proxy = Proxy::start(([127, 0, 0, 1], postgres.port()).into());
    let url = url.replace(&postgres.port().to_string(), &proxy.address().port().to_string());
    (proxy, TestDatabase { url })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_store_is_reported_and_recovers() {
    let postgres = Postgres::start();
    let (proxy, test_database) = behind_a_proxy(&postgres).await;
    let store = test_database.store().await;
    let mut watch = store.watch(1);
    wait_for_heads(&mut watch, &store, revision(0)).await;
    proxy.set(Traffic::HalfOpen);
    let error = store.revisions().await.expect_err("the store does not answer").to_string();
    assert_eq!(error, "rules: the store cannot be reached: it does not answer, tried for 5 s");
    let lost = async { while !matches!(watch.next().await, Signal::Lost(_)) {} };
    tokio::time::timeout(START_TIME_MAX, lost).await.expect("the watcher is notified");
    proxy.set(Traffic::Pass);
    wait_for_heads(&mut watch, &store, revision(0)).await;
    apply(&store, vec![put("a", 1)]).await;
    wait_for_heads(&mut watch, &store, revision(1)).await;
}

/// Holds every commit up until a lock is free.
const COMMITS_WAIT: &str = "CREATE FUNCTION hold() RETURNS trigger AS \
     'BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NULL; END' LANGUAGE plpgsql; \
     CREATE CONSTRAINT TRIGGER hold AFTER INSERT ON tidegate_audit DEFERRABLE INITIALLY DEFERRED \
     FOR EACH ROW EXECUTE FUNCTION hold()";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_is_made_again_after_a_lost_answer_happens_once() {
    let postgres = Postgres::start();
    let (proxy, test_database) = behind_a_proxy(&postgres).await;
    let store = test_database.store().await;
    let mut holder = sqlx::PgConnection::connect(&postgres.url("rules")).await.expect("a connection");
    sqlx::raw_sql(COMMITS_WAIT).execute(&mut holder).await.expect("the commit is blocked");
    sqlx::raw_sql("SELECT pg_advisory_lock(1)").execute(&mut holder).await.expect("locked");
    let wanted = proposal(0, vec![put("a", 1)]);
    let first = {
        let (store, wanted) = (store.clone(), wanted.clone());
        tokio::spawn(async move { store.apply_new(&wanted, false, by("ada")).await })
    };
    let waits = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted";
    while sqlx::query_scalar::<_, i64>(waits).fetch_one(&mut holder).await.expect("a number") == 0 {
        assert!(!first.is_finished(), "the commit is blocked");
    }
    proxy.set(Traffic::CutAnswers);
    sqlx::raw_sql("SELECT pg_advisory_unlock(1)").execute(&mut holder).await.expect("unlocked");
    let outcome = first.await.expect("no panic");
    assert!(matches!(outcome, Err(StoreError::Unreachable(_))), "{outcome:?}");
    proxy.set(Traffic::Pass);
    let again = store.apply_new(&wanted, false, by("ada")).await;
    assert!(matches!(again, Err(StoreError::Conflict(_))), "it was committed: {again:?}");
    assert_eq!(store.revisions().await.expect("heads"), revision(1));
    assert_eq!(store.verify_audit(None).await.expect("holds").count, 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_notification_names_the_revision() {
    let postgres = Postgres::start();
    let test_database = test_database(&postgres, "rules").await;
    let mut listener = sqlx::postgres::PgListener::connect(&test_database.url).await.expect("listens");
    listener.listen(CHANNEL).await.expect("listens");
    let store = test_database.store().await;
    apply(&store, vec![put("a", 1)]).await;
    // Not applied, so no notification.
    let stale = store.apply_new(&proposal(0, vec![put("a", 3)]), false, by("ada")).await;
    assert!(matches!(stale, Err(StoreError::Conflict(_))), "{stale:?}");
    apply(&store, vec![put("a", 2)]).await;
    for wanted in ["revision 1", "revision 2"] {
        let notification = tokio::time::timeout(START_TIME_MAX, listener.recv())
            .await
            .expect("in time")
            .expect("a notification");
        assert_eq!(notification.payload(), wanted);
    }
}

#[tokio::test]
async fn a_store_is_shown_without_its_password() {
    let address: Address = "postgres://ada:secret@127.0.0.1:1/rules".parse().expect("an address");
    let error = Store::open(&address).await.expect_err("no server at the address");
    for text in [address.to_string(), format!("{address:?}"), error.to_string(), format!("{error:?}")] {
        assert!(!text.contains("secret"), "{text}");
    }
    assert!(error.to_string().contains("postgres://ada@127.0.0.1:1/rules: "), "{error}");
    let memory = TestDatabase { url: "sqlite::memory:".to_owned() }.store().await;
    assert_eq!(memory.address().to_string(), "sqlite::memory:");
    assert!(format!("{memory:?}").contains("sqlite::memory:"), "{memory:?}");
}
