//! The transition of one meter: lapse, charge, decide, grant.
//!
//! A meter has a level, which drains, and grants, which do not. Whenever a grant is made, both
//! together are within the limit. Every number is an integer below 2^53, and a script can perform
//! every step: see [`Terms`].

mod grants;
mod ledger;
mod regions;
mod room;

pub use grants::{
    CROSS_REGION_LIFE_US_MAX, LAPSE_MARGIN_US, LAPSES_PER_CALL_MAX, LIFE_US_MAX, NodeGrant, RECALL_US,
};
pub(crate) use grants::{REPORT_US_MIN, REPORTS_PER_BURST};
pub use room::NEVER_US;

use self::grants::{GRANT_US_MAX, Recall};
use self::ledger::GrantLedger;
use super::call::{MeterUpdate, NodeId};
use super::region_state::{Connectivity, RegionState};
use super::tank::{CellStep, Tank};
use super::terms::{LEVEL_MAX, Lapse, Terms};
use crate::limit::Algorithm;

/// Retention of an idle meter after it has drained, µs, so that the version of its rule is not lost
/// at once.
const RETENTION_US: u64 = 60_000_000;

/// The longest that a level is retained, µs: seventeen years. A full burst drains in ten, and a
/// level may exceed the burst.
const RETAINED_US_MAX: u64 = 1 << 49;

/// Where the sums of all that was ever charged, and of all that was given back, stop.
pub(super) const TOTAL_MAX: u64 = 1 << 52;

const _: () = assert!(TOTAL_MAX + LEVEL_MAX < 1 << 53, "a script's numbers are exact up to 2^53");

/// A meter as an origin holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginMeter {
    /// The highest version of its limit that a node has sent.
    terms: Terms,
    /// Undrained usage at tick `at`. For a sliding window: usage in the cell `cell` and the one
    /// before.
    tank: Tank,
    at: u64,
    cell: u64,
    grants: GrantLedger,
    /// All that was ever charged, in units, and all that was given back.
    charged: u64,
    refunded: u64,
    /// When the last call came.
    seen_us: u64,
    /// The last loss of writes taken into account, by the time when it was noticed; 0 for none.
    loss_us: u64,
    recall: Option<Recall>,
    /// Whether the call under way refused a request that could pass later.
    refused: bool,
    /// Boxed: most limits are of one region.
    region_state: Option<Box<RegionState>>,
}

/// The context of a call, as a meter needs it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) node: NodeId,
    pub(super) now_us: u64,
    /// When the partition last lost writes, by which that loss is known; 0 if it never did. And
    /// when that was by a clock that has been set back since.
    pub(super) loss_us: u64,
    pub(super) loss_at_us: u64,
    /// Whether writes were lost since the last reply to this node.
    pub(super) lost: bool,
    /// Connectivity of cross-region limits, and since when all peers have been heard without a
    /// break; 0 before the first round.
    pub(super) connectivity: Connectivity,
    pub(super) connected_since_us: u64,
}

impl OriginMeter {
    /// Creates a meter without usage.
    pub(super) fn new(terms: Terms, now_us: u64) -> Self {
        let at = terms.tick(now_us);
        Self {
            terms,
            tank: Tank::default(),
            at,
            cell: at / terms.period(),
            grants: GrantLedger::default(),
            charged: 0,
            refunded: 0,
            seen_us: 0,
            loss_us: 0,
            recall: None,
            refused: false,
            region_state: terms.cross_region().map(|_| Box::new(RegionState::new(now_us))),
        }
    }

    /// All that was ever charged, in units.
    pub fn charged(&self) -> u64 {
        self.charged
    }

    /// All that was ever given back, in units.
    pub fn refunded(&self) -> u64 {
        self.refunded
    }

    /// Returns the units granted to nodes.
    pub fn held(&self) -> u64 {
        self.grants.units()
    }

    /// Returns the nodes that have or want a grant.
    pub fn holders(&self) -> impl Iterator<Item = (NodeId, NodeGrant)> + '_ {
        self.grants.iter()
    }

    /// Returns the usage that has not drained, in drops.
    pub fn level(&self) -> u64 {
        self.charged_drops()
    }

    /// The limit it is under.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Returns all numbers of the meter, in the order of the script: level and tick; cell, current
    /// and previous; granted in the present cell and in earlier ones, and wanted; total charged and
    /// refunded; the last loss taken into account.
    pub fn numbers(&self) -> [u64; 11] {
        let Tank { level, current, previous } = self.tank;
        let GrantLedger { present, earlier, wants, .. } = self.grants;
        let Self { at, cell, charged, refunded, loss_us, .. } = *self;
        [level, at, cell, current, previous, present, earlier, wants, charged, refunded, loss_us]
    }

    /// Whether the meter has expired.
    pub(super) fn is_over(&self, now_us: u64) -> bool {
        self.expires_us() <= now_us
    }

    /// Returns when the meter expires, by the origin's clock, µs: then no state of it matters.
    pub fn expires_us(&self) -> u64 {
        let ticks = match self.terms.algorithm() {
            // Granted units may still count as used, and drain only from then on.
            Algorithm::Gcra => {
                let held = self.terms.drops(self.held());
                let of_all = self.terms.ticks_to_drain(self.tank.level + held);
                (of_all + self.isolated_ticks(held)).max(self.ticks_owned(held))
            }
            Algorithm::SlidingWindow => 2 * self.terms.period(),
        };
        self.seen_us + self.terms.ticks_us(ticks, RETAINED_US_MAX) + GRANT_US_MAX + RETENTION_US
    }

    /// Brings the meter up to date and applies the node's report. Returns whether the node's grant
    /// had lapsed.
    pub(super) fn settle(&mut self, moment: Moment, update: &MeterUpdate) -> bool {
        let since_us = self.at_us();
        let changed = self.adopt(&update.terms, moment.now_us);
        self.roll(moment.now_us);
        self.follow_connectivity(moment, since_us);
        self.distrust(moment, changed);
        self.lapse_others(moment);
        self.shorten_others(moment);
        let lapsed = self.settle_own(moment, update);
        // Refunded units may have been charged in lost writes. Subtracted from the usage assumed
        // instead, they would be admitted twice.
        if !(moment.lost && self.terms.lapse() == Lapse::Counted) {
            self.refund(update);
        }
        self.seen_us = moment.now_us;
        // Drops a recall that is over, and one from before the clock was set back.
        let kept = moment.now_us + 1..=moment.now_us + RECALL_US;
        self.recall = self.recall.filter(|wanted| kept.contains(&wanted.until_us));
        lapsed
    }

    /// Adopts `terms` unless their version is lower. Charged units stay the same units. Returns
    /// whether the limit changed.
    fn adopt(&mut self, terms: &Terms, now_us: u64) -> bool {
        if terms.version() < self.terms.version() || *terms == self.terms {
            return false;
        }
        // Until now, the usage drained under the old terms.
        self.roll(now_us);
        let before = std::mem::replace(&mut self.terms, *terms);
        if before.period() != terms.period() {
            self.tank.resize(&before, terms);
            if let Some(region_state) = &mut self.region_state {
                region_state.own.resize(&before, terms);
                region_state.isolated.resize(&before, terms);
            }
        }
        if before.tick_us() != terms.tick_us() {
            self.at = self.at * before.tick_us() / terms.tick_us();
        }
        let both_gcra = before.algorithm() == Algorithm::Gcra && terms.algorithm() == Algorithm::Gcra;
        let recounts =
            !both_gcra && (before.algorithm() != terms.algorithm() || before.cell_us() != terms.cell_us());
        if recounts {
            self.set_connectivity(Connectivity::Connected);
            self.recount(&before);
        }
        self.adopt_cross_region(now_us, recounts);
        true
    }

    /// Converts usage counted by another algorithm, or in cells of another length, as if it was
    /// charged just now.
    fn recount(&mut self, before: &Terms) {
        let units = match before.algorithm() {
            Algorithm::Gcra => before_units(self.tank.level, self.terms.period()),
            Algorithm::SlidingWindow => self.tank.current + self.tank.previous,
        };
        let units = units.min(self.terms.units_max());
        self.cell = self.at / self.terms.period();
        self.tank = Tank::default();
        self.tank.charge(&self.terms, units, 0);
        self.grants.turn();
    }

    /// When it was last brought up to the present, by the origin's clock.
    pub(super) fn at_us(&self) -> u64 {
        self.at * self.terms.tick_us()
    }

    /// Drains, or moves on to the present cell. A clock that was set back starts again from where
    /// it is.
    pub(super) fn roll(&mut self, now_us: u64) {
        let now = self.terms.tick(now_us);
        let elapsed = now.saturating_sub(self.at);
        self.at = now;
        match self.terms.algorithm() {
            Algorithm::Gcra => self.drain(elapsed),
            Algorithm::SlidingWindow => self.roll_cells(now / self.terms.period()),
        }
    }

    /// Drains all levels. Isolated usage drains at the rate of the regional share, after the usage
    /// of all regions has drained: until then the share's part of that usage drains. This region's
    /// own usage drains at the rate of the share from the start.
    fn drain(&mut self, elapsed: u64) {
        let amount = self.terms.amount();
        if let (Some(region_state), Some(cross_region)) = (&mut self.region_state, self.terms.cross_region())
        {
            let left = elapsed.saturating_sub(self.terms.ticks_to_drain(self.tank.level));
            region_state.isolated.drain(left, cross_region.share_amount);
            region_state.own.drain(elapsed, cross_region.share_amount);
        }
        self.tank.drain(elapsed, amount);
    }

    fn roll_cells(&mut self, cell: u64) {
        if cell == self.cell {
            return;
        }
        let turn = match cell {
            _ if cell == self.cell + 1 => CellStep::Next,
            _ if cell > self.cell => CellStep::Later,
            _ => CellStep::Back,
        };
        self.tank.turn(turn);
        if let Some(region_state) = &mut self.region_state {
            region_state.own.turn(turn);
            region_state.isolated.turn(turn);
        }
        self.grants.turn();
        self.cell = cell;
    }

    /// The last loss of writes that it knows of.
    pub(super) fn loss_us(&self) -> u64 {
        self.loss_us
    }

    /// After a loss of writes, counts a limit with `Lapse::Counted` as full at that moment. This
    /// happens once for each loss, and again for each later change of the limit. A loss is
    /// identified by its time and not by order, because clocks are set back and those of two stores
    /// differ.
    fn distrust(&mut self, moment: Moment, changed: bool) {
        let known = std::mem::replace(&mut self.loss_us, moment.loss_us) == moment.loss_us;
        if moment.loss_us == 0 || (known && !changed) {
            return;
        }
        let assumed = match self.terms.lapse() {
            Lapse::Counted => self.left_of_full(moment.loss_at_us),
            Lapse::Forgiven => Tank::default(),
        };
        self.tank = self.tank.at_least(&assumed);
        if !known {
            self.disown(moment.loss_us, &assumed);
        }
    }

    /// Returns the undrained part of a limit that was full at `loss_at_us`.
    fn left_of_full(&self, loss_at_us: u64) -> Tank {
        let lost_at = self.terms.tick(loss_at_us);
        let mut left = Tank::default();
        match self.terms.algorithm() {
            Algorithm::Gcra => {
                left.level = self.terms.full();
                left.drain(self.at.saturating_sub(lost_at), self.terms.amount());
            }
            Algorithm::SlidingWindow => match self.cells_ago(lost_at / self.terms.period()) {
                0 => left.current = self.terms.capacity(),
                1 => left.previous = self.terms.capacity(),
                _ => {}
            },
        }
        left
    }

    /// Starts a new incarnation of the component after a loss of writes. Under `Lapse::Counted` it
    /// begins with the assumed usage, or this region's known usage if that is more; otherwise at
    /// zero. Usage of peers is not in it, because each peer publishes its own.
    fn disown(&mut self, loss_us: u64, assumed: &Tank) {
        let Some(region_state) = &mut self.region_state else { return };
        // Isolated usage is published when all peers are heard again.
        let untold =
            if region_state.connectivity == Connectivity::Isolated { region_state.isolated.level } else { 0 };
        let mut own = Tank::default();
        if self.terms.lapse() == Lapse::Counted {
            let meter_reply =
                Tank { level: region_state.own.level.saturating_sub(untold), ..region_state.own };
            own = meter_reply.at_least(assumed);
        }
        region_state.begin(&self.terms, loss_us, own);
        region_state.own.level = (region_state.own.level + untold).min(LEVEL_MAX);
    }

    /// How many cells ago that one was: the present one, the one before, or one that does not
    /// count.
    fn cells_ago(&self, cell: u64) -> u64 {
        match cell {
            _ if cell == self.cell => 0,
            _ if cell.saturating_add(1) == self.cell => 1,
            _ => 2,
        }
    }

    fn charge(&mut self, units: u64, cell: u64) {
        let units = units.min(LEVEL_MAX);
        let cells_ago = self.cells_ago(cell);
        self.charged = (self.charged + units).min(TOTAL_MAX);
        let Some(region_state) = &mut self.region_state else {
            self.tank.charge(&self.terms, units, cells_ago);
            return;
        };
        // Isolated usage under GCRA is own usage at once, because it drains meanwhile. Isolated
        // usage of window cells joins `own` when all peers are heard again.
        if region_state.connectivity != Connectivity::Isolated || self.terms.algorithm() == Algorithm::Gcra {
            region_state.own.charge(&self.terms, units, cells_ago);
        }
        let counts = if region_state.connectivity == Connectivity::Connected {
            &mut self.tank
        } else {
            &mut region_state.isolated
        };
        counts.charge(&self.terms, units, cells_ago);
        if region_state.connectivity != Connectivity::Isolated {
            region_state.add(&self.terms, self.at * self.terms.tick_us(), units);
        }
    }

    /// Refunds usage in the cell in which it was charged, as far as it has not drained.
    fn refund(&mut self, update: &MeterUpdate) {
        let MeterUpdate { refund_of_us, cell, .. } = *update;
        let units = update.refund.min(LEVEL_MAX);
        self.refunded = (self.refunded + units).min(TOTAL_MAX);
        let drops = match self.terms.algorithm() {
            Algorithm::Gcra => {
                let drops = self.terms.drops(units);
                let age =
                    if refund_of_us == 0 { 0 } else { self.at.saturating_sub(self.terms.tick(refund_of_us)) };
                drops.saturating_sub(age.min(self.terms.ticks_to_drain(drops)) * self.terms.amount())
            }
            Algorithm::SlidingWindow => 0,
        };
        let cells_ago = self.cells_ago(cell);
        let Some(region_state) = &mut self.region_state else {
            self.tank.give_back(drops, units, cells_ago);
            return;
        };
        let counts = if region_state.connectivity == Connectivity::Connected {
            &mut self.tank
        } else {
            &mut region_state.isolated
        };
        // Peers receive the refund that took effect. They receive none for a sliding window,
        // because the total of a cell only grows.
        let taken = counts.level.min(drops);
        counts.give_back(drops, units, cells_ago);
        region_state.own.give_back(taken, 0, cells_ago);
        if region_state.connectivity != Connectivity::Isolated {
            region_state.refunded = (region_state.refunded + taken / self.terms.period()).min(TOTAL_MAX);
        }
    }

    /// Charges requests that were decided here.
    pub(super) fn admit(&mut self, node: NodeId, units: u64) {
        self.charge(units, self.cell);
        if units > 0 && self.recall.is_some_and(|wanted| wanted.node == node) {
            self.recall = None;
        }
    }
}

/// Converts drops to units, rounded up: rounding forgives no usage.
const fn before_units(drops: u64, period: u64) -> u64 {
    drops.div_ceil(period)
}
