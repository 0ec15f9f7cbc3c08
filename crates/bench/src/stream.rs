//! The sample stream: keys drawn in advance, so that the measured loop only reads them in order.

use std::thread;

use anyhow::{Context, Result};
use rand::rngs::Xoshiro256PlusPlus;
use rand::{RngExt, SeedableRng};
use rand_distr::Zipf;

use crate::contenders::Batch;
use crate::measure;
use crate::workload::{Draw, Workload, ZIPF_EXPONENT};

/// Bytes of one key name, `user:` and eleven digits.
pub(crate) const NAME_LEN: usize = 16;

/// Checks between two looks at the clock; a multiple of every case's limits per request.
pub(crate) const BATCH_LEN: usize = 1024;

/// Checks in the stream, which starts over at its end: 64 MiB of names, and too many keys for any
/// cache.
pub(crate) const STREAM_LEN: usize = 1 << 22;

const SEED: u64 = 0x7469_6465_6761_7465;
const NAME_PREFIX: &[u8] = b"user:";

const _: () = assert!(STREAM_LEN.is_multiple_of(BATCH_LEN * measure::THREADS_MAX));

/// The drawn keys, as numbers and as names.
pub(crate) struct Stream {
    names: String,
    numbers: Vec<u64>,
}

impl Stream {
    /// Draws the stream of a case; the same case always gives the same stream.
    pub(crate) fn draw(workload: &Workload) -> Result<Self> {
        let mut numbers = vec![0; STREAM_LEN];
        thread::scope(|scope| {
            let parts = numbers.chunks_mut(STREAM_LEN / measure::THREADS_MAX).enumerate();
            let painters: Vec<_> =
                parts.map(|(part, keys)| scope.spawn(move || draw_part(workload, part, keys))).collect();
            painters.into_iter().try_for_each(|painter| measure::join(painter)?)
        })?;
        Ok(Self { names: names_of(&numbers)?, numbers })
    }

    /// Returns the batches for one of `threads` threads, without end. Each thread starts at its own
    /// position.
    pub(crate) fn batches(
        &self,
        limits: usize,
        thread: usize,
        threads: usize,
    ) -> impl Iterator<Item = Batch<'_>> {
        let first = thread * (STREAM_LEN / BATCH_LEN) / threads;
        (0..STREAM_LEN / BATCH_LEN).cycle().skip(first).map(move |index| {
            let keys = index * BATCH_LEN..(index + 1) * BATCH_LEN;
            let names = &self.names[keys.start * NAME_LEN..keys.end * NAME_LEN];
            Batch::new(names, &self.numbers[keys], limits, threads > 1)
        })
    }
}

fn draw_part(workload: &Workload, part: usize, keys: &mut [u64]) -> Result<()> {
    let mut rng = Xoshiro256PlusPlus::seed_from_u64(SEED ^ part as u64);
    let keys_per_limit = workload.keys_per_limit();
    let ranks = Zipf::new(keys_per_limit as f64, ZIPF_EXPONENT).context("Zipf over the keys of a limit")?;
    for (index, key) in keys.iter_mut().enumerate() {
        let key_of_limit = match workload.draw {
            Draw::Uniform => rng.random_range(0..keys_per_limit),
            Draw::Zipf => scramble(rng.sample(ranks) as u64 - 1, keys_per_limit),
        };
        *key = workload.key(index % workload.limits, key_of_limit);
    }
    Ok(())
}

/// Maps ranks to key numbers one to one, and separates neighbours, so that hot keys share no cache
/// line.
fn scramble(rank: u64, keys: u64) -> u64 {
    // A prime that divides no power of ten is coprime to every case's number of keys.
    const STRIDE: u64 = 2_654_435_761;
    rank * STRIDE % keys
}

/// The names of keys, back to back.
pub(crate) fn names_of(numbers: &[u64]) -> Result<String> {
    let mut names = Vec::with_capacity(numbers.len() * NAME_LEN);
    for &number in numbers {
        names.extend_from_slice(&name_of(number));
    }
    Ok(String::from_utf8(names)?)
}

/// By hand, since `format!` would take longer than some contenders' fill.
fn name_of(mut number: u64) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    let (prefix, digits) = name.split_at_mut(NAME_PREFIX.len());
    prefix.copy_from_slice(NAME_PREFIX);
    for digit in digits.iter_mut().rev() {
        *digit = b'0' + (number % 10) as u8;
        number /= 10;
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Case;

    #[test]
    fn scrambling_reaches_every_key_once() {
        let mut reached: Vec<_> = (0..10_000).map(|rank| scramble(rank, 10_000)).collect();
        reached.sort_unstable();
        assert!(reached.into_iter().eq(0..10_000));
    }

    #[test]
    fn names_are_sixteen_bytes_each() -> Result<()> {
        assert_eq!(names_of(&[7, 12_345_678])?, "user:00000000007user:00012345678");
        Ok(())
    }

    #[test]
    fn each_limit_of_a_request_has_keys_of_its_own() -> Result<()> {
        let mut keys = [0; 64];
        draw_part(&Case::FourZipf100M.workload(), 0, &mut keys)?;
        assert!(
            keys.chunks(4)
                .flat_map(|request| request.iter().zip(0..))
                .all(|(key, scope)| key / 25_000_000 == scope)
        );
        Ok(())
    }

    #[test]
    fn the_first_rank_of_zipf_has_its_share() -> Result<()> {
        let mut keys = vec![0; 1 << 20];
        draw_part(&Case::Zipf10M.workload(), 0, &mut keys)?;
        let share = keys.iter().filter(|&&key| key == 0).count() as f64 / keys.len() as f64;
        // 1 over the generalised harmonic number of 10M with exponent 0.99.
        assert!((share - 0.0552).abs() < 0.002, "{share}");
        Ok(())
    }
}
