//! What was spent already, or is given back, under limits that another region decides: told until it was heard, in time.
//!
//! A charge is told again until it is answered, so it counts at least once: more than once only if one process of the other
//! region took it in, its answer was lost, and another process heard it then. A refund that was sent is not told again: it counts
//! once at most.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::Backoff;
use tidegate_core::origin::RegionId;
use tokio::time::timeout;

use super::forward::{ForwardError, Forwarder};
use super::send::wait;
use crate::forward::{ForwardAction, ForwardDecision, ForwardHandler, ForwardReply, ForwardRequest};

/// What is told at once, to all regions together; more is given up. Higher: more is kept while a region cannot be reached; more
/// memory, up to a key and its limit for each.
pub(super) const DELIVERIES_MAX: usize = 4_096;

/// How often something is told at most. Higher: longer cuts are outlasted; it counts against a later time.
const TRIES_MAX: u32 = 24;

/// How long an answer may take before it is told again. Longer: slower networks; what was lost is told later.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);

/// How long to wait before it is told again, at first and at most: with the tries, some two minutes. Longer: less work while a region is
/// gone; what was spent is known there later when it is back.
const WAIT_MIN: Duration = Duration::from_millis(100);
const WAIT_MAX: Duration = Duration::from_secs(5);

/// How much of what others told is remembered. Higher: what is told again is known for longer to have been heard; more memory,
/// 48 bytes for each.
const DELIVERIES_SEEN_MAX: usize = 16_384;

impl Forwarder {
    /// Tells a region of what was spent, or of what is given back, until it has heard it. False if that was given up, which is
    /// counted.
    pub async fn deliver(&self, region: RegionId, mut forward: ForwardRequest) -> bool {
        let act = forward.act;
        let Some(place) = self.number(region, &mut forward) else { return false };
        let is_told = match self.deliveries.try_acquire() {
            Ok(_permit) => self.deliver_with_retry(place, forward).await,
            Err(_) => false,
        };
        if !is_told {
            self.shared.count(place, |counts| match act {
                ForwardAction::Refund | ForwardAction::RollBack { .. } => counts.refunds_given_up += 1,
                ForwardAction::Charge | ForwardAction::Decide => counts.charges_given_up += 1,
            });
        }
        is_told
    }

    async fn deliver_with_retry(&self, place: usize, forward: ForwardRequest) -> bool {
        let mut backoff = Backoff::new(WAIT_MIN, WAIT_MAX, self.shared.seed.wrapping_add(forward.id));
        for turn in 1..=TRIES_MAX {
            match self.ask_once(place, forward.clone(), ANSWER_TIME_MAX).await {
                Ok(ForwardReply { decision: Some(_), .. }) => return true,
                // Twice would let more pass than the limit says.
                Err(ForwardError::Unknown) if forward.act.gives_back() => return false,
                // Nobody could take it in, it never left, or it may have been lost.
                Ok(ForwardReply { decision: None, .. }) | Err(_) => {}
            }
            if turn < TRIES_MAX {
                wait(backoff.after_failure()).await;
            }
        }
        false
    }

    /// Waits until everything that is being told was heard or given up, or for this long.
    pub async fn settle(&self, time_max: Duration) {
        let all = u32::try_from(DELIVERIES_MAX).unwrap_or(u32::MAX);
        let _ = timeout(time_max, self.deliveries.acquire_many(all)).await;
    }
}

/// Who tells something. The process is what it calls itself, and only its region was shown to be what it says: so what one region tells
/// is never taken for what another told.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SenderId {
    /// The region: its place among the peers.
    pub(super) place: usize,
    /// The process.
    pub(super) incarnation: u64,
}

/// What others told, so that it is taken in once.
#[derive(Default)]
pub(super) struct DeliveryLog(Mutex<SeenDeliveries>);

#[derive(Default)]
struct SeenDeliveries {
    /// By who told it and its number.
    all: HashSet<(SenderId, u64)>,
    /// In the order in which they are forgotten.
    order: VecDeque<(SenderId, u64)>,
}

impl DeliveryLog {
    fn remembered(&self) -> MutexGuard<'_, SeenDeliveries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes something in, unless it was: then it is answered alike.
    pub(super) async fn once(
        &self,
        sender: SenderId,
        forward: ForwardRequest,
        forward_handler: &dyn ForwardHandler,
    ) -> ForwardReply {
        let (id, limits) = (forward.id, forward.checks.len());
        if !self.remembered().begin((sender, id)) {
            let decision = ForwardDecision { remaining: vec![0; limits], denied: None };
            return ForwardReply { id, decision: Some(decision) };
        }
        let answer = forward_handler.answer(forward).await;
        if answer.decision.is_none() {
            // It was not taken in: it may be told again.
            self.remembered().forget((sender, id));
        }
        answer
    }
}

impl SeenDeliveries {
    /// Whether it is told for the first time, as far as that is remembered.
    fn begin(&mut self, what: (SenderId, u64)) -> bool {
        if !self.all.insert(what) {
            return false;
        }
        self.order.push_back(what);
        if self.order.len() > DELIVERIES_SEEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
        true
    }

    /// Forgets something whole: what is told again later would otherwise be forgotten with what was told before.
    fn forget(&mut self, what: (SenderId, u64)) {
        self.all.remove(&what);
        // It came of late.
        if let Some(at) = self.order.iter().rposition(|known| *known == what) {
            self.order.remove(at);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process of the first region.
    fn of(incarnation: u64) -> SenderId {
        SenderId { place: 0, incarnation }
    }

    #[test]
    fn what_is_remembered_is_bounded_and_the_oldest_is_forgotten() {
        let mut remembered = SeenDeliveries::default();
        let most = DELIVERIES_SEEN_MAX as u64;
        assert!((0..most).all(|id| remembered.begin((of(1), id))));
        assert!(!remembered.begin((of(1), 0)) && remembered.begin((of(2), 0)), "by who told it");
        let elsewhere = SenderId { place: 1, ..of(1) };
        assert!(remembered.begin((elsewhere, DELIVERIES_SEEN_MAX as u64 - 1)), "and of which region that is");
        assert!(remembered.begin((of(1), 0)), "the oldest made room");
        assert_eq!(
            (remembered.all.len(), remembered.order.len()),
            (DELIVERIES_SEEN_MAX, DELIVERIES_SEEN_MAX)
        );
    }

    #[test]
    fn what_was_told_again_because_it_was_not_taken_in_is_remembered_as_long_as_everything_else() {
        let mut remembered = SeenDeliveries::default();
        assert!(remembered.begin((of(1), 7)));
        remembered.forget((of(1), 7));
        assert!((0..1_000).all(|id| remembered.begin((of(2), id))));
        assert!(remembered.begin((of(1), 7)), "told again");
        let rest = DELIVERIES_SEEN_MAX as u64 - 1;
        assert!((0..rest).all(|id| remembered.begin((of(3), id))));
        assert!(!remembered.begin((of(1), 7)), "nothing is older than what is the oldest");
        assert!(remembered.begin((of(4), 0)) && remembered.begin((of(1), 7)), "and then it is its turn");
    }
}
