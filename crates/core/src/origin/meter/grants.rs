//! Grants of a meter: their extension, units kept for a large request, and the lapse of unreported
//! grants.

use super::super::call::{MeterReply, MeterUpdate, NodeId};
use super::super::terms::{Lapse, SHARES};
use super::{Moment, OriginMeter};
use crate::limit::Algorithm;
use crate::remote_clock::longest_us;

/// Maximum number of other nodes' expired grants that one call writes off. Higher: a meter with
/// many holders drops grants of dead nodes sooner; longer calls.
pub const LAPSES_PER_CALL_MAX: usize = 8;

/// Time after the end of a grant until it lapses, µs, besides a sixteenth of its life for clocks of
/// different rates. Higher: fewer grants lapse under slow calls; those of a dead node lapse later.
pub const LAPSE_MARGIN_US: u64 = 300_000;

/// The longest life of a grant, µs.
pub const LIFE_US_MAX: u64 = 10_000_000;

/// Longest life of a grant of a cross-region limit, µs. A node's usage is published when its grant
/// ends at the latest. The node may spend the grant regardless of usage that peers publish
/// meanwhile. Higher: fewer reports for keys far below their limits; regions count the usage of
/// peers later, and may owe each other the drain of twice this time more.
pub const CROSS_REGION_LIFE_US_MAX: u64 = 1_000_000;

/// The longest time until a grant lapses, µs.
pub(super) const GRANT_US_MAX: u64 = longest_us(LIFE_US_MAX) + LAPSE_MARGIN_US;

/// How long returned units are kept for a request that was too large, µs: long enough for the
/// holders' next reports.
pub const RECALL_US: u64 = 300_000;

/// Retry time of a request that was too large, µs.
const RECALL_RETRY_US: u64 = 200_000;

/// The grant of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeGrant {
    /// Units.
    pub amount: u64,
    /// When it is written off, by the origin's clock.
    pub until_us: u64,
    /// The cell it is of.
    pub cell: u64,
    /// Units that the node wants as its grant. A node that wants units has a record, even if it was
    /// granted none.
    pub want: u64,
}

/// Units kept for a request that was too large for the room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recall {
    pub(super) node: NodeId,
    pub(super) units: u64,
    pub(super) until_us: u64,
}

/// The shortest time between two reports of a meter, µs.
pub(crate) const REPORT_US_MIN: u64 = 5_000;

/// The longest time between two reports of a meter that the origin expects, µs. A node with other
/// settings reports less often.
const REPORT_US_MAX: u64 = 100_000;

/// A node reports a meter so many times while its burst drains, within the times above.
pub(crate) const REPORTS_PER_BURST: u64 = 8;

/// One call extends a grant by this fraction of the room, weighed by demand: a quarter. Higher:
/// more calls; more room is left for nodes with growing demand.
const ROOM_PARTS: u64 = 4;

/// A node is granted one unit at least where the room has this many units for each holder.
const ONE_PARTS: u64 = 8;

/// A node is also granted one unit at least where the burst has this many units for each holder:
/// one unit for each of them is then a small part of the burst.
const HOLDER_PARTS: u64 = 64;

/// How the room of a meter is divided between the nodes that want some of it: by demand, a quarter
/// at a time.
struct Division {
    /// The node's want among all, in [`SHARES`].
    share: u64,
    /// Units that drain between two reports.
    drained_per_report: u64,
    /// How many nodes hold or want some, this one included.
    holders: u64,
    /// From how many units on a node is granted one of them at least.
    one_from: u64,
}

impl Division {
    /// The division for a node that wants `want` units. Neither its want nor its grant is among
    /// those of the meter.
    fn new(meter: &OriginMeter, want: u64) -> Self {
        let holders = meter.grants.nodes() as u64 + 1;
        let spares_one = holders * HOLDER_PARTS <= meter.capacity();
        Self {
            share: if want == 0 { 0 } else { (want * SHARES).div_ceil(meter.grants.wants + want) },
            drained_per_report: meter.drained_per_report(),
            holders,
            one_from: if spares_one { 1 } else { ONE_PARTS * holders },
        }
    }

    /// Returns the largest extension of a grant by one call. `units` are free in the room. Of its
    /// grant, the node has spent `used` units since its last report and keeps `kept`.
    fn extra(&self, units: u64, used: u64, kept: u64) -> u64 {
        // A grant at most doubles: the first node must leave room for an unknown number of others.
        let doubled = 2 * (used.min(units) + kept).max(1) - kept;
        let of_room = (units * self.share / (ROOM_PARTS * SHARES)).min(doubled);
        let of_drain = units.min(self.drained_per_report) * self.share / SHARES;
        let one = u64::from(units >= self.one_from);
        of_room.max(of_drain).max(one)
    }

    /// Whether `left` units are fewer than the other nodes use until they report again.
    fn is_short(&self, left: u64) -> bool {
        left * SHARES < self.drained_per_report * (SHARES - self.share)
    }
}

impl OriginMeter {
    /// Units that drain between two reports of a node, at most all there are.
    fn drained_per_report(&self) -> u64 {
        let (tick_us, amount) = (self.terms.tick_us(), self.amount());
        if amount == 0 {
            return 0;
        }
        let [least, most] = [REPORT_US_MIN.div_ceil(tick_us), (REPORT_US_MAX / tick_us).max(1)];
        let ticks = (self.full() / REPORTS_PER_BURST / amount).clamp(least.min(most), most);
        (ticks * amount / self.terms.period()).min(self.capacity())
    }

    /// Extends the node's grant towards the wanted units, by its part of the room.
    pub(in crate::origin) fn grant(
        &mut self,
        moment: Moment,
        update: &MeterUpdate,
        lapsed: bool,
    ) -> MeterReply {
        let refused = std::mem::take(&mut self.refused);
        let held = self.grants.get(moment.node);
        // A record without units has no usage to report, so it is replaced.
        if let Some(node_grant) = held.filter(|held| held.amount > 0 && held.cell != self.grant_cell()) {
            return self.expired_reply(moment, node_grant);
        }
        let kept = self.release(moment.node).map_or(0, |node_grant| node_grant.amount);
        let room = self.room(moment.node).saturating_sub(self.terms.drops(kept));
        // A limit or regional share with a rate of 0 grants no units.
        let units = if self.amount() == 0 { 0 } else { room / self.terms.period() };
        let want = update.want.min(self.capacity());
        let division = Division::new(self, want);
        let extra = division.extra(units, update.used, kept).min(want.saturating_sub(kept));
        let life_us = self.life_us(update.life_us);
        let until_us = moment.now_us + longest_us(life_us) + LAPSE_MARGIN_US;
        let cell = self.grant_cell();
        self.hold(moment.node, NodeGrant { amount: kept + extra, until_us, cell, want });
        let wait_us = self.wait_us(moment.node, 1);
        debug_assert!(extra == 0 || self.taken(moment.node) <= self.full());
        MeterReply {
            grant: kept + extra,
            life_us,
            room: units - extra,
            remaining: self.remaining(),
            wait_us,
            cell,
            holders: u32::try_from(division.holders).unwrap_or(u32::MAX),
            exhausted: refused || wait_us > 0 || (kept + extra < want && division.is_short(units - extra)),
            lapsed,
            recall: self.recall.is_some_and(|wanted| wanted.node != moment.node),
            is_global: self.region_state.is_some() && !self.is_isolated(),
        }
    }

    /// Replies on a grant of a cell that has ended. The node may have spent kept units while the
    /// call was in flight, so they stay granted until its next report. Only then does it get a new
    /// grant.
    fn expired_reply(&self, moment: Moment, node_grant: NodeGrant) -> MeterReply {
        MeterReply {
            grant: node_grant.amount,
            life_us: 0,
            room: self.room(moment.node) / self.terms.period(),
            remaining: self.remaining(),
            wait_us: 0,
            cell: node_grant.cell,
            holders: u32::try_from(self.grants.nodes()).unwrap_or(u32::MAX),
            exhausted: false,
            lapsed: false,
            recall: false,
            is_global: self.region_state.is_some() && !self.is_isolated(),
        }
    }

    /// Returns the life of a grant, µs. It ends within its cell, even on a clock that is slow by a
    /// sixteenth: later usage would count in a cell that is over.
    fn life_us(&self, wanted_us: u64) -> u64 {
        let life_us = wanted_us.min(self.terms.life_us_max());
        match self.terms.algorithm() {
            Algorithm::Gcra => life_us,
            Algorithm::SlidingWindow => {
                let rest_us = (self.terms.period() - self.elapsed()) * self.terms.tick_us();
                life_us.min(rest_us * 16 / 17)
            }
        }
    }

    /// Recalls grants of other nodes for a large request, and keeps the returned units for it.
    /// Returns the time until its retry, µs, if a recall helps. Small requests wait for units that
    /// drain or return anyway: a recall for each of them would leave no node with a grant.
    pub(super) fn keep_for(&mut self, moment: Moment, units: u64) -> Option<u64> {
        let others = self.recall.is_some_and(|wanted| wanted.node != moment.node);
        let known = self.grants.nodes() - usize::from(self.grants.get(moment.node).is_some());
        // A holder of a grant has one unit at least.
        let holders = (known as u64).min(self.held());
        let is_large = units * (holders + 1) > self.capacity();
        let held = self.terms.drops(self.held());
        let helps = self.room(moment.node) + held >= self.terms.drops(units);
        if others || !is_large || !helps {
            return None;
        }
        self.recall = Some(Recall { node: moment.node, units, until_us: moment.now_us + RECALL_US });
        Some(RECALL_RETRY_US)
    }

    pub(super) fn lapse_others(&mut self, moment: Moment) {
        let over: Vec<NodeId> = self
            .grants
            .by_end()
            .take(LAPSES_PER_CALL_MAX)
            .take_while(|(until_us, _)| *until_us <= moment.now_us)
            .map(|(_, node)| node)
            .filter(|node| *node != moment.node)
            .collect();
        for node in over {
            if let Some(node_grant) = self.release(node) {
                self.write_off(node_grant);
            }
        }
    }

    /// Grants that end later than any could, since the clock was set back, end as late as they may.
    pub(super) fn shorten_others(&mut self, moment: Moment) {
        let latest_us = moment.now_us + GRANT_US_MAX;
        let ahead: Vec<NodeId> = self
            .grants
            .by_end()
            .rev()
            .take(LAPSES_PER_CALL_MAX)
            .take_while(|(until_us, _)| *until_us > latest_us)
            .map(|(_, node)| node)
            .filter(|node| *node != moment.node)
            .collect();
        for node in ahead {
            self.grants.end_at(node, latest_us);
        }
    }

    pub(super) fn settle_own(&mut self, moment: Moment, update: &MeterUpdate) -> bool {
        self.charge(update.owed, self.cell);
        let Some(node_grant) = self.release(moment.node) else {
            // It was written off, and counted if it had to be; unless the store forgot that there
            // ever was a grant.
            let forgotten = moment.loss_us > 0 && moment.now_us < moment.loss_at_us + 2 * LIFE_US_MAX;
            if self.terms.lapse() == Lapse::Forgiven || forgotten {
                self.charge(update.used, update.cell);
            }
            return update.used > 0 || update.keep > 0;
        };
        if node_grant.until_us <= moment.now_us {
            self.write_off(node_grant);
            if self.terms.lapse() == Lapse::Forgiven {
                self.charge(update.used, node_grant.cell);
            }
            return node_grant.amount > 0 || update.used > 0;
        }
        self.charge(update.used, self.cell_of(node_grant));
        let amount = update.keep.min(node_grant.amount.saturating_sub(update.used));
        // Not longer than any may last, also after a clock was set back.
        let until_us = node_grant.until_us.min(moment.now_us + GRANT_US_MAX);
        self.hold(moment.node, NodeGrant { amount, until_us, ..node_grant });
        false
    }

    fn write_off(&mut self, node_grant: NodeGrant) {
        if self.terms.lapse() == Lapse::Counted {
            self.charge(node_grant.amount, self.cell_of(node_grant));
        }
    }

    /// Returns the cell in which usage of a grant counts. If the cells have changed with the limit
    /// since, it is the last cell in which the grant may be spent, so no usage stays uncounted.
    fn cell_of(&self, node_grant: NodeGrant) -> u64 {
        if self.cells_ago(node_grant.cell) < 2 {
            return node_grant.cell;
        }
        self.cell.min(self.terms.tick(node_grant.until_us) / self.terms.period())
    }

    fn release(&mut self, node: NodeId) -> Option<NodeGrant> {
        self.grants.release(node, self.grant_cell())
    }

    fn hold(&mut self, node: NodeId, node_grant: NodeGrant) {
        self.grants.hold(node, node_grant, self.grant_cell());
    }

    /// Returns the cell of new grants; 0 under GCRA, which has no cells.
    fn grant_cell(&self) -> u64 {
        match self.terms.algorithm() {
            Algorithm::Gcra => 0,
            Algorithm::SlidingWindow => self.cell,
        }
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::{Call, Charge, CheckGroup, Partition, StoreId, Terms};
    use super::*;
    use crate::limit::Limit;
    use std::time::Duration;

    const SECOND: u64 = 1_000_000;

    /// A moment at which cells of all lengths below begin.
    const START: u64 = 1_000 * SECOND;

    /// A test node that sends the given updates.
    struct Caller {
        node: NodeId,
        sequence: u64,
    }

    impl Caller {
        fn new(node: u64) -> Self {
            Self { node: NodeId(node), sequence: 0 }
        }

        /// Sends an update with `count` waiting requests. Returns the reply and the number of
        /// requests that pass.
        fn say(
            &mut self,
            partition: &mut Partition,
            now_us: u64,
            terms: Terms,
            change: impl FnOnce(&mut MeterUpdate),
            count: u32,
        ) -> (MeterReply, u32) {
            self.sequence += 1;
            let mut update = MeterUpdate { life_us: SECOND, ..MeterUpdate::new(*b"key", terms) };
            change(&mut update);
            let ask = CheckGroup { charges: vec![Charge { meter: 0, cost: 1 }], count };
            let store = StoreId { lineage: 1, boot: 1, parent: 0, up_us: 0 };
            let (node, sequence, acknowledged) = (self.node, self.sequence, self.sequence - 1);
            let call = Call {
                node,
                sequence,
                acknowledged,
                known_us: 0,
                store,
                updates: vec![update],
                checks: vec![ask],
            };
            let reply = partition.apply(now_us, &call).expect("in order");
            (reply.meters[0], reply.checks[0].passed)
        }
    }

    /// Calls until the node holds `want` units: one call grants a part of the room.
    fn hold(caller: &mut Caller, partition: &mut Partition, terms: Terms, want: u64) -> MeterReply {
        let mut meter_reply = caller.say(partition, START, terms, |update| update.want = want, 0).0;
        for _ in 0..64 {
            let extend = |update: &mut MeterUpdate| (update.keep, update.want) = (meter_reply.grant, want);
            meter_reply = caller.say(partition, START, terms, extend, 0).0;
        }
        meter_reply
    }

    fn gcra(seconds: u64, lapse: Lapse, version: u32) -> Terms {
        let limit = Limit::gcra(10, Duration::from_secs(seconds)).expect("in range");
        Terms::new(&limit, 0, lapse, version)
    }

    fn window(seconds: u64, lapse: Lapse, version: u32) -> Terms {
        let limit = Limit::sliding_window(10, Duration::from_secs(seconds)).expect("in range");
        Terms::new(&limit, 0, lapse, version)
    }

    #[test]
    fn owed_units_count_in_the_current_cell_beside_any_grant() {
        for lapse in [Lapse::Counted, Lapse::Forgiven] {
            for terms in [gcra(100, lapse, 1), window(100, lapse, 1)] {
                for granted in [0, 5] {
                    let (mut partition, mut caller) = (Partition::default(), Caller::new(1));
                    let meter_reply = hold(&mut caller, &mut partition, terms, granted);
                    // The origin was unreachable for many cells. The node now reports all usage
                    // admitted meanwhile.
                    let later_us = START + 1_000 * SECOND;
                    let owes = |update: &mut MeterUpdate| (update.owed, update.cell) = (4, meter_reply.cell);
                    let (_, passed) = caller.say(&mut partition, later_us, terms, owes, 99);
                    // The unreported grant lapses. It counts only if lapses count and its cell is
                    // not over.
                    let lapsed = if lapse == Lapse::Counted && terms.algorithm() == Algorithm::Gcra {
                        granted
                    } else {
                        0
                    };
                    assert_eq!(u64::from(passed), 10 - 4 - lapsed, "{terms:?}, {granted} granted");
                }
            }
        }
    }

    /// The changes that make cells other ones: of the algorithm, both ways, and of the period, both
    /// ways.
    fn changes(lapse: Lapse) -> [(Terms, Terms); 4] {
        [
            (gcra(100, lapse, 1), window(100, lapse, 2)),
            (window(100, lapse, 1), gcra(100, lapse, 2)),
            (window(100, lapse, 1), window(10, lapse, 2)),
            (window(10, lapse, 1), window(100, lapse, 2)),
        ]
    }

    #[test]
    fn grant_usage_counts_after_the_limit_changes_its_cells() {
        for lapse in [Lapse::Counted, Lapse::Forgiven] {
            for (before, after) in changes(lapse) {
                let mut partition = Partition::default();
                let (mut holder, mut other) = (Caller::new(1), Caller::new(2));
                let meter_reply = hold(&mut holder, &mut partition, before, 6);
                assert_eq!(other.say(&mut partition, START, after, |_| {}, 99).1, 4, "the rest is held");
                let reports = |update: &mut MeterUpdate| (update.used, update.cell) = (6, meter_reply.cell);
                holder.say(&mut partition, START + 1, after, reports, 0);
                assert_eq!(
                    other.say(&mut partition, START + 2, after, |_| {}, 99).1,
                    0,
                    "{before:?} {after:?}"
                );
            }
        }
    }

    #[test]
    fn a_grant_that_lapses_counts_although_the_limit_counts_by_other_cells_now() {
        for (before, after) in changes(Lapse::Counted) {
            let mut partition = Partition::default();
            let (mut holder, mut other) = (Caller::new(1), Caller::new(2));
            hold(&mut holder, &mut partition, before, 6);
            other.say(&mut partition, START, after, |_| {}, 0);
            let lapsed_us = START + 2 * SECOND;
            assert_eq!(other.say(&mut partition, lapsed_us, after, |_| {}, 99).1, 4, "{before:?} {after:?}");
        }
    }
}
