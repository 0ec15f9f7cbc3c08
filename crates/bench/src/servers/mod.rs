//! `servers`: servers beside each other on loopback, in operations per second of the server's CPU
//! time.
//!
//! The load comes from third-party programs where they exist (redis-benchmark, wrk). Each runs in
//! its own process, so that only the server's CPU time is counted.

mod case;
mod crowd;
pub(crate) mod grpc;
mod noop;
mod peers;
mod process;
mod redis;
mod report;
mod wrk;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use self::case::{Case, Contestant, Loads};
use self::process::Server;

pub(crate) use self::peers::tidegate;

/// Connections of every load.
const CONNECTIONS: usize = 50;
/// Keys to draw from.
const KEYS: u64 = 1_000_000;
/// A limit that a key hardly reaches: the benchmark measures the path of a request that passes.
const LIMIT: u64 = 100;
const PERIOD: Duration = Duration::from_mins(1);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run one case only; all of them otherwise.
    #[arg(long, value_name = "NAME")]
    case: Option<Case>,
    /// Run one server only, in the cases it takes part in.
    #[arg(long = "who", value_name = "NAME")]
    contender: Option<Contestant>,
    /// How long each row is measured.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=300))]
    seconds: u64,
    /// Measure this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE")]
    tidegate: Option<PathBuf>,
    /// Print one JSON array of rows instead of tables.
    #[arg(long)]
    json: bool,
    #[command(subcommand)]
    part: Option<Part>,
}

/// Parts of a run that need a process of their own.
#[derive(Subcommand)]
enum Part {
    /// The cost of many idle clients and some slow ones to the others.
    Crowd(crowd::Args),
    /// A server that decides nothing.
    #[command(hide = true)]
    Noop(noop::Args),
    /// A load over gRPC.
    #[command(hide = true)]
    GrpcLoad(grpc::Args),
}

/// The figures of a load.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    operations: f64,
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
}

impl Load {
    /// Leaves out shed answers. The latencies still include them.
    fn without(self, shed: u64) -> Result<Self> {
        let decided = self.operations - shed as f64;
        ensure!(decided > 0.0, "all of {} answers were shed: the machine is overloaded", self.operations);
        let per_second = self.per_second * (decided / self.operations);
        Ok(Self { operations: decided, per_second, ..self })
    }
}

/// One server in one case, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
struct Row {
    case: &'static str,
    contender: &'static str,
    #[serde(flatten)]
    result: CaseResult,
}

/// The outcome of a row.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
enum CaseResult {
    Figures(Figures),
    /// The reason why there are no figures.
    Failed {
        failed: String,
    },
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Figures {
    ops_per_cpu_s: f64,
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
    /// Shed answers, which the rates leave out.
    shed: u64,
}

impl Row {
    fn figures(&self) -> Option<Figures> {
        match self.result {
            CaseResult::Figures(figures) => Some(figures),
            CaseResult::Failed { .. } => None,
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    match &args.part {
        Some(Part::Crowd(args)) => crowd::run(args),
        Some(Part::Noop(args)) => noop::run(args),
        Some(Part::GrpcLoad(args)) => grpc::run(args),
        None => run_cases(args),
    }
}

fn run_cases(args: &Args) -> Result<()> {
    let cases = args.case.as_ref().map_or_else(Case::value_variants, std::slice::from_ref);
    let mut rows = Vec::new();
    for &case in cases {
        for &contender in
            case.contenders().iter().filter(|contender| args.contender.is_none_or(|only| only == **contender))
        {
            eprintln!("{}: {} ({} s)", case.name(), contender.name(), args.seconds);
            // When one fails, the others are still worth seeing.
            let result = run_row(args, case, contender).map_or_else(
                |error| CaseResult::Failed { failed: format!("{error:#}") },
                CaseResult::Figures,
            );
            rows.push(Row { case: case.name(), contender: contender.name(), result });
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        report::print(&rows);
    }
    let failed = rows.iter().filter(|row| row.figures().is_none()).count();
    ensure!(failed == 0, "{failed} of {} rows failed", rows.len());
    Ok(())
}

/// Starts the server, lets it warm up, and counts the CPU time it uses while the load runs.
fn run_row(args: &Args, case: Case, contender: Contestant) -> Result<Figures> {
    let server = peers::start(case, contender, args.tidegate.as_deref())?;
    let load = case.load(contender, server.port())?;
    let warm = load.warm_up().context("the warm-up")?;
    let found = run_load(&server, load.as_ref(), &warm, Duration::from_secs(args.seconds))?;
    Ok(Figures {
        ops_per_cpu_s: found.load.operations / found.cpu.as_secs_f64(),
        per_second: found.load.per_second,
        p50_us: found.load.p50_us,
        p99_us: found.load.p99_us,
        shed: found.shed,
    })
}

/// The figures of a load, and its cost to the server.
struct LoadCost {
    /// Without shed answers.
    load: Load,
    shed: u64,
    cpu: Duration,
}

/// Puts a load on a server. Reading the shed count is not part of the load, so the CPU time is read
/// inside.
fn run_load(server: &Server, load: &dyn Loads, warm: &Load, time: Duration) -> Result<LoadCost> {
    let shed_before = server.shed()?;
    let cpu_before = server.cpu_time()?;
    let ran = load.run(warm, time)?;
    let cpu = server.cpu_time()?.saturating_sub(cpu_before);
    let shed = server.shed()?.saturating_sub(shed_before);
    Ok(LoadCost { load: ran.without(shed)?, shed, cpu })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOAD: Load = Load { operations: 1_000.0, per_second: 100.0, p50_us: 1.0, p99_us: 2.0 };

    #[test]
    fn shed_requests_are_not_operations() {
        let load = LOAD.without(250).expect("most were decided");
        assert!((load.operations - 750.0).abs() < 1e-9 && (load.per_second - 75.0).abs() < 1e-9, "{load:?}");
        assert!(LOAD.without(1_000).is_err());
    }

    #[test]
    fn failed_row_has_an_error_and_no_figures() {
        let figures = Figures { ops_per_cpu_s: 1.0, per_second: 2.0, p50_us: 3.0, p99_us: 4.0, shed: 5 };
        let row =
            |result| serde_json::to_value(Row { case: "http", contender: "tidegate", result }).expect("JSON");
        assert_eq!(
            row(CaseResult::Failed { failed: "no wrk".to_owned() }),
            serde_json::json!({"case": "http", "contender": "tidegate", "failed": "no wrk"})
        );
        let measured = row(CaseResult::Figures(figures));
        assert_eq!((&measured["contender"], &measured["shed"]), (&"tidegate".into(), &5.into()));
        assert!(measured.get("failed").is_none(), "{measured}");
    }
}
