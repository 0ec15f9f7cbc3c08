//! Undoes a change by itself when the rules that it touched suddenly deny far more.

use std::sync::{Arc, MutexGuard, PoisonError};

use tidegate_rules::change::State;
use tidegate_rules::store::{Act, Conditions, Rollback, StoreError};
use tokio::time::{MissedTickBehavior, interval};

use super::denials::{Denials, Jump, LOOK_EVERY};
use super::{Control, Look, Unfit};
use crate::metrics::ControlMetrics;

/// Who undoes a change that nobody undid, as the audit says.
pub(crate) const AUTOMATIC: &str = "tidegate: automatic";

impl Control {
    pub(super) fn denials(&self) -> MutexGuard<'_, Denials> {
        // Counts that are off by one look judge as well.
        self.denials.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn undo(self: &Arc<Self>, jump: &Jump) {
        let Jump { change, rule, before_per_minute, denied } = jump;
        let revision = self.book().revision;
        if self.denials().is_refused(*change, revision) {
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
                self.want(Look::Heads);
            }
            Err(Unfit::Store(error)) if may_pass(&error) => {
                return tracing::warn!(change, %error, "to be rolled back, and tried again");
            }
            // Until the emergency is over, which may be so at any time.
            Err(Unfit::Store(error @ StoreError::InEmergency(_))) => {
                return self.not_undone(jump, None, &reason, &error.to_string());
            }
            Err(Unfit::Store(error)) => self.left_alone(*change, &reason, &error).await,
            // Until other rules are in force, which may make sense without it.
            Err(Unfit::Wrong(problems)) => return self.not_undone(jump, Some(revision), &reason, &problems),
        }
        self.denials().forget(*change);
    }

    /// Says what is not undone any more: another server did, or somebody changed it further. They may know better, but what it
    /// denies it denies still.
    async fn left_alone(&self, change: u64, reason: &str, error: &StoreError) {
        let state = self.store.change(change).await.map(|change| change.state);
        if state.is_ok_and(|state| state != State::Applied) {
            return tracing::info!(change, %error, "not rolled back by this server");
        }
        tracing::error!(change, reason, %error, "not rolled back, and left to people: it was changed further");
        self.count_rollback(ControlMetrics::not_rolled_back);
    }

    /// Says once why a change stays that should not; at a revision where that was found out it is not tried again.
    fn not_undone(&self, jump: &Jump, revision: Option<u64>, reason: &str, problem: &str) {
        let change = jump.change;
        if self.denials().refuse(change, revision) {
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
    async fn try_undo(self: &Arc<Self>, change: u64, reason: &str) -> Result<(), Unfit> {
        let book = self.current().await?;
        let proposal = self.store.restoring(Rollback::Change(change), reason).await?;
        self.attempt(&book, &proposal.operations, drop).await?;
        let conditions = Conditions { confirmed: false, checked: Some((&*book).into()) };
        let act = Act { by: AUTOMATIC, now_ms: self.now_ms() };
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
        control.note_unnoted().await;
        let looking = Arc::clone(&control);
        let looked = tokio::task::spawn_blocking(move || {
            let mut denials = looking.denials();
            let rules = shared.rules.load_full();
            denials.take_from(&rules);
            let jumps = denials.look(shared.now_ms());
            denials.mark(&rules);
            jumps
        });
        match looked.await {
            Ok(jumps) => {
                for jump in jumps {
                    control.undo(&jump).await;
                }
            }
            // Rules are followed whatever becomes of this look, and there is another one.
            Err(error) => tracing::error!(%error, "denials were not looked at"),
        }
    }
}
