//! Changes of people: planned, then applied at once or kept until another person approves.

use std::collections::HashSet;
use std::sync::Arc;

use tidegate_rules::audit::Checkpoint;
use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::RuleRows;
use tidegate_rules::store::{ApplyConditions, Attribution, StoreError};

use crate::consent::{self, ChangeKind};
use crate::control::{Control, Stopping};
use crate::guardrail::{ApprovedEffect, ChangeEffect};
use crate::node::Node;
use crate::plan::{PlanError, PlanResult};

/// A proposed change of the store that can be applied.
#[derive(Debug)]
pub struct StoredChange {
    change: Change,
    /// Its operations.
    pub operations: Vec<Operation>,
}

/// The result of a change.
#[derive(Debug)]
pub enum ChangeOutcome {
    /// It is applied, and other servers follow the store.
    Applied(Change),
    /// It waits for an approval.
    Waiting(Change),
}

/// The reason why a change is not made.
#[derive(Debug)]
pub enum ChangeError {
    /// The store refused it, or is unreachable.
    Store(StoreError),
    /// Its author must confirm it first, for this reason.
    Unconfirmed(String),
    /// Its effect cannot be written.
    Effect(serde_json::Error),
    /// The server stops.
    Stopping(Stopping),
}

impl From<StoreError> for ChangeError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<Stopping> for ChangeError {
    fn from(stopping: Stopping) -> Self {
        Self::Stopping(stopping)
    }
}

impl StoredChange {
    /// Origin of its operations.
    pub fn kind(&self) -> ChangeKind {
        if self.change.undoes.is_empty() { ChangeKind::Edit } else { ChangeKind::Rollback }
    }

    /// The effect that was approved, if any was.
    fn approved(&self) -> Option<ApprovedEffect> {
        self.change.approval.as_ref().and(self.change.effect.as_deref()).and_then(ApprovedEffect::read)
    }
}

impl<N: Node> Control<N> {
    /// Plans a change of `caller` as a whole, with the consent that it needs on this node.
    pub async fn plan(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        (kind, operations): (ChangeKind, &[Operation]),
        caller: &str,
    ) -> Result<PlanResult, PlanError> {
        self.plan_for(rule_rows, (kind, operations), ApprovedEffect::default(), caller).await
    }

    /// Plans a stored change again, compared with its approved effect: traffic goes on while a
    /// change waits for approval.
    pub async fn plan_stored(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        stored: &StoredChange,
    ) -> Result<PlanResult, PlanError> {
        let approved = stored.approved().unwrap_or_default();
        let change = (stored.kind(), stored.operations.as_slice());
        self.plan_for(rule_rows, change, approved, &stored.change.author).await
    }

    async fn plan_for(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        (kind, operations): (ChangeKind, &[Operation]),
        approved: ApprovedEffect,
        author: &str,
    ) -> Result<PlanResult, PlanError> {
        let planned = self.evaluate(rule_rows, operations, approved).await?;
        let effect = self.fit_to_approvers(planned.effect, rule_rows, author).await?;
        let effect = match consent::question(kind, rule_rows, operations) {
            Some(question) => effect.confirmed_for(&question),
            None => effect,
        };
        Ok(PlanResult { effect, ..planned })
    }

    /// Adapts an effect whose approval could never come.
    async fn fit_to_approvers(
        &self,
        effect: ChangeEffect,
        rule_rows: &RuleRows,
        author: &str,
    ) -> Result<ChangeEffect, StoreError> {
        let Some(node) = self.node.upgrade() else { return Ok(effect) };
        // An empty store that replaces a lost one is not new: this node still has rules in force.
        let is_first = rule_rows.revision == 0 && self.rule_rows().revision == 0;
        if node.is_open() {
            return Ok(effect.for_one());
        }
        if is_first {
            return Ok(effect.for_first());
        }
        if effect.needs != ChangeNeeds::Approver {
            return Ok(effect);
        }
        let related = self.store.related_to(author).await?;
        let names: HashSet<String> = related.into_iter().chain([author.to_owned()]).collect();
        Ok(if node.has_approver_beside(&names) { effect } else { effect.for_only() })
    }

    /// Returns a stored change that can be applied.
    pub async fn stored_change(&self, id: u64) -> Result<StoredChange, StoreError> {
        let change = self.store.change(id).await?;
        // A waiting change may be approved while it is planned. It would then be applied by its
        // approved effect, not by its present one.
        match change.state {
            ChangeState::Proposed => {}
            ChangeState::Waiting => return Err(StoreError::Needs(id, ChangeNeeds::Approver)),
            state => return Err(StoreError::State(id, state)),
        }
        let operations = self.store.operations(id).await?;
        Ok(StoredChange { change, operations })
    }

    /// Makes a planned change: at once, if all consent that it needs is there.
    pub async fn make(
        &self,
        rule_rows: &RuleRows,
        proposal: Proposal,
        effect: &ChangeEffect,
        confirmed: bool,
        by: &str,
    ) -> Result<ChangeOutcome, ChangeError> {
        let needs = effect.needs;
        if needs == ChangeNeeds::Confirmation && !confirmed {
            return Err(ChangeError::Unconfirmed(effect.because.clone()));
        }
        let proposal = Proposal { effect: Some(written(effect)?), needs, ..proposal };
        if needs == ChangeNeeds::Approver {
            let change = self.store.propose(&proposal, self.act(by)?).await?;
            return Ok(ChangeOutcome::Waiting(change));
        }
        let applied = self.store.apply_new(&proposal, checked(rule_rows, confirmed), self.act(by)?).await?;
        Ok(ChangeOutcome::Applied(applied))
    }

    /// Applies a stored change. One that now denies clearly more than was approved must wait for
    /// another approval.
    pub async fn apply_stored(
        &self,
        rule_rows: &RuleRows,
        stored: &StoredChange,
        effect: &ChangeEffect,
        confirmed: bool,
        by: &str,
    ) -> Result<ChangeOutcome, ChangeError> {
        let id = stored.change.id;
        if effect.is_beyond {
            let change = self.store.wait_again(id, &written(effect)?, self.act(by)?).await?;
            return Ok(ChangeOutcome::Waiting(change));
        }
        let applied = self.store.apply(id, checked(rule_rows, confirmed), self.act(by)?).await?;
        Ok(ChangeOutcome::Applied(applied))
    }

    /// Returns the actor and the time of an action, for the audit.
    pub fn act<'a>(&self, by: &'a str) -> Result<Attribution<'a>, Stopping> {
        Ok(Attribution { by, now_ms: self.now_ms()? })
    }

    /// Verifies the audit, from a checkpoint that the caller kept. `None` if another caller does so
    /// now.
    pub async fn verify_audit(&self, kept: Option<&Checkpoint>) -> Option<Result<Checkpoint, StoreError>> {
        let _verifying = self.verifying_audit.try_lock().ok()?;
        Some(self.store.verify_audit(kept).await)
    }
}

/// Returns the condition that the rule rows are still those which the change was compiled with.
fn checked(rule_rows: &RuleRows, confirmed: bool) -> ApplyConditions {
    ApplyConditions { confirmed, checked: Some(rule_rows.into()) }
}

/// Serializes an effect for the store.
fn written(effect: &ChangeEffect) -> Result<String, ChangeError> {
    serde_json::to_string(effect).map_err(ChangeError::Effect)
}
