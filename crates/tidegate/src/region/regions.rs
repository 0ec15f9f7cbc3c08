//! Regions that count together, and this region's share of a limit.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tidegate_core::bound::{Fleet, LAG_ALARM_US, PEER_TIMEOUT_US, Promise, debt_max};
use tidegate_core::origin::{CROSS_REGION_LIFE_US_MAX, CrossRegionTerms, RegionId, Terms, share_of};
use tidegate_core::{Algorithm, Limit};
use tidegate_replication::{
    Forwarder, PEERS_MAX, PeerCertificates, PeerConfig, ReplicationStatus, Replicator, ReplicatorConfig,
    ReplicatorError, owner_of, region_id,
};

use super::Region;
use super::check::RegionPolicy;
use super::driver::Driver;
use crate::limiter::random_name;

/// Largest number of regions that count together: each connects to all others.
pub const REGIONS_MAX: usize = PEERS_MAX + 1;

/// Largest weight of a region.
pub const WEIGHT_MAX: u32 = 1_000_000;

/// Default timeout of a forwarded check.
const FORWARD_TIME_MAX: Duration = Duration::from_millis(250);

/// Longest wait of a stopping node until owner regions acknowledge charges and refunds. Longer:
/// more of them arrive over slow networks; a stop takes longer while a peer is down.
const SETTLE_TIME_MAX: Duration = Duration::from_secs(2);

/// Interval between readings of the lag. Shorter: grant lives follow sooner; more work.
const LAG_EVERY: Duration = Duration::from_millis(500);

/// Shortest life of a grant at any lag, µs: two reports. Shorter: slightly less passes meanwhile;
/// more calls to an origin that may itself be slow.
const GRANT_LIFE_US_MIN: u64 = 200_000;

const PPM: u64 = 1_000_000;

/// The configuration of a region and its peers.
#[derive(Clone, Debug)]
pub struct MultiRegionConfig {
    /// Name of this region.
    pub region: String,
    /// Where it listens for the others; port 0 takes a free one.
    pub listen: SocketAddr,
    /// All the others.
    pub peers: Vec<PeerConfig>,
    /// Weights of the regional shares, by region, this one included; 1 for a region that is not
    /// listed. They must be equal in every region, or the shares add up to more than the limit.
    pub weights: Vec<(String, u32)>,
    /// Last-heard age at which a peer counts as lost, so that each region spends only its regional
    /// share. Equal in every region. Longer: short network partitions go unnoticed; more passes
    /// before a real one is noticed.
    pub peer_timeout: Duration,
    /// Timeout of a forwarded check. Longer: more requests pass over a slow network; requests wait
    /// longer for a region that is down.
    pub forward_time_max: Duration,
    /// Certificates of this region and of the authority that it trusts. Without them, it connects
    /// only to nodes of this machine.
    pub certificates: Option<PeerCertificates>,
}

impl MultiRegionConfig {
    /// Returns the configuration of a region without peers.
    pub fn new(region: &str, listen: SocketAddr) -> Self {
        Self {
            region: region.to_owned(),
            listen,
            peers: Vec::new(),
            weights: Vec::new(),
            peer_timeout: Duration::from_micros(PEER_TIMEOUT_US),
            forward_time_max: FORWARD_TIME_MAX,
            certificates: None,
        }
    }

    /// Returns all problems of the configuration, each with its setting.
    pub fn problems(&self) -> Vec<String> {
        let mut problems = self.replicator(|| 0, 0).problems();
        let mut seen = Vec::new();
        for (name, weight) in &self.weights {
            if !self.names().contains(&name.as_str()) {
                problems.push(format!("weights: {name:?} is none of the regions"));
            }
            if seen.contains(&name) {
                problems.push(format!("weights: {name:?} is given twice"));
            }
            if !(1..=WEIGHT_MAX).contains(weight) {
                problems.push(format!("weights: {name}: {weight} is outside 1 to {WEIGHT_MAX}"));
            }
            seen.push(name);
        }
        problems
    }

    /// The regions as bounds count with them.
    pub fn fleet(&self) -> Fleet {
        self.layout().fleet
    }

    fn replicator(&self, now_us: impl Fn() -> u64 + Send + Sync + 'static, seed: u64) -> ReplicatorConfig {
        let mut config = ReplicatorConfig::new(&self.region, self.listen, now_us, seed);
        config.peers.clone_from(&self.peers);
        config.certificates.clone_from(&self.certificates);
        config.peer_timeout = self.peer_timeout;
        config.agreement = region_id(&format!("{:?}", self.layout().fleet.weights)).0;
        config
    }

    /// All regions, in the order in which parts are handed out: the same in every one of them.
    fn names(&self) -> Vec<&str> {
        let peers = self.peers.iter().map(|peer| peer.region.as_str());
        let mut names: Vec<&str> = peers.chain([self.region.as_str()]).collect();
        names.sort_unstable();
        names
    }

    pub(super) fn layout(&self) -> RegionLayout {
        let names = self.names();
        let weight = |name: &&str| {
            let given = self.weights.iter().find(|(known, _)| known == name);
            given.map_or(1, |(_, weight)| *weight)
        };
        let peer_timeout_us = u64::try_from(self.peer_timeout.as_micros()).unwrap_or(u64::MAX);
        let fleet = Fleet { weights: names.iter().map(weight).collect(), peer_timeout_us, ..Fleet::of(1) };
        let own = names.iter().position(|name| *name == self.region).unwrap_or_default();
        let ids = names.iter().map(|name| region_id(name)).collect();
        RegionLayout { own, ids, fleet }
    }
}

/// All regions, and the position of this one among them.
#[derive(Debug)]
pub(crate) struct RegionLayout {
    own: usize,
    ids: Box<[RegionId]>,
    fleet: Fleet,
}

impl RegionLayout {
    /// Returns this region's share of an amount.
    pub(super) fn share_of(&self, whole: u64) -> u64 {
        share_of(whole, &self.fleet.weights, self.own)
    }

    /// Returns this region's share of a limit. If the share is 0, no request passes.
    pub(super) fn part(&self, limit: &Limit) -> Limit {
        let burst = self.share_of(limit.burst().into());
        let amount = share_of(limit.amount().into(), &self.weights_of(limit.burst().into()), self.own);
        let period = limit.period();
        let part = match limit.algorithm() {
            Algorithm::SlidingWindow => Limit::sliding_window(amount, period),
            // A smaller amount takes longer to drain, and may not have all of its burst.
            Algorithm::Gcra => {
                Limit::gcra(amount, period).and_then(|part| part.with_burst_upto(burst.max(1)))
            }
        };
        // A share of a valid limit is valid.
        part.unwrap_or(*limit)
    }

    /// Returns the weights of the regions that have a share of this burst. The others let no
    /// request pass, so a share of the rate would be lost there.
    fn weights_of(&self, burst: u64) -> Vec<u32> {
        let weights = &self.fleet.weights;
        let weight =
            |(own, weight): (usize, &u32)| if share_of(burst, weights, own) == 0 { 0 } else { *weight };
        weights.iter().enumerate().map(weight).collect()
    }

    /// Returns the owner region of a key, if it is a peer.
    pub(super) fn owner(&self, key: &[&[u8]]) -> Option<usize> {
        Some(owner_of(&self.ids, key)).filter(|owner| *owner != self.own)
    }

    pub(super) fn id(&self, place: usize) -> Option<RegionId> {
        self.ids.get(place).copied()
    }

    /// Returns the cross-region terms of a limit.
    pub(super) fn cross_region(
        &self,
        limit: &Limit,
        terms: &Terms,
        policy: &RegionPolicy,
    ) -> CrossRegionTerms {
        let RegionPolicy { class, paid, tolerance_ppm, regime, .. } = *policy;
        let promise = Promise { limit, class, paid, tolerance_ppm, regime };
        CrossRegionTerms {
            publish_threshold: terms.burst() * u64::from(self.fleet.threshold_ppm) / PPM,
            share_amount: self.share_of(terms.amount()),
            share_capacity: self.share_of(terms.capacity()),
            debt_max: debt_max(&promise, &self.fleet),
        }
    }
}

/// The peer regions, and the replicator that exchanges messages with them.
pub(super) struct PeerRegions {
    config: MultiRegionConfig,
    pub(super) layout: Arc<RegionLayout>,
    replicator: Mutex<Option<Replicator>>,
    /// Whether a `strict` limit exists, so that peer regions decide some keys.
    forwards: AtomicBool,
}

impl PeerRegions {
    pub(super) fn new(config: MultiRegionConfig) -> Self {
        let layout = Arc::new(config.layout());
        Self { config, layout, replicator: Mutex::new(None), forwards: AtomicBool::new(false) }
    }

    fn replicator(&self) -> MutexGuard<'_, Option<Replicator>> {
        self.replicator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the forwarder of checks to peer regions, once replication has started.
    pub(super) fn forwarder(&self) -> Option<Forwarder> {
        self.replicator().as_ref().map(Replicator::forwarder)
    }

    pub(super) fn forward_time_max(&self) -> Duration {
        self.config.forward_time_max
    }

    /// Opens connections to peer regions in advance, because some checks will be forwarded.
    pub(super) fn will_forward(&self) {
        self.forwards.store(true, Ordering::Relaxed);
        if let Some(forwarder) = self.forwarder() {
            forwarder.keep_ready();
        }
    }

    /// Stops the exchange with peers. Meters that peers have not acknowledged stay dirty at the
    /// origin.
    pub(super) async fn leave(&self) {
        let replicator = self.replicator().take();
        if let Some(replicator) = replicator {
            replicator.forwarder().settle(SETTLE_TIME_MAX).await;
            replicator.stop().await;
        }
    }
}

impl Region {
    /// Listens for peer regions from now on, and replicates this region's usage whenever no other
    /// node of it does. Returns the listening address; `None` for a region without peers. Must be
    /// called within a runtime, once.
    pub fn start_replication(&self) -> Result<Option<SocketAddr>, ReplicatorError> {
        let Some(peer_regions) = &self.peer_regions else { return Ok(None) };
        let seed =
            random_name().map_err(|error| ReplicatorError { problems: vec![format!("region: {error}")] })?;
        let limiter = Arc::clone(&self.limiter);
        let mut config = peer_regions.config.replicator(move || limiter.now().mono_us(), seed);
        config.forward_handler = Some(self.as_owner(Arc::clone(&peer_regions.layout)));
        let replicator = Replicator::start(config, self.driver.origin())?;
        let address = replicator.address();
        if peer_regions.forwards.load(Ordering::Relaxed) {
            replicator.forwarder().keep_ready();
        }
        *peer_regions.replicator() = Some(replicator);
        let lags = follow_lags(Arc::downgrade(peer_regions), Arc::downgrade(&self.driver));
        self.driver.spawn(lags);
        Ok(Some(address))
    }

    /// Returns the known number of nodes that share this region's origin: the most that ever held
    /// grants of one meter, this one included.
    pub fn processes(&self) -> u32 {
        self.driver.processes()
    }

    /// Returns the state of replication; `None` without peers, and before
    /// [`Region::start_replication`].
    pub fn replication_status(&self) -> Option<ReplicationStatus> {
        self.peer_regions.as_ref()?.replicator().as_ref().map(Replicator::status)
    }
}

/// Shortens grants of cross-region limits while the lag is long, until replication stops. The
/// replicator measures the lag, and the origin passes it to the other nodes.
async fn follow_lags(peer_regions: Weak<PeerRegions>, driver: Weak<Driver>) {
    let mut ticks = tokio::time::interval(LAG_EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let (Some(peer_regions), Some(driver)) = (peer_regions.upgrade(), driver.upgrade()) else { return };
        let Some(status) = peer_regions.replicator().as_ref().map(Replicator::status) else { return };
        driver.limit_cross_region_life(grant_life_us(status.lag_us.unwrap_or(0)));
    }
}

/// Returns the life of grants at this lag of the slowest peer, µs: shorter in proportion as the lag
/// exceeds `LAG_ALARM_US`.
fn grant_life_us(lag_us: u64) -> u64 {
    let life_us = CROSS_REGION_LIFE_US_MAX * LAG_ALARM_US / lag_us.max(LAG_ALARM_US);
    life_us.max(GRANT_LIFE_US_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::bound::{Faults, bound};
    use tidegate_core::{Class, Regime};

    #[test]
    fn grants_are_shorter_at_a_longer_lag() {
        let lives = [0, 500_000, 1_000_000, 2_000_000, 2_500_000, u64::MAX].map(grant_life_us);
        assert_eq!(lives, [1_000_000, 1_000_000, 500_000, 250_000, 200_000, 200_000]);
    }

    fn regions(own: &str, weights: &[(&str, u32)]) -> MultiRegionConfig {
        let mut regions = MultiRegionConfig::new(own, ([127, 0, 0, 1], 0).into());
        let others = weights.iter().filter(|(name, _)| *name != own);
        let peer = |(name, _): &(&str, u32)| PeerConfig {
            region: (*name).to_owned(),
            addresses: vec!["127.0.0.1:7000".to_owned()],
        };
        regions.peers = others.map(peer).collect();
        regions.weights = weights.iter().map(|(name, weight)| ((*name).to_owned(), *weight)).collect();
        regions
    }

    const WEIGHTS: [[(&str, u32); 3]; 4] = [
        [("us", 1), ("eu", 1), ("ap", 1)],
        [("us", 5), ("eu", 3), ("ap", 1)],
        [("ap", 1_000_000), ("eu", 1), ("us", 1)],
        [("us", 7), ("ap", 11), ("eu", 13)],
    ];

    #[test]
    fn parts_of_a_limit_are_together_the_limit() {
        let minute = Duration::from_mins(1);
        for weights in WEIGHTS {
            for amount in [1, 2, 100] {
                for limit in [Limit::gcra(amount, minute), Limit::sliding_window(amount, minute)] {
                    let limit = limit.expect("in range");
                    let parts = weights.map(|(own, _)| regions(own, &weights).layout().part(&limit));
                    let sum = |of: fn(&Limit) -> u32| parts.iter().map(of).sum::<u32>();
                    assert_eq!(sum(Limit::amount), limit.amount(), "{weights:?} {limit:?}");
                    let burst = |part: &Limit| if part.is_blocked() { 0 } else { part.burst() };
                    assert_eq!(sum(burst), limit.burst(), "{weights:?} {limit:?}");
                }
            }
        }
    }

    #[test]
    fn parts_of_a_small_burst_are_together_the_burst_and_the_rate() {
        for (amount, burst) in [(100, 1), (100, 2), (600, 2), (7, 3), (4_294_967_295, 2)] {
            let limit = Limit::gcra(amount, Duration::from_secs(1)).and_then(|limit| limit.with_burst(burst));
            let limit = limit.expect("in range");
            for weights in WEIGHTS {
                let parts = weights.map(|(own, _)| regions(own, &weights).layout().part(&limit));
                let open = || parts.iter().filter(|part| !part.is_blocked());
                let bursts: u64 = open().map(|part| u64::from(part.burst())).sum();
                let amounts: u64 = open().map(|part| u64::from(part.amount())).sum();
                // A rate that was the part of a region without a burst is in those that have one.
                assert_eq!((bursts, amounts), (burst, amount), "{weights:?} {parts:?}");
            }
        }
    }

    #[test]
    fn shares_of_a_very_slow_limit_keep_most_of_its_burst() {
        let longest = Limit::gcra(10, Duration::from_hours(24 * 366)).and_then(|limit| limit.with_burst(100));
        let longest = longest.expect("in range");
        let parts = WEIGHTS[0].map(|(own, _)| regions(own, &WEIGHTS[0]).layout().part(&longest));
        let [amounts, bursts] = [Limit::amount, Limit::burst].map(|of| parts.iter().map(of).sum::<u32>());
        assert_eq!(amounts, 10);
        assert!((91..=100).contains(&bursts), "{parts:?}");
    }

    #[test]
    fn a_global_limit_is_counted_by_parts_that_are_together_the_whole() {
        let limit = Limit::gcra(160, Duration::from_mins(1)).expect("in range");
        let policy = RegionPolicy { regime: Regime::BestEffort, ..RegionPolicy::of(Class::Comfort) };
        for weights in WEIGHTS {
            let cross_region = weights.map(|(own, _)| {
                let terms = Terms::new(&limit, policy.tolerance_ppm, policy.class.lapse(), 1);
                regions(own, &weights).layout().cross_region(&limit, &terms, &policy)
            });
            assert_eq!(cross_region.iter().map(|part| part.share_amount).sum::<u64>(), 160);
            assert_eq!(
                cross_region.iter().map(|part| part.share_capacity).sum::<u64>(),
                160,
                "the burst of the limit"
            );
            assert!(
                cross_region
                    .iter()
                    .all(|part| part.publish_threshold == 10 && part.debt_max == cross_region[0].debt_max)
            );
            let promise = Promise::new(&limit, Class::Comfort, Regime::BestEffort);
            let fleet = regions("eu", &weights).fleet();
            assert!(cross_region[0].debt_max >= bound(&promise, &fleet, &Faults::NONE).total());
        }
    }

    #[test]
    fn all_region_problems_are_reported() {
        let mut wrong = regions("eu", &[("us", 0), ("us", 1), ("eu", 1), ("mars", 1)]);
        wrong.peers.retain(|peer| peer.region != "mars");
        wrong.peers[1].region = "eu".to_owned();
        wrong.peer_timeout = Duration::ZERO;
        let problems = wrong.problems();
        for part in [
            "peers: \"eu\" is given twice",
            "peer_timeout: 0ns is outside",
            "weights: \"us\" is given twice",
            "weights: us: 0 is outside 1 to 1000000",
            "weights: \"mars\" is none of the regions",
        ] {
            assert!(problems.iter().any(|problem| problem.contains(part)), "{part} in {problems:#?}");
        }
        assert!(regions("eu", &WEIGHTS[0]).problems().is_empty());
    }
}
