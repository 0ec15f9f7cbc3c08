//! Three regions in this process, each with an origin, a replicator and requests of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use tidegate::region::bound::Fleet;
use tidegate::region::{
    EngineSettings, MemoryOrigin, MultiRegionConfig, PeerConfig, Regime, Region, RegionPolicy,
    ReplicationStatus,
};
use tidegate::{Clock, Gate, Limit, Limiter, SystemClock};
use tokio::net::TcpListener;
use tokio::time::MissedTickBehavior;

use super::account::CLASS;
use super::wan::Link;
use crate::Failure;

pub(super) const REGIONS: usize = 3;

/// Names of the regions.
pub(super) const NAMES: [&str; REGIONS] = ["eu", "us", "ap"];

/// The regions that each link joins.
pub(super) const LINKS: [(usize, usize); REGIONS] = [(0, 1), (1, 2), (2, 0)];

/// The limit of a key in all regions together: units per second, and the burst.
pub(super) const PER_SECOND: u64 = 100;

/// The attacker's request rate in each region, in multiples of the limit.
pub(super) const ATTACK: u64 = 10;

/// The shortest peer timeout that a replicator accepts, so that a cut shows soon.
const PEER_TIMEOUT: Duration = Duration::from_secs(2);

/// Interval of the attacker's requests, ms.
const ATTACK_EVERY_MS: u64 = 10;

/// Requests of the attacker in each interval.
const ATTACK_AT_ONCE: u64 = PER_SECOND * ATTACK * ATTACK_EVERY_MS / 1_000;

/// Interval of each ordinary user's requests in each region. In all regions, a user makes three
/// tenths of the limit.
const USERS_EVERY: Duration = Duration::from_millis(100);

const USERS: [&str; 4] = ["alice", "bob", "carol", "dave"];

const ATTACKER: &str = "mallory";

/// Timeout of a request to the origin, µs. The origin is in memory, so only a busy machine makes it
/// late. That is no reason to deny a request.
const ORIGIN_TIME_MAX_US: u64 = 1_000_000;

/// How long regions may take to find each other.
const MEETING_TIME_MAX: Duration = Duration::from_secs(20);

/// How often is looked whether they have.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A few keys need little.
const TABLE_BYTES: usize = 1 << 20;

/// Name of the limit of every key.
const LIMIT: &str = "per_user";

const ANY_PORT: (Ipv4Addr, u16) = (Ipv4Addr::LOCALHOST, 0);

/// Counts of requests by outcome.
#[derive(Default)]
struct Tally {
    admitted: AtomicU64,
    denied: AtomicU64,
}

impl Tally {
    fn add(&self, is_allowed: bool) {
        let count = if is_allowed { &self.admitted } else { &self.denied };
        count.fetch_add(1, Ordering::Relaxed);
    }

    fn counts(&self) -> Counts {
        Counts {
            admitted: self.admitted.load(Ordering::Relaxed),
            denied: self.denied.load(Ordering::Relaxed),
        }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) admitted: u64,
    pub(super) denied: u64,
}

/// The state of the demo at one moment.
#[derive(Clone, Debug)]
pub(super) struct Reading {
    pub(super) elapsed_us: u64,
    pub(super) regions: [RegionReading; REGIONS],
    pub(super) links_up: [bool; REGIONS],
    pub(super) attacks: bool,
    /// Network partitions: cuts of a link while all links were up.
    pub(super) partitions: u32,
}

impl Reading {
    pub(super) fn attacker(&self) -> Counts {
        sum(self.regions.iter().map(|region| region.attacker))
    }

    pub(super) fn users(&self) -> Counts {
        sum(self.regions.iter().map(|region| region.users))
    }
}

fn sum(counts: impl Iterator<Item = Counts>) -> Counts {
    counts.fold(Counts::default(), |sum, more| Counts {
        admitted: sum.admitted + more.admitted,
        denied: sum.denied + more.denied,
    })
}

#[derive(Clone, Copy, Debug)]
pub(super) struct RegionReading {
    pub(super) attacker: Counts,
    pub(super) users: Counts,
    /// Whether the region counts the usage of all regions. Otherwise it spends its regional share.
    pub(super) is_connected: bool,
    /// Lag until all peers know of a change here, µs; `None` before it is measured.
    pub(super) lag_us: Option<u64>,
}

/// A region, and its clients.
struct Member {
    region: Region,
    gate: Gate,
    attacker: Tally,
    users: Tally,
}

impl Member {
    fn start(regions: MultiRegionConfig, limit: Limit) -> Result<(Self, SocketAddr), Failure> {
        let limiter = Limiter::builder().memory_bytes(TABLE_BYTES).limit(LIMIT, limit).build();
        let limiter = Arc::new(limiter.map_err(Failure::failed)?);
        let clock = SystemClock::new();
        let origin = Arc::new(MemoryOrigin::new(move || clock.now().wall_us()));
        let settings = EngineSettings { deadline_us: ORIGIN_TIME_MAX_US, ..EngineSettings::default() };
        let region = Region::join_among(regions, limiter, origin, settings).map_err(Failure::failed)?;
        let policy = RegionPolicy { regime: Regime::BestEffort, ..RegionPolicy::of(CLASS) };
        let gate = region.gate_with("", LIMIT, limit, policy).map_err(Failure::failed)?;
        let address = region.start_replication().map_err(Failure::failed)?;
        let address = address.ok_or_else(|| Failure::failed("a region has no listener for its peers"))?;
        Ok((Self { region, gate, attacker: Tally::default(), users: Tally::default() }, address))
    }

    fn reading(&self) -> RegionReading {
        let abroad = self.region.replication_status();
        let lags = abroad.iter().flat_map(|status| &status.peers).map(|peer| peer.lag_us);
        RegionReading {
            attacker: self.attacker.counts(),
            users: self.users.counts(),
            is_connected: abroad.as_ref().is_some_and(|status| status.is_connected),
            lag_us: lags.max().flatten(),
        }
    }

    async fn ask(&self, key: &str, tally: &Tally) {
        // One limit is never too many.
        if let Ok(ruling) = self.region.check(&[self.gate.region_check(key)]).await {
            tally.add(ruling.is_allowed());
        }
    }

    async fn attack(&self, attacks: &AtomicBool) {
        let mut ticks = ticks(Duration::from_millis(ATTACK_EVERY_MS));
        loop {
            ticks.tick().await;
            for _ in 0..ATTACK_AT_ONCE {
                if attacks.load(Ordering::Relaxed) {
                    self.ask(ATTACKER, &self.attacker).await;
                }
            }
        }
    }

    async fn be_used(&self) {
        let mut ticks = ticks(USERS_EVERY);
        loop {
            ticks.tick().await;
            for user in USERS {
                self.ask(user, &self.users).await;
            }
        }
    }
}

/// Returns a regular timer that skips missed ticks, so a busy machine does not get all missed
/// requests at once.
fn ticks(every: Duration) -> tokio::time::Interval {
    let mut ticks = tokio::time::interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Skip);
    ticks
}

/// A way from one region to another.
struct Way {
    listener: TcpListener,
    link: usize,
    to: usize,
}

/// Returns the ways from a region to its peers, and the configuration of these peers.
async fn ways_from(own: usize) -> Result<(Vec<Way>, Vec<PeerConfig>), Failure> {
    let (mut ways, mut peers) = (Vec::new(), Vec::new());
    for (link, ends) in LINKS.into_iter().enumerate() {
        let to = match ends {
            (from, to) if from == own => to,
            (to, from) if from == own => to,
            _ => continue,
        };
        let listener = TcpListener::bind(ANY_PORT).await.map_err(Failure::failed)?;
        let address = listener.local_addr().map_err(Failure::failed)?;
        peers.push(PeerConfig { region: NAMES[to].to_owned(), addresses: vec![address.to_string()] });
        ways.push(Way { listener, link, to });
    }
    Ok((ways, peers))
}

/// Three regions and the links between them.
pub(super) struct World {
    members: [Arc<Member>; REGIONS],
    links: [Link; REGIONS],
    limit: Limit,
    fleet: Fleet,
    clock: SystemClock,
    /// When the first request came.
    began_us: AtomicU64,
    attacks: Arc<AtomicBool>,
    partitions: AtomicU32,
}

impl World {
    /// Starts regions with this one-way delay between them, and admits requests once they are
    /// connected. Must be called within the runtime that runs them.
    pub(super) async fn open(delay: Duration) -> Result<Self, Failure> {
        let world = Self::start(delay).await?;
        world.meet().await?;
        world.let_in();
        Ok(world)
    }

    async fn start(delay: Duration) -> Result<Self, Failure> {
        let limit = Limit::gcra(PER_SECOND, Duration::from_secs(1)).map_err(Failure::failed)?;
        let links = [(); REGIONS].map(|()| Link::new(delay));
        let (mut ways, mut members, mut addresses) = (Vec::new(), Vec::new(), Vec::new());
        let mut fleet = Fleet::of(1);
        for (own, name) in NAMES.into_iter().enumerate() {
            let (from_here, peers) = ways_from(own).await?;
            let regions = MultiRegionConfig {
                peers,
                peer_timeout: PEER_TIMEOUT,
                ..MultiRegionConfig::new(name, ANY_PORT.into())
            };
            fleet = regions.fleet();
            let (member, address) = Member::start(regions, limit)?;
            members.push(Arc::new(member));
            addresses.push(address);
            ways.extend(from_here);
        }
        for Way { listener, link, to } in ways {
            links[link].lead(listener, addresses[to]);
        }
        let members = members.try_into().map_err(|_| Failure::failed("the demo has three regions"))?;
        Ok(Self {
            members,
            links,
            limit,
            fleet,
            clock: SystemClock::new(),
            began_us: AtomicU64::new(0),
            attacks: Arc::new(AtomicBool::new(true)),
            partitions: AtomicU32::new(0),
        })
    }

    /// Waits until the regions are connected. Before that, each would start with its regional
    /// share.
    async fn meet(&self) -> Result<(), Failure> {
        let meeting = async {
            let mut ticks = ticks(LOOK_EVERY);
            while !self
                .members
                .iter()
                .all(|member| member.region.replication_status().is_some_and(|status| has_met(&status)))
            {
                ticks.tick().await;
            }
        };
        tokio::time::timeout(MEETING_TIME_MAX, meeting)
            .await
            .map_err(|_| Failure::failed(format!("the regions did not connect within {MEETING_TIME_MAX:?}")))
    }

    fn let_in(&self) {
        self.began_us.store(self.clock.now().mono_us(), Ordering::Relaxed);
        for member in &self.members {
            let (attacked, used) = (Arc::clone(member), Arc::clone(member));
            let attacks = Arc::clone(&self.attacks);
            tokio::spawn(async move { attacked.attack(&attacks).await });
            tokio::spawn(async move { used.be_used().await });
        }
    }

    pub(super) fn limit(&self) -> Limit {
        self.limit
    }

    pub(super) fn fleet(&self) -> Fleet {
        self.fleet.clone()
    }

    pub(super) fn reading(&self) -> Reading {
        let regions = self.members.each_ref().map(|member| member.reading());
        // Read after the counters: all counted units fall within this time.
        let now_us = self.clock.now().mono_us();
        Reading {
            elapsed_us: now_us.saturating_sub(self.began_us.load(Ordering::Relaxed)),
            regions,
            links_up: self.links.each_ref().map(Link::is_up),
            attacks: self.attacks.load(Ordering::Relaxed),
            partitions: self.partitions.load(Ordering::Relaxed),
        }
    }

    /// Cuts a link, or heals it.
    pub(super) fn set_link(&self, link: usize, is_up: bool) {
        let was_connected = self.links.iter().all(Link::is_up);
        if let Some(link) = self.links.get(link) {
            link.set(is_up);
        }
        if was_connected && !is_up {
            self.partitions.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(super) fn turn_link(&self, link: usize) {
        let is_up = self.links.get(link).is_some_and(Link::is_up);
        self.set_link(link, !is_up);
    }

    pub(super) fn turn_attacker(&self) {
        self.attacks.fetch_not(Ordering::Relaxed);
    }
}

fn has_met(status: &ReplicationStatus) -> bool {
    status.is_connected && status.peers.iter().all(|peer| peer.lag_us.is_some())
}
