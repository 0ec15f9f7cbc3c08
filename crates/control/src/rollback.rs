//! Undoes a change by itself when the rules that it touched suddenly deny far more keys.

use std::sync::{Arc, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use tidegate_record::timestamp;
use tidegate_rules::change::{Change, ChangeState, Proposal};
use tidegate_rules::rows::RuleRows;
use tidegate_rules::store::{ApplyConditions, Rollback, StoreError};
use tokio::time::{MissedTickBehavior, interval};

use crate::control::{Control, LoadDepth};
use crate::denials::{DenialJump, Denials, LOOK_EVERY};
use crate::node::{ControlEvent, Node};
use crate::plan::PlanError;
use crate::row_tenants::RowTenants;

/// Actor of automatic rollbacks in the audit.
pub(crate) const AUTOMATIC: &str = "tidegate: automatic";

/// A change that a server rolled back by itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AutomaticRollback {
    /// The change that was undone.
    pub change: u64,
    /// The change that undid it.
    pub rollback_change: u64,
    /// The revision since the rollback.
    pub revision: u64,
    /// As people read it.
    pub at: String,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// The rule, and its newly denied keys.
    pub reason: String,
    /// The tenant whose rows were restored; `None` if the whole change was undone.
    pub tenant: Option<String>,
}

/// The effect of a rollback that restores only the rows of one tenant. The change stays applied for
/// the others.
#[derive(Debug, Serialize, Deserialize)]
struct PartialRollback {
    needs: String,
    because: String,
    part_of: u64,
    tenant: String,
}

impl AutomaticRollback {
    /// Returns `None` if the change undid none, or is not applied.
    pub(super) fn of(by: Change) -> Option<Self> {
        let part =
            by.effect.as_deref().and_then(|effect| serde_json::from_str::<PartialRollback>(effect).ok());
        let part = part.map(|part| (part.part_of, Some(part.tenant)));
        let (change, tenant) = part.or_else(|| Some((by.undoes.first().copied()?, None)))?;
        Some(Self {
            change,
            tenant,
            rollback_change: by.id,
            revision: by.revision?,
            at: timestamp(by.created_ms),
            at_ms: by.created_ms,
            reason: by.reason,
        })
    }
}

impl<N: Node> Control<N> {
    /// Returns the last automatic rollback of the store, by any server.
    pub fn last_rollback(&self) -> Option<Arc<AutomaticRollback>> {
        self.last_rollback.load_full()
    }

    /// Reads the last automatic rollback from the store.
    pub(super) async fn take_last_rollback(&self) -> Result<(), StoreError> {
        let last = self.store.last_applied_by(AUTOMATIC).await?;
        self.last_rollback.store(last.and_then(AutomaticRollback::of).map(Arc::new));
        Ok(())
    }

    /// Locks the denials, for threads that may wait: the holder may be scanning all rules.
    pub(super) fn denials(&self) -> MutexGuard<'_, Denials> {
        // Counts that are off by one look judge as well.
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs work on the denials on a blocking thread. Logs a panic and returns `None`.
    pub(super) async fn with_denials<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&mut Denials) -> T + Send + 'static,
    ) -> Option<T> {
        let control = Arc::clone(self);
        let done = tokio::task::spawn_blocking(move || work(&mut control.denials())).await;
        done.map_err(|error| tracing::error!(%error, "denials were not looked at")).ok()
    }

    async fn undo(self: &Arc<Self>, jump: &DenialJump) {
        let (change, tenant) = (jump.change, jump.tenant.clone());
        let revision = self.rule_rows().revision;
        if self.with_denials(move |denials| denials.is_refused(change, revision)).await == Some(true) {
            return;
        }
        let reason = jump.to_string();
        match self.try_undo(jump, &reason).await {
            Ok(()) => {
                tracing::error!(change, reason, "rolled back");
                self.count(ControlEvent::RolledBack);
                self.want(LoadDepth::Heads);
            }
            Err(PlanError::Store(error)) if may_pass(&error) => {
                return tracing::warn!(change, %error, "to be rolled back, and tried again");
            }
            // Until the emergency is over, which may be so at any time.
            Err(PlanError::Store(error @ StoreError::InEmergency(_))) => {
                return self.not_undone(jump, None, &reason, &error.to_string()).await;
            }
            Err(PlanError::Store(error)) => self.left_alone(change, &reason, &error).await,
            // Until other rules are in force, which may make sense without it.
            Err(PlanError::Wrong(problems)) => {
                return self.not_undone(jump, Some(revision), &reason, &problems).await;
            }
        }
        self.with_denials(move |denials| denials.forget(change, tenant.as_deref())).await;
    }

    /// Logs that a change is not rolled back any more: another server did it, or a person changed
    /// it further. The person may have a reason, but the denials continue.
    async fn left_alone(&self, change: u64, reason: &str, error: &StoreError) {
        let state = self.store.change(change).await.map(|change| change.state);
        if state.is_ok_and(|state| state != ChangeState::Applied) {
            return tracing::info!(change, %error, "not rolled back by this server");
        }
        tracing::error!(change, reason, %error, "not rolled back, and left to people: it was changed further");
        self.count(ControlEvent::NotRolledBack);
    }

    /// Logs once why a change cannot be rolled back. There is no retry at `revision`.
    async fn not_undone(
        self: &Arc<Self>,
        jump: &DenialJump,
        revision: Option<u64>,
        reason: &str,
        problem: &str,
    ) {
        let change = jump.change;
        if self.with_denials(move |denials| denials.refuse(change, revision)).await == Some(true) {
            tracing::error!(change, reason, problem, "not rolled back: as things are it cannot be");
            self.count(ControlEvent::NotRolledBack);
        }
    }

    /// Restores the rows before a change, or those of the tenant that it concerns, if all rules
    /// compile with them.
    async fn try_undo(self: &Arc<Self>, jump: &DenialJump, reason: &str) -> Result<(), PlanError> {
        let rule_rows = self.current().await?;
        let proposal = self.store.restoring(Rollback::Change(jump.change), reason).await?;
        let proposal = match &jump.tenant {
            Some(tenant) => restricted(proposal, (jump.change, tenant), &rule_rows)?,
            None => proposal,
        };
        self.compile_change(&rule_rows, &proposal.operations, drop).await?;
        let conditions = ApplyConditions { confirmed: false, checked: Some((&*rule_rows).into()) };
        self.store.apply_new(&proposal, conditions, self.attribution(AUTOMATIC)?).await?;
        Ok(())
    }
}

/// Restricts the rollback of a change to the rows of a tenant. It stays the rollback of the whole
/// change if the change has no other rows.
fn restricted(
    mut proposal: Proposal,
    (change, tenant): (u64, &str),
    rule_rows: &RuleRows,
) -> Result<Proposal, PlanError> {
    let tenants = RowTenants { before: rule_rows, after: rule_rows };
    let all = proposal.operations.len();
    proposal.operations.retain(|operation| tenants.of(operation).as_deref() == Some(tenant));
    if proposal.operations.is_empty() {
        return Err(StoreError::NothingToRestore.into());
    }
    if proposal.operations.len() < all {
        let because = format!("undoes change {change} for tenant {tenant:?} only");
        let (needs, tenant) = (proposal.needs.word().to_owned(), tenant.to_owned());
        let part = PartialRollback { needs, because, part_of: change, tenant };
        let effect = serde_json::to_string(&part).map_err(|error| PlanError::Wrong(error.to_string()))?;
        (proposal.effect, proposal.undoes) = (Some(effect), Vec::new());
    }
    Ok(proposal)
}

/// Whether the next look may find it otherwise.
pub(super) fn may_pass(error: &StoreError) -> bool {
    matches!(
        error,
        StoreError::Unreachable(_) | StoreError::Busy | StoreError::Database(_) | StoreError::Moved { .. }
    )
}

/// Looks at the denials, forever.
pub(super) async fn look<N: Node>(control: Arc<Control<N>>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(node) = control.node.upgrade() else { return };
        control.look_once(node).await;
    }
}

impl<N: Node> Control<N> {
    /// Looks at the denials since the last look. Rolls back the changes whose rules jumped, or
    /// raises an alarm. [`StoreFollower::run`](crate::StoreFollower::run) calls it every
    /// [`LOOK_EVERY`].
    pub async fn look_once(self: &Arc<Self>, node: Arc<N>) {
        self.review_pending().await;
        let looked = self.with_denials(move |denials| {
            let rules = node.rules();
            let emergencies = denials.emergency_jumps(&*rules);
            (denials.look(&*rules, node.now_ms()), emergencies)
        });
        // A failed look does not stop the follower: there is another one.
        let (jumps, emergencies) = looked.await.unwrap_or_default();
        for emergency in emergencies {
            self.alarm_of_emergency(emergency).await;
        }
        for jump in jumps {
            match &jump.alarm {
                Some(cause) => self.alarm_of_change(&jump, cause).await,
                None => self.undo(&jump).await,
            }
        }
        if let Err(error) = self.follow_alarms().await {
            tracing::debug!(%error, "the last alarm is not known");
        }
    }
}
