//! Decisions and outcomes as the SDK returns them.

use std::time::Duration;

use arrayvec::ArrayVec;
use tidegate_core::{CheckOutcome, DecidingMeter, RequestVerdict, Retry, Verdict};

use crate::gate::Gate;

/// The most limits in one [`Limiter::check_all`](crate::Limiter::check_all).
pub const LIMITS_PER_CHECK_MAX: usize = tidegate_core::LIMITS_PER_REQUEST_MAX;

/// Most outcomes that a decision stores without allocation. Also the most limits of a reservation,
/// of a request in a batch and of a layer.
pub const LIMITS_INLINE_MAX: usize = 8;

/// The verdict of one limit of a request.
#[derive(Clone, Copy, Debug)]
#[must_use = "an unread decision limits nothing"]
pub struct Outcome<'g> {
    gate: &'g Gate,
    answer: CheckOutcome,
}

impl<'g> Outcome<'g> {
    #[inline]
    pub(crate) fn new(gate: &'g Gate, answer: CheckOutcome) -> Self {
        Self { gate, answer }
    }

    /// Whether this limit lets the request pass.
    #[inline]
    pub fn is_allowed(&self) -> bool {
        self.answer.verdict.is_allowed()
    }

    /// Returns the gate of the limit.
    pub fn gate(&self) -> &'g Gate {
        self.gate
    }

    /// Returns the verdict, with times in microseconds.
    pub fn verdict(&self) -> Verdict {
        self.answer.verdict
    }

    /// Which meter decided: the key's own, or one it shares because there is no room for more.
    pub fn source(&self) -> DecidingMeter {
        self.answer.source
    }

    /// Returns the units that remain now.
    pub fn remaining(&self) -> u32 {
        self.answer.verdict.remaining()
    }

    /// Returns the time until the meter is empty, without further usage.
    pub fn reset_after(&self) -> Duration {
        Duration::from_micros(self.answer.verdict.reset_after_us())
    }

    /// States when a limit of 0 ends. A denial by it then has a retry time; any other outcome
    /// stays.
    pub fn set_end(&mut self, ends_us: u64) {
        if let Verdict::Deny { retry: retry @ Retry::Blocked, .. } = &mut self.answer.verdict {
            *retry = Retry::After(ends_us);
        }
    }

    /// Returns the time until the same request would pass; `None` if it passed, or never will.
    pub fn retry_after(&self) -> Option<Duration> {
        self.answer.verdict.retry().and_then(Retry::after_us).map(Duration::from_micros)
    }
}

/// The decision about a request under several limits: allowed and charged under all, or denied and
/// charged under none.
#[derive(Clone, Debug)]
#[must_use = "an unread decision limits nothing"]
pub struct Decision<'g> {
    pub(crate) outcomes: Outcomes<'g>,
    pub(crate) decided: RequestVerdict,
}

/// The outcomes of the limits of one request.
#[derive(Clone, Debug)]
#[expect(clippy::large_enum_variant, reason = "the large variant must not be allocated")]
pub(crate) enum Outcomes<'g> {
    /// The usual case, without allocation.
    Few(ArrayVec<Outcome<'g>, LIMITS_INLINE_MAX>),
    /// More than [`LIMITS_INLINE_MAX`].
    Many(Vec<Outcome<'g>>),
}

impl<'g> Outcomes<'g> {
    #[inline]
    fn as_slice(&self) -> &[Outcome<'g>] {
        match self {
            Self::Few(outcomes) => outcomes,
            Self::Many(outcomes) => outcomes,
        }
    }

    fn as_mut_slice(&mut self) -> &mut [Outcome<'g>] {
        match self {
            Self::Few(outcomes) => outcomes,
            Self::Many(outcomes) => outcomes,
        }
    }
}

impl<'g> From<Outcome<'g>> for Decision<'g> {
    /// Makes the decision on a request under one limit.
    fn from(outcome: Outcome<'g>) -> Self {
        let decided =
            if outcome.is_allowed() { RequestVerdict::Allowed } else { RequestVerdict::Denied { by: 0 } };
        Self { outcomes: Outcomes::Few(ArrayVec::from_iter([outcome])), decided }
    }
}

impl<'g> Decision<'g> {
    /// Whether the request may pass.
    pub fn is_allowed(&self) -> bool {
        self.decided == RequestVerdict::Allowed
    }

    /// The limit that denied. Of several, the one that would deny longest.
    pub fn denied_by(&self) -> Option<&Outcome<'g>> {
        match self.decided {
            RequestVerdict::Allowed => None,
            RequestVerdict::Denied { by } => self.outcomes().get(by),
        }
    }

    /// Returns the time until the same request would pass; `None` if it passed, or never will.
    pub fn retry_after(&self) -> Option<Duration> {
        self.denied_by().and_then(Outcome::retry_after)
    }

    /// States when each limit ends, in the order of the checks. See [`Outcome::set_end`].
    pub fn set_ends(&mut self, ends_us: impl IntoIterator<Item = Option<u64>>) {
        for (outcome, ends_us) in self.outcomes.as_mut_slice().iter_mut().zip(ends_us) {
            if let Some(ends_us) = ends_us {
                outcome.set_end(ends_us);
            }
        }
    }

    /// Returns the outcome of each limit, in the order of the checks.
    pub fn outcomes(&self) -> &[Outcome<'g>] {
        self.outcomes.as_slice()
    }
}
