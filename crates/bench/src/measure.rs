//! Measures a contender: warm-up, then slices of fixed length, of which the median counts.

use std::sync::Barrier;
use std::thread::{self, ScopedJoinHandle};
use std::time::Duration;

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};

use crate::contenders::{Batch, Contender};
use crate::machine;
use crate::stream::Stream;

/// The most threads that a measurement uses.
pub(crate) const THREADS_MAX: usize = 2;

/// How long a measurement takes.
pub(crate) struct Pace {
    pub(crate) warm_up: Duration,
    pub(crate) slice: Duration,
    pub(crate) slices: usize,
}

/// The pace of every contender: a second and a half measured.
pub(crate) const PACE: Pace =
    Pace { warm_up: Duration::from_millis(100), slice: Duration::from_millis(300), slices: 5 };

/// The figures of a contender with a number of threads.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Measurement {
    pub(crate) threads: usize,
    /// CPU nanoseconds per limit check.
    pub(crate) cpu_ns: f64,
    /// Limit checks per wall second, all threads together.
    pub(crate) per_second: f64,
    /// Share of the requests that were allowed.
    pub(crate) allowed: f64,
}

/// The work of one thread in one slice.
#[derive(Clone, Copy, Default)]
struct Slice {
    checks: u64,
    requests: u64,
    allowed: u64,
    cpu: Duration,
    wall: Duration,
}

/// Runs the contender over the stream with so many threads at once.
pub(crate) fn measure(
    contender: &dyn Contender,
    stream: &Stream,
    limits: usize,
    threads: usize,
    pace: &Pace,
) -> Result<Measurement> {
    let barrier = &Barrier::new(threads);
    let by_thread = thread::scope(|scope| {
        let start = |thread| {
            let batches = stream.batches(limits, thread, threads);
            // A profiler distinguishes threads by name, so it can leave out the fill.
            let named = thread::Builder::new().name(format!("measure-{threads}"));
            named.spawn_scoped(scope, move || run_slices(contender, batches, barrier, pace))
        };
        let runners: Vec<_> = (0..threads).map(start).collect::<Result<_, _>>()?;
        runners.into_iter().map(join).collect::<Result<Vec<_>>>()
    })?;
    Ok(summarise(&by_thread, threads))
}

/// The value of a thread, with its panic as an error.
pub(crate) fn join<T>(thread: ScopedJoinHandle<'_, T>) -> Result<T> {
    thread.join().map_err(|_| anyhow!("a thread of the benchmark panicked"))
}

fn run_slices<'a>(
    contender: &dyn Contender,
    mut batches: impl Iterator<Item = Batch<'a>>,
    barrier: &Barrier,
    pace: &Pace,
) -> Vec<Slice> {
    run_for(pace.warm_up, contender, &mut batches);
    let run_slice = |_| {
        // Every slice has all threads in it from its start to nearly its end.
        barrier.wait();
        run_for(pace.slice, contender, &mut batches)
    };
    (0..pace.slices).map(run_slice).collect()
}

fn run_for<'a>(
    length: Duration,
    contender: &dyn Contender,
    batches: &mut impl Iterator<Item = Batch<'a>>,
) -> Slice {
    let mut slice = Slice::default();
    let (started, cpu_before) = (machine::now(), machine::thread_cpu());
    for batch in batches {
        slice.allowed += contender.check(&batch);
        slice.checks += batch.numbers.len() as u64;
        slice.requests += (batch.numbers.len() / batch.limits) as u64;
        slice.wall = machine::now() - started;
        if slice.wall >= length {
            break;
        }
    }
    slice.cpu = machine::thread_cpu().saturating_sub(cpu_before);
    slice
}

fn summarise(by_thread: &[Vec<Slice>], threads: usize) -> Measurement {
    let slices = by_thread.first().map_or(0, Vec::len);
    let of_slice = |index: usize| by_thread.iter().map(move |slices| slices[index]);
    let median_of = |value: &dyn Fn(usize) -> f64| median((0..slices).map(value).collect());
    let sum = |value: fn(&Slice) -> u64| by_thread.iter().flatten().map(value).sum::<u64>() as f64;
    Measurement {
        threads,
        cpu_ns: median_of(&|index| {
            let cpu: Duration = of_slice(index).map(|slice| slice.cpu).sum();
            cpu.as_nanos() as f64 / of_slice(index).map(|slice| slice.checks).sum::<u64>() as f64
        }),
        per_second: median_of(&|index| {
            of_slice(index).map(|slice| slice.checks as f64 / slice.wall.as_secs_f64()).sum()
        }),
        allowed: sum(|slice| slice.allowed) / sum(|slice| slice.requests),
    }
}

pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_shared_by_all_checks_and_speed_adds_up() {
        let slice = |checks, millis| Slice {
            checks,
            requests: checks,
            allowed: checks / 2,
            cpu: Duration::from_millis(millis),
            wall: Duration::from_secs(1),
        };
        let summary = summarise(&[vec![slice(1_000_000, 600)], vec![slice(3_000_000, 1_000)]], 2);
        assert!((summary.cpu_ns - 400.0).abs() < 1e-6);
        assert!((summary.per_second - 4e6).abs() < 1e-3);
        assert!((summary.allowed - 0.5).abs() < 1e-9);
    }

    #[test]
    fn the_median_ignores_a_stray_slice() {
        assert!((median(vec![9.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
    }
}
