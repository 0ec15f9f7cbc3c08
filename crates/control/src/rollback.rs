//! Undoes a change by itself when the rules that it touched suddenly deny far more.

use std::sync::{Arc, MutexGuard, PoisonError};

use tidegate_record::timestamp;
use tidegate_rules::change::{Change, ChangeState};
use tidegate_rules::store::{ApplyConditions, Rollback, StoreError};
use tokio::time::{MissedTickBehavior, interval};

use crate::control::{Control, LoadDepth};
use crate::denials::{DenialJump, Denials, LOOK_EVERY};
use crate::guardrail::ChangeScope;
use crate::node::{ControlEvent, Node};
use crate::plan::PlanError;
use crate::watch::WatchForecast;

/// Rules of a forecast under one lock of the denials. More: a forecast ends earlier; loads of rules
/// wait longer for it.
const FORECAST_AT_ONCE: usize = 1_000;

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
    /// The rule, and its denials before and after.
    pub reason: String,
}

impl AutomaticRollback {
    /// Returns `None` if the change undid none, or is not applied.
    fn of(by: Change) -> Option<Self> {
        Some(Self {
            change: by.undoes.first().copied()?,
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

    /// Returns the rules of a change that would be watched. A change may touch all rules, so the
    /// denials are locked for some of them at a time: a load of new rules waits for that lock.
    pub(super) fn forecast(&self, scope: &ChangeScope) -> WatchForecast {
        let stricter = scope.stricter();
        let mut forecast = WatchForecast::default();
        for some in scope.touched().chunks(FORECAST_AT_ONCE) {
            self.denials().forecast(some, &stricter, &mut forecast);
        }
        forecast
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
        let DenialJump { change, rule, before_per_minute, denied } = jump;
        let (of, revision) = (*change, self.rule_rows().revision);
        if self.with_denials(move |denials| denials.is_refused(of, revision)).await == Some(true) {
            return;
        }
        let reason = format!(
            "denials of rule {rule:?} went from {before_per_minute:.0} to {denied} a minute within five \
             minutes of change {change}"
        );
        match self.try_undo(*change, &reason).await {
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
            Err(PlanError::Store(error)) => self.left_alone(*change, &reason, &error).await,
            // Until other rules are in force, which may make sense without it.
            Err(PlanError::Wrong(problems)) => {
                return self.not_undone(jump, Some(revision), &reason, &problems).await;
            }
        }
        self.with_denials(move |denials| denials.forget(of)).await;
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

    /// Restores the rows before a change, if all rules compile with them.
    async fn try_undo(self: &Arc<Self>, change: u64, reason: &str) -> Result<(), PlanError> {
        let rule_rows = self.current().await?;
        let proposal = self.store.restoring(Rollback::Change(change), reason).await?;
        self.compile_change(&rule_rows, &proposal.operations, drop).await?;
        let conditions = ApplyConditions { confirmed: false, checked: Some((&*rule_rows).into()) };
        self.store.apply_new(&proposal, conditions, self.attribution(AUTOMATIC)?).await?;
        Ok(())
    }
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
    /// Looks at the denials since the last look, and rolls back the changes whose rules jumped.
    /// [`StoreFollower::run`](crate::StoreFollower::run) calls it every [`LOOK_EVERY`].
    pub async fn look_once(self: &Arc<Self>, node: Arc<N>) {
        self.review_pending().await;
        let looked = self.with_denials(move |denials| {
            let rules = node.rules();
            denials.take_from(&*rules);
            let jumps = denials.look(node.now_ms());
            denials.mark(&*rules);
            jumps
        });
        // A failed look does not stop the follower: there is another one.
        for jump in looked.await.unwrap_or_default() {
            self.undo(&jump).await;
        }
    }
}
