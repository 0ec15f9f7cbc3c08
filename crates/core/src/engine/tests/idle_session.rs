//! Calls without a reply: their waiting requests, and calls that outlast the session at the origin.

use super::*;
use crate::origin::{SESSION_RETENTION_US, StoreId};

const MINUTE_US: u64 = 60_000 * MS;

impl Bench {
    /// Requests one unit of a key. Returns the call.
    fn call_about(&mut self, key: &[u8]) -> Arc<Call> {
        let meter = self.meter_of(key, 10);
        self.request_one(&meter);
        self.poll_call()
    }

    /// Lets time pass, and polls the engine whenever it is due. Returns the last call.
    fn pass(&mut self, us: u64) -> Arc<Call> {
        let (until_us, mut last) = (self.now_us + us, None);
        while let Some(next_us) = self.poll().filter(|next_us| *next_us < until_us) {
            self.now_us = next_us.max(self.now_us + 1);
            last = self.calls().pop().or(last);
        }
        self.now_us = until_us;
        last.expect("the call is repeated").0
    }
}

#[test]
fn network_partition_longer_than_the_session_retention_is_no_loss() {
    let (mut bench, mut partition) = (Bench::new(), Partition::default());
    let first = bench.call_about(b"one");
    let reply = partition.apply(bench.now_us, &first).expect("a valid call");
    bench.reply_as(&first, &reply);
    let partitioned = bench.call_about(b"another");
    assert_eq!(partitioned.acknowledged, first.sequence);
    let last = bench.pass(SESSION_RETENTION_US + MINUTE_US);
    partition.expire(bench.now_us);
    let late = |call: &Call| partition.clone().apply(bench.now_us, call).expect("a valid call").lost;
    assert_eq!((last.sequence, last.acknowledged), (partitioned.sequence, 0));
    assert_eq!([&partitioned, &last].map(|call| late(call)), [true, false]);
}

/// Whether an empty store that has been up for `up_us` reports lost writes.
fn is_lost_in_an_empty_one(up_us: u64, now_us: u64, call: &Call) -> bool {
    let store = StoreId { up_us, ..call.store };
    let reply = Partition::default().apply(now_us, &Call { store, ..call.clone() });
    reply.expect("a valid call").lost
}

#[test]
fn store_emptied_during_a_long_network_partition_is_noticed() {
    let mut bench = Bench::new();
    let first = bench.call_about(b"one");
    let reply = Partition::default().apply(bench.now_us, &first).expect("a valid call");
    bench.reply_as(&first, &reply);
    bench.now_us += 10 * MINUTE_US;
    let partitioned = bench.call_about(b"another");
    let last = bench.pass(35 * MINUTE_US);
    assert_eq!((last.sequence, last.acknowledged), (partitioned.sequence, 0));
    // The store was emptied a minute after the first attempt of the call, or before the node first
    // knew of it.
    let is_lost = |call: &Call, up_us| is_lost_in_an_empty_one(up_us, bench.now_us, call);
    assert!(is_lost(&last, 34 * MINUTE_US));
    assert!(!is_lost(&last, 46 * MINUTE_US));
    let as_it_was = Call { acknowledged: 0, ..(*partitioned).clone() };
    assert!(!is_lost(&as_it_was, 34 * MINUTE_US), "the first attempt cannot detect the loss");
}

#[test]
fn call_that_may_be_applied_twice_refunds_once() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    bench.request_at(&meter, 7_000 * MS, meter_reply(0, 9));
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
fn call_that_is_repeated_for_long_is_applied_once() {
    let (mut bench, mut partition) = (Bench::new(), Partition::default());
    let call = bench.call_about(b"one");
    let reply = partition.apply(bench.now_us, &call).expect("a valid call");
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
fn each_request_of_a_group_has_its_own_deadline() {
    let mut bench = Bench::new();
    let first = bench.request(1);
    let call = bench.poll_call();
    bench.now_us += MS;
    let early = bench.request(1);
    bench.now_us += 10 * MS;
    let late = bench.request(1);
    bench.now_us += MS;
    bench.reply(&call, 1, 0);
    let call = bench.poll_call();
    assert_eq!(call.checks.iter().map(|group| group.count).collect::<Vec<_>>(), [2]);
    assert_eq!(bench.answers().iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), [first]);
    bench.poll_after(9 * MS);
    assert_eq!(bench.answers(), [(early, Resolution::Unanswered)]);
    bench.reply(&call, 2, 0);
    let answers = bench.answers();
    assert!(matches!(answers[..], [(ticket, Resolution::Allowed { .. })] if ticket == late), "{answers:?}");
    assert_eq!(bench.engine.stats().returned, 1, "the unit of an expired check is refunded");
}
