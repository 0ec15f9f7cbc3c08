//! Compares the admitted units with one bucket and with the promised bound.

use tidegate::Limit;
use tidegate::region::bound::{Faults, Fleet, Promise, bound};
use tidegate::region::{Class, Regime};

/// How many units there are, as bounds and buckets count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AccountState {
    /// Since when, µs.
    pub(super) elapsed_us: u64,
    /// Units that all regions admitted together.
    pub(super) admitted: u64,
    /// Units that one bucket would have admitted at most: B + r * t.
    pub(super) bucket: u64,
    /// Units that the regions may have admitted at most: `bucket`, plus the over-admission due to
    /// usage of peers that they do not know yet.
    pub(super) bound: u64,
    /// Whether every interval kept its bound: from any reading to any later one, not only from the
    /// start.
    pub(super) is_held: bool,
}

/// Sums the units admitted on one key.
pub(super) struct Account {
    limit: Limit,
    fleet: Fleet,
    before: AccountState,
    /// Level of a bucket that never denies, in units times microseconds of the period. It is the
    /// maximum, over all intervals that end now, of the admitted units less the drained units.
    level: u128,
}

impl Account {
    pub(super) fn new(limit: Limit, fleet: Fleet) -> Self {
        let before = AccountState { elapsed_us: 0, admitted: 0, bucket: 0, bound: 0, is_held: true };
        Self { limit, fleet, before, level: 0 }
    }

    /// Adds the units admitted and the network partitions so far.
    pub(super) fn take(&mut self, elapsed_us: u64, admitted: u64, partitions: u32) -> AccountState {
        let (amount, period) = (u128::from(self.limit.amount()), u128::from(self.limit.period_us()));
        let (passed_us, more) = (elapsed_us - self.before.elapsed_us, admitted - self.before.admitted);
        let drained = amount * u128::from(passed_us);
        self.level = self.level.saturating_sub(drained) + u128::from(more) * period;

        let surplus = surplus(&self.limit, &self.fleet, partitions);
        let burst = u64::from(self.limit.burst());
        let is_held = self.level <= u128::from(burst + surplus) * period;
        let drained = u64::try_from(amount * u128::from(elapsed_us) / period).unwrap_or(u64::MAX);
        let bucket = burst.saturating_add(drained);
        self.before = AccountState {
            elapsed_us,
            admitted,
            bucket,
            bound: bucket.saturating_add(surplus),
            is_held: self.before.is_held && is_held,
        };
        self.before
    }
}

/// The class of the limit. `security` admits no uncounted units, however busy the machine is.
pub(super) const CLASS: Class = Class::Security;

/// How far the limit may be passed.
pub(super) fn surplus(limit: &Limit, fleet: &Fleet, partitions: u32) -> u64 {
    let promise = Promise::new(limit, CLASS, Regime::BestEffort);
    bound(&promise, fleet, &Faults { partitions, ..Faults::NONE }).total()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn account() -> (Account, u64) {
        let limit = Limit::gcra(10, Duration::from_secs(1)).expect("in range");
        let fleet = Fleet::of(3);
        let surplus = surplus(&limit, &fleet, 0);
        (Account::new(limit, fleet), surplus)
    }

    #[test]
    fn bound_is_one_bucket_and_the_cross_region_surplus() {
        let (mut account, surplus) = account();
        let account_state = account.take(2_550_000, 7, 0);
        assert_eq!((account_state.bucket, account_state.bound), (35, 35 + surplus));
        assert!(account_state.is_held && surplus >= 20);
        let later = account.take(2_550_000, 7, 1);
        assert!(later.bound > account_state.bound, "a partition costs");
    }

    #[test]
    fn one_unit_above_the_bound_breaks_it_for_good() {
        for above in [0, 1] {
            let (mut account, surplus) = account();
            assert_eq!(account.take(0, 10 + surplus + above, 0).is_held, above == 0);
            assert_eq!(account.take(60_000_000, 10 + surplus + above, 0).is_held, above == 0);
        }
    }

    #[test]
    fn a_burst_after_a_quiet_time_is_held_against_its_own_interval() {
        let (mut account, surplus) = account();
        // After a minute the sum from the start has room for 600 more: the last instant has not.
        account.take(60_000_000, 0, 0);
        let account_state = account.take(60_000_000, 11 + surplus, 0);
        assert!(account_state.admitted < account_state.bound && !account_state.is_held, "{account_state:?}");
    }
}
