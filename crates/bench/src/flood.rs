//! A flood of new keys against a table of fixed size: its effect on memory, on an offender and on
//! another tenant.

use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use tidegate::{Check, Gate, Limit, Limiter, ManualClock, Secret, Verdict};

use crate::machine;

/// Keys of the neighbour tenant, checked in every round of the flood.
const NEIGHBOURS: u64 = 10_000;

/// Rounds in which the neighbour's keys are checked, spread over the flood.
const ROUNDS: u64 = 20;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keys that come by once each.
    #[arg(long, default_value_t = 50_000_000)]
    keys: u64,
    /// Memory of the table, in MB of a million bytes.
    #[arg(long, default_value_t = 256)]
    memory_mb: usize,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

/// The findings of a run.
#[derive(Serialize)]
struct Report {
    keys: u64,
    table_bytes: usize,
    /// Peak of resident memory, less the memory before the table.
    resident_bytes: u64,
    resident_share_of_table: f64,
    offender_denied_before: bool,
    offender_denied_after: bool,
    neighbour_decisions: u64,
    neighbour_differences: u64,
    evicted_clean: u64,
    evicted_in_use: u64,
    decided_by_overflow: u64,
    cpu_ns_per_stranger: f64,
}

impl Report {
    fn is_good(&self) -> bool {
        self.resident_share_of_table <= 1.05
            && self.offender_denied_before
            && self.offender_denied_after
            && self.neighbour_differences == 0
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let before = machine::resident_bytes()?;
    let flooded = limiter(args.memory_mb * 1_000_000)?;
    let calm = limiter(16_000_000)?;
    let report = flood(args, before, &flooded, &calm)?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        print(&report);
    }
    ensure!(report.is_good(), "the flood affected other keys");
    Ok(())
}

/// Builds a limiter with a clock that stands still. No meter drains, which is the hardest case for
/// a full table.
fn limiter(memory_bytes: usize) -> Result<Limiter> {
    Ok(Limiter::builder()
        .memory_bytes(memory_bytes)
        .limit("per_user", Limit::gcra(100, Duration::from_mins(1))?)
        .tenant("flooded", 8)
        .tenant("neighbour", 1)
        .clock(ManualClock::new())
        .secret(Secret::from_bytes([3; 16]))
        .build()?)
}

fn flood(args: &Args, before: u64, flooded: &Limiter, calm: &Limiter) -> Result<Report> {
    let gate = flooded.gate_of("flooded", "per_user")?;
    let neighbours = (flooded.gate_of("neighbour", "per_user")?, calm.gate_of("neighbour", "per_user")?);
    let offender_is_denied = || !flooded.check(gate.key("offender")).is_allowed();
    flooded.charge(gate.key("offender").cost(100));
    let offender_denied_before = offender_is_denied();
    let (mut resident, mut differences, mut cpu) = (0, 0, Duration::ZERO);
    for round in 0..ROUNDS {
        let started = machine::thread_cpu();
        strangers(flooded, &gate, args.keys * round / ROUNDS..args.keys * (round + 1) / ROUNDS);
        cpu += machine::thread_cpu().saturating_sub(started);
        differences += differing(round, (flooded, &neighbours.0), (calm, &neighbours.1));
        resident =
            resident.max(machine::resident_bytes()?.saturating_sub(before + calm.memory_bytes() as u64));
        eprintln!("flood: {} of {} strangers", args.keys * (round + 1) / ROUNDS, args.keys);
    }
    let stats = flooded.stats_of("flooded")?;
    Ok(Report {
        keys: args.keys,
        table_bytes: flooded.memory_bytes(),
        resident_bytes: resident,
        resident_share_of_table: resident as f64 / flooded.memory_bytes() as f64,
        offender_denied_before,
        offender_denied_after: offender_is_denied(),
        neighbour_decisions: ROUNDS * NEIGHBOURS,
        neighbour_differences: differences,
        evicted_clean: stats.evicted_clean,
        evicted_in_use: stats.evicted_in_use,
        decided_by_overflow: stats.spilled,
        cpu_ns_per_stranger: cpu.as_nanos() as f64 / args.keys as f64,
    })
}

fn strangers(limiter: &Limiter, gate: &Gate, keys: std::ops::Range<u64>) {
    for key in keys {
        let _ = limiter.check(gate.key(key.to_le_bytes()));
    }
}

/// Returns the number of the neighbour's decisions that differ between the flooded table and a calm
/// one.
fn differing(round: u64, flooded: (&Limiter, &Gate), calm: (&Limiter, &Gate)) -> u64 {
    let hears = |(limiter, gate): (&Limiter, &Gate), key: u64| -> Verdict {
        let ask: Check<'_> = gate.key(key.to_le_bytes()).cost(1 + (key + round) % 12);
        limiter.check(ask).verdict()
    };
    (0..NEIGHBOURS).filter(|&key| hears(flooded, key) != hears(calm, key)).count() as u64
}

fn print(report: &Report) {
    let mb = |bytes: u64| bytes as f64 / 1e6;
    println!("strangers                 {}", report.keys);
    println!("table                     {:.1} MB", mb(report.table_bytes as u64));
    println!(
        "resident at its highest   {:.1} MB, {:.1} % of the table",
        mb(report.resident_bytes),
        100.0 * report.resident_share_of_table
    );
    println!(
        "offender denied           before {}, after {}",
        report.offender_denied_before, report.offender_denied_after
    );
    println!(
        "neighbour's decisions     {} asked, {} differ",
        report.neighbour_decisions, report.neighbour_differences
    );
    println!(
        "evicted                   {} at level 0, {} in use below their limit",
        report.evicted_clean, report.evicted_in_use
    );
    println!("decided by overflow       {}", report.decided_by_overflow);
    println!("CPU per stranger          {:.0} ns", report.cpu_ns_per_stranger);
}
