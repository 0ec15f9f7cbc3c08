//! The decisions of a server, and their counts.

use std::fmt::Display;

/// The decision of a request, as all surfaces report it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckDecision {
    /// Whether the request passes.
    pub is_allowed: bool,
    /// Units that are left. `None` over some surfaces if the server sheds, or if several rules
    /// decided.
    pub remaining: Option<u64>,
}

/// The reply to one check: a decision, or the error of the server.
pub type CheckResult = Result<CheckDecision, String>;

/// Counts of replies by decision.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckTally {
    /// Requests that passed.
    pub allowed: u64,
    /// Requests that were denied.
    pub denied: u64,
    /// Requests without a decision.
    pub errors: u64,
    /// The first of the errors.
    pub first_error: Option<String>,
}

impl CheckTally {
    /// Counts a reply.
    pub fn record(&mut self, result: CheckResult) {
        match result {
            Ok(CheckDecision { is_allowed: true, .. }) => self.allowed += 1,
            Ok(_) => self.denied += 1,
            Err(error) => self.fail(&error),
        }
    }

    /// Counts a request without a decision.
    pub fn fail(&mut self, error: &dyn Display) {
        self.errors += 1;
        self.first_error.get_or_insert_with(|| error.to_string());
    }

    /// Requests with a decision.
    pub fn decisions(&self) -> u64 {
        self.allowed + self.denied
    }

    /// Adds the counts of another tally.
    pub fn add(&mut self, other: Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.errors += other.errors;
        self.first_error = self.first_error.take().or(other.first_error);
    }
}
