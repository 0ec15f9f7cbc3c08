//! Many worlds of several regions, on as many threads as there are cores, and smaller ones that
//! break the same promise.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;

use super::bug::RegionBug;
use super::report::{Reach, RegionReport, RegionViolation};
use super::scenario::{Attack, Kind, REACHED_MILLI, RegionFaults, RegionScenario, region_scenario_of};
use super::world::run_regions;
use crate::shrink::smallest;
use crate::sweep::{Size, over_seeds, with_world};

/// How many worlds are tried for a smaller one. Higher: a smaller one may be found; longer.
const TRIES: usize = 120;

/// Number of worlds from which on a bound that was not reached is significant.
const TELLING_SEEDS: u64 = 2_000;

/// The results of many worlds of several regions.
#[derive(Clone, Debug, Default)]
pub struct RegionSummary {
    /// How many worlds.
    pub seeds: u64,
    /// How long they lasted, for all of their regions together, µs.
    pub simulated_us: u64,
    /// Requests.
    pub requests: u64,
    /// Requests that passed.
    pub passed: u64,
    /// Injected faults.
    pub faults: u64,
    /// Sum of `RegionReport::isolations` over the worlds.
    pub isolations: u64,
    /// Batches that were merged.
    pub batches: u64,
    /// Worlds that show the long-run rate.
    pub rated: u64,
    /// How far limits were passed at worst, for each kind of world.
    pub reached: BTreeMap<Kind, BoundReach>,
    /// A hash of all events, which does not depend on the number of threads.
    pub trace_hash: u64,
    /// The seeds of worlds that broke a promise, in order.
    pub broken: Vec<(u64, Vec<RegionViolation>)>,
}

/// The worlds of one group, and the one that came closest to its bound. Of equal ones it is that
/// with the lower seed, whichever ended first.
#[derive(Clone, Copy, Debug)]
pub struct BoundReach {
    /// How many worlds.
    pub worlds: u64,
    /// The seed of that world.
    pub seed: u64,
    /// Over-admission and bound of that world.
    pub reach: Reach,
}

impl BoundReach {
    fn add(&mut self, other: Self) {
        self.worlds += other.worlds;
        let rank = |reached: &Self| (reached.reach.milli(), Reverse(reached.seed));
        if rank(&other) > rank(self) {
            (self.seed, self.reach) = (other.seed, other.reach);
        }
    }
}

impl RegionSummary {
    /// The most of a printed bound that was reached in any world of these kinds, in thousandths.
    pub fn reached_milli(&self, counts: impl Fn(&Kind) -> bool) -> u64 {
        let of_these = self.reached.iter().filter(|(kind, _)| counts(kind));
        of_these.map(|(_, reached)| reached.reach.milli()).max().unwrap_or(0)
    }

    /// Returns the groups that reached less of their bound than `REACHED_MILLI`, with the part
    /// reached in thousandths. Attackers reach that much of a tight bound. Groups that differ only
    /// in `cuts` count as one. Empty if there are too few worlds.
    pub fn loose(&self) -> Vec<(Kind, u64)> {
        let mut loose: Vec<(Kind, u64)> = Vec::new();
        for kind in self.reached.keys().filter(|_| self.seeds >= TELLING_SEEDS) {
            let is_like = |other: &Kind| Kind { cuts: kind.cuts, ..*other } == *kind;
            let reached = self.reached_milli(is_like);
            if reached < REACHED_MILLI && !loose.iter().any(|(known, _)| is_like(known)) {
                loose.push((*kind, reached));
            }
        }
        loose
    }

    fn add(&mut self, kind: Kind, report: RegionReport) {
        self.seeds += 1;
        self.simulated_us += report.simulated_us;
        self.requests += report.requests;
        self.passed += report.passed;
        self.faults += report.faults;
        self.isolations += report.isolations;
        self.batches += report.batches;
        self.rated += u64::from(report.is_rated);
        let reached = BoundReach { worlds: 1, seed: report.seed, reach: report.reach };
        self.reached.entry(kind).and_modify(|known| known.add(reached)).or_insert(reached);
        self.trace_hash = with_world(self.trace_hash, report.seed, report.trace.hash());
        if !report.violations.is_empty() {
            self.broken.push((report.seed, report.violations));
        }
    }
}

/// Runs the worlds of several regions of many seeds, and calls `progress` after each.
pub fn sweep_regions(
    seeds: Range<u64>,
    size: Size,
    threads: usize,
    progress: &(dyn Fn() + Sync),
) -> RegionSummary {
    let world = |seed| {
        let scenario = region_scenario_of(seed, size.length_us, size.requests);
        (scenario.kind(), run_regions(&scenario, None, false))
    };
    let add = |summary: &mut RegionSummary, (kind, report)| summary.add(kind, report);
    let mut summary = over_seeds(seeds, threads, progress, world, add);
    summary.broken.sort_by_key(|(seed, _)| *seed);
    summary
}

/// Returns the first seed with a world that notices a known mistake, and the violation.
pub fn catch_in_regions(bug: RegionBug, seeds: Range<u64>, size: Size) -> Option<(u64, RegionViolation)> {
    seeds.into_iter().find_map(|seed| {
        let scenario = region_scenario_of(seed, size.length_us, size.requests);
        let report = run_regions(&scenario, Some(bug), false);
        report.violations.into_iter().next().map(|violation| (seed, violation))
    })
}

type Change = fn(&mut RegionScenario);

/// Changes that make a world smaller, the most effective first.
const CHANGES: &[Change] = &[
    |world| world.faults = RegionFaults::default(),
    |world| world.requests /= 2,
    |world| world.length_us /= 2,
    |world| world.faults.cuts.clear(),
    |world| world.faults.wan_loss_ppm = 0,
    |world| world.faults.wan_repeat_ppm = 0,
    |world| world.faults.wan_slow_ppm = 0,
    |world| world.faults.replicator_crashes = 0,
    |world| world.faults.two_replicators = 0,
    |world| world.faults.pauses = 0,
    |world| world.faults.losses = 0,
    |world| world.faults.wipes = 0,
    |world| world.faults.crashes = 0,
    |world| world.faults.loss_ppm = 0,
    |world| world.faults.cuts.truncate(1),
    |world| world.faults.resets = false,
    |world| world.faults.replicator_crashes = world.faults.replicator_crashes.min(1),
    |world| world.faults.pauses = world.faults.pauses.min(1),
    |world| world.faults.losses = world.faults.losses.min(1),
    |world| world.faults.crashes = world.faults.crashes.min(1),
    |world| world.weights.truncate(2),
    |world| world.weights.truncate(3),
    |world| world.weights.iter_mut().for_each(|weight| *weight = 1),
    |world| world.nodes = 1,
    |world| world.attack = Attack::Flood,
    |world| world.requests -= world.requests / 5,
    |world| world.length_us -= world.length_us / 5,
];

/// Returns the smallest world found that still breaks this promise, and its report.
pub fn shrink_regions(
    scenario: &RegionScenario,
    bug: Option<RegionBug>,
    violation: &RegionViolation,
) -> (RegionScenario, RegionReport) {
    let makes_sense = |world: &RegionScenario| world.requests > 0 && world.length_us > 0;
    let breaks = |world: &RegionScenario| breaks(world, bug, violation);
    let smallest = smallest(scenario, CHANGES, TRIES, makes_sense, breaks);
    let report = run_regions(&smallest, bug, true);
    (smallest, report)
}

fn breaks(scenario: &RegionScenario, bug: Option<RegionBug>, violation: &RegionViolation) -> bool {
    run_regions(scenario, bug, false).violations.iter().any(|other| other.is_like(violation))
}
