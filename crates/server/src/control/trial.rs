//! Changes are looked at as a whole before they are made, by people or by the server itself.

use std::sync::Arc;

use tidegate_rules::EMERGENCIES_MAX;
use tidegate_rules::book::{Book, EmergencyRow};
use tidegate_rules::change::Operation;
use tidegate_rules::store::{StoreError, in_emergency};

use super::{Control, let_go};
use crate::guardrail::Trial;
use crate::rules::check_tenants;

/// How many changes are compiled at the same time. More: fewer wait for another; each needs the memory of two books.
pub(super) const TRIALS_MAX: usize = 1;

/// Why a change is not made.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// The store would refuse it, or could not be asked.
    Store(StoreError),
    /// The rules would make no sense with it.
    Wrong(String),
}

impl From<StoreError> for Unfit {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl Control {
    /// What the store holds now. That is not in force yet if another server changed it a moment ago, and never if it was
    /// refused: it has to be known all the same, or nobody could mend it.
    pub(crate) async fn current(self: &Arc<Self>) -> Result<Arc<Book>, StoreError> {
        let heads = self.store.heads().await?;
        let is_current = |book: &Book| {
            (book.revision, book.emergency_revision) == (heads.revision, heads.emergency_revision)
        };
        let mut book = self.book();
        if !is_current(&book) {
            if let Err(problem) = self.refresh().await {
                tracing::debug!(problem, "what the store holds is looked at, and not in force");
            }
            book = self.book();
        }
        if is_current(&book) { Ok(book) } else { self.load_aside().await }
    }

    /// What the store holds, read and in the end let go of where that holds up no decisions.
    async fn load_aside(self: &Arc<Self>) -> Result<Arc<Book>, StoreError> {
        let control = Arc::clone(self);
        let loading = self.runtime.spawn(async move {
            let book = Arc::new(control.store.load().await?);
            control.runtime.spawn(let_go(Arc::clone(&book.rows)));
            Ok(book)
        });
        loading.await.unwrap_or_else(|error| Err(StoreError::Unreachable(error.to_string())))
    }

    /// Compiles what the store holds with a change in it, on a thread where that holds up no decisions.
    pub(crate) async fn attempt(&self, book: &Arc<Book>, operations: &[Operation]) -> Result<Trial, Unfit> {
        let shared = self.shared.upgrade().ok_or_else(stopping)?;
        let is_missing = |operation: &&Operation| {
            let (kind, name) = operation.row();
            operation.body().is_none() && book.row(kind, name).is_none()
        };
        if let Some(operation) = operations.iter().find(is_missing) {
            let (kind, name) = operation.row();
            return Err(StoreError::Missing(vec![(kind, name.to_owned())]).into());
        }
        let now_ms = shared.now_ms();
        let in_emergency = in_emergency(operations, &book.emergencies, now_ms);
        if !in_emergency.is_empty() {
            return Err(StoreError::InEmergency(in_emergency).into());
        }
        let permit = Arc::clone(&self.trials).acquire_owned().await.map_err(|_| stopping())?;
        let (book, operations) = (Arc::clone(book), operations.to_vec());
        let placement = self.placement.clone();
        aside(move || {
            let _permit = permit;
            let in_force = shared.rules.load();
            let trial = Trial::new(in_force.set(), &book, &operations, placement.as_deref(), now_ms)
                .map_err(|problems| problems.to_string())?;
            check_tenants(trial.after(), &shared.tenants)?;
            Ok(trial)
        })
        .await
    }

    /// Puts an emergency before the rules in force, with all others, to see whether that can be. It waits for no change.
    pub(crate) async fn try_emergency(&self, row: &EmergencyRow) -> Result<(), Unfit> {
        let shared = self.shared.upgrade().ok_or_else(stopping)?;
        let (book, now_ms) = (self.book(), shared.now_ms());
        let others = book.emergencies.iter().filter(|known| known.id != row.id && now_ms < known.expires_ms);
        // That there are too many is for the store to say, which knows of all.
        let others = others.take(EMERGENCIES_MAX - 1).cloned();
        let all: Vec<EmergencyRow> = others.chain([row.clone()]).collect();
        aside(move || {
            let tried = shared.rules.load().set().with_emergencies(book.emergency_revision, &all, now_ms);
            tried.map(drop).map_err(|problems| problems.to_string())
        })
        .await
    }
}

fn stopping() -> Unfit {
    Unfit::Wrong("the server stops".to_owned())
}

async fn aside<T: Send + 'static>(
    compile: impl FnOnce() -> Result<T, String> + Send + 'static,
) -> Result<T, Unfit> {
    let ended = |error| Err(format!("could not be compiled: {error}"));
    tokio::task::spawn_blocking(compile).await.unwrap_or_else(ended).map_err(Unfit::Wrong)
}
