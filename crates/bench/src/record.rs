//! What the decision log costs: the same decisions at the same rate, with it and without it, and how many denials a second
//! it takes before it loses one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use tidegate::{Clock, Gate, Limit, Limiter, Secret, SystemClock};
use tidegate_record::{Entry, Kind, Log, Recorder, Settings, Terms, Verdict};

use crate::machine;

/// The rate at which the log may cost no more than [`COST_PERCENT_MAX`] of the machine.
const RATE: u64 = 1_000_000;
const COST_PERCENT_MAX: f64 = 5.0;

/// Shares of what is asked that are denied, in percent. The bar is about the last but one: where a tenth of a million
/// requests a second is denied, the log does what nobody else does for them.
const DENIED_PERCENT: [u64; 3] = [0, 1, 10];
const DENIED_PERCENT_OF_BAR: u64 = 1;

/// Denials a second that are tried one after the other.
const DENIAL_RATES: [u64; 6] = [50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000];

/// How often the pace is kept. It is what a burst is here: shorter ones cost more sleep.
const BEATS_PER_SECOND: u64 = 1_000;

/// Different keys, a power of two.
const KEYS: u64 = 1 << 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds of each case.
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// The share of what passes that is logged.
    #[arg(long, default_value_t = 0.001)]
    sample: f64,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    cores: usize,
    cases: Vec<Case>,
    rates: Vec<Rate>,
}

/// One share of denials.
#[derive(Serialize)]
struct Case {
    denied_percent: u64,
    per_second: u64,
    cpu_ns_per_decision: f64,
    /// What the log adds to the thread that decides, and what its own threads take.
    cpu_ns_added_to_decision: f64,
    cpu_ns_behind_decision: f64,
    /// What the log adds, in percent of one core at this rate, and of all cores.
    percent_of_core: f64,
    percent_of_machine: f64,
    written: u64,
    dropped_denials: u64,
    dropped_samples: u64,
}

/// One rate of denials.
#[derive(Serialize)]
struct Rate {
    denials_per_second: u64,
    /// What was reached, if the machine is too slow to ask for as many.
    reached: u64,
    denials: u64,
    written: u64,
    dropped: u64,
    /// CPU time of asking and logging.
    cpu_ns_per_denial: f64,
    bytes_per_denial: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let load = Load::new()?;
    let mut report = Report { cores: machine::cores(), cases: Vec::new(), rates: Vec::new() };
    for denied_percent in DENIED_PERCENT {
        eprintln!("record: {denied_percent} % denied");
        report.cases.push(case(args, &load, denied_percent)?);
    }
    for rate in DENIAL_RATES {
        eprintln!("record: {rate} denials a second");
        report.rates.push(denials(args, &load, rate)?);
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    let exact = report.rates.iter().all(|rate| rate.written + rate.dropped == rate.denials);
    ensure!(exact, "what was written and what was dropped are not all denials");
    let of_bar = report.cases.iter().find(|case| case.denied_percent == DENIED_PERCENT_OF_BAR);
    let is_within = |case: &Case| case.percent_of_machine <= COST_PERCENT_MAX && case.dropped_denials == 0;
    ensure!(of_bar.is_some_and(is_within), "the log costs more than {COST_PERCENT_MAX} % of the machine");
    Ok(())
}

/// With the log and without it in turns, a thousandth of a second each, so that whatever else the machine does is the same
/// for both.
fn case(args: &Args, load: &Load, denied_percent: u64) -> Result<Case> {
    let folder = tempfile::tempdir()?;
    let (ran, recorder) = load.logged(args, folder.path(), RATE, denied_percent, Logged::InTurns)?;
    let counts = recorder.counts();
    let [without, with] = ran.asking.map(|half| half.cpu.as_nanos() as f64 / half.decisions as f64);
    let behind = ran.behind.as_nanos() as f64 / ran.asking[1].decisions as f64;
    let percent_of_core = 100.0 * (with - without + behind) * RATE as f64 / 1e9;
    Ok(Case {
        denied_percent,
        per_second: ran.per_second(),
        cpu_ns_per_decision: without,
        cpu_ns_added_to_decision: with - without,
        cpu_ns_behind_decision: behind,
        percent_of_core,
        percent_of_machine: percent_of_core / machine::cores() as f64,
        written: Kind::ALL.iter().map(|kind| counts.written(*kind)).sum(),
        dropped_denials: counts.dropped(Kind::Denial),
        dropped_samples: counts.dropped(Kind::Sample),
    })
}

fn denials(args: &Args, load: &Load, rate: u64) -> Result<Rate> {
    let folder = tempfile::tempdir()?;
    let (ran, recorder) = load.logged(args, folder.path(), rate, 100, Logged::Always)?;
    let counts = recorder.counts();
    let written = counts.written(Kind::Denial);
    let bytes = std::fs::metadata(folder.path().join("decisions.db"))?.len();
    Ok(Rate {
        denials_per_second: rate,
        reached: ran.per_second(),
        denials: ran.decisions,
        written,
        dropped: counts.dropped(Kind::Denial),
        cpu_ns_per_denial: ran.cpu_ns(),
        bytes_per_denial: bytes as f64 / written.max(1) as f64,
    })
}

/// What is asked: keys that pass, and keys that do not.
struct Load {
    clock: Arc<SystemClock>,
    limiter: Limiter,
    passes: Gate,
    denies: Gate,
    keys: Vec<String>,
}

/// Which decisions are offered to the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Logged {
    Always,
    InTurns,
}

/// What a run took, all threads together.
struct Ran {
    decisions: u64,
    cpu: Duration,
    /// Of that, threads other than the one that decides.
    behind: Duration,
    wall: Duration,
    /// What the thread that decides took, without the log and with it.
    asking: [Half; 2],
}

#[derive(Clone, Copy, Default)]
struct Half {
    decisions: u64,
    cpu: Duration,
}

impl Ran {
    fn cpu_ns(&self) -> f64 {
        self.cpu.as_nanos() as f64 / self.decisions as f64
    }

    fn per_second(&self) -> u64 {
        (self.decisions as f64 / self.wall.as_secs_f64()) as u64
    }
}

impl Load {
    fn new() -> Result<Self> {
        let clock = Arc::new(SystemClock::new());
        let limiter = Limiter::builder()
            .memory_bytes(256 << 20)
            .limit("passes", Limit::gcra(1_000_000, Duration::from_secs(1))?)
            .limit("denies", Limit::gcra(1, Duration::from_hours(24))?)
            .clock(Arc::clone(&clock))
            .secret(Secret::from_bytes([3; 16]))
            .build()?;
        let (passes, denies) = (limiter.gate("passes")?, limiter.gate("denies")?);
        let keys: Vec<String> = (0..KEYS).map(|key| format!("user:{key}")).collect();
        for key in &keys {
            limiter.charge(denies.key(key));
        }
        Ok(Self { clock, limiter, passes, denies, keys })
    }

    /// A run with a log; all of it is written when this returns.
    fn logged(
        &self,
        args: &Args,
        folder: &std::path::Path,
        per_second: u64,
        denied_percent: u64,
        logged: Logged,
    ) -> Result<(Ran, Arc<Recorder>)> {
        let settings = Settings {
            threads: 1,
            sample_rate: args.sample,
            retention: Duration::from_hours(24),
            bytes_max: 1 << 34,
            region: "eu-west-1".to_owned(),
            node: "node-1".to_owned(),
            seed: 1,
        };
        let clock = Arc::clone(&self.clock);
        let log = Log::open(folder, settings, move || clock.now().wall_us() / 1_000)?;
        let recorder = Arc::clone(log.recorder());
        let before = (machine::process_cpu(), machine::thread_cpu());
        let mut ran = self.run(args.seconds, per_second, denied_percent, logged, &recorder);
        drop(log);
        ran.cpu = machine::process_cpu().saturating_sub(before.0);
        // Keeping the pace takes time too, and none of it is the log's.
        ran.behind = ran.cpu.saturating_sub(machine::thread_cpu().saturating_sub(before.1));
        Ok((ran, recorder))
    }

    fn run(
        &self,
        seconds: u64,
        per_second: u64,
        denied_percent: u64,
        logged: Logged,
        recorder: &Recorder,
    ) -> Ran {
        let started = machine::now();
        let mut asking = [Half::default(); 2];
        let mut decisions = 0;
        for beat in 0..seconds * BEATS_PER_SECOND {
            let is_logged = logged == Logged::Always || beat % 2 == 1;
            let recorder = is_logged.then_some(recorder);
            let cpu = machine::thread_cpu();
            for _ in 0..per_second / BEATS_PER_SECOND {
                self.decide(decisions, denied_percent, recorder);
                decisions += 1;
            }
            let half = &mut asking[usize::from(is_logged)];
            half.cpu += machine::thread_cpu().saturating_sub(cpu);
            half.decisions += per_second / BEATS_PER_SECOND;
            machine::sleep_until(started + Duration::from_micros((beat + 1) * 1_000_000 / BEATS_PER_SECOND));
        }
        let wall = machine::now().saturating_duration_since(started);
        Ran { decisions, cpu: Duration::ZERO, behind: Duration::ZERO, wall, asking }
    }

    /// One decision, taken down as a server does.
    fn decide(&self, at: u64, denied_percent: u64, recorder: Option<&Recorder>) {
        let gate = if at % 100 < denied_percent { &self.denies } else { &self.passes };
        // An odd factor visits all keys, in no order that a cache would know.
        let key = self.keys[(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize].as_str();
        let outcome = self.limiter.check(gate.key(key));
        let verdict = if outcome.is_allowed() { Verdict::Allowed } else { Verdict::Denied };
        let Some(recorder) = recorder else {
            std::hint::black_box(verdict);
            return;
        };
        if recorder.wants(0, verdict) {
            let limit = gate.limit();
            let entry = Entry {
                at_ms: self.clock.now().wall_us() / 1_000,
                tenant: "acme",
                surface: "check",
                key,
                cost: 1,
                verdict,
                rule: gate.name(),
                rule_version: 3,
                set_version: "0f6c1a9e52d17b40",
                replaced_by: "",
                limit: Terms {
                    amount: limit.amount(),
                    burst: limit.burst(),
                    period_ms: limit.period_us() / 1_000,
                },
                remaining: outcome.remaining(),
                retry_ms: outcome.retry_after().map(|wait| wait.as_millis() as u64),
                rung: "local",
            };
            let dimensions = [("user", &key["user:".len()..]), ("method", "POST"), ("path", "/v1/orders")];
            recorder.write(0, &entry, dimensions);
        }
    }
}

const _: () = assert!(KEYS == 1 << (64 - 44), "what is left of a product is the number of a key");

fn print(report: &Report) {
    println!("{} decisions a second, with the log and without it, on {} cores", RATE, report.cores);
    println!("denied %   ns each   added   behind   % of a core   % of the machine   written   dropped");
    for case in &report.cases {
        println!(
            "{:>8} {:>9.0} {:>7.0} {:>8.0} {:>13.1} {:>18.1} {:>9} {:>9}",
            case.denied_percent,
            case.cpu_ns_per_decision,
            case.cpu_ns_added_to_decision,
            case.cpu_ns_behind_decision,
            case.percent_of_core,
            case.percent_of_machine,
            case.written,
            case.dropped_denials + case.dropped_samples,
        );
    }
    println!("denials a second   reached   written   dropped   ns each, asked and logged   bytes each");
    for rate in &report.rates {
        println!(
            "{:>16} {:>9} {:>9} {:>9} {:>27.0} {:>12.1}",
            rate.denials_per_second,
            rate.reached,
            rate.written,
            rate.dropped,
            rate.cpu_ns_per_denial,
            rate.bytes_per_denial,
        );
    }
}
