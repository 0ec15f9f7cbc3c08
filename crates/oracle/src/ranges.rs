//! Limits from the documented ranges, and a check that the constructors agree with the ranges.

use std::fmt;
use std::time::Duration;

use tidegate_core::{Algorithm, Limit, LimitError};

use crate::difference::Difference;
use crate::exact::Exact;

const DAY_US: u64 = 86_400 * 1_000_000;

/// The longest period.
pub(crate) const PERIOD_US_MAX: u64 = 366 * DAY_US;

/// The longest drain of a full burst.
pub(crate) const DRAIN_US_MAX: u64 = 3_660 * DAY_US;

/// Arguments for the constructors of [`Limit`], in range or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spec {
    /// How the limit counts.
    pub algorithm: Algorithm,
    /// The amount per period.
    pub amount: u64,
    /// The period.
    pub period: Duration,
    /// The burst, if one is requested.
    pub burst: Option<u64>,
}

impl fmt::Display for Spec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, amount, period, burst } = self;
        write!(f, "{algorithm:?} limit: amount {amount}, period {} ns", period.as_nanos())?;
        burst.map_or(Ok(()), |burst| write!(f, ", burst {burst}"))
    }
}

impl Spec {
    /// Builds the limit with the constructors of the product.
    pub fn build(&self) -> Result<Limit, LimitError> {
        let limit = match self.algorithm {
            Algorithm::Gcra => Limit::gcra(self.amount, self.period)?,
            Algorithm::SlidingWindow => Limit::sliding_window(self.amount, self.period)?,
        };
        self.burst.map_or(Ok(limit), |burst| limit.with_burst(burst))
    }

    /// Returns the limit, or `None` if the product rightly refuses it; a difference if the product
    /// is wrong.
    pub(crate) fn check(&self) -> Result<Option<Limit>, Difference> {
        match self.build() {
            Ok(limit) if self.is_in_range() && self.matches_request(&limit) => Ok(Some(limit)),
            Err(error) if self.explains(error) => Ok(None),
            got => Err(Difference::new("limit", &self.expectation(), &got)),
        }
    }

    fn expectation(&self) -> &'static str {
        if self.is_in_range() {
            "the limit that was asked for"
        } else {
            "an error that names a field out of range"
        }
    }

    fn is_in_range(&self) -> bool {
        self.amount_fits() && self.period_fits() && self.burst.is_none_or(|burst| self.burst_fits(burst))
    }

    fn matches_request(&self, limit: &Limit) -> bool {
        let least_burst = u64::from(self.algorithm == Algorithm::Gcra);
        let burst = self.burst.unwrap_or(self.amount.max(least_burst));
        limit.algorithm() == self.algorithm
            && u64::from(limit.amount()) == self.amount
            && limit.period() == self.period
            && u64::from(limit.burst()) == burst
    }

    /// Whether `error` is true of this spec.
    fn explains(&self, error: LimitError) -> bool {
        let asked = self.burst;
        match error {
            LimitError::Amount(given) => given == self.amount && !self.amount_fits(),
            LimitError::Period(given) => given == self.period && !self.period_fits(),
            LimitError::Burst(given) => Some(given) == asked && !count_fits(given, 1),
            LimitError::Drain { burst, burst_max } => {
                Some(burst) == asked && !self.drain_fits(burst) && self.is_largest_burst(burst_max)
            }
            LimitError::BurstOfWindow => asked.is_some() && self.algorithm == Algorithm::SlidingWindow,
        }
    }

    fn amount_fits(&self) -> bool {
        count_fits(self.amount, 0)
    }

    fn period_fits(&self) -> bool {
        let whole = self.period.as_nanos().is_multiple_of(1_000);
        whole
            && self.period >= Duration::from_micros(1)
            && self.period <= Duration::from_micros(PERIOD_US_MAX)
    }

    fn burst_fits(&self, burst: u64) -> bool {
        self.algorithm == Algorithm::Gcra && count_fits(burst, 1) && self.drain_fits(burst)
    }

    /// Whether `burst * period / amount <= 3,660 days`, without the division. A limit of 0 never
    /// drains, and any burst fits.
    fn drain_fits(&self, burst: u64) -> bool {
        let Ok(period_us) = u64::try_from(self.period.as_micros()) else { return false };
        let drain = Exact::from(burst) * Exact::from(period_us);
        self.amount == 0 || drain <= Exact::from(DRAIN_US_MAX) * Exact::from(self.amount)
    }

    fn is_largest_burst(&self, burst: u64) -> bool {
        self.burst_fits(burst) && !self.burst_fits(burst + 1)
    }
}

fn count_fits(count: u64, least: u32) -> bool {
    (u64::from(least)..=u64::from(u32::MAX)).contains(&count)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(amount: u64, period_us: u64, burst: Option<u64>) -> Spec {
        Spec { algorithm: Algorithm::Gcra, amount, period: Duration::from_micros(period_us), burst }
    }

    #[test]
    fn the_ends_of_every_range_are_in_and_their_neighbours_out() {
        let max = u64::from(u32::MAX);
        for (inside, outside) in [
            (spec(0, 1, None), spec(max + 1, 1, None)),
            (spec(max, PERIOD_US_MAX, None), spec(max, PERIOD_US_MAX + 1, None)),
            (spec(1, 1, Some(1)), spec(1, 0, Some(1))),
            (spec(1, 1, Some(max)), spec(1, 1, Some(max + 1))),
            (spec(1, PERIOD_US_MAX, Some(10)), spec(1, PERIOD_US_MAX, Some(11))),
            (spec(0, 1, Some(max)), spec(0, PERIOD_US_MAX, Some(0))),
        ] {
            assert!(inside.is_in_range() && inside.check().is_ok_and(|limit| limit.is_some()), "{inside}");
            assert!(
                !outside.is_in_range() && outside.check().is_ok_and(|limit| limit.is_none()),
                "{outside}"
            );
        }
    }

    #[test]
    fn a_wrong_reason_is_not_accepted() {
        let spec = spec(1, PERIOD_US_MAX, Some(11));
        assert!(spec.explains(LimitError::Drain { burst: 11, burst_max: 10 }));
        assert!(!spec.explains(LimitError::Drain { burst: 11, burst_max: 9 }));
        assert!(!spec.explains(LimitError::Burst(11)));
        assert!(!spec.explains(LimitError::Amount(1)));
    }
}
