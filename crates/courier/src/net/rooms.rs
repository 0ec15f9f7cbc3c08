//! Places for connections, so that nobody keeps others out for good.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio_util::sync::CancellationToken;

/// So many places. Whoever comes when all are taken gets one: the oldest has to leave of those that came from where most did, so that
/// one address that takes all it can takes it from itself.
pub(super) struct Room {
    places_max: usize,
    taken: Mutex<Taken>,
}

#[derive(Default)]
struct Taken {
    next: u64,
    /// In the order in which they came.
    seats: VecDeque<Seat>,
}

struct Seat {
    number: u64,
    from: IpAddr,
    is_lost: CancellationToken,
}

/// A place in a room, until it is dropped or lost.
pub(super) struct Place {
    room: Arc<Room>,
    number: u64,
    is_lost: CancellationToken,
}

impl Room {
    pub(super) fn new(places_max: usize) -> Arc<Self> {
        Arc::new(Self { places_max, taken: Mutex::default() })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for somebody, which somebody else may lose by that.
    pub(super) fn enter(self: &Arc<Self>, from: IpAddr) -> Place {
        let mut taken = self.taken();
        while taken.seats.len() >= self.places_max.max(1) {
            taken.make_room();
        }
        let (number, is_lost) = (taken.next, CancellationToken::new());
        taken.next += 1;
        taken.seats.push_back(Seat { number, from, is_lost: is_lost.clone() });
        Place { room: Arc::clone(self), number, is_lost }
    }
}

impl Taken {
    fn make_room(&mut self) {
        let neighbours = |seat: &Seat| self.seats.iter().filter(|other| other.from == seat.from).count();
        // The last of equals is taken: from the back, that is the oldest.
        let crowded = self.seats.iter().enumerate().rev().max_by_key(|(_, seat)| neighbours(seat));
        let crowded = crowded.map(|(at, _)| at);
        if let Some(seat) = crowded.and_then(|at| self.seats.remove(at)) {
            seat.is_lost.cancel();
        }
    }
}

impl Place {
    /// Waits until somebody else has it.
    pub(super) async fn lost(&self) {
        self.is_lost.cancelled().await;
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.room.taken().seats.retain(|seat| seat.number != self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u8) -> IpAddr {
        IpAddr::from([192, 0, 2, number])
    }

    fn lost(places: &[Place]) -> Vec<usize> {
        let lost = places.iter().enumerate().filter(|(_, place)| place.is_lost.is_cancelled());
        lost.map(|(at, _)| at).collect()
    }

    #[test]
    fn whoever_comes_finds_a_place_and_the_oldest_loses_one() {
        let room = Room::new(3);
        let mut places: Vec<Place> = (0..3).map(|_| room.enter(address(1))).collect();
        assert_eq!(lost(&places), [0; 0]);
        places.push(room.enter(address(1)));
        assert_eq!(lost(&places), [0]);
        drop(places.pop());
        places.push(room.enter(address(1)));
        assert_eq!(lost(&places), [0], "one was free");
        assert_eq!(room.taken().seats.len(), 3);
    }

    #[test]
    fn who_comes_in_a_crowd_takes_from_the_crowd_only() {
        let room = Room::new(4);
        let mut places = vec![room.enter(address(1)), room.enter(address(2))];
        places.extend((0..20).map(|_| room.enter(address(3))));
        assert_eq!(lost(&places), (2..20).collect::<Vec<_>>(), "the others were there before");
        places.push(room.enter(address(4)));
        assert_eq!(lost(&places), (2..21).collect::<Vec<_>>(), "who comes after it finds a place");
    }
}
