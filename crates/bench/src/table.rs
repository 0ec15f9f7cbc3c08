//! The tables that people read: one per case, with ratios to Tidegate and the facts of the machine.

use crate::local::Finisher;
use crate::machine;
use crate::measure::{Measurement, PACE};
use crate::pieces::PieceCost;
use crate::workload::{Draw, Workload, ZIPF_EXPONENT};

/// The references of the ratios. The first one that ran is used.
const YARDSTICKS: [&str; 2] = ["tidegate", "floor"];

const MIB: f64 = 1_048_576.0;

/// Prints the table of a case.
pub(crate) fn print(workload: &Workload, finishers: &[Finisher], pieces: &[PieceCost]) {
    let yardstick = YARDSTICKS
        .iter()
        .find_map(|contender| finishers.iter().find(|finisher| finisher.variant.contender == *contender));
    println!("\n{}", title(workload));
    println!("{}", heading(workload, yardstick));
    for finisher in finishers {
        for measurement in &finisher.findings.measurements {
            println!("{}", line(workload, finisher, measurement, ratio(measurement, yardstick)));
        }
    }
    print_facts(finishers, pieces);
}

fn title(workload: &Workload) -> String {
    let Workload { case, keys, limits, quota, .. } = workload;
    let draw = match workload.draw {
        _ if *keys == 1 => "always the same".to_owned(),
        Draw::Uniform => "drawn uniformly".to_owned(),
        Draw::Zipf => format!("Zipf {ZIPF_EXPONENT} over scrambled ranks"),
    };
    let scopes = if *limits > 1 { ", each on keys of its own" } else { "" };
    format!("{case}: {keys} live keys, {draw}; limits per request: {limits}{scopes}; each limit: {quota}")
}

fn heading(workload: &Workload, yardstick: Option<&Finisher>) -> String {
    let versus = yardstick.map_or_else(String::new, |finisher| format!("vs {}", finisher.variant.contender));
    let requests = if workload.limits > 1 { "requests/s" } else { "" };
    columns([
        "contender",
        "threads",
        "cores",
        "cpu ns/check",
        "checks/s",
        requests,
        "bytes/key",
        "allowed",
        &versus,
    ])
}

fn line(workload: &Workload, finisher: &Finisher, measurement: &Measurement, ratio: Option<f64>) -> String {
    let Measurement { threads, cpu_ns, per_second, allowed } = measurement;
    let requests = (workload.limits > 1).then(|| millions(per_second / workload.limits as f64));
    columns([
        finisher.variant.contender,
        &threads.to_string(),
        &format!("{:.2}", cpu_ns * per_second / 1e9),
        &format!("{cpu_ns:.1}"),
        &millions(*per_second),
        &requests.unwrap_or_default(),
        &finisher.findings.bytes_per_key.map_or_else(|| "-".to_owned(), |bytes| format!("{bytes:.1}")),
        &format!("{:.2} %", allowed * 100.0),
        &ratio.map_or_else(String::new, |ratio| format!("{ratio:.2}x")),
    ])
}

/// An empty requests column takes no room.
fn columns([contender, threads, cores, cpu, checks, requests, bytes, allowed, ratio]: [&str; 9]) -> String {
    let requests = if requests.is_empty() { String::new() } else { format!(" {requests:>11}") };
    format!(
        "  {contender:<16} {threads:>7} {cores:>6} {cpu:>13} {checks:>10}{requests} {bytes:>10} {allowed:>9} \
         {ratio:>12}"
    )
}

fn millions(per_second: f64) -> String {
    format!("{:.2} M", per_second / 1e6)
}

/// CPU time beside the yardstick's at the same number of threads.
fn ratio(measurement: &Measurement, yardstick: Option<&Finisher>) -> Option<f64> {
    let measurements = &yardstick?.findings.measurements;
    let beside = measurements.iter().find(|beside| beside.threads == measurement.threads)?;
    Some(measurement.cpu_ns / beside.cpu_ns)
}

fn print_facts(finishers: &[Finisher], pieces: &[PieceCost]) {
    println!(
        "  pieces, one thread, cpu ns: {}",
        joined(pieces.iter().map(|(name, ns)| format!("{name} {ns:.1}")))
    );
    println!("  huge pages obtained: {}", joined(finishers.iter().filter_map(huge_pages)));
    let (slices, millis) = (PACE.slices, PACE.slice.as_millis());
    println!(
        "  measured: median of {slices} slices of {millis} ms after {} ms of warm-up",
        PACE.warm_up.as_millis()
    );
    println!("  machine: {} cores; mimalloc for all; each contender in its own process", machine::cores());
    println!("  cores: CPU time over wall time; fewer cores than threads mean lock waits or other programs");
    finishers.iter().filter_map(|finisher| finisher.variant.note).for_each(|note| println!("  {note}"));
}

fn huge_pages(finisher: &Finisher) -> Option<String> {
    let bytes = finisher.findings.huge_page_bytes;
    (bytes > 0).then(|| format!("{} {:.0} MiB", finisher.variant.contender, bytes as f64 / MIB))
}

fn joined(parts: impl Iterator<Item = String>) -> String {
    let parts: Vec<_> = parts.collect();
    if parts.is_empty() { "none".to_owned() } else { parts.join("; ") }
}
