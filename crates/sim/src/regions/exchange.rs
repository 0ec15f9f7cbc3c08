//! Requests, calls and replies inside a region.

use std::sync::Arc;

use tidegate_core::engine::{Effect, Resolution};
use tidegate_core::origin::Call;

use super::scenario::KEYS;
use super::world::{EPOCH_US, Event, ReplyInTransit, WaitingRequest, World};
use crate::memory::{FORGETS_EVERY_US, forget};
use crate::network::arrivals;
use crate::node::{MeteredCharge, SpendResult};
use crate::scenario::{Charge, Faults};

impl World<'_> {
    pub(super) fn request(&mut self, region: usize, key: usize, cost: u64) {
        let here = &mut self.regions[region];
        let node = self.rng.usize(0..here.nodes.len().max(1));
        if here.nodes.is_empty() {
            return;
        }
        self.trace.note([self.now_us, 1, region as u64 * 8 + key as u64, cost], || {
            format!("region {region}, node {node}: request of {cost} for key {key}")
        });
        let metered = [MeteredCharge { charge: Charge { meter: key, cost }, rule: here.rule }];
        let now = here.nodes[node].now(self.now_us);
        match here.nodes[node].spend(now, &metered) {
            SpendResult::Allowed => self.admit(region, key, cost, self.now_us),
            SpendResult::Denied => self.deny(region, key, cost),
            SpendResult::Asks => {
                self.tally.tickets += 1;
                let ticket = self.tally.tickets;
                self.waiting.insert(ticket, WaitingRequest { region, node, key, cost });
                let mut effects = Vec::new();
                self.regions[region].nodes[node].ask(now, ticket, false, &metered, &mut effects);
                self.act(region, node, effects, None);
                self.poll(region, node);
            }
        }
    }

    /// Notes that a request passed: when its node let it pass, or when the origin did.
    fn admit(&mut self, region: usize, key: usize, cost: u64, at_us: u64) {
        self.tally.passed += 1;
        self.check.admitted(region, key, cost, at_us);
        self.trace.note([self.now_us, 4, region as u64 * 8 + key as u64, at_us], || {
            format!("region {region}: {cost} admitted for key {key}, as of {at_us} us")
        });
    }

    fn deny(&mut self, region: usize, key: usize, cost: u64) {
        self.check.denied(region, key, cost, self.now_us);
        self.trace.note([self.now_us, 6, region as u64 * 8 + key as u64, cost], || {
            format!("region {region}: {cost} denied for key {key}")
        });
    }

    pub(super) fn wake(&mut self, region: usize, node: usize, life: u32) {
        let here = &mut self.regions[region].nodes[node];
        if here.life != life || here.wake_us > self.now_us {
            return;
        }
        here.wake_us = u64::MAX;
        self.poll(region, node);
    }

    pub(super) fn poll(&mut self, region: usize, node: usize) {
        let mut effects = Vec::new();
        let here = &mut self.regions[region].nodes[node];
        let now = here.clock.read(self.now_us);
        if let Some(next_us) = here.engine.poll(now, &here.table, &mut effects) {
            let at_us = here.clock.true_time(next_us).max(self.now_us + 1);
            if at_us < here.wake_us {
                here.wake_us = at_us;
                let life = here.life;
                self.schedule(at_us, Event::Wake { region, node, life });
            }
        }
        self.act(region, node, effects, None);
    }

    /// Executes the effects of an engine. A decision of the origin has the time at which the origin
    /// made it, not the arrival time of the reply.
    fn act(&mut self, region: usize, node: usize, effects: Vec<Effect>, decided_us: Option<u64>) {
        let at_us = decided_us.unwrap_or(self.now_us);
        for effect in effects {
            match effect {
                Effect::Call { partition, call, .. } => self.send_call(region, node, partition, &call),
                Effect::Answer { ticket, resolution } => self.resolve(ticket, at_us, &resolution),
            }
        }
    }

    fn resolve(&mut self, ticket: u64, at_us: u64, resolution: &Resolution) {
        let Some(WaitingRequest { region, key, cost, .. }) = self.waiting.remove(&ticket) else { return };
        match resolution {
            Resolution::Allowed { .. } => self.admit(region, key, cost, at_us),
            Resolution::Denied { .. } => self.deny(region, key, cost),
            Resolution::Unanswered => {}
        }
    }

    fn send_call(&mut self, region: usize, node: usize, partition: u16, call: &Arc<Call>) {
        let life = self.regions[region].nodes[node].life;
        for time in self.travel_times() {
            let call = Arc::clone(call);
            let event = Event::CallArrives { region, node, life, partition, call };
            self.schedule(self.now_us + time, event);
        }
    }

    fn travel_times(&mut self) -> Vec<u64> {
        let loss_ppm = if self.closed { 0 } else { self.scenario.faults.loss_ppm };
        let faults = Faults { loss_ppm, ..Faults::default() };
        arrivals(&mut self.rng, &faults, self.scenario.delay_us).collect()
    }

    pub(super) fn call_arrives(
        &mut self,
        region: usize,
        node: usize,
        life: u32,
        partition: u16,
        call: Arc<Call>,
    ) {
        let origin_us = self.origin_us();
        if self.now_us < self.regions[region].paused_until_us {
            let at_us = self.regions[region].paused_until_us;
            self.schedule(at_us, Event::CallArrives { region, node, life, partition, call });
            return;
        }
        self.forget(region, usize::from(partition));
        let here = &mut self.regions[region];
        let sequence = call.sequence;
        let call = Call { store: here.store(self.now_us), ..Call::clone(&call) };
        let answer = here.partitions[usize::from(partition)].apply(origin_us, &call);
        if let Ok(reply) = &answer {
            self.check.note_reply(region, partition, &call, reply, self.now_us);
        }
        self.trace.note([self.now_us, 3, call.node.0, call.sequence], || {
            format!(
                "region {region}: origin answers node {node}: {:?} {:?} {answer:?}",
                call.updates, call.checks
            )
        });
        for time in self.travel_times() {
            let answer = answer.clone();
            let answered = ReplyInTransit { region, node, life, partition, sequence, answer };
            self.schedule(self.now_us + time, Event::Answered(Box::new(answered)));
        }
    }

    /// Expires the meters of a partition, unless the origin did so within `FORGETS_EVERY_US`.
    pub(super) fn forget(&mut self, region: usize, place: usize) {
        let origin_us = self.origin_us();
        let here = &mut self.regions[region];
        if origin_us - here.forgot_us[place] < FORGETS_EVERY_US {
            return;
        }
        here.forgot_us[place] = origin_us;
        let over_us = self.spoiler.over_us(origin_us);
        for (key, was) in forget(&mut here.partitions[place], KEYS, over_us) {
            self.check.forgot(region, key, &was, self.now_us);
            self.trace.note([self.now_us, 11, region as u64 * 8 + key as u64, was.charged()], || {
                format!("region {region}: key {key} has expired: {was:?}")
            });
        }
    }

    pub(super) fn answered(&mut self, answered: ReplyInTransit) {
        let ReplyInTransit { region, node, life, partition, sequence, answer } = answered;
        let here = &mut self.regions[region].nodes[node];
        if here.life != life {
            return;
        }
        let now = here.clock.read(self.now_us);
        let mut effects = Vec::new();
        let mut decided_us = None;
        match answer {
            Ok(reply) => {
                // The reply to a repeated call is the first one.
                decided_us = Some(reply.now_us - EPOCH_US);
                here.engine.on_reply(now, &here.table, partition, sequence, &reply, &mut effects);
            }
            Err(error) => here.engine.on_failure(now, partition, sequence, error.into(), &mut effects),
        }
        self.act(region, node, effects, decided_us);
        self.poll(region, node);
    }
}
