//! A refund that the node has not sent yet, and the time of the charge behind it.

use crate::limit::Algorithm;
use crate::origin::{MeterUpdate, Terms};

/// Usual longest time until the origin receives a caller's refund, µs: the longest stretched report
/// interval. Units that drain in this time are refunded all the same. Longer: more is refunded of
/// usage that a busy node reports late; after an outage of the origin, units that drain in this
/// time may pass twice.
const REFUND_ON_ITS_WAY_US: u64 = 500_000;

/// The time of the charge that a refund belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChargeTime {
    /// Start of its drain, by the origin's clock; `u64::MAX` if nothing has drained.
    drains_from_us: u64,
    /// Window cell of the charge, and the length of cells under the limit at that time, µs; 0 under
    /// GCRA, which has no cells.
    cell: u64,
    cell_us: u64,
}

impl Default for ChargeTime {
    /// A charge of which nothing has drained yet.
    fn default() -> Self {
        Self { drains_from_us: u64::MAX, cell: u64::MAX, cell_us: 0 }
    }
}

impl ChargeTime {
    /// A charge at this moment of the origin's clock. Before the origin's first reply the time is
    /// unknown; no limit with `Lapse::Counted` admits anything then.
    pub(super) fn at(origin_us: Option<u64>, terms: &Terms) -> Self {
        let cell_us = cell_us(terms);
        origin_us.map_or_else(Self::default, |drains_from_us| Self {
            drains_from_us,
            cell: drains_from_us.checked_div(cell_us).unwrap_or(0),
            cell_us,
        })
    }

    /// The charge behind a refund that a caller requests at this moment.
    pub(super) fn of_request(origin_us: Option<u64>, terms: &Terms) -> Self {
        let now = Self::at(origin_us, terms);
        Self { drains_from_us: now.drains_from_us.saturating_add(REFUND_ON_ITS_WAY_US), ..now }
    }

    /// Reads the charge from an update in a call.
    fn of(update: &MeterUpdate) -> Self {
        let drains_from_us = if update.refund_of_us == 0 { u64::MAX } else { update.refund_of_us };
        Self { drains_from_us, cell: update.cell, cell_us: cell_us(&update.terms) }
    }

    /// Merges two charges for one refund. The earlier time and cell apply, because the later ones
    /// would refund units of the earlier charge that have drained.
    fn earlier(self, other: Self) -> Self {
        let begins_us = |charge: &Self| charge.cell.saturating_mul(charge.cell_us.max(1));
        let Self { cell, cell_us, .. } = if begins_us(&other) < begins_us(&self) { other } else { self };
        Self { drains_from_us: self.drains_from_us.min(other.drains_from_us), cell, cell_us }
    }

    /// Whether the window of the charge is over. The length of its cells is that at the time of the
    /// charge: the limit may have changed since, here or at the origin.
    fn is_over(self, origin_us: u64) -> bool {
        origin_us.checked_div(self.cell_us).is_some_and(|cell| self.cell.saturating_add(1) < cell)
    }
}

/// Returns the length of the limit's cells, µs; 0 if it has none.
fn cell_us(terms: &Terms) -> u64 {
    match terms.algorithm() {
        Algorithm::Gcra => 0,
        Algorithm::SlidingWindow => terms.cell_us(),
    }
}

/// Units to refund, and the earliest charge among them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RefundDue {
    pub(super) units: u64,
    charge: ChargeTime,
}

impl RefundDue {
    /// The refund of an update whose call is never applied.
    pub(super) fn of(update: &MeterUpdate) -> Self {
        Self { units: update.refund, charge: ChargeTime::of(update) }
    }

    pub(super) fn new(units: u64, charge: ChargeTime) -> Self {
        Self { units, charge }
    }

    pub(super) fn add(&mut self, other: Self) {
        if other.units > 0 {
            let units = self.units.saturating_add(other.units);
            *self = Self { units, charge: self.charge.earlier(other.charge) };
        }
    }

    /// Drops the refund if the window of its charge is over: the charge is gone as well.
    pub(super) fn drop_if_over(&mut self, origin_us: u64) {
        if self.charge.is_over(origin_us) {
            *self = Self::default();
        }
    }

    /// Takes the refund for a call that reports `used` units of a grant of `grant_cell`. A call has
    /// one cell, and `used` counts there if the origin has dropped the grant. So a refund of
    /// another cell waits for a call of its own.
    pub(super) fn take(&mut self, used: u64, terms: &Terms, grant_cell: u64) -> Self {
        let has_cell = terms.algorithm() == Algorithm::SlidingWindow && self.charge.cell < u64::MAX;
        let cell = if has_cell { self.charge.cell } else { grant_cell };
        if self.units == 0 || (used > 0 && cell != grant_cell) {
            return Self { units: 0, charge: ChargeTime { cell: grant_cell, ..ChargeTime::default() } };
        }
        let Self { units, charge } = std::mem::take(self);
        Self { units, charge: ChargeTime { cell, ..charge } }
    }

    /// Returns the time of the charge as a call encodes it: 0 if nothing has drained yet.
    pub(super) const fn charged_us(&self) -> u64 {
        if self.charge.drains_from_us == u64::MAX { 0 } else { self.charge.drains_from_us }
    }

    /// Returns the cell of the call that carries the refund.
    pub(super) const fn cell(&self) -> u64 {
        self.charge.cell
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Limit;
    use crate::origin::Lapse;
    use std::time::Duration;

    const SECOND: u64 = 1_000_000;

    fn window(seconds: u64) -> Terms {
        let limit = Limit::sliding_window(10, Duration::from_secs(seconds)).expect("in range");
        Terms::new(&limit, 0, Lapse::Counted, 1)
    }

    fn refund(units: u64, at_s: u64, terms: &Terms) -> RefundDue {
        RefundDue::new(units, ChargeTime::at(Some(at_s * SECOND), terms))
    }

    #[test]
    fn merged_refunds_have_the_earlier_charge() {
        for order in [[12, 39], [39, 12]] {
            let mut due = RefundDue::default();
            for at_s in order {
                due.add(refund(2, at_s, &window(10)));
            }
            due.add(refund(0, 1, &window(10)));
            assert_eq!((due.units, due.charged_us(), due.cell()), (4, 12 * SECOND, 1));
        }
    }

    #[test]
    fn refund_of_another_cell_waits_for_a_call_without_usage() {
        let terms = window(10);
        let mut due = refund(2, 39, &terms);
        let none = due.take(5, &terms, 4);
        assert_eq!((none.units, none.charged_us(), none.cell()), (0, 0, 4));
        let taken = due.take(0, &terms, 4);
        assert_eq!((taken.units, taken.charged_us(), taken.cell()), (2, 39 * SECOND, 3));
        assert_eq!(due, RefundDue::default(), "a refund is taken once");
    }

    #[test]
    fn refund_ends_with_the_window_after_its_cell() {
        let mut due = refund(2, 39, &window(10));
        due.drop_if_over(50 * SECOND - 1);
        assert_eq!(due.units, 2);
        due.drop_if_over(50 * SECOND);
        assert_eq!(due, RefundDue::default());
    }
}
