//! The thread that stores the records of a recorder.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::block::{Block, SearchTerms};
use crate::entry::{RecordContext, RecordKind};
use crate::heavy::{HeavyKeys, Minutes};
use crate::layout::{Frame, frames};
use crate::otlp::{Deliveries, Otlp, OtlpThread, Queue};
use crate::recorder::Recorder;
use crate::store::{BlockOrigin, LogError, Retention, Store};

/// The usual [`LogSettings::flush_every`].
pub const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// Interval at which expired records are dropped, and at which a failing collector is logged.
pub(crate) const LOOK_EVERY_MS: u64 = 60_000;

/// Settings of a log.
#[derive(Clone, Debug)]
pub struct LogSettings {
    /// Number of threads that record decisions.
    pub threads: usize,
    /// Share of the allowed decisions that is recorded, from 0 to 1.
    pub sample_rate: f64,
    /// Time for which records are kept.
    pub retention: Duration,
    /// Maximum size of the stored records, in bytes.
    pub bytes_max: u64,
    /// The region of this node; empty if it has none.
    pub region: String,
    /// Name of this node.
    pub node: String,
    /// Seed of the sampling.
    pub seed: u64,
    /// The collector that receives the records too, if any.
    pub otlp: Option<Otlp>,
    /// Interval at which buffers are drained, unless one is half full earlier. Longer: fewer writes
    /// with few denials; queries find the newest denials later.
    pub flush_every: Duration,
}

/// The log of this process.
pub struct Log {
    recorder: Arc<Recorder>,
    minutes: Arc<Mutex<Minutes>>,
    folder: PathBuf,
    /// `None` only while the log closes.
    thread: Option<JoinHandle<()>>,
    stopping: Arc<AtomicBool>,
    /// Dropped after the thread has ended, because the thread sends records until then.
    sending: Option<OtlpThread>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The time, in milliseconds since the Unix epoch.
pub(crate) type NowMs = Arc<dyn Fn() -> u64 + Send + Sync>;

impl Log {
    /// Opens the store in `folder` and starts to store records. `now_ms` is the clock by which old
    /// records expire.
    pub fn open(
        folder: &Path,
        settings: LogSettings,
        now_ms: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Self, LogError> {
        let recorder = Arc::new(Recorder::new(settings.threads, settings.sample_rate, settings.seed));
        let minutes = Arc::new(Mutex::new(Minutes::default()));
        let now_ms: NowMs = Arc::new(now_ms);
        let writer =
            BlockOrigin { region: settings.region, node: settings.node, sample_rate: recorder.sample_rate() };
        let start = |otlp| OtlpThread::start(otlp, &writer, settings.seed, Arc::clone(&now_ms));
        let sending = settings.otlp.map(start).transpose().map_err(LogError::Thread)?;
        let keeping = LogThreadConfig {
            recorder: Arc::clone(&recorder),
            minutes: Arc::clone(&minutes),
            retention: Retention { time: settings.retention, bytes_max: settings.bytes_max },
            now_ms,
            flush_every: settings.flush_every,
            to_send: sending.as_ref().map(|sending| Arc::clone(sending.queue())),
        };
        let stopping = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stopping);
        let (opened, is_open) = channel();
        let there = folder.to_owned();
        let thread = std::thread::Builder::new()
            .name("decision-log".to_owned())
            .spawn(move || match keeping.open(&there, writer) {
                Ok(keeper) => {
                    let _ = opened.send(Ok(()));
                    keeper.run(&stopped);
                }
                Err(error) => drop(opened.send(Err(error))),
            })
            .map_err(LogError::Thread)?;
        let ended =
            || Err(LogError::Thread(std::io::Error::other("the thread ended before the store was open")));
        is_open.recv().unwrap_or_else(|_| ended())?;
        recorder.set_drain_thread(thread.thread().clone());
        Ok(Self { recorder, minutes, folder: folder.to_owned(), thread: Some(thread), stopping, sending })
    }

    /// Returns the recorder that decisions are written to.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Returns the folder of the log, for an [`Archive`](crate::Archive).
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the delivery counts of the OTLP export; `None` without one.
    pub fn deliveries(&self) -> Option<Deliveries> {
        self.sending.as_ref().map(OtlpThread::deliveries)
    }

    /// Returns the summary of the last minutes, for use on another thread.
    pub fn summary(&self) -> Summary {
        Summary { minutes: Arc::clone(&self.minutes), sample_rate: self.recorder.sample_rate() }
    }
}

/// Summary of the last minutes.
#[derive(Clone, Debug)]
pub struct Summary {
    minutes: Arc<Mutex<Minutes>>,
    sample_rate: f64,
}

impl Summary {
    /// Returns at most `most` keys of a tenant that were near a limit in at least half of the last
    /// `minutes`, including that of `now_ms`. The call may wait while the log reads records, so a
    /// thread that decides must not make it.
    pub fn heavy(&self, tenant: &str, minutes: u64, now_ms: u64, most: usize) -> HeavyKeys {
        let known = self.minutes.lock().unwrap_or_else(PoisonError::into_inner);
        known.heavy(tenant, minutes, now_ms, most, self.sample_rate)
    }
}

/// All decisions recorded before are stored when this returns.
impl Drop for Log {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A thread that reads the flag also sees all records written before it.
            self.stopping.store(true, Ordering::Release);
            self.recorder.hurry();
            if thread.join().is_err() {
                tracing::error!("the thread of the decision log ended in a panic");
            }
        }
    }
}

/// A setting of a buffer, and its number in the block that is being filled.
struct BlockContext<'b> {
    setting: RecordContext<'b>,
    terms: SearchTerms,
    /// Of which block, and the number.
    place: Option<(usize, u32)>,
}

impl<'b> BlockContext<'b> {
    fn new(setting: RecordContext<'b>) -> Self {
        let [tenant, ..] = setting.names;
        Self { setting, terms: SearchTerms::new(tenant), place: None }
    }

    fn number_in(&mut self, at: usize, block: &mut Block) -> u32 {
        if let Some((_, number)) = self.place.filter(|(of, _)| *of == at) {
            return number;
        }
        let number = block.define(&self.setting);
        self.place = Some((at, number));
        number
    }
}

/// Input of the log's thread.
struct LogThreadConfig {
    recorder: Arc<Recorder>,
    minutes: Arc<Mutex<Minutes>>,
    retention: Retention,
    now_ms: NowMs,
    flush_every: Duration,
    to_send: Option<Arc<Queue>>,
}

impl LogThreadConfig {
    fn open(self, folder: &Path, writer: BlockOrigin) -> Result<LogThread, LogError> {
        let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
        let store = runtime.block_on(Store::open(folder, writer))?;
        let spare = self.recorder.spare();
        Ok(LogThread { keeping: self, runtime, store, looked_ms: 0, open: None, spare, is_up: true })
    }
}

struct LogThread {
    keeping: LogThreadConfig,
    runtime: Runtime,
    store: Store,
    looked_ms: u64,
    /// The last written block, to be written again with more records.
    open: Option<Block>,
    spare: Vec<u8>,
    /// Whether the last write to the store succeeded.
    is_up: bool,
}

impl LogThread {
    /// Drains the buffers at every interval, and when one is half full, until `stopping` is set;
    /// then once more.
    fn run(mut self, stopping: &AtomicBool) {
        while !stopping.load(Ordering::Acquire) {
            self.keeping.recorder.wait(self.keeping.flush_every);
            self.flush();
        }
        self.flush();
        if let Err(error) = self.runtime.block_on(self.store.close()) {
            tracing::warn!(%error, "cannot close the decision log cleanly; no record is lost");
        }
    }

    /// Stores the records since the last flush.
    fn flush(&mut self) {
        let now_ms = (self.keeping.now_ms)();
        let before = self.open.as_ref().map(|block| block.counts).unwrap_or_default();
        let first_is_open = self.open.is_some();
        let mut blocks = self.take(now_ms);
        if blocks.iter().map(Block::records).sum::<u64>() > before.iter().sum() {
            let done = self.runtime.block_on(self.store.write(&mut blocks, first_is_open));
            self.count(&blocks, before, done.is_ok());
            if done.is_err() {
                // These records are counted as lost, so the next write must not contain them.
                blocks.clear();
            }
            if self.note(&done) {
                let done = self.runtime.block_on(self.store.forget_bytes(self.keeping.retention));
                self.note(&done);
            }
        } else if !self.is_up {
            let done = self.runtime.block_on(self.store.write_nothing());
            self.note(&done);
        }
        self.open = blocks.pop().filter(Block::stays_open);
        if now_ms.abs_diff(self.looked_ms) >= LOOK_EVERY_MS {
            self.looked_ms = now_ms;
            let done = self.runtime.block_on(self.store.forget_time(self.keeping.retention, now_ms));
            // A deletion of no rows succeeds also on a full disk, so it proves nothing.
            if done.is_err() {
                self.note(&done);
            }
        }
    }

    /// Drains the buffers into blocks, starting with the open block.
    fn take(&mut self, now_ms: u64) -> Vec<Block> {
        let mut blocks: Vec<Block> = self.open.take().into_iter().collect();
        self.keeping.recorder.drain(&mut self.spare, |bytes| {
            // Locked for each buffer separately, so that queries run in between.
            let mut minutes = self.keeping.minutes.lock().unwrap_or_else(PoisonError::into_inner);
            let mut settings: Vec<BlockContext<'_>> = Vec::new();
            for frame in frames(bytes) {
                match frame {
                    Frame::Setting(setting) => settings.push(BlockContext::new(setting)),
                    Frame::Decision(number, decision, frame) => {
                        let Some(defined) = settings.get_mut(number as usize) else { break };
                        if let Some(entry) = decision.entry(&defined.setting) {
                            minutes.see(&entry, now_ms);
                            if let Some(queue) = &self.keeping.to_send {
                                queue.push(entry.verdict.kind(), &defined.setting, frame);
                            }
                        }
                        if blocks.last().is_none_or(Block::is_full) {
                            blocks.push(Block::default());
                        }
                        let at = blocks.len();
                        if let Some(block) = blocks.last_mut() {
                            let number = defined.number_in(at, block);
                            block.push(number, defined.terms, &decision, frame);
                        }
                    }
                }
            }
        });
        if let Some(queue) = &self.keeping.to_send {
            queue.notify();
        }
        blocks
    }

    /// Counts the new records in `blocks`; those in `before` are counted already.
    fn count(&self, blocks: &[Block], before: [u64; RecordKind::ALL.len()], is_kept: bool) {
        for kind in RecordKind::ALL {
            let all: u64 = blocks.iter().map(|block| block.counts[kind as usize]).sum();
            let new = all - before[kind as usize];
            if is_kept {
                self.keeping.recorder.keep_records(kind, new);
            } else {
                self.keeping.recorder.drop_records(kind, new);
            }
        }
    }

    /// Logs that the store fails, and that it takes writes again, once each. Returns whether it
    /// takes writes.
    fn note(&mut self, done: &Result<(), LogError>) -> bool {
        let is_up = done.is_ok();
        if let (Err(error), true) = (done, self.is_up) {
            tracing::error!(
                %error,
                "cannot write the decision log: lost records are counted in `tidegate_log_dropped_total` until \
                 `tidegate_log_up` is 1 again"
            );
        } else if is_up && !self.is_up {
            tracing::info!("the decision log is written again");
        }
        self.is_up = is_up;
        self.keeping.recorder.set_log_up(is_up);
        is_up
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use sqlx::Connection as _;
    use sqlx::sqlite::SqliteConnection;
    use tidegate_testkit::{START_TIME_MAX, wait_until};

    use super::*;
    use crate::entry::tests::denied;

    /// A log for many workers with a timer that does not fire during a test, and a channel that
    /// reports each drain.
    fn patient(folder: &Path) -> (Log, Receiver<()>) {
        let settings = LogSettings {
            threads: 64,
            sample_rate: 0.0,
            retention: Duration::from_hours(1),
            bytes_max: 1 << 30,
            region: String::new(),
            node: "n1".to_owned(),
            seed: 1,
            otlp: None,
            flush_every: Duration::from_hours(24),
        };
        let (tell, flushed) = channel();
        // The log reads the clock before each drain.
        let now_ms = move || {
            let _ = tell.send(());
            1
        };
        let log = Log::open(folder, settings, now_ms).expect("opens");
        (log, flushed)
    }

    /// A disk without room refuses new rows, and lets rows be deleted.
    #[test]
    fn a_deletion_of_nothing_is_no_recovery() {
        let folder = tempfile::tempdir().expect("a folder");
        let recorder = Arc::new(Recorder::new(1, 0.0, 1));
        let keeping = LogThreadConfig {
            recorder: Arc::clone(&recorder),
            minutes: Arc::default(),
            retention: Retention { time: Duration::from_hours(1), bytes_max: 1 << 30 },
            now_ms: Arc::new(|| 10 * LOOK_EVERY_MS),
            flush_every: Duration::from_hours(24),
            to_send: None,
        };
        let writer = BlockOrigin { region: String::new(), node: "n1".to_owned(), sample_rate: 0.0 };
        let mut thread = keeping.open(folder.path(), writer).expect("opens");
        let url = format!("sqlite:{}", folder.path().join("decisions.db").display());
        let full = "CREATE TRIGGER full BEFORE INSERT ON blocks BEGIN SELECT RAISE(ABORT, 'full'); END";
        let runtime = Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(async {
            let mut connection = SqliteConnection::connect(&url).await.expect("a connection");
            sqlx::query(full).execute(&mut connection).await.expect("a trigger");
        });
        recorder.write(0, &denied("user:1", 1), []);
        thread.flush();
        assert_eq!((recorder.counts().dropped(RecordKind::Denial), recorder.is_log_up()), (1, false));
    }

    #[test]
    fn a_buffer_that_fills_up_is_emptied_before_its_time() {
        let folder = tempfile::tempdir().expect("a folder");
        let (log, flushed) = patient(folder.path());
        let (recorder, path) = (Arc::clone(log.recorder()), "/x".repeat(500));
        let write = |denials: u64| {
            (0..denials).for_each(|at| recorder.write(63, &denied("user:1", at), [("path", path.as_str())]));
        };
        // A thousand bytes each, and one of 64 threads has a mebibyte.
        write(400);
        assert!(flushed.try_recv().is_err(), "half of it is free");
        for time in 1..=2 {
            write(200);
            flushed.recv_timeout(START_TIME_MAX).expect("it is woken");
            // Records written during a drain stay for the next one.
            wait_until("half of it to be kept", START_TIME_MAX, || {
                recorder.counts().written(RecordKind::Denial) >= 400 * time
            });
            write(400);
        }
        drop(log);
        let counts = recorder.counts();
        assert_eq!(
            (counts.written(RecordKind::Denial), counts.dropped(RecordKind::Denial)),
            (400 + 2 * 600, 0)
        );
    }
}
