//! Checks that memory cannot decide. They are sent to the origin all at once, and their replies are
//! inserted in place.

use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::join_all;
use tidegate::{Gate, Outcome};

use super::client_state::context;
use super::reply::{Protocol, Reply};
use super::throttle::{ZeroLimit, write_outcome};
use crate::auth::TenantIndex;
use crate::metrics::{Stopwatch, Surface};
use crate::shared::Shared;

/// A future of replies.
pub(super) type PendingReplies = Pin<Box<dyn Future<Output = Vec<u8>>>>;

/// The reply of a request that was not decided: without it, all later replies would be taken for
/// those of other requests.
const UNDECIDED: &[u8] = b"ERR not decided: send the request again";

/// A reply that waits for the origin.
#[derive(Debug)]
pub(super) struct PendingReply {
    /// Its position among the known ones, in bytes.
    pub(super) place: usize,
    /// `None` if the request is lost: then the reply is an error.
    pub(super) check: Option<PendingCheck>,
}

/// A check that waits for the origin.
#[derive(Debug)]
pub(super) struct PendingCheck {
    tenant: TenantIndex,
    gate: Gate,
    key: Box<[u8]>,
    cost: u64,
    zero_limit: Option<ZeroLimit>,
}

impl PendingCheck {
    pub(super) fn new(tenant: TenantIndex, gate: &Gate, key: &[u8], cost: u64) -> Self {
        Self { tenant, gate: gate.clone(), key: key.into(), cost, zero_limit: None }
    }

    pub(super) fn with_zero_limit(self, zero_limit: Option<ZeroLimit>) -> Self {
        Self { zero_limit, ..self }
    }

    async fn decide(&self, shared: &Shared, reply: &mut Reply<'_>) {
        let check = self.gate.region_check(&self.key).cost(self.cost);
        let answer = |outcome: Option<&Outcome<'_>>| {
            if let Some(outcome) = outcome {
                return write_outcome(reply, outcome, self.zero_limit);
            }
            reply.error(UNDECIDED);
            false
        };
        context(shared, self.tenant).resume().decide_later(&self.key, &check, answer).await;
    }
}

impl PendingReply {
    async fn write(&self, shared: &Shared, protocol: Protocol) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut reply = Reply::new(&mut bytes, protocol);
        match &self.check {
            Some(check) => check.decide(shared, &mut reply).await,
            None => reply.error(UNDECIDED),
        }
        bytes
    }
}

/// Returns the replies in `known`, with those of `waiting` inserted in place.
pub(super) async fn all_replies(
    shared: Arc<Shared>,
    protocol: Protocol,
    known: Vec<u8>,
    waiting: Vec<PendingReply>,
) -> Vec<u8> {
    let started = Stopwatch::start();
    let replies = join_all(waiting.iter().map(|waiting| waiting.write(&shared, protocol))).await;
    let mut whole = Vec::with_capacity(known.len() + replies.iter().map(Vec::len).sum::<usize>());
    let mut copied = 0;
    for (waiting, reply) in waiting.iter().zip(&replies) {
        whole.extend_from_slice(&known[copied..waiting.place]);
        whole.extend_from_slice(reply);
        copied = waiting.place;
    }
    whole.extend_from_slice(&known[copied..]);
    let decisions = u64::try_from(waiting.len()).unwrap_or(u64::MAX);
    shared.telemetry.metrics.took(Surface::Resp, started.taken(), decisions);
    whole
}
