//! The engine, step by step: a test is its clock, its network and its origin.

mod grant_life;
mod idle_session;
mod refunds;

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::origin::{
    CROSS_REGION_LIFE_US_MAX, CheckReply, CrossRegionTerms, Lapse, MeterReply, MeterUpdate, Partition,
    UNDECIDED,
};
use crate::table::{Check, Shares};
use crate::{FallbackState, Retry, Secret, Verdict};

const MS: u64 = 1_000;

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

    fn ask(&mut self, cost: u64) -> Ticket {
        let meter = self.meter(10, 1);
        self.ask_under(vec![Charge { meter, cost }])
    }

    fn ask_under(&mut self, charges: Vec<Charge>) -> Ticket {
        self.tickets += 1;
        let request = EngineRequest { ticket: self.tickets, partition: 0, charges };
        self.engine.on_request(self.now(), request, &mut self.effects);
        self.tickets
    }

    /// Checks one unit in the table. Returns when it would pass, if it is denied.
    fn check(&self, meter: &MeterRef) -> Option<Retry> {
        let ask = Check { limit: &meter.limit, space: &self.space, digest: meter.digest, cost: 1 };
        self.table.check(self.now(), &ask).verdict.retry()
    }

    /// Checks one unit in the table, or asks the origin.
    fn check_or_ask(&mut self, meter: &MeterRef) {
        if self.check(meter) == Some(Retry::AskOrigin) {
            self.ask_under(vec![Charge { meter: meter.clone(), cost: 1 }]);
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
    fn reply_with(&mut self, call: &Call, meter_reply: Vec<MeterReply>, decided: CheckReply) {
        let reply = CallReply {
            meters: meter_reply,
            checks: vec![decided; call.checks.len()],
            now_us: 99,
            lost: false,
        };
        let (now, sequence) = (self.now(), call.sequence);
        self.engine.on_reply(now, &self.table, 0, sequence, &reply, &mut self.effects);
    }

    /// Asks once and receives a grant.
    fn hold(&mut self, grant: u64) {
        self.ask(1);
        self.poll();
        let call = self.only_call();
        self.reply(&call, 1, grant);
        self.answers();
    }

    fn spend(&self, cost: u64) -> Verdict {
        let meter = self.meter(10, 1);
        let ask = Check { limit: &meter.limit, space: &self.space, digest: meter.digest, cost };
        self.table.check(self.now(), &ask).verdict
    }
}

/// A grant, with `room` units left besides it.
fn meter_reply(grant: u64, room: u64) -> MeterReply {
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

#[test]
fn a_late_answer_is_asked_for_a_second_time_once() {
    let mut bench = Bench::new();
    bench.ask(1);
    assert_eq!(bench.poll(), Some(START_US + 3 * MS));
    let first = bench.only_call();
    bench.poll_after(3 * MS - 1);
    assert_eq!(bench.calls(), []);
    bench.poll_after(1);
    assert_eq!(bench.calls(), [(first, true)], "the same call, marked as a hedge");
    bench.poll_after(3 * MS);
    assert_eq!(bench.calls(), []);
}

#[test]
fn a_call_without_an_answer_is_repeated_ever_more_rarely() {
    let mut bench = Bench::new();
    bench.ask(1);
    let mut next_us = bench.poll();
    let first = bench.only_call();
    let (mut sent_us, mut gaps_ms) = (START_US, Vec::new());
    while gaps_ms.len() < 8 {
        bench.now_us = next_us.expect("a call is under way");
        next_us = bench.poll();
        for (call, hedge) in bench.calls() {
            assert_eq!(call, first, "a retry repeats the call unchanged");
            if !hedge {
                gaps_ms.push((bench.now_us - sent_us) / MS);
                sent_us = bench.now_us;
            }
        }
    }
    assert_eq!(gaps_ms, [100, 200, 400, 800, 1_000, 1_000, 1_000, 1_000]);
}

#[test]
fn failed_call_is_retried_soon_with_the_same_content() {
    let mut bench = Bench::new();
    bench.hold(8);
    assert!(bench.spend(3).is_allowed());
    bench.poll_after(100 * MS);
    let flush = bench.only_call();
    assert_eq!(flush.updates[0].used, 3);
    bench.now_us += MS;
    bench.engine.on_failure(bench.now(), 0, flush.sequence, CallFailure::Unanswered, &mut bench.effects);
    assert!(bench.spend(2).is_allowed(), "the node spends its grant while the call is repeated");
    bench.poll_after(50 * MS);
    let repeats = bench.calls();
    assert!(!repeats.is_empty() && repeats.iter().all(|(call, _)| *call == flush));
    bench.reply(&flush, 0, 5);
    bench.poll_after(100 * MS);
    assert_eq!(bench.only_call().updates[0].used, 2, "later usage is in the next report");
}

#[test]
fn requests_end_at_the_deadline_and_late_charges_are_refunded() {
    let mut bench = Bench::new();
    let ticket = bench.ask(4);
    bench.poll();
    let call = bench.only_call();
    bench.poll_after(20 * MS - 1);
    assert_eq!(bench.answers(), []);
    bench.poll_after(1);
    assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)]);
    bench.reply(&call, 1, 0);
    assert_eq!(bench.engine.stats().returned, 4);
    bench.poll_after(100 * MS);
    let update = &bench.only_call().updates[0];
    assert_eq!((update.refund, update.refund_of_us), (4, 99));
}

#[test]
fn requests_do_not_wait_for_a_stalled_origin() {
    let mut bench = Bench::new();
    bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.poll_after(20 * MS);
    bench.answers();
    assert!(bench.engine.is_stalled(bench.now()));
    let ticket = bench.ask(1);
    assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)], "at once");
    bench.reply(&call, 0, 0);
    assert!(!bench.engine.is_stalled(bench.now()));
    bench.ask(1);
    bench.poll();
    assert_eq!(bench.only_call().checks.len(), 1, "the engine sends checks again after the first reply");
}

/// A process that did not run for a while has not read the replies that came meanwhile.
#[test]
fn paused_process_does_not_mark_the_origin_as_stalled() {
    let mut bench = Bench::new();
    let first = bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.now_us += 30 * MS;
    let second = bench.ask(1);
    assert!(!bench.engine.is_stalled(bench.now()));
    assert_eq!(bench.answers(), []);
    bench.now_us += 10 * MS;
    let third = bench.ask(1);
    assert_eq!(
        bench.answers(),
        [(third, Resolution::Unanswered)],
        "a late origin counts as stalled in the end"
    );
    bench.reply(&call, 1, 5);
    bench.poll();
    let answered: Vec<_> = bench
        .answers()
        .into_iter()
        .map(|(ticket, resolution)| {
            assert!(matches!(resolution, Resolution::Allowed { .. }), "{resolution:?}");
            ticket
        })
        .collect();
    assert_eq!(answered, [first, second]);
}

#[test]
fn report_without_waiting_requests_can_be_overdue() {
    let mut bench = Bench::new();
    bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.reply(&call, 1, 5);
    let meter = bench.meter(10, 1);
    while bench.check(&meter).is_none() {}
    bench.answers();
    while bench.calls().is_empty() {
        bench.poll_after(10 * MS);
    }
    let wakes_us = bench.poll().expect("a pending deadline");
    assert!(wakes_us <= bench.now_us + 20 * MS, "{wakes_us}");
    bench.poll_after(20 * MS);
    assert!(bench.engine.is_stalled(bench.now()));
}

#[test]
fn one_shard_that_hangs_does_not_hide_that_all_do() {
    let mut bench = Bench::new();
    let ask_of = |bench: &mut Bench, partition: u16| {
        bench.tickets += 1;
        let charges = vec![Charge { meter: bench.meter(10, 1), cost: 1 }];
        let request = EngineRequest { ticket: bench.tickets, partition, charges };
        bench.engine.on_request(bench.now(), request, &mut bench.effects);
        bench.poll();
        bench.calls()
    };
    ask_of(&mut bench, 1);
    let answered = ask_of(&mut bench, 2).remove(0).0;
    bench.poll_after(10 * MS);
    let checks = vec![CheckReply { passed: 1, denied_by: 0, retry_us: 0 }];
    let reply = CallReply { meters: vec![meter_reply(0, 9)], checks, now_us: 99, lost: false };
    let now = bench.now();
    bench.engine.on_reply(now, &bench.table, 2, answered.sequence, &reply, &mut bench.effects);
    bench.poll_after(10 * MS);
    assert!(!bench.engine.is_stalled(bench.now()), "another partition answers");
    bench.poll_after(MS);
    ask_of(&mut bench, 3);
    bench.poll_after(20 * MS);
    assert!(bench.engine.is_stalled(bench.now()), "no partition has answered since");
}

#[test]
fn equal_requests_are_asked_as_one_and_as_many_pass_as_there_is_room_for() {
    let mut bench = Bench::new();
    let tickets = [bench.ask(2), bench.ask(2), bench.ask(2)];
    let other = bench.ask(5);
    bench.poll();
    let call = bench.only_call();
    let asked: Vec<_> = call.checks.iter().map(|ask| (ask.charges[0].cost, ask.count)).collect();
    assert_eq!((call.updates.len(), asked), (1, vec![(2, 3), (5, 1)]));
    bench.reply(&call, 2, 0);
    let passed: Vec<_> = bench
        .answers()
        .into_iter()
        .filter(|(_, resolution)| matches!(resolution, Resolution::Allowed { .. }))
        .map(|(ticket, _)| ticket)
        .collect();
    assert_eq!(passed, [tickets[0], tickets[1], other]);
}

#[test]
fn each_limit_of_a_request_has_its_own_cost_and_its_own_rest() {
    let mut bench = Bench::new();
    let (requests, tokens) = (bench.meter_of(b"requests", 10), bench.meter_of(b"tokens", 100));
    let charges =
        |cost| vec![Charge { meter: requests.clone(), cost: 1 }, Charge { meter: tokens.clone(), cost }];
    let tickets = [20, 20, 30].map(|cost| bench.ask_under(charges(cost)));
    bench.poll();
    let call = bench.only_call();
    let asked = |ask: &crate::origin::CheckGroup| {
        let costs: Vec<_> = ask.charges.iter().map(|charge| (charge.meter, charge.cost)).collect();
        (costs, ask.count)
    };
    let expected = [(vec![(0, 1), (1, 20)], 2), (vec![(0, 1), (1, 30)], 1)];
    assert_eq!(
        call.checks.iter().map(asked).collect::<Vec<_>>(),
        expected,
        "only checks of equal cost are merged"
    );
    let decided = CheckReply { passed: 1, denied_by: 1, retry_us: 7 };
    bench.reply_with(&call, vec![meter_reply(2, 7), meter_reply(0, 60)], decided);
    // The origin reports the units left after all requests: before that, the last request had not
    // been charged yet. And a denied request finds less than its cost.
    let allowed = |left: [u32; 2]| Resolution::Allowed { remaining: Box::from(left), charged_us: Some(99) };
    let denied = Resolution::Denied { by: 1, remaining: Box::from([10, 19]), retry_us: 7 };
    let expected = [(tickets[0], allowed([10, 90])), (tickets[1], denied), (tickets[2], allowed([9, 60]))];
    assert_eq!(bench.answers(), expected);
}

#[test]
fn undecided_check_is_unanswered_and_others_are_decided() {
    let mut bench = Bench::new();
    let known = bench.ask(1);
    let stranger = bench.meter_of(b"stranger", 10);
    let stranger = bench.ask_under(vec![Charge { meter: stranger, cost: 1 }]);
    bench.poll();
    let (call, now) = (bench.only_call(), bench.now());
    let passed = CheckReply { passed: 1, denied_by: 0, retry_us: 0 };
    let checks = vec![passed, CheckReply { passed: 0, denied_by: UNDECIDED, ..passed }];
    let reply =
        CallReply { meters: vec![meter_reply(0, 9), meter_reply(0, 10)], checks, now_us: 99, lost: false };
    bench.engine.on_reply(now, &bench.table, 0, call.sequence, &reply, &mut bench.effects);
    let allowed = Resolution::Allowed { remaining: Box::from([9]), charged_us: Some(99) };
    assert_eq!(bench.answers(), [(known, allowed), (stranger, Resolution::Unanswered)]);
    assert_eq!(bench.engine.stats().unanswered, 1);
    assert!(!bench.engine.is_stalled(bench.now()));
}

#[test]
fn remaining_counts_uncharged_units_up_to_the_burst() {
    let mut bench = Bench::new();
    let allowed = |left: u32| Resolution::Allowed { remaining: Box::from([left]), charged_us: Some(99) };
    let ticket = bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    let decided = CheckReply { passed: 1, denied_by: 0, retry_us: 0 };
    bench.reply_with(&call, vec![meter_reply(5, u64::MAX)], decided);
    assert_eq!(bench.answers(), [(ticket, allowed(10))]);
    bench.now_us += 2_000 * MS;
    let ticket = bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.reply_with(&call, vec![MeterReply { life_us: 0, remaining: 4, ..meter_reply(5, 3) }], decided);
    assert_eq!(bench.answers(), [(ticket, allowed(4))], "`remaining` is independent of the grant");
}

#[test]
fn each_limit_is_refunded_for_a_timed_out_request() {
    let mut bench = Bench::new();
    let (requests, tokens) = (bench.meter_of(b"requests", 10), bench.meter_of(b"tokens", 100));
    bench.ask_under(vec![Charge { meter: requests, cost: 1 }, Charge { meter: tokens, cost: 20 }]);
    bench.poll();
    let call = bench.only_call();
    bench.poll_after(20 * MS);
    bench.reply(&call, 1, 0);
    assert_eq!(bench.engine.stats().returned, 21);
    bench.poll_after(100 * MS);
    let last = bench.calls().pop().expect("a call").0;
    let mut refunds: Vec<_> = last.updates.iter().map(|update| (&*update.key, update.refund)).collect();
    refunds.sort_unstable();
    assert_eq!(refunds, [(&b"requests"[..], 1), (b"tokens", 20)]);
}

#[test]
fn a_limit_that_a_request_is_under_twice_is_asked_for_once_at_both_costs() {
    let mut bench = Bench::new();
    let (twice, other) = (bench.meter(10, 1), bench.meter_of(b"other", 10));
    let under = [(&twice, 2), (&other, 1), (&twice, 3)];
    bench.ask_under(under.map(|(meter, cost)| Charge { meter: meter.clone(), cost }).into());
    bench.poll();
    let call = bench.only_call();
    assert_eq!(call.check(), Ok(()));
    let charged: Vec<_> = call.checks[0].charges.iter().map(|charge| (charge.meter, charge.cost)).collect();
    assert_eq!(charged, [(0, 5), (1, 1)]);
    bench.reply_with(
        &call,
        vec![meter_reply(0, 4), meter_reply(0, 6)],
        CheckReply { passed: 0, denied_by: 0, retry_us: 1 },
    );
    let denied = Resolution::Denied { by: 0, remaining: Box::from([4, 6, 4]), retry_us: 1 };
    assert_eq!(bench.answers(), [(1, denied)]);
}

#[test]
fn calls_stay_within_the_size_limit_of_the_origin() {
    let mut bench = Bench::new();
    for cost in (0..300).map(|turn| 1 + turn % 2) {
        bench.ask(cost);
    }
    bench.poll();
    let first = bench.only_call();
    assert_eq!(
        (first.check(), first.checks.len()),
        (Ok(()), 256),
        "adjacent checks differ in cost, so none are merged"
    );
    bench.reply(&first, 0, 0);
    bench.poll();
    assert_eq!(bench.only_call().checks.len(), 44);
}

#[test]
fn due_reports_are_batched_and_every_meter_gets_a_turn() {
    let mut bench = Bench::new();
    let names: Vec<[u8; 1]> = (0..150u8).map(|name| [name]).collect();
    for name in &names {
        let meter = bench.meter_of(name, 10);
        bench.ask_under(vec![Charge { meter, cost: 1 }]);
    }
    for expected in [64, 64, 22] {
        bench.poll();
        let call = bench.only_call();
        assert_eq!(call.updates.len(), expected, "waiting checks count towards the size limit");
        bench.reply(&call, 1, 5);
    }
    let mut reported = Vec::new();
    bench.now_us += 100 * MS;
    for expected in [64, 64, 22] {
        // Those that have just been reported are due again.
        for name in &names {
            let meter = bench.meter_of(name, 10);
            let ask = Check { limit: &meter.limit, space: &bench.space, digest: meter.digest, cost: 1 };
            assert!(bench.table.check(bench.now(), &ask).verdict.is_allowed());
        }
        bench.poll();
        let flush = bench.only_call();
        let new = flush.updates.iter().filter(|update| !reported.contains(&update.key)).count();
        assert_eq!((flush.updates.len(), new), (64, expected));
        reported.extend(flush.updates.iter().map(|update| update.key.clone()));
        bench.reply(&flush, 0, 5);
        bench.now_us += 100 * MS;
    }
}

#[test]
fn a_thousand_requests_for_a_cold_key_make_one_call_and_then_one_more() {
    let mut bench = Bench::new();
    for _ in 0..1_000 {
        bench.ask(1);
        bench.poll();
    }
    let first = bench.only_call();
    bench.reply(&first, 1, 0);
    bench.poll();
    let second = bench.only_call();
    assert_eq!((second.checks.len(), second.checks[0].count), (1, 999));
}

#[test]
fn late_reported_grants_are_counted_as_lapsed() {
    // A grant of a second is believed in for 300 ms longer, and clocks may differ by a sixteenth.
    for (late_ms, lapsed) in [(1_281, 0), (1_282, 8)] {
        let mut bench = Bench::new();
        bench.hold(8);
        let granted_us = bench.now_us;
        bench.now_us += 900 * MS;
        bench.poll();
        let call = bench.only_call();
        bench.now_us = granted_us + late_ms * MS;
        bench.reply(&call, 0, 0);
        assert_eq!(bench.engine.stats().lapsed, lapsed, "after {late_ms} ms");
    }
    let mut bench = Bench::new();
    bench.hold(8);
    let call = bench.next_call();
    bench.reply_with(
        &call,
        vec![MeterReply { lapsed: true, ..meter_reply(0, 0) }],
        CheckReply { passed: 0, denied_by: 0, retry_us: 0 },
    );
    assert_eq!(bench.engine.stats().lapsed, 8, "the origin reports the lapse");
}

#[test]
fn closing_engine_reports_all_usage_and_keeps_no_grant() {
    let mut bench = Bench::new();
    bench.hold(8);
    assert!(bench.spend(3).is_allowed());
    bench.engine.close();
    bench.poll();
    let last = bench.only_call();
    let update = &last.updates[0];
    assert_eq!((update.used, update.keep, update.want), (3, 0, 0));
    assert!(!bench.engine.is_idle());
    bench.reply(&last, 0, 0);
    bench.poll();
    assert!(bench.engine.is_idle());
}

#[test]
fn lowered_limit_gives_up_its_grant() {
    let mut bench = Bench::new();
    bench.hold(8);
    let lower = bench.meter(4, 2);
    bench.engine.refund(bench.now(), 0, &lower, 0);
    bench.poll_after(100 * MS);
    let update = &bench.only_call().updates[0];
    assert_eq!((update.keep, update.want, update.terms.version()), (0, 0, 2));
    assert!(!bench.spend(1).is_allowed(), "the grant is not spent while the change is in flight");
}

/// Also where the last reply or the grant would decide: the flushes continue with the old limit.
#[test]
fn a_limit_that_changed_is_brought_by_the_next_request() {
    for grant in [0, 8] {
        let mut bench = Bench::new();
        bench.ask(1);
        bench.poll();
        let call = bench.only_call();
        let exhausted = MeterReply { wait_us: 60_000 * MS, exhausted: true, ..meter_reply(grant, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 1, denied_by: 0, retry_us: 1 });
        bench.answers();
        let decided = bench.spend(1);
        assert_ne!(decided.retry(), Some(Retry::AskOrigin), "{decided:?}");
        let raised = bench.meter(20, 2);
        let ask = Check { limit: &raised.limit, space: &bench.space, digest: raised.digest, cost: 1 };
        assert_eq!(bench.table.check(bench.now(), &ask).verdict.retry(), Some(Retry::AskOrigin));
        bench.ask_under(vec![Charge { meter: raised, cost: 1 }]);
        bench.poll();
        let call = bench.only_call();
        assert_eq!((call.updates[0].terms.version(), call.checks.len()), (2, 1));
    }
}

#[test]
fn the_answer_to_another_call_is_of_no_interest() {
    let mut bench = Bench::new();
    bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.reply(&Call { sequence: call.sequence + 1, ..Call::clone(&call) }, 1, 9);
    assert_eq!(bench.answers(), []);
    assert!(!bench.spend(1).is_allowed(), "nothing was granted");
    bench.reply(&call, 1, 0);
    assert_eq!(bench.answers().len(), 1);
}

#[test]
fn denials_last_until_the_drain_and_longer_while_the_origin_stays_exhausted() {
    let mut bench = Bench::new();
    let mut lasted_ms = Vec::new();
    for _ in 0..10 {
        bench.ask(1);
        bench.poll();
        let call = bench.only_call();
        let exhausted = MeterReply { life_us: 0, wait_us: 5 * MS, exhausted: true, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 5 * MS });
        let began_us = bench.now_us;
        while matches!(bench.spend(1).retry(), Some(crate::Retry::After(_))) {
            bench.now_us += MS;
        }
        lasted_ms.push((bench.now_us - began_us) / MS);
    }
    // A sixteenth of the flush interval, doubled each time, until a flush would have asked and had
    // its reply.
    assert_eq!(lasted_ms, [6, 12, 25, 50, 100, 115, 115, 115, 115, 115]);
    bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.reply_with(&call, vec![meter_reply(0, 9)], CheckReply { passed: 1, denied_by: 0, retry_us: 0 });
    assert_eq!(bench.spend(1).retry(), Some(crate::Retry::AskOrigin), "not exhausted: the origin is asked");
}

/// Although the origin refuses every time, each denial of a burst of one ends when the unit has
/// drained: `wait_us` after the call was sent.
#[test]
fn denials_of_a_burst_of_one_end_when_the_unit_has_drained() {
    let mut bench = Bench::new();
    let meter = bench.meter(1, 1);
    for _ in 0..10 {
        bench.check_or_ask(&meter);
        bench.poll();
        let (call, sent_us) = (bench.only_call(), bench.now_us);
        bench.now_us += 2 * MS;
        let exhausted = MeterReply { life_us: 0, wait_us: 5 * MS, exhausted: true, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 5 * MS });
        while matches!(bench.check(&meter), Some(Retry::After(_))) {
            bench.now_us += MS;
        }
        assert_eq!(bench.now_us, sent_us + 5 * MS);
    }
}

/// At ten units a second, one of eight nodes gets one every 800 ms, and asks twice in that time.
/// But no unit may be lost: an eighth of the burst drains in 125 ms.
#[test]
fn a_flush_asks_for_an_exhausted_meter_at_its_turn() {
    for (holders, calls) in [(1, 1), (8, 0)] {
        let mut bench = Bench::new();
        bench.ask(1);
        bench.poll();
        let call = bench.only_call();
        let exhausted =
            MeterReply { life_us: 0, wait_us: 50 * MS, exhausted: true, holders, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 50 * MS });
        bench.now_us += 40 * MS;
        assert!(!bench.spend(1).is_allowed());
        bench.poll_after(60 * MS);
        assert_eq!(bench.calls().len(), calls, "{holders} holders, after an interval");
        bench.poll_after(100 * MS);
        assert_eq!(bench.calls().len(), 1, "{holders} holders, after another: asked for, or again");
    }
}

#[test]
fn remaining_units_are_known_and_grow_by_draining() {
    let mut bench = Bench::new();
    let digest = bench.meter(10, 1).digest;
    bench.ask(1);
    let before = bench.engine.fallback_state(bench.now(), 0, digest);
    assert_eq!(before, FallbackState { processes: 1, remaining: None }, "no reply has arrived");
    bench.poll();
    let call = bench.only_call();
    let left = MeterReply { holders: 4, ..meter_reply(2, 3) };
    bench.reply_with(&call, vec![left], CheckReply { passed: 1, denied_by: 0, retry_us: 0 });
    for (later_us, left) in [(0, 3), (500 * MS, 8), (60_000 * MS, 10)] {
        bench.now_us += later_us;
        let fallback_state = bench.engine.fallback_state(bench.now(), 0, digest);
        assert_eq!(fallback_state, FallbackState { processes: 4, remaining: Some(left) });
    }
}

impl Bench {
    fn with(settings: EngineSettings) -> Self {
        Self { engine: Engine::new(NodeId(7), settings), ..Self::new() }
    }

    /// The origin does not take a call.
    fn refuse(&mut self, call: &Call, failure: CallFailure) {
        let now = self.now();
        self.engine.on_failure(now, 0, call.sequence, failure, &mut self.effects);
    }

    fn owe(&mut self, meter: &MeterRef, cost: u64) {
        let now = self.now();
        self.engine.owe(now, 0, meter, cost);
    }

    /// A request that was charged here does not pass in the end.
    fn roll_back(&mut self, meter: &MeterRef, cost: u64, paid: ChargeLocation) {
        let (now, charge) = (self.now(), Charge { meter: meter.clone(), cost });
        self.engine.roll_back(now, &self.table, 0, &charge, paid);
    }

    /// Asks for one unit, which the origin allows when its clock reads `origin_us`.
    fn ask_at(&mut self, meter: &MeterRef, origin_us: u64, word: MeterReply) {
        self.ask_under(vec![Charge { meter: meter.clone(), cost: 1 }]);
        self.poll();
        let (call, now) = (self.only_call(), self.now());
        let checks = vec![CheckReply { passed: 1, denied_by: 0, retry_us: 0 }; call.checks.len()];
        let reply =
            CallReply { meters: vec![word; call.updates.len()], checks, now_us: origin_us, lost: false };
        self.engine.on_reply(now, &self.table, 0, call.sequence, &reply, &mut self.effects);
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

#[test]
fn refused_call_ends_its_checks_and_its_reports_are_resent() {
    for (failure, next) in [(CallFailure::Refused, 3), (CallFailure::Outdated { sequence: 40 }, 41)] {
        let mut bench = Bench::new();
        bench.hold(8);
        assert!(bench.spend(3).is_allowed());
        let meter = bench.meter(10, 1);
        bench.owe(&meter, 2);
        bench.roll_back(&meter, 1, ChargeLocation::AtOrigin { at_us: 50 });
        let ticket = bench.ask(9);
        bench.poll();
        let call = bench.only_call();
        let fields = |call: &Call| {
            let MeterUpdate { used, owed, refund, refund_of_us, .. } = call.updates[0];
            (used, owed, refund, refund_of_us)
        };
        assert_eq!((fields(&call), call.checks.len()), ((3, 2, 1, 50), 1));
        bench.refuse(&call, failure);
        assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)], "at once");
        let stats = bench.engine.stats();
        assert_eq!((stats.refused, stats.unanswered), (1, 1));
        bench.poll();
        assert_eq!(bench.calls(), [], "the call is repeated after a delay");
        bench.poll_after(100 * MS);
        assert!(!bench.engine.is_stalled(bench.now()));
        let again = bench.only_call();
        assert_eq!((fields(&again), again.checks.len(), again.sequence), ((3, 2, 1, 50), 0, next));
        bench.reply(&again, 0, 0);
        bench.engine.close();
        bench.poll_after(100 * MS);
        assert!(bench.engine.is_idle(), "usage is reported once");
    }
}

/// Two meters that share a name at the origin make no sense in one call: neither they nor others
/// suffer from it for long.
#[test]
fn meters_that_make_no_sense_together_are_spoken_of_apart() {
    let mut bench = Bench::new();
    let names: Vec<[u8; 1]> = (0..40u8).map(|name| [name]).collect();
    for name in &names {
        let meter = bench.meter_of(name, 10);
        bench.owe(&meter, 1);
    }
    let twin = MeterRef { digest: bench.space.digest(&[b"another"]), ..bench.meter_of(&names[7], 10) };
    bench.owe(&twin, 1);
    let mut partition = Partition::default();
    bench.engine.close();
    for _ in 0..200 {
        let next_us = bench.poll();
        for (call, _) in bench.calls() {
            match partition.apply(bench.now_us, &call) {
                Ok(reply) => {
                    let now = bench.now();
                    bench.engine.on_reply(now, &bench.table, 0, call.sequence, &reply, &mut bench.effects);
                }
                Err(error) => bench.refuse(&call, error.into()),
            }
        }
        bench.now_us = next_us.unwrap_or(bench.now_us).max(bench.now_us + 1);
    }
    assert!(bench.engine.is_idle());
    let charged = |name: &[u8; 1]| partition.meter(name).map(crate::origin::OriginMeter::charged);
    assert!(names.iter().all(|name| charged(name) == Some(if *name == names[7] { 2 } else { 1 })));
    assert!((1..20).contains(&bench.engine.stats().refused), "{:?}", bench.engine.stats());
}

#[test]
fn untracked_charges_and_refunds_are_counted_as_dropped() {
    let mut bench = Bench::with(EngineSettings { tracked_max: 1, ..EngineSettings::default() });
    let (known, stranger) = (bench.meter_of(b"known", 10), bench.meter_of(b"stranger", 10));
    bench.owe(&known, 1);
    bench.owe(&stranger, 2);
    bench.engine.refund(bench.now(), 0, &known, 2);
    bench.engine.refund(bench.now(), 0, &stranger, 3);
    assert_eq!(bench.engine.stats().dropped, 5);
    bench.ask_under(vec![Charge { meter: stranger, cost: 4 }]);
    bench.poll();
    let call = bench.only_call();
    bench.poll_after(20 * MS);
    bench.reply(&call, 1, 0);
    let stats = bench.engine.stats();
    assert_eq!((stats.returned, stats.dropped), (0, 9), "expired checks of a dropped meter are not refunded");
}

#[test]
fn when_too_many_wait_the_next_are_answered_at_once() {
    let mut bench = Bench::with(EngineSettings { waiting_max: 3, ..EngineSettings::default() });
    (0..3).for_each(|_| _ = bench.ask(1));
    let ticket = bench.ask(1);
    assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)]);
    bench.poll();
    let call = bench.only_call();
    assert_eq!(call.checks[0].count, 3);
    assert_eq!((bench.ask(1), bench.answers().len()), (5, 1), "checks of a call in flight count as waiting");
    bench.reply(&call, 2, 0);
    assert_eq!(bench.answers().len(), 3);
    bench.ask(1);
    assert_eq!(bench.answers(), [], "the queue accepts checks again");
    let stats = bench.engine.stats();
    assert_eq!((stats.crowded, stats.unanswered), (2, 2));
    bench.poll();
    bench.poll_after(20 * MS);
    assert_eq!(bench.answers().len(), 1);
    assert_eq!(bench.engine.waiting, 0);
}

/// A reply about a window expires with its cell; the recent denial of its key does not.
#[test]
fn after_a_denial_grants_are_short_although_another_window_has_begun() {
    let mut bench = Bench::new();
    let limit = Limit::sliding_window(10, Duration::from_secs(1)).expect("in range").at_origin();
    let meter = MeterRef { limit, terms: Terms::new(&limit, 0, Lapse::Counted, 1), ..bench.meter(10, 1) };
    let mut life_us = |later_us: u64, cell: u64, is_exhausted: bool| {
        bench.now_us += later_us;
        bench.ask_under(vec![Charge { meter: meter.clone(), cost: 1 }]);
        bench.poll();
        let (call, _) = bench.calls().pop().expect("a call with the check");
        let meter_reply = MeterReply { cell, exhausted: is_exhausted, life_us: 0, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![meter_reply], CheckReply { passed: 0, denied_by: 0, retry_us: 1 });
        call.updates[0].life_us
    };
    assert_eq!(life_us(0, 10, true), 1_000 * MS, "no denial yet");
    assert_eq!(life_us(900 * MS, 11, false), 300 * MS, "denied in the cell before");
    assert_eq!(life_us(2_000 * MS, 13, false), 300 * MS, "denied two cells before");
    assert_eq!(life_us(2_200 * MS, 15, false), 1_000 * MS, "long ago");
}

#[test]
fn grants_of_several_regions_are_shorter_and_smaller_while_these_hear_of_each_other_late() {
    let asked_for = |is_cross_region: bool, life_us: u64| {
        let mut bench = Bench::new();
        bench.engine.limit_cross_region_life(life_us);
        let mut meter = bench.meter(1_000, 1);
        if is_cross_region {
            let cross_region = CrossRegionTerms {
                publish_threshold: 1,
                share_amount: 500,
                share_capacity: 500,
                debt_max: 1_000,
            };
            meter.terms = meter.terms.with_cross_region(cross_region);
        }
        let mut update = None;
        for _ in 0..5 {
            bench.now_us += 100 * MS;
            for _ in 0..20 {
                bench.ask_under(vec![Charge { meter: meter.clone(), cost: 1 }]);
            }
            bench.poll();
            let (call, _) = bench.calls().pop().expect("a call with the check");
            update = Some((call.updates[0].life_us, call.updates[0].want));
            let meter_reply = MeterReply { life_us: 0, ..meter_reply(0, 0) };
            bench.reply_with(&call, vec![meter_reply], CheckReply { passed: 20, denied_by: 0, retry_us: 0 });
        }
        update.expect("asked")
    };
    let (life_us, want) = asked_for(true, CROSS_REGION_LIFE_US_MAX);
    assert_eq!(life_us, 1_000 * MS);
    let (shorter_us, less) = asked_for(true, 250 * MS);
    assert_eq!(shorter_us, 250 * MS);
    assert!(0 < less && less < want, "{less} of {want}");
    assert_eq!(asked_for(false, 250 * MS), (life_us, want), "a limit of one region keeps its grant life");
}

#[test]
fn grants_are_short_after_a_denial_despite_a_small_grant() {
    let mut bench = Bench::new();
    bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    let exhausted = MeterReply { exhausted: true, ..meter_reply(1, 0) };
    bench.reply_with(&call, vec![exhausted], CheckReply { passed: 1, denied_by: 0, retry_us: 0 });
    assert!(bench.spend(1).is_allowed());
    assert!(
        matches!(bench.spend(1).retry(), Some(Retry::After(_))),
        "the reply marks the meter as exhausted"
    );
    bench.poll_after(100 * MS);
    assert_eq!(bench.only_call().updates[0].life_us, 300 * MS);
}
