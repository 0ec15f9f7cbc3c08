//! Where decisions are written down by whoever decides: a buffer for each thread, of bounded size, that the log empties.
//!
//! What passes and is not drawn costs a countdown. What is drawn, or denied, is encoded into the thread's buffer, under a
//! lock that nobody else wants but the log, a few times a second and for as long as it takes to swap two buffers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::entry::{Entry, Kind, RECORD_BYTES_MAX, Verdict};

/// The memory of all buffers together, but for the one that is being written out. Higher: longer bursts of denials, and
/// longer pauses of the disk, that lose nothing.
const BUFFERS_BYTES_MAX: usize = 32 << 20;

/// The least memory of one buffer: some hundreds of the longest records.
const BUFFER_BYTES_MIN: usize = 1 << 20;

/// The part of a buffer, in quarters, that samples and denials in shadow may fill. The rest is for denials. Lower: longer
/// bursts of denials that lose nothing; samples are lost sooner.
const QUARTERS_FOR_SAMPLES: usize = 3;

const KINDS: usize = Kind::ALL.len();

/// How many records became what, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    written: [u64; KINDS],
    dropped: [u64; KINDS],
}

impl Counts {
    /// Those that are kept.
    pub fn written(&self, kind: Kind) -> u64 {
        self.written[kind as usize]
    }

    /// Those that were lost, because there was no room or the store failed.
    pub fn dropped(&self, kind: Kind) -> u64 {
        self.dropped[kind as usize]
    }
}

/// Takes decisions down. Each thread that decides has a number of its own.
#[derive(Debug)]
pub struct Recorder {
    shards: Box<[Shard]>,
    shard_bytes_max: usize,
    /// The natural logarithm of the chance that a decision is passed over.
    ln_passed_over: f64,
    sample_rate: f64,
    written: [AtomicU64; KINDS],
    dropped: [AtomicU64; KINDS],
}

/// What one thread writes to. Aligned, so that no two threads write to the same cache line.
#[derive(Debug)]
#[repr(align(128))]
struct Shard {
    /// How many more decisions that pass are not written down. Only its own thread counts.
    countdown: AtomicU64,
    buffer: Mutex<Buffer>,
}

#[derive(Debug)]
struct Buffer {
    bytes: Vec<u8>,
    draws: fastrand::Rng,
}

impl Recorder {
    /// One for `threads` threads that takes down the given share of what passes, from 0 to 1. The same seed draws the same
    /// decisions.
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
            // All of it at once: memory that nobody writes to is not taken, and a buffer that grew would be copied while
            // somebody waits for a decision.
            let bytes = Vec::with_capacity(shard_bytes_max);
            Shard { countdown, buffer: Mutex::new(Buffer { bytes, draws }) }
        };
        Self {
            shards: (0..threads).map(shard).collect(),
            shard_bytes_max,
            ln_passed_over,
            sample_rate,
            written: Default::default(),
            dropped: Default::default(),
        }
    }

    /// The share of what passes that is taken down.
    pub fn sample_rate(&self) -> f64 {
        self.sample_rate
    }

    /// Whether a decision of a thread is to be taken down: every denial, and some of what passes. To be asked once for
    /// each.
    #[inline]
    pub fn wants(&self, thread: usize, verdict: Verdict) -> bool {
        verdict != Verdict::Allowed || self.draws(self.shard(thread))
    }

    #[inline]
    fn draws(&self, shard: &Shard) -> bool {
        // Threads that share a number may lose a count to each other: a sample a little later than drawn.
        let left = shard.countdown.load(Ordering::Relaxed);
        if left > 0 {
            shard.countdown.store(left - 1, Ordering::Relaxed);
            return false;
        }
        let next = gap(&mut lock(shard).draws, self.ln_passed_over);
        shard.countdown.store(next, Ordering::Relaxed);
        true
    }

    /// Takes down a decision with what the request was known by, if there is room.
    pub fn write<'d>(
        &self,
        thread: usize,
        entry: &Entry<'_>,
        dimensions: impl IntoIterator<Item = (&'d str, &'d str)>,
    ) {
        let kind = entry.verdict.kind();
        let mut buffer = lock(self.shard(thread));
        if buffer.bytes.len() + RECORD_BYTES_MAX > self.room(kind) {
            drop(buffer);
            return self.drop_records(kind, 1);
        }
        entry.encode(dimensions.into_iter(), &mut buffer.bytes);
    }

    /// How full a buffer may be with a record of this kind.
    fn room(&self, kind: Kind) -> usize {
        match kind {
            Kind::Denial => self.shard_bytes_max,
            Kind::Shadow | Kind::Sample => self.shard_bytes_max / 4 * QUARTERS_FOR_SAMPLES,
        }
    }

    /// A buffer as large as each of the others, for [`Recorder::drain`].
    pub(crate) fn spare(&self) -> Vec<u8> {
        Vec::with_capacity(self.shard_bytes_max)
    }

    /// What became of all records until now, but for those that are on their way.
    pub fn counts(&self) -> Counts {
        let read = |counts: &[AtomicU64; KINDS]| counts.each_ref().map(|count| count.load(Ordering::Relaxed));
        Counts { written: read(&self.written), dropped: read(&self.dropped) }
    }

    /// Empties all buffers, one after the other, through `spare`, whose room is used again.
    pub(crate) fn drain(&self, spare: &mut Vec<u8>, mut take: impl FnMut(&[u8])) {
        for shard in &self.shards {
            spare.clear();
            std::mem::swap(&mut lock(shard).bytes, spare);
            take(spare);
        }
        spare.clear();
    }

    pub(crate) fn keep_records(&self, kind: Kind, n: u64) {
        self.written[kind as usize].fetch_add(n, Ordering::Relaxed);
    }

    pub(crate) fn drop_records(&self, kind: Kind, n: u64) {
        self.dropped[kind as usize].fetch_add(n, Ordering::Relaxed);
    }

    #[inline]
    fn shard(&self, thread: usize) -> &Shard {
        // Threads that were not foreseen write with the first.
        &self.shards[if thread < self.shards.len() { thread } else { 0 }]
    }
}

/// A buffer is whole between any two records, so one of a thread that panicked is as good as any other.
fn lock(shard: &Shard) -> MutexGuard<'_, Buffer> {
    shard.buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many decisions are passed over until the next one is drawn, each with the same chance.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "rounds down what is not negative"
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
    use crate::entry::records;
    use crate::entry::tests::denied;
    use proptest::prelude::*;

    fn drained(recorder: &Recorder) -> Vec<Verdict> {
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
            let drawn = (0..decisions).filter(|_| recorder.wants(0, Verdict::Allowed)).count();
            assert!((least..=most).contains(&drawn), "{rate}: {drawn}");
            assert!(recorder.wants(0, Verdict::Denied) && recorder.wants(0, Verdict::ShadowDenied));
        }
    }

    #[test]
    fn the_same_seed_draws_the_same_decisions() {
        let drawn = |seed| {
            let recorder = Recorder::new(2, 0.01, seed);
            (0..10_000).map(|at| recorder.wants(at % 2, Verdict::Allowed)).collect::<Vec<_>>()
        };
        assert_eq!(drawn(1), drawn(1));
        assert_ne!(drawn(1), drawn(2));
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
        let dropped = recorder.counts().dropped(Kind::Denial);
        assert_eq!(taken as u64 + dropped, 4 * EACH as u64);
    }

    proptest! {
        #[test]
        fn denials_have_room_that_samples_cannot_take(
            verdicts in prop::collection::vec(
                prop::sample::select(vec![Verdict::Denied, Verdict::ShadowDenied, Verdict::Allowed]), 0..2_000),
            threads in 1..3_usize,
        ) {
            let room = 64 << 10;
            let recorder = Recorder::with_buffers(threads, 1.0, 1, room);
            let mut asked = [0; KINDS];
            for (at, verdict) in verdicts.iter().enumerate() {
                asked[verdict.kind() as usize] += 1;
                recorder.write(at % threads, &Entry { verdict: *verdict, ..denied("user:42", 5) }, [("user", "42")]);
            }
            let counts = recorder.counts();
            let mut length = Vec::new();
            denied("user:42", 5).encode([("user", "42")].into_iter(), &mut length);
            // As many as fit into the part that is theirs alone are never lost.
            let reserved = (room - room / 4 * QUARTERS_FOR_SAMPLES - RECORD_BYTES_MAX) / length.len();
            if asked[Kind::Denial as usize] <= reserved as u64 {
                prop_assert_eq!(counts.dropped(Kind::Denial), 0);
            }
            let taken = drained(&recorder);
            for kind in Kind::ALL {
                let kept = taken.iter().filter(|verdict| verdict.kind() == kind).count() as u64;
                prop_assert_eq!(kept + counts.dropped(kind), asked[kind as usize]);
            }
        }
    }
}
