//! The call in flight: its waiting requests, and when it is sent again.

use std::sync::Arc;

use super::super::{Context, EngineSettings};
use super::draft::CallDraft;
use super::group::{Waiter, WaitingGroup};
use crate::digest::Digest;
use crate::origin::{Call, CallReply};

/// Deadlines after which a call counts as overdue although no poll has looked for its reply. The
/// driver may pause for a shorter time; no request should wait for a longer pause.
const UNREAD_DEADLINES: u64 = 2;

/// The call that is in flight.
#[derive(Debug)]
pub(super) struct InFlightCall {
    pub(super) call: Arc<Call>,
    pub(super) meters: Vec<Digest>,
    pub(super) groups: Vec<WaitingGroup>,
    pub(super) sent_us: u64,
    /// Whether a poll after the deadline found no reply. Time alone does not show this: the driver
    /// may not have run meanwhile, and not have read the reply.
    is_overdue: bool,
    attempts: Attempts,
}

/// The further attempts of a call.
#[derive(Debug)]
struct Attempts {
    /// Whether a hedge was sent, or was due and exceeded the budget.
    is_hedged: bool,
    is_retried: bool,
    retry_at_us: u64,
    /// Time until the retry after that.
    retry_us: u64,
}

impl InFlightCall {
    pub(super) fn new(draft: CallDraft, sent_us: u64, settings: &EngineSettings) -> Self {
        let retry_us = settings.retry_us;
        let retry_at_us = sent_us + retry_us;
        let attempts = Attempts { is_hedged: false, is_retried: false, retry_at_us, retry_us };
        let CallDraft { call, meters, groups, .. } = draft;
        Self { call: Arc::new(call), meters, groups, sent_us, is_overdue: false, attempts }
    }

    pub(super) fn wake_us(&self, settings: &EngineSettings) -> u64 {
        let waits_until_us = self.waiters().map(|waiter| waiter.since_us + settings.deadline_us).min();
        let overdue_us = (!self.is_overdue).then_some(self.sent_us + settings.deadline_us);
        let others = [waits_until_us, overdue_us].into_iter().flatten();
        others.fold(self.hedge_at_us(settings).min(self.attempts.retry_at_us), u64::min)
    }

    /// Notes that a poll found no reply.
    pub(super) fn note_unread(&mut self, now_us: u64, settings: &EngineSettings) {
        self.is_overdue |= now_us >= self.sent_us + settings.deadline_us;
    }

    pub(super) fn is_overdue(&self, now_us: u64, settings: &EngineSettings) -> bool {
        self.is_overdue || now_us >= self.sent_us + UNREAD_DEADLINES * settings.deadline_us
    }

    /// Returns whether the call is sent again now, and if so, whether as a hedge.
    pub(super) fn next_attempt(&mut self, cx: &mut Context<'_>) -> Option<bool> {
        let now_us = cx.now_us();
        let is_late = now_us >= self.hedge_at_us(&cx.settings);
        let hedge = is_late && cx.node.hedges.spend();
        let attempts = &mut self.attempts;
        attempts.is_hedged |= is_late;
        if now_us >= attempts.retry_at_us {
            attempts.retry_us = (attempts.retry_us * 2).min(cx.settings.retry_us_max);
            attempts.retry_at_us = now_us + attempts.retry_us;
            // If no call sent later has a reply, this call may just be slow, like all others.
            let is_slow = cx.node.replies.latest_sent_us <= self.sent_us;
            let is_first = !std::mem::replace(&mut attempts.is_retried, true);
            if is_slow && is_first && !hedge && !cx.node.hedges.spend() {
                attempts.retry_at_us = now_us + cx.settings.retry_us_max;
                return None;
            }
        } else if !hedge {
            return None;
        }
        Some(hedge)
    }

    /// Retries a failed attempt soon, but not at once: the origin may be overloaded.
    pub(super) fn retry_soon(&mut self, now_us: u64) {
        self.attempts.is_retried = true;
        self.attempts.retry_at_us = self.attempts.retry_at_us.min(self.pause_until_us(now_us));
    }

    /// Returns the end of the pause after an attempt that failed now.
    pub(super) fn pause_until_us(&self, now_us: u64) -> u64 {
        now_us + self.attempts.retry_us / 2
    }

    /// Makes this the first call of a session that the origin may have dropped. Then only the age
    /// of the store can show that it was emptied. If the origin has applied the call and dropped
    /// the session since, it applies the call twice: the usage counts twice, and the refund,
    /// removed here, does not.
    pub(super) fn begin_anew(&mut self, known_us: u64) {
        let call = Arc::make_mut(&mut self.call);
        (call.acknowledged, call.known_us) = (0, known_us);
        call.updates.iter_mut().for_each(|update| (update.refund, update.refund_of_us) = (0, 0));
    }

    /// Returns the requests that still wait.
    pub(super) fn waiters(&self) -> impl Iterator<Item = Waiter> {
        self.groups.iter().flat_map(|group| group.waiters.iter().flatten().copied())
    }

    /// Removes the requests that have waited since `latest_us` or longer.
    pub(super) fn take_expired(&mut self, latest_us: u64) -> impl Iterator<Item = Waiter> {
        let waiters = self.groups.iter_mut().flat_map(|group| &mut group.waiters);
        waiters.filter_map(move |waiter| waiter.take_if(|waiter| waiter.since_us <= latest_us))
    }

    /// Returns when the call is late for a waiting request.
    fn hedge_at_us(&self, settings: &EngineSettings) -> u64 {
        let has_waiters = !self.attempts.is_hedged && self.waiters().next().is_some();
        if has_waiters { self.sent_us + settings.hedge_us } else { u64::MAX }
    }

    /// Whether this is the complete reply to this call.
    pub(super) fn matches(&self, sequence: u64, reply: &CallReply) -> bool {
        self.call.sequence == sequence
            && reply.meters.len() == self.meters.len()
            && reply.checks.len() == self.groups.len()
    }
}
