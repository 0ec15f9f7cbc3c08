//! Results of a run, as a table for people and as JSON for programs.

use serde_json::{Value, json};

use super::load::Findings;
use super::plan::Plan;
use crate::{Failure, table};

/// The latency quantiles in the report.
const QUANTILES: [(&str, f64); 4] = [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p99_9", 0.999)];

/// As one object of JSON.
pub(super) fn json(plan: &Plan, findings: &Findings) -> Value {
    let latency: serde_json::Map<String, Value> =
        latencies(findings).into_iter().map(|(name, us)| (name.to_owned(), us.into())).collect();
    json!({
        "surface": plan.surface.as_str(),
        "server": plan.address.to_string(),
        "connections": plan.connections,
        "pipeline": plan.pipeline,
        "keys": plan.keys,
        "seconds": findings.taken.as_secs_f64(),
        "decisions": findings.answered(),
        "per_second": per_second(findings),
        "allowed": findings.answers.allowed,
        "denied": findings.answers.denied,
        "errors": findings.answers.errors,
        "first_error": findings.answers.first_error,
        "latency_us": latency,
    })
}

/// As a table.
pub(super) fn print(plan: &Plan, findings: &Findings) -> Result<(), Failure> {
    let mut table = table::without_header();
    table.add_row(["decisions".to_owned(), findings.answered().to_string()]);
    table.add_row(["per second".to_owned(), format!("{:.0}", per_second(findings))]);
    table.add_row(["allowed".to_owned(), findings.answers.allowed.to_string()]);
    table.add_row(["denied".to_owned(), findings.answers.denied.to_string()]);
    table.add_row(["errors".to_owned(), findings.answers.errors.to_string()]);
    for (name, us) in latencies(findings) {
        table.add_row([name.replace('_', "."), format!("{us:.1} us")]);
    }
    table::align_right(&mut table, 1);
    let (surface, address) = (plan.surface.as_str(), plan.address);
    let (connections, pipeline, seconds) = (plan.connections, plan.pipeline, findings.taken.as_secs_f64());
    say!("{surface} at {address}: {connections} connections, pipeline {pipeline}, {seconds:.1} s\n{table}")?;
    if let Some(error) = &findings.answers.first_error {
        say!("first error: {error}")?;
    }
    Ok(())
}

fn latencies(findings: &Findings) -> Vec<(&'static str, f64)> {
    let at = QUANTILES.map(|(name, quantile)| (name, findings.latency.value_at_quantile(quantile)));
    at.into_iter().chain([("max", findings.latency.max())]).map(|(name, ns)| (name, micros(ns))).collect()
}

#[expect(clippy::cast_precision_loss, reason = "a minute in nanoseconds is far below 2^52")]
fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[expect(clippy::cast_precision_loss, reason = "an hour of answers is far below 2^52")]
fn per_second(findings: &Findings) -> f64 {
    findings.answered() as f64 / findings.taken.as_secs_f64()
}
