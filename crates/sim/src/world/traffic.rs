//! Requests, and how nodes handle them.

use tidegate_core::DecisionSource;
use tidegate_core::engine::{Effect, Resolution};

use super::{Event, Process, WaitingRequest, World};
use crate::bug::Bug;
use crate::checks::Observation;
use crate::node::{MeteredCharge, SpendResult};
use crate::scenario::{Demand, Shape, Spread};
use crate::store::EPOCH_US;

/// How many requests in ten come to their key's own node, where keys have one.
const AT_HOME_OF_TEN: u8 = 9;

/// How steeply requests fall off from node to node, where few nodes get most.
const FEW_STEEPNESS: f64 = 1.5;

impl World<'_> {
    fn draw_node(&mut self, Demand { region, key, .. }: Demand) -> Option<Process> {
        let all_open = self.is_faultless && !self.closed;
        let open = if all_open { Vec::new() } else { self.open_nodes(region) };
        let count = if all_open { self.regions[region].nodes.len() } else { open.len() };
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
        if all_open { Some(self.process(region, at)) } else { open.get(at).copied() }
    }

    pub(super) fn request(&mut self, demand: Demand) {
        let (now_us, true_us) = (self.now_us, self.true_us());
        let Some(at) = self.draw_node(demand) else { return };
        self.drawn += 1;
        let charges = self.scenario.charges_of(demand);
        if !demand.is_charge {
            self.see(&Observation::Offered { charges: &charges, true_us });
        }
        if self.is_frozen(at) {
            // The client has given up by the time the node could answer.
            self.tally.unanswered += 1;
            return;
        }
        let Demand { region, key, cost, .. } = demand;
        self.trace.note([now_us, 1, number(demand), self.tally.passed], || {
            format!("region {region}, node {}: request of {cost} for key {key}", at.node)
        });
        let (metered, partition) = (self.metered(at, demand), self.scenario.partition_of(key));
        let here = self.node(at);
        let now = here.now(now_us);
        if demand.is_charge {
            here.owe(now, partition, &metered);
            let node = here.id;
            self.see(&Observation::Owed { node, charges: &charges });
            self.poll(at);
            return;
        }
        match here.spend(now, &metered) {
            SpendResult::Allowed => self.admit(demand, true_us),
            SpendResult::Denied => self.deny(demand, true_us),
            SpendResult::Asks => {
                self.tally.tickets += 1;
                self.tally.waited += 1;
                let ticket = self.tally.tickets;
                self.waiting.insert(ticket, WaitingRequest { at, demand, since_us: now_us });
                let mut effects = Vec::new();
                self.node(at).ask(now, ticket, partition, &metered, &mut effects);
                self.act(at, effects, None);
                self.poll(at);
            }
        }
    }

    /// The limits that a request is under, as a node knows them.
    fn metered(&self, at: Process, demand: Demand) -> Vec<MeteredCharge> {
        let region = &self.regions[at.region];
        let edition = region.nodes[at.node].edition;
        let charges = self.scenario.charges_of(demand);
        let rule = |meter| region.rules.rule(edition, meter);
        charges.iter().map(|charge| MeteredCharge { charge: *charge, rule: rule(charge.meter) }).collect()
    }

    /// Notes that a request passed: when its node let it pass, or when the origin did.
    fn admit(&mut self, demand: Demand, true_us: u64) {
        self.tally.passed += 1;
        self.follow();
        let charges = self.scenario.charges_of(demand);
        let Demand { region, key, cost, .. } = demand;
        self.see(&Observation::Admitted { region, charges: &charges, true_us });
        self.trace.note([self.now_us, 4, number(demand), true_us], || {
            format!("region {region}: {cost} admitted for key {key}, as of {} us", true_us - EPOCH_US)
        });
    }

    /// Schedules the next request after an answer, if requests come in sequence.
    fn follow(&mut self) {
        if self.scenario.shape == Shape::Sequence {
            self.schedule_next_request();
        }
    }

    /// Notes that a request was denied: when its node denied it, or when the origin did.
    fn deny(&mut self, demand: Demand, true_us: u64) {
        self.tally.passed_before_denial.get_or_insert(self.tally.passed);
        self.follow();
        let charges = self.scenario.charges_of(demand);
        let Demand { region, key, cost, .. } = demand;
        self.see(&Observation::Denied { region, key, charges: &charges });
        self.see(&Observation::Refused { key, cost, true_us });
        self.trace.note([self.now_us, 6, number(demand), cost], || {
            format!("region {region}: {cost} denied for key {key}")
        });
    }

    pub(super) fn is_frozen(&self, at: Process) -> bool {
        self.now_us < self.regions[at.region].nodes[at.node].frozen_until_us
    }

    pub(super) fn wake(&mut self, at: Process) {
        let (now_us, is_frozen) = (self.now_us, self.is_frozen(at));
        let here = self.node(at);
        if here.life != at.life || here.wake_us > now_us {
            return;
        }
        if is_frozen {
            let until_us = here.frozen_until_us;
            here.wake_us = until_us;
            self.schedule(until_us, Event::Wake(at));
            return;
        }
        here.wake_us = u64::MAX;
        self.poll(at);
    }

    pub(super) fn poll(&mut self, at: Process) {
        if self.is_frozen(at) {
            return;
        }
        let (now_us, mut effects) = (self.now_us, Vec::new());
        let here = self.node(at);
        if let Some(next_us) = here.engine.poll(here.clock.read(now_us), &here.table, &mut effects) {
            // A node may wake up slightly later than its clock reaches the reading, never earlier.
            let wake_us = here.clock.true_time(next_us).max(now_us + 1);
            if wake_us < here.wake_us {
                here.wake_us = wake_us;
                self.schedule(wake_us, Event::Wake(at));
            }
        }
        self.act(at, effects, None);
    }

    /// Executes the effects of an engine. A decision of the origin has the time at which the origin
    /// made it, not the arrival time of the reply.
    pub(super) fn act(&mut self, at: Process, effects: Vec<Effect>, decided_us: Option<u64>) {
        for effect in effects {
            match effect {
                Effect::Call { partition, call, .. } => self.send(at, partition, &call),
                Effect::Answer { ticket, resolution } => self.resolve(ticket, decided_us, &resolution),
            }
        }
    }

    fn resolve(&mut self, ticket: u64, decided_us: Option<u64>, resolution: &Resolution) {
        let true_us = decided_us.unwrap_or(self.true_us());
        let hangs = self.spoiler.bug == Some(Bug::HangsWithStore);
        if hangs && *resolution == Resolution::Unanswered {
            return;
        }
        let Some(WaitingRequest { at, demand, since_us }) = self.waiting.remove(&ticket) else { return };
        if self.node(at).frozen_until_us < since_us {
            let us = self.now_us - since_us;
            self.tally.longest_wait_us = self.tally.longest_wait_us.max(us);
            self.see(&Observation::Waited { us });
        }
        match resolution {
            Resolution::Allowed { .. } => {
                // A waiting request may also pass by a grant that its node received meanwhile.
                if decided_us.is_some() {
                    let (node, charges) = (self.node(at).id, self.scenario.charges_of(demand));
                    self.see(&Observation::Heard { node, charges: &charges });
                }
                self.admit(demand, true_us);
            }
            Resolution::Denied { .. } => self.deny(demand, true_us),
            Resolution::Unanswered if self.spoiler.bug == Some(Bug::FailsOpen) => {
                self.admit(demand, true_us);
            }
            Resolution::Unanswered => self.without_origin(at, demand),
        }
    }

    /// Decides a request that the origin did not: by its class.
    fn without_origin(&mut self, at: Process, demand: Demand) {
        let (now_us, true_us) = (self.now_us, self.true_us());
        let Demand { key, cost, .. } = demand;
        self.tally.unanswered += 1;
        self.see(&Observation::Unanswered { key });
        let is_local = self.scenario.class.without_origin(false) == DecisionSource::Local;
        if !(self.scenario.has_fallback && is_local) {
            self.see(&Observation::Refused { key, cost, true_us });
            return;
        }
        let (metered, partition) = (self.metered(at, demand), self.scenario.partition_of(key));
        let here = &mut self.regions[at.region].nodes[at.node];
        let now = here.now(now_us);
        if !here.decide_alone(now, partition, &metered, |known| self.spoiler.fallback_state(known)) {
            return;
        }
        if self.spoiler.bug != Some(Bug::AloneUntold) {
            here.owe(now, partition, &metered);
        }
        (here.wake_us, self.tally.alone) = (now_us, self.tally.alone + 1);
        let (node, charges) = (here.id, self.scenario.charges_of(demand));
        self.see(&Observation::PassedAlone { node, now, charges: &charges });
        self.schedule(now_us, Event::Wake(at));
        self.admit(demand, true_us);
    }
}

/// A number that identifies the region and key of a request.
fn number(Demand { region, key, .. }: Demand) -> u64 {
    (region as u64) << 8 | key as u64
}
