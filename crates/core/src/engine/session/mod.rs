//! A session: the calls of a node to one partition, one at a time.
//!
//! A call is sent as soon as a request waits, or when the flush interval is over and a report is
//! urgent:
//!
//! - a fifth of a grant is used, or, with plenty of room, a grant runs low;
//! - a grant is about to end;
//! - a request was denied, and the origin may have units again.
//!
//! Grants with at most three fifths of their life left join such a call.

mod draft;
mod group;
mod in_flight;

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use self::draft::CallDraft;
use self::group::{GroupOutcome, Waiter, charged_in};
use self::in_flight::InFlightCall;
use super::node_meter::{NodeMeter, ReportUrgency, UpdateCause};
use super::{
    CallFailure, Charge, Context, Effect, EngineRequest, EngineSettings, EngineStats, MeterRef, Resolution,
    Ticket,
};
use crate::digest::Digest;
use crate::origin::{CallReply, NEVER_US, SESSION_RETENTION_US};
use crate::remote_clock::RemoteClock;
use crate::table::{Check, CheckOutcome, DecidingMeter, LIMITS_PER_REQUEST_MAX, RequestVerdict, Table};
use crate::time::Now;
use crate::verdict::{Retry, Verdict};

/// Largest number of meters in a call, unless a single request has more. Higher: fewer calls;
/// longer waits behind a call, because Redis takes about 76 µs for a call and 25 µs for each
/// further meter.
const METERS_PER_CALL_MAX: usize = 64;

/// A request that waits for the next call.
#[derive(Debug)]
struct WaitingRequest {
    request: EngineRequest,
    since_us: u64,
}

/// When the session reports its meters, and where it starts.
#[derive(Debug, Default)]
struct FlushSchedule {
    at_us: u64,
    /// The first meter that was due and had no room in the last call.
    due_from: Option<Digest>,
}

/// The limits on the calls of a session, tightened by refused calls.
#[derive(Debug)]
struct CallLimits {
    /// Largest number of meters in the next call.
    meters_max: usize,
    /// Until when the session sends calls for waiting requests only.
    until_us: u64,
}

impl Default for CallLimits {
    fn default() -> Self {
        Self { meters_max: METERS_PER_CALL_MAX, until_us: 0 }
    }
}

impl CallLimits {
    /// Halves the calls after one of `meters` was refused, so that a faulty meter does not block
    /// the others for long.
    fn tighten(&mut self, meters: usize, until_us: u64) {
        *self = Self { meters_max: (meters / 2).max(1), until_us };
    }

    /// Doubles the calls again after a reply.
    fn relax(&mut self) {
        self.meters_max = (self.meters_max * 2).min(METERS_PER_CALL_MAX);
    }
}

/// When a session has work.
#[derive(Debug, Default)]
struct WakeTime {
    /// When the session has work again if no event comes before.
    at_us: Option<u64>,
    /// Whether an event has come since.
    has_event: bool,
    /// Whether a call was due while too many calls were in flight.
    is_held_up: bool,
}

/// The session of a node with one partition.
#[derive(Debug, Default)]
pub(super) struct Session {
    sequence: u64,
    acknowledged: u64,
    /// The origin's clock in its last reply; `None` before the first. Every shard of a cluster has
    /// its own clock.
    clock: Option<RemoteClock>,
    meters: BTreeMap<Digest, NodeMeter>,
    waiting: Vec<WaitingRequest>,
    in_flight: Option<InFlightCall>,
    flush: FlushSchedule,
    call_limits: CallLimits,
    wake: WakeTime,
}

impl Session {
    /// Whether the session may have work.
    pub(super) fn is_awake(&self, now: Now, is_closing: bool) -> bool {
        let WakeTime { at_us, has_event, .. } = self.wake;
        has_event || is_closing || at_us.is_some_and(|at_us| at_us <= now.mono_us())
    }

    /// Returns when the session has work again if no event comes before.
    pub(super) fn wake_us(&self) -> Option<u64> {
        self.wake.at_us
    }

    /// Accepts a request. Returns the number of newly tracked meters.
    pub(super) fn wait(&mut self, now: Now, request: EngineRequest, room: usize) -> usize {
        let before = self.meters.len();
        for Charge { meter, cost } in &request.charges {
            if let Some(node_meter) = self.track(now, meter, before + room) {
                node_meter.note_request(*cost, now.mono_us());
            }
        }
        self.waiting.push(WaitingRequest { request, since_us: now.mono_us() });
        self.wake.has_event = true;
        self.meters.len() - before
    }

    /// Returns the number of tracked meters.
    pub(super) fn tracked(&self) -> usize {
        self.meters.len()
    }

    /// Returns the state of a meter; creates it if fewer than `most` are tracked.
    pub(super) fn track(&mut self, now: Now, meter: &MeterRef, most: usize) -> Option<&mut NodeMeter> {
        if !self.meters.contains_key(&meter.digest) {
            if self.meters.len() >= most {
                return None;
            }
            self.meters.insert(meter.digest, NodeMeter::new(meter.clone(), now.mono_us()));
        }
        self.wake.has_event = true;
        let node_meter = self.meters.get_mut(&meter.digest)?;
        node_meter.adopt(meter);
        Some(node_meter)
    }

    /// Returns the origin's clock at a moment of the node's clock, or earlier; `None` before the
    /// first reply.
    pub(super) fn origin_us(&self, mono_us: u64) -> Option<u64> {
        self.clock.map(|clock| clock.at_or_before_us(mono_us))
    }

    /// Takes back usage of a grant, or usage admitted without the origin, no earlier than
    /// `since_us`, if it is certainly not reported. Returns the rest of the cost.
    pub(super) fn take_unreported(&mut self, now: Now, table: &Table, charge: &Charge, since_us: u64) -> u64 {
        let Some(node_meter) = self.meters.get_mut(&charge.meter.digest) else { return charge.cost };
        if node_meter.was_reported_since(since_us) {
            return charge.cost;
        }
        node_meter.forgive(table.give_back(now, &charge.check()))
    }

    pub(super) fn left(&self, now: Now, digest: Digest) -> Option<u64> {
        self.meters.get(&digest)?.left(now.mono_us())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_none() && self.waiting.is_empty() && self.meters.is_empty()
    }

    /// Returns when the call in flight was sent, if its reply is overdue.
    pub(super) fn overdue_since(&self, now: Now, settings: &EngineSettings) -> Option<u64> {
        let overdue = self.in_flight.as_ref().filter(|call| call.is_overdue(now.mono_us(), settings));
        overdue.map(|call| call.sent_us)
    }

    pub(super) fn is_stalled(&self, now: Now, settings: &EngineSettings) -> bool {
        self.overdue_since(now, settings).is_some()
    }

    /// Does the work that is due. Returns the number of evicted meters.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) -> usize {
        self.wake.is_held_up = false;
        if let Some(call) = &mut self.in_flight {
            call.note_unread(cx.now_us(), &cx.settings);
        }
        self.expire(cx, effects);
        self.begin_anew(cx);
        self.repeat(cx, partition, effects);
        let before = self.meters.len();
        if self.in_flight.is_none() {
            self.send_due(cx, partition, effects);
        }
        // A held-up session gets another look at the next reply, whenever that comes.
        let is_held_up = self.wake.is_held_up;
        self.wake = WakeTime { at_us: self.next_us(&cx.settings), has_event: is_held_up, is_held_up };
        before - self.meters.len()
    }

    /// Whether a call was due while too many calls were in flight.
    pub(super) fn is_held_up(&self) -> bool {
        self.wake.is_held_up
    }

    /// Whether a request waits for the next call.
    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns when the call in flight stops counting against `calls_max`: it is late, and its
    /// store may be gone.
    pub(super) fn late_us(&self, settings: &EngineSettings) -> Option<u64> {
        self.in_flight.as_ref().map(|call| call.sent_us + settings.retry_us)
    }

    fn next_us(&self, settings: &EngineSettings) -> Option<u64> {
        let has_flush = self.in_flight.is_none() && !self.wake.is_held_up && !self.meters.is_empty();
        let flush = has_flush.then_some(self.flush.at_us.max(self.call_limits.until_us));
        let waiting = self.waiting.iter().map(|waiting| waiting.since_us + settings.deadline_us).min();
        let call = self.in_flight.as_ref().map(|call| call.wake_us(settings));
        [flush, waiting, call].into_iter().flatten().min()
    }

    /// Whether the origin may have dropped this session, or soon will: it has not replied for long.
    fn may_be_dropped(&self, cx: &Context<'_>) -> bool {
        let replied_us = self.clock.map_or(0, |clock| clock.arrived_us());
        cx.now_us() > replied_us + SESSION_RETENTION_US / 2
    }

    /// Restarts the session after a long time without a reply. An origin drops idle sessions, and a
    /// dropped session must not look like lost writes. Earlier refunds are dropped too, because
    /// their charges may be gone.
    fn begin_anew(&mut self, cx: &Context<'_>) {
        if !self.may_be_dropped(cx) {
            return;
        }
        self.acknowledged = 0;
        // Before its first reply, the origin has no session to drop.
        if self.clock.is_some() {
            self.meters.values_mut().for_each(NodeMeter::forget_refund);
        }
    }

    /// Answers requests at their deadline as unanswered.
    fn expire(&mut self, cx: &mut Context<'_>, effects: &mut Vec<Effect>) {
        let latest_us = cx.now_us().saturating_sub(cx.settings.deadline_us);
        let stats = &mut cx.node.stats;
        self.waiting.retain(|waiting| {
            let waits = waiting.since_us > latest_us;
            if !waits {
                leave_unanswered(waiting.request.ticket, stats, effects);
            }
            waits
        });
        for waiter in self.in_flight.iter_mut().flat_map(|call| call.take_expired(latest_us)) {
            leave_unanswered(waiter.ticket, stats, effects);
        }
    }

    /// Sends the call in flight again if it is due: once as a hedge, then as retries.
    fn repeat(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) {
        let begins_anew = self.may_be_dropped(cx) && self.clock.is_some();
        let Some(in_flight) = &mut self.in_flight else { return };
        let Some(hedge) = in_flight.next_attempt(cx) else { return };
        if begins_anew {
            in_flight.begin_anew(cx.known_us());
        }
        cx.node.stats.repeats += 1;
        effects.push(Effect::Call { partition, call: Arc::clone(&in_flight.call), hedge });
    }

    /// Sends a call if one is due.
    fn send_due(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) {
        self.decide_waiting(cx, effects);
        let is_due = cx.now_us() >= self.flush.at_us || cx.is_closing();
        let is_flush = is_due && cx.now_us() >= self.call_limits.until_us;
        let is_time = !self.waiting.is_empty() || is_flush;
        self.wake.is_held_up = is_time && cx.calls_left == 0;
        if !is_time || self.wake.is_held_up {
            return;
        }
        let mut draft = CallDraft::default();
        self.take_waiting(cx, &mut draft);
        if is_flush {
            self.meters.retain(|_, node_meter| !node_meter.is_over(cx));
            let next_us = self.meters.values().map(|node_meter| node_meter.next_look_us(cx)).min();
            self.flush.at_us = cx.flush_with_others_us(next_us.unwrap_or(cx.now_us() + cx.settings.flush_us));
        }
        self.take_due(cx, &mut draft);
        if !draft.call.updates.is_empty() {
            self.send(cx, partition, draft, effects);
        }
    }

    /// Decides waiting requests by a grant that came meanwhile.
    fn decide_waiting(&mut self, cx: &mut Context<'_>, effects: &mut Vec<Effect>) {
        let meters = &mut self.meters;
        self.waiting.retain(|WaitingRequest { request, .. }| {
            let Some(resolution) = decide(cx, request) else { return true };
            let has_passed = matches!(resolution, Resolution::Allowed { .. });
            for Charge { meter, cost } in &request.charges {
                if let Some(node_meter) = meters.get_mut(&meter.digest) {
                    node_meter.note_answered(*cost);
                    if has_passed {
                        node_meter.note_passed(*cost);
                    }
                }
            }
            effects.push(Effect::Answer { ticket: request.ticket, resolution });
            false
        });
    }

    fn take_waiting(&mut self, cx: &Context<'_>, draft: &mut CallDraft) {
        let mut waiting = std::mem::take(&mut self.waiting).into_iter();
        for next in waiting.by_ref() {
            if !draft.has_room_for(&next.request, self.call_limits.meters_max) {
                self.waiting.push(next);
                break;
            }
            let charges = next.request.charges.iter();
            let places = charges.map(|charge| self.place(cx, &charge.meter, draft)).collect();
            draft.add_check(next, places);
        }
        self.waiting.extend(waiting);
    }

    /// Returns the position of a meter in the call; adds its update if there is none yet.
    fn place(&mut self, cx: &Context<'_>, meter: &MeterRef, draft: &mut CallDraft) -> u16 {
        if let Some(place) = draft.place(meter.digest) {
            return place;
        }
        let update = match self.meters.get_mut(&meter.digest) {
            Some(node_meter) => node_meter.update(cx, UpdateCause::Check),
            // No room to track the meter: the origin decides, and the node keeps no grant.
            None => NodeMeter::new(meter.clone(), cx.now_us()).update(cx, UpdateCause::Untracked),
        };
        draft.push(meter.digest, update)
    }

    fn take_due(&mut self, cx: &Context<'_>, draft: &mut CallDraft) {
        let room = self.call_limits.meters_max.saturating_sub(draft.meters.len());
        // Start where the last call ended, so that meters that are soon due again do not displace
        // others.
        let due_from = self.flush.due_from;
        let first = due_from.map_or(Bound::Unbounded, Bound::Included);
        let before_first = due_from.into_iter().flat_map(|first| self.meters.range(..first));
        let in_turn = self.meters.range((first, Bound::Unbounded)).chain(before_first);
        let others = in_turn.filter(|(digest, _)| draft.place(**digest).is_none());
        let urgency = others.map(|(digest, node_meter)| (*digest, node_meter.report_urgency(cx)));
        let urgency: Vec<(Digest, ReportUrgency)> =
            urgency.filter(|(_, urgency)| *urgency > ReportUrgency::None).take(room + 1).collect();
        // A call that is sent anyway, or would be full, carries all reports.
        let is_urgent = urgency.iter().any(|(_, urgency)| *urgency == ReportUrgency::Urgent);
        let is_sent = is_urgent || !draft.meters.is_empty() || urgency.len() > room;
        let due = if is_sent { &urgency[..] } else { &[] };
        for (digest, _) in due.iter().take(room) {
            if let Some(node_meter) = self.meters.get_mut(digest) {
                draft.push(*digest, node_meter.update(cx, UpdateCause::Flush));
            }
        }
        self.flush.due_from = due.get(room).map(|(digest, _)| *digest);
        if self.flush.due_from.is_some() {
            // The rest does not wait for another interval.
            self.flush.at_us = cx.now_us();
        }
    }

    fn send(
        &mut self,
        cx: &mut Context<'_>,
        partition: u16,
        mut draft: CallDraft,
        effects: &mut Vec<Effect>,
    ) {
        self.sequence += 1;
        let call = &mut draft.call;
        (call.node, call.sequence, call.acknowledged) = (cx.node.id, self.sequence, self.acknowledged);
        call.known_us = cx.known_us();
        cx.node.hedges.earn();
        cx.calls_left -= 1;
        cx.node.stats.calls += 1;
        cx.node.stats.updates += draft.meters.len() as u64;
        let in_flight = self.in_flight.insert(InFlightCall::new(draft, cx.now_us(), &cx.settings));
        effects.push(Effect::Call { partition, call: Arc::clone(&in_flight.call), hedge: false });
    }

    /// Processes the reply to the call in flight; ignores any other.
    pub(super) fn on_reply(
        &mut self,
        cx: &mut Context<'_>,
        sequence: u64,
        reply: &CallReply,
        effects: &mut Vec<Effect>,
    ) {
        let Some(in_flight) = self.in_flight.take_if(|call| call.matches(sequence, reply)) else { return };
        (self.acknowledged, self.wake.has_event) = (sequence, true);
        self.clock = Some(RemoteClock::new(reply.now_us, cx.now_us()));
        self.call_limits.relax();
        let latest_sent_us = &mut cx.node.replies.latest_sent_us;
        *latest_sent_us = in_flight.sent_us.max(*latest_sent_us);
        for (digest, meter_reply) in in_flight.meters.iter().zip(&reply.meters) {
            if let Some(node_meter) = self.meters.get_mut(digest) {
                cx.node.stats.lapsed += node_meter.apply_reply(cx, in_flight.sent_us, meter_reply, reply);
                self.flush.at_us = self.flush.at_us.min(cx.flush_with_others_us(node_meter.next_look_us(cx)));
            }
        }
        self.answer_groups(cx, &in_flight, reply, effects);
    }

    /// Answers the requests of a call, and refunds the charges of those that had timed out.
    fn answer_groups(
        &mut self,
        cx: &mut Context<'_>,
        in_flight: &InFlightCall,
        reply: &CallReply,
        effects: &mut Vec<Effect>,
    ) {
        let call = &in_flight.call;
        let mut charged_later = charged_in(call, reply);
        for ((group, checks), check_reply) in in_flight.groups.iter().zip(&call.checks).zip(&reply.checks) {
            let charged_later = &mut charged_later;
            let mut outcome = GroupOutcome { checks, check_reply, call, reply, charged_later };
            let late = group.resolve(&mut outcome, effects);
            cx.node.stats.unanswered += group.undecided(*check_reply);
            for charge in &checks.charges {
                let digest = in_flight.meters.get(usize::from(charge.meter));
                let node_meter = digest.and_then(|digest| self.meters.get_mut(digest));
                if let Some(node_meter) = node_meter.filter(|_| check_reply.passed > 0) {
                    node_meter.note_passed(charge.cost);
                }
                self.refund(cx, digest, u64::from(late) * charge.cost, reply.now_us);
            }
        }
    }

    /// Refunds units that passed for requests that had timed out.
    fn refund(&mut self, cx: &mut Context<'_>, meter: Option<&Digest>, units: u64, charged_us: u64) {
        if units == 0 {
            return;
        }
        match meter.and_then(|digest| self.meters.get_mut(digest)) {
            Some(node_meter) => {
                cx.node.stats.returned += units;
                node_meter.refund(units, Some(charged_us), cx.now_us());
            }
            None => cx.node.stats.dropped += units,
        }
    }

    pub(super) fn on_failure(
        &mut self,
        now: Now,
        sequence: u64,
        failure: CallFailure,
        stats: &mut EngineStats,
        effects: &mut Vec<Effect>,
    ) {
        let Some(in_flight) = self.in_flight.as_mut().filter(|call| call.call.sequence == sequence) else {
            return;
        };
        self.wake.has_event = true;
        match failure {
            CallFailure::Unanswered => in_flight.retry_soon(now.mono_us()),
            // Only a session that was restarted elsewhere has a later call.
            CallFailure::Outdated { sequence } => {
                self.sequence = self.sequence.max(sequence);
                self.end_refused(now, stats, effects);
            }
            CallFailure::Refused => self.end_refused(now, stats, effects),
        }
    }

    /// Ends the call in flight, which is never applied. Its requests are answered, and later calls
    /// repeat its reports.
    fn end_refused(&mut self, now: Now, stats: &mut EngineStats, effects: &mut Vec<Effect>) {
        let Some(in_flight) = self.in_flight.take() else { return };
        stats.refused += 1;
        self.call_limits.tighten(in_flight.meters.len(), in_flight.pause_until_us(now.mono_us()));
        for Waiter { ticket, .. } in in_flight.waiters() {
            leave_unanswered(ticket, stats, effects);
        }
        for (digest, update) in in_flight.meters.iter().zip(&in_flight.call.updates) {
            if let Some(node_meter) = self.meters.get_mut(digest) {
                node_meter.take_again(update);
            }
        }
    }
}

/// Answers a request that the origin did not decide.
fn leave_unanswered(ticket: Ticket, stats: &mut EngineStats, effects: &mut Vec<Effect>) {
    stats.unanswered += 1;
    effects.push(Effect::Answer { ticket, resolution: Resolution::Unanswered });
}

/// Decides a request by the node's memory, if that suffices.
fn decide(cx: &Context<'_>, request: &EngineRequest) -> Option<Resolution> {
    let checks: Vec<Check<'_>> = request.charges.iter().map(Charge::check).collect();
    let verdict = Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::AskOrigin };
    let mut outcomes = [CheckOutcome { verdict, source: DecidingMeter::Own }; LIMITS_PER_REQUEST_MAX];
    let request_verdict = cx.table.check_all(cx.now, &checks, &mut outcomes).ok()?;
    let remaining =
        || outcomes.iter().take(checks.len()).map(|outcome| outcome.verdict.remaining()).collect();
    match request_verdict {
        RequestVerdict::Allowed => Some(Resolution::Allowed { remaining: remaining(), charged_us: None }),
        RequestVerdict::Denied { by } => {
            let retry_us = match outcomes.get(by)?.verdict.retry()? {
                Retry::AskOrigin => return None,
                Retry::After(us) => us,
                Retry::CostAboveBurst | Retry::Blocked => NEVER_US,
            };
            Some(Resolution::Denied { by, remaining: remaining(), retry_us })
        }
    }
}
