//! Rules from a rule store: replaced as a whole when they change, kept while the store is
//! unreachable.
//!
//! Only rules that compiled replace those in force. Emergencies are loaded separately: they do not
//! wait for rule rows, and no rule is compiled again for them.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tidegate_rules::RuleSet;
use tidegate_rules::rows::{EmergencyRow, RuleRows};
use tidegate_rules::store::{Credential, Store, StoreError};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval};

use crate::alarm::Alarm;
use crate::audit_watch::AuditWatch;
use crate::denials::Denials;
use crate::node::{ControlEvent, Node, NodeRules};
use crate::plan::PlanPermits;
use crate::review::{PreviousRules, UnreviewedChanges};
use crate::rollback::AutomaticRollback;

/// The rule store as a node knows it.
#[derive(Debug)]
pub struct Control<N: Node> {
    pub(crate) store: Store,
    pub(crate) node: Weak<N>,
    /// Runtime of all calls to the store, because the runtimes of the workers make decisions.
    pub(crate) runtime: Handle,
    pub(crate) placement: Option<String>,
    /// Readers never wait; a writer holds `replacing`.
    pub(crate) in_force: ArcSwap<RuleRows>,
    pub(crate) replacing: Mutex<()>,
    /// Those of the store, or of the snapshot that this server began with.
    pub(crate) credentials: ArcSwap<Vec<Credential>>,
    /// One load of each kind at a time; changes meanwhile cause one more load.
    pub(crate) loading: tokio::sync::Mutex<LoadState>,
    pub(crate) loading_emergencies: tokio::sync::Mutex<()>,
    /// Wakes the task that loads rule rows.
    pub(crate) rows_wanted: Notify,
    /// Whether the next load of rows looks at more than the revisions.
    pub(crate) everything_wanted: AtomicBool,
    pub(crate) emergencies_wanted: Notify,
    pub(crate) denials: Mutex<Denials>,
    /// One task at a time reviews changes that came into force.
    pub(crate) unreviewed: tokio::sync::Mutex<Option<UnreviewedChanges<N>>>,
    pub(crate) last_rollback: ArcSwapOption<AutomaticRollback>,
    pub(crate) last_alarm: ArcSwapOption<Alarm>,
    /// Audit entries at the last read of the alarms.
    pub(crate) alarms_read: AtomicU64,
    pub(crate) plan_permits: PlanPermits,
    /// Content of the store that is not in force, while it is in use. All users share one copy.
    pub(crate) beside: tokio::sync::Mutex<Weak<RuleRows>>,
    /// Locked while the audit is verified. That reads the whole audit, so only one runs at a time.
    pub(crate) verifying_audit: tokio::sync::Mutex<()>,
    pub(crate) audit_watch: AuditWatch,
}

/// State of the last load, so that refused content is not retried until it changes.
#[derive(Debug, Default)]
pub(crate) struct LoadState {
    refused: Option<(u64, u64)>,
    /// Whether the rules in force come from another store than this new one, so that its revisions
    /// cannot be compared.
    pub(crate) is_of_another: bool,
    pub(crate) credential_revision: Option<u64>,
}

/// The node stops: nothing can be done in its name any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stopping;

impl std::fmt::Display for Stopping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the server stops")
    }
}

/// The reason why the content of the store is not in force.
#[derive(Debug)]
pub(crate) enum LoadError {
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
            Self::Stopping => Stopping.fmt(f),
        }
    }
}

impl From<StoreError> for LoadError {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl From<Stopping> for LoadError {
    fn from(_: Stopping) -> Self {
        Self::Stopping
    }
}

/// The problem of an empty store while there are rules in force.
pub(crate) const EMPTY: &str = "it is empty and new, which the store of the rules in force is not: \
    if that was lost, put it back; these rules stay until something is applied to this one";

/// How thoroughly the store is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadDepth {
    /// All content, for the first time: none of it is a change.
    First,
    /// Only content with a new revision.
    Heads,
    /// All content, regardless of the revisions.
    Everything,
}

impl<N: Node> Control<N> {
    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the rows that the rule set in force was compiled from.
    pub fn rule_rows(&self) -> Arc<RuleRows> {
        self.in_force.load_full()
    }

    /// Milliseconds since the Unix epoch, by the node's clock.
    pub(crate) fn now_ms(&self) -> Result<u64, Stopping> {
        Ok(self.node()?.now_ms())
    }

    /// Loads, compiles and puts in force the current content of the store. Called after a change on
    /// this server, so that it does not wait for its own notification.
    pub async fn refresh(self: &Arc<Self>) -> Result<(), String> {
        let control = Arc::clone(self);
        self.to_its_end(async move {
            let emergencies = control.take_emergencies().await;
            // Emergencies that do not fit these rules may fit the next, and tokens depend on
            // neither.
            control.take_rows(LoadDepth::Heads).await.and(emergencies)
        })
        .await
    }

    /// Does the same for emergencies alone. They do not wait for rule rows, neither for a load in
    /// progress nor for refused rows.
    pub async fn refresh_emergencies(self: &Arc<Self>) -> Result<(), String> {
        let control = Arc::clone(self);
        self.to_its_end(async move { control.take_emergencies().await }).await
    }

    /// Completes a load even if the caller is gone.
    async fn to_its_end(
        &self,
        taking: impl Future<Output = Result<(), LoadError>> + Send + 'static,
    ) -> Result<(), String> {
        match self.runtime.spawn(taking).await {
            Ok(taken) => taken.map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Locks the replacement of the rules in force and of their rows.
    pub(crate) fn replacing(&self) -> MutexGuard<'_, ()> {
        // A thread that panicked had not begun to replace them.
        self.replacing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn node(&self) -> Result<Arc<N>, Stopping> {
        self.node.upgrade().ok_or(Stopping)
    }

    /// Takes over templates, rules and overrides, and credentials, if they moved.
    pub(crate) async fn take_rows(self: &Arc<Self>, look: LoadDepth) -> Result<(), LoadError> {
        let mut tried = self.loading.lock().await;
        let revisions = self.store.revisions().await?;
        if look != LoadDepth::Heads || tried.credential_revision != Some(revisions.credential_revision) {
            self.take_credentials(&revisions).await?;
            tried.credential_revision = Some(revisions.credential_revision);
        }
        let seen = (revisions.revision, revisions.emergency_revision);
        let in_force = self.rule_rows();
        let is_in_force = in_force.revision == revisions.revision && !tried.is_of_another;
        let is_refused = tried.refused == Some(seen);
        if look == LoadDepth::Heads && (is_in_force || is_refused) {
            match in_force.override_revision.cmp(&revisions.override_revision) {
                // As with emergencies: overrides of clients come into force also while rows are
                // refused.
                Ordering::Less if !tried.is_of_another => return self.take_overrides().await,
                // The store lost writes, so everything is loaded.
                Ordering::Greater if is_in_force => {}
                Ordering::Equal | Ordering::Less | Ordering::Greater => return Ok(()),
            }
        }
        if revisions.revision == 0 && self.rule_rows().revision > 0 {
            *tried = LoadState { refused: Some(seen), is_of_another: true, ..*tried };
            let refused = LoadError::Refused(EMPTY.to_owned());
            self.count_load(Err(&refused));
            return Err(refused);
        }
        let rule_rows = self.store.load().await?;
        let seen = (rule_rows.revision, rule_rows.emergency_revision);
        let is_of_another = tried.is_of_another;
        let taken = self
            .blocking(move |control, node| control.take_rule_rows(rule_rows, look, is_of_another, node))
            .await;
        tried.refused = matches!(taken, Err(LoadError::Refused(_))).then_some(seen);
        if !matches!(taken, Ok(None)) {
            self.count_load(taken.as_ref().map(|_| ()));
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
    pub(crate) async fn take_emergencies(self: &Arc<Self>) -> Result<(), LoadError> {
        let _one_at_a_time = self.loading_emergencies.lock().await;
        // Read before the call to the store: the reply is then newer, even if the store lost writes
        // and has a lower revision.
        let known = self.rule_rows();
        let (revision, rows) = self.store.emergencies().await?;
        let is_known = (known.emergency_revision, &known.emergencies) == (revision, &rows);
        // As with rules: a store that never had emergencies does not remove those of another store.
        if is_known || revision == 0 {
            return Ok(());
        }
        let known = known.emergency_revision;
        let taken =
            self.blocking(move |control, node| control.put_under((revision, rows), known, node)).await;
        self.count_load(taken.as_ref().copied());
        if taken.is_ok()
            && let Ok(now_ms) = self.now_ms()
        {
            // In the background, because its call to the store may wait for a load of rule rows.
            let control = Arc::clone(self);
            self.runtime.spawn(async move { control.note_emergencies(now_ms).await });
        }
        taken
    }

    /// Measures how long the emergencies took that were put in force by then.
    async fn note_emergencies(&self, now_ms: u64) {
        match self.emergencies_changed_ms().await {
            Ok(Some(changed_ms)) => {
                self.count(ControlEvent::Lagged { ms: now_ms.saturating_sub(changed_ms) });
            }
            Ok(None) => {}
            Err(error) => tracing::debug!(%error, "it is not known how long emergencies took"),
        }
    }

    /// Runs long work on a blocking thread.
    pub(crate) async fn blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Self, &N) -> Result<T, LoadError> + Send + 'static,
    ) -> Result<T, LoadError> {
        let (control, node) = (Arc::clone(self), self.node()?);
        let done = tokio::task::spawn_blocking(move || work(&control, &node)).await;
        done.unwrap_or_else(|error| Err(LoadError::Refused(format!("could not be compiled: {error}"))))
    }

    /// Puts rule rows in force, perhaps of another store, and returns the previous rules; `None` if
    /// nothing differs.
    fn take_rule_rows(
        &self,
        rule_rows: RuleRows,
        look: LoadDepth,
        is_of_another: bool,
        node: &N,
    ) -> Result<Option<PreviousRules<N>>, LoadError> {
        if *self.in_force.load_full() == rule_rows && look != LoadDepth::First {
            return Ok(None);
        }
        self.put_in_force(rule_rows, look, is_of_another, node).map(Some)
    }

    /// Replaces the rules in force and returns the previous ones.
    fn put_in_force(
        &self,
        mut rule_rows: RuleRows,
        look: LoadDepth,
        is_of_another: bool,
        node: &N,
    ) -> Result<PreviousRules<N>, LoadError> {
        let mut rules = compile(&rule_rows, self.placement.as_deref(), node).map_err(LoadError::Refused)?;
        let replacing = self.replacing();
        let before = self.rule_rows();
        // Emergencies do not wait for a load of rule rows: later ones stay.
        if !is_of_another && before.emergency_revision > rule_rows.emergency_revision {
            let later = (before.emergency_revision, &*before.emergencies);
            rules = node.with_emergencies(&rules, later.0, later.1).map_err(LoadError::Refused)?;
            (rule_rows.emergency_revision, rule_rows.emergencies) = (later.0, later.1.to_vec());
        }
        node.note(in_force(&rule_rows));
        adopt_keys(&rules, &*node.rules());
        let replaced = node.replace_rules(Arc::new(rules));
        let rule_rows = Arc::new(rule_rows);
        self.in_force.store(Arc::clone(&rule_rows));
        drop(replacing);
        let mut denials = self.denials();
        // Denials by the new rules must not count as denials by the old ones.
        let since_look = denials.note_replaced(&*node.rules());
        // At a start, no emergency was in force before.
        let known: &[EmergencyRow] = if look == LoadDepth::First { &[] } else { &before.emergencies };
        denials.watch_emergencies(known, &rule_rows.emergencies, node.now_ms());
        drop(denials);
        Ok(PreviousRules { rule_rows: before, rules: replaced, since_look, at_ms: node.now_ms() })
    }

    fn put_under(
        &self,
        (revision, rows): (u64, Vec<EmergencyRow>),
        known: u64,
        node: &N,
    ) -> Result<(), LoadError> {
        let _replacing = self.replacing();
        let before = self.rule_rows();
        // A load of rule rows brought later ones meanwhile.
        if before.emergency_revision != known && before.emergency_revision >= revision {
            return Ok(());
        }
        let rules = node.with_emergencies(&node.rules(), revision, &rows);
        node.replace_rules(Arc::new(rules.map_err(LoadError::Refused)?));
        self.denials().watch_emergencies(&before.emergencies, &rows, node.now_ms());
        let rule_rows = before.under(revision, rows);
        node.note(in_force(&rule_rows));
        self.in_force.store(Arc::new(rule_rows));
        Ok(())
    }

    pub(crate) fn count_load(&self, taken: Result<(), &LoadError>) {
        self.count(match taken {
            Ok(()) => ControlEvent::Loaded,
            Err(LoadError::Refused(_)) => ControlEvent::LoadRefused,
            Err(LoadError::Failed(_)) => ControlEvent::LoadFailed,
            Err(LoadError::Stopping) => return,
        });
    }

    pub(crate) fn count(&self, event: ControlEvent) {
        if let Some(node) = self.node.upgrade() {
            node.note(event);
        }
    }
}

/// Lets new rules continue the recent keys of those that they replace. A rule with another key
/// begins anew.
fn adopt_keys(rules: &impl NodeRules, replaced: &impl NodeRules) {
    let before = replaced.counted().filter(|(_, keys)| !keys.is_empty());
    let before: HashMap<&str, _> = before.map(|(rule, keys)| (&*rule.name, (&rule.key, keys))).collect();
    for (rule, keys) in rules.counted() {
        if let Some((_, known)) = before.get(&*rule.name).filter(|(key, _)| **key == rule.key) {
            keys.adopt(known);
        }
    }
}

/// The event that rules of these rows are in force.
pub(crate) fn in_force(rule_rows: &RuleRows) -> ControlEvent {
    let RuleRows { revision, emergency_revision, .. } = *rule_rows;
    ControlEvent::InForce { revision, emergency_revision }
}

/// Interval and maximum number of looks whether replaced data is still in use. No reader holds it
/// for that long.
const LET_GO_EVERY: Duration = Duration::from_secs(1);
const LET_GO_LOOKS_MAX: u32 = 60;

/// Keeps replaced data until no other reference is left, and drops it on a blocking thread. The
/// drop of a million rows takes long, and would otherwise fall to the last reader, perhaps a thread
/// that decides.
pub(crate) async fn let_go<T: ?Sized + Send + Sync + 'static>(replaced: Arc<T>) {
    let mut ticks = interval(LET_GO_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for _ in 0..LET_GO_LOOKS_MAX {
        ticks.tick().await;
        if Arc::strong_count(&replaced) == 1 {
            break;
        }
    }
    // If the runtime ends, it drops the data too.
    let _ = tokio::task::spawn_blocking(move || drop(replaced)).await;
}

/// Compiles rule rows into rules that can decide.
pub(crate) fn compile<N: Node>(
    rule_rows: &RuleRows,
    placement: Option<&str>,
    node: &N,
) -> Result<N::Rules, String> {
    let set =
        RuleSet::compile(rule_rows, placement, node.now_ms()).map_err(|problems| problems.to_string())?;
    node.prepare(set)
}
