//! A tour of Tidegate in a minute: a steady limit with a burst, a sliding window, a request under
//! several limits at once, a reservation, and the speed of checks. Run it with
//!
//! ```sh
//! cargo run --release --example quickstart -p tidegate
//! ```
//!
//! The example sets the time by hand wherever it would have to wait, so it ends at once.

use std::error::Error;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tidegate::{Clock, Gate, Limit, Limiter, ManualClock, Outcome, ReserveOutcome};

fn main() -> Result<(), Box<dyn Error>> {
    let clock = Arc::new(ManualClock::new());
    let minute = Duration::from_mins(1);
    let limiter = Limiter::builder()
        .limit("steady", Limit::gcra(5, Duration::from_secs(1))?.with_burst(3)?)
        .limit("window", Limit::sliding_window(10, minute)?)
        .limit("tokens", Limit::gcra(1_000, minute)?)
        .clock(Arc::clone(&clock))
        .build()?;
    let demo = Demo { limiter, clock };

    demo.steady(&demo.limiter.gate("steady")?);
    demo.window(&demo.limiter.gate("window")?);
    demo.several()?;
    demo.reservation()?;
    speed()
}

struct Demo {
    limiter: Limiter,
    clock: Arc<ManualClock>,
}

impl Demo {
    fn steady(&self, steady: &Gate) {
        heading("steady: 5 per second, 3 at once (GCRA). Each key has its own 3.");
        for key in ["alice", "alice", "alice", "alice", "bob"] {
            self.ask(steady, key, 1);
        }
        self.wait(Duration::from_millis(200));
        self.ask(steady, "alice", 1);
        self.ask(steady, "alice", 1);
    }

    fn window(&self, window: &Gate) {
        heading("window: 10 per minute (sliding window). Costs may differ; a cost of 0 only reads.");
        for cost in [8, 3, 2, 0, 11] {
            self.ask(window, "alice", cost);
        }
        self.wait(Duration::from_secs(90));
        self.ask(window, "alice", 3);
    }

    fn several(&self) -> Result<(), Box<dyn Error>> {
        heading("steady and window as one: all are charged, or none is.");
        let (steady, window) = (self.limiter.gate("steady")?, self.limiter.gate("window")?);
        for cost in [4, 7, 6] {
            let asks = [steady.key("carol"), window.key("carol").cost(cost)];
            let decision = self.limiter.check_all(&asks)?;
            for (outcome, cost) in decision.outcomes().iter().zip([1, cost]) {
                self.row(outcome, "carol", cost);
            }
            let denied_by = decision.denied_by().map(|outcome| outcome.gate().name());
            match denied_by {
                None => println!("{:>8}  => allowed", ""),
                Some(by) => println!("{:>8}  => denied by {by}, nothing charged", ""),
            }
        }
        Ok(())
    }

    fn reservation(&self) -> Result<(), Box<dyn Error>> {
        heading("tokens: 1000 per minute. Reserve an estimate, then charge the actual cost.");
        let tokens = self.limiter.gate("tokens")?;
        match self.limiter.reserve(&[tokens.key("dora").cost(400)])? {
            ReserveOutcome::Denied(decision) => println!("denied for {:?}", decision.retry_after()),
            ReserveOutcome::Held(held) => {
                held.decision().outcomes().iter().for_each(|outcome| self.row(outcome, "dora", 400));
                println!("{:>8}  => 400 reserved; the work turns out to cost 250", "");
                held.commit_actual(250);
            }
        }
        self.ask(&tokens, "dora", 0);
        Ok(())
    }

    fn ask(&self, gate: &Gate, key: &str, cost: u64) {
        self.row(&self.limiter.check(gate.key(key).cost(cost)), key, cost);
    }

    fn wait(&self, time: Duration) {
        self.clock.advance(time);
        println!("{:>8}  .. {time:?} pass", "");
    }

    fn row(&self, outcome: &Outcome<'_>, key: &str, cost: u64) {
        let time = Duration::from_micros(self.clock.now().mono_us()).as_secs_f64();
        let (name, left) = (outcome.gate().name(), outcome.remaining());
        let verdict = if outcome.is_allowed() { "allowed" } else { "denied" };
        println!(
            "{time:>7.1}s  {name:<7} {key:<6} {cost:>4}  {verdict:<7} {left:>9}  {:>11}",
            retry(outcome)
        );
    }
}

fn heading(text: &str) {
    println!("\n{text}");
    println!(
        "{:>8}  {:<7} {:<6} {:>4}  {:<7} {:>9}  {:>11}",
        "time", "limit", "key", "cost", "result", "remaining", "retry after"
    );
}

fn retry(outcome: &Outcome<'_>) -> String {
    match outcome.retry_after() {
        Some(wait) => format!("{wait:.1?}"),
        None if outcome.is_allowed() => "-".to_owned(),
        None => "never".to_owned(),
    }
}

const KEYS: u64 = 1_000_000;
const CHECKS: u64 = 5_000_000;

/// Times one thread that checks keys in no particular order, by the system's clock.
fn speed() -> Result<(), Box<dyn Error>> {
    let limit = Limit::gcra(100, Duration::from_secs(1))?;
    let limiter = Limiter::builder().limit("speed", limit).keys(usize::try_from(KEYS)?).build()?;
    let gate = limiter.gate("speed")?;
    let check = |key: u64| limiter.check(gate.key(key.to_le_bytes())).is_allowed();
    for key in 0..KEYS {
        check(key);
    }

    let (mut key, mut allowed) = (0_u64, 0_u64);
    let took = timed(|| {
        for _ in 0..CHECKS {
            // Steps through all keys in an order that no cache can foresee.
            key = (key + 618_033_989) % KEYS;
            allowed += u64::from(check(key));
        }
    });
    let ns = took.as_secs_f64() * 1e9 / f64::from(u32::try_from(CHECKS)?);
    println!("\nspeed: {CHECKS} checks on {KEYS} keys, one thread: {ns:.0} ns per check ({allowed} allowed)");
    println!("memory: {} MiB, allocated at the start, never more", limiter.memory_bytes() >> 20);
    Ok(())
}

#[expect(clippy::disallowed_methods, reason = "measures how long the work really takes")]
fn timed(work: impl FnOnce()) -> Duration {
    let started = Instant::now();
    work();
    started.elapsed()
}
