//! Injects faults at their scheduled times.

use tidegate_replication::INTERVAL_US;

use super::replicator::{RECONNECT_US, Step};
use super::{Event, PAUSE_US_MAX, Process, RULE_LAG_US, World};
use crate::bug::Bug;
use crate::checks::{Observation, to_publish};
use crate::scenario::{Attack, CutKind, SECOND_US, Shape};
use crate::store::StoreContents;

/// Between two nodes of a rolling deploy.
const DEPLOY_STEP_US: u64 = 2 * SECOND_US;

/// By how much a clock steps.
const STEP_US: u64 = 3_600 * SECOND_US;

/// How long two replicators go on beside each other at most.
const TWO_US: u64 = 5 * SECOND_US;

/// After how long at most a replicator notices that a link broke.
const NOTICED_US: u64 = 3 * SECOND_US;

/// Rounds from the arrival of all published usage until regions are connected. In the first, they
/// publish the usage of their shares; in the second, they learn that their peers have done so. Two
/// one-way trips are added.
const SETTLES_ROUNDS: u64 = 2;

impl World<'_> {
    /// Injects a fault, or ends one.
    pub(super) fn go_wrong(&mut self, fault: Event) {
        match fault {
            Event::Crash => self.crash(),
            Event::Restart { process } => self.restart(process),
            Event::Deploy => self.deploy(),
            Event::Freeze => self.freeze(),
            Event::Cut => self.cut(),
            Event::Pause => self.pause(),
            Event::Lose => self.lose(),
            Event::Wipe => self.wipe(),
            Event::ChangeRule => self.change_rule(),
            Event::LearnRule { process, edition } => self.node(process).edition = edition,
            Event::StepNode => self.step_node(),
            Event::StepOrigin => self.step_origin(),
            Event::CutBegins { cut } => self.cut_begins(cut),
            Event::CutEnds { cut } => self.cut_ends(cut),
            Event::Healed { known, begun_us } => {
                let seen = Observation::Healed { regions: &self.regions, known: &known, begun_us };
                self.watch.see(self.now_us, &seen);
            }
            Event::Settled { begun_us } => {
                self.watch.see(self.now_us, &Observation::Settled { regions: &self.regions, begun_us });
            }
            Event::ReplicatorDies => self.doom_replicator(),
            Event::TakeOver { region } => self.take_over_lease(region),
            Event::SecondReplicator => self.second_replicator(),
            Event::ReplicatorEnds { region, replicator } => self.replicator_ends(region, replicator),
            _ => {}
        }
    }

    pub(super) fn trouble(&mut self, fault: &str) {
        self.tally.faults += 1;
        self.troubled_until(self.now_us);
        self.trace.note([self.now_us, 5, self.tally.faults, 0], || fault.to_owned());
    }

    pub(super) fn troubled_until(&mut self, until_us: u64) {
        self.see(&Observation::Troubled { until_us });
    }

    /// Draws a region, and notes a fault in it.
    fn trouble_in_region(&mut self, fault: &str) -> usize {
        let region = self.any_region();
        self.trouble(&format!("region {region}: {fault}"));
        region
    }

    /// Draws a region and a node of it, and notes a fault there.
    fn trouble_at_node(&mut self, fault: &str) -> Option<Process> {
        let region = self.trouble_in_region(fault);
        self.any_node(region)
    }

    /// Kills a node, and starts another one in its place.
    fn crash(&mut self) {
        let Some(at) = self.trouble_at_node("a node dies") else { return };
        let node = self.node(at).id;
        self.see(&Observation::Crashed { node });
        self.die(at);
    }

    fn die(&mut self, at: Process) {
        let life = self.node(at).life + 1;
        self.waiting.retain(|_, waits| (waits.at.region, waits.at.node) != (at.region, at.node));
        if let Some(fresh) = self.new_node(life, self.regions[at.region].rules.current) {
            let old = std::mem::replace(self.node(at), fresh);
            self.tally.count(&old);
        }
    }

    /// Stops a node in order, and starts another one. The node has as long as it needs to report,
    /// because the other one runs beside it.
    fn restart(&mut self, process: Option<Process>) {
        let region = match process {
            Some(at) => at.region,
            None => self.any_region(),
        };
        self.trouble(&format!("region {region}: a node is replaced"));
        let Some(at) = process.or_else(|| self.any_node(region)) else { return };
        if self.spoiler.bug == Some(Bug::StopsWithoutFlush) {
            self.die(at);
            return;
        }
        self.node(at).close();
        self.poll(at);
        if let Some(fresh) = self.new_node(0, self.regions[region].rules.current) {
            self.regions[region].nodes.push(fresh);
        }
    }

    /// All nodes of a region are replaced, one after another.
    fn deploy(&mut self) {
        let region = self.any_region();
        for (turn, at) in self.open_nodes(region).into_iter().enumerate() {
            let at_us = self.now_us + turn as u64 * DEPLOY_STEP_US;
            self.schedule(at_us, Event::Restart { process: Some(at) });
        }
    }

    /// Freezes a node: no message reaches it, and its clocks continue.
    fn freeze(&mut self) {
        let region = self.trouble_in_region("a node stalls");
        let until_us = self.now_us + self.rng.u64(0..=self.scenario.faults.freeze_us);
        if let Some(at) = self.any_node(region) {
            self.node(at).frozen_until_us = until_us;
            self.troubled_until(until_us);
        }
    }

    fn cut(&mut self) {
        let region = self.trouble_in_region("a node is partitioned");
        let until_us = self.now_us + self.rng.u64(0..=self.scenario.faults.cut_us);
        if let Some(at) = self.any_node(region) {
            self.node(at).cut_until_us = until_us;
            self.troubled_until(until_us);
        }
    }

    fn pause(&mut self) {
        let region = self.trouble_in_region("its origin stalls");
        let until_us = self.now_us + self.rng.u64(0..PAUSE_US_MAX);
        self.regions[region].store.paused_until_us = until_us;
        self.troubled_until(until_us);
    }

    fn lose(&mut self) {
        let region = self.trouble_in_region("its origin comes back without its last writes");
        let snapshot = self.regions[region].store.snapshot.clone();
        self.come_back_with(region, snapshot);
    }

    /// Deletes all data of a store, and the snapshot that a later loss would restore.
    fn wipe(&mut self) {
        let region = self.trouble_in_region("its origin comes back with nothing");
        let nothing = StoreContents::nothing(self.scenario);
        self.regions[region].store.snapshot = nothing.clone();
        self.come_back_with(region, nothing);
        if self.scenario.shape == Shape::Attack(Attack::Wipes) {
            self.plan_burst_in(region, self.now_us + SECOND_US);
        }
    }

    fn come_back_with(&mut self, region: usize, contents: StoreContents) {
        for meter in 0..self.scenario.meters() {
            let [charged, _, held] = self.regions[region].store.contents.counts(meter);
            let [left, ..] = contents.counts(meter);
            self.see(&Observation::Lost { meter, units: charged.saturating_sub(left) + held });
        }
        self.regions[region].store.begin_anew(self.now_us, contents);
        self.regions[region].losses += 1;
    }

    fn step_node(&mut self) {
        let region = self.trouble_in_region("a node's wall clock steps");
        let back = self.rng.bool();
        if let Some(at) = self.any_node(region) {
            let wall_us = &mut self.node(at).clock.wall_offset_us;
            *wall_us = stepped(*wall_us, back);
        }
    }

    fn step_origin(&mut self) {
        let region = self.trouble_in_region("its origin's clock steps");
        let back = self.rng.bool();
        let epoch_us = &mut self.regions[region].store.epoch_us;
        *epoch_us = stepped(*epoch_us, back);
    }

    /// Changes the limit in all regions, or changes it back. Nodes learn of it one after another.
    fn change_rule(&mut self) {
        self.trouble("the limit changes");
        for region in 0..self.regions.len() {
            self.regions[region].rules.turn(self.scenario);
            let edition = self.regions[region].rules.current;
            for node in 0..self.regions[region].nodes.len() {
                let at_us = self.now_us + self.rng.u64(0..RULE_LAG_US);
                let process = self.process(region, node);
                self.schedule(at_us, Event::LearnRule { process, edition });
            }
        }
    }

    /// The ways between regions that a cut closes, as it begins.
    fn draw_ways(&mut self, kind: CutKind) -> Vec<(usize, usize)> {
        let count = self.regions.len();
        let one = self.any_region();
        let other = (one + self.rng.usize(1..count.max(2))) % count;
        let weights = self.scenario.regions.as_ref().map_or(&[][..], |regions| &regions.weights[..]);
        let largest = (0..weights.len()).max_by_key(|place| weights[*place]).unwrap_or(0);
        let all = (0..count).flat_map(|from| (0..count).map(move |to| (from, to)));
        let all = all.filter(|(from, to)| from != to);
        match kind {
            CutKind::All => all.collect(),
            CutKind::One => all.filter(|(from, to)| *from == one || *to == one).collect(),
            CutKind::Pair => vec![(one, other), (other, one)],
            CutKind::OneWay => vec![(one, other)],
            CutKind::Deaf => all.filter(|(_, to)| *to == largest).collect(),
        }
    }

    fn cut_begins(&mut self, cut: usize) {
        let faults = self.scenario.link_faults();
        let ways = self.draw_ways(faults.cuts[cut].kind);
        self.trouble(&format!("cut: {ways:?}"));
        self.links.cut(cut, &ways, self.now_us);
        for (from, to) in ways.into_iter().filter(|_| faults.resets) {
            self.reset_links(from, to);
        }
    }

    fn cut_ends(&mut self, cut: usize) {
        let ways = self.links.mend(cut);
        self.trace.note([self.now_us, 10, cut as u64, 0], || format!("heals: {ways:?}"));
        if !self.links.is_whole() || self.scenario.is_wan_bad() || self.closed {
            return;
        }
        let (begun_us, wan_us) = (self.now_us, self.wan_us());
        let ways_us = 4 * (wan_us + wan_us / 4 + self.scenario.delay_us);
        // During a longer cut, replicators try to connect all the time.
        let unnoticed_us = (self.links.cut_us + NOTICED_US).saturating_sub(begun_us);
        let at_us = begun_us + unnoticed_us + RECONNECT_US + 2 * INTERVAL_US + ways_us;
        let known = to_publish(&self.regions, self.scenario.keys);
        self.schedule(at_us, Event::Healed { known, begun_us });
        let settled_us = at_us + SETTLES_ROUNDS * INTERVAL_US + ways_us / 2;
        self.schedule(settled_us, Event::Settled { begun_us });
    }

    fn doom_replicator(&mut self) {
        let region = self.any_region();
        let step = Step::ALL[self.rng.usize(0..Step::ALL.len())];
        self.regions[region].doom = Some(step);
    }

    fn second_replicator(&mut self) {
        let region = self.trouble_in_region("a second replicator");
        let mut first = Vec::new();
        for replicator in &mut self.regions[region].replicators {
            replicator.is_ending = true;
            first.push(replicator.incarnation);
        }
        self.take_over(region);
        let until_us = self.now_us + self.rng.u64(0..TWO_US);
        self.troubled_until(until_us + SECOND_US);
        for replicator in first {
            self.schedule(until_us, Event::ReplicatorEnds { region, replicator });
        }
    }
}

fn stepped(us: u64, back: bool) -> u64 {
    if back { us - STEP_US } else { us + STEP_US }
}
