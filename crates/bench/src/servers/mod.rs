//! `servers`: servers beside each other on loopback, in operations per second of the server's CPU time.
//!
//! The load comes from programs of others where there are any (redis-benchmark, wrk), each in a process of its own, so
//! that only the server's CPU time is counted.

mod case;
mod crowd;
mod grpc;
mod noop;
mod peers;
mod process;
mod redis;
mod report;
mod wrk;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use self::case::{Case, Who};

/// Connections of every load.
const CONNECTIONS: usize = 50;
/// Keys to draw from.
const KEYS: u64 = 1_000_000;
/// A limit that a key hardly reaches: what is measured is the way of a request that passes.
const LIMIT: u64 = 100;
const PERIOD: Duration = Duration::from_mins(1);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run one case only; all of them otherwise.
    #[arg(long, value_name = "NAME")]
    case: Option<Case>,
    /// Run one server only, in the cases it takes part in.
    #[arg(long, value_name = "NAME")]
    who: Option<Who>,
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
    /// What many idle clients and some slow ones cost the others.
    Crowd(crowd::Args),
    /// A server that decides nothing.
    #[command(hide = true)]
    Noop(noop::Args),
    /// A load over gRPC.
    #[command(hide = true)]
    GrpcLoad(grpc::Args),
}

/// What a load came to.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Load {
    operations: f64,
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
}

/// One measurement, as `--json` prints it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    case: &'static str,
    who: &'static str,
    ops_per_cpu_s: f64,
    per_second: f64,
    p50_us: f64,
    p99_us: f64,
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
        for &who in case.contenders().iter().filter(|who| args.who.is_none_or(|only| only == **who)) {
            eprintln!("{}: {} ({} s)", case.name(), who.name(), args.seconds);
            match run_row(args, case, who) {
                Ok(row) => rows.push(row),
                // The others are still worth seeing; what is missing is said here and not in the table.
                Err(error) => eprintln!("left out: {} in {}: {error:#}", who.name(), case.name()),
            }
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    } else {
        report::print(&rows);
    }
    Ok(())
}

/// Starts the server, lets it warm up, and counts the CPU time it uses while the load runs.
fn run_row(args: &Args, case: Case, who: Who) -> Result<Row> {
    let server = peers::start(case, who, args.tidegate.as_deref())?;
    let load = case.load(who, server.port())?;
    let warm = load.warm_up().context("the warm-up")?;
    let before = server.cpu_time()?;
    let found = load.run(&warm, Duration::from_secs(args.seconds))?;
    let cpu = server.cpu_time()?.saturating_sub(before);
    Ok(Row {
        case: case.name(),
        who: who.name(),
        ops_per_cpu_s: found.operations / cpu.as_secs_f64(),
        per_second: found.per_second,
        p50_us: found.p50_us,
        p99_us: found.p99_us,
    })
}
