//! The cost of finding the override of an identifier among a thousand with a `*`.

use std::hint::black_box;
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::Serialize;
use tidegate_load::{long_identifier, wildcard};
use tidegate_rules::NamespaceOverrides;
use tidegate_rules::rows::{RowKind, RuleRow};

use crate::machine;
use crate::measure::median;

/// Overrides of one namespace, all with a `*`.
const WILDCARDS: u64 = 1_000;

/// Identifiers of one request.
const IDENTIFIERS: usize = 100;

/// Requests; the median counts.
const REQUESTS: usize = 15;

/// Longest search for one identifier.
const SEARCH_BAR: Duration = Duration::from_micros(500);

/// The cost of one kind of overrides and identifiers.
#[derive(Serialize)]
pub(super) struct LookupCost {
    shape: &'static str,
    /// CPU milliseconds for a request with 100 identifiers.
    request_ms: f64,
    /// CPU microseconds for an identifier.
    identifier_us: f64,
    /// Whether an identifier stays within the bar.
    is_held: bool,
}

/// A kind of overrides, and of identifiers.
type Shape = (&'static str, fn(u64) -> String, fn(usize) -> String);

const SHAPES: [Shape; 5] = [
    (
        "each its own beginning",
        |at| format!("user-{at:03}-*"),
        |at| format!("user-{:03}-{}", at * 7, "x".repeat(500)),
    ),
    (
        "one beginning, each its own end",
        |at| format!("a*-{at:03}"),
        |at| format!("a{}-{at}!", "x".repeat(500)),
    ),
    (
        "one beginning, each its own text between stars",
        |at| format!("a*-{at:03}-*z*"),
        |at| format!("a{}-{at}", "x".repeat(500)),
    ),
    ("texts that begin with each other", wildcard, long_identifier),
    ("texts that all occur everywhere", everywhere, |at| format!("{}{at:03}", "a".repeat(509))),
];

fn everywhere(at: u64) -> String {
    let run = |length: u64| "a".repeat(length as usize);
    format!("a*{}*{}*b*", run(1 + at % 64), run(1 + at / 64))
}

impl LookupCost {
    /// Measures all shapes.
    pub(super) fn all() -> Result<Vec<Self>> {
        SHAPES.into_iter().map(Self::measure).collect()
    }

    fn measure((shape, pattern, identifier): Shape) -> Result<Self> {
        let rows: Vec<RuleRow> = (0..WILDCARDS).map(|at| row(at, &pattern(at))).collect();
        let overrides =
            NamespaceOverrides::compile(&rows, 0).map_err(|problems| anyhow::anyhow!("{problems}"))?;
        ensure!(overrides.wildcards() as u64 == WILDCARDS, "{shape}: each has a star");
        let identifiers: Vec<String> = (0..IDENTIFIERS).map(identifier).collect();
        let request = |_| {
            let started = machine::thread_cpu();
            for identifier in &identifiers {
                black_box(overrides.find("hostile", "n", black_box(identifier), 0));
            }
            machine::thread_cpu().saturating_sub(started).as_secs_f64()
        };
        let seconds = median((0..REQUESTS).map(request).collect());
        let of_identifier = seconds / IDENTIFIERS as f64;
        let is_held = of_identifier <= SEARCH_BAR.as_secs_f64();
        Ok(Self { shape, request_ms: seconds * 1e3, identifier_us: of_identifier * 1e6, is_held })
    }

    pub(super) fn is_held(&self) -> bool {
        self.is_held
    }

    pub(super) fn print(&self) {
        let Self { shape, request_ms, identifier_us, is_held } = self;
        let held = if *is_held { "held" } else { "MISSED" };
        println!("  {shape:<48} {request_ms:>9.2} ms {identifier_us:>9.1} us  {held}");
    }
}

fn row(at: u64, identifier: &str) -> RuleRow {
    let body = format!(
        r#"{{"tenant":"hostile","namespace":"n","identifier":"{identifier}","limit":5,"period":"60000ms"}}"#
    );
    RuleRow { kind: RowKind::Override, name: format!("o{at}"), body, version: 1 }
}
