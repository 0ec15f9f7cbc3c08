//! Requests that the origin does not answer in time, and requests that do not wait.

use super::*;

#[test]
fn requests_end_at_the_deadline_and_late_charges_are_refunded() {
    let mut bench = Bench::new();
    let ticket = bench.request(4);
    let call = bench.poll_call();
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
    bench.request(1);
    let call = bench.poll_call();
    bench.poll_after(20 * MS);
    bench.answers();
    assert!(bench.engine.is_stalled(bench.now()));
    let ticket = bench.request(1);
    assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)], "at once");
    bench.reply(&call, 0, 0);
    assert!(!bench.engine.is_stalled(bench.now()));
    bench.request(1);
    assert_eq!(bench.poll_call().checks.len(), 1, "the engine sends checks again after the first reply");
}

/// A process that did not run for a while has not read the replies that came meanwhile.
#[test]
fn paused_process_does_not_mark_the_origin_as_stalled() {
    let mut bench = Bench::new();
    let first = bench.request(1);
    let call = bench.poll_call();
    bench.now_us += 30 * MS;
    let second = bench.request(1);
    assert!(!bench.engine.is_stalled(bench.now()));
    assert_eq!(bench.answers(), []);
    bench.now_us += 10 * MS;
    let third = bench.request(1);
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
    bench.request(1);
    let call = bench.poll_call();
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
fn hung_shard_does_not_hide_that_all_hang() {
    let mut bench = Bench::new();
    let request_to = |bench: &mut Bench, partition: u16| {
        bench.tickets += 1;
        let charges = vec![Charge { meter: bench.meter(10, 1), cost: 1 }];
        let request = EngineRequest { ticket: bench.tickets, partition, charges };
        bench.engine.on_request(bench.now(), request, &mut bench.effects);
        bench.poll();
        bench.calls()
    };
    request_to(&mut bench, 1);
    let answered = request_to(&mut bench, 2).remove(0).0;
    bench.poll_after(10 * MS);
    let (meters, checks) = (vec![meter_reply(0, 9)], vec![check_reply(1)]);
    let reply = CallReply { meters, checks, now_us: 99, lost: false };
    let now = bench.now();
    bench.engine.on_reply(now, &bench.table, 2, answered.sequence, &reply, &mut bench.effects);
    bench.poll_after(10 * MS);
    assert!(!bench.engine.is_stalled(bench.now()), "another partition answers");
    bench.poll_after(MS);
    request_to(&mut bench, 3);
    bench.poll_after(20 * MS);
    assert!(bench.engine.is_stalled(bench.now()), "no partition has answered since");
}

#[test]
fn when_too_many_wait_the_next_are_answered_at_once() {
    let mut bench = Bench::with(EngineSettings { waiting_max: 3, ..EngineSettings::default() });
    (0..3).for_each(|_| _ = bench.request(1));
    let ticket = bench.request(1);
    assert_eq!(bench.answers(), [(ticket, Resolution::Unanswered)]);
    let call = bench.poll_call();
    assert_eq!(call.checks[0].count, 3);
    assert_eq!(
        (bench.request(1), bench.answers().len()),
        (5, 1),
        "checks of a call in flight count as waiting"
    );
    bench.reply(&call, 2, 0);
    assert_eq!(bench.answers().len(), 3);
    bench.request(1);
    assert_eq!(bench.answers(), [], "the queue accepts checks again");
    let stats = bench.engine.stats();
    assert_eq!((stats.crowded, stats.unanswered), (2, 2));
    bench.poll();
    bench.poll_after(20 * MS);
    assert_eq!(bench.answers().len(), 1);
    assert_eq!(bench.engine.waiting, 0);
}
