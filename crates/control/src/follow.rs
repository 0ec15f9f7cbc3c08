//! Follows the rule store: starts with its content or the last good snapshot, and takes over every
//! change.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arc_swap::{ArcSwap, ArcSwapOption};
use tidegate_core::with_jitter;
use tidegate_rules::snapshot::Snapshot;
use tidegate_rules::store::{Address, Signal, Store};
use tokio::runtime::Handle;
use tokio::sync::Notify;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use crate::audit_watch::AuditWatch;
use crate::control::{Control, EMPTY, LoadDepth, LoadError, LoadState, compile, in_force};
use crate::node::{ControlEvent, Node, NodeRules};
use crate::plan::PlanPermits;
use crate::review::UnreviewedChanges;
use crate::rollback;
use crate::snapshots::{self, LastWrite, Snapshots};

/// Delay before a retry after a failed load. Shorter: the rules arrive earlier; a store in trouble
/// gets more requests.
const RETRY: Duration = Duration::from_secs(1);

/// A rule store, and how it is followed.
#[derive(Clone, Debug)]
pub struct StoreConfig {
    /// Address of the store, shown without its password.
    pub address: Address,
    /// The dimension that places rules, as the field of this name in a rules file.
    pub placement: Option<String>,
    /// The place of the snapshots; `None` if none are written.
    pub snapshots: Option<Snapshots>,
    /// The interval at which all rows are compared, regardless of notifications.
    pub reconcile: Duration,
    /// The interval at which revisions are compared, besides notifications; `None` for the default
    /// of the store.
    pub look: Option<Duration>,
}

/// A node that follows its rule store, or will once the store is there.
#[derive(Debug)]
pub struct StoreFollower<N: Node> {
    config: StoreConfig,
    node: Arc<N>,
    /// The followed store, or the snapshot in force until the store is reachable.
    begun: Result<Arc<Control<N>>, Snapshot>,
    /// Whether the first rules came from a snapshot.
    is_kept: bool,
}

impl<N: Node> StoreFollower<N> {
    /// Puts the rules of the store in force. If the store does not reply or its rules do not
    /// compile, the last good snapshot applies. Returns an error if there is none, each problem in
    /// a line of its own.
    pub async fn start(config: &StoreConfig, node: &Arc<N>) -> Result<Self, String> {
        let (config, node) = (config.clone(), Arc::clone(node));
        let (control, problem) = match Store::open(&config.address).await {
            Err(error) => (None, error.to_string()),
            Ok(store) => {
                let control = Control::new(store, Snapshot::default(), config.placement.clone(), &node);
                match control.take_rows(LoadDepth::First).await {
                    Ok(()) => {
                        node.note(ControlEvent::StoreUp(true));
                        let is_new = control.rule_rows().revision == 0;
                        if is_new {
                            begin_from_snapshot_for_empty_store(&config, &node, &control).await;
                        }
                        let is_kept = is_new && control.rule_rows().revision > 0;
                        node.follow(Arc::clone(&control));
                        return Ok(Self { config, node, begun: Ok(control), is_kept });
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
        node.note(ControlEvent::StoreUp(control.is_some()));
        let last = last_good(&config, &node)
            .await
            .map_err(|also| format!("{problem}\nrules_snapshots: nothing to start from instead: {also}"))?;
        let snapshot = last.begin(&*node, &problem);
        let begun = match control {
            None => {
                node.admit_stored(&snapshot.credentials);
                Err(snapshot)
            }
            Some(control) => {
                control.begin_with(snapshot, &*node).await;
                node.follow(Arc::clone(&control));
                Ok(control)
            }
        };
        Ok(Self { config, node, begun, is_kept: true })
    }

    /// Takes over changes until `stop` is cancelled.
    pub async fn run(self, stop: CancellationToken) {
        let Self { config, node, begun, is_kept } = self;
        let control = match begun {
            Ok(control) => control,
            Err(snapshot) => {
                let store = tokio::select! {
                    () = stop.cancelled() => return,
                    store = find(&config, seed(node.now_ms())) => store,
                };
                let control = Control::new(store, snapshot, config.placement.clone(), &node);
                // Another store, or one that was set back, may have come to the revisions of the
                // snapshot.
                control.want(LoadDepth::Everything);
                node.follow(Arc::clone(&control));
                control
            }
        };
        let rows = follow_rows(Arc::clone(&control));
        let emergencies = follow_emergencies(Arc::clone(&control));
        let known = (control.rule_rows(), control.credentials.load_full());
        let written = is_kept.then(|| LastWrite::of(&known.0, &known.1, None));
        let to = config.snapshots.clone().map(Arc::new);
        let kept = tokio::spawn(snapshots::keep(Arc::clone(&control), to, written, stop.clone()));
        tokio::select! {
            () = stop.cancelled() => {}
            () = watch(&control, &config, seed(node.now_ms())) => {}
            () = rows => {}
            () = emergencies => {}
            () = rollback::look(Arc::clone(&control)) => {}
        }
        // The task has logged its failed writes.
        let _ = kept.await;
        control.store().close().await;
    }
}

/// Prefixes each line of a problem with the address of the store.
fn located(config: &StoreConfig, problem: &str) -> String {
    let lines: Vec<String> =
        problem.lines().map(|line| format!("rules: {}: {line}", config.address)).collect();
    lines.join("\n")
}

/// Starts from the last snapshot, because an empty store may replace a lost one. Without rules
/// every request would pass.
async fn begin_from_snapshot_for_empty_store<N: Node>(
    config: &StoreConfig,
    node: &Arc<N>,
    control: &Control<N>,
) {
    if let Ok(last) = last_good(config, node).await
        && last.snapshot.rule_rows.revision > 0
    {
        control.begin_with(last.begin(&**node, &located(config, EMPTY)), &**node).await;
        control.loading.lock().await.is_of_another = true;
    }
}

impl<N: Node> Control<N> {
    /// Follows a store, with the content of a snapshot in force.
    pub(crate) fn new(
        store: Store,
        Snapshot { rule_rows, credentials, checkpoint }: Snapshot,
        placement: Option<String>,
        node: &Arc<N>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            node: Arc::downgrade(node),
            runtime: Handle::current(),
            placement,
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
            last_alarm: ArcSwapOption::empty(),
            alarms_read: AtomicU64::new(0),
            plan_permits: PlanPermits::default(),
            beside: tokio::sync::Mutex::default(),
            verifying_audit: tokio::sync::Mutex::new(()),
            audit_watch: AuditWatch::after(checkpoint),
        })
    }

    /// Continues from a snapshot with its rules in force. Its tokens apply unless the store is
    /// known to have had any.
    async fn begin_with(&self, Snapshot { rule_rows, credentials, .. }: Snapshot, node: &N) {
        self.in_force.store(Arc::new(rule_rows));
        if self.credentials.load().is_empty() && !self.has_stored_credentials().await {
            node.admit_stored(&credentials);
            self.credentials.store(Arc::new(credentials.to_vec()));
        }
    }

    /// Whether the tokens of the store were loaded, and it ever had any.
    async fn has_stored_credentials(&self) -> bool {
        self.loading.lock().await.credential_revision.is_some_and(|revision| revision > 0)
    }
}

/// The last good snapshot, compiled.
struct CompiledSnapshot<R> {
    snapshot: Snapshot,
    written_ms: Option<u64>,
    rules: R,
}

/// Reads and compiles the last good snapshot on a blocking thread: it may have a million rows and
/// come over a network.
async fn last_good<N: Node>(
    config: &StoreConfig,
    node: &Arc<N>,
) -> Result<CompiledSnapshot<N::Rules>, String> {
    let (config, node) = (config.clone(), Arc::clone(node));
    let reading = tokio::task::spawn_blocking(move || {
        let from = config.snapshots.as_ref().ok_or_else(|| "rules_snapshots is \"none\"".to_owned())?;
        let (snapshot, written_ms) = from.read(node.now_ms())?;
        let rules = compile(&snapshot.rule_rows, config.placement.as_deref(), &*node)
            .map_err(|problems| format!("the last good snapshot in {from}: {problems}"))?;
        Ok(CompiledSnapshot { snapshot, written_ms, rules })
    });
    reading.await.unwrap_or_else(|error| Err(format!("no snapshot was read: {error}")))
}

impl<R: NodeRules> CompiledSnapshot<R> {
    /// Puts the snapshot in force and logs that.
    fn begin(self, node: &impl Node<Rules = R>, problem: &str) -> Snapshot {
        let Self { snapshot, written_ms, rules } = self;
        let age_s = written_ms.map(|written_ms| node.now_ms().saturating_sub(written_ms) / 1_000);
        tracing::error!(
            problem,
            revision = snapshot.rule_rows.revision,
            emergency_revision = snapshot.rule_rows.emergency_revision,
            credentials = snapshot.credentials.len(),
            written_s_ago = age_s,
            "the store of rules does not give them: starting with the last good snapshot"
        );
        node.note(in_force(&snapshot.rule_rows));
        node.replace_rules(Arc::new(rules));
        snapshot
    }
}

/// Spreads the times at which many servers do the same.
fn seed(now_ms: u64) -> u64 {
    now_ms ^ u64::from(std::process::id()).rotate_left(32)
}

/// Opens the store once it is reachable. Retries as for a store that is lost while the server runs.
async fn find(config: &StoreConfig, seed: u64) -> Store {
    let mut backoff = config.address.retries(seed);
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
async fn watch<N: Node>(control: &Arc<Control<N>>, config: &StoreConfig, seed: u64) {
    let mut watch = control.store().watch_looking(seed, config.look);
    let mut ticks = interval(with_jitter(config.reconcile, seed));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // The first tick comes at once, and everything was just loaded.
    ticks.tick().await;
    let mut state = StoreState::Up;
    loop {
        let signal = tokio::select! {
            signal = watch.next() => Some(signal),
            _ = ticks.tick() => None,
        };
        let before = state;
        state = signal.as_ref().map_or(before, StoreState::from);
        if state != before {
            state.log(signal.as_ref());
        }
        control.count(ControlEvent::StoreUp(state == StoreState::Up));
        match (signal, before) {
            (Some(Signal::Lost(_)), _) => {}
            // Notifications during the outage are lost.
            (None, _) | (Some(_), StoreState::Lost) => control.want(LoadDepth::Everything),
            (Some(_), StoreState::Up | StoreState::ReadOnly) => control.want(LoadDepth::Heads),
        }
    }
}

/// The state of a followed store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StoreState {
    Up,
    /// It is read, and takes no writes.
    ReadOnly,
    Lost,
}

impl From<&Signal> for StoreState {
    fn from(signal: &Signal) -> Self {
        match signal {
            Signal::MayHaveChanged => Self::Up,
            Signal::ReadOnly(_) => Self::ReadOnly,
            Signal::Lost(_) => Self::Lost,
        }
    }
}

impl StoreState {
    /// Logs the state, with the problem of the signal that led to it.
    fn log(self, signal: Option<&Signal>) {
        let problem = match signal {
            Some(Signal::ReadOnly(problem) | Signal::Lost(problem)) => problem,
            Some(Signal::MayHaveChanged) | None => "",
        };
        match self {
            Self::Up => tracing::info!("the store of rules is there again"),
            Self::ReadOnly => {
                tracing::error!(
                    problem,
                    "the store of rules takes no writes: its changes still come into force"
                );
            }
            Self::Lost => {
                tracing::error!(problem, "the store of rules is gone: the last good rules stay in force");
            }
        }
    }
}

impl<N: Node> Control<N> {
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

async fn follow_rows<N: Node>(control: Arc<Control<N>>) {
    let mut is_done = true;
    loop {
        wait(&control.rows_wanted, is_done).await;
        let look = control.wanted();
        is_done = log_outcome("rules", control.take_rows(look).await, is_done);
        if !is_done && look == LoadDepth::Everything {
            control.everything_wanted.store(true, Ordering::Relaxed);
        }
    }
}

async fn follow_emergencies<N: Node>(control: Arc<Control<N>>) {
    let mut is_done = true;
    loop {
        wait(&control.emergencies_wanted, is_done).await;
        is_done = log_outcome("emergencies", control.take_emergencies().await, is_done);
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

/// Logs a failed load, unless it is the retry of a logged one. Returns whether a retry would be
/// pointless.
fn log_outcome(what: &str, taken: Result<(), LoadError>, was_done: bool) -> bool {
    match taken {
        Ok(()) | Err(LoadError::Stopping) => true,
        Err(LoadError::Refused(problems)) => {
            tracing::error!(what, %problems, "refused whole; the last good set stays in force");
            true
        }
        Err(LoadError::Failed(error)) => {
            if was_done {
                tracing::warn!(what, %error, "not loaded; the last good set stays in force until a retry succeeds");
            }
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::{RowKind, RuleRow, RuleRows};

    use super::*;
    use crate::node::RuleTarget as _;
    use crate::test_node::TestNode;

    /// A deadline to end a hung test.
    const WAIT_MAX: Duration = Duration::from_mins(1);

    fn config() -> StoreConfig {
        let address = "sqlite::memory:".parse().expect("an address");
        let (reconcile, look) = (Duration::from_hours(1), None);
        StoreConfig { address, placement: None, snapshots: None, reconcile, look }
    }

    #[tokio::test]
    async fn after_a_start_from_a_snapshot_all_that_the_store_holds_is_looked_at() {
        let node = TestNode::new();
        // The store is of the same revision, and has no rule.
        let body = r#"{"key":["user"],"limit":1,"period":"1h"}"#.to_owned();
        let row = RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body, version: 1 };
        let rule_rows = RuleRows { rows: [row].into(), ..RuleRows::default() };
        let rules = compile(&rule_rows, None, &*node).expect("good rules");
        let last = CompiledSnapshot {
            snapshot: Snapshot { rule_rows, ..Snapshot::default() },
            written_ms: None,
            rules,
        };
        let snapshot = last.begin(&*node, "it is gone");
        assert_eq!(node.rules().set().rules().len(), 1);
        let begun = Err(snapshot);
        let following = StoreFollower { config: config(), node: Arc::clone(&node), begun, is_kept: true };
        let stop = CancellationToken::new();
        let run = tokio::spawn(following.run(stop.clone()));
        let taken = async {
            while !node.rules().set().rules().is_empty() {
                tokio::task::yield_now().await;
            }
        };
        timeout(WAIT_MAX, taken).await.expect("what the store holds is in force");
        stop.cancel();
        run.await.expect("it ends");
    }

    /// Returns the number of snapshots after a node has run for a moment, with rules of a snapshot
    /// or not.
    async fn kept(is_from_one: bool) -> usize {
        let dir = tempfile::tempdir().expect("a folder");
        let store = Store::open(&config().address).await.expect("a store");
        let node = TestNode::new();
        let control = Control::new(store, Snapshot::default(), None, &node);
        let written =
            is_from_one.then(|| LastWrite::of(&control.rule_rows(), &control.credentials.load_full(), None));
        let (to, stop) = (Arc::new(Snapshots::Folder(dir.path().to_owned())), CancellationToken::new());
        let keeping = tokio::spawn(snapshots::keep(control, Some(to), written, stop.clone()));
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
