use super::*;
use crate::limit::Limit;
use crate::origin::{LAPSE_MARGIN_US, Lapse, MeterUpdate, RECALL_US};
use crate::remote_clock::longest_us;
use std::time::Duration;

const SECOND: u64 = 1_000_000;
const START: u64 = 1_000 * SECOND;

/// A node that sends the updates of a test.
struct Caller {
    node: NodeId,
    sequence: u64,
    store: StoreId,
    terms: Terms,
}

impl Caller {
    fn new(node: u64, terms: Terms) -> Self {
        Self {
            node: NodeId(node),
            sequence: 0,
            store: StoreId { lineage: 1, boot: 1, parent: 0, up_us: 0 },
            terms,
        }
    }

    fn update(&self, used: u64, keep: u64, want: u64) -> MeterUpdate {
        MeterUpdate { used, keep, want, life_us: SECOND, ..MeterUpdate::new(*b"key", self.terms) }
    }

    fn call(&mut self, update: MeterUpdate, checks: Vec<CheckGroup>) -> Call {
        self.sequence += 1;
        let (node, sequence, acknowledged) = (self.node, self.sequence, self.sequence - 1);
        Call { node, sequence, acknowledged, known_us: 0, store: self.store, updates: vec![update], checks }
    }

    /// Calls until the node has the grant that it wants: one call grants a part of the room.
    fn hold(&mut self, partition: &mut Partition, now: u64, want: u64) -> crate::origin::MeterReply {
        let mut meter_reply = self.say(partition, now, (0, 0, want));
        for _ in 0..64 {
            meter_reply = self.say(partition, now, (0, meter_reply.grant, want));
        }
        meter_reply
    }

    fn say(
        &mut self,
        partition: &mut Partition,
        now: u64,
        report: (u64, u64, u64),
    ) -> crate::origin::MeterReply {
        let update = self.update(report.0, report.1, report.2);
        let call = self.call(update, Vec::new());
        partition.apply(now, &call).expect("in order").meters[0]
    }

    fn ask(&mut self, partition: &mut Partition, now: u64, cost: u64, count: u32) -> CheckReply {
        let update = self.update(0, 0, 0);
        let call = self.call(update, vec![one(cost, count)]);
        partition.apply(now, &call).expect("in order").checks[0]
    }
}

/// Requests under several limits, as pairs of meter and cost.
fn ask(charges: &[(u16, u64)], count: u32) -> CheckGroup {
    let charges = charges.iter().map(|&(meter, cost)| Charge { meter, cost });
    CheckGroup { charges: charges.collect(), count }
}

/// Requests under the only limit of a call.
fn one(cost: u64, count: u32) -> CheckGroup {
    ask(&[(0, cost)], count)
}

fn ten_per_second(lapse: Lapse) -> Terms {
    Terms::new(&Limit::gcra(10, Duration::from_secs(1)).expect("in range"), 0, lapse, 1)
}

fn window_of_ten(lapse: Lapse) -> Terms {
    Terms::new(&Limit::sliding_window(10, Duration::from_secs(1)).expect("in range"), 0, lapse, 1)
}

#[test]
fn grants_count_as_used() {
    for terms in [ten_per_second(Lapse::Counted), window_of_ten(Lapse::Counted)] {
        let mut partition = Partition::default();
        let (mut first, mut second) = (Caller::new(1, terms), Caller::new(2, terms));
        assert_eq!(first.hold(&mut partition, START, 6).grant, 6);
        let meter_reply = second.say(&mut partition, START, (0, 0, 8));
        assert_eq!(
            (meter_reply.grant, meter_reply.exhausted, meter_reply.room, meter_reply.holders),
            (0, false, 4, 2)
        );
        assert_eq!(meter_reply.remaining, 10, "a grant is not usage");
        assert_eq!(second.ask(&mut partition, START, 1, 5).passed, 4);
        assert_eq!(first.ask(&mut partition, START, 1, 99).passed, 6);
    }
}

/// A limit of 1,000 a second with this burst, of which four nodes want their parts.
fn divided(burst: u64, wants: [u64; 4]) -> [crate::origin::MeterReply; 4] {
    let limit = Limit::gcra(1_000, Duration::from_secs(1)).and_then(|limit| limit.with_burst(burst));
    let terms = Terms::new(&limit.expect("in range"), 0, Lapse::Counted, 1);
    let mut partition = Partition::default();
    let mut callers = [1, 2, 3, 4].map(|node| Caller::new(node, terms));
    // The first round informs the origin of each want, and the second divides by them.
    let ends = START + 10 * SECOND;
    for (caller, want) in callers.iter_mut().zip(wants) {
        caller.say(&mut partition, ends - SECOND, (0, 0, want));
    }
    let mut at = 0;
    callers.map(|mut caller| {
        at += 1;
        caller.say(&mut partition, ends - SECOND, (0, 0, wants[at - 1]))
    })
}

#[test]
fn one_call_extends_a_grant_by_a_quarter_of_the_room() {
    let limit = Limit::gcra(1_000, Duration::from_secs(1)).and_then(|limit| limit.with_burst(1_000));
    let terms = Terms::new(&limit.expect("in range"), 0, Lapse::Counted, 1);
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, terms);
    // All that is left drains in a second, a tenth of it until the next report: the grant grows
    // to that first.
    assert_eq!(caller.say(&mut partition, START, (0, 0, 900)).grant, 100);
    // 900 units are left, and 200 would double the grant.
    assert_eq!(caller.say(&mut partition, START, (0, 100, 900)).grant, 200);
    // 800 are left: a quarter of them.
    assert_eq!(caller.say(&mut partition, START, (0, 200, 900)).grant, 400);
    assert_eq!(caller.say(&mut partition, START, (0, 400, 900)).grant, 550);
}

#[test]
fn room_is_divided_by_demand() {
    let meter_reply = divided(1_000, [500, 250, 125, 125]);
    assert!(meter_reply.is_sorted_by(|one, other| one.grant >= other.grant), "{meter_reply:?}");
    assert!(
        meter_reply[0].grant >= 2 * meter_reply[1].grant - 20 && meter_reply[0].grant <= 125,
        "{meter_reply:?}"
    );
    let held: u64 = meter_reply.iter().map(|meter_reply| meter_reply.grant).sum();
    assert!((90..=100).contains(&held), "grants sum to the drain until the next report: {meter_reply:?}");
    assert!(
        meter_reply.iter().all(|meter_reply| !meter_reply.exhausted),
        "no node sees an exhausted meter: {meter_reply:?}"
    );
    assert!(
        meter_reply.iter().all(|meter_reply| meter_reply.remaining == 1_000),
        "nothing is used: {meter_reply:?}"
    );
}

#[test]
fn node_without_a_grant_counts_by_its_demand() {
    let meter_reply = divided(4, [3, 3, 3, 3]);
    assert_eq!(
        meter_reply.map(|meter_reply| (meter_reply.grant, meter_reply.holders)),
        [(1, 4), (0, 4), (0, 4), (0, 4)]
    );
    assert_eq!(
        meter_reply.map(|meter_reply| meter_reply.exhausted),
        [false; 4],
        "no node is denied because of the division"
    );
}

#[test]
fn only_waiting_requests_use_the_tolerance_against_other_grants() {
    let limit = Limit::gcra(100, Duration::from_hours(24)).expect("in range");
    let terms = Terms::new(&limit, crate::origin::TOLERANCE_PPM_MAX, Lapse::Counted, 1);
    let mut partition = Partition::default();
    let (mut holder, mut other) = (Caller::new(1, terms), Caller::new(2, terms));
    assert_eq!(holder.hold(&mut partition, START, 60).grant, 60);
    assert_eq!(
        other.ask(&mut partition, START, 1, 99).passed,
        41,
        "the free units and the tolerance of one hundredth"
    );
    assert_eq!(other.ask(&mut partition, START, 1, 9).passed, 0);
    holder.say(&mut partition, START, (60, 0, 0));
    assert_eq!(holder.ask(&mut partition, START, 1, 9).passed, 0, "reported usage is not admitted again");
}

#[test]
fn charges_drain_at_the_old_rate_until_a_limit_changes() {
    let limit = |seconds| Limit::gcra(10, Duration::from_secs(seconds)).expect("in range");
    let mut partition = Partition::default();
    let mut slow = Caller::new(1, Terms::new(&limit(100), 0, Lapse::Counted, 1));
    let mut fast = Caller::new(2, Terms::new(&limit(1), 0, Lapse::Counted, 2));
    assert_eq!(slow.ask(&mut partition, START, 1, 10).passed, 10);
    assert_eq!(fast.ask(&mut partition, START + 20 * SECOND, 1, 99).passed, 2);
    assert_eq!(fast.ask(&mut partition, START + 21 * SECOND, 1, 99).passed, 10);
}

#[test]
fn a_call_that_is_sent_again_gets_its_first_answer() {
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    let update = caller.update(0, 0, 0);
    let call = caller.call(update, vec![one(4, 1)]);
    let first = partition.apply(START, &call);
    assert_eq!(partition.apply(START + 9, &call), first);
    assert_eq!(partition.meter(b"key").map(OriginMeter::charged), Some(4));
    caller.say(&mut partition, START + 10, (0, 0, 0));
    assert_eq!(partition.apply(START + 11, &call), Err(CallError::Outdated { sequence: 2 }));
}

#[test]
fn a_lapsed_grant_is_counted_or_forgiven_and_a_late_report_charged_once() {
    for (lapse, charged, late) in [(Lapse::Counted, 6, 6), (Lapse::Forgiven, 0, 5)] {
        let mut partition = Partition::default();
        let mut holder = Caller::new(1, ten_per_second(lapse));
        let mut other = Caller::new(2, ten_per_second(lapse));
        holder.hold(&mut partition, START, 6);
        let ends = START + longest_us(SECOND) + LAPSE_MARGIN_US;
        other.say(&mut partition, ends - 1, (0, 0, 0));
        assert_eq!(partition.meter(b"key").map(OriginMeter::held), Some(6));
        other.say(&mut partition, ends, (0, 0, 0));
        let meter = partition.meter(b"key").expect("known");
        assert_eq!((meter.held(), meter.charged()), (0, charged));
        let meter_reply = holder.say(&mut partition, ends + 1, (5, 3, 0));
        assert_eq!((meter_reply.grant, meter_reply.lapsed), (0, true));
        assert_eq!(partition.meter(b"key").map(OriginMeter::charged), Some(late));
    }
}

#[test]
fn a_window_charges_a_late_report_to_the_cell_it_is_of() {
    let mut partition = Partition::default();
    let mut holder = Caller::new(1, window_of_ten(Lapse::Forgiven));
    let meter_reply = holder.hold(&mut partition, START + SECOND / 2, 6);
    let life_us = SECOND / 2 * 16 / 17;
    assert_eq!(
        (meter_reply.grant, meter_reply.life_us),
        (6, life_us),
        "the grant ends with its cell, even on a slow clock"
    );
    let mut report = holder.update(6, 0, 0);
    report.cell = meter_reply.cell;
    let call = holder.call(report, Vec::new());
    partition.apply(START + SECOND + SECOND / 2, &call).expect("in order");
    let mut other = Caller::new(2, window_of_ten(Lapse::Forgiven));
    assert_eq!(other.ask(&mut partition, START + SECOND + SECOND / 2, 1, 99).passed, 7);
}

#[test]
fn requests_under_several_limits_pass_together_or_not_at_all() {
    let mut partition = Partition::default();
    let narrow = Terms::new(&Limit::gcra(3, Duration::from_secs(1)).expect("in range"), 0, Lapse::Counted, 1);
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    let wide = caller.update(0, 0, 0);
    let mut call = caller.call(wide.clone(), vec![ask(&[(0, 2), (1, 2)], 4)]);
    call.updates.push(MeterUpdate { key: Box::from(*b"narrow"), terms: narrow, ..wide });
    let reply = partition.apply(START, &call).expect("in order");
    assert_eq!((reply.checks[0].passed, reply.checks[0].denied_by), (1, 1));
    assert_eq!(reply.checks[0].retry_us, SECOND / 3 + 1);
    for key in [&b"key"[..], b"narrow"] {
        assert_eq!(partition.meter(key).map(OriginMeter::charged), Some(2));
    }
}

#[test]
fn each_limit_of_a_request_is_charged_its_own_cost() {
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    let requests = caller.update(0, 0, 0);
    let hundred =
        Terms::new(&Limit::gcra(100, Duration::from_secs(1)).expect("in range"), 0, Lapse::Counted, 1);
    let tokens = MeterUpdate { key: Box::from(*b"tokens"), terms: hundred, ..requests.clone() };
    let mut decide = |cost, count| {
        let mut call = caller.call(requests.clone(), vec![ask(&[(0, 1), (1, cost)], count)]);
        call.updates.push(tokens.clone());
        let CheckReply { passed, denied_by, .. } = partition.apply(START, &call).expect("in order").checks[0];
        let charged = |key: &[u8]| partition.meter(key).map_or(0, OriginMeter::charged);
        (passed, denied_by, charged(b"key"), charged(b"tokens"))
    };
    assert_eq!(decide(20, 9), (5, 1, 5, 100), "100 tokens admit five requests");
    assert_eq!(decide(1, 1), (0, 1, 5, 100), "the token limit denies although requests are left");
    assert_eq!(decide(0, 9), (5, 0, 10, 100), "checks without tokens pass until the request limit is spent");
}

#[test]
fn large_request_recalls_grants_of_other_nodes() {
    let mut partition = Partition::default();
    let terms = ten_per_second(Lapse::Counted);
    let (mut holder, mut large) = (Caller::new(1, terms), Caller::new(2, terms));
    holder.say(&mut partition, START, (0, 0, 8));
    let denied = large.ask(&mut partition, START, 10, 1);
    assert_eq!((denied.passed, denied.retry_us < RECALL_US), (0, true));
    let meter_reply = holder.say(&mut partition, START + 100_000, (0, 8, 8));
    assert!(meter_reply.recall);
    assert_eq!(
        holder.say(&mut partition, START + 100_001, (0, 0, 8)).grant,
        0,
        "the units stay reserved for the large request"
    );
    assert_eq!(large.ask(&mut partition, START + denied.retry_us, 10, 1).passed, 1);
}

#[test]
fn drained_units_are_not_refunded() {
    for (charged_us, passes) in [(START, 8), (0, 9)] {
        let mut partition = Partition::default();
        let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
        assert_eq!(caller.ask(&mut partition, START, 1, 10).passed, 10);
        // A tenth of a second later one unit has drained, from any of the charges.
        let mut update = caller.update(0, 0, 0);
        (update.refund, update.refund_of_us) = (8, charged_us);
        let call = caller.call(update, vec![one(1, 99)]);
        let reply = partition.apply(START + SECOND / 10, &call).expect("in order");
        assert_eq!(reply.checks[0].passed, passes);
    }
}

#[test]
fn the_higher_version_of_a_limit_holds() {
    let mut partition = Partition::default();
    let old = ten_per_second(Lapse::Counted);
    let new = Terms::new(&Limit::gcra(4, Duration::from_mins(1)).expect("in range"), 0, Lapse::Counted, 2);
    let (mut late, mut early) = (Caller::new(1, old), Caller::new(2, new));
    assert_eq!(late.ask(&mut partition, START, 1, 3).passed, 3);
    assert_eq!(early.ask(&mut partition, START, 1, 9).passed, 1, "three of four are used");
    assert_eq!(late.ask(&mut partition, START + SECOND, 1, 9).passed, 0, "the higher version denies");
}

#[test]
fn after_lost_writes_a_limit_that_must_hold_counts_as_full() {
    let stores = |boot, parent, lineage| StoreId { lineage, boot, parent, up_us: 0 };
    let cases = [
        ("restarted", stores(2, 0, 1), true),
        ("promoted", stores(2, 1, 7), true),
        ("moved with all its data", stores(2, 0, 7), false),
        ("the same", stores(1, 0, 1), false),
    ];
    for (case, store, lost) in cases {
        for terms in [ten_per_second(Lapse::Counted), window_of_ten(Lapse::Counted)] {
            let mut partition = Partition::default();
            let mut caller = Caller::new(1, terms);
            assert_eq!(caller.ask(&mut partition, START, 1, 1).passed, 1);
            caller.store = store;
            let passed = caller.ask(&mut partition, START + 1, 1, 99).passed;
            assert_eq!(passed, if lost { 0 } else { 9 }, "{case}");
            let later = caller.ask(&mut partition, START + 2 * SECOND + 1, 1, 99).passed;
            assert_eq!(later, 10, "{case}: drained since");
        }
    }
}

#[test]
fn a_store_that_knows_less_than_the_node_has_lost_writes() {
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    caller.say(&mut partition, START, (0, 0, 0));
    let mut emptied = Partition::default();
    let update = caller.update(0, 0, 4);
    let call = caller.call(update, Vec::new());
    let reply = emptied.apply(START + 1, &call).expect("in order");
    assert!(reply.lost);
    assert_eq!(reply.meters[0].grant, 0);
}

#[test]
fn clock_set_back_does_not_lock_out_requests() {
    for terms in [ten_per_second(Lapse::Counted), window_of_ten(Lapse::Counted)] {
        let mut partition = Partition::default();
        let mut caller = Caller::new(1, terms);
        let hour = 3_600 * SECOND;
        assert_eq!(caller.ask(&mut partition, START + hour, 1, 99).passed, 10);
        assert_eq!(caller.ask(&mut partition, START, 1, 99).passed, 0);
        assert_eq!(caller.ask(&mut partition, START + 2 * SECOND, 1, 99).passed, 10);
    }
}

#[test]
fn limit_of_zero_grants_nothing_and_never_retries() {
    let gcra = Limit::gcra(0, Duration::from_secs(1)).expect("in range");
    let window = Limit::sliding_window(0, Duration::from_secs(1)).expect("in range");
    for limit in [gcra, window] {
        let mut partition = Partition::default();
        let mut caller = Caller::new(1, Terms::new(&limit, 50_000, Lapse::Counted, 1));
        let meter_reply = caller.say(&mut partition, START, (0, 0, 5));
        assert_eq!(
            (meter_reply.grant, meter_reply.room, meter_reply.wait_us),
            (0, 0, crate::origin::NEVER_US)
        );
        let denied = caller.ask(&mut partition, START, 1, 1);
        assert_eq!((denied.passed, denied.retry_us), (0, crate::origin::NEVER_US));
    }
}

#[test]
fn no_number_is_too_large() {
    let year = Duration::from_hours(8_784);
    let limits =
        [Limit::gcra(u64::from(u32::MAX), year), Limit::sliding_window(1, year), Limit::gcra(1, year)];
    for limit in limits {
        for lapse in [Lapse::Counted, Lapse::Forgiven] {
            let mut partition = Partition::default();
            let mut caller = Caller::new(1, Terms::new(&limit.expect("in range"), u32::MAX, lapse, u32::MAX));
            for _ in 0..9 {
                let mut update = caller.update(u64::MAX, u64::MAX, u64::MAX);
                (update.cell, update.life_us) = (u64::MAX, u64::MAX);
                let call = caller.call(update, vec![one(u64::MAX, u32::MAX)]);
                let meter_reply = partition.apply(START, &call).expect("in order").meters[0];
                assert!(meter_reply.wait_us <= crate::origin::NEVER_US);
            }
            let mut update = caller.update(0, 0, 0);
            update.refund = u64::MAX;
            let call = caller.call(update, Vec::new());
            partition.apply(START, &call).expect("in order");
            assert!(partition.meter(b"key").expect("known").expires_us() < 1 << 52);
        }
    }
}

#[test]
fn a_grant_that_counts_as_used_is_remembered_until_it_would_have_drained() {
    let a_day = Limit::gcra(1_000, Duration::from_hours(24)).expect("in range");
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, Terms::new(&a_day, 0, Lapse::Counted, 1));
    caller.hold(&mut partition, START, 500);
    partition.expire(START + 43_200 * SECOND);
    assert_eq!(partition.meter(b"key").map(OriginMeter::held), Some(500));
}

#[test]
fn lost_writes_are_counted_once_at_any_clock_offset() {
    let terms = ten_per_second(Lapse::Counted);
    let restarted = StoreId { lineage: 1, boot: 2, parent: 0, up_us: 0 };
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, terms);
    caller.ask(&mut partition, START, 1, 1);
    // The clock of the store that took over is behind.
    caller.store = restarted;
    assert_eq!(caller.ask(&mut partition, START - SECOND, 1, 99).passed, 0);
    // The clock is set back further, and no limit stays full because of that.
    caller.ask(&mut partition, START - 900 * SECOND, 1, 0);
    assert_eq!(caller.ask(&mut partition, START - 898 * SECOND, 1, 99).passed, 10);
}

/// The node has known the origin for longer than an empty store is up. All state was lost when
/// that store started, also of meters that this node never used.
#[test]
fn a_store_that_comes_back_empty_counts_limits_that_must_hold_as_full_since_then() {
    let ask = |lapse, known_us, up_us| {
        let mut caller = Caller::new(1, ten_per_second(lapse));
        caller.store.up_us = up_us;
        let update = caller.update(0, 0, 0);
        let checks = vec![CheckGroup { charges: vec![Charge { meter: 0, cost: 1 }], count: 99 }];
        let call = Call { known_us, ..caller.call(update, checks) };
        let reply = Partition::default().apply(START, &call).expect("in order");
        (reply.checks[0].passed, reply.lost)
    };
    assert_eq!(ask(Lapse::Counted, 60 * SECOND, SECOND / 2), (5, true), "half of it has drained");
    assert_eq!(ask(Lapse::Counted, 60 * SECOND, 20 * SECOND), (10, true), "all of it has drained");
    assert_eq!(ask(Lapse::Forgiven, 60 * SECOND, SECOND / 2), (10, true));
    assert_eq!(ask(Lapse::Counted, 0, SECOND / 2), (10, false), "the node knows no earlier store");
    assert_eq!(
        ask(Lapse::Counted, 60 * SECOND, 57 * SECOND),
        (10, false),
        "the difference is within the clock tolerance"
    );
}

#[test]
fn a_call_that_makes_no_sense_is_refused_by_name() {
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    let update = caller.update(0, 0, 0);
    let good = caller.call(update.clone(), Vec::new());
    let cases = [
        (
            Call { sequence: 1 << 53, ..good.clone() },
            "sequence: 9007199254740992 is outside 0 to 9007199254740991",
        ),
        (
            Call { updates: vec![update.clone(); 2], ..good.clone() },
            "updates: meter 0 occurs twice in this call",
        ),
        (Call { updates: vec![update; 257], ..good.clone() }, "updates and checks: 257 is outside 0 to 256"),
        (
            Call { checks: vec![ask(&[(0, 1), (1, 1)], 1)], ..good.clone() },
            "checks: a check refers to meter 1, which is not in this call",
        ),
        (Call { checks: vec![ask(&[(0, 1), (0, 2)], 1)], ..good }, "checks: one check charges meter 0 twice"),
    ];
    for (call, message) in cases {
        let refused = Partition::default().apply(START, &call).expect_err(message);
        assert_eq!(refused.to_string(), message);
    }
}

#[test]
fn a_clock_that_is_set_back_leaves_nothing_held_for_longer_than_a_grant_lives() {
    let terms = ten_per_second(Lapse::Forgiven);
    let mut partition = Partition::default();
    let (mut dead, mut large, mut other) =
        (Caller::new(1, terms), Caller::new(2, terms), Caller::new(3, terms));
    dead.hold(&mut partition, START, 6);
    assert_eq!(large.ask(&mut partition, START, 10, 1).passed, 0, "the grant of the other node is recalled");
    let back = START - 900 * SECOND;
    assert_eq!(
        other.ask(&mut partition, back, 1, 99).passed,
        4,
        "the reservation ends although the clock was set back"
    );
    assert_eq!(other.ask(&mut partition, back + 12 * SECOND, 1, 99).passed, 10);
}

#[test]
fn expired_meter_is_removed() {
    let mut partition = Partition::default();
    let mut caller = Caller::new(1, ten_per_second(Lapse::Counted));
    caller.ask(&mut partition, START, 1, 9);
    let ends = partition.meter(b"key").expect("known").expires_us();
    partition.expire(ends - 1);
    assert!(partition.meter(b"key").is_some());
    partition.expire(ends);
    assert!(partition.meter(b"key").is_none());
}
