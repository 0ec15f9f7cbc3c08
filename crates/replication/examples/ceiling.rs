//! Measures how many components two replicators transfer over a long distance, and the cost of
//! merging them.
//!
//! ```sh
//! cargo run --release -p tidegate-replication --features net --example ceiling            # origins in memory
//! cargo run --release -p tidegate-replication --features net --example ceiling -- redis   # a redis-server for each
//! ```
//!
//! Every key of one region has usage. The other region receives all of them through a proxy that
//! delays both directions. Both replicators and the proxy share one machine.

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::cast_precision_loss,
    reason = "a measurement program"
)]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tidegate_core::Limit;
use tidegate_core::origin::{
    Call, Charge, CheckGroup, CrossRegionTerms, Lapse, MergeReply, MergeRequest, MeterUpdate, NodeId,
    RoundReply, RoundRequest, StoreId, Terms,
};
use tidegate_origin::redis::{RedisConfig, RedisOrigin};
use tidegate_origin::{
    LeaseReply, LeaseRequest, MemoryOrigin, Origin, OriginFuture, PARTITIONS, partition_of,
};
use tidegate_replication::{PeerConfig, Replicator, ReplicatorConfig};
use tidegate_testkit::{Proxy, Redis, Traffic, ask, free_port};

/// Number of keys to replicate, and bytes of each, as in `tidegate plan`.
const KEYS: u32 = 500_000;
const KEY_BYTES: usize = 32;

/// Keys of one call.
const UPDATES: usize = 64;

/// Delays of the proxy in each direction, ms.
const WAYS_MS: [u64; 3] = [0, 40, 80];

/// Rounds without changes, to measure the cost of an empty round.
const QUIET_ROUNDS: u64 = 25;

#[expect(clippy::disallowed_methods, reason = "replicators and their network run in real time")]
fn now() -> Instant {
    Instant::now()
}

fn clock(started: Instant) -> impl Fn() -> u64 + Send + Sync + Copy + 'static {
    move || {
        #[expect(clippy::disallowed_methods, reason = "replicators and their network run in real time")]
        let since = started.elapsed();
        1_000_000_000 + u64::try_from(since.as_micros()).unwrap()
    }
}

fn terms() -> Terms {
    let limit = Limit::gcra(1_000, Duration::from_hours(1_000)).unwrap();
    let cross_region =
        CrossRegionTerms { publish_threshold: 1, share_amount: 1, share_capacity: 300, debt_max: 10_000 };
    Terms::new(&limit, 0, Lapse::Counted, 1).with_cross_region(cross_region)
}

fn key(number: u32) -> Vec<u8> {
    format!("{number:0KEY_BYTES$}").into_bytes()
}

/// An origin that counts the components it merges.
struct CountingOrigin {
    origin: Arc<dyn Origin>,
    merged: AtomicU64,
}

impl Origin for CountingOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.origin.call(partition, call)
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        self.origin.round(partition, round)
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        Box::pin(async move {
            let answer = self.origin.merge(partition, merge).await;
            if answer.is_ok() {
                self.merged.fetch_add(merge.components.len() as u64, Ordering::Relaxed);
            }
            answer
        })
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        self.origin.lease(request)
    }
}

/// Uses some of every key.
async fn use_all(origin: &dyn Origin) {
    let mut by_partition: Vec<Vec<Vec<u8>>> = vec![Vec::new(); usize::from(PARTITIONS)];
    for key in (0..KEYS).map(key) {
        by_partition[usize::from(partition_of(&key))].push(key);
    }
    for (partition, keys) in (0..).zip(by_partition) {
        for (number, some) in (1..).zip(keys.chunks(UPDATES)) {
            let update = |key: &Vec<u8>| MeterUpdate::new(key.as_slice(), terms());
            let checks = (0..some.len())
                .map(|meter| CheckGroup {
                    charges: vec![Charge { meter: meter.try_into().unwrap(), cost: 10 }],
                    count: 1,
                })
                .collect();
            let call = Call {
                node: NodeId(number),
                sequence: 1,
                acknowledged: 0,
                known_us: 0,
                store: StoreId::default(),
                updates: some.iter().map(update).collect(),
                checks,
            };
            origin.call(partition, &call).await.unwrap();
        }
    }
}

/// CPU time of a redis-server so far, µs.
fn cpu_us(redis: &Redis) -> f64 {
    let info: String = ask(redis, &["INFO", "cpu"]);
    let of = |name: &str| -> f64 {
        let line = info.lines().find_map(|line| line.strip_prefix(name)).unwrap();
        line.trim().parse().unwrap()
    };
    1e6 * (of("used_cpu_user:") + of("used_cpu_sys:"))
}

struct Place {
    origin: Arc<CountingOrigin>,
    port: u16,
}

impl Place {
    fn new(origin: Arc<dyn Origin>) -> Self {
        Self { origin: Arc::new(CountingOrigin { origin, merged: AtomicU64::new(0) }), port: free_port() }
    }

    fn start(
        &self,
        name: &str,
        peer: &str,
        address: &str,
        now_us: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Replicator {
        let mut config =
            ReplicatorConfig::new(name, ([127, 0, 0, 1], self.port).into(), now_us, self.port.into());
        config.peers = vec![PeerConfig { region: peer.to_owned(), addresses: vec![address.to_owned()] }];
        Replicator::start(config, Arc::clone(&self.origin) as Arc<dyn Origin>).unwrap()
    }
}

#[tokio::main]
async fn main() {
    let stores = std::env::args().any(|word| word == "redis").then(|| [Redis::start(&[]), Redis::start(&[])]);
    for way_ms in WAYS_MS {
        measure(Duration::from_millis(way_ms), stores.as_ref()).await;
        // Each run begins with empty meters.
        for store in stores.iter().flatten() {
            let _: String = ask(store, &["FLUSHALL"]);
        }
    }
}

async fn measure(way: Duration, stores: Option<&[Redis; 2]>) {
    let now_us = clock(now());
    let place = |at: usize| {
        Place::new(match stores {
            None => Arc::new(MemoryOrigin::new(now_us)),
            Some(stores) => {
                let config = RedisConfig::new(stores[at].url().parse().unwrap(), 7);
                Arc::new(RedisOrigin::open(config).unwrap())
            }
        })
    };
    let (from, to) = (place(0), place(1));
    use_all(from.origin.as_ref()).await;
    let link = Proxy::start(([127, 0, 0, 1], to.port).into());
    link.set(Traffic::Far(way, u32::MAX));
    let receiver = to.start("us", "eu", &format!("127.0.0.1:{}", from.port), now_us);
    until(|| receiver.status().is_replicator).await;
    let merged = || to.origin.merged.load(Ordering::Relaxed);
    let cpu = || stores.map(|stores| stores.each_ref().map(cpu_us));
    let sender = from.start("eu", "us", &link.address().to_string(), now_us);
    until(|| merged() > u64::from(KEYS) / 10).await;
    let (began, first, before) = (now(), merged(), cpu());
    until(|| merged() >= u64::from(KEYS)).await;
    let (took, all) = (now() - began, merged() - first);
    println!(
        "round trip {:>3} ms: {:>7.0} components/s, {} batches, {} calls failed",
        2 * way.as_millis(),
        all as f64 / took.as_secs_f64(),
        sender.status().peers[0].counts.batches_sent,
        sender.status().origin_failures + receiver.status().origin_failures,
    );
    if let (Some(before), Some(after)) = (before, cpu()) {
        let each = |at: usize| (after[at] - before[at]) / all as f64;
        println!("  Redis: {:.1} us of CPU to gather a component, {:.1} us to merge it", each(0), each(1));
        let rounds = || sender.status().rounds;
        let earlier = rounds();
        until(|| rounds() >= earlier + QUIET_ROUNDS).await;
        let (earlier, before) = (rounds(), cpu_us(&stores.unwrap()[0]));
        until(|| rounds() >= earlier + QUIET_ROUNDS).await;
        let looks = (rounds() - earlier) * u64::from(PARTITIONS);
        println!(
            "  Redis: {:.1} us of CPU to look into a partition",
            (cpu_us(&stores.unwrap()[0]) - before) / looks as f64
        );
    }
    sender.stop().await;
    receiver.stop().await;
}

#[expect(clippy::disallowed_methods, reason = "replicators and their network run in real time")]
async fn until(is_so: impl Fn() -> bool) {
    while !is_so() {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
