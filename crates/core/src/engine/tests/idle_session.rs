//! Calls without a reply: their waiting requests, and calls that outlast the session at the origin.

use super::*;
use crate::origin::{SESSION_RETENTION_US, StoreId};

const MINUTE_US: u64 = 60_000 * MS;

impl Bench {
    /// A call about a key of its own.
    fn call_about(&mut self, key: &[u8]) -> Arc<Call> {
        let meter = self.meter_of(key, 10);
        self.ask_under(vec![Charge { meter, cost: 1 }]);
        self.poll();
        self.only_call()
    }

    /// Lets time pass, and looks after the engine whenever it wants that. The last call that was
    /// made.
    fn pass(&mut self, us: u64) -> Arc<Call> {
        let (until_us, mut last) = (self.now_us + us, None);
        while let Some(next_us) = self.poll().filter(|next_us| *next_us < until_us) {
            self.now_us = next_us.max(self.now_us + 1);
            last = self.calls().pop().or(last);
        }
        self.now_us = until_us;
        last.expect("the call is repeated").0
    }

    fn hear(&mut self, call: &Call, reply: &CallReply) {
        self.engine.on_reply(self.now(), &self.table, 0, call.sequence, reply, &mut self.effects);
    }
}

#[test]
fn a_cut_for_longer_than_lanes_are_remembered_does_not_look_like_a_loss() {
    let (mut bench, mut partition) = (Bench::new(), Partition::default());
    let first = bench.call_about(b"one");
    let reply = partition.apply(bench.now_us, &first).expect("it makes sense");
    bench.hear(&first, &reply);
    let cut_off = bench.call_about(b"another");
    assert_eq!(cut_off.acknowledged, first.sequence);
    let last = bench.pass(SESSION_RETENTION_US + MINUTE_US);
    partition.expire(bench.now_us);
    let late = |call: &Call| partition.clone().apply(bench.now_us, call).expect("it makes sense").lost;
    assert_eq!((last.sequence, last.acknowledged), (cut_off.sequence, 0));
    assert_eq!([&cut_off, &last].map(|call| late(call)), [true, false]);
}

/// Whether an empty store that has been up for `up_us` reports lost writes.
fn is_lost_in_an_empty_one(up_us: u64, now_us: u64, call: &Call) -> bool {
    let store = StoreId { up_us, ..call.store };
    let reply = Partition::default().apply(now_us, &Call { store, ..call.clone() });
    reply.expect("it makes sense").lost
}

#[test]
fn a_store_that_was_emptied_behind_a_long_cut_is_noticed() {
    let mut bench = Bench::new();
    let first = bench.call_about(b"one");
    let reply = Partition::default().apply(bench.now_us, &first).expect("it makes sense");
    bench.hear(&first, &reply);
    bench.now_us += 10 * MINUTE_US;
    let cut_off = bench.call_about(b"another");
    let last = bench.pass(35 * MINUTE_US);
    assert_eq!((last.sequence, last.acknowledged), (cut_off.sequence, 0));
    // The store was emptied a minute after the first attempt of the call, or before the node first
    // knew of it.
    let is_lost = |call: &Call, up_us| is_lost_in_an_empty_one(up_us, bench.now_us, call);
    assert!(is_lost(&last, 34 * MINUTE_US));
    assert!(!is_lost(&last, 46 * MINUTE_US));
    let as_it_was = Call { acknowledged: 0, ..(*cut_off).clone() };
    assert!(!is_lost(&as_it_was, 34 * MINUTE_US), "the first attempt cannot detect the loss");
}

#[test]
fn nothing_is_given_back_twice_by_a_call_that_may_be_applied_twice() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    bench.ask_at(&meter, 7_000 * MS, meter_reply(0, 9));
    bench.roll_back(&meter, 4, ChargeLocation::AtOrigin { at_us: 7_000 * MS });
    let call = bench.next_call();
    assert_eq!(call.updates[0].refund, 4);
    bench.roll_back(&meter, 3, ChargeLocation::AtOrigin { at_us: 7_000 * MS });
    let again = bench.pass(20 * MINUTE_US);
    assert_eq!((again.sequence, again.updates[0].refund), (call.sequence, 4), "the retry repeats the refund");
    let last = bench.pass(20 * MINUTE_US);
    assert_eq!((last.sequence, last.updates[0].refund), (call.sequence, 0));
    bench.reply(&last, 0, 0);
    bench.owe(&meter, 1);
    let update = bench.next_call().updates[0].clone();
    assert_eq!((update.owed, update.refund), (1, 0), "an expired refund is not in the next call");
}

#[test]
fn a_call_that_is_made_for_long_is_applied_once() {
    let (mut bench, mut partition) = (Bench::new(), Partition::default());
    let call = bench.call_about(b"one");
    let reply = partition.apply(bench.now_us, &call).expect("it makes sense");
    // The origin receives the call, and its replies are lost.
    for _ in 0..3 {
        let again = bench.pass(SESSION_RETENTION_US * 2 / 3);
        partition.expire(bench.now_us);
        assert_eq!(
            partition.apply(bench.now_us, &again).as_ref(),
            Ok(&reply),
            "a repeated call gets its first reply"
        );
    }
}

#[test]
fn each_waits_for_its_own_time_however_many_are_asked_as_one() {
    let mut bench = Bench::new();
    let first = bench.ask(1);
    bench.poll();
    let call = bench.only_call();
    bench.now_us += MS;
    let early = bench.ask(1);
    bench.now_us += 10 * MS;
    let late = bench.ask(1);
    bench.now_us += MS;
    bench.reply(&call, 1, 0);
    bench.poll();
    let call = bench.only_call();
    assert_eq!(call.checks.iter().map(|ask| ask.count).collect::<Vec<_>>(), [2]);
    assert_eq!(bench.answers().iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), [first]);
    bench.poll_after(9 * MS);
    assert_eq!(bench.answers(), [(early, Resolution::Unanswered)]);
    bench.reply(&call, 2, 0);
    let answers = bench.answers();
    assert!(matches!(answers[..], [(ticket, Resolution::Allowed { .. })] if ticket == late), "{answers:?}");
    assert_eq!(bench.engine.stats().returned, 1, "the unit of an expired check is refunded");
}
