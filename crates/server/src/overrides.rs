//! Overrides at work: looked up in memory by every worker, written by one thread that keeps them.
//!
//! A write goes to the store first and to memory second, and its answer comes after both: what somebody was told is in
//! force, here and after a restart.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

use tidegate_rules::overrides::{Full, Override, OverrideIndex, Store, StoreError};
use tokio::sync::{mpsc, oneshot};

use crate::auth::TenantIndex;
use crate::shared::StartError;

/// Questions to the store that may wait. Higher: larger bursts of writes are taken, and the last of them waits longer.
const WAITING_MAX: usize = 1_024;

/// The overrides of all tenants.
#[derive(Debug)]
pub(crate) struct Overrides {
    /// By [`TenantIndex`].
    tenants: Arc<[TenantOverrides]>,
    /// Nothing only while it is being dropped.
    keeper: Option<(mpsc::Sender<Task>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct TenantOverrides {
    name: String,
    index: OverrideIndex,
}

/// Why a write, or a list, was not done.
#[derive(Debug)]
pub(crate) enum NotDone {
    /// There is no room for another override.
    Full(Full),
    /// Too much is waiting to be written.
    Busy,
    /// The store failed.
    Store(StoreError),
    /// The server stops.
    Stopping,
}

impl fmt::Display for NotDone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(full) => full.fmt(f),
            Self::Busy => f.write_str("overrides: too much is waiting to be written"),
            Self::Store(error) => error.fmt(f),
            Self::Stopping => f.write_str("overrides: the server is stopping"),
        }
    }
}

impl From<StoreError> for NotDone {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

type Reply<T> = oneshot::Sender<Result<T, NotDone>>;

/// What the keeper does.
enum Task {
    Set { tenant: TenantIndex, new: Override, now_ms: u64, reply: Reply<String> },
    Delete { tenant: TenantIndex, namespace: String, pattern: String, reply: Reply<bool> },
    List { tenant: TenantIndex, page: Page, reply: Reply<Vec<Override>> },
}

/// Which part of a namespace's overrides.
#[derive(Debug)]
pub(crate) struct Page {
    /// Of this namespace.
    pub(crate) namespace: String,
    /// Those that follow this pattern.
    pub(crate) after: Option<String>,
    /// At most this many.
    pub(crate) most: u32,
}

impl Overrides {
    /// Opens the store in `folder`, or keeps overrides in memory only, for tenants of these names.
    pub(crate) fn open(folder: Option<&Path>, tenants: &[String]) -> Result<Self, StartError> {
        let tenant = |name: &String| TenantOverrides { name: name.clone(), index: OverrideIndex::default() };
        let tenants: Arc<[_]> = tenants.iter().map(tenant).collect();
        let (tasks, waiting) = mpsc::channel(WAITING_MAX);
        let (opened, is_open) = std::sync::mpsc::channel();
        let keeper = Keeper { folder: folder.map(Path::to_owned), tenants: Arc::clone(&tenants) };
        let failed = |error| StartError::System("the thread that keeps overrides".to_owned(), error);
        let thread = std::thread::Builder::new()
            .name("overrides".to_owned())
            .spawn(move || keeper.run(waiting, &opened))
            .map_err(failed)?;
        match is_open.recv() {
            Ok(Ok(())) => Ok(Self { tenants, keeper: Some((tasks, thread)) }),
            Ok(Err(error)) => Err(StartError::File(error.to_string())),
            Err(_) => Err(StartError::File("data_dir: the store could not be opened".to_owned())),
        }
    }

    /// The overrides of a tenant.
    #[inline]
    pub(crate) fn of(&self, tenant: TenantIndex) -> &OverrideIndex {
        // Principals are made from the same list.
        &self.tenants[tenant].index
    }

    /// Keeps an override; gives its id, which is that of the one it replaces.
    pub(crate) fn set(
        &self,
        tenant: TenantIndex,
        new: Override,
        now_ms: u64,
    ) -> impl Future<Output = Result<String, NotDone>> + use<> {
        self.ask(move |reply| Task::Set { tenant, new, now_ms, reply })
    }

    /// Forgets the override with this pattern; says whether there was one.
    pub(crate) fn delete(
        &self,
        tenant: TenantIndex,
        namespace: String,
        pattern: String,
    ) -> impl Future<Output = Result<bool, NotDone>> + use<> {
        self.ask(move |reply| Task::Delete { tenant, namespace, pattern, reply })
    }

    /// Some overrides of a namespace, in the order of their patterns.
    pub(crate) fn list(
        &self,
        tenant: TenantIndex,
        page: Page,
    ) -> impl Future<Output = Result<Vec<Override>, NotDone>> + use<> {
        self.ask(move |reply| Task::List { tenant, page, reply })
    }

    /// Hands a task to the keeper, now or not at all, and gives what comes of it.
    fn ask<T, F>(&self, task: F) -> impl Future<Output = Result<T, NotDone>> + use<T, F>
    where
        F: FnOnce(Reply<T>) -> Task,
    {
        let (reply, answer) = oneshot::channel();
        let sent = match &self.keeper {
            None => Err(NotDone::Stopping),
            Some((tasks, _)) => tasks.try_send(task(reply)).map_err(|_| NotDone::Busy),
        };
        async move {
            sent?;
            answer.await.unwrap_or(Err(NotDone::Stopping))
        }
    }
}

impl Drop for Overrides {
    /// Waits for what was handed over to be written.
    fn drop(&mut self) {
        if let Some((tasks, thread)) = self.keeper.take() {
            drop(tasks);
            let _ = thread.join();
        }
    }
}

/// The one that writes.
struct Keeper {
    folder: Option<PathBuf>,
    tenants: Arc<[TenantOverrides]>,
}

impl Keeper {
    fn run(self, waiting: mpsc::Receiver<Task>, opened: &std::sync::mpsc::Sender<Result<(), StoreError>>) {
        // Without a runtime nobody hears that the store is open, and the start fails.
        let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
        runtime.block_on(async {
            match self.open().await {
                Err(error) => drop(opened.send(Err(error))),
                Ok(store) => {
                    let _ = opened.send(Ok(()));
                    self.keep(store, waiting).await;
                }
            }
        });
    }

    /// Opens the store and takes everything in it to memory. What belongs to tenants that are not configured stays
    /// where it is.
    async fn open(&self) -> Result<Store, StoreError> {
        let mut store = Store::open(self.folder.as_deref()).await?;
        for (name, known) in store.load().await? {
            if let Some(tenant) = self.tenants.iter().find(|tenant| tenant.name == name) {
                tenant.index.set(known);
            }
        }
        Ok(store)
    }

    async fn keep(&self, mut store: Store, mut waiting: mpsc::Receiver<Task>) {
        while let Some(task) = waiting.recv().await {
            // Whoever asked may be gone; what they asked for is done all the same.
            match task {
                Task::Set { tenant, new, now_ms, reply } => {
                    let _ = reply.send(self.set(&mut store, tenant, new, now_ms).await);
                }
                Task::Delete { tenant, namespace, pattern, reply } => {
                    let _ = reply.send(self.delete(&mut store, tenant, &namespace, &pattern).await);
                }
                Task::List { tenant, page, reply } => {
                    let name = &self.tenants[tenant].name;
                    let Page { namespace, after, most } = page;
                    let found = store.list(name, &namespace, after.as_deref(), most).await;
                    let _ = reply.send(found.map_err(NotDone::Store));
                }
            }
        }
        if let Err(error) = store.close().await {
            tracing::warn!(%error, "the store was not closed in order; nothing is lost");
        }
    }

    async fn set(
        &self,
        store: &mut Store,
        tenant: TenantIndex,
        new: Override,
        now_ms: u64,
    ) -> Result<String, NotDone> {
        let TenantOverrides { name, index } = &self.tenants[tenant];
        index.room_for(&new.namespace, new.identifier.as_str()).map_err(NotDone::Full)?;
        let id = store.set(name, &new, now_ms).await?;
        index.set(Override { id: id.clone(), ..new });
        Ok(id)
    }

    async fn delete(
        &self,
        store: &mut Store,
        tenant: TenantIndex,
        namespace: &str,
        pattern: &str,
    ) -> Result<bool, NotDone> {
        let TenantOverrides { name, index } = &self.tenants[tenant];
        let was_there = store.delete(name, namespace, pattern).await?;
        index.remove(namespace, pattern);
        Ok(was_there)
    }
}

/// A new id: `ovr_` and 128 random bits, so that it tells nothing of other overrides.
#[expect(clippy::disallowed_methods, reason = "an id must not be guessable by other tenants")]
pub(crate) fn new_id() -> Result<String, String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system gave no random bytes: {error}"))?;
    Ok(format!("ovr_{:032x}", u128::from_le_bytes(bytes)))
}
