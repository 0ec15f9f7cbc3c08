//! Many histories on several threads. Which histories there are depends on the seed alone.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use crate::difference::Report;
use crate::level::Level;
use crate::play::play;
use crate::rng::Rng;
use crate::subject::Subject;
use crate::totals::Totals;

/// How long a history is, in decisions, at most.
const LENGTH_MAX: u64 = 96;

/// Interval between progress reports.
const TELL_EVERY: Duration = Duration::from_secs(5);

/// How much to compare.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Seed that determines every history.
    pub seed: u64,
    /// How many decisions are compared.
    pub decisions: u64,
    /// On how many threads.
    pub threads: usize,
}

/// Compares `S` with the model `L`. Calls `tell` every few seconds with the number of decisions
/// done.
pub fn campaign<L: Level, S: Subject>(plan: &Plan, mut tell: impl FnMut(u64)) -> Result<Totals, Box<Report>> {
    let shared = Shared::new(plan);
    let (sender, results) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..plan.threads.max(1) {
            let (sender, shared) = (sender.clone(), &shared);
            scope.spawn(move || shared.work::<L, S>(&sender));
        }
        drop(sender);
        let mut outcome = Ok(Totals::default());
        loop {
            match results.recv_timeout(TELL_EVERY) {
                Ok(result) => outcome = joined(outcome, result),
                Err(RecvTimeoutError::Timeout) => tell(shared.done.load(Ordering::Relaxed)),
                Err(RecvTimeoutError::Disconnected) => return outcome,
            }
        }
    })
}

type Outcome = Result<Totals, Box<Report>>;

/// The sum of two threads' totals, or the earlier of their differences.
fn joined(one: Outcome, other: Outcome) -> Outcome {
    match (one, other) {
        (Ok(mut sum), Ok(more)) => {
            sum += more;
            Ok(sum)
        }
        (Err(one), Err(other)) => Err(if one.history <= other.history { one } else { other }),
        (Err(report), Ok(_)) | (Ok(_), Err(report)) => Err(report),
    }
}

/// State that the threads share: the histories that no thread has taken yet, and the progress.
struct Shared {
    plan: Plan,
    todo: Mutex<Todo>,
    done: AtomicU64,
    stop: AtomicBool,
}

struct Todo {
    decisions: u64,
    history: u64,
    lengths: Rng,
}

impl Shared {
    fn new(plan: &Plan) -> Self {
        let lengths = Rng::new(plan.seed);
        let todo = Mutex::new(Todo { decisions: plan.decisions, history: 0, lengths });
        Self { plan: *plan, todo, done: AtomicU64::new(0), stop: AtomicBool::new(false) }
    }

    fn work<L: Level, S: Subject>(&self, results: &Sender<Outcome>) {
        let mut totals = Totals::default();
        while let Some((history, decisions)) = self.take() {
            match play::<L, S>(&self.plan, history, decisions) {
                Ok(more) => totals += more,
                Err(report) => {
                    self.stop.store(true, Ordering::Relaxed);
                    let _ = results.send(Err(report));
                    return;
                }
            }
            self.done.fetch_add(decisions, Ordering::Relaxed);
        }
        let _ = results.send(Ok(totals));
    }

    /// The next history and its length in decisions.
    fn take(&self) -> Option<(u64, u64)> {
        let mut todo = self.todo.lock().unwrap_or_else(PoisonError::into_inner);
        if todo.decisions == 0 || self.stop.load(Ordering::Relaxed) {
            return None;
        }
        let length = todo.lengths.any_length(LENGTH_MAX).min(todo.decisions);
        todo.decisions -= length;
        todo.history += 1;
        Some((todo.history - 1, length))
    }
}
