//! Clocks that disagree.

use tidegate_core::Now;

/// A clock that runs fast or slow, and began at some reading of its own.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SkewedClock {
    /// Monotonic reading when the world began, µs.
    pub(crate) offset_us: u64,
    /// Millionths by which it runs fast; slow, if negative.
    pub(crate) rate_ppm: i64,
    /// Offset of the wall clock from the true time, µs.
    pub(crate) wall_offset_us: u64,
}

impl SkewedClock {
    /// Returns the readings at a true time.
    pub(crate) fn read(&self, true_us: u64) -> Now {
        let drift = i128::from(true_us) * i128::from(self.rate_ppm) / 1_000_000;
        let elapsed = u64::try_from(i128::from(true_us) + drift).unwrap_or(0);
        Now::from_micros(self.offset_us + elapsed, self.wall_offset_us + elapsed)
    }

    /// The first true time at which it shows at least `local_us`.
    pub(crate) fn true_time(&self, local_us: u64) -> u64 {
        let elapsed = i128::from(local_us.saturating_sub(self.offset_us));
        let scaled = (elapsed * 1_000_000).div_euclid(1_000_000 + i128::from(self.rate_ppm)) + 1;
        u64::try_from(scaled).unwrap_or(0)
    }
}
