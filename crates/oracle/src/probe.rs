//! Whether a verdict is true of the subject itself: its waits are tried out, to the microsecond.

use tidegate_core::{Limit, Retry, Verdict};

use crate::difference::Difference;
use crate::history::Clock;
use crate::subject::Subject;

/// A decision that was made, and the meter after it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Probe<'a, S> {
    pub(crate) limit: &'a Limit,
    pub(crate) clock: Clock,
    pub(crate) at_us: u64,
    pub(crate) cost: u64,
    pub(crate) after: S,
    /// Whether committing all reservations now would stay below the cap. A meter at its cap forgets
    /// some of a commit, and so lets the request pass earlier than `retry`, which counts it in
    /// full.
    pub(crate) commits_in_full: bool,
}

impl<S: Subject> Probe<'_, S> {
    /// Tries out all waits of `verdict`. Gives how many questions that took.
    pub(crate) fn all(&self, verdict: Verdict) -> Result<u64, Difference> {
        let retries = match verdict.retry() {
            Some(Retry::After(wait_us)) => self.retry(wait_us)?,
            // Only limits at an origin return `AskOrigin`; none is compared here.
            Some(Retry::Blocked | Retry::AskOrigin) => return Ok(0),
            Some(Retry::CostAboveBurst) | None => 0,
        };
        Ok(retries + self.reset(verdict.reset_after_us())?)
    }

    /// With the reservations committed, the request passes after `wait_us` and not one microsecond
    /// earlier.
    fn retry(&self, wait_us: u64) -> Result<u64, Difference> {
        let reserved = u64::from(self.after.reserved());
        let now = self.clock.now(self.at_us);
        let committed = self.after.commit(self.limit, now, reserved, reserved);
        let passes = self.ask(committed, wait_us, self.cost).is_allowed();
        Difference::unless_equal("whether it passes after `retry`", &true, &passes)?;
        if !self.commits_in_full {
            return Ok(1);
        }
        let Some(earlier_us) = wait_us.checked_sub(1) else {
            return Err(Difference::new("retry", &"at least 1 us", &wait_us));
        };
        let passes = self.ask(committed, earlier_us, self.cost).is_allowed();
        Difference::unless_equal("whether it passes 1 us before `retry`", &false, &passes)?;
        Ok(2)
    }

    /// With the reservations given back, the meter is as new after `wait_us` and not one
    /// microsecond earlier.
    fn reset(&self, wait_us: u64) -> Result<u64, Difference> {
        let free = self.after.rollback(self.after.reserved().into());
        let burst = self.limit.burst();
        let as_new = Verdict::Allow { remaining: burst, reset_after_us: 0 };
        Difference::unless_equal("look after `reset_after_us`", &as_new, &self.ask(free, wait_us, 0))?;
        let Some(earlier_us) = wait_us.checked_sub(1) else { return Ok(1) };
        let full = self.ask(free, earlier_us, 0).remaining() == burst;
        Difference::unless_equal("whether all remains 1 us before `reset_after_us`", &false, &full)?;
        Ok(2)
    }

    fn ask(&self, meter: S, wait_us: u64, cost: u64) -> Verdict {
        meter.decide(self.limit, self.clock.now(self.at_us + wait_us), cost).0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tidegate_core::Meter;

    /// Three per second, all spent at once, and a fourth denied: it passes after 333,334 us.
    fn probe_denial(reset_after_us: u64, retry_us: u64) -> Result<u64, Difference> {
        let limit = Limit::gcra(3, Duration::from_secs(1)).unwrap();
        let clock = Clock { mono_us: 5, wall_us: 9 };
        let after = Meter::empty(&limit).charge(&limit, clock.now(0), 3);
        let probe = Probe { limit: &limit, clock, at_us: 0, cost: 1, after, commits_in_full: true };
        probe.all(Verdict::Deny { remaining: 0, reset_after_us, retry: Retry::After(retry_us) })
    }

    #[test]
    fn true_waits_pass() {
        assert_eq!(probe_denial(1_000_000, 333_334), Ok(4));
    }

    #[test]
    fn waits_that_are_off_by_one_are_found() {
        let property = |reset_us, retry_us| probe_denial(reset_us, retry_us).unwrap_err().property;
        assert_eq!(property(1_000_000, 333_333), "whether it passes after `retry`");
        assert_eq!(property(1_000_000, 333_335), "whether it passes 1 us before `retry`");
        assert_eq!(property(999_999, 333_334), "look after `reset_after_us`");
        assert_eq!(property(1_000_001, 333_334), "whether all remains 1 us before `reset_after_us`");
        assert_eq!(property(1_000_000, 0), "whether it passes after `retry`");
    }
}
