//! Calls and replies, in flight and at the origin.

use std::sync::Arc;

use tidegate_core::origin::{Call, CallReply, Lapse, Partition};

use super::{Event, Process, ReplyInTransit, World};
use crate::checks::{AppliedCall, Observation};
use crate::history::MeterBefore;
use crate::memory::{FORGETS_EVERY_US, forget};
use crate::network::arrivals;
use crate::scenario::{Faults, SECOND_US};
use crate::store::FIRST_BOOT;

/// Margins by which a node must have known the origin for longer than an empty store is up: this
/// time in µs, and one part in so many for clock rates that differ. Beyond them the node knew an
/// earlier store. This is the promise, regardless of the code under test.
const KNOWN_MARGIN_US: u64 = 2 * SECOND_US;
const KNOWN_PARTS: u64 = 16;

impl World<'_> {
    pub(super) fn send(&mut self, from: Process, partition: u16, call: &Arc<Call>) {
        let now_us = self.now_us;
        let again = self.node(from).sequence_in_flight(partition) == Some(call.sequence);
        for call in self.spoiler.on_send(call, again) {
            let here = self.node(from);
            let in_flight = here.sequence_in_flight(partition);
            if in_flight != Some(call.sequence) {
                here.in_flight.insert(partition, (Arc::clone(&call), now_us));
            }
            self.see(&Observation::Sent { node: from.node, sequence: call.sequence, in_flight });
            self.trace.note([now_us, 2, call.node.0, call.sequence], || {
                format!(
                    "region {}, node {}: call {} to {partition}: {:?} {:?}",
                    from.region, from.node, call.sequence, call.updates, call.checks
                )
            });
            self.carry(from, partition, &call);
        }
    }

    fn carry(&mut self, from: Process, partition: u16, call: &Arc<Call>) {
        if self.is_cut(from) && !self.scenario.faults.one_way {
            return;
        }
        for time in self.travel_times() {
            let call = Arc::clone(call);
            self.schedule(self.now_us + time, Event::CallArrives { from, partition, call });
        }
    }

    fn travel_times(&mut self) -> Vec<u64> {
        // After the end the network has no faults, so that all usage can be reported.
        let faults = if self.closed { Faults::default() } else { self.scenario.faults };
        arrivals(&mut self.rng, &faults, self.scenario.delay_us).collect()
    }

    fn is_cut(&mut self, at: Process) -> bool {
        let now_us = self.now_us;
        !self.closed && now_us < self.node(at).cut_until_us
    }

    /// The time that the origin of a region uses, µs.
    pub(super) fn origin_us(&mut self, region: usize) -> u64 {
        self.spoiler.origin_us(self.regions[region].store.epoch_us + self.now_us)
    }

    pub(super) fn call_arrives(&mut self, from: Process, partition: u16, sent: Arc<Call>) {
        let (region, now_us) = (from.region, self.now_us);
        let store = &self.regions[region].store;
        let paused_until_us = store.paused_until_us;
        if now_us < paused_until_us {
            self.schedule(paused_until_us, Event::CallArrives { from, partition, call: sent });
            return;
        }
        let mut call = Call { store: store.id(now_us), ..Call::clone(&sent) };
        let origin_us = self.origin_us(region);
        self.forget(region, partition);
        self.find_out(&sent, region, partition);
        let here = &mut self.regions[region];
        let place = &mut here.store.contents.partitions[usize::from(partition)];
        self.spoiler.at_origin(&mut call, (partition, &*place), origin_us, (self.scenario, &here.rules));
        let has_several = sent.checks.iter().any(|ask| ask.charges.len() > 1);
        let whole_before = has_several.then(|| Partition::clone(place));
        let before = MeterBefore::of_call(place, &sent, origin_us);
        let answer = place.apply(origin_us, &call);
        let mut decided_us = self.true_us();
        if let Ok(reply) = &answer {
            let store = &mut self.regions[region].store;
            let is_fresh = reply.now_us == origin_us && !store.was_decided(partition, &call);
            decided_us = store.decided(partition, &call, is_fresh, decided_us);
            let applied = AppliedCall {
                region,
                partition,
                sent: &sent,
                received: &call,
                reply,
                is_fresh,
                whole_before: whole_before.as_ref(),
                before: &before,
                after: &store.contents.partitions[usize::from(partition)],
                boot: store.boot,
                true_us: decided_us,
                origin_us,
            };
            self.watch.see(now_us, &Observation::Applied(&applied));
            self.notice_loss(reply, is_fresh);
        }
        self.trace.note([now_us, 3, call.node.0, call.sequence], || {
            format!("region {region}: origin answers node {}: {answer:?}", from.node)
        });
        if self.is_cut(from) {
            return;
        }
        let sequence = sent.sequence;
        for time in self.travel_times() {
            let answer = answer.clone();
            let answered = ReplyInTransit { to: from, partition, sequence, answer, decided_us };
            self.schedule(now_us + time, Event::Answered(Box::new(answered)));
        }
    }

    /// Each node that returns after a loss makes the origin wait again before it grants.
    fn notice_loss(&mut self, reply: &CallReply, is_fresh: bool) {
        let faults = &self.scenario.faults;
        if is_fresh && reply.lost && faults.losses + faults.wipes > 0 {
            self.see(&Observation::Troubled { until_us: self.now_us });
        }
    }

    /// Expires the meters of a partition, unless the origin did so within `FORGETS_EVERY_US`. A
    /// clock that was set back does not delay it.
    pub(super) fn forget(&mut self, region: usize, partition: u16) {
        let (place, origin_us) = (usize::from(partition), self.origin_us(region));
        let store = &mut self.regions[region].store;
        if origin_us.abs_diff(store.forgot_us[place]) < FORGETS_EVERY_US {
            return;
        }
        store.forgot_us[place] = origin_us;
        self.watch.see(self.now_us, &Observation::ExpiredSessions { region, partition, origin_us });
        let over_us = self.spoiler.over_us(origin_us);
        let here = &mut store.contents.partitions[place];
        for (meter, was) in forget(here, self.scenario.meters(), over_us) {
            self.watch.see(self.now_us, &Observation::Expired { region, meter, was: &was, origin_us });
            let counted = if was.terms().lapse() == Lapse::Counted { was.held() } else { 0 };
            let [charged, back] = store.contents.forgotten.entry(meter).or_default();
            *charged += was.charged() + counted;
            *back += was.refunded();
            self.trace.note([self.now_us, 7, meter as u64, was.charged()], || {
                format!("region {region}: meter {meter} has expired: {was:?}")
            });
        }
    }

    /// Counts the losses that the first caller of an empty partition cannot notice. The partition
    /// itself cannot tell whether it ever had data. A caller can if it has known the store for
    /// longer than this life of it, or if that partition has answered it.
    fn find_out(&mut self, sent: &Call, region: usize, partition: u16) {
        let (store, partition) = (&mut self.regions[region].store, usize::from(partition));
        let was_called = std::mem::replace(&mut store.contents.called[partition], true);
        if was_called || store.boot == FIRST_BOOT {
            return;
        }
        let sure_us = sent.known_us - sent.known_us / KNOWN_PARTS;
        let is_known = sure_us > store.id(self.now_us).up_us + KNOWN_MARGIN_US;
        if !is_known && sent.acknowledged == 0 {
            store.unnoticed[partition] += 1;
        }
    }

    pub(super) fn answered(&mut self, answered: Box<ReplyInTransit>) {
        let (at, now_us) = (answered.to, self.now_us);
        if self.node(at).life != at.life {
            return;
        }
        if self.is_frozen(at) {
            let until_us = self.node(at).frozen_until_us;
            self.schedule(until_us, Event::Answered(answered));
            return;
        }
        let ReplyInTransit { partition, sequence, answer, decided_us, .. } = *answered;
        let here = &mut self.regions[at.region].nodes[at.node];
        let in_flight = here.sequence_in_flight(partition);
        let sequence = self.spoiler.answers_call(sequence, in_flight);
        let flight = if in_flight == Some(sequence) { here.in_flight.remove(&partition) } else { None };
        let now = here.now(now_us);
        let mut effects = Vec::new();
        match answer {
            Ok(mut reply) => {
                if let Some((call, sent_us)) = &flight {
                    self.spoiler.on_reply(&mut reply, call, now_us - sent_us);
                }
                here.engine.on_reply(now, &here.table, partition, sequence, &reply, &mut effects);
            }
            Err(error) => here.engine.on_failure(now, partition, sequence, error.into(), &mut effects),
        }
        self.act(at, effects, Some(decided_us));
        self.poll(at);
    }
}
