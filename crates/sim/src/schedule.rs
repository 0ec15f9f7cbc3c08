//! The events of a world, ordered by time, and at the same time by the order of scheduling.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

/// The events to come.
pub(crate) struct Schedule<E> {
    events: BinaryHeap<Reverse<ScheduledEvent<E>>>,
    order: u64,
}

impl<E> Schedule<E> {
    pub(crate) fn new() -> Self {
        Self { events: BinaryHeap::new(), order: 0 }
    }

    pub(crate) fn add(&mut self, at_us: u64, event: E) {
        self.order += 1;
        self.events.push(Reverse(ScheduledEvent { at_us, order: self.order, event }));
    }

    /// Takes the next event, and its time.
    pub(crate) fn next(&mut self) -> Option<(u64, E)> {
        self.events.pop().map(|Reverse(next)| (next.at_us, next.event))
    }

    pub(crate) fn clear(&mut self) {
        self.events.clear();
    }
}

struct ScheduledEvent<E> {
    at_us: u64,
    order: u64,
    event: E,
}

impl<E> PartialEq for ScheduledEvent<E> {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}
impl<E> Eq for ScheduledEvent<E> {}
impl<E> PartialOrd for ScheduledEvent<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}
impl<E> Ord for ScheduledEvent<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.at_us, self.order).cmp(&(other.at_us, other.order))
    }
}
