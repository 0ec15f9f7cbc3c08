//! Questions that another region decides.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use tidegate_core::Limit;
use tidegate_replication::wire::Frame;
use tidegate_replication::{
    ForwardAction, ForwardDecision, ForwardHandler, ForwardReply, ForwardRequest, ForwardedCheck,
    PeerCertificates, Replicator, region_id,
};
use tidegate_testkit::{Proxy, Traffic};
use tokio::sync::Semaphore;

use common::{Hand, Region, TIME_MAX};

/// Replies with the cost of each check, once it has a permit.
struct Echo {
    may: Semaphore,
}

impl Echo {
    fn new(may: usize) -> Arc<Self> {
        Arc::new(Self { may: Semaphore::new(may) })
    }
}

impl ForwardHandler for Echo {
    fn answer(&self, forward: ForwardRequest) -> Pin<Box<dyn Future<Output = ForwardReply> + Send + '_>> {
        Box::pin(async move {
            self.may.acquire().await.unwrap().forget();
            let costs = forward.checks.iter().map(|check| u32::try_from(check.cost).unwrap());
            let decision = ForwardDecision { remaining: costs.collect(), denied: Some((0, 7)) };
            ForwardReply { id: forward.id, decision: Some(decision) }
        })
    }
}

fn check(cost: u64) -> ForwardRequest {
    let limit = Limit::gcra(10, Duration::from_mins(1)).unwrap();
    let check = ForwardedCheck {
        tenant: "acme".to_owned(),
        name: "logins".to_owned(),
        limit,
        tolerance_ppm: 0,
        version: 1,
        key: b"alice"[..].into(),
        placement: None,
        cost,
    };
    ForwardRequest { id: 0, act: ForwardAction::Decide, checks: vec![check] }
}

/// Repeats a check until a reply arrives, because the connection may not exist yet.
async fn ask(replicator: &Replicator, cost: u64) -> ForwardDecision {
    let forwarder = replicator.forwarder();
    let asking = async {
        loop {
            let answer = forwarder.ask(region_id("us"), check(cost), TIME_MAX).await;
            if let Some(decision) = answer.and_then(|answer| answer.decision) {
                return decision;
            }
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(TIME_MAX, asking).await.unwrap()
}

fn start<A: ForwardHandler + 'static>(
    region: &Region,
    peer: (&str, std::net::SocketAddr),
    forward_handler: Option<Arc<A>>,
) -> Replicator {
    let mut config = region.config(&[peer]);
    config.forward_handler =
        forward_handler.map(|forward_handler| forward_handler as Arc<dyn ForwardHandler>);
    region.start_with(config)
}

/// Adds up charges and refunds. It rejects the first request that it receives.
#[derive(Default)]
struct Ledger {
    asked: AtomicU64,
    charged: AtomicU64,
    refunded: AtomicU64,
    rolled_back: AtomicU64,
    /// Since when the last of that was charged.
    since_us: AtomicU64,
}

impl Ledger {
    fn given_back(&self) -> u64 {
        self.refunded.load(Ordering::SeqCst) + self.rolled_back.load(Ordering::SeqCst)
    }

    fn totals(&self) -> (u64, u64) {
        (self.charged.load(Ordering::SeqCst), self.refunded.load(Ordering::SeqCst))
    }
}

impl ForwardHandler for Ledger {
    fn answer(&self, forward: ForwardRequest) -> Pin<Box<dyn Future<Output = ForwardReply> + Send + '_>> {
        let is_first = self.asked.fetch_add(1, Ordering::SeqCst) == 0;
        let cost = forward.checks[0].cost;
        match forward.act {
            _ if is_first => {}
            ForwardAction::Decide => {}
            ForwardAction::Charge => drop(self.charged.fetch_add(cost, Ordering::SeqCst)),
            ForwardAction::Refund => drop(self.refunded.fetch_add(cost, Ordering::SeqCst)),
            ForwardAction::RollBack { since_us } => {
                self.since_us.store(since_us, Ordering::SeqCst);
                self.rolled_back.fetch_add(cost, Ordering::SeqCst);
            }
        }
        let decision = (!is_first).then(|| ForwardDecision { remaining: vec![0], denied: None });
        Box::pin(std::future::ready(ForwardReply { id: forward.id, decision }))
    }
}

fn telling(
    replicator: &Replicator,
    act: ForwardAction,
    cost: u64,
) -> impl Future<Output = Result<bool, tokio::task::JoinError>> + use<> {
    let forwarder = replicator.forwarder();
    tokio::spawn(
        async move { forwarder.deliver(region_id("us"), ForwardRequest { act, ..check(cost) }).await },
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn charge_is_retried_until_received_and_counts_once() {
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let link = Proxy::start(us.address());
    let asker = start::<Ledger>(&eu, ("us", link.address()), None);
    // Sent before the owner starts. The owner then rejects the first request.
    let early = [telling(&asker, ForwardAction::Charge, 1), telling(&asker, ForwardAction::Refund, 10)];
    let ledger = Arc::<Ledger>::default();
    let _owner = start(&us, ("eu", eu.address()), Some(Arc::clone(&ledger)));
    for early in early {
        assert!(early.await.unwrap());
    }
    assert_eq!(ledger.totals(), (1, 10));
    for (traffic, cost) in
        [(Traffic::DropAnswers, 100), (Traffic::CutAnswers, 1_000), (Traffic::HalfOpen, 10_000)]
    {
        let (before, lost) = (ledger.totals(), link.lost());
        link.set(traffic);
        let meter_reply = telling(&asker, ForwardAction::Charge, cost);
        if traffic == Traffic::HalfOpen {
            // Until the idle timeout has closed the connection and a new one is made.
            let connections = link.connections();
            tidegate_testkit::wait_until("another connection", TIME_MAX, || link.connections() > connections);
        } else {
            tidegate_testkit::wait_until("the charge to arrive", TIME_MAX, || {
                ledger.totals().0 == before.0 + cost && link.lost() > lost
            });
        }
        link.set(Traffic::Pass);
        assert!(meter_reply.await.unwrap(), "{traffic:?}");
        assert_eq!(ledger.totals(), (before.0 + cost, before.1), "{traffic:?}");
    }
    let counts = asker.status().peers[0].counts;
    assert_eq!((counts.charges_given_up, counts.refunds_given_up), (0, 0));
}

/// Maximum time of a delivery on a working connection. Longer: a failed attempt takes longer.
const SOON: Duration = Duration::from_secs(2);

/// Outcome of a delivery after the test tried to lose its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The owner received it, its reply was lost, and it was not retried.
    Lost,
    /// It was sent on a broken connection and not retried.
    Unheard,
    /// It was not sent at first, and delivered later.
    ToldAgain,
}

/// Delivers 1, 1 and 10 units. The reply to the 10 units is lost, unless another reply is lost
/// instead.
async fn deliver_with_lost_reply(
    link: &Proxy,
    asker: &Replicator,
    ledger: &Ledger,
    act: ForwardAction,
) -> End {
    link.set(Traffic::Pass);
    // The second delivery follows the first heartbeat of the connection. Otherwise the reply to
    // that heartbeat would be lost instead.
    for _ in 0..2 {
        assert!(telling(asker, act, 1).await.unwrap());
    }
    let (given_back, lost) = (ledger.given_back(), link.lost());
    link.set(Traffic::CutAnswers);
    let meter_reply = telling(asker, act, 10);
    let losing = async {
        let mut looks = tokio::time::interval(Duration::from_millis(1));
        while ledger.given_back() != given_back + 10 || link.lost() == lost {
            looks.tick().await;
        }
    };
    let is_lost = tokio::time::timeout(SOON, losing).await.is_ok();
    // A retry would now reach the owner and get a reply.
    link.set(Traffic::Pass);
    match (is_lost, meter_reply.await.unwrap()) {
        (true, is_told) => {
            assert!(!is_told, "{act:?}");
            End::Lost
        }
        (false, true) => End::ToldAgain,
        (false, false) => End::Unheard,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refund_applies_at_most_once_and_unknown_ones_are_counted() {
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let link = Proxy::start(us.address());
    let asker = start::<Ledger>(&eu, ("us", link.address()), None);
    let ledger = Arc::<Ledger>::default();
    let owner = start(&us, ("eu", eu.address()), Some(Arc::clone(&ledger)));
    let (mut heard, mut given_up) = ([0, 0], 0);
    for (at, act) in [ForwardAction::Refund, ForwardAction::RollBack { since_us: 0 }].into_iter().enumerate()
    {
        let mut is_lost = false;
        while !is_lost {
            let end = deliver_with_lost_reply(&link, &asker, &ledger, act).await;
            // If the reply to a heartbeat comes just then, it is lost instead, with its connection.
            // A delivery sent by then is given up, received or not. One not yet sent is retried.
            is_lost = end == End::Lost;
            heard[at] += if end == End::Unheard { 2 } else { 12 };
            given_up += u64::from(end != End::ToldAgain);
            assert_eq!(asker.status().peers[0].counts.refunds_given_up, given_up, "{act:?}");
        }
    }
    let [refunded, rolled_back] = heard;
    assert_eq!((ledger.totals(), ledger.rolled_back.load(Ordering::SeqCst)), ((0, refunded), rolled_back));
    // A delivery that was never sent is retried, even after a long time.
    owner.stop().await;
    link.set(Traffic::Pass);
    let meter_reply = telling(&asker, ForwardAction::Refund, 100);
    let _owner = start(&us, ("eu", eu.address()), Some(Arc::clone(&ledger)));
    // It depends on the network whether the delivery was sent before the owner stopped.
    let more = if meter_reply.await.unwrap() { 100 } else { 0 };
    assert_eq!(ledger.totals(), (0, refunded + more));
    asker.forwarder().settle(TIME_MAX).await;
}

/// The owner has another clock, and the time in transit is unknown. If a charge looked later than
/// it was, units that have already drained would be refunded again.
#[tokio::test(flavor = "multi_thread")]
async fn rollback_never_states_a_later_charge_time() {
    const AHEAD_US: u64 = 31_536_000_000_000;
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let link = Proxy::start(us.address());
    link.set(Traffic::Far(Duration::from_millis(20), u32::MAX));
    let asker = start::<Ledger>(&eu, ("us", link.address()), None);
    let since_us = common::now_us();
    // Sent before the owner starts, and the owner rejects the first request. The retry must not
    // make the charge look later.
    let meter_reply = telling(&asker, ForwardAction::RollBack { since_us }, 10);
    let ledger = Arc::<Ledger>::default();
    let mut config = us.config(&[("eu", eu.address())]);
    config.now_us = Arc::new(|| common::now_us() + AHEAD_US);
    config.forward_handler = Some(Arc::clone(&ledger) as Arc<dyn ForwardHandler>);
    let _owner = us.start_with(config);
    assert!(meter_reply.await.unwrap());
    let (took_us, heard_us) = (common::now_us() - since_us, ledger.since_us.load(Ordering::SeqCst));
    assert_eq!(ledger.rolled_back.load(Ordering::SeqCst), 10);
    let charged_us = since_us + AHEAD_US;
    assert!((charged_us - 2 * took_us..=charged_us).contains(&heard_us), "{heard_us}, not {charged_us}");
}

/// An incarnation is the node's own claim and proves no identity.
#[tokio::test(flavor = "multi_thread")]
async fn deliveries_are_deduplicated_per_region() {
    let [ap, eu, us] = ["ap", "eu", "us"].map(Region::new);
    let ledger = Arc::<Ledger>::default();
    let mut config = us.config(&[("ap", ap.address()), ("eu", eu.address())]);
    config.forward_handler = Some(Arc::clone(&ledger) as Arc<dyn ForwardHandler>);
    let _owner = us.start_with(config);
    let mut hands = [Hand::greet(&us, "ap").await, Hand::greet(&us, "eu").await];
    for (id, cost, charged) in [(1, 1, 1), (2, 10, 21), (2, 100, 21)] {
        let forward = ForwardRequest { id, act: ForwardAction::Charge, ..check(cost) };
        for hand in &mut hands {
            hand.say(&Frame::Forward(forward.clone(), u64::MAX)).await;
            assert!(matches!(hand.hear().await, Frame::Forwarded(..)));
        }
        // The owner rejects the very first request.
        assert_eq!(ledger.totals(), (charged, 0), "number {id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_decides_for_another_and_many_at_once() {
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let echo = Echo::new(1);
    let asker = start::<Echo>(&eu, ("us", us.address()), None);
    let _owner = start(&us, ("eu", eu.address()), Some(Arc::clone(&echo)));
    assert_eq!(ask(&asker, 3).await, ForwardDecision { remaining: vec![3], denied: Some((0, 7)) });
    // The owner replies to none of these before all are started.
    let checks: Vec<_> = (0..100)
        .map(|cost| {
            let forwarder = asker.forwarder();
            tokio::spawn(async move { forwarder.ask(region_id("us"), check(cost), TIME_MAX).await })
        })
        .collect();
    echo.may.add_permits(100);
    for (cost, asking) in (0_u32..).zip(checks) {
        let decision = asking.await.unwrap().unwrap().decision.unwrap();
        assert_eq!(decision.remaining, [cost], "each check gets its own decision");
    }
    let nobody = asker.forwarder().ask(region_id("mars"), check(1), TIME_MAX).await;
    assert_eq!(nobody, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_check_times_out_and_the_next_connection_works() {
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let link = Proxy::start(us.address());
    let asker = start::<Echo>(&eu, ("us", link.address()), None);
    let _owner = start(&us, ("eu", eu.address()), Some(Echo::new(1_000)));
    ask(&asker, 1).await;
    common::wait_for(&asker, "a connection", |status| status.peers[0].has_link && status.is_connected);
    let before = link.connections();
    let mut long = check(1);
    long.checks[0].key = vec![b'x'; 100_000].into();
    assert_eq!(
        asker.forwarder().ask(region_id("us"), long, TIME_MAX).await,
        None,
        "a key longer than the wire format is not forwarded"
    );
    ask(&asker, 1).await;
    assert_eq!(link.connections(), before, "the connection stays open");
    for traffic in [Traffic::DropAnswers, Traffic::HalfOpen, Traffic::CutAnswers] {
        link.set(traffic);
        let soon = Duration::from_millis(50);
        assert_eq!(asker.forwarder().ask(region_id("us"), check(1), soon).await, None, "{traffic:?}");
        link.set(Traffic::Pass);
        ask(&asker, 2).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_are_encrypted_and_only_peers_may_ask() {
    let (eu, us) = (Region::new("eu"), Region::new("us"));
    let mut authority = CertificateParams::new(Vec::new()).unwrap();
    authority.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(authority, KeyPair::generate().unwrap()).unwrap();
    let certify = |region: &str| {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec![format!("{region}.tidegate")]).unwrap();
        let certificate = params.signed_by(&key, &authority).unwrap();
        PeerCertificates {
            authority: authority.pem().into_bytes(),
            chain: certificate.pem().into_bytes(),
            key: key.serialize_pem().into_bytes(),
        }
    };
    let mut config = us.config(&[("eu", eu.address())]);
    config.certificates = Some(certify("us"));
    config.forward_handler = Some(Echo::new(1_000));
    let owner = us.start_with(config);
    let mut config = eu.config(&[("us", us.address())]);
    config.certificates = Some(certify("eu"));
    let asker = eu.start_with(config);
    ask(&asker, 5).await;
    // The authority signed its certificate, but it is not a peer.
    let stranger = Region::new("ap");
    let mut config = stranger.config(&[("us", us.address())]);
    config.certificates = Some(certify("ap"));
    let stranger = stranger.start_with(config);
    stranger.forwarder().keep_ready();
    common::wait_for(&owner, "a stranger to be refused", |status| status.strangers > 0);
    let answer = stranger.forwarder().ask(region_id("us"), check(1), Duration::from_millis(50)).await;
    assert_eq!(answer, None);
}
