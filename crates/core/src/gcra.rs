//! GCRA on integers: one theoretical arrival time, exact for every rate.
//!
//! Seven per second is not 142,857 µs each: one unit takes 1,000,000 / 7 µs, and rounding it
//! drifts. So an instant is stored as whole microseconds plus a fraction with the limit's amount as
//! its denominator. All sums and comparisons are exact; only the answers are rounded, each to the
//! side that keeps its promise.

use std::num::NonZeroU32;

use crate::limit::{DRAIN_US_MAX, Limit};
use crate::verdict::{Retry, Verdict};

/// Largest level of a meter, as time to drain, µs. More is dropped, so that every instant fits into
/// the bits of a meter.
pub const LEVEL_US_MAX: u64 = 2 * DRAIN_US_MAX;

/// A length of time: `whole` µs and `frac / amount` of one more. Only meaningful beside its limit's
/// amount.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Span {
    /// Whole microseconds.
    pub whole: u64,
    /// Numerator of the fraction; always below the amount.
    pub frac: u32,
}

/// The theoretical arrival time on the monotonic line: the instant at which the meter will have
/// drained.
pub type Arrival = Span;

impl Span {
    /// A span of no time.
    pub const ZERO: Self = Self { whole: 0, frac: 0 };

    /// Returns the time in which one unit of cost drains.
    pub(crate) const fn of_unit(amount: NonZeroU32, period_us: u64) -> Self {
        let amount = amount.get() as u64;
        Self { whole: period_us / amount, frac: (period_us % amount) as u32 }
    }

    /// Returns `n` times this span. The caller has checked that the product fits: `n` is at most a
    /// burst.
    #[inline]
    pub(crate) const fn times(self, n: u32, amount: NonZeroU32) -> Self {
        if n == 1 {
            return self;
        }
        let (frac, amount) = (n as u64 * self.frac as u64, amount.get() as u64);
        if frac < amount {
            return Self { whole: n as u64 * self.whole, frac: frac as u32 };
        }
        Self { whole: n as u64 * self.whole + frac / amount, frac: (frac % amount) as u32 }
    }

    /// Returns the time in which `cost` drains, or [`LEVEL_US_MAX`] if that is less: for unchecked
    /// costs.
    fn of_cost(limit: &Limit, cost: u64) -> Self {
        let amount = u128::from(limit.denominator().get());
        let scaled = u128::from(cost) * u128::from(limit.period_us());
        let (whole, frac) = (scaled / amount, scaled % amount);
        match (u64::try_from(whole), u32::try_from(frac)) {
            (Ok(whole), Ok(frac)) => Self { whole, frac }.capped(),
            _ => Self { whole: LEVEL_US_MAX, frac: 0 },
        }
    }

    const fn capped(self) -> Self {
        if self.whole < LEVEL_US_MAX { self } else { Self { whole: LEVEL_US_MAX, frac: 0 } }
    }

    #[inline]
    const fn plus(self, other: Self, amount: NonZeroU32) -> Self {
        let (frac, amount) = (self.frac as u64 + other.frac as u64, amount.get() as u64);
        let carry = frac >= amount;
        let frac = if carry { frac - amount } else { frac };
        Self { whole: self.whole + other.whole + carry as u64, frac: frac as u32 }
    }

    /// Subtracts a shorter span; returns zero if the other is longer.
    #[inline]
    const fn minus(self, other: Self, amount: NonZeroU32) -> Self {
        let borrow = self.frac < other.frac;
        let Some(whole) = self.whole.checked_sub(other.whole + borrow as u64) else { return Self::ZERO };
        let borrowed = if borrow { amount.get() } else { 0 };
        // With a borrow the sum passes 32 bits before the other fraction brings it back: wrapping
        // is exact.
        Self { whole, frac: self.frac.wrapping_add(borrowed).wrapping_sub(other.frac) }
    }

    /// Microseconds, rounded up.
    #[inline]
    pub(crate) const fn ceil_us(self) -> u64 {
        self.whole + (self.frac > 0) as u64
    }
}

/// Returns the time still to drain at `now_us`. Whether that is zero cannot be predicted, so the
/// code has no branch on it.
///
/// The meter may come from a limit with another amount and so another denominator. A fraction that
/// is too large for this limit counts as a whole microsecond; any other is off by less than one.
#[inline]
fn backlog(limit: &Limit, arrival: Arrival, now_us: u64) -> Span {
    let pending = arrival.whole >= now_us;
    let foreign = arrival.frac >= limit.denominator().get();
    let frac = if foreign { 0 } else { arrival.frac };
    let rounded = u64::from(pending & foreign);
    Span { whole: arrival.whole.saturating_sub(now_us) + rounded, frac: frac * u32::from(pending) }
}

#[inline]
fn arrival(backlog: Span, now_us: u64) -> Arrival {
    Span { whole: now_us + backlog.whole, frac: backlog.frac }
}

/// Returns the whole units of cost that drain within `span`.
#[inline]
fn units_in(limit: &Limit, span: Span) -> u32 {
    let amount = u64::from(limit.amount());
    // Spans up to 71 minutes stay inside one machine word, and nearly all are.
    let units = match u32::try_from(span.whole) {
        Ok(whole) => (u64::from(whole) * amount + u64::from(span.frac)) / limit.period_us(),
        Err(_) => units_in_long(limit, span),
    };
    u32::try_from(units).unwrap_or(u32::MAX)
}

#[cold]
fn units_in_long(limit: &Limit, span: Span) -> u64 {
    let scaled = u128::from(span.whole) * u128::from(limit.amount()) + u128::from(span.frac);
    u64::try_from(scaled / u128::from(limit.period_us())).unwrap_or(u64::MAX)
}

/// Decides a request of `cost` on a meter with `reserved` more units in reservations. Returns the
/// arrival time after it, which is unchanged unless the request is allowed.
#[inline(always)]
pub fn decide(limit: &Limit, before: Arrival, reserved: u32, now_us: u64, cost: u64) -> (Verdict, Arrival) {
    if limit.is_blocked() {
        return (Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::Blocked }, before);
    }
    let amount = limit.denominator();
    let backlog = backlog(limit, before, now_us);
    let Some(cost) = u32::try_from(cost).ok().filter(|&cost| cost <= limit.burst()) else {
        return (denial(limit, backlog, reserved, Retry::CostAboveBurst), before);
    };
    let charged = backlog.plus(limit.unit.times(cost, amount), amount);
    let after = with_reserved(limit, charged, reserved);
    if after > limit.full {
        let retry = Retry::After(after.minus(limit.full, amount).ceil_us());
        return (denial(limit, backlog, reserved, retry), before);
    }
    let remaining = units_in(limit, limit.full.minus(after, amount));
    (Verdict::Allow { remaining, reset_after_us: charged.ceil_us() }, arrival(charged, now_us))
}

/// Returns the span that the limit compares: the time still to drain, and the reservations.
#[inline]
fn with_reserved(limit: &Limit, span: Span, reserved: u32) -> Span {
    if reserved == 0 {
        return span;
    }
    let amount = limit.denominator();
    span.plus(limit.unit.times(reserved.min(limit.burst()), amount), amount)
}

fn denial(limit: &Limit, backlog: Span, reserved: u32, retry: Retry) -> Verdict {
    let held = with_reserved(limit, backlog, reserved);
    let remaining = units_in(limit, limit.full.minus(held, limit.denominator()));
    Verdict::Deny { remaining, reset_after_us: backlog.ceil_us(), retry }
}

/// Adds `cost` without a test: the level may exceed the burst, up to [`LEVEL_US_MAX`].
pub fn charge(limit: &Limit, before: Arrival, now_us: u64, cost: u64) -> Arrival {
    let cost = Span::of_cost(limit, cost);
    arrival(backlog(limit, before, now_us).plus(cost, limit.denominator()).capped(), now_us)
}

/// Gives `cost` back, down to an empty meter.
pub fn refund(limit: &Limit, before: Arrival, now_us: u64, cost: u64) -> Arrival {
    let cost = Span::of_cost(limit, cost);
    arrival(backlog(limit, before, now_us).minus(cost, limit.denominator()), now_us)
}

/// Raises the meter to at least `used` units, which another party knows to be spent.
pub fn raise(limit: &Limit, before: Arrival, now_us: u64, used: u64) -> Arrival {
    let floor = Span::of_cost(limit, used);
    arrival(backlog(limit, before, now_us).max(floor), now_us)
}

/// The arrival time under `limit` of a meter that drained at another amount and period until now.
/// The units to drain stay the same, rounded up by less than a microsecond.
pub(crate) fn converted(
    limit: &Limit,
    before: Arrival,
    (amount, period_us): (u32, u64),
    now_us: u64,
) -> Arrival {
    if before.whole < now_us {
        return before;
    }
    // In parts of a microsecond, of which one unit takes a period. Only the words of a torn read
    // saturate.
    let parts = u128::from(before.whole - now_us) * u128::from(amount.max(1)) + u128::from(before.frac);
    let parts = if period_us == limit.period_us() {
        parts
    } else {
        parts.saturating_mul(u128::from(limit.period_us())).div_ceil(u128::from(period_us.max(1)))
    };
    let amount = u128::from(limit.denominator().get());
    let backlog = match (u64::try_from(parts / amount), u32::try_from(parts % amount)) {
        (Ok(whole), Ok(frac)) => Span { whole, frac }.capped(),
        _ => Span { whole: LEVEL_US_MAX, frac: 0 },
    };
    arrival(backlog, now_us)
}

/// Returns the units that are spent and not yet drained, rounded up.
pub fn used(limit: &Limit, before: Arrival, now_us: u64) -> u64 {
    let backlog = backlog(limit, before, now_us);
    let scaled = u128::from(backlog.whole) * u128::from(limit.amount()) + u128::from(backlog.frac);
    u64::try_from(scaled.div_ceil(u128::from(limit.period_us()))).unwrap_or(u64::MAX)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn per_second(amount: u64, burst: u64) -> Limit {
        Limit::gcra(amount, Duration::from_secs(1)).and_then(|l| l.with_burst(burst)).expect("in range")
    }

    #[test]
    fn seven_per_second_is_exactly_seven_thousand_in_a_thousand_seconds() {
        let limit = per_second(7, 1);
        let (mut state, mut now, mut passed) = (Arrival::ZERO, 0, 0);
        while now < 1_000_000_000 {
            let (verdict, after) = decide(&limit, state, 0, now, 1);
            assert!(verdict.is_allowed(), "at {now}");
            (state, passed) = (after, passed + 1);
            let (denied, _) = decide(&limit, state, 0, now, 1);
            now += denied.retry().and_then(Retry::after_us).expect("denied for now");
        }
        assert_eq!(passed, 7_000);
    }

    #[test]
    fn a_fraction_of_another_amount_is_off_by_less_than_a_microsecond() {
        for amount in [1, 2, 7, 1_000_003, u64::from(u32::MAX)] {
            let limit = per_second(amount, 3);
            for frac in [0, 1, 6, 7, 1_000_002, u32::MAX] {
                let left = Arrival { whole: 1_000, frac };
                let (look, _) = decide(&limit, left, 0, 400, 0);
                assert!((600..=601).contains(&look.reset_after_us()), "{amount} {frac}: {look:?}");
                let charged = charge(&limit, left, 400, 1);
                assert!(charged.frac < limit.denominator().get(), "{amount} {frac}: {charged:?}");
                // A drained meter has no fraction left to carry.
                assert_eq!(decide(&limit, left, 0, 1_001, 0).0.reset_after_us(), 0, "{amount} {frac}");
            }
        }
    }

    #[test]
    fn remaining_counts_down_and_reset_is_the_full_drain_time() {
        let limit = per_second(2, 4);
        let mut state = Arrival::ZERO;
        for left in (0..4).rev() {
            let (verdict, after) = decide(&limit, state, 0, 0, 1);
            assert_eq!(
                verdict,
                Verdict::Allow { remaining: left, reset_after_us: u64::from(4 - left) * 500_000 }
            );
            state = after;
        }
        let (verdict, _) = decide(&limit, state, 0, 2_000_000, 0);
        assert_eq!(verdict, Verdict::Allow { remaining: 4, reset_after_us: 0 });
        let (verdict, _) = decide(&limit, state, 0, 1_999_999, 0);
        assert_eq!(verdict.remaining(), 3);
    }

    #[test]
    fn a_cost_above_the_burst_and_a_limit_of_zero_say_never() {
        let limit = per_second(100, 10);
        for cost in [11, 1 << 32, 1 << 53, u64::MAX] {
            let (verdict, after) = decide(&limit, Arrival::ZERO, 0, 5, cost);
            assert_eq!(verdict.retry(), Some(Retry::CostAboveBurst));
            assert_eq!((verdict.remaining(), after), (10, Arrival::ZERO));
        }
        for cost in [0, 1, u64::MAX] {
            assert_eq!(decide(&per_second(0, 1), Arrival::ZERO, 0, 5, cost).0.retry(), Some(Retry::Blocked));
        }
    }

    #[test]
    fn a_reservation_counts_against_the_limit_and_not_as_use() {
        let limit = per_second(10, 10);
        let (verdict, after) = decide(&limit, Arrival::ZERO, 6, 0, 4);
        assert_eq!(verdict, Verdict::Allow { remaining: 0, reset_after_us: 400_000 });
        assert_eq!(used(&limit, after, 0), 4);
        assert!(!decide(&limit, Arrival::ZERO, 7, 0, 4).0.is_allowed());
    }

    #[test]
    fn refund_and_raise_stop_at_their_floors() {
        let limit = per_second(10, 10);
        let spent = charge(&limit, Arrival::ZERO, 50, 4);
        assert_eq!(used(&limit, refund(&limit, spent, 50, 3), 50), 1);
        assert_eq!(used(&limit, refund(&limit, spent, 50, u64::MAX), 50), 0);
        assert_eq!(used(&limit, raise(&limit, spent, 50, 3), 50), 4);
        assert_eq!(used(&limit, raise(&limit, spent, 50, 9), 50), 9);
    }

    #[test]
    fn the_level_is_capped_and_never_overflows() {
        let limit = Limit::gcra(1, Duration::from_hours(8784)).expect("in range");
        let mut state = Arrival::ZERO;
        let now = crate::Now::from_micros(u64::MAX, 0).mono_us();
        for cost in [1, u64::from(u32::MAX), 1 << 53, u64::MAX] {
            state = charge(&limit, state, now, cost);
        }
        assert_eq!(state, Span { whole: now + LEVEL_US_MAX, frac: 0 });
        assert!(state.whole < 1 << 52);
        assert!(!decide(&limit, state, 0, now, 1).0.is_allowed());
    }
}
