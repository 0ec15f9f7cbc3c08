//! Measures the load of a worker, and sheds checks when it is overloaded.
//!
//! There is no queue between a socket and a decision: requests wait in the sockets. So each worker
//! sets a short timer, and measures how late it fires. That is the time that a request which
//! arrives now waits before it is read. Only lasting delays count: a worker that the system paused
//! is late once, an overloaded worker every time.

use std::cell::Cell;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate_rules::Class;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::auth::TenantIndex;
use crate::metrics::Metrics;
use crate::time_share;

/// How often a worker looks how late it is. Shorter: sooner to notice, more wake-ups of an idle
/// server.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Delays from which a worker sheds checks of a class, if [`LATE_LOOKS`] measurements in a row
/// reach them. Comfort goes first, security last. Lower: responses stay quick for longer, and more
/// checks are not decided.
const SHED_LATE: [(Class, Duration); 3] = [
    (Class::Comfort, Duration::from_millis(100)),
    (Class::Cost, Duration::from_millis(200)),
    (Class::Security, Duration::from_millis(400)),
];

/// Late looks in a row before a worker sheds. Higher: a pause of the machine sheds less; overload
/// is noticed later.
pub(crate) const LATE_LOOKS: usize = 3;

/// The time from which all workers count their pulses.
static START: OnceLock<Instant> = OnceLock::new();

thread_local! {
    /// How late the worker was at its last looks, the latest first.
    static LATE: Cell<[Duration; LATE_LOOKS]> = const { Cell::new([Duration::ZERO; LATE_LOOKS]) };
    static PULSE: Cell<u32> = const { Cell::new(0) };
}

/// Whether this worker is too busy to decide checks of `class`, and the tenant has used more than
/// its share of the worker's time.
#[inline]
pub(crate) fn sheds(class: Class, tenant: TenantIndex) -> bool {
    let late = LATE.get().into_iter().min().unwrap_or_default();
    // A worker is rarely late, so this is usually one comparison.
    late >= SHED_LATE[0].1
        && SHED_LATE.iter().any(|(shed, from)| *shed == class && late >= *from)
        && time_share::is_above_share(tenant)
}

/// Returns a counter that rises about twenty times a second: a clock that costs nothing to read. It
/// is nearly the same on all workers.
#[inline]
pub(crate) fn pulse() -> u32 {
    PULSE.get()
}

/// How many pulses make up `time`, at least one.
pub(crate) fn pulses(time: Duration) -> u32 {
    let pulses = time.as_millis().div_ceil(LOOK_EVERY.as_millis());
    u32::try_from(pulses).unwrap_or(u32::MAX / 2).max(1)
}

/// The other way round.
pub(crate) fn time_of(pulses: u32) -> Duration {
    LOOK_EVERY * pulses
}

/// Watches how late this worker is, for as long as it runs.
pub(crate) async fn watch(metrics: Arc<Metrics>) {
    let start = *START.get_or_init(now);
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let due = ticks.tick().await;
        let now = now();
        let late = now.saturating_duration_since(due);
        note(late);
        time_share::settle(&metrics, late >= SHED_LATE[0].1);
        beat(now.saturating_duration_since(start));
    }
}

#[expect(clippy::disallowed_methods, reason = "how late it is, is what is measured")]
fn now() -> Instant {
    Instant::now()
}

/// Sets the pulse of this worker to the time since [`START`].
fn beat(since_start: Duration) {
    let pulses = since_start.as_millis() / LOOK_EVERY.as_millis();
    // It wraps around after six years.
    PULSE.set(u32::try_from(pulses % (1 << u32::BITS)).unwrap_or_default());
}

/// Takes note of how late this worker is.
pub(crate) fn note(late: Duration) {
    let [last, before, _] = LATE.get();
    LATE.set([late, last, before]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comfort_goes_first_and_security_last() {
        let shed_when_late = |ms| {
            (0..LATE_LOOKS).for_each(|_| note(Duration::from_millis(ms)));
            Class::ALL.map(|class| sheds(class, 0))
        };
        assert_eq!(shed_when_late(0), [false, false, false]);
        assert_eq!(shed_when_late(99), [false, false, false]);
        assert_eq!(shed_when_late(100), [true, false, false]);
        assert_eq!(shed_when_late(200), [true, true, false]);
        assert_eq!(shed_when_late(400), [true, true, true]);
        assert_eq!(shed_when_late(1), [false, false, false]);
    }

    #[test]
    fn tenants_within_their_share_are_not_shed() {
        let metrics = Metrics::new(1, 3);
        time_share::start(&[1, 1, 1]);
        time_share::charge_ns(0, 900);
        time_share::charge_ns(1, 100);
        time_share::settle(&metrics, true);
        (0..LATE_LOOKS).for_each(|_| note(Duration::from_secs(1)));
        assert_eq!(Class::ALL.map(|class| sheds(class, 0)), [true; 3]);
        assert_eq!(Class::ALL.map(|class| sheds(class, 1)), [false; 3]);
        assert_eq!(Class::ALL.map(|class| sheds(class, 2)), [false; 3], "a new tenant");
        time_share::charge_ns(1, 100_000);
        time_share::settle(&metrics, true);
        assert_eq!([0, 1, 2].map(|tenant| sheds(Class::Comfort, tenant)), [false, true, false]);
    }

    #[test]
    fn being_late_once_or_twice_sheds_nothing() {
        for ms in [0, 0, 5_000, 3, 5_000, 5_000, 0] {
            note(Duration::from_millis(ms));
            assert_eq!(Class::ALL.map(|class| sheds(class, 0)), [false, false, false], "{ms}");
        }
    }

    #[test]
    fn the_pulse_rises_twenty_times_a_second() {
        beat(Duration::from_millis(549));
        assert_eq!(pulse(), 10);
        assert_eq!(pulses(Duration::from_secs(10)), 200);
    }
}
