//! The decision log of a server: writes decision records and serves queries.

use std::path::Path;
use std::sync::Arc;

use tidegate_control::LogReplay;
use tidegate_record::{
    Archive, DecisionRecord, Deliveries, FLUSH_EVERY, HeavyKeys, Log, LogError, LogSettings, Recorder,
    WhyQuery,
};
use tokio::runtime::Builder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::config::LogConfig;
use crate::shared::Shared;

/// Concurrent queries. Higher: more people at once; less of the machine for decisions.
const QUERIES_MAX: usize = 2;

/// Similar keys that an answer without records names at most.
const SIMILAR_MAX: usize = 5;

/// The log of this server.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    log: Log,
    recorder: Arc<Recorder>,
    queries: Arc<Semaphore>,
    replay: LogReplay,
}

/// The reason why a query failed.
#[derive(Debug)]
pub(crate) enum LogQueryError {
    /// The maximum number of queries is running.
    Busy,
    /// The store failed.
    Log(LogError),
}

impl DecisionLog {
    /// Opens the log in `folder`.
    pub(crate) fn open(
        folder: &Path,
        config: &LogConfig,
        owner: LogOwner,
        shared: &Shared,
    ) -> Result<Self, LogError> {
        let limiter = Arc::clone(&shared.decider.limiter);
        let settings = LogSettings {
            threads: owner.threads,
            sample_rate: config.sample_rate,
            retention: config.retention,
            bytes_max: config.bytes_max,
            region: owner.region,
            node: shared.node.host_name.clone(),
            seed: limiter.wall_us(),
            otlp: config.otlp.clone(),
            flush_every: FLUSH_EVERY,
        };
        let log = Log::open(folder, settings, move || limiter.wall_us() / 1_000)?;
        let recorder = Arc::clone(log.recorder());
        let replay = LogReplay::new(log.folder(), recorder.sample_rate()).requiring(config.evidence);
        Ok(Self { log, recorder, queries: Arc::new(Semaphore::new(QUERIES_MAX)), replay })
    }

    pub(crate) fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Returns the delivery counts of records that are sent to a collector.
    pub(crate) fn deliveries(&self) -> Option<Deliveries> {
        self.log.deliveries()
    }

    /// Returns the heavy keys of a tenant, at most `most`.
    pub(crate) async fn heavy(
        &self,
        tenant: String,
        minutes: u64,
        now_ms: u64,
        most: usize,
    ) -> Result<HeavyKeys, LogQueryError> {
        let permit = Arc::clone(&self.queries).try_acquire_owned().map_err(|_| LogQueryError::Busy)?;
        let summary = self.log.summary();
        // The thread of the log may hold the lock of the summary while it takes in records. A
        // worker must not wait for it.
        let found = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            summary.heavy(&tenant, minutes, now_ms, most)
        });
        found.await.map_err(|error| LogQueryError::Log(ended(error)))
    }

    /// Returns the decisions on a key.
    pub(crate) async fn why(&self, request: WhyRequest) -> Result<WhyAnswer, LogQueryError> {
        let permit = Arc::clone(&self.queries).try_acquire_owned().map_err(|_| LogQueryError::Busy)?;
        let found = self.look_up(permit, async move |folder: &Path| request.look_up(folder).await);
        found.await.map_err(LogQueryError::Log)
    }

    /// The log, for replays.
    pub(crate) fn replay(&self) -> &LogReplay {
        &self.replay
    }

    /// Runs a query on a thread of its own, so that the workers go on deciding.
    async fn look_up<T: Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        query: impl AsyncFnOnce(&Path) -> Result<T, LogError> + Send + 'static,
    ) -> Result<T, LogError> {
        let folder = self.log.folder().to_owned();
        let looked_up = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            run_query(&folder, query)
        });
        looked_up.await.map_err(ended).flatten()
    }
}

/// Runs a query of the log in a folder, and blocks this thread until it ends.
fn run_query<T>(folder: &Path, query: impl AsyncFnOnce(&Path) -> Result<T, LogError>) -> Result<T, LogError> {
    let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
    runtime.block_on(query(folder))
}

/// A thread that did not come to an end.
fn ended(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> LogError {
    LogError::Thread(std::io::Error::other(error))
}

/// The server that writes the log.
#[derive(Debug)]
pub(crate) struct LogOwner {
    pub(crate) threads: usize,
    pub(crate) region: String,
}

/// A query for the decisions on a key.
#[derive(Debug)]
pub(crate) struct WhyRequest {
    pub(crate) tenant: String,
    pub(crate) key: String,
    pub(crate) at_ms: u64,
    pub(crate) window_ms: u64,
    pub(crate) records: usize,
}

/// The log's answer to a query.
#[derive(Debug)]
pub(crate) struct WhyAnswer {
    pub(crate) records: Vec<DecisionRecord>,
    /// Keys that contain the key of the query; empty if there are records.
    pub(crate) similar: Vec<String>,
}

impl WhyRequest {
    async fn look_up(&self, folder: &Path) -> Result<WhyAnswer, LogError> {
        let Self { tenant, key, at_ms, window_ms, records } = self;
        let mut archive = Archive::open(folder).await?;
        let why = WhyQuery { tenant, key, at_ms: *at_ms, window_ms: *window_ms, records: *records };
        let records = archive.why(&why).await?;
        let similar = if records.is_empty() { archive.similar(&why, SIMILAR_MAX).await? } else { Vec::new() };
        archive.close().await?;
        Ok(WhyAnswer { records, similar })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate::ManualClock;

    use super::*;
    use crate::fuzzing::small_config;

    /// Opens a log without records.
    fn decision_log(folder: &Path) -> DecisionLog {
        let mut config = small_config(None);
        let shared = Shared::on_clock(&mut config, Arc::new(ManualClock::new())).expect("fits");
        let log = LogConfig {
            sample_rate: 1.0,
            retention: Duration::from_hours(1),
            bytes_max: 1 << 20,
            evidence: Duration::ZERO,
            otlp: None,
        };
        DecisionLog::open(folder, &log, LogOwner { threads: 1, region: String::new() }, &shared)
            .expect("opens")
    }

    #[test]
    fn lookups_do_not_block_replays() {
        let folder = tempfile::tempdir().expect("a folder");
        let decision_log = decision_log(folder.path());
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let everybody: Vec<_> = (0..QUERIES_MAX).map(|_| decision_log.queries.try_acquire()).collect();
            let request = WhyRequest {
                tenant: String::new(),
                key: "user:1".to_owned(),
                at_ms: 1,
                window_ms: 1,
                records: 1,
            };
            assert!(everybody.iter().all(Result::is_ok));
            assert!(matches!(decision_log.why(request).await, Err(LogQueryError::Busy)));
            let counted = decision_log.replay().replay((0, 1), 1, 7, |_, _| true).await;
            assert_eq!(counted.expect("replayed"), 7);
        });
    }
}
