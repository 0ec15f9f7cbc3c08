//! Worlds of several regions.

use clap::ArgMatches;
use comfy_table::Table;
use serde_json::{Value, json};
use tidegate_sim::{
    BoundReach, Kind, RegionSummary, RegionViolation, Size, region_scenario_of, run_regions, shrink_regions,
    sweep_regions,
};

use super::{BrokenPromise, US_PER_HOUR, ended, explain, figures, swept, to_json};
use crate::out::Reader;
use crate::{CommandResult, Failure, table};

/// One world, with all there is to see of it.
pub(super) fn one(matches: &ArgMatches, seed: u64, size: Size) -> CommandResult {
    let scenario = region_scenario_of(seed, size.length_us, size.requests);
    let report = run_regions(&scenario, None, matches.get_flag("trace"));
    if matches.get_flag("trace") {
        crate::out::print(report.trace.to_string().as_bytes())?;
    }
    if matches.get_flag("json") {
        say!(
            "{}",
            json!({
                "seed": seed,
                "scenario": scenario.to_string(),
                "requests": report.requests,
                "faults": report.faults,
                "isolations": report.isolations,
                "excess": report.reach.excess,
                "bound": report.reach.allowed,
                "reached": thousandths(report.reach.milli()),
                "violations": to_json(seed, &report.violations).collect::<Value>(),
                "trace_hash": format!("{:016x}", report.trace.hash()),
            })
        )?;
    } else {
        say!("seed {seed}: {scenario}")?;
        say!(
            "{} of {} requests passed, {} units above the limit; the bound is {} units ({} reached); trace \
             {:016x}",
            report.passed,
            report.requests,
            report.reach.excess,
            report.reach.allowed,
            percent(report.reach.milli()),
            report.trace.hash()
        )?;
        for violation in &report.violations {
            say!("broken: {violation}")?;
        }
    }
    Ok(ended(report.violations.is_empty()))
}

/// Many worlds, and the first that broke a promise.
pub(super) fn many(matches: &ArgMatches, size: Size) -> CommandResult {
    let summary = swept(matches, |seeds, threads, done| sweep_regions(seeds, size, threads, done));
    if matches.get_flag("json") {
        say!("{}", summed(&summary))?;
    } else {
        print(&summary)?;
    }
    let scenario_of = |seed| region_scenario_of(seed, size.length_us, size.requests);
    explain(&summary.broken, scenario_of, |scenario, violation| {
        let (smaller, report) = shrink_regions(scenario, None, violation);
        (smaller, report.violations, report.trace)
    });
    let loose = summary.loose();
    for (kind, milli) in &loose {
        let (algorithm, class) = (algorithm(*kind), kind.class.as_str());
        aside!(
            "{algorithm}, {class}: worlds reached only {} of the bound, so it is not shown to be tight",
            percent(*milli)
        );
    }
    Ok(ended(summary.broken.is_empty() && loose.is_empty()))
}

impl BrokenPromise for RegionViolation {
    fn promise(&self) -> &'static str {
        Self::promise(self)
    }
}

fn thousandths(milli: u64) -> f64 {
    milli as f64 / 1_000.0
}

fn percent(milli: u64) -> String {
    format!("{:.1} %", milli as f64 / 10.0)
}

fn summed(summary: &RegionSummary) -> Value {
    let reached: Value = summary.reached.iter().map(|(kind, reached)| reached_of(*kind, reached)).collect();
    json!({
        "seeds": summary.seeds,
        "region_hours": summary.simulated_us as f64 / US_PER_HOUR,
        "requests": summary.requests,
        "faults": summary.faults,
        "isolations": summary.isolations,
        "batches": summary.batches,
        "rated": summary.rated,
        "reached": reached,
        "violations": summary.broken.iter().flat_map(|(seed, all)| to_json(*seed, all)).collect::<Value>(),
        "trace_hash": format!("{:016x}", summary.trace_hash),
    })
}

/// The world that reached most of its bound, of its kind.
fn reached_of(kind: Kind, reached: &BoundReach) -> Value {
    json!({
        "algorithm": algorithm(Kind { is_fast: false, ..kind }),
        "fast": kind.is_fast,
        "class": kind.class.as_str(),
        "cuts": kind.cuts.as_str(),
        "worlds": reached.worlds,
        "seed": reached.seed,
        "excess": reached.reach.excess,
        "bound": reached.reach.allowed,
        "share": thousandths(reached.reach.milli()),
    })
}

fn algorithm(kind: Kind) -> &'static str {
    match (kind.is_window, kind.is_fast) {
        (true, _) => "sliding_window",
        (false, false) => "gcra",
        (false, true) => "gcra, fast",
    }
}

fn print(summary: &RegionSummary) -> Result<Reader, Failure> {
    let hours = summary.simulated_us as f64 / US_PER_HOUR;
    let rows = [
        ("worlds", summary.seeds.to_string()),
        ("region-hours", format!("{hours:.1}")),
        ("requests", summary.requests.to_string()),
        ("faults", summary.faults.to_string()),
        ("isolations of a region", summary.isolations.to_string()),
        ("batches merged", summary.batches.to_string()),
        ("worlds with a checked long-run rate", summary.rated.to_string()),
        ("trace", format!("{:016x}", summary.trace_hash)),
        ("worlds that broke a promise", summary.broken.len().to_string()),
    ];
    say!("{}\n\n{}", figures(rows), reached_table(summary))
}

/// How much of a printed bound was reached at most.
fn reached_table(summary: &RegionSummary) -> Table {
    let header = ["limit", "class", "cuts", "worlds", "bound", "excess", "reached", "seed"];
    let mut table = table::with_header(header);
    for (kind, BoundReach { worlds, seed, reach }) in &summary.reached {
        table.add_row([
            algorithm(*kind).to_owned(),
            kind.class.as_str().to_owned(),
            kind.cuts.as_str().to_owned(),
            worlds.to_string(),
            reach.allowed.to_string(),
            reach.excess.to_string(),
            percent(reach.milli()),
            seed.to_string(),
        ]);
    }
    table
}
