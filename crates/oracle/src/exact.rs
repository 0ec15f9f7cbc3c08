//! Whole numbers that are never wrong: every operation is checked, and an overflow stops the
//! program.

use std::ops::{Add, Mul};

/// A whole number from 0 to 2^128 - 1. A rational is such a number over a fixed denominator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Exact(u128);

impl Exact {
    /// Zero.
    pub const ZERO: Self = Self(0);

    /// Returns `self - other`, or zero if `other` is the larger.
    #[must_use]
    pub fn without(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `self / divisor`, rounded down.
    #[must_use]
    pub fn floor_div(self, divisor: Self) -> Self {
        match self.0.checked_div(divisor.0) {
            Some(quotient) => Self(quotient),
            None => does_not_fit("/"),
        }
    }

    /// `self / divisor`, rounded up.
    #[must_use]
    pub fn ceil_div(self, divisor: Self) -> Self {
        let down = self.floor_div(divisor);
        if down * divisor == self { down } else { down + Self(1) }
    }

    /// The same number in 64 bits.
    pub fn to_u64(self) -> u64 {
        u64::try_from(self.0).unwrap_or_else(|_| does_not_fit("as u64"))
    }

    /// The same number in 32 bits.
    pub fn to_u32(self) -> u32 {
        u32::try_from(self.0).unwrap_or_else(|_| does_not_fit("as u32"))
    }
}

impl From<u64> for Exact {
    fn from(value: u64) -> Self {
        Self(u128::from(value))
    }
}

impl From<u32> for Exact {
    fn from(value: u32) -> Self {
        Self(u128::from(value))
    }
}

impl Add for Exact {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.checked_add(other.0).unwrap_or_else(|| does_not_fit("+")))
    }
}

impl Mul for Exact {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        Self(self.0.checked_mul(other.0).unwrap_or_else(|| does_not_fit("*")))
    }
}

/// `later - earlier`, for instants in microseconds.
pub(crate) fn elapsed(earlier: u64, later: u64) -> u64 {
    later.checked_sub(earlier).unwrap_or_else(|| does_not_fit("later - earlier"))
}

/// `instant + wait`, in microseconds.
pub(crate) fn later(instant: u64, wait: u64) -> u64 {
    instant.checked_add(wait).unwrap_or_else(|| does_not_fit("instant + wait"))
}

#[cold]
#[expect(clippy::panic, reason = "an oracle that cannot compute the exact result must panic")]
fn does_not_fit(operation: &str) -> ! {
    panic!("the oracle left its range in `{operation}`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn divisions_round_as_they_say() {
        let (six, seven, three) = (Exact(6), Exact(7), Exact(3));
        assert_eq!((six.floor_div(three), six.ceil_div(three)), (Exact(2), Exact(2)));
        assert_eq!((seven.floor_div(three), seven.ceil_div(three)), (Exact(2), Exact(3)));
        assert_eq!(three.without(seven), Exact::ZERO);
    }

    #[test]
    #[should_panic(expected = "the oracle left its range in `*`")]
    fn a_product_that_does_not_fit_is_not_an_answer() {
        let _ = Exact(1 << 64) * Exact(1 << 64);
    }
}
