//! The parameters of a world of several regions.

use std::fmt;
use std::time::Duration;

use fastrand::Rng;
use tidegate_core::bound::{self, Bound, Fleet, Promise, THRESHOLD_PPM, bound, debt_max};
use tidegate_core::origin::{CrossRegionTerms, Lapse, Terms, share_of};
use tidegate_core::{Algorithm, Class, Limit, Regime};
use tidegate_replication::{INTERVAL_US, PEER_TIMEOUT_DEFAULT_US};

use super::bug::RegionBug;
use crate::rule_editions::Rule;

pub(super) const SECOND_US: u64 = 1_000_000;

/// The longest cut: an hour.
const LONG_CUT_US: u64 = 3_600 * SECOND_US;

/// How long other cuts last.
const CUT_SECONDS: [u64; 6] = [1, 2, 4, 10, 60, 180];

/// Durations of cuts in worlds that test the usage before a cut is noticed, s.
const RUSHED_SECONDS: [u64; 5] = [2, 4, 10, 10, 60];

/// Time for which a region hears no peer in worlds that test this, µs. The usage that all peers
/// admitted drains in that time.
const DEAF_US: u64 = 300 * SECOND_US;

/// How much longer worlds last that are for the long run, µs.
const LONG_RUN_US: u64 = 900 * SECOND_US;

/// How many times as many requests there are in those.
const LONG_RUN_TIMES: u64 = 8;

/// How much of a bound is reached at least, in thousandths.
pub(super) const REACHED_MILLI: u64 = 800;

/// Least number of bursts of a fast limit that drain within the lag and the peer timeout.
const FAST_BURSTS: u32 = 4;

/// Regions of worlds that have many.
const REGIONS_MAX: usize = 8;

/// Total losses of data in worlds that test them.
const WIPES: u32 = 8;

/// How many times as many requests there are in a world with such a cut, at most.
const LONG_TIMES_MAX: u64 = 20;

const PPM: u64 = 1_000_000;

/// How requests come for the key that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// At random, several times as often as the limit allows, in every region.
    Flood,
    /// As much as stays below the threshold, then a burst everywhere at once, and then all that
    /// passes within the lag.
    Lag,
    /// A burst everywhere just after regions were cut from each other, and all that passes after
    /// it.
    Cut,
    /// The same, and bursts everywhere when regions hear each other again, as often as it takes.
    Heal,
    /// A burst everywhere before regions notice that they are cut from each other, then no
    /// requests, so that debts may be dropped. Bursts everywhere follow when regions hear each
    /// other again, as often as it takes.
    Pause,
    /// At the end of each period, everywhere.
    Edges,
    /// A burst in a region each time that its origin has lost all data.
    Wipes,
    /// All requests that can pass everywhere, for a key unknown to peers, from a cut until regions
    /// have heard each other again. Then none until the known usage has drained, and the same again
    /// at the next cut.
    Rush,
}

/// Which links are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutKind {
    /// All of them.
    All,
    /// One region from all others.
    One,
    /// One pair of regions.
    Pair,
    /// One pair, one way only.
    OneWay,
    /// The region with the largest share hears no peer, and all peers hear it.
    Deaf,
}

/// Which links of a world are cut at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Cuts {
    /// No links.
    None,
    /// Among three regions or more, single pairs only: each region is still heard by a peer.
    Pairs,
    /// More than that.
    More,
}

impl Cuts {
    /// In a word or two.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Pairs => "pairs only",
            Self::More => "more",
        }
    }
}

/// A group of worlds that are compared by the parts of their bounds that they reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Whether the limit is a sliding window.
    pub is_window: bool,
    /// The class of the limit.
    pub class: Class,
    /// Whether several bursts drain within the lag and the peer timeout. The bound then depends on
    /// the drain, and not on the burst.
    pub is_fast: bool,
    /// Which links are cut.
    pub cuts: Cuts,
}

/// Some links are cut for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Which.
    pub kind: CutKind,
    /// When, µs after the world began.
    pub at_us: u64,
    /// For how long.
    pub for_us: u64,
}

/// Faults between regions and inside them. Fractions are in millionths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RegionFaults {
    /// Links that are cut.
    pub cuts: Vec<Cut>,
    /// Whether replicators notice a cut link at once, as when a device on the path resets the
    /// connection.
    pub resets: bool,
    /// Messages between regions that get lost.
    pub wan_loss_ppm: u32,
    /// Messages between regions that arrive twice, or after later ones.
    pub wan_repeat_ppm: u32,
    /// Messages between regions that take up to two seconds longer.
    pub wan_slow_ppm: u32,
    /// How many times a replicator dies, each time in the middle of another step.
    pub replicator_crashes: u32,
    /// How many times a region has two replicators for a while.
    pub two_replicators: u32,
    /// Pauses of an origin.
    pub pauses: u32,
    /// Times that an origin returns without its last writes.
    pub losses: u32,
    /// Times that an origin returns without any data.
    pub wipes: u32,
    /// How many times a node dies.
    pub crashes: u32,
    /// Messages between nodes and origins that get lost.
    pub loss_ppm: u32,
}

impl RegionFaults {
    /// Whether messages between regions may be late without a cut.
    pub(super) fn is_wan_bad(&self) -> bool {
        self.wan_loss_ppm + self.wan_slow_ppm > 0 || self.replicator_crashes + self.pauses > 0
    }

    /// Whether all is well from a time on.
    pub(super) fn is_well_from(&self, us: u64) -> bool {
        let are_replicators_well = self.two_replicators == 0 && !self.is_wan_bad();
        let is_over = |cut: &Cut| cut.at_us + cut.for_us < us;
        are_replicators_well && self.are_regions_well() && self.cuts.iter().all(is_over)
    }

    /// Whether no faults occur inside the regions.
    pub(super) fn are_regions_well(&self) -> bool {
        self.pauses + self.losses + self.wipes + self.crashes + self.loss_ppm == 0
    }
}

/// A world of several regions before it begins.
#[derive(Clone, Debug)]
pub struct RegionScenario {
    /// The seed that determines the world.
    pub seed: u64,
    /// The weight of each region, which sets its regional share.
    pub weights: Vec<u32>,
    /// The limit of every key, which all regions share.
    pub limit: Limit,
    /// The class of the limit.
    pub class: Class,
    /// Nodes in each region.
    pub nodes: usize,
    /// The attack on the first key. The second key has even demand within its regional shares, the
    /// third has occasional requests.
    pub attack: Attack,
    /// How many requests are made for the first key at most.
    pub requests: u64,
    /// How long it lasts.
    pub length_us: u64,
    /// One way between two regions, µs.
    pub wan_us: u64,
    /// One way inside a region, µs.
    pub delay_us: u64,
    /// The faults of the world.
    pub faults: RegionFaults,
}

/// The keys of a world.
pub(super) const KEYS: usize = 3;

/// The key that is attacked.
pub(super) const ATTACKED: usize = 0;

/// The key of the ordinary user, with even demand within every regional share.
pub(super) const ORDINARY: usize = 1;

/// The key with occasional requests.
pub(super) const RARE: usize = 2;

impl RegionScenario {
    /// How many regions there are.
    pub fn regions(&self) -> usize {
        self.weights.len()
    }

    /// Returns the group of the world.
    pub fn kind(&self) -> Kind {
        let is_pair = |cut: &Cut| self.regions() > 2 && matches!(cut.kind, CutKind::Pair | CutKind::OneWay);
        let cuts = match &self.faults.cuts[..] {
            [] => Cuts::None,
            cuts if cuts.iter().all(is_pair) => Cuts::Pairs,
            _ => Cuts::More,
        };
        let is_window = self.limit.algorithm() == Algorithm::SlidingWindow;
        Kind { is_window, class: self.class, is_fast: !is_window && self.is_fast(), cuts }
    }

    /// Whether several bursts drain while a region does not count the usage of a peer.
    fn is_fast(&self) -> bool {
        let unheard_us = self.bound(&bound::Faults::NONE).lag_us + PEER_TIMEOUT_DEFAULT_US;
        let drained = u128::from(unheard_us) * u128::from(self.limit.amount());
        let bursts = u128::from(FAST_BURSTS * self.limit.burst());
        drained >= bursts * u128::from(self.limit.period_us())
    }

    pub(super) fn promise(&self) -> Promise<'_> {
        Promise::new(&self.limit, self.class, Regime::BestEffort)
    }

    /// How far the limit may be passed, as it is printed, after so much went wrong.
    pub(super) fn bound(&self, faults: &bound::Faults) -> Bound {
        bound(&self.promise(), &self.fleet(), faults)
    }

    fn fleet(&self) -> Fleet {
        Fleet {
            weights: self.weights.clone().into(),
            nodes: self.nodes as u32,
            replication_interval_us: INTERVAL_US,
            transit_us: self.wan_us + self.wan_us / 4 + 4 * self.delay_us,
            peer_timeout_us: PEER_TIMEOUT_DEFAULT_US,
            ..Fleet::of(self.regions() as u32)
        }
    }

    /// The most that is owed beyond the limit, in units.
    pub(super) fn debt_max(&self) -> u64 {
        debt_max(&self.promise(), &self.fleet())
    }

    pub(super) fn lapse(&self) -> Lapse {
        self.class.lapse()
    }

    /// The limit as nodes of a region know it.
    pub(super) fn rule(&self, region: usize, bug: Option<RegionBug>) -> Rule {
        let terms = Terms::new(&self.limit, 0, self.lapse(), 1);
        let publish_threshold = match bug {
            Some(RegionBug::NoThreshold) => 1,
            _ => (terms.burst() * u64::from(THRESHOLD_PPM) / PPM).max(1),
        };
        let part = |whole| match bug {
            Some(RegionBug::PartIsWhole) => whole,
            _ => share_of(whole, &self.weights, region),
        };
        let debt_max = match bug {
            Some(RegionBug::ForgivesAll) => 0,
            Some(RegionBug::ForgivesNothing) => u64::MAX,
            _ => self.debt_max(),
        };
        let (share_amount, share_capacity) = (part(terms.amount()), part(terms.capacity()));
        let terms = terms.with_cross_region(CrossRegionTerms {
            publish_threshold,
            share_amount,
            share_capacity,
            debt_max,
        });
        Rule { limit: self.limit.at_origin(), terms }
    }

    /// How long a full meter takes to drain, µs.
    pub(super) fn drain_us(&self, units: u64) -> u64 {
        match self.limit.algorithm() {
            Algorithm::Gcra => units * self.limit.period_us() / u64::from(self.limit.amount()).max(1),
            Algorithm::SlidingWindow => 2 * self.limit.period_us(),
        }
    }
}

/// The purpose of a world.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Any fault may occur.
    Any,
    /// A region is cut off for an hour, with more requests in proportion.
    LongCut,
    /// There are many regions, of which one pair is cut.
    OnePair,
    /// Origins lose all data again and again.
    Wipes,
    /// The region with nearly all of the limit hears no peer. This lasts until the peers have paid
    /// off the usage that it does not know.
    Deaf,
    /// A limit is flooded for so long that all there is to it is its rate.
    LongRun,
    /// Many more units drain within the lag and the peer timeout than pass at once.
    Rush,
}

impl Purpose {
    fn draw(rng: &mut Rng) -> Self {
        match rng.u8(0..32) {
            0 | 1 => Self::LongCut,
            2 => Self::OnePair,
            3 => Self::Wipes,
            4 => Self::Deaf,
            5 => Self::LongRun,
            6 | 7 => Self::Rush,
            _ => Self::Any,
        }
    }

    fn regions(self, rng: &mut Rng) -> usize {
        match self {
            Self::OnePair => REGIONS_MAX,
            Self::Deaf | Self::LongRun => pick(rng, &[2, 2, 3]),
            Self::Any | Self::LongCut | Self::Wipes | Self::Rush => pick(rng, &[2, 3, 3, 4]),
        }
    }

    fn attack(self, rng: &mut Rng) -> Attack {
        match self {
            Self::Any => pick(
                rng,
                &[Attack::Flood, Attack::Lag, Attack::Cut, Attack::Heal, Attack::Pause, Attack::Edges],
            ),
            Self::LongCut => {
                pick(rng, &[Attack::Flood, Attack::Heal, Attack::Cut, Attack::Pause, Attack::Edges])
            }
            Self::OnePair => pick(rng, &[Attack::Lag, Attack::Lag, Attack::Edges]),
            Self::Wipes => Attack::Wipes,
            Self::Deaf => pick(rng, &[Attack::Heal, Attack::Pause]),
            Self::LongRun => Attack::Flood,
            Self::Rush => Attack::Rush,
        }
    }

    /// How much longer than others such a world lasts, µs.
    fn longer_us(self) -> u64 {
        match self {
            Self::LongCut => LONG_CUT_US,
            Self::Deaf => DEAF_US,
            Self::LongRun => LONG_RUN_US,
            Self::Any | Self::OnePair | Self::Wipes | Self::Rush => 0,
        }
    }

    /// How many times as many requests there are, where a world lasts about `length_us` beside
    /// that.
    fn times(self, length_us: u64) -> u64 {
        match self {
            Self::LongCut => (1 + LONG_CUT_US / length_us.max(1)).min(LONG_TIMES_MAX),
            Self::LongRun => LONG_RUN_TIMES,
            Self::Any | Self::OnePair | Self::Wipes | Self::Deaf | Self::Rush => 1,
        }
    }

    fn weight(self, rng: &mut Rng, is_even: bool, place: usize) -> u32 {
        match self {
            Self::Deaf if place == 0 => pick(rng, &[4, 16, 64]),
            Self::Deaf => 1,
            _ if is_even => 1,
            _ => rng.u32(1..=3),
        }
    }

    fn limit(self, rng: &mut Rng, attack: Attack, length_us: u64) -> Limit {
        match self {
            Self::LongCut => slow_limit(rng),
            Self::Deaf => even_limit(rng),
            Self::LongRun => fast_limit(rng, &[16, 64, 160]),
            Self::Rush => fast_limit(rng, &[16, 32, 48]),
            Self::Any | Self::OnePair | Self::Wipes => limit(rng, attack, length_us / SECOND_US),
        }
    }

    fn faults(self, rng: &mut Rng, length_us: u64) -> RegionFaults {
        let one_cut = |cut| RegionFaults { cuts: vec![cut], ..RegionFaults::default() };
        match self {
            Self::Any => faults(rng, length_us),
            Self::LongCut => {
                let kind = pick(rng, &[CutKind::All, CutKind::One, CutKind::Pair, CutKind::Pair]);
                let at_us = rng.u64(60 * SECOND_US..=120 * SECOND_US);
                let cut = Cut { kind, at_us, for_us: LONG_CUT_US };
                RegionFaults { cuts: vec![cut], ..faults(rng, length_us) }
            }
            Self::OnePair => {
                let kind = pick(rng, &[CutKind::Pair, CutKind::OneWay]);
                let at_us = rng.u64(length_us / 3..=length_us / 2);
                one_cut(Cut { kind, at_us, for_us: SECOND_US * pick(rng, &CUT_SECONDS) })
            }
            Self::Wipes => RegionFaults { wipes: WIPES, ..RegionFaults::default() },
            Self::Deaf => {
                let at_us = rng.u64(10 * SECOND_US..=20 * SECOND_US);
                one_cut(Cut { kind: CutKind::Deaf, at_us, for_us: DEAF_US })
            }
            Self::Rush if rng.u8(0..4) == 0 => RegionFaults::default(),
            Self::Rush => two_cuts(rng, length_us),
            Self::LongRun if rng.bool() => RegionFaults::default(),
            Self::LongRun => {
                let kind = pick(rng, &[CutKind::All, CutKind::One, CutKind::Pair, CutKind::OneWay]);
                let at_us = rng.u64(60 * SECOND_US..=120 * SECOND_US);
                one_cut(Cut { kind, at_us, for_us: SECOND_US * pick(rng, &CUT_SECONDS) })
            }
        }
    }
}

/// The world of several regions of a seed, about `length_us` long with at most about `requests`
/// requests.
pub fn region_scenario_of(seed: u64, length_us: u64, requests: u64) -> RegionScenario {
    let mut rng = Rng::with_seed(seed ^ 0x7e61_0425);
    let rng = &mut rng;
    let purpose = Purpose::draw(rng);
    let is_even = rng.u8(0..3) > 0;
    let regions = purpose.regions(rng);
    let weights: Vec<u32> = (0..regions).map(|place| purpose.weight(rng, is_even, place)).collect();
    let times = purpose.times(length_us);
    let length_us = length_us + purpose.longer_us();
    let attack = purpose.attack(rng);
    let limit = purpose.limit(rng, attack, length_us);
    let mut faults = purpose.faults(rng, length_us);
    // Only a limit that forgives has a maximum debt. Many losses of data reach it.
    let class = if rng.bool() || purpose == Purpose::Wipes { Class::Comfort } else { Class::Security };
    if class == Class::Security {
        // An empty store does not know that it had data.
        faults.wipes = 0;
    }
    RegionScenario {
        seed,
        weights,
        limit,
        class,
        nodes: pick(rng, &[1, 2, 3]),
        attack,
        requests: requests * times,
        length_us,
        wan_us: pick(rng, &[1_000, 20_000, 75_000, 150_000]),
        delay_us: pick(rng, &[200, 500, 1_000]),
        faults,
    }
}

/// Draws a limit. Under an attack within the lag a burst drains slowly, so the lag alone is a small
/// part of it. Under `Wipes`, lost usage has not drained by the next loss.
fn limit(rng: &mut Rng, attack: Attack, length_s: u64) -> Limit {
    let (amount, seconds, burst) = if matches!(attack, Attack::Lag | Attack::Wipes) {
        let burst = pick(rng, &[160, 480, 960]);
        (burst, length_s * pick(rng, &[2, 4]), burst)
    } else {
        let amount = pick(rng, &[16, 40, 100, 300]);
        (amount, pick(rng, &[10, 10, 60]), pick(rng, &[16, amount, 2 * amount]).max(16))
    };
    let period = Duration::from_secs(seconds.max(1));
    let is_window = match attack {
        Attack::Edges => rng.bool(),
        Attack::Lag | Attack::Wipes => false,
        Attack::Flood | Attack::Cut | Attack::Heal | Attack::Pause | Attack::Rush => rng.u8(0..6) == 0,
    };
    let made = if is_window {
        Limit::sliding_window(amount, period)
    } else {
        Limit::gcra(amount, period).and_then(|limit| limit.with_burst(burst))
    };
    made.unwrap_or_else(|_| unreachable!("amounts and periods are in range"))
}

/// Draws a limit that is slow enough to be exhausted by requests for an hour.
fn slow_limit(rng: &mut Rng) -> Limit {
    let (amount, seconds) = pick(rng, &[(16, 10), (40, 60), (100, 60)]);
    let limit = Limit::gcra(amount, Duration::from_secs(seconds))
        .and_then(|limit| limit.with_burst(pick(rng, &[16, amount, 2 * amount])));
    limit.unwrap_or_else(|_| unreachable!("amounts and periods are in range"))
}

/// Draws a limit of which several bursts drain while a region is deaf, and little drains within the
/// lag.
fn even_limit(rng: &mut Rng) -> Limit {
    let limit = Limit::gcra(pick(rng, &[320, 960]), Duration::from_mins(1));
    limit.unwrap_or_else(|_| unreachable!("amounts and periods are in range"))
}

/// A limit of which many bursts drain in a quarter of an hour.
fn fast_limit(rng: &mut Rng, bursts: &[u64]) -> Limit {
    let limit =
        Limit::gcra(300, Duration::from_secs(10)).and_then(|limit| limit.with_burst(pick(rng, bursts)));
    limit.unwrap_or_else(|_| unreachable!("amounts and periods are in range"))
}

/// One world in five is well.
fn faults(rng: &mut Rng, length_us: u64) -> RegionFaults {
    if rng.u8(0..5) == 0 {
        return RegionFaults::default();
    }
    let cuts = (0..pick(rng, &[0, 1, 1, 3])).map(|_| Cut {
        kind: pick(rng, &[CutKind::All, CutKind::One, CutKind::Pair, CutKind::OneWay]),
        at_us: rng.u64(length_us / 10..=length_us * 3 / 4),
        for_us: SECOND_US * pick(rng, &CUT_SECONDS),
    });
    let cuts = cuts.collect();
    // Few faults occur inside regions here, because worlds of one region test those.
    let is_rough = rng.u8(0..3) == 0;
    let mut rough = |of: &[u32]| if is_rough { pick(rng, of) } else { 0 };
    let (pauses, losses, wipes) = (rough(&[0, 1, 2]), rough(&[0, 0, 1, 2]), rough(&[0, 0, 0, 1]));
    let (crashes, loss_ppm) = (rough(&[0, 0, 1, 4]), rough(&[0, 0, 1_000, 50_000]));
    RegionFaults {
        cuts,
        resets: false,
        wan_loss_ppm: pick(rng, &[0, 0, 1_000, 50_000]),
        wan_repeat_ppm: pick(rng, &[0, 10_000, 200_000]),
        wan_slow_ppm: pick(rng, &[0, 0, 10_000, 100_000]),
        replicator_crashes: pick(rng, &[0, 0, 1, 6]),
        two_replicators: pick(rng, &[0, 0, 1, 3]),
        pauses,
        losses,
        wipes,
        crashes,
        loss_ppm,
    }
}

/// Draws two cuts, the second soon after regions have heard each other again.
fn two_cuts(rng: &mut Rng, length_us: u64) -> RegionFaults {
    let kind = pick(rng, &[CutKind::All, CutKind::All, CutKind::All, CutKind::One, CutKind::Pair]);
    let cut = |at_us, seconds| Cut { kind, at_us, for_us: SECOND_US * seconds };
    let first = cut(rng.u64(length_us / 3..=length_us / 2), pick(rng, &RUSHED_SECONDS));
    let healed_us = first.at_us + first.for_us + rng.u64(3 * SECOND_US..=6 * SECOND_US);
    let cuts = vec![first, cut(healed_us, pick(rng, &RUSHED_SECONDS))];
    RegionFaults { cuts, resets: rng.u8(0..4) > 0, ..RegionFaults::default() }
}

pub(super) fn pick<T: Copy>(rng: &mut Rng, of: &[T]) -> T {
    of[rng.usize(0..of.len())]
}

impl fmt::Display for RegionScenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, weights, nodes, .. } = self;
        let seconds = |us: u64| us as f64 / SECOND_US as f64;
        match limit.algorithm() {
            Algorithm::Gcra => write!(
                f,
                "{} in {} s with a burst of {}",
                limit.amount(),
                seconds(limit.period_us()),
                limit.burst()
            )?,
            Algorithm::SlidingWindow => {
                write!(f, "{} in a sliding window of {} s", limit.amount(), seconds(limit.period_us()))?;
            }
        }
        let class = self.class.as_str();
        write!(f, ", class {class}; regions of weights {weights:?} with {nodes} nodes each; ")?;
        f.write_str(match self.attack {
            Attack::Flood => "flooded",
            Attack::Lag => "attacked within the lag",
            Attack::Cut => "attacked at partitions",
            Attack::Heal => "attacked at partitions and at their ends",
            Attack::Pause => "attacked before a partition is noticed and at its end",
            Attack::Edges => "attacked at the ends of periods",
            Attack::Wipes => "attacked after origins have lost all data",
            Attack::Rush => "attacked twice before a partition is noticed",
        })?;
        let (wan_ms, length_s) = (self.wan_us / 1_000, seconds(self.length_us));
        write!(f, " with up to {} requests in {length_s} s; {wan_ms} ms between regions; ", self.requests)?;
        write!(f, "{}", self.faults)
    }
}

impl fmt::Display for RegionFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::default() {
            return f.write_str("no faults");
        }
        let percent = |ppm: u32| f64::from(ppm) / 10_000.0;
        let cuts = self.cuts.iter().map(|cut| {
            let cause = match cut.kind {
                CutKind::All => "all regions partitioned from each other",
                CutKind::One => "one region partitioned",
                CutKind::Pair => "one pair partitioned",
                CutKind::OneWay => "one pair partitioned in one direction",
                CutKind::Deaf => "the largest region receives nothing",
            };
            format!("{cause} at {} s for {} s", cut.at_us / SECOND_US, cut.for_us / SECOND_US)
        });
        let parts = [
            (u32::from(self.resets), "partitions noticed at once".to_owned()),
            (self.wan_loss_ppm, format!("{} % lost between regions", percent(self.wan_loss_ppm))),
            (self.wan_repeat_ppm, format!("{} % repeated", percent(self.wan_repeat_ppm))),
            (self.wan_slow_ppm, format!("{} % slow", percent(self.wan_slow_ppm))),
            (self.replicator_crashes, format!("{} replicators die", self.replicator_crashes)),
            (self.two_replicators, format!("two replicators {} times", self.two_replicators)),
            (self.pauses, format!("{} pauses of an origin", self.pauses)),
            (self.losses, format!("{} losses of data", self.losses)),
            (self.wipes, format!("{} losses of all data", self.wipes)),
            (self.crashes, format!("{} nodes die", self.crashes)),
            (self.loss_ppm, format!("{} % lost inside regions", percent(self.loss_ppm))),
        ];
        let counted = parts.into_iter().filter(|(count, _)| *count > 0).map(|(_, words)| words);
        f.write_str(&cuts.chain(counted).collect::<Vec<String>>().join(", "))
    }
}
