//! Strict limits: the owner region decides each key, and other regions forward their checks to it.

use std::pin::Pin;
use std::sync::Arc;

use tidegate_core::engine::{ChargeLocation, Resolution};
use tidegate_core::origin::NEVER_US;
use tidegate_core::{Class, RequestVerdict, Retry};
use tidegate_replication::{
    ForwardAction, ForwardDecision, ForwardHandler, ForwardReply, ForwardRequest, ForwardedCheck,
};

use super::check::{RegionCheck, RegionPolicy};
use super::fallback::closed;
use super::regions::RegionLayout;
use super::{DecisionSource, MissingReply, Regime, Region, RegionDecision, resolved};
use crate::decision::Outcome;
use crate::gate::Gate;

/// Returns the peer region that owns a check, as its position among the regions; `None` if this
/// region decides it.
pub(super) fn owner(check: &RegionCheck<'_, '_>) -> Option<usize> {
    let origin_limit = check.origin_limit();
    let layout = origin_limit.layout.as_deref().filter(|_| origin_limit.policy.regime == Regime::Strict)?;
    layout.owner(&[origin_limit.prefix(), check.key()])
}

/// Returns the action that makes the owner region give a charge back. Its time is that of the local
/// clock, which the replicator uses too.
pub(super) fn roll_back_action(location: ChargeLocation) -> ForwardAction {
    match location {
        ChargeLocation::OnNode { since_us } => ForwardAction::RollBack { since_us },
        // The clock of another region's origin is unknown here, so all of it counts as drained.
        ChargeLocation::AtOrigin { .. } => ForwardAction::RollBack { since_us: 0 },
    }
}

impl Region {
    /// Forwards checks to the owner region. Without a reply in time, the request is denied.
    pub(super) async fn forward_checks<'g>(
        &self,
        owner: usize,
        group: &[&RegionCheck<'g, '_>],
    ) -> RegionDecision<'g> {
        let decision = self.forward(owner, ForwardAction::Decide, group).await;
        let resolution = decision.and_then(|decision| resolution(decision, group.len()));
        match resolution {
            Some(resolution) => {
                let decision = resolved(group, &resolution);
                RegionDecision { decision, source: DecisionSource::Regional, missing_reply: None }
            }
            None => RegionDecision {
                decision: closed(group),
                source: DecisionSource::Closed,
                missing_reply: Some(MissingReply::Owner),
            },
        }
    }

    async fn forward(
        &self,
        owner: usize,
        act: ForwardAction,
        group: &[&RegionCheck<'_, '_>],
    ) -> Option<ForwardDecision> {
        let peer_regions = self.peer_regions.as_deref()?;
        let forwarder = peer_regions.forwarder()?;
        let (region, timeout) = (peer_regions.layout.id(owner)?, peer_regions.forward_time_max());
        forwarder.ask(region, forward_request(act, group), timeout).await?.decision
    }

    /// Gives back charges made here at `since_us` or later, for a request of a peer region that is
    /// denied in the end.
    fn roll_back_for_another(&self, checks: &[RegionCheck<'_, '_>], since_us: u64) {
        for check in checks {
            self.driver.roll_back_for_another(check.partition(), &check.charge(), since_us);
        }
    }

    /// Sends a charge or a refund to the owner region in the background, with retries until it is
    /// acknowledged. A charge counts at least once, a refund at most once. The replicator counts
    /// abandoned deliveries.
    pub(super) fn deliver_to_owner(&self, owner: usize, act: ForwardAction, check: &RegionCheck<'_, '_>) {
        let Some(peer_regions) = self.peer_regions.as_deref() else { return };
        let (Some(forwarder), Some(region)) = (peer_regions.forwarder(), peer_regions.layout.id(owner))
        else {
            return;
        };
        let forward = forward_request(act, &[check]);
        self.driver.spawn(async move {
            forwarder.deliver(region, forward).await;
        });
    }
}

fn forward_request(act: ForwardAction, group: &[&RegionCheck<'_, '_>]) -> ForwardRequest {
    let check = |check: &&RegionCheck<'_, '_>| {
        let (gate, origin_limit) = (check.node_check.gate(), check.origin_limit());
        ForwardedCheck {
            tenant: origin_limit.tenant().to_owned(),
            name: origin_limit.name().to_owned(),
            limit: *gate.limit(),
            tolerance_ppm: origin_limit.policy.tolerance_ppm,
            version: origin_limit.policy.version,
            key: check.key().into(),
            placement: check.placement().map(Into::into),
            cost: check.node_check.cost,
        }
    };
    // Numbered when it is sent.
    ForwardRequest { id: 0, act, checks: group.iter().map(check).collect() }
}

/// Converts the decision of an owner region on this number of limits, as if from an origin; `None`
/// if it is invalid.
fn resolution(decision: ForwardDecision, limits: usize) -> Option<Resolution> {
    let ForwardDecision { remaining, denied } = decision;
    if remaining.len() != limits {
        return None;
    }
    let remaining = remaining.into_boxed_slice();
    Some(match denied {
        None => Resolution::Allowed { remaining, charged_us: None },
        Some((by, retry_us)) => Resolution::Denied { by: by.into(), remaining, retry_us },
    })
}

/// The handler of checks that peer regions forward to this owner region.
pub(super) struct Owner {
    /// Without peers: a forwarded check is not forwarded again.
    pub(super) region: Region,
    /// Owner regions of keys, by the configuration of this node.
    layout: Arc<RegionLayout>,
}

impl ForwardHandler for Owner {
    fn answer(&self, forward: ForwardRequest) -> Pin<Box<dyn Future<Output = ForwardReply> + Send + '_>> {
        Box::pin(async move {
            let id = forward.id;
            ForwardReply { id, decision: self.decide(&forward).await }
        })
    }
}

impl Owner {
    async fn decide(&self, forward: &ForwardRequest) -> Option<ForwardDecision> {
        let gates: Option<Vec<Gate>> = forward.checks.iter().map(|check| self.gate(check)).collect();
        let gates = gates?;
        // If regions have different region lists, two of them might own a key. Then neither decides
        // for the other.
        if !gates.iter().zip(&forward.checks).all(|(gate, check)| self.decides_for(gate, &check.key)) {
            return None;
        }
        let checks: Vec<RegionCheck<'_, '_>> =
            gates.iter().zip(&forward.checks).map(|(gate, check)| local_check(gate, check)).collect();
        match forward.act {
            ForwardAction::Decide => decision(&self.region.check(&checks).await.ok()?),
            ForwardAction::Charge => {
                self.region.charge(&checks);
                Some(nothing_left(&checks))
            }
            ForwardAction::Refund => {
                self.region.refund(&checks);
                Some(nothing_left(&checks))
            }
            ForwardAction::RollBack { since_us } => {
                self.region.roll_back_for_another(&checks, since_us);
                Some(nothing_left(&checks))
            }
        }
    }

    /// Whether this region owns a key, by the configuration of this node.
    fn decides_for(&self, gate: &Gate, key: &[u8]) -> bool {
        gate.origin_limit()
            .is_some_and(|origin_limit| self.layout.owner(&[origin_limit.prefix(), key]).is_none())
    }

    fn gate(&self, check: &ForwardedCheck) -> Option<Gate> {
        let ForwardedCheck { tenant, name, limit, tolerance_ppm, version, .. } = check;
        let (tolerance_ppm, version) = (*tolerance_ppm, *version);
        // Decided here, and never forwarded.
        let regime = Regime::Regional;
        let policy = RegionPolicy { tolerance_ppm, regime, version, ..RegionPolicy::of(Class::Security) };
        self.region.gate_with(tenant, name, *limit, policy).ok()
    }
}

fn local_check<'g, 'k>(gate: &'g Gate, forwarded: &'k ForwardedCheck) -> RegionCheck<'g, 'k> {
    let check = gate.region_check(&forwarded.key).cost(forwarded.cost);
    match &forwarded.placement {
        Some(placement) => check.placed_by(placement),
        None => check,
    }
}

/// Converts a decision for the forwarding region; `None` if it does not rest on the origin.
fn decision(region_decision: &RegionDecision<'_>) -> Option<ForwardDecision> {
    if region_decision.source > DecisionSource::Regional {
        return None;
    }
    let outcomes = region_decision.decision.outcomes();
    let retry_us = |retry: Option<Retry>| match retry {
        Some(Retry::After(us)) => us,
        _ => NEVER_US,
    };
    let denied = match region_decision.decision.decided {
        RequestVerdict::Denied { by } => {
            Some((u16::try_from(by).ok()?, retry_us(outcomes.get(by)?.verdict().retry())))
        }
        RequestVerdict::Allowed => None,
    };
    Some(ForwardDecision { remaining: outcomes.iter().map(Outcome::remaining).collect(), denied })
}

/// Returns the reply to a request without a check.
fn nothing_left(checks: &[RegionCheck<'_, '_>]) -> ForwardDecision {
    ForwardDecision { remaining: vec![0; checks.len()], denied: None }
}

impl Region {
    /// Returns the handler of checks that peer regions forward to this node.
    pub(super) fn as_owner(&self, layout: Arc<RegionLayout>) -> Arc<dyn ForwardHandler> {
        Arc::new(Owner { region: Self { peer_regions: None, ..self.clone() }, layout })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use tidegate_core::engine::EngineSettings;
    use tidegate_core::origin::{Call, MergeReply, MergeRequest, RoundReply, RoundRequest};
    use tidegate_core::{Limit, Now};
    use tidegate_origin::{LeaseReply, LeaseRequest, MemoryOrigin, Origin, OriginFuture};
    use tidegate_replication::{PeerConfig, owner_of, region_id};

    use super::super::MultiRegionConfig;
    use super::*;
    use crate::{Clock, Limiter, SystemClock};

    const MINUTE: Duration = Duration::from_mins(1);

    /// An address without a listener.
    const NOBODY: &str = "127.0.0.1:1";

    /// Returns a region of one node that waits up to a minute for a decision, and a gate with a
    /// strict limit.
    fn among(own: &str, peers: &[(&str, &str)]) -> (Region, Gate) {
        let clock = SystemClock::new();
        let origin = Arc::new(MemoryOrigin::new(move || clock.now().wall_us()));
        among_around(own, peers, origin, SystemClock::new())
    }

    /// The same around this origin, by this clock.
    fn among_around(
        own: &str,
        peers: &[(&str, &str)],
        origin: Arc<dyn Origin>,
        clock: impl Clock + 'static,
    ) -> (Region, Gate) {
        let mut regions = MultiRegionConfig::new(own, ([127, 0, 0, 1], 0).into());
        let peer = |(region, address): &(&str, &str)| PeerConfig {
            region: (*region).to_owned(),
            addresses: vec![(*address).to_owned()],
        };
        regions.peers = peers.iter().map(peer).collect();
        regions.forward_time_max = MINUTE;
        let limiter = Arc::new(Limiter::builder().clock(clock).build().expect("a limiter"));
        let patient =
            EngineSettings { deadline_us: 60_000_000, hedge_us: 60_000_000, ..EngineSettings::default() };
        let region = Region::join_among(regions, limiter, origin, patient).expect("a good one");
        let policy = RegionPolicy { regime: Regime::Strict, ..RegionPolicy::of(Class::Security) };
        let limit = Limit::gcra(10, MINUTE).expect("in range");
        let gate = region.gate_with("", "logins", limit, policy).expect("a name");
        (region, gate)
    }

    /// Returns a key that this region owns.
    fn key_of(owner: &str, regions: &[&str], gate: &Gate) -> String {
        let prefix = gate.origin_limit().expect("a gate with an origin").prefix();
        let ids: Vec<_> = regions.iter().map(|name| region_id(name)).collect();
        let mut keys = (0..1_000).map(|number| format!("198.51.100.{number}"));
        let is_of_it = |key: &String| regions[owner_of(&ids, &[prefix, key.as_bytes()])] == owner;
        keys.find(is_of_it).expect("each region owns some keys")
    }

    /// Repeats a request until the owner region replies: the first may precede the connection.
    async fn check_until_connected(region: &Region, checks: &[RegionCheck<'_, '_>]) -> bool {
        let decided = async {
            loop {
                let region_decision = region.check(checks).await.expect("few limits");
                if region_decision.source != DecisionSource::Closed {
                    return region_decision.is_allowed();
                }
            }
        };
        tokio::time::timeout(MINUTE, decided).await.expect("a connection")
    }

    /// A clock that the test moves, shared by all nodes.
    #[derive(Clone, Debug)]
    struct Hand(Arc<AtomicU64>);

    impl Clock for Hand {
        fn now(&self) -> Now {
            let us = self.0.load(Ordering::Relaxed);
            Now::from_micros(us, us)
        }
    }

    /// A charge for a request of a peer region may be rolled back late. By then it has drained, and
    /// other requests have used the drained units.
    #[tokio::test]
    async fn late_rollback_of_a_peer_refunds_no_drained_units() {
        let clock = Hand(Arc::new(AtomicU64::new(1 << 50)));
        let reads = clock.clone();
        let origin = Arc::new(MemoryOrigin::new(move || reads.now().wall_us()));
        let eu =
            || among_around("eu", &[("us", NOBODY)], Arc::clone(&origin) as Arc<dyn Origin>, clock.clone());
        let (region, gate) = eu();
        let key = key_of("eu", &["eu", "us"], &gate);
        let applied = async |region: &Region, act: ForwardAction| {
            let layout = Arc::clone(&region.peer_regions.as_ref().expect("one of two").layout);
            let owner = region.as_owner(layout);
            let decision =
                owner.answer(forward_request(act, &[&gate.region_check(&key).cost(10)])).await.decision;
            decision.expect("this region owns the key").denied.is_none()
        };
        let since_us = clock.now().mono_us();
        assert!(applied(&region, ForwardAction::Decide).await);
        // All of it drains in a minute.
        clock.0.fetch_add(61_000_000, Ordering::Relaxed);
        assert!(applied(&region, ForwardAction::Decide).await, "one burst");
        assert!(applied(&region, ForwardAction::RollBack { since_us }).await);
        region.leave().await;
        assert!(!applied(&eu().0, ForwardAction::Decide).await, "a rollback does not refund drained units");
        // No unit of the latest charge has drained.
        let (last, since_us) = (eu().0, clock.now().mono_us());
        assert!(!applied(&last, ForwardAction::Decide).await);
        assert!(applied(&last, ForwardAction::RollBack { since_us }).await);
        last.leave().await;
        assert!(applied(&eu().0, ForwardAction::Decide).await, "the charge was refunded");
    }

    /// An origin that records when it made a charge, and the charge time that a refund states.
    struct Witness {
        inner: MemoryOrigin,
        charged_us: AtomicU64,
        given_back: Mutex<Option<(u64, u64)>>,
    }

    impl Origin for Witness {
        fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
            Box::pin(async move {
                let reply = self.inner.call(partition, call).await?;
                if call.checks.iter().flat_map(|group| &group.charges).any(|charge| charge.cost > 0) {
                    self.charged_us.store(reply.now_us, Ordering::SeqCst);
                }
                if let Some(update) = call.updates.iter().find(|update| update.refund > 0) {
                    let given_back = (update.refund, update.refund_of_us);
                    *self.given_back.lock().expect("no thread panicked") = Some(given_back);
                }
                Ok(reply)
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

    #[tokio::test(flavor = "multi_thread")]
    async fn cross_region_rollback_carries_the_charge_time() {
        let clock = SystemClock::new();
        let witness = Arc::new(Witness {
            inner: MemoryOrigin::new(move || clock.now().wall_us()),
            charged_us: AtomicU64::new(0),
            given_back: Mutex::default(),
        });
        let peers = [("ap", NOBODY), ("us", NOBODY)];
        let (eu, _) = among_around("eu", &peers, Arc::clone(&witness) as Arc<dyn Origin>, SystemClock::new());
        let (ap, _) = among("ap", &[("eu", NOBODY), ("us", NOBODY)]);
        let address = |region: &Region| {
            region.start_replication().expect("a free port").expect("it has peers").to_string()
        };
        let (us, logins) = among("us", &[("eu", &address(&eu)), ("ap", &address(&ap))]);
        address(&us);
        let [of_eu, of_ap] = ["eu", "ap"].map(|owner| key_of(owner, &["ap", "eu", "us"], &logins));
        assert!(check_until_connected(&us, &[logins.region_check(&of_ap).cost(10)]).await);
        assert!(check_until_connected(&us, &[logins.region_check(&of_eu)]).await);
        let both = [logins.region_check(&of_eu).cost(7), logins.region_check(&of_ap).cost(10)];
        assert!(!check_until_connected(&us, &both).await, "nothing is left in ap");
        let refund = async {
            loop {
                if let Some(given_back) = *witness.given_back.lock().expect("no thread panicked") {
                    return given_back;
                }
                tokio::task::yield_now().await;
            }
        };
        let (units, of_us) = tokio::time::timeout(MINUTE, refund).await.expect("the refund arrives");
        let charged_us = witness.charged_us.load(Ordering::SeqCst);
        assert_eq!(units, 7);
        assert!((1..=charged_us).contains(&of_us), "charged at {charged_us}, and given back as of {of_us}");
    }

    /// If one region knows of a new region before the others do, the keys that move there have one
    /// bucket and not two.
    #[tokio::test(flavor = "multi_thread")]
    async fn region_decides_forwarded_checks_only_if_both_regions_name_it_as_owner() {
        let (eu, _) = among("eu", &[("us", NOBODY), ("sa", NOBODY)]);
        let address = eu.start_replication().expect("a free port").expect("it has peers").to_string();
        let (us, logins) = among("us", &[("eu", &address)]);
        us.start_replication().expect("a free port");
        let prefix = logins.origin_limit().expect("a gate with an origin").prefix();
        let is_of_eu = |regions: &[&str], key: &str| {
            let ids: Vec<_> = regions.iter().map(|name| region_id(name)).collect();
            regions[owner_of(&ids, &[prefix, key.as_bytes()])] == "eu"
        };
        let keys = (0..60).map(|number| format!("192.0.2.{number}"));
        let forwarded_to_eu = keys.filter(|key| is_of_eu(&["eu", "us"], key));
        let (unmoved, moved): (Vec<_>, Vec<_>) =
            forwarded_to_eu.partition(|key| is_of_eu(&["eu", "sa", "us"], key));
        assert!(!unmoved.is_empty() && !moved.is_empty());
        let source_of =
            async |key: &str| us.check(&[logins.region_check(key)]).await.expect("one limit").source;
        // The first check may precede the connection.
        let decided = async { while source_of(&unmoved[0]).await == DecisionSource::Closed {} };
        tokio::time::timeout(MINUTE, decided).await.expect("a connection");
        for key in &moved {
            assert_eq!(source_of(key).await, DecisionSource::Closed, "{key}: another region may own the key");
        }
        for key in &unmoved {
            assert_eq!(
                source_of(key).await,
                DecisionSource::Regional,
                "{key}: both configurations name the same owner"
            );
        }
    }
}
