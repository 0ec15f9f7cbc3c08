//! Refunds, and the charges that they belong to.

use super::*;

#[test]
fn rolled_back_origin_charge_is_refunded_as_of_its_time() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    bench.request_at(&meter, 7_000 * MS, meter_reply(8, 0));
    assert!(bench.spend(3).is_allowed());
    bench.roll_back(&meter, 1, ChargeLocation::AtOrigin { at_us: 7_000 * MS });
    let update = bench.next_call().updates[0].clone();
    assert_eq!(
        (update.used, update.refund, update.refund_of_us),
        (3, 1, 7_000 * MS),
        "the refund has the time of its own charge"
    );
}

#[test]
fn rolled_back_node_charge_is_refunded_only_if_reported() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    bench.request_at(&meter, 7_000 * MS, meter_reply(8, 0));
    bench.now_us += 16 * MS;
    let since_us = bench.now_us;
    assert!(bench.spend(5).is_allowed());
    bench.roll_back(&meter, 2, ChargeLocation::OnNode { since_us });
    let call = bench.next_call();
    assert_eq!((call.updates[0].used, call.updates[0].refund), (3, 0));
    // Usage after the call belongs to other requests.
    assert!(bench.spend(1).is_allowed());
    bench.roll_back(&meter, 3, ChargeLocation::OnNode { since_us });
    bench.reply(&call, 0, 8);
    let update = bench.next_call().updates[0].clone();
    // By a clock that may run slower by a sixteenth.
    assert_eq!((update.used, update.refund, update.refund_of_us), (1, 3, 7_015 * MS));
}

#[test]
fn unreported_charges_are_refunded_on_the_node() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    let since_us = bench.now_us;
    bench.owe(&meter, 6);
    bench.roll_back(&meter, 2, ChargeLocation::OnNode { since_us });
    bench.engine.refund(bench.now(), 0, &meter, 1);
    let update = bench.next_call().updates[0].clone();
    assert_eq!((update.owed, update.refund), (3, 0));
}

/// While reports arrive in the usual time, the refund is complete. One that the origin receives
/// much later excludes the units that have drained by then.
#[test]
fn user_refund_counts_from_the_usual_report_time() {
    let mut bench = Bench::new();
    let meter = bench.meter(10, 1);
    bench.engine.refund(bench.now(), 0, &meter, 4);
    let first = bench.next_call();
    assert_eq!(
        (first.updates[0].refund, first.updates[0].refund_of_us),
        (4, 0),
        "the origin's time is unknown before the first reply"
    );
    let meters = vec![meter_reply(0, 9)];
    bench.reply_as(&first, &CallReply { meters, checks: Vec::new(), now_us: 7_000 * MS, lost: false });
    bench.now_us += 160 * MS;
    bench.engine.refund(bench.now(), 0, &meter, 4);
    bench.now_us += 3_000 * MS;
    let update = bench.next_call().updates[0].clone();
    assert_eq!((update.refund, update.refund_of_us), (4, 7_650 * MS));
}

/// A window of ten seconds, and a reply from this cell of it.
fn windowed(bench: &Bench, cell: u64, grant: u64) -> (MeterRef, MeterReply) {
    let limit = Limit::sliding_window(100, Duration::from_secs(10)).expect("in range").at_origin();
    let terms = Terms::new(&limit, 0, Lapse::Counted, 1);
    (MeterRef { limit, terms, ..bench.meter(10, 1) }, MeterReply { cell, ..meter_reply(grant, 50) })
}

#[test]
fn refund_applies_to_the_cell_of_its_charge() {
    let second = 1_000 * MS;
    let mut bench = Bench::new();
    let (meter, meter_reply) = windowed(&bench, 3, 0);
    bench.request_at(&meter, 39 * second, meter_reply);
    let (_, meter_reply) = windowed(&bench, 4, 8);
    bench.request_at(&meter, 41 * second, meter_reply);
    assert!(bench.table.check(bench.now(), &meter.check(5)).verdict.is_allowed());
    bench.roll_back(&meter, 1, ChargeLocation::AtOrigin { at_us: 39 * second });
    let spent = bench.next_call();
    let fields = |call: &Call| (call.updates[0].used, call.updates[0].refund, call.updates[0].cell);
    assert_eq!(fields(&spent), (5, 0, 4), "spent units belong to the present cell");
    bench.reply_with(&spent, vec![meter_reply], check_reply(0));
    assert_eq!(fields(&bench.next_call()), (0, 1, 3), "the refund belongs to the previous cell");
    let late = bench.engine.stats();
    assert_eq!(late.dropped, 0);
}

/// Returns the owed units and the refund in the next call, for a charge in the cell before the
/// present one. The reply to a call made meanwhile has `origin_us` as the origin's clock.
fn refunded_after(origin_us: u64, change: impl FnOnce(&mut Bench) -> (MeterRef, MeterReply)) -> (u64, u64) {
    let second = 1_000 * MS;
    let mut bench = Bench::new();
    let (meter, meter_reply) = windowed(&bench, 3, 0);
    bench.request_at(&meter, 39 * second, meter_reply);
    bench.request_one(&meter);
    let call = bench.poll_call();
    bench.roll_back(&meter, 1, ChargeLocation::AtOrigin { at_us: 39 * second });
    let (meter, meter_reply) = change(&mut bench);
    let (meters, checks) = (vec![meter_reply], vec![check_reply(1)]);
    bench.reply_as(&call, &CallReply { meters, checks, now_us: origin_us, lost: false });
    bench.owe(&meter, 1);
    let update = bench.next_call().updates[0].clone();
    (update.owed, update.refund)
}

#[test]
fn charge_of_an_expired_window_is_not_refunded() {
    let second = 1_000 * MS;
    assert_eq!(refunded_after(49 * second, |bench| windowed(bench, 4, 0)), (1, 1));
    assert_eq!(refunded_after(51 * second, |bench| windowed(bench, 5, 0)), (1, 0));
}

/// The same key under a window of `seconds`, which the node learns of while the reply is missing.
fn changed_to(seconds: u64) -> impl FnOnce(&mut Bench) -> (MeterRef, MeterReply) {
    move |bench| {
        let limit = Limit::sliding_window(100, Duration::from_secs(seconds)).expect("in range").at_origin();
        let terms = Terms::new(&limit, 0, Lapse::Counted, 2);
        let (meter, meter_reply) = windowed(bench, 39 / seconds, 0);
        let meter = MeterRef { limit, terms, ..meter };
        bench.owe(&meter, 0);
        (meter, meter_reply)
    }
}

#[test]
fn a_window_is_over_by_the_cells_in_which_something_was_charged() {
    let second = 1_000 * MS;
    // The origin knows of a period of a second, and this node does not.
    assert_eq!(refunded_after(42 * second, |bench| windowed(bench, 42, 0)), (1, 1));
    // Both have, of a shorter one and of a longer one.
    for seconds in [1, 30] {
        assert_eq!(refunded_after(49 * second, changed_to(seconds)), (1, 1), "{seconds} s");
        assert_eq!(refunded_after(51 * second, changed_to(seconds)), (1, 0), "{seconds} s");
    }
}

#[test]
fn refund_keeps_its_cell_after_a_refused_call() {
    let mut bench = Bench::new();
    let (meter, meter_reply) = windowed(&bench, 3, 0);
    bench.request_at(&meter, 39_700 * MS, meter_reply);
    // The origin usually receives it half a second later, which is in the next cell.
    bench.engine.refund(bench.now(), 0, &meter, 2);
    let fields = |call: &Call| (call.updates[0].refund, call.updates[0].cell);
    let call = bench.next_call();
    assert_eq!(fields(&call), (2, 3));
    let terms = Terms::new(&meter.limit, 0, Lapse::Counted, 2);
    bench.owe(&MeterRef { terms, ..meter }, 0);
    bench.engine.on_failure(bench.now(), 0, call.sequence, CallFailure::Refused, &mut bench.effects);
    assert_eq!(fields(&bench.next_call()), (2, 3), "a new version of an equal limit keeps the refund");
}
