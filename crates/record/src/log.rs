//! The thread that keeps what recorders take down.

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

/// How often buffers are emptied, if none of them is half full before. Longer: fewer writes where little is denied; questions
/// find the newest denials later.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// How often records are forgotten that are too old, and a store that fails is complained about.
pub(crate) const LOOK_EVERY_MS: u64 = 60_000;

/// What a log is told before it starts.
#[derive(Clone, Debug)]
pub struct LogSettings {
    /// How many threads write.
    pub threads: usize,
    /// The share of what passes that is taken down, from 0 to 1.
    pub sample_rate: f64,
    /// How long records are kept.
    pub retention: Duration,
    /// How many bytes of them are kept.
    pub bytes_max: u64,
    /// The region of this node; empty if it has none.
    pub region: String,
    /// What this node is called.
    pub node: String,
    /// What samples are drawn from.
    pub seed: u64,
    /// Where records are sent besides, if anywhere.
    pub otlp: Option<Otlp>,
}

/// The log of this process.
pub struct Log {
    recorder: Arc<Recorder>,
    minutes: Arc<Mutex<Minutes>>,
    folder: PathBuf,
    /// Nothing only while it is being closed.
    thread: Option<JoinHandle<()>>,
    stopping: Arc<AtomicBool>,
    /// Let go of after the thread has ended, which has more to send until then.
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
    /// Opens the store in `folder` and starts to keep what is taken down. `now_ms` tells what is too old.
    pub fn open(
        folder: &Path,
        settings: LogSettings,
        now_ms: impl Fn() -> u64 + Send + Sync + 'static,
    ) -> Result<Self, LogError> {
        Self::flushing(FLUSH_EVERY, folder, settings, now_ms)
    }

    fn flushing(
        flush_every: Duration,
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
            flush_every,
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
        let ended = || Err(LogError::Thread(std::io::Error::other("it ended before the store was open")));
        is_open.recv().unwrap_or_else(|_| ended())?;
        recorder.is_kept_by(thread.thread().clone());
        Ok(Self { recorder, minutes, folder: folder.to_owned(), thread: Some(thread), stopping, sending })
    }

    /// Where decisions are taken down.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Where the log is kept, for an [`Archive`](crate::Archive).
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// What becomes of the records that are to be sent; nothing where none are.
    pub fn deliveries(&self) -> Option<Deliveries> {
        self.sending.as_ref().map(OtlpThread::deliveries)
    }

    /// What is known of the last minutes, for whoever asks on another thread.
    pub fn summary(&self) -> Summary {
        Summary { minutes: Arc::clone(&self.minutes), sample_rate: self.recorder.sample_rate() }
    }
}

/// What is known of the last minutes.
#[derive(Clone, Debug)]
pub struct Summary {
    minutes: Arc<Mutex<Minutes>>,
    sample_rate: f64,
}

impl Summary {
    /// Who of a tenant was near a limit in at least half of the last `minutes`, that of `now_ms` among them: no more than
    /// `most`. It may wait while the log takes in what was decided, so a thread that decides does not ask.
    pub fn heavy(&self, tenant: &str, minutes: u64, now_ms: u64, most: usize) -> HeavyKeys {
        let known = self.minutes.lock().unwrap_or_else(PoisonError::into_inner);
        known.heavy(tenant, minutes, now_ms, most, self.sample_rate)
    }
}

/// What was taken down until now is kept when this returns.
impl Drop for Log {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            // Whoever sees it sees all that was taken down.
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

/// What the thread is given.
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
        Ok(LogThread { keeping: self, runtime, store, looked_ms: 0, open: None, spare })
    }
}

struct LogThread {
    keeping: LogThreadConfig,
    runtime: Runtime,
    store: Store,
    looked_ms: u64,
    /// What was written and will be again, with more in it.
    open: Option<Block>,
    spare: Vec<u8>,
}

impl LogThread {
    /// Empties the buffers when it is time, and when one of them is half full, until it is told to stop; then once more.
    fn run(mut self, stopping: &AtomicBool) {
        while !stopping.load(Ordering::Acquire) {
            self.keeping.recorder.wait(self.keeping.flush_every);
            self.flush();
        }
        self.flush();
        if let Err(error) = self.runtime.block_on(self.store.close()) {
            tracing::warn!(%error, "the decision log was not closed in order; nothing is lost");
        }
    }

    /// Keeps what was taken down since the last time.
    fn flush(&mut self) {
        let now_ms = (self.keeping.now_ms)();
        let is_time_to_look = now_ms.abs_diff(self.looked_ms) >= LOOK_EVERY_MS;
        let before = self.open.as_ref().map(|block| block.counts).unwrap_or_default();
        let first_is_open = self.open.is_some();
        let mut blocks = self.take(now_ms);
        if blocks.iter().map(Block::records).sum::<u64>() > before.iter().sum() {
            let done = self.runtime.block_on(self.store.write(&mut blocks, first_is_open));
            self.count(&blocks, before, done.is_ok());
            if done.is_err() {
                // What is counted as lost does not come back with the next one.
                blocks.clear();
            }
            Self::complain(done, is_time_to_look);
            let done = self.runtime.block_on(self.store.forget_bytes(self.keeping.retention));
            Self::complain(done, is_time_to_look);
        }
        self.open = blocks.pop().filter(Block::stays_open);
        if is_time_to_look {
            self.looked_ms = now_ms;
            let done = self.runtime.block_on(self.store.forget_time(self.keeping.retention, now_ms));
            Self::complain(done, true);
        }
    }

    /// What is in the buffers, behind what is to be written again.
    fn take(&mut self, now_ms: u64) -> Vec<Block> {
        let mut blocks: Vec<Block> = self.open.take().into_iter().collect();
        self.keeping.recorder.drain(&mut self.spare, |bytes| {
            // For each buffer anew, so that whoever asks comes in between.
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

    /// Counts what is new in `blocks`: `before` was counted already.
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

    /// A disk that is full stays so for a while: it is told once a minute, and counted always.
    fn complain(done: Result<(), LogError>, is_time: bool) {
        if let (Err(error), true) = (done, is_time) {
            tracing::error!(%error, "the decision log cannot be written: what is lost is counted");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::Receiver;

    use tidegate_testkit::{START_TIME_MAX, wait_until};

    use super::*;
    use crate::entry::tests::denied;

    /// A log of a machine with many workers, that empties its buffers once in the lifetime of a test; and tells of each time.
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
        };
        let (tell, flushed) = channel();
        // Whoever empties buffers asks for the time first.
        let now_ms = move || {
            let _ = tell.send(());
            1
        };
        let log = Log::flushing(Duration::from_hours(24), folder, settings, now_ms).expect("opens");
        (log, flushed)
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
            // What is written while it is at work is left for the next time.
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
