//! Alarms about emergencies and changes, on one server and on several.

use super::*;

async fn declare(fixture: &Fixture, id: &str, action: &str, key: &str) {
    let created_ms = fixture.node.now_ms();
    let body =
        format!(r#"{{"action":"{action}","rule":"per_user","key":["{key}"],"created_ms":{created_ms}}}"#);
    let emergency = EmergencyRow { id: id.to_owned(), body, expires_ms: created_ms + 600_000 };
    fixture.store.put_emergency(&emergency, fixture.by()).await.expect("put");
}

/// The emergencies with an alarm, the latest first.
async fn alarms(fixture: &Fixture) -> Vec<String> {
    let alarms = fixture.control.alarms().await.expect("alarms");
    alarms.into_iter().filter_map(|alarm| alarm.emergency).collect()
}

#[tokio::test]
async fn emergency_that_denies_many_keys_raises_an_alarm() {
    let fixture = settled().await;
    declare(&fixture, "stop", "block", "*").await;
    declare(&fixture, "free", "allow", "vip-*").await;
    fixture.follow().await;
    fixture.flood_of("", 0..9, 400).await;
    fixture.flood_of("", 1_000..1_100, 2).await;
    assert_eq!(alarms(&fixture).await, [""; 0], "of few keys, and of unknown ones");
    fixture.flood().await;
    fixture.flood().await;
    assert_eq!(alarms(&fixture).await, ["stop"], "once");
    let words = "emergency \"stop\" denies 30 of 30 keys of rule \"per_user\"; it ends by itself";
    assert_eq!(fixture.control.last_alarm().expect("an alarm").reason, words);
    assert_eq!(fixture.store.emergencies().await.expect("read").1.len(), 2, "both are in force");
}

#[tokio::test]
async fn an_alarm_names_the_emergency_that_denies_the_keys() {
    let fixture = settled().await;
    declare(&fixture, "large", "block", "*").await;
    declare(&fixture, "trivial", "block", "somebody").await;
    fixture.follow().await;
    fixture.flood().await;
    assert_eq!(alarms(&fixture).await, ["large"]);
}

#[tokio::test]
async fn servers_raise_one_alarm_for_each_declaration() {
    let fixture = settled().await;
    let other = Fixture::start(fixture.clock.clone(), fixture.store.clone(), None).await;
    other.minute().await;
    fixture.minute().await;
    for count in 1..=2 {
        declare(&fixture, "stop", "block", "*").await;
        fixture.follow().await;
        fixture.flood().await;
        // The clock of this server has moved on, so the emergency looks later here.
        other.follow().await;
        other.flood().await;
        assert_eq!(alarms(&fixture).await.len(), count);
        fixture.store.end_emergency("stop", fixture.by()).await.expect("ended");
        fixture.follow().await;
        other.follow().await;
        other.minute().await;
        fixture.minute().await;
    }
}

#[tokio::test]
async fn a_server_without_the_traffic_shows_the_alarm() {
    let fixture = settled().await;
    let other = Fixture::start(fixture.clock.clone(), fixture.store.clone(), None).await;
    let approved = fixture.approve(1, 1).await;
    other.follow().await;
    fixture.flood().await;
    assert_eq!(fixture.alarms().await, [approved.id]);
    assert_eq!(other.control.last_alarm(), None);
    other.look().await;
    assert_eq!(other.control.last_alarm().and_then(|alarm| alarm.change), Some(approved.id));
}

#[tokio::test]
async fn emergency_that_arrives_with_rule_rows_is_watched() {
    let fixture = settled().await;
    declare(&fixture, "stop", "block", "*").await;
    let base_revision = fixture.store.revisions().await.expect("revisions").revision;
    let proposal = Proposal::new(base_revision, "a test", vec![put(RowKind::Rule, "other", OTHER)]);
    fixture.store.apply_new(&proposal, false, fixture.by()).await.expect("applied");
    fixture.control.take_rows(LoadDepth::Heads).await.expect("loaded");
    fixture.flood().await;
    assert_eq!(alarms(&fixture).await, ["stop"]);
}

/// Returns the alarms of a server that starts some minutes after an emergency.
async fn after_a_start(minutes: u64) -> Vec<String> {
    let folder = tempfile::tempdir().expect("a folder");
    let clock = TestClock::new();
    let store = Store::open(&"sqlite::memory:".parse().expect("an address")).await.expect("opens");
    let first = Fixture::start(clock.clone(), store.clone(), Some(folder.path())).await;
    first.put("per_user", &per_user(PLENTY)).await;
    clock.advance(Duration::from_mins(10));
    first.minute().await;
    first.minute().await;
    declare(&first, "stop", "block", "*").await;
    // The log is complete on disk once the server is gone.
    drop(first);
    clock.advance(Duration::from_mins(minutes));
    let second = Fixture::start(clock, store, Some(folder.path())).await;
    second.flood().await;
    alarms(&second).await
}

#[tokio::test]
async fn an_emergency_of_a_moment_ago_is_watched_after_a_start() {
    assert_eq!(after_a_start(1).await, ["stop"]);
    assert_eq!(after_a_start(5).await, [""; 0], "it is too old");
}
