//! The state that a node keeps for one meter, besides its slot in the table.

mod demand;
mod denial;
mod grant;
mod origin_view;
mod refund;
mod schedule;
mod unreported;

use self::demand::Demand;
use self::denial::DenialState;
use self::grant::Grant;
use self::origin_view::OriginView;
use self::refund::{ChargeTime, RefundDue};
use self::schedule::ReportSchedule;
use self::unreported::Unreported;
use super::{Context, MeterRef};
use crate::origin::{CallReply, Lapse, MeterReply, MeterUpdate};
use crate::table::Check;
use crate::{GrantUpdate, UsageReport};

pub(super) use self::schedule::ReportUrgency;

/// The node evicts its state of a meter this many grant lives after its last use or call.
const LIVES_REMEMBERED: u64 = 2;

/// Of a grant, how much may be spent before it is reported early: one fifth.
const REPORT_SHARE: u64 = 5;

/// With plenty of room, the least usage for an early report, in units. Higher: fewer reports of
/// keys with occasional requests; the origin sees less room, by that much for each node.
const REPORT_LEAST: u64 = 16;

/// The same as a part of the capacity: one in 64.
const REPORT_PART: u64 = 64;

/// With plenty of room, the longest life of a grant, as a multiple of `life_us`. Higher: fewer
/// reports of keys far below their limits; the grant of a dead node is missing longer, although no
/// node needs it.
const PLENTY_LIVES: u64 = 4;

/// With plenty of room, the flush intervals that the rest of a grant should last.
const INTERVALS_LEFT: u64 = 2;

/// Flush intervals for which the node does not read the slot of a meter with a sufficient grant.
/// Higher: less work for keys far below their limits; more grants run out when demand jumps, and
/// then a request waits for the origin.
const INTERVALS_QUIET: u64 = 3;

/// Why a call has an update of a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UpdateCause {
    /// A request waits for the origin's decision.
    Check,
    /// The same for a meter that is not tracked: the node may not keep a grant of it.
    Untracked,
    /// The node has usage to report or a grant to extend.
    Flush,
}

/// The state that a node keeps for one meter.
#[derive(Debug)]
pub(super) struct NodeMeter {
    meter: MeterRef,
    /// When a request last used the meter.
    used_us: u64,
    demand: Demand,
    unreported: Unreported,
    grant: Grant,
    denials: DenialState,
    origin: OriginView,
    schedule: ReportSchedule,
}

impl NodeMeter {
    pub(super) fn new(meter: MeterRef, now_us: u64) -> Self {
        Self {
            meter,
            used_us: now_us,
            demand: Demand::default(),
            unreported: Unreported::default(),
            grant: Grant::default(),
            denials: DenialState::default(),
            origin: OriginView::default(),
            schedule: ReportSchedule::default(),
        }
    }

    /// Notes a request that waits for the origin.
    pub(super) fn note_request(&mut self, cost: u64, now_us: u64) {
        self.demand.note_request(cost);
        self.used_us = now_us;
    }

    /// Takes back the demand of a request: the grant decided it after all, and its `cost` counts as
    /// used.
    pub(super) fn note_answered(&mut self, cost: u64) {
        self.demand.note_answered(cost);
    }

    /// Notes that a request passed after it had waited for the origin.
    pub(super) fn note_passed(&mut self, cost: u64) {
        self.demand.note_passed(cost);
    }

    /// Adds usage that was admitted without the origin.
    pub(super) fn owe(&mut self, cost: u64, now_us: u64) {
        self.unreported.owe(cost);
        self.used_us = now_us;
    }

    /// Cancels owed units that the origin does not know of yet. Returns the rest of the cost.
    pub(super) fn forgive(&mut self, cost: u64) -> u64 {
        self.unreported.forgive(cost)
    }

    /// Adds the refund of a charge at `charged_us` of the origin's clock.
    pub(super) fn refund(&mut self, units: u64, charged_us: Option<u64>, now_us: u64) {
        self.add_refund(units, ChargeTime::at(charged_us, &self.meter.terms), now_us);
    }

    /// Adds a refund that a caller requests at `origin_us` of the origin's clock. Units that the
    /// origin does not know of yet are cancelled on the node.
    pub(super) fn refund_request(&mut self, cost: u64, origin_us: Option<u64>, now_us: u64) {
        let rest = self.forgive(cost);
        self.add_refund(rest, ChargeTime::of_request(origin_us, &self.meter.terms), now_us);
    }

    fn add_refund(&mut self, units: u64, charge: ChargeTime, now_us: u64) {
        if units > 0 {
            self.unreported.refund.add(RefundDue::new(units, charge));
            self.used_us = now_us;
        }
    }

    pub(super) fn forget_refund(&mut self) {
        self.unreported.refund = RefundDue::default();
    }

    /// Whether a call may already have reported the usage of that moment.
    pub(super) fn was_reported_since(&self, since_us: u64) -> bool {
        self.schedule.sent_us >= since_us
    }

    /// Adopts a changed limit. A lower limit gives up the grant at once; a higher one waits for new
    /// grants.
    pub(super) fn adopt(&mut self, meter: &MeterRef) {
        let (before, after) = (&self.meter.terms, &meter.terms);
        if after == before || after.version() < before.version() {
            return;
        }
        self.grant.is_recalled |= after.capacity() < before.capacity();
        self.meter = meter.clone();
    }

    /// Returns when the meter may need a report again: at its turn, and soon after its grant ends.
    pub(super) fn next_look_us(&self, cx: &Context<'_>) -> u64 {
        let (now_us, interval_us) = (cx.now_us(), cx.report_interval_us(&self.meter.terms));
        let turn_us = self.schedule.sent_us + interval_us;
        let next_us = if turn_us > now_us + cx.flush_slack_us() { turn_us } else { now_us + interval_us };
        let report_by_us = self.grant.report_by_us(cx.flush_us_min()).filter(|by_us| *by_us > now_us);
        report_by_us.map_or(next_us, |by_us| next_us.min(by_us))
    }

    /// Returns the units left by the origin's last reply and the drain since; `None` before the
    /// first.
    pub(super) fn left(&self, now_us: u64) -> Option<u64> {
        self.origin.room_at(now_us, &self.meter.terms)
    }

    /// Returns a check that finds the slot of the meter.
    fn check(&self) -> Check<'_> {
        self.meter.check(0)
    }

    fn peek(&self, cx: &Context<'_>) -> UsageReport {
        cx.table.peek_report(cx.now, &self.check())
    }

    /// Returns the urgency of a report. The module of the session lists the causes.
    pub(super) fn report_urgency(&self, cx: &Context<'_>) -> ReportUrgency {
        if self.schedule.is_in_flight {
            return ReportUrgency::None;
        }
        let must_return = self.grant.is_recalled || cx.is_closing();
        // The shortest interval of its meters wakes a session. A grant that ends before its turn is
        // reported in time.
        let turn_us = self.schedule.sent_us + cx.report_interval_us(&self.meter.terms);
        let is_early = cx.now_us() + cx.flush_slack_us() < turn_us && !self.grant.ends_by(turn_us);
        if is_early && !must_return {
            return ReportUrgency::None;
        }
        let pending = self.unreported.units();
        if self.schedule.is_quiet(cx.now_us()) && pending == 0 && !must_return {
            return self.grant.urgency_at_end(cx);
        }
        let report = self.peek(cx);
        let unreported = pending.saturating_add(report.used);
        self.schedule.quiet_until_us.set(self.quiet_until_us(cx, &report));
        if cx.is_closing() {
            return ReportUrgency::urgent_if(unreported > 0 || self.grant.exists());
        }
        let is_wanted = report.missed && report.keep == 0 && self.denials.may_have_refilled(cx);
        let is_recalled = self.grant.is_recalled && report.keep + unreported > 0;
        if is_wanted || is_recalled {
            return ReportUrgency::Urgent;
        }
        self.urgency_of_usage(cx, &report, unreported).max(self.grant.urgency_at_end(cx))
    }

    /// Returns the urgency of unreported usage.
    fn urgency_of_usage(&self, cx: &Context<'_>, report: &UsageReport, unreported: u64) -> ReportUrgency {
        if unreported == 0 {
            return ReportUrgency::None;
        }
        let is_share = unreported.saturating_mul(REPORT_SHARE) >= report.used + report.keep;
        if self.unreported.units() > 0 && is_share {
            return ReportUrgency::Urgent;
        }
        if self.denials.is_strict(cx.now_us()) {
            // Usage that is reported late still counts as granted when it could drain. A small part
            // of the capacity is not missed.
            let all = self.meter.terms.capacity() / u64::from(self.origin.holders.max(1));
            return ReportUrgency::urgent_if(unreported.saturating_mul(REPORT_SHARE) > all);
        }
        if self.origin.spare > 0 {
            let is_low = report.keep < self.demand.within(INTERVALS_LEFT * cx.settings.flush_us);
            return ReportUrgency::urgent_if(is_low || (is_share && unreported >= self.report_least()));
        }
        ReportUrgency::urgent_if(is_share)
    }

    /// Returns until when usage needs no report, unless demand doubles. A request that finds the
    /// grant spent before that asks the origin, and its call reports the usage.
    fn quiet_until_us(&self, cx: &Context<'_>, report: &UsageReport) -> u64 {
        if self.origin.spare == 0 || self.denials.is_strict(cx.now_us()) {
            return 0;
        }
        let until_low = report.keep.saturating_sub(self.demand.within(INTERVALS_LEFT * cx.settings.flush_us));
        let share = (report.used + report.keep) / REPORT_SHARE;
        let until_share = share.max(self.report_least()).saturating_sub(report.used);
        let us = self.demand.time_for_us(until_low.min(until_share)) / 2;
        cx.now_us() + us.min(INTERVALS_QUIET * cx.settings.flush_us)
    }

    /// Returns the least usage for an early report while there is plenty of room.
    fn report_least(&self) -> u64 {
        REPORT_LEAST.max(self.meter.terms.capacity() / REPORT_PART)
    }

    /// Whether the node can evict this state without loss.
    pub(super) fn is_over(&self, cx: &Context<'_>) -> bool {
        let idle_us = cx.now_us().saturating_sub(self.used_us.max(self.schedule.sent_us));
        let is_idle = idle_us > LIVES_REMEMBERED * cx.settings.life_us || cx.is_closing();
        let owes = self.schedule.is_in_flight || self.unreported.units() > 0 || self.grant.exists();
        is_idle && !owes && self.peek(cx).used == 0
    }

    /// Returns the life that the node wants for its next grant.
    fn life_us(&self, cx: &Context<'_>) -> u64 {
        let terms = &self.meter.terms;
        let life_us = match (self.denials.is_recently_denied(cx.now_us()), self.origin.spare) {
            (true, _) => cx.settings.strict_life_us,
            (false, 0) => cx.settings.life_us,
            // No longer than a burst takes to drain: a grant unused for that long could have been
            // used.
            (false, 1..) => {
                let burst_us = terms.drain_us(terms.capacity());
                burst_us.clamp(cx.settings.life_us, PLENTY_LIVES * cx.settings.life_us)
            }
        };
        let is_cross_region = terms.cross_region().is_some();
        let most_us = if is_cross_region { cx.settings.cross_region_life_us } else { u64::MAX };
        life_us.min(most_us).min(terms.life_us_max())
    }

    /// Builds the update for a call, and marks the meter as in flight.
    pub(super) fn update(&mut self, cx: &Context<'_>, cause: UpdateCause) -> MeterUpdate {
        let (now_us, terms) = (cx.now_us(), self.meter.terms);
        let before = self.peek(cx);
        if before.used > 0 || self.demand.has_requests() || before.missed {
            self.used_us = now_us;
        }
        let interval_us = cx.report_interval_us(&terms);
        let elapsed_us = now_us.saturating_sub(self.schedule.sent_us).max(interval_us / 2);
        self.demand.end_interval(before, elapsed_us, self.origin.spare > 0);
        if before.missed {
            // A request was denied, even if the origin has granted a little meanwhile.
            self.denials.note_denied(cx);
        }
        let life_us = self.life_us(cx);
        let want = if self.grant.is_recalled || cx.is_closing() || cause == UpdateCause::Untracked {
            0
        } else {
            self.demand.want(&terms, interval_us, life_us, self.origin.spare)
        };
        // A waiting request needs more than the grant. The node gives the grant up, so that the
        // origin decides on all units.
        let keep = if cause == UpdateCause::Flush { want } else { 0 };
        let UsageReport { used, keep, .. } = cx.table.take_report(cx.now, &self.check(), keep);
        let Unreported { used, owed, refund } = self.unreported.take(used, &terms, self.grant.cell);
        self.schedule.begin_call(now_us);
        self.grant.is_recalled = false;
        MeterUpdate {
            key: Box::from(&*self.meter.key),
            terms,
            used,
            owed,
            refund: refund.units,
            refund_of_us: refund.charged_us(),
            keep,
            want,
            life_us,
            cell: refund.cell(),
        }
    }

    /// Takes back the usage and refund of a call that is never applied; the next call reports them.
    pub(super) fn take_again(&mut self, update: &MeterUpdate) {
        self.schedule.end_call();
        self.unreported.put_back(update);
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
        let (now_us, terms) = (cx.now_us(), self.meter.terms);
        let is_counted = terms.lapse() == Lapse::Counted;
        self.schedule.end_call();
        self.unreported.refund.drop_if_over(reply.now_us);
        if reply.lost && is_counted {
            self.forget_refund();
        }
        let lapsed = self.grant.lapsed(now_us, &terms, meter_reply);
        self.grant.replace(sent_us, meter_reply);
        self.origin = OriginView::new(now_us, &terms, meter_reply);
        let deny_us = self.denials.apply_reply(cx, sent_us, &terms, meter_reply);
        // The reply describes a moment after `sent_us`: units that drained until now must not count
        // as free twice.
        let drained = self.meter.limit.drained_in(now_us.saturating_sub(sent_us));
        let grant_update = GrantUpdate {
            sent_us,
            grant: meter_reply.grant,
            life_us: meter_reply.life_us,
            deny_us,
            free: meter_reply.remaining.saturating_sub(drained),
            counted: meter_reply.lapsed && is_counted,
        };
        let has_room = cx.table.apply_grant(cx.now, &self.check(), &grant_update);
        // A grant without room in the table goes back at once.
        self.grant.is_recalled |= !has_room && meter_reply.grant > 0;
        lapsed
    }
}
