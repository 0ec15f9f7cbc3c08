//! Many threads at once: on a stopped clock, exactly the limit passes.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicU32, Ordering};

use common::{HOUR, both, limiter, passes, remaining};
use tidegate::{Gate, Limit, Limiter, ReserveOutcome};

const THREADS: usize = 8;
const ROUNDS: usize = 2_000;
/// Low enough that the threads request far more than may pass.
const LIMIT: u32 = 1_000;

/// Runs `work` on all threads, with the number of the thread.
fn hammer(work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let work = &work;
            scope.spawn(move || work(thread));
        }
    });
}

#[test]
fn checks_of_one_key_admit_exactly_the_limit() {
    for limit in both(LIMIT.into(), HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let passed = AtomicU32::new(0);
        hammer(|_| {
            passed.fetch_add(passes(&limiter, gate.key("x"), LIMIT), Ordering::Relaxed);
        });
        assert_eq!(passed.into_inner(), LIMIT);
    }
}

#[test]
fn requests_under_several_limits_charge_all_of_them_alike() {
    for limit in both(LIMIT.into(), HOUR) {
        let (limiter, _) = limiter(&[("a", limit), ("b", limit)]);
        let (a, b) = (limiter.gate("a").unwrap(), limiter.gate("b").unwrap());
        let passed = AtomicU32::new(0);
        hammer(|thread| {
            // Half of the threads name the limits the other way round.
            let mut asks = [a.key("x"), b.key("x")];
            asks.rotate_left(thread % 2);
            for _ in 0..LIMIT {
                let allowed = limiter.check_all(&asks).unwrap().is_allowed();
                passed.fetch_add(allowed.into(), Ordering::Relaxed);
            }
        });
        assert_eq!(passed.into_inner(), LIMIT);
        assert_eq!((remaining(&limiter, a.key("x")), remaining(&limiter, b.key("x"))), (0, 0));
    }
}

#[test]
fn reservations_that_are_dropped_leave_nothing_and_committed_ones_exactly_their_cost() {
    for limit in both(LIMIT.into(), HOUR) {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        let spent = AtomicU32::new(0);
        hammer(|_| {
            for round in 0..u64::from(LIMIT) / 2 {
                let ReserveOutcome::Held(held) = limiter.reserve(&[gate.key("x").cost(2)]).unwrap() else {
                    continue;
                };
                if round % 2 == 0 {
                    held.commit_actual(1);
                    spent.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
        let spent = spent.into_inner();
        assert!(spent <= LIMIT, "{spent} of {LIMIT}");
        assert_eq!(remaining(&limiter, gate.key("x")), LIMIT - spent);
    }
}

#[test]
fn every_kind_of_request_on_several_keys_adds_up() {
    for limit in both(LIMIT.into(), HOUR) {
        let crowd = Crowd::new(limit);
        hammer(|thread| (0..ROUNDS).for_each(|round| crowd.request(thread, thread + round)));
        for (key, spent) in crowd.spent.iter().enumerate() {
            let (spent, ask) = (spent.load(Ordering::Relaxed), crowd.gate.key(key.to_le_bytes()));
            assert!(spent <= LIMIT, "{spent} of {LIMIT}");
            // An open reservation may have denied other requests; now none is open, and the rest
            // must pass.
            assert_eq!(spent + passes(&crowd.limiter, ask, LIMIT), LIMIT);
        }
    }
}

/// Keys that get requests of every kind, and the units that passed on each.
struct Crowd {
    limiter: Limiter,
    gate: Gate,
    spent: [AtomicU32; 4],
}

impl Crowd {
    fn new(limit: Limit) -> Self {
        let (limiter, _) = limiter(&[("a", limit)]);
        let gate = limiter.gate("a").unwrap();
        Self { limiter, gate, spent: Default::default() }
    }

    fn request(&self, thread: usize, round: usize) {
        let keys = [round, round + 1 + thread % 3].map(|key| key % self.spent.len());
        let asks = keys.map(|key| self.gate.key(key.to_le_bytes()));
        match round % 4 {
            0 if self.limiter.check(asks[0]).is_allowed() => self.note(&keys[..1], 1),
            1 if self.limiter.check_all(&asks).unwrap().is_allowed() => self.note(&keys, 1),
            2 => {
                if let ReserveOutcome::Held(held) = self.limiter.reserve(&asks).unwrap() {
                    held.commit();
                    self.note(&keys, 1);
                }
            }
            3 => drop(self.limiter.reserve(&asks[..1])),
            _ => {}
        }
    }

    fn note(&self, keys: &[usize], cost: u32) {
        for &key in keys {
            self.spent[key].fetch_add(cost, Ordering::Relaxed);
        }
    }
}
