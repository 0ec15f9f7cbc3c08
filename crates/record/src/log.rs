//! The thread that keeps what recorders take down.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

use crate::block::Block;
use crate::entry::{Kind, records};
use crate::heavy::{Heavy, Minutes};
use crate::recorder::Recorder;
use crate::store::{LogError, Retention, Store, Writer};

/// How often buffers are emptied. Longer: fewer writes where little is denied; questions find the newest denials later.
const FLUSH_EVERY: Duration = Duration::from_millis(200);

/// How often records are forgotten that are too old, and a store that fails is complained about.
const LOOK_EVERY_MS: u64 = 60_000;

/// What a log is told before it starts.
#[derive(Clone, Debug)]
pub struct Settings {
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
}

/// The log of this process.
pub struct Log {
    recorder: Arc<Recorder>,
    minutes: Arc<Mutex<Minutes>>,
    folder: PathBuf,
    /// Nothing only while it is being closed: whoever lets go of the sender stops the thread.
    thread: Option<(Sender<()>, JoinHandle<()>)>,
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Log").field("folder", &self.folder).finish_non_exhaustive()
    }
}

/// The time, in milliseconds since the Unix epoch.
type NowMs = Box<dyn Fn() -> u64 + Send>;

impl Log {
    /// Opens the store in `folder` and starts to keep what is taken down. `now_ms` tells what is too old.
    pub fn open(
        folder: &Path,
        settings: Settings,
        now_ms: impl Fn() -> u64 + Send + 'static,
    ) -> Result<Self, LogError> {
        let recorder = Arc::new(Recorder::new(settings.threads, settings.sample_rate, settings.seed));
        let minutes = Arc::new(Mutex::new(Minutes::default()));
        let keeping = Keeping {
            recorder: Arc::clone(&recorder),
            minutes: Arc::clone(&minutes),
            retention: Retention { time: settings.retention, bytes_max: settings.bytes_max },
            now_ms: Box::new(now_ms),
        };
        let writer =
            Writer { region: settings.region, node: settings.node, sample_rate: recorder.sample_rate() };
        let (stop, stopped) = channel();
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
        Ok(Self { recorder, minutes, folder: folder.to_owned(), thread: Some((stop, thread)) })
    }

    /// Where decisions are taken down.
    pub fn recorder(&self) -> &Arc<Recorder> {
        &self.recorder
    }

    /// Where the log is kept, for an [`Archive`](crate::Archive).
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Who of a tenant was near a limit in at least half of the last `minutes`, that of `now_ms` among them.
    pub fn heavy(&self, tenant: &str, minutes: u64, now_ms: u64) -> Vec<Heavy> {
        let known = self.minutes.lock().unwrap_or_else(PoisonError::into_inner);
        known.heavy(tenant, minutes, now_ms, self.recorder.sample_rate())
    }
}

/// What was taken down until now is kept when this returns.
impl Drop for Log {
    fn drop(&mut self) {
        if let Some((stop, thread)) = self.thread.take() {
            drop(stop);
            if thread.join().is_err() {
                tracing::error!("the thread of the decision log ended in a panic");
            }
        }
    }
}

/// What the thread is given.
struct Keeping {
    recorder: Arc<Recorder>,
    minutes: Arc<Mutex<Minutes>>,
    retention: Retention,
    now_ms: NowMs,
}

impl Keeping {
    fn open(self, folder: &Path, writer: Writer) -> Result<Keeper, LogError> {
        let runtime = Builder::new_current_thread().build().map_err(LogError::Thread)?;
        let store = runtime.block_on(Store::open(folder, writer))?;
        let spare = self.recorder.spare();
        Ok(Keeper { keeping: self, runtime, store, looked_ms: 0, open: None, spare })
    }
}

struct Keeper {
    keeping: Keeping,
    runtime: Runtime,
    store: Store,
    looked_ms: u64,
    /// What was written and will be again, with more in it.
    open: Option<Block>,
    spare: Vec<u8>,
}

impl Keeper {
    fn run(mut self, stopped: &Receiver<()>) {
        while stopped.recv_timeout(FLUSH_EVERY) == Err(RecvTimeoutError::Timeout) {
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
        let mut blocks = self.take();
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
    fn take(&mut self) -> Vec<Block> {
        let mut minutes = self.keeping.minutes.lock().unwrap_or_else(PoisonError::into_inner);
        let mut blocks: Vec<Block> = self.open.take().into_iter().collect();
        self.keeping.recorder.drain(&mut self.spare, |mut bytes| {
            for written in records(bytes) {
                let (record, rest) = bytes.split_at(written.bytes);
                bytes = rest;
                minutes.see(&written.entry);
                if blocks.last().is_none_or(Block::is_full) {
                    blocks.push(Block::default());
                }
                if let Some(block) = blocks.last_mut() {
                    block.push(&written, record);
                }
            }
        });
        blocks
    }

    /// Counts what is new in `blocks`: `before` was counted already.
    fn count(&self, blocks: &[Block], before: [u64; Kind::ALL.len()], is_kept: bool) {
        for kind in Kind::ALL {
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
