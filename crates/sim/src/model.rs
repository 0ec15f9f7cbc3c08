//! The cases of a simpler model of grants, run with the shipped engine, beside the results of the
//! model.

use std::time::Duration;

use tidegate_core::Class;

use crate::report::Report;
use crate::scenario::{SECOND_US, Scenario, Spread};
use crate::swarm::bucket;
use crate::world::run;

/// A case of the model, with the results of the model.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// The name of the case.
    pub name: &'static str,
    nodes: usize,
    amount: u64,
    period_s: u64,
    burst: u64,
    /// Thousandths of a request per second.
    load_milli: u64,
    seconds: u64,
    spread: Spread,
    /// Units admitted, relative to one bucket.
    pub admitted: f64,
    /// The share of requests that waited for a call.
    pub waited: f64,
    /// Meter updates at the origin for each request.
    pub updates: f64,
}

/// The results of the shipped engine in a case.
#[derive(Clone, Copy, Debug)]
pub struct ModelMeasurement {
    /// Units admitted, relative to one bucket.
    pub admitted: f64,
    /// The share of requests that waited for a call.
    pub waited: f64,
    /// Meter updates at the origin for each request.
    pub updates: f64,
    /// How many promises were broken.
    pub violations: usize,
}

type Row = (&'static str, usize, (u64, u64, u64), (u64, u64), Spread, (f64, f64, f64));

/// Name; nodes; amount, seconds and burst; load in thousandths and its seconds; spread; the results
/// of the model.
const ROWS: &[Row] = &[
    ("1 node, 100/s, at 5 %", 1, (100, 1, 100), (5_000, 60), Spread::Even, (1.0, 0.007, 0.35)),
    ("1 node, 100/s, at 100 %", 1, (100, 1, 100), (100_000, 60), Spread::Even, (0.995, 0.007, 0.1)),
    ("1 node, 100/s, 10x", 1, (100, 1, 100), (1_000_000, 30), Spread::Even, (0.997, 0.0008, 0.01)),
    ("4 nodes, 100/s, half", 4, (100, 1, 100), (50_000, 60), Spread::Even, (1.0, 0.014, 0.25)),
    ("4 nodes, 100/s, 2x", 4, (100, 1, 100), (200_000, 60), Spread::Even, (0.998, 0.10, 0.27)),
    ("4 nodes, 1000/min, half", 4, (1_000, 60, 1_000), (8_000, 300), Spread::Even, (1.0, 0.016, 0.77)),
    ("4 nodes, 1000/min, 4x", 4, (1_000, 60, 1_000), (67_000, 300), Spread::Even, (1.0, 0.32, 0.62)),
    (
        "4 nodes, 100k/min, 4x",
        4,
        (100_000, 60, 100_000),
        (6_700_000, 40),
        Spread::Even,
        (0.999, 0.005, 0.006),
    ),
    (
        "16 nodes, one hot key, 4x",
        16,
        (5_000, 1, 5_000),
        (20_000_000, 5),
        Spread::Even,
        (0.979, 0.015, 0.013),
    ),
    ("4 nodes, 10/min, 4x", 4, (10, 60, 10), (670, 3_000), Spread::Even, (1.0, 0.64, 0.9)),
    ("4 nodes, burst 1 at 10/s, 2x", 4, (10, 1, 1), (20_000, 100), Spread::Even, (0.987, 0.71, 0.94)),
    ("100 nodes, sticky, half", 100, (1_000, 1, 1_000), (500_000, 30), Spread::Few, (1.0, 0.003, 0.07)),
    ("100 nodes, even, 2x", 100, (1_000, 1, 1_000), (2_000_000, 20), Spread::Even, (0.995, 0.32, 0.6)),
    ("1000 nodes, 0.05/s each", 1_000, (100, 1, 100), (50_000, 60), Spread::Even, (1.0, 0.999, 1.1)),
];

/// The cases of the model.
pub fn cases() -> impl Iterator<Item = Case> {
    ROWS.iter().map(
        |&(
            name,
            nodes,
            (amount, period_s, burst),
            (load_milli, seconds),
            spread,
            (admitted, waited, updates),
        )| {
            Case {
                name,
                nodes,
                amount,
                period_s,
                burst,
                load_milli,
                seconds,
                spread,
                admitted,
                waited,
                updates,
            }
        },
    )
}

impl Case {
    fn scenario(&self) -> Scenario {
        let limit = bucket(self.amount, Duration::from_secs(self.period_s), self.burst);
        Scenario {
            nodes: self.nodes,
            spread: self.spread,
            requests: self.load_milli * self.seconds / 1_000,
            length_us: self.seconds * SECOND_US,
            ..Scenario::new(limit, Class::Security)
        }
    }

    /// Runs the case with the shipped engine.
    pub fn measure(&self) -> ModelMeasurement {
        let report: Report = run(&self.scenario(), None, false);
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        ModelMeasurement {
            admitted: share(report.admitted, report.ideal),
            waited: share(report.waited, report.requests),
            updates: share(report.updates, report.requests),
            violations: report.violations.len(),
        }
    }
}
