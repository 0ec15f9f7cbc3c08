//! A limit as an origin counts it: in whole numbers that a script can hold exactly.

use crate::limit::{Algorithm, Limit};

/// The most that a limit may allow at once, in drops.
pub const DROPS_MAX: u64 = 1 << 48;

/// The most that is charged to a meter, held of it, or kept for someone, in drops. What goes beyond is forgotten.
pub const DEBT_MAX: u64 = 1 << 50;

const _: () = assert!(4 * DEBT_MAX + 2 * DROPS_MAX < 1 << 53, "a script's numbers are exact up to 2^53");

/// What becomes of a grant whose holder was not heard of in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lapse {
    /// It counts as used: nothing is ever admitted twice, and what was not used is lost to everyone.
    Counted,
    /// It is dropped, and a late report is charged whenever it comes: at most one grant too much for each lapse.
    Forgiven,
}

/// A limit as an origin counts it.
///
/// A level is kept in drops. A unit of cost is `period` drops and `amount` drops drain in each tick of the clock, so that no
/// sum ever has a fraction: seven per second is seven drops per microsecond, and a request costs a million of them. A tick
/// is a microsecond, unless the burst and the period together are too large for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    algorithm: Algorithm,
    amount: u64,
    period: u64,
    tick_us: u64,
    burst: u64,
    capacity: u64,
    lapse: Lapse,
    version: u64,
}

impl Terms {
    /// The terms of a limit that tolerates `tolerance_ppm` millionths above its burst, at the `version` of its rule.
    pub fn new(limit: &Limit, tolerance_ppm: u32, lapse: Lapse, version: u32) -> Self {
        let burst = u64::from(limit.burst());
        // Nothing may pass under a limit of 0, so there is nothing to hold of it either.
        let most = if limit.amount() == 0 { 0 } else { burst };
        let capacity = most + most * u64::from(tolerance_ppm) / 1_000_000;
        let tick_us = tick_us(capacity, limit.period_us());
        Self {
            algorithm: limit.algorithm(),
            amount: u64::from(limit.amount()),
            // Rounded up: a unit may take a little longer to drain, never less.
            period: limit.period_us().div_ceil(tick_us),
            tick_us,
            burst,
            capacity,
            lapse,
            version: u64::from(version),
        }
    }

    /// How the limit counts.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Drops that drain in a tick: what may pass in a period.
    pub const fn amount(&self) -> u64 {
        self.amount
    }

    /// Drops in a unit of cost: ticks in a period.
    pub const fn period(&self) -> u64 {
        self.period
    }

    /// Microseconds in a tick.
    pub const fn tick_us(&self) -> u64 {
        self.tick_us
    }

    /// What may pass at once, in units.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// The burst and what is tolerated above it, in units.
    pub const fn capacity(&self) -> u64 {
        self.capacity
    }

    /// What becomes of a grant that was not reported.
    pub const fn lapse(&self) -> Lapse {
        self.lapse
    }

    /// The version of the rule: of two, the higher holds.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// The largest grant and the largest cost that an origin decides: all there ever is.
    pub const fn full(&self) -> u64 {
        self.capacity * self.period
    }

    /// The tick of an instant.
    pub const fn tick(&self, now_us: u64) -> u64 {
        now_us / self.tick_us
    }

    /// The length of a cell, µs.
    pub(super) const fn cell_us(&self) -> u64 {
        self.period * self.tick_us
    }

    /// Units in drops, as far as a meter holds them.
    pub(super) const fn drops(&self, units: u64) -> u64 {
        let most = self.units_max();
        let units = if units < most { units } else { most };
        units * self.period
    }

    /// The most units that a meter holds.
    pub(super) const fn units_max(&self) -> u64 {
        DEBT_MAX / self.period
    }

    /// Ticks in microseconds, at most `most_us`: long ticks and a large debt would pass what a script holds exactly.
    pub(super) const fn ticks_us(&self, ticks: u64, most_us: u64) -> u64 {
        if ticks < most_us / self.tick_us { ticks * self.tick_us } else { most_us }
    }

    /// How many ticks `drops` take to drain, rounded up.
    pub(super) const fn ticks_to_drain(&self, drops: u64) -> u64 {
        if self.amount == 0 { 0 } else { drops.div_ceil(self.amount) }
    }
}

/// The shortest tick at which a full meter stays inside [`DROPS_MAX`], also after its period was rounded up to whole ticks.
/// A power of ten, so that nearly every period is a whole number of ticks.
fn tick_us(capacity: u64, period_us: u64) -> u64 {
    let drops = u128::from(capacity) * u128::from(period_us);
    let mut tick_us = 1;
    while drops > u128::from(DROPS_MAX / 2) * u128::from(tick_us) {
        tick_us *= 10;
    }
    tick_us
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn common_limits_count_in_microseconds() {
        for (amount, seconds) in [(1, 1), (100_000, 60), (1_000, 86_400), (1_000_000, 60)] {
            let limit = Limit::gcra(amount, Duration::from_secs(seconds)).expect("in range");
            let terms = Terms::new(&limit, 50_000, Lapse::Forgiven, 1);
            assert_eq!((terms.tick_us(), terms.period()), (1, seconds * 1_000_000));
            assert_eq!(terms.capacity(), amount + amount / 20);
        }
    }

    proptest! {
        #[test]
        fn a_full_meter_fits_whatever_the_limit(amount in 0u64..1 << 32, period in 1u64..=crate::PERIOD_US_MAX, ppm in 0u32..=1_000_000) {
            let limit = Limit::sliding_window(amount, Duration::from_micros(period)).expect("in range");
            let terms = Terms::new(&limit, ppm, Lapse::Counted, 1);
            prop_assert!(terms.full() <= DROPS_MAX);
            // Never faster than asked for, and slower by less than a tick in a period.
            let real = u128::from(terms.period()) * u128::from(terms.tick_us());
            prop_assert!(real >= u128::from(period));
            prop_assert!(real - u128::from(period) < u128::from(terms.tick_us()));
        }
    }
}
