//! Shared parts of the replicator tests: regions on free ports, and origins that can stop a call
//! midway.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use tidegate_core::Limit;
use tidegate_core::origin::{
    Call, Charge, CheckGroup, Component, ComponentTotals, CrossRegionTerms, Lapse, MergeReply, MergeRequest,
    MeterReply, MeterUpdate, NodeId, RoundReply, RoundRequest, StoreId, Terms,
};
use tidegate_origin::{LeaseReply, LeaseRequest, MemoryOrigin, Origin, OriginFuture, partition_of};
use tidegate_replication::wire::{Frame, Hello};
use tidegate_replication::{PeerConfig, ReplicationStatus, Replicator, ReplicatorConfig};
use tidegate_testkit::{free_port, wait_until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::Notify;

/// Timeout of every wait in a test, for a busy machine.
pub const TIME_MAX: Duration = Duration::from_secs(30);

/// The shortest peer timeout allowed, to keep tests short.
pub const PEER_TIMEOUT: Duration = Duration::from_secs(2);

/// Burst of the limit in these tests. Almost none of it drains during a test.
pub const BURST: u64 = 1_000;

/// This region's part of it.
pub const PART: u64 = 300;

/// Real time: replicators and origins of these tests live in it.
#[expect(clippy::disallowed_methods, reason = "tests of real sockets run in real time")]
pub fn now_us() -> u64 {
    static START: OnceLock<Instant> = OnceLock::new();
    // Not from zero: the time before the test began is long ago, as it is on every machine.
    let since = START.get_or_init(Instant::now).elapsed();
    1_000_000_000 + u64::try_from(since.as_micros()).unwrap()
}

pub fn terms() -> Terms {
    let limit = Limit::gcra(BURST, Duration::from_hours(1_000)).unwrap();
    let cross_region = CrossRegionTerms {
        publish_threshold: 1,
        share_amount: 1,
        share_capacity: PART,
        debt_max: 10 * BURST,
    };
    Terms::new(&limit, 0, Lapse::Counted, 1).with_cross_region(cross_region)
}

pub fn component(key: &str, charged: u64) -> Component {
    let totals = ComponentTotals::Drained { charged, refunded: 0, level: charged };
    Component { key: key.as_bytes().into(), terms: terms(), incarnation: 1, totals }
}

/// An update of a meter without a grant.
pub fn update(key: &str) -> MeterUpdate {
    MeterUpdate::new(key.as_bytes(), terms())
}

/// The points at which a call to an origin can be stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    BeforeLease,
    AfterLease,
    BeforeRound,
    AfterRound,
    BeforeMerge,
    AfterMerge,
}

pub const STOPS: [Stop; 6] = [
    Stop::BeforeLease,
    Stop::AfterLease,
    Stop::BeforeRound,
    Stop::AfterRound,
    Stop::BeforeMerge,
    Stop::AfterMerge,
];

/// A region with an origin that can stop calls forever, before or after they take effect.
pub struct Region {
    pub name: &'static str,
    pub origin: Arc<StoppableOrigin>,
    pub port: u16,
    calls: AtomicU64,
}

pub struct StoppableOrigin {
    origin: MemoryOrigin,
    stop: Mutex<Option<Stop>>,
    stopped: Notify,
    stops: AtomicU64,
}

impl StoppableOrigin {
    /// The next calls of this kind never end.
    pub fn stop_at(&self, stop: Option<Stop>) {
        *self.stop.lock().unwrap() = stop;
    }

    /// How many calls were stopped.
    pub fn stops(&self) -> u64 {
        self.stops.load(Ordering::SeqCst)
    }

    async fn pass(&self, here: Stop) {
        if *self.stop.lock().unwrap() == Some(here) {
            self.stops.fetch_add(1, Ordering::SeqCst);
            self.stopped.notified().await;
        }
    }
}

impl Origin for StoppableOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.origin.call(partition, call)
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        Box::pin(async move {
            self.pass(Stop::BeforeRound).await;
            let answer = self.origin.round(partition, round).await;
            self.pass(Stop::AfterRound).await;
            answer
        })
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        Box::pin(async move {
            self.pass(Stop::BeforeMerge).await;
            let answer = self.origin.merge(partition, merge).await;
            self.pass(Stop::AfterMerge).await;
            answer
        })
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        Box::pin(async move {
            self.pass(Stop::BeforeLease).await;
            let answer = self.origin.lease(request).await;
            self.pass(Stop::AfterLease).await;
            answer
        })
    }
}

impl Region {
    pub fn new(name: &'static str) -> Self {
        let origin = StoppableOrigin {
            origin: MemoryOrigin::new(now_us),
            stop: Mutex::new(None),
            stopped: Notify::new(),
            stops: AtomicU64::new(0),
        };
        Self { name, origin: Arc::new(origin), port: free_port(), calls: AtomicU64::new(0) }
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    /// A configuration under which it speaks to others at these addresses.
    pub fn config(&self, peers: &[(&str, SocketAddr)]) -> ReplicatorConfig {
        static SEEDS: AtomicU64 = AtomicU64::new(1);
        let seed = SEEDS.fetch_add(1, Ordering::Relaxed) << 32;
        let mut config = ReplicatorConfig::new(self.name, self.address(), now_us, seed);
        config.peer_timeout = PEER_TIMEOUT;
        let peer = |(region, address): &(&str, SocketAddr)| PeerConfig {
            region: (*region).to_owned(),
            addresses: vec![address.to_string()],
        };
        config.peers = peers.iter().map(peer).collect();
        config
    }

    pub fn start(&self, peers: &[(&str, SocketAddr)]) -> Replicator {
        self.start_with(self.config(peers))
    }

    pub fn start_with(&self, config: ReplicatorConfig) -> Replicator {
        Replicator::start(config, Arc::clone(&self.origin) as Arc<dyn Origin>).unwrap()
    }

    /// Uses some of a key's limit, or looks at it with 0.
    pub async fn charge(&self, key: &str, used: u64) -> MeterReply {
        let sequence = self.calls.fetch_add(1, Ordering::Relaxed) + 1;
        let call = Call {
            // A new session for each call: the order of calls to a partition does not matter here.
            node: NodeId(sequence),
            sequence: 1,
            acknowledged: 0,
            known_us: 0,
            store: StoreId::default(),
            updates: vec![update(key)],
            checks: vec![CheckGroup { charges: vec![Charge { meter: 0, cost: used }], count: 1 }],
        };
        let reply = self.origin.call(partition_of(key.as_bytes()), &call).await.unwrap();
        assert_eq!(reply.checks[0].passed, 1, "{used} units fit");
        reply.meters[0]
    }

    /// Returns the units left under a key's limit.
    pub fn room(&self, key: &str) -> u64 {
        self.look(key).room
    }

    pub fn look(&self, key: &str) -> MeterReply {
        // The origin is in memory, so the call completes at once.
        futures_util::FutureExt::now_or_never(self.charge(key, 0)).unwrap()
    }

    /// Waits until the region counts with the others on this key.
    pub fn wait_until_connected(&self, key: &str) {
        wait_until(&format!("{} to be connected", self.name), TIME_MAX, || self.look(key).is_global);
    }

    /// Waits until this much is left of a key's limit.
    pub fn wait_for_room(&self, key: &str, room: u64) {
        let awaited = format!("room for {room} in {}", self.name);
        let waiting = std::panic::AssertUnwindSafe(|| {
            wait_until(&awaited, TIME_MAX, || self.room(key) == room);
        });
        assert!(std::panic::catch_unwind(waiting).is_ok(), "waited for {awaited}: it is {}", self.room(key));
    }
}

/// Waits until the status of a replicator meets a condition.
pub fn wait_for(replicator: &Replicator, awaited: &str, is_so: impl Fn(&ReplicationStatus) -> bool) {
    let waiting =
        std::panic::AssertUnwindSafe(|| wait_until(awaited, TIME_MAX, || is_so(&replicator.status())));
    assert!(std::panic::catch_unwind(waiting).is_ok(), "waited for {awaited}: {:#?}", replicator.status());
}

/// Incarnation that a `Hand` claims.
pub const HAND: u64 = 9;

/// A client that sends and receives replication frames by hand.
pub struct Hand {
    stream: TcpStream,
}

impl Hand {
    pub async fn greet(to: &Region, from: &str) -> Self {
        let mut hand = Self { stream: TcpStream::connect(to.address()).await.unwrap() };
        hand.say(&Frame::Hello(Hello {
            from: from.to_owned(),
            to: to.name.to_owned(),
            incarnation: HAND,
            agreement: 0,
        }))
        .await;
        assert!(matches!(hand.hear().await, Frame::Welcome(_)));
        hand
    }

    pub async fn say(&mut self, frame: &Frame) {
        self.stream.write_all(&frame.encode()).await.unwrap();
    }

    pub async fn hear(&mut self) -> Frame {
        let length = self.stream.read_u32().await.unwrap();
        let mut bytes = vec![0; usize::try_from(length).unwrap()];
        self.stream.read_exact(&mut bytes).await.unwrap();
        Frame::decode(&bytes).unwrap()
    }
}
