//! What a decision says.

/// The answer for one limit. A denial is an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The request may pass, and its cost was charged (or would be, for a peek).
    Allow {
        /// What a request at this instant could still spend.
        remaining: u32,
        /// Microseconds until the meter is as good as new.
        reset_after_us: u64,
    },
    /// The request may not pass, and nothing was charged.
    Deny {
        /// What a smaller request at this instant could still spend.
        remaining: u32,
        /// Microseconds until the meter is as good as new.
        reset_after_us: u64,
        /// When the same request would pass if nothing else came.
        retry: Retry,
    },
}

/// When a denied request would pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Retry {
    /// Perhaps now: nothing here decides it, the origin has to be asked. Only limits that an origin keeps say so, and it
    /// stands behind every real denial of the same request.
    AskOrigin,
    /// After this many microseconds, and not one earlier. With reservations outstanding, as if they were
    /// committed now.
    After(u64),
    /// Never: the cost is above what the limit can ever hold.
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

    /// What could still be spent at this instant.
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

    /// When the same request would pass; nothing for an allowed one.
    #[inline]
    pub const fn retry(&self) -> Option<Retry> {
        match *self {
            Self::Allow { .. } => None,
            Self::Deny { retry, .. } => Some(retry),
        }
    }
}

impl Retry {
    /// Microseconds to wait, or nothing if waiting does not help.
    #[inline]
    pub const fn after_us(self) -> Option<u64> {
        match self {
            Self::After(us) => Some(us),
            Self::AskOrigin | Self::CostAboveBurst | Self::Blocked => None,
        }
    }
}
