//! Terms of limits, compared: which of two lets more pass.

use tidegate_core::Limit;

/// Terms of a limit, as far as limits are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rate {
    amount: u32,
    burst: u32,
    period_us: u64,
}

impl Rate {
    pub(super) fn of(limit: &Limit) -> Self {
        Self { amount: limit.amount(), burst: limit.burst(), period_us: limit.period_us().max(1) }
    }

    fn is_blocked(self) -> bool {
        self.amount == 0
    }

    /// Cost that drains in a millisecond.
    pub(super) fn per_ms(self) -> f64 {
        f64::from(self.amount) * 1_000.0 / as_real(self.period_us)
    }

    /// How long a full burst takes to leak.
    pub(super) fn full_ms(self) -> u64 {
        let full_us = u128::from(self.burst) * u128::from(self.period_us) / u128::from(self.amount.max(1));
        u64::try_from(full_us / 1_000).unwrap_or(u64::MAX)
    }

    /// Whether this rate passes all requests that the other rate passes.
    pub(super) fn covers(self, other: Self) -> bool {
        other.is_blocked()
            || !self.is_blocked() && self.burst >= other.burst && self.product(other) >= other.product(self)
    }

    /// Returns the part of another limit's traffic that still passes, if it is half or less, of
    /// bursts or in the long run.
    pub(super) fn half_of(self, other: Self) -> Option<f64> {
        self.is_half_of(other).then(|| self.part_of(other))
    }

    fn is_half_of(self, other: Self) -> bool {
        let is_half = self.product(other).saturating_mul(2) <= other.product(self);
        !other.is_blocked()
            && (self.is_blocked() || is_half || u64::from(self.burst) * 2 <= u64::from(other.burst))
    }

    /// Returns the minimum part that passes of another limit's traffic, if that limit is fully
    /// used.
    pub(super) fn part_of(self, other: Self) -> f64 {
        if self.covers(other) {
            return 1.0;
        }
        let burst = f64::from(self.burst) / f64::from(other.burst.max(1));
        if self.is_blocked() { 0.0 } else { (self.per_ms() / other.per_ms()).min(burst).min(1.0) }
    }

    /// Whether so much spent at once is more than it lets pass.
    pub(super) fn is_below(self, level: u32) -> bool {
        self.is_blocked() || self.burst < level
    }

    fn product(self, other: Self) -> u128 {
        u128::from(self.amount) * u128::from(other.period_us)
    }
}

#[expect(clippy::cast_precision_loss, reason = "shares are told to a tenth of a percent")]
pub(super) fn as_real(number: u64) -> f64 {
    number as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn per_minute(amount: u32, burst: u32) -> Rate {
        Rate { amount, burst, period_us: 60_000_000 }
    }

    #[test]
    fn limits_are_compared_by_rate_and_burst() {
        let is = per_minute(10, 10);
        for (other, covers, part) in [
            (per_minute(10, 10), true, 1.0),
            (per_minute(11, 12), true, 1.0),
            (per_minute(20, 5), false, 0.5),
            (per_minute(4, 10), false, 0.4),
            (per_minute(0, 10), false, 0.0),
        ] {
            assert_eq!((other.covers(is), other.part_of(is)), (covers, part), "{other:?}");
        }
        assert!(is.covers(per_minute(0, 99)), "what is blocked lets nothing pass");
        for (other, half) in [
            (per_minute(6, 6), false),
            (per_minute(5, 10), true),
            (per_minute(10, 5), true),
            (per_minute(0, 10), true),
            (per_minute(99, 99), false),
        ] {
            assert_eq!(other.is_half_of(is), half, "{other:?}");
        }
        assert!(!is.is_half_of(per_minute(0, 99)), "there is nothing to halve");
    }
}
