//! The cost of the decision log: the same decisions at the same rate, with the log and without it
//! in turns. Also the denials per second that the log takes before it loses one.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use rand::rngs::Xoshiro256PlusPlus as Random;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use tidegate::{Clock, Gate, Limit, Limiter, Secret, SystemClock};
use tidegate_load::wait_until;
use tidegate_record::{
    DecisionEntry, FLUSH_EVERY, LimitTerms, Log, LogSettings, RecordKind, RecordVerdict, Recorder,
};

use crate::machine;
use crate::measure::median;

/// Decisions per second at which the log may cost the deciding thread at most [`COST_PERCENT_MAX`]
/// of its throughput.
const RATE: u64 = 1_000_000;
const COST_PERCENT_MAX: f64 = 5.0;

/// Denials per second up to which, by the documentation, none is lost: with short records, and with
/// the longest.
const STATED_DENIALS: u64 = 100_000;
const STATED_LONG_DENIALS: u64 = 10_000;

/// Least percentage of a rate that the load must reach for a verdict on it.
const REACHED_PERCENT_MIN: u64 = 95;

/// Percentages of denied requests. The bar applies to all of them.
const DENIED_PERCENT: [u64; 3] = [0, 1, 10];

/// Ways in which denials arrive. With many workers each has a small buffer, and all denials may
/// reach one of them.
const FLOODS: [Flood; 4] = [
    Flood {
        workers: 1,
        record: Length::Short,
        rates: &[50_000, 100_000, 200_000, 400_000, 800_000, 1_600_000],
    },
    Flood { workers: MANY_WORKERS, record: Length::Short, rates: &[50_000, 100_000, 200_000, 400_000] },
    Flood { workers: 1, record: Length::Long, rates: &[5_000, 10_000, 20_000] },
    Flood { workers: MANY_WORKERS, record: Length::Long, rates: &[5_000, 10_000, 20_000] },
];

/// So many that each has the least memory that a worker has for its records.
const MANY_WORKERS: usize = 64;

/// Dimensions of a long record, and the bytes of each value. With their names they fill the space
/// that a record has for dimensions.
const LONG_DIMENSIONS: [&str; 4] = ["user", "path", "agent", "token"];
const LONG_VALUE_BYTES: usize = 240;

/// Bytes of the text from which long dimensions are cut, so that no two are alike. A log would
/// store equal ones at almost no cost.
const TEXT_BYTES: usize = 1 << 16;

/// Beats per second, which keep the pace. The decisions of one beat are a burst; shorter beats cost
/// more sleep.
const BEATS_PER_SECOND: u64 = 1_000;

/// Beats of a turn, with the log or without it. A turn is so long that the log's threads work only
/// in turns with the log. Their effect on caches and memory then counts as the log's.
const TURN_BEATS: u64 = 1_000;
/// First beats of a turn, which do not count: the log's threads finish the work of the turn before.
const SETTLING_BEATS: u64 = 300;

/// Factor on the length of cases that compare turns. The machine itself varies more from turn to
/// turn than the log costs.
const COMPARED_TIMES: u64 = 3;

/// Different keys, a power of two.
const KEYS: u64 = 1 << 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Seconds of each rate of denials. Comparisons with and without the log last three times as
    /// long, half of it with the log.
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u64).range(2..=3_600))]
    seconds: u64,
    /// The share of allowed decisions that is logged.
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
    /// Of the thread that decides, without the log: the median of turns.
    cpu_ns_per_decision: f64,
    /// CPU time that the log adds: the median of the excess of each turn with the log over the
    /// turns beside it.
    cpu_ns_added_to_decision: f64,
    /// So much less the thread decides in the same time.
    percent_of_throughput: f64,
    /// CPU time of the log's own threads for each decision, and in percent of a core at this rate.
    cpu_ns_behind_decision: f64,
    behind_percent_of_core: f64,
    written: u64,
    dropped_denials: u64,
    dropped_samples: u64,
}

/// How denials come.
#[derive(Clone, Copy)]
struct Flood {
    /// Workers of the server. All denials come to the last of them.
    workers: usize,
    record: Length,
    /// Denials a second that are tried one after the other.
    rates: &'static [u64],
}

/// The length of a decision record.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Length {
    /// Three short dimensions.
    Short,
    /// Dimensions of the largest size that a record keeps.
    Long,
}

impl Length {
    fn stated(self) -> u64 {
        match self {
            Self::Short => STATED_DENIALS,
            Self::Long => STATED_LONG_DENIALS,
        }
    }

    fn as_str(self) -> &'static str {
        match self {
            Self::Short => "short",
            Self::Long => "long",
        }
    }
}

/// One rate of denials.
#[derive(Serialize)]
struct Rate {
    workers: usize,
    record: Length,
    denials_per_second: u64,
    /// The rate reached; lower if the machine is too slow.
    reached: u64,
    denials: u64,
    written: u64,
    dropped: u64,
    /// CPU time of deciding and logging.
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
    for flood in FLOODS {
        for rate in flood.rates {
            let Flood { workers, record, .. } = flood;
            eprintln!(
                "record: {rate} denials a second, {} records, one of {workers} workers",
                record.as_str()
            );
            report.rates.push(denials(args, &load, flood, *rate)?);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    let problems = report.problems();
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    Ok(())
}

impl Report {
    /// The bars that were missed.
    fn problems(&self) -> Vec<String> {
        self.cases.iter().flat_map(Case::problems).chain(self.rates.iter().flat_map(Rate::problems)).collect()
    }
}

impl Case {
    fn problems(&self) -> Vec<String> {
        let Self { denied_percent, per_second, percent_of_throughput, dropped_denials, .. } = self;
        let checks = [
            (is_reached(*per_second, RATE), format!("only {per_second} decisions a second were made")),
            (*dropped_denials == 0, format!("{dropped_denials} denials are lost")),
            (
                *percent_of_throughput <= COST_PERCENT_MAX,
                format!(
                    "the log costs {percent_of_throughput:.1} % of throughput, more than {COST_PERCENT_MAX} %"
                ),
            ),
        ];
        failed_checks(&format!("{denied_percent} % denied"), checks)
    }
}

impl Rate {
    fn problems(&self) -> Vec<String> {
        let Self { workers, record, denials_per_second, reached, denials, written, dropped, .. } = self;
        let stated = record.stated();
        let is_stated = *denials_per_second <= stated;
        let checks = [
            (
                written + dropped == *denials,
                format!("{written} written and {dropped} lost are not all {denials}"),
            ),
            (!is_stated || *dropped == 0, format!("{dropped} are lost, and none may be up to {stated}")),
            (!is_stated || is_reached(*reached, *denials_per_second), format!("only {reached} were made")),
        ];
        let of = format!("{denials_per_second} denials a second, {}, {workers} workers", record.as_str());
        failed_checks(&of, checks)
    }
}

fn is_reached(reached: u64, rate: u64) -> bool {
    reached * 100 >= rate * REACHED_PERCENT_MIN
}

fn failed_checks<const N: usize>(of: &str, checks: [(bool, String); N]) -> Vec<String> {
    checks.into_iter().filter(|(holds, _)| !holds).map(|(_, problem)| format!("{of}: {problem}")).collect()
}

/// Runs with the log and without it in turns, so that other work of the machine affects both alike.
fn case(args: &Args, load: &Load, denied_percent: u64) -> Result<Case> {
    let folder = tempfile::tempdir()?;
    let asking = RunPlan {
        per_second: RATE,
        denied_percent,
        workers: 1,
        record: Length::Short,
        logged: LogMode::InTurns,
    };
    let (ran, recorder) = load.logged(args, COMPARED_TIMES * args.seconds, folder.path(), asking)?;
    let counts = recorder.counts();
    let behind = ran.behind.as_nanos() as f64 / ran.logged as f64;
    let (added, without) = (added(&ran.turns), median(ran.turns[0].clone()));
    Ok(Case {
        denied_percent,
        per_second: ran.per_second(),
        cpu_ns_per_decision: without,
        cpu_ns_added_to_decision: added,
        percent_of_throughput: 100.0 * added / (without + added),
        cpu_ns_behind_decision: behind,
        behind_percent_of_core: 100.0 * behind * RATE as f64 / 1e9,
        written: RecordKind::ALL.iter().map(|kind| counts.written(*kind)).sum(),
        dropped_denials: counts.dropped(RecordKind::Denial),
        dropped_samples: counts.dropped(RecordKind::Sample),
    })
}

/// Returns the median excess of a turn with the log over the turns without it before and after. The
/// machine is faster in some minutes than in others, and sometimes slow for a second. Neither
/// counts as the log's.
fn added([without, with]: &[Vec<f64>; 2]) -> f64 {
    let beside = |at: usize| {
        let turns = without.get(at..).unwrap_or_default();
        let turns = &turns[..turns.len().min(2)];
        turns.iter().sum::<f64>() / turns.len() as f64
    };
    median(with.iter().enumerate().map(|(at, turn)| turn - beside(at)).collect())
}

fn denials(args: &Args, load: &Load, flood: Flood, rate: u64) -> Result<Rate> {
    let Flood { workers, record, .. } = flood;
    let folder = tempfile::tempdir()?;
    let asking = RunPlan { per_second: rate, denied_percent: 100, workers, record, logged: LogMode::Always };
    let (ran, recorder) = load.logged(args, args.seconds, folder.path(), asking)?;
    let counts = recorder.counts();
    let written = counts.written(RecordKind::Denial);
    let bytes = std::fs::metadata(folder.path().join("decisions.db"))?.len();
    Ok(Rate {
        workers,
        record,
        denials_per_second: rate,
        reached: ran.per_second(),
        denials: ran.decisions,
        written,
        dropped: counts.dropped(RecordKind::Denial),
        cpu_ns_per_denial: ran.cpu_ns(),
        bytes_per_denial: bytes as f64 / written.max(1) as f64,
    })
}

/// The load: keys that pass, and keys that are denied.
struct Load {
    clock: Arc<SystemClock>,
    limiter: Limiter,
    passes: Gate,
    denies: Gate,
    keys: Vec<String>,
    /// The text from which long dimensions are cut.
    text: String,
}

/// The parameters of a run.
#[derive(Clone, Copy)]
struct RunPlan {
    per_second: u64,
    denied_percent: u64,
    /// The last of them decides.
    workers: usize,
    record: Length,
    logged: LogMode,
}

/// The decisions that are offered to the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LogMode {
    Always,
    InTurns,
}

/// The cost of a run, all threads together.
struct RunCost {
    decisions: u64,
    cpu: Duration,
    /// Of that, threads other than the one that decides.
    behind: Duration,
    wall: Duration,
    /// Decisions that were offered to the log.
    logged: u64,
    /// CPU time of the thread that decides for each decision, in nanoseconds, turn by turn, without
    /// the log and with it.
    turns: [Vec<f64>; 2],
}

impl RunCost {
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
        let mut random = Random::seed_from_u64(7);
        let text = (0..TEXT_BYTES).map(|_| char::from(random.random_range(b'a'..=b'z'))).collect();
        Ok(Self { clock, limiter, passes, denies, keys, text })
    }

    /// A run with a log; all of it is written when this returns.
    fn logged(
        &self,
        args: &Args,
        seconds: u64,
        folder: &std::path::Path,
        asking: RunPlan,
    ) -> Result<(RunCost, Arc<Recorder>)> {
        let settings = LogSettings {
            threads: asking.workers,
            sample_rate: args.sample,
            retention: Duration::from_hours(24),
            bytes_max: 1 << 34,
            region: "eu-west-1".to_owned(),
            node: "node-1".to_owned(),
            seed: 1,
            otlp: None,
            flush_every: FLUSH_EVERY,
        };
        let clock = Arc::clone(&self.clock);
        let log = Log::open(folder, settings, move || clock.now().wall_us() / 1_000)?;
        let recorder = Arc::clone(log.recorder());
        let before = (machine::process_cpu(), machine::thread_cpu());
        let mut ran = self.run(seconds, asking, &recorder);
        drop(log);
        ran.cpu = machine::process_cpu().saturating_sub(before.0);
        // The CPU time that keeps the pace is left out too: it is not the log's.
        ran.behind = ran.cpu.saturating_sub(machine::thread_cpu().saturating_sub(before.1));
        Ok((ran, recorder))
    }

    fn run(&self, seconds: u64, asking: RunPlan, recorder: &Recorder) -> RunCost {
        let started = machine::now();
        let each = asking.per_second / BEATS_PER_SECOND;
        let mut turns = [Vec::new(), Vec::new()];
        let (mut decisions, mut offered, mut turn) = (0, 0, Duration::ZERO);
        for beat in 0..seconds * BEATS_PER_SECOND {
            let is_logged = asking.logged == LogMode::Always || beat / TURN_BEATS % 2 == 1;
            let recorder = is_logged.then_some(recorder);
            let cpu = machine::thread_cpu();
            for _ in 0..each {
                self.decide(decisions, asking, recorder);
                decisions += 1;
            }
            let took = machine::thread_cpu().saturating_sub(cpu);
            offered += if is_logged { each } else { 0 };
            match beat % TURN_BEATS {
                ..SETTLING_BEATS => turn = Duration::ZERO,
                _ => turn += took,
            }
            if beat % TURN_BEATS == TURN_BEATS - 1 {
                let counted = (TURN_BEATS - SETTLING_BEATS) * each;
                turns[usize::from(is_logged)].push(turn.as_nanos() as f64 / counted as f64);
            }
            wait_until(started + Duration::from_micros((beat + 1) * 1_000_000 / BEATS_PER_SECOND));
        }
        let wall = machine::now().saturating_duration_since(started);
        RunCost { decisions, cpu: Duration::ZERO, behind: Duration::ZERO, wall, logged: offered, turns }
    }

    /// Makes one decision, and logs it as a server does.
    fn decide(&self, at: u64, asking: RunPlan, recorder: Option<&Recorder>) {
        let gate = if at % 100 < asking.denied_percent { &self.denies } else { &self.passes };
        // An odd factor visits all keys, in no order that a cache would know.
        let key = self.keys[(at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 44) as usize].as_str();
        let outcome = self.limiter.check(gate.key(key));
        let verdict = if outcome.is_allowed() { RecordVerdict::Allowed } else { RecordVerdict::Denied };
        let Some(recorder) = recorder else {
            std::hint::black_box(verdict);
            return;
        };
        let worker = asking.workers - 1;
        if recorder.wants(worker, verdict) {
            let limit = gate.limit();
            let entry = DecisionEntry {
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
                limit: LimitTerms {
                    amount: limit.amount(),
                    burst: limit.burst(),
                    period_ms: limit.period_us() / 1_000,
                },
                remaining: outcome.remaining(),
                retry_ms: outcome.retry_after().map(|wait| wait.as_millis() as u64),
                source: "local",
                reason: "limit",
                until_ms: None,
            };
            match asking.record {
                Length::Short => {
                    let user = &key["user:".len()..];
                    recorder.write(
                        worker,
                        &entry,
                        [("user", user), ("method", "POST"), ("path", "/v1/orders")],
                    );
                }
                Length::Long => recorder.write(worker, &entry, self.long_dimensions(at)),
            }
        }
    }

    /// Returns dimensions of as many bytes as a record keeps. They differ from those of the next
    /// decisions.
    fn long_dimensions(&self, at: u64) -> impl Iterator<Item = (&str, &str)> {
        let places = TEXT_BYTES - LONG_VALUE_BYTES * LONG_DIMENSIONS.len();
        let start = (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % places;
        let values = (0..).map(move |number| {
            let from = start + number * LONG_VALUE_BYTES;
            &self.text[from..from + LONG_VALUE_BYTES]
        });
        LONG_DIMENSIONS.into_iter().zip(values)
    }
}

const _: () = assert!(KEYS == 1 << (64 - 44), "the remaining bits of a product are the number of a key");

fn print(report: &Report) {
    println!("{} decisions a second, with the log and without it, on {} cores", RATE, report.cores);
    println!(
        "denied %   reached   ns each   added   % of throughput   behind   % of a core   written   dropped"
    );
    for case in &report.cases {
        println!(
            "{:>8} {:>9} {:>9.0} {:>7.0} {:>17.1} {:>8.0} {:>13.1} {:>9} {:>9}",
            case.denied_percent,
            case.per_second,
            case.cpu_ns_per_decision,
            case.cpu_ns_added_to_decision,
            case.percent_of_throughput,
            case.cpu_ns_behind_decision,
            case.behind_percent_of_core,
            case.written,
            case.dropped_denials + case.dropped_samples,
        );
    }
    println!(
        "workers   records   denials a second   reached   written   dropped   ns each, check and log   bytes \
         each"
    );
    for rate in &report.rates {
        println!(
            "{:>7} {:>9} {:>18} {:>9} {:>9} {:>9} {:>27.0} {:>12.1}",
            rate.workers,
            rate.record.as_str(),
            rate.denials_per_second,
            rate.reached,
            rate.written,
            rate.dropped,
            rate.cpu_ns_per_denial,
            rate.bytes_per_denial,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rate(denials_per_second: u64, reached: u64, dropped: u64) -> Rate {
        Rate {
            workers: 1,
            record: Length::Short,
            denials_per_second,
            reached,
            denials: 1_000,
            written: 1_000 - dropped,
            dropped,
            cpu_ns_per_denial: 0.0,
            bytes_per_denial: 0.0,
        }
    }

    fn case(percent_of_throughput: f64, per_second: u64, dropped_denials: u64) -> Case {
        Case {
            denied_percent: 1,
            per_second,
            cpu_ns_per_decision: 0.0,
            cpu_ns_added_to_decision: 0.0,
            percent_of_throughput,
            cpu_ns_behind_decision: 0.0,
            behind_percent_of_core: 0.0,
            written: 0,
            dropped_denials,
            dropped_samples: 7,
        }
    }

    #[test]
    fn record_loss_within_the_stated_rate_is_a_problem() {
        assert_eq!(rate(STATED_DENIALS, STATED_DENIALS, 0).problems(), [""; 0]);
        assert_eq!(rate(STATED_DENIALS, STATED_DENIALS, 1).problems().len(), 1);
        assert_eq!(
            rate(STATED_DENIALS, STATED_DENIALS / 2, 0).problems().len(),
            1,
            "the stated rate was not reached"
        );
        assert_eq!(
            rate(2 * STATED_DENIALS, STATED_DENIALS, 1).problems(),
            [""; 0],
            "a loss above the stated rate is only counted"
        );
        let long = |rate: Rate| Rate { record: Length::Long, ..rate };
        assert_eq!(
            long(rate(STATED_DENIALS, STATED_DENIALS, 1)).problems(),
            [""; 0],
            "above the stated rate"
        );
        assert_eq!(long(rate(STATED_LONG_DENIALS, STATED_LONG_DENIALS, 1)).problems().len(), 1);
        let uncounted = Rate { written: 998, ..rate(2 * STATED_DENIALS, STATED_DENIALS, 1) };
        assert_eq!(uncounted.problems().len(), 1);
    }

    #[test]
    fn every_way_in_which_denials_come_is_tried_at_its_stated_rate() {
        for workers in [1, MANY_WORKERS] {
            for record in [Length::Short, Length::Long] {
                let mut floods =
                    FLOODS.iter().filter(|flood| flood.workers == workers && flood.record == record);
                assert!(floods.any(|flood| flood.rates.contains(&record.stated())));
            }
        }
    }

    #[test]
    fn a_turn_is_compared_with_those_beside_it() {
        // The machine gets slower by 10 with each turn, and is stopped once.
        let (without, with) =
            (vec![100.0, 120.0, 140.0, 160.0, 180.0], vec![113.0, 133.0, 950.0, 173.0, 183.0]);
        assert!((added(&[without, with]) - 3.0).abs() < 1e-9);
    }

    #[test]
    fn logging_cost_above_the_bar_is_a_problem() {
        assert_eq!(case(COST_PERCENT_MAX, RATE, 0).problems(), [""; 0]);
        for missed in [case(5.1, RATE, 0), case(1.0, RATE / 2, 0), case(1.0, RATE, 1)] {
            assert_eq!(missed.problems().len(), 1);
        }
    }
}
