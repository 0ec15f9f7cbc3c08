//! Overrides of a server. All workers look them up and list them in memory; one thread writes them.
//!
//! A write goes first to the store, then to memory, and then it is acknowledged. So an acknowledged
//! override is in force, also after a restart.

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use tidegate_rules::overrides::{Override, OverrideIndex, OverrideStore, OverrideStoreError, OverridesFull};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot};

use crate::auth::TenantIndex;
use crate::shared::StartError;

/// Largest number of waiting writes per tenant. Higher: larger bursts of one tenant are accepted,
/// and writes of other tenants wait longer behind them.
const WAITING_PER_TENANT_MAX: usize = 128;

/// The overrides of all tenants.
#[derive(Debug)]
pub(crate) struct Overrides {
    /// By [`TenantIndex`].
    tenants: Arc<[TenantOverrides]>,
    /// The queue and the thread of the writer. The places of all tenants bound the queue. `None`
    /// only during the drop.
    keeper: Option<(mpsc::UnboundedSender<Task>, JoinHandle<()>)>,
}

#[derive(Debug)]
struct TenantOverrides {
    name: String,
    index: OverrideIndex,
    /// Its places among the writes that wait: no tenant can take those of another.
    places: Arc<Semaphore>,
}

/// Why a write was not done.
#[derive(Debug)]
pub(crate) enum OverrideError {
    /// There is no room for another override.
    Full(OverridesFull),
    /// The tenant has [`WAITING_PER_TENANT_MAX`] writes that wait.
    Busy,
    /// The store failed.
    Store(OverrideStoreError),
    /// The server stops.
    Stopping,
}

impl fmt::Display for OverrideError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(full) => full.fmt(f),
            Self::Busy => write!(
                f,
                "overrides: {WAITING_PER_TENANT_MAX} writes of this tenant wait already, the most that may"
            ),
            Self::Store(error) => error.fmt(f),
            Self::Stopping => f.write_str("overrides: the server is stopping"),
        }
    }
}

impl From<OverrideStoreError> for OverrideError {
    fn from(error: OverrideStoreError) -> Self {
        Self::Store(error)
    }
}

/// A write that waits for the keeper.
#[derive(Debug)]
struct Task {
    tenant: TenantIndex,
    write: Write,
    place: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Write {
    Set { new: Override, now_ms: u64, reply: Reply<String> },
    Delete { namespace: String, pattern: String, reply: Reply<bool> },
}

type Reply<T> = oneshot::Sender<Result<T, OverrideError>>;

impl Overrides {
    /// Opens the store in `folder`, or keeps overrides in memory only, for tenants of these names.
    pub(crate) fn open(folder: Option<&Path>, names: &[String]) -> Result<Self, StartError> {
        let (tasks, waiting) = mpsc::unbounded_channel();
        let (opened, is_open) = std::sync::mpsc::channel();
        let (folder, names) = (folder.map(Path::to_owned), names.to_owned());
        let failed = |error| StartError::System("the thread that keeps overrides".to_owned(), error);
        let thread = std::thread::Builder::new()
            .name("overrides".to_owned())
            .spawn(move || run(folder.as_deref(), &names, waiting, &opened))
            .map_err(failed)?;
        match is_open.recv() {
            Ok(Ok(tenants)) => Ok(Self { tenants, keeper: Some((tasks, thread)) }),
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
    ) -> impl Future<Output = Result<String, OverrideError>> + use<> {
        self.ask(tenant, move |reply| Write::Set { new, now_ms, reply })
    }

    /// Deletes the override with this pattern. Returns whether it existed.
    pub(crate) fn delete(
        &self,
        tenant: TenantIndex,
        namespace: String,
        pattern: String,
    ) -> impl Future<Output = Result<bool, OverrideError>> + use<> {
        self.ask(tenant, move |reply| Write::Delete { namespace, pattern, reply })
    }

    /// Sends a write to the writer at once, or fails. The future returns the result of the write.
    fn ask<T, F>(
        &self,
        tenant: TenantIndex,
        write: F,
    ) -> impl Future<Output = Result<T, OverrideError>> + use<T, F>
    where
        F: FnOnce(Reply<T>) -> Write,
    {
        let (reply, answer) = oneshot::channel();
        let sent = self.hand_over(tenant, write(reply));
        async move {
            sent?;
            answer.await.unwrap_or(Err(OverrideError::Stopping))
        }
    }

    fn hand_over(&self, tenant: TenantIndex, write: Write) -> Result<(), OverrideError> {
        let places = Arc::clone(&self.tenants[tenant].places);
        let place = places.try_acquire_owned().map_err(|_| OverrideError::Busy)?;
        let (tasks, _) = self.keeper.as_ref().ok_or(OverrideError::Stopping)?;
        tasks.send(Task { tenant, write, place }).map_err(|_| OverrideError::Stopping)
    }
}

impl Drop for Overrides {
    /// Waits until all queued writes are done.
    fn drop(&mut self) {
        if let Some((tasks, thread)) = self.keeper.take() {
            drop(tasks);
            let _ = thread.join();
        }
    }
}

/// Runs the thread of the writer: opens the store, returns its overrides, and writes until the
/// queue is closed.
fn run(
    folder: Option<&Path>,
    names: &[String],
    waiting: mpsc::UnboundedReceiver<Task>,
    opened: &std::sync::mpsc::Sender<Result<Arc<[TenantOverrides]>, OverrideStoreError>>,
) {
    // Without a runtime, the caller gets no message that the store is open, and the start fails.
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else { return };
    runtime.block_on(async {
        match open(folder, names).await {
            Err(error) => drop(opened.send(Err(error))),
            Ok(keeper) => {
                let _ = opened.send(Ok(Arc::clone(&keeper.tenants)));
                keeper.keep(waiting).await;
            }
        }
    });
}

/// Opens the store and loads it into memory. Overrides of tenants that are not configured stay in
/// the store.
async fn open(folder: Option<&Path>, names: &[String]) -> Result<OverrideWriter, OverrideStoreError> {
    let mut store = OverrideStore::open(folder).await?;
    let mut by_tenant: HashMap<String, Vec<Override>> = HashMap::new();
    for (name, known) in store.load().await? {
        by_tenant.entry(name).or_default().push(known);
    }
    let tenant = |name: &String| TenantOverrides {
        name: name.clone(),
        index: by_tenant.remove(name).unwrap_or_default().into_iter().collect(),
        places: Arc::new(Semaphore::new(WAITING_PER_TENANT_MAX)),
    };
    Ok(OverrideWriter { tenants: names.iter().map(tenant).collect(), store })
}

/// The one that writes.
struct OverrideWriter {
    tenants: Arc<[TenantOverrides]>,
    store: OverrideStore,
}

impl OverrideWriter {
    async fn keep(mut self, mut waiting: mpsc::UnboundedReceiver<Task>) {
        while let Some(task) = waiting.recv().await {
            self.write(task).await;
        }
        if let Err(error) = self.store.close().await {
            tracing::warn!(%error, "the store was not closed in order; nothing is lost");
        }
    }

    /// Does a write, even if its client is gone. Frees the place of the write before it replies.
    async fn write(&mut self, Task { tenant, write, place }: Task) {
        match write {
            Write::Set { new, now_ms, reply } => {
                let done = self.set(tenant, new, now_ms).await;
                drop(place);
                let _ = reply.send(done);
            }
            Write::Delete { namespace, pattern, reply } => {
                let done = self.delete(tenant, &namespace, &pattern).await;
                drop(place);
                let _ = reply.send(done);
            }
        }
    }

    async fn set(
        &mut self,
        tenant: TenantIndex,
        new: Override,
        now_ms: u64,
    ) -> Result<String, OverrideError> {
        let TenantOverrides { name, index, .. } = &self.tenants[tenant];
        index.room_for(&new.namespace, new.identifier.as_str()).map_err(OverrideError::Full)?;
        let id = self.store.set(name, &new, now_ms).await?;
        index.set(Override { id: id.clone(), ..new });
        Ok(id)
    }

    async fn delete(
        &mut self,
        tenant: TenantIndex,
        namespace: &str,
        pattern: &str,
    ) -> Result<bool, OverrideError> {
        let TenantOverrides { name, index, .. } = &self.tenants[tenant];
        let was_there = self.store.delete(name, namespace, pattern).await?;
        index.remove(namespace, pattern);
        Ok(was_there)
    }
}

/// Returns a new id: `ovr_` and 128 random bits, so that it reveals nothing of other overrides.
#[expect(clippy::disallowed_methods, reason = "an id must not be guessable by other tenants")]
pub(crate) fn new_id() -> Result<String, String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| format!("the system gave no random bytes: {error}"))?;
    Ok(format!("ovr_{:032x}", u128::from_le_bytes(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate_rules::pattern::Pattern;

    const NOISY: TenantIndex = 0;
    const CALM: TenantIndex = 1;

    fn of(pattern: &str) -> Override {
        Override {
            id: format!("ovr_{pattern}"),
            namespace: "n".to_owned(),
            identifier: Pattern::new(pattern),
            limit: 1,
            duration_ms: 1_000,
        }
    }

    /// Returns overrides of two tenants, with a writer that has not started and its queue.
    async fn not_begun() -> (Overrides, OverrideWriter, mpsc::UnboundedReceiver<Task>) {
        let keeper = open(None, &["noisy".to_owned(), "calm".to_owned()]).await.expect("in memory");
        let (tasks, waiting) = mpsc::unbounded_channel();
        let tenants = Arc::clone(&keeper.tenants);
        (Overrides { tenants, keeper: Some((tasks, std::thread::spawn(|| ()))) }, keeper, waiting)
    }

    #[tokio::test]
    async fn a_tenant_that_writes_much_takes_no_place_of_another() {
        let (overrides, mut keeper, mut waiting) = not_begun().await;
        let set = |tenant, pattern: &str| overrides.set(tenant, of(pattern), 1);
        let taken: Vec<_> = (0..WAITING_PER_TENANT_MAX).map(|at| set(NOISY, &at.to_string())).collect();
        let refused = set(NOISY, "one more").await.expect_err("it has no place left");
        assert!(matches!(refused, OverrideError::Busy), "{refused}");
        let calm = set(CALM, "a");

        keeper.write(waiting.recv().await.expect("the first")).await;
        let again = overrides.delete(NOISY, "n".to_owned(), "0".to_owned());
        let refused = set(NOISY, "one more").await.expect_err("the place that came free is taken again");
        assert!(matches!(refused, OverrideError::Busy), "{refused}");

        for _ in 0..=WAITING_PER_TENANT_MAX {
            keeper.write(waiting.recv().await.expect("those that wait")).await;
        }
        assert_eq!(calm.await.expect("written"), "ovr_a");
        for taken in taken {
            taken.await.expect("written");
        }
        assert!(again.await.expect("written"), "it was there to be forgotten");
        assert!(waiting.try_recv().is_err(), "what was refused is not written");
        assert_eq!((overrides.of(NOISY).len(), overrides.of(CALM).len()), (WAITING_PER_TENANT_MAX - 1, 1));
    }

    #[tokio::test]
    async fn acknowledged_override_is_in_memory() {
        let overrides = Overrides::open(None, &["t".to_owned()]).expect("in memory");
        overrides.set(0, of("a*"), 1).await.expect("written");
        assert_eq!(overrides.of(0).list("n", None, 10).len(), 1);
        assert!(overrides.of(0).get("n", "a*").is_some());
        assert!(overrides.delete(0, "n".to_owned(), "a*".to_owned()).await.expect("written"));
        assert!(overrides.of(0).list("n", None, 10).is_empty());
    }

    #[tokio::test]
    async fn stored_overrides_are_in_memory_after_a_start() {
        let folder = tempfile::tempdir().expect("a folder");
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let overrides = Overrides::open(Some(folder.path()), &names(&["a", "b"])).expect("opens");
        overrides.set(0, of("of a"), 1).await.expect("written");
        overrides.set(1, of("of b"), 1).await.expect("written");
        drop(overrides);
        // A tenant that is no longer configured keeps its overrides, in case it returns.
        let overrides = Overrides::open(Some(folder.path()), &names(&["b"])).expect("opens again");
        let listed = overrides.of(0).list("n", None, 10);
        assert_eq!(listed.iter().map(|of| of.identifier.as_str()).collect::<Vec<_>>(), ["of b"]);
    }
}
