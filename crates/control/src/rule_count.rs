//! Counts of a rule: written by the decisions of a node, read by the watch over changes.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// The counts of a rule, for all workers. A read resets them. Denials are the rarer outcome, and
/// requests are counted only while the rule is watched. So an allowed request usually writes
/// nothing.
#[derive(Debug, Default)]
pub struct RuleCount {
    denied: AtomicU32,
    /// Requests that it would have denied in shadow mode.
    shadow_denied: AtomicU32,
    requests: AtomicU32,
    is_watched: AtomicBool,
    /// Whether there was a request, in either mode. Written once for each look.
    is_used: AtomicBool,
}

/// The counts of a rule over a time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RuleTally {
    /// Requests that it denied.
    pub denied: u64,
    /// Denials in shadow mode, where the requests passed.
    pub shadow_denied: u64,
    /// Requests that it was enforced for, if they were counted.
    pub requests: u64,
    /// Whether there was a request, in either mode.
    pub is_used: bool,
}

impl RuleCount {
    /// Counts a request that the rule was enforced for.
    #[inline]
    pub fn count(&self, is_allowed: bool) {
        self.note_use();
        if !is_allowed {
            self.denied.fetch_add(1, Ordering::Relaxed);
        }
        if self.is_watched.load(Ordering::Relaxed) {
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts a request that the rule looked at in shadow mode.
    #[inline]
    pub fn count_in_shadow(&self, is_allowed: bool) {
        self.note_use();
        if !is_allowed {
            self.shadow_denied.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[inline]
    fn note_use(&self) {
        if !self.is_used.load(Ordering::Relaxed) {
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    /// Whether its requests are counted from now on.
    pub fn watch(&self, is_watched: bool) {
        // Most stay as they are: their cache lines are left alone.
        if self.is_watched.load(Ordering::Relaxed) != is_watched {
            self.is_watched.store(is_watched, Ordering::Relaxed);
        }
    }

    /// Returns the counts since the last call, and resets them.
    pub fn take(&self) -> RuleTally {
        // Most counts are 0: their cache lines are not written.
        let take = |count: &AtomicU32| match count.load(Ordering::Relaxed) {
            0 => 0,
            _ => u64::from(count.swap(0, Ordering::Relaxed)),
        };
        let (denied, shadow_denied) = (take(&self.denied), take(&self.shadow_denied));
        let is_used = self.is_used.load(Ordering::Relaxed) && self.is_used.swap(false, Ordering::Relaxed);
        RuleTally { denied, shadow_denied, requests: take(&self.requests), is_used }
    }
}
