//! Replays of the decision log: the records of a time span, in order, on a blocking thread.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tidegate_record::{Archive, DecisionRecord, LogError};
use tokio::runtime::Builder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::guardrail::EVIDENCE_MS;

/// Concurrent replays. Each holds some tens of megabytes of state. A replay waits for the previous
/// one, but not for queries.
const REPLAYS_MAX: usize = 1;

/// The decision log of a node, for replays.
#[derive(Debug)]
pub struct LogReplay {
    folder: PathBuf,
    sample_rate: f64,
    evidence_ms: u64,
    permits: Arc<Semaphore>,
}

impl LogReplay {
    /// For the log in `folder`, which has this share of the allowed decisions.
    pub fn new(folder: &Path, sample_rate: f64) -> Self {
        let permits = Arc::new(Semaphore::new(REPLAYS_MAX));
        Self { folder: folder.to_owned(), sample_rate, evidence_ms: EVIDENCE_MS, permits }
    }

    /// The same log, whose records of a rule must cover this time to show that a change denies
    /// little.
    #[must_use]
    pub fn requiring(self, evidence: Duration) -> Self {
        Self { evidence_ms: u64::try_from(evidence.as_millis()).unwrap_or(u64::MAX), ..self }
    }

    pub(crate) fn sample_rate(&self) -> f64 {
        self.sample_rate
    }

    pub(crate) fn evidence_ms(&self) -> u64 {
        self.evidence_ms
    }

    /// Passes records to `take` as `ReplayTurn::replay` does, on a blocking thread, and returns
    /// the state that they changed.
    pub async fn replay<T: Send + 'static>(
        &self,
        window_ms: (u64, u64),
        records: u64,
        mut state: T,
        take: fn(&mut T, &DecisionRecord) -> bool,
    ) -> Result<T, LogError> {
        let turn = self.turn().await?;
        let replayed = tokio::task::spawn_blocking(move || {
            turn.replay(window_ms, records, |record| take(&mut state, record))?;
            Ok(state)
        });
        replayed.await.map_err(ended).flatten()
    }

    /// Waits until no other replay runs.
    pub(crate) async fn turn(&self) -> Result<ReplayTurn, LogError> {
        let permit = Arc::clone(&self.permits).acquire_owned().await.map_err(ended)?;
        Ok(ReplayTurn { folder: self.folder.clone(), _permit: permit })
    }
}

/// The permit to replay. The next replay waits until it is dropped.
#[derive(Debug)]
pub(crate) struct ReplayTurn {
    folder: PathBuf,
    _permit: OwnedSemaphorePermit,
}

impl ReplayTurn {
    /// Passes the records of a time span to `take` in order until it returns `false`, and blocks
    /// this thread until then. If there are more than `records`, only the latest are replayed.
    pub(crate) fn replay(
        &self,
        (from_ms, to_ms): (u64, u64),
        records: u64,
        mut take: impl FnMut(&DecisionRecord) -> bool,
    ) -> Result<(), LogError> {
        let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
        runtime.block_on(async {
            let mut archive = Archive::open(&self.folder).await?;
            let from_ms = archive.since(from_ms, to_ms, records).await?;
            archive.replay(from_ms, to_ms, |record| take(&record)).await?;
            archive.close().await
        })
    }
}

/// A thread that did not come to an end.
fn ended(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LogError {
    LogError::Thread(std::io::Error::other(error))
}
