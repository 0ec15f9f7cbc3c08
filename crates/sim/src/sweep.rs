//! Many worlds, on as many threads as there are cores.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::bug::Bug;
use crate::matrix::half_loads;
use crate::report::{Report, Violation};
use crate::swarm::scenario_of;
use crate::world::run;

/// How large the worlds of a sweep are.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// How long each lasts, µs.
    pub length_us: u64,
    /// How many requests come in each.
    pub requests: u64,
}

/// The results of many worlds.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// How many worlds.
    pub seeds: u64,
    /// How long they lasted, all together.
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
    /// A hash of all events, which does not depend on the number of threads.
    pub trace_hash: u64,
    /// The seeds of worlds that broke a promise, in order.
    pub broken: Vec<(u64, Vec<Violation>)>,
}

impl Summary {
    fn add(&mut self, report: Report) {
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
        self.trace_hash = with_world(self.trace_hash, report.seed, report.trace.hash());
        if !report.violations.is_empty() {
            self.broken.push((report.seed, report.violations));
        }
    }
}

/// Runs the worlds of many seeds, and calls `progress` after each.
pub fn sweep(seeds: Range<u64>, size: Size, threads: usize, progress: &(dyn Fn() + Sync)) -> Summary {
    let world = |seed| run(&scenario_of(seed, size.length_us, size.requests), None, false);
    let mut summary = over_seeds(seeds, threads, progress, world, Summary::add);
    summary.broken.sort_by_key(|(seed, _)| *seed);
    summary
}

/// Runs each seed on several threads, sums up the results, and calls `progress` after each.
pub(crate) fn over_seeds<R, S: Default + Send>(
    seeds: Range<u64>,
    threads: usize,
    progress: &(dyn Fn() + Sync),
    world: impl Fn(u64) -> R + Sync,
    add: impl Fn(&mut S, R) + Sync,
) -> S {
    let next = AtomicU64::new(seeds.start);
    let summary = Mutex::new(S::default());
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let found = world(seed);
            if let Ok(mut summary) = summary.lock() {
                add(&mut summary, found);
            }
            progress();
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(work);
        }
    });
    summary.into_inner().unwrap_or_default()
}

/// The hash of many worlds with one more: a sum of mixed words, since the order in which worlds end
/// does not matter.
pub(crate) fn with_world(hash: u64, seed: u64, trace: u64) -> u64 {
    let mixed = (trace ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    hash.wrapping_add(mixed.rotate_left(31))
}

/// Returns the first seed with a world that notices a known mistake, and the violation. A mistake
/// in the division of room shows in worlds of uneven nodes, which have no seed.
pub fn catch(bug: Bug, seeds: Range<u64>, size: Size) -> Option<(Option<u64>, Violation)> {
    let loads = if bug.is_of_division() { half_loads() } else { Vec::new() };
    let loads = loads.into_iter().map(|scenario| (None, scenario));
    let worlds = seeds.into_iter().map(|seed| (Some(seed), scenario_of(seed, size.length_us, size.requests)));
    loads.chain(worlds).find_map(|(seed, scenario)| {
        let violation = run(&scenario, Some(bug), false).violations.into_iter().next();
        violation.map(|violation| (seed, violation))
    })
}
