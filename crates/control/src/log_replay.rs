//! Replays of the decision log: the records of a time span, in order, on a blocking thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tidegate_record::{Archive, DecisionRecord, LogError};
use tokio::runtime::Builder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent replays. Each holds some tens of megabytes of state. A replay waits for the previous
/// one, but not for queries.
const REPLAYS_MAX: usize = 1;

/// The permit to replay.
pub(crate) type ReplayPermit = OwnedSemaphorePermit;

/// The decision log of a node, for replays.
#[derive(Debug)]
pub struct LogReplay {
    folder: PathBuf,
    sample_rate: f64,
    permits: Arc<Semaphore>,
}

impl LogReplay {
    /// For the log in `folder`, which has this share of the allowed decisions.
    pub fn new(folder: &Path, sample_rate: f64) -> Self {
        Self { folder: folder.to_owned(), sample_rate, permits: Arc::new(Semaphore::new(REPLAYS_MAX)) }
    }

    pub(crate) fn sample_rate(&self) -> f64 {
        self.sample_rate
    }

    /// Passes the records of a time span to `take` in order until it has enough, and returns the
    /// result of `finish`. If there are more than `records`, only the latest are replayed.
    pub async fn replay<T: Send + 'static, R: Send + 'static>(
        &self,
        window_ms: (u64, u64),
        records: u64,
        to: T,
        take: fn(&mut T, &DecisionRecord) -> bool,
        finish: fn(T) -> R,
    ) -> Result<R, LogError> {
        let (permit, folder) = (self.turn().await?, self.folder.clone());
        let replayed = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            replay(&folder, window_ms, records, to, take, finish)
        });
        replayed.await.map_err(ended).flatten()
    }

    /// Waits until no other replay runs.
    pub(crate) async fn turn(&self) -> Result<ReplayPermit, LogError> {
        Arc::clone(&self.permits).acquire_owned().await.map_err(ended)
    }

    /// Runs `replay` on the current thread. The caller holds the permit, and its thread may block.
    pub(crate) fn replay_here<T, R>(
        &self,
        _turn: ReplayPermit,
        window_ms: (u64, u64),
        records: u64,
        to: T,
        take: fn(&mut T, &DecisionRecord) -> bool,
        finish: fn(T) -> R,
    ) -> Result<R, LogError> {
        replay(&self.folder, window_ms, records, to, take, finish)
    }
}

/// Replays the log in a folder, and blocks this thread until it ends.
fn replay<T, R>(
    folder: &Path,
    (from_ms, to_ms): (u64, u64),
    records: u64,
    mut to: T,
    take: fn(&mut T, &DecisionRecord) -> bool,
    finish: fn(T) -> R,
) -> Result<R, LogError> {
    let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
    runtime.block_on(async move {
        let mut archive = Archive::open(folder).await?;
        let from_ms = archive.since(from_ms, to_ms, records).await?;
        archive.replay(from_ms, to_ms, |record| take(&mut to, &record)).await?;
        archive.close().await?;
        Ok(finish(to))
    })
}

/// A thread that did not come to an end.
fn ended(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LogError {
    LogError::Thread(std::io::Error::other(error))
}
