//! What a meter keeps because other regions count the same limit.

use std::collections::BTreeMap;

use super::meter::TOTAL_MAX;
use super::replication::{ComponentTotals, RegionId};
use super::tank::Tank;
use super::terms::{DEBT_MAX, Terms};

/// How many incarnations of a region's component a meter remembers: one that ends, and the one that begins. A message of the
/// one that ended may come late.
const INCARNATIONS_MAX: usize = 2;

/// Where sums begin anew, as another incarnation, in units. What is left of them is charged once more elsewhere then, which is
/// a burst at most; a meter of the highest rate that there is comes to it in six days.
const TOTALS_MAX: u64 = 1 << 51;

const _: () = assert!(TOTALS_MAX + DEBT_MAX < TOTAL_MAX, "no charge is cut off");

/// What a meter counts on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connectivity {
    /// The whole limit: all regions were heard of.
    Connected,
    /// The standing part, and others hear of what was charged to it: they were heard of again, and what they charged to theirs has
    /// not come yet.
    Settling,
    /// The standing part: another region has not been heard of for too long.
    Isolated,
}

/// What a meter keeps because other regions count the same limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegionState {
    /// When the sums began, by the origin's clock.
    pub(super) incarnation: u64,
    /// What this region charged since, and what it gave back before it had drained, in units.
    pub(super) charged: u64,
    pub(super) refunded: u64,
    /// What both were together when the meter was last marked.
    pub(super) published: u64,
    /// What this region charged and has not paid off by its own part of the rate: what is charged for it by who has never heard
    /// of it. The sum over all regions is never less than what one bucket would hold, whoever heard of whom.
    pub(super) own: Tank,
    /// What was charged to the standing part, beside this region's share of what all used.
    pub(super) isolated: Tank,
    pub(super) connectivity: Connectivity,
    /// Whether everything is told, since another region counts this meter too, or is going to.
    pub(super) publishes_all: bool,
    /// What was owed and forgotten, in units.
    pub(super) forgiven: u64,
    /// What was charged for each component of another region.
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

    /// Adds to what others are to hear of, at `now_us`.
    pub(super) fn add(&mut self, terms: &Terms, now_us: u64, units: u64) {
        self.charged += units;
        if self.charged >= TOTALS_MAX {
            self.begin(terms, now_us, self.own);
        }
    }

    /// Whether something was charged to the standing part that others are not to hear of yet.
    pub(super) fn has_isolated_usage(&self) -> bool {
        self.connectivity == Connectivity::Isolated && self.isolated != Tank::default()
    }

    /// Whether others are to hear of what was counted since they last did. Then it counts as told.
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
