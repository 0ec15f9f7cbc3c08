//! Turns requests into replies: a connection without its socket.
//!
//! Requests that were read together are answered together. Plain checks are decided as one batch:
//! while one is decided, the meters of the next are prefetched. Replies keep the order of their
//! requests.

use std::sync::Arc;

use tidegate::{Check, Outcome};

use super::client_state::{ClientState, context};
use super::command::{Flow, dispatch};
use super::pending::{PendingCheck, PendingReplies, PendingReply, all_replies};
use super::reply::Reply;
use super::request::{Parser, Trust};
use super::throttle::{self, Gates};
use crate::auth::TenantIndex;
use crate::metrics::{Stopwatch, Surface};
use crate::shared::Shared;

/// Bytes of replies that are written before the next request is read. Higher: fewer writes to
/// clients with long pipelines; more memory for clients that do not read their replies.
pub(super) const REPLY_BYTES_MAX: usize = 64 << 10;

/// Largest number of decisions in one batch: their replies stay below [`REPLY_BYTES_MAX`].
const DECISIONS_PER_BATCH_MAX: usize = 512;

/// Longest reply to a check, in bytes: a head and five 64-bit numbers.
const ANSWER_BYTES_MAX: usize = 4 + 5 * (1 + 20 + 2);

const _: () = assert!(DECISIONS_PER_BATCH_MAX * ANSWER_BYTES_MAX <= REPLY_BYTES_MAX, "a batch is one write");

/// How a connection goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// With more bytes from the client.
    More,
    /// With the rest of the input, once the client has read the replies.
    Rest,
    /// Not at all, once the client has read the replies.
    Close,
}

/// The parser and the state of one client.
#[derive(Debug)]
pub(super) struct Dialogue {
    parser: Parser,
    client_state: ClientState,
    index: BatchIndex,
}

/// The requests of a batch, to find the few again that need more than their decision.
#[derive(Debug, Default)]
struct BatchIndex {
    /// Where the requests of the batch begin.
    starts: Vec<usize>,
    /// Of its own: the other may be in the middle of a request.
    parser: Parser,
}

impl Dialogue {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            parser: Parser::default(),
            client_state: ClientState::new(shared),
            index: BatchIndex::default(),
        }
    }

    /// The tenant of the client, once it is authenticated.
    pub(super) fn tenant(&self) -> Option<TenantIndex> {
        self.client_state.principal.map(|principal| principal.tenant)
    }

    /// Writes replies to the requests at the beginning of `input` into `out`. Returns the bytes
    /// used, and the next step. The caller must pass unused bytes again, with or without more
    /// behind them.
    pub(super) fn answer(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Next) {
        let started = Stopwatch::start();
        self.client_state.look_again();
        let answered = self.answer_all(input, out);
        let decisions = self.client_state.flush_tally();
        if decisions > 0 {
            self.client_state.shared.telemetry.metrics.took(Surface::Resp, started.taken(), decisions);
        }
        answered
    }

    /// Returns a future of the replies in `out` with those that wait for the origin; `None` if no
    /// check waits.
    pub(super) fn later(&mut self, out: &[u8]) -> Option<PendingReplies> {
        if self.client_state.waiting.is_empty() {
            return None;
        }
        let waiting = std::mem::take(&mut self.client_state.waiting);
        let shared = Arc::clone(&self.client_state.shared);
        Some(Box::pin(all_replies(shared, self.client_state.protocol, out.to_vec(), waiting)))
    }

    fn answer_all(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Next) {
        let mut used = 0;
        loop {
            used += self.decide_batch(&input[used..], out);
            if out.len() >= REPLY_BYTES_MAX {
                return (used, Next::Rest);
            }
            let mut reply = Reply::new(out, self.client_state.protocol);
            match self.parser.parse(&input[used..], self.client_state.trust()) {
                Ok(None) => return (used, Next::More),
                Ok(Some(request)) => {
                    used += request.used;
                    if dispatch(&mut self.client_state, &request, &mut reply) == Flow::Close {
                        return (used, Next::Close);
                    }
                }
                Err(error) => {
                    reply.error(format!("ERR Protocol error: {error}").as_bytes());
                    return (input.len(), Next::Close);
                }
            }
        }
    }

    /// Decides the checks at the beginning of `input`, up to the first other request. Returns the
    /// bytes used.
    fn decide_batch(&mut self, input: &[u8], out: &mut Vec<u8>) -> usize {
        let ClientState { shared, principal: Some(principal), gates, tally, protocol, waiting, .. } =
            &mut self.client_state
        else {
            return 0;
        };
        let tenant = principal.tenant;
        let Some(admission) = context(shared, tenant).admit_batch() else { return 0 };
        let mut reply = Reply::new(out, *protocol);
        self.index.starts.clear();
        let is_indexed = shared.decider.region.is_some() || shared.telemetry.decision_log.is_some();
        let mut batch = Batch {
            parser: &mut self.parser,
            input,
            used: 0,
            room: DECISIONS_PER_BATCH_MAX,
            gates,
            index: &mut self.index,
            is_indexed,
        };
        let mut pending = Vec::new();
        let answer = |at, outcome: Option<&Outcome<'_>>| match outcome {
            Some(outcome) => throttle::write_plain(&mut reply, outcome),
            None => pending.push((at, reply.len())),
        };
        admission.decide_each(tally, &mut batch, answer, Batch::find);
        waiting.extend(pending.into_iter().map(|(at, place)| {
            let found = batch.find(at);
            let new = |(key, check): (_, Check<'_>)| {
                PendingCheck::new(tenant, check.gate(), key, check.requested_cost())
            };
            PendingReply { place, check: found.map(new) }
        }));
        batch.used
    }
}

/// Reads checks as they are needed. Keys are hashed in place, without a copy.
struct Batch<'b, 'g> {
    parser: &'b mut Parser,
    input: &'b [u8],
    used: usize,
    room: usize,
    gates: &'g Gates,
    index: &'b mut BatchIndex,
    /// Whether some of the requests may have to be found again.
    is_indexed: bool,
}

impl<'g> Batch<'_, 'g> {
    /// Parses a request of the batch again, and returns its key and its check.
    fn find(&mut self, at: usize) -> Option<(&[u8], Check<'g>)> {
        let BatchIndex { starts, parser } = &mut *self.index;
        let request = parser.parse(self.input.get(*starts.get(at)?..)?, Trust::Known).ok()??;
        throttle::plain_check(&request, self.gates)
    }
}

impl<'g> Iterator for Batch<'_, 'g> {
    type Item = Check<'g>;

    #[inline]
    fn next(&mut self) -> Option<Check<'g>> {
        self.room = self.room.checked_sub(1)?;
        let request = self.parser.parse(&self.input[self.used..], Trust::Known).ok()??;
        if !throttle::is_meant(&request) {
            return None;
        }
        let (_, check) = throttle::plain_check(&request, self.gates)?;
        if self.is_indexed {
            self.index.starts.push(self.used);
        }
        self.used += request.used;
        Some(check)
    }
}
