//! Injects faults at their scheduled times.

use super::{Event, PAUSE_US_MAX, RULE_LAG_US, SECOND_US, StoreContents, World};
use crate::bug::Bug;

/// Between two nodes of a rolling deploy.
const DEPLOY_STEP_US: u64 = 2 * SECOND_US;

/// By how much a clock steps.
const STEP_US: u64 = 3_600 * SECOND_US;

impl World<'_> {
    /// Kills a node, and starts another one in its place.
    pub(super) fn crash(&mut self) {
        self.trouble("a node dies");
        let Some(node) = self.any_node() else { return };
        self.watch.crashed(self.nodes[node].id);
        self.die(node);
    }

    fn die(&mut self, node: usize) {
        let life = self.nodes[node].life + 1;
        self.waiting.retain(|_, waits| waits.node != node);
        if let Some(fresh) = self.new_node(life) {
            let old = std::mem::replace(&mut self.nodes[node], fresh);
            self.count(&old);
        }
    }

    /// Stops a node in order, and starts another one. The node has as long as it needs to report,
    /// because the other one runs beside it.
    pub(super) fn restart(&mut self, node: Option<usize>) {
        self.trouble("a node is replaced");
        let Some(node) = node.or_else(|| self.any_node()) else { return };
        if self.spoiler.bug == Some(Bug::StopsWithoutFlush) {
            self.die(node);
            return;
        }
        self.nodes[node].close();
        self.poll(node);
        if let Some(fresh) = self.new_node(0) {
            self.nodes.push(fresh);
        }
    }

    /// All nodes are replaced, one after another.
    pub(super) fn deploy(&mut self) {
        for (turn, node) in self.open_nodes().into_iter().enumerate() {
            let at_us = self.now_us + turn as u64 * DEPLOY_STEP_US;
            self.schedule(at_us, Event::Restart { node: Some(node) });
        }
    }

    /// Freezes a node: no message reaches it, and its clocks continue.
    pub(super) fn freeze(&mut self) {
        self.trouble("a node stalls");
        let for_us = self.rng.u64(0..=self.scenario.faults.freeze_us);
        if let Some(node) = self.any_node() {
            self.nodes[node].frozen_until_us = self.now_us + for_us;
            self.watch.troubled(self.now_us + for_us);
        }
    }

    pub(super) fn cut(&mut self) {
        self.trouble("a node is partitioned");
        let for_us = self.rng.u64(0..=self.scenario.faults.cut_us);
        if let Some(node) = self.any_node() {
            self.nodes[node].cut_until_us = self.now_us + for_us;
            self.watch.troubled(self.now_us + for_us);
        }
    }

    pub(super) fn pause(&mut self) {
        self.trouble("the origin stalls");
        self.store.paused_until_us = self.now_us + self.rng.u64(0..PAUSE_US_MAX);
        self.watch.troubled(self.store.paused_until_us);
    }

    pub(super) fn lose(&mut self) {
        self.trouble("the origin comes back without its last writes");
        self.come_back_with(self.snapshot.clone());
    }

    /// Deletes all data of the store, and the snapshot that a later loss would restore.
    pub(super) fn wipe(&mut self) {
        self.trouble("the origin comes back with nothing");
        self.snapshot = StoreContents::nothing();
        self.come_back_with(StoreContents::nothing());
    }

    fn come_back_with(&mut self, kept: StoreContents) {
        for meter in 0..self.scenario.meters() {
            let [charged, _, held] = self.store.kept.counts(meter, self.scenario.shared);
            let [left, ..] = kept.counts(meter, self.scenario.shared);
            self.watch.lost(meter, charged.saturating_sub(left) + held);
        }
        self.store.kept = kept;
        self.store.begin_anew(self.now_us);
    }

    pub(super) fn step_node(&mut self) {
        self.trouble("a node's wall clock steps");
        let back = self.rng.bool();
        if let Some(node) = self.any_node() {
            let wall_us = &mut self.nodes[node].clock.wall_offset_us;
            *wall_us = stepped(*wall_us, back);
        }
    }

    pub(super) fn step_origin(&mut self) {
        self.trouble("the origin's clock steps");
        let back = self.rng.bool();
        self.store.epoch_us = stepped(self.store.epoch_us, back);
    }

    /// Changes the limit, or changes it back. Nodes learn of it one after another.
    pub(super) fn change_rule(&mut self) {
        self.trouble("the limit changes");
        self.rule_editions.turn(self.scenario);
        for node in 0..self.nodes.len() {
            let at_us = self.now_us + self.rng.u64(0..RULE_LAG_US);
            self.schedule(at_us, Event::LearnRule { node, edition: self.rule_editions.current });
        }
    }

    fn trouble(&mut self, fault: &str) {
        self.tally.faults += 1;
        self.watch.troubled(self.now_us);
        self.trace.note([self.now_us, 5, self.tally.faults, 0], || fault.to_owned());
    }
}

fn stepped(us: u64, back: bool) -> u64 {
    if back { us - STEP_US } else { us + STEP_US }
}
