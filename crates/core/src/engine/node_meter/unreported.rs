//! Usage and refunds that the origin does not know of, besides the usage in the slot of the meter.

use super::refund::RefundDue;
use crate::origin::{MeterUpdate, Terms};

/// Units to report in the next call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unreported {
    /// Units spent from a grant and reported in a call that the origin refused.
    pub(super) used: u64,
    /// Units admitted without the origin.
    pub(super) owed: u64,
    pub(super) refund: RefundDue,
}

impl Unreported {
    pub(super) fn units(&self) -> u64 {
        self.used.saturating_add(self.owed).saturating_add(self.refund.units)
    }

    pub(super) fn owe(&mut self, cost: u64) {
        self.owed = self.owed.saturating_add(cost);
    }

    /// Cancels owed units. Returns the rest of the cost.
    pub(super) fn forgive(&mut self, cost: u64) -> u64 {
        let own = cost.min(self.owed);
        self.owed -= own;
        cost - own
    }

    /// Takes all units for a call that also reports `used_in_slot` units of a grant of
    /// `grant_cell`. Only the refund may stay: see [`RefundDue::take`].
    pub(super) fn take(&mut self, used_in_slot: u64, terms: &Terms, grant_cell: u64) -> Self {
        let Self { used, owed, .. } = *self;
        let used = used_in_slot.saturating_add(used);
        let refund = self.refund.take(used, terms, grant_cell);
        (self.used, self.owed) = (0, 0);
        Self { used, owed, refund }
    }

    /// Puts back the units of a call that is never applied.
    pub(super) fn put_back(&mut self, update: &MeterUpdate) {
        self.used = self.used.saturating_add(update.used);
        self.owe(update.owed);
        self.refund.add(RefundDue::of(update));
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::tests::terms;
    use super::super::refund::ChargeTime;
    use super::*;

    #[test]
    fn units_of_a_refused_call_are_reported_again() {
        let mut unreported = Unreported::default();
        unreported.owe(5);
        assert_eq!((unreported.forgive(2), unreported.forgive(9)), (0, 6));
        unreported.owe(3);
        unreported.refund.add(RefundDue::new(2, ChargeTime::at(Some(70), &terms(10))));
        let taken = unreported.take(4, &terms(10), 0);
        assert_eq!((taken.used, taken.owed, taken.refund.units), (4, 3, 2));
        assert_eq!(unreported, Unreported::default());
        let update = MeterUpdate {
            key: Box::default(),
            terms: terms(10),
            used: taken.used,
            owed: taken.owed,
            refund: taken.refund.units,
            refund_of_us: taken.refund.charged_us(),
            keep: 0,
            want: 0,
            life_us: 0,
            cell: taken.refund.cell(),
        };
        unreported.put_back(&update);
        assert_eq!(unreported.units(), 9);
        assert_eq!(unreported.take(1, &terms(10), 0), Unreported { used: 5, ..taken });
    }
}
