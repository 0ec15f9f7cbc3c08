//! What every origin does, whatever it is made of: the tests of each run the same suite.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_core::Limit;
use tidegate_core::origin::{
    Ask, Call, CallError, Charge, Lapse, NodeId, Reply, StoreId, Terms, UPDATES_PER_CALL_MAX, Update,
};
use tidegate_origin::redis::{RedisConfig, RedisOrigin, Servers};
use tidegate_origin::{Origin, OriginError, PARTITIONS};

/// How long a store may be away, on a machine that has much else to do.
pub const TIME_MAX: Duration = Duration::from_mins(1);

/// What a test's limits allow. It drains in a day, which no test takes.
pub const BURST: u64 = 100;

static NODES: AtomicU64 = AtomicU64::new(1);

pub fn a_day(lapse: Lapse, version: u32) -> Terms {
    let limit = Limit::gcra(1, Duration::from_hours(24)).and_then(|limit| limit.with_burst(BURST));
    Terms::new(&limit.expect("in range"), 0, lapse, version)
}

/// One lane of a node.
pub struct Lane {
    pub origin: Arc<dyn Origin>,
    pub partition: u16,
    node: NodeId,
    sequence: u64,
    acknowledged: u64,
    /// Whether the origin ever said that it lost writes.
    pub lost: bool,
}

impl Lane {
    pub fn new(origin: &Arc<dyn Origin>, partition: u16) -> Self {
        let node = NodeId(NODES.fetch_add(1, Ordering::Relaxed) << 32 | u64::from(std::process::id()));
        Self { origin: Arc::clone(origin), partition, node, sequence: 0, acknowledged: 0, lost: false }
    }

    /// The next call of the lane.
    pub fn next(&mut self, updates: Vec<Update>, asks: Vec<Ask>) -> Call {
        self.sequence += 1;
        let (node, sequence, acknowledged) = (self.node, self.sequence, self.acknowledged);
        Call { node, sequence, acknowledged, store: StoreId::default(), updates, asks }
    }

    /// Makes a call until there is an answer, as nodes do.
    pub async fn make(&mut self, call: &Call) -> Reply {
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
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub async fn ask(&mut self, key: &[u8], terms: Terms, cost: u64, count: u32) -> u32 {
        let call = self.next(vec![update(key, terms)], vec![asks(&[(0, cost)], count)]);
        self.make(&call).await.asks[0].passed
    }

    /// Waits until a loss is taken into account: a store is asked who it is twice in a second, and a meter that must hold
    /// then has no room.
    pub async fn until_full(&mut self, key: &[u8], terms: Terms) {
        self.until("a full meter", key, terms, |_, room| room == 0).await;
    }

    /// Waits until this lane is told of a loss.
    pub async fn until_lost(&mut self, key: &[u8], terms: Terms) {
        self.until("a word of the loss", key, terms, |lost, _| lost).await;
    }

    async fn until(&mut self, what: &str, key: &[u8], terms: Terms, condition: fn(bool, u64) -> bool) {
        let deadline = Instant::now() + TIME_MAX;
        loop {
            let call = self.next(vec![update(key, terms)], Vec::new());
            let room = self.make(&call).await.told[0].room;
            if condition(self.lost, room) {
                return;
            }
            assert!(Instant::now() < deadline, "waited {TIME_MAX:?} for {what}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Reports what was used, keeps nothing, and gets what it wants, if it can.
    pub async fn hold(&mut self, key: &[u8], terms: Terms, used: u64, want: u64) -> u64 {
        let call = self.next(vec![Update { used, want, ..update(key, terms) }], Vec::new());
        self.make(&call).await.told[0].grant
    }
}

/// Requests that wait: the places of their meters with what each costs there, and how many there are.
pub fn asks(charges: &[(u16, u64)], count: u32) -> Ask {
    let charges = charges.iter().map(|&(meter, cost)| Charge { meter, cost });
    Ask { charges: charges.collect(), count }
}

pub fn update(key: &[u8], terms: Terms) -> Update {
    Update {
        key: key.into(),
        terms,
        used: 0,
        refund: 0,
        refund_of_us: 0,
        keep: 0,
        want: 0,
        life_us: 10_000_000,
        cell: 0,
    }
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

/// What every origin does.
pub async fn conforms(origin: Arc<dyn Origin>) {
    what_is_held_counts_as_used(&origin).await;
    a_repeat_gets_the_first_answer(&origin).await;
    all_limits_of_a_request_pass_or_none(&origin).await;
    each_limit_of_a_request_has_its_own_cost(&origin).await;
    every_name_is_a_meter_of_its_own(&origin).await;
    the_higher_version_holds(&origin).await;
    what_makes_no_sense_is_refused(&origin).await;
    a_full_call_is_taken(&origin).await;
    for partition in [0, 1, 100, PARTITIONS - 1] {
        let (passed, lost) = spend_all(&origin, partition, b"hot", 8).await;
        assert_eq!((passed, lost), (BURST, false), "partition {partition}");
    }
}

async fn what_is_held_counts_as_used(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let (mut first, mut second) = (Lane::new(origin, 3), Lane::new(origin, 3));
    assert_eq!(first.hold(b"held", terms, 0, 80).await, 80);
    assert_eq!(second.hold(b"held", terms, 0, 80).await, 10, "half of what is left");
    assert_eq!(second.ask(b"held", terms, 1, 99).await, 20, "what it held is given back");
    assert_eq!(first.hold(b"held", terms, 30, 0).await, 0);
    assert_eq!(second.ask(b"held", terms, 1, 99).await, 50, "30 of 80 were used");
}

async fn a_repeat_gets_the_first_answer(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(origin, 4);
    let call = lane.next(vec![update(b"again", terms)], vec![asks(&[(0, 7)], 1)]);
    let first = lane.make(&call).await;
    assert_eq!(origin.call(4, &call).await, Ok(first.clone()));
    assert_eq!(origin.hedge(4, &call).await, Ok(first.clone()));
    let (one, other) = tokio::join!(origin.call(4, &call), origin.hedge(4, &call));
    assert_eq!((one, other), (Ok(first.clone()), Ok(first)));
    assert_eq!(lane.ask(b"again", terms, 1, 99).await, 93);
    let outdated = OriginError::Refused(CallError::Outdated { sequence: 2 });
    assert_eq!(origin.call(4, &call).await, Err(outdated));
}

async fn all_limits_of_a_request_pass_or_none(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Forgiven, 1);
    let mut lane = Lane::new(origin, 5);
    assert_eq!(lane.ask(b"narrow", terms, 90, 1).await, 1);
    let updates = vec![update(b"wide", terms), update(b"narrow", terms)];
    let call = lane.next(updates, vec![asks(&[(0, 4), (1, 4)], 9)]);
    let decided = lane.make(&call).await.asks[0];
    assert_eq!((decided.passed, decided.denied_by), (2, 1));
    assert_eq!(lane.ask(b"wide", terms, 1, 99).await, 92);
}

async fn each_limit_of_a_request_has_its_own_cost(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(origin, 10);
    let said = |back: [u64; 2]| {
        let named = [(&b"requests"[..], back[0]), (b"tokens", back[1])];
        named.map(|(key, refund)| Update { refund, ..update(key, terms) }).to_vec()
    };
    let call = lane.next(said([0, 0]), vec![asks(&[(0, 1), (1, 20)], 9)]);
    let decided = lane.make(&call).await.asks[0];
    assert_eq!((decided.passed, decided.denied_by), (5, 1), "five times 20 tokens are all there are");
    let call = lane.next(said([0, 0]), vec![asks(&[(0, 96), (1, 0)], 1)]);
    let decided = lane.make(&call).await.asks[0];
    assert_eq!((decided.passed, decided.denied_by), (0, 0), "95 requests are left, and no token is needed");
    // Who stopped waiting gets back what it paid: each limit its own.
    let call = lane.next(said([1, 20]), Vec::new());
    let left: Vec<u64> = lane.make(&call).await.told.iter().map(|told| told.room).collect();
    assert_eq!(left, [96, 20]);
}

async fn every_name_is_a_meter_of_its_own(origin: &Arc<dyn Origin>) {
    let terms = a_day(Lapse::Counted, 1);
    let mut lane = Lane::new(origin, 6);
    for name in [&b""[..], b"a", b"a\0", b"a ", b"a:b", b"{6}:m:a", b"\r\n", &[255, 254], &[b'x'; 1_000]] {
        assert_eq!(lane.ask(name, terms, 1, 200).await, 100, "{}", name.escape_ascii());
    }
}

async fn the_higher_version_holds(origin: &Arc<dyn Origin>) {
    let five = Limit::gcra(1, Duration::from_hours(24)).and_then(|limit| limit.with_burst(5));
    let five = Terms::new(&five.expect("in range"), 0, Lapse::Counted, 2);
    let mut lane = Lane::new(origin, 7);
    assert_eq!(lane.ask(b"new", a_day(Lapse::Counted, 1), 1, 3).await, 3);
    assert_eq!(lane.ask(b"new", five, 1, 99).await, 2);
    assert_eq!(lane.ask(b"new", a_day(Lapse::Counted, 1), 1, 99).await, 0);
}

async fn what_makes_no_sense_is_refused(origin: &Arc<dyn Origin>) {
    let mut lane = Lane::new(origin, 8);
    let same = update(b"twice", a_day(Lapse::Counted, 1));
    let call = lane.next(vec![same.clone(), same], Vec::new());
    assert!(matches!(origin.call(8, &call).await, Err(OriginError::Refused(CallError::Twice { .. }))));
    let once = vec![update(b"once", a_day(Lapse::Counted, 1))];
    let call = lane.next(once, vec![asks(&[(0, 1), (0, 2)], 1)]);
    let refused = OriginError::Refused(CallError::ChargedTwice { meter: 0 });
    assert_eq!(origin.call(8, &call).await, Err(refused));
    let call = lane.next(Vec::new(), Vec::new());
    assert!(matches!(origin.call(PARTITIONS, &call).await, Err(OriginError::NotApplied(_))));
}

async fn a_full_call_is_taken(origin: &Arc<dyn Origin>) {
    let mut lane = Lane::new(origin, 9);
    let name = |number: usize| format!("full {number}").into_bytes();
    let terms = a_day(Lapse::Counted, 1);
    let updates = (0..UPDATES_PER_CALL_MAX).map(|number| Update { want: 1, ..update(&name(number), terms) });
    let meters = 0u16..;
    let all = meters.take(UPDATES_PER_CALL_MAX).map(|meter| asks(&[(meter, 1)], 2));
    let call = lane.next(updates.collect(), all.collect());
    let reply = lane.make(&call).await;
    assert!(reply.told.iter().all(|told| told.grant == 1));
    assert!(reply.asks.iter().all(|decided| decided.passed == 2));
}

/// Lets many nodes ask for more than there is of one meter, and hold parts of it in between. How much they got together,
/// and whether anyone was told that writes were lost.
pub async fn spend_all(
    origin: &Arc<dyn Origin>,
    partition: u16,
    key: &'static [u8],
    nodes: u64,
) -> (u64, bool) {
    let terms = a_day(Lapse::Counted, 1);
    let spenders = (0..nodes).map(|number| {
        let mut lane = Lane::new(origin, partition);
        tokio::spawn(async move {
            let mut got = 0;
            for round in 0..2 * BURST / nodes {
                if (round + number) % 3 == 0 {
                    let granted = lane.hold(key, terms, 0, 2).await;
                    lane.hold(key, terms, granted, 0).await;
                    got += granted;
                } else {
                    got += u64::from(lane.ask(key, terms, 1, 1).await);
                }
            }
            // What others held in the meantime has come back.
            while lane.ask(key, terms, 1, 1).await == 1 {
                got += 1;
            }
            (got, lane.lost)
        })
    });
    let spenders: Vec<_> = spenders.collect();
    let (mut got, mut lost) = (0, false);
    for spender in spenders {
        let (its, told) = spender.await.expect("no panic");
        got += its;
        lost |= told;
    }
    (got, lost)
}
