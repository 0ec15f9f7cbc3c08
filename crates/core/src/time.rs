//! Time as the core sees it: two injected readings, in whole microseconds.

use crate::sync::{AtomicU64, Ordering};

/// The last instant the monotonic line can hold: 71 years. Later readings stay there.
const MONO_US_MAX: u64 = (1 << 51) - 1;

/// Distance that the line must move before the latest reading is stored again, µs. Higher: fewer
/// writes to a shared cache line; a step back smaller than this plus [`STEP_BACK_US_MIN`] goes
/// unnoticed.
const NOTE_EVERY_US: u64 = 1_000;

/// A reading this far behind the latest is a step of the clock, not a thread that was slow to use
/// its reading.
const STEP_BACK_US_MIN: u64 = 1_000_000;

/// One reading of both clocks.
///
/// `mono` measures elapsed time and carries every level; `wall` only places the edges of calendar
/// windows. So a step of the wall clock moves edges, and never creates or destroys elapsed time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Now {
    mono_us: u64,
    wall_us: u64,
}

impl Now {
    /// A reading in microseconds. A monotonic reading past 71 years counts as the last instant that
    /// can be held.
    #[inline]
    pub const fn from_micros(mono_us: u64, wall_us: u64) -> Self {
        let mono_us = if mono_us > MONO_US_MAX { MONO_US_MAX } else { mono_us };
        Self { mono_us, wall_us }
    }

    /// Microseconds on the monotonic line.
    #[inline]
    pub const fn mono_us(self) -> u64 {
        self.mono_us
    }

    /// Microseconds since the Unix epoch, as the wall clock had it.
    #[inline]
    pub const fn wall_us(self) -> u64 {
        self.wall_us
    }
}

/// Keeps the monotonic line from stepping back when the injected clock does.
///
/// A meter stores instants; if the line fell back by an hour, a key would stay denied for that
/// hour. So a step back is measured once and added to every later reading: the line continues where
/// it was. A step forward needs no care: it drains levels, which unlocks at most one burst per key.
#[derive(Debug, Default)]
pub struct Timeline {
    latest_us: AtomicU64,
    shift_us: AtomicU64,
}

impl Timeline {
    /// A line that starts at the first reading.
    pub fn new() -> Self {
        Self { latest_us: AtomicU64::new(0), shift_us: AtomicU64::new(0) }
    }

    /// Returns the reading of `read`, placed on the line. Calls `read` again if the first reading
    /// looks like a step back, because a thread that slept between reading and asking looks the
    /// same.
    #[inline]
    pub fn now(&self, read: impl Fn() -> Now) -> Now {
        let now = self.read_placed(&read);
        let latest = self.latest_us.load(Ordering::Relaxed);
        if now.mono_us >= latest {
            if now.mono_us - latest >= NOTE_EVERY_US {
                self.latest_us.fetch_max(now.mono_us, Ordering::Relaxed);
            }
            return now;
        }
        if latest - now.mono_us < STEP_BACK_US_MIN { now } else { self.after_step_back(&read) }
    }

    /// A reading with the shift that was in force when it was read: one read before a step and
    /// placed after its correction would throw the line forward for good.
    #[inline]
    fn read_placed(&self, read: &impl Fn() -> Now) -> Now {
        loop {
            let shift = self.shift_us.load(Ordering::Acquire);
            let raw = read();
            if self.shift_us.load(Ordering::Acquire) == shift {
                return Now::from_micros(raw.mono_us.saturating_add(shift), raw.wall_us);
            }
        }
    }

    #[cold]
    fn after_step_back(&self, read: &impl Fn() -> Now) -> Now {
        let shift = self.shift_us.load(Ordering::Acquire);
        let placed = read().mono_us.saturating_add(shift);
        let behind = self.latest_us.load(Ordering::Relaxed).saturating_sub(placed);
        if behind >= STEP_BACK_US_MIN {
            // Losing this race means another thread corrected the same step; its shift is the one
            // in force.
            let corrected = shift.saturating_add(behind);
            let _ = self.shift_us.compare_exchange(shift, corrected, Ordering::AcqRel, Ordering::Acquire);
        }
        self.read_placed(read)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const HOUR_US: u64 = 3_600_000_000;

    #[test]
    fn a_step_back_of_an_hour_continues_the_line() {
        let clock = Cell::new(2 * HOUR_US);
        let line = Timeline::new();
        let read = || Now::from_micros(clock.get(), 0);
        assert_eq!(line.now(read).mono_us(), 2 * HOUR_US);
        clock.set(HOUR_US);
        assert_eq!(line.now(read).mono_us(), 2 * HOUR_US);
        clock.set(HOUR_US + 5_000_000);
        assert_eq!(line.now(read).mono_us(), 2 * HOUR_US + 5_000_000);
    }

    #[test]
    fn a_slow_thread_is_not_a_step() {
        let line = Timeline::new();
        line.now(|| Now::from_micros(10_000_000, 0));
        assert_eq!(line.now(|| Now::from_micros(9_500_000, 0)).mono_us(), 9_500_000);
        // Even a reading that is ten seconds old changes nothing if a second one shows the clock
        // where it was.
        let first = Cell::new(true);
        let read =
            || if first.replace(false) { Now::from_micros(0, 0) } else { Now::from_micros(10_000_001, 0) };
        assert_eq!(line.now(read).mono_us(), 10_000_001);
        assert_eq!(line.now(|| Now::from_micros(10_000_002, 0)).mono_us(), 10_000_002);
    }

    #[test]
    fn a_reading_from_before_a_step_is_not_placed_by_its_correction() {
        let line = Timeline::new();
        line.now(|| Now::from_micros(5 * HOUR_US, 0));
        // While this thread reads the clock, it steps back an hour and another thread corrects the
        // line for it.
        let first = Cell::new(true);
        let read = || {
            if first.replace(false) {
                line.now(|| Now::from_micros(4 * HOUR_US, 0));
                return Now::from_micros(5 * HOUR_US, 0);
            }
            Now::from_micros(4 * HOUR_US + 1, 0)
        };
        assert_eq!(line.now(read).mono_us(), 5 * HOUR_US + 1);
        assert_eq!(line.now(|| Now::from_micros(4 * HOUR_US + 2, 0)).mono_us(), 5 * HOUR_US + 2);
    }

    #[test]
    fn a_step_forward_is_taken_as_it_is() {
        let line = Timeline::new();
        line.now(|| Now::from_micros(1, 0));
        assert_eq!(line.now(|| Now::from_micros(HOUR_US, 0)).mono_us(), HOUR_US);
    }

    #[test]
    fn extreme_readings_stay_on_the_line() {
        assert_eq!(Now::from_micros(u64::MAX, u64::MAX).mono_us(), MONO_US_MAX);
        let line = Timeline::new();
        line.now(|| Now::from_micros(u64::MAX, 0));
        assert_eq!(line.now(|| Now::from_micros(0, 0)).mono_us(), MONO_US_MAX);
    }
}
