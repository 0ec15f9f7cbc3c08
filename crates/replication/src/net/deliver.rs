//! Delivery of charges and refunds under limits that another region owns, with a bounded number of
//! retries.
//!
//! A charge is retried until it is acknowledged, so it counts at least once. It counts twice if one
//! node of the owner region applies it, the reply is lost, and the retry reaches another node. A
//! refund is retried only while it is certain that it was not applied, so it counts at most once.

use std::collections::{HashSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::Backoff;
use tidegate_core::origin::RegionId;
use tokio::time::timeout;

use super::forward::{ForwardError, Forwarder};
use super::send::wait;
use crate::forward::{ForwardAction, ForwardDecision, ForwardHandler, ForwardReply, ForwardRequest};

/// Maximum deliveries in progress to all regions together; further ones are given up. Higher: fewer
/// are lost while a region is unreachable; more memory, up to a key and its limit for each.
pub(super) const DELIVERIES_MAX: usize = 4_096;

/// Maximum attempts of one delivery. Higher: it outlasts longer network partitions, but counts at a
/// later time.
const TRIES_MAX: u32 = 24;

/// Reply timeout of one attempt. Longer: slower networks work; a lost delivery is retried later.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(2);

/// First and longest wait before a retry: with all attempts, about two minutes. Longer: less work
/// while a region is unreachable; it learns of the usage later after it returns.
const WAIT_MIN: Duration = Duration::from_millis(100);
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Number of received deliveries to remember. Higher: a repeated delivery is recognized for longer;
/// more memory, 48 bytes for each.
const DELIVERIES_SEEN_MAX: usize = 16_384;

impl Forwarder {
    /// Sends a charge or a refund to a region until it is acknowledged. Returns false if the
    /// delivery is given up, which is counted.
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
                // A second refund would admit more than the limit.
                Err(ForwardError::Unknown) if forward.act.gives_back() => return false,
                // The owner could not apply it, it was not sent, or it is a charge that may be
                // lost.
                Ok(ForwardReply { decision: None, .. }) | Err(_) => {}
            }
            if turn < TRIES_MAX {
                wait(backoff.after_failure()).await;
            }
        }
        false
    }

    /// Waits until every delivery is acknowledged or given up, for at most `time_max`.
    pub async fn settle(&self, time_max: Duration) {
        let all = u32::try_from(DELIVERIES_MAX).unwrap_or(u32::MAX);
        let _ = timeout(time_max, self.deliveries.acquire_many(all)).await;
    }
}

/// Sender of a delivery. The node's `incarnation` is its own claim; only its region is
/// authenticated. With both in the id, one region's delivery is never mistaken for another's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SenderId {
    /// The region: its place among the peers.
    pub(super) place: usize,
    /// The process.
    pub(super) incarnation: u64,
}

/// Deliveries received from other regions, so that each is applied once.
#[derive(Default)]
pub(super) struct DeliveryLog(Mutex<SeenDeliveries>);

#[derive(Default)]
struct SeenDeliveries {
    /// By sender and number.
    all: HashSet<(SenderId, u64)>,
    /// In the order in which they are forgotten.
    order: VecDeque<(SenderId, u64)>,
}

impl DeliveryLog {
    fn remembered(&self) -> MutexGuard<'_, SeenDeliveries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a delivery, unless it was received before. The reply to a repetition is positive
    /// too.
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
            // It was not applied, so a retry must be accepted.
            self.remembered().forget((sender, id));
        }
        answer
    }
}

impl SeenDeliveries {
    /// Records a delivery. Returns whether the delivery log does not have it yet.
    fn begin(&mut self, delivery: (SenderId, u64)) -> bool {
        if !self.all.insert(delivery) {
            return false;
        }
        self.order.push_back(delivery);
        if self.order.len() > DELIVERIES_SEEN_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.all.remove(&oldest);
        }
        true
    }

    /// Removes a delivery from the set and from the order. A leftover entry in the order would
    /// evict its retry too early.
    fn forget(&mut self, delivery: (SenderId, u64)) {
        self.all.remove(&delivery);
        // It came of late.
        if let Some(at) = self.order.iter().rposition(|known| *known == delivery) {
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
    fn seen_deliveries_are_bounded_and_the_oldest_is_evicted() {
        let mut remembered = SeenDeliveries::default();
        let most = DELIVERIES_SEEN_MAX as u64;
        assert!((0..most).all(|id| remembered.begin((of(1), id))));
        assert!(
            !remembered.begin((of(1), 0)) && remembered.begin((of(2), 0)),
            "deliveries are identified by their sender"
        );
        let elsewhere = SenderId { place: 1, ..of(1) };
        assert!(
            remembered.begin((elsewhere, DELIVERIES_SEEN_MAX as u64 - 1)),
            "deliveries are identified by the region of their sender"
        );
        assert!(remembered.begin((of(1), 0)), "the oldest delivery was evicted");
        assert_eq!(
            (remembered.all.len(), remembered.order.len()),
            (DELIVERIES_SEEN_MAX, DELIVERIES_SEEN_MAX)
        );
    }

    #[test]
    fn retried_delivery_is_remembered_as_long_as_others() {
        let mut remembered = SeenDeliveries::default();
        assert!(remembered.begin((of(1), 7)));
        remembered.forget((of(1), 7));
        assert!((0..1_000).all(|id| remembered.begin((of(2), id))));
        assert!(remembered.begin((of(1), 7)), "a forgotten delivery is accepted again");
        let rest = DELIVERIES_SEEN_MAX as u64 - 1;
        assert!((0..rest).all(|id| remembered.begin((of(3), id))));
        assert!(!remembered.begin((of(1), 7)), "the repeated delivery counts as new and is not evicted yet");
        assert!(remembered.begin((of(4), 0)) && remembered.begin((of(1), 7)), "the next delivery evicts it");
    }
}
