//! Rules that come from a store: taken over whole when they change, kept when the store is gone.
//!
//! What is in force is only ever replaced by something that compiled. Emergencies are taken over on a way of their own: they
//! wait for no book to be read, and no rule is compiled again for them.

mod applied;
mod credentials;
mod denials;
mod follow;
mod rollback;
mod snapshots;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tidegate_rules::RuleSet;
use tidegate_rules::book::{Book, EmergencyRow};
use tidegate_rules::store::{Store, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;

pub(crate) use follow::Following;

use denials::Denials;

use crate::auth::Credentials;
use crate::metrics::Followed;
use crate::rules::GatedRules;
use crate::shared::Shared;

/// The rules' store as this server knows it.
#[derive(Debug)]
pub(crate) struct Control {
    store: Store,
    shared: Weak<Shared>,
    /// What is asked of the store is asked here: a worker's runtime has decisions to make.
    runtime: Handle,
    placement: Option<String>,
    /// Those of the configuration, which hold whatever the store says.
    configured: Arc<Credentials>,
    in_force: Mutex<Arc<Book>>,
    /// One load of each kind at a time: what changes meanwhile is one more load.
    loading: tokio::sync::Mutex<Tried>,
    loading_emergencies: tokio::sync::Mutex<()>,
    /// Wakes whoever loads the one or the other.
    rows_wanted: Notify,
    /// Whether whoever loads rows is to look at more than the heads.
    everything_wanted: AtomicBool,
    emergencies_wanted: Notify,
    denials: Mutex<Denials>,
}

/// What was tried last, so that what was refused is not tried again until it changes.
#[derive(Debug, Default)]
struct Tried {
    refused: Option<(u64, u64)>,
    credential_revision: Option<u64>,
}

/// Why what the store holds is not in force.
#[derive(Debug)]
enum NotTaken {
    /// The store did not give it.
    Failed(StoreError),
    /// It is wrong.
    Refused(String),
    /// The server stops.
    Stopping,
}

impl std::fmt::Display for NotTaken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Refused(problems) => f.write_str(problems),
            Self::Stopping => f.write_str("the server stops"),
        }
    }
}

impl From<StoreError> for NotTaken {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

/// How thoroughly the store is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// All it holds, for the first time: nothing of it is news.
    First,
    /// What its heads say.
    Heads,
    /// All it holds, whatever its heads say.
    Everything,
}

impl Control {
    /// The store.
    pub(crate) fn store(&self) -> &Store {
        &self.store
    }

    /// What the set in force was compiled from.
    pub(crate) fn book(&self) -> Arc<Book> {
        Arc::clone(&self.in_force())
    }

    /// Milliseconds since the Unix epoch, by the server's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.shared.upgrade().map_or(0, |shared| shared.now_ms())
    }

    /// Loads, compiles and puts in force what the store holds now; called after a change made here, so that this server
    /// does not wait for its own notification.
    pub(crate) async fn refresh(self: &Arc<Self>) -> Result<(), String> {
        let control = Arc::clone(self);
        // Whoever asked may be gone before it is done.
        let refreshed = self.runtime.spawn(async move {
            control.take_emergencies().await?;
            control.take_rows(Look::Heads).await
        });
        match refreshed.await {
            Ok(taken) => taken.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn in_force(&self) -> MutexGuard<'_, Arc<Book>> {
        // Whoever panicked had not begun to replace it.
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared(&self) -> Result<Arc<Shared>, NotTaken> {
        self.shared.upgrade().ok_or(NotTaken::Stopping)
    }

    /// Takes over templates, rules and overrides, and credentials, if they moved.
    async fn take_rows(self: &Arc<Self>, look: Look) -> Result<(), NotTaken> {
        let mut tried = self.loading.lock().await;
        let heads = self.store.heads().await?;
        if look != Look::Heads || tried.credential_revision != Some(heads.credential_revision) {
            self.take_credentials().await?;
            tried.credential_revision = Some(heads.credential_revision);
        }
        let seen = (heads.revision, heads.emergency_revision);
        let is_known = self.book().revision == heads.revision || tried.refused == Some(seen);
        if look == Look::Heads && is_known {
            return Ok(());
        }
        let book = self.store.load().await?;
        let before = self.book();
        if *before == book && look != Look::First {
            return Ok(());
        }
        let seen = (book.revision, book.emergency_revision);
        let taken = self.blocking(move |control, shared| control.put_in_force(book, shared)).await;
        tried.refused = matches!(taken, Err(NotTaken::Refused(_))).then_some(seen);
        self.count(&taken);
        if taken.is_ok() && look != Look::First {
            self.note_applied(before).await;
        }
        taken
    }

    /// Takes over emergencies, if they moved, for the rules that are in force.
    async fn take_emergencies(self: &Arc<Self>) -> Result<(), NotTaken> {
        let _one_at_a_time = self.loading_emergencies.lock().await;
        let (revision, rows) = self.store.emergencies().await?;
        if self.book().emergency_revision == revision {
            return Ok(());
        }
        let taken = self.blocking(move |control, shared| control.put_under(revision, rows, shared)).await;
        self.count(&taken);
        if taken.is_ok() {
            self.note_emergencies().await;
        }
        taken
    }

    /// Measures how long the emergencies that were just put in force took.
    async fn note_emergencies(&self) {
        let now_ms = self.now_ms();
        match (self.emergencies_changed_ms().await, self.shared.upgrade()) {
            (Ok(Some(changed_ms)), Some(shared)) => {
                shared.metrics.control.lagged(now_ms.saturating_sub(changed_ms));
            }
            (Ok(_), _) => {}
            (Err(error), _) => tracing::debug!(%error, "it is not known how long emergencies took"),
        }
    }

    /// Does what takes long where nobody waits for it.
    async fn blocking(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &Shared) -> Result<(), NotTaken> + Send + 'static,
    ) -> Result<(), NotTaken> {
        let (control, shared) = (Arc::clone(self), self.shared()?);
        let done = tokio::task::spawn_blocking(move || work(&control, &shared)).await;
        done.unwrap_or_else(|error| Err(NotTaken::Refused(format!("could not be compiled: {error}"))))
    }

    fn put_in_force(&self, mut book: Book, shared: &Shared) -> Result<(), NotTaken> {
        let mut rules = compile(&book, self.placement.as_deref(), shared).map_err(NotTaken::Refused)?;
        let mut in_force = self.in_force();
        // Emergencies do not wait while a book is read: those of a later moment stay.
        if in_force.emergency_revision > book.emergency_revision {
            let later = (in_force.emergency_revision, &*in_force.emergencies);
            rules = rules.with_emergencies(later, shared).map_err(NotTaken::Refused)?;
            (book.emergency_revision, book.emergencies) = (later.0, later.1.to_vec());
        }
        shared.metrics.control.in_force(book.revision, book.emergency_revision);
        let replaced = shared.rules.swap(Arc::new(rules));
        *in_force = Arc::new(book);
        let mut denials = self.denials();
        denials.take_from(&replaced);
        denials.mark(&shared.rules.load());
        Ok(())
    }

    fn put_under(&self, revision: u64, rows: Vec<EmergencyRow>, shared: &Shared) -> Result<(), NotTaken> {
        let mut in_force = self.in_force();
        if in_force.emergency_revision >= revision {
            return Ok(());
        }
        let rules = shared.rules.load().with_emergencies((revision, &rows), shared);
        shared.rules.store(Arc::new(rules.map_err(NotTaken::Refused)?));
        // Copied only while somebody else looks at it.
        let book = Arc::make_mut(&mut in_force);
        (book.emergency_revision, book.emergencies) = (revision, rows);
        shared.metrics.control.in_force(book.revision, book.emergency_revision);
        Ok(())
    }

    fn count(&self, taken: &Result<(), NotTaken>) {
        let outcome = match taken {
            Ok(()) => Followed::Taken,
            Err(NotTaken::Refused(_)) => Followed::Refused,
            Err(NotTaken::Failed(_)) => Followed::Failed,
            Err(NotTaken::Stopping) => return,
        };
        if let Some(shared) = self.shared.upgrade() {
            shared.metrics.control.followed(outcome);
        }
    }
}

/// The rules of a book, ready to decide.
fn compile(book: &Book, placement: Option<&str>, shared: &Shared) -> Result<GatedRules, String> {
    let set = RuleSet::compile(book, placement, shared.now_ms()).map_err(|problems| problems.to_string())?;
    GatedRules::new(set, shared)
}
