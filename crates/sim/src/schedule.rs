//! The events of a world, ordered by time, and at the same time by the order of scheduling.

use std::cmp::Ordering;

#[derive(Debug)]
pub(crate) struct ScheduledEvent<E> {
    pub(crate) at_us: u64,
    pub(crate) order: u64,
    pub(crate) event: E,
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
