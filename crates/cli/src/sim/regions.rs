//! Worlds of several regions.

use comfy_table::Table;
use serde_json::{Value, json};
use tidegate_sim::{BoundReach, Kind, Report, Summary};

use super::figures;
use crate::out::Reader;
use crate::{Failure, table};

/// The figures of a world, as JSON and in words.
pub(super) fn of_world(report: &Report) -> (Value, String) {
    let (excess, bound, milli) = (report.reach.excess, report.reach.allowed, report.reach.milli());
    let figures = json!({
        "isolations": report.isolations,
        "excess": excess,
        "bound": bound,
        "reached": thousandths(milli),
    });
    let reached = percent(milli);
    let words = format!("{excess} units above the limit; the bound is {bound} units ({reached} reached)");
    (figures, words)
}

/// Whether attacks reached enough of every bound. Prints the ones of which they did not.
pub(super) fn is_tight(summary: &Summary) -> bool {
    let loose = summary.loose();
    for (kind, milli) in &loose {
        let (algorithm, class) = (algorithm(*kind), kind.class.as_str());
        aside!(
            "{algorithm}, {class}: worlds reached only {} of the bound, so it is not shown to be tight",
            percent(*milli)
        );
    }
    loose.is_empty()
}

fn thousandths(milli: u64) -> f64 {
    milli as f64 / 1_000.0
}

fn percent(milli: u64) -> String {
    format!("{:.1} %", milli as f64 / 10.0)
}

pub(super) fn summed(summary: &Summary) -> Value {
    let reached: Value = summary.reached.iter().map(|(kind, reached)| reached_of(*kind, reached)).collect();
    json!({
        "isolations": summary.isolations,
        "batches": summary.batches,
        "rated": summary.rated,
        "reached": reached,
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

pub(super) fn print(summary: &Summary) -> Result<Reader, Failure> {
    let rows = [
        ("isolations of a region", summary.isolations.to_string()),
        ("batches merged", summary.batches.to_string()),
        ("worlds with a checked long-run rate", summary.rated.to_string()),
    ];
    say!("{}\n\n{}", figures(summary, rows), reached_table(summary))
}

/// How much of a printed bound was reached at most.
fn reached_table(summary: &Summary) -> Table {
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
