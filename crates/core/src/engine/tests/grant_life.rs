//! How long grants live, and when the engine reports them.

use super::*;

/// Many keys with ten requests a second each, and an origin that replies a millisecond later.
struct Crowd {
    bench: Bench,
    meters: Vec<MeterRef>,
    partitions: Vec<Partition>,
    in_flight: Vec<(u16, Arc<Call>)>,
    passed: u64,
}

/// How many partitions the keys of a crowd lie in.
const CROWD_PARTITIONS: usize = 16;

impl Crowd {
    /// Half of the keys have room for ten times as much, half for half of it.
    fn new(keys: u32) -> Self {
        let mut bench = Bench::new();
        bench.table = Table::new(1 << 22, &Shares::single()).expect("a few lines");
        let amount = |key: u32| if key.is_multiple_of(2) { 100 } else { 5 };
        let meters = (0..keys).map(|key| bench.meter_of(&key.to_le_bytes(), amount(key))).collect();
        let partitions = vec![Partition::default(); CROWD_PARTITIONS];
        Self { bench, meters, partitions, in_flight: Vec::new(), passed: 0 }
    }

    fn request(&mut self, key: usize) {
        let meter = self.meters[key].clone();
        let verdict = self.bench.table.check(self.bench.now(), &meter.check(1)).verdict;
        self.passed += u64::from(verdict.is_allowed());
        if verdict.retry() == Some(Retry::AskOrigin) {
            let (ticket, partition) = (0, (key / 2 % CROWD_PARTITIONS) as u16);
            let request = EngineRequest { ticket, partition, charges: vec![Charge { meter, cost: 1 }] };
            self.bench.engine.on_request(self.bench.now(), request, &mut self.bench.effects);
        }
    }

    /// Runs a millisecond: replies come, a hundredth of the keys gets a request, calls go out.
    fn tick(&mut self) {
        self.bench.now_us += MS;
        for (partition, call) in std::mem::take(&mut self.in_flight) {
            let at = usize::from(partition);
            let reply = self.partitions[at].apply(self.bench.now_us, &call).expect("in order");
            self.bench.reply_from(partition, &call, &reply);
        }
        let turn = (self.bench.now_us / MS % 100) as usize;
        (turn..self.meters.len()).step_by(100).for_each(|key| self.request(key));
        self.bench.poll();
        for effect in std::mem::take(&mut self.bench.effects) {
            match effect {
                Effect::Call { partition, call, .. } => self.in_flight.push((partition, call)),
                Effect::Answer { resolution: Resolution::Allowed { .. }, .. } => self.passed += 1,
                Effect::Answer { .. } => {}
            }
        }
    }

    /// Lets seconds pass. Returns the number of meter updates and of passed requests.
    fn run(&mut self, seconds: u64) -> (u64, u64) {
        let count = |crowd: &Self| (crowd.bench.engine.stats().updates, crowd.passed);
        let before = count(self);
        (0..1_000 * seconds).for_each(|_| self.tick());
        let after = count(self);
        (after.0 - before.0, after.1 - before.1)
    }
}

#[test]
fn where_there_is_plenty_a_grant_lasts_and_is_reported_before_it_ends() {
    let mut bench = Bench::new();
    let meter = bench.meter_of(b"key", 100);
    let mut reports = Vec::new();
    for _ in 0..30 {
        bench.now_us += 100 * MS;
        bench.check_or_request(&meter);
        bench.poll();
        if let Some((call, _)) = bench.calls().pop() {
            let MeterUpdate { used, want, life_us, .. } = call.updates[0];
            let decided = check_reply(1);
            bench.reply_with(&call, vec![MeterReply { life_us, ..meter_reply(want, 100 - want) }], decided);
            reports.push((used, want));
        }
    }
    assert!(reports.len() < 7, "{reports:?}");
    let last = reports.last().map(|(_, want)| *want);
    assert!(matches!(last, Some(15 | 16)), "the want is the demand of one grant life and a margin: {last:?}");
    assert_eq!(bench.tickets, 2, "later requests do not wait for a call");
}

/// The node does not look at a grant that should last for a while. A request that finds it spent
/// asks the origin all the same, and its call reports all usage.
#[test]
fn request_after_an_early_spent_grant_asks_the_origin_at_once() {
    let mut bench = Bench::new();
    let meter = bench.meter_of(b"key", 100);
    let check = |bench: &Bench| bench.check(&meter);
    let mut held = 0;
    for _ in 0..30 {
        bench.now_us += 100 * MS;
        held -= u64::from(held > 0 && check(&bench).is_none());
        if held == 0 {
            bench.request_one(&meter);
        }
        bench.poll();
        if let Some((call, _)) = bench.calls().pop() {
            let MeterUpdate { want, life_us, .. } = call.updates[0];
            let decided = check_reply(1);
            bench.reply_with(&call, vec![MeterReply { life_us, ..meter_reply(want, 100 - want) }], decided);
            held = want;
        }
    }
    assert!(held > 5, "{held}");
    let mut spent = 0;
    while check(&bench).is_none() {
        spent += 1;
    }
    assert_eq!(spent, held);
    bench.request_one(&meter);
    let call = bench.poll_call();
    assert!(call.updates[0].used >= spent && call.checks.len() == 1, "{call:?}");
}

#[test]
fn sessions_that_begin_at_different_times_report_together() {
    let mut bench = Bench::new();
    bench.now_us += 3 * MS;
    bench.hold(10);
    assert_eq!(
        bench.poll(),
        Some(START_US + 100 * MS),
        "sessions report at one of eight phases of the interval"
    );
}

#[test]
fn a_grant_of_a_limit_of_several_regions_lasts_no_longer_where_there_is_plenty() {
    let limit = Limit::gcra(100, Duration::from_secs(1)).and_then(|limit| limit.with_burst(400));
    let limit = limit.expect("in range").at_origin();
    let longest_us = |terms: Terms| {
        let mut bench = Bench::new();
        let meter = MeterRef { limit, terms, ..bench.meter(100, 1) };
        let mut lives_us = Vec::new();
        for _ in 0..30 {
            bench.now_us += 100 * MS;
            bench.check_or_request(&meter);
            bench.poll();
            if let Some((call, _)) = bench.calls().pop() {
                let MeterUpdate { want, life_us, .. } = call.updates[0];
                let decided = check_reply(1);
                bench.reply_with(
                    &call,
                    vec![MeterReply { life_us, ..meter_reply(want, 400 - want) }],
                    decided,
                );
                lives_us.push(life_us);
            }
        }
        lives_us.into_iter().max().expect("a report of the meter")
    };
    let terms = Terms::new(&limit, 0, Lapse::Counted, 1);
    let cross_region =
        CrossRegionTerms { publish_threshold: 25, share_amount: 50, share_capacity: 200, debt_max: 0 };
    assert!(longest_us(terms) > CROSS_REGION_LIFE_US_MAX, "a limit of one region");
    assert_eq!(
        longest_us(terms.with_cross_region(cross_region)),
        CROSS_REGION_LIFE_US_MAX,
        "a cross-region limit"
    );
}

/// Two keys get their requests at different times, but one call reports both.
#[test]
fn grants_that_end_soon_join_the_report_of_an_earlier_one() {
    let mut bench = Bench::new();
    let meters = [b"one", b"two"].map(|key| bench.meter_of(key, 100));
    let (mut calls, mut updates) = (0, 0);
    for turn in 0..200 {
        bench.now_us += 20 * MS;
        bench.check_or_request(&meters[turn / 5 % 2]);
        bench.poll();
        for (call, _) in bench.calls() {
            let meter_reply = call
                .updates
                .iter()
                .map(|update| MeterReply { life_us: update.life_us, ..meter_reply(update.want, 60) });
            bench.reply_with(&call, meter_reply.collect(), check_reply(1));
            // The first second does not count.
            (calls, updates) = if turn < 50 { (0, 0) } else { (calls + 1, updates + call.updates.len()) };
        }
    }
    assert!(calls > 0 && updates == 2 * calls, "{updates} in {calls}");
}

#[test]
fn refund_is_reported_although_units_remain() {
    let mut bench = Bench::new();
    bench.request(1);
    let call = bench.poll_call();
    bench.poll_after(20 * MS);
    bench.reply_with(&call, vec![meter_reply(0, 9)], check_reply(1));
    bench.poll_after(100 * MS);
    let last = bench.calls().pop().expect("a call").0;
    assert_eq!(last.updates[0].refund, 1);
}

#[test]
fn node_asks_again_when_a_unit_can_have_drained() {
    let mut bench = Bench::new();
    bench.request(1);
    let call = bench.poll_call();
    let exhausted = MeterReply { life_us: 0, wait_us: 450 * MS, exhausted: true, ..meter_reply(0, 0) };
    bench.reply_with(&call, vec![exhausted], CheckReply { passed: 0, denied_by: 0, retry_us: 450 * MS });
    let mut calls = Vec::new();
    while calls.is_empty() {
        assert!(!bench.spend(1).is_allowed());
        bench.poll_after(100 * MS);
        calls = bench.calls();
    }
    assert_eq!(bench.now_us, START_US + 500 * MS);
}

#[test]
fn many_warm_keys_cost_few_updates_and_pass_as_they_may() {
    let mut crowd = Crowd::new(10_000);
    crowd.run(10);
    let (updates, passed) = crowd.run(6);
    let requests = 6 * 100_000;
    assert!(updates * 100 < requests * 29, "{updates} updates of meters for {requests} requests");
    let may_pass = 6 * (50_000 + 25_000);
    assert!(passed * 100 >= may_pass * 97, "{passed} of {may_pass} passed");
}
