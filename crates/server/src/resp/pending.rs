//! Checks that memory cannot decide. They are sent to the origin all at once, and their replies are
//! inserted in place.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::join_all;
use tidegate::Gate;

use super::client_state::Tally;
use super::record::ThrottleDecision;
use super::reply::{Protocol, Reply};
use super::throttle::{ZeroLimit, answer_with};
use crate::auth::TenantIndex;
use crate::metrics::{DecisionSource, Stopwatch, Surface};
use crate::shared::Shared;

/// A future of replies.
pub(super) type PendingReplies = Pin<Box<dyn Future<Output = Vec<u8>>>>;

/// A question that waits.
#[derive(Debug)]
pub(super) struct PendingCheck {
    /// Position of its reply among the known ones, in bytes.
    place: usize,
    tenant: TenantIndex,
    gate: Gate,
    key: Box<[u8]>,
    cost: u64,
    without_room: Option<ZeroLimit>,
}

impl PendingCheck {
    pub(super) fn new(place: usize, tenant: TenantIndex, gate: &Gate, key: &[u8], cost: u64) -> Self {
        Self { place, tenant, gate: gate.clone(), key: key.into(), cost, without_room: None }
    }

    pub(super) fn without_room(self, without_room: Option<ZeroLimit>) -> Self {
        Self { without_room, ..self }
    }

    /// Returns the reply, whether the check passes, and the decision source.
    async fn answer(&self, shared: &Shared, protocol: Protocol) -> (Vec<u8>, bool, DecisionSource) {
        let question = self.gate.region_check(&self.key).cost(self.cost);
        let mut answer = Vec::new();
        let mut reply = Reply::new(&mut answer, protocol);
        match shared.decider.check(question).await {
            Ok((outcome, source)) => {
                let is_allowed = answer_with(&mut reply, &outcome, self.without_room);
                let Self { tenant, key, cost, .. } = self;
                ThrottleDecision {
                    tenant: *tenant,
                    key,
                    cost: *cost,
                    is_allowed,
                    limit_outcome: outcome,
                    source,
                }
                .record_if_due(shared);
                (answer, is_allowed, source)
            }
            Err(error) => {
                reply.error(format!("ERR {error}").as_bytes());
                (answer, false, DecisionSource::Refused)
            }
        }
    }
}

/// Returns the replies in `known`, with those of `waiting` inserted in place.
pub(super) async fn answered(
    shared: Arc<Shared>,
    protocol: Protocol,
    known: Vec<u8>,
    waiting: Vec<PendingCheck>,
) -> Vec<u8> {
    let started = Stopwatch::start();
    let answers = join_all(waiting.iter().map(|waiting| waiting.answer(&shared, protocol))).await;
    let mut tally = Tally::default();
    let mut whole =
        Vec::with_capacity(known.len() + answers.iter().map(|(bytes, ..)| bytes.len()).sum::<usize>());
    let mut copied = 0;
    for (waiting, (bytes, is_allowed, source)) in waiting.iter().zip(&answers) {
        whole.extend_from_slice(&known[copied..waiting.place]);
        whole.extend_from_slice(bytes);
        copied = waiting.place;
        tally.count(*is_allowed, *source);
    }
    whole.extend_from_slice(&known[copied..]);
    let decisions = tally.flush(&shared.metrics);
    shared.metrics.took(Surface::Resp, started.taken(), decisions);
    whole
}
