//! What the two algorithms have in common: a level at an instant that only time lowers by itself.

use tidegate_core::{Algorithm, Limit, Now};

use crate::exact::{Exact, later};

/// What is spent on one key, exactly, at one instant. Costs are in units of the limit.
pub trait Level: Copy + PartialEq {
    /// The algorithm this is a model of.
    const ALGORITHM: Algorithm;

    /// Nothing spent, at the start of time.
    fn empty(limit: &Limit) -> Self;

    /// The clock that this level lives by.
    fn reading(now: Now) -> u64;

    /// The instant this is the level of.
    fn time_us(&self) -> u64;

    /// The level at a later instant if nothing comes.
    #[must_use]
    fn at(self, time_us: u64) -> Self;

    /// Whether `extra` more would still be within the limit.
    fn fits(&self, extra: Exact) -> bool;

    /// Whether nothing is left of what was spent.
    fn is_empty(&self) -> bool;

    /// The largest whole cost that still fits beside `reserved`.
    fn remaining(&self, reserved: Exact) -> Exact;

    /// What is spent, rounded up.
    fn used(&self) -> Exact;

    /// `reserved` more, all of it: no cap forgets any, since it is not charged yet.
    #[must_use]
    fn with_reserved(self, reserved: Exact) -> Self;

    /// `cost` more, up to the most that is ever kept.
    #[must_use]
    fn plus(self, cost: Exact) -> Self;

    /// `cost` less, down to nothing.
    #[must_use]
    fn minus(self, cost: Exact) -> Self;

    /// At least `used`.
    #[must_use]
    fn at_least(self, used: Exact) -> Self;

    /// The level after `wait_us` if nothing comes.
    #[must_use]
    fn after(self, wait_us: u64) -> Self {
        self.at(later(self.time_us(), wait_us))
    }
}
