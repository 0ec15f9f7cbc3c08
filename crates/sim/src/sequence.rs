//! Requests one after the other through several nodes: how many pass, and when the first one is
//! denied.

use std::time::Duration;

use tidegate_core::Class;

use crate::scenario::{Scenario, Shape, Spread};
use crate::swarm::bucket;
use crate::world::run;

/// One way between a node and the origin, µs.
const DELAY_US: u64 = 250;

/// A day, so that no unit drains during a sequence.
const PERIOD: Duration = Duration::from_hours(24);

const LIMITS: [u64; 10] = [1, 2, 3, 5, 10, 20, 50, 100, 400, 1_000];

/// The pause between an answer and the next request, µs.
const PAUSES_US: [u64; 3] = [300, 3_000, 100_000];

/// Requests for a fresh key, each after the answer to the previous one.
#[derive(Clone, Copy, Debug)]
pub struct SequenceCase {
    /// Nodes of the region.
    pub nodes: usize,
    /// Units per day.
    pub limit: u64,
    /// The pause between an answer and the next request, µs.
    pub pause_us: u64,
    /// Whether requests come to nodes in turn, or at random.
    pub in_turn: bool,
}

/// The outcome of a sequence, relative to the limit.
#[derive(Clone, Copy, Debug)]
pub struct SequenceResult {
    /// Units that passed.
    pub passed: f64,
    /// Units that passed before the first denial.
    pub first_denial: f64,
    /// Promises that were broken: an admission above the limit is one.
    pub violations: usize,
}

/// The sequences through `nodes` nodes.
pub fn sequence_cases(nodes: usize) -> Vec<SequenceCase> {
    let mut cases = Vec::new();
    for limit in LIMITS {
        for pause_us in PAUSES_US {
            cases.extend([true, false].map(|in_turn| SequenceCase { nodes, limit, pause_us, in_turn }));
        }
    }
    cases
}

impl SequenceCase {
    fn scenario(&self) -> Scenario {
        let requests = self.limit + self.limit.div_ceil(2) + 4 * self.nodes as u64;
        Scenario {
            nodes: self.nodes,
            spread: if self.in_turn { Spread::InTurn } else { Spread::Even },
            requests,
            // Waits at the origin come on top of the pauses.
            length_us: self.pause_us * requests,
            shape: Shape::Sequence,
            delay_us: DELAY_US,
            ..Scenario::new(bucket(self.limit, PERIOD, self.limit), Class::Comfort)
        }
    }

    /// Runs the sequence with the shipped engine.
    pub fn measure(&self) -> SequenceResult {
        let report = run(&self.scenario(), None, false);
        let of_limit = |units: u64| (units as f64 / self.limit as f64).min(1.0);
        SequenceResult {
            passed: of_limit(report.admitted),
            first_denial: report.passed_before_denial.map_or(1.0, of_limit),
            violations: report.violations.len(),
        }
    }
}
