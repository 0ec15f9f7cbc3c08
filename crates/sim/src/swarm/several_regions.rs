//! Worlds of several regions: every seed has an attack, a limit and faults of its own.

use std::time::Duration;

use fastrand::Rng;
use tidegate_core::{Class, Limit};

use super::{Size, bucket, pick, window};
use crate::scenario::{Attack, Cut, CutKind, Faults, LinkFaults, Regions, SECOND_US, Scenario, Shape};
use crate::world::ATTACK_KEYS;

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

/// Regions of worlds that have many.
const REGIONS_MAX: usize = 8;

/// Total losses of data in worlds that test them.
const WIPES: u32 = 8;

/// How many times as many requests there are in a world with such a cut, at most.
const LONG_TIMES_MAX: u64 = 20;

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

    /// Draws the faults between regions and inside them.
    fn faults(self, rng: &mut Rng, length_us: u64) -> (LinkFaults, Faults) {
        let no_faults = || (LinkFaults::default(), Faults::default());
        let one_cut = |cut| (LinkFaults { cuts: vec![cut], ..LinkFaults::default() }, Faults::default());
        match self {
            Self::Any => faults(rng, length_us),
            Self::LongCut => {
                let kind = pick(rng, &[CutKind::All, CutKind::One, CutKind::Pair, CutKind::Pair]);
                let at_us = rng.u64(60 * SECOND_US..=120 * SECOND_US);
                let cuts = vec![Cut { kind, at_us, for_us: LONG_CUT_US }];
                let (links, inside) = faults(rng, length_us);
                (LinkFaults { cuts, ..links }, inside)
            }
            Self::OnePair => {
                let kind = pick(rng, &[CutKind::Pair, CutKind::OneWay]);
                let at_us = rng.u64(length_us / 3..=length_us / 2);
                one_cut(Cut { kind, at_us, for_us: SECOND_US * pick(rng, &CUT_SECONDS) })
            }
            Self::Wipes => (LinkFaults::default(), Faults { wipes: WIPES, ..Faults::default() }),
            Self::Deaf => {
                let at_us = rng.u64(10 * SECOND_US..=20 * SECOND_US);
                one_cut(Cut { kind: CutKind::Deaf, at_us, for_us: DEAF_US })
            }
            Self::Rush if rng.u8(0..4) == 0 => no_faults(),
            Self::Rush => (two_cuts(rng, length_us), Faults::default()),
            Self::LongRun if rng.bool() => no_faults(),
            Self::LongRun => {
                let kind = pick(rng, &[CutKind::All, CutKind::One, CutKind::Pair, CutKind::OneWay]);
                let at_us = rng.u64(60 * SECOND_US..=120 * SECOND_US);
                one_cut(Cut { kind, at_us, for_us: SECOND_US * pick(rng, &CUT_SECONDS) })
            }
        }
    }
}

/// The world of a seed. Some purposes need longer worlds, and more requests.
pub(super) fn scenario_of(seed: u64, Size { length_us, requests }: Size) -> Scenario {
    let mut rng = Rng::with_seed(seed ^ 0x7e61_0425);
    let rng = &mut rng;
    let purpose = Purpose::draw(rng);
    let is_even = rng.u8(0..3) > 0;
    let regions = purpose.regions(rng);
    let weights = (0..regions).map(|place| purpose.weight(rng, is_even, place)).collect();
    let times = purpose.times(length_us);
    let length_us = length_us + purpose.longer_us();
    let attack = purpose.attack(rng);
    let limit = purpose.limit(rng, attack, length_us);
    let (links, mut faults) = purpose.faults(rng, length_us);
    // Only a limit that forgives has a maximum debt. Many losses of data reach it.
    let class = if rng.bool() || purpose == Purpose::Wipes { Class::Comfort } else { Class::Security };
    if class == Class::Security {
        // An empty store does not know that it had data.
        faults.wipes = 0;
    }
    Scenario {
        seed,
        nodes: pick(rng, &[1, 2, 3]),
        keys: ATTACK_KEYS,
        shape: Shape::Attack(attack),
        requests: requests * times,
        length_us,
        regions: Some(Regions {
            weights,
            wan_us: pick(rng, &[1_000, 20_000, 75_000, 150_000]),
            faults: links,
        }),
        delay_us: pick(rng, &[200, 500, 1_000]),
        faults,
        // The checked bound has no terms for outages of an origin.
        has_fallback: false,
        ..Scenario::new(limit, class)
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
    if is_window { window(amount, period) } else { bucket(amount, period, burst) }
}

/// Draws a limit that is slow enough to be exhausted by requests for an hour.
fn slow_limit(rng: &mut Rng) -> Limit {
    let (amount, seconds) = pick(rng, &[(16, 10), (40, 60), (100, 60)]);
    bucket(amount, Duration::from_secs(seconds), pick(rng, &[16, amount, 2 * amount]))
}

/// Draws a limit of which several bursts drain while a region is deaf, and little drains within the
/// lag.
fn even_limit(rng: &mut Rng) -> Limit {
    let amount = pick(rng, &[320, 960]);
    bucket(amount, Duration::from_mins(1), amount)
}

/// A limit of which many bursts drain in a quarter of an hour.
fn fast_limit(rng: &mut Rng, bursts: &[u64]) -> Limit {
    bucket(300, Duration::from_secs(10), pick(rng, bursts))
}

/// One world in five is well.
fn faults(rng: &mut Rng, length_us: u64) -> (LinkFaults, Faults) {
    if rng.u8(0..5) == 0 {
        return (LinkFaults::default(), Faults::default());
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
    let inside = Faults {
        pauses: rough(&[0, 1, 2]),
        losses: rough(&[0, 0, 1, 2]),
        wipes: rough(&[0, 0, 0, 1]),
        crashes: rough(&[0, 0, 1, 4]),
        loss_ppm: rough(&[0, 0, 1_000, 50_000]),
        ..Faults::default()
    };
    let links = LinkFaults {
        cuts,
        resets: false,
        loss_ppm: pick(rng, &[0, 0, 1_000, 50_000]),
        repeat_ppm: pick(rng, &[0, 10_000, 200_000]),
        slow_ppm: pick(rng, &[0, 0, 10_000, 100_000]),
        replicator_crashes: pick(rng, &[0, 0, 1, 6]),
        two_replicators: pick(rng, &[0, 0, 1, 3]),
    };
    (links, inside)
}

/// Draws two cuts, the second soon after regions have heard each other again.
fn two_cuts(rng: &mut Rng, length_us: u64) -> LinkFaults {
    let kind = pick(rng, &[CutKind::All, CutKind::All, CutKind::All, CutKind::One, CutKind::Pair]);
    let cut = |at_us, seconds| Cut { kind, at_us, for_us: SECOND_US * seconds };
    let first = cut(rng.u64(length_us / 3..=length_us / 2), pick(rng, &RUSHED_SECONDS));
    let healed_us = first.at_us + first.for_us + rng.u64(3 * SECOND_US..=6 * SECOND_US);
    let cuts = vec![first, cut(healed_us, pick(rng, &RUSHED_SECONDS))];
    LinkFaults { cuts, resets: rng.u8(0..4) > 0, ..LinkFaults::default() }
}
