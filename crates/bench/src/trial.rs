//! A trial: one limiter in one case, in its own process, so that no contender's memory affects
//! another.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::contenders::{self, Contender, Entry};
use crate::fill::{self, FillResult};
use crate::machine;
use crate::measure::{Measurement, PACE, THREADS_MAX, measure};
use crate::stream::Stream;
use crate::workload::{Case, Workload};

#[derive(clap::Args)]
pub(crate) struct Args {
    #[arg(long)]
    pub(crate) case: Case,
    #[arg(long = "who")]
    pub(crate) contender: String,
    /// Fill for as long as it takes.
    #[arg(long)]
    pub(crate) full: bool,
}

/// The outcome of a trial, as its process reports it to its parent.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum TrialResult {
    /// Per variant.
    Ran(Vec<Findings>),
    LeftOut {
        reason: String,
    },
}

/// The findings of a trial for one variant.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Findings {
    /// `None` for a single key.
    pub(crate) bytes_per_key: Option<f64>,
    pub(crate) huge_page_bytes: u64,
    /// One thread first.
    pub(crate) measurements: Vec<Measurement>,
}

/// Runs a trial and prints its outcome as one line of JSON.
pub(crate) fn run(args: &Args) -> Result<()> {
    machine::offer_to_oom_killer();
    let entry =
        contenders::find(&args.contender).with_context(|| format!("no contender {}", args.contender))?;
    let outcome = attempt(entry, &args.case.workload(), args.full)?;
    println!("{}", serde_json::to_string(&outcome)?);
    Ok(())
}

fn attempt(entry: &Entry, workload: &Workload, full: bool) -> Result<TrialResult> {
    let resident_before = machine::resident_bytes()?;
    // Leaked: the process ends soon, and freeing millions of keys would only delay the next trial.
    let variants: &[Box<dyn Contender>] = (entry.make)(workload)?.leak();
    if entry.key_cost.is_some() {
        let filled = fill_all(entry, variants, workload, full)?;
        if filled.keys < workload.keys {
            return Ok(TrialResult::LeftOut { reason: too_slow(filled.estimate(workload.keys).as_secs()) });
        }
    }
    let grown = machine::resident_bytes()?.saturating_sub(resident_before);
    // Drawn after the fill, so that the fill starts early. A virtual machine returns freed memory
    // to its host within seconds. Memory that the previous trial freed is much faster to fill than
    // fresh memory.
    let stream = Stream::draw(workload)?;
    let huge_page_bytes = machine::huge_page_bytes()?;
    let bytes_per_key = (workload.keys > 1).then_some(grown as f64 / workload.keys as f64);
    let findings = variants.iter().map(|contender| {
        let run = |threads| measure(contender.as_ref(), &stream, workload.limits, threads, &PACE);
        let measurements = (1..=THREADS_MAX).map(run).collect::<Result<_>>()?;
        Ok(Findings { bytes_per_key, huge_page_bytes, measurements })
    });
    Ok(TrialResult::Ran(findings.collect::<Result<_>>()?))
}

fn fill_all(
    entry: &Entry,
    variants: &[Box<dyn Contender>],
    workload: &Workload,
    full: bool,
) -> Result<FillResult> {
    let contender = variants.first().context("an entry without variants")?.as_ref();
    let filled = fill::fill(contender, workload, entry.fill_budget(full))?;
    let (keys, seconds) = (filled.keys, filled.took.as_secs_f64());
    eprintln!("{}: {}: filled {keys} keys in {seconds:.1} s", workload.case, entry.contender());
    Ok(filled)
}

/// Why a contender that fills too slowly is left out.
pub(crate) fn too_slow(fill_seconds: u64) -> String {
    let budget = fill::BUDGET.as_secs();
    format!("filling takes about {fill_seconds} s, budget {budget} s; run with --full")
}
