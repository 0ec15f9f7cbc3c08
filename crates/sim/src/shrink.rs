//! A smaller world that breaks the same promise: less to read.

use crate::bug::Bug;
use crate::report::{Report, Violation};
use crate::scenario::{Faults, Scenario, Shape, Spread};
use crate::swarm::PLENTY_PER_S;
use crate::world::run;

/// How many worlds are tried. Higher: a smaller one may be found; longer.
const TRIES: usize = 400;

type Change = fn(&mut Scenario);

/// What makes a world smaller, the most effective first.
const CHANGES: &[Change] = &[
    |world| world.faults = Faults::default(),
    |world| world.requests /= 2,
    |world| world.length_us /= 2,
    |world| world.nodes = world.nodes.div_ceil(2),
    |world| world.keys = world.keys.div_ceil(2),
    |world| world.shared = false,
    |world| world.uneven = false,
    |world| world.faults.loss_ppm = 0,
    |world| world.faults.duplicate_ppm = 0,
    |world| world.faults.slow_ppm = 0,
    |world| world.faults.crashes = 0,
    |world| world.faults.restarts = 0,
    |world| world.faults.deploys = 0,
    |world| world.faults.freezes = 0,
    |world| world.faults.cuts = 0,
    |world| world.faults.pauses = 0,
    |world| world.faults.losses = 0,
    |world| world.faults.skew_ppm = 0,
    |world| world.faults.node_steps = 0,
    |world| world.faults.origin_steps = 0,
    |world| world.faults.rule_changes = 0,
    |world| world.faults.losses = world.faults.losses.min(1),
    |world| world.faults.crashes = world.faults.crashes.min(1),
    |world| world.faults.rule_changes = world.faults.rule_changes.min(1),
    |world| world.updates_per_s_max = PLENTY_PER_S,
    |world| world.large_ppm = 0,
    |world| world.cost_max = 1,
    |world| world.shape = Shape::Steady,
    |world| world.spread = Spread::Even,
    |world| world.nodes = (world.nodes - 1).max(1),
    |world| world.keys = (world.keys - 1).max(1),
    |world| world.requests -= world.requests / 5,
];

/// The smallest world found that still breaks this promise, and what came of it.
pub fn shrink(scenario: &Scenario, bug: Option<Bug>, violation: &Violation) -> (Scenario, Report) {
    let mut smallest = scenario.clone();
    let mut left = TRIES;
    while let Some(smaller) = CHANGES.iter().find_map(|change| {
        let tried = changed(&smallest, *change).filter(|_| left > 0)?;
        left -= 1;
        breaks(&tried, bug, violation).then_some(tried)
    }) {
        smallest = smaller;
    }
    let report = run(&smallest, bug, true);
    (smallest, report)
}

/// The world after a change, unless that changes nothing.
fn changed(scenario: &Scenario, change: Change) -> Option<Scenario> {
    let mut after = scenario.clone();
    change(&mut after);
    let says = |world: &Scenario| format!("{world:?}");
    (says(&after) != says(scenario) && after.requests > 0 && after.length_us > 0).then_some(after)
}

fn breaks(scenario: &Scenario, bug: Option<Bug>, violation: &Violation) -> bool {
    run(scenario, bug, false).violations.iter().any(|other| other.is_like(violation))
}
