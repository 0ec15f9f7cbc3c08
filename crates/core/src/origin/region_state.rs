//! The state of a meter that other regions count too.

use std::collections::BTreeMap;

use super::meter::TOTAL_MAX;
use super::replication::{ComponentTotals, RegionId};
use super::tank::Tank;
use super::terms::{LEVEL_MAX, Terms};

/// How many incarnations of a region's component a meter remembers: one that ends, and the one that
/// begins. A message of the one that ended may come late.
const INCARNATIONS_MAX: usize = 2;

/// Total at which a region starts a new incarnation, in units. Peers then charge the undrained part
/// once more, at most a burst. A meter of the highest possible rate reaches this total in six days.
const TOTALS_MAX: u64 = 1 << 51;

const _: () = assert!(TOTALS_MAX + LEVEL_MAX < TOTAL_MAX, "no charge is cut off");

/// Whether a meter counts against the whole limit or the regional share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connectivity {
    /// The whole limit: all peers are heard.
    Connected,
    /// The regional share, while isolated usage is published: all peers are heard again, and their
    /// isolated usage has not arrived yet.
    Settling,
    /// The regional share: a peer counts as lost.
    Isolated,
}

/// The state of a meter that other regions count too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionState {
    /// When the sums began, by the origin's clock.
    pub(super) incarnation: u64,
    /// Units that this region charged since, and units refunded before they had drained.
    pub(super) charged: u64,
    pub(super) refunded: u64,
    /// Sum of both when the meter was last marked dirty, in units.
    pub(super) published: u64,
    /// This region's own usage that has not drained at the rate of its share. A peer without a
    /// record of the component charges this. Summed over all regions, it is never below the level
    /// of one bucket, in any state of replication.
    pub(super) own: Tank,
    /// Usage charged to the regional share, in addition to the share's part of all regions' usage.
    pub(super) isolated: Tank,
    pub(super) connectivity: Connectivity,
    /// Whether every charge is published, because a peer counts this meter too, or soon will.
    pub(super) publishes_all: bool,
    /// Units of peers' usage that were dropped above the debt limit.
    pub(super) forgiven: u64,
    /// Merged totals of each component of a peer, by region and incarnation.
    pub(super) seen: BTreeMap<(RegionId, u64), ComponentTotals>,
}

impl RegionState {
    pub(super) fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            charged: 0,
            refunded: 0,
            published: 0,
            own: Tank::default(),
            isolated: Tank::default(),
            connectivity: Connectivity::Connected,
            publishes_all: false,
            forgiven: 0,
            seen: BTreeMap::new(),
        }
    }

    /// Begins its sums anew, with `own` as all that counts.
    pub(super) fn begin(&mut self, terms: &Terms, now_us: u64, own: Tank) {
        self.incarnation = now_us.max(self.incarnation + 1);
        (self.charged, self.refunded, self.published) = (own.units(terms), 0, 0);
        self.own = own;
    }

    /// Adds `units` to the total that is published to peers, at `now_us`.
    pub(super) fn add(&mut self, terms: &Terms, now_us: u64, units: u64) {
        self.charged += units;
        if self.charged >= TOTALS_MAX {
            self.begin(terms, now_us, self.own);
        }
    }

    /// Whether there is isolated usage that must not be published yet.
    pub(super) fn has_isolated_usage(&self) -> bool {
        self.connectivity == Connectivity::Isolated && self.isolated != Tank::default()
    }

    /// Returns whether the usage since the last publication is due. If so, it counts as published.
    pub(super) fn is_due(&mut self, publish_threshold: u64) -> bool {
        let total = self.charged + self.refunded;
        let is_due = total - self.published >= if self.publishes_all { 1 } else { publish_threshold };
        if is_due {
            (self.published, self.publishes_all) = (total, true);
        }
        is_due
    }

    pub(super) fn remember(&mut self, from: RegionId, incarnation: u64, totals: ComponentTotals) {
        self.seen.insert((from, incarnation), totals);
        let mut others: Vec<u64> =
            self.seen.range((from, 0)..=(from, u64::MAX)).map(|((_, of), _)| *of).collect();
        others.retain(|of| *of != incarnation);
        if others.len() >= INCARNATIONS_MAX {
            self.seen.remove(&(from, others[0]));
        }
    }
}
