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

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use super::node_meter::{ChargeTime, NodeMeter, ReportUrgency, UpdateCause};
use super::{
    CallFailure, Charge, Context, Effect, EngineRequest, EngineSettings, EngineStats, MeterRef, Resolution,
    STORE_UNKNOWN, Ticket,
};
use crate::digest::Digest;
use crate::origin::{
    self, Call, CallReply, CheckGroup, NEVER_US, SESSION_RETENTION_US, UNDECIDED, UPDATES_PER_CALL_MAX,
};
use crate::remote_clock::RemoteClock;
use crate::table::{self, CheckOutcome, DecidingMeter, LIMITS_PER_REQUEST_MAX, RequestVerdict, Table};
use crate::time::Now;
use crate::verdict::{Retry, Verdict};

/// Largest number of meters in a call, unless a single request has more. Higher: fewer calls;
/// longer waits behind a call, because Redis takes about 76 µs for a call and 25 µs for each
/// further meter.
const METERS_PER_CALL_MAX: usize = 64;

/// Deadlines after which a call counts as overdue although no poll has looked for its reply. The
/// driver may pause for a shorter time; no request should wait for a longer pause.
const UNREAD_DEADLINES: u64 = 2;

/// A request that waits for the next call.
#[derive(Debug)]
struct WaitingRequest {
    request: EngineRequest,
    since_us: u64,
}

/// Equal requests of the call in flight, sent as one check group.
#[derive(Debug)]
struct WaitingGroup {
    /// Requests that still wait; `None` for one that has timed out.
    waiters: Vec<Option<Waiter>>,
    /// Where each of their limits is in the call.
    places: Vec<u16>,
}

/// A request of a group. Each has its own deadline, however many the group has.
#[derive(Clone, Copy, Debug)]
struct Waiter {
    ticket: Ticket,
    since_us: u64,
}

/// The call that is under way.
#[derive(Debug)]
struct InFlightCall {
    call: Arc<Call>,
    meters: Vec<Digest>,
    groups: Vec<WaitingGroup>,
    sent_us: u64,
    /// Whether a poll after the deadline found no reply. Time alone does not show this: the driver
    /// may not have run meanwhile, and not have read the reply.
    overdue: bool,
    hedged: bool,
    retried: bool,
    retry_at_us: u64,
    retry_us: u64,
}

/// The session of a node with one partition.
#[derive(Debug)]
pub(super) struct Session {
    sequence: u64,
    acknowledged: u64,
    /// The origin's clock in its last reply; `None` before the first.
    clock: Option<RemoteClock>,
    flush_at_us: u64,
    meters: BTreeMap<Digest, NodeMeter>,
    waiting: Vec<WaitingRequest>,
    in_flight: Option<InFlightCall>,
    /// The first meter that was due and had no room in the last call.
    due_from: Option<Digest>,
    /// The most meters in its next call: fewer than others have after one that was refused.
    meters_max: usize,
    /// Until when the session sends only waiting requests, after a call that was refused.
    rests_until_us: u64,
    /// When the session has work again if no event comes before.
    wake_us: Option<u64>,
    /// Whether an event has come since.
    is_stirred: bool,
    /// Whether a call was due while too many calls were in flight.
    held_up: bool,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            sequence: 0,
            acknowledged: 0,
            clock: None,
            flush_at_us: 0,
            meters: BTreeMap::new(),
            waiting: Vec::new(),
            in_flight: None,
            due_from: None,
            meters_max: METERS_PER_CALL_MAX,
            rests_until_us: 0,
            wake_us: None,
            is_stirred: false,
            held_up: false,
        }
    }
}

impl Session {
    /// Whether the session may have work.
    pub(super) fn is_awake(&self, now: Now, closing: bool) -> bool {
        self.is_stirred || closing || self.wake_us.is_some_and(|wake_us| wake_us <= now.mono_us())
    }

    /// Returns when the session has work again if no event comes before.
    pub(super) fn wake_us(&self) -> Option<u64> {
        self.wake_us
    }

    /// Accepts a request. Returns the number of newly tracked meters.
    pub(super) fn wait(&mut self, now: Now, request: EngineRequest, room: usize) -> usize {
        let before = self.meters.len();
        for Charge { meter, cost } in &request.charges {
            if let Some(tracked) = self.track(now, meter, before + room) {
                tracked.note_demand(*cost, now.mono_us());
            }
        }
        self.waiting.push(WaitingRequest { request, since_us: now.mono_us() });
        self.is_stirred = true;
        self.meters.len() - before
    }

    /// Returns the number of tracked meters.
    pub(super) fn tracked(&self) -> usize {
        self.meters.len()
    }

    /// Returns the tracked state of a meter; creates it if there is room for more.
    pub(super) fn track(&mut self, now: Now, meter: &MeterRef, most: usize) -> Option<&mut NodeMeter> {
        if !self.meters.contains_key(&meter.digest) {
            if self.meters.len() >= most {
                return None;
            }
            self.meters.insert(meter.digest, NodeMeter::new(meter.clone(), now.mono_us()));
        }
        self.is_stirred = true;
        let tracked = self.meters.get_mut(&meter.digest)?;
        tracked.adopt(meter);
        Some(tracked)
    }

    /// Returns the origin's clock at a moment of the node's clock, or earlier. `None` before the first reply. Every shard of a cluster has its own
    /// clock, so the session keeps this.
    pub(super) fn origin_us(&self, mono_us: u64) -> Option<u64> {
        self.clock.map(|clock| clock.at_or_before_us(mono_us))
    }

    /// When the last reply arrived; 0 before the first.
    fn answered_us(&self) -> u64 {
        self.clock.map_or(0, |clock| clock.arrived_us())
    }

    /// Takes back usage of a grant, or usage admitted without the origin, no earlier than
    /// `since_us`, if it is certainly not reported. Returns the rest of the cost.
    pub(super) fn take_unreported(&mut self, now: Now, table: &Table, charge: &Charge, since_us: u64) -> u64 {
        let Some(tracked) = self.meters.get_mut(&charge.meter.digest) else { return charge.cost };
        if tracked.was_reported_since(since_us) {
            return charge.cost;
        }
        tracked.forgive(table.give_back(now, &charge.ask()))
    }

    pub(super) fn left(&self, now: Now, digest: Digest) -> Option<u64> {
        self.meters.get(&digest)?.left(now.mono_us())
    }

    pub(super) fn is_idle(&self) -> bool {
        self.in_flight.is_none() && self.waiting.is_empty() && self.meters.is_empty()
    }

    /// Returns when the call in flight was sent, if its reply is overdue.
    pub(super) fn overdue_since(&self, now: Now, settings: &EngineSettings) -> Option<u64> {
        let is_overdue = |call: &&InFlightCall| {
            call.overdue || now.mono_us() >= call.sent_us + UNREAD_DEADLINES * settings.deadline_us
        };
        self.in_flight.as_ref().filter(is_overdue).map(|call| call.sent_us)
    }

    pub(super) fn is_stalled(&self, now: Now, settings: &EngineSettings) -> bool {
        self.overdue_since(now, settings).is_some()
    }

    /// Does the work that is due. Returns the number of evicted meters.
    pub(super) fn poll(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) -> usize {
        self.held_up = false;
        if let Some(call) = &mut self.in_flight {
            call.overdue |= cx.now_us() >= call.sent_us + cx.settings.deadline_us;
        }
        self.give_up(cx, effects);
        self.begin_anew(cx);
        self.repeat(cx, partition, effects);
        let before = self.meters.len();
        if self.in_flight.is_none() {
            self.send_due(cx, partition, effects);
        }
        // A held-up session gets another look at the next reply, whenever that comes.
        (self.wake_us, self.is_stirred) = (self.next_us(cx.settings), self.held_up);
        before - self.meters.len()
    }

    /// Whether a call was due while too many calls were in flight.
    pub(super) fn is_held_up(&self) -> bool {
        self.held_up
    }

    /// Whether someone waits for its next call.
    pub(super) fn is_waited_for(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns when the call in flight stops counting against `calls_max`: it is late, and its
    /// store may be gone.
    pub(super) fn late_us(&self, settings: &EngineSettings) -> Option<u64> {
        self.in_flight.as_ref().map(|call| call.sent_us + settings.retry_us)
    }

    fn next_us(&self, settings: &EngineSettings) -> Option<u64> {
        let is_quiet = self.in_flight.is_none() && !self.held_up;
        let flush =
            (is_quiet && !self.meters.is_empty()).then_some(self.flush_at_us.max(self.rests_until_us));
        let waiting = self.waiting.iter().map(|waiting| waiting.since_us + settings.deadline_us).min();
        let call = self.in_flight.as_ref().map(|call| call.wake_us(settings));
        [flush, waiting, call].into_iter().flatten().min()
    }

    /// Whether the origin may have dropped this session, or soon will: it has not replied for long.
    fn may_be_forgotten(&self, cx: &Context<'_>) -> bool {
        cx.now_us() > self.answered_us() + SESSION_RETENTION_US / 2
    }

    /// Restarts the session after a long time without a reply. An origin drops idle sessions, and a
    /// dropped session must not look like lost writes. Earlier refunds are dropped too, because
    /// their charges may be gone.
    fn begin_anew(&mut self, cx: &Context<'_>) {
        if !self.may_be_forgotten(cx) {
            return;
        }
        self.acknowledged = 0;
        // Before its first reply, the origin has no session to drop.
        if self.clock.is_some() {
            self.meters.values_mut().for_each(NodeMeter::forget_refund);
        }
    }

    /// Answers requests at their deadline as unanswered.
    fn give_up(&mut self, cx: &mut Context<'_>, effects: &mut Vec<Effect>) {
        let latest_us = cx.now_us().saturating_sub(cx.settings.deadline_us);
        let mut unanswered = |ticket: Ticket| {
            cx.stats.unanswered += 1;
            effects.push(Effect::Answer { ticket, resolution: Resolution::Unanswered });
        };
        self.waiting.retain(|waiting| {
            let waits = waiting.since_us > latest_us;
            if !waits {
                unanswered(waiting.request.ticket);
            }
            waits
        });
        let groups = self.in_flight.iter_mut().flat_map(|call| &mut call.groups);
        for waiter in groups.flat_map(|groups| &mut groups.waiters) {
            if let Some(given_up) = waiter.take_if(|waiter| waiter.since_us <= latest_us) {
                unanswered(given_up.ticket);
            }
        }
    }

    /// Sends the call under way again: once for the tail, then now and then.
    fn repeat(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) {
        let begins_anew = self.may_be_forgotten(cx) && self.clock.is_some();
        let Some(in_flight) = &mut self.in_flight else { return };
        let now_us = cx.now_us();
        let late = now_us >= in_flight.hedge_at_us(cx.settings);
        let hedge = late && cx.hedges.spend();
        // One that may not be made twice is not looked at again for that.
        in_flight.hedged |= late;
        if !hedge && now_us < in_flight.retry_at_us {
            return;
        }
        if now_us >= in_flight.retry_at_us {
            in_flight.retry_us = (in_flight.retry_us * 2).min(cx.settings.retry_us_max);
            in_flight.retry_at_us = now_us + in_flight.retry_us;
            // If no call sent later has a reply, this call may just be slow, like all others.
            let is_slow = cx.answered_sent_us <= in_flight.sent_us;
            let is_first = !std::mem::replace(&mut in_flight.retried, true);
            if is_slow && is_first && !hedge && !cx.hedges.spend() {
                in_flight.retry_at_us = now_us + cx.settings.retry_us_max;
                return;
            }
        }
        if begins_anew {
            in_flight.begin_anew(cx.known_us());
        }
        cx.stats.repeats += 1;
        effects.push(Effect::Call { partition, call: Arc::clone(&in_flight.call), hedge });
    }

    /// Sends a call if one is due.
    fn send_due(&mut self, cx: &mut Context<'_>, partition: u16, effects: &mut Vec<Effect>) {
        self.decide_here(cx, effects);
        let is_due = cx.now_us() >= self.flush_at_us || cx.closing;
        let is_flush = is_due && cx.now_us() >= self.rests_until_us;
        let is_time = !self.waiting.is_empty() || is_flush;
        self.held_up = is_time && cx.calls_left == 0;
        if !is_time || self.held_up {
            return;
        }
        let mut draft = CallDraft::default();
        self.take_waiting(cx, &mut draft);
        if is_flush {
            self.meters.retain(|_, tracked| !tracked.is_over(cx));
            let next_us = self.meters.values().map(|tracked| tracked.next_look_us(cx)).min();
            self.flush_at_us = cx.flush_with_others_us(next_us.unwrap_or(cx.now_us() + cx.settings.flush_us));
        }
        self.take_due(cx, &mut draft);
        if draft.call.updates.is_empty() {
            return;
        }
        self.send(cx, partition, draft, effects);
    }

    /// Decides waiting requests by a grant that came meanwhile.
    fn decide_here(&mut self, cx: &mut Context<'_>, effects: &mut Vec<Effect>) {
        let meters = &mut self.meters;
        self.waiting.retain(|waiting| match decide(cx, &waiting.request) {
            Some(resolution) => {
                for Charge { meter, cost } in &waiting.request.charges {
                    meters
                        .get_mut(&meter.digest)
                        .into_iter()
                        .for_each(|tracked| tracked.note_answered(*cost));
                }
                effects.push(Effect::Answer { ticket: waiting.request.ticket, resolution });
                false
            }
            None => true,
        });
    }

    fn take_waiting(&mut self, cx: &Context<'_>, draft: &mut CallDraft) {
        let mut waiting = std::mem::take(&mut self.waiting).into_iter();
        for next in waiting.by_ref() {
            if !draft.has_room_for(&next.request, self.meters_max) {
                self.waiting.push(next);
                break;
            }
            let charges = next.request.charges.iter();
            let places = charges.map(|charge| self.place(cx, &charge.meter, draft)).collect();
            draft.add_check(next, places);
        }
        self.waiting.extend(waiting);
    }

    /// The place of a meter in the call.
    fn place(&mut self, cx: &Context<'_>, meter: &MeterRef, draft: &mut CallDraft) -> u16 {
        if let Some(place) = draft.places.get(&meter.digest) {
            return *place;
        }
        let update = match self.meters.get_mut(&meter.digest) {
            Some(tracked) => tracked.update(cx, UpdateCause::Check),
            // No room to track the meter: the origin decides, and the node keeps no grant.
            None => NodeMeter::new(meter.clone(), cx.now_us()).update(cx, UpdateCause::Untracked),
        };
        draft.push(meter.digest, update)
    }

    fn take_due(&mut self, cx: &Context<'_>, draft: &mut CallDraft) {
        let room = self.meters_max.saturating_sub(draft.meters.len());
        // Start where the last call ended, so that meters that are soon due again do not displace
        // others.
        let first = self.due_from.map_or(Bound::Unbounded, Bound::Included);
        let passed_by = self.due_from.into_iter().flat_map(|first| self.meters.range(..first));
        let in_turn = self.meters.range((first, Bound::Unbounded)).chain(passed_by);
        let others = in_turn.filter(|(digest, _)| !draft.places.contains_key(digest));
        let urgency = others.map(|(digest, tracked)| (*digest, tracked.report_urgency(cx)));
        let urgency: Vec<(Digest, ReportUrgency)> =
            urgency.filter(|(_, urgency)| *urgency > ReportUrgency::None).take(room + 1).collect();
        // A call that is sent anyway, or would be full, carries all reports.
        let is_urgent = urgency.iter().any(|(_, urgency)| *urgency == ReportUrgency::Urgent);
        let is_called_for = is_urgent || !draft.meters.is_empty() || urgency.len() > room;
        let due: Vec<Digest> =
            if is_called_for { urgency.into_iter().map(|(digest, _)| digest).collect() } else { Vec::new() };
        for digest in due.iter().take(room) {
            if let Some(tracked) = self.meters.get_mut(digest) {
                let update = tracked.update(cx, UpdateCause::Flush);
                draft.push(*digest, update);
            }
        }
        self.due_from = due.get(room).copied();
        if self.due_from.is_some() {
            // The rest does not wait for another interval.
            self.flush_at_us = cx.now_us();
        }
    }

    fn send(&mut self, cx: &mut Context<'_>, partition: u16, draft: CallDraft, effects: &mut Vec<Effect>) {
        self.sequence += 1;
        let CallDraft { mut call, meters, groups, .. } = draft;
        (call.node, call.sequence, call.acknowledged) = (cx.node, self.sequence, self.acknowledged);
        call.known_us = cx.known_us();
        cx.hedges.earn();
        cx.calls_left -= 1;
        cx.stats.calls += 1;
        cx.stats.updates += meters.len() as u64;
        let (call, sent_us) = (Arc::new(call), cx.now_us());
        effects.push(Effect::Call { partition, call: Arc::clone(&call), hedge: false });
        let retry_us = cx.settings.retry_us;
        let retry_at_us = sent_us + retry_us;
        self.in_flight = Some(InFlightCall {
            call,
            meters,
            groups,
            sent_us,
            overdue: false,
            hedged: false,
            retried: false,
            retry_at_us,
            retry_us,
        });
    }

    /// Processes the reply to the call in flight; ignores any other.
    pub(super) fn on_reply(
        &mut self,
        cx: &mut Context<'_>,
        sequence: u64,
        reply: &CallReply,
        effects: &mut Vec<Effect>,
    ) {
        let Some(in_flight) = self.in_flight.take_if(|call| call.fits(sequence, reply)) else { return };
        (self.acknowledged, self.is_stirred) = (sequence, true);
        self.clock = Some(RemoteClock::new(reply.now_us, cx.now_us()));
        self.meters_max = (self.meters_max * 2).min(METERS_PER_CALL_MAX);
        cx.answered_sent_us = cx.answered_sent_us.max(in_flight.sent_us);
        for (digest, meter_reply) in in_flight.meters.iter().zip(&reply.meters) {
            if let Some(tracked) = self.meters.get_mut(digest) {
                cx.stats.lapsed += tracked.apply_reply(cx, in_flight.sent_us, meter_reply, reply);
                self.flush_at_us = self.flush_at_us.min(cx.flush_with_others_us(tracked.next_look_us(cx)));
            }
        }
        let mut later = charged_in(&in_flight.call, reply);
        for ((groups, ask), decided) in in_flight.groups.iter().zip(&in_flight.call.checks).zip(&reply.checks)
        {
            let outcome = GroupOutcome { ask, decided, reply, call: &in_flight.call };
            let returned = groups.resolve(&outcome, &mut later, effects);
            cx.stats.unanswered += groups.undecided(*decided);
            for charge in &ask.charges {
                let digest = in_flight.meters.get(usize::from(charge.meter));
                self.take_back(cx, digest, u64::from(returned) * charge.cost, reply.now_us);
            }
        }
    }

    /// Refunds units that passed for requests that had stopped waiting.
    fn take_back(&mut self, cx: &mut Context<'_>, meter: Option<&Digest>, units: u64, charged_us: u64) {
        if units == 0 {
            return;
        }
        match meter.and_then(|digest| self.meters.get_mut(digest)) {
            Some(tracked) => {
                cx.stats.returned += units;
                tracked.note_refund(units, ChargeTime::charged(Some(charged_us), tracked), cx.now_us());
            }
            None => cx.stats.dropped += units,
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
        self.is_stirred = true;
        match failure {
            // An attempt that failed at once is made again soon, but not at once: the other end has
            // enough to do.
            CallFailure::Unanswered => {
                in_flight.retried = true;
                in_flight.retry_at_us = in_flight.retry_at_us.min(now.mono_us() + in_flight.retry_us / 2);
            }
            // Only a session that was restarted elsewhere has a later call.
            CallFailure::Outdated { sequence } => {
                self.sequence = self.sequence.max(sequence);
                self.end_refused(now, stats, effects);
            }
            CallFailure::Refused => self.end_refused(now, stats, effects),
        }
    }

    /// Ends the call in flight, which is never applied. Its requests are answered, and later calls
    /// repeat its reports with fewer meters each, so that a faulty meter does not block the others
    /// for long.
    fn end_refused(&mut self, now: Now, stats: &mut EngineStats, effects: &mut Vec<Effect>) {
        let Some(in_flight) = self.in_flight.take() else { return };
        stats.refused += 1;
        self.meters_max = (in_flight.meters.len() / 2).max(1);
        self.rests_until_us = now.mono_us() + in_flight.retry_us / 2;
        for Waiter { ticket, .. } in in_flight.waiters() {
            stats.unanswered += 1;
            effects.push(Effect::Answer { ticket, resolution: Resolution::Unanswered });
        }
        for (digest, update) in in_flight.meters.iter().zip(&in_flight.call.updates) {
            if let Some(tracked) = self.meters.get_mut(digest) {
                tracked.take_again(update);
            }
        }
    }
}

impl InFlightCall {
    fn wake_us(&self, settings: &EngineSettings) -> u64 {
        let waits_until_us = self.waiters().map(|waiter| waiter.since_us + settings.deadline_us).min();
        let overdue_us = (!self.overdue).then_some(self.sent_us + settings.deadline_us);
        let others = [waits_until_us, overdue_us].into_iter().flatten();
        others.fold(self.hedge_at_us(settings).min(self.retry_at_us), u64::min)
    }

    /// Makes this the first call of a session that the origin may have dropped. Then only the age
    /// of the store can show that it was emptied. If the origin has applied the call and dropped
    /// the session since, it applies the call twice: the usage counts twice, and the refund,
    /// removed here, does not.
    fn begin_anew(&mut self, known_us: u64) {
        let call = Arc::make_mut(&mut self.call);
        (call.acknowledged, call.known_us) = (0, known_us);
        call.updates.iter_mut().for_each(|update| (update.refund, update.refund_of_us) = (0, 0));
    }

    /// Returns the requests that still wait.
    fn waiters(&self) -> impl Iterator<Item = Waiter> {
        self.groups.iter().flat_map(|groups| groups.waiters.iter().flatten().copied())
    }

    /// Returns when the call is late for a waiting request.
    fn hedge_at_us(&self, settings: &EngineSettings) -> u64 {
        let is_waited_for = !self.hedged && self.waiters().next().is_some();
        if is_waited_for { self.sent_us + settings.hedge_us } else { u64::MAX }
    }

    /// Whether this is the complete reply to this call.
    fn fits(&self, sequence: u64, reply: &CallReply) -> bool {
        self.call.sequence == sequence
            && reply.meters.len() == self.meters.len()
            && reply.checks.len() == self.groups.len()
    }
}

impl WaitingGroup {
    /// Returns the number of waiting requests that the origin did not decide.
    fn undecided(&self, decided: origin::CheckReply) -> u64 {
        let waiting = self.waiters.iter().flatten().count() as u64;
        if decided.denied_by == UNDECIDED { waiting.saturating_sub(decided.passed.into()) } else { 0 }
    }

    /// Answers the waiting requests. Returns how many passed that had stopped waiting.
    fn resolve(&self, outcome: &GroupOutcome<'_>, later: &mut [u64], effects: &mut Vec<Effect>) -> u32 {
        let GroupOutcome { ask, decided, reply, .. } = *outcome;
        let by = self.places.iter().position(|place| *place == decided.denied_by).unwrap_or(0);
        let retry_us = decided.retry_us.min(NEVER_US);
        // Requests that still wait pass first.
        let mut passed = decided.passed;
        for Waiter { ticket, .. } in self.waiters.iter().flatten() {
            if passed > 0 {
                outcome.pass(later);
            }
            let mut remaining = outcome.remaining(&self.places, later);
            let resolution = match passed {
                1.. => Resolution::Allowed { remaining, charged_us: Some(reply.now_us) },
                0 if decided.denied_by == UNDECIDED => Resolution::Unanswered,
                0 => {
                    // A denied request finds less than its cost, also while other nodes hold
                    // grants.
                    let cost = ask.charges.iter().find(|charge| charge.meter == decided.denied_by);
                    let most = cost.map_or(u64::MAX, |charge| charge.cost.saturating_sub(1));
                    if let Some(left) = remaining.get_mut(by) {
                        *left = u32::try_from(most).map_or(*left, |most| most.min(*left));
                    }
                    Resolution::Denied { by, remaining, retry_us }
                }
            };
            passed = passed.saturating_sub(1);
            effects.push(Effect::Answer { ticket: *ticket, resolution });
        }
        (0..passed).for_each(|_| outcome.pass(later));
        passed
    }
}

/// The origin's decision about a check group.
struct GroupOutcome<'a> {
    ask: &'a CheckGroup,
    decided: &'a origin::CheckReply,
    call: &'a Call,
    reply: &'a CallReply,
}

impl GroupOutcome<'_> {
    /// Counts one request as charged: the call charges that much less for later requests.
    fn pass(&self, later: &mut [u64]) {
        for charge in &self.ask.charges {
            if let Some(units) = later.get_mut(usize::from(charge.meter)) {
                *units = units.saturating_sub(charge.cost);
            }
        }
    }

    /// Returns the units left of each limit after a request, in the order of its limits: the units
    /// in the reply, and those that the call charged for later requests.
    fn remaining(&self, places: &[u16], later: &[u64]) -> Box<[u32]> {
        let left = |place: &u16| {
            let place = usize::from(*place);
            let (update, meter_reply) = self.call.updates.get(place).zip(self.reply.meters.get(place))?;
            let left = meter_reply.remaining.saturating_add(*later.get(place)?).min(update.terms.burst());
            Some(u32::try_from(left).unwrap_or(u32::MAX))
        };
        places.iter().map(|place| left(place).unwrap_or(0)).collect()
    }
}

/// Units that a call charged to each of its meters for waiting requests.
fn charged_in(call: &Call, reply: &CallReply) -> Vec<u64> {
    let mut charged = vec![0u64; call.updates.len()];
    for (ask, decided) in call.checks.iter().zip(&reply.checks) {
        for charge in &ask.charges {
            if let Some(units) = charged.get_mut(usize::from(charge.meter)) {
                *units = units.saturating_add(charge.cost.saturating_mul(decided.passed.into()));
            }
        }
    }
    charged
}

/// A call that is being put together.
#[derive(Debug)]
struct CallDraft {
    call: Call,
    meters: Vec<Digest>,
    places: BTreeMap<Digest, u16>,
    groups: Vec<WaitingGroup>,
}

impl Default for CallDraft {
    fn default() -> Self {
        let (updates, checks) = (Vec::new(), Vec::new());
        let node = origin::NodeId(0);
        let call =
            Call { node, sequence: 0, acknowledged: 0, known_us: 0, store: STORE_UNKNOWN, updates, checks };
        Self { call, meters: Vec::new(), places: BTreeMap::new(), groups: Vec::new() }
    }
}

impl CallDraft {
    /// Whether the call has room for this request. An origin accepts as many check groups as
    /// meters.
    fn has_room_for(&self, request: &EngineRequest, meters_max: usize) -> bool {
        let is_small = self.meters.len() + request.charges.len() <= meters_max;
        self.meters.is_empty() || is_small && self.call.checks.len() < UPDATES_PER_CALL_MAX
    }

    fn push(&mut self, digest: Digest, update: origin::MeterUpdate) -> u16 {
        // A call has far fewer updates than sixteen bits can name.
        let place = self.call.updates.len() as u16;
        self.call.updates.push(update);
        self.meters.push(digest);
        self.places.insert(digest, place);
        place
    }

    /// Adds a request. Equal requests in sequence form one check group: as many pass as there is
    /// room for.
    fn add_check(&mut self, waiting: WaitingRequest, places: Vec<u16>) {
        let WaitingRequest { request, since_us } = waiting;
        let waiter = Some(Waiter { ticket: request.ticket, since_us });
        let charges = charges_at(&places, &request.charges);
        let last = self.call.checks.last_mut().zip(self.groups.last_mut());
        let is_alike =
            |ask: &CheckGroup, groups: &WaitingGroup| ask.charges == charges && groups.places == places;
        if let Some((ask, groups)) = last.filter(|(ask, groups)| is_alike(ask, groups)) {
            ask.count += 1;
            groups.waiters.push(waiter);
            return;
        }
        self.call.checks.push(CheckGroup { charges, count: 1 });
        self.groups.push(WaitingGroup { waiters: vec![waiter], places });
    }
}

/// Returns the cost of a request at each place of a call. A meter that it names twice is charged
/// both costs, as one.
fn charges_at(places: &[u16], charges: &[Charge]) -> Vec<origin::Charge> {
    let mut at: Vec<origin::Charge> = Vec::with_capacity(places.len());
    for (&meter, &Charge { cost, .. }) in places.iter().zip(charges) {
        match at.iter_mut().find(|earlier| earlier.meter == meter) {
            Some(earlier) => earlier.cost = earlier.cost.saturating_add(cost),
            None => at.push(origin::Charge { meter, cost }),
        }
    }
    at
}

impl Charge {
    /// Returns the check for the table.
    fn ask(&self) -> table::Check<'_> {
        let MeterRef { limit, space, digest, .. } = &self.meter;
        table::Check { limit, space, digest: *digest, cost: self.cost }
    }
}

/// Decides a request by the node's memory, if that suffices.
fn decide(cx: &Context<'_>, request: &EngineRequest) -> Option<Resolution> {
    let checks: Vec<table::Check<'_>> = request.charges.iter().map(Charge::ask).collect();
    let verdict = Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::AskOrigin };
    let mut answers = [CheckOutcome { verdict, source: DecidingMeter::Own }; LIMITS_PER_REQUEST_MAX];
    let decided = cx.table.check_all(cx.now, &checks, &mut answers).ok()?;
    let remaining = || answers.iter().take(checks.len()).map(|answer| answer.verdict.remaining()).collect();
    match decided {
        RequestVerdict::Allowed => Some(Resolution::Allowed { remaining: remaining(), charged_us: None }),
        RequestVerdict::Denied { by } => {
            let retry_us = match answers.get(by)?.verdict.retry()? {
                Retry::AskOrigin => return None,
                Retry::After(us) => us,
                Retry::CostAboveBurst | Retry::Blocked => NEVER_US,
            };
            Some(Resolution::Denied { by, remaining: remaining(), retry_us })
        }
    }
}
