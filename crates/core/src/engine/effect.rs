//! Effects of the engine, and the failures of calls that come back.

use std::sync::Arc;

use super::request::Ticket;
use crate::origin::{Call, CallError};

/// An action for the caller to execute.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send this call. It may have been sent before.
    Call {
        /// The partition that it is for.
        partition: u16,
        /// The call.
        call: Arc<Call>,
        /// Whether it is a second attempt beside the first, better sent over another connection.
        hedge: bool,
    },
    /// Answer a waiting request.
    Answer {
        /// The request.
        ticket: Ticket,
        /// Its result.
        resolution: Resolution,
    },
}

/// The result of a request that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// The request passes, and is charged.
    Allowed {
        /// Units that remain under each of its limits, in their order, as of the last reply of the
        /// origin.
        remaining: Box<[u32]>,
        /// When the origin charged it, by the origin's clock; `None` if a grant of this node paid
        /// for it.
        charged_us: Option<u64>,
    },
    /// The request does not pass.
    Denied {
        /// Position of the limit that denies it.
        by: usize,
        /// Units that remain under each of its limits, as above.
        remaining: Box<[u32]>,
        /// Time until it would pass if no other request came, µs.
        retry_us: u64,
    },
    /// The origin did not decide in time: the class of the limit decides.
    Unanswered,
}

/// How a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The origin did not apply it, or the result is unknown: it is sent again.
    Unanswered,
    /// The origin applied a later call of this session, so it never applies this one.
    Outdated {
        /// The last call that was applied.
        sequence: u64,
    },
    /// The call makes no sense: no origin applies it, however often it is sent.
    Refused,
}

impl From<CallError> for CallFailure {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Outdated { sequence } => Self::Outdated { sequence },
            _ => Self::Refused,
        }
    }
}
