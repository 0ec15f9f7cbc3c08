//! Undoes a change by itself when the rules that it touched suddenly deny far more.

use std::sync::{Arc, MutexGuard, PoisonError};

use tidegate_rules::change::ChangeState;
use tidegate_rules::store::{ApplyConditions, Attribution, Rollback, StoreError};
use tokio::time::{MissedTickBehavior, interval};

use super::denials::{DenialJump, Denials, LOOK_EVERY};
use super::{Control, LoadDepth, PlanError};
use crate::metrics::ControlMetrics;

/// Who undoes a change that nobody undid, as the audit says.
pub(crate) const AUTOMATIC: &str = "tidegate: automatic";

impl Control {
    /// For threads that may wait: who has them may be going through all rules.
    pub(super) fn denials(&self) -> MutexGuard<'_, Denials> {
        // Counts that are off by one look judge as well.
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with them where nobody waits for it. Nothing, if that panicked, which is said.
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
            "denials of rule {rule:?} went from {before_per_minute:.0} to {denied} a minute within five minutes of change \
             {change}"
        );
        match self.try_undo(*change, &reason).await {
            Ok(()) => {
                tracing::error!(change, reason, "rolled back");
                self.count_rollback(ControlMetrics::rolled_back);
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

    /// Says what is not undone any more: another server did, or somebody changed it further. They may know better, but what it
    /// denies it denies still.
    async fn left_alone(&self, change: u64, reason: &str, error: &StoreError) {
        let state = self.store.change(change).await.map(|change| change.state);
        if state.is_ok_and(|state| state != ChangeState::Applied) {
            return tracing::info!(change, %error, "not rolled back by this server");
        }
        tracing::error!(change, reason, %error, "not rolled back, and left to people: it was changed further");
        self.count_rollback(ControlMetrics::not_rolled_back);
    }

    /// Says once why a change stays that should not; at a revision where that was found out it is not tried again.
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
            self.count_rollback(ControlMetrics::not_rolled_back);
        }
    }

    fn count_rollback(&self, count: fn(&ControlMetrics)) {
        if let Some(shared) = self.shared.upgrade() {
            count(&shared.metrics.control);
        }
    }

    /// Restores what was there before a change, if all the rules make sense with that.
    async fn try_undo(self: &Arc<Self>, change: u64, reason: &str) -> Result<(), PlanError> {
        let rule_rows = self.current().await?;
        let proposal = self.store.restoring(Rollback::Change(change), reason).await?;
        self.compile_change(&rule_rows, &proposal.operations, drop).await?;
        let conditions = ApplyConditions { confirmed: false, checked: Some((&*rule_rows).into()) };
        let act = Attribution { by: AUTOMATIC, now_ms: self.now_ms() };
        self.store.apply_new(&proposal, conditions, act).await?;
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

/// Looks at denials, for ever.
pub(super) async fn look(control: Arc<Control>) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(shared) = control.shared.upgrade() else { return };
        control.review_pending().await;
        let looked = control.with_denials(move |denials| {
            let rules = shared.rules.load_full();
            denials.take_from(&rules);
            let jumps = denials.look(shared.now_ms());
            denials.mark(&rules);
            jumps
        });
        // Rules are followed whatever becomes of a look, and there is another one.
        for jump in looked.await.unwrap_or_default() {
            control.undo(&jump).await;
        }
    }
}
