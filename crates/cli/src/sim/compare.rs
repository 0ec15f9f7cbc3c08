//! Tables: known mistakes and the worlds that noticed them; the engine beside its model.

use comfy_table::Table;
use serde_json::{Value, json};
use tidegate::{Clock as _, SystemClock};
use tidegate_sim::{Bug, Case, ModelMeasurement, Size, Violation, Worlds, cases, catch};

use super::{ended, progress};
use crate::{CommandResult, table};

/// The number of worlds in which a known mistake is searched for.
const MUTANT_SEEDS: u64 = 6_000;

/// How long it may take until a known mistake is noticed, in seconds.
const NOTICED_SECONDS_MAX: f64 = 60.0;

/// Worlds in which known mistakes are looked for are short: more of them are seen in the same time.
const MUTANT_SIZE: Size = Size { length_us: 300_000_000, requests: 3_000 };

/// The first world that noticed a mistake. A world of uneven nodes at half load has no seed.
struct CaughtBug {
    seed: Option<u64>,
    promise: &'static str,
    what: String,
}

impl CaughtBug {
    fn new(seed: Option<u64>, violation: &Violation) -> Self {
        Self { seed, promise: violation.promise(), what: violation.to_string() }
    }
}

/// A known mistake, the world that noticed it, and the time that this took.
struct BugSearch {
    bug: String,
    caught: Option<CaughtBug>,
    seconds: f64,
}

impl BugSearch {
    /// Whether a world noticed the mistake in time.
    fn is_noticed(&self) -> bool {
        self.caught.is_some() && self.seconds <= NOTICED_SECONDS_MAX
    }
}

/// Makes every known mistake, and prints which world noticed each.
pub(super) fn mutants(as_json: bool) -> CommandResult {
    let clock = SystemClock::new();
    let mut before_us = clock.now().mono_us();
    // The clock is read once for each mistake, after the search. Worlds do not depend on it.
    let mut seconds = || {
        let now_us = clock.now().mono_us();
        (now_us - std::mem::replace(&mut before_us, now_us)) as f64 / 1e6
    };
    let pairs = |bug: &Bug| bug.worlds().iter().map(|worlds| (*bug, *worlds)).collect::<Vec<_>>();
    let pairs: Vec<(Bug, Worlds)> = Bug::ALL.iter().flat_map(pairs).collect();
    let bar = progress(pairs.len() as u64, "worlds");
    let search = |(bug, worlds): &(Bug, Worlds)| {
        let caught = catch(*bug, *worlds, 0..MUTANT_SEEDS, MUTANT_SIZE);
        bar.inc(1);
        let caught = caught.map(|(seed, of)| CaughtBug::new(seed, &of));
        BugSearch { bug: bug.to_string(), caught, seconds: seconds() }
    };
    let found: Vec<BugSearch> = pairs.iter().map(search).collect();
    bar.finish_and_clear();
    if as_json {
        let rows: Value = found.iter().map(to_json).collect();
        say!("{rows}")?;
    } else {
        say!("{}", caught_table(&found))?;
    }
    Ok(ended(found.iter().all(BugSearch::is_noticed)))
}

fn to_json(BugSearch { bug, caught, seconds }: &BugSearch) -> Value {
    let caught = caught.as_ref();
    json!({
        "mistake": bug,
        "seed": caught.and_then(|noticed| noticed.seed),
        "broken": caught.map(|noticed| noticed.promise),
        "what": caught.map(|noticed| &noticed.what),
        "seconds": seconds,
    })
}

fn caught_table(found: &[BugSearch]) -> Table {
    let mut table = table::with_header(["bug", "seconds", "seed", "promise", "violation"]);
    for searched in found {
        let (bug, seconds) = (searched.bug.clone(), format!("{:.2}", searched.seconds));
        let row = match &searched.caught {
            Some(_) if !searched.is_noticed() => {
                [bug, seconds, "-".to_owned(), "DETECTED TOO LATE".to_owned(), String::new()]
            }
            Some(CaughtBug { seed, promise, what }) => [
                bug,
                seconds,
                seed.map_or_else(|| "half load".to_owned(), |seed| seed.to_string()),
                (*promise).to_owned(),
                what.clone(),
            ],
            None => [bug, seconds, "-".to_owned(), "NOT DETECTED".to_owned(), String::new()],
        };
        table.add_row(row);
    }
    table
}

/// Runs the cases of the model with the engine.
pub(super) fn model(as_json: bool) -> CommandResult {
    let measured: Vec<(Case, ModelMeasurement)> = cases().map(|case| (case, case.measure())).collect();
    if as_json {
        let rows: Value = measured.iter().map(|(case, measured)| compared(case, measured)).collect();
        say!("{rows}")?;
    } else {
        say!("{}", model_table(&measured))?;
    }
    Ok(ended(measured.iter().all(|(_, measured)| measured.violations == 0)))
}

fn compared(case: &Case, measured: &ModelMeasurement) -> Value {
    json!({
        "case": case.name,
        "admitted": measured.admitted, "model_admitted": case.admitted,
        "waited": measured.waited, "model_waited": case.waited,
        "updates": measured.updates, "model_updates": case.updates,
        "violations": measured.violations,
    })
}

fn model_table(measured: &[(Case, ModelMeasurement)]) -> Table {
    let header = ["case", "admitted", "model", "waited", "model", "updates per request", "model"];
    let mut table = table::with_header(header);
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
    table::align_right(&mut table, 1);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistake_that_is_noticed_late_counts_as_one_that_is_not() {
        let searched = |caught: bool, seconds| {
            let what = "above it".to_owned();
            let caught = caught.then_some(CaughtBug { seed: Some(1), promise: "bound", what });
            BugSearch { bug: "a mistake".to_owned(), caught, seconds }
        };
        assert!(searched(true, NOTICED_SECONDS_MAX).is_noticed());
        assert!(!searched(true, NOTICED_SECONDS_MAX + 0.01).is_noticed());
        assert!(!searched(false, 1.0).is_noticed());
        let table =
            caught_table(&[searched(true, NOTICED_SECONDS_MAX + 1.0), searched(false, 1.0)]).to_string();
        assert!(table.contains("DETECTED TOO LATE") && table.contains("NOT DETECTED"), "{table}");
    }
}
