//! The recorder of decisions: one buffer of bounded size for each thread that decides, drained by
//! the log.
//!
//! An allowed decision that is not sampled costs one step of a countdown. A sampled or denied one
//! is encoded into the thread's buffer, under a lock. Only the log competes for that lock, a few
//! times a second and for the swap of two buffers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::Duration;

use crate::entry::{DecisionEntry, LimitTerms, NAMES, RecordContext, RecordKind, RecordVerdict};
use crate::layout::{RECORD_BYTES_MAX, put_decision, put_setting};

/// Memory of all buffers together, in bytes, without the one being written out. Higher: longer
/// bursts of denials and longer pauses of the disk lose nothing.
const BUFFERS_BYTES_MAX: usize = 32 << 20;

/// The least memory of one buffer: some hundreds of the longest records.
const BUFFER_BYTES_MIN: usize = 1 << 20;

/// Quarters of a buffer that samples and shadow denials may fill. The rest is for denials. Lower:
/// longer bursts of denials lose nothing; samples are lost sooner.
const QUARTERS_FOR_SAMPLES: usize = 3;

/// The part of a buffer that wakes the log's thread once it is full.
/// Smaller: room for longer pauses of the disk is left; the log's thread is woken more often.
const HURRY_PART: usize = 2;

/// Settings that a thread remembers to have written. Higher: fewer of them are written again where
/// many rules deny in turns; some 200 bytes each, for each thread.
const SETTINGS_KNOWN: usize = 64;

const KINDS: usize = RecordKind::ALL.len();

/// Numbers of stored and dropped records, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    written: [u64; KINDS],
    dropped: [u64; KINDS],
}

impl Counts {
    /// Returns the number of stored records.
    pub fn written(&self, kind: RecordKind) -> u64 {
        self.written[kind as usize]
    }

    /// Returns the number of records that were lost, without room or because the store failed.
    pub fn dropped(&self, kind: RecordKind) -> u64 {
        self.dropped[kind as usize]
    }
}

/// Records decisions. Each thread that decides has its own number.
#[derive(Debug)]
pub struct Recorder {
    shards: Box<[Shard]>,
    shard_bytes_max: usize,
    /// The thread that drains the buffers. A buffer that fills up wakes it early.
    keeper: OnceLock<Thread>,
    /// Whether it was woken, and has not drained since.
    hurried: AtomicBool,
    /// The natural logarithm of the chance that an allowed decision is not sampled.
    ln_passed_over: f64,
    sample_rate: f64,
    written: [AtomicU64; KINDS],
    dropped: [AtomicU64; KINDS],
    /// Whether the last write of the log failed.
    is_log_down: AtomicBool,
}

/// Countdown and buffer of one thread. Aligned, so that no two threads write to the same cache
/// line.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    /// Number of allowed decisions before the next sample. Only its own thread counts down.
    countdown: AtomicU64,
    buffer: Mutex<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    /// Number of settings in `bytes`.
    settings: u32,
    /// Recently written settings, by the addresses of their texts.
    known: Box<[WrittenContext]>,
    /// Buffer to encode a decision in. It stays in the cache of the core; the end of `bytes` may
    /// not.
    scratch: Vec<u8>,
    draws: fastrand::Rng,
}

/// A setting that was written.
#[derive(Clone, Debug, Default)]
struct WrittenContext {
    texts: String,
    ends: [usize; NAMES],
    rule_version: u64,
    limit: LimitTerms,
    until_ms: Option<u64>,
    /// Its number, if it is in the buffer.
    number: Option<u32>,
}

impl WrittenContext {
    fn is(&self, setting: &RecordContext<'_>) -> bool {
        let mut start = 0;
        (self.rule_version, self.limit, self.until_ms)
            == (setting.rule_version, setting.limit, setting.until_ms)
            && setting.names.iter().zip(self.ends).all(|(name, end)| {
                let known = self.texts.get(start..end);
                start = end;
                known == Some(*name)
            })
    }

    fn become_one(&mut self, setting: &RecordContext<'_>) {
        self.texts.clear();
        for (name, end) in setting.names.iter().zip(&mut self.ends) {
            self.texts.push_str(name);
            *end = self.texts.len();
        }
        (self.rule_version, self.limit) = (setting.rule_version, setting.limit);
        self.until_ms = setting.until_ms;
    }
}

impl Buffer {
    fn new(bytes_max: usize, draws: fastrand::Rng) -> Self {
        Self {
            // Reserved at once: untouched memory is not allocated by the system, and growth would
            // copy the buffer while a request waits.
            bytes: Vec::with_capacity(bytes_max),
            settings: 0,
            known: vec![WrittenContext::default(); SETTINGS_KNOWN].into(),
            scratch: Vec::with_capacity(RECORD_BYTES_MAX),
            draws,
        }
    }

    fn write<'d>(&mut self, entry: &DecisionEntry<'_>, dimensions: impl Iterator<Item = (&'d str, &'d str)>) {
        let number = self.number_of(&RecordContext::of(entry));
        self.scratch.clear();
        put_decision(&mut self.scratch, number, entry, dimensions);
        self.bytes.extend_from_slice(&self.scratch);
    }

    /// The number of a setting, which is written if it is not there.
    fn number_of(&mut self, setting: &RecordContext<'_>) -> u32 {
        let known = &mut self.known[place(setting)];
        let is_it = known.is(setting);
        if let (true, Some(number)) = (is_it, known.number) {
            return number;
        }
        if !is_it {
            known.become_one(setting);
        }
        put_setting(&mut self.bytes, setting);
        known.number = Some(self.settings);
        self.settings += 1;
        self.settings - 1
    }

    /// Exchanges the written bytes for the empty `spare`.
    fn swap(&mut self, spare: &mut Vec<u8>) {
        std::mem::swap(&mut self.bytes, spare);
        self.settings = 0;
        for known in &mut self.known {
            known.number = None;
        }
    }
}

/// Returns the slot of a setting among the known ones, from the addresses of its texts. A setting
/// whose texts move is written again.
fn place(setting: &RecordContext<'_>) -> usize {
    // Alignment of allocations, in bits.
    const ALIGNED_BITS: u32 = 4;
    let addresses = setting.names.iter().map(|name| name.as_ptr().addr() >> ALIGNED_BITS);
    addresses.fold(0_usize, usize::wrapping_add) % SETTINGS_KNOWN
}

impl Recorder {
    /// Creates a recorder for `threads` threads that samples the given share of allowed decisions,
    /// from 0 to 1. The same seed samples the same decisions.
    pub fn new(threads: usize, sample_rate: f64, seed: u64) -> Self {
        let threads = threads.max(1);
        Self::with_buffers(threads, sample_rate, seed, (BUFFERS_BYTES_MAX / threads).max(BUFFER_BYTES_MIN))
    }

    fn with_buffers(threads: usize, sample_rate: f64, seed: u64, shard_bytes_max: usize) -> Self {
        let sample_rate = sample_rate.clamp(0.0, 1.0);
        let ln_passed_over = (-sample_rate).ln_1p();
        let mut seeds = fastrand::Rng::with_seed(seed);
        let shard = |_| {
            let mut draws = seeds.fork();
            let countdown = AtomicU64::new(gap(&mut draws, ln_passed_over));
            Shard { countdown, buffer: Mutex::new(Buffer::new(shard_bytes_max, draws)) }
        };
        Self {
            shards: (0..threads).map(shard).collect(),
            shard_bytes_max,
            keeper: OnceLock::new(),
            hurried: AtomicBool::new(false),
            ln_passed_over,
            sample_rate,
            written: Default::default(),
            dropped: Default::default(),
            is_log_down: AtomicBool::new(false),
        }
    }

    /// Returns the share of allowed decisions that is recorded.
    pub fn sample_rate(&self) -> f64 {
        self.sample_rate
    }

    /// Whether to record a decision of a thread: every denial, and a sample of the allowed ones.
    /// Call it once for each decision.
    #[inline]
    pub fn wants(&self, thread: usize, verdict: RecordVerdict) -> bool {
        verdict != RecordVerdict::Allowed || self.draws(self.shard(thread))
    }

    #[inline]
    fn draws(&self, shard: &Shard) -> bool {
        // Threads that share a number may lose a count to each other: a sample a little later than
        // drawn.
        let left = shard.countdown.load(Ordering::Relaxed);
        if left > 0 {
            shard.countdown.store(left - 1, Ordering::Relaxed);
            return false;
        }
        let next = gap(&mut lock(shard).draws, self.ln_passed_over);
        shard.countdown.store(next, Ordering::Relaxed);
        true
    }

    /// Records a decision with the dimensions of its request, if there is room.
    pub fn write<'d>(
        &self,
        thread: usize,
        entry: &DecisionEntry<'_>,
        dimensions: impl IntoIterator<Item = (&'d str, &'d str)>,
    ) {
        let kind = entry.verdict.kind();
        let mut buffer = lock(self.shard(thread));
        if buffer.bytes.len() + RECORD_BYTES_MAX > self.room(kind) {
            drop(buffer);
            return self.drop_records(kind, 1);
        }
        let before = buffer.bytes.len();
        buffer.write(entry, dimensions.into_iter());
        let after = buffer.bytes.len();
        drop(buffer);
        // With many threads each has little room, and one thread may get all denials.
        let mark = self.shard_bytes_max / HURRY_PART;
        if before < mark && after >= mark {
            self.hurry();
        }
    }

    /// Wakes the thread that drains the buffers, without waiting. A buffer calls this once until it
    /// is drained.
    #[cold]
    pub(crate) fn hurry(&self) {
        // Also set a flag: another wait of the thread may consume the wake-up.
        self.hurried.store(true, Ordering::Release);
        if let Some(keeper) = self.keeper.get() {
            keeper.unpark();
        }
    }

    /// Waits until a buffer fills up, or for so long.
    pub(crate) fn wait(&self, most: Duration) {
        if !self.hurried.swap(false, Ordering::Acquire) {
            std::thread::park_timeout(most);
            self.hurried.store(false, Ordering::Relaxed);
        }
    }

    /// From now on this thread empties the buffers, and is woken when one is half full.
    pub(crate) fn set_drain_thread(&self, thread: Thread) {
        // There is one for as long as there is a recorder.
        let _ = self.keeper.set(thread);
    }

    /// Returns the fill level up to which a buffer takes a record of this kind.
    fn room(&self, kind: RecordKind) -> usize {
        match kind {
            RecordKind::Denial => self.shard_bytes_max,
            RecordKind::Shadow | RecordKind::Sample => self.shard_bytes_max / 4 * QUARTERS_FOR_SAMPLES,
        }
    }

    /// A buffer as large as each of the others, for [`Recorder::drain`].
    pub(crate) fn spare(&self) -> Vec<u8> {
        Vec::with_capacity(self.shard_bytes_max)
    }

    /// Returns the counts of all records so far, without those not stored yet.
    pub fn counts(&self) -> Counts {
        let read = |counts: &[AtomicU64; KINDS]| counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        Counts { written: read(&self.written), dropped: read(&self.dropped) }
    }

    /// Whether the last write of the log succeeded, or none was made.
    pub fn is_log_up(&self) -> bool {
        !self.is_log_down.load(Ordering::Relaxed)
    }

    pub(crate) fn set_log_up(&self, is_up: bool) {
        self.is_log_down.store(!is_up, Ordering::Relaxed);
    }

    /// Drains all buffers, one after the other, through `spare`, and reuses its memory.
    pub(crate) fn drain(&self, spare: &mut Vec<u8>, mut take: impl FnMut(&[u8])) {
        for shard in &self.shards {
            spare.clear();
            lock(shard).swap(spare);
            take(spare);
        }
        spare.clear();
    }

    pub(crate) fn keep_records(&self, kind: RecordKind, n: u64) {
        self.written[kind as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn drop_records(&self, kind: RecordKind, n: u64) {
        self.dropped[kind as usize].fetch_add(n, Ordering::Relaxed);
    }

    #[inline]
    fn shard(&self, thread: usize) -> &Shard {
        // Threads beyond the configured number share the first buffer.
        &self.shards[if thread < self.shards.len() { thread } else { 0 }]
    }
}

/// Locks a buffer. It is consistent between any two records, also after a panic of its thread.
fn lock(shard: &Shard) -> MutexGuard<'_, Buffer> {
    shard.buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Draws the number of decisions before the next sample. Each has the same chance.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rounds a non-negative number down"
)]
fn gap(chance: &mut fastrand::Rng, ln_passed_over: f64) -> u64 {
    if ln_passed_over == 0.0 {
        return u64::MAX;
    }
    // From above 0 to 1: its logarithm is at most 0, and finite.
    let drawn = 1.0 - chance.f64();
    (drawn.ln() / ln_passed_over) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::tests::denied;
    use crate::layout::tests::encoded;
    use crate::layout::{Frame, StoredDecision, frames, records};
    use proptest::prelude::*;

    fn drained(recorder: &Recorder) -> Vec<RecordVerdict> {
        let mut verdicts = Vec::new();
        recorder.drain(&mut Vec::new(), |bytes| {
            verdicts.extend(records(bytes).map(|written| written.entry.verdict));
        });
        verdicts
    }

    #[test]
    fn every_denial_is_wanted_and_a_share_of_the_rest() {
        let decisions = 1_000_000;
        for (rate, least, most) in
            [(0.0, 0, 0), (0.001, 870, 1_130), (0.1, 98_500, 101_500), (1.0, decisions, decisions)]
        {
            let recorder = Recorder::new(1, rate, 7);
            let drawn = (0..decisions).filter(|_| recorder.wants(0, RecordVerdict::Allowed)).count();
            assert!((least..=most).contains(&drawn), "{rate}: {drawn}");
            assert!(
                recorder.wants(0, RecordVerdict::Denied) && recorder.wants(0, RecordVerdict::ShadowDenied)
            );
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_decisions() {
        let drawn = |seed| {
            let recorder = Recorder::new(2, 0.01, seed);
            (0..10_000).map(|at| recorder.wants(at % 2, RecordVerdict::Allowed)).collect::<Vec<_>>()
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
    }

    #[test]
    fn settings_stay_distinct_beyond_the_cache_size() {
        let recorder = Recorder::new(1, 0.0, 1);
        // More than are remembered, in turns, at addresses that serve again for other texts.
        let mut text = String::new();
        let mut written = Vec::new();
        for at in 0..10 * SETTINGS_KNOWN as u64 {
            text.clear();
            text.push_str(["a", "b", "ab", ""][(at % 4) as usize]);
            let limit = LimitTerms { amount: (at % 7) as u32, burst: 1, period_ms: at % 3 };
            let (rule, tenant) = if at % 2 == 0 { (&*text, "t") } else { ("t", &*text) };
            let entry = DecisionEntry { rule, tenant, limit, rule_version: at % 5, ..denied("k", at) };
            recorder.write(0, &entry, []);
            written.push((rule.to_owned(), tenant.to_owned(), limit, at % 5, at));
            if at % 100 == 99 {
                let mut read = Vec::new();
                recorder.drain(&mut Vec::new(), |bytes| {
                    let decisions = records(bytes).map(|StoredDecision { entry, .. }| {
                        let (rule, tenant) = (entry.rule.to_owned(), entry.tenant.to_owned());
                        (rule, tenant, entry.limit, entry.rule_version, entry.at_ms)
                    });
                    read.extend(decisions);
                });
                assert_eq!(read, written);
                written.clear();
            }
        }
    }

    #[test]
    fn repeated_setting_is_written_once() {
        let recorder = Recorder::new(1, 0.0, 1);
        (0..1_000).for_each(|at| recorder.write(0, &denied("user:42", at), []));
        recorder.drain(&mut Vec::new(), |bytes| {
            let settings = frames(bytes).filter(|frame| matches!(frame, Frame::Setting(..))).count();
            assert_eq!((settings, records(bytes).count()), (1, 1_000));
        });
    }

    #[test]
    fn threads_write_beside_each_other_and_nothing_is_lost() {
        const EACH: usize = 20_000;
        let recorder = Recorder::new(4, 0.0, 1);
        let mut taken = 0;
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..4)
                .map(|thread| {
                    let recorder = &recorder;
                    scope.spawn(move || {
                        for at in 0..EACH {
                            recorder.write(thread, &denied("user:1", at as u64), []);
                        }
                    })
                })
                .collect();
            while !writers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
                taken += drained(&recorder).len();
            }
        });
        taken += drained(&recorder).len();
        let dropped = recorder.counts().dropped(RecordKind::Denial);
        assert_eq!(taken as u64 + dropped, 4 * EACH as u64);
    }

    proptest! {
        #[test]
        fn denials_have_room_that_samples_cannot_take(
            verdicts in prop::collection::vec(
                prop::sample::select(vec![
                    RecordVerdict::Denied, RecordVerdict::ShadowDenied, RecordVerdict::Allowed]), 0..2_000),
            threads in 1..3_usize,
        ) {
            let room = 64 << 10;
            let recorder = Recorder::with_buffers(threads, 1.0, 1, room);
            let mut asked = [0; KINDS];
            for (at, verdict) in verdicts.iter().enumerate() {
                asked[verdict.kind() as usize] += 1;
                recorder.write(at % threads,
                    &DecisionEntry { verdict: *verdict, ..denied("user:42", 5) }, [("user", "42")]);
            }
            let counts = recorder.counts();
            let length = encoded(&denied("user:42", 5), [("user", "42")]);
            // Denials within the part that is reserved for them are never lost.
            let reserved = (room - room / 4 * QUARTERS_FOR_SAMPLES - RECORD_BYTES_MAX) / length.len();
            if asked[RecordKind::Denial as usize] <= reserved as u64 {
                prop_assert_eq!(counts.dropped(RecordKind::Denial), 0);
            }
            let taken = drained(&recorder);
            for kind in RecordKind::ALL {
                let kept = taken.iter().filter(|verdict| verdict.kind() == kind).count() as u64;
                prop_assert_eq!(kept + counts.dropped(kind), asked[kind as usize]);
            }
        }
    }
}
