//! The connections of a listener, and the one among them that has been idle for longest.
//!
//! A worker owns its connections. So a connection publishes whether it is idle in an atomic of its
//! own, and the listener marks it there to evict it. The connection then closes by itself.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::sync::OwnedSemaphorePermit;

/// Idle connections found by one search. Higher: fewer searches of a full listener; a connection
/// that was used and fell idle again keeps its old rank for longer.
const FOUND_MAX: usize = 64;

const BUSY: u64 = 0;
/// Beside the pulse since which a connection is idle.
const IDLE: u64 = 1 << 32;
const EVICTED: u64 = 2 << 32;

/// The state of a connection, as its listener sees it.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    state: AtomicU64,
    waker: AtomicWaker,
}

impl Slot {
    /// A request has begun: the connection is not evicted.
    #[inline]
    pub(crate) fn set_busy(&self) {
        self.state.store(BUSY, Ordering::Relaxed);
    }

    /// The connection waits for a request since `pulse`.
    #[inline]
    pub(crate) fn set_idle(&self, pulse: u32) {
        self.state.store(IDLE | u64::from(pulse), Ordering::Relaxed);
    }

    /// Whether the connection must close, in favour of another.
    #[inline]
    pub(crate) fn is_evicted(&self) -> bool {
        self.state.load(Ordering::Relaxed) == EVICTED
    }

    /// Sets the task that an eviction wakes.
    pub(crate) fn wake_by(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Evicts the connection if its state is still `seen`. A request that begins at the same time
    /// may overwrite the mark. Then the connection stays, and the listener finds another one.
    fn evict(&self, seen: u64) -> bool {
        let evicted =
            self.state.compare_exchange(seen, EVICTED, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if evicted {
            self.waker.wake();
        }
        evicted
    }
}

/// The slots of a listener.
#[derive(Debug, Default)]
pub(crate) struct Slots {
    open: Mutex<OpenSlots>,
}

#[derive(Debug, Default)]
struct OpenSlots {
    slots: HashMap<u64, Arc<Slot>>,
    next: u64,
}

/// A slot that is taken until this is dropped.
#[derive(Debug)]
pub(crate) struct TakenSlot {
    slots: Arc<Slots>,
    number: u64,
    pub(crate) slot: Arc<Slot>,
    /// Given back after the slot.
    _permit: OwnedSemaphorePermit,
}

impl Drop for TakenSlot {
    fn drop(&mut self) {
        self.slots.open().slots.remove(&self.number);
    }
}

impl Slots {
    /// Takes a slot. The permit bounds their number.
    pub(crate) fn take(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> TakenSlot {
        let slot = Arc::new(Slot::default());
        let mut open = self.open();
        let number = open.next;
        open.next += 1;
        open.slots.insert(number, Arc::clone(&slot));
        drop(open);
        TakenSlot { slots: Arc::clone(self), number, slot, _permit: permit }
    }

    /// Returns the connections that have been idle for longest, with their states, in this order.
    fn longest_idle(&self) -> VecDeque<(u64, Weak<Slot>)> {
        let open = self.open();
        let state = |(number, slot): (&u64, &Arc<Slot>)| (slot.state.load(Ordering::Relaxed), *number);
        let mut idle: Vec<(u64, u64)> =
            open.slots.iter().map(state).filter(|(state, _)| (IDLE..EVICTED).contains(state)).collect();
        if idle.len() > FOUND_MAX {
            idle.select_nth_unstable(FOUND_MAX);
            idle.truncate(FOUND_MAX);
        }
        idle.sort_unstable();
        let found = |(state, number)| Some((state, Arc::downgrade(open.slots.get(&number)?)));
        idle.into_iter().filter_map(found).collect()
    }

    fn open(&self) -> MutexGuard<'_, OpenSlots> {
        // The lock is held for a few operations on a map, which do not panic.
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Evicts the connections of a listener that have been idle for longest.
#[derive(Debug)]
pub(crate) struct Evictor {
    slots: Arc<Slots>,
    /// Found by the last search.
    found: VecDeque<(u64, Weak<Slot>)>,
}

impl Evictor {
    pub(crate) fn new(slots: &Arc<Slots>) -> Self {
        Self { slots: Arc::clone(slots), found: VecDeque::new() }
    }

    /// Evicts one connection; whether there was an idle one.
    pub(crate) fn evict(&mut self) -> bool {
        if self.evict_found() {
            return true;
        }
        self.found = self.slots.longest_idle();
        self.evict_found()
    }

    fn evict_found(&mut self) -> bool {
        while let Some((seen, slot)) = self.found.pop_front() {
            if slot.upgrade().is_some_and(|slot| slot.evict(seen)) {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::Semaphore;

    use super::*;

    fn taken(slots: &Arc<Slots>, count: usize) -> Vec<TakenSlot> {
        let room = Arc::new(Semaphore::new(count));
        let permit = || Arc::clone(&room).try_acquire_owned().expect("room");
        (0..count).map(|_| slots.take(permit())).collect()
    }

    #[test]
    fn the_longest_idle_connection_goes_first_and_a_busy_one_never() {
        let slots = Arc::new(Slots::default());
        let mut evictor = Evictor::new(&slots);
        let open = taken(&slots, 4);
        for (open, pulse) in open.iter().zip([7, 3, 5]) {
            open.slot.set_idle(pulse);
        }
        let evicted = |open: &[TakenSlot]| open.iter().map(|open| open.slot.is_evicted()).collect::<Vec<_>>();
        assert!(evictor.evict());
        assert_eq!(evicted(&open), [false, true, false, false]);
        open[2].slot.set_busy();
        assert!(evictor.evict());
        assert_eq!(evicted(&open), [true, true, false, false], "a request had begun on the third");
        open[2].slot.set_idle(9);
        assert!(evictor.evict(), "found by a new search");
        assert!(!evictor.evict(), "the last one was never idle");
    }

    #[test]
    fn a_closed_connection_is_not_found() {
        let slots = Arc::new(Slots::default());
        let mut open = taken(&slots, 3 * FOUND_MAX);
        for (open, pulse) in open.iter().zip(0..) {
            open.slot.set_idle(pulse);
        }
        let mut evictor = Evictor::new(&slots);
        assert!(evictor.evict() && open[0].slot.is_evicted());
        open.drain(..2 * FOUND_MAX);
        assert!(evictor.evict() && open[0].slot.is_evicted());
        drop(open);
        assert!(!evictor.evict() && slots.open().slots.is_empty());
    }
}
