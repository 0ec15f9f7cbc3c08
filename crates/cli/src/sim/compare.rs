//! Rows of figures: known mistakes and who noticed them, the engine beside its model.

use std::process::ExitCode;

use comfy_table::{Table, presets};
use serde_json::{Value, json};
use tidegate_sim::{Bug, Case, Measured, Size, Violation, cases, catch};

use super::{aligned, ended, progress};

/// In how many worlds a known mistake is looked for.
const MUTANT_SEEDS: u64 = 2_000;

/// Worlds in which known mistakes are looked for are short: more of them are seen in the same time.
const MUTANT_SIZE: Size = Size { length_us: 300_000_000, requests: 3_000 };

/// Makes every known mistake, and tells who noticed.
pub(super) fn mutants(as_json: bool) -> ExitCode {
    let bar = progress(Bug::ALL.len() as u64);
    let found = Bug::ALL.map(|bug| {
        let caught = catch(bug, 0..MUTANT_SEEDS, MUTANT_SIZE);
        bar.inc(1);
        (bug, caught)
    });
    bar.finish_and_clear();
    if as_json {
        let rows: Value = found.iter().map(|(bug, caught)| told(*bug, caught.as_ref())).collect();
        println!("{rows}");
    } else {
        println!("{}", caught_table(&found));
    }
    ended(found.iter().all(|(_, caught)| caught.is_some()))
}

fn told(bug: Bug, caught: Option<&(u64, Violation)>) -> Value {
    json!({
        "mistake": bug.to_string(),
        "seed": caught.map(|(seed, _)| seed),
        "broken": caught.map(|(_, violation)| violation.promise()),
        "what": caught.map(|(_, violation)| violation.to_string()),
    })
}

fn caught_table(found: &[(Bug, Option<(u64, Violation)>)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["mistake", "seed", "broken", "what"]);
    for (bug, caught) in found {
        let row = match caught {
            Some((seed, violation)) => {
                [bug.to_string(), seed.to_string(), violation.promise().to_owned(), violation.to_string()]
            }
            None => [bug.to_string(), "-".to_owned(), "NOT NOTICED".to_owned(), String::new()],
        };
        table.add_row(row);
    }
    table
}

/// Runs the cases of the model with the engine.
pub(super) fn model(as_json: bool) -> ExitCode {
    let measured: Vec<(Case, Measured)> = cases().map(|case| (case, case.measure())).collect();
    if as_json {
        let rows: Value = measured.iter().map(|(case, measured)| compared(case, measured)).collect();
        println!("{rows}");
    } else {
        println!("{}", model_table(&measured));
    }
    ended(measured.iter().all(|(_, measured)| measured.violations == 0))
}

fn compared(case: &Case, measured: &Measured) -> Value {
    json!({
        "case": case.name,
        "admitted": measured.admitted, "model_admitted": case.admitted,
        "waited": measured.waited, "model_waited": case.waited,
        "updates": measured.updates, "model_updates": case.updates,
        "violations": measured.violations,
    })
}

fn model_table(measured: &[(Case, Measured)]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["case", "admitted", "model", "waited", "model", "updates per request", "model"]);
    let percent = |share: f64| format!("{:.2} %", share * 100.0);
    for (case, measured) in measured {
        table.add_row([
            case.name.to_owned(),
            percent(measured.admitted),
            percent(case.admitted),
            percent(measured.waited),
            percent(case.waited),
            format!("{:.2}", measured.updates),
            format!("{:.2}", case.updates),
        ]);
    }
    aligned(&mut table);
    table
}
