//! An origin on a cluster passes the conformance suite, even while slots move and masters change.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

mod suite;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use suite::{
    BURST, TIME_MAX, TestSession, a_day, config, conforms, documented_user, is_of_suite, open, spend_all,
    update,
};
use tidegate_core::origin::Lapse;
use tidegate_origin::redis::{RedisOrigin, Servers};
use tidegate_origin::{Origin, PARTITIONS};
use tidegate_testkit::{Cluster, ask, wait_until};

/// How many slots move from one master to the next, of 16,384.
const SLOTS_MOVED: u64 = 400;

/// A key that the origin has in a partition.
fn key_of(partition: u16) -> String {
    format!("tg2:{{{partition}}}:s")
}

/// Returns the partitions with slots below `end`.
fn partitions_below(cluster: &Cluster, end: u64) -> Vec<u16> {
    let keys: Vec<String> = (0..PARTITIONS).map(key_of).collect();
    let slots = cluster.slots(&keys);
    (0..PARTITIONS).zip(slots).filter(|(_, slot)| *slot < end).map(|(partition, _)| partition).collect()
}

fn open_cluster(cluster: &Cluster) -> Arc<dyn Origin> {
    open(Servers::Cluster(cluster.urls()))
}

/// Opens an origin on a cluster as a user with exactly the documented permissions.
fn open_as_documented(cluster: &Cluster) -> Arc<dyn Origin> {
    for server in &cluster.servers {
        ask::<String>(server, &[&["ACL"], &documented_user()[..]].concat());
    }
    let urls = cluster.urls().into_iter().map(|url| url.replacen("://", "://tide:password@", 1));
    let mut config = config(Servers::Cluster(urls.collect()));
    // No reply is lost in this test, so a slow reply must not cause a retry.
    config.call_time_max = TIME_MAX;
    Arc::new(RedisOrigin::open(config).expect("an address"))
}

/// How many slots move at least while the suite runs, which takes a second or two on a machine that
/// is idle.
const MOVES_MIN: usize = 5;

/// Moves the slots of the suite from master to master until `until` is set. Returns the number of
/// moves.
fn move_slots(cluster: &Cluster, until: &AtomicBool) -> usize {
    let keys: Vec<String> = (0..PARTITIONS).filter(|partition| is_of_suite(*partition)).map(key_of).collect();
    let (slots, masters) = (cluster.slots(&keys), cluster.masters());
    let moves = (0..).flat_map(|round| slots.iter().enumerate().map(move |(at, slot)| (*slot, at + round)));
    let moves = moves.take_while(|_| !until.load(Ordering::Relaxed));
    moves.map(|(slot, turn)| cluster.move_slot(slot, masters[turn % masters.len()])).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_on_a_cluster_conforms_while_slots_move_and_leaves_nothing_without_an_end() {
    let cluster = Arc::new(Cluster::start());
    let origin = open_as_documented(&cluster);
    origin.probe().await.expect("the cluster replies");
    let done = Arc::new(AtomicBool::new(false));
    let (moved, until) = (Arc::clone(&cluster), Arc::clone(&done));
    let moving = std::thread::spawn(move || move_slots(&moved, &until));
    conforms(origin).await;
    done.store(true, Ordering::Relaxed);
    let count = moving.join().expect("no panic");
    assert!(count >= MOVES_MIN, "{count} moves");
    let mut seen = 0;
    for number in cluster.masters() {
        let keys = cluster.servers[number].keys();
        for (key, left) in &keys {
            assert!(*left > 0, "{} of server {number} has no expiry", key.escape_ascii());
        }
        seen += keys.len();
    }
    assert!(seen > 100);
}

/// How many probes reach every partition.
const PROBES: usize = 16;

#[tokio::test(flavor = "multi_thread")]
async fn probes_reach_every_shard_and_stay_with_one_that_fails() {
    let cluster = Cluster::start();
    let mut config = config(Servers::Cluster(cluster.urls()));
    // A slow reply must not count as a failure.
    config.call_time_max = TIME_MAX;
    let origin = RedisOrigin::open(config).expect("an address");
    let first = cluster.owner(&key_of(0));
    let other = cluster.masters().into_iter().find(|master| Some(*master) != first).expect("a master");
    let other = &cluster.servers[other];
    ask::<String>(other, &["CONFIG", "SET", "maxmemory-policy", "allkeys-lru"]);
    for _ in 0..PROBES {
        origin.probe().await.expect("the cluster replies");
    }
    for _ in 0..PROBES {
        let policy = origin.probe().await.expect("the cluster replies").eviction_policy;
        assert_eq!(policy.as_deref(), Some("allkeys-lru"), "also when a probe tries other shards");
    }
    ask::<String>(other, &["CONFIG", "SET", "maxmemory-policy", "noeviction"]);

    ask::<String>(other, &["ACL", "SETUSER", "default", "-pexpire"]);
    let mut is_failed = false;
    for _ in 0..PROBES {
        let failed = origin.probe().await.is_err();
        assert!(failed || !is_failed, "a shard that fails does not seem to recover");
        is_failed = failed;
    }
    assert!(is_failed, "a shard went unseen");
    ask::<String>(other, &["ACL", "SETUSER", "default", "+pexpire"]);
    for _ in 0..PROBES {
        origin.probe().await.expect("the shard replies again");
    }
    assert_eq!(origin.probe().await.expect("it replies").eviction_policy, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_on_a_cluster_conforms_after_every_master_handed_over() {
    let cluster = Cluster::start();
    let origin = open_cluster(&cluster);
    for master in cluster.masters() {
        // One that the suite does not use, since a limit that must hold counts as full there from
        // now on.
        let is_there = |partition: &u16| cluster.owner(&key_of(*partition)) == Some(master);
        let other = (0..PARTITIONS).filter(|partition| !is_of_suite(*partition)).find(is_there);
        let mut session = TestSession::new(&origin, other.expect("a partition of each master"));
        assert_eq!(session.ask(b"before", a_day(Lapse::Counted, 1), 1, 40).await, 40);
        let (_, replica) = cluster.owner_and_replica(&key_of(session.partition));
        ask::<String>(&cluster.servers[replica], &["CLUSTER", "FAILOVER"]);
        wait_until("the replica to take over", TIME_MAX, || cluster.is_master(replica));
        cluster.wait_until_whole();
        session.until_full(b"before", a_day(Lapse::Counted, 1)).await;
    }
    conforms(origin).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_lost_or_charged_twice_while_slots_move() {
    let cluster = Cluster::start();
    let origin = open_cluster(&cluster);
    // Meters that are in use before their slots move. A move takes the lowest slots that there are.
    let partitions: Vec<u16> = partitions_below(&cluster, SLOTS_MOVED).into_iter().take(16).collect();
    for partition in &partitions {
        let passed =
            TestSession::new(&origin, *partition).ask(b"before", a_day(Lapse::Counted, 1), 1, 40).await;
        assert_eq!(passed, 40);
    }
    let address = cluster.servers[0].address().to_string();
    let ids: Vec<String> = cluster.masters().into_iter().map(|master| cluster.id(master)).collect();
    let moving = std::thread::spawn(move || {
        for (from, to) in [(0, 1), (1, 2), (2, 0)] {
            let (from, to) = (ids[from].as_str(), ids[to].as_str());
            let count = SLOTS_MOVED.to_string();
            let whence = ["--cluster-from", from, "--cluster-to", to, "--cluster-slots", &count];
            cluster.wait_until_agreed();
            Cluster::manage(&[&["reshard", &address], &whence[..]].concat());
        }
        cluster
    });
    let mut rounds = 0;
    while !moving.is_finished() {
        for &partition in &partitions {
            let key: &'static [u8] = Box::leak(format!("hot {rounds}").into_bytes().into_boxed_slice());
            assert_eq!(spend_all(&origin, partition, key, 4).await, (BURST, false), "partition {partition}");
        }
        rounds += 1;
    }
    let cluster = moving.join().expect("moved");
    assert!(rounds > 0);
    for &partition in &partitions {
        let mut session = TestSession::new(&origin, partition);
        assert_eq!(
            session.ask(b"before", a_day(Lapse::Counted, 1), 1, 200).await,
            60,
            "partition {partition}"
        );
        assert!(!session.lost);
    }
    drop(cluster);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_that_must_hold_does_so_when_masters_hand_over_or_die() {
    let mut cluster = Cluster::start();
    let origin = open_cluster(&cluster);
    for (partition, dies) in [(10, false), (11, true)] {
        let (master, replica) = cluster.owner_and_replica(&key_of(partition));
        let mut session = TestSession::new(&origin, partition);
        assert_eq!(session.ask(b"key", a_day(Lapse::Counted, 1), 1, 40).await, 40);
        let spending = {
            let origin = Arc::clone(&origin);
            tokio::spawn(async move { spend_all(&origin, partition, b"hot", 4).await })
        };
        if dies {
            cluster.servers[master].kill();
            others_go_on(&cluster, &origin, master).await;
        } else {
            ask::<String>(&cluster.servers[replica], &["CLUSTER", "FAILOVER"]);
        }
        wait_until("the replica to take over", TIME_MAX, || cluster.is_master(replica));
        let (spent, _) = spending.await.expect("no panic");
        assert!(spent <= BURST, "{spent} were spent, dies: {dies}");
        session.until_full(b"key", a_day(Lapse::Counted, 1)).await;
        let others =
            TestSession::new(&origin, partition).ask(b"new", a_day(Lapse::Forgiven, 1), 1, 200).await;
        assert_eq!(others, 100, "a limit with forgiven lapses still admits, dies: {dies}");
        if !dies {
            cluster.wait_until_whole();
        }
    }
}

/// While one master is down, the partitions of the others reply at once.
async fn others_go_on(cluster: &Cluster, origin: &Arc<dyn Origin>, dead: usize) {
    let elsewhere = (20..PARTITIONS)
        .find(|partition| cluster.owner(&key_of(*partition)).is_some_and(|owner| owner != dead));
    let mut session = TestSession::new(origin, elsewhere.expect("another master"));
    for _ in 0..200 {
        let call = session.next(vec![update(b"steady", a_day(Lapse::Counted, 1))], Vec::new());
        let answer = origin.call(session.partition, &call).await;
        assert!(answer.is_ok(), "{answer:?}");
    }
}
