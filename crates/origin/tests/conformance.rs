//! Every origin does the same: in memory, and on a real server, also while the server and the
//! network misbehave.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

mod suite;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use suite::{
    BURST, TIME_MAX, TestSession, a_day, checks, config, conforms, documented_user, gather, open, spend_all,
    update,
};
use tidegate_core::origin::{
    Component, ComponentTotals, Lapse, MergeRequest, RegionId, RoundRequest, UNDECIDED,
};
use tidegate_origin::redis::{LINKS, RedisCertificates, RedisOrigin, Servers};
use tidegate_origin::{LeaseReply, LeaseRequest, MemoryOrigin, Origin, OriginError, ProbeReply};
use tidegate_testkit::{APPEND_ONLY, Proxy, Redis, SNAPSHOTS, Signal, TlsRedis, Traffic, ask, wait_until};

fn wall_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
    u64::try_from(since.as_micros()).expect("before the year 500,000")
}

fn single(server: &Redis) -> Arc<dyn Origin> {
    open(Servers::Single(server.url()))
}

#[tokio::test(flavor = "multi_thread")]
async fn probe_finds_a_store_that_refuses_calls_or_may_evict() {
    assert_eq!(MemoryOrigin::new(wall_us).probe().await, Ok(ProbeReply::default()));
    let master = Redis::start(&["--maxmemory-policy", "allkeys-lru"]);
    let origin = single(&master);
    let reply = origin.probe().await.expect("it replies");
    assert_eq!(reply.eviction_policy.as_deref(), Some("allkeys-lru"));
    assert_eq!(master.keys(), [], "a probe writes nothing");
    let replica = Redis::start_replica(&master);
    let refused = single(&replica).probe().await;
    let Err(OriginError::NotApplied(cause)) = refused else { panic!("{refused:?}") };
    assert!(cause.to_lowercase().contains("read only"), "{cause}");
    ask::<String>(&master, &["ACL", "SETUSER", "reader", "on", ">password", "~*", "+info", "+ping"]);
    let url = master.url().replacen("://", "://reader:password@", 1);
    let refused = open(Servers::Single(url)).probe().await;
    let Err(OriginError::NotApplied(cause)) = refused else { panic!("{refused:?}") };
    assert!(cause.to_lowercase().contains("no permissions"), "{cause}");
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
    let mut session = TestSession::new(&origin, 1);
    let terms = a_day(Lapse::Counted, 1);
    for name in 0..10u8 {
        session.ask(&[name], terms, 1, 1).await;
    }
    let updates = vec![update(b"first", terms), update(&[0], terms), update(b"second", terms)];
    let waiting = vec![checks(&[(0, 1)], 2), checks(&[(1, 1)], 200), checks(&[(1, 1), (2, 1)], 1)];
    let crowded = session.next(updates, waiting);
    let reply = session.make(&crowded).await;
    let decided: Vec<_> = reply.checks.iter().map(|decided| (decided.passed, decided.denied_by)).collect();
    assert_eq!(decided, [(0, UNDECIDED), (99, 1), (0, UNDECIDED)], "meters in the store keep deciding");
    let rooms: Vec<u64> = reply.meters.iter().map(|meter_reply| meter_reply.room).collect();
    assert_eq!(rooms, [BURST, 0, BURST]);
    assert_eq!(origin.call(1, &crowded).await, Ok(reply), "a repeated call gets the same reply");
    assert_eq!(session.ask(&[1], terms, 1, 200).await, 99);
    let component = Component {
        key: Box::from(*b"of another region"),
        terms: suite::cross_region(1),
        incarnation: 1,
        totals: ComponentTotals::Drained { charged: 7, refunded: 0, level: 7 },
    };
    let merge = MergeRequest { from: RegionId(1), components: vec![component] };
    assert_eq!(
        origin.merge(1, &merge).await.map(|merged| merged.charged),
        Ok(0),
        "a merge into a full store does not wait"
    );
    // A year later all meters have drained, and expired ones make room for the next key.
    clock.fetch_add(366 * 86_400_000_000, Ordering::Relaxed);
    assert_eq!(TestSession::new(&origin, 1).ask(b"first", terms, 1, 1).await, 1);
    assert_eq!(origin.merge(1, &merge).await.map(|merged| merged.charged), Ok(7));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_origin_on_redis_conforms_and_leaves_nothing_without_an_end() {
    let server = Redis::start(&[]);
    conforms(single(&server)).await;
    let keys = server.keys();
    assert!(keys.len() > 100);
    for (key, left) in keys {
        assert!(key.starts_with(b"tg2:{"), "{}", key.escape_ascii());
        assert!(left > 0, "{} has no expiry", key.escape_ascii());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn scripts_that_are_flushed_all_the_time_are_sent_again() {
    let server = Redis::start(&[]);
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
async fn retried_call_renews_the_expiry_of_its_reply() {
    const SHORT_MS: i64 = 60_000;
    let server = Redis::start(&[]);
    let origin: Arc<dyn Origin> = single(&server);
    let mut session = TestSession::new(&origin, 3);
    let call = session.next(vec![update(b"key", a_day(Lapse::Counted, 1))], Vec::new());
    let reply = session.make(&call).await;
    let kept = || {
        let is_lane = |(key, _): &(Vec<u8>, i64)| key.windows(3).any(|part| part == b":n:");
        server.keys().into_iter().find(is_lane).expect("a session")
    };
    let (key, _) = kept();
    redis::cmd("PEXPIRE").arg(&key).arg(SHORT_MS).exec(&mut server.connection()).expect("it is there");
    assert!(kept().1 <= SHORT_MS);
    assert_eq!(origin.call(3, &call).await, Ok(reply));
    assert!(kept().1 > SHORT_MS);
}

#[tokio::test(flavor = "multi_thread")]
async fn call_with_a_lost_reply_is_charged_once() {
    let server = Redis::start(&[]);
    let proxy = Proxy::start(server.address());
    let mut config = config(Servers::Single(proxy.url()));
    config.call_time_max = Duration::from_millis(300);
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let terms = a_day(Lapse::Counted, 1);
    let mut left = 200;
    for traffic in
        [Traffic::DropAnswers, Traffic::CutAnswers, Traffic::DelayAnswers(Duration::from_millis(900))]
    {
        let mut session = TestSession::new(&origin, 2);
        // The connection is open before the proxy disturbs it.
        let first = session.next(vec![update(b"key", terms)], Vec::new());
        session.make(&first).await;
        let call = session.next(vec![update(b"key", terms)], vec![checks(&[(0, 7)], 1)]);
        proxy.set(traffic);
        let lost = origin.call(2, &call).await;
        assert!(matches!(lost, Err(OriginError::Unknown(_))), "{traffic:?}: {lost:?}");
        proxy.set(Traffic::Pass);
        assert_eq!(session.make(&call).await.checks[0].passed, 1);
        left -= 7;
    }
    left -= 100;
    assert_eq!(TestSession::new(&origin, 2).ask(b"key", terms, 1, 200).await, left);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_that_is_stuck_is_answered_another_way() {
    let terms = a_day(Lapse::Counted, 1);
    let mut stuck = 0;
    // Only the origin knows which connection carries which call, and it has more connections than
    // these two calls use.
    for which in (0..LINKS).cycle().take(10 * LINKS) {
        let server = Redis::start(&[]);
        let proxy = Proxy::start(server.address());
        let origin: Arc<dyn Origin> = open(Servers::Single(proxy.url()));
        let mut session = TestSession::new(&origin, 2);
        let call = session.next(vec![update(b"key", terms)], vec![checks(&[(0, 1)], 1)]);
        let both = async || tokio::join!(origin.call(2, &call), origin.hedge(2, &call));
        // Until the second connection is there, both calls go through the first.
        let deadline = Instant::now() + TIME_MAX;
        while !matches!(both().await, (Ok(_), Ok(_))) || callers(&server) < 2 {
            assert!(Instant::now() < deadline, "{} connections made a call", callers(&server));
        }
        proxy.set(Traffic::DropAnswersOn(which));
        let (direct, hedged) = both().await;
        assert!(direct.is_ok() || hedged.is_ok(), "{direct:?}, {hedged:?}");
        assert_eq!(TestSession::new(&single(&server), 2).ask(b"key", terms, 1, 200).await, 99);
        stuck += usize::from(direct.is_ok() != hedged.is_ok());
        if stuck == 2 {
            return;
        }
    }
    panic!("of {} calls {stuck} were stuck", 10 * LINKS);
}

/// How many connections have made a call.
fn callers(server: &Redis) -> usize {
    let clients: String = ask(server, &["CLIENT", "LIST"]);
    clients.lines().filter(|client| client.contains(" cmd=eval")).count()
}

#[tokio::test(flavor = "multi_thread")]
async fn hanging_store_blocks_no_call_and_recovers() {
    let server = Redis::start(&[]);
    let mut config = config(Servers::Single(server.url()));
    config.call_time_max = Duration::from_millis(200);
    config.connect_time_max = Duration::from_millis(500);
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(&origin, 2);
    assert_eq!(session.ask(b"key", terms, 1, 1).await, 1);
    server.signal(Signal::STOP);
    let call = session.next(vec![update(b"key", terms)], vec![checks(&[(0, 1)], 1)]);
    assert!(matches!(origin.call(2, &call).await, Err(OriginError::Unknown(_))));
    for _ in 0..10 {
        let answer =
            tokio::time::timeout(TIME_MAX, origin.call(2, &call)).await.expect("the call ends in time");
        assert!(answer.is_err());
    }
    server.signal(Signal::CONT);
    assert_eq!(session.make(&call).await.checks[0].passed, 1);
    assert_eq!(session.ask(b"key", terms, 1, 200).await, 98);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_not_there_is_no_doubt_and_is_found_when_it_comes() {
    let mut server = Redis::start(&[]);
    server.kill();
    let origin = single(&server);
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(&origin, 2);
    let call = session.next(vec![update(b"key", terms)], vec![checks(&[(0, 1)], 1)]);
    let gone = origin.call(2, &call).await;
    assert!(matches!(gone, Err(OriginError::NotApplied(_))), "{gone:?}");
    server.restart();
    assert_eq!(session.make(&call).await.checks[0].passed, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn more_calls_than_there_may_be_are_turned_away() {
    let server = Redis::start(&[]);
    let mut config = config(Servers::Single(server.url()));
    config.calls_max = 1;
    let origin: Arc<dyn Origin> = Arc::new(RedisOrigin::open(config).expect("an address"));
    let mut session = TestSession::new(&origin, 2);
    let call = session.next(vec![update(b"key", a_day(Lapse::Counted, 1))], Vec::new());
    session.make(&call).await;
    server.signal(Signal::STOP);
    let (first, second) = tokio::join!(origin.call(2, &call), origin.call(2, &call));
    assert!(matches!(first, Err(OriginError::Unknown(_))), "{first:?}");
    assert!(matches!(second, Err(OriginError::NotApplied(_))), "{second:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_store_counts_possibly_lost_writes() {
    let cases: [(&str, &[&str]); 3] =
        [("append-only file", APPEND_ONLY), ("snapshot", SNAPSHOTS), ("nothing", &[])];
    for (kept, arguments) in cases {
        let mut server = Redis::start(arguments);
        let origin = single(&server);
        let terms = a_day(Lapse::Counted, 1);
        let mut session = TestSession::new(&origin, 2);
        assert_eq!(session.ask(b"key", terms, 1, 30).await, 30);
        if kept == "snapshot" {
            redis::cmd("SAVE").exec(&mut server.connection()).expect("saves");
            assert_eq!(session.ask(b"key", terms, 1, 30).await, 30);
        }
        server.kill();
        server.restart();
        session.until_full(b"key", terms).await;
        assert!(session.lost, "{kept}");
        // A limit with `Lapse::Forgiven` continues from the known state.
        let forgives = TestSession::new(&origin, 2).ask(b"other", a_day(Lapse::Forgiven, 1), 1, 100).await;
        assert_eq!(forgives, 100, "{kept}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn promoted_replica_counts_possibly_lost_writes() {
    let master = Redis::start(&[]);
    let replica = Redis::start_replica(&master);
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(&single(&master), 2);
    assert_eq!(session.ask(b"key", terms, 1, 30).await, 30);
    let _: i64 = redis::cmd("WAIT").arg(1).arg(60_000).query(&mut master.connection()).expect("replicated");
    session.origin = single(&replica);
    let call = session.next(vec![update(b"key", terms)], vec![checks(&[(0, 1)], 1)]);
    let read_only = session.origin.call(2, &call).await;
    assert!(matches!(read_only, Err(OriginError::NotApplied(_))), "{read_only:?}");
    redis::cmd("REPLICAOF").arg("NO").arg("ONE").exec(&mut replica.connection()).expect("promoted");
    session.make(&call).await;
    session.until_full(b"key", terms).await;
    assert!(session.lost);
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_and_a_user_with_a_password_are_spoken() {
    let server = TlsRedis::start();
    redis::cmd("ACL").arg(documented_user()).exec(&mut server.redis.connection()).expect("a user");
    let opened = |user: &str, roots| {
        let mut config = config(Servers::Single(format!("rediss://{user}@localhost:{}/", server.port)));
        config.certificates = RedisCertificates { roots, identity: None };
        RedisOrigin::open(config).expect("an address")
    };
    let roots = Some(server.roots.clone());
    let origin: Arc<dyn Origin> = Arc::new(opened("tide:password", roots.clone()));
    assert_eq!(spend_all(&origin, 2, b"key", 4).await, (BURST, false));
    let round = RoundRequest { connected_for_us: 1, settled: false, clock_us: 0, trim: 1, after: 0, most: 1 };
    assert_eq!(gather(&origin, 2, round).await.components, []);
    let request = LeaseRequest { holder: 1, for_us: 1_000_000, lag_us: 0 };
    assert_eq!(origin.lease(request).await, Ok(LeaseReply { is_held: true, lag_us: 0 }));
    assert_eq!(origin.probe().await, Ok(ProbeReply::default()));
    for (wrong, roots) in [("tide:wrong", roots), ("tide:password", None)] {
        let origin: Arc<dyn Origin> = Arc::new(opened(wrong, roots));
        let call = TestSession::new(&origin, 2).next(Vec::new(), Vec::new());
        let refused = origin.call(2, &call).await;
        assert!(matches!(refused, Err(OriginError::NotApplied(_))), "{refused:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_master_that_sentinels_name_is_followed() {
    let master = Redis::start(&[]);
    let replica = Redis::start_replica(&master);
    let sentinel = Redis::start_sentinel(&master, "tide");
    let origin: Arc<dyn Origin> = open(Servers::Sentinel {
        sentinels: vec![sentinel.url()],
        name: "tide".to_owned(),
        master: "redis://master/".to_owned(),
    });
    let terms = a_day(Lapse::Forgiven, 1);
    let mut session = TestSession::new(&origin, 2);
    assert_eq!(session.ask(b"key", terms, 1, 30).await, 30);
    let _: i64 = redis::cmd("WAIT").arg(1).arg(60_000).query(&mut master.connection()).expect("replicated");
    wait_until("the sentinel to fail over", TIME_MAX, || {
        let mut connection = redis::Client::open(sentinel.url()).unwrap().get_connection().unwrap();
        redis::cmd("SENTINEL").arg("FAILOVER").arg("tide").exec(&mut connection).is_ok()
    });
    // A server that changes its role disconnects its clients, including the test.
    let role = |server: &Redis| -> redis::RedisResult<String> {
        let answer: Vec<redis::Value> = redis::cmd("ROLE").query(&mut server.try_connection()?)?;
        Ok(redis::from_redis_value(answer[0].clone())?)
    };
    wait_until("the replica to be master", TIME_MAX, || role(&replica).is_ok_and(|role| role == "master"));
    wait_until("the master to be replica", TIME_MAX, || role(&master).is_ok_and(|role| role == "slave"));
    assert_eq!(session.ask(b"key", terms, 1, 200).await, 70, "the new master has all data");
    // The origin cannot know that no write was lost, so it reports a loss.
    session.until_lost(b"key", terms).await;
}
