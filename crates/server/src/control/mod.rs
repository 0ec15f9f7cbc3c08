//! Rules that come from a store: taken over whole when they change, kept when the store is gone.
//!
//! What is in force is only ever replaced by something that compiled. Emergencies are taken over on a way of their own: they
//! wait for no book to be read, and no rule is compiled again for them.

mod applied;
mod bucket;
mod credentials;
mod denials;
mod follow;
mod plan;
mod review;
mod rollback;
mod snapshots;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use arc_swap::ArcSwap;
use tidegate_rules::RuleSet;
use tidegate_rules::rows::{EmergencyRow, RuleRows};
use tidegate_rules::store::{Credential, Store, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

pub(crate) use bucket::Bucket;
pub(crate) use follow::StoreFollower;
pub(crate) use plan::{PlanError, PlanResult};
pub(crate) use snapshots::Snapshots;

use denials::Denials;
use plan::PlanPermits;
use review::{PreviousRules, UnreviewedChanges};

use crate::auth::Credentials;
use crate::metrics::StoreLoad;
use crate::rules::{ActiveRules, warn_of};
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
    /// Whoever looks at it never waits: what replaces it holds `replacing`.
    in_force: ArcSwap<RuleRows>,
    replacing: Mutex<()>,
    /// Those of the store, or of the snapshot that this server began with.
    credentials: ArcSwap<Vec<Credential>>,
    /// One load of each kind at a time: what changes meanwhile is one more load.
    loading: tokio::sync::Mutex<LoadState>,
    loading_emergencies: tokio::sync::Mutex<()>,
    /// Wakes whoever loads the one or the other.
    rows_wanted: Notify,
    /// Whether whoever loads rows is to look at more than the heads.
    everything_wanted: AtomicBool,
    emergencies_wanted: Notify,
    denials: Mutex<Denials>,
    /// One at a time looks at what came into force.
    unreviewed: tokio::sync::Mutex<Option<UnreviewedChanges>>,
    plan_permits: PlanPermits,
    /// What the store holds and is not in force, as long as somebody looks at it: however many do, it is there once.
    beside: tokio::sync::Mutex<Weak<RuleRows>>,
}

/// What was tried last, so that what was refused is not tried again until it changes.
#[derive(Debug, Default)]
struct LoadState {
    refused: Option<(u64, u64)>,
    /// Whether what is in force is of another store than this one, which is new: its revisions say nothing here.
    is_of_another: bool,
    credential_revision: Option<u64>,
}

/// Why what the store holds is not in force.
#[derive(Debug)]
enum LoadError {
    /// The store did not give it.
    Failed(StoreError),
    /// It is wrong.
    Refused(String),
    /// The server stops.
    Stopping,
}

impl std::fmt::Display for LoadError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Failed(error) => error.fmt(f),
            Self::Refused(problems) => f.write_str(problems),
            Self::Stopping => f.write_str("the server stops"),
        }
    }
}

impl From<StoreError> for LoadError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

/// What a store is that has nothing, where there are rules in force.
const EMPTY: &str = "it is empty and new, which the store of the rules in force is not: if that was lost, put it back; these \
                     rules stay until something is applied to this one";

/// How thoroughly the store is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum LoadDepth {
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
    pub(crate) fn rule_rows(&self) -> Arc<RuleRows> {
        self.in_force.load_full()
    }

    /// Milliseconds since the Unix epoch, by the server's clock.
    pub(crate) fn now_ms(&self) -> u64 {
        self.shared.upgrade().map_or(0, |shared| shared.now_ms())
    }

    /// Loads, compiles and puts in force what the store holds now; called after a change made here, so that this server
    /// does not wait for its own notification.
    pub(crate) async fn refresh(self: &Arc<Self>) -> Result<(), String> {
        let control = Arc::clone(self);
        self.to_its_end(async move {
            let emergencies = control.take_emergencies().await;
            // Those that do not fit these rules may fit the next, and credentials have nothing to do with either.
            control.take_rows(LoadDepth::Heads).await.and(emergencies)
        })
        .await
    }

    /// The same of emergencies alone: they wait for no book, neither for one that is being read nor for one that is refused.
    pub(crate) async fn refresh_emergencies(self: &Arc<Self>) -> Result<(), String> {
        let control = Arc::clone(self);
        self.to_its_end(async move { control.take_emergencies().await }).await
    }

    /// Whoever asked may be gone before it is done.
    async fn to_its_end(
        &self,
        taking: impl Future<Output = Result<(), LoadError>> + Send + 'static,
    ) -> Result<(), String> {
        match self.runtime.spawn(taking).await {
            Ok(taken) => taken.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Held by whoever replaces the rules in force and the book that they are from.
    fn replacing(&self) -> MutexGuard<'_, ()> {
        // Whoever panicked had not begun to replace them.
        self.replacing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shared(&self) -> Result<Arc<Shared>, LoadError> {
        self.shared.upgrade().ok_or(LoadError::Stopping)
    }

    /// Takes over templates, rules and overrides, and credentials, if they moved.
    async fn take_rows(self: &Arc<Self>, look: LoadDepth) -> Result<(), LoadError> {
        let mut tried = self.loading.lock().await;
        let revisions = self.store.revisions().await?;
        if look != LoadDepth::Heads || tried.credential_revision != Some(revisions.credential_revision) {
            self.take_credentials(&revisions).await?;
            tried.credential_revision = Some(revisions.credential_revision);
        }
        let seen = (revisions.revision, revisions.emergency_revision);
        let is_in_force = self.rule_rows().revision == revisions.revision && !tried.is_of_another;
        if look == LoadDepth::Heads && (is_in_force || tried.refused == Some(seen)) {
            return Ok(());
        }
        if revisions.revision == 0 && self.rule_rows().revision > 0 {
            *tried = LoadState { refused: Some(seen), is_of_another: true, ..*tried };
            let refused = LoadError::Refused(EMPTY.to_owned());
            self.count(Err(&refused));
            return Err(refused);
        }
        let rule_rows = self.store.load().await?;
        let seen = (rule_rows.revision, rule_rows.emergency_revision);
        let is_of_another = tried.is_of_another;
        let taken = self
            .blocking(move |control, shared| control.take_rule_rows(rule_rows, look, is_of_another, shared))
            .await;
        tried.refused = matches!(taken, Err(LoadError::Refused(_))).then_some(seen);
        if !matches!(taken, Ok(None)) {
            self.count(taken.as_ref().map(|_| ()));
        }
        let replaced = taken?;
        tried.is_of_another = false;
        if let Some(replaced) = replaced.filter(|_| look != LoadDepth::First) {
            // One that was declared meanwhile may not have fitted the rules before.
            self.emergencies_wanted.notify_one();
            self.review_applied(replaced).await;
        }
        Ok(())
    }

    /// Takes over emergencies, if they moved, for the rules that are in force.
    async fn take_emergencies(self: &Arc<Self>) -> Result<(), LoadError> {
        let _one_at_a_time = self.loading_emergencies.lock().await;
        // Before the store is asked: what it says then is later, also where it lost something and counts from less.
        let known = self.rule_rows();
        let (revision, rows) = self.store.emergencies().await?;
        let is_known = (known.emergency_revision, &known.emergencies) == (revision, &rows);
        // As with rules: a store that never had any says nothing of those of another.
        if is_known || revision == 0 {
            return Ok(());
        }
        let known = known.emergency_revision;
        let taken =
            self.blocking(move |control, shared| control.put_under((revision, rows), known, shared)).await;
        self.count(taken.as_ref().copied());
        if taken.is_ok() {
            // Nobody waits for that: what it asks the store may stand behind a book that is being read.
            let (control, now_ms) = (Arc::clone(self), self.now_ms());
            self.runtime.spawn(async move { control.note_emergencies(now_ms).await });
        }
        taken
    }

    /// Measures how long the emergencies took that were put in force by then.
    async fn note_emergencies(&self, now_ms: u64) {
        match (self.emergencies_changed_ms().await, self.shared.upgrade()) {
            (Ok(Some(changed_ms)), Some(shared)) => {
                shared.metrics.control.lagged(now_ms.saturating_sub(changed_ms));
            }
            (Ok(_), _) => {}
            (Err(error), _) => tracing::debug!(%error, "it is not known how long emergencies took"),
        }
    }

    /// Does what takes long where nobody waits for it.
    async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &Shared) -> Result<T, LoadError> + Send + 'static,
    ) -> Result<T, LoadError> {
        let (control, shared) = (Arc::clone(self), self.shared()?);
        let done = tokio::task::spawn_blocking(move || work(&control, &shared)).await;
        done.unwrap_or_else(|error| Err(LoadError::Refused(format!("could not be compiled: {error}"))))
    }

    /// Puts a book in force that may be of another store, and gives what was; nothing if it is the same.
    fn take_rule_rows(
        &self,
        rule_rows: RuleRows,
        look: LoadDepth,
        is_of_another: bool,
        shared: &Shared,
    ) -> Result<Option<PreviousRules>, LoadError> {
        if *self.in_force.load_full() == rule_rows && look != LoadDepth::First {
            return Ok(None);
        }
        self.put_in_force(rule_rows, is_of_another, shared).map(Some)
    }

    /// Replaces what is in force, and gives what was.
    fn put_in_force(
        &self,
        mut rule_rows: RuleRows,
        is_of_another: bool,
        shared: &Shared,
    ) -> Result<PreviousRules, LoadError> {
        let mut rules = compile(&rule_rows, self.placement.as_deref(), shared).map_err(LoadError::Refused)?;
        // Those that are watched count all that they are asked, from the first.
        self.denials().mark(&rules);
        let replacing = self.replacing();
        let before = self.rule_rows();
        // Emergencies do not wait while a book is read: those of a later moment stay.
        if !is_of_another && before.emergency_revision > rule_rows.emergency_revision {
            let later = (before.emergency_revision, &*before.emergencies);
            rules = rules.with_emergencies(later, shared).map_err(LoadError::Refused)?;
            (rule_rows.emergency_revision, rule_rows.emergencies) = (later.0, later.1.to_vec());
        }
        shared.metrics.control.in_force(rule_rows.revision, rule_rows.emergency_revision);
        let replaced = shared.rules.swap(Arc::new(rules));
        self.in_force.store(Arc::new(rule_rows));
        drop(replacing);
        let mut denials = self.denials();
        denials.take_from(&replaced);
        // What the new rules deny is no measure for what the old ones did.
        denials.set_aside();
        denials.mark(&shared.rules.load());
        drop(denials);
        Ok(PreviousRules { rule_rows: before, rules: replaced, at_ms: shared.now_ms() })
    }

    fn put_under(
        &self,
        (revision, rows): (u64, Vec<EmergencyRow>),
        known: u64,
        shared: &Shared,
    ) -> Result<(), LoadError> {
        let _replacing = self.replacing();
        let before = self.rule_rows();
        // Those of a book that was read meanwhile are later.
        if before.emergency_revision != known && before.emergency_revision >= revision {
            return Ok(());
        }
        let rules = shared.rules.load().with_emergencies((revision, &rows), shared);
        shared.rules.store(Arc::new(rules.map_err(LoadError::Refused)?));
        let rule_rows = before.under(revision, rows);
        shared.metrics.control.in_force(rule_rows.revision, rule_rows.emergency_revision);
        self.in_force.store(Arc::new(rule_rows));
        Ok(())
    }

    fn count(&self, taken: Result<(), &LoadError>) {
        let outcome = match taken {
            Ok(()) => StoreLoad::Taken,
            Err(LoadError::Refused(_)) => StoreLoad::Refused,
            Err(LoadError::Failed(_)) => StoreLoad::Failed,
            Err(LoadError::Stopping) => return,
        };
        if let Some(shared) = self.shared.upgrade() {
            shared.metrics.control.followed(outcome);
        }
    }
}

/// How often it is looked whether somebody still holds what was replaced, and how often at most: nobody holds it for as long as
/// that takes.
const LET_GO_EVERY: Duration = Duration::from_secs(1);
const LET_GO_LOOKS_MAX: u32 = 60;

/// Keeps what was replaced until nobody else holds it, and ends it on a thread where that holds up nobody: the end of a million
/// rows takes long, and would otherwise come to whoever looked at them last, which may be a thread that decides.
async fn let_go<T: ?Sized + Send + Sync + 'static>(replaced: Arc<T>) {
    let mut ticks = interval(LET_GO_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for _ in 0..LET_GO_LOOKS_MAX {
        ticks.tick().await;
        if Arc::strong_count(&replaced) == 1 {
            break;
        }
    }
    // A runtime that ends lets go of it too.
    let _ = tokio::task::spawn_blocking(move || drop(replaced)).await;
}

/// The rules of a book, ready to decide.
fn compile(rule_rows: &RuleRows, placement: Option<&str>, shared: &Shared) -> Result<ActiveRules, String> {
    let set =
        RuleSet::compile(rule_rows, placement, shared.now_ms()).map_err(|problems| problems.to_string())?;
    warn_of(&set, &shared.fleet);
    ActiveRules::new(set, shared)
}
