//! Several nodes around one origin, in one process: their total admissions, and their decisions
//! without the origin.

#![allow(clippy::expect_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::region::{
    CallError, Class, DecisionSource, EngineSettings, MemoryOrigin, MultiRegionConfig, Origin, OriginError,
    PeerConfig, Regime, Region, RegionPolicy,
};
use tidegate::{Clock, Gate, Limit, Limiter, SystemClock};
use tidegate_core::origin::{
    Call, CallReply, MergeReply, MergeRequest, OriginMeter, RoundReply, RoundRequest,
};
use tidegate_origin::{LeaseReply, LeaseRequest, OriginFuture, partition_of};

const MINUTE: Duration = Duration::from_mins(1);

/// An origin in memory that counts its calls, and can stop replying.
struct WatchedOrigin {
    inner: Arc<MemoryOrigin>,
    calls: AtomicU64,
    is_gone: AtomicBool,
    /// Two partitions: the first call to the first one stops the replies of the second.
    stops: Option<(u16, u16)>,
    has_stopped: AtomicBool,
    /// Whether it takes no call.
    refuses: AtomicBool,
}

impl WatchedOrigin {
    fn new() -> Arc<Self> {
        let clock = SystemClock::new();
        Self::around(Arc::new(MemoryOrigin::new(move || clock.now().wall_us())), None)
    }

    fn around(inner: Arc<MemoryOrigin>, stops: Option<(u16, u16)>) -> Arc<Self> {
        let [is_gone, has_stopped, refuses] = [0, 1, 2].map(|_| AtomicBool::new(false));
        Arc::new(Self { inner, calls: AtomicU64::new(0), is_gone, stops, has_stopped, refuses })
    }

    /// Whether a call to this partition gets no reply.
    fn stands_still(&self, partition: u16) -> bool {
        let stops = self.stops.is_some_and(|(by, _)| by == partition);
        if stops && !self.has_stopped.swap(true, Ordering::Relaxed) {
            self.is_gone.store(true, Ordering::Relaxed);
        }
        let is_affected = self.stops.is_none_or(|(_, stopped)| stopped == partition);
        is_affected && self.is_gone.load(Ordering::Relaxed)
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    /// Returns the units charged at the origin to a key of the limit `per_user`, less refunds.
    fn charged(&self, key: &str) -> u64 {
        self.charged_of("per_user", key, key)
    }

    /// The same for a key of any limit, at this placement.
    fn charged_of(&self, limit: &str, key: &str, placement: &str) -> u64 {
        let name = format!("0:0:{}:{limit}{key}", limit.len()).into_bytes();
        let charged = |meter: &OriginMeter| meter.charged() - meter.refunded();
        self.inner
            .look(partition_of(placement.as_bytes()), |p| p.meter(&name).map_or(0, charged))
            .expect("a partition")
    }
}

impl Origin for WatchedOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        Box::pin(async move {
            if self.stands_still(partition) {
                return std::future::pending::<Result<CallReply, OriginError>>().await;
            }
            if self.refuses.load(Ordering::Relaxed) {
                return Err(OriginError::Refused(CallError::Twice { meter: 0 }));
            }
            self.inner.call(partition, call).await
        })
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        self.inner.round(partition, round)
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        self.inner.merge(partition, merge)
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        self.inner.lease(request)
    }
}

/// A node that waits for the origin however long it takes: a test may run on a machine that is
/// slow.
fn patient(origin: &Arc<WatchedOrigin>, class: Class, limit: Limit) -> (Region, Gate) {
    let minute_us = 60_000_000;
    node(
        origin,
        class,
        limit,
        EngineSettings { deadline_us: minute_us, hedge_us: minute_us, ..EngineSettings::default() },
    )
}

/// A node that is soon tired of waiting.
fn hasty(origin: &Arc<WatchedOrigin>, class: Class, limit: Limit) -> (Region, Gate) {
    node(origin, class, limit, EngineSettings::default())
}

fn node(origin: &Arc<WatchedOrigin>, class: Class, limit: Limit, settings: EngineSettings) -> (Region, Gate) {
    node_of(Arc::clone(origin) as Arc<dyn Origin>, class, limit, settings)
}

fn node_of(origin: Arc<dyn Origin>, class: Class, limit: Limit, settings: EngineSettings) -> (Region, Gate) {
    let limiter = Limiter::builder().limit("per_user", limit).build().expect("a limiter");
    let region = Region::join_as("", Arc::new(limiter), origin, settings).expect("a name");
    let gate = region.gate("", "per_user", class).expect("known");
    (region, gate)
}

async fn passes(node: &(Region, Gate), key: &str) -> bool {
    node.0.check(&[node.1.region_check(key)]).await.expect("one limit").is_allowed()
}

#[tokio::test]
async fn nodes_together_admit_as_much_as_one() {
    for limit in [Limit::gcra(100, MINUTE), Limit::sliding_window(100, MINUTE)] {
        let (origin, limit) = (WatchedOrigin::new(), limit.expect("in range"));
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
        assert_eq!(origin.charged("alice"), passed, "the origin is charged for every admitted unit");
    }
}

#[tokio::test]
async fn a_thousand_cold_requests_are_one_call() {
    let origin = WatchedOrigin::new();
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
    let origin = WatchedOrigin::new();
    let node = patient(&origin, Class::Comfort, Limit::gcra(1_000_000, MINUTE).expect("in range"));
    for _ in 0..20_000 {
        assert!(passes(&node, "alice").await);
    }
    let stats = node.0.stats();
    assert!(stats.waited * 50 < 20_000, "{stats:?}");
}

/// An origin with replies that pass through separate tasks, as those of a connection do.
struct RelayedOrigin(Arc<MemoryOrigin>);

/// Delay of its replies, well within the deadline of a request.
const ANSWERS_AFTER: Duration = Duration::from_millis(5);

impl Origin for RelayedOrigin {
    #[expect(clippy::disallowed_methods, reason = "the delay of the origin")]
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        Box::pin(async move {
            let socket = tokio::spawn(tokio::time::sleep(ANSWERS_AFTER));
            let connection = tokio::spawn(async move { socket.await.is_ok() });
            assert!(connection.await.expect("it ends"));
            self.0.call(partition, call).await
        })
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        self.0.round(partition, round)
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        self.0.merge(partition, merge)
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        self.0.lease(request)
    }
}

#[tokio::test]
async fn delayed_node_reads_pending_replies_before_its_fallback() {
    let clock = SystemClock::new();
    let origin = Arc::new(RelayedOrigin(Arc::new(MemoryOrigin::new(|| SystemClock::new().now().wall_us()))));
    let limit = Limit::gcra(100, MINUTE).expect("in range");
    let (region, gate) = node_of(origin, Class::Comfort, limit, EngineSettings::default());
    let question = [gate.region_check("alice")];
    let mut asked = std::pin::pin!(region.check(&question));
    assert!(poll_once(asked.as_mut()).await.is_none(), "the check waits for the origin");
    // Two yields: the first makes the call, the second awaits its reply.
    tokio::task::yield_now().await;
    tokio::task::yield_now().await;
    // Blocks all tasks of this process for longer than the deadline of a request.
    let until_us = clock.now().mono_us() + 2 * EngineSettings::default().deadline_us;
    while clock.now().mono_us() < until_us {
        std::hint::spin_loop();
    }
    let region_decision = asked.await.expect("one limit");
    assert_eq!((region_decision.is_allowed(), region_decision.source), (true, DecisionSource::Regional));
}

/// Returns the output of a future, if it is ready now.
async fn poll_once<F: Future>(mut future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    std::future::poll_fn(|cx| match future.as_mut().poll(cx) {
        std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
        std::task::Poll::Pending => std::task::Poll::Ready(None),
    })
    .await
}

#[tokio::test]
async fn without_the_origin_the_class_decides() {
    let limit = Limit::gcra(100, MINUTE).expect("in range");
    for (class, source, most) in [
        (Class::Comfort, DecisionSource::Local, 101),
        (Class::Cost, DecisionSource::Closed, 0),
        (Class::Security, DecisionSource::Closed, 0),
    ] {
        let origin = WatchedOrigin::new();
        origin.is_gone.store(true, Ordering::Relaxed);
        let node = hasty(&origin, class, limit);
        let (mut passed, mut rungs) = (0, Vec::new());
        for _ in 0..1_000 {
            let region_decision = node.0.check(&[node.1.region_check("alice")]).await.expect("one limit");
            passed += u64::from(region_decision.is_allowed());
            rungs.push(region_decision.source);
        }
        assert!(rungs.iter().all(|seen| *seen == source), "{class:?}");
        assert!(passed <= most && (most == 0) == (passed == 0), "{class:?}: {passed}");
    }
}

#[tokio::test]
async fn without_the_origin_a_region_among_others_goes_on_with_its_standing_part() {
    for (regime, most) in [(Regime::Regional, 101), (Regime::BestEffort, 26), (Regime::Share, 26)] {
        let origin = WatchedOrigin::new();
        origin.is_gone.store(true, Ordering::Relaxed);
        let limit = Limit::gcra(100, MINUTE).expect("in range");
        let limiter = Limiter::builder().build().expect("a limiter");
        let mut regions = MultiRegionConfig::new("eu", ([127, 0, 0, 1], 0).into());
        let addresses = vec!["127.0.0.1:1".to_owned()];
        regions.peers = vec![PeerConfig { region: "us".to_owned(), addresses }];
        regions.weights = vec![("us".to_owned(), 3)];
        let origin = origin as Arc<dyn Origin>;
        let region = Region::join_among(regions, Arc::new(limiter), origin, EngineSettings::default());
        let region = region.expect("a valid configuration");
        let policy = RegionPolicy { regime, ..RegionPolicy::of(Class::Comfort) };
        let node = (region.gate_with("", "per_user", limit, policy).expect("a name"), region);
        let mut passed = 0;
        for _ in 0..1_000 {
            let region_decision = node.1.check(&[node.0.region_check("alice")]).await.expect("one limit");
            assert_eq!(region_decision.source, DecisionSource::Local);
            passed += u64::from(region_decision.is_allowed());
        }
        // Less than two in a second drain.
        assert!((most - 1..most + 10).contains(&passed), "{regime}: {passed}");
    }
}

#[tokio::test]
async fn node_without_origin_does_not_respend_used_units() {
    let origin = WatchedOrigin::new();
    let node = hasty(&origin, Class::Comfort, Limit::gcra(100, MINUTE).expect("in range"));
    while passes(&node, "alice").await {}
    origin.is_gone.store(true, Ordering::Relaxed);
    let (mut alone, mut passed) = (0, 0);
    // Until one unit has drained, the last reply of the origin decides.
    while alone < 100 {
        let region_decision = node.0.check(&[node.1.region_check("alice")]).await.expect("one limit");
        alone += u64::from(region_decision.source == DecisionSource::Local);
        passed += u64::from(region_decision.is_allowed());
    }
    // A part of the limit that begins anew would let all of them pass; less than two in a second
    // drain.
    assert!(passed < 50, "{passed}");
    origin.is_gone.store(false, Ordering::Relaxed);
    node.0.leave().await;
}

#[tokio::test]
async fn fallback_usage_is_reported_when_the_origin_returns() {
    let origin = WatchedOrigin::new();
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

/// Returns two limits of a region: one for each user, and one for all users together.
fn two_limits(origin: &Arc<WatchedOrigin>, per_user: u64, in_all: u64) -> (Region, Gate, Gate) {
    two_limits_in(HOUR, origin, per_user, in_all)
}

fn two_limits_in(
    period: Duration,
    origin: &Arc<WatchedOrigin>,
    per_user: u64,
    in_all: u64,
) -> (Region, Gate, Gate) {
    let (region, _) = patient(origin, Class::Security, Limit::gcra(1, MINUTE).expect("in range"));
    let gate = |name: &str, amount| {
        let limit = Limit::gcra(amount, period).expect("in range");
        region.gate_with("", name, limit, RegionPolicy::of(Class::Security)).expect("a tenant")
    };
    let (user, all) = (gate("user", per_user), gate("all", in_all));
    (region, user, all)
}

#[tokio::test]
async fn limits_of_one_placement_are_one_call_each_with_its_own_cost() {
    let origin = WatchedOrigin::new();
    let (region, user, all) = two_limits(&origin, 100, 100);
    let questions =
        [user.region_check("alice").cost(2), all.region_check("everyone").cost(20).placed_by("alice")];
    assert!(region.check(&questions).await.expect("two limits").is_allowed());
    assert_eq!(origin.calls(), 1);
    region.leave().await;
    assert_eq!(origin.charged_of("user", "alice", "alice"), 2);
    assert_eq!(origin.charged_of("all", "everyone", "alice"), 20);
}

#[tokio::test]
async fn cross_placement_limit_counts_all_and_refunds_denied_requests() {
    let origin = WatchedOrigin::new();
    let nodes = [two_limits(&origin, 3, 10), two_limits(&origin, 3, 10)];
    let ask = async |turn: usize| {
        let (region, user, all) = &nodes[turn % 2];
        let name = format!("user{}", turn % 5);
        let region_decision = region.check(&[user.region_check(&name), all.region_check("everyone")]).await;
        u64::from(region_decision.expect("two limits").is_allowed())
    };
    let mut passed = 0;
    // A refund arrives with the next report.
    let spend = async {
        let mut turns = 0..;
        while passed < 10 {
            passed += ask(turns.next().expect("no end")).await;
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), spend).await.expect("all of it is used");
    for turn in 0..60 {
        passed += ask(turn).await;
    }
    for (region, ..) in &nodes {
        region.leave().await;
    }
    // Five users of three each would make fifteen: all together stop at ten, and no user is charged
    // for more than passed.
    let users: u64 =
        (0..5).map(|user| format!("user{user}")).map(|u| origin.charged_of("user", &u, &u)).sum();
    assert_eq!((passed, origin.charged_of("all", "everyone", "everyone"), users), (10, 10, 10));
}

/// A charge for a request that another placement denied is given back late, if its partition stops
/// replying meanwhile. By then it has drained, and other requests have used the drained units.
#[tokio::test]
async fn late_refund_does_not_pass_drained_units_again() {
    let clock = Arc::new(AtomicU64::new(1 << 50));
    let reads = Arc::clone(&clock);
    let inner = Arc::new(MemoryOrigin::new(move || reads.load(Ordering::Relaxed)));
    let [all_at, user_at] = [&b"everyone"[..], b"alice"].map(partition_of);
    let stopping = WatchedOrigin::around(Arc::clone(&inner), Some((user_at, all_at)));
    let others = WatchedOrigin::around(inner, None);
    let node = |origin: &Arc<WatchedOrigin>| two_limits_in(MINUTE, origin, 1, 600);
    let checks = async || {
        let (region, _, all) = node(&others);
        region.check(&[all.region_check("everyone").cost(600)]).await.expect("one limit").is_allowed()
    };
    // The user has no units left, and the first node does not know it.
    let (region, user, _) = node(&others);
    assert!(region.check(&[user.region_check("alice")]).await.expect("one limit").is_allowed());
    let (first, user, all) = node(&stopping);
    let both = [all.region_check("everyone").cost(600), user.region_check("alice")];
    assert!(!first.check(&both).await.expect("two limits").is_allowed());
    // All of it drains in a minute.
    clock.fetch_add(61_000_000, Ordering::Relaxed);
    assert!(checks().await, "one burst");
    stopping.is_gone.store(false, Ordering::Relaxed);
    first.leave().await;
    assert_eq!(stopping.charged_of("all", "everyone", "everyone"), 600, "the charge was refunded");
    assert!(!checks().await, "refunded units are not admitted twice");
}

#[tokio::test]
async fn refunded_units_can_be_spent_again() {
    let origin = WatchedOrigin::new();
    let (region, user, _) = two_limits(&origin, 5, 5);
    let ask = || user.region_check("alice").cost(5);
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
async fn paid_limit_fails_open_up_to_the_tenant_limit() {
    let origin = WatchedOrigin::new();
    origin.is_gone.store(true, Ordering::Relaxed);
    let limit = Limit::gcra(10, MINUTE).expect("in range");
    let (region, _) = hasty(&origin, Class::Cost, limit);
    let paid = RegionPolicy { paid: true, ..RegionPolicy::of(Class::Cost) };
    let gate = region.gate_with("", "paid", limit, paid).expect("a tenant");
    let ask = async |key: &str| region.check(&[gate.region_check(key).cost(10)]).await.expect("one limit");
    for _ in 0..20 {
        let region_decision = ask("alice").await;
        assert_eq!(
            (region_decision.is_allowed(), region_decision.source),
            (true, DecisionSource::Open),
            "far above its own limit"
        );
    }
    let mut last = ask("bob").await;
    for _ in 0..1_000_000 {
        if !last.is_allowed() {
            break;
        }
        last = ask("bob").await;
    }
    assert_eq!(
        (last.is_allowed(), last.source),
        (false, DecisionSource::Open),
        "above the coarse limit of the tenant"
    );
    let strict = region.gate_with("", "strict", limit, RegionPolicy::of(Class::Security)).expect("a tenant");
    let both = [gate.region_check("alice"), strict.region_check("alice")];
    assert_eq!(
        region.check(&both).await.expect("two limits").source,
        DecisionSource::Closed,
        "the strictest decides"
    );
}

const HOUR: Duration = Duration::from_hours(1);

/// A limit that changes its algorithm or period keeps its meter, at the origin and on the node.
/// Usage under one version counts under the other, and every unit is charged once.
#[tokio::test]
async fn a_limit_that_changes_its_algorithm_or_its_period_goes_on_counting() {
    let gcra = |hours: u32| Limit::gcra(100, HOUR * hours).expect("in range");
    let window = |hours: u32| Limit::sliding_window(100, HOUR * hours).expect("in range");
    let changes = [
        (gcra(1), window(1)),
        (window(1), gcra(1)),
        (window(1), window(24)),
        (window(24), window(1)),
        (gcra(1), gcra(24)),
    ];
    for (before, after) in changes {
        for class in [Class::Security, Class::Cost] {
            let origin = WatchedOrigin::new();
            let nodes = [patient(&origin, class, before).0, patient(&origin, class, before).0];
            let ask = async |node: &Region, limit: Limit, version: u32| {
                let policy = RegionPolicy { version, ..RegionPolicy::of(class) };
                let gate = node.gate_with("", "per_user", limit, policy).expect("a tenant");
                let region_decision = node.check(&[gate.region_check("alice")]).await.expect("one limit");
                assert_eq!(region_decision.source, DecisionSource::Regional);
                u64::from(region_decision.is_allowed())
            };
            let mut passed = 0;
            for turn in 0..40 {
                passed += ask(&nodes[turn % 2], before, 1).await;
            }
            assert_eq!(passed, 40);
            // One node learns of the change later than the other, and continues with its grant.
            for turn in 0..400 {
                let knows = turn % 2 == 0 || turn > 20;
                let (limit, version) = if knows { (after, 2) } else { (before, 1) };
                passed += ask(&nodes[turn % 2], limit, version).await;
            }
            for node in &nodes {
                node.leave().await;
                assert_eq!(node.stats().refused, 0);
            }
            let charged = origin.charged("alice");
            assert_eq!((passed, charged), (100, 100), "{class:?}, from {before:?} to {after:?}");
        }
    }
}

#[tokio::test]
async fn refused_call_is_decided_by_class_and_retried() {
    let limit = Limit::gcra(100, HOUR).expect("in range");
    for (class, source) in
        [(Class::Comfort, DecisionSource::Local), (Class::Security, DecisionSource::Closed)]
    {
        let origin = WatchedOrigin::new();
        origin.refuses.store(true, Ordering::Relaxed);
        let node = patient(&origin, class, limit);
        let refusal = node.0.refusal();
        let ask = async || {
            let questions = [node.1.region_check("alice")];
            let region_decision =
                tokio::time::timeout(Duration::from_secs(30), node.0.check(&questions)).await;
            region_decision.expect("not a minute").expect("one limit")
        };
        let first = ask().await;
        assert_eq!((first.source, first.is_allowed()), (source, class == Class::Comfort));
        assert_eq!(*refusal.borrow(), Some(CallError::Twice { meter: 0 }));
        origin.refuses.store(false, Ordering::Relaxed);
        let second = ask().await;
        assert_eq!((second.source, second.is_allowed()), (DecisionSource::Regional, true), "no check hangs");
        assert!(node.0.stats().refused >= 1);
        node.0.leave().await;
        assert_eq!(origin.charged("alice"), 1 + u64::from(first.is_allowed()));
    }
}

/// A flood of keys fills an origin in memory. Those that it knows are decided as ever, with
/// strangers in the same call, and strangers by class, as if there was no origin.
#[tokio::test]
async fn full_origin_decides_known_keys_and_new_keys_fall_back() {
    let limit = Limit::gcra(100, HOUR).expect("in range");
    for (class, source) in
        [(Class::Comfort, DecisionSource::Local), (Class::Security, DecisionSource::Closed)]
    {
        let clock = Arc::new(AtomicU64::new(1 << 50));
        let reads = Arc::clone(&clock);
        let inner = MemoryOrigin::with_meters_max(move || reads.load(Ordering::Relaxed), 4);
        let origin = WatchedOrigin::around(Arc::new(inner), None);
        let node = patient(&origin, class, limit);
        let ask = async |key: &str| {
            let questions = [node.1.region_check(key).placed_by("tenant")];
            let asked = tokio::time::timeout(Duration::from_secs(30), node.0.check(&questions)).await;
            let region_decision = asked.expect("no check hangs").expect("one limit");
            (region_decision.source, region_decision.is_allowed())
        };
        let known = ["0", "1", "2", "3"];
        for key in known {
            assert_eq!(ask(key).await, (DecisionSource::Regional, true));
        }
        for turn in 0..40 {
            let names = [format!("one of {turn}"), format!("another of {turn}")];
            let (one, of_known, other) = tokio::join!(ask(&names[0]), ask(known[turn % 4]), ask(&names[1]));
            assert_eq!(of_known, (DecisionSource::Regional, true), "{class:?}, turn {turn}");
            assert_eq!([one, other], [(source, class == Class::Comfort); 2]);
        }
        assert_eq!(node.0.stats().refused, 0);
        // Expired meters make room, in less time than the origin retains sessions.
        clock.fetch_add(3_000_000_000, Ordering::Relaxed);
        assert_eq!(ask("one more").await, (DecisionSource::Regional, true));
        node.0.leave().await;
    }
}

#[tokio::test]
async fn charge_without_a_check_counts_beside_any_grant() {
    for limit in [Limit::gcra(100, HOUR), Limit::sliding_window(100, HOUR)] {
        for class in [Class::Comfort, Class::Security] {
            let origin = WatchedOrigin::new();
            let node = patient(&origin, class, limit.expect("in range"));
            node.0.charge([&node.1.region_check("alice").cost(7)]);
            node.0.leave().await;
            assert_eq!(origin.charged("alice"), 7, "{class:?}");
            let next = patient(&origin, class, limit.expect("in range"));
            assert!(
                !next
                    .0
                    .check(&[next.1.region_check("alice").cost(99)])
                    .await
                    .expect("one limit")
                    .is_allowed()
            );
            next.0.leave().await;
        }
    }
}

#[tokio::test]
async fn request_beyond_the_waiting_limit_is_decided_by_class() {
    let limit = Limit::gcra(100, HOUR).expect("in range");
    for (class, source) in
        [(Class::Comfort, DecisionSource::Local), (Class::Security, DecisionSource::Closed)]
    {
        let origin = WatchedOrigin::new();
        let node =
            node(&origin, class, limit, EngineSettings { waiting_max: 0, ..EngineSettings::default() });
        let region_decision = node.0.check(&[node.1.region_check("alice")]).await.expect("one limit");
        assert_eq!((region_decision.source, node.0.stats().crowded, origin.calls()), (source, 1, 0));
    }
}
