//! Decisions of Redis clients in the decision log.

use tidegate::Outcome as LimitOutcome;
use tidegate_record::{RecordKey, Recorder};

use crate::auth::TenantIndex;
use crate::decision_log::RecordDraft;
use crate::metrics::{DecisionSource, Outcome, Surface};
use crate::reason::DecisionReason;
use crate::shared::Shared;

/// A decision on a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct ThrottleDecision<'d> {
    pub(super) tenant: TenantIndex,
    pub(super) key: &'d [u8],
    pub(super) cost: u64,
    pub(super) is_allowed: bool,
    pub(super) limit_outcome: LimitOutcome<'d>,
    pub(super) source: DecisionSource,
}

impl ThrottleDecision<'_> {
    /// Takes it down, if that is due.
    pub(super) fn record_if_due(&self, shared: &Shared) {
        if let Some(recorder) = shared.recorder_for(outcome(self.is_allowed)) {
            self.record_decision(shared, recorder);
        }
    }

    /// Takes it down.
    pub(super) fn record_decision(&self, shared: &Shared, recorder: &Recorder) {
        let Self { tenant, key, cost, is_allowed, limit_outcome, source } = *self;
        let draft = RecordDraft {
            tenant,
            surface: Surface::Resp,
            key: RecordKey::of_bytes(key),
            cost,
            outcome: outcome(is_allowed),
            limit_outcome: Some(limit_outcome),
            source,
            reason: DecisionReason::of_source(source, shared.decider.region.is_some()),
            until_ms: None,
            rule_version: 0,
            set_version: "",
            replaced_by: "",
        };
        shared.record_decision(recorder, &draft, []);
    }
}

/// Returns the outcome for metrics and records.
pub(super) fn outcome(is_allowed: bool) -> Outcome {
    if is_allowed { Outcome::Allowed } else { Outcome::Denied }
}
