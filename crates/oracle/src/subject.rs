//! The subject of the comparison: the product's meter, or one that a test made wrong on purpose.

use tidegate_core::{Limit, Meter, Now, Verdict};

/// A meter in the product's terms. Every method is the product's unless an implementation replaces
/// it.
pub trait Subject: Copy {
    /// The product's meter inside.
    fn meter(self) -> Meter;

    /// The subject around a product's meter.
    fn around(meter: Meter) -> Self;

    /// [`Meter::empty`].
    fn empty(limit: &Limit) -> Self {
        Self::around(Meter::empty(limit))
    }

    /// [`Meter::decide`].
    fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.meter().decide(limit, now, cost);
        (verdict, Self::around(meter))
    }

    /// [`Meter::reserve`].
    fn reserve(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, meter) = self.meter().reserve(limit, now, cost);
        (verdict, Self::around(meter))
    }

    /// [`Meter::commit`].
    #[must_use]
    fn commit(self, limit: &Limit, now: Now, reserved: u64, actual: u64) -> Self {
        Self::around(self.meter().commit(limit, now, reserved, actual))
    }

    /// [`Meter::rollback`].
    #[must_use]
    fn rollback(self, reserved: u64) -> Self {
        Self::around(self.meter().rollback(reserved))
    }

    /// [`Meter::charge`].
    #[must_use]
    fn charge(self, limit: &Limit, now: Now, cost: u64) -> Self {
        Self::around(self.meter().charge(limit, now, cost))
    }

    /// [`Meter::refund`].
    #[must_use]
    fn refund(self, limit: &Limit, now: Now, cost: u64) -> Self {
        Self::around(self.meter().refund(limit, now, cost))
    }

    /// [`Meter::merge`].
    #[must_use]
    fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {
        Self::around(self.meter().merge(limit, now, used))
    }

    /// [`Meter::reset`].
    #[must_use]
    fn reset(self, limit: &Limit) -> Self {
        Self::around(self.meter().reset(limit))
    }

    /// [`Meter::used`].
    fn used(self, limit: &Limit, now: Now) -> u64 {
        Meter::used(&self.meter(), limit, now)
    }

    /// [`Meter::reserved`].
    fn reserved(self) -> u32 {
        Meter::reserved(&self.meter())
    }
}

impl Subject for Meter {
    fn meter(self) -> Meter {
        self
    }

    fn around(meter: Meter) -> Self {
        meter
    }
}
