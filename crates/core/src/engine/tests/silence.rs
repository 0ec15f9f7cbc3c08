//! Calls that stay without an answer: for whom, and for longer than an origin remembers them.

use super::*;
use crate::origin::LANE_RETENTION_US;

const MINUTE_US: u64 = 60_000 * MS;

impl Bench {
    /// A call about a key of its own.
    fn call_about(&mut self, key: &[u8]) -> Arc<Call> {
        let meter = self.meter_of(key, 10);
        self.ask_under(vec![Charge { meter, cost: 1 }]);
        self.poll();
        self.only_call()
    }

    /// Lets time pass, and looks after the engine whenever it wants that. The last call that was made.
    fn pass(&mut self, us: u64) -> Arc<Call> {
        let (until_us, mut last) = (self.now_us + us, None);
        while let Some(next_us) = self.poll().filter(|next_us| *next_us < until_us) {
            self.now_us = next_us.max(self.now_us + 1);
            last = self.calls().pop().or(last);
        }
        self.now_us = until_us;
        last.expect("a call is made again and again").0
    }

    fn hear(&mut self, call: &Call, reply: &Reply) {
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
    let last = bench.pass(LANE_RETENTION_US + MINUTE_US);
    partition.expire(bench.now_us);
    let late = |call: &Call| partition.clone().apply(bench.now_us, call).expect("it makes sense").lost;
    assert_eq!((last.sequence, last.acknowledged), (cut_off.sequence, 0));
    assert_eq!([&cut_off, &last].map(|call| late(call)), [true, false]);
}

#[test]
fn a_call_that_is_made_for_long_is_applied_once() {
    let (mut bench, mut partition) = (Bench::new(), Partition::default());
    let call = bench.call_about(b"one");
    let reply = partition.apply(bench.now_us, &call).expect("it makes sense");
    // It is heard there, and its answers are lost.
    for _ in 0..3 {
        let again = bench.pass(LANE_RETENTION_US * 2 / 3);
        partition.expire(bench.now_us);
        assert_eq!(
            partition.apply(bench.now_us, &again).as_ref(),
            Ok(&reply),
            "what was said the first time"
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
    assert_eq!(call.asks.iter().map(|ask| ask.count).collect::<Vec<_>>(), [2]);
    assert_eq!(bench.answers().iter().map(|(ticket, _)| *ticket).collect::<Vec<_>>(), [first]);
    bench.poll_after(9 * MS);
    assert_eq!(bench.answers(), [(early, Resolution::Unanswered)]);
    bench.reply(&call, 2, 0);
    let answers = bench.answers();
    assert!(matches!(answers[..], [(ticket, Resolution::Allowed { .. })] if ticket == late), "{answers:?}");
    assert_eq!(bench.engine.stats().returned, 1, "what passed for who had stopped waiting");
}
