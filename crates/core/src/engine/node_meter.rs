//! The state that a node tracks for one meter, besides its slot in the table.

use std::cell::Cell;

use super::demand::Demand;
use super::{Context, MeterRef};
use crate::limit::Algorithm;
use crate::origin::{
    CallReply, LAPSE_MARGIN_US, Lapse, MeterReply, MeterUpdate, REPORT_US_MIN, REPORTS_PER_BURST, Terms,
};
use crate::remote_clock::shortest_us;
use crate::table::Check;
use crate::{GrantUpdate, UsageReport};

/// A meter is forgotten this many lives after it was last spoken of.
const LIVES_REMEMBERED: u64 = 2;

/// Of a grant, how much may be spent before it is reported early: one fifth.
const REPORT_SHARE: u64 = 5;

/// With plenty of room, the least usage for an early report, in units. Higher: fewer reports of
/// keys with occasional requests; the origin sees less room, by that much for each node.
const REPORT_LEAST: u64 = 16;

/// The same as a part of all there ever is: one in 64.
const REPORT_PART: u64 = 64;

/// With plenty of room, the longest life of a grant, as a multiple of `life_us`. Higher: fewer
/// reports of keys far below their limits; the grant of a dead node is missing longer, although no
/// node needs it.
const PLENTY_LIVES: u64 = 4;

/// With plenty of room, the flush intervals that the rest of a grant should last.
const INTERVALS_LEFT: u64 = 2;

/// Flush intervals for which the node does not look at a sufficient grant. Higher: less work for
/// keys far below their limits; more grants run out when demand jumps, and then a request waits for
/// the origin.
const INTERVALS_QUIET: u64 = 3;

/// There is plenty while others use at most this part of all there ever is, and this node holds at
/// most as much of the rest: one half.
const PLENTY_SHARE: u64 = 2;

/// Usual longest time until the origin receives a caller's refund, µs: the longest stretched report
/// interval. Units that drain in this time are refunded all the same. Longer: more is refunded of
/// usage that a busy node reports late; after an outage of the origin, units that drain in this
/// time may pass twice.
const REFUND_ON_ITS_WAY_US: u64 = 500_000;

/// The first denial after an exhausted reply lasts one part in so many of a flush interval; each
/// further one lasts twice as long.
const FIRST_DENIAL_PARTS: u64 = 16;

/// The longest drain time that a node waits for while other nodes have grants, µs: they may return
/// some before anything drains.
const RETRY_US: u64 = 200_000;

/// The time of the charge that a refund belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) struct ChargeTime {
    /// From when on it has been draining, by the origin's clock.
    of_us: u64,
    /// Cell of the charge, and the length of cells under the limit at that time, µs; 0 if it has
    /// none.
    cell: u64,
    cell_us: u64,
}

impl ChargeTime {
    /// A charge of which nothing has drained yet.
    const LATEST: Self = Self { of_us: u64::MAX, cell: u64::MAX, cell_us: 0 };

    /// A charge at this moment of the origin's clock. Before the origin's first reply the time is
    /// unknown; no limit that must hold admits anything then.
    pub(super) fn charged(at_us: Option<u64>, tracked: &NodeMeter) -> Self {
        let cell_us = cell_us(&tracked.meter.terms);
        at_us.map_or(Self::LATEST, |of_us| Self {
            of_us,
            cell: of_us.checked_div(cell_us).unwrap_or(0),
            cell_us,
        })
    }

    /// The charge behind a refund that a caller requests at this moment.
    pub(super) fn of_request(at_us: Option<u64>, tracked: &NodeMeter) -> Self {
        let charged = Self::charged(at_us, tracked);
        Self { of_us: charged.of_us.saturating_add(REFUND_ON_ITS_WAY_US), ..charged }
    }

    /// Reads the charge from an update in a call.
    fn of(update: &MeterUpdate) -> Self {
        let of_us = if update.refund_of_us == 0 { u64::MAX } else { update.refund_of_us };
        Self { of_us, cell: update.cell, cell_us: cell_us(&update.terms) }
    }

    /// Returns the time as a call encodes it: 0 if nothing has drained yet.
    const fn as_reported(self) -> u64 {
        if self.of_us == u64::MAX { 0 } else { self.of_us }
    }

    /// Both, to be given back as one. By the later of them too much would be.
    fn first(self, other: Self) -> Self {
        let begins_us = |of: &Self| of.cell.saturating_mul(of.cell_us.max(1));
        let Self { cell, cell_us, .. } = if begins_us(&other) < begins_us(&self) { other } else { self };
        Self { of_us: self.of_us.min(other.of_us), cell, cell_us }
    }

    /// Whether the window is over in which it was charged, by its own count: the origin counts
    /// cells by the limit as it knows it, which may be another.
    fn is_over(self, origin_us: u64) -> bool {
        origin_us.checked_div(self.cell_us).is_some_and(|cell| self.cell.saturating_add(1) < cell)
    }
}

/// Returns the length of the limit's cells, µs; 0 if it has none.
fn cell_us(terms: &Terms) -> u64 {
    match terms.algorithm() {
        Algorithm::Gcra => 0,
        Algorithm::SlidingWindow => terms.tick_us() * terms.period(),
    }
}

/// Urgency of a report about a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum ReportUrgency {
    /// No report.
    None,
    /// A report that may join an urgent one: a call costs more than its content.
    Some,
    /// A report that should not wait.
    Urgent,
}

impl ReportUrgency {
    fn urgent_if(is_urgent: bool) -> Self {
        if is_urgent { Self::Urgent } else { Self::None }
    }
}

/// Why a call speaks of a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpdateCause {
    /// A request waits for the origin's decision.
    Check,
    /// The same for a meter that is not tracked: the node may not keep a grant of it.
    Untracked,
    /// The node has usage to report or a grant to extend.
    Flush,
}

/// The state that a node tracks for one meter.
#[derive(Debug)]
pub(super) struct NodeMeter {
    pub(super) meter: MeterRef,
    demand: Demand,
    /// Units that requests asked the origin for since the last call, whether they still wait or
    /// not.
    demanded: u64,
    /// Units spent from a grant and reported in a call that was refused.
    unreported_again: u64,
    /// Units that were let through without the origin.
    owed: u64,
    /// Units to be given back, and the first charge that any of them is of.
    refund: u64,
    refund_time: ChargeTime,
    /// When the last call about it was sent, and when it was last of use to anyone.
    sent_us: u64,
    used_us: u64,
    /// The cell of its grant.
    cell: u64,
    /// End of the grant (0 without one), its whole life, µs, and its units.
    ends_us: u64,
    granted_us: u64,
    granted: u64,
    /// Until when the meter counts as recently denied: a request was denied, or the origin was
    /// exhausted and granted nothing. Grants are short until then.
    denied_until_us: u64,
    /// The same for the second cause only. Usage is not worth a call of its own until then.
    strict_until_us: u64,
    /// Exhausted replies of late: one more counts 1, any other reply halves the count.
    exhausted_replies: u8,
    /// Earliest time at which the origin may have units again.
    refills_us: u64,
    /// Units that the node may have beyond its near demand; 0 unless there is plenty of room.
    spare: u64,
    /// The origin's last reply: its free units, the nodes with a grant, and when it came.
    room: u64,
    holders: u32,
    heard_us: u64,
    /// Until when its slot need not be looked at, by how fast it is used: thousands of slots lie
    /// all over memory.
    quiet_until_us: Cell<u64>,
    /// Whether it is part of the call under way.
    in_flight: bool,
    /// Whether the node must return the grant: the origin recalls it, the limit was lowered, or the
    /// table has no room.
    recalled: bool,
}

impl NodeMeter {
    pub(super) fn new(meter: MeterRef, now_us: u64) -> Self {
        Self {
            meter,
            demand: Demand::default(),
            demanded: 0,
            unreported_again: 0,
            owed: 0,
            refund: 0,
            refund_time: ChargeTime::LATEST,
            sent_us: 0,
            used_us: now_us,
            cell: 0,
            ends_us: 0,
            granted_us: 0,
            granted: 0,
            denied_until_us: 0,
            strict_until_us: 0,
            exhausted_replies: 0,
            refills_us: 0,
            spare: 0,
            room: 0,
            holders: 0,
            heard_us: 0,
            quiet_until_us: Cell::new(0),
            in_flight: false,
            recalled: false,
        }
    }

    pub(super) fn note_demand(&mut self, cost: u64, now_us: u64) {
        self.demanded = self.demanded.saturating_add(cost.max(1));
        self.used_us = now_us;
    }

    /// Takes back the demand of a request: the grant decided it after all, and its `cost` counts as
    /// used.
    pub(super) fn note_answered(&mut self, cost: u64) {
        self.demanded = self.demanded.saturating_sub(cost.max(1));
    }

    pub(super) fn note_owed(&mut self, cost: u64, now_us: u64) {
        self.owed = self.owed.saturating_add(cost);
        self.used_us = now_us;
    }

    /// Adds a refund and the time of its charge.
    pub(super) fn note_refund(&mut self, cost: u64, of: ChargeTime, now_us: u64) {
        if cost > 0 {
            self.refund = self.refund.saturating_add(cost);
            self.refund_time = self.refund_time.first(of);
            self.used_us = now_us;
        }
    }

    /// Cancels owed units that the origin does not know of yet. Returns the rest of the cost.
    pub(super) fn forgive(&mut self, cost: u64) -> u64 {
        let own = cost.min(self.owed);
        self.owed -= own;
        cost - own
    }

    /// Whether a call may already have reported the usage of that moment.
    pub(super) fn was_reported_since(&self, since_us: u64) -> bool {
        self.sent_us >= since_us
    }

    pub(super) fn forget_refund(&mut self) {
        (self.refund, self.refund_time) = (0, ChargeTime::LATEST);
    }

    /// Adopts a changed limit. A lower limit gives up the grant at once; a higher one waits for new
    /// grants.
    pub(super) fn adopt(&mut self, meter: &MeterRef) {
        if meter.terms == self.meter.terms || meter.terms.version() < self.meter.terms.version() {
            return;
        }
        if meter.terms.capacity() < self.meter.terms.capacity() {
            self.recalled = true;
        }
        self.meter = meter.clone();
    }

    /// Returns when the meter may need a report again: at its turn, and soon after its grant ends,
    /// before the grant lapses at the origin.
    pub(super) fn next_look_us(&self, cx: &Context<'_>) -> u64 {
        let (now_us, flush_us) = (cx.now_us(), self.flush_us(cx));
        let turn_us = self.sent_us + flush_us;
        let next_us = if turn_us > now_us + cx.flush_slack_us() { turn_us } else { now_us + flush_us };
        let report_by_us = self.ends_us + cx.flush_us_min;
        if self.ends_us > 0 && report_by_us > now_us { next_us.min(report_by_us) } else { next_us }
    }

    /// Returns the units left by the origin's last reply and the drain since; `None` before the
    /// first.
    pub(super) fn left(&self, now_us: u64) -> Option<u64> {
        let terms = &self.meter.terms;
        let ticks = now_us.saturating_sub(self.heard_us) / terms.tick_us();
        let drained = ticks.saturating_mul(terms.amount()) / terms.period();
        let left = self.room.saturating_add(drained).min(terms.capacity());
        (self.heard_us > 0).then_some(left)
    }

    /// The question that finds its slot.
    fn ask(&self) -> Check<'_> {
        let MeterRef { limit, space, digest, .. } = &self.meter;
        Check { limit, space, digest: *digest, cost: 0 }
    }

    /// Returns the units to report besides those in the slot.
    fn pending_units(&self) -> u64 {
        self.unreported_again.saturating_add(self.owed).saturating_add(self.refund)
    }

    fn look(&self, cx: &Context<'_>) -> UsageReport {
        cx.table.peek_report(cx.now, &self.ask())
    }

    /// Returns the urgency of a report. The module of the session lists the causes.
    pub(super) fn report_urgency(&self, cx: &Context<'_>) -> ReportUrgency {
        if self.in_flight {
            return ReportUrgency::None;
        }
        // A session looks as often as the shortest interval of its meters requires. A grant that
        // ends before its turn is reported in time.
        let turn_us = self.sent_us + self.flush_us(cx);
        let is_early = cx.now_us() + cx.flush_slack_us() < turn_us && !(1..=turn_us).contains(&self.ends_us);
        if is_early && !self.recalled && !cx.closing {
            return ReportUrgency::None;
        }
        let is_quiet = cx.now_us() < self.quiet_until_us.get() && self.pending_units() == 0;
        if is_quiet && !self.recalled && !cx.closing {
            return self.urgency_at_end(cx);
        }
        let report = self.look(cx);
        let unreported = self.pending_units().saturating_add(report.used);
        self.quiet_until_us.set(self.quiet_until_us(cx, &report));
        if cx.closing {
            return if unreported > 0 || self.ends_us > 0 {
                ReportUrgency::Urgent
            } else {
                ReportUrgency::None
            };
        }
        let wanted =
            report.missed && report.keep == 0 && cx.now_us() + cx.settings.hedge_us >= self.refills_us;
        let called_back = self.recalled && report.keep + unreported > 0;
        if wanted || called_back {
            return ReportUrgency::Urgent;
        }
        self.urgency_of_usage(cx, &report, unreported).max(self.urgency_at_end(cx))
    }

    /// Returns the urgency as the grant ends. A spent grant needs a report too: until the node
    /// returns it, the origin counts it as used.
    fn urgency_at_end(&self, cx: &Context<'_>) -> ReportUrgency {
        if self.ends_us == 0 {
            return ReportUrgency::None;
        }
        let left_us = self.ends_us.saturating_sub(cx.now_us());
        // Before the flush after the next one, which would come too late.
        if left_us <= (self.granted_us / 5).max(cx.settings.flush_us) {
            ReportUrgency::Urgent
        } else if left_us <= self.granted_us * 3 / 5 {
            ReportUrgency::Some
        } else {
            ReportUrgency::None
        }
    }

    /// Returns the urgency of unreported usage.
    fn urgency_of_usage(&self, cx: &Context<'_>, report: &UsageReport, unreported: u64) -> ReportUrgency {
        if unreported == 0 {
            return ReportUrgency::None;
        }
        let is_share = unreported.saturating_mul(REPORT_SHARE) >= report.used + report.keep;
        if self.pending_units() > 0 && is_share {
            return ReportUrgency::Urgent;
        }
        if self.is_strict(cx.now_us()) {
            // Usage that is reported late still counts as granted when it could drain. A small part
            // of the capacity is not missed.
            let all = self.meter.terms.capacity() / u64::from(self.holders.max(1));
            return ReportUrgency::urgent_if(unreported.saturating_mul(REPORT_SHARE) > all);
        }
        if self.spare > 0 {
            let is_low = report.keep < self.demand.within(INTERVALS_LEFT * cx.settings.flush_us);
            return ReportUrgency::urgent_if(is_low || (is_share && unreported >= self.report_least()));
        }
        ReportUrgency::urgent_if(is_share)
    }

    /// Returns until when usage needs no report, unless demand doubles. A request that finds the
    /// grant spent before that asks the origin, and its call reports the usage.
    fn quiet_until_us(&self, cx: &Context<'_>, report: &UsageReport) -> u64 {
        if self.spare == 0 || self.is_strict(cx.now_us()) {
            return 0;
        }
        let until_low = report.keep.saturating_sub(self.demand.within(INTERVALS_LEFT * cx.settings.flush_us));
        let share = (report.used + report.keep) / REPORT_SHARE;
        let until_share = share.max(self.report_least()).saturating_sub(report.used);
        let us = self.demand.time_for_us(until_low.min(until_share)) / 2;
        cx.now_us() + us.min(INTERVALS_QUIET * cx.settings.flush_us)
    }

    /// Where there is plenty, how much had better be spent before it is reported.
    fn report_least(&self) -> u64 {
        REPORT_LEAST.max(self.meter.terms.capacity() / REPORT_PART)
    }

    /// Whether the node can evict this state without loss.
    pub(super) fn is_over(&self, cx: &Context<'_>) -> bool {
        let idle_us = cx.now_us().saturating_sub(self.used_us.max(self.sent_us));
        let idle = idle_us > LIVES_REMEMBERED * cx.settings.life_us || cx.closing;
        let owes = self.in_flight || self.pending_units() > 0 || self.ends_us > 0;
        idle && !owes && self.look(cx).used == 0
    }

    fn is_strict(&self, now_us: u64) -> bool {
        now_us < self.strict_until_us
    }

    fn life_us(&self, cx: &Context<'_>) -> u64 {
        let life_us = match (cx.now_us() < self.denied_until_us, self.spare) {
            (true, _) => cx.settings.strict_life_us,
            (false, 0) => cx.settings.life_us,
            // No longer than a burst takes to drain: a grant unused for that long could have been
            // used.
            (false, 1..) => self.burst_us().clamp(cx.settings.life_us, PLENTY_LIVES * cx.settings.life_us),
        };
        let is_cross_region = self.meter.terms.cross_region().is_some();
        let most_us = if is_cross_region { cx.settings.cross_region_life_us } else { u64::MAX };
        life_us.min(most_us).min(self.meter.terms.life_us_max())
    }

    /// Builds the update for a call, and marks the meter as in flight.
    pub(super) fn update(&mut self, cx: &Context<'_>, cause: UpdateCause) -> MeterUpdate {
        let now_us = cx.now_us();
        let before = self.look(cx);
        let flush_us = self.flush_us(cx);
        let elapsed_us = now_us.saturating_sub(self.sent_us).max(flush_us / 2);
        let seen = before.used.saturating_add(self.demanded);
        self.demand.measure(seen, elapsed_us, before.missed);
        if self.demanded > 0 && self.spare > 0 {
            self.demand.catch_up(seen, elapsed_us);
        }
        if before.missed {
            // A request was denied, even if the origin has granted a little meanwhile.
            self.denied_until_us = now_us + cx.settings.strict_us;
        }
        let life_us = self.life_us(cx);
        let want = if self.recalled || cx.closing || cause == UpdateCause::Untracked {
            0
        } else {
            self.demand.want(flush_us, life_us, self.spare).min(self.meter.terms.capacity())
        };
        // A waiting request needs more than the grant. The node gives the grant up, so that the
        // origin decides on all units.
        let keep = if cause == UpdateCause::Flush { want } else { 0 };
        let taken = cx.table.take_report(cx.now, &self.ask(), keep);
        let used = taken.used.saturating_add(self.unreported_again);
        let (refund, of) = self.take_refund(used);
        let update = MeterUpdate {
            key: Box::from(&*self.meter.key),
            terms: self.meter.terms,
            used,
            owed: self.owed,
            refund,
            refund_of_us: of.as_reported(),
            keep: taken.keep,
            want,
            life_us,
            cell: of.cell,
        };
        if before.used > 0 || self.demanded > 0 || before.missed {
            self.used_us = now_us;
        }
        (self.demanded, self.unreported_again, self.owed) = (0, 0, 0);
        (self.sent_us, self.in_flight, self.recalled) = (now_us, true, false);
        update
    }

    /// Returns the refund for a call that reports `used` units, and the cell of the call. A call
    /// has one cell, and `used` counts there if the origin has dropped the grant. So a refund of
    /// another cell waits for a call of its own.
    fn take_refund(&mut self, used: u64) -> (u64, ChargeTime) {
        let has_cell =
            self.meter.terms.algorithm() == Algorithm::SlidingWindow && self.refund_time.cell < u64::MAX;
        let of = if has_cell { self.refund_time } else { ChargeTime { cell: self.cell, ..self.refund_time } };
        if self.refund == 0 || (used > 0 && of.cell != self.cell) {
            return (0, ChargeTime { cell: self.cell, ..ChargeTime::LATEST });
        }
        let refund = self.refund;
        self.forget_refund();
        (refund, of)
    }

    /// Takes back the usage and refund of a call that is never applied; the next call reports them.
    pub(super) fn take_again(&mut self, update: &MeterUpdate) {
        self.in_flight = false;
        self.quiet_until_us.set(0);
        self.unreported_again = self.unreported_again.saturating_add(update.used);
        self.owed = self.owed.saturating_add(update.owed);
        self.note_refund(update.refund, ChargeTime::of(update), self.used_us);
    }

    /// Returns the units of the grant that the origin may have counted as used because of a late
    /// report, whether its reply states so or not: the origin keeps no record of a lapse that
    /// another call applied.
    fn lapsed(&self, cx: &Context<'_>, meter_reply: &MeterReply) -> u64 {
        // The origin allows for clock drift in the life of a grant, but not in the margin.
        let written_off_us = self.ends_us + shortest_us(LAPSE_MARGIN_US);
        let is_late = self.ends_us > 0 && cx.now_us() >= written_off_us;
        let counts = self.meter.terms.lapse() == Lapse::Counted;
        if counts && (meter_reply.lapsed || is_late) { self.granted } else { 0 }
    }

    /// Applies the origin's reply. Drops a pending refund if its charge may be lost as well.
    /// Returns the units of the grant that may count as used although they were not.
    pub(super) fn apply_reply(
        &mut self,
        cx: &Context<'_>,
        sent_us: u64,
        meter_reply: &MeterReply,
        reply: &CallReply,
    ) -> u64 {
        let lapsed = self.lapsed(cx, meter_reply);
        self.granted = meter_reply.grant;
        self.in_flight = false;
        self.quiet_until_us.set(0);
        // A charge in a window that is over is gone as well.
        let is_over = self.refund_time.is_over(reply.now_us);
        if is_over || (reply.lost && self.meter.terms.lapse() == Lapse::Counted) {
            self.forget_refund();
        }
        let now_us = cx.now_us();
        (self.room, self.holders, self.heard_us) = (meter_reply.room, meter_reply.holders, now_us);
        let counted = meter_reply.lapsed && self.meter.terms.lapse() == Lapse::Counted;
        self.cell = meter_reply.cell;
        self.spare = self.spare_of(meter_reply);
        self.exhausted_replies = if meter_reply.exhausted {
            (self.exhausted_replies + 1).min(8)
        } else {
            self.exhausted_replies / 2
        };
        let (deny_us, refills_us) = self.denial_us(cx, sent_us, meter_reply);
        self.refills_us = sent_us + refills_us;
        // The reply describes a moment after `sent_us`: units that drained until now must not count
        // as free twice.
        let drained = self.meter.limit.drained_in(now_us.saturating_sub(sent_us));
        let free = meter_reply.remaining.saturating_sub(drained);
        let grant_update = GrantUpdate {
            sent_us,
            grant: meter_reply.grant,
            life_us: meter_reply.life_us,
            deny_us,
            free,
            counted,
        };
        let is_held = cx.table.apply_grant(cx.now, &self.ask(), &grant_update);
        (self.ends_us, self.granted_us) =
            if meter_reply.grant > 0 { (sent_us + meter_reply.life_us, meter_reply.life_us) } else { (0, 0) };
        // A grant without room in the table goes back at once.
        self.recalled |= meter_reply.recall || (!is_held && meter_reply.grant > 0);
        if meter_reply.exhausted && meter_reply.grant == 0 {
            self.strict_until_us = now_us + cx.settings.strict_us;
            self.denied_until_us = self.strict_until_us;
        }
        lapsed
    }

    /// Returns the units that the node may have beyond its near demand. A dead node loses them as
    /// well, but no other node misses them.
    fn spare_of(&self, meter_reply: &MeterReply) -> u64 {
        let free = meter_reply.room.saturating_add(meter_reply.grant);
        let plenty = !meter_reply.exhausted
            && free >= self.meter.terms.capacity() / PLENTY_SHARE
            && meter_reply.grant <= free / PLENTY_SHARE;
        if plenty { free / PLENTY_SHARE / u64::from(meter_reply.holders.max(1)) } else { 0 }
    }

    /// How long it takes until one more unit may pass.
    fn unit_us(&self) -> u64 {
        self.drain_us(1)
    }

    /// How long it takes until so many units have drained.
    fn drain_us(&self, units: u64) -> u64 {
        let terms = &self.meter.terms;
        let ticks = (units * terms.period()).checked_div(terms.amount()).unwrap_or(u64::MAX);
        ticks.saturating_mul(terms.tick_us())
    }

    /// How long it takes until all that may ever be used at once has drained.
    fn burst_us(&self) -> u64 {
        self.drain_us(self.meter.terms.capacity())
    }

    /// How often it is reported: at the origin's interval for its limit, which is stretched with
    /// all others.
    pub(super) fn flush_us(&self, cx: &Context<'_>) -> u64 {
        let flush_us =
            (self.burst_us() / REPORTS_PER_BURST).clamp(REPORT_US_MIN.min(cx.flush_us_min), cx.flush_us_min);
        flush_us * cx.settings.flush_us / cx.flush_us_min.max(1)
    }

    /// Returns how long after `sent_us` requests are denied once the grant is spent, and how long
    /// after it a flush asks again. A node denies by itself only after an exhausted reply. The
    /// first denial is short, because the load may be below the limit. While the origin stays
    /// exhausted, denials last until a flush has asked for the denied requests. A burst of one unit
    /// cannot accumulate the units that drain during a denial, so that denial ends with the drain.
    fn denial_us(&self, cx: &Context<'_>, sent_us: u64, meter_reply: &MeterReply) -> (u64, u64) {
        if !meter_reply.exhausted {
            return (0, 0);
        }
        let under_way_us = cx.now_us().saturating_sub(sent_us);
        let others_hold = meter_reply.remaining > meter_reply.room + meter_reply.grant;
        let wait_us = if others_hold { meter_reply.wait_us.min(RETRY_US) } else { meter_reply.wait_us };
        let asks_us = self.turn_us(cx, meter_reply.holders).max(wait_us);
        let until_reply_us = asks_us + cx.flush_slack_us().min(self.flush_us(cx)) + cx.settings.hedge_us;
        if meter_reply.grant == 0 && self.meter.terms.capacity() == 1 {
            // `wait_us` counts from the decision at the origin. A request that leaves the node
            // `wait_us` after `sent_us` reaches the origin when the unit has drained.
            return (wait_us, asks_us);
        }
        let first_us = self.flush_us(cx) / FIRST_DENIAL_PARTS;
        let doublings = self.exhausted_replies.saturating_sub(1);
        let deny_us = (first_us << doublings).min(until_reply_us);
        let deny_us = if meter_reply.grant == 0 { deny_us.max(wait_us) } else { deny_us };
        (under_way_us + deny_us, asks_us)
    }

    /// Returns the interval at which a node asks for an exhausted meter: twice in the time in which
    /// a unit drains for each of `holders` nodes. No unit is lost meanwhile, because at most an
    /// eighth of the burst drains.
    fn turn_us(&self, cx: &Context<'_>, holders: u32) -> u64 {
        let flush_us = self.flush_us(cx);
        let turn_us = self.unit_us().saturating_mul(u64::from(holders.max(1))) / 2;
        turn_us.min(self.burst_us() / REPORTS_PER_BURST).clamp(flush_us, cx.settings.life_us.max(flush_us))
    }
}
