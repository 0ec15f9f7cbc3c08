//! The conformance suite that the tests of every origin run.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_core::Limit;
use tidegate_core::origin::{
    CONNECTED_US_MAX, Call, CallError, CallReply, Charge, CheckGroup, Component, ComponentTotals,
    CrossRegionTerms, Lapse, MergeReply, MergeRequest, MeterReply, MeterUpdate, NodeId, RegionId, RoundReply,
    RoundRequest, StoreId, Terms, UPDATES_PER_CALL_MAX,
};
use tidegate_origin::redis::{RedisConfig, RedisOrigin, Servers};
use tidegate_origin::{LeaseReply, LeaseRequest, Origin, OriginError, PARTITIONS};

/// How long a store may be away, on a machine that has much else to do.
pub const TIME_MAX: Duration = Duration::from_mins(1);

/// Interval between two looks at a condition; it does not affect the result.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Burst of the limits in tests. One unit drains in a day, longer than any test takes.
pub const BURST: u64 = 100;

static NODES: AtomicU64 = AtomicU64::new(1);

pub fn a_day(lapse: Lapse, version: u32) -> Terms {
    let limit = Limit::gcra(1, Duration::from_hours(24)).and_then(|limit| limit.with_burst(BURST));
    Terms::new(&limit.expect("in range"), 0, lapse, version)
}

/// One session of a node.
pub struct TestSession {
    pub origin: Arc<dyn Origin>,
    pub partition: u16,
    node: NodeId,
    sequence: u64,
    acknowledged: u64,
    /// Whether the origin ever reported lost writes.
    pub lost: bool,
}

impl TestSession {
    pub fn new(origin: &Arc<dyn Origin>, partition: u16) -> Self {
        let node = NodeId(NODES.fetch_add(1, Ordering::Relaxed) << 32 | u64::from(std::process::id()));
        Self { origin: Arc::clone(origin), partition, node, sequence: 0, acknowledged: 0, lost: false }
    }

    /// Returns the next call of the session.
    pub fn next(&mut self, updates: Vec<MeterUpdate>, checks: Vec<CheckGroup>) -> Call {
        self.sequence += 1;
        let (node, sequence, acknowledged) = (self.node, self.sequence, self.acknowledged);
        Call { node, sequence, acknowledged, known_us: 0, store: StoreId::default(), updates, checks }
    }

    /// Repeats a call until it gets a reply, as nodes do.
    pub async fn make(&mut self, call: &Call) -> CallReply {
        let deadline = Instant::now() + TIME_MAX;
        loop {
            match self.origin.call(self.partition, call).await {
                Ok(reply) => {
                    self.acknowledged = call.sequence;
                    self.lost |= reply.lost;
                    return reply;
                }
                Err(error @ OriginError::Refused(_)) => panic!("{error}"),
                Err(error) => assert!(Instant::now() < deadline, "no answer in {TIME_MAX:?}: {error}"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    pub async fn ask(&mut self, key: &[u8], terms: Terms, cost: u64, count: u32) -> u32 {
        let call = self.next(vec![update(key, terms)], vec![checks(&[(0, cost)], count)]);
        self.make(&call).await.checks[0].passed
    }

    /// Waits until the origin accounts for lost writes: a meter with `Lapse::Counted` then has no
    /// room.
    pub async fn until_full(&mut self, key: &[u8], terms: Terms) {
        self.until("a full meter", key, terms, |_, meter_reply| meter_reply.room == 0).await;
    }

    /// Waits until a reply to this session reports lost writes.
    pub async fn until_lost(&mut self, key: &[u8], terms: Terms) {
        self.until("a reply that reports the loss", key, terms, |lost, _| lost).await;
    }

    /// Makes calls without checks until the reply for a meter, and whether writes were lost, meet
    /// the condition.
    async fn until(
        &mut self,
        awaited: &str,
        key: &[u8],
        terms: Terms,
        condition: fn(bool, &MeterReply) -> bool,
    ) {
        let deadline = Instant::now() + TIME_MAX;
        loop {
            let call = self.next(vec![update(key, terms)], Vec::new());
            let meter_reply = self.make(&call).await.meters[0];
            if condition(self.lost, &meter_reply) {
                return;
            }
            assert!(Instant::now() < deadline, "waited {TIME_MAX:?} for {awaited}");
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Reports usage, keeps nothing of the grant, and returns the new grant of up to `want`.
    pub async fn hold(&mut self, key: &[u8], terms: Terms, used: u64, want: u64) -> u64 {
        let call = self.next(vec![MeterUpdate { used, want, ..update(key, terms) }], Vec::new());
        self.make(&call).await.meters[0].grant
    }
}

/// Returns a group of waiting checks: positions of their meters with the cost of each, and their
/// number.
pub fn checks(charges: &[(u16, u64)], count: u32) -> CheckGroup {
    let charges = charges.iter().map(|&(meter, cost)| Charge { meter, cost });
    CheckGroup { charges: charges.collect(), count }
}

pub fn update(key: &[u8], terms: Terms) -> MeterUpdate {
    MeterUpdate { life_us: 10_000_000, ..MeterUpdate::new(key, terms) }
}

/// An origin on Redis, with a time for each call that a busy machine can keep.
pub fn open(servers: Servers) -> Arc<RedisOrigin> {
    Arc::new(RedisOrigin::open(config(servers)).expect("an address"))
}

pub fn config(servers: Servers) -> RedisConfig {
    let mut config = RedisConfig::new(servers, 7);
    config.connect_time_max = Duration::from_secs(10);
    config.call_time_max = Duration::from_secs(2);
    config
}

/// Returns the documented permissions of the store's user, as arguments of `ACL`. Its name is
/// `tide`, with the password `password`.
pub fn documented_user() -> Vec<&'static str> {
    let docs = include_str!("../../../../docs/servers.md");
    let line = docs.lines().find_map(|line| line.strip_prefix("ACL ")).expect("the documented ACL line");
    line.split_whitespace().collect()
}

/// Repeats a request until the store replies, as nodes and replicators do: a store may ask for a
/// retry while its slots move.
async fn answered<T>(make: impl AsyncFn() -> Result<T, OriginError>) -> Result<T, OriginError> {
    let deadline = Instant::now() + TIME_MAX;
    loop {
        match make().await {
            Err(error @ (OriginError::NotApplied(_) | OriginError::Unknown(_))) => {
                assert!(Instant::now() < deadline, "no answer in {TIME_MAX:?}: {error}");
            }
            answer => return answer,
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

/// Runs the suite, in the partitions that [`is_of_suite`] selects.
pub async fn conforms(origin: Arc<dyn Origin>) {
    grants_count_as_used(&origin).await;
    a_repeat_gets_the_first_answer(&origin).await;
    all_limits_of_a_request_pass_or_none(&origin).await;
    each_limit_of_a_request_has_its_own_cost(&origin).await;
    every_name_is_a_meter_of_its_own(&origin).await;
    the_higher_version_holds(&origin).await;
    invalid_calls_are_refused(&origin).await;
    a_full_call_is_taken(&origin).await;
    regions_charge_components_of_peers_once(&origin).await;
    isolated_region_has_its_regional_share(&origin).await;
    a_region_stays_on_its_part_until_all_that_others_charged_has_come(&origin).await;
    share_usage_is_published_without_further_requests(&origin).await;
    a_node_may_not_know_yet_that_a_limit_is_of_several_regions(&origin).await;
    marks_come_in_pages_until_they_are_trimmed(&origin).await;
    a_full_merge_is_taken_and_nonsense_refused(&origin).await;
    a_lease_is_of_one(&origin).await;
    for partition in SPENT {
        let (passed, lost) = spend_all(&origin, partition, b"hot", 8).await;
        assert_eq!((passed, lost), (BURST, false), "partition {partition}");
    }
}

/// The partitions in which much is spent at once.
const SPENT: [u16; 4] = [0, 1, 100, PARTITIONS - 1];

/// Whether the suite uses this partition.
pub fn is_of_suite(partition: u16) -> bool {
    partition <= 18 || SPENT.contains(&partition)
}

async fn grants_count_as_used(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let (mut first, mut second) = (TestSession::new(origin, 3), TestSession::new(origin, 3));
    assert_eq!(first.hold(b"held", terms, 0, 80).await, 2, "a grant begins small");
    assert_eq!(second.hold(b"held", terms, 0, 80).await, 2);
    assert_eq!(second.ask(b"held", terms, 1, 99).await, 98, "the other grant is returned");
    assert_eq!(first.hold(b"held", terms, 1, 0).await, 0);
    assert_eq!(second.ask(b"held", terms, 1, 99).await, 1, "1 of 2 was used");
}

async fn a_repeat_gets_the_first_answer(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(origin, 4);
    let call = session.next(vec![update(b"again", terms)], vec![checks(&[(0, 7)], 1)]);
    let first = session.make(&call).await;
    let (again, hedge) = (async || origin.call(4, &call).await, async || origin.hedge(4, &call).await);
    assert_eq!(answered(again).await, Ok(first.clone()));
    assert_eq!(answered(hedge).await, Ok(first.clone()));
    let (one, other) = tokio::join!(answered(again), answered(hedge));
    assert_eq!((one, other), (Ok(first.clone()), Ok(first)));
    assert_eq!(session.ask(b"again", terms, 1, 99).await, 93);
    let outdated = OriginError::Refused(CallError::Outdated { sequence: 2 });
    assert_eq!(answered(again).await, Err(outdated));
}

async fn all_limits_of_a_request_pass_or_none(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Forgiven, 1);
    let mut session = TestSession::new(origin, 5);
    assert_eq!(session.ask(b"narrow", terms, 90, 1).await, 1);
    let updates = vec![update(b"wide", terms), update(b"narrow", terms)];
    let call = session.next(updates, vec![checks(&[(0, 4), (1, 4)], 9)]);
    let decided = session.make(&call).await.checks[0];
    assert_eq!((decided.passed, decided.denied_by), (2, 1));
    assert_eq!(session.ask(b"wide", terms, 1, 99).await, 92);
}

async fn each_limit_of_a_request_has_its_own_cost(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(origin, 10);
    let updates = |back: [u64; 2]| {
        let named = [(&b"requests"[..], back[0]), (b"tokens", back[1])];
        named.map(|(key, refund)| MeterUpdate { refund, ..update(key, terms) }).to_vec()
    };
    let call = session.next(updates([0, 0]), vec![checks(&[(0, 1), (1, 20)], 9)]);
    let decided = session.make(&call).await.checks[0];
    assert_eq!((decided.passed, decided.denied_by), (5, 1), "five requests spend all 100 tokens");
    let call = session.next(updates([0, 0]), vec![checks(&[(0, 96), (1, 0)], 1)]);
    let decided = session.make(&call).await.checks[0];
    assert_eq!(
        (decided.passed, decided.denied_by),
        (0, 0),
        "95 requests are left, and the check needs no token"
    );
    // A request that stopped waiting gets its costs back, each limit its own.
    let call = session.next(updates([1, 20]), Vec::new());
    let left: Vec<u64> =
        session.make(&call).await.meters.iter().map(|meter_reply| meter_reply.room).collect();
    assert_eq!(left, [96, 20]);
}

async fn every_name_is_a_meter_of_its_own(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut session = TestSession::new(origin, 6);
    for name in [&b""[..], b"a", b"a\0", b"a ", b"a:b", b"{6}:m:a", b"\r\n", &[255, 254], &[b'x'; 1_000]] {
        assert_eq!(session.ask(name, terms, 1, 200).await, 100, "{}", name.escape_ascii());
    }
}

async fn the_higher_version_holds(origin: &Arc<dyn Origin>) {
    let five = Limit::gcra(1, Duration::from_hours(24)).and_then(|limit| limit.with_burst(5));
    let five = Terms::new(&five.expect("in range"), 0, Lapse::Counted, 2);
    let mut session = TestSession::new(origin, 7);
    assert_eq!(session.ask(b"new", a_day(Lapse::Counted, 1), 1, 3).await, 3);
    assert_eq!(session.ask(b"new", five, 1, 99).await, 2);
    assert_eq!(session.ask(b"new", a_day(Lapse::Counted, 1), 1, 99).await, 0);
}

async fn invalid_calls_are_refused(origin: &Arc<dyn Origin>) {
    let mut session = TestSession::new(origin, 8);
    let same = update(b"twice", a_day(Lapse::Counted, 1));
    let call = session.next(vec![same.clone(), same], Vec::new());
    assert!(matches!(origin.call(8, &call).await, Err(OriginError::Refused(CallError::Twice { .. }))));
    let once = vec![update(b"once", a_day(Lapse::Counted, 1))];
    let call = session.next(once, vec![checks(&[(0, 1), (0, 2)], 1)]);
    let refused = OriginError::Refused(CallError::ChargedTwice { meter: 0 });
    assert_eq!(origin.call(8, &call).await, Err(refused));
    let call = session.next(Vec::new(), Vec::new());
    assert!(matches!(origin.call(PARTITIONS, &call).await, Err(OriginError::NotApplied(_))));
}

async fn a_full_call_is_taken(origin: &Arc<dyn Origin>) {
    let mut session = TestSession::new(origin, 9);
    let name = |number: usize| format!("full {number}").into_bytes();
    let terms = a_day(Lapse::Counted, 1);
    let updates =
        (0..UPDATES_PER_CALL_MAX).map(|number| MeterUpdate { want: 1, ..update(&name(number), terms) });
    let meters = 0u16..;
    let all = meters.take(UPDATES_PER_CALL_MAX).map(|meter| checks(&[(meter, 1)], 2));
    let call = session.next(updates.collect(), all.collect());
    let reply = session.make(&call).await;
    assert!(reply.meters.iter().all(|meter_reply| meter_reply.grant == 1));
    assert!(reply.checks.iter().all(|decided| decided.passed == 2));
}

/// Returns a limit of 100, with a regional share of 40 and a publish threshold of 10.
pub fn cross_region(version: u32) -> Terms {
    let cross_region =
        CrossRegionTerms { publish_threshold: 10, share_amount: 1, share_capacity: 40, debt_max: 1_000 };
    a_day(Lapse::Counted, version).with_cross_region(cross_region)
}

/// Repeats a round until it gets a reply.
pub async fn gather(origin: &Arc<dyn Origin>, partition: u16, round: RoundRequest) -> RoundReply {
    answered(async || origin.round(partition, &round).await).await.expect("nothing to refuse")
}

async fn merge(
    origin: &Arc<dyn Origin>,
    partition: u16,
    components: Vec<Component>,
) -> Result<MergeReply, OriginError> {
    let merge = MergeRequest { from: RegionId(u64::MAX), components };
    answered(async || origin.merge(partition, &merge).await).await
}

/// A round that leaves the connectivity unchanged.
const EVERYTHING: RoundRequest =
    RoundRequest { connected_for_us: 0, settled: false, clock_us: 0, trim: 0, after: 0, most: 256 };

/// A round in which all peers are heard and settled. The origin sets the start: with `clock_us`
/// ahead of its clock, as after a step back, it counts from its own time.
const HEARD: RoundRequest =
    RoundRequest { connected_for_us: CONNECTED_US_MAX, settled: true, clock_us: u64::MAX, ..EVERYTHING };

/// Reports that all peers are heard, and waits until meters count all regions together.
async fn settle(origin: &Arc<dyn Origin>, partition: u16) -> RoundReply {
    let gathered = gather(origin, partition, HEARD).await;
    let mut session = TestSession::new(origin, partition);
    session
        .until("a meter that counts all regions", b"settled", cross_region(1), |_, meter_reply| {
            meter_reply.is_global
        })
        .await;
    gathered
}

/// Partitions of one origin stand for regions.
async fn regions_charge_components_of_peers_once(origin: &Arc<dyn Origin>) {
    let (here, there) = (11, 12);
    for partition in [here, there] {
        settle(origin, partition).await;
    }
    let (mut near, mut far) = (TestSession::new(origin, here), TestSession::new(origin, there));
    assert_eq!(near.ask(b"global", cross_region(1), 1, 9).await, 9);
    assert_eq!(gather(origin, here, EVERYTHING).await.components, [], "usage below the publish threshold");
    assert_eq!(near.ask(b"global", cross_region(1), 1, 21).await, 21);
    let meter_reply = gather(origin, here, EVERYTHING).await.components;
    let [component] = &meter_reply[..] else { panic!("{meter_reply:?}") };
    assert_eq!((&*component.key, component.terms), (&b"global"[..], cross_region(1)));
    assert_eq!(component.totals, ComponentTotals::Drained { charged: 30, refunded: 0, level: 30 });
    let first = merge(origin, there, meter_reply.clone()).await.expect("merged");
    let again = merge(origin, there, meter_reply).await.expect("merged");
    assert_eq!(((first.charged, first.stale), (again.charged, again.stale)), ((30, 0), (0, 1)));
    let call = far.next(vec![update(b"global", cross_region(1))], vec![checks(&[(0, 1)], 1)]);
    let meter_reply = far.make(&call).await.meters[0];
    assert_eq!((meter_reply.room, meter_reply.is_global), (69, true));
    // The usage of a peer counts there too, so each unit charged there is published.
    assert_eq!(gather(origin, there, EVERYTHING).await.components.len(), 1);
}

async fn isolated_region_has_its_regional_share(origin: &Arc<dyn Origin>) {
    let mut session = TestSession::new(origin, 13);
    assert_eq!(session.ask(b"apart", cross_region(1), 1, 99).await, 40);
    assert_eq!(settle(origin, 13).await.components, []);
    assert_eq!(session.ask(b"apart", cross_region(1), 1, 99).await, 60, "the rest of the whole limit");
    let meter_reply = gather(origin, 13, EVERYTHING).await.components;
    assert_eq!(meter_reply[0].totals, ComponentTotals::Drained { charged: 100, refunded: 0, level: 100 });
    gather(origin, 13, RoundRequest { connected_for_us: 0, ..HEARD }).await;
    assert_eq!(session.ask(b"apart", cross_region(1), 1, 99).await, 0);
}

async fn a_region_stays_on_its_part_until_all_that_others_charged_has_come(origin: &Arc<dyn Origin>) {
    let mut session = TestSession::new(origin, 18);
    assert!(!gather(origin, 18, EVERYTHING).await.includes_isolated);
    assert!(gather(origin, 18, RoundRequest { settled: false, ..HEARD }).await.includes_isolated);
    assert_eq!(session.ask(b"settling", cross_region(1), 1, 99).await, 40);
    assert!(gather(origin, 18, HEARD).await.includes_isolated);
    assert_eq!(session.ask(b"settling", cross_region(1), 1, 99).await, 60);
}

async fn share_usage_is_published_without_further_requests(origin: &Arc<dyn Origin>) {
    let mut session = TestSession::new(origin, 17);
    assert_eq!(session.ask(b"parted", cross_region(1), 1, 30).await, 30);
    let first = gather(origin, 17, HEARD).await;
    assert_eq!((first.components, first.more), (vec![], true));
    let meter_reply = gather(origin, 17, RoundRequest { after: first.upto, ..EVERYTHING }).await;
    assert_eq!(
        meter_reply.components[0].totals,
        ComponentTotals::Drained { charged: 30, refunded: 0, level: 30 }
    );
    assert!(!meter_reply.more);
}

async fn a_node_may_not_know_yet_that_a_limit_is_of_several_regions(origin: &Arc<dyn Origin>) {
    settle(origin, 14).await;
    let (mut early, mut late) = (TestSession::new(origin, 14), TestSession::new(origin, 14));
    assert_eq!(early.ask(b"known", cross_region(2), 1, 20).await, 20);
    assert_eq!(late.ask(b"known", a_day(Lapse::Counted, 1), 1, 5).await, 5);
    let meter_reply = gather(origin, 14, EVERYTHING).await.components;
    assert_eq!(meter_reply[0].totals, ComponentTotals::Drained { charged: 25, refunded: 0, level: 25 });
}

async fn marks_come_in_pages_until_they_are_trimmed(origin: &Arc<dyn Origin>) {
    settle(origin, 15).await;
    let mut session = TestSession::new(origin, 15);
    for name in 0..5u8 {
        assert_eq!(session.ask(&[name], cross_region(1), 10, 1).await, 1);
    }
    let names =
        |gathered: &RoundReply| gathered.components.iter().map(|found| found.key[0]).collect::<Vec<_>>();
    let first = gather(origin, 15, RoundRequest { most: 2, ..EVERYTHING }).await;
    assert_eq!((names(&first), first.more), (vec![0, 1], true));
    let second = gather(origin, 15, RoundRequest { after: first.upto, trim: first.upto, ..EVERYTHING }).await;
    assert_eq!((names(&second), second.more), (vec![2, 3, 4], false));
    let rest = gather(origin, 15, RoundRequest { after: second.upto, ..EVERYTHING }).await;
    assert_eq!((names(&rest), rest.upto), (vec![], second.upto));
    assert_eq!(
        names(&gather(origin, 15, EVERYTHING).await),
        [2, 3, 4],
        "trimmed meters are not gathered again"
    );
    let unknown =
        gather(origin, 15, RoundRequest { after: second.upto + 1, trim: second.upto + 1, ..EVERYTHING })
            .await;
    assert_eq!(names(&unknown), [2, 3, 4], "a cursor of another incarnation reads from the start");
}

async fn a_full_merge_is_taken_and_nonsense_refused(origin: &Arc<dyn Origin>) {
    let component = |number: usize| Component {
        key: format!("merged {number}").into_bytes().into(),
        terms: cross_region(1),
        incarnation: 1,
        totals: ComponentTotals::Drained { charged: 7, refunded: 0, level: 7 },
    };
    let all: Vec<Component> = (0..UPDATES_PER_CALL_MAX).map(component).collect();
    let merged = merge(origin, 16, all.clone()).await.expect("merged");
    assert_eq!((merged.charged, merged.stale), (7 * UPDATES_PER_CALL_MAX as u64, 0));
    let regional = Component { terms: a_day(Lapse::Counted, 1), ..component(0) };
    assert_eq!(merge(origin, 16, vec![regional]).await.expect("merged").stale, 1);
    let too_many = all.into_iter().chain([component(UPDATES_PER_CALL_MAX)]).collect();
    let refused = OriginError::Refused(CallError::TooMany { given: UPDATES_PER_CALL_MAX + 1 });
    assert_eq!(merge(origin, 16, too_many).await, Err(refused));
    let twice = merge(origin, 16, vec![component(0), component(0)]).await;
    assert!(matches!(twice, Err(OriginError::Refused(CallError::Twice { .. }))), "{twice:?}");
    let nothing = MergeRequest { from: RegionId(1), components: Vec::new() };
    for outside in
        [origin.round(PARTITIONS, &EVERYTHING).await.err(), origin.merge(PARTITIONS, &nothing).await.err()]
    {
        assert!(matches!(outside, Some(OriginError::NotApplied(_))), "{outside:?}");
    }
}

async fn a_lease_is_of_one(origin: &Arc<dyn Origin>) {
    let hour_us = 3_600_000_000;
    let request = async |holder, for_us, lag_us| {
        let request = LeaseRequest { holder, for_us, lag_us };
        answered(async || origin.lease(request).await).await.expect("nothing to refuse")
    };
    let lease = async |holder, for_us| request(holder, for_us, 0).await.is_held;
    assert!(!lease(1, 0).await, "releasing a lease does not acquire it");
    assert!(lease(1, hour_us).await);
    assert!(!lease(u64::MAX, hour_us).await);
    assert_eq!(
        request(1, hour_us, 700_000).await,
        LeaseReply { is_held: true, lag_us: 700_000 },
        "the holder keeps the lease"
    );
    let other = request(u64::MAX, hour_us, 9).await;
    assert_eq!(other, LeaseReply { is_held: false, lag_us: 700_000 }, "only the holder reports a lag");
    assert!(!lease(u64::MAX, 0).await, "only the holder releases the lease");
    assert!(!lease(u64::MAX, hour_us).await);
    assert!(!lease(1, 0).await);
    assert!(lease(u64::MAX, 1_000).await);
    let deadline = Instant::now() + TIME_MAX;
    while !lease(1, hour_us).await {
        assert!(Instant::now() < deadline, "the lease expires");
    }
}

/// Lets many nodes request more than one meter has, with grants in between. Returns the units that
/// they got together, and whether any reply reported lost writes.
pub async fn spend_all(
    origin: &Arc<dyn Origin>,
    partition: u16,
    key: &'static [u8],
    nodes: u64,
) -> (u64, bool) {
    let terms = a_day(Lapse::Counted, 1);
    let spenders = (0..nodes).map(|number| {
        let mut session = TestSession::new(origin, partition);
        tokio::spawn(async move {
            let mut got = 0;
            for round in 0..2 * BURST / nodes {
                if (round + number) % 3 == 0 {
                    let granted = session.hold(key, terms, 0, 2).await;
                    session.hold(key, terms, granted, 0).await;
                    got += granted;
                } else {
                    got += u64::from(session.ask(key, terms, 1, 1).await);
                }
            }
            // Other nodes have returned the grants that they held meanwhile.
            while session.ask(key, terms, 1, 1).await == 1 {
                got += 1;
            }
            (got, session.lost)
        })
    });
    let spenders: Vec<_> = spenders.collect();
    let (mut got, mut lost) = (0, false);
    for spender in spenders {
        let (its, meter_reply) = spender.await.expect("no panic");
        got += its;
        lost |= meter_reply;
    }
    (got, lost)
}
