//! Injects faults at their scheduled times.

use tidegate_replication::INTERVAL_US;

use super::check::{self, KeyKnowledge};
use super::replicator::{RECONNECT_US, Step};
use super::report::RegionViolation;
use super::scenario::{Attack, CutKind, KEYS, SECOND_US};
use super::world::{Event, PAUSE_US_MAX, World};
use tidegate_core::origin::Partition;

/// How long two replicators go on beside each other at most.
const TWO_US: u64 = 5 * SECOND_US;

/// After how long at most a replicator notices that a link broke.
const NOTICED_US: u64 = 3 * SECOND_US;

/// Rounds from the arrival of all published usage until regions are connected. In the first, they
/// publish the usage of their shares; in the second, they learn that their peers have done so. Two
/// one-way trips are added.
const SETTLES_ROUNDS: u64 = 2;

impl World<'_> {
    pub(super) fn trouble(&mut self, fault: &str) {
        self.tally.faults += 1;
        self.check.troubled(self.now_us);
        self.trace.note([self.now_us, 5, self.tally.faults, 0], || fault.to_owned());
    }

    fn any_region(&mut self) -> usize {
        self.rng.usize(0..self.regions.len())
    }

    pub(super) fn cut_begins(&mut self, cut: usize) {
        let count = self.regions.len();
        let one = self.any_region();
        let other = (one + self.rng.usize(1..count)) % count;
        let all = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let ways: Vec<(usize, usize)> = match self.scenario.faults.cuts[cut].kind {
            CutKind::All => all.filter(|(from, to)| from != to).collect(),
            CutKind::One => all.filter(|(from, to)| from != to && (*from == one || *to == one)).collect(),
            CutKind::Pair => vec![(one, other), (other, one)],
            CutKind::OneWay => vec![(one, other)],
            CutKind::Deaf => {
                let largest = (0..count).max_by_key(|place| self.scenario.weights[*place]).unwrap_or(0);
                all.filter(|(from, to)| from != to && *to == largest).collect()
            }
        };
        self.trouble(&format!("cut: {ways:?}"));
        for (from, to) in &ways {
            self.cut[*from][*to] += 1;
            if self.scenario.faults.resets {
                self.reset_links(*from, *to);
            }
        }
        self.ways.insert(cut, ways);
        self.cut_us = self.now_us;
    }

    pub(super) fn cut_ends(&mut self, cut: usize) {
        let ways = self.ways.remove(&cut).unwrap_or_default();
        for (from, to) in &ways {
            self.cut[*from][*to] -= 1;
        }
        self.trace.note([self.now_us, 10, cut as u64, 0], || format!("heals: {ways:?}"));
        let is_connected = self.cut.iter().flatten().all(|cuts| *cuts == 0);
        if is_connected && !self.scenario.faults.is_wan_bad() && !self.closed {
            let ways_us = 4 * (self.scenario.wan_us + self.scenario.wan_us / 4 + self.scenario.delay_us);
            // During a longer cut, replicators try to connect all the time.
            let unnoticed_us = (self.cut_us + NOTICED_US).saturating_sub(self.now_us);
            let at_us = self.now_us + unnoticed_us + RECONNECT_US + 2 * INTERVAL_US + ways_us;
            let event = Event::Healed { known: check::known(&self.regions), begun_us: self.now_us };
            self.schedule(at_us, event);
            let settled_us = at_us + SETTLES_ROUNDS * INTERVAL_US + ways_us / 2;
            self.schedule(settled_us, Event::Settled { begun_us: self.now_us });
        }
    }

    /// Checks that every region knows the usage of all others two rounds after regions hear each
    /// other again.
    pub(super) fn healed(&mut self, known: &[KeyKnowledge], begun_us: u64) {
        if self.check.is_troubled_since(begun_us) {
            return;
        }
        if let Some((region, of, key)) = self.check.unknown(&self.regions, known) {
            self.check.report(RegionViolation::Apart { region, of, key, at_us: self.now_us });
        }
    }

    /// Checks that every region is connected again after the usage of all regional shares has
    /// arrived.
    pub(super) fn settled(&mut self, begun_us: u64) {
        if self.check.is_troubled_since(begun_us) {
            return;
        }
        if let Some((region, key, is_connected)) = check::unsettled(&self.regions, self.origin_us()) {
            self.check.report(RegionViolation::Unsettled { region, key, is_connected, at_us: self.now_us });
        }
    }

    pub(super) fn doom_replicator(&mut self) {
        let region = self.any_region();
        let step = Step::ALL[self.rng.usize(0..Step::ALL.len())];
        self.regions[region].doom = Some(step);
    }

    pub(super) fn second_replicator(&mut self) {
        let region = self.any_region();
        self.trouble(&format!("region {region}: a second replicator"));
        let replicators = self.regions[region].replicators.iter_mut();
        let first: Vec<u64> = replicators
            .map(|replicator| {
                replicator.is_ending = true;
                replicator.incarnation
            })
            .collect();
        self.take_over(region);
        let until_us = self.now_us + self.rng.u64(0..TWO_US);
        self.check.troubled(until_us + SECOND_US);
        for replicator in first {
            self.schedule(until_us, Event::ReplicatorEnds { region, replicator });
        }
    }

    pub(super) fn pause(&mut self) {
        let region = self.any_region();
        self.trouble(&format!("region {region}: its origin stalls"));
        let until_us = self.now_us + self.rng.u64(0..PAUSE_US_MAX);
        self.regions[region].paused_until_us = until_us;
        self.check.troubled(until_us);
    }

    pub(super) fn lose(&mut self) {
        let region = self.any_region();
        self.trouble(&format!("region {region}: its origin comes back without its last writes"));
        let here = &mut self.regions[region];
        here.partitions.clone_from(&here.snapshot);
        (here.boot, here.booted_us) = (here.boot + 1, self.now_us);
        here.losses += 1;
    }

    pub(super) fn wipe(&mut self) {
        let region = self.any_region();
        self.trouble(&format!("region {region}: its origin comes back with nothing"));
        let here = &mut self.regions[region];
        here.partitions = vec![Partition::default(); KEYS];
        (here.boot, here.booted_us) = (here.boot + 1, self.now_us);
        here.losses += 1;
        if self.scenario.attack == Attack::Wipes {
            self.plan_burst_in(region, self.now_us + SECOND_US);
        }
    }

    /// Kills a node, and starts another one in its place.
    pub(super) fn crash(&mut self) {
        let region = self.any_region();
        self.trouble(&format!("region {region}: a node dies"));
        let node = self.rng.usize(0..self.scenario.nodes);
        self.waiting.retain(|_, waits| (waits.region, waits.node) != (region, node));
        let life = self.regions[region].nodes[node].life + 1;
        if let Some(fresh) = self.new_node(life) {
            self.regions[region].nodes[node] = fresh;
        }
    }
}
