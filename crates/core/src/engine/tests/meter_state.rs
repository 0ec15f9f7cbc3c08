//! The state of a meter: lapsed and returned grants, changed limits, remaining and dropped units.

use super::*;

#[test]
fn late_reported_grants_are_counted_as_lapsed() {
    // A grant of a second is believed in for 300 ms longer, and clocks may differ by a sixteenth.
    for (late_ms, lapsed) in [(1_281, 0), (1_282, 8)] {
        let mut bench = Bench::new();
        bench.hold(8);
        let granted_us = bench.now_us;
        bench.now_us += 900 * MS;
        let call = bench.poll_call();
        bench.now_us = granted_us + late_ms * MS;
        bench.reply(&call, 0, 0);
        assert_eq!(bench.engine.stats().lapsed, lapsed, "after {late_ms} ms");
    }
    let mut bench = Bench::new();
    bench.hold(8);
    let call = bench.next_call();
    bench.reply_with(&call, vec![MeterReply { lapsed: true, ..meter_reply(0, 0) }], check_reply(0));
    assert_eq!(bench.engine.stats().lapsed, 8, "the origin reports the lapse");
}

#[test]
fn closing_engine_reports_all_usage_and_keeps_no_grant() {
    let mut bench = Bench::new();
    bench.hold(8);
    assert!(bench.spend(3).is_allowed());
    bench.engine.close();
    let last = bench.poll_call();
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
fn changed_limit_reaches_the_origin_with_the_next_request() {
    for grant in [0, 8] {
        let mut bench = Bench::new();
        bench.request(1);
        let call = bench.poll_call();
        let exhausted = MeterReply { wait_us: 60_000 * MS, exhausted: true, ..meter_reply(grant, 0) };
        bench.reply_with(&call, vec![exhausted], CheckReply { passed: 1, denied_by: 0, retry_us: 1 });
        bench.answers();
        let decided = bench.spend(1);
        assert_ne!(decided.retry(), Some(Retry::AskOrigin), "{decided:?}");
        let raised = bench.meter(20, 2);
        assert_eq!(bench.table.check(bench.now(), &raised.check(1)).verdict.retry(), Some(Retry::AskOrigin));
        bench.request_under(vec![Charge { meter: raised, cost: 1 }]);
        let call = bench.poll_call();
        assert_eq!((call.updates[0].terms.version(), call.checks.len()), (2, 1));
    }
}

#[test]
fn remaining_units_are_known_and_grow_by_draining() {
    let mut bench = Bench::new();
    let digest = bench.meter(10, 1).digest;
    bench.request(1);
    let before = bench.engine.fallback_state(bench.now(), 0, digest);
    assert_eq!(before, FallbackState { processes: 1, remaining: None }, "no reply has arrived");
    let call = bench.poll_call();
    let left = MeterReply { holders: 4, ..meter_reply(2, 3) };
    bench.reply_with(&call, vec![left], check_reply(1));
    for (later_us, left) in [(0, 3), (500 * MS, 8), (60_000 * MS, 10)] {
        bench.now_us += later_us;
        let fallback_state = bench.engine.fallback_state(bench.now(), 0, digest);
        assert_eq!(fallback_state, FallbackState { processes: 4, remaining: Some(left) });
    }
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
    bench.request_under(vec![Charge { meter: stranger, cost: 4 }]);
    let call = bench.poll_call();
    bench.poll_after(20 * MS);
    bench.reply(&call, 1, 0);
    let stats = bench.engine.stats();
    assert_eq!((stats.returned, stats.dropped), (0, 9), "expired checks of a dropped meter are not refunded");
}

#[test]
fn cross_region_grants_are_shorter_and_smaller_at_a_long_lag() {
    let update_for = |is_cross_region: bool, life_us: u64| {
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
                bench.request_one(&meter);
            }
            bench.poll();
            let (call, _) = bench.calls().pop().expect("a call with the check");
            update = Some((call.updates[0].life_us, call.updates[0].want));
            let meter_reply = MeterReply { life_us: 0, ..meter_reply(0, 0) };
            bench.reply_with(&call, vec![meter_reply], check_reply(20));
        }
        update.expect("five calls")
    };
    let (life_us, want) = update_for(true, CROSS_REGION_LIFE_US_MAX);
    assert_eq!(life_us, 1_000 * MS);
    let (shorter_us, less) = update_for(true, 250 * MS);
    assert_eq!(shorter_us, 250 * MS);
    assert!(0 < less && less < want, "{less} of {want}");
    assert_eq!(update_for(false, 250 * MS), (life_us, want), "a limit of one region keeps its grant life");
}
