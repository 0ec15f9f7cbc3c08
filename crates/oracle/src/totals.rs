//! Counts of the comparison, so that one with too few cases cannot pass for a good one.

use std::ops::AddAssign;

use tidegate_core::{Retry, Verdict};

/// Counts of comparisons without a difference.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Histories, each under a limit of its own.
    pub histories: u64,
    /// Verdicts that were the same in every field.
    pub decisions: u64,
    /// Of these: the request may pass.
    pub allowed: u64,
    /// Of these: it may pass later.
    pub later: u64,
    /// Of these: it may never pass.
    pub never: u64,
    /// Questions that tried out the waits of the verdicts.
    pub probes: u64,
}

impl Totals {
    /// Counts a verdict. Its waits took `probes` checks to test.
    pub(crate) fn count(&mut self, verdict: Verdict, probes: u64) {
        self.decisions += 1;
        self.probes += probes;
        match verdict.retry() {
            None => self.allowed += 1,
            Some(Retry::After(_)) => self.later += 1,
            Some(Retry::CostAboveBurst | Retry::Blocked | Retry::AskOrigin) => self.never += 1,
        }
    }
}

impl AddAssign for Totals {
    fn add_assign(&mut self, other: Self) {
        self.histories += other.histories;
        self.decisions += other.decisions;
        self.allowed += other.allowed;
        self.later += other.later;
        self.never += other.never;
        self.probes += other.probes;
    }
}
