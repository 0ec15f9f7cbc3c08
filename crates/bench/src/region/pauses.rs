//! Times in which the machine itself stood still, because another guest of its host had a core or
//! the host was busy. Answers that are late then are no fault of a server. A run on a shared
//! machine has some.
//!
//! A thread on each core sleeps for a millisecond at a time and reads the clock. The scheduler
//! prefers a thread that has slept to threads that run all the time. So the thread is late by more
//! than a few milliseconds only if no thread ran on its core.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rustix::thread::{CpuSet, sched_setaffinity};
use tidegate_load::wait_until;

use super::client::Timeline;
use crate::machine;

const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Least lateness that counts as a pause, µs: half of the time that a request waits for its origin.
/// With a smaller value, competition between busy processes counts too.
const PAUSE_US_MIN: u64 = 10_000;

/// Time after a pause in which the backlog is worked off, µs. A larger value attributes more to the
/// machine.
const AFTERMATH_US: u64 = 50_000;

/// When a core stood still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pause {
    from_us: u64,
    until_us: u64,
}

/// When cores stood still.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Pauses(Vec<Pause>);

impl Pauses {
    /// Runs `work`, and watches every core meanwhile.
    pub(super) fn watch<T>(timeline: Timeline, work: impl FnOnce() -> T) -> Result<(T, Self)> {
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let watchers: Vec<_> = (0..machine::cores())
                .map(|core| {
                    let is_done = &is_done;
                    scope.spawn(move || watch_core(core, timeline, is_done))
                })
                .collect();
            let done = work();
            is_done.store(true, Ordering::Relaxed);
            let mut pauses = Vec::new();
            for watcher in watchers {
                pauses.extend(watcher.join().map_err(|_| anyhow!("a watcher panicked"))??);
            }
            Ok((done, Self(pauses)))
        })
    }

    /// How many there were.
    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether a core stood still at any time between these, or just before.
    pub(super) fn touch(&self, from_us: u64, until_us: u64) -> bool {
        self.0.iter().any(|pause| pause.from_us <= until_us && from_us <= pause.until_us + AFTERMATH_US)
    }
}

fn watch_core(core: usize, timeline: Timeline, is_done: &AtomicBool) -> Result<Vec<Pause>> {
    let mut only = CpuSet::new();
    only.set(core);
    sched_setaffinity(None, &only).with_context(|| format!("a thread on core {core}"))?;
    let mut pauses = Vec::new();
    while !is_done.load(Ordering::Relaxed) {
        let due_us = timeline.now_us() + LOOK_EVERY.as_micros() as u64;
        wait_until(machine::now() + LOOK_EVERY);
        let woken_us = timeline.now_us();
        if woken_us >= due_us + PAUSE_US_MIN {
            pauses.push(Pause { from_us: due_us, until_us: woken_us });
        }
    }
    Ok(pauses)
}

#[cfg(test)]
impl Pauses {
    pub(super) fn at(from_us: u64, until_us: u64) -> Self {
        Self(vec![Pause { from_us, until_us }])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pause_touches_overlapping_requests() {
        let pauses = Pauses::at(100, 200);
        let over = 200 + AFTERMATH_US;
        assert!(
            pauses.touch(50, 100)
                && pauses.touch(150, 160)
                && pauses.touch(over, over + 1)
                && pauses.touch(0, 999)
        );
        assert!(!pauses.touch(0, 99) && !pauses.touch(over + 1, over + 2));
        assert!(!Pauses::default().touch(0, u64::MAX));
    }

    #[test]
    fn watch_returns_the_result_of_its_closure() {
        let (done, _) = Pauses::watch(Timeline::new(), || 7).unwrap();
        assert_eq!(done, 7);
    }
}
