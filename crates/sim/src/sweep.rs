//! Many worlds, on as many threads as there are cores.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bug::Bug;
use crate::kind::Kind;
use crate::matrix::half_loads;
use crate::report::{Reach, Report, Violation};
use crate::scenario::Scenario;
use crate::swarm::{Size, Worlds};
use crate::world::run;

/// How much of a bound is reached at least, in thousandths.
const REACHED_MILLI: u64 = 800;

/// Number of worlds from which on a bound that was not reached is significant.
const TELLING_SEEDS: u64 = 2_000;

/// The results of many worlds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many worlds.
    pub seeds: u64,
    /// How long they lasted, for all of their regions together, µs.
    pub simulated_us: u64,
    /// Requests.
    pub requests: u64,
    /// Requests that waited for the origin.
    pub waited: u64,
    /// Requests that the origin did not answer in time.
    pub unanswered: u64,
    /// Requests among those that passed by their node's part of the limit.
    pub alone: u64,
    /// The longest that one waited, µs.
    pub longest_wait_us: u64,
    /// Units admitted.
    pub admitted: u64,
    /// Units that one bucket for each key would have admitted.
    pub ideal: u64,
    /// Meters spoken of in all calls.
    pub updates: u64,
    /// Injected faults.
    pub faults: u64,
    /// Sum of [`Report::isolations`] over the worlds.
    pub isolations: u64,
    /// Batches that were merged.
    pub batches: u64,
    /// Worlds that show the long-run rate.
    pub rated: u64,
    /// How far limits were passed at worst, for each kind of world of several regions.
    pub reached: BTreeMap<Kind, BoundReach>,
    /// A hash of all events, which does not depend on the number of threads.
    pub trace_hash: u64,
    /// The seeds of worlds that broke a promise, in order.
    pub broken: Vec<(u64, Vec<Violation>)>,
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

impl Summary {
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

    fn add(&mut self, scenario: &Scenario, report: Report) {
        self.seeds += 1;
        self.simulated_us += report.simulated_us;
        self.requests += report.requests;
        self.waited += report.waited;
        self.unanswered += report.unanswered;
        self.alone += report.alone;
        self.longest_wait_us = self.longest_wait_us.max(report.longest_wait_us);
        self.admitted += report.admitted;
        self.ideal += report.ideal;
        self.updates += report.updates;
        self.faults += report.faults;
        self.isolations += report.isolations;
        self.batches += report.batches;
        self.rated += u64::from(report.is_rated);
        if scenario.regions.is_some() {
            let reached = BoundReach { worlds: 1, seed: report.seed, reach: report.reach };
            self.reached.entry(scenario.kind()).and_modify(|known| known.add(reached)).or_insert(reached);
        }
        // A sum of mixed words, since the order in which worlds end does not matter.
        let mixed = (report.trace.hash() ^ report.seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.trace_hash = self.trace_hash.wrapping_add(mixed.rotate_left(31));
        if !report.violations.is_empty() {
            self.broken.push((report.seed, report.violations));
        }
    }
}

/// Runs the worlds of many seeds, and calls `progress` after each.
pub fn sweep(
    worlds: Worlds,
    seeds: Range<u64>,
    size: Size,
    threads: usize,
    progress: &(dyn Fn() + Sync),
) -> Summary {
    let next = AtomicU64::new(seeds.start);
    let summary = Mutex::new(Summary::default());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let scenario = worlds.scenario(seed, size);
            let report = run(&scenario, None, false);
            if let Ok(mut summary) = summary.lock() {
                summary.add(&scenario, report);
            }
            progress();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    let mut summary = summary.into_inner().unwrap_or_default();
    summary.broken.sort_by_key(|(seed, _)| *seed);
    summary
}

/// Returns the first seed with a world that notices a known mistake, and the violation. A mistake
/// in the division of room shows in worlds of uneven nodes, which have no seed.
pub fn catch(bug: Bug, worlds: Worlds, seeds: Range<u64>, size: Size) -> Option<(Option<u64>, Violation)> {
    let loads = if bug.is_of_division() { half_loads() } else { Vec::new() };
    let loads = loads.into_iter().map(|scenario| (None, scenario));
    let seeded = seeds.into_iter().map(|seed| (Some(seed), worlds.scenario(seed, size)));
    loads.chain(seeded).find_map(|(seed, scenario)| {
        let violation = run(&scenario, Some(bug), false).violations.into_iter().next();
        violation.map(|violation| (seed, violation))
    })
}
