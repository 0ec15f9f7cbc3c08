//! Writes overrides of direct limits: to the rule store, or to the embedded store of a server
//! without one. One thread writes them; all workers look them up in the rules in force.
//!
//! A write goes to the store, then into force, and then it is acknowledged. Writes that wait are
//! written as one group, in one transaction, and the overrides are indexed once for all of them.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tidegate_control::OverrideWriteError;
use tidegate_rules::rows::RuleRows;
use tidegate_rules::store::{OverrideOutcome, OverrideWrite, Store, StoreError};
use tidegate_rules::{NamespaceOverrides, OVERRIDES_MAX, WILDCARDS_MAX};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};
use tokio::time::timeout;

use crate::auth::TenantIndex;
use crate::shared::{RuleState, StartError};

/// Largest number of waiting writes per tenant. Higher: larger bursts of one tenant are accepted,
/// and writes of other tenants wait longer behind them.
const WAITING_PER_TENANT_MAX: usize = 128;

/// Largest number of waiting writes of all tenants. Higher: more memory, and a longer wait for the
/// last of them.
const WAITING_MAX: usize = 4_096;

/// The most writes of one transaction. Higher: fewer transactions and indexes for a burst; each
/// holds the lock of the store for longer, for which changes of rules wait.
const GROUP_MAX: usize = 256;

/// Room for overrides that clients leave to changes of rules. Servers do not know of each other's
/// latest writes, and together must not exceed the maximum of the store.
const RESERVED: usize = 65_536;
/// The same for overrides with a `*`.
const RESERVED_WILDCARDS: usize = 16_384;
const _: () = assert!(RESERVED < OVERRIDES_MAX && RESERVED_WILDCARDS < WILDCARDS_MAX, "some are left");

/// Interval of retries after the embedded store failed. Shorter: the server notices earlier that it
/// is back.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// Where the overrides of a server apply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OverrideScope {
    /// On every server that follows the rule store.
    Fleet,
    /// On this server only.
    Server,
}

impl OverrideScope {
    /// Returns its name in responses.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::Fleet => "fleet",
            Self::Server => "server",
        }
    }
}

/// The queue of writes, and the thread that writes them.
#[derive(Debug)]
pub(crate) struct Overrides {
    scope: OverrideScope,
    /// The places of each tenant among the writes that wait: no tenant can take those of another.
    places: Box<[Arc<Semaphore>]>,
    /// The places of all tenants.
    all_places: Arc<Semaphore>,
    rules: Arc<RuleState>,
    /// Whether the last use of the embedded store failed.
    is_store_down: Arc<AtomicBool>,
    /// `None` only during the drop.
    writer: Option<(mpsc::UnboundedSender<QueuedWrite>, JoinHandle<()>)>,
}

/// Why a write was not done.
#[derive(Debug)]
pub(crate) enum OverrideError {
    /// The store has room for no more overrides.
    Full,
    /// The tenant has [`WAITING_PER_TENANT_MAX`] writes that wait, or all have [`WAITING_MAX`].
    Busy,
    /// The rule store has not been reached since the server started.
    Unreached,
    /// The store failed, or the override is not in force.
    Store(Arc<OverrideWriteError>),
    /// The server stops.
    Stopping,
}

impl fmt::Display for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => f.write_str("overrides: the store has reached its maximum: delete one"),
            Self::Busy => write!(
                f,
                "overrides: {WAITING_PER_TENANT_MAX} writes of this tenant wait already, the most that may"
            ),
            Self::Unreached => f.write_str(
                "overrides: the rule store was not reached since the server started: try again later",
            ),
            Self::Store(error) => error.fmt(f),
            Self::Stopping => f.write_str("overrides: the server is stopping"),
        }
    }
}

/// A write in the queue.
#[derive(Debug)]
struct QueuedWrite {
    write: OverrideWrite,
    /// Its places in the queue.
    places: [OwnedSemaphorePermit; 2],
    reply: oneshot::Sender<Result<OverrideOutcome, OverrideError>>,
}

impl Overrides {
    /// Writes overrides to the rule store that the server follows. The data folder is locked all
    /// the same: the decision log and the snapshots in it are of one server alone.
    pub(crate) fn of_fleet(
        folder: Option<&Path>,
        rules: Arc<RuleState>,
        tenants: usize,
    ) -> Result<Self, StartError> {
        let folder = folder.map(Path::to_owned);
        Self::start(OverrideScope::Fleet, rules, tenants, move |rules| async move {
            let locked = match folder {
                None => None,
                Some(folder) => {
                    let store = Store::open_embedded(Some(&folder)).await;
                    Some(store.map_err(|error| problem_of_folder(&error))?)
                }
            };
            Ok(OverrideWriter::Fleet { rules, locked })
        })
    }

    /// Opens the embedded store in `folder`, or in memory, and puts its overrides in force.
    pub(crate) fn embedded(
        folder: Option<&Path>,
        rules: Arc<RuleState>,
        tenants: usize,
        now_ms: u64,
    ) -> Result<Self, StartError> {
        let folder = folder.map(Path::to_owned);
        let is_store_down = Arc::new(AtomicBool::new(false));
        let of_store = Arc::clone(&is_store_down);
        let mut started = Self::start(OverrideScope::Server, rules, tenants, move |rules| async move {
            let store = EmbeddedStore::open(folder.as_deref(), rules, of_store, now_ms).await?;
            Ok(OverrideWriter::Embedded(Box::new(store)))
        })?;
        started.is_store_down = is_store_down;
        Ok(started)
    }

    /// Starts the thread of the writer, and waits until it has opened its store.
    fn start<F, O>(
        scope: OverrideScope,
        rules: Arc<RuleState>,
        tenants: usize,
        open: F,
    ) -> Result<Self, StartError>
    where
        F: FnOnce(Arc<RuleState>) -> O + Send + 'static,
        O: Future<Output = Result<OverrideWriter, String>>,
    {
        let (queue, waiting) = mpsc::unbounded_channel();
        let (opened, is_open) = std::sync::mpsc::channel();
        let failed = |error| StartError::System("the thread that writes overrides".to_owned(), error);
        let of_writer = Arc::clone(&rules);
        let thread = std::thread::Builder::new()
            .name("overrides".to_owned())
            .spawn(move || run(move || open(of_writer), waiting, &opened))
            .map_err(failed)?;
        let places = || Arc::new(Semaphore::new(WAITING_PER_TENANT_MAX));
        match is_open.recv() {
            Ok(Ok(())) => Ok(Self {
                scope,
                places: (0..tenants).map(|_| places()).collect(),
                all_places: Arc::new(Semaphore::new(WAITING_MAX)),
                rules,
                is_store_down: Arc::default(),
                writer: Some((queue, thread)),
            }),
            Ok(Err(problem)) => Err(StartError::File(problem)),
            Err(_) => Err(StartError::File("data_dir: the store could not be opened".to_owned())),
        }
    }

    /// Where its overrides apply.
    pub(crate) fn scope(&self) -> OverrideScope {
        self.scope
    }

    /// Whether the last use of the embedded store failed; never of a rule store.
    pub(crate) fn is_store_down(&self) -> &Arc<AtomicBool> {
        &self.is_store_down
    }

    /// Sends a write to the writer at once, or fails. The future returns the result of the write,
    /// which is done even if the future is dropped.
    pub(crate) fn write(
        &self,
        tenant: TenantIndex,
        write: OverrideWrite,
    ) -> impl Future<Output = Result<OverrideOutcome, OverrideError>> + use<> {
        let (reply, answer) = oneshot::channel();
        let sent = self.queue(tenant, write, reply);
        async move {
            sent?;
            answer.await.unwrap_or(Err(OverrideError::Stopping))
        }
    }

    fn queue(
        &self,
        tenant: TenantIndex,
        write: OverrideWrite,
        reply: oneshot::Sender<Result<OverrideOutcome, OverrideError>>,
    ) -> Result<(), OverrideError> {
        self.check_room(&write)?;
        // Principals are made from the same list of tenants.
        let of_tenant = Arc::clone(&self.places[tenant]).try_acquire_owned();
        let of_all = Arc::clone(&self.all_places).try_acquire_owned();
        let (Ok(of_tenant), Ok(of_all)) = (of_tenant, of_all) else { return Err(OverrideError::Busy) };
        let (queue, _) = self.writer.as_ref().ok_or(OverrideError::Stopping)?;
        let queued = QueuedWrite { write, places: [of_tenant, of_all], reply };
        queue.send(queued).map_err(|_| OverrideError::Stopping)
    }

    /// Refuses another override if all rows together are about to exceed their maximum. The store
    /// checks the maximum of the tenant.
    fn check_room(&self, write: &OverrideWrite) -> Result<(), OverrideError> {
        let rules = self.rules.load();
        let (is_set, is_wild) = (write.limit.is_some(), write.identifier.contains('*'));
        let has_room = rules.set().overrides() < OVERRIDES_MAX - RESERVED
            && (!is_wild || rules.set().wildcards() < WILDCARDS_MAX - RESERVED_WILDCARDS);
        if has_room || !is_set { Ok(()) } else { Err(OverrideError::Full) }
    }
}

impl Drop for Overrides {
    /// Waits until all queued writes are done, and the embedded store is closed. A rule store is
    /// not waited for: it may be written on the runtime of the caller.
    fn drop(&mut self) {
        if let Some((queue, thread)) = self.writer.take() {
            drop(queue);
            if self.scope == OverrideScope::Server {
                let _ = thread.join();
            }
        }
    }
}

/// Runs the thread of the writer: opens its store, and writes until the queue is closed.
fn run<O: Future<Output = Result<OverrideWriter, String>>>(
    open: impl FnOnce() -> O,
    waiting: mpsc::UnboundedReceiver<QueuedWrite>,
    opened: &std::sync::mpsc::Sender<Result<(), String>>,
) {
    // Without a runtime, the caller gets no message that the store is open, and the start fails.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    runtime.block_on(async {
        match open().await {
            Err(problem) => drop(opened.send(Err(problem))),
            Ok(writer) => {
                let _ = opened.send(Ok(()));
                writer.run(waiting).await;
            }
        }
    });
}

/// Writes groups of overrides to a store, and puts them in force.
enum OverrideWriter {
    /// To the rule store, once the server has reached it.
    Fleet {
        rules: Arc<RuleState>,
        /// Locks the data folder.
        locked: Option<Store>,
    },
    /// To the store of this server.
    Embedded(Box<EmbeddedStore>),
}

impl OverrideWriter {
    async fn run(mut self, mut waiting: mpsc::UnboundedReceiver<QueuedWrite>) {
        let mut group = Vec::with_capacity(GROUP_MAX);
        loop {
            // A timeout loses no write: they stay in the queue.
            let received = waiting.recv_many(&mut group, GROUP_MAX);
            match &mut self {
                Self::Embedded(embedded) if embedded.is_down() => {
                    match timeout(RETRY_EVERY, received).await {
                        Err(_) => embedded.retry().await,
                        Ok(0) => break,
                        Ok(_) => self.write_group(&mut group).await,
                    }
                }
                Self::Embedded(_) | Self::Fleet { .. } => match received.await {
                    0 => break,
                    _ => self.write_group(&mut group).await,
                },
            }
        }
        let store = match self {
            Self::Fleet { locked, .. } => locked,
            Self::Embedded(embedded) => Some(embedded.store),
        };
        if let Some(store) = store {
            store.close().await;
        }
    }

    /// Does a group of writes, even if their clients are gone. Frees the places of a write before
    /// it replies.
    async fn write_group(&mut self, group: &mut Vec<QueuedWrite>) {
        let writes: Vec<OverrideWrite> = group.iter().map(|queued| queued.write.clone()).collect();
        let mut outcomes = self.write(writes).await.map(Vec::into_iter);
        for QueuedWrite { places, reply, .. } in group.drain(..) {
            drop(places);
            let outcome = match &mut outcomes {
                Ok(outcomes) => outcomes.next().ok_or(OverrideError::Stopping),
                Err(OverrideError::Store(error)) => Err(OverrideError::Store(Arc::clone(error))),
                Err(_) => Err(OverrideError::Unreached),
            };
            // A client that is gone needs no reply.
            let _ = reply.send(outcome);
        }
    }

    async fn write(&mut self, writes: Vec<OverrideWrite>) -> Result<Vec<OverrideOutcome>, OverrideError> {
        let written = match self {
            Self::Embedded(embedded) => embedded.write(&writes).await,
            Self::Fleet { rules, .. } => {
                let control = rules.control().ok_or(OverrideError::Unreached)?;
                control.write_overrides(writes).await
            }
        };
        written.map_err(|error| OverrideError::Store(Arc::new(error)))
    }
}

/// The embedded store: a rule store with overrides only.
struct EmbeddedStore {
    store: Store,
    rows: RuleRows,
    rules: Arc<RuleState>,
    is_down: Arc<AtomicBool>,
}

impl EmbeddedStore {
    /// Opens the store, and puts its overrides in force. Overrides of tenants that are not
    /// configured stay in the store.
    async fn open(
        folder: Option<&Path>,
        rules: Arc<RuleState>,
        is_down: Arc<AtomicBool>,
        now_ms: u64,
    ) -> Result<Self, String> {
        let store = Store::open_embedded(folder).await.map_err(|error| problem_of_folder(&error))?;
        let rows = store.load().await.map_err(|error| problem_of_folder(&error))?;
        let overrides = NamespaceOverrides::compile(&rows.rows, now_ms);
        let overrides = overrides.map_err(|problems| format!("data_dir: {problems}"))?;
        rules.store_embedded(overrides);
        Ok(Self { store, rows, rules, is_down })
    }

    async fn write(&mut self, writes: &[OverrideWrite]) -> Result<Vec<OverrideOutcome>, OverrideWriteError> {
        let written = self.write_into_force(writes).await;
        self.note(written.as_ref().err());
        written
    }

    async fn write_into_force(
        &mut self,
        writes: &[OverrideWrite],
    ) -> Result<Vec<OverrideOutcome>, OverrideWriteError> {
        let (revision, outcomes) = self.store.write_overrides(writes).await?;
        if revision != self.rows.override_revision {
            self.take_changes(writes.last().map_or(0, |write| write.now_ms)).await?;
        }
        Ok(outcomes)
    }

    /// Puts the overrides in force that the store has got since.
    async fn take_changes(&mut self, now_ms: u64) -> Result<(), OverrideWriteError> {
        let (revisions, changes) = self.store.override_changes(self.rows.override_revision).await?;
        let rows = self.rows.with_overrides(revisions.override_revision, changes);
        let overrides = NamespaceOverrides::compile(&rows.rows, now_ms)
            .map_err(|problems| OverrideWriteError::NotInForce(problems.to_string()))?;
        self.rules.store_embedded(overrides);
        self.rows = rows;
        Ok(())
    }

    fn is_down(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    /// Looks whether the store works again. A failed write may have reached it.
    async fn retry(&mut self) {
        let retried = match self.store.retry_failed_write().await {
            // Expired overrides take part in no decision, so the time does not matter.
            Ok(()) => self.take_changes(0).await,
            Err(error) => Err(error.into()),
        };
        self.note(retried.as_ref().err());
    }

    /// Logs that the store fails, and that it works again, once each.
    fn note(&self, error: Option<&OverrideWriteError>) {
        let problem = match error {
            Some(OverrideWriteError::Store(
                error @ (StoreError::Unreachable(_) | StoreError::Database(_) | StoreError::Busy),
            )) => Some(error),
            _ => None,
        };
        let was_down = self.is_down.swap(problem.is_some(), Ordering::Relaxed);
        match problem {
            Some(error) if !was_down => tracing::error!(
                %error,
                "the store of overrides in `data_dir` fails: overrides stay as they are until it works again"
            ),
            None if was_down => tracing::info!("the store of overrides in `data_dir` works again"),
            Some(_) | None => {}
        }
    }
}

/// Names the setting of the folder, as all problems of the configuration do.
fn problem_of_folder(error: &StoreError) -> String {
    match error {
        StoreError::InUse(_) => error.to_string(),
        StoreError::Unreachable(problem) => problem.clone(),
        other => format!("data_dir: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use tidegate_rules::store::OverrideLimit;

    use super::*;

    const NOISY: TenantIndex = 0;
    const CALM: TenantIndex = 1;
    const NAMES: [&str; 2] = ["noisy", "calm"];

    fn set(tenant: TenantIndex, identifier: &str) -> OverrideWrite {
        OverrideWrite {
            tenant: NAMES[tenant].to_owned(),
            namespace: "n".to_owned(),
            identifier: identifier.to_owned(),
            limit: Some(OverrideLimit { amount: 1, period_ms: 1_000 }),
            by: "token:ops".to_owned(),
            now_ms: 1,
        }
    }

    fn delete(tenant: TenantIndex, identifier: &str) -> OverrideWrite {
        OverrideWrite { limit: None, ..set(tenant, identifier) }
    }

    fn count(rules: &RuleState, tenant: TenantIndex) -> usize {
        let rules = rules.load();
        rules.set().list_namespace_overrides(NAMES[tenant], "n", (None, usize::MAX), 1).len()
    }

    /// Returns overrides of two tenants, with a writer that has not started and its queue.
    async fn not_begun() -> (Overrides, OverrideWriter, mpsc::UnboundedReceiver<QueuedWrite>) {
        let rules = Arc::new(RuleState::default());
        let store =
            EmbeddedStore::open(None, Arc::clone(&rules), Arc::default(), 1).await.expect("in memory");
        let (queue, waiting) = mpsc::unbounded_channel();
        let overrides = Overrides {
            scope: OverrideScope::Server,
            places: NAMES.iter().map(|_| Arc::new(Semaphore::new(WAITING_PER_TENANT_MAX))).collect(),
            all_places: Arc::new(Semaphore::new(WAITING_MAX)),
            rules,
            is_store_down: Arc::default(),
            writer: Some((queue, std::thread::spawn(|| ()))),
        };
        (overrides, OverrideWriter::Embedded(Box::new(store)), waiting)
    }

    #[tokio::test]
    async fn a_tenant_that_writes_much_takes_no_place_of_another() {
        let (overrides, mut writer, mut waiting) = not_begun().await;
        let write = |tenant, identifier: &str| overrides.write(tenant, set(tenant, identifier));
        let taken: Vec<_> = (0..WAITING_PER_TENANT_MAX).map(|at| write(NOISY, &at.to_string())).collect();
        let refused = write(NOISY, "one more").await.expect_err("it has no place left");
        assert!(matches!(refused, OverrideError::Busy), "{refused}");
        let calm = write(CALM, "a");

        let mut first = vec![waiting.recv().await.expect("the first")];
        writer.write_group(&mut first).await;
        let again = overrides.write(NOISY, delete(NOISY, "0"));
        let refused = write(NOISY, "one more").await.expect_err("the place that came free is taken again");
        assert!(matches!(refused, OverrideError::Busy), "{refused}");

        let mut group = Vec::new();
        assert_eq!(waiting.recv_many(&mut group, GROUP_MAX).await, WAITING_PER_TENANT_MAX + 1);
        writer.write_group(&mut group).await;
        assert!(matches!(calm.await, Ok(OverrideOutcome::Set { .. })));
        for taken in taken {
            assert!(matches!(taken.await, Ok(OverrideOutcome::Set { .. })));
        }
        assert!(matches!(again.await, Ok(OverrideOutcome::Deleted)), "it was there to be deleted");
        assert!(waiting.try_recv().is_err(), "what was refused is not written");
        let counts = [NOISY, CALM].map(|tenant| count(&overrides.rules, tenant));
        assert_eq!(counts, [WAITING_PER_TENANT_MAX - 1, 1]);
    }

    #[tokio::test]
    async fn waiting_writes_are_one_revision_of_the_store() {
        let (overrides, mut writer, mut waiting) = not_begun().await;
        let pending: Vec<_> = (0..100).map(|at| overrides.write(CALM, set(CALM, &at.to_string()))).collect();
        let mut group = Vec::new();
        waiting.recv_many(&mut group, GROUP_MAX).await;
        writer.write_group(&mut group).await;
        for write in pending {
            assert!(matches!(write.await, Ok(OverrideOutcome::Set { version: 1, .. })));
        }
        let OverrideWriter::Embedded(embedded) = &writer else { panic!("it is embedded") };
        assert_eq!((embedded.rows.override_revision, embedded.rows.rows.len()), (1, 100));
    }

    #[tokio::test]
    async fn acknowledged_override_is_in_force() {
        let rules = Arc::new(RuleState::default());
        let overrides = Overrides::embedded(None, Arc::clone(&rules), 2, 1).expect("in memory");
        overrides.write(CALM, set(CALM, "a*")).await.expect("written");
        let found = |rules: &RuleState| {
            rules.load().set().namespace_override("calm", "n", "abc", 1).map(|found| found.version)
        };
        assert_eq!(found(&rules), Some(1));
        overrides.write(CALM, set(CALM, "a*")).await.expect("written");
        assert_eq!(found(&rules), Some(2));
        overrides.write(CALM, delete(CALM, "a*")).await.expect("written");
        assert_eq!(found(&rules), None);
    }

    #[tokio::test]
    async fn stored_overrides_are_in_force_after_a_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let open = |rules: &Arc<RuleState>| Overrides::embedded(Some(folder.path()), Arc::clone(rules), 2, 1);
        let rules = Arc::new(RuleState::default());
        let overrides = open(&rules).expect("opens");
        overrides.write(CALM, set(CALM, "a")).await.expect("written");
        let problem = open(&rules).expect_err("in use").to_string();
        assert!(problem.starts_with("data_dir: ") && problem.ends_with("--data-dir DIR"), "{problem}");
        drop(overrides);
        let rules = Arc::new(RuleState::default());
        let _overrides = open(&rules).expect("opens again");
        assert_eq!([NOISY, CALM].map(|tenant| count(&rules, tenant)), [0, 1]);
    }
}
