//! What passed, against what one bucket lets pass and what is promised at most.

use tidegate::Limit;
use tidegate::region::bound::{Faults, Fleet, Promise, bound};
use tidegate::region::{Class, Regime};

/// How many units there are, as bounds and buckets count them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AccountState {
    /// Since when, µs.
    pub(super) elapsed_us: u64,
    /// What all regions admitted together.
    pub(super) admitted: u64,
    /// What one bucket would have admitted at most: B + r * t.
    pub(super) bucket: u64,
    /// What the regions may have admitted at most: that, and what they may pass because they have not heard of each other.
    pub(super) bound: u64,
    /// Whether no interval had more than is promised for it: from any moment to any later one, not from the start only.
    pub(super) is_held: bool,
}

/// Sums up what is admitted on one key.
pub(super) struct Account {
    limit: Limit,
    fleet: Fleet,
    before: AccountState,
    /// The largest, over all intervals that end now, of what was admitted in them less what drains in them, in units times
    /// microseconds of the period: a bucket that never denies.
    level: u128,
}

impl Account {
    pub(super) fn new(limit: Limit, fleet: Fleet) -> Self {
        let before = AccountState { elapsed_us: 0, admitted: 0, bucket: 0, bound: 0, is_held: true };
        Self { limit, fleet, before, level: 0 }
    }

    /// Takes in what was admitted until now, with so many partitions of the network until now.
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

/// The class of the limit: one that admits nothing that nobody counted, however busy the machine is.
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
    fn the_bound_is_one_bucket_and_what_regions_do_not_know_of_each_other() {
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
