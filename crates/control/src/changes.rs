//! Changes of people: planned, then applied at once or kept until another person approves.

use std::collections::HashSet;
use std::sync::Arc;

use tidegate_rules::audit::Checkpoint;
use tidegate_rules::change::{Change, ChangeNeeds, ChangeState, Operation, Proposal};
use tidegate_rules::rows::RuleRows;
use tidegate_rules::store::{ApplyConditions, Attribution, StoreError};

use crate::consent::{self, ChangeKind};
use crate::control::{Control, Stopping};
use crate::denials::AlarmCause;
use crate::emergency_consent::blocked_by_emergencies;
use crate::guardrail::{ApprovedEffect, AuthorHistory, ChangeEffect, SERIES_MS};
use crate::node::{Node, NodeRules as _};
use crate::plan::{PlanBasis, PlanError, PlanResult};

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
        self.plan_for(rule_rows, (kind, operations), None, caller).await
    }

    /// Plans a stored change again, compared with its approved effect: traffic goes on while a
    /// change waits for approval.
    pub async fn plan_stored(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        stored: &StoredChange,
    ) -> Result<PlanResult, PlanError> {
        let approved = stored.change.approval.as_ref().map(|_| stored.approved().unwrap_or_default());
        let change = (stored.kind(), stored.operations.as_slice());
        self.plan_for(rule_rows, change, approved, &stored.change.author).await
    }

    async fn plan_for(
        self: &Arc<Self>,
        rule_rows: &Arc<RuleRows>,
        (kind, operations): (ChangeKind, &[Operation]),
        approved: Option<ApprovedEffect>,
        author: &str,
    ) -> Result<PlanResult, PlanError> {
        let (is_approved, approved) = (approved.is_some(), approved.unwrap_or_default());
        let history = self.history_of(rule_rows, author).await?;
        let planned = self.evaluate(rule_rows, operations, PlanBasis { approved, history }).await?;
        let effect = self.fit_to_approvers(planned.effect, rule_rows, author).await?;
        let effect = match consent::confirmation(kind, rule_rows, operations) {
            Some(confirmation) => effect.confirmed_for(&confirmation),
            None => effect,
        };
        // An approved change is not undone automatically.
        let needs_approval = is_approved || effect.needs == ChangeNeeds::Approver;
        let watch =
            if needs_approval { planned.watch.alarm_only(AlarmCause::Approved) } else { planned.watch };
        Ok(PlanResult { effect, watch, ..planned })
    }

    /// Returns the recent changes of an author, and the addresses that its emergencies block.
    async fn history_of(&self, rule_rows: &RuleRows, author: &str) -> Result<AuthorHistory, PlanError> {
        let now_ms = self.now_ms()?;
        let changes = self.store.changes_by(author, now_ms.saturating_sub(SERIES_MS)).await?;
        let (names, rules) = (self.names_of(author).await?, self.node()?.rules());
        let blocked = blocked_by_emergencies(&rule_rows.emergencies, &names, rules.set(), now_ms);
        Ok(AuthorHistory::new(changes, blocked))
    }

    /// Returns the names of an author, and of the credentials related to it.
    pub(crate) async fn names_of(&self, author: &str) -> Result<HashSet<String>, StoreError> {
        let related = self.store.related_to(author).await?;
        Ok(related.into_iter().chain([author.to_owned()]).collect())
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
        let mut names: HashSet<String> = self.store.line_of(author).await?.into_iter().collect();
        names.insert(author.to_owned());
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

    /// Approves a change that waits for another person than its author. Credentials of one maker
    /// may be one person, so none of them approves while an unrelated token could.
    pub async fn approve(&self, id: u64, by: &str) -> Result<Change, PlanError> {
        let node = self.node()?;
        let change = self.store.change(id).await?;
        if change.state == ChangeState::Waiting && change.author != by {
            let names = self.names_of(&change.author).await?;
            if names.contains(by) && node.has_approver_beside(&names) {
                return Err(StoreError::RelatedApproval(id).into());
            }
        }
        Ok(self.store.approve(id, self.attribution(by)?).await?)
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
            let change = self.store.propose(&proposal, self.attribution(by)?).await?;
            return Ok(ChangeOutcome::Waiting(change));
        }
        let applied =
            self.store.apply_new(&proposal, checked(rule_rows, confirmed), self.attribution(by)?).await?;
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
            let change = self.store.wait_again(id, &written(effect)?, self.attribution(by)?).await?;
            return Ok(ChangeOutcome::Waiting(change));
        }
        let applied = self.store.apply(id, checked(rule_rows, confirmed), self.attribution(by)?).await?;
        Ok(ChangeOutcome::Applied(applied))
    }

    /// Returns the actor and the time of an action, for the audit.
    pub fn attribution<'a>(&self, by: &'a str) -> Result<Attribution<'a>, Stopping> {
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

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RowKind;
    use tidegate_rules::store::Credential;

    use super::*;
    use crate::tests::{Fixture, per_user, put};

    /// A node with a rule in force and without a log, so that half the limit needs an approval.
    async fn fixture() -> Fixture {
        let fixture = Fixture::new().await;
        fixture.put("per_user", &per_user(100)).await;
        fixture
    }

    fn halved() -> Vec<Operation> {
        vec![put(RowKind::Rule, "per_user", &per_user(50))]
    }

    async fn effect(fixture: &Fixture, operations: &[Operation]) -> ChangeEffect {
        let rule_rows = fixture.control.current().await.expect("rows");
        let plan = fixture.control.plan(&rule_rows, (ChangeKind::Edit, operations), "ada").await;
        plan.expect("a plan").effect
    }

    /// The consent that halving the limit needs, and the last part of its reason.
    async fn consent(fixture: &Fixture) -> (ChangeNeeds, String) {
        let effect = effect(fixture, &halved()).await;
        (effect.needs, effect.because.rsplit("; ").next().unwrap_or_default().to_owned())
    }

    #[tokio::test]
    async fn approval_becomes_a_confirmation_if_no_other_person_could_give_it() {
        let fixture = fixture().await;
        let confirmation = |why: &str| (ChangeNeeds::Confirmation, why.to_owned());
        assert_eq!(consent(&fixture).await, confirmation("without tokens there is no second approver"));
        fixture.node.set_approvers(&["ada"]);
        assert_eq!(consent(&fixture).await, confirmation("no other credential may approve"));
        fixture.node.set_approvers(&["ada", "bob"]);
        let approval = "lowers rule \"per_user\" from 100 to 50, by 50.0 %".to_owned();
        assert_eq!(consent(&fixture).await, (ChangeNeeds::Approver, approval.clone()));
        let of_bob = Credential {
            hash: "0".repeat(64),
            name: "bob".to_owned(),
            tenant: String::new(),
            role: "admin".to_owned(),
            created_ms: 1,
            expires_ms: None,
        };
        fixture.store.put_credential(&of_bob, fixture.by()).await.expect("put");
        assert_eq!(consent(&fixture).await, confirmation("no other credential may approve"), "ada made it");
        fixture.node.set_approvers(&["ada", "bob", "carol"]);
        assert_eq!(consent(&fixture).await, (ChangeNeeds::Approver, approval));
    }

    #[tokio::test]
    async fn first_change_of_a_new_store_needs_no_approval() {
        let (known, new) = (fixture().await, Fixture::new().await);
        for fixture in [&known, &new] {
            fixture.node.set_approvers(&["ada", "bob"]);
        }
        let fit = async |fixture: &Fixture| {
            let effect = effect(&known, &halved()).await;
            fixture.control.fit_to_approvers(effect, &RuleRows::default(), "ada").await.expect("names")
        };
        let first = fit(&new).await;
        assert_eq!(first.needs, ChangeNeeds::Confirmation);
        assert!(first.because.ends_with("; the store is new"), "{}", first.because);
        let later = fit(&known).await;
        assert_eq!(later.needs, ChangeNeeds::Approver, "an empty store in place of a lost one is not new");
    }

    #[tokio::test]
    async fn change_is_made_after_the_consent_that_it_needs() {
        let fixture = fixture().await;
        let rule_rows = fixture.control.current().await.expect("rows");
        let proposal = || Proposal::new(rule_rows.revision, "a test", halved());
        let confirmable = effect(&fixture, &halved()).await;
        let refused = fixture.control.make(&rule_rows, proposal(), &confirmable, false, "ada").await;
        let Err(ChangeError::Unconfirmed(because)) = refused else { panic!("{refused:?}") };
        assert_eq!(because, confirmable.because);
        fixture.node.set_approvers(&["ada", "bob"]);
        let approvable = effect(&fixture, &halved()).await;
        let waiting = fixture.control.make(&rule_rows, proposal(), &approvable, true, "ada").await;
        let Ok(ChangeOutcome::Waiting(waiting)) = waiting else { panic!("{waiting:?}") };
        assert_eq!((waiting.needs, waiting.state), (ChangeNeeds::Approver, ChangeState::Waiting));
        let made = fixture.control.make(&rule_rows, proposal(), &confirmable, true, "ada").await;
        assert!(matches!(made, Ok(ChangeOutcome::Applied(_))), "{made:?}");
    }

    #[tokio::test]
    async fn approved_change_that_now_denies_more_waits_for_another_approval() {
        let fixture = fixture().await;
        fixture.node.set_approvers(&["ada", "bob"]);
        let control = &fixture.control;
        let rule_rows = control.current().await.expect("rows");
        let proposal = Proposal::new(rule_rows.revision, "a test", halved());
        let approvable = effect(&fixture, &halved()).await;
        let made = control.make(&rule_rows, proposal, &approvable, false, "ada").await;
        let Ok(ChangeOutcome::Waiting(Change { id, .. })) = made else { panic!("{made:?}") };
        fixture
            .store
            .approve(id, control.attribution("bob").expect("a running node"))
            .await
            .expect("approved");
        let stored = control.stored_change(id).await.expect("stored");
        let same = control.plan_stored(&rule_rows, &stored).await.expect("a plan").effect;
        assert!(!same.is_beyond);
        // The same limit is now a twentieth, not a half.
        fixture.put("per_user", &per_user(1_000)).await;
        let rule_rows = control.current().await.expect("rows");
        let effect = control.plan_stored(&rule_rows, &stored).await.expect("a plan").effect;
        assert!(effect.is_beyond);
        let waits = control.apply_stored(&rule_rows, &stored, &effect, true, "ada").await;
        let Ok(ChangeOutcome::Waiting(change)) = waits else { panic!("{waits:?}") };
        assert_eq!((change.state, change.approval), (ChangeState::Waiting, None));
        fixture.node.set_approvers(&["ada"]);
        let alone = control.plan_stored(&rule_rows, &stored).await.expect("a plan").effect;
        assert_eq!((alone.needs, alone.is_beyond), (ChangeNeeds::Confirmation, false));
    }
}
