//! Requests one after the other through several nodes: how many pass, and when the first one is
//! denied.

use std::time::Duration;

use tidegate_core::origin::Lapse;
use tidegate_core::{Class, Limit};

use crate::scenario::{Faults, Scenario, Shape, Spread};
use crate::swarm::PLENTY_PER_S;
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
        let limit = Limit::gcra(self.limit, PERIOD);
        let requests = self.limit + self.limit.div_ceil(2) + 4 * self.nodes as u64;
        Scenario {
            seed: 1,
            limit: limit.unwrap_or_else(|_| unreachable!("the limits above are in range")),
            tolerance_ppm: 0,
            lapse: Lapse::Forgiven,
            class: Class::Comfort,
            nodes: self.nodes,
            keys: 1,
            shared: false,
            spread: if self.in_turn { Spread::InTurn } else { Spread::Even },
            requests,
            // Waits at the origin come on top of the pauses.
            length_us: self.pause_us * requests,
            steady_from_us: 0,
            keeps_refusals: false,
            shape: Shape::Sequence,
            cost_max: 1,
            uneven: false,
            large_ppm: 0,
            charges_ppm: 0,
            delay_us: DELAY_US,
            faults: Faults::default(),
            updates_per_s_max: PLENTY_PER_S,
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
