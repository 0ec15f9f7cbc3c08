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

    pub(super) fn is_blocked(self) -> bool {
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

    /// Returns the part of another limit's traffic that still passes, if an unknown traffic may
    /// lose half or more: half of the limit or less is left, of bursts or in the long run, or the
    /// burst is lower. Requests may cost as much as the burst, and those would all be denied.
    pub(super) fn risky_part_of(self, other: Self) -> Option<f64> {
        let is_risky = self.is_half_of(other) || !other.is_blocked() && self.burst < other.burst;
        is_risky.then(|| self.part_of(other))
    }

    /// Whether this rate passes more than so many times another one, of bursts or in the long run.
    pub(super) fn exceeds(self, other: Self, times: u32) -> bool {
        let times_more = |is: u128, was: u128| is > was.saturating_mul(u128::from(times));
        !self.is_blocked()
            && (other.is_blocked()
                || times_more(self.product(other), other.product(self))
                || times_more(self.burst.into(), other.burst.into()))
    }

    /// Describes the change from this limit to another one.
    pub(super) fn to_words(self, other: Self) -> String {
        let seconds = |rate: Self| as_real(rate.period_us) / 1_000_000.0;
        let number = |number: u32| grouped(number.into());
        if self.period_us != other.period_us {
            let words = |rate: Self| format!("{} per {} s", number(rate.amount), seconds(rate));
            format!("from {} to {}", words(self), words(other))
        } else if self.amount == other.amount {
            format!("from a burst of {} to {}", number(self.burst), number(other.burst))
        } else {
            format!("from {} to {}", number(self.amount), number(other.amount))
        }
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

/// A limit that a change lowers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct LoweredRate {
    from: Rate,
    to: Rate,
}

impl LoweredRate {
    /// `None` if the limit passes all that it passed before.
    pub(super) fn new(from: Rate, to: Rate) -> Option<Self> {
        (!to.covers(from)).then_some(Self { from, to })
    }

    /// Returns the part that is left of a fully used limit.
    pub(super) fn part(self) -> f64 {
        self.to.part_of(self.from)
    }

    /// Describes the change of a rule, with the time of the first change, if that is an earlier
    /// one.
    pub(super) fn words(self, rule: &str, since: &str) -> String {
        let (change, percent) = (self.from.to_words(self.to), 100.0 * (1.0 - self.part()));
        format!("lowers rule {rule:?} {change}{since}, by {percent:.1} %")
    }
}

/// Writes a number with commas between its thousands.
pub(super) fn grouped(number: u128) -> String {
    let digits = number.to_string();
    let mut text = String::with_capacity(digits.len() * 4 / 3);
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
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

    #[test]
    fn lower_burst_is_risky_because_costs_are_unknown() {
        let is = per_minute(10, 10);
        for (other, part) in [
            (per_minute(10, 9), Some(0.9)),
            (per_minute(6, 10), None),
            (per_minute(5, 10), Some(0.5)),
            (per_minute(99, 9), Some(0.9)),
            (per_minute(10, 10), None),
        ] {
            assert_eq!(other.risky_part_of(is), part, "{other:?}");
        }
        assert_eq!(is.risky_part_of(per_minute(0, 99)), None, "there is nothing to lose");
    }

    #[test]
    fn limit_exceeds_another_by_rate_or_burst() {
        let is = per_minute(10, 10);
        for (other, exceeds) in [
            (per_minute(20, 20), false),
            (per_minute(21, 10), true),
            (per_minute(10, 21), true),
            (per_minute(0, 99), false),
            (Rate { period_us: 20_000_000, ..is }, true),
        ] {
            assert_eq!(other.exceeds(is, 2), exceeds, "{other:?}");
        }
        assert!(is.exceeds(per_minute(0, 10), 2), "a block is lifted");
    }

    #[test]
    fn lowered_limit_is_described_with_its_numbers() {
        let words = |from: Rate, to: Rate| LoweredRate::new(from, to).map(|lowered| lowered.words("api", ""));
        for (from, to, expected) in [
            (per_minute(1_000, 1_000), per_minute(2, 2), Some("from 1,000 to 2, by 99.8 %")),
            (per_minute(10, 100), per_minute(10, 59), Some("from a burst of 100 to 59, by 41.0 %")),
            (
                per_minute(1_200, 9),
                Rate { period_us: 120_000_000, ..per_minute(1_200, 9) },
                Some("from 1,200 per 60 s to 1,200 per 120 s, by 50.0 %"),
            ),
            (per_minute(10, 10), per_minute(10, 10), None),
        ] {
            assert_eq!(words(from, to), expected.map(|change| format!("lowers rule \"api\" {change}")));
        }
    }
}
