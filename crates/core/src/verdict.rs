//! Verdicts: the answers of limits.

/// The answer of one limit. A denial is an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request may pass, and its cost was charged (or would be, for a peek).
    Allow {
        /// Units that a request at this instant could still spend.
        remaining: u32,
        /// Microseconds until the meter is as good as new.
        reset_after_us: u64,
    },
    /// The request may not pass, and nothing was charged.
    Deny {
        /// Units that a smaller request at this instant could still spend.
        remaining: u32,
        /// Microseconds until the meter is as good as new.
        reset_after_us: u64,
        /// When the same request would pass if no other came.
        retry: Retry,
    },
}

/// When a denied request would pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// Perhaps now: the node cannot decide, and has to ask the origin. Only limits at an origin
    /// return it. A real denial by another limit of the same request takes precedence.
    AskOrigin,
    /// After this many microseconds, and not one earlier. With reservations outstanding, as if they
    /// were committed now.
    After(u64),
    /// Never: the cost is above the burst of the limit.
    CostAboveBurst,
    /// Never: the limit is 0.
    Blocked,
}

impl Verdict {
    /// Whether the request may pass.
    #[inline]
    pub const fn is_allowed(&self) -> bool {
        matches!(self, Self::Allow { .. })
    }

    /// Returns the units that could still be spent at this instant.
    #[inline]
    pub const fn remaining(&self) -> u32 {
        match *self {
            Self::Allow { remaining, .. } | Self::Deny { remaining, .. } => remaining,
        }
    }

    /// Microseconds until the meter is as good as new.
    #[inline]
    pub const fn reset_after_us(&self) -> u64 {
        match *self {
            Self::Allow { reset_after_us, .. } | Self::Deny { reset_after_us, .. } => reset_after_us,
        }
    }

    /// Returns when the same request would pass; `None` for an allowed one.
    #[inline]
    pub const fn retry(&self) -> Option<Retry> {
        match *self {
            Self::Allow { .. } => None,
            Self::Deny { retry, .. } => Some(retry),
        }
    }
}

impl Retry {
    /// Returns the microseconds to wait, or `None` if waiting does not help.
    #[inline]
    pub const fn after_us(self) -> Option<u64> {
        match self {
            Self::After(us) => Some(us),
            Self::AskOrigin | Self::CostAboveBurst | Self::Blocked => None,
        }
    }
}
