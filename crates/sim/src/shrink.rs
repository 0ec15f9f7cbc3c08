//! A smaller world that breaks the same promise: less to read.

use crate::bug::Bug;
use crate::report::{Report, Violation};
use crate::scenario::{
    Attack, Faults, LinkFaults, PLENTY_PER_S, Regions, RuleChange, Scenario, Shape, Spread,
};
use crate::world::{ATTACK_KEYS, run};

/// How many worlds are tried, of one region and of several. Higher: a smaller one may be found;
/// longer.
const TRIES: usize = 400;
const REGIONS_TRIES: usize = 120;

type Change = fn(&mut Scenario);

/// Changes that make a world smaller, the most effective first.
const CHANGES: &[Change] = &[
    |world| world.faults = Faults::default(),
    |world| of_regions(world, |regions| regions.faults = LinkFaults::default()),
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
    |world| world.faults.pauses = world.faults.pauses.min(1),
    |world| world.faults.losses = world.faults.losses.min(1),
    |world| world.faults.crashes = world.faults.crashes.min(1),
    |world| world.faults.rule_changes = world.faults.rule_changes.min(1),
    |world| world.updates_per_s_max = PLENTY_PER_S,
    |world| world.large_ppm = 0,
    |world| world.charges_ppm = 0,
    |world| world.cost_max = 1,
    |world| of_regions(world, |regions| regions.faults.cuts.clear()),
    |world| of_regions(world, |regions| regions.faults.loss_ppm = 0),
    |world| of_regions(world, |regions| regions.faults.repeat_ppm = 0),
    |world| of_regions(world, |regions| regions.faults.slow_ppm = 0),
    |world| of_regions(world, |regions| regions.faults.replicator_crashes = 0),
    |world| of_regions(world, |regions| regions.faults.two_replicators = 0),
    |world| of_regions(world, |regions| regions.faults.cuts.truncate(1)),
    |world| of_regions(world, |regions| regions.faults.resets = false),
    |world| of_regions(world, |regions| regions.weights.truncate(2)),
    |world| of_regions(world, |regions| regions.weights.truncate(3)),
    |world| of_regions(world, |regions| regions.weights.fill(1)),
    |world| {
        let is_attacked = matches!(world.shape, Shape::Attack(_));
        world.shape = if is_attacked { Shape::Attack(Attack::Flood) } else { Shape::Steady };
    },
    |world| world.spread = Spread::Even,
    |world| world.nodes = (world.nodes - 1).max(1),
    |world| world.keys = (world.keys - 1).max(1),
    |world| world.requests -= world.requests / 5,
    |world| world.length_us -= world.length_us / 5,
];

fn of_regions(world: &mut Scenario, change: fn(&mut Regions)) {
    if let Some(regions) = &mut world.regions {
        change(regions);
    }
}

/// Returns the smallest world found that still breaks this promise, and its report.
pub fn shrink(scenario: &Scenario, bug: Option<Bug>, violation: &Violation) -> (Scenario, Report) {
    let mut smallest = scenario.clone();
    let mut left = if scenario.regions.is_some() { REGIONS_TRIES } else { TRIES };
    while let Some(smaller) = CHANGES.iter().find_map(|change| {
        let tried = changed(&smallest, *change).filter(|_| left > 0)?;
        left -= 1;
        let breaks = run(&tried, bug, false).violations.iter().any(|other| other.is_like(violation));
        breaks.then_some(tried)
    }) {
        smallest = smaller;
    }
    let report = run(&smallest, bug, true);
    (smallest, report)
}

/// Returns the world after a change, unless it is the same or makes no sense.
fn changed(scenario: &Scenario, change: Change) -> Option<Scenario> {
    let mut after = scenario.clone();
    change(&mut after);
    let has_keys = after.keys >= ATTACK_KEYS || !matches!(after.shape, Shape::Attack(_));
    let makes_sense = after.requests > 0 && after.length_us > 0 && has_keys;
    (makes_sense && format!("{after:?}") != format!("{scenario:?}")).then_some(after)
}
