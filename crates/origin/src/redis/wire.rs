//! A call as the script reads it, and its reply.
//!
//! Every key of a partition has the partition in braces, which is all that a cluster places it by: a call is in one slot.
//! A meter's own name is the rest of its key, whatever bytes it has, so no two meters share one.

use tidegate_core::Algorithm;
use tidegate_core::origin::{
    Ask, Call, CallError, Charge, DEBT_MAX, Decided, Lapse, NEVER_US, NodeId, Reply, Terms, Told, Update,
};

/// What the keys begin with.
const PREFIX: &str = "tg:";

/// The bytes of a number.
const NUMBER_BYTES: usize = 8;

/// Numbers of a call, of each of its meters, and of each of its asks beside their charges.
const CALL_NUMBERS: usize = 5;
const UPDATE_NUMBERS: usize = 15;
const ASK_NUMBERS: usize = 2;

/// A call, ready to be sent.
pub(super) struct Words {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) arguments: [Vec<u8>; 2],
}

impl Words {
    pub(super) fn of(partition: u16, call: &Call, clustered: bool) -> Self {
        let node = node_name(call.node);
        let mut keys = Vec::with_capacity(2 + 2 * call.updates.len());
        keys.push(format!("{PREFIX}{{{partition}}}:s").into_bytes());
        keys.push(format!("{PREFIX}{{{partition}}}:n:{node}").into_bytes());
        for update in &call.updates {
            keys.push(meter_key(partition, 'm', &update.key));
            keys.push(meter_key(partition, 'e', &update.key));
        }
        Self { keys, arguments: [node.into_bytes(), numbers_of(call, clustered)] }
    }
}

/// A node as the script calls it.
pub(super) fn node_name(node: NodeId) -> String {
    format!("{:016x}", node.0)
}

pub(super) fn meter_key(partition: u16, kind: char, name: &[u8]) -> Vec<u8> {
    let mut key = format!("{PREFIX}{{{partition}}}:{kind}:").into_bytes();
    key.extend_from_slice(name);
    key
}

fn numbers_of(call: &Call, clustered: bool) -> Vec<u8> {
    let charges: usize = call.asks.iter().map(|ask| ask.charges.len()).sum();
    let numbers =
        CALL_NUMBERS + UPDATE_NUMBERS * call.updates.len() + ASK_NUMBERS * call.asks.len() + 2 * charges;
    let mut bytes = Vec::with_capacity(NUMBER_BYTES * numbers);
    let (updates, asks) = (call.updates.len() as u64, call.asks.len() as u64);
    push(&mut bytes, [call.sequence, call.acknowledged, u64::from(clustered), updates, asks]);
    for update in &call.updates {
        push(&mut bytes, terms_numbers(&update.terms));
        push(&mut bytes, said(update));
    }
    for ask in &call.asks {
        push(&mut bytes, [u64::from(ask.count), ask.charges.len() as u64]);
        for Charge { meter, cost } in &ask.charges {
            push(&mut bytes, [u64::from(*meter), (*cost).min(DEBT_MAX)]);
        }
    }
    bytes
}

/// The script counts in doubles. Nothing that is written here is above 2^53.
#[expect(clippy::cast_precision_loss, reason = "whole numbers up to 2^53 are exact")]
fn push<const N: usize>(bytes: &mut Vec<u8>, numbers: [u64; N]) {
    for number in numbers {
        bytes.extend_from_slice(&(number as f64).to_le_bytes());
    }
}

/// Numbers as the script keeps them.
#[cfg(test)]
pub(super) fn numbers_bytes<const N: usize>(numbers: [u64; N]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push(&mut bytes, numbers);
    bytes
}

pub(super) fn terms_numbers(terms: &Terms) -> [u64; 8] {
    let kind = match terms.algorithm() {
        Algorithm::Gcra => 0,
        Algorithm::SlidingWindow => 1,
    };
    let counted = u64::from(terms.lapse() == Lapse::Counted);
    let (amount, period, tick_us) = (terms.amount(), terms.period(), terms.tick_us());
    let (burst, capacity, version) = (terms.burst(), terms.capacity(), terms.version());
    [kind, amount, period, tick_us, burst, capacity, counted, version]
}

/// What is more than a meter ever holds is as good as the most: the script's numbers end at 2^53.
fn said(update: &Update) -> [u64; 7] {
    let [used, refund, keep, want, life_us] =
        [update.used, update.refund, update.keep, update.want, update.life_us]
            .map(|units| units.min(DEBT_MAX));
    let (cell, refund_of_us) = (update.cell.min(NEVER_US), update.refund_of_us.min(NEVER_US));
    [used, refund, refund_of_us, keep, want, life_us, cell]
}

/// What the script answered.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answered {
    Reply(Reply),
    Refused(CallError),
}

/// Reads the script's answer to `call`; `None` for one that makes no sense.
pub(super) fn read(call: &Call, answer: &[u8]) -> Option<Answered> {
    let mut numbers = Numbers::of(answer)?;
    let first = numbers.next()?;
    if first == OUTDATED {
        let sequence = numbers.whole()?;
        return numbers.is_over().then_some(Answered::Refused(CallError::Outdated { sequence }));
    }
    let now_us = whole(first)?;
    let lost = numbers.whole()? == 1;
    let told = call.updates.iter().map(|update| read_told(update, &mut numbers)).collect::<Option<_>>()?;
    let asks = call.asks.iter().map(|ask| read_decided(ask, &mut numbers)).collect::<Option<_>>()?;
    numbers.is_over().then_some(Answered::Reply(Reply { told, asks, now_us, lost }))
}

/// What the script says first when a later call of the lane was applied.
const OUTDATED: f64 = -1.0;

/// Numbers as the script writes them.
pub(super) struct Numbers<'a>(std::slice::Iter<'a, [u8; NUMBER_BYTES]>);

impl<'a> Numbers<'a> {
    /// Nothing, where there is part of a number.
    pub(super) fn of(bytes: &'a [u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks();
        rest.is_empty().then_some(Self(numbers.iter()))
    }

    fn next(&mut self) -> Option<f64> {
        self.0.next().map(|bytes| f64::from_le_bytes(*bytes))
    }

    /// The next, if it is a whole number.
    pub(super) fn whole(&mut self) -> Option<u64> {
        self.next().and_then(whole)
    }

    fn is_over(&self) -> bool {
        self.0.len() == 0
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "whole and in range: looked at before"
)]
fn whole(number: f64) -> Option<u64> {
    /// Up to here every whole number is a double.
    const MOST: f64 = 9_007_199_254_740_992.0;
    ((0.0..=MOST).contains(&number) && number.fract() == 0.0).then_some(number as u64)
}

fn read_told(update: &Update, numbers: &mut Numbers<'_>) -> Option<Told> {
    let mut next = || numbers.whole();
    let (grant, life_us, room, wait_us, cell) = (next()?, next()?, next()?, next()?, next()?);
    let (holders, flags) = (u32::try_from(next()?).ok()?, next()?);
    let (dry, lapsed, recall) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
    // Nobody is given more than it has or wants, whatever became of what is stored.
    let sane = grant <= update.keep.max(update.want) && flags < 8;
    sane.then_some(Told { grant, life_us, room, wait_us, cell, holders, dry, lapsed, recall })
}

fn read_decided(ask: &Ask, numbers: &mut Numbers<'_>) -> Option<Decided> {
    let mut next = || numbers.whole();
    let (passed, denied_by, retry_us) = (u32::try_from(next()?).ok()?, u16::try_from(next()?).ok()?, next()?);
    let sane =
        passed <= ask.count && (denied_by == 0 || ask.charges.iter().any(|charge| charge.meter == denied_by));
    sane.then_some(Decided { passed, denied_by, retry_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Limit;
    use tidegate_core::origin::StoreId;

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

    fn doubles(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
    }

    fn bytes(numbers: &[f64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn a_call_is_in_one_slot_and_its_names_are_kept_as_they_are() {
        let words = Words::of(5, &call(), true);
        let keys: Vec<_> = words.keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
        let expected =
            ["tg:{5}:s", "tg:{5}:n:00000000000000ff", "tg:{5}:m:a key \0{b}", "tg:{5}:e:a key \0{b}"];
        assert_eq!(keys, expected);
        let [node, numbers] = words.arguments;
        assert_eq!(node, b"00000000000000ff");
        let said = [9.0, 8.0, 1.0, 1.0, 1.0];
        let terms = [0.0, 10.0, 1e6, 1.0, 10.0, 10.0, 1.0, 7.0];
        let update = [1.0, 2.0, 9.0, 3.0, 4.0, 5.0, 4_503_599_627_370_496.0];
        let ask = [3.0, 1.0, 0.0, 1_125_899_906_842_624.0];
        assert_eq!(doubles(&numbers), [&said[..], &terms, &update, &ask].concat());
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_not_used() {
        let good = [100.0, 1.0, 4.0, 5.0, 6.0, 7.0, 8.0, 1.0, 5.0, 3.0, 0.0, 0.0];
        let Some(Answered::Reply(reply)) = read(&call(), &bytes(&good)) else { panic!("{good:?}") };
        assert_eq!((reply.now_us, reply.lost, reply.asks[0].passed), (100, true, 3));
        let told = reply.told[0];
        assert_eq!((told.grant, told.cell, told.dry, told.lapsed, told.recall), (4, 8, true, false, true));
        let with = |place: usize, number: f64| {
            let mut numbers = good;
            numbers[place] = number;
            bytes(&numbers)
        };
        let bad = [
            Vec::new(),
            bytes(&good[..2]),
            bytes(&good[..11]),
            bytes(&[&good[..], &[0.0]].concat()),
            bytes(&good)[1..].to_vec(),
            b"outdated".to_vec(),
            with(0, -2.0),
            with(11, -1.0),
            with(11, 0.5),
            with(11, f64::NAN),
            with(11, f64::INFINITY),
            with(2, 5.0),
            with(8, 9.0),
            with(9, 4.0),
            with(10, 1.0),
            bytes(&[-1.0]),
            bytes(&[-1.0, -1.0]),
            bytes(&[-1.0, 12.0, 0.0]),
        ];
        for answer in bad {
            assert_eq!(read(&call(), &answer), None, "{answer:?}");
        }
        let outdated = Answered::Refused(CallError::Outdated { sequence: 12 });
        assert_eq!(read(&call(), &bytes(&[-1.0, 12.0])), Some(outdated));
    }
}
