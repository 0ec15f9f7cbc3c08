//! The common ground of the two algorithms: a level at an instant that only time lowers by itself.

use tidegate_core::{Algorithm, Limit, Now};

use crate::exact::{Exact, later};

/// The exact usage of one key at one instant. Costs are in units of the limit.
pub trait Level: Copy + PartialEq {
    /// The algorithm this is a model of.
    const ALGORITHM: Algorithm;

    /// Returns an empty level at the start of time.
    fn empty(limit: &Limit) -> Self;

    /// The clock that this level lives by.
    fn reading(now: Now) -> u64;

    /// The instant this is the level of.
    fn time_us(&self) -> u64;

    /// Returns the level at a later instant if no request comes.
    #[must_use]
    fn at(self, time_us: u64) -> Self;

    /// Whether `extra` more would still be within the limit.
    fn fits(&self, extra: Exact) -> bool;

    /// Whether all usage has drained.
    fn is_empty(&self) -> bool;

    /// Returns the largest whole cost that still fits beside `reserved`.
    fn remaining(&self, reserved: Exact) -> Exact;

    /// Returns the spent units, rounded up.
    fn used(&self) -> Exact;

    /// `reserved` more, all of it: no cap forgets any, since it is not charged yet.
    #[must_use]
    fn with_reserved(self, reserved: Exact) -> Self;

    /// Adds `cost`, up to the cap of the level.
    #[must_use]
    fn plus(self, cost: Exact) -> Self;

    /// Subtracts `cost`, down to zero.
    #[must_use]
    fn minus(self, cost: Exact) -> Self;

    /// At least `used`.
    #[must_use]
    fn at_least(self, used: Exact) -> Self;

    /// Returns the level after `wait_us` if no request comes.
    #[must_use]
    fn after(self, wait_us: u64) -> Self {
        self.at(later(self.time_us(), wait_us))
    }
}
