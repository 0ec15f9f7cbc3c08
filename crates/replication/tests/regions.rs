//! Regions with origins in memory and replicators on real sockets.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate_core::origin::{
    Call, Charge, CheckGroup, DIRTY_METERS_MAX, MergeReply, MergeRequest, NodeId, RoundReply, RoundRequest,
    StoreId,
};
use tidegate_origin::{LeaseReply, LeaseRequest, MemoryOrigin, Origin, OriginFuture, partition_of};
use tidegate_replication::wire::{Frame, Refusal};
use tidegate_replication::{
    Batch, BatchFreshness, BatchId, ComponentGroup, ForwardAction, ForwardRequest, LAG_ALARM_US, Replicator,
};
use tidegate_testkit::{Proxy, Traffic, wait_until};

use common::{BURST, Hand, PART, Region, STOPS, Stop, TIME_MAX, component, now_us, update, wait_for};

const KEY: &str = "api/alice";

#[tokio::test(flavor = "multi_thread")]
async fn usage_of_one_region_counts_in_all_others() {
    let [eu, us, ap] = ["eu", "us", "ap"].map(Region::new);
    let _eu = eu.start(&[("us", us.address()), ("ap", ap.address())]);
    let _us = us.start(&[("eu", eu.address()), ("ap", ap.address())]);
    let replicator = ap.start(&[("eu", eu.address()), ("us", us.address())]);
    for region in [&eu, &us, &ap] {
        region.wait_until_connected(KEY);
    }
    eu.charge(KEY, 10).await;
    us.charge(KEY, 200).await;
    for region in [&eu, &us, &ap] {
        region.wait_for_room(KEY, BURST - 210);
    }
    wait_for(&replicator, "a round trip", |status| {
        status.peers.iter().all(|peer| peer.lag_us.is_some() && peer.last_heard_age_us.is_some())
    });
    let status = replicator.status();
    assert!(status.is_replicator && status.is_connected, "{status:#?}");
    for peer in &status.peers {
        let counts = peer.counts;
        assert_eq!((counts.components_received, counts.refused), (1, 0), "{status:#?}");
        assert!(counts.bytes_sent > 0 && counts.bytes_received > 0 && counts.batches_sent > 0, "{status:#?}");
    }
    for _ in 0..3 {
        eu.charge(KEY, 1).await;
    }
    ap.wait_for_room(KEY, BURST - 213);
}

/// Three regions. The connections between the first two, in both directions, go through proxies
/// that can cut them.
struct Triangle {
    eu: Region,
    us: Region,
    ap: Region,
    replicators: [tidegate_replication::Replicator; 3],
    links: [Proxy; 2],
}

fn triangle() -> Triangle {
    let [eu, us, ap] = ["eu", "us", "ap"].map(Region::new);
    let links = [Proxy::start(us.address()), Proxy::start(eu.address())];
    let replicators = [
        eu.start(&[("us", links[0].address()), ("ap", ap.address())]),
        us.start(&[("eu", links[1].address()), ("ap", ap.address())]),
        ap.start(&[("eu", eu.address()), ("us", us.address())]),
    ];
    Triangle { eu, us, ap, replicators, links }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_makes_all_regions_fall_back_to_their_parts_and_nothing_is_lost_when_it_heals() {
    let Triangle { eu, us, ap, replicators, links } = triangle();
    for region in [&eu, &us, &ap] {
        region.wait_until_connected(KEY);
    }
    for link in &links {
        link.set(Traffic::HalfOpen);
    }
    // No region has noticed yet: the charge counts as connected, and the meter becomes dirty.
    eu.charge(KEY, 40).await;
    for region in [&eu, &us, &ap] {
        wait_until("the region to be isolated", TIME_MAX, || !region.look(KEY).is_global);
        assert!(region.room(KEY) <= PART, "{} is left in {}", region.room(KEY), region.name);
    }
    for replicator in &replicators {
        wait_for(replicator, "the region to be isolated", |status| {
            !status.is_connected && status.is_replicator
        });
    }
    let late = |status: &tidegate_replication::ReplicationStatus| {
        status.peers[0].lag_us.is_some_and(|lag| lag > LAG_ALARM_US)
    };
    wait_for(&replicators[0], "the lag to grow", late);
    for link in &links {
        link.set(Traffic::Pass);
    }
    for region in [&eu, &us, &ap] {
        region.wait_until_connected(KEY);
    }
    for replicator in &replicators {
        wait_for(replicator, "all peers to be heard", |status| status.is_connected);
    }
    us.wait_for_room(KEY, BURST - 40);
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_with_a_lost_acknowledgement_counts_once() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let link = Proxy::start(us.address());
    let replicator = eu.start(&[("us", link.address())]);
    let _us = us.start(&[("eu", eu.address())]);
    eu.wait_until_connected(KEY);
    us.wait_until_connected(KEY);
    for traffic in [Traffic::CutAnswers, Traffic::DropAnswers] {
        let (before, lost) = (us.room(KEY), link.lost());
        eu.charge(KEY, 7).await;
        link.set(traffic);
        wait_until("acknowledgements to be lost", TIME_MAX, || link.lost() > lost);
        link.set(Traffic::Pass);
        us.wait_for_room(KEY, before - 7);
        // Wait until everything is sent again and acknowledged.
        let batches = replicator.status().peers[0].counts.batches_sent;
        wait_for(&replicator, "batches to be sent again", |status| {
            status.peers[0].counts.batches_sent > batches + 2
        });
        assert_eq!(us.room(KEY), before - 7);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replicator_that_dies_in_the_middle_of_any_step_is_taken_over_and_nothing_is_lost_or_doubled() {
    for stop in STOPS {
        let [eu, us] = ["eu", "us"].map(Region::new);
        let _eu = eu.start(&[("us", us.address())]);
        let dying = us.start(&[("eu", eu.address())]);
        eu.wait_until_connected(KEY);
        us.wait_until_connected(KEY);
        us.origin.stop_at(Some(stop));
        // Usage is in transit in both directions.
        eu.charge(KEY, 30).await;
        us.charge(KEY, 4).await;
        wait_until(&format!("a call to stall {stop:?}"), TIME_MAX, || us.origin.stops() > 0);
        drop(dying);
        us.origin.stop_at(None);
        let mut config = us.config(&[("eu", eu.address())]);
        // The successor takes the same address, so that the peer finds it. The old listener may
        // hold the port for a moment.
        config.listen = us.address();
        let next = start_when_free(&us, &config);
        wait_for(&next, "the lease to expire", |status| status.is_replicator);
        for region in [&eu, &us] {
            wait_until(&format!("both components in {} after {stop:?}", region.name), TIME_MAX, || {
                let meter_reply = region.look(KEY);
                meter_reply.is_global && meter_reply.room == BURST - 34
            });
        }
    }
}

/// Starts a replicator as soon as its predecessor has released the port.
fn start_when_free(
    region: &Region,
    config: &tidegate_replication::ReplicatorConfig,
) -> tidegate_replication::Replicator {
    let mut started = None;
    wait_until("the port to be free", TIME_MAX, || {
        let origin = std::sync::Arc::clone(&region.origin) as std::sync::Arc<dyn tidegate_origin::Origin>;
        started = tidegate_replication::Replicator::start(config.clone(), origin).ok();
        started.is_some()
    });
    started.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_process_of_a_region_is_its_replicator_and_the_next_follows_when_it_stops() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let second_port = tidegate_testkit::free_port();
    let mut config = eu.config(&[("us", us.address())]);
    config.peers[0].addresses.push(format!("127.0.0.1:{second_port}"));
    let sender = eu.start_with(config);
    let first = us.start(&[("eu", eu.address())]);
    wait_for(&first, "the lease", |status| status.is_replicator);
    let mut config = us.config(&[("eu", eu.address())]);
    config.listen.set_port(second_port);
    let second = us.start_with(config);
    us.wait_until_connected(KEY);
    assert!(!second.status().is_replicator);
    eu.wait_until_connected(KEY);
    // Only the replicator can measure it, and the others of the region have to know.
    wait_for(&second, "the lag of the replicator", |status| status.lag_us.is_some());
    assert_eq!(second.status().peers[0].lag_us, None);

    first.stop().await;
    wait_for(&second, "the lease to be handed over", |status| status.is_replicator);
    wait_for(&sender, "the new replicator to be found", |status| status.peers[0].has_link);
    eu.charge(KEY, 3).await;
    us.wait_for_room(KEY, BURST - 3);
    wait_for(&second, "all peers to be heard", |status| status.is_connected);
    assert_eq!(
        sender.status().peers[0].counts.refused,
        0,
        "a node that is not the replicator is not counted as a refusal"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn regions_with_different_weights_report_disagreement() {
    let [eu, us, ap] = ["eu", "us", "ap"].map(Region::new);
    let others = |region: &Region, weights: u64| {
        let peers = [&eu, &us, &ap].map(|peer| (peer.name, peer.address()));
        let mut config = region.config(&peers);
        config.peers.retain(|peer| peer.region != region.name);
        config.agreement = weights;
        region.start_with(config)
    };
    let replicators = [others(&eu, 1), others(&us, 1), others(&ap, 2)];
    let agrees = |status: &tidegate_replication::ReplicationStatus| {
        status.peers.iter().map(|peer| peer.agrees).collect::<Vec<_>>()
    };
    let expected = [[true, false], [true, false], [false, false]];
    for (replicator, expected) in replicators.iter().zip(expected) {
        let expected = expected.map(Some);
        wait_for(replicator, "all peers to have greeted", |status| agrees(status) == expected);
    }
}

fn batch(sequence: u64, charged: u64) -> Frame {
    let id = BatchId { incarnation: 9, sequence };
    let freshness =
        BatchFreshness { after: 0, echo_us: 0, age_us: None, settled_age_us: None, last_heard_age_us: None };
    let group =
        ComponentGroup { partition: partition_of(KEY.as_bytes()), components: vec![component(KEY, charged)] };
    Frame::Batch(Batch { id, freshness, groups: vec![group.into()] })
}

#[tokio::test(flavor = "multi_thread")]
async fn batches_that_come_twice_or_in_another_order_change_nothing() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let _eu = eu.start(&[("us", us.address())]);
    let replicator = us.start(&[("eu", eu.address())]);
    eu.wait_until_connected(KEY);
    us.wait_until_connected(KEY);
    let mut hand = Hand::greet(&us, "eu").await;
    for (sequence, charged) in [(2, 70), (1, 30), (2, 70), (3, 90), (3, 90), (1, 30)] {
        hand.say(&batch(sequence, charged)).await;
        let Frame::Ack(ack) = hand.hear().await else { panic!("it is merged") };
        assert_eq!(ack.id.sequence, sequence);
    }
    assert_eq!(us.room(KEY), BURST - 90);
    assert_eq!(replicator.status().peers[0].counts.components_received, 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_the_replicator_lease_refuses_batches() {
    let us = Region::new("us");
    us.origin.stop_at(Some(Stop::BeforeLease));
    let _us = us.start(&[("eu", ([127, 0, 0, 1], 1).into())]);
    let mut hand = Hand::greet(&us, "eu").await;
    hand.say(&batch(1, 5)).await;
    assert_eq!(hand.hear().await, Frame::Refused(Refusal::NotReplicator));
    assert_eq!(us.room(KEY), PART, "nothing was merged");
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_that_the_origin_did_not_merge_is_resent() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let sender = eu.start(&[("us", us.address())]);
    let replicator = us.start(&[("eu", eu.address())]);
    eu.wait_until_connected(KEY);
    us.wait_until_connected(KEY);
    us.origin.stop_at(Some(Stop::BeforeMerge));
    eu.charge(KEY, 6).await;
    wait_for(&replicator, "a merge to fail", |status| status.origin_failures > 0);
    assert_eq!(sender.status().peers[0].counts.components_sent, 0);
    us.origin.stop_at(None);
    us.wait_for_room(KEY, BURST - 6);
    wait_for(&sender, "the acknowledgement", |status| status.peers[0].counts.components_sent == 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_link_shows_in_the_lag() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let link = Proxy::start(us.address());
    link.set(Traffic::DelayAnswers(Duration::from_millis(400)));
    let replicator = eu.start(&[("us", link.address())]);
    let _us = us.start(&[("eu", eu.address())]);
    // Half of the way, and an interval.
    wait_for(&replicator, "the lag to be measured", |status| {
        status.peers[0].lag_us.is_some_and(|lag_us| lag_us >= 400_000)
    });
    assert!(replicator.status().peers[0].has_link);
}

/// The heartbeat of a node that forwards checks.
fn question_of_nothing() -> Frame {
    Frame::Forward(ForwardRequest { id: 0, act: ForwardAction::Decide, checks: Vec::new() }, u64::MAX)
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_that_ask_leave_room_for_the_replicator_of_their_region() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let _us = us.start(&[("eu", eu.address())]);
    let mut asking = Vec::new();
    loop {
        let mut hand = Hand::greet(&us, "eu").await;
        hand.say(&question_of_nothing()).await;
        match hand.hear().await {
            Frame::Forwarded(..) => asking.push(hand),
            frame => {
                assert_eq!(frame, Frame::Refused(Refusal::Full));
                break;
            }
        }
        assert!(asking.len() < 1_000, "the connections of a region are bounded");
    }
    let _eu = eu.start(&[("us", us.address())]);
    eu.wait_until_connected(KEY);
    us.wait_until_connected(KEY);
    drop(asking);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_brings_batches_is_for_nothing_else() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let _eu = eu.start(&[("us", us.address())]);
    let _us = us.start(&[("eu", eu.address())]);
    us.wait_until_connected(KEY);
    let mut hand = Hand::greet(&us, "eu").await;
    hand.say(&batch(1, 5)).await;
    assert!(matches!(hand.hear().await, Frame::Ack(_)));
    hand.say(&question_of_nothing()).await;
    assert_eq!(hand.hear().await, Frame::Refused(Refusal::Nonsense));
}

/// A partition with the maximum of dirty meters, and one without any.
const BUSY: u16 = 7;
const QUIET: u16 = 8;

/// An origin that records how many rounds the quiet partition had seen when the busy one was
/// completely gathered.
struct FloodedOrigin {
    inner: MemoryOrigin,
    looks: AtomicU64,
    looks_until_told: OnceLock<u64>,
}

impl FloodedOrigin {
    async fn new() -> Arc<Self> {
        let (inner, looks) = (MemoryOrigin::new(now_us), AtomicU64::new(0));
        let flooded = Self { inner, looks, looks_until_told: OnceLock::new() };
        // An isolated region marks no meter dirty.
        let whole = RoundRequest {
            connected_for_us: 60_000_000,
            settled: true,
            clock_us: now_us(),
            trim: 0,
            after: 0,
            most: 1,
        };
        flooded.inner.round(BUSY, &whole).await.unwrap();
        let keys: Vec<String> = (0..DIRTY_METERS_MAX).map(|number| format!("api/{number}")).collect();
        for (node, some) in (1..).zip(keys.chunks(64)) {
            let charge = |meter: usize| Charge { meter: meter.try_into().unwrap(), cost: 10 };
            let ask = |meter| CheckGroup { charges: vec![charge(meter)], count: 1 };
            let call = Call {
                node: NodeId(node),
                sequence: 1,
                acknowledged: 0,
                known_us: 0,
                store: StoreId::default(),
                updates: some.iter().map(|key| update(key)).collect(),
                checks: (0..some.len()).map(ask).collect(),
            };
            flooded.inner.call(BUSY, &call).await.unwrap();
        }
        Arc::new(flooded)
    }
}

impl Origin for FloodedOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        self.inner.call(partition, call)
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        Box::pin(async move {
            let gathered = self.inner.round(partition, round).await?;
            // Only rounds that gather for a peer count.
            if partition == QUIET && round.most > 0 {
                self.looks.fetch_add(1, Ordering::SeqCst);
            }
            if partition == BUSY && round.after > 0 && !gathered.more {
                self.looks_until_told.get_or_init(|| self.looks.load(Ordering::SeqCst));
            }
            Ok(gathered)
        })
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        self.inner.merge(partition, merge)
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        self.inner.lease(request)
    }
}

/// While one partition has a backlog, peers see no progress of any partition. After the peer
/// timeout, all regions would be isolated.
#[tokio::test(flavor = "multi_thread")]
async fn full_backlog_of_a_partition_is_sent_in_one_round() {
    let [eu, us] = ["eu", "us"].map(Region::new);
    let _us = us.start(&[("eu", eu.address())]);
    let origin = FloodedOrigin::new().await;
    let mut config = eu.config(&[("us", us.address())]);
    // No time passes in which the next round could be due.
    config.now_us = Arc::new(|| 1_000_000_000);
    let replicator = Replicator::start(config, Arc::clone(&origin) as Arc<dyn Origin>).unwrap();
    let all = u64::try_from(DIRTY_METERS_MAX).unwrap();
    wait_for(&replicator, "all components to be sent", |status| {
        status.peers[0].counts.components_sent >= all
    });
    let looks = *origin.looks_until_told.get().expect("all components were sent");
    assert!(looks <= 2, "it took {looks} rounds");
}
