//! Slots for connections, so that no client can lock out others for good.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// A fixed number of slots. A new connection always gets one. If all are taken, it replaces the
/// oldest connection of the address with the most slots. So an address that takes all it can
/// replaces only its own connections.
pub(super) struct SlotPool {
    places_max: usize,
    slots: Mutex<SlotTable>,
}

#[derive(Default)]
struct SlotTable {
    next: u64,
    /// In the order in which they came.
    slots_in_order: VecDeque<Slot>,
}

struct Slot {
    number: u64,
    from: IpAddr,
    is_lost: CancellationToken,
}

/// A place in a room, until it is dropped or lost.
pub(super) struct SlotLease {
    pool: Arc<SlotPool>,
    number: u64,
    is_lost: CancellationToken,
}

impl SlotPool {
    pub(super) fn new(places_max: usize) -> Arc<Self> {
        Arc::new(Self { places_max, slots: Mutex::default() })
    }

    fn slots(&self) -> MutexGuard<'_, SlotTable> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot, if necessary from another connection.
    pub(super) fn enter(self: &Arc<Self>, from: IpAddr) -> SlotLease {
        let mut slots = self.slots();
        while slots.slots_in_order.len() >= self.places_max.max(1) {
            slots.make_room();
        }
        let (number, is_lost) = (slots.next, CancellationToken::new());
        slots.next += 1;
        slots.slots_in_order.push_back(Slot { number, from, is_lost: is_lost.clone() });
        SlotLease { pool: Arc::clone(self), number, is_lost }
    }
}

impl SlotTable {
    fn make_room(&mut self) {
        let neighbours =
            |seat: &Slot| self.slots_in_order.iter().filter(|other| other.from == seat.from).count();
        // `max_by_key` returns the last of equals: in reverse order, the oldest.
        let crowded = self.slots_in_order.iter().enumerate().rev().max_by_key(|(_, seat)| neighbours(seat));
        let crowded = crowded.map(|(at, _)| at);
        if let Some(seat) = crowded.and_then(|at| self.slots_in_order.remove(at)) {
            seat.is_lost.cancel();
        }
    }
}

impl SlotLease {
    /// Waits until a newer connection has taken the slot.
    pub(super) async fn lost(&self) {
        self.is_lost.cancelled().await;
    }
}

impl Drop for SlotLease {
    fn drop(&mut self) {
        self.pool.slots().slots_in_order.retain(|seat| seat.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    fn lost(places: &[SlotLease]) -> Vec<usize> {
        let lost = places.iter().enumerate().filter(|(_, place)| place.is_lost.is_cancelled());
        lost.map(|(at, _)| at).collect()
    }

    #[test]
    fn new_connection_gets_a_slot_and_evicts_the_oldest() {
        let pool = SlotPool::new(3);
        let mut places: Vec<SlotLease> = (0..3).map(|_| pool.enter(address(1))).collect();
        assert_eq!(lost(&places), [0; 0]);
        places.push(pool.enter(address(1)));
        assert_eq!(lost(&places), [0]);
        drop(places.pop());
        places.push(pool.enter(address(1)));
        assert_eq!(lost(&places), [0], "a released slot is reused");
        assert_eq!(pool.slots().slots_in_order.len(), 3);
    }

    #[test]
    fn connections_of_a_crowded_address_evict_only_each_other() {
        let pool = SlotPool::new(4);
        let mut places = vec![pool.enter(address(1)), pool.enter(address(2))];
        places.extend((0..20).map(|_| pool.enter(address(3))));
        assert_eq!(
            lost(&places),
            (2..20).collect::<Vec<_>>(),
            "connections of other addresses keep their slots"
        );
        places.push(pool.enter(address(4)));
        assert_eq!(
            lost(&places),
            (2..21).collect::<Vec<_>>(),
            "a later connection of another address gets a slot"
        );
    }
}
