//! Follows the rule store: starts with its content or the last good snapshot, and takes over every
//! change.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tidegate_core::{Backoff, with_jitter};
use tidegate_rules::rows::RuleRows;
use tidegate_rules::snapshot::Snapshot;
use tidegate_rules::store::{RETRY_MAX, RETRY_MIN, Signal, Store};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::credentials::admit;
use super::plan::PlanPermits;
use super::review::UnreviewedChanges;
use super::snapshots::LastWrite;
use super::{Control, EMPTY, LoadDepth, LoadError, LoadState, compile, rollback, snapshots};
use crate::auth::Credentials;
use crate::config::StoreConfig;
use crate::rules::ActiveRules;
use crate::shared::{Shared, StartError};

/// Delay before a retry after a failed load. Shorter: the rules arrive earlier; a store in trouble
/// gets more requests.
const RETRY: Duration = Duration::from_secs(1);

/// A server that follows the store of its rules, or will once it is there.
pub(crate) struct StoreFollower {
    config: StoreConfig,
    shared: Arc<Shared>,
    /// Before any of a store, or of a snapshot, were added.
    configured: Arc<Credentials>,
    /// The followed store, or the snapshot in force until the store is reachable.
    begun: Result<Arc<Control>, Snapshot>,
    /// Whether the first rules came from a snapshot.
    is_kept: bool,
}

impl StoreFollower {
    /// Puts the rules of the store in force; if they cannot be had, those of the last good snapshot.
    pub(crate) async fn start(config: &StoreConfig, shared: &Arc<Shared>) -> Result<Self, StartError> {
        let (config, shared) = (config.clone(), Arc::clone(shared));
        let configured = Arc::clone(&shared.credentials.load());
        let (control, problem) = match Store::open(&config.address).await {
            Err(error) => (None, error.to_string()),
            Ok(store) => {
                let control = control(store, Snapshot::default(), &config, &shared, &configured);
                match control.take_rows(LoadDepth::First).await {
                    Ok(()) => {
                        shared.telemetry.metrics.control.store_is_up(true);
                        let is_new = control.rule_rows().revision == 0;
                        if is_new {
                            begin_from_snapshot_for_empty_store(&config, &shared, &control).await;
                        }
                        let is_kept = is_new && control.rule_rows().revision > 0;
                        shared.rules.follow(Arc::clone(&control));
                        return Ok(Self { config, shared, configured, begun: Ok(control), is_kept });
                    }
                    Err(problem) => {
                        // Refused content is retried when it changes; after a failed load,
                        // everything is loaded again.
                        if matches!(problem, LoadError::Failed(_)) {
                            control.want(LoadDepth::Everything);
                        }
                        (Some(control), located(&config, &problem.to_string()))
                    }
                }
            }
        };
        shared.telemetry.metrics.control.store_is_up(control.is_some());
        let last = last_good(&config, &shared).await.map_err(|also| {
            StartError::Rules(format!("{problem}\nrules_snapshots: nothing to start from instead: {also}"))
        })?;
        let snapshot = last.begin(&shared, &problem);
        let begun = match control {
            None => {
                admit(&configured, &snapshot.credentials, &shared);
                Err(snapshot)
            }
            Some(control) => {
                control.begin_with(snapshot, &shared).await;
                shared.rules.follow(Arc::clone(&control));
                Ok(control)
            }
        };
        Ok(Self { config, shared, configured, begun, is_kept: true })
    }

    /// Takes over changes until `stop` is cancelled.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let Self { config, shared, configured, begun, is_kept } = self;
        let control = match begun {
            Ok(control) => control,
            Err(snapshot) => {
                let store = tokio::select! {
                    () = stop.cancelled() => return,
                    store = find(&config, seed(&shared)) => store,
                };
                let control = control(store, snapshot, &config, &shared, &configured);
                // Another store, or one that was set back, may have come to the revisions of the snapshot.
                control.want(LoadDepth::Everything);
                shared.rules.follow(Arc::clone(&control));
                control
            }
        };
        let rows = follow_rows(Arc::clone(&control));
        let emergencies = follow_emergencies(Arc::clone(&control));
        let written = is_kept.then(|| LastWrite::of(&control.rule_rows(), &control.credentials.load_full()));
        let kept = config.snapshots.clone().map(Arc::new);
        let kept =
            kept.map(|to| tokio::spawn(snapshots::keep(Arc::clone(&control), to, written, stop.clone())));
        tokio::select! {
            () = stop.cancelled() => {}
            () = watch(&control, &config) => {}
            () = rows => {}
            () = emergencies => {}
            () = rollback::look(Arc::clone(&control)) => {}
        }
        if let Some(kept) = kept {
            // The task has logged its failed writes.
            let _ = kept.await;
        }
        control.store().close().await;
    }
}

pub(super) fn control(
    store: Store,
    Snapshot { rule_rows, credentials }: Snapshot,
    config: &StoreConfig,
    shared: &Arc<Shared>,
    configured: &Arc<Credentials>,
) -> Arc<Control> {
    Arc::new(Control {
        store,
        shared: Arc::downgrade(shared),
        runtime: Handle::current(),
        placement: config.placement.clone(),
        configured: Arc::clone(configured),
        in_force: ArcSwap::from_pointee(rule_rows),
        replacing: Mutex::new(()),
        credentials: ArcSwap::from_pointee(credentials.to_vec()),
        loading: tokio::sync::Mutex::new(LoadState::default()),
        loading_emergencies: tokio::sync::Mutex::new(()),
        rows_wanted: Notify::new(),
        everything_wanted: AtomicBool::new(false),
        emergencies_wanted: Notify::new(),
        denials: Mutex::default(),
        unreviewed: tokio::sync::Mutex::new(Some(UnreviewedChanges::at_start())),
        last_rollback: ArcSwapOption::empty(),
        plan_permits: PlanPermits::default(),
        beside: tokio::sync::Mutex::default(),
    })
}

/// Prefixes each line of a problem with the address of the store.
fn located(config: &StoreConfig, problem: &str) -> String {
    let lines: Vec<String> =
        problem.lines().map(|line| format!("rules: {}: {line}", config.address)).collect();
    lines.join("\n")
}

/// Starts from the last snapshot, because an empty store may replace a lost one. Without rules
/// every request would pass.
async fn begin_from_snapshot_for_empty_store(config: &StoreConfig, shared: &Arc<Shared>, control: &Control) {
    if let Ok(last) = last_good(config, shared).await
        && last.snapshot.rule_rows.revision > 0
    {
        control.begin_with(last.begin(shared, &located(config, EMPTY)), shared).await;
        control.loading.lock().await.is_of_another = true;
    }
}

impl Control {
    /// Continues from a snapshot with its rules in force. Its tokens apply unless the store is
    /// known to have had any.
    async fn begin_with(&self, Snapshot { rule_rows, credentials }: Snapshot, shared: &Shared) {
        self.in_force.store(Arc::new(rule_rows));
        if self.credentials.load().is_empty() && !self.has_stored_credentials().await {
            admit(&self.configured, &credentials, shared);
            self.credentials.store(Arc::new(credentials.to_vec()));
        }
    }

    /// Whether the tokens of the store were loaded, and it ever had any.
    async fn has_stored_credentials(&self) -> bool {
        self.loading.lock().await.credential_revision.is_some_and(|revision| revision > 0)
    }
}

/// The last good snapshot, compiled.
struct CompiledSnapshot {
    snapshot: Snapshot,
    written_ms: Option<u64>,
    rules: ActiveRules,
}

/// Reads and compiles the last good snapshot on a blocking thread: it may have a million rows and
/// come over a network.
async fn last_good(config: &StoreConfig, shared: &Arc<Shared>) -> Result<CompiledSnapshot, String> {
    let (config, shared) = (config.clone(), Arc::clone(shared));
    let reading = tokio::task::spawn_blocking(move || {
        let from = config.snapshots.as_ref().ok_or_else(|| "rules_snapshots is \"none\"".to_owned())?;
        let (snapshot, written_ms) = from.read(shared.now_ms())?;
        let rules = compile(&snapshot.rule_rows, config.placement.as_deref(), &shared)
            .map_err(|problems| format!("the last good snapshot in {from}: {problems}"))?;
        Ok(CompiledSnapshot { snapshot, written_ms, rules })
    });
    reading.await.unwrap_or_else(|error| Err(format!("no snapshot was read: {error}")))
}

impl CompiledSnapshot {
    /// Puts the snapshot in force and logs that.
    fn begin(self, shared: &Shared, problem: &str) -> Snapshot {
        let Self { snapshot, written_ms, rules } = self;
        let RuleRows { revision, emergency_revision, .. } = snapshot.rule_rows;
        let age_s = written_ms.map(|written_ms| shared.now_ms().saturating_sub(written_ms) / 1_000);
        tracing::error!(
            problem,
            revision,
            emergency_revision,
            credentials = snapshot.credentials.len(),
            written_s_ago = age_s,
            "the store of rules does not give them: starting with the last good snapshot"
        );
        shared.telemetry.metrics.control.in_force(revision, emergency_revision);
        shared.rules.store(Arc::new(rules));
        snapshot
    }
}

/// Spreads the times at which many servers do the same.
fn seed(shared: &Shared) -> u64 {
    shared.now_ms() ^ u64::from(std::process::id()).rotate_left(32)
}

/// Opens the store once it is reachable. Retries as for a store that is lost while the server runs.
async fn find(config: &StoreConfig, seed: u64) -> Store {
    let mut backoff = Backoff::new(RETRY_MIN, RETRY_MAX, seed);
    loop {
        match Store::open(&config.address).await {
            Ok(store) => return store,
            Err(error) => tracing::debug!(%error, "looking for the store of rules"),
        }
        pause(backoff.after_failure()).await;
    }
}

#[expect(clippy::disallowed_methods, reason = "no condition to wait for: a store is not asked too often")]
async fn pause(time: Duration) {
    tokio::time::sleep(time).await;
}

/// Wakes the loading tasks when something may have changed, and for a full load at intervals.
async fn watch(control: &Arc<Control>, config: &StoreConfig) {
    let seed = control.shared.upgrade().map_or(0, |shared| seed(&shared));
    let mut watch = control.store().watch_looking(seed, config.look);
    let mut ticks = interval(with_jitter(config.reconcile, seed));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick comes at once, and everything was just loaded.
    ticks.tick().await;
    let mut is_up = true;
    loop {
        let wanted = tokio::select! {
            signal = watch.next() => match signal {
                Signal::MayHaveChanged => {
                    // Notifications during the outage are lost.
                    let look = if is_up { LoadDepth::Heads } else { LoadDepth::Everything };
                    if !is_up {
                        tracing::info!("the store of rules is there again");
                    }
                    is_up = true;
                    look
                }
                Signal::Lost(problem) => {
                    if is_up {
                        tracing::error!(problem, "the store of rules is gone: the last good rules stay in force");
                    }
                    is_up = false;
                    report(control, is_up);
                    continue;
                }
            },
            _ = ticks.tick() => LoadDepth::Everything,
        };
        report(control, is_up);
        control.want(wanted);
    }
}

fn report(control: &Control, is_up: bool) {
    if let Some(shared) = control.shared.upgrade() {
        shared.telemetry.metrics.control.store_is_up(is_up);
    }
}

impl Control {
    pub(super) fn want(&self, look: LoadDepth) {
        if look == LoadDepth::Everything {
            self.everything_wanted.store(true, Ordering::Relaxed);
        }
        // A second notification before the first is handled adds nothing: both mean the same.
        self.emergencies_wanted.notify_one();
        self.rows_wanted.notify_one();
    }

    fn wanted(&self) -> LoadDepth {
        let everything = self.everything_wanted.swap(false, Ordering::Relaxed);
        if everything { LoadDepth::Everything } else { LoadDepth::Heads }
    }
}

async fn follow_rows(control: Arc<Control>) {
    let mut is_done = true;
    loop {
        wait(&control.rows_wanted, is_done).await;
        let look = control.wanted();
        is_done = log_outcome("rules", control.take_rows(look).await);
        if !is_done && look == LoadDepth::Everything {
            control.everything_wanted.store(true, Ordering::Relaxed);
        }
    }
}

async fn follow_emergencies(control: Arc<Control>) {
    let mut is_done = true;
    loop {
        wait(&control.emergencies_wanted, is_done).await;
        is_done = log_outcome("emergencies", control.take_emergencies().await);
    }
}

/// Waits to be woken, and after a failure not for long.
async fn wait(wanted: &Notify, is_done: bool) {
    if is_done {
        wanted.notified().await;
    } else {
        // Either is a reason to try.
        let _ = timeout(RETRY, wanted.notified()).await;
    }
}

/// Logs a failed load. Returns whether a retry would be pointless.
fn log_outcome(what: &str, taken: Result<(), LoadError>) -> bool {
    match taken {
        Ok(()) | Err(LoadError::Stopping) => true,
        Err(LoadError::Refused(problems)) => {
            tracing::error!(what, %problems, "refused whole; the last good set stays in force");
            true
        }
        Err(LoadError::Failed(error)) => {
            tracing::warn!(what, %error, "not loaded; the last good set stays in force");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use tidegate::ManualClock;
    use tidegate_rules::rows::{RowKind, RuleRow};

    use super::*;
    use crate::config::Config;
    use crate::control::snapshots::Snapshots;

    /// A deadline to end a hung test.
    const WAIT_MAX: Duration = Duration::from_mins(1);

    fn shared() -> Arc<Shared> {
        let given = [("memory", "1MB"), ("data_dir", "none"), ("workers", "1")];
        let given: HashMap<String, String> =
            given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let mut config = Config::read(&given, None).expect("good");
        Arc::new(Shared::on_clock(&mut config, Arc::new(ManualClock::new())).expect("fits"))
    }

    #[tokio::test]
    async fn after_a_start_from_a_snapshot_all_that_the_store_holds_is_looked_at() {
        let shared = shared();
        let address = "sqlite::memory:".parse().expect("an address");
        let (reconcile, look) = (Duration::from_hours(1), None);
        let config = StoreConfig { address, placement: None, snapshots: None, reconcile, look };
        // The store is of the same revision, and has no rule.
        let body = r#"{"key":["user"],"limit":1,"period":"1h"}"#.to_owned();
        let row = RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body, version: 1 };
        let rule_rows = RuleRows { rows: [row].into(), ..RuleRows::default() };
        let rules = compile(&rule_rows, None, &shared).expect("good rules");
        let last = CompiledSnapshot {
            snapshot: Snapshot { rule_rows, ..Snapshot::default() },
            written_ms: None,
            rules,
        };
        let snapshot = last.begin(&shared, "it is gone");
        assert_eq!(shared.rules.load().set().rules().len(), 1);
        let configured = Arc::clone(&shared.credentials.load());
        let (shared, begun) = (Arc::clone(&shared), Err(snapshot));
        let following =
            StoreFollower { config, shared: Arc::clone(&shared), configured, begun, is_kept: true };
        let stop = CancellationToken::new();
        let run = tokio::spawn(following.run(stop.clone()));
        let taken = async {
            while !shared.rules.load().set().rules().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(WAIT_MAX, taken).await.expect("what the store holds is in force");
        stop.cancel();
        run.await.expect("it ends");
    }

    /// How many snapshots there are after a server with such rules, which it has from one or not, has run for a moment.
    async fn kept(is_from_one: bool) -> usize {
        let shared = shared();
        let dir = tempfile::tempdir().expect("a folder");
        let address = "sqlite::memory:".parse().expect("an address");
        let (reconcile, look) = (Duration::from_hours(1), None);
        let config = StoreConfig { address, placement: None, snapshots: None, reconcile, look };
        let store = Store::open(&config.address).await.expect("a store");
        let configured = Arc::clone(&shared.credentials.load());
        let control = control(store, Snapshot::default(), &config, &shared, &configured);
        let written =
            is_from_one.then(|| LastWrite::of(&control.rule_rows(), &control.credentials.load_full()));
        let (to, stop) = (Arc::new(Snapshots::Folder(dir.path().to_owned())), CancellationToken::new());
        let keeping = tokio::spawn(snapshots::keep(control, to, written, stop.clone()));
        tokio::task::yield_now().await;
        stop.cancel();
        keeping.await.expect("it ends");
        std::fs::read_dir(dir.path()).expect("a folder").count()
    }

    #[tokio::test]
    async fn rules_from_a_snapshot_are_not_written_again() {
        assert_eq!((kept(false).await, kept(true).await), (1, 0));
    }
}
