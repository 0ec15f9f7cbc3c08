//! Check groups: the requests of one call, and the answers to each.

use super::*;

#[test]
fn equal_requests_form_one_group_and_pass_as_far_as_there_is_room() {
    let mut bench = Bench::new();
    let tickets = [bench.request(2), bench.request(2), bench.request(2)];
    let other = bench.request(5);
    let call = bench.poll_call();
    let groups: Vec<_> = call.checks.iter().map(|group| (group.charges[0].cost, group.count)).collect();
    assert_eq!((call.updates.len(), groups), (1, vec![(2, 3), (5, 1)]));
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
    let tickets = [20, 20, 30].map(|cost| bench.request_under(charges(cost)));
    let call = bench.poll_call();
    let costs_and_count = |group: &crate::origin::CheckGroup| {
        let costs: Vec<_> = group.charges.iter().map(|charge| (charge.meter, charge.cost)).collect();
        (costs, group.count)
    };
    let expected = [(vec![(0, 1), (1, 20)], 2), (vec![(0, 1), (1, 30)], 1)];
    assert_eq!(
        call.checks.iter().map(costs_and_count).collect::<Vec<_>>(),
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
    let known = bench.request(1);
    let stranger = bench.meter_of(b"stranger", 10);
    let stranger = bench.request_under(vec![Charge { meter: stranger, cost: 1 }]);
    let call = bench.poll_call();
    let passed = check_reply(1);
    let checks = vec![passed, CheckReply { passed: 0, denied_by: UNDECIDED, ..passed }];
    let meters = vec![meter_reply(0, 9), meter_reply(0, 10)];
    bench.reply_as(&call, &CallReply { meters, checks, now_us: 99, lost: false });
    let allowed = Resolution::Allowed { remaining: Box::from([9]), charged_us: Some(99) };
    assert_eq!(bench.answers(), [(known, allowed), (stranger, Resolution::Unanswered)]);
    assert_eq!(bench.engine.stats().unanswered, 1);
    assert!(!bench.engine.is_stalled(bench.now()));
}

#[test]
fn remaining_counts_uncharged_units_up_to_the_burst() {
    let mut bench = Bench::new();
    let allowed = |left: u32| Resolution::Allowed { remaining: Box::from([left]), charged_us: Some(99) };
    let ticket = bench.request(1);
    let call = bench.poll_call();
    let decided = check_reply(1);
    bench.reply_with(&call, vec![meter_reply(5, u64::MAX)], decided);
    assert_eq!(bench.answers(), [(ticket, allowed(10))]);
    bench.now_us += 2_000 * MS;
    let ticket = bench.request(1);
    let call = bench.poll_call();
    bench.reply_with(&call, vec![MeterReply { life_us: 0, remaining: 4, ..meter_reply(5, 3) }], decided);
    assert_eq!(bench.answers(), [(ticket, allowed(4))], "`remaining` is independent of the grant");
}

#[test]
fn each_limit_is_refunded_for_a_timed_out_request() {
    let mut bench = Bench::new();
    let (requests, tokens) = (bench.meter_of(b"requests", 10), bench.meter_of(b"tokens", 100));
    bench.request_under(vec![Charge { meter: requests, cost: 1 }, Charge { meter: tokens, cost: 20 }]);
    let call = bench.poll_call();
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
fn limit_that_occurs_twice_in_a_request_is_charged_both_costs() {
    let mut bench = Bench::new();
    let (twice, other) = (bench.meter(10, 1), bench.meter_of(b"other", 10));
    let under = [(&twice, 2), (&other, 1), (&twice, 3)];
    bench.request_under(under.map(|(meter, cost)| Charge { meter: meter.clone(), cost }).into());
    let call = bench.poll_call();
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
