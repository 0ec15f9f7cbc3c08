//! Calls: hedges, retries, sizes and refusals.

use super::*;

#[test]
fn late_call_is_hedged_once() {
    let mut bench = Bench::new();
    bench.request(1);
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
fn call_without_a_reply_is_retried_at_growing_intervals() {
    let mut bench = Bench::new();
    bench.request(1);
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
fn reply_to_another_call_is_ignored() {
    let mut bench = Bench::new();
    bench.request(1);
    let call = bench.poll_call();
    bench.reply(&Call { sequence: call.sequence + 1, ..Call::clone(&call) }, 1, 9);
    assert_eq!(bench.answers(), []);
    assert!(!bench.spend(1).is_allowed(), "nothing was granted");
    bench.reply(&call, 1, 0);
    assert_eq!(bench.answers().len(), 1);
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
        let ticket = bench.request(9);
        let call = bench.poll_call();
        let fields = |call: &Call| {
            let MeterUpdate { used, owed, refund, refund_of_us, .. } = call.updates[0];
            (used, owed, refund, refund_of_us)
        };
        assert_eq!((fields(&call), call.checks.len()), ((3, 2, 1, 50), 1));
        bench.fail(&call, failure);
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
fn meters_that_are_refused_together_are_reported_separately() {
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
                Ok(reply) => bench.reply_as(&call, &reply),
                Err(error) => bench.fail(&call, error.into()),
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
fn calls_stay_within_the_size_limit_of_the_origin() {
    let mut bench = Bench::new();
    for cost in (0..300).map(|turn| 1 + turn % 2) {
        bench.request(cost);
    }
    let first = bench.poll_call();
    assert_eq!(
        (first.check(), first.checks.len()),
        (Ok(()), 256),
        "adjacent checks differ in cost, so none are merged"
    );
    bench.reply(&first, 0, 0);
    assert_eq!(bench.poll_call().checks.len(), 44);
}

#[test]
fn due_reports_are_batched_and_every_meter_gets_a_turn() {
    let mut bench = Bench::new();
    let names: Vec<[u8; 1]> = (0..150u8).map(|name| [name]).collect();
    for name in &names {
        let meter = bench.meter_of(name, 10);
        bench.request_one(&meter);
    }
    for expected in [64, 64, 22] {
        let call = bench.poll_call();
        assert_eq!(call.updates.len(), expected, "waiting checks count towards the size limit");
        bench.reply(&call, 1, 5);
    }
    let mut reported = Vec::new();
    bench.now_us += 100 * MS;
    for expected in [64, 64, 22] {
        // Those that have just been reported are due again.
        for name in &names {
            let meter = bench.meter_of(name, 10);
            assert!(bench.table.check(bench.now(), &meter.check(1)).verdict.is_allowed());
        }
        let flush = bench.poll_call();
        let new = flush.updates.iter().filter(|update| !reported.contains(&update.key)).count();
        assert_eq!((flush.updates.len(), new), (64, expected));
        reported.extend(flush.updates.iter().map(|update| update.key.clone()));
        bench.reply(&flush, 0, 5);
        bench.now_us += 100 * MS;
    }
}

#[test]
fn thousand_requests_for_a_cold_key_make_two_calls() {
    let mut bench = Bench::new();
    for _ in 0..1_000 {
        bench.request(1);
        bench.poll();
    }
    let first = bench.only_call();
    bench.reply(&first, 1, 0);
    let second = bench.poll_call();
    assert_eq!((second.checks.len(), second.checks[0].count), (1, 999));
}
