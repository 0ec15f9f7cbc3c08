//! A limit as an origin counts it: in integers that a script represents exactly.

use super::meter::{CROSS_REGION_LIFE_US_MAX, LIFE_US_MAX};
use super::replication::CrossRegionTerms;
use crate::limit::{Algorithm, Limit, PERIOD_US_MAX};

/// The most that a limit may allow at once, in drops.
pub const DROPS_MAX: u64 = 1 << 48;

/// Maximum of the usage, of the grants and of the units kept for a recall, in drops each. Excess is
/// dropped.
pub const LEVEL_MAX: u64 = 1 << 50;

const _: () = assert!(4 * LEVEL_MAX + 2 * DROPS_MAX < 1 << 53, "a script's numbers are exact up to 2^53");

/// The largest tolerance, in millionths of the burst: one hundredth.
pub const TOLERANCE_PPM_MAX: u32 = 10_000;

/// The smallest burst that may have a tolerance, in units.
pub const TOLERANCE_BURST_MIN: u64 = 20;

/// Longest period in whole ticks, µs: rounding up makes it a little longer than that of the limit.
const CELL_US_MAX: u64 = 2 * PERIOD_US_MAX;

/// Number of parts that make up a whole in a regional share. A product of a whole and a share stays
/// exact in a script, if quotient and remainder are multiplied separately.
pub(super) const SHARES: u64 = 1 << 20;

/// The treatment of a grant that its node did not report in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lapse {
    /// It counts as used: no unit is admitted twice, and unspent units are lost to all nodes.
    Counted,
    /// It is dropped, and a late report is charged whenever it arrives. Each lapse over-admits at
    /// most one grant.
    Forgiven,
}

/// A limit as an origin counts it.
///
/// A level is in drops. A unit of cost is `period` drops, and `amount` drops drain in each tick of
/// the clock, so no sum has a fraction. Seven per second is seven drops per microsecond, and a
/// request costs a million of them. A tick is a microsecond, unless the burst and the period
/// together are too large for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    algorithm: Algorithm,
    amount: u64,
    period: u64,
    tick_us: u64,
    burst: u64,
    tolerance: u64,
    lapse: Lapse,
    version: u64,
    cross_region: Option<CrossRegionTerms>,
    /// Part of all regions' usage that counts against this region's share, in [`SHARES`].
    share: u64,
}

impl Terms {
    /// The terms of a limit with a tolerance of `tolerance_ppm` millionths of its burst, at most
    /// [`TOLERANCE_PPM_MAX`], at the `version` of its rule.
    pub fn new(limit: &Limit, tolerance_ppm: u32, lapse: Lapse, version: u32) -> Self {
        let burst = u64::from(limit.burst());
        let tolerance = tolerance(limit, tolerance_ppm);
        let tick_us = tick_us(burst + tolerance, limit.period_us());
        Self {
            algorithm: limit.algorithm(),
            amount: u64::from(limit.amount()),
            // Rounded up: a unit may take a little longer to drain, never less.
            period: limit.period_us().div_ceil(tick_us),
            tick_us,
            burst,
            tolerance,
            lapse,
            version: u64::from(version),
            cross_region: None,
            share: 0,
        }
    }

    /// Returns the same limit, counted together with other regions. Values out of range are
    /// clamped: the publish threshold is at least 1, and no share exceeds the limit.
    #[must_use]
    pub fn with_cross_region(self, cross_region: CrossRegionTerms) -> Self {
        let publish_threshold = cross_region.publish_threshold.clamp(1, LEVEL_MAX);
        let share_amount = cross_region.share_amount.min(self.amount);
        let share_capacity = cross_region.share_capacity.min(self.capacity());
        let debt_max = cross_region.debt_max.min(LEVEL_MAX);
        let share = u128::from(share_capacity) * u128::from(SHARES);
        // Rounded up: the shares together always cover the usage of all regions.
        let share = share.div_ceil(u128::from(self.capacity().max(1)));
        let share = u64::try_from(share).unwrap_or(SHARES);
        Self {
            cross_region: Some(CrossRegionTerms {
                publish_threshold,
                share_amount,
                share_capacity,
                debt_max,
            }),
            share,
            ..self
        }
    }

    /// Returns the same limit at version 0, which any other version replaces.
    pub(super) const fn unversioned(self) -> Self {
        Self { version: 0, ..self }
    }

    /// The terms as numbers: how the limit counts (1 for a sliding window), amount, period, tick,
    /// burst, tolerance, whether a lapsed grant counts as used, version; and how it is counted
    /// together with other regions, of which the first is 0 if it is not.
    pub fn numbers(&self) -> [u64; 12] {
        let kind = u64::from(self.algorithm == Algorithm::SlidingWindow);
        let counted = u64::from(self.lapse == Lapse::Counted);
        let none = CrossRegionTerms { publish_threshold: 0, share_amount: 0, share_capacity: 0, debt_max: 0 };
        let CrossRegionTerms { publish_threshold, share_amount, share_capacity, debt_max } =
            self.cross_region.unwrap_or(none);
        let [amount, period, tick_us] = [self.amount, self.period, self.tick_us];
        let [burst, tolerance, version] = [self.burst, self.tolerance, self.version];
        [
            kind,
            amount,
            period,
            tick_us,
            burst,
            tolerance,
            counted,
            version,
            publish_threshold,
            share_amount,
            share_capacity,
            debt_max,
        ]
    }

    /// Returns the terms of [`numbers`](Self::numbers), or none if no limit has these numbers.
    pub fn of_numbers(numbers: [u64; 12]) -> Option<Self> {
        let [kind, amount, period, tick_us, burst, tolerance, counted, version, publish_threshold, ..] =
            numbers;
        let [.., share_amount, share_capacity, debt_max] = numbers;
        let most = u64::from(u32::MAX);
        let fits = [amount, burst, version].iter().all(|number| *number <= most)
            && kind <= 1
            && counted <= 1
            && period >= 1
            && tick_us >= 1
            && tolerance <= (burst * u64::from(TOLERANCE_PPM_MAX) / 1_000_000).max(1)
            && u128::from(burst + tolerance) * u128::from(period) <= u128::from(DROPS_MAX)
            && u128::from(period) * u128::from(tick_us) <= u128::from(CELL_US_MAX);
        let terms = Self {
            algorithm: if kind == 0 { Algorithm::Gcra } else { Algorithm::SlidingWindow },
            amount,
            period,
            tick_us,
            burst,
            tolerance,
            lapse: if counted == 1 { Lapse::Counted } else { Lapse::Forgiven },
            version,
            cross_region: None,
            share: 0,
        };
        let cross_region = CrossRegionTerms { publish_threshold, share_amount, share_capacity, debt_max };
        fits.then(|| if publish_threshold == 0 { terms } else { terms.with_cross_region(cross_region) })
    }

    /// How the limit counts.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// Drops that drain per tick: the units that may pass per period.
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

    /// Units that may pass at once.
    pub const fn burst(&self) -> u64 {
        self.burst
    }

    /// Maximum of used and granted units together: the burst, or 0 under a limit of 0.
    pub const fn capacity(&self) -> u64 {
        if self.amount == 0 { 0 } else { self.burst }
    }

    /// Units by which a request that waits at the origin may over-commit unspent grants of other
    /// nodes.
    pub const fn tolerance(&self) -> u64 {
        self.tolerance
    }

    /// The treatment of a grant that was not reported.
    pub const fn lapse(&self) -> Lapse {
        self.lapse
    }

    /// The version of the rule: of two, the higher holds.
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// The cross-region terms; none for a limit of this region only.
    pub const fn cross_region(&self) -> Option<&CrossRegionTerms> {
        self.cross_region.as_ref()
    }

    /// The longest life of a grant, µs.
    pub const fn life_us_max(&self) -> u64 {
        if self.cross_region.is_some() { CROSS_REGION_LIFE_US_MAX } else { LIFE_US_MAX }
    }

    /// Part of all regions' usage that counts against this region's share, in 2^20ths.
    pub const fn share(&self) -> u64 {
        self.share
    }

    /// The largest grant and the largest cost that an origin decides: all there ever is.
    pub const fn full(&self) -> u64 {
        self.capacity() * self.period
    }

    /// The tick of an instant.
    pub const fn tick(&self, now_us: u64) -> u64 {
        now_us / self.tick_us
    }

    /// The length of a cell, µs.
    pub(crate) const fn cell_us(&self) -> u64 {
        self.period * self.tick_us
    }

    /// The time in which `units` drain, µs, rounded down; the longest there is under a limit of 0.
    pub(crate) fn drain_us(&self, units: u64) -> u64 {
        let ticks = (units * self.period).checked_div(self.amount).unwrap_or(u64::MAX);
        ticks.saturating_mul(self.tick_us)
    }

    /// Units in drops, as far as a meter holds them.
    pub(super) const fn drops(&self, units: u64) -> u64 {
        let most = self.units_max();
        let units = if units < most { units } else { most };
        units * self.period
    }

    /// The most units that a meter holds.
    pub(super) const fn units_max(&self) -> u64 {
        LEVEL_MAX / self.period
    }

    /// Converts ticks to microseconds, at most `most_us`: long ticks and a large debt would exceed
    /// the exact range of a script.
    pub(super) const fn ticks_us(&self, ticks: u64, most_us: u64) -> u64 {
        if ticks < most_us / self.tick_us { ticks * self.tick_us } else { most_us }
    }

    /// How many ticks `drops` take to drain, rounded up.
    pub(super) const fn ticks_to_drain(&self, drops: u64) -> u64 {
        if self.amount == 0 { 0 } else { drops.div_ceil(self.amount) }
    }
}

/// Returns the tolerance of a limit, in units: at least one. A burst below [`TOLERANCE_BURST_MIN`]
/// has no tolerance, because one unit would be too large a part of it.
fn tolerance(limit: &Limit, tolerance_ppm: u32) -> u64 {
    let burst = u64::from(limit.burst());
    if tolerance_ppm == 0 || limit.amount() == 0 || burst < TOLERANCE_BURST_MIN {
        return 0;
    }
    (burst * u64::from(tolerance_ppm.min(TOLERANCE_PPM_MAX)) / 1_000_000).max(1)
}

/// Returns the shortest tick at which a full meter stays within [`DROPS_MAX`], even after its
/// period is rounded up to whole ticks. It is a power of ten, so nearly every period is a whole
/// number of ticks.
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
            let terms = Terms::new(&limit, 10_000, Lapse::Forgiven, 1);
            assert_eq!((terms.tick_us(), terms.period()), (1, seconds * 1_000_000));
            let tolerance = if amount < TOLERANCE_BURST_MIN { 0 } else { amount / 100 };
            assert_eq!((terms.capacity(), terms.tolerance()), (amount, tolerance));
        }
    }

    proptest! {
        #[test]
        fn full_meter_fits_for_any_limit(
            amount in 0u64..1 << 32, period in 1u64..=crate::PERIOD_US_MAX, ppm in 0u32..=1_000_000) {
            let limit = Limit::sliding_window(amount, Duration::from_micros(period)).expect("in range");
            let terms = Terms::new(&limit, ppm, Lapse::Counted, 1);
            prop_assert!(terms.full() + terms.tolerance() * terms.period() <= DROPS_MAX);
            // Never faster than the limit, and slower by less than a tick per period.
            let real = u128::from(terms.period()) * u128::from(terms.tick_us());
            prop_assert!(real >= u128::from(period));
            prop_assert!(real - u128::from(period) < u128::from(terms.tick_us()));
        }
    }
}
