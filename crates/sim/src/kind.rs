//! Groups of worlds of several regions, and the printed bound of their limit.

use tidegate_core::bound::{self, Bound, Fleet, Promise, bound, debt_max};
use tidegate_core::{Algorithm, Class, Limit, Regime};
use tidegate_replication::{INTERVAL_US, PEER_TIMEOUT_DEFAULT_US};

use crate::scenario::{Cut, CutKind, Scenario};

/// Least number of bursts of a fast limit that drain within the lag and the peer timeout.
const FAST_BURSTS: u32 = 4;

/// The links of a world that are cut at some time.
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
    /// The links that are cut.
    pub cuts: Cuts,
}

impl Scenario {
    /// Returns the group of the world.
    pub fn kind(&self) -> Kind {
        let is_wide = self.region_count() > 2;
        let is_pair = |cut: &Cut| is_wide && matches!(cut.kind, CutKind::Pair | CutKind::OneWay);
        let cuts = match &self.link_faults().cuts[..] {
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

    /// How far the limit may be passed, as it is printed, after so much went wrong.
    pub(crate) fn bound(&self, faults: &bound::Faults) -> Bound {
        bound(&Promise::new(&self.limit, self.class, Regime::BestEffort), &self.fleet(), faults)
    }

    fn fleet(&self) -> Fleet {
        let fleet = Fleet { nodes: self.nodes as u32, ..Fleet::of(self.region_count() as u32) };
        let Some(regions) = &self.regions else { return fleet };
        Fleet {
            weights: regions.weights.clone().into(),
            replication_interval_us: INTERVAL_US,
            transit_us: regions.wan_us + regions.wan_us / 4 + 4 * self.delay_us,
            peer_timeout_us: PEER_TIMEOUT_DEFAULT_US,
            ..fleet
        }
    }

    /// The most that is owed beyond a limit of this world, in units.
    pub(crate) fn debt_max(&self, limit: &Limit) -> u64 {
        debt_max(&Promise::new(limit, self.class, Regime::BestEffort), &self.fleet())
    }
}
