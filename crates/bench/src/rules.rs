//! A rule set of a million rows: the time to compile it, its memory, and the time of a match. Also
//! the start of a server that reads it from a rule store.

mod load;

use std::hint::black_box;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Result, ensure};
use rand::rngs::Xoshiro256PlusPlus as Random;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;
use tidegate_rules::rows::{EmergencyRow, RowKind, RuleRow, RuleRows};
use tidegate_rules::{Dimensions, DimensionsError, EMERGENCIES_MAX, Rule, RuleSet};

use crate::machine;
use crate::measure::median;

/// Longest time to compile.
const LOAD_BAR: Duration = Duration::from_secs(10);
/// Longest time for a server to put emergencies in force: a part of the one second within which
/// they must reach it.
const EMERGENCIES_BAR: Duration = Duration::from_millis(500);
/// Longest match, in CPU nanoseconds.
const MATCH_BAR_NS: f64 = 1_000.0;

/// Rules of the first set, each for a path of its own.
const RULES: usize = 10_000;
/// Overrides with a `*` in the first set, each for keys of another beginning.
const WILDCARDS: usize = 5_000;
/// Rules that have them: as many each as a rule may have.
const RULES_WITH_WILDCARDS: usize = 5;
/// Tenants of the second set.
const TENANTS: usize = 100_000;
/// Rules of each tenant's own in the second set.
const RULES_PER_TENANT: usize = 10;
/// Requests that are made at once: few enough to stay in the cache.
const BATCH: usize = 64;
/// Batches of each kind of request.
const BATCHES: usize = 4_000;
const SEED: u64 = 7;

/// The mark of a bar that was not held.
const MISSED: &str = "MISSED";

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rules and overrides of each set, together.
    #[arg(long, default_value_t = 1_000_000)]
    rows: usize,
    /// Start servers on a store with as many rows, instead of compiling in this process.
    #[arg(long, value_name = "KIND")]
    store: Option<load::RowStore>,
    /// With `--store`: run this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE", requires = "store")]
    tidegate: Option<PathBuf>,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    set: &'static str,
    rows: usize,
    /// Wall time from rows to a set.
    load_s: f64,
    load: &'static str,
    /// Wall time until as many emergencies as there may be are put before the set.
    emergencies_ms: f64,
    emergencies: &'static str,
    /// Growth of resident memory while compiling, including memory that the allocator keeps for
    /// later.
    bytes_per_row: f64,
    matches: Vec<MatchCost>,
}

#[derive(Serialize)]
struct MatchCost {
    request: &'static str,
    /// CPU time of one match: the median of batches.
    cpu_ns: f64,
    held: &'static str,
}

/// A request of one kind.
struct SampleRequest {
    tenant: String,
    path: String,
    user: String,
}

impl SampleRequest {
    fn dimensions(&self) -> Result<Dimensions<'_>, DimensionsError> {
        let Self { path, user, .. } = self;
        Dimensions::new([("method", "GET"), ("path", path.as_str()), ("user", user.as_str())])
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    ensure!(args.rows > RULES + WILDCARDS, "rows: {} is not above {}", args.rows, RULES + WILDCARDS);
    if let Some(kept) = args.store {
        return load::run(kept, args);
    }
    let reports = [overridden(args.rows)?, tenants(args.rows)?];
    if args.json {
        println!("{}", serde_json::to_string(&reports)?);
    } else {
        reports.iter().for_each(print);
    }
    let missed = reports.iter().flat_map(Report::bars).filter(|bar| *bar == MISSED).count();
    ensure!(missed == 0, "{missed} bars were missed");
    Ok(())
}

impl Report {
    fn bars(&self) -> impl Iterator<Item = &str> {
        [self.load, self.emergencies].into_iter().chain(self.matches.iter().map(|measured| measured.held))
    }
}

fn print(report: &Report) {
    let Report { set, rows, load_s, load, emergencies_ms, emergencies, bytes_per_row, matches } = report;
    println!("{set}: {rows} rows");
    println!("  load  {load_s:>8.2} s   of {:>6.0} {load}", LOAD_BAR.as_secs_f64());
    println!(
        "  stop  {emergencies_ms:>8.1} ms  of {:>6.0} {emergencies:<7} {EMERGENCIES_MAX} emergencies",
        EMERGENCIES_BAR.as_secs_f64() * 1e3
    );
    println!("  keep  {bytes_per_row:>8.1} bytes/row");
    for MatchCost { request, cpu_ns, held } in matches {
        println!("  match {cpu_ns:>8.0} ns  of {MATCH_BAR_NS:>6.0} {held:<7} {request}");
    }
}

/// Rules for everyone, with overrides for most of their keys.
fn overridden_rows(rows: usize) -> impl Iterator<Item = RuleRow> {
    let rules = (0..RULES).map(|at| row(RowKind::Rule, format!("rule-{at}"), rule(None, &path(at))));
    let wildcards = (0..WILDCARDS).map(|at| {
        let rule = at % RULES_WITH_WILDCARDS;
        row(RowKind::Override, format!("wild-{at}"), over(rule, &format!("partner-{at}-*"), at))
    });
    let overrides = (0..rows - RULES - WILDCARDS)
        .map(|at| row(RowKind::Override, format!("exact-{at}"), over(at % RULES, &user(at), at)));
    rules.chain(wildcards).chain(overrides)
}

/// Rules for everyone, each for a path of its own, and no override.
fn plain_rows(rows: usize) -> impl Iterator<Item = RuleRow> {
    (0..rows).map(|at| row(RowKind::Rule, format!("rule-{at}"), rule(None, &path(at))))
}

fn overridden(rows: usize) -> Result<Report> {
    let exact = rows - RULES - WILDCARDS;
    let (set, report) = load("overridden", overridden_rows(rows).collect())?;
    let asked = |path: String, user: String| SampleRequest { tenant: String::new(), path, user };
    let own = |random: &mut Random| {
        let at = random.random_range(0..exact);
        asked(path(at % RULES), user(at))
    };
    let wild = |random: &mut Random| {
        let at = random.random_range(0..WILDCARDS);
        asked(path(at % RULES_WITH_WILDCARDS), format!("partner-{at}-{}", random.random_range(0..1_000)))
    };
    let none = |random: &mut Random| {
        asked(path(random.random_range(0..RULES)), format!("stranger-{}", random.random::<u32>()))
    };
    let no_rule = |random: &mut Random| asked(format!("/other/{}", random.random::<u32>()), user(1));
    let is_wild = |name: Option<&str>| name.is_some_and(|name| name.starts_with("wild-"));
    let is_exact = |name: Option<&str>| name.is_some_and(|name| name.starts_with("exact-"));
    Ok(Report {
        matches: vec![
            measure("one rule, an exact override", &set, own, |names| {
                names.len() == 1 && is_exact(names[0])
            })?,
            measure("one rule, a wildcard of 1,000", &set, wild, |names| {
                names.len() == 1 && is_wild(names[0])
            })?,
            measure("one rule, no override", &set, none, |names| names == [None])?,
            measure("no rule", &set, no_rule, |names| matches!(names, []))?,
        ],
        ..report
    })
}

/// Measures tenants with rules of their own, and nothing else.
fn tenants(rows: usize) -> Result<Report> {
    let count = (rows / RULES_PER_TENANT).min(TENANTS);
    let own = (0..count * RULES_PER_TENANT).map(|at| {
        let (tenant, at) = (at / RULES_PER_TENANT, at % RULES_PER_TENANT);
        row(RowKind::Rule, format!("tenant-{tenant}-{at}"), rule(Some(tenant), &path(at)))
    });
    let (set, report) = load("tenants", own.collect())?;
    let asked = |tenant: usize, random: &mut Random| SampleRequest {
        tenant: format!("tenant-{tenant}"),
        path: path(random.random_range(0..RULES_PER_TENANT)),
        user: user(random.random_range(0..1_000)),
    };
    let own = |random: &mut Random| asked(random.random_range(0..count), random);
    let stranger = |random: &mut Random| asked(count + random.random_range(0..count), random);
    Ok(Report {
        matches: vec![
            measure("one rule of the tenant's own", &set, own, |names| names == [None])?,
            measure("a tenant without rules", &set, stranger, |names| matches!(names, []))?,
        ],
        ..report
    })
}

fn path(at: usize) -> String {
    format!("/v1/service-{at}")
}

fn user(at: usize) -> String {
    format!("customer-{at}")
}

fn row(kind: RowKind, name: String, body: String) -> RuleRow {
    RuleRow { kind, name, body, version: 1 }
}

fn rule(tenant: Option<usize>, path: &str) -> String {
    let tenant = tenant.map_or_else(String::new, |tenant| format!(r#""tenant":"tenant-{tenant}","#));
    format!(
        r#"{{{tenant}"when":{{"path":"{path}","method":["GET","POST"]}},"key":["user"],"limit":100,"period":"1m"}}"#
    )
}

/// An override; a few hundred limits differ.
fn over(rule: usize, key: &str, at: usize) -> String {
    format!(r#"{{"rule":"rule-{rule}","key":["{key}"],"limit":{}}}"#, 200 + at % 300)
}

fn load(set: &'static str, rows: Vec<RuleRow>) -> Result<(RuleSet, Report)> {
    eprintln!("rules: compiling {set}");
    let rule_rows = RuleRows {
        revision: 1,
        emergency_revision: 0,
        override_revision: 0,
        rows: rows.into(),
        emergencies: Vec::new(),
    };
    let (rows, before, started) = (rule_rows.rows.len(), machine::resident_bytes()?, machine::now());
    let compiled = RuleSet::compile(&rule_rows, None, 0)?;
    let took = machine::now() - started;
    let grown = machine::resident_bytes()?.saturating_sub(before);
    let emergencies_took = put_emergencies(&compiled)?;
    let report = Report {
        set,
        rows,
        load_s: took.as_secs_f64(),
        load: held(took <= LOAD_BAR),
        emergencies_ms: emergencies_took.as_secs_f64() * 1e3,
        emergencies: held(emergencies_took <= EMERGENCIES_BAR),
        bytes_per_row: grown as f64 / rows as f64,
        matches: Vec::new(),
    };
    Ok((compiled, report))
}

/// Puts as many emergencies before a set as there may be, each about a rule that is far from the
/// others.
fn put_emergencies(set: &RuleSet) -> Result<Duration> {
    let (rules, step) = (set.rules(), set.rules().len() / EMERGENCIES_MAX);
    let row = |(at, rule): (usize, &Rule)| EmergencyRow {
        id: format!("stop-{at}"),
        body: format!(r#"{{"action":"block","rule":"{}"}}"#, rule.name),
        expires_ms: 1,
    };
    let rows: Vec<EmergencyRow> =
        rules.iter().step_by(step.max(1)).take(EMERGENCIES_MAX).enumerate().map(row).collect();
    let started = machine::now();
    black_box(set.with_emergencies(1, &rows, 0)?);
    Ok(machine::now() - started)
}

/// Times matches, a few requests at a time: those were just made, as a server has just read them,
/// while the rows that they are about have to come from memory.
fn measure(
    request: &'static str,
    set: &RuleSet,
    draw: impl Fn(&mut Random) -> SampleRequest,
    is_right: impl Fn(&[Option<&str>]) -> bool,
) -> Result<MatchCost> {
    let mut random = Random::seed_from_u64(SEED);
    let mut slices = Vec::with_capacity(BATCHES);
    for _ in 0..BATCHES {
        let asked: Vec<SampleRequest> = (0..BATCH).map(|_| draw(&mut random)).collect();
        let requests = asked.iter().map(|asked| Ok((asked.tenant.as_str(), asked.dimensions()?)));
        let requests = requests.collect::<Result<Vec<_>>>()?;
        let started = machine::thread_cpu();
        for (tenant, dimensions) in &requests {
            set.matching(tenant, dimensions, 0).for_each(|found| drop(black_box(found)));
        }
        slices.push(machine::thread_cpu().saturating_sub(started).as_nanos() as f64 / BATCH as f64);
        for (tenant, dimensions) in &requests {
            let names: Vec<_> =
                set.matching(tenant, dimensions, 0).map(|found| found.terms.override_name).collect();
            ensure!(is_right(&names), "{request}: {dimensions:?} found {names:?}");
        }
    }
    let cpu_ns = median(slices);
    Ok(MatchCost { request, cpu_ns, held: held(cpu_ns <= MATCH_BAR_NS) })
}

fn held(is_held: bool) -> &'static str {
    if is_held { "held" } else { MISSED }
}
