//! The clock of another machine, as far as a message reveals it.

/// The bound on clock drift: the rates of two clocks differ by at most one part in this many.
pub const CLOCK_DRIFT_DIVISOR: u64 = 16;

/// Returns the longest time on one clock, µs, in which `us` pass on another.
pub const fn longest_us(us: u64) -> u64 {
    us.saturating_add(us / CLOCK_DRIFT_DIVISOR)
}

/// Returns the shortest time on one clock, µs, in which `us` pass on another.
pub const fn shortest_us(us: u64) -> u64 {
    us - us / CLOCK_DRIFT_DIVISOR
}

/// One reading of a remote clock, with the local instant at which it arrived.
///
/// The reading is older than its arrival. So every estimate is a lower bound of the remote clock,
/// apart from the drift between both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteClock {
    reading_us: u64,
    arrived_us: u64,
}

impl RemoteClock {
    /// A reading of a remote clock that arrived at a local instant.
    pub const fn new(reading_us: u64, arrived_us: u64) -> Self {
        Self { reading_us, arrived_us }
    }

    /// The local instant at which the reading arrived.
    pub const fn arrived_us(&self) -> u64 {
        self.arrived_us
    }

    /// Returns the remote clock at a local instant, if both clocks run at the same rate. An instant
    /// before the arrival counts as the arrival.
    pub const fn at_us(&self, local_us: u64) -> u64 {
        self.reading_us.saturating_add(local_us.saturating_sub(self.arrived_us))
    }

    /// Returns the remote clock at a local instant, or an earlier remote instant: the drift counts
    /// against the estimate on both sides of the arrival.
    pub const fn at_or_before_us(&self, local_us: u64) -> u64 {
        let after_us = shortest_us(local_us.saturating_sub(self.arrived_us));
        let before_us = longest_us(self.arrived_us.saturating_sub(local_us));
        self.reading_us.saturating_add(after_us).saturating_sub(before_us)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_estimate_follows_the_local_clock_from_the_arrival_on() {
        let clock = RemoteClock::new(1_000, 50);
        assert_eq!([clock.at_us(50), clock.at_us(66), clock.at_us(0)], [1_000, 1_016, 1_000]);
        assert_eq!(clock.at_or_before_us(66), 1_015);
        assert_eq!(clock.at_or_before_us(34), 983);
        assert_eq!(RemoteClock::new(5, 100).at_or_before_us(0), 0);
        assert_eq!(RemoteClock::new(u64::MAX, 0).at_us(7), u64::MAX);
    }

    #[test]
    fn no_moment_of_another_clock_is_taken_for_a_later_one() {
        let clock = RemoteClock::new(5_000_000, 1_000_000);
        assert_eq!(clock.at_or_before_us(1_000_000), 5_000_000);
        assert_eq!(clock.at_or_before_us(1_160_000), 5_150_000, "the other clock may run slower");
        assert_eq!(clock.at_or_before_us(840_000), 4_830_000, "the other clock may have run faster");
        assert_eq!(RemoteClock::new(7, u64::MAX).at_or_before_us(0), 0);
    }

    proptest! {
        /// A remote clock that runs up to a sixteenth faster or slower is never before the
        /// estimate.
        #[test]
        fn a_lower_bound_holds_for_every_drift(
            reading in 1u64 << 40..1 << 41,
            arrived in 1u64 << 40..1 << 41,
            local in 1u64 << 40..1 << 41,
            delay in 0u64..1 << 20,
            ppm in -62_500i64..=62_500,
        ) {
            let elapsed = i128::from(local) - i128::from(arrived);
            let remote = i128::from(reading + delay) + elapsed + elapsed * i128::from(ppm) / 1_000_000;
            let estimate = RemoteClock::new(reading, arrived).at_or_before_us(local);
            prop_assert!(i128::from(estimate) <= remote + 1, "{} after {}", estimate, remote);
        }
    }
}
