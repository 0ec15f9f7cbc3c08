//! The meters of a back-test: they leak as those of GCRA do, and take requests one by one or as an even stream.

use tidegate::Limit;

/// Times and levels are not exact here.
const NEARLY_NOTHING: f64 = 1e-6;

/// Terms of a limit, as far as a back-test uses them.
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

    /// Whether all passes that passes under another one.
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

/// Requests that come evenly from one moment to another.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Stream {
    pub(super) from_ms: u64,
    pub(super) to_ms: u64,
    /// Requests in a millisecond.
    pub(super) per_ms: f64,
    /// Of each.
    pub(super) cost: f64,
}

/// The modelled state of one key under one limit.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Meter {
    level: f64,
    at_ms: u64,
    /// Requests of the stream since the last call of `share`, and those of them that passed.
    came: f64,
    passed: f64,
    /// Whether any ever came with the stream.
    is_streamed: bool,
}

impl Meter {
    /// Advances to a time, with the requests of the stream until then.
    pub(super) fn advance(&mut self, rate: Rate, stream: &Stream, at_ms: u64) {
        self.flow(rate, 0.0, stream.cost, stream.from_ms.min(at_ms));
        self.flow(rate, stream.per_ms, stream.cost, stream.to_ms.min(at_ms));
        self.flow(rate, 0.0, stream.cost, at_ms);
    }

    fn flow(&mut self, rate: Rate, per_ms: f64, cost: f64, until_ms: u64) {
        let ms = as_real(until_ms.saturating_sub(self.at_ms));
        self.at_ms = self.at_ms.max(until_ms);
        let (came, leaked, burst) = (per_ms * ms, rate.per_ms() * ms, f64::from(rate.burst));
        let charged = if rate.is_blocked() || cost > burst {
            0.0
        } else {
            (came * cost).min(burst - self.level + leaked).max(0.0)
        };
        self.is_streamed |= came > 0.0;
        self.came += came;
        self.passed += match rate.is_blocked() {
            true => 0.0,
            false if cost > 0.0 => charged / cost,
            false => came,
        };
        self.level = (self.level + charged - leaked).clamp(0.0, burst);
    }

    /// Returns the share of a request of this cost that passes now. It is 0 or 1, or a fraction if
    /// the level is the average of a stream.
    pub(super) fn room(&self, rate: Rate, cost: u64) -> f64 {
        let room = (f64::from(rate.burst) - self.level + NEARLY_NOTHING) / as_real(cost.max(1));
        match cost {
            _ if rate.is_blocked() || as_real(cost) > f64::from(rate.burst) => 0.0,
            0 => 1.0,
            _ if self.is_streamed => room.clamp(0.0, 1.0),
            _ => room.floor().clamp(0.0, 1.0),
        }
    }

    /// Charges the part of a request that passed.
    pub(super) fn charge(&mut self, part: f64, cost: u64) {
        self.level += part * as_real(cost);
    }

    /// Returns the share that passed of a request, of which `part` did, and of the stream since the
    /// last call.
    pub(super) fn share(&mut self, part: f64) -> f64 {
        let share = (self.passed + part) / (self.came + 1.0);
        (self.came, self.passed) = (0.0, 0.0);
        share
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
    fn a_meter_takes_its_burst_and_leaks() {
        let (rate, still) = (per_minute(60, 3), Stream::default());
        let mut meter = Meter::default();
        let mut passed = |at_ms: u64| {
            meter.advance(rate, &still, at_ms);
            let room = meter.room(rate, 1);
            meter.charge(room, 1);
            room > 0.0
        };
        let at = [1_000, 1_000, 1_000, 1_000, 1_999, 2_000, 2_000, 4_000, 4_000];
        assert_eq!(at.map(&mut passed), [true, true, true, false, false, true, false, true, true]);
        assert!(Meter::default().room(per_minute(0, 3), 0) <= 0.0, "blocked");
        assert!(Meter::default().room(rate, 4) <= 0.0, "more than the burst");
    }

    #[test]
    fn stream_passes_the_burst_and_the_drained_units() {
        let rate = per_minute(10, 10);
        let stream = |per_minute: f64| Stream {
            from_ms: 60_000,
            to_ms: 60_000 * 11,
            per_ms: per_minute / 60_000.0,
            cost: 1.0,
        };
        for (per_minute, share) in [(5.0, 1.0), (10.0, 1.0), (110.0, 0.1), (1_100.0, 0.01)] {
            let mut meter = Meter::default();
            meter.advance(rate, &stream(per_minute), 60_000 * 20);
            let measured = meter.share(0.0) * (per_minute * 10.0 + 1.0) / (per_minute * 10.0);
            assert!((measured - share).abs() < 1e-9, "{per_minute}: {measured}");
            assert!((meter.share(1.0) - 1.0).abs() < 1e-9, "what was told is over");
        }
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
