//! The only file that reads a clock for decisions. All other code gets the time as an argument.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tidegate_core::Now;

/// How long a reading of the wall clock serves. Higher: fewer readings, window edges that follow a
/// corrected wall clock later. Elapsed time is read afresh each time.
const WALL_EVERY_US: u64 = 10_000;

/// A source of time.
pub trait Clock: Send + Sync + fmt::Debug {
    /// Returns the current time: monotonic for elapsed time, wall for the edges of calendar
    /// windows.
    fn now(&self) -> Now;
}

/// The clocks of the system. Elapsed time comes from the processor's counter if that is steady.
/// Reading it takes a third of the time of a system clock, and lets the processor continue with
/// other work. Time while the machine is suspended counts too, from 10 ms after it wakes: a grant
/// with a life of one second has expired by then.
#[derive(Debug)]
pub struct SystemClock {
    counter: quanta::Clock,
    started: u64,
    /// The wall clock less the monotonic one; both count from their own zero.
    wall_ahead_us: AtomicU64,
    wall_read_us: AtomicU64,
    /// How long the machine was suspended since this clock was made, and since it was switched on
    /// until then. The counter may stand still meanwhile.
    suspended_us: AtomicU64,
    suspended_before_us: u64,
}

impl SystemClock {
    /// Returns a clock with a monotonic reading that starts at 0 now. The first clock of a process
    /// takes about 1 ms, to calibrate the counter.
    pub fn new() -> Self {
        let counter = quanta::Clock::new();
        let started = counter.raw();
        let clock = Self {
            counter,
            started,
            wall_ahead_us: AtomicU64::new(0),
            wall_read_us: AtomicU64::new(0),
            suspended_us: AtomicU64::new(0),
            suspended_before_us: suspended_us(),
        };
        clock.read_wall(0);
        clock
    }

    #[inline]
    fn elapsed_us(&self) -> u64 {
        let counted_us = self.counter.delta_as_nanos(self.started, self.counter.raw()) / 1_000;
        counted_us + self.suspended_us.load(Ordering::Relaxed)
    }

    /// Takes in how long the machine has been suspended; how much of that is new.
    fn note_suspended(&self, since_boot_us: u64) -> u64 {
        let suspended_us = since_boot_us.saturating_sub(self.suspended_before_us);
        suspended_us - self.suspended_us.fetch_max(suspended_us, Ordering::Relaxed).min(suspended_us)
    }

    #[cold]
    #[expect(clippy::disallowed_methods, reason = "this is the clock")]
    fn read_wall(&self, mono_us: u64) -> u64 {
        // A wall clock before 1970 is as wrong as any other; windows only need it to be steady.
        let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let wall_us = u64::try_from(wall.as_micros()).unwrap_or(u64::MAX);
        let ahead = wall_us.wrapping_sub(mono_us);
        self.wall_ahead_us.store(ahead, Ordering::Relaxed);
        self.wall_read_us.store(mono_us, Ordering::Relaxed);
        ahead
    }
}

/// Returns the time that the machine was suspended since boot, µs: one system clock counts it and
/// another does not.
#[cfg(target_os = "linux")]
fn suspended_us() -> u64 {
    use rustix::time::{ClockId, clock_gettime};
    let us = |clock| {
        let time = clock_gettime(clock);
        // Both count up from the start of the machine.
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        seconds * 1_000_000 + u64::try_from(time.tv_nsec).unwrap_or_default() / 1_000
    };
    // In this order a thread that is held up in between sees less than there was, never more.
    let with = us(ClockId::Boottime);
    let suspended_us = with.saturating_sub(us(ClockId::Monotonic));
    if suspended_us < SUSPENDED_US_MIN { 0 } else { suspended_us }
}

/// Elsewhere the counter is all there is.
#[cfg(not(target_os = "linux"))]
fn suspended_us() -> u64 {
    0
}

/// Shortest time that counts as suspended, µs. Less may pass between the readings of two clocks.
#[cfg(target_os = "linux")]
const SUSPENDED_US_MIN: u64 = 1_000;

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    #[inline]
    fn now(&self) -> Now {
        let mut mono_us = self.elapsed_us();
        let age = mono_us.saturating_sub(self.wall_read_us.load(Ordering::Relaxed));
        let ahead = if age < WALL_EVERY_US {
            self.wall_ahead_us.load(Ordering::Relaxed)
        } else {
            mono_us += self.note_suspended(suspended_us());
            self.read_wall(mono_us)
        };
        Now::from_micros(mono_us, mono_us.wrapping_add(ahead))
    }
}

/// A clock that moves only when it is set: for tests, and for time from another source.
#[derive(Debug, Default)]
pub struct ManualClock {
    mono_us: AtomicU64,
    wall_us: AtomicU64,
}

impl ManualClock {
    /// A clock at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Lets time pass, on both clocks.
    pub fn advance(&self, by: Duration) {
        let by = u64::try_from(by.as_micros()).unwrap_or(u64::MAX);
        for clock in [&self.mono_us, &self.wall_us] {
            // The clock stops at the end of time rather than starting over.
            let _ =
                clock.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |us| Some(us.saturating_add(by)));
        }
    }

    /// Sets both clocks, in microseconds, to any value that a test has to survive.
    pub fn set(&self, mono_us: u64, wall_us: u64) {
        self.mono_us.store(mono_us, Ordering::Relaxed);
        self.wall_us.store(wall_us, Ordering::Relaxed);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Now {
        Now::from_micros(self.mono_us.load(Ordering::Relaxed), self.wall_us.load(Ordering::Relaxed))
    }
}

impl<C: Clock> Clock for std::sync::Arc<C> {
    fn now(&self) -> Now {
        (**self).now()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_in_which_the_machine_slept_has_passed() {
        let clock = SystemClock::new();
        let before_us = clock.elapsed_us();
        let boot_us = clock.suspended_before_us;
        assert_eq!(clock.note_suspended(boot_us + 5_000_000), 5_000_000);
        assert_eq!(clock.note_suspended(boot_us + 5_000_000), 0, "it is counted once");
        assert_eq!(clock.note_suspended(boot_us + 4_000_000), 0, "and never subtracted");
        assert!(clock.elapsed_us() >= before_us + 5_000_000);
    }

    #[test]
    fn the_system_clock_runs_forward_and_knows_the_year() {
        let clock = SystemClock::new();
        let (first, second) = (clock.now(), clock.now());
        assert!(second.mono_us() >= first.mono_us());
        let year_2024_us = 1_704_067_200_000_000;
        assert!(first.wall_us() > year_2024_us);
    }
}
