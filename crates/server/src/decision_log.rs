//! The decision log of a server: writes decision records and serves queries.

use std::path::Path;
use std::sync::Arc;

use tidegate::{Outcome as LimitOutcome, Retry};
use tidegate_record::{
    Archive, DecisionEntry, DecisionRecord, Deliveries, HeavyKeys, LimitTerms, Log, LogError, LogSettings,
    RecordKey, RecordVerdict, Recorder, WhyQuery,
};
use tokio::runtime::Builder;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::auth::TenantIndex;
use crate::config::LogConfig;
use crate::metrics::{self, DecisionSource, Outcome, Surface};
use crate::reason::DecisionReason;
use crate::shared::Shared;

/// Questions that are looked up at the same time. Higher: more people at once; more of the machine that is not there for
/// decisions.
const QUESTIONS_MAX: usize = 2;

/// Concurrent replays. Each holds some tens of megabytes of state. A replay waits for the previous
/// one, but not for queries.
const REPLAYS_MAX: usize = 1;

/// Similar keys that an answer without records names at most.
const SIMILAR_MAX: usize = 5;

/// The permit to replay.
#[derive(Debug)]
pub(crate) struct ReplayPermit(OwnedSemaphorePermit);

/// The log of this server.
#[derive(Debug)]
pub(crate) struct DecisionLog {
    log: Log,
    recorder: Arc<Recorder>,
    questions: Arc<Semaphore>,
    replays: Arc<Semaphore>,
}

/// The reason why a query failed.
#[derive(Debug)]
pub(crate) enum LogQueryError {
    /// As many as may are being looked up.
    Busy,
    /// The store failed.
    Log(LogError),
}

/// A decision record without the dimensions of the request.
#[derive(Debug)]
pub(crate) struct RecordDraft<'n> {
    pub(crate) tenant: TenantIndex,
    pub(crate) surface: Surface,
    pub(crate) key: RecordKey,
    pub(crate) cost: u64,
    pub(crate) outcome: Outcome,
    /// The outcome of the limit that decided; `None` if no limit was checked.
    pub(crate) limit_outcome: Option<LimitOutcome<'n>>,
    pub(crate) source: DecisionSource,
    pub(crate) reason: DecisionReason,
    /// When the emergency in force ends, in milliseconds since the Unix epoch.
    pub(crate) until_ms: Option<u64>,
    pub(crate) rule_version: u64,
    pub(crate) set_version: &'n str,
    pub(crate) replaced_by: &'n str,
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
            node: shared.node.clone(),
            seed: limiter.wall_us(),
            otlp: config.otlp.clone(),
        };
        let log = Log::open(folder, settings, move || limiter.wall_us() / 1_000)?;
        let recorder = Arc::clone(log.recorder());
        let [questions, replays] = [QUESTIONS_MAX, REPLAYS_MAX].map(|most| Arc::new(Semaphore::new(most)));
        Ok(Self { log, recorder, questions, replays })
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
        let permit = Arc::clone(&self.questions).try_acquire_owned().map_err(|_| LogQueryError::Busy)?;
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
    pub(crate) async fn why(&self, question: WhyRequest) -> Result<WhyAnswer, LogQueryError> {
        let permit = Arc::clone(&self.questions).try_acquire_owned().map_err(|_| LogQueryError::Busy)?;
        let found = self.look_up(permit, async move |folder: &Path| question.look_up(folder).await);
        found.await.map_err(LogQueryError::Log)
    }

    /// Passes the records of a time span to `take` in order until it has enough, and returns the
    /// result of `finish`. If there are more than `records`, only the latest are replayed.
    pub(crate) async fn replay<T: Send + 'static, R: Send + 'static>(
        &self,
        (from_ms, to_ms): (u64, u64),
        records: u64,
        to: T,
        take: fn(&mut T, &DecisionRecord) -> bool,
        finish: fn(T) -> R,
    ) -> Result<R, LogError> {
        let ReplayPermit(permit) = self.turn().await?;
        self.look_up(permit, replaying((from_ms, to_ms), records, to, take, finish)).await
    }

    /// Waits until no other replay runs.
    pub(crate) async fn turn(&self) -> Result<ReplayPermit, LogError> {
        Arc::clone(&self.replays).acquire_owned().await.map(ReplayPermit).map_err(ended)
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
        query(self.log.folder(), replaying(window_ms, records, to, take, finish))
    }

    /// Runs a query on a thread of its own, so that the workers go on deciding.
    async fn look_up<T: Send + 'static>(
        &self,
        permit: OwnedSemaphorePermit,
        question: impl AsyncFnOnce(&Path) -> Result<T, LogError> + Send + 'static,
    ) -> Result<T, LogError> {
        let folder = self.log.folder().to_owned();
        let looked_up = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            query(&folder, question)
        });
        looked_up.await.map_err(ended).flatten()
    }
}

/// Runs a query of the log in a folder, and blocks this thread until it ends.
fn query<T>(folder: &Path, question: impl AsyncFnOnce(&Path) -> Result<T, LogError>) -> Result<T, LogError> {
    let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
    runtime.block_on(question(folder))
}

fn replaying<T, R>(
    (from_ms, to_ms): (u64, u64),
    records: u64,
    mut to: T,
    take: fn(&mut T, &DecisionRecord) -> bool,
    finish: fn(T) -> R,
) -> impl AsyncFnOnce(&Path) -> Result<R, LogError> {
    async move |folder: &Path| {
        let mut archive = Archive::open(folder).await?;
        let from_ms = archive.since(from_ms, to_ms, records).await?;
        archive.replay(from_ms, to_ms, |record| take(&mut to, &record)).await?;
        archive.close().await?;
        Ok(finish(to))
    }
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

impl Shared {
    /// Returns the recorder if this decision is to be logged. Must be called once for each
    /// decision, because it samples.
    #[inline]
    pub(crate) fn recorder_for(&self, outcome: Outcome) -> Option<&Recorder> {
        let recorder = &*self.decision_log.as_ref()?.recorder;
        recorder.wants(metrics::this_worker(), verdict(outcome)).then_some(recorder)
    }

    /// Writes a decision record with the dimensions of the request.
    pub(crate) fn record_decision<'d>(
        &self,
        recorder: &Recorder,
        draft: &RecordDraft<'_>,
        dimensions: impl IntoIterator<Item = (&'d str, &'d str)>,
    ) {
        let limit = draft.limit_outcome.as_ref().map(|limit_outcome| limit_outcome.gate().limit());
        let entry = DecisionEntry {
            at_ms: self.decider.limiter.wall_us() / 1_000,
            tenant: &self.tenant(draft.tenant).name,
            surface: draft.surface.as_str(),
            key: draft.key.as_str(),
            cost: draft.cost,
            verdict: verdict(draft.outcome),
            rule: draft.limit_outcome.as_ref().map_or("", |limit_outcome| limit_outcome.gate().name()),
            rule_version: draft.rule_version,
            set_version: draft.set_version,
            replaced_by: draft.replaced_by,
            limit: limit.map_or_else(LimitTerms::default, |limit| LimitTerms {
                amount: limit.amount(),
                burst: limit.burst(),
                period_ms: limit.period_us().div_ceil(1_000),
            }),
            remaining: draft.limit_outcome.as_ref().map_or(0, LimitOutcome::remaining),
            retry_ms: draft.limit_outcome.as_ref().and_then(retry_us).map(|us| us.div_ceil(1_000)),
            source: draft.source.as_str(),
            reason: draft.reason.as_str(),
            until_ms: draft.until_ms,
        };
        recorder.write(metrics::this_worker(), &entry, dimensions);
    }
}

fn verdict(outcome: Outcome) -> RecordVerdict {
    match outcome {
        Outcome::Allowed => RecordVerdict::Allowed,
        Outcome::Denied => RecordVerdict::Denied,
        Outcome::ShadowDenied => RecordVerdict::ShadowDenied,
    }
}

fn retry_us(limit_outcome: &LimitOutcome<'_>) -> Option<u64> {
    limit_outcome.verdict().retry().and_then(Retry::after_us)
}

/// Returns the index of the limit that decided: the denial with the longest retry time, or without
/// denials the limit with the least remaining.
pub(crate) fn decisive<'o, 'g: 'o>(
    limit_outcome: impl IntoIterator<Item = &'o LimitOutcome<'g>>,
) -> Option<usize> {
    let rank = |(_, limit_outcome): &(usize, &LimitOutcome<'_>)| {
        let burst = u64::from(limit_outcome.gate().limit().burst()).max(1);
        if limit_outcome.is_allowed() {
            (1, (u64::from(limit_outcome.remaining()) << 32) / burst)
        } else {
            (0, u64::MAX - retry_us(limit_outcome).unwrap_or(u64::MAX))
        }
    };
    limit_outcome.into_iter().enumerate().min_by_key(rank).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::time::Duration;

    use tidegate::{Limit, Limiter, ManualClock};

    use super::*;
    use crate::config::Config;

    /// Opens a log without records.
    fn decision_log(folder: &Path) -> DecisionLog {
        let given = [("memory", "1MB"), ("data_dir", "none"), ("workers", "1")];
        let given: HashMap<String, String> =
            given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        let mut config = Config::read(&given, None).expect("good");
        let shared = Shared::on_clock(&mut config, Arc::new(ManualClock::new())).expect("fits");
        let log = LogConfig {
            sample_rate: 1.0,
            retention: Duration::from_hours(1),
            bytes_max: 1 << 20,
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
            let everybody: Vec<_> =
                (0..QUESTIONS_MAX).map(|_| decision_log.questions.try_acquire()).collect();
            let question = WhyRequest {
                tenant: String::new(),
                key: "user:1".to_owned(),
                at_ms: 1,
                window_ms: 1,
                records: 1,
            };
            assert!(everybody.iter().all(Result::is_ok));
            assert!(matches!(decision_log.why(question).await, Err(LogQueryError::Busy)));
            let counted = decision_log.replay((0, 1), 1, 7, |_, _| true, |count: u32| count).await;
            assert_eq!(counted.expect("replayed"), 7);
        });
    }

    #[test]
    fn the_longest_denial_decides_or_else_the_limit_with_the_least_left() {
        let mut builder = Limiter::builder().clock(ManualClock::new());
        for (name, amount, period_s) in
            [("short", 1, 1), ("long", 1, 60), ("wide", 100, 60), ("blocked", 0, 1)]
        {
            builder =
                builder.limit(name, Limit::gcra(amount, Duration::from_secs(period_s)).expect("in range"));
        }
        let limiter = builder.build().expect("a limiter");
        let gates = ["short", "long", "wide", "blocked"].map(|name| limiter.gate(name).expect("a gate"));
        let [short, long, wide, blocked] = &gates;
        let first = [short, long, wide].map(|gate| limiter.check(gate.key("a")));
        assert_eq!(decisive(&[first[2], first[0]]), Some(1));
        let second = [short, long, wide].map(|gate| limiter.check(gate.key("a")));
        assert_eq!(decisive(&second), Some(1));
        assert_eq!(decisive(&[second[1], limiter.check(blocked.key("a")), second[0]]), Some(1));
        assert_eq!(decisive(&[]), None);
    }
}
