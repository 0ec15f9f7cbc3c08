//! Clients that each drive their own connection until the time is up.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use indicatif::{ProgressBar, ProgressStyle};
use tidegate_load::{
    CheckTally, HttpConnection, Pace, RespConnection, now, run_clients, throttle, wait_until,
};

use super::plan::{Plan, Surface};
use crate::Failure;

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

/// Maximum number of stripes of the findings. A histogram has a quarter of a megabyte.
const STRIPES_MAX: usize = 64;

/// The period of every limit.
const PERIOD: Duration = Duration::from_mins(1);

/// Results of a run.
pub(super) struct Findings {
    pub(super) answers: CheckTally,
    /// Nanoseconds, of requests that got a decision.
    pub(super) latency: Histogram<u64>,
    pub(super) taken: Duration,
}

impl Findings {
    fn new() -> Result<Self, Failure> {
        let latency = Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).map_err(Failure::failed)?;
        Ok(Self { answers: CheckTally::default(), latency, taken: Duration::ZERO })
    }

    /// Requests that got a decision.
    pub(super) fn answered(&self) -> u64 {
        self.answers.decisions()
    }

    fn record(&mut self, answers: CheckTally, latency: Duration) {
        let ns = u64::try_from(latency.as_nanos()).unwrap_or(LATENCY_NS_MAX);
        self.latency.saturating_record_n(ns.max(1), answers.decisions());
        self.answers.add(answers);
    }
}

/// The findings of all clients, in stripes: up to 64 clients do not wait for each other.
struct StripedFindings {
    stripes: Vec<Mutex<Findings>>,
    /// Of all stripes, for the progress.
    answered: AtomicU64,
}

impl StripedFindings {
    fn new(clients: usize) -> Result<Self, Failure> {
        let stripes = (0..clients.clamp(1, STRIPES_MAX)).map(|_| Findings::new().map(Mutex::new));
        Ok(Self { stripes: stripes.collect::<Result<_, _>>()?, answered: AtomicU64::new(0) })
    }

    fn record(&self, client: usize, answers: CheckTally, latency: Duration) {
        self.answered.fetch_add(answers.decisions(), Ordering::Relaxed);
        self.update(client, |findings| findings.record(answers, latency));
    }

    fn fail(&self, client: usize, error: &io::Error) {
        self.update(client, |findings| findings.answers.fail(error));
    }

    fn update(&self, client: usize, change: impl FnOnce(&mut Findings)) {
        if let Some(stripe) = self.stripes.get(client % self.stripes.len()) {
            // Counts are complete after each update, also if a client panics later.
            change(&mut stripe.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn merge(self, taken: Duration) -> Result<Findings, Failure> {
        let mut all = Findings { taken, ..Findings::new()? };
        for stripe in self.stripes {
            let findings = stripe.into_inner().unwrap_or_else(PoisonError::into_inner);
            all.latency.add(findings.latency).map_err(Failure::failed)?;
            all.answers.add(findings.answers);
        }
        Ok(all)
    }
}

/// Puts the load on the server, and draws the progress.
pub(super) fn run(plan: &Plan) -> Result<Findings, Failure> {
    let clients = usize::try_from(plan.connections).map_err(Failure::failed)?;
    let (findings, started, drawer) = (StripedFindings::new(clients)?, OnceLock::new(), thread::current());
    let taken = thread::scope(|scope| {
        let load = scope.spawn(|| {
            let ran = run_clients(clients, |number| -> io::Result<()> {
                BenchClient::new(plan, number, *started.get_or_init(now), &findings).run();
                Ok(())
            });
            let taken = started.get().map_or(Duration::ZERO, |started| now() - *started);
            drawer.unpark();
            ran.map(|_| taken)
        });
        let progress = Progress::new(plan);
        while !load.is_finished() {
            thread::park_timeout(DRAW_EVERY);
            if let Some(started) = started.get() {
                progress.draw(*started, findings.answered.load(Ordering::Relaxed));
            }
        }
        load.join().map_err(|_| Failure::failed("the load panicked"))?.map_err(Failure::failed)
    })?;
    findings.merge(taken)
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

    fn draw(&self, started: Instant, answered: u64) {
        let spent = millis(now() - started);
        self.0.set_message(format!("{} responses/s", answered * 1_000 / spent.max(1)));
        self.0.set_position(spent);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

enum Connection {
    Http(HttpConnection),
    Resp(RespConnection),
}

impl Connection {
    fn open(plan: &Plan) -> io::Result<Self> {
        let token = plan.token.as_deref();
        match plan.surface {
            Surface::Http | Surface::Check => {
                let connection = HttpConnection::open(plan.address, ANSWER_TIME_MAX)?;
                Ok(Self::Http(match token {
                    Some(token) => connection.with_token(token),
                    None => connection,
                }))
            }
            Surface::Resp => {
                let mut connection = RespConnection::open(plan.address, ANSWER_TIME_MAX)?;
                token.map_or(Ok(()), |token| connection.log_in(token))?;
                Ok(Self::Resp(connection))
            }
        }
    }

    /// Checks the keys: one by one over HTTP, together over RESP.
    fn check(&mut self, plan: &Plan, keys: impl Iterator<Item = u64>) -> io::Result<CheckTally> {
        let mut answers = CheckTally::default();
        match self {
            Self::Http(connection) => {
                for key in keys.map(|key| format!("k{key}")) {
                    answers.record(match plan.surface {
                        Surface::Check => connection.check(&[("user", &key)], 1)?,
                        Surface::Http | Surface::Resp => {
                            connection.limit("bench", &key, plan.limit, PERIOD)?
                        }
                    });
                }
            }
            Self::Resp(connection) => {
                let command = |key| throttle(&format!("bench:k{key}"), plan.limit, PERIOD);
                connection.send(&keys.map(command).collect::<String>())?;
                for _ in 0..plan.pipeline {
                    answers.record(connection.read()?);
                }
            }
        }
        Ok(answers)
    }
}

/// One connection, and its part of the load.
struct BenchClient<'a> {
    plan: &'a Plan,
    number: usize,
    keys: Keys,
    pace: Pace,
    ends: Instant,
    findings: &'a StripedFindings,
}

impl<'a> BenchClient<'a> {
    fn new(plan: &'a Plan, number: usize, started: Instant, findings: &'a StripedFindings) -> Self {
        let (place, clients) = (u32::try_from(number), u32::try_from(plan.connections));
        Self {
            plan,
            number,
            keys: Keys { state: number as u64 * CONNECTION_STRIDE, count: plan.keys },
            pace: Pace::new(plan.every(), place.unwrap_or(0), clients.unwrap_or(1), started),
            ends: started + plan.duration,
            findings,
        }
    }

    fn run(mut self) {
        while now() < self.ends
            && let Err(error) = self.run_connection()
        {
            self.findings.fail(self.number, &error);
            wait_until((now() + REOPEN_AFTER).min(self.ends));
        }
    }

    /// Until the time is up, or the connection fails.
    fn run_connection(&mut self) -> io::Result<()> {
        let mut connection = Connection::open(self.plan)?;
        while let Some(due) = self.pace.wait(self.ends) {
            let keys = (0..self.plan.pipeline).map(|_| self.keys.draw());
            let answers = connection.check(self.plan, keys)?;
            let latency = now() - due;
            self.findings.record(self.number, answers, latency);
        }
        Ok(())
    }
}

/// Keys drawn at random: `SplitMix64`, another sequence for each connection and the same in each
/// run.
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

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, mpsc};

    use super::*;

    #[test]
    fn clients_do_not_wait_for_each_other_and_their_findings_are_merged() {
        let findings = Arc::new(StripedFindings::new(2).ok().unwrap());
        let answers = || CheckTally { allowed: 2, denied: 1, ..CheckTally::default() };
        let busy = findings.stripes[0].lock().unwrap();
        let (done, ended) = mpsc::channel();
        let others = Arc::clone(&findings);
        let client = thread::spawn(move || {
            others.record(1, answers(), Duration::from_millis(2));
            others.fail(1, &io::Error::other("refused"));
            done.send(()).unwrap();
        });
        let waited = ended.recv_timeout(Duration::from_secs(10));
        drop(busy);
        waited.expect("a client waits for the findings of another one");
        client.join().unwrap();
        findings.record(2, answers(), Duration::from_millis(8));
        assert_eq!(findings.answered.load(Ordering::Relaxed), 6);
        let all = Arc::into_inner(findings).unwrap().merge(Duration::from_secs(1)).ok().unwrap();
        assert_eq!((all.answered(), all.answers.errors, all.taken), (6, 1, Duration::from_secs(1)));
        assert_eq!(all.latency.len(), 6);
        assert!(all.latency.max() >= 8_000_000 && all.latency.min() <= 2_000_000);
    }

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
