//! Helpers of the tests: limiters on a clock that moves only when it is set.

#![allow(dead_code, reason = "every test file uses some of it")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::sync::Arc;
use std::time::Duration;

use tidegate::{Check, Limit, Limiter, ManualClock};

pub(crate) const MICROSECOND: Duration = Duration::from_micros(1);
pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MINUTE: Duration = Duration::from_mins(1);
pub(crate) const HOUR: Duration = Duration::from_hours(1);

pub(crate) fn gcra(amount: u64, period: Duration) -> Limit {
    Limit::gcra(amount, period).unwrap()
}

pub(crate) fn window(amount: u64, period: Duration) -> Limit {
    Limit::sliding_window(amount, period).unwrap()
}

/// Returns the same limit by either algorithm: both must pass the same tests.
pub(crate) fn both(amount: u64, period: Duration) -> [Limit; 2] {
    [gcra(amount, period), window(amount, period)]
}

/// A limiter on a clock at zero.
pub(crate) fn limiter(limits: &[(&str, Limit)]) -> (Limiter, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let described = Limiter::builder().memory_bytes(1 << 20).clock(Arc::clone(&clock));
    let described = limits.iter().fold(described, |builder, (name, limit)| builder.limit(name, *limit));
    (described.build().unwrap(), clock)
}

/// Returns the remaining units, by a check that changes nothing.
pub(crate) fn remaining(limiter: &Limiter, ask: Check<'_>) -> u32 {
    limiter.check(ask.cost(0)).remaining()
}

/// How many requests of cost 1 pass right now, at most `most`.
pub(crate) fn passes(limiter: &Limiter, ask: Check<'_>, most: u32) -> u32 {
    (0..most).take_while(|_| limiter.check(ask.cost(1)).is_allowed()).count().try_into().unwrap()
}
