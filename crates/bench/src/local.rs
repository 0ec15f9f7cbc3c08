//! `local`: starts a trial per contender and case, and prints the findings.

use std::env;
use std::process::{Command, Stdio};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde::Serialize;

use crate::contenders::{self, Entry, Variant};
use crate::trial::{self, Findings, TrialResult};
use crate::workload::{Case, Workload};
use crate::{machine, pieces, table};

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Run one case only; all of them otherwise.
    #[arg(long, value_name = "NAME")]
    case: Option<Case>,
    /// Print one JSON array of measurements instead of tables.
    #[arg(long)]
    json: bool,
    /// Also run contenders with keys that take long to fill.
    #[arg(long)]
    full: bool,
}

/// A variant that ran in a case.
pub(crate) struct Finisher {
    pub(crate) variant: &'static Variant,
    pub(crate) findings: Findings,
}

/// One measurement, as `--json` prints it.
#[derive(Serialize)]
struct Row {
    case: &'static str,
    contender: &'static str,
    keys: u64,
    limits: usize,
    threads: usize,
    cpu_ns: f64,
    per_second: f64,
    bytes_per_key: Option<f64>,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let cases = args.case.as_ref().map_or_else(Case::value_variants, std::slice::from_ref);
    let mut rows = Vec::new();
    for &case in cases {
        let workload = case.workload();
        let finishers = run_case(case, args.full)?;
        if args.json {
            rows.extend(finishers.iter().flat_map(|finisher| rows_of(&workload, finisher)));
        } else {
            table::print(&workload, &finishers, &pieces::measure_pieces(&workload)?);
        }
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&rows)?);
    }
    Ok(())
}

fn run_case(case: Case, full: bool) -> Result<Vec<Finisher>> {
    let workload = case.workload();
    let mut finishers = Vec::new();
    for entry in contenders::ALL {
        let outcome = match refusal(entry, &workload, full)? {
            Some(reason) => TrialResult::LeftOut { reason },
            None => start_trial(case, entry, full)?,
        };
        match outcome {
            TrialResult::Ran(findings) => {
                let variants = entry.variants.iter().zip(findings);
                finishers.extend(variants.map(|(variant, findings)| Finisher { variant, findings }));
            }
            TrialResult::LeftOut { reason } => {
                eprintln!("excluded: {} at {} keys: {reason}", entry.contender(), workload.keys_short());
            }
        }
    }
    Ok(finishers)
}

/// Returns the reason to skip a trial, if there is one.
fn refusal(entry: &Entry, workload: &Workload, full: bool) -> Result<Option<String>> {
    let Some(cost) = &entry.key_cost else { return Ok(None) };
    let (bytes, available) = (cost.bytes * workload.keys, machine::available_bytes()?);
    if bytes > available {
        let (bytes, available) = (gigabytes(bytes), gigabytes(available));
        return Ok(Some(format!("would need about {bytes:.0} GB, {available:.0} GB available")));
    }
    let fill_seconds = cost.fill_ns * workload.keys / 1_000_000_000;
    let too_slow = entry.fill_budget(full).is_some_and(|budget| fill_seconds > budget.as_secs());
    Ok(too_slow.then(|| trial::too_slow(fill_seconds)))
}

fn gigabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e9
}

/// Runs one trial in a new process of this program, and returns its outcome.
fn start_trial(case: Case, entry: &Entry, full: bool) -> Result<TrialResult> {
    let name = case.workload().case;
    eprintln!("{name}: {}", entry.contender());
    let mut command = Command::new(env::current_exe().context("the path of this program")?);
    command.args(["trial", "--case", name, "--who", entry.contender()]).args(full.then_some("--full"));
    let output = command.stderr(Stdio::inherit()).output().context("starting a trial")?;
    if !output.status.success() {
        return Ok(TrialResult::LeftOut { reason: format!("its process ended with {}", output.status) });
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("the outcome of {}", entry.contender()))
}

fn rows_of(workload: &Workload, finisher: &Finisher) -> impl Iterator<Item = Row> {
    let &Workload { case, keys, limits, .. } = workload;
    let (contender, bytes_per_key) = (finisher.variant.contender, finisher.findings.bytes_per_key);
    finisher.findings.measurements.iter().map(move |measurement| {
        let (threads, cpu_ns, per_second) = (measurement.threads, measurement.cpu_ns, measurement.per_second);
        Row { case, contender, keys, limits, threads, cpu_ns, per_second, bytes_per_key }
    })
}
