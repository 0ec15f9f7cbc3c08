//! The wire format of a call to the script, and of its reply.
//!
//! Every key contains its partition in braces, the only part by which a cluster places it: a call
//! is in one slot. The name of a meter is the rest of its key, with any bytes, so no two meters
//! share a key.

use tidegate_core::origin::{
    Call, CallError, CallReply, Charge, CheckGroup, CheckReply, Component, ComponentTotals, LEVEL_MAX,
    MergeReply, MergeRequest, MeterReply, MeterUpdate, NEVER_US, NodeId, RoundReply, RoundRequest, Terms,
    UPDATES_PER_CALL_MAX,
};

use crate::{LeaseReply, LeaseRequest};

/// Prefix of all keys.
const PREFIX: &str = "tg2:";

/// The bytes of a number.
const NUMBER_BYTES: usize = 8;

/// Numbers of a call, of each of its meters, and of each of its check groups beside the charges.
const CALL_NUMBERS: usize = 6;
const UPDATE_NUMBERS: usize = 16;
const CHECK_NUMBERS: usize = 2;

/// The keys of a partition for replication: connectivity, dirty meters, and meters with usage
/// charged while isolated.
const REPLICATION_KEYS: [char; 3] = ['w', 'k', 'p'];

/// The input of a script, ready to send.
pub(super) struct ScriptInput {
    pub(super) keys: Vec<Vec<u8>>,
    pub(super) arguments: Vec<Vec<u8>>,
    /// Whether the input includes the data of cross-region limits.
    pub(super) is_wide: bool,
}

impl ScriptInput {
    pub(super) fn of(partition: u16, call: &Call, clustered: bool, is_wide: bool) -> Self {
        let node = node_name(call.node);
        let mut keys = Vec::with_capacity(4 + 2 * call.updates.len());
        keys.push(partition_key(partition, 's'));
        keys.push(format!("{PREFIX}{{{partition}}}:n:{node}").into_bytes());
        keys.extend(meter_keys(partition, call.updates.iter().map(|update| &*update.key)));
        if is_wide {
            keys.extend(REPLICATION_KEYS.map(|kind| partition_key(partition, kind)));
        }
        let arguments = vec![node.into_bytes(), numbers_of(call, clustered, is_wide)];
        Self { keys, arguments, is_wide }
    }

    pub(super) fn of_round(partition: u16, round: &RoundRequest) -> Self {
        let keys = REPLICATION_KEYS.map(|kind| partition_key(partition, kind)).to_vec();
        let most = usize::from(round.most).clamp(1, UPDATES_PER_CALL_MAX) as u64;
        let [trim, after] = [round.trim, round.after].map(|stamp| stamp.min(NEVER_US));
        let mut numbers = Vec::new();
        let [connected_for_us, clock_us] =
            [round.connected_for_us, round.clock_us].map(|us| us.min(NEVER_US));
        push(&mut numbers, [connected_for_us, round.settled.into(), clock_us, trim, after, most]);
        Self { keys, arguments: vec![numbers], is_wide: true }
    }

    /// Meters to be read, by their names.
    pub(super) fn of_meters(partition: u16, names: &[Vec<u8>]) -> Self {
        let mut keys = vec![partition_key(partition, 'w')];
        keys.extend(names.iter().map(|name| meter_key(partition, 'm', name)));
        Self { keys, arguments: Vec::new(), is_wide: true }
    }

    /// Returns the input for meters with usage charged while isolated, by their names.
    pub(super) fn of_join(partition: u16, names: &[Vec<u8>], clustered: bool) -> Self {
        let mut keys = REPLICATION_KEYS.map(|kind| partition_key(partition, kind)).to_vec();
        keys.push(partition_key(partition, 's'));
        keys.extend(meter_keys(partition, names.iter().map(|name| &**name)));
        Self { keys, arguments: vec![u8::from(clustered).to_string().into_bytes()], is_wide: true }
    }

    pub(super) fn of_merge(partition: u16, merge: &MergeRequest) -> Self {
        let components: Vec<&Component> =
            merge.components.iter().filter(|component| component.terms.cross_region().is_some()).collect();
        let mut keys = ['w', 'k'].map(|kind| partition_key(partition, kind)).to_vec();
        keys.extend(meter_keys(partition, components.iter().map(|component| &*component.key)));
        let mut numbers = Vec::new();
        for component in components {
            push_terms(&mut numbers, &component.terms, true);
            let [first, second, third] = component.totals.numbers();
            push(&mut numbers, [component.incarnation, first, second, third].map(|sum| sum.min(NEVER_US)));
        }
        let arguments = vec![format!("{:016x}", merge.from.0).into_bytes(), numbers];
        Self { keys, arguments, is_wide: true }
    }

    /// The lease is of the region: it lies with the first partition, and anywhere would do.
    pub(super) fn of_lease(request: LeaseRequest) -> Self {
        let LeaseRequest { holder, for_us, lag_us } = request;
        let milliseconds = for_us.min(NEVER_US).div_ceil(1_000);
        let arguments =
            [format!("{holder:016x}"), milliseconds.to_string(), lag_us.min(NEVER_US).to_string()];
        let arguments = arguments.map(String::into_bytes).into();
        Self { keys: vec![partition_key(0, 'c')], arguments, is_wide: true }
    }

    /// Returns the input of a probe: a key that no other script uses.
    pub(super) fn of_probe(partition: u16) -> Self {
        Self { keys: vec![partition_key(partition, 'q')], arguments: Vec::new(), is_wide: true }
    }
}

/// Parses the reply to a lease request: whether the node holds the lease, and the lag.
pub(super) fn read_lease(text: &str) -> Option<LeaseReply> {
    let (held, lag_us) = text.split_once(' ')?;
    Some(LeaseReply { is_held: held == "1", lag_us: lag_us.parse().ok()? })
}

/// Whether the call contains a cross-region limit.
pub(super) fn is_cross_region(call: &Call) -> bool {
    call.updates.iter().any(|update| update.terms.cross_region().is_some())
}

pub(super) fn partition_key(partition: u16, kind: char) -> Vec<u8> {
    format!("{PREFIX}{{{partition}}}:{kind}").into_bytes()
}

fn meter_keys<'a>(partition: u16, names: impl Iterator<Item = &'a [u8]>) -> impl Iterator<Item = Vec<u8>> {
    names.flat_map(move |name| ['m', 'e'].map(|kind| meter_key(partition, kind, name)))
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

fn numbers_of(call: &Call, clustered: bool, is_wide: bool) -> Vec<u8> {
    let charges: usize = call.checks.iter().map(|ask| ask.charges.len()).sum();
    let numbers =
        CALL_NUMBERS + UPDATE_NUMBERS * call.updates.len() + CHECK_NUMBERS * call.checks.len() + 2 * charges;
    let mut bytes = Vec::with_capacity(NUMBER_BYTES * numbers);
    let (updates, checks) = (call.updates.len() as u64, call.checks.len() as u64);
    let known_us = call.known_us.min(NEVER_US);
    push(&mut bytes, [call.sequence, call.acknowledged, u64::from(clustered), known_us, updates, checks]);
    for update in &call.updates {
        push_terms(&mut bytes, &update.terms, is_wide);
        push(&mut bytes, update_numbers(update));
    }
    for ask in &call.checks {
        push(&mut bytes, [u64::from(ask.count), ask.charges.len() as u64]);
        for Charge { meter, cost } in &ask.charges {
            push(&mut bytes, [u64::from(*meter), (*cost).min(LEVEL_MAX)]);
        }
    }
    bytes
}

/// Appends numbers as doubles, as the script uses them. No number here exceeds 2^53.
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

/// The numbers of a limit of one region are the first eight of those of any.
fn push_terms(bytes: &mut Vec<u8>, terms: &Terms, is_wide: bool) {
    let [kind, amount, period, tick_us, burst, capacity, counted, version, ..] = terms.numbers();
    push(bytes, [kind, amount, period, tick_us, burst, capacity, counted, version]);
    if is_wide {
        let [.., publish_threshold, share_amount, share_capacity, debt_max] = terms.numbers();
        push(bytes, [publish_threshold, share_amount, share_capacity, debt_max, terms.share()]);
    }
}

/// Terms as the script keeps them.
#[cfg(test)]
pub(super) fn terms_bytes(terms: &Terms) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_terms(&mut bytes, terms, terms.cross_region().is_some());
    bytes
}

/// Returns the numbers of an update, clamped to the most that a meter can hold: the script's
/// numbers end at 2^53.
fn update_numbers(update: &MeterUpdate) -> [u64; 8] {
    let [used, owed, refund, keep, want, life_us] =
        [update.used, update.owed, update.refund, update.keep, update.want, update.life_us]
            .map(|units| units.min(LEVEL_MAX));
    let (cell, refund_of_us) = (update.cell.min(NEVER_US), update.refund_of_us.min(NEVER_US));
    [used, owed, refund, refund_of_us, keep, want, life_us, cell]
}

/// The reply of the script.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ScriptReply {
    Reply(CallReply),
    Refused(CallError),
    /// The call is about limits of several regions, which others know it by: that is for the script
    /// that knows them.
    NeedsCrossRegion,
}

/// Parses the script's reply to `call`; `None` if it is invalid.
pub(super) fn read(call: &Call, answer: &[u8]) -> Option<ScriptReply> {
    let mut numbers = Numbers::of(answer)?;
    let first = numbers.next()?;
    if first == OUTDATED {
        let sequence = numbers.whole()?;
        return numbers.is_over().then_some(ScriptReply::Refused(CallError::Outdated { sequence }));
    }
    if first == NEEDS_CROSS_REGION {
        return (numbers.whole()? == 0 && numbers.is_over()).then_some(ScriptReply::NeedsCrossRegion);
    }
    let now_us = whole(first)?;
    let lost = numbers.whole()? == 1;
    let meter_reply =
        call.updates.iter().map(|update| read_meter_reply(update, &mut numbers)).collect::<Option<_>>()?;
    let checks = call.checks.iter().map(|ask| read_check_reply(ask, &mut numbers)).collect::<Option<_>>()?;
    numbers.is_over().then_some(ScriptReply::Reply(CallReply { meters: meter_reply, checks, now_us, lost }))
}

/// First number of the reply if a later call of the session was applied.
const OUTDATED: f64 = -1.0;

/// First number of the single-region script's reply if the call needs the cross-region script.
const NEEDS_CROSS_REGION: f64 = -2.0;

/// The reply to a round without its components, the names of their meters, and the names of meters
/// with isolated usage.
pub(super) struct RoundScriptReply<'a> {
    pub(super) gathered: RoundReply,
    pub(super) names: &'a [Vec<u8>],
    pub(super) isolated_meters: &'a [Vec<u8>],
}

pub(super) fn read_round(answer: &[Vec<u8>]) -> Option<RoundScriptReply<'_>> {
    let (head, names) = answer.split_first()?;
    let mut numbers = Numbers::of(head)?;
    let (now_us, upto) = (numbers.whole()?, numbers.whole()?);
    let (more, joined) = (numbers.whole()? == 1, numbers.whole()? == 1);
    let isolated_meters = usize::try_from(numbers.whole()?).ok()?;
    let (names, isolated_meters) = names.split_at_checked(names.len().checked_sub(isolated_meters)?)?;
    let gathered = RoundReply { components: Vec::new(), upto, more, includes_isolated: joined, now_us };
    numbers.is_over().then_some(RoundScriptReply { gathered, names, isolated_meters })
}

/// Parses components, without those of meters that no longer exist.
pub(super) fn read_components(names: &[Vec<u8>], found: &[Vec<u8>]) -> Option<Vec<Component>> {
    if names.len() != found.len() {
        return None;
    }
    let of_several = names.iter().zip(found).filter(|(_, answer)| !answer.is_empty());
    of_several.map(|(name, answer)| read_component(name, answer)).collect()
}

fn read_component(name: &[u8], answer: &[u8]) -> Option<Component> {
    let mut numbers = Numbers::of(answer)?;
    let mut terms = [0; 12];
    for number in &mut terms {
        *number = numbers.whole()?;
    }
    let terms = Terms::of_numbers(terms)?;
    // The share follows from the rest.
    numbers.whole()?;
    let incarnation = numbers.whole()?;
    let totals = [numbers.whole()?, numbers.whole()?, numbers.whole()?];
    let totals = ComponentTotals::of_numbers(terms.algorithm(), totals);
    numbers.is_over().then(|| Component { key: name.into(), terms, incarnation, totals })
}

/// Parses the reply to a merge. Components of single-region limits were not sent, and count as
/// stale.
pub(super) fn read_merged(merge: &MergeRequest, answer: &[u8]) -> Option<MergeReply> {
    let mut numbers = Numbers::of(answer)?;
    let (now_us, charged, stale) = (numbers.whole()?, numbers.whole()?, numbers.whole()?);
    let unsent = merge.components.iter().filter(|component| component.terms.cross_region().is_none()).count();
    let stale = u32::try_from(stale).ok()?.checked_add(u32::try_from(unsent).ok()?)?;
    numbers.is_over().then_some(MergeReply { charged, stale, now_us })
}

/// Numbers as the script writes them.
pub(super) struct Numbers<'a>(std::slice::Iter<'a, [u8; NUMBER_BYTES]>);

impl<'a> Numbers<'a> {
    /// Returns `None` if the bytes end within a number.
    pub(super) fn of(bytes: &'a [u8]) -> Option<Self> {
        let (numbers, rest) = bytes.as_chunks();
        rest.is_empty().then_some(Self(numbers.iter()))
    }

    fn next(&mut self) -> Option<f64> {
        self.0.next().map(|bytes| f64::from_le_bytes(*bytes))
    }

    /// Returns the next number if it is an integer.
    pub(super) fn whole(&mut self) -> Option<u64> {
        self.next().and_then(whole)
    }

    fn is_over(&self) -> bool {
        self.0.len() == 0
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked: an integer in range")]
fn whole(number: f64) -> Option<u64> {
    /// Every integer up to this one is exact as a double.
    const MOST: f64 = 9_007_199_254_740_992.0;
    ((0.0..=MOST).contains(&number) && number.fract() == 0.0).then_some(number as u64)
}

fn read_meter_reply(update: &MeterUpdate, numbers: &mut Numbers<'_>) -> Option<MeterReply> {
    let mut next = || numbers.whole();
    let (grant, life_us, room, remaining) = (next()?, next()?, next()?, next()?);
    let (wait_us, cell) = (next()?, next()?);
    let (holders, flags) = (u32::try_from(next()?).ok()?, next()?);
    let (exhausted, lapsed, recall) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
    let is_global = flags & 8 != 0;
    // No reply grants more than the node keeps or wants, even if the stored state is corrupt.
    let sane = grant <= update.keep.max(update.want) && flags < 16;
    sane.then_some(MeterReply {
        grant,
        life_us,
        room,
        remaining,
        wait_us,
        cell,
        holders,
        exhausted,
        lapsed,
        recall,
        is_global,
    })
}

fn read_check_reply(ask: &CheckGroup, numbers: &mut Numbers<'_>) -> Option<CheckReply> {
    let mut next = || numbers.whole();
    let (passed, denied_by, retry_us) = (u32::try_from(next()?).ok()?, u16::try_from(next()?).ok()?, next()?);
    let sane =
        passed <= ask.count && (denied_by == 0 || ask.charges.iter().any(|charge| charge.meter == denied_by));
    sane.then_some(CheckReply { passed, denied_by, retry_us })
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_core::Limit;
    use tidegate_core::origin::{Lapse, StoreId};

    fn call() -> Call {
        let limit = Limit::gcra(10, std::time::Duration::from_secs(1)).expect("in range");
        let terms = Terms::new(&limit, 0, Lapse::Counted, 7);
        let key = Box::from(*b"a key \0{b}");
        let update = MeterUpdate {
            key,
            terms,
            used: 1,
            owed: 6,
            refund: 2,
            refund_of_us: 9,
            keep: 3,
            want: 4,
            life_us: 5,
            cell: u64::MAX,
        };
        let checks = vec![CheckGroup { charges: vec![Charge { meter: 0, cost: u64::MAX }], count: 3 }];
        let (node, store) = (NodeId(255), StoreId::default());
        Call { node, sequence: 9, acknowledged: 8, known_us: 0, store, updates: vec![update], checks }
    }

    fn doubles(bytes: &[u8]) -> Vec<f64> {
        bytes.as_chunks().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect()
    }

    fn bytes(numbers: &[f64]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn call_keys_share_one_slot_and_keep_their_names() {
        let words = ScriptInput::of(5, &call(), true, false);
        let keys: Vec<_> = words.keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect();
        let expected =
            ["tg2:{5}:s", "tg2:{5}:n:00000000000000ff", "tg2:{5}:m:a key \0{b}", "tg2:{5}:e:a key \0{b}"];
        assert_eq!(keys, expected);
        let [node, numbers] = <[Vec<u8>; 2]>::try_from(words.arguments).expect("two");
        assert_eq!(node, b"00000000000000ff");
        let head = [9.0, 8.0, 1.0, 0.0, 1.0, 1.0];
        let terms = [0.0, 10.0, 1e6, 1.0, 10.0, 0.0, 1.0, 7.0];
        let update = [1.0, 6.0, 2.0, 9.0, 3.0, 4.0, 5.0, 4_503_599_627_370_496.0];
        let ask = [3.0, 1.0, 0.0, 1_125_899_906_842_624.0];
        assert_eq!(doubles(&numbers), [&head[..], &terms, &update, &ask].concat());
    }

    #[test]
    fn an_answer_that_makes_no_sense_is_not_used() {
        let good = [100.0, 1.0, 4.0, 5.0, 6.0, 9.0, 7.0, 8.0, 1.0, 5.0, 3.0, 0.0, 0.0];
        let Some(ScriptReply::Reply(reply)) = read(&call(), &bytes(&good)) else { panic!("{good:?}") };
        assert_eq!((reply.now_us, reply.lost, reply.checks[0].passed), (100, true, 3));
        let meter_reply = reply.meters[0];
        assert_eq!(
            (meter_reply.grant, meter_reply.room, meter_reply.remaining, meter_reply.cell),
            (4, 6, 9, 8)
        );
        assert_eq!((meter_reply.exhausted, meter_reply.lapsed, meter_reply.recall), (true, false, true));
        let with = |place: usize, number: f64| {
            let mut numbers = good;
            numbers[place] = number;
            bytes(&numbers)
        };
        let bad = [
            Vec::new(),
            bytes(&good[..2]),
            bytes(&good[..12]),
            bytes(&[&good[..], &[0.0]].concat()),
            bytes(&good)[1..].to_vec(),
            b"outdated".to_vec(),
            with(0, -3.0),
            with(12, -1.0),
            with(12, 0.5),
            with(12, f64::NAN),
            with(12, f64::INFINITY),
            with(2, 5.0),
            with(9, 17.0),
            with(10, 4.0),
            with(11, 1.0),
            bytes(&[-1.0]),
            bytes(&[-1.0, -1.0]),
            bytes(&[-1.0, 12.0, 0.0]),
        ];
        for answer in bad {
            assert_eq!(read(&call(), &answer), None, "{answer:?}");
        }
        let outdated = ScriptReply::Refused(CallError::Outdated { sequence: 12 });
        assert_eq!(read(&call(), &bytes(&[-1.0, 12.0])), Some(outdated));
    }
}
