//! The atomics of the core, replaced by loom's when schedules are explored.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Spins before a waiting thread offers its core to others. The holder needs some ten nanoseconds,
/// so a wait longer than this means that it was descheduled.
#[cfg(not(loom))]
const SPINS_MAX: u32 = 64;

/// Waits a little for another thread to finish its few stores.
#[derive(Debug, Default)]
pub(crate) struct SpinWait {
    #[cfg(not(loom))]
    spins: u32,
}

impl SpinWait {
    #[cfg(not(loom))]
    pub(crate) fn wait(&mut self) {
        if self.spins < SPINS_MAX {
            self.spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    #[cfg(loom)]
    pub(crate) fn wait(&mut self) {
        loom::thread::yield_now();
    }
}
