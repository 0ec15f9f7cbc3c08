//! A smaller world that breaks the same promise: less to read.

use std::fmt::Debug;

use crate::bug::Bug;
use crate::report::{Report, Violation};
use crate::scenario::{Faults, RuleChange, Scenario, Shape, Spread};
use crate::swarm::PLENTY_PER_S;
use crate::world::run;

/// How many worlds are tried. Higher: a smaller one may be found; longer.
const TRIES: usize = 400;

type Change = fn(&mut Scenario);

/// Changes that make a world smaller, the most effective first.
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
    |world| world.faults.wipes = 0,
    |world| world.faults.skew_ppm = 0,
    |world| world.faults.node_steps = 0,
    |world| world.faults.origin_steps = 0,
    |world| world.faults.rule_changes = 0,
    |world| world.faults.change = RuleChange::Half,
    |world| world.faults.losses = world.faults.losses.min(1),
    |world| world.faults.crashes = world.faults.crashes.min(1),
    |world| world.faults.rule_changes = world.faults.rule_changes.min(1),
    |world| world.updates_per_s_max = PLENTY_PER_S,
    |world| world.large_ppm = 0,
    |world| world.charges_ppm = 0,
    |world| world.cost_max = 1,
    |world| world.shape = Shape::Steady,
    |world| world.spread = Spread::Even,
    |world| world.nodes = (world.nodes - 1).max(1),
    |world| world.keys = (world.keys - 1).max(1),
    |world| world.requests -= world.requests / 5,
];

/// Returns the smallest world found that still breaks this promise, and its report.
pub fn shrink(scenario: &Scenario, bug: Option<Bug>, violation: &Violation) -> (Scenario, Report) {
    let makes_sense = |world: &Scenario| world.requests > 0 && world.length_us > 0;
    let breaks = |world: &Scenario| breaks(world, bug, violation);
    let smallest = smallest(scenario, CHANGES, TRIES, makes_sense, breaks);
    let report = run(&smallest, bug, true);
    (smallest, report)
}

/// Returns the smallest world that the changes lead to and that still breaks a promise, after at
/// most `worlds_max` attempts.
pub(crate) fn smallest<S: Clone + Debug>(
    scenario: &S,
    changes: &[fn(&mut S)],
    worlds_max: usize,
    makes_sense: impl Fn(&S) -> bool,
    breaks: impl Fn(&S) -> bool,
) -> S {
    let mut smallest = scenario.clone();
    let mut left = worlds_max;
    while let Some(smaller) = changes.iter().find_map(|change| {
        let tried = changed(&smallest, *change).filter(&makes_sense).filter(|_| left > 0)?;
        left -= 1;
        breaks(&tried).then_some(tried)
    }) {
        smallest = smaller;
    }
    smallest
}

/// Returns the world after a change, unless it is the same.
fn changed<S: Clone + Debug>(scenario: &S, change: fn(&mut S)) -> Option<S> {
    let mut after = scenario.clone();
    change(&mut after);
    (format!("{after:?}") != format!("{scenario:?}")).then_some(after)
}

fn breaks(scenario: &Scenario, bug: Option<Bug>, violation: &Violation) -> bool {
    run(scenario, bug, false).violations.iter().any(|other| other.is_like(violation))
}
