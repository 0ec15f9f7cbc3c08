//! Memory per live key, for each algorithm: resident memory divided by the keys in the table.

use std::time::Duration;

use anyhow::Result;
use serde::Serialize;
use tidegate::{Limit, Limiter};

use crate::machine;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Keys to keep live.
    #[arg(long, default_value_t = 100_000_000)]
    keys: u64,
    /// Print one JSON array.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Row {
    algorithm: &'static str,
    keys: u64,
    /// Meters that the table holds at the end.
    live: u64,
    bytes_per_key: f64,
    fill_cpu_ns: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let day = Duration::from_hours(24);
    let limits = [("gcra", Limit::gcra(1_000, day)?), ("sliding_window", Limit::sliding_window(1_000, day)?)];
    let rows = limits.into_iter().map(|(algorithm, limit)| fill(algorithm, limit, args.keys));
    let rows = rows.collect::<Result<Vec<Row>>>()?;
    if args.json {
        println!("{}", serde_json::to_string(&rows)?);
        return Ok(());
    }
    println!("{:<16} {:>12} {:>12} {:>10} {:>12}", "algorithm", "keys", "live", "bytes/key", "cpu ns/key");
    for Row { algorithm, keys, live, bytes_per_key, fill_cpu_ns } in rows {
        println!("{algorithm:<16} {keys:>12} {live:>12} {bytes_per_key:>10.1} {fill_cpu_ns:>12.0}");
    }
    Ok(())
}

/// Spends one unit on each key. A limit per day keeps every level above 0, so none is evicted as
/// clean.
fn fill(algorithm: &'static str, limit: Limit, keys: u64) -> Result<Row> {
    eprintln!("memory: filling {keys} {algorithm} keys");
    let before = machine::resident_bytes()?;
    let limiter = Limiter::builder().keys(usize::try_from(keys)?).limit("limit", limit).build()?;
    let gate = limiter.gate("limit")?;
    let started = machine::thread_cpu();
    for key in 0..keys {
        let _ = limiter.check(gate.key(key.to_le_bytes()));
    }
    let cpu = machine::thread_cpu().saturating_sub(started);
    let live = limiter.stats().live;
    let resident = machine::resident_bytes()?.saturating_sub(before);
    Ok(Row {
        algorithm,
        keys,
        live,
        bytes_per_key: resident as f64 / live as f64,
        fill_cpu_ns: cpu.as_nanos() as f64 / keys as f64,
    })
}
