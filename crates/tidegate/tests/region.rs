//! Several processes around one origin, in one: what they admit together, and what they do without it.

#![allow(clippy::expect_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::region::{Class, MemoryOrigin, Origin, OriginError, Region, RegionGate, Rung, Settings};
use tidegate::{Clock, Limit, Limiter, SystemClock};
use tidegate_core::origin::{Call, OriginMeter, Reply};
use tidegate_origin::{Answer, partition_of};

const MINUTE: Duration = Duration::from_mins(1);

/// An origin in memory that counts its calls, and can be made to answer nothing.
struct Watched {
    inner: MemoryOrigin,
    calls: AtomicU64,
    is_gone: AtomicBool,
}

impl Watched {
    fn new() -> Arc<Self> {
        let clock = SystemClock::new();
        let inner = MemoryOrigin::new(move || clock.now().wall_us());
        Arc::new(Self { inner, calls: AtomicU64::new(0), is_gone: AtomicBool::new(false) })
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// What the origin was told of a key of the limit `per_user`.
    fn charged(&self, key: &str) -> u64 {
        let name = format!("0:8:per_user{key}").into_bytes();
        let charged = |meter: &OriginMeter| meter.charged() - meter.refunded();
        self.inner
            .look(partition_of(key.as_bytes()), |p| p.meter(&name).map_or(0, charged))
            .expect("a partition")
    }
}

impl Origin for Watched {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> Answer<'a> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            if self.is_gone.load(Ordering::Relaxed) {
                return std::future::pending::<Result<Reply, OriginError>>().await;
            }
            self.inner.call(partition, call).await
        })
    }
}

/// A node that waits for the origin however long it takes: a test may run on a machine that is slow.
fn patient(origin: &Arc<Watched>, class: Class, limit: Limit) -> (Region, RegionGate) {
    let minute_us = 60_000_000;
    node(
        origin,
        class,
        limit,
        Settings { deadline_us: minute_us, hedge_us: minute_us, ..Settings::default() },
    )
}

/// A node that is soon tired of waiting.
fn hasty(origin: &Arc<Watched>, class: Class, limit: Limit) -> (Region, RegionGate) {
    node(origin, class, limit, Settings::default())
}

fn node(origin: &Arc<Watched>, class: Class, limit: Limit, settings: Settings) -> (Region, RegionGate) {
    let limiter = Limiter::builder().limit("per_user", limit).build().expect("a limiter");
    let origin = Arc::clone(origin) as Arc<dyn Origin>;
    let region = Region::join_with(Arc::new(limiter), origin, settings).expect("a name");
    let gate = region.gate("", "per_user", class).expect("known");
    (region, gate)
}

async fn passes(node: &(Region, RegionGate), key: &str) -> bool {
    node.0.check(key, &[node.1.key(key)], 1).await.expect("one limit").is_allowed()
}

#[tokio::test]
async fn nodes_admit_together_what_one_would() {
    for limit in [Limit::gcra(100, MINUTE), Limit::sliding_window(100, MINUTE)] {
        let (origin, limit) = (Watched::new(), limit.expect("in range"));
        let nodes: Vec<_> = (0..4).map(|_| patient(&origin, Class::Security, limit)).collect();
        let mut passed = 0;
        for turn in 0..4_000 {
            passed += u64::from(passes(&nodes[turn % 4], "alice").await);
        }
        // A drain of a hundred a minute may add one while this runs, not more.
        assert!((90..=102).contains(&passed), "{passed}");
        for (region, _) in &nodes {
            region.leave().await;
        }
        assert_eq!(origin.charged("alice"), passed, "what passed is what the origin was told");
    }
}

#[tokio::test]
async fn a_thousand_cold_requests_are_one_call() {
    let origin = Watched::new();
    let limit = Limit::gcra(100, MINUTE).expect("in range");
    let node = Arc::new(patient(&origin, Class::Security, limit));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..1_000 {
        let node = Arc::clone(&node);
        tasks.spawn(async move { passes(&node, "alice").await });
    }
    let passed = tasks.join_all().await.into_iter().filter(|passed| *passed).count();
    assert_eq!((passed, origin.calls()), (100, 1));
}

#[tokio::test]
async fn a_warm_key_is_decided_without_a_call() {
    let origin = Watched::new();
    let node = patient(&origin, Class::Comfort, Limit::gcra(1_000_000, MINUTE).expect("in range"));
    for _ in 0..20_000 {
        assert!(passes(&node, "alice").await);
    }
    let stats = node.0.stats();
    assert!(stats.waited * 50 < 20_000, "{stats:?}");
}

#[tokio::test]
async fn without_the_origin_the_class_decides() {
    let limit = Limit::gcra(100, MINUTE).expect("in range");
    for (class, rung, most) in [
        (Class::Comfort, Rung::Local, 101),
        (Class::Cost, Rung::Closed, 0),
        (Class::Security, Rung::Closed, 0),
    ] {
        let origin = Watched::new();
        origin.is_gone.store(true, Ordering::Relaxed);
        let node = hasty(&origin, class, limit);
        let (mut passed, mut rungs) = (0, Vec::new());
        for _ in 0..1_000 {
            let ruling = node.0.check("alice", &[node.1.key("alice")], 1).await.expect("one limit");
            passed += u64::from(ruling.is_allowed());
            rungs.push(ruling.rung);
        }
        assert!(rungs.iter().all(|seen| *seen == rung), "{class:?}");
        assert!(passed <= most && (most == 0) == (passed == 0), "{class:?}: {passed}");
    }
}

#[tokio::test]
async fn what_passed_without_the_origin_is_told_when_it_is_back() {
    let origin = Watched::new();
    let node = hasty(&origin, Class::Comfort, Limit::gcra(100, MINUTE).expect("in range"));
    assert!(passes(&node, "alice").await);
    origin.is_gone.store(true, Ordering::Relaxed);
    let mut passed = 1;
    for _ in 0..50 {
        passed += u64::from(passes(&node, "alice").await);
    }
    origin.is_gone.store(false, Ordering::Relaxed);
    node.0.leave().await;
    assert_eq!(origin.charged("alice"), passed);
}
