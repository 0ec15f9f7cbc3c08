//! Decisions of Redis clients in the decision log.

use tidegate::Outcome as LimitOutcome;
use tidegate_record::{Key, Recorder};

use crate::auth::TenantIndex;
use crate::journal::Note;
use crate::metrics::{Outcome, Rung, Surface};
use crate::shared::Shared;

/// What was decided about a key.
#[derive(Clone, Copy, Debug)]
pub(super) struct Decided<'d> {
    pub(super) tenant: TenantIndex,
    pub(super) key: &'d [u8],
    pub(super) cost: u64,
    pub(super) is_allowed: bool,
    pub(super) said: LimitOutcome<'d>,
    pub(super) rung: Rung,
}

impl Decided<'_> {
    /// Takes it down, if that is due.
    pub(super) fn note(&self, shared: &Shared) {
        if let Some(recorder) = shared.recorder_for(outcome(self.is_allowed)) {
            self.take_down(shared, recorder);
        }
    }

    /// Takes it down.
    pub(super) fn take_down(&self, shared: &Shared, recorder: &Recorder) {
        let Self { tenant, key, cost, is_allowed, said, rung } = *self;
        let note = Note {
            tenant,
            surface: Surface::Resp,
            key: Key::of_bytes(key),
            cost,
            outcome: outcome(is_allowed),
            said: Some(said),
            rung,
            rule_version: 0,
            set_version: "",
            replaced_by: "",
        };
        shared.take_down(recorder, &note, []);
    }
}

/// What is counted.
pub(super) fn outcome(is_allowed: bool) -> Outcome {
    if is_allowed { Outcome::Allowed } else { Outcome::Denied }
}
