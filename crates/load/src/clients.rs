//! Clients in threads of their own, and the times of their requests.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Runs this many clients at once, and returns their results in order.
pub fn run_clients<T, E>(count: usize, client: impl Fn(usize) -> Result<T, E> + Sync) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<io::Error> + Send,
{
    thread::scope(|scope| {
        let spawn = |number| {
            let client = &client;
            thread::Builder::new().spawn_scoped(scope, move || client(number))
        };
        let clients = (0..count).map(spawn).collect::<io::Result<Vec<_>>>()?;
        let join = |client: thread::ScopedJoinHandle<'_, Result<T, E>>| {
            client.join().map_err(|_| io::Error::other("a client panicked"))?
        };
        clients.into_iter().map(join).collect()
    })
}

/// The time by which clients measure and wait.
#[expect(clippy::disallowed_methods, reason = "measures how long a server takes; nothing is decided by it")]
pub fn now() -> Instant {
    Instant::now()
}

/// Waits until `due`; returns at once if that has passed.
pub fn wait_until(due: Instant) {
    loop {
        let left = due.saturating_duration_since(now());
        if left.is_zero() {
            return;
        }
        thread::park_timeout(left);
    }
}

/// Turns that several clients take, each turn once.
#[derive(Debug)]
pub struct Turns {
    next: AtomicU64,
    count: u64,
}

impl Turns {
    /// So many turns.
    pub const fn new(count: u64) -> Self {
        Self { next: AtomicU64::new(0), count }
    }

    /// Returns the next turn, from 0 on, or `None` after the last one.
    pub fn take(&self) -> Option<u64> {
        Some(self.next.fetch_add(1, Ordering::Relaxed)).filter(|turn| *turn < self.count)
    }
}

/// When the next requests of a client are due.
#[derive(Debug)]
pub struct Pace {
    next: Instant,
    every: Option<Duration>,
}

impl Pace {
    /// An open loop with requests at this interval; without one a closed loop, in which each
    /// request follows the reply to the one before. Staggers the clients, so that the load is even.
    pub fn new(every: Option<Duration>, number: u32, clients: u32, started: Instant) -> Self {
        let first = every.map_or(Duration::ZERO, |every| every * number / clients.max(1));
        Self { next: started + first, every }
    }

    /// Waits until the next requests are due; returns `None` if the run ends first. Latency counts
    /// from the due time, so a slow server cannot hide the time that requests wait for it.
    pub fn wait(&mut self, ends: Instant) -> Option<Instant> {
        let Some(every) = self.every else { return Some(now()).filter(|now| *now < ends) };
        let due = self.next;
        if due.max(now()) >= ends {
            return None;
        }
        self.next += every;
        wait_until(due);
        Some(due)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_share_turns_and_each_turn_is_taken_once() {
        let turns = Turns::new(1_000);
        let taken =
            run_clients(4, |_| Ok::<_, io::Error>(std::iter::from_fn(|| turns.take()).collect::<Vec<u64>>()));
        let mut taken: Vec<u64> = taken.unwrap().into_iter().flatten().collect();
        taken.sort_unstable();
        assert!(taken.into_iter().eq(0..1_000));
        assert_eq!(turns.take(), None);
    }

    #[test]
    fn failure_or_panic_of_a_client_is_an_error() {
        let failed =
            run_clients(3, |number| if number == 1 { Err(io::Error::other("refused")) } else { Ok(number) });
        assert_eq!(failed.unwrap_err().to_string(), "refused");
        let panicked = run_clients(1, |number| -> io::Result<()> { panic!("client {number}") });
        assert_eq!(panicked.unwrap_err().to_string(), "a client panicked");
    }

    #[test]
    fn paced_requests_are_due_at_the_interval_though_the_client_is_late() {
        let (started, every) = (now(), Duration::from_millis(4));
        let mut pace = Pace::new(Some(every), 1, 2, started);
        let ends = started + Duration::from_millis(12);
        wait_until(started + Duration::from_millis(7));
        assert_eq!(pace.wait(ends), Some(started + Duration::from_millis(2)));
        assert_eq!(pace.wait(ends), Some(started + Duration::from_millis(6)));
        wait_until(ends);
        assert_eq!(pace.wait(ends), None);
        assert_eq!(Pace::new(None, 0, 1, started).wait(ends), None, "a closed loop ends too");
    }
}
