//! The check groups of a call in flight, and the answers to their requests.

use super::super::{Effect, Resolution, Ticket};
use crate::origin::{Call, CallReply, CheckGroup, CheckReply, NEVER_US, UNDECIDED};

/// A request of a group. Each has its own deadline, however many the group has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Waiter {
    pub(super) ticket: Ticket,
    pub(super) since_us: u64,
}

/// Equal requests of the call in flight, sent as one check group.
#[derive(Debug)]
pub(super) struct WaitingGroup {
    /// Requests that still wait; `None` for one that has timed out.
    pub(super) waiters: Vec<Option<Waiter>>,
    /// Position of each of their limits in the call.
    pub(super) places: Vec<u16>,
}

impl WaitingGroup {
    /// Returns the number of waiting requests that the origin did not decide.
    pub(super) fn undecided(&self, check_reply: CheckReply) -> u64 {
        let waiting = self.waiters.iter().flatten().count() as u64;
        if check_reply.denied_by == UNDECIDED { waiting.saturating_sub(check_reply.passed.into()) } else { 0 }
    }

    /// Answers the waiting requests. Returns how many requests passed after their timeout.
    pub(super) fn resolve(&self, outcome: &mut GroupOutcome<'_>, effects: &mut Vec<Effect>) -> u32 {
        // Requests that still wait pass first.
        let mut passed = outcome.check_reply.passed;
        for Waiter { ticket, .. } in self.waiters.iter().flatten() {
            if passed > 0 {
                outcome.pass();
            }
            let remaining = outcome.remaining(&self.places);
            let resolution = match passed {
                1.. => Resolution::Allowed { remaining, charged_us: Some(outcome.reply.now_us) },
                0 if outcome.check_reply.denied_by == UNDECIDED => Resolution::Unanswered,
                0 => self.denial(outcome, remaining),
            };
            passed = passed.saturating_sub(1);
            effects.push(Effect::Answer { ticket: *ticket, resolution });
        }
        (0..passed).for_each(|_| outcome.pass());
        passed
    }

    /// Returns the denial of a request. It finds less than its cost, also while other nodes have
    /// unspent grants.
    fn denial(&self, outcome: &GroupOutcome<'_>, mut remaining: Box<[u32]>) -> Resolution {
        let CheckReply { denied_by, retry_us, .. } = *outcome.check_reply;
        let by = self.places.iter().position(|place| *place == denied_by).unwrap_or(0);
        let charge = outcome.checks.charges.iter().find(|charge| charge.meter == denied_by);
        let most = charge.map_or(u64::MAX, |charge| charge.cost.saturating_sub(1));
        if let Some(left) = remaining.get_mut(by) {
            *left = u32::try_from(most).map_or(*left, |most| most.min(*left));
        }
        Resolution::Denied { by, remaining, retry_us: retry_us.min(NEVER_US) }
    }
}

/// The origin's decision about a check group.
pub(super) struct GroupOutcome<'a> {
    pub(super) checks: &'a CheckGroup,
    pub(super) check_reply: &'a CheckReply,
    pub(super) call: &'a Call,
    pub(super) reply: &'a CallReply,
    /// Units that the call charged to each of its meters for requests that have no answer yet.
    pub(super) charged_later: &'a mut [u64],
}

impl GroupOutcome<'_> {
    /// Counts one request as charged: the call charges that much less for later requests.
    fn pass(&mut self) {
        for charge in &self.checks.charges {
            if let Some(units) = self.charged_later.get_mut(usize::from(charge.meter)) {
                *units = units.saturating_sub(charge.cost);
            }
        }
    }

    /// Returns the units left of each limit after a request, in the order of its limits: the units
    /// in the reply, and those that the call charged for later requests.
    fn remaining(&self, places: &[u16]) -> Box<[u32]> {
        let left = |place: &u16| {
            let place = usize::from(*place);
            let (update, meter_reply) = self.call.updates.get(place).zip(self.reply.meters.get(place))?;
            let later = *self.charged_later.get(place)?;
            let left = meter_reply.remaining.saturating_add(later).min(update.terms.burst());
            Some(u32::try_from(left).unwrap_or(u32::MAX))
        };
        places.iter().map(|place| left(place).unwrap_or(0)).collect()
    }
}

/// Returns the units that a call charged to each of its meters for waiting requests.
pub(super) fn charged_in(call: &Call, reply: &CallReply) -> Vec<u64> {
    let mut charged = vec![0u64; call.updates.len()];
    for (checks, check_reply) in call.checks.iter().zip(&reply.checks) {
        for charge in &checks.charges {
            if let Some(units) = charged.get_mut(usize::from(charge.meter)) {
                *units = units.saturating_add(charge.cost.saturating_mul(check_reply.passed.into()));
            }
        }
    }
    charged
}
