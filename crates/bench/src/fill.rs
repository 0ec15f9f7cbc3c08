//! Makes every key of a case live before measuring.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use anyhow::Result;

use crate::contenders::{Batch, Contender};
use crate::machine;
use crate::measure;
use crate::stream::{BATCH_LEN, names_of};
use crate::workload::Workload;

/// Fill time that one contender gets unless `--full`: the rest of a case still fits into a minute.
pub(crate) const BUDGET: Duration = Duration::from_secs(20);

/// Threads that fill.
pub(crate) const THREADS: u64 = measure::THREADS_MAX as u64;

/// How far a fill came.
pub(crate) struct FillResult {
    pub(crate) keys: u64,
    pub(crate) took: Duration,
}

impl FillResult {
    /// Returns the estimated time to fill `keys` at this pace.
    pub(crate) fn estimate(&self, keys: u64) -> Duration {
        self.took.mul_f64(keys as f64 / self.keys.max(1) as f64)
    }
}

/// Checks each key once, on all cores, and gives up when the budget is spent.
pub(crate) fn fill(
    contender: &dyn Contender,
    workload: &Workload,
    budget: Option<Duration>,
) -> Result<FillResult> {
    let started = machine::now();
    let in_time = || budget.is_none_or(|budget| machine::now() - started < budget);
    let filled = thread::scope(|scope| {
        let limits = workload.limits as u64;
        let requests = workload.keys_per_limit();
        let bound = |part| requests * part / THREADS * limits;
        let ranges = (0..THREADS).map(|part| bound(part)..bound(part + 1));
        let fillers: Vec<_> = ranges
            .map(|range| scope.spawn(move || fill_range(contender, workload, range, in_time)))
            .collect();
        fillers.into_iter().map(|filler| measure::join(filler)?).sum::<Result<u64>>()
    })?;
    Ok(FillResult { keys: filled, took: machine::now() - started })
}

/// Makes the checks of a range, in the shape of the case's requests. A limiter may store the keys
/// of each limit apart, and only the pairs that are measured later should be live.
fn fill_range(
    contender: &dyn Contender,
    workload: &Workload,
    checks: Range<u64>,
    in_time: impl Fn() -> bool,
) -> Result<u64> {
    let limits = workload.limits as u64;
    let key_at = |check: u64| workload.key((check % limits) as usize, check / limits);
    let mut next = checks.start;
    while next < checks.end && in_time() {
        let end = checks.end.min(next + BATCH_LEN as u64);
        let numbers: Vec<_> = (next..end).map(key_at).collect();
        contender.check(&Batch::new(&names_of(&numbers)?, &numbers, workload.limits, false));
        next = end;
    }
    Ok(next - checks.start)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::Case;
    use std::collections::BTreeSet;
    use std::sync::{Mutex, PoisonError};

    /// Records each key with the limit of the request under which it was checked.
    struct SeenKeys(Mutex<BTreeSet<(usize, u64)>>);

    impl Contender for SeenKeys {
        fn check(&self, batch: &Batch<'_>) -> u64 {
            let limits = (0..batch.limits).cycle();
            self.lock().extend(limits.zip(batch.numbers.iter().copied()));
            0
        }
    }

    impl SeenKeys {
        fn lock(&self) -> std::sync::MutexGuard<'_, BTreeSet<(usize, u64)>> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner)
        }
    }

    fn filled(workload: &Workload, budget: Option<Duration>) -> Result<(u64, BTreeSet<(usize, u64)>)> {
        let seen = SeenKeys(Mutex::default());
        let filled = fill(&seen, workload, budget)?;
        Ok((filled.keys, seen.0.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    #[test]
    fn every_key_is_asked_under_its_own_limit() -> Result<()> {
        let workload = Workload { keys: 20_004, ..Case::FourZipf100M.workload() };
        let (keys, seen) = filled(&workload, None)?;
        assert_eq!(keys, 20_004);
        assert!(seen.into_iter().eq((0..20_004).map(|key| (key as usize / 5_001, key))));
        Ok(())
    }

    #[test]
    fn a_spent_budget_ends_the_fill() -> Result<()> {
        assert_eq!(filled(&Case::Uniform1M.workload(), Some(Duration::ZERO))?.0, 0);
        Ok(())
    }
}
