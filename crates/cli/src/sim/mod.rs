//! `tidegate sim`: runs the shipped engine in simulated regions under seeded faults, and reports
//! broken promises.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "figures for people, of worlds whose size is checked"
)]

mod compare;
mod loads;
mod regions;

use std::io::IsTerminal;
use std::ops::Range;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use comfy_table::Table;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};
use tidegate_sim::{
    Report, Scenario, Size, Summary, Violation, Worlds, plot, run as run_world, shrink, sweep,
};

use crate::client::json_arg;
use crate::out::Reader;
use crate::{CommandResult, EXIT_FAILED, Failure, table};

const US_PER_HOUR: f64 = 3_600_000_000.0;

/// The longest world, in hours. Longer ones would rather show in memory than in findings.
const HOURS_MAX: f64 = 24.0;

/// Default length of a world in hours, and requests per hour.
const ONE_DEFAULT: (f64, u64) = (0.5, 7_200);

/// The same for several regions. Replicators run five rounds per second, so simulating such an hour
/// takes longer.
const REGIONS_DEFAULT: (f64, u64) = (0.1, 20_000);

/// How much of the trace of a broken world is shown: its end, where the promise broke.
const LINES_SHOWN: usize = 60;

pub(crate) fn command() -> Command {
    Command::new("sim")
        .about("Simulate regions under seeded faults, and check every promise")
        .long_about(
            "Run the shipped engine, meter table and origin in simulated worlds, one for each seed. \
             Messages are lost, delayed and duplicated; links are cut, nodes crash, data is lost, clocks \
             disagree. Checkers compare the admitted usage with the promises. The same seed gives the same \
             history.\n\nWith --regions, a world has two to eight regions with replicators, and links \
             between them that are cut.\n\nExit status: 0 if every promise holds, 1 if one is broken. The \
             command then prints the seed, and a smaller world that breaks the same promise.",
        )
        .arg(number("seeds", "200", "Number of worlds"))
        .arg(number("first", "0", "Seed of the first world"))
        .arg(
            Arg::new("seed")
                .long("seed")
                .value_name("SEED")
                .value_parser(value_parser!(u64))
                .conflicts_with_all(["seeds", "first"])
                .help("Seed of a single world"),
        )
        .arg(flag("trace", "Print all events of the world").requires("seed"))
        .arg(
            Arg::new("plot")
                .long("plot")
                .value_name("FILE")
                .value_parser(value_parser!(PathBuf))
                .requires("seed")
                .help("Draw admitted usage, limit and bound of the world as SVG"),
        )
        .arg(
            Arg::new("hours")
                .long("hours")
                .value_name("HOURS")
                .value_parser(value_parser!(f64))
                .help("Length of each world [default: 0.5; with --regions 0.1]"),
        )
        .arg(Arg::new("requests").long("requests").value_name("N").value_parser(value_parser!(u64)).help(
            "Requests per hour of a world [default: 7200; with --regions up to 20000 of an \
                       attacker]",
        ))
        .arg(
            flag("regions", "Simulate worlds of two to eight regions that count together")
                .conflicts_with_all(["plot", "mutants", "model"]),
        )
        .arg(flag("mutants", "Run with known bugs, and print the world that detects each"))
        .arg(
            flag(
                "loads",
                "Measure the admitted share of a single bucket, and false denials, under even \
                           and uneven load",
            )
            .conflicts_with_all(["regions", "plot", "mutants", "model", "seed"]),
        )
        .arg(flag("model", "Compare the engine with the design model of grants"))
        .arg(json_arg())
}

fn number(name: &'static str, default: &'static str, help: &'static str) -> Arg {
    Arg::new(name)
        .long(name)
        .value_name("N")
        .default_value(default)
        .value_parser(value_parser!(u64))
        .help(help)
}

fn flag(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    if matches.get_flag("mutants") {
        return compare::mutants(matches.get_flag("json"));
    }
    if matches.get_flag("loads") {
        return loads::run(matches.get_flag("json"));
    }
    if matches.get_flag("model") {
        return compare::model(matches.get_flag("json"));
    }
    let size = size(matches)?;
    let worlds = if matches.get_flag("regions") { Worlds::SeveralRegions } else { Worlds::OneRegion };
    match matches.get_one::<u64>("seed") {
        Some(seed) => one(matches, &worlds.scenario(*seed, size)),
        None => many(matches, worlds, size),
    }
}

fn size(matches: &ArgMatches) -> Result<Size, Failure> {
    let (hours_default, requests_default) =
        if matches.get_flag("regions") { REGIONS_DEFAULT } else { ONE_DEFAULT };
    let hours = matches.get_one::<f64>("hours").copied().unwrap_or(hours_default);
    let per_hour = matches.get_one::<u64>("requests").copied().unwrap_or(requests_default);
    if !(hours > 0.0 && hours <= HOURS_MAX) {
        return Err(Failure::usage(format!("--hours: {hours} is not above 0 and up to {HOURS_MAX}")));
    }
    let requests = per_hour as f64 * hours;
    if !(1.0..=1e8).contains(&requests) {
        return Err(Failure::usage(format!(
            "--requests: {requests} requests in a world are outside 1 to 100000000"
        )));
    }
    Ok(Size { length_us: (hours * US_PER_HOUR) as u64, requests: requests as u64 })
}

/// One world, with all there is to see of it.
fn one(matches: &ArgMatches, scenario: &Scenario) -> CommandResult {
    let report = run_world(scenario, None, matches.get_flag("trace"));
    if let Some(path) = matches.get_one::<PathBuf>("plot") {
        std::fs::write(path, plot(&report))
            .map_err(|error| Failure::failed(format!("{}: {error}", path.display())))?;
    }
    if matches.get_flag("trace") {
        crate::out::print(report.trace.to_string().as_bytes())?;
    }
    let (as_json, as_words) =
        if scenario.regions.is_some() { regions::of_world(&report) } else { of_world(&report) };
    if matches.get_flag("json") {
        let mut world = json!({
            "seed": report.seed,
            "scenario": scenario.to_string(),
            "requests": report.requests,
            "faults": report.faults,
            "violations": to_json(report.seed, &report.violations).collect::<Value>(),
            "trace_hash": format!("{:016x}", report.trace.hash()),
        });
        extend(&mut world, as_json);
        say!("{world}")?;
    } else {
        say!("seed {}: {scenario}", report.seed)?;
        let (passed, requests) = (report.passed, report.requests);
        let hash = report.trace.hash();
        say!("{passed} of {requests} requests passed, {as_words}; trace {hash:016x}")?;
        for violation in &report.violations {
            say!("broken: {violation}")?;
        }
    }
    Ok(ended(report.violations.is_empty()))
}

/// The figures of a world of one region, as JSON and in words.
fn of_world(report: &Report) -> (Value, String) {
    let figures = json!({
        "admitted_share": share(report.admitted, report.ideal),
        "waited_share": share(report.waited, report.requests),
    });
    let Report { waited, unanswered, alone, .. } = report;
    let words =
        format!("{waited} waited, {unanswered} got no reply, of which {alone} passed by the node share");
    (figures, words)
}

/// Adds the fields of one object to another.
fn extend(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

fn ended(holds: bool) -> ExitCode {
    if holds { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) }
}

/// Many worlds on all cores, and the first that broke a promise.
fn many(matches: &ArgMatches, worlds: Worlds, size: Size) -> CommandResult {
    let seeds = seeds(matches);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let bar = progress(seeds.end - seeds.start, "worlds");
    let summary = sweep(worlds, seeds, size, threads, &|| bar.inc(1));
    bar.finish_and_clear();
    let has_regions = worlds == Worlds::SeveralRegions;
    if matches.get_flag("json") {
        let figures = if has_regions { regions::summed(&summary) } else { summed(&summary) };
        say!("{}", with_common(&summary, figures))?;
    } else if has_regions {
        regions::print(&summary)?;
    } else {
        print(&summary)?;
    }
    explain(&summary.broken, worlds, size);
    let is_tight = !has_regions || regions::is_tight(&summary);
    Ok(ended(summary.broken.is_empty() && is_tight))
}

fn seeds(matches: &ArgMatches) -> Range<u64> {
    let count = matches.get_one::<u64>("seeds").copied().unwrap_or(200);
    let first = matches.get_one::<u64>("first").copied().unwrap_or(0);
    first..first.saturating_add(count)
}

/// Shown on a terminal only: a log has no use for it.
fn progress(count: u64, unit: &str) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template(&format!("{{bar:40}} {{pos}}/{{len}} {unit}, {{eta}} left"));
    ProgressBar::new(count).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
}

fn to_json(seed: u64, violations: &[Violation]) -> impl Iterator<Item = Value> + '_ {
    violations.iter().map(move |violation| {
        let what = violation.to_string();
        json!({ "seed": seed, "promise": violation.promise(), "what": what })
    })
}

/// The figures of worlds of one region.
fn summed(summary: &Summary) -> Value {
    json!({
        "admitted_share": share(summary.admitted, summary.ideal),
        "waited_share": share(summary.waited, summary.requests),
        "unanswered_share": share(summary.unanswered, summary.requests),
        "alone_share": share(summary.alone, summary.requests),
        "updates_per_request": share(summary.updates, summary.requests),
        "longest_wait_us": summary.longest_wait_us,
    })
}

/// Adds the figures that all worlds have.
fn with_common(summary: &Summary, figures: Value) -> Value {
    let mut all = json!({
        "seeds": summary.seeds,
        "region_hours": summary.simulated_us as f64 / US_PER_HOUR,
        "requests": summary.requests,
        "faults": summary.faults,
        "violations": summary.broken.iter().flat_map(|(seed, all)| to_json(*seed, all)).collect::<Value>(),
        "trace_hash": format!("{:016x}", summary.trace_hash),
    });
    extend(&mut all, figures);
    all
}

fn print(summary: &Summary) -> Result<Reader, Failure> {
    let percent = |part, whole| format!("{:.2} %", share(part, whole) * 100.0);
    let rows = [
        ("admitted share of a single bucket", percent(summary.admitted, summary.ideal)),
        ("requests that waited for the origin", percent(summary.waited, summary.requests)),
        ("requests that passed without the origin", percent(summary.alone, summary.requests)),
        ("longest wait", format!("{:.1} ms", summary.longest_wait_us as f64 / 1_000.0)),
        ("meter updates per request", format!("{:.2}", share(summary.updates, summary.requests))),
    ];
    say!("{}", figures(summary, rows))
}

/// The figures that all worlds have, and those of `rows` among them.
fn figures<const N: usize>(summary: &Summary, rows: [(&str, String); N]) -> Table {
    let first = [
        ("worlds", summary.seeds.to_string()),
        ("region-hours", format!("{:.1}", summary.simulated_us as f64 / US_PER_HOUR)),
        ("requests", summary.requests.to_string()),
        ("faults", summary.faults.to_string()),
    ];
    let last = [
        ("trace", format!("{:016x}", summary.trace_hash)),
        ("worlds that broke a promise", summary.broken.len().to_string()),
    ];
    let mut table = table::without_header();
    for (name, figure) in first.into_iter().chain(rows).chain(last) {
        table.add_row(vec![name.to_owned(), figure]);
    }
    table::align_right(&mut table, 1);
    table
}

/// Prints the violations of the first broken world, and a smaller world that still breaks the
/// promise.
fn explain(broken: &[(u64, Vec<Violation>)], worlds: Worlds, size: Size) {
    let Some((seed, violations)) = broken.first() else { return };
    let Some(violation) = violations.first() else { return };
    let scenario = worlds.scenario(*seed, size);
    aside!("seed {seed}: {scenario}");
    for violation in violations {
        aside!("  broken: {violation}");
    }
    let (smaller, Report { violations, trace, .. }) = shrink(&scenario, None, violation);
    aside!("a smaller world breaks the same promise: {smaller}");
    for violation in &violations {
        aside!("  broken: {violation}");
    }
    let trace = trace.to_string();
    let lines: Vec<&str> = trace.lines().collect();
    for line in lines.iter().skip(lines.len().saturating_sub(LINES_SHOWN)) {
        aside!("{line}");
    }
}

fn share(part: u64, whole: u64) -> f64 {
    part as f64 / whole.max(1) as f64
}
