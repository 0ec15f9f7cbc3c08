//! Clients in threads of their own, and the times of their requests.

use std::io;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// Runs this many clients at once, and returns their results in order. No client starts its work
/// before the threads of all of them run: if one thread cannot be started, none does any.
pub fn run_clients<T, E>(count: usize, client: impl Fn(usize) -> Result<T, E> + Sync) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<io::Error> + Send,
{
    run_in_threads(count, |_| thread::Builder::new(), client)
}

fn run_in_threads<T, E>(
    count: usize,
    thread_of: impl Fn(usize) -> thread::Builder,
    client: impl Fn(usize) -> Result<T, E> + Sync,
) -> Result<Vec<T>, E>
where
    T: Send,
    E: From<io::Error> + Send,
{
    let are_all_started = OnceLock::new();
    let run = |number| match are_all_started.wait() {
        true => client(number),
        false => Err(io::Error::other("another client did not start").into()),
    };
    let run = &run;
    thread::scope(|scope| {
        let spawn = |number| thread_of(number).spawn_scoped(scope, move || run(number));
        let clients = (0..count).map(spawn).collect::<io::Result<Vec<_>>>();
        are_all_started.get_or_init(|| clients.is_ok());
        let join = |client: thread::ScopedJoinHandle<'_, Result<T, E>>| {
            client.join().map_err(|_| io::Error::other("a client panicked"))?
        };
        clients?.into_iter().map(join).collect()
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
        let due = self.next_due(now(), ends)?;
        wait_until(due);
        Some(due)
    }

    fn next_due(&mut self, now: Instant, ends: Instant) -> Option<Instant> {
        let due = self.every.map_or(now, |_| self.next);
        if due.max(now) >= ends {
            return None;
        }
        self.next += self.every.unwrap_or_default();
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
    fn no_client_starts_if_one_thread_cannot_be_started() {
        let too_large = |number| {
            let builder = thread::Builder::new();
            if number == 2 { builder.stack_size(1 << 60) } else { builder }
        };
        let started = AtomicU64::new(0);
        let ran = run_in_threads(4, too_large, |_| {
            started.fetch_add(1, Ordering::Relaxed);
            Ok::<_, io::Error>(())
        });
        assert!(ran.is_err());
        assert_eq!(started.into_inner(), 0);
    }

    #[test]
    fn paced_requests_are_due_at_the_interval_though_the_client_is_late() {
        let (started, ms) = (now(), Duration::from_millis);
        let ends = started + ms(12);
        let mut pace = Pace::new(Some(ms(4)), 1, 2, started);
        assert_eq!(pace.next_due(started, ends), Some(started + ms(2)));
        let late = started + ms(11);
        assert_eq!(pace.next_due(late, ends), Some(started + ms(6)));
        assert_eq!(pace.next_due(late, ends), Some(started + ms(10)));
        assert_eq!(pace.next_due(late, ends), None, "due after the end");
        let mut closed_loop = Pace::new(None, 0, 1, started);
        assert_eq!(closed_loop.next_due(late, ends), Some(late));
        assert_eq!(closed_loop.next_due(ends, ends), None, "a closed loop ends too");
    }
}
