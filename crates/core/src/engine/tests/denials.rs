//! Denials by the node after an exhausted reply.

use super::*;

#[test]
fn denials_last_until_the_drain_and_longer_while_the_origin_stays_exhausted() {
    let mut bench = Bench::new();
    let mut lasted_ms = Vec::new();
    for _ in 0..10 {
        bench.request(1);
        let call = bench.poll_call();
        let exhausted = MeterReply { life_us: 0, wait_us: 5 * MS, exhausted: true, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 5 * MS });
        let began_us = bench.now_us;
        while matches!(bench.spend(1).retry(), Some(Retry::After(_))) {
            bench.now_us += MS;
        }
        lasted_ms.push((bench.now_us - began_us) / MS);
    }
    // A sixteenth of the flush interval, doubled each time, up to the reply to the next flush.
    assert_eq!(lasted_ms, [6, 12, 25, 50, 100, 115, 115, 115, 115, 115]);
    bench.request(1);
    let call = bench.poll_call();
    bench.reply_with(&call, vec![meter_reply(0, 9)], check_reply(1));
    assert_eq!(
        bench.spend(1).retry(),
        Some(Retry::AskOrigin),
        "not exhausted: the request goes to the origin"
    );
}

/// Although the origin refuses every time, each denial of a burst of one ends when the unit has
/// drained: `wait_us` after the call was sent.
#[test]
fn denials_of_a_burst_of_one_end_when_the_unit_has_drained() {
    let mut bench = Bench::new();
    let meter = bench.meter(1, 1);
    for _ in 0..10 {
        bench.check_or_request(&meter);
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
        bench.request(1);
        let call = bench.poll_call();
        let exhausted =
            MeterReply { life_us: 0, wait_us: 50 * MS, exhausted: true, holders, ..meter_reply(0, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 50 * MS });
        bench.now_us += 40 * MS;
        assert!(!bench.spend(1).is_allowed());
        bench.poll_after(60 * MS);
        assert_eq!(bench.calls().len(), calls, "{holders} holders, after one interval");
        bench.poll_after(100 * MS);
        assert_eq!(bench.calls().len(), 1, "{holders} holders, after two intervals");
    }
}

/// A reply about a window expires with its cell; the recent denial of its key does not.
#[test]
fn after_a_denial_grants_are_short_although_another_window_has_begun() {
    let mut bench = Bench::new();
    let limit = Limit::sliding_window(10, Duration::from_secs(1)).expect("in range").at_origin();
    let meter = MeterRef { limit, terms: Terms::new(&limit, 0, Lapse::Counted, 1), ..bench.meter(10, 1) };
    let mut life_us = |later_us: u64, cell: u64, is_exhausted: bool| {
        bench.now_us += later_us;
        bench.request_one(&meter);
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
fn grants_are_short_after_a_denial_despite_a_small_grant() {
    let mut bench = Bench::new();
    bench.request(1);
    let call = bench.poll_call();
    let exhausted = MeterReply { exhausted: true, ..meter_reply(1, 0) };
    bench.reply_with(&call, vec![exhausted], check_reply(1));
    assert!(bench.spend(1).is_allowed());
    assert!(
        matches!(bench.spend(1).retry(), Some(Retry::After(_))),
        "the reply marks the meter as exhausted"
    );
    bench.poll_after(100 * MS);
    assert_eq!(bench.only_call().updates[0].life_us, 300 * MS);
}
