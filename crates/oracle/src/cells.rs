//! The sliding window by its definition: two cells of the wall clock, the older one weighted by its
//! remaining part.

use tidegate_core::{Algorithm, Limit, Now};

use crate::exact::{Exact, elapsed};
use crate::level::Level;

/// The most one cell ever counts. Charging on has no effect.
const COUNT_MAX: u32 = u32::MAX;

/// Both cells at an instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cells {
    amount: Exact,
    period_us: u64,
    current: Exact,
    previous: Exact,
    time_us: u64,
}

impl Cells {
    fn period(&self) -> Exact {
        self.period_us.into()
    }

    /// Returns the weight of the previous cell, times `period`.
    fn previous_numerator(&self) -> Exact {
        self.previous * Exact::from(elapsed(self.time_us % self.period_us, self.period_us))
    }

    fn with_current(self, current: Exact) -> Self {
        Self { current: current.min(COUNT_MAX.into()), ..self }
    }
}

impl Level for Cells {
    const ALGORITHM: Algorithm = Algorithm::SlidingWindow;

    fn empty(limit: &Limit) -> Self {
        Self {
            amount: limit.amount().into(),
            period_us: limit.period_us(),
            current: Exact::ZERO,
            previous: Exact::ZERO,
            time_us: 0,
        }
    }

    fn reading(now: Now) -> u64 {
        now.wall_us()
    }

    fn time_us(&self) -> u64 {
        self.time_us
    }

    fn at(self, time_us: u64) -> Self {
        let (current, previous) = match elapsed(self.time_us / self.period_us, time_us / self.period_us) {
            0 => (self.current, self.previous),
            1 => (Exact::ZERO, self.current),
            _ => (Exact::ZERO, Exact::ZERO),
        };
        Self { current, previous, time_us, ..self }
    }

    fn fits(&self, extra: Exact) -> bool {
        (self.current + extra) * self.period() + self.previous_numerator() <= self.amount * self.period()
    }

    fn is_empty(&self) -> bool {
        self.current == Exact::ZERO && self.previous == Exact::ZERO
    }

    fn remaining(&self, reserved: Exact) -> Exact {
        self.amount.without(self.used() + reserved)
    }

    fn used(&self) -> Exact {
        self.current + self.previous_numerator().ceil_div(self.period())
    }

    fn with_reserved(self, reserved: Exact) -> Self {
        Self { current: self.current + reserved, ..self }
    }

    fn plus(self, cost: Exact) -> Self {
        self.with_current(self.current + cost)
    }

    fn minus(self, cost: Exact) -> Self {
        let rest = cost.without(self.current);
        Self { current: self.current.without(cost), previous: self.previous.without(rest), ..self }
    }

    fn at_least(self, used: Exact) -> Self {
        let weighs_at_least = self.previous_numerator().floor_div(self.period());
        self.with_current(self.current.max(used.without(weighs_at_least)))
    }
}
