//! Calls and replies, in flight and at the origin.

use std::sync::Arc;

use tidegate_core::origin::{Call, Lapse, Partition};

use super::{Event, FIRST_BOOT, ReplyInTransit, SECOND_US, World};
use crate::memory::{FORGETS_EVERY_US, forget};
use crate::network::arrivals;
use crate::scenario::Faults;
use crate::watch::{SessionId, Watch};

/// Margins by which a node must have known the origin for longer than an empty store is up: this
/// time in µs, and one part in so many for clock rates that differ. Beyond them the node knew an
/// earlier store. This is the promise, regardless of the code under test.
const KNOWN_MARGIN_US: u64 = 2 * SECOND_US;
const KNOWN_PARTS: u64 = 16;

impl World<'_> {
    pub(super) fn send(&mut self, node: usize, partition: u16, call: &Arc<Call>) {
        let session = SessionId { node, life: self.nodes[node].life, partition };
        let calls = self.spoiler.on_send(call, self.watch.is_in_flight(session, call.sequence));
        for call in calls {
            self.watch.sent(session, &call, self.now_us);
            self.trace.note([self.now_us, 2, call.node.0, call.sequence], || {
                format!(
                    "node {node}: call {} to {partition}: {:?} {:?}",
                    call.sequence, call.updates, call.checks
                )
            });
            self.carry(session, &call);
        }
    }

    fn carry(&mut self, session: SessionId, call: &Arc<Call>) {
        let SessionId { node, life, partition } = session;
        if self.is_cut(node) && !self.scenario.faults.one_way {
            return;
        }
        for time in self.travel_times() {
            let call = Arc::clone(call);
            self.schedule(self.now_us + time, Event::CallArrives { node, life, partition, call });
        }
    }

    fn travel_times(&mut self) -> Vec<u64> {
        let faults = self.faults_now();
        arrivals(&mut self.rng, &faults, self.scenario.delay_us).collect()
    }

    /// Returns the faults in force. After the end the network has none, so that all usage can be
    /// reported.
    fn faults_now(&self) -> Faults {
        if self.closed { Faults::default() } else { self.scenario.faults }
    }

    fn is_cut(&self, node: usize) -> bool {
        !self.closed && self.now_us < self.nodes[node].cut_until_us
    }

    pub(super) fn call_arrives(&mut self, node: usize, life: u32, partition: u16, call: Arc<Call>) {
        if self.now_us < self.store.paused_until_us {
            self.schedule(self.store.paused_until_us, Event::CallArrives { node, life, partition, call });
            return;
        }
        let sent = call;
        let mut call = Call::clone(&sent);
        call.store = self.store.id(self.now_us);
        let origin_us = self.spoiler.origin_us(self.store.epoch_us + self.now_us);
        self.forget(partition, origin_us);
        let place = (partition, &self.store.kept.partitions[usize::from(partition)]);
        self.spoiler.at_origin(&mut call, place, origin_us, (self.scenario, &self.rule_editions));
        self.find_out(&sent, partition);
        let here = &mut self.store.kept.partitions[usize::from(partition)];
        let copy = sent.checks.iter().any(|ask| ask.charges.len() > 1).then(|| Partition::clone(here));
        let before = Watch::before(here, &sent, origin_us);
        let answer = here.apply(origin_us, &call);
        let mut decided_us = super::EPOCH_US + self.now_us;
        if let Ok(reply) = &answer {
            let is_fresh = reply.now_us == origin_us && !self.watch.was_decided(partition, &call);
            decided_us = self.watch.decided(partition, &call, is_fresh, decided_us);
            self.watch.call_received(partition, call.node, origin_us);
            if !is_fresh {
                self.watch.repeated(here, &sent, &before);
            }
            if is_fresh {
                self.watch.counted_by(here, (&sent, &before), self.store.boot, decided_us);
                self.watch.lapsed(here, &sent, &before);
                self.watch.passed(&sent, reply);
                self.watch.note_report(&sent);
                // Each node that returns after a loss makes the origin wait again before it grants.
                let faults = &self.scenario.faults;
                if reply.lost && faults.losses + faults.wipes > 0 {
                    self.watch.troubled(self.now_us);
                }
                self.watch.granted(here, &call, reply);
                if let Some(copy) = copy {
                    self.watch.charged_whole(copy, here, (&sent, &call), reply);
                }
            }
        }
        self.trace.note([self.now_us, 3, call.node.0, call.sequence], || {
            format!("origin: {} answers {answer:?}", call.node.0)
        });
        if self.is_cut(node) {
            return;
        }
        let sequence = sent.sequence;
        for time in self.travel_times() {
            let answer = answer.clone();
            let answered = ReplyInTransit { node, life, partition, sequence, answer, decided_us };
            self.schedule(self.now_us + time, Event::Answered(Box::new(answered)));
        }
    }

    /// Expires the meters of a partition, unless the origin did so within `FORGETS_EVERY_US`. A
    /// clock that was set back does not delay it.
    fn forget(&mut self, partition: u16, origin_us: u64) {
        let place = usize::from(partition);
        if origin_us.abs_diff(self.store.forgot_us[place]) < FORGETS_EVERY_US {
            return;
        }
        self.store.forgot_us[place] = origin_us;
        self.watch.forgot_sessions(partition, origin_us);
        let over_us = self.spoiler.over_us(origin_us);
        let here = &mut self.store.kept.partitions[place];
        for (meter, was) in forget(here, self.scenario.meters(), over_us) {
            self.watch.forgot(meter, &was, origin_us, self.now_us);
            let counted = if was.terms().lapse() == Lapse::Counted { was.held() } else { 0 };
            let [charged, back] = self.store.kept.forgotten.entry(meter).or_default();
            *charged += was.charged() + counted;
            *back += was.refunded();
            self.trace.note([self.now_us, 7, meter as u64, was.charged()], || {
                format!("origin: meter {meter} has expired: {was:?}")
            });
        }
    }

    /// Counts the losses that the first caller of an empty partition cannot notice. The partition
    /// itself cannot tell whether it ever had data. A caller can if it has known the store for
    /// longer than this life of it, or if that partition has answered it.
    fn find_out(&mut self, sent: &Call, partition: u16) {
        let partition = usize::from(partition);
        let was_called = std::mem::replace(&mut self.store.kept.called[partition], true);
        if was_called || self.store.boot == FIRST_BOOT {
            return;
        }
        let sure_us = sent.known_us - sent.known_us / KNOWN_PARTS;
        let is_known = sure_us > self.store.id(self.now_us).up_us + KNOWN_MARGIN_US;
        if !is_known && sent.acknowledged == 0 {
            self.unnoticed[partition] += 1;
        }
    }

    pub(super) fn answered(&mut self, answered: Box<ReplyInTransit>) {
        let node = answered.node;
        if self.nodes[node].life != answered.life {
            return;
        }
        if self.is_frozen(node) {
            self.schedule(self.nodes[node].frozen_until_us, Event::Answered(answered));
            return;
        }
        let ReplyInTransit { life, partition, sequence, answer, decided_us, .. } = *answered;
        let session = SessionId { node, life, partition };
        let sequence = self.spoiler.answers_call(sequence, self.watch.in_flight(session));
        let flight = self.watch.answered(session, sequence);
        let here = &mut self.nodes[node];
        let now = here.clock.read(self.now_us);
        let mut effects = Vec::new();
        match answer {
            Ok(mut reply) => {
                if let Some((call, sent_us)) = &flight {
                    self.spoiler.on_reply(&mut reply, call, self.now_us - sent_us);
                }
                here.engine.on_reply(now, &here.table, partition, sequence, &reply, &mut effects);
            }
            Err(error) => here.engine.on_failure(now, partition, sequence, error.into(), &mut effects),
        }
        self.act(node, effects, Some(decided_us));
        self.poll(node);
    }
}
