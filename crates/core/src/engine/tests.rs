//! The engine, step by step: a test is its clock, its network and its origin.

mod calls;
mod check_groups;
mod deadlines;
mod denials;
mod grant_life;
mod idle_session;
mod meter_state;
mod refunds;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::origin::{
    CROSS_REGION_LIFE_US_MAX, Call, CheckReply, CrossRegionTerms, Lapse, MeterReply, MeterUpdate, Partition,
    Terms, UNDECIDED,
};
use crate::table::Shares;
use crate::{KeySpace, Limit, Retry, Secret, Verdict};

pub(super) const MS: u64 = 1_000;

const START_US: u64 = 10_000 * MS;

/// An engine and a table, with the effects that the engine returned.
struct Bench {
    engine: Engine,
    table: Table,
    space: KeySpace,
    now_us: u64,
    effects: Vec<Effect>,
    tickets: Ticket,
}

impl Bench {
    fn new() -> Self {
        Self {
            engine: Engine::new(NodeId(7), EngineSettings::default()),
            table: Table::new(1 << 14, &Shares::single()).expect("a few lines"),
            space: KeySpace::new(&Secret::from_bytes([1; 16]), Shares::FIRST, "key"),
            now_us: START_US,
            effects: Vec::new(),
            tickets: 0,
        }
    }

    fn now(&self) -> Now {
        Now::from_micros(self.now_us, self.now_us)
    }

    /// A limit of `amount` per second on one key, at a version of its rule.
    fn meter(&self, amount: u64, version: u32) -> MeterRef {
        let limit = Limit::gcra(amount, Duration::from_secs(1)).expect("in range").at_origin();
        let terms = Terms::new(&limit, 0, Lapse::Counted, version);
        let (key, digest) = (Arc::from(&b"key"[..]), self.space.digest(&[b"key"]));
        MeterRef { key, limit, terms, space: self.space, digest }
    }

    /// The same for another key.
    fn meter_of(&self, key: &[u8], amount: u64) -> MeterRef {
        MeterRef { key: Arc::from(key), digest: self.space.digest(&[key]), ..self.meter(amount, 1) }
    }

    fn request(&mut self, cost: u64) -> Ticket {
        let meter = self.meter(10, 1);
        self.request_under(vec![Charge { meter, cost }])
    }

    fn request_one(&mut self, meter: &MeterRef) -> Ticket {
        self.request_under(vec![Charge { meter: meter.clone(), cost: 1 }])
    }

    fn request_under(&mut self, charges: Vec<Charge>) -> Ticket {
        self.tickets += 1;
        let request = EngineRequest { ticket: self.tickets, partition: 0, charges };
        self.engine.on_request(self.now(), request, &mut self.effects);
        self.tickets
    }

    /// Checks one unit in the table. Returns when it would pass, if it is denied.
    fn check(&self, meter: &MeterRef) -> Option<Retry> {
        self.table.check(self.now(), &meter.check(1)).verdict.retry()
    }

    /// Checks one unit in the table, or asks the origin.
    fn check_or_request(&mut self, meter: &MeterRef) {
        if self.check(meter) == Some(Retry::AskOrigin) {
            self.request_one(meter);
        }
    }

    fn poll(&mut self) -> Option<u64> {
        self.engine.poll(self.now(), &self.table, &mut self.effects)
    }

    fn poll_after(&mut self, us: u64) -> Option<u64> {
        self.now_us += us;
        self.poll()
    }

    /// The calls that were sent since the last look, and whether each was a hedge.
    fn calls(&mut self) -> Vec<(Arc<Call>, bool)> {
        let mut calls = Vec::new();
        self.effects.retain(|effect| match effect {
            Effect::Call { call, hedge, .. } => {
                calls.push((Arc::clone(call), *hedge));
                false
            }
            Effect::Answer { .. } => true,
        });
        calls
    }

    /// Polls, and returns the only call that was sent.
    fn poll_call(&mut self) -> Arc<Call> {
        self.poll();
        self.only_call()
    }

    fn only_call(&mut self) -> Arc<Call> {
        let calls = self.calls();
        assert_eq!(calls.len(), 1, "{calls:?}");
        Arc::clone(&calls[0].0)
    }

    /// Returns the answers since the last look.
    fn answers(&mut self) -> Vec<(Ticket, Resolution)> {
        let answers = self.effects.iter().filter_map(|effect| match effect {
            Effect::Answer { ticket, resolution } => Some((*ticket, resolution.clone())),
            Effect::Call { .. } => None,
        });
        let answers = answers.collect();
        self.effects.clear();
        answers
    }

    /// Replies to a call: `passed` of each check group, and a grant on every meter.
    fn reply(&mut self, call: &Call, passed: u32, grant: u64) {
        let decided = CheckReply { passed, denied_by: 0, retry_us: 1 };
        self.reply_with(call, vec![meter_reply(grant, 0); call.updates.len()], decided);
    }

    /// Replies to a call: one reply for each meter, and the same decision for each check group.
    fn reply_with(&mut self, call: &Call, meters: Vec<MeterReply>, check_reply: CheckReply) {
        let checks = vec![check_reply; call.checks.len()];
        let reply = CallReply { meters, checks, now_us: 99, lost: false };
        self.reply_as(call, &reply);
    }

    /// Delivers a reply of partition 0.
    fn reply_as(&mut self, call: &Call, reply: &CallReply) {
        self.reply_from(0, call, reply);
    }

    fn reply_from(&mut self, partition: u16, call: &Call, reply: &CallReply) {
        let now = self.now();
        self.engine.on_reply(now, &self.table, partition, call.sequence, reply, &mut self.effects);
    }

    /// Requests one unit and receives a grant.
    fn hold(&mut self, grant: u64) {
        self.request(1);
        let call = self.poll_call();
        self.reply(&call, 1, grant);
        self.answers();
    }

    fn spend(&self, cost: u64) -> Verdict {
        let meter = self.meter(10, 1);
        self.table.check(self.now(), &meter.check(cost)).verdict
    }

    fn with(settings: EngineSettings) -> Self {
        Self { engine: Engine::new(NodeId(7), settings), ..Self::new() }
    }

    /// Fails a call.
    fn fail(&mut self, call: &Call, failure: CallFailure) {
        let now = self.now();
        self.engine.on_failure(now, 0, call.sequence, failure, &mut self.effects);
    }

    fn owe(&mut self, meter: &MeterRef, cost: u64) {
        let now = self.now();
        self.engine.owe(now, 0, meter, cost);
    }

    /// Gives back the charge of a request that is denied in the end.
    fn roll_back(&mut self, meter: &MeterRef, cost: u64, location: ChargeLocation) {
        let (now, charge) = (self.now(), Charge { meter: meter.clone(), cost });
        self.engine.roll_back(now, &self.table, 0, &charge, location);
    }

    /// Requests one unit, which the origin allows when its clock reads `origin_us`.
    fn request_at(&mut self, meter: &MeterRef, origin_us: u64, meter_reply: MeterReply) {
        self.request_one(meter);
        let call = self.poll_call();
        let meters = vec![meter_reply; call.updates.len()];
        let checks = vec![check_reply(1); call.checks.len()];
        self.reply_as(&call, &CallReply { meters, checks, now_us: origin_us, lost: false });
        self.answers();
    }

    /// Polls until the next call, and returns it.
    fn next_call(&mut self) -> Arc<Call> {
        for _ in 0..100 {
            self.poll_after(10 * MS);
            if let Some((call, _)) = self.calls().pop() {
                return call;
            }
        }
        panic!("the engine sent no call")
    }
}

/// A limit of `amount` per second.
pub(super) fn terms(amount: u64) -> Terms {
    let limit = Limit::gcra(amount, Duration::from_secs(1)).expect("in range");
    Terms::new(&limit, 0, Lapse::Counted, 1)
}

/// A grant, with `room` units left besides it.
pub(super) fn meter_reply(grant: u64, room: u64) -> MeterReply {
    MeterReply {
        grant,
        life_us: 1_000 * MS,
        room,
        remaining: room.saturating_add(grant),
        wait_us: 0,
        cell: 0,
        holders: 1,
        exhausted: false,
        lapsed: false,
        recall: false,
        is_global: false,
    }
}

/// A reply on a check group of which `passed` requests pass.
fn check_reply(passed: u32) -> CheckReply {
    CheckReply { passed, denied_by: 0, retry_us: 0 }
}
