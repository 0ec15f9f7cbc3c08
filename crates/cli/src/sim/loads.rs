//! `tidegate sim --loads`: fleets without faults under even and uneven load, compared with a single
//! bucket.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use comfy_table::Table;
use serde_json::{Value, json};
use tidegate_sim::{FleetResult, LoadCase, LoadResult, load_cases};

use super::{ended, progress};
use crate::{CommandResult, table};

/// Runs every case on all cores, and prints one row for each limit on each fleet, or every case as
/// JSON.
pub(super) fn run(as_json: bool) -> CommandResult {
    let results = measure(&load_cases());
    let fleets = FleetResult::of(&results);
    if as_json {
        let cases: Value = results.iter().map(|(case, result)| case_json(case, result)).collect();
        say!("{cases}")?;
    } else {
        say!("{}", fleets_table(&fleets))?;
    }
    Ok(ended(fleets.iter().all(FleetResult::holds)))
}

fn measure(cases: &[LoadCase]) -> Vec<(LoadCase, LoadResult)> {
    let bar = progress(cases.len() as u64);
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(cases.len())));
    let work = || {
        while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = case.measure();
            if let Ok(mut results) = results.lock() {
                results.push((*case, result));
            }
            bar.inc(1);
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    bar.finish_and_clear();
    results.into_inner().unwrap_or_default()
}

fn case_json(case: &LoadCase, result: &LoadResult) -> Value {
    json!({
        "amount": case.amount, "period_s": case.period_s, "burst": case.burst,
        "nodes": case.nodes, "spread": case.spread_name, "load": case.load_tenths as f64 / 10.0,
        "cost_max": case.cost_max,
        "share": result.share, "denied": result.net_denials, "false_denials": result.false_denials,
        "waited": result.waited, "calls": result.calls, "violations": result.violations,
    })
}

fn fleets_table(fleets: &[FleetResult]) -> Table {
    let mut table = table::with_header([
        "limit",
        "burst",
        "costs",
        "nodes",
        "least share",
        "denied, load <= 1x",
        "of them > 3 % free",
        "waited",
        "calls per request",
        "broken",
        "",
    ]);
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    for fleet in fleets {
        let LoadCase { amount, period_s, burst, nodes, cost_max, .. } = fleet.case;
        table.add_row([
            format!("{amount} in {period_s} s"),
            burst.to_string(),
            if cost_max == 1 { "1".to_owned() } else { format!("1-{cost_max}") },
            nodes.to_string(),
            percent(fleet.share_least),
            percent(fleet.denied),
            percent(fleet.false_denials),
            percent(fleet.waited),
            format!("{:.3}", fleet.calls),
            fleet.violations.to_string(),
            if fleet.holds() { "" } else { "MISSED" }.to_owned(),
        ]);
    }
    table::align_right(&mut table, 1);
    table
}
