//! GCRA by its definition: a bucket that drains at `amount / period` per microsecond.

use tidegate_core::{Algorithm, Limit, Now};

use crate::exact::{Exact, elapsed};
use crate::level::Level;

/// Largest level of a bucket, as microseconds to drain: twice 3,660 days. Further charges have no
/// effect.
const LEVEL_US_MAX: u64 = 2 * 3_660 * 86_400 * 1_000_000;

/// A bucket at an instant. Its level is a rational number of cost units over the fixed denominator
/// `period`, so that one microsecond drains exactly `amount` from the numerator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    amount: Exact,
    period: Exact,
    burst: Exact,
    /// The level times `period`.
    numerator: Exact,
    time_us: u64,
}

impl Bucket {
    /// `units` of cost in the terms of `numerator`.
    fn units(&self, units: Exact) -> Exact {
        units * self.period
    }

    fn with_numerator(self, numerator: Exact) -> Self {
        Self { numerator: numerator.min(self.amount * Exact::from(LEVEL_US_MAX)), ..self }
    }
}

impl Level for Bucket {
    const ALGORITHM: Algorithm = Algorithm::Gcra;

    fn empty(limit: &Limit) -> Self {
        Self {
            amount: limit.amount().into(),
            period: limit.period_us().into(),
            burst: limit.burst().into(),
            numerator: Exact::ZERO,
            time_us: 0,
        }
    }

    fn reading(now: Now) -> u64 {
        now.mono_us()
    }

    fn time_us(&self) -> u64 {
        self.time_us
    }

    fn at(self, time_us: u64) -> Self {
        let passed = Exact::from(elapsed(self.time_us, time_us));
        Self { numerator: self.numerator.without(passed * self.amount), time_us, ..self }
    }

    fn fits(&self, extra: Exact) -> bool {
        self.numerator + self.units(extra) <= self.units(self.burst)
    }

    fn is_empty(&self) -> bool {
        self.numerator == Exact::ZERO
    }

    fn remaining(&self, reserved: Exact) -> Exact {
        self.units(self.burst).without(self.numerator + self.units(reserved)).floor_div(self.period)
    }

    fn used(&self) -> Exact {
        self.numerator.ceil_div(self.period)
    }

    fn with_reserved(self, reserved: Exact) -> Self {
        Self { numerator: self.numerator + self.units(reserved), ..self }
    }

    fn plus(self, cost: Exact) -> Self {
        self.with_numerator(self.numerator + self.units(cost))
    }

    fn minus(self, cost: Exact) -> Self {
        self.with_numerator(self.numerator.without(self.units(cost)))
    }

    fn at_least(self, used: Exact) -> Self {
        self.with_numerator(self.numerator.max(self.units(used)))
    }
}
