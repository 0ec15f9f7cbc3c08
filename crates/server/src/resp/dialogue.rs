//! Turns requests into replies: a connection without its socket.
//!
//! Requests that were read together are answered together. Plain checks are decided as one batch:
//! while one is decided, the meters of the next are prefetched. Replies keep the order of their
//! requests.

use std::sync::Arc;

use tidegate::{Check, Outcome, Retry};
use tidegate_rules::Class;

use super::client_state::ClientState;
use super::command::{Flow, dispatch};
use super::pending::{PendingCheck, PendingReplies, answered};
use super::record::{ThrottleDecision, outcome as counted};
use super::reply::Reply;
use super::request::{Parser, Trust};
use super::throttle::{self, Gates};
use crate::load;
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
    again: RequestFinder,
}

/// Parses requests of a batch again, for the few that need more than their decision.
#[derive(Debug, Default)]
struct RequestFinder {
    /// Where the requests of the batch begin.
    starts: Vec<usize>,
    /// Of its own: the other may be in the middle of a request.
    parser: Parser,
}

impl RequestFinder {
    /// Returns the key and the cost of a request.
    fn find<'i>(&'i mut self, input: &'i [u8], at: usize, gates: &Gates) -> Option<(&'i [u8], u64)> {
        let start = *self.starts.get(at)?;
        let request = self.parser.parse(input.get(start..)?, Trust::Known).ok()??;
        let (key, question) = throttle::question(&request, gates)?;
        Some((key, question.requested_cost()))
    }
}

impl Dialogue {
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self {
            parser: Parser::default(),
            client_state: ClientState::new(shared),
            again: RequestFinder::default(),
        }
    }

    /// Writes replies to the requests at the beginning of `input` into `out`. Returns the bytes
    /// used, and the next step. The caller must pass unused bytes again, with or without more
    /// behind them.
    pub(super) fn answer(&mut self, input: &[u8], out: &mut Vec<u8>) -> (usize, Next) {
        let started = Stopwatch::start();
        self.client_state.look_again();
        let answered = self.answer_all(input, out);
        let metrics = &self.client_state.shared.metrics;
        let decisions = self.client_state.tally.flush(metrics);
        if decisions > 0 {
            metrics.took(Surface::Resp, started.taken(), decisions);
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
        Some(Box::pin(answered(shared, self.client_state.protocol, out.to_vec(), waiting)))
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
        if load::sheds(Class::Comfort) {
            return 0;
        }
        let mut reply = Reply::new(out, *protocol);
        let keys = shared.decider.region.is_some().then(Keys::default);
        self.again.starts.clear();
        let starts = shared.decision_log.is_some().then_some(&mut self.again.starts);
        let room = DECISIONS_PER_BATCH_MAX;
        let mut batch = Batch { parser: &mut self.parser, input, used: 0, room, gates, keys, starts };
        let mut asked = Vec::new();
        let mut noted: Vec<(usize, Outcome<'_>)> = Vec::new();
        shared.decider.limiter.check_each(&mut batch, |at, outcome| {
            if outcome.verdict().retry() == Some(Retry::AskOrigin) {
                asked.push((at, reply.len(), outcome.gate()));
                return;
            }
            tally.count(outcome.is_allowed(), shared.decider.source_of(&outcome));
            throttle::tell(&mut reply, &outcome);
            if shared.recorder_for(counted(outcome.is_allowed())).is_some() {
                noted.push((at, outcome));
            }
        });
        for (at, place, gate) in asked {
            let Some((key, cost)) = batch.keys.as_ref().and_then(|keys| keys.get(at)) else { continue };
            waiting.push(PendingCheck::new(place, principal.tenant, gate, key, cost));
        }
        let used = batch.used;
        for (at, limit_outcome) in noted {
            let Some(decision_log) = &shared.decision_log else { break };
            let Some((key, cost)) = self.again.find(input, at, gates) else { continue };
            let (is_allowed, source) = (limit_outcome.is_allowed(), shared.decider.source_of(&limit_outcome));
            let decided =
                ThrottleDecision { tenant: principal.tenant, key, cost, is_allowed, limit_outcome, source };
            decided.record_decision(shared, decision_log.recorder());
        }
        used
    }
}

/// Reads checks as they are needed. Keys are hashed in place, without a copy.
struct Batch<'b, 'g> {
    parser: &'b mut Parser,
    input: &'b [u8],
    used: usize,
    room: usize,
    gates: &'g Gates,
    /// The keys of the checks, if the origin may need them.
    keys: Option<Keys>,
    /// Where the requests begin, where some of them are to be found again.
    starts: Option<&'b mut Vec<usize>>,
}

/// The keys of checks, one after another, and their costs.
#[derive(Debug, Default)]
struct Keys {
    bytes: Vec<u8>,
    /// Where each key ends.
    ends: Vec<(usize, u64)>,
}

impl Keys {
    fn push(&mut self, key: &[u8], cost: u64) {
        self.bytes.extend_from_slice(key);
        self.ends.push((self.bytes.len(), cost));
    }

    fn get(&self, at: usize) -> Option<(&[u8], u64)> {
        let (end, cost) = *self.ends.get(at)?;
        let start = at.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |(end, _)| *end);
        Some((self.bytes.get(start..end)?, cost))
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
        let (key, question) = throttle::question(&request, self.gates)?;
        if let Some(keys) = &mut self.keys {
            keys.push(key, question.requested_cost());
        }
        if let Some(starts) = &mut self.starts {
            starts.push(self.used);
        }
        self.used += request.used;
        Some(question)
    }
}
