//! A call as the script reads it, and its reply.
//!
//! Every key of a partition has the partition in braces, which is all that a cluster places it by: a call is in one slot.
//! A meter's own name is the rest of its key, whatever bytes it has, so no two meters share one.

use std::fmt::Write as _;

use tidegate_core::Algorithm;
use tidegate_core::origin::{
    Ask, Call, CallError, Charge, DEBT_MAX, Decided, Lapse, NEVER_US, Reply, Terms, Told, Update,
};

/// What the keys begin with.
const PREFIX: &str = "tg:";

/// A call, ready to be sent.
pub(super) struct Script {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) arguments: Vec<String>,
}

impl Script {
    pub(super) fn of(partition: u16, call: &Call, clustered: bool) -> Self {
        let mut keys = Vec::with_capacity(2 + 2 * call.updates.len());
        keys.push(format!("{PREFIX}{{{partition}}}:s").into_bytes());
        keys.push(format!("{PREFIX}{{{partition}}}:n:{:016x}", call.node.0).into_bytes());
        for update in &call.updates {
            keys.push(meter_key(partition, 'm', &update.key));
            keys.push(meter_key(partition, 'e', &update.key));
        }
        let mut arguments = Vec::with_capacity(1 + call.updates.len() + call.asks.len());
        arguments.push(header(call, clustered));
        arguments.extend(call.updates.iter().map(update_line));
        arguments.extend(call.asks.iter().map(ask_line));
        Self { keys, arguments }
    }
}

pub(super) fn meter_key(partition: u16, kind: char, name: &[u8]) -> Vec<u8> {
    let mut key = format!("{PREFIX}{{{partition}}}:{kind}:").into_bytes();
    key.extend_from_slice(name);
    key
}

fn header(call: &Call, clustered: bool) -> String {
    let (sequence, acknowledged, clustered) = (call.sequence, call.acknowledged, u8::from(clustered));
    let (updates, asks) = (call.updates.len(), call.asks.len());
    format!("{:016x} {sequence} {acknowledged} {clustered} {updates} {asks}", call.node.0)
}

pub(super) fn terms_text(terms: &Terms) -> String {
    let kind = match terms.algorithm() {
        Algorithm::Gcra => 0,
        Algorithm::SlidingWindow => 1,
    };
    let counted = u8::from(terms.lapse() == Lapse::Counted);
    let (amount, period, tick_us) = (terms.amount(), terms.period(), terms.tick_us());
    let (burst, capacity, version) = (terms.burst(), terms.capacity(), terms.version());
    format!("{kind} {amount} {period} {tick_us} {burst} {capacity} {counted} {version}")
}

/// What is more than a meter ever holds is as good as the most: the script's numbers end at 2^53.
fn update_line(update: &Update) -> String {
    let [used, refund, keep, want, life_us] =
        [update.used, update.refund, update.keep, update.want, update.life_us]
            .map(|units| units.min(DEBT_MAX));
    let (cell, refund_of_us) = (update.cell.min(NEVER_US), update.refund_of_us.min(NEVER_US));
    format!("{} {used} {refund} {refund_of_us} {keep} {want} {life_us} {cell}", terms_text(&update.terms))
}

fn ask_line(ask: &Ask) -> String {
    let mut line = ask.count.to_string();
    for Charge { meter, cost } in &ask.charges {
        // Writing to a string cannot fail.
        let _ = write!(line, " {meter} {}", cost.min(&DEBT_MAX));
    }
    line
}

/// What the script answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answered {
    Reply(Reply),
    Refused(CallError),
}

/// Reads the script's answer to `call`; `None` for one that makes no sense.
pub(super) fn read(call: &Call, text: &str) -> Option<Answered> {
    if let Some(sequence) = text.strip_prefix("outdated ") {
        return Some(Answered::Refused(CallError::Outdated { sequence: sequence.parse().ok()? }));
    }
    let mut numbers = text.split(' ').map(|number| number.parse::<u64>().ok());
    let mut next = || numbers.next().flatten();
    let now_us = next()?;
    let lost = next()? == 1;
    let told = call.updates.iter().map(|update| read_told(update, &mut next)).collect::<Option<_>>()?;
    let asks = call.asks.iter().map(|ask| read_decided(ask, &mut next)).collect::<Option<_>>()?;
    numbers.next().is_none().then_some(Answered::Reply(Reply { told, asks, now_us, lost }))
}

fn read_told(update: &Update, next: &mut impl FnMut() -> Option<u64>) -> Option<Told> {
    let (grant, life_us, room, wait_us, cell) = (next()?, next()?, next()?, next()?, next()?);
    let (holders, flags) = (u32::try_from(next()?).ok()?, next()?);
    let (dry, lapsed, recall) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
    // Nobody is given more than it has or wants, whatever became of what is stored.
    let sane = grant <= update.keep.max(update.want) && flags < 8;
    sane.then_some(Told { grant, life_us, room, wait_us, cell, holders, dry, lapsed, recall })
}

fn read_decided(ask: &Ask, next: &mut impl FnMut() -> Option<u64>) -> Option<Decided> {
    let (passed, denied_by, retry_us) = (u32::try_from(next()?).ok()?, u16::try_from(next()?).ok()?, next()?);
    let sane =
        passed <= ask.count && (denied_by == 0 || ask.charges.iter().any(|charge| charge.meter == denied_by));
    sane.then_some(Decided { passed, denied_by, retry_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Limit;
    use tidegate_core::origin::{NodeId, StoreId};

    fn call() -> Call {
        let limit = Limit::gcra(10, std::time::Duration::from_secs(1)).expect("in range");
        let terms = Terms::new(&limit, 0, Lapse::Counted, 7);
        let key = Box::from(*b"a key \0{b}");
        let update = Update {
            key,
            terms,
            used: 1,
            refund: 2,
            refund_of_us: 9,
            keep: 3,
            want: 4,
            life_us: 5,
            cell: u64::MAX,
        };
        let asks = vec![Ask { charges: vec![Charge { meter: 0, cost: u64::MAX }], count: 3 }];
        let (node, store) = (NodeId(255), StoreId::default());
        Call { node, sequence: 9, acknowledged: 8, store, updates: vec![update], asks }
    }

    #[test]
    fn a_call_is_in_one_slot_and_its_names_are_kept_as_they_are() {
        let script = Script::of(5, &call(), true);
        let keys: Vec<_> = script.keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
        let expected =
            ["tg:{5}:s", "tg:{5}:n:00000000000000ff", "tg:{5}:m:a key \0{b}", "tg:{5}:e:a key \0{b}"];
        assert_eq!(keys, expected);
        let expected = [
            "00000000000000ff 9 8 1 1 1",
            "0 10 1000000 1 10 10 1 7 1 2 9 3 4 5 4503599627370496",
            "3 0 1125899906842624",
        ];
        assert_eq!(script.arguments, expected);
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_not_used() {
        let good = "100 1 4 5 6 7 8 1 5 3 0 0";
        let Some(Answered::Reply(reply)) = read(&call(), good) else { panic!("{good}") };
        assert_eq!((reply.now_us, reply.lost, reply.asks[0].passed), (100, true, 3));
        let told = reply.told[0];
        assert_eq!((told.grant, told.cell, told.dry, told.lapsed, told.recall), (4, 8, true, false, true));
        let bad = [
            "",
            "100 1",
            "100 1 4 5 6 7 8 1 5 3 0",
            "100 1 4 5 6 7 8 1 5 3 0 0 0",
            "100 1 4 5 6 7 8 1 5 3 0 x",
            "100 1 4 5 6 7 8 1 5 3 0 -1",
            "100 1 5 5 6 7 8 1 5 3 0 0",
            "100 1 4 5 6 7 8 1 9 3 0 0",
            "100 1 4 5 6 7 8 1 5 4 0 0",
            "100 1 4 5 6 7 8 1 5 3 1 0",
            "outdated",
            "outdated x",
        ];
        for text in bad {
            assert_eq!(read(&call(), text), None, "{text:?}");
        }
        let outdated = Answered::Refused(CallError::Outdated { sequence: 12 });
        assert_eq!(read(&call(), "outdated 12"), Some(outdated));
    }
}
