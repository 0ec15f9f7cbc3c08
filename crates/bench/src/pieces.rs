//! The pieces that a check with names is made of, to read "floor + hash + clock" off a table.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::Result;
use siphasher::sip128::SipHasher13;

use crate::contenders::{Batch, Contender};
use crate::measure::{Pace, measure};
use crate::stream::Stream;
use crate::workload::Workload;

/// Shorter than a contender's: pieces are steady.
const PACE: Pace = Pace { warm_up: Duration::from_millis(50), slice: Duration::from_millis(60), slices: 5 };

const PIECES: [(&str, &dyn Contender); 3] = [
    ("loop over the sample stream", &Loop),
    ("the loop with SipHash-1-3-128 of the name, by the siphasher crate", &Digest),
    ("the loop with Instant::now", &Clock),
];

/// A piece and its CPU nanoseconds per check, at one thread.
pub(crate) type PieceCost = (&'static str, f64);

/// Measures the pieces over the stream of a case.
pub(crate) fn measure_pieces(workload: &Workload) -> Result<Vec<PieceCost>> {
    let stream = Stream::draw(workload)?;
    let cost = |(name, piece)| Ok((name, measure(piece, &stream, 1, 1, &PACE)?.cpu_ns));
    PIECES.into_iter().map(cost).collect()
}

struct Loop;

impl Contender for Loop {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        batch.count_by_name(|name| !black_box(name).is_empty())
    }
}

struct Digest;

impl Contender for Digest {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let keyed = SipHasher13::new_with_keys(black_box(1), black_box(2));
        batch.count_by_name(|name| black_box(keyed.hash(name.as_bytes())).h1 != 0)
    }
}

struct Clock;

impl Contender for Clock {
    #[expect(clippy::disallowed_methods, reason = "the benchmark measures its cost")]
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let started = Instant::now();
        batch.count_by_name(|name| Instant::now() >= started && !black_box(name).is_empty())
    }
}
