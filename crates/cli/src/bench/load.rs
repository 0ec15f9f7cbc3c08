//! Threads that each drive their own connections until the time is up.

use std::cell::RefCell;
use std::fmt::Display;
use std::io;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::task::{JoinSet, LocalSet};
use tokio::time::{Instant, sleep_until, timeout};

use super::http::HttpConnection;
use super::plan::{Plan, Surface};
use super::resp::RespConnection;
use crate::Failure;

/// The most threads. More than this are not needed to keep any server busy from one machine.
const THREADS_MAX: u64 = 8;

/// Timeout for one reply. After it, the request counts as failed.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

/// Delay before a lost connection is reopened, so that an unreachable server is not flooded.
const REOPEN_AFTER: Duration = Duration::from_millis(100);

/// How often the progress is drawn.
const DRAW_EVERY: Duration = Duration::from_millis(100);

/// Distance between the starting points of two connections in the sequence of keys.
const CONNECTION_STRIDE: u64 = 0x1234_5678_9abc;

/// Maximum of the latency histogram, ns, above any latency that counts. It has three significant
/// digits.
const LATENCY_NS_MAX: u64 = 60_000_000_000;

/// Counts of the replies by outcome.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers {
    pub(super) allowed: u64,
    pub(super) denied: u64,
    pub(super) errors: u64,
    pub(super) first_error: Option<String>,
}

impl Answers {
    pub(super) fn decided(&mut self, allowed: bool) {
        if allowed { self.allowed += 1 } else { self.denied += 1 }
    }

    pub(super) fn failed(&mut self, words: &dyn Display) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| words.to_string());
    }

    fn decisions(&self) -> u64 {
        self.allowed + self.denied
    }

    fn add(&mut self, other: Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }
}

/// Results of a run.
pub(super) struct Findings {
    pub(super) answers: Answers,
    /// Nanoseconds, of questions that got a decision.
    pub(super) latency: Histogram<u64>,
    pub(super) taken: Duration,
}

impl Findings {
    fn new() -> Result<Self, Failure> {
        let latency = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).map_err(Failure::failed)?;
        Ok(Self { answers: Answers::default(), latency, taken: Duration::ZERO })
    }

    /// Questions that got a decision.
    pub(super) fn answered(&self) -> u64 {
        self.answers.decisions()
    }

    fn add(&mut self, other: Self) -> Result<(), Failure> {
        self.answers.add(other.answers);
        self.latency.add(other.latency).map_err(Failure::failed)
    }

    fn note(&mut self, answers: Answers, taken: Duration) {
        let ns = u64::try_from(taken.as_nanos()).unwrap_or(LATENCY_NS_MAX);
        self.latency.saturating_record_n(ns.max(1), answers.decisions());
        self.answers.add(answers);
    }
}

/// Puts the load on the server, and draws the progress.
pub(super) fn run(plan: &Arc<Plan>) -> Result<Findings, Failure> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let threads = cores.min(THREADS_MAX).min(plan.connections);
    let answered = Arc::new(AtomicU64::new(0));
    let started = now();
    let (done, dones) = mpsc::channel();
    let mut findings = Findings::new()?;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (done, answered) = (done.clone(), &answered);
            scope.spawn(move || {
                // The send fails if another thread has failed, because the receiver is then gone.
                let _ = done.send(drive(plan, thread, threads, started, answered));
            });
        }
        drop(done);
        let progress = Progress::new(plan);
        loop {
            match dones.recv_timeout(DRAW_EVERY) {
                Ok(found) => findings.add(found?)?,
                Err(RecvTimeoutError::Timeout) => progress.draw(started, &answered),
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    })?;
    findings.taken = now() - started;
    Ok(findings)
}

struct Progress(ProgressBar);

impl Progress {
    /// The bar is drawn only on a terminal.
    fn new(plan: &Plan) -> Self {
        let bar = ProgressBar::new(millis(plan.duration));
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} %  {msg}") {
            bar.set_style(style);
        }
        Self(bar)
    }

    fn draw(&self, started: Instant, answered: &AtomicU64) {
        let spent = millis(now() - started);
        let so_far = answered.load(Ordering::Relaxed);
        self.0.set_message(format!("{} responses/s", so_far * 1_000 / spent.max(1)));
        self.0.set_position(spent);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Drives every `threads`-th connection.
fn drive(
    plan: &Arc<Plan>,
    thread: u64,
    threads: u64,
    started: Instant,
    answered: &Arc<AtomicU64>,
) -> Result<Findings, Failure> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Failure::failed)?;
    LocalSet::new().block_on(&runtime, async {
        let found = Rc::new(RefCell::new(Findings::new()?));
        let mut driven = JoinSet::new();
        for number in (thread..plan.connections).step_by(usize::try_from(threads).unwrap_or(1)) {
            let one = Driver {
                plan: Arc::clone(plan),
                keys: Keys { state: number * CONNECTION_STRIDE, count: plan.keys },
                pace: Pace::new(plan, number, started),
                ends: started + plan.duration,
                answered: Arc::clone(answered),
                found: Rc::clone(&found),
            };
            driven.spawn_local(one.run());
        }
        while let Some(ended) = driven.join_next().await {
            ended.map_err(Failure::failed)?;
        }
        Ok(found.replace(Findings::new()?))
    })
}

enum Connection {
    Http(HttpConnection),
    Resp(RespConnection),
}

impl Connection {
    async fn open(plan: &Plan) -> io::Result<Self> {
        match plan.surface {
            Surface::Http | Surface::Check => HttpConnection::open(plan).await.map(Self::Http),
            Surface::Resp => RespConnection::open(plan).await.map(Self::Resp),
        }
    }

    async fn ask(&mut self, plan: &Plan, keys: &[u64]) -> io::Result<Answers> {
        match self {
            Self::Http(connection) => connection.ask(plan, keys).await,
            Self::Resp(connection) => connection.ask(plan, keys).await,
        }
    }
}

/// One connection, and its part of the load.
struct Driver {
    plan: Arc<Plan>,
    keys: Keys,
    pace: Pace,
    ends: Instant,
    answered: Arc<AtomicU64>,
    /// Of all connections of the thread: a histogram is a quarter of a megabyte.
    found: Rc<RefCell<Findings>>,
}

impl Driver {
    async fn run(mut self) {
        while now() < self.ends {
            if let Err(error) = self.run_connection().await {
                self.found.borrow_mut().answers.failed(&error);
                sleep_until((now() + REOPEN_AFTER).min(self.ends)).await;
            }
        }
    }

    /// Until the time is up, or the connection fails.
    async fn run_connection(&mut self) -> io::Result<()> {
        let mut connection = timeout(ANSWER_TIME_MAX, Connection::open(&self.plan)).await??;
        let mut batch = Vec::new();
        loop {
            let Some(due) = self.pace.wait(self.ends).await else { return Ok(()) };
            batch.clear();
            batch.extend((0..self.plan.pipeline).map(|_| self.keys.draw()));
            let answers = timeout(ANSWER_TIME_MAX, connection.ask(&self.plan, &batch)).await??;
            self.answered.fetch_add(answers.decisions(), Ordering::Relaxed);
            self.found.borrow_mut().note(answers, now() - due);
        }
    }
}

/// When the next batch is due.
struct Pace {
    next: Instant,
    every: Option<Duration>,
}

impl Pace {
    /// Staggers the connections, so that the load is even.
    fn new(plan: &Plan, number: u64, started: Instant) -> Self {
        let every = plan.every();
        let turn = |every: Duration| {
            let (number, connections) = (u32::try_from(number), u32::try_from(plan.connections));
            every * number.unwrap_or(0) / connections.unwrap_or(1)
        };
        Self { next: started + every.map_or(Duration::ZERO, turn), every }
    }

    /// Waits until the next batch is due; returns `None` if the run ends first. Latency counts from
    /// the due time, so a slow server cannot hide the time that requests wait for it.
    async fn wait(&mut self, ends: Instant) -> Option<Instant> {
        let Some(every) = self.every else { return Some(now()).filter(|now| *now < ends) };
        let due = self.next;
        if due.max(now()) >= ends {
            return None;
        }
        self.next += every;
        sleep_until(due).await;
        Some(due)
    }
}

/// Keys drawn at random: `SplitMix64`, another sequence for each connection and the same in each run.
struct Keys {
    state: u64,
    count: u64,
}

impl Keys {
    fn draw(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % self.count
    }
}

#[expect(clippy::disallowed_methods, reason = "measures how long a server takes; nothing is decided by it")]
fn now() -> Instant {
    Instant::now()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_spread_and_differ_between_connections() {
        let drawn = |number| {
            let mut keys = Keys { state: number * CONNECTION_STRIDE, count: 1_000 };
            (0..10_000).map(|_| keys.draw()).collect::<Vec<_>>()
        };
        let (first, second) = (drawn(0), drawn(1));
        assert_ne!(first[..10], second[..10]);
        let distinct: std::collections::HashSet<_> = first.iter().collect();
        assert_eq!(distinct.len(), 1_000, "each of a thousand keys comes up in ten thousand draws");
    }
}
