//! Expiry at the origin: the meters that it drops, and the meters that it has to keep.

use tidegate_core::Algorithm;
use tidegate_core::origin::{OriginMeter, Partition};

use crate::node::name;

/// Interval at which an origin expires the meters of a partition, µs by its own clock, as in
/// `MemoryOrigin`.
pub(crate) const FORGETS_EVERY_US: u64 = 10_000_000;

/// Lead over its clock at which an origin with the mistake `ForgetsEarly` expires meters, µs. The
/// lead is below the retention of sessions, because an origin that lost a session notices the loss.
pub(crate) const TOO_EARLY_US: u64 = 1_800_000_000;

/// Expires the meters of a partition at `over_us`, as an origin does. Returns the expired ones
/// among the first `meters` meters, as they were.
pub(crate) fn forget(partition: &mut Partition, meters: usize, over_us: u64) -> Vec<(usize, OriginMeter)> {
    let known = |meter| Some((meter, partition.meter(&name(meter))?.clone()));
    let mut known: Vec<(usize, OriginMeter)> = (0..meters).filter_map(known).collect();
    partition.expire(over_us);
    known.retain(|(meter, _)| partition.meter(&name(*meter)).is_none());
    known
}

/// Whether a meter still counts at `origin_us`, independently of the code under test. It counts
/// while a grant may be spent, or while a charge or a possible spend has not drained. It also
/// counts while this region has not paid off its own charges, because peers should receive them.
pub(crate) fn still_counts(meter: &OriginMeter, origin_us: u64) -> bool {
    meter.holders().any(|(_, node_grant)| node_grant.until_us > origin_us)
        || match meter.terms().algorithm() {
            Algorithm::Gcra => has_not_drained(meter, origin_us),
            Algorithm::SlidingWindow => has_cells_left(meter, origin_us),
        }
}

/// Whether usage is left to drain. A grant counts as spent at its end, and drains from then on.
fn has_not_drained(meter: &OriginMeter, origin_us: u64) -> bool {
    let terms = meter.terms();
    let [level, at, ..] = meter.numbers();
    let ends = meter.holders().map(|(_, node_grant)| terms.tick(node_grant.until_us));
    let elapsed = terms.tick(origin_us).saturating_sub(ends.fold(at, u64::max));
    let held = meter.held() * terms.period();
    let rate = terms.amount().max(1);
    let Some([_, _, _, _, own, _, _, apart, _, _, flags, _]) = meter.region_state_numbers() else {
        return level + held > elapsed * rate;
    };
    // Usage charged to a regional share drains there, after the usage of all regions has drained. A
    // share without a rate drains at the rate of the limit.
    let part = terms.cross_region().map_or(0, |cross_region| cross_region.share_amount);
    let (of_all, of_part) = if flags & ON_PART == 0 { (level + held, apart) } else { (level, apart + held) };
    let left = elapsed.saturating_sub(of_all.div_ceil(rate));
    let part_rate = if part == 0 { rate } else { part };
    of_all > elapsed * rate || of_part > left * part_rate || own > elapsed * part.max(1)
}

/// A cell counts until the one after it is over.
fn has_cells_left(meter: &OriginMeter, origin_us: u64) -> bool {
    let terms = meter.terms();
    let present = terms.tick(origin_us) / terms.period();
    let [_, _, cell, current, previous, ..] = meter.numbers();
    let [mut now, mut before] = [current, previous];
    if let Some([_, _, _, _, _, own, own_before, _, apart, apart_before, ..]) = meter.region_state_numbers() {
        (now, before) = (now + own + apart, before + own_before + apart_before);
    }
    let counts = |of: u64, units: u64| units > 0 && of + 1 >= present;
    let ends = |until_us: u64| terms.tick(until_us) / terms.period();
    counts(cell, now)
        || counts(cell.saturating_sub(1), before)
        || meter.holders().any(|(_, node_grant)| counts(ends(node_grant.until_us), node_grant.amount))
}

/// Flag in the region state of a meter: the meter counts on its regional share.
pub(crate) const ON_PART: u64 = 2;

/// Flag in the region state of a meter: the meter publishes the usage that it charged to its share.
pub(crate) const IS_SETTLING: u64 = 4;

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use tidegate_core::Limit;
    use tidegate_core::origin::{
        Call, CallReply, Charge, CheckGroup, CrossRegionTerms, Lapse, MeterUpdate, NodeId, StoreId, Terms,
    };

    use super::*;

    pub(crate) const SECOND_US: u64 = 1_000_000;

    /// A moment at which windows of all lengths below begin.
    pub(crate) const START_US: u64 = 1_800_000_000 * SECOND_US;

    pub(crate) const STORE: StoreId = StoreId { lineage: 1, boot: 1, parent: 0, up_us: 0 };

    fn gcra(amount: u64, seconds: u64) -> Terms {
        let limit = Limit::gcra(amount, Duration::from_secs(seconds)).expect("in range");
        Terms::new(&limit, 0, Lapse::Counted, 1)
    }

    /// The same, of which this region has one part of so many.
    pub(crate) fn shared_gcra(amount: u64, seconds: u64, parts: u64) -> Terms {
        let terms = gcra(amount, seconds);
        let (share_amount, share_capacity) = (terms.amount() / parts, terms.capacity() / parts);
        terms.with_cross_region(CrossRegionTerms {
            publish_threshold: 1,
            share_amount,
            share_capacity,
            debt_max: 0,
        })
    }

    /// Sends a call for the first meter: `count` checks of cost 1, and a grant of `want` units.
    pub(crate) fn ask(
        partition: &mut Partition,
        now_us: u64,
        terms: Terms,
        (count, want): (u32, u64),
    ) -> CallReply {
        let update = MeterUpdate { want, life_us: SECOND_US, ..MeterUpdate::new(name(0), terms) };
        let checks = vec![CheckGroup { charges: vec![Charge { meter: 0, cost: 1 }], count }];
        let node = NodeId(now_us);
        let call = Call {
            node,
            sequence: 1,
            acknowledged: 0,
            known_us: 0,
            store: STORE,
            updates: vec![update],
            checks,
        };
        partition.apply(now_us, &call).expect("in order")
    }

    /// Returns when the first meter no longer counts, and the earliest time at which the partition
    /// expires it. Both are in seconds after `START_US`.
    fn counts_for_s(partition: &Partition) -> (u64, u64) {
        let meter = partition.meter(&name(0)).expect("known");
        let is_over = |second: &u64| !still_counts(meter, START_US + second * SECOND_US);
        let over_s = (0..100_000).find(is_over).expect("it ends");
        (over_s, (meter.expires_us() - START_US) / SECOND_US)
    }

    #[test]
    fn meter_counts_until_charges_and_grants_have_drained() {
        let mut partition = Partition::default();
        ask(&mut partition, START_US, gcra(10, 1_000), (5, 0));
        assert_eq!(counts_for_s(&partition).0, 500);
        let mut partition = Partition::default();
        let granted = ask(&mut partition, START_US, gcra(10, 1_000), (5, 4)).meters[0].grant;
        assert_eq!(granted, 1, "the grant is a part of the free units");
        let (over_s, forgotten_s) = counts_for_s(&partition);
        assert!((601..=603).contains(&over_s), "a grant of one second, and the drain of its units: {over_s}");
        assert!(forgotten_s > over_s);
    }

    #[test]
    fn a_window_counts_until_the_one_after_it_is_over() {
        let limit = Limit::sliding_window(10, Duration::from_secs(100)).expect("in range");
        let mut partition = Partition::default();
        ask(&mut partition, START_US, Terms::new(&limit, 0, Lapse::Counted, 1), (5, 0));
        let (over_s, forgotten_s) = counts_for_s(&partition);
        assert_eq!(over_s, 200);
        assert!(forgotten_s > over_s);
    }

    #[test]
    fn charges_to_a_share_count_until_they_drain_there() {
        let mut partition = Partition::default();
        ask(&mut partition, START_US, shared_gcra(40, 1_000, 4), (5, 0));
        let (over_s, forgotten_s) = counts_for_s(&partition);
        assert_eq!(over_s, 500, "the usage drains at the rate of the share");
        assert!(forgotten_s > over_s);
    }

    #[test]
    fn grants_of_a_share_count_until_they_could_have_drained() {
        let mut partition = Partition::default();
        let granted = ask(&mut partition, START_US, shared_gcra(400, 10_000, 4), (5, 90)).meters[0].grant;
        let (over_s, forgotten_s) = counts_for_s(&partition);
        assert!(
            granted > 0 && over_s >= 100 * (5 + granted),
            "{granted} and five drain at one per hundred seconds: {over_s}"
        );
        assert!(forgotten_s > over_s, "{forgotten_s}");
    }

    #[test]
    fn expired_meters_are_returned_with_their_state() {
        let mut partition = Partition::default();
        ask(&mut partition, START_US, gcra(10, 1_000), (5, 0));
        let over_us = partition.meter(&name(0)).expect("known").expires_us();
        assert!(forget(&mut partition, 1, over_us - 1).is_empty());
        let forgotten = forget(&mut partition, 1, over_us);
        assert_eq!(
            forgotten.iter().map(|(meter, was)| (*meter, was.charged())).collect::<Vec<_>>(),
            [(0, 5)]
        );
        assert!(partition.meter(&name(0)).is_none());
    }
}
