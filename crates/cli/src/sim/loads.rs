//! `tidegate sim --loads`: fleets without faults under even and uneven load, compared with a single
//! bucket.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use comfy_table::Table;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use tidegate_sim::{FleetResult, LoadCase, LoadResult, load_cases};

use super::{ended, progress};
use crate::{CommandResult, table};

/// Without a terminal, one line of progress for so many percent of all requests.
const PERCENT_PER_LINE: u64 = 5;

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

/// Measures all cases on all cores. The longest ones come first, so that no core ends with one of
/// them while the others are idle.
fn measure(cases: &[LoadCase]) -> Vec<(LoadCase, LoadResult)> {
    let mut in_order = cases.to_vec();
    in_order.sort_by_key(|case| std::cmp::Reverse(case.requests()));
    let progress = Progress::new(&in_order);
    let (next, results) = (AtomicUsize::new(0), Mutex::new(Vec::with_capacity(cases.len())));
    let work = || {
        while let Some(case) = in_order.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = case.measure();
            if let Ok(mut results) = results.lock() {
                results.push((*case, result));
                progress.note(case, results.len());
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    progress.bar.finish_and_clear();
    let mut results = results.into_inner().unwrap_or_default();
    results.sort_by_key(|(case, _)| cases.iter().position(|other| other == case));
    results
}

/// The progress of a run by its requests, because a case has between a hundred and 26 million of
/// them: a bar on a terminal, and otherwise a line for each [`PERCENT_PER_LINE`].
struct Progress {
    bar: ProgressBar,
    cases: usize,
    requests: u64,
}

impl Progress {
    fn new(cases: &[LoadCase]) -> Self {
        let requests = cases.iter().map(LoadCase::requests).sum();
        Self { bar: progress(requests, "requests"), cases: cases.len(), requests }
    }

    /// Notes a measured case, the last of `measured`. One thread at a time may call this.
    fn note(&self, case: &LoadCase, measured: usize) {
        let lines = |requests: u64| requests * 100 / PERCENT_PER_LINE / self.requests.max(1);
        let before = self.bar.position();
        self.bar.inc(case.requests());
        let after = self.bar.position();
        if self.bar.is_hidden() && lines(after) > lines(before) {
            let percent = after * 100 / self.requests.max(1);
            let (cases, seconds) = (self.cases, self.bar.elapsed().as_secs());
            aside!("{percent} % of the requests, {measured} of {cases} cases, after {seconds} s");
        }
    }
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
        "most denied, load <= 1x",
        "denied with > 3 % free",
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
            percent(fleet.denied_most),
            percent(fleet.false_denials_most),
            percent(fleet.waited),
            format!("{:.3}", fleet.calls),
            fleet.violations.to_string(),
            if fleet.holds() { "" } else { "MISSED" }.to_owned(),
        ]);
    }
    table::align_right(&mut table, 1);
    table
}
