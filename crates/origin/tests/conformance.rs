//! Every origin does the same: in memory, and on a real server, also while the server and the network misbehave.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

mod suite;
mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use suite::proxy::{Proxy, Replies};
use suite::{BURST, Lane, TIME_MAX, a_day, asks, config, conforms, open, spend_all, update};
use support::{Server, wait_until};
use tidegate_core::origin::Lapse;
use tidegate_origin::redis::{Certificates, RedisOrigin, Servers};
use tidegate_origin::{MemoryOrigin, Origin, OriginError};

fn wall_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

fn single(server: &Server) -> Arc<dyn Origin> {
    open(Servers::Single(server.url()))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_in_memory_conforms() {
    conforms(Arc::new(MemoryOrigin::new(wall_us))).await;
}

#[tokio::test]
async fn an_origin_in_memory_has_bounded_room() {
    let clock = Arc::new(std::sync::atomic::AtomicU64::new(1 << 50));
    let reads = Arc::clone(&clock);
    let memory = MemoryOrigin::with_meters_max(move || reads.load(Ordering::Relaxed), 10);
    let origin: Arc<dyn Origin> = Arc::new(memory);
    let mut lane = Lane::new(&origin, 1);
    let terms = a_day(Lapse::Counted, 1);
    for name in 0..10u8 {
        lane.ask(&[name], terms, 1, 1).await;
    }
    let newcomer = lane.next(vec![update(b"newcomer", terms)], Vec::new());
    assert!(matches!(origin.call(1, &newcomer).await, Err(OriginError::NotApplied(_))));
    assert_eq!(lane.ask(&[0], terms, 1, 200).await, 99, "who is there goes on");
    // A year later, everything has drained. What is over is dropped now and then, not with each call.
    clock.fetch_add(366 * 86_400_000_000, Ordering::Relaxed);
    assert_eq!(Lane::new(&origin, 1).ask(b"newcomer", terms, 1, 1).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_on_redis_conforms_and_leaves_nothing_without_an_end() {
    let server = Server::start(&[]);
    conforms(single(&server)).await;
    nothing_stays_for_ever(&mut server.connection());
}

fn nothing_stays_for_ever(connection: &mut redis::Connection) {
    let keys: Vec<Vec<u8>> = redis::cmd("KEYS").arg("*").query(connection).expect("keys");
    assert!(keys.len() > 100);
    for key in keys {
        assert!(key.starts_with(b"tg:{"), "{}", key.escape_ascii());
        let left: i64 = redis::cmd("PTTL").arg(&key).query(connection).expect("a time");
        assert!(left > 0, "{} stays for ever", key.escape_ascii());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_are_flushed_all_the_time_are_sent_again() {
    let server = Server::start(&[]);
    let done = Arc::new(AtomicBool::new(false));
    let (until, mut connection) = (Arc::clone(&done), server.connection());
    let flushing = std::thread::spawn(move || {
        let mut flushes = 0;
        while !until.load(Ordering::Relaxed) {
            redis::cmd("SCRIPT").arg("FLUSH").exec(&mut connection).expect("flushes");
            flushes += 1;
        }
        flushes
    });
    let origin = single(&server);
    for partition in 0..10 {
        assert_eq!(spend_all(&origin, partition, b"key", 8).await, (BURST, false));
    }
    done.store(true, Ordering::Relaxed);
    assert!(flushing.join().expect("no panic") > 100);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_whose_answer_is_lost_is_charged_once() {
    let server = Server::start(&[]);
    let proxy = Proxy::start(server.address()).await;
    let mut config = config(Servers::Single(proxy.url()));
    config.call_time_max = Duration::from_millis(300);
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let terms = a_day(Lapse::Counted, 1);
    let mut left = 200;
    for replies in [Replies::Drop, Replies::Cut, Replies::Delay(Duration::from_millis(900))] {
        let mut lane = Lane::new(&origin, 2);
        // Both connections are there before anything is done to them.
        let first = lane.next(vec![update(b"key", terms)], Vec::new());
        lane.make(&first).await;
        let call = lane.next(vec![update(b"key", terms)], vec![asks(&[(0, 7)], 1)]);
        proxy.set(replies);
        let lost = origin.call(2, &call).await;
        assert!(matches!(lost, Err(OriginError::Unknown(_))), "{replies:?}: {lost:?}");
        proxy.set(Replies::Pass);
        assert_eq!(lane.make(&call).await.asks[0].passed, 1);
        left -= 7;
    }
    left -= 100;
    assert_eq!(Lane::new(&origin, 2).ask(b"key", terms, 1, 200).await, left);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_stuck_is_answered_another_way() {
    let server = Server::start(&[]);
    let terms = a_day(Lapse::Counted, 1);
    for stuck in [0, 1] {
        let proxy = Proxy::start(server.address()).await;
        let origin: Arc<dyn Origin> = open(Servers::Single(proxy.url()));
        let mut lane = Lane::new(&origin, 2);
        let call = lane.next(vec![update(b"key", terms)], vec![asks(&[(0, 1)], 1)]);
        let both = async || tokio::join!(origin.call(2, &call), origin.hedge(2, &call));
        while !matches!(both().await, (Ok(_), Ok(_))) {}
        proxy.set(Replies::DropOn(stuck));
        let (direct, hedged) = both().await;
        assert_ne!(direct.is_ok(), hedged.is_ok(), "{direct:?}, {hedged:?}");
    }
    let origin = single(&server);
    assert_eq!(Lane::new(&origin, 2).ask(b"key", terms, 1, 200).await, 98);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_hangs_holds_nobody_and_is_found_again() {
    let server = Server::start(&[]);
    let mut config = config(Servers::Single(server.url()));
    config.call_time_max = Duration::from_millis(200);
    config.connect_time_max = Duration::from_millis(500);
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(&origin, 2);
    assert_eq!(lane.ask(b"key", terms, 1, 1).await, 1);
    server.signal("-STOP");
    let call = lane.next(vec![update(b"key", terms)], vec![asks(&[(0, 1)], 1)]);
    assert!(matches!(origin.call(2, &call).await, Err(OriginError::Unknown(_))));
    for _ in 0..10 {
        let answer = tokio::time::timeout(TIME_MAX, origin.call(2, &call)).await.expect("held for ever");
        assert!(answer.is_err());
    }
    server.signal("-CONT");
    assert_eq!(lane.make(&call).await.asks[0].passed, 1);
    assert_eq!(lane.ask(b"key", terms, 1, 200).await, 98);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_not_there_is_no_doubt_and_is_found_when_it_comes() {
    let mut server = Server::start(&[]);
    server.kill();
    let origin = single(&server);
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(&origin, 2);
    let call = lane.next(vec![update(b"key", terms)], vec![asks(&[(0, 1)], 1)]);
    let gone = origin.call(2, &call).await;
    assert!(matches!(gone, Err(OriginError::NotApplied(_))), "{gone:?}");
    server.restart();
    assert_eq!(lane.make(&call).await.asks[0].passed, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_there_may_be_are_turned_away() {
    let server = Server::start(&[]);
    let mut config = config(Servers::Single(server.url()));
    config.calls_max = 1;
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let mut lane = Lane::new(&origin, 2);
    let call = lane.next(vec![update(b"key", a_day(Lapse::Counted, 1))], Vec::new());
    lane.make(&call).await;
    server.signal("-STOP");
    let (first, second) = tokio::join!(origin.call(2, &call), origin.call(2, &call));
    assert!(matches!(first, Err(OriginError::Unknown(_))), "{first:?}");
    assert!(matches!(second, Err(OriginError::NotApplied(_))), "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_was_killed_counts_what_it_may_have_lost() {
    let cases: [(&str, &[&str]); 3] = [
        ("append-only file", &["--appendonly", "yes", "--appendfsync", "always"]),
        ("snapshot", &["--save", "3600", "1"]),
        ("nothing", &[]),
    ];
    for (kept, arguments) in cases {
        let mut server = Server::start(arguments);
        let origin = single(&server);
        let terms = a_day(Lapse::Counted, 1);
        let mut lane = Lane::new(&origin, 2);
        assert_eq!(lane.ask(b"key", terms, 1, 30).await, 30);
        if kept == "snapshot" {
            redis::cmd("SAVE").exec(&mut server.connection()).expect("saves");
            assert_eq!(lane.ask(b"key", terms, 1, 30).await, 30);
        }
        server.kill();
        server.restart();
        lane.until_full(b"key", terms).await;
        assert!(lane.lost, "{kept}");
        // A limit that forgives goes on from what is known.
        let forgives = Lane::new(&origin, 2).ask(b"other", a_day(Lapse::Forgiven, 1), 1, 100).await;
        assert_eq!(forgives, 100, "{kept}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_was_promoted_counts_what_it_may_not_have_heard() {
    let master = Server::start(&[]);
    let replica = Server::start(&["--replicaof", &format!("127.0.0.1 {}", master.port())]);
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(&single(&master), 2);
    assert_eq!(lane.ask(b"key", terms, 1, 30).await, 30);
    let _: i64 = redis::cmd("WAIT").arg(1).arg(60_000).query(&mut master.connection()).expect("heard");
    lane.origin = single(&replica);
    let call = lane.next(vec![update(b"key", terms)], vec![asks(&[(0, 1)], 1)]);
    let read_only = lane.origin.call(2, &call).await;
    assert!(matches!(read_only, Err(OriginError::NotApplied(_))), "{read_only:?}");
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.connection()).expect("promoted");
    lane.make(&call).await;
    lane.until_full(b"key", terms).await;
    assert!(lane.lost);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_and_a_user_with_a_password_are_spoken() {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let dir = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: String| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_string_lossy().into_owned()
    };
    let certificate = file("certificate.pem", made.cert.pem());
    let key = file("key.pem", made.signing_key.serialize_pem());
    let port = support::free_port();
    let server = Server::start(&[
        "--tls-port",
        &port.to_string(),
        "--tls-cert-file",
        &certificate,
        "--tls-key-file",
        &key,
        "--tls-ca-cert-file",
        &certificate,
        "--tls-auth-clients",
        "no",
    ]);
    // What the documentation says that it needs, and nothing else.
    let user = "SETUSER tide on >pass ~tg:* -@all +eval +evalsha +info +cluster|myid +time +get +set +pexpire +hget +hmget \
                +hset +hdel +zadd +zrem +zrangebyscore +zrevrangebyscore";
    let user: Vec<&str> = user.split_whitespace().collect();
    redis::cmd("ACL").arg(&user).exec(&mut server.connection()).expect("a user");
    let opened = |user: &str, roots| {
        let mut config = config(Servers::Single(format!("rediss://{user}@localhost:{port}/")));
        config.certificates = Certificates { roots, identity: None };
        RedisOrigin::open(config).expect("an address")
    };
    let roots = Some(made.cert.pem().into_bytes());
    let origin: Arc<dyn Origin> = Arc::new(opened("tide:pass", roots.clone()));
    assert_eq!(spend_all(&origin, 2, b"key", 4).await, (BURST, false));
    for (wrong, roots) in [("tide:wrong", roots), ("tide:pass", None)] {
        let origin: Arc<dyn Origin> = Arc::new(opened(wrong, roots));
        let call = Lane::new(&origin, 2).next(Vec::new(), Vec::new());
        let refused = origin.call(2, &call).await;
        assert!(matches!(refused, Err(OriginError::NotApplied(_))), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_that_sentinels_name_is_followed() {
    let master = Server::start(&[]);
    let replica = Server::start(&["--replicaof", &format!("127.0.0.1 {}", master.port())]);
    let conf = tempfile::NamedTempFile::new().expect("a file");
    let watch = format!("sentinel monitor tide 127.0.0.1 {} 1\n", master.port());
    std::fs::write(conf.path(), watch).expect("written");
    let sentinel = Server::start_sentinel(conf.path());
    let origin: Arc<dyn Origin> = open(Servers::Sentinel {
        sentinels: vec![sentinel.url()],
        name: "tide".to_owned(),
        master: "redis://master/".to_owned(),
    });
    let terms = a_day(Lapse::Forgiven, 1);
    let mut lane = Lane::new(&origin, 2);
    assert_eq!(lane.ask(b"key", terms, 1, 30).await, 30);
    let _: i64 = redis::cmd("WAIT").arg(1).arg(60_000).query(&mut master.connection()).expect("heard");
    wait_until("the sentinel to hand over", TIME_MAX, || {
        let mut connection = redis::Client::open(sentinel.url()).unwrap().get_connection().unwrap();
        redis::cmd("SENTINEL").arg("FAILOVER").arg("tide").exec(&mut connection).is_ok()
    });
    let role = |server: &Server| -> String {
        let answer: Vec<redis::Value> = redis::cmd("ROLE").query(&mut server.connection()).unwrap();
        redis::from_redis_value(answer[0].clone()).unwrap()
    };
    wait_until("the replica to be master", TIME_MAX, || role(&replica) == "master");
    wait_until("the master to be replica", TIME_MAX, || role(&master) == "slave");
    assert_eq!(lane.ask(b"key", terms, 1, 200).await, 70, "it is the other one, with all its data");
    // Which nobody can be sure of.
    lane.until_lost(b"key", terms).await;
}
