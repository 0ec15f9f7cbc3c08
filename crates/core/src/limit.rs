//! A limit: the amount that may pass, in integers that are checked once, here.

use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::gcra::Span;
use crate::minifloat;

/// The longest period: 366 days.
pub const PERIOD_US_MAX: u64 = 366 * 24 * 3_600 * 1_000_000;

/// The longest time a full burst may take to drain: 3,660 days. Together with [`PERIOD_US_MAX`] it
/// keeps every sum of the arithmetic inside 64 bits.
pub const DRAIN_US_MAX: u64 = 10 * PERIOD_US_MAX;

/// The largest amount, burst and cost that can ever pass.
const AMOUNT_MAX: u64 = u32::MAX as u64;

const _: () = assert!(
    DRAIN_US_MAX < 1 << 49,
    "two bursts above an instant must fit the 52 bits a meter has for an instant"
);

/// How a limit counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Algorithm {
    /// One theoretical arrival time: a bucket of `burst` that drains at `amount` per `period`.
    Gcra,
    /// Two fixed cells, the previous one weighted by its overlap with the sliding window.
    SlidingWindow,
}

/// Bits of a meter that identify the limit of the origin's last reply.
pub(crate) const FINGERPRINT_BITS: u32 = 9;

/// One step of a hash: a multiplication spreads upwards, and the fold back down.
const fn mix(mixed: u64, next: u64) -> u64 {
    let product = (mixed ^ next).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    product ^ product >> 32
}

/// An amount per period, with a burst. Built once, then only read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    algorithm: Algorithm,
    amount: u32,
    burst: u32,
    period_us: u64,
    /// Whether an origin has the meters, and this node only its grants.
    at_origin: bool,
    /// Whether a meter keeps its units when the amount or period of the limit changes.
    keeps_units: bool,
    /// Distinguishes this limit from its replacement, in the bits that a meter has left: see
    /// [`Limit::fingerprint`].
    fingerprint: u16,
    /// Time in which one unit of cost drains.
    pub(crate) unit: Span,
    /// Time in which a full burst drains.
    pub(crate) full: Span,
    /// Level above which a meter is at its limit, rounded down to eight bits: see
    /// `meter::EvictionRank`.
    pub(crate) keep_above: u8,
    /// The period, rounded up to eight bits.
    pub(crate) period_code: u8,
}

/// The reason why a limit is invalid. Each names the field, the given value and the allowed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitError {
    /// `amount` is above 4,294,967,295.
    Amount(u64),
    /// `burst` is outside 1 to 4,294,967,295.
    Burst(u64),
    /// `period` is not a whole number of microseconds, is zero, or is above 366 days.
    Period(Duration),
    /// A full burst would take longer than 3,660 days to drain.
    Drain {
        /// The requested burst.
        burst: u64,
        /// The largest one that this amount and period allow.
        burst_max: u64,
    },
    /// A sliding window has no burst of its own.
    BurstOfWindow,
}

/// The longest time that [`Limit::drained_in`] reckons with, µs: longer than any grant or denial.
const DRAINED_US_MAX: u64 = 1 << 31;

impl fmt::Display for LimitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Amount(given) => write!(f, "amount: {given} is outside 0 to {AMOUNT_MAX}"),
            Self::Burst(given) => write!(f, "burst: {given} is outside 1 to {AMOUNT_MAX}"),
            Self::Period(given) => {
                write!(f, "period: {given:?} is not a whole number of microseconds from 1 us to 366 days")
            }
            Self::Drain { burst, burst_max } => write!(
                f,
                "burst: {burst} would take more than 3,660 days to drain; at this amount and period it may \
                 be 1 to {burst_max}"
            ),
            Self::BurstOfWindow => {
                write!(f, "burst: not allowed for a sliding window: its burst is its amount")
            }
        }
    }
}

impl std::error::Error for LimitError {}

impl Limit {
    /// `amount` per `period` by GCRA, with a burst of `amount`. An amount of 0 blocks.
    pub fn gcra(amount: u64, period: Duration) -> Result<Self, LimitError> {
        let (amount, period_us) = (parse_amount(amount)?, parse_period(period)?);
        Self::checked_gcra(amount, period_us, u64::from(amount.max(1)))
    }

    /// `amount` in each window of `period`, counted in cells aligned to the wall clock. An amount
    /// of 0 blocks.
    pub fn sliding_window(amount: u64, period: Duration) -> Result<Self, LimitError> {
        let (amount, period_us) = (parse_amount(amount)?, parse_period(period)?);
        Ok(Self {
            algorithm: Algorithm::SlidingWindow,
            amount,
            burst: amount,
            period_us,
            at_origin: false,
            keeps_units: false,
            fingerprint: 0,
            unit: Span::ZERO,
            full: Span::ZERO,
            keep_above: minifloat::floor(u64::from(amount.saturating_sub(1))),
            period_code: minifloat::ceil(period_us),
        })
    }

    /// The same limit with another burst: how much may pass at once after a quiet time. 1 spaces
    /// requests evenly.
    pub fn with_burst(self, burst: u64) -> Result<Self, LimitError> {
        if self.algorithm == Algorithm::SlidingWindow {
            return Err(LimitError::BurstOfWindow);
        }
        let limit = Self::checked_gcra(self.amount, self.period_us, burst)?;
        Ok(Self { keeps_units: self.keeps_units, ..limit })
    }

    /// Returns the same limit, counted by an origin: this node decides by its grants, and its
    /// verdict states when to ask.
    #[must_use]
    pub const fn at_origin(self) -> Self {
        Self { at_origin: true, fingerprint: self.fingerprint_of(), ..self }
    }

    /// Returns the same limit for meters whose amount and period an operator may change: after a
    /// change, the units that have not drained stay the same. Without it, the time in which they
    /// drain stays the same, as clients of `CL.THROTTLE` expect. Sliding windows count units
    /// anyway.
    #[must_use]
    pub const fn keeping_units(self) -> Self {
        Self { keeps_units: true, ..self }
    }

    /// Whether a meter keeps its units when the amount or period of the limit changes.
    #[inline]
    pub(crate) const fn keeps_units(&self) -> bool {
        self.keeps_units
    }

    const fn fingerprint_of(&self) -> u16 {
        let mut mixed = self.algorithm as u64;
        mixed = mix(mixed, self.amount as u64);
        mixed = mix(mixed, self.burst as u64);
        mixed = mix(mixed, self.period_us);
        (mixed >> (u64::BITS - FINGERPRINT_BITS)) as u16
    }

    /// Distinguishes a limit at an origin from its replacement: by it a meter knows whether the
    /// origin's last reply was about this limit. It has [`FINGERPRINT_BITS`] bits, so one change in
    /// 512 goes unnoticed until that reply expires.
    #[inline]
    pub(crate) const fn fingerprint(&self) -> u16 {
        self.fingerprint
    }

    /// Whether an origin keeps its meters.
    #[inline]
    pub const fn is_at_origin(&self) -> bool {
        self.at_origin
    }

    fn checked_gcra(amount: u32, period_us: u64, burst: u64) -> Result<Self, LimitError> {
        let short = u32::try_from(burst).ok().filter(|&b| b > 0).ok_or(LimitError::Burst(burst))?;
        let burst_max = burst_max(amount, period_us);
        if burst > burst_max {
            return Err(LimitError::Drain { burst, burst_max });
        }
        let denominator = denominator(amount);
        // Under a limit of 0 nothing drains and nothing is ever charged: its burst takes no time.
        let unit = if amount == 0 { Span::ZERO } else { Span::of_unit(denominator, period_us) };
        Ok(Self {
            algorithm: Algorithm::Gcra,
            amount,
            burst: short,
            period_us,
            at_origin: false,
            keeps_units: false,
            fingerprint: 0,
            unit,
            full: unit.times(short, denominator),
            keep_above: minifloat::floor(unit.times(short - 1, denominator).whole),
            period_code: minifloat::ceil(period_us),
        })
    }

    /// How the limit counts.
    #[inline]
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// How much may pass per period in the long run.
    #[inline]
    pub const fn amount(&self) -> u32 {
        self.amount
    }

    /// Returns the denominator of the fractions in this limit's spans.
    #[inline]
    pub(crate) const fn denominator(&self) -> NonZeroU32 {
        denominator(self.amount)
    }

    /// How much may pass at once; the amount itself for a sliding window.
    #[inline]
    pub const fn burst(&self) -> u32 {
        self.burst
    }

    /// The period in microseconds.
    #[inline]
    pub const fn period_us(&self) -> u64 {
        self.period_us
    }

    /// The period.
    pub const fn period(&self) -> Duration {
        Duration::from_micros(self.period_us)
    }

    /// Returns the time until a meter with `remaining` units left has drained, µs. For a sliding
    /// window this is only a rough estimate.
    pub fn reset_after_us(&self, remaining: u32) -> u64 {
        let used = self.burst.saturating_sub(remaining);
        match self.algorithm {
            Algorithm::Gcra => self.unit.times(used, self.denominator()).ceil_us(),
            Algorithm::SlidingWindow if used == 0 => 0,
            Algorithm::SlidingWindow => self.period_us,
        }
    }

    /// Returns the units that drain in this time, rounded down. For a sliding window it returns 0:
    /// only the origin knows how its cells fade.
    pub(crate) fn drained_in(&self, us: u64) -> u64 {
        match self.algorithm {
            // The product of both is below 2^63.
            Algorithm::Gcra => us.min(DRAINED_US_MAX) * u64::from(self.amount) / self.period_us,
            Algorithm::SlidingWindow => 0,
        }
    }

    /// Returns the time in which units of [`Limit::drained_in`] drain, µs, rounded up.
    pub(crate) fn drain_time_us(&self, units: u64) -> u64 {
        (units * self.period_us).div_ceil(u64::from(self.amount.max(1)))
    }

    /// Returns the part of this limit for one of `nodes` that cannot reach each other: the rate and
    /// the burst divided, with a burst of at least one. Together they pass at most the rate, and at
    /// most one unit for each node above the burst. If a unit of a part would take longer than the
    /// longest period, it takes that period: one unit for each node in 366 days.
    #[must_use]
    pub fn part(&self, nodes: u32) -> Self {
        let whole = Self { at_origin: false, ..*self };
        if self.is_blocked() {
            return whole;
        }
        let nodes = u64::from(nodes.max(1));
        let burst = (u64::from(self.burst) / nodes).max(1);
        let part = match self.algorithm {
            Algorithm::Gcra => self.slowed(nodes).and_then(|part| part.with_burst_upto(burst)),
            Algorithm::SlidingWindow => Self::sliding_window(burst, Duration::from_micros(self.period_us)),
        };
        part.unwrap_or(whole)
    }

    /// The same rate divided: in a period that is longer, as far as one can be, and from there on
    /// by a smaller amount.
    fn slowed(&self, times: u64) -> Result<Self, LimitError> {
        let period_us = u128::from(self.period_us) * u128::from(times);
        let (amount, most_us) = (u128::from(self.amount), u128::from(PERIOD_US_MAX));
        let (amount, period_us) = if period_us <= most_us {
            (amount, period_us)
        } else {
            ((amount * most_us / period_us).max(1), most_us)
        };
        let [amount, period_us] = [amount, period_us].map(|number| u64::try_from(number).unwrap_or(u64::MAX));
        Self::gcra(amount, Duration::from_micros(period_us))
    }

    /// The same limit with this burst, or with the largest one that drains in time.
    pub fn with_burst_upto(self, burst: u64) -> Result<Self, LimitError> {
        match self.with_burst(burst) {
            Err(LimitError::Drain { burst_max, .. }) => self.with_burst(burst_max),
            result => result,
        }
    }

    /// Whether the limit never lets anything pass.
    #[inline]
    pub const fn is_blocked(&self) -> bool {
        self.amount == 0
    }
}

/// A limit of 0 never divides anything, but its spans still need a denominator.
const fn denominator(amount: u32) -> NonZeroU32 {
    match NonZeroU32::new(amount) {
        Some(amount) => amount,
        None => NonZeroU32::MIN,
    }
}

fn parse_amount(amount: u64) -> Result<u32, LimitError> {
    u32::try_from(amount).map_err(|_| LimitError::Amount(amount))
}

fn parse_period(period: Duration) -> Result<u64, LimitError> {
    let micros = u64::try_from(period.as_micros()).unwrap_or(u64::MAX);
    let whole = period.subsec_nanos().is_multiple_of(1_000);
    if whole && (1..=PERIOD_US_MAX).contains(&micros) { Ok(micros) } else { Err(LimitError::Period(period)) }
}

/// Returns the largest burst that drains within [`DRAIN_US_MAX`].
fn burst_max(amount: u32, period_us: u64) -> u64 {
    if amount == 0 {
        return AMOUNT_MAX;
    }
    let most = u128::from(DRAIN_US_MAX) * u128::from(amount) / u128::from(period_us);
    u64::try_from(most).unwrap_or(u64::MAX).min(AMOUNT_MAX)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const EXTREMES: [u64; 8] = [0, 1, 2, 99, 100, 1 << 32, 1 << 53, u64::MAX];

    #[test]
    fn extremes_of_every_field_are_a_limit_or_a_named_error() {
        for amount in EXTREMES {
            for micros in EXTREMES {
                let period = Duration::from_micros(micros);
                let _ = Limit::sliding_window(amount, period);
                let Ok(limit) = Limit::gcra(amount, period) else { continue };
                for burst in EXTREMES {
                    if let Err(error) = limit.with_burst(burst) {
                        assert!(error.to_string().starts_with("burst: "), "{error}");
                    }
                }
            }
        }
    }

    #[test]
    fn parts_of_however_long_a_limit_are_together_no_faster_than_it() {
        let day = Duration::from_hours(24);
        let limits = [(1_000, 300 * day), (7, 366 * day), (2, 183 * day), (1, 366 * day), (100, SECOND)];
        for (amount, period) in limits {
            let plain = Limit::gcra(amount, period).expect("in range");
            let large = plain.with_burst_upto(u64::MAX >> 32).expect("in range");
            for (limit, nodes) in
                [plain, large].into_iter().flat_map(|limit| [1, 2, 3, 10, 1_000].map(|n| (limit, n)))
            {
                let part = limit.part(nodes);
                let nodes = u128::from(nodes);
                let rate =
                    |of: &Limit, other: &Limit| u128::from(of.amount()) * u128::from(other.period_us());
                let is_least = part.amount() == 1 && part.period_us() == PERIOD_US_MAX;
                assert!(
                    nodes * rate(&part, &limit) <= rate(&limit, &part) || is_least,
                    "{limit:?} for {nodes} is {part:?}"
                );
                assert!(u128::from(part.burst()) <= (u128::from(limit.burst()) / nodes).max(1));
            }
        }
    }

    #[test]
    fn errors_name_the_field_and_the_range() {
        let cases = [
            (Limit::gcra(1 << 32, SECOND), "amount: 4294967296 is outside 0 to 4294967295"),
            (
                Limit::gcra(1, Duration::ZERO),
                "period: 0ns is not a whole number of microseconds from 1 us to 366 days",
            ),
            (
                Limit::gcra(1, Duration::from_nanos(1_500)),
                "period: 1.5µs is not a whole number of microseconds from 1 us to 366 days",
            ),
            (
                Limit::gcra(1, Duration::from_secs(366 * 86_400 + 1)),
                "period: 31622401s is not a whole number of microseconds from 1 us to 366 days",
            ),
            (Limit::gcra(1, SECOND).and_then(|l| l.with_burst(0)), "burst: 0 is outside 1 to 4294967295"),
            (
                Limit::gcra(1, Duration::from_hours(8784)).and_then(|l| l.with_burst(11)),
                "burst: 11 would take more than 3,660 days to drain; at this amount and period it may be 1 \
                 to 10",
            ),
            (
                Limit::sliding_window(1, SECOND).and_then(|l| l.with_burst(2)),
                "burst: not allowed for a sliding window: its burst is its amount",
            ),
        ];
        for (got, message) in cases {
            assert_eq!(got.expect_err(message).to_string(), message);
        }
    }

    #[test]
    fn the_largest_burst_is_accepted_and_one_more_is_not() {
        let limit = Limit::gcra(7, Duration::from_hours(24)).expect("in range");
        let most = 3_660 * 7;
        assert_eq!(limit.with_burst(most).map(|l| l.burst()), Ok(most as u32));
        assert_eq!(limit.with_burst(most + 1), Err(LimitError::Drain { burst: most + 1, burst_max: most }));
    }
}
