//! Several processes around one origin, in one: what they admit together, and what they do without it.

#![allow(clippy::expect_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::region::{Class, MemoryOrigin, Origin, OriginError, Policy, Region, Rung, Settings};
use tidegate::{Clock, Gate, Limit, Limiter, SystemClock};
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
        self.charged_of("per_user", key, key)
    }

    /// What it was told of a key of any limit, kept where `placement` says.
    fn charged_of(&self, limit: &str, key: &str, placement: &str) -> u64 {
        let name = format!("0:0:{}:{limit}{key}", limit.len()).into_bytes();
        let charged = |meter: &OriginMeter| meter.charged() - meter.refunded();
        self.inner
            .look(partition_of(placement.as_bytes()), |p| p.meter(&name).map_or(0, charged))
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
fn patient(origin: &Arc<Watched>, class: Class, limit: Limit) -> (Region, Gate) {
    let minute_us = 60_000_000;
    node(
        origin,
        class,
        limit,
        Settings { deadline_us: minute_us, hedge_us: minute_us, ..Settings::default() },
    )
}

/// A node that is soon tired of waiting.
fn hasty(origin: &Arc<Watched>, class: Class, limit: Limit) -> (Region, Gate) {
    node(origin, class, limit, Settings::default())
}

fn node(origin: &Arc<Watched>, class: Class, limit: Limit, settings: Settings) -> (Region, Gate) {
    let limiter = Limiter::builder().limit("per_user", limit).build().expect("a limiter");
    let origin = Arc::clone(origin) as Arc<dyn Origin>;
    let region = Region::join_as("", Arc::new(limiter), origin, settings).expect("a name");
    let gate = region.gate("", "per_user", class).expect("known");
    (region, gate)
}

async fn passes(node: &(Region, Gate), key: &str) -> bool {
    node.0.check(&[node.1.question(key)]).await.expect("one limit").is_allowed()
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
            let ruling = node.0.check(&[node.1.question("alice")]).await.expect("one limit");
            passed += u64::from(ruling.is_allowed());
            rungs.push(ruling.rung);
        }
        assert!(rungs.iter().all(|seen| *seen == rung), "{class:?}");
        assert!(passed <= most && (most == 0) == (passed == 0), "{class:?}: {passed}");
    }
}

#[tokio::test]
async fn who_is_left_alone_does_not_spend_again_what_all_have_used() {
    let origin = Watched::new();
    let node = hasty(&origin, Class::Comfort, Limit::gcra(100, MINUTE).expect("in range"));
    while passes(&node, "alice").await {}
    origin.is_gone.store(true, Ordering::Relaxed);
    let (mut alone, mut passed) = (0, 0);
    // Until one unit has drained it is decided by what the origin said last.
    while alone < 100 {
        let ruling = node.0.check(&[node.1.question("alice")]).await.expect("one limit");
        alone += u64::from(ruling.rung == Rung::Local);
        passed += u64::from(ruling.is_allowed());
    }
    // A part of the limit that begins anew would let all of them pass; less than two in a second drain.
    assert!(passed < 50, "{passed}");
    origin.is_gone.store(false, Ordering::Relaxed);
    node.0.leave().await;
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

/// Two limits of a region: what a user may do, and what all may do together.
fn two_limits(origin: &Arc<Watched>, per_user: u64, in_all: u64) -> (Region, Gate, Gate) {
    let (region, _) = patient(origin, Class::Security, Limit::gcra(1, MINUTE).expect("in range"));
    let gate = |name: &str, amount| {
        let limit = Limit::gcra(amount, MINUTE).expect("in range");
        region.gate_with("", name, limit, Policy::of(Class::Security)).expect("a tenant")
    };
    let (user, all) = (gate("user", per_user), gate("all", in_all));
    (region, user, all)
}

#[tokio::test]
async fn limits_of_one_placement_are_one_call_each_with_its_own_cost() {
    let origin = Watched::new();
    let (region, user, all) = two_limits(&origin, 100, 100);
    let questions = [user.question("alice").cost(2), all.question("everyone").cost(20).placed_by("alice")];
    assert!(region.check(&questions).await.expect("two limits").is_allowed());
    assert_eq!(origin.calls(), 1);
    region.leave().await;
    assert_eq!(origin.charged_of("user", "alice", "alice"), 2);
    assert_eq!(origin.charged_of("all", "everyone", "alice"), 20);
}

#[tokio::test]
async fn a_limit_that_crosses_placements_counts_all_of_them_and_gives_back_what_was_denied() {
    let origin = Watched::new();
    let nodes = [two_limits(&origin, 3, 10), two_limits(&origin, 3, 10)];
    let mut passed = 0;
    for turn in 0..60 {
        let (region, user, all) = &nodes[turn % 2];
        let name = format!("user{}", turn % 5);
        let ruling = region.check(&[user.question(&name), all.question("everyone")]).await;
        passed += u64::from(ruling.expect("two limits").is_allowed());
    }
    for (region, ..) in &nodes {
        region.leave().await;
    }
    // Five users of three each would make fifteen: all together stop at ten, and no user is charged for more than passed.
    let users: u64 =
        (0..5).map(|user| format!("user{user}")).map(|u| origin.charged_of("user", &u, &u)).sum();
    assert_eq!((passed, origin.charged_of("all", "everyone", "everyone"), users), (10, 10, 10));
}

#[tokio::test]
async fn what_is_given_back_can_be_spent_again() {
    let origin = Watched::new();
    let (region, user, _) = two_limits(&origin, 5, 5);
    let ask = || user.question("alice").cost(5);
    assert!(region.check(&[ask()]).await.expect("one limit").is_allowed());
    assert!(!region.check(&[ask()]).await.expect("one limit").is_allowed());
    region.refund([&ask()]);
    let comes_back = async {
        while !region.check(&[ask()]).await.expect("one limit").is_allowed() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), comes_back).await.expect("it came back");
}

#[tokio::test]
async fn who_pays_passes_without_the_origin_but_not_without_end() {
    let origin = Watched::new();
    origin.is_gone.store(true, Ordering::Relaxed);
    let limit = Limit::gcra(10, MINUTE).expect("in range");
    let (region, _) = hasty(&origin, Class::Cost, limit);
    let paid = Policy { paid: true, ..Policy::of(Class::Cost) };
    let gate = region.gate_with("", "paid", limit, paid).expect("a tenant");
    let ask = async |key: &str| region.check(&[gate.question(key).cost(10)]).await.expect("one limit");
    for _ in 0..20 {
        let ruling = ask("alice").await;
        assert_eq!((ruling.is_allowed(), ruling.rung), (true, Rung::Open), "far above its own limit");
    }
    let mut last = ask("bob").await;
    for _ in 0..1_000_000 {
        if !last.is_allowed() {
            break;
        }
        last = ask("bob").await;
    }
    assert_eq!((last.is_allowed(), last.rung), (false, Rung::Open), "above what a tenant has");
    let strict = region.gate_with("", "strict", limit, Policy::of(Class::Security)).expect("a tenant");
    let both = [gate.question("alice"), strict.question("alice")];
    assert_eq!(region.check(&both).await.expect("two limits").rung, Rung::Closed, "the strictest decides");
}
