//! Requests, and how nodes handle them.

use tidegate_core::DecisionSource;
use tidegate_core::engine::{Effect, Resolution};

use super::{Event, WaitingRequest, World};
use crate::bug::Bug;
use crate::node::{MeteredCharge, SpendResult};
use crate::scenario::{Charge, Demand, Shape, Spread};

/// How many requests in ten come to their key's own node, where keys have one.
const AT_HOME_OF_TEN: u8 = 9;

/// How steeply requests fall off from node to node, where few nodes get most.
const FEW_STEEPNESS: f64 = 1.5;

impl World<'_> {
    fn draw_node(&mut self, key: usize) -> Option<usize> {
        let all_open = self.is_faultless && !self.closed;
        let open = if all_open { Vec::new() } else { self.open_nodes() };
        let count = if all_open { self.nodes.len() } else { open.len() };
        let last = count.checked_sub(1)?;
        let at = match self.scenario.spread {
            Spread::Half if self.rng.bool() => 0,
            Spread::InTurn => (self.drawn % count as u64) as usize,
            Spread::Zipf => {
                let point = self.rng.f64() * self.zipf.last().copied().unwrap_or(0.0);
                self.zipf.partition_point(|sum| *sum <= point).min(last)
            }
            Spread::Home if self.rng.u8(0..10) < AT_HOME_OF_TEN => key % count,
            Spread::Few => ((-(1.0 - self.rng.f64()).ln() / FEW_STEEPNESS) as usize).min(last),
            Spread::Even | Spread::Home | Spread::Half => self.rng.usize(0..=last),
        };
        if all_open { Some(at) } else { open.get(at).copied() }
    }

    pub(super) fn request(&mut self, demand: Demand) {
        let true_us = self.true_us();
        let Demand { key, cost, .. } = demand;
        let Some(node) = self.draw_node(key) else { return };
        self.drawn += 1;
        if !demand.is_charge {
            self.watch.offered(self.scenario.charges_of(demand), true_us);
        }
        if self.is_frozen(node) {
            // The client has given up by the time the node could answer.
            self.tally.unanswered += 1;
            return;
        }
        self.trace.note([self.now_us, 1, key as u64, self.tally.passed], || {
            format!("node {node}: request of {cost} for key {key}")
        });
        let metered = self.metered(node, demand);
        let now = self.nodes[node].now(self.now_us);
        if demand.is_charge {
            self.watch.owed(self.nodes[node].id, self.scenario.charges_of(demand));
            self.nodes[node].owe(now, self.scenario.shared, &metered);
            self.poll(node);
            return;
        }
        match self.nodes[node].spend(now, &metered) {
            SpendResult::Allowed => self.admit(demand, true_us),
            SpendResult::Denied => self.deny(demand, true_us),
            SpendResult::Asks => {
                self.tally.tickets += 1;
                self.tally.waited += 1;
                let ticket = self.tally.tickets;
                self.waiting.insert(ticket, WaitingRequest { node, demand, since_us: self.now_us });
                let mut effects = Vec::new();
                self.nodes[node].ask(now, ticket, self.scenario.shared, &metered, &mut effects);
                self.act(node, effects, None);
                self.poll(node);
            }
        }
    }

    /// The limits that a request is under, as a node knows them.
    fn metered(&self, node: usize, demand: Demand) -> Vec<MeteredCharge> {
        let edition = self.nodes[node].edition;
        let metered =
            |charge: Charge| MeteredCharge { charge, rule: self.rule_editions.rule(edition, charge.meter) };
        self.scenario.charges_of(demand).map(metered).collect()
    }

    /// Notes that a request passed: when its node let it pass, or when the origin did.
    fn admit(&mut self, demand: Demand, at_us: u64) {
        self.tally.passed += 1;
        self.follow();
        self.watch.admitted(self.scenario.charges_of(demand), at_us);
        let Demand { key, cost, .. } = demand;
        self.trace.note([self.now_us, 4, key as u64, at_us], || {
            format!("{cost} admitted for key {key}, as of {} us", at_us - super::EPOCH_US)
        });
    }

    /// Schedules the next request after an answer, if requests come in sequence.
    fn follow(&mut self) {
        if self.scenario.shape == Shape::Sequence {
            self.schedule_next_request();
        }
    }

    /// Notes that a request was denied: when its node denied it, or when the origin did.
    fn deny(&mut self, demand: Demand, at_us: u64) {
        let Demand { key, cost, .. } = demand;
        self.tally.passed_before_denial.get_or_insert(self.tally.passed);
        self.follow();
        self.watch.denied(key, self.scenario.charges_of(demand), self.now_us);
        self.watch.refused(demand.key, demand.cost, at_us);
        self.trace.note([self.now_us, 6, key as u64, cost], || format!("{cost} denied for key {key}"));
    }

    pub(super) fn is_frozen(&self, node: usize) -> bool {
        self.now_us < self.nodes[node].frozen_until_us
    }

    pub(super) fn wake(&mut self, node: usize, life: u32) {
        if self.nodes[node].life != life || self.nodes[node].wake_us > self.now_us {
            return;
        }
        if self.is_frozen(node) {
            let at_us = self.nodes[node].frozen_until_us;
            self.nodes[node].wake_us = at_us;
            self.schedule(at_us, Event::Wake { node, life });
            return;
        }
        self.nodes[node].wake_us = u64::MAX;
        self.poll(node);
    }

    pub(super) fn poll(&mut self, node: usize) {
        if self.is_frozen(node) {
            return;
        }
        let mut effects = Vec::new();
        let here = &mut self.nodes[node];
        let now = here.clock.read(self.now_us);
        let next = here.engine.poll(now, &here.table, &mut effects);
        if let Some(next_us) = next {
            // A node may wake up slightly later than its clock reaches the reading, never earlier.
            let at_us = here.clock.true_time(next_us).max(self.now_us + 1);
            if at_us < here.wake_us {
                here.wake_us = at_us;
                let life = here.life;
                self.schedule(at_us, Event::Wake { node, life });
            }
        }
        self.act(node, effects, None);
    }

    /// Executes the effects of an engine. A decision of the origin has the time at which the origin
    /// made it, not the arrival time of the reply.
    pub(super) fn act(&mut self, node: usize, effects: Vec<Effect>, decided_us: Option<u64>) {
        for effect in effects {
            match effect {
                Effect::Call { partition, call, .. } => self.send(node, partition, &call),
                Effect::Answer { ticket, resolution } => self.resolve(ticket, decided_us, &resolution),
            }
        }
    }

    fn resolve(&mut self, ticket: u64, decided_us: Option<u64>, resolution: &Resolution) {
        let at_us = decided_us.unwrap_or(self.true_us());
        let hangs = self.spoiler.bug == Some(Bug::HangsWithStore);
        if hangs && *resolution == Resolution::Unanswered {
            return;
        }
        let Some(waits) = self.waiting.remove(&ticket) else { return };
        if self.nodes[waits.node].frozen_until_us < waits.since_us {
            let waited_us = self.now_us - waits.since_us;
            self.tally.longest_wait_us = self.tally.longest_wait_us.max(waited_us);
            self.watch.waited(waited_us);
        }
        match resolution {
            Resolution::Allowed { .. } => {
                // A waiting request may also pass by a grant that its node received meanwhile.
                if decided_us.is_some() {
                    let id = self.nodes[waits.node].id;
                    self.watch.heard(id, self.scenario.charges_of(waits.demand));
                }
                self.admit(waits.demand, at_us);
            }
            Resolution::Denied { .. } => self.deny(waits.demand, at_us),
            Resolution::Unanswered if self.spoiler.bug == Some(Bug::FailsOpen) => {
                self.admit(waits.demand, at_us);
            }
            Resolution::Unanswered => self.without_origin(waits.node, waits.demand),
        }
    }

    /// Decides a request that the origin did not: by its class.
    fn without_origin(&mut self, node: usize, demand: Demand) {
        self.tally.unanswered += 1;
        self.watch.unanswered(demand.key, self.now_us);
        if self.scenario.class.without_origin(false) != DecisionSource::Local {
            self.watch.refused(demand.key, demand.cost, self.true_us());
            return;
        }
        let (metered, shared) = (self.metered(node, demand), self.scenario.shared);
        let here = &mut self.nodes[node];
        let now = here.clock.read(self.now_us);
        if !here.decide_alone(now, shared, &metered, |known| self.spoiler.fallback_state(known)) {
            return;
        }
        if self.spoiler.bug != Some(Bug::AloneUntold) {
            here.owe(now, shared, &metered);
        }
        (here.wake_us, self.tally.alone) = (self.now_us, self.tally.alone + 1);
        let (id, life) = (here.id, here.life);
        self.watch.passed_alone(id, now, self.scenario.charges_of(demand));
        self.schedule(self.now_us, Event::Wake { node, life });
        self.admit(demand, self.true_us());
    }
}
