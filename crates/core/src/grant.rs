//! The state of a grant on a node: an amount to spend without asking the origin, and the decision
//! once it is spent.
//!
//! A request within the grant passes. After the origin replied that it is exhausted, a request is
//! denied until the time in that reply. Otherwise the node has to ask the origin
//! ([`Retry::AskOrigin`]).

use crate::limit::Limit;
use crate::verdict::{Retry, Verdict};

/// Longest grant and longest denial that a meter can store, µs. A longer one is cut to this, and
/// the node asks again.
pub const HOLD_US_MAX: u64 = u16::MAX as u64 * US_PER_MS;

const US_PER_MS: u64 = 1_000;

/// The grant of a meter as a slot stores it. All zeroes: the node has never asked the origin about
/// this meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct GrantState {
    /// Start of all times below: when the node sent the call of the last applied reply, or later.
    pub(crate) since_us: u64,
    /// Units of the grant not spent yet.
    pub(crate) unspent: u32,
    /// Units spent and not reported yet.
    pub(crate) unreported: u32,
    /// How long after `since_us` the grant may be spent.
    pub(crate) life_ms: u16,
    /// How long after `since_us` a request is denied, once the grant is spent.
    pub(crate) deny_ms: u16,
    /// Units of the burst not charged at `since_us`, before `unreported` is subtracted: see
    /// [`CompactUnits`]. Above the burst if unreported units have drained.
    pub(crate) free: CompactUnits,
    /// Whether the node has denied a request since.
    pub(crate) missed: bool,
    /// Which limit it was about: see [`Limit::fingerprint`].
    pub(crate) fingerprint: u16,
}

/// The reply of an origin about one meter, in times of the node's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct GrantUpdate {
    /// When the call was sent.
    pub sent_us: u64,
    /// Units that the node may spend, including those spent since it sent the call.
    pub grant: u64,
    /// How long it may, from when the call was sent.
    pub life_us: u64,
    /// How long the node denies without asking again once the grant is spent, from when the call
    /// was sent, µs.
    pub deny_us: u64,
    /// Units of the burst that were not charged when the call was sent, granted or not.
    pub free: u64,
    /// Whether the units spent since the call was sent are counted already.
    pub counted: bool,
}

/// The usage that a node reports to the origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct UsageReport {
    /// Units spent and not reported yet.
    pub used: u64,
    /// Units that the node may still spend while the call is in flight.
    pub keep: u64,
    /// Whether the node has denied a request since the origin's last reply.
    pub missed: bool,
}

/// An amount in sixteen bits, rounded down: exact below 2,048, and to a thousandth above.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct CompactUnits(pub(crate) u16);

const MANTISSA_BITS: u32 = 10;

impl CompactUnits {
    const fn of(amount: u64) -> Self {
        if amount < 1 << (MANTISSA_BITS + 1) {
            return Self(amount as u16);
        }
        let shift = amount.ilog2() - MANTISSA_BITS;
        let mantissa = (amount >> shift) & ((1 << MANTISSA_BITS) - 1);
        Self((((shift + 1) as u64) << MANTISSA_BITS | mantissa) as u16)
    }

    const fn amount(self) -> u64 {
        let (exponent, mantissa) =
            ((self.0 >> MANTISSA_BITS) as u32, self.0 as u64 & ((1 << MANTISSA_BITS) - 1));
        if exponent < 2 { self.0 as u64 } else { (1 << MANTISSA_BITS | mantissa) << (exponent - 1) }
    }
}

impl GrantState {
    fn is_alive(&self, now_us: u64) -> bool {
        now_us < self.since_us + u64::from(self.life_ms) * US_PER_MS
    }

    fn denies_until_us(&self) -> u64 {
        self.since_us + u64::from(self.deny_ms) * US_PER_MS
    }

    /// Whether the node can evict this state without loss: it has no usage to report, no grant left
    /// and no denial in force.
    pub(crate) fn is_over(&self, now_us: u64) -> bool {
        self.unreported == 0
            && now_us >= self.denies_until_us()
            && (self.unspent == 0 || !self.is_alive(now_us))
    }

    /// Decides a request of `cost`. Returns the verdict and the state after it.
    #[inline]
    pub(crate) fn decide(self, limit: &Limit, now_us: u64, cost: u64) -> (Verdict, Self) {
        if limit.is_blocked() {
            return (Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::Blocked }, self);
        }
        let Some(cost) = u32::try_from(cost).ok().filter(|&cost| cost <= limit.burst()) else {
            return (self.denial(limit, now_us, u32::MAX, Retry::CostAboveBurst), self);
        };
        if self.fingerprint != limit.fingerprint() {
            // The last reply is about the limit before a change, which the origin may not know yet.
            return (self.denial(limit, now_us, cost, Retry::AskOrigin), self);
        }
        let unspent = if self.is_alive(now_us) { self.unspent } else { 0 };
        if unspent >= cost
            && (cost > 0 || self.has_valid_reply(now_us))
            && self.unreported.checked_add(cost).is_some()
        {
            let before = self.drained(limit, now_us);
            let after =
                Self { unspent: before.unspent - cost, unreported: before.unreported + cost, ..before };
            let remaining = after.remaining(limit, now_us).min(limit.burst() - cost);
            return (Verdict::Allow { remaining, reset_after_us: limit.reset_after_us(remaining) }, after);
        }
        let retry = if now_us < self.denies_until_us() {
            Retry::After(self.retry_after_us(limit, now_us, cost))
        } else {
            Retry::AskOrigin
        };
        (self.denial(limit, now_us, cost, retry), self.missed(now_us))
    }

    /// Returns the state with `missed` set, if the origin's last reply is the reason for the
    /// denial.
    pub(crate) fn missed(self, now_us: u64) -> Self {
        Self { missed: self.missed || now_us < self.denies_until_us(), ..self }
    }

    /// Returns the time until a denied request would pass. The stored denial may be cut to
    /// [`HOLD_US_MAX`], and covers one unit: the missing units drain later.
    fn retry_after_us(&self, limit: &Limit, now_us: u64, cost: u32) -> u64 {
        let charged = u64::from(cost) + u64::from(self.unreported);
        let missing = charged.saturating_sub(self.free.amount());
        let passes_us = self.since_us.saturating_add(limit.drain_time_us(missing));
        passes_us.max(self.denies_until_us()).saturating_sub(now_us)
    }

    /// Whether the origin's last reply still applies.
    fn has_valid_reply(&self, now_us: u64) -> bool {
        self.is_alive(now_us) || now_us < self.denies_until_us()
    }

    /// Returns a denial. Its `remaining` is below `cost`, even if other nodes have unspent grants.
    fn denial(&self, limit: &Limit, now_us: u64, cost: u32, retry: Retry) -> Verdict {
        let remaining = self.remaining(limit, now_us).min(cost.saturating_sub(1));
        Verdict::Deny { remaining, reset_after_us: limit.reset_after_us(remaining), retry }
    }

    /// Returns the unused units of the burst: those in the origin's last reply, plus the units
    /// drained since, minus the units that this node has used since.
    fn remaining(&self, limit: &Limit, now_us: u64) -> u32 {
        let free = self.free_at(limit, now_us).saturating_sub(self.unreported.into());
        u32::try_from(free).unwrap_or(u32::MAX).min(limit.burst())
    }

    /// Returns the free units at `now_us`, before `unreported` is subtracted.
    fn free_at(&self, limit: &Limit, now_us: u64) -> u64 {
        self.free.amount() + limit.drained_in(now_us.saturating_sub(self.since_us))
    }

    /// Restarts the count at `now_us` if the meter has become empty: time in which no unit drains
    /// must not count.
    fn drained(self, limit: &Limit, now_us: u64) -> Self {
        let most = u64::from(limit.burst()) + u64::from(self.unreported);
        if self.free_at(limit, now_us) <= most {
            return self;
        }
        // By whole milliseconds, because each check may do so: the life of the grant stays exact.
        let passed_us = now_us.saturating_sub(self.since_us);
        self.counted_from(now_us - passed_us % US_PER_MS, most)
    }

    /// Moves `since_us` to `from_us`, when `free` units are free. Lives are rounded down to
    /// milliseconds.
    fn counted_from(self, from_us: u64, free: u64) -> Self {
        let passed_us = from_us.saturating_sub(self.since_us);
        let left_of = |ms: u16| {
            let left_us = (u64::from(ms) * US_PER_MS).saturating_sub(passed_us);
            u16::try_from(left_us / US_PER_MS).unwrap_or(0)
        };
        Self {
            since_us: self.since_us + passed_us,
            free: CompactUnits::of(free),
            life_ms: left_of(self.life_ms),
            deny_ms: left_of(self.deny_ms),
            ..self
        }
    }

    /// Takes the unreported usage, and gives up unspent units beyond `keep`. From here on the node
    /// spends only the kept units.
    pub(crate) fn take_report(self, limit: &Limit, now_us: u64, keep: u64) -> (UsageReport, Self) {
        let unspent = if self.is_alive(now_us) { self.unspent } else { 0 };
        let kept_units = unspent.min(u32::try_from(keep).unwrap_or(u32::MAX));
        let taken = UsageReport {
            used: u64::from(self.unreported),
            keep: u64::from(kept_units),
            missed: self.missed,
        };
        // Units on their way to the origin stay used. The time of a unit that has drained in part
        // counts on.
        let free = self.remaining(limit, now_us);
        let drained_us = limit.drain_time_us(limit.drained_in(now_us.saturating_sub(self.since_us)));
        let from_us = if free < limit.burst() { now_us.min(self.since_us + drained_us) } else { now_us };
        let after = if self.unreported > 0 { self.counted_from(from_us, free.into()) } else { self };
        (taken, Self { unspent: kept_units, unreported: 0, missed: false, ..after })
    }

    /// Applies the origin's reply on a limit. Units spent while the call was in flight are
    /// subtracted from the new grant, unless the origin has counted them.
    pub(crate) fn apply_update(self, limit: &Limit, update: &GrantUpdate) -> Self {
        let unreported = if update.counted { 0 } else { self.unreported };
        let unspent = update.grant.saturating_sub(u64::from(unreported));
        Self {
            since_us: update.sent_us,
            unspent: u32::try_from(unspent).unwrap_or(u32::MAX),
            unreported,
            life_ms: ms(update.life_us),
            deny_ms: ms(update.deny_us),
            free: CompactUnits::of(update.free),
            missed: false,
            fingerprint: limit.fingerprint(),
        }
    }

    /// Refunds `cost`, and returns the part that was reported already: the origin has to refund
    /// that part.
    pub(crate) fn refund(self, cost: u64) -> (u64, Self) {
        let here = self.unreported.min(u32::try_from(cost).unwrap_or(u32::MAX));
        let after =
            Self { unreported: self.unreported - here, unspent: self.unspent.saturating_add(here), ..self };
        (cost - u64::from(here), after)
    }

    /// Adds `cost` without a test: it was spent already.
    pub(crate) fn charge(self, cost: u64) -> Self {
        let cost = u32::try_from(cost).unwrap_or(u32::MAX);
        Self {
            unspent: self.unspent.saturating_sub(cost),
            unreported: self.unreported.saturating_add(cost),
            ..self
        }
    }
}

/// Converts to milliseconds, rounded down: a node may ask a moment too early, but must not spend
/// for too long.
fn ms(us: u64) -> u16 {
    u16::try_from(us / US_PER_MS).unwrap_or(u16::MAX)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    const MS: u64 = 1_000;

    fn ten_per_second() -> Limit {
        Limit::gcra(10, Duration::from_secs(1)).expect("in range").at_origin()
    }

    fn granted(grant: u64, deny_us: u64) -> GrantState {
        let update =
            GrantUpdate { sent_us: 5_000 * MS, grant, life_us: 1_000 * MS, deny_us, free: 2, counted: false };
        GrantState::default().apply_update(&ten_per_second(), &update)
    }

    fn passes(allowance: GrantState, now_ms: u64, cost: u64) -> (Option<Retry>, GrantState) {
        let (verdict, after) = allowance.decide(&ten_per_second(), now_ms * MS, cost);
        (verdict.retry(), after)
    }

    #[test]
    fn meter_without_a_reply_asks_the_origin() {
        assert_eq!(passes(GrantState::default(), 0, 1).0, Some(Retry::AskOrigin));
        assert_eq!(
            passes(GrantState::default(), 9_999, 0).0,
            Some(Retry::AskOrigin),
            "a check of cost 0 asks the origin too"
        );
    }

    #[test]
    fn a_grant_is_spent_and_then_asked_for_again() {
        let (retry, after) = passes(granted(3, 0), 5_001, 2);
        assert_eq!((retry, after.unspent, after.unreported), (None, 1, 2));
        assert_eq!(passes(after, 5_001, 2).0, Some(Retry::AskOrigin));
        assert_eq!(passes(after, 5_999, 1).0, None);
        assert_eq!(passes(after, 6_000, 1).0, Some(Retry::AskOrigin), "the grant has expired");
    }

    #[test]
    fn an_exhausted_origin_is_not_asked_before_the_denial_ends() {
        let exhausted = granted(0, 200 * MS);
        assert_eq!(passes(exhausted, 5_050, 1).0, Some(Retry::After(150 * MS)));
        assert_eq!(passes(exhausted, 5_200, 1).0, Some(Retry::AskOrigin));
        assert_eq!(
            passes(granted(1, 200 * MS), 5_050, 1).0,
            None,
            "a grant is spent before the denial applies"
        );
    }

    #[test]
    fn retry_time_is_not_cut_with_the_stored_denial() {
        for limit in
            [Limit::gcra(2, Duration::from_hours(1)), Limit::sliding_window(2, Duration::from_hours(1))]
        {
            let limit = limit.expect("in range").at_origin();
            let half_hour_us = 1_800_000 * MS;
            let update = GrantUpdate { sent_us: 5_000 * MS, deny_us: half_hour_us, ..GrantUpdate::default() };
            let exhausted = GrantState::default().apply_update(&limit, &update);
            let retry = |now_ms: u64, cost| exhausted.decide(&limit, now_ms * MS, cost).0.retry();
            assert_eq!(retry(6_000, 1), Some(Retry::After(half_hour_us - 1_000 * MS)));
            assert_eq!(retry(6_000, 2), Some(Retry::After(2 * half_hour_us - 1_000 * MS)));
            assert_eq!(retry(5_000 + HOLD_US_MAX / MS, 1), Some(Retry::AskOrigin), "the node asks earlier");
        }
    }

    #[test]
    fn usage_during_a_call_is_taken_from_the_new_grant() {
        let (_, spent) = passes(granted(9, 0), 5_001, 4);
        let (taken, kept_units) = spent.take_report(&ten_per_second(), 5_002 * MS, 3);
        assert_eq!(taken, UsageReport { used: 4, keep: 3, missed: false });
        let (_, meanwhile) = passes(kept_units, 5_003, 2);
        let update =
            GrantUpdate { sent_us: 5_002 * MS, grant: 8, life_us: 1_000 * MS, ..GrantUpdate::default() };
        let after = meanwhile.apply_update(&ten_per_second(), &update);
        assert_eq!((after.unspent, after.unreported), (6, 2));
        let after = meanwhile.apply_update(&ten_per_second(), &GrantUpdate { counted: true, ..update });
        assert_eq!((after.unspent, after.unreported), (8, 0));
    }

    #[test]
    fn expired_grant_is_not_kept() {
        assert_eq!(granted(9, 0).take_report(&ten_per_second(), 6_000 * MS, 9).0, UsageReport::default());
    }

    #[test]
    fn refund_returns_the_units_left_to_the_origin() {
        let (_, spent) = passes(granted(9, 0), 5_001, 4);
        let (rest, after) = spent.refund(6);
        assert_eq!((rest, after.unspent, after.unreported), (2, 9, 0));
    }

    #[test]
    fn denial_by_an_exhausted_meter_is_marked_as_missed() {
        let (_, after) = passes(granted(0, 200 * MS), 5_050, 1);
        assert!(after.missed && after.take_report(&ten_per_second(), 5_060 * MS, 0).0.missed);
        assert!(
            !passes(GrantState::default(), 5_050, 1).1.missed,
            "a check that asks the origin is not a denial"
        );
    }

    #[test]
    fn reply_for_another_limit_does_not_decide() {
        let hundred = Limit::gcra(100, Duration::from_secs(1)).expect("in range").at_origin();
        for before in [granted(9, 0), granted(0, 200 * MS)] {
            let (verdict, after) = before.decide(&hundred, 5_050 * MS, 1);
            assert_eq!(
                (verdict.retry(), after),
                (Some(Retry::AskOrigin), before),
                "the grant stays as it was"
            );
        }
    }

    #[test]
    fn never_allowed_cost_has_its_own_retry_reason() {
        assert_eq!(passes(granted(9, 0), 5_001, 11).0, Some(Retry::CostAboveBurst));
        let blocked = Limit::gcra(0, Duration::from_secs(1)).expect("in range").at_origin();
        assert_eq!(granted(9, 0).decide(&blocked, 5_001 * MS, 1).0.retry(), Some(Retry::Blocked));
    }

    #[test]
    fn remaining_ignores_grants_and_pending_reports() {
        let limit = ten_per_second();
        let remaining = |allowance: GrantState, cost: u64| {
            let (verdict, after) = allowance.decide(&limit, 5_000 * MS, cost);
            (verdict.remaining(), after)
        };
        let update = GrantUpdate {
            sent_us: 5_000 * MS,
            grant: 3,
            life_us: 1_000 * MS,
            free: 9,
            ..GrantUpdate::default()
        };
        let (first, after) = remaining(GrantState::default().apply_update(&limit, &update), 1);
        let (second, after) = remaining(after, 1);
        assert_eq!((first, second), (8, 7));
        let (_, on_its_way) = after.take_report(&limit, 5_000 * MS, 1);
        assert_eq!(remaining(on_its_way, 1).0, 6, "reported units stay used until the reply");
        let denied = GrantState { unspent: 0, ..after };
        assert_eq!(remaining(denied, 1).0, 0, "`remaining` of a denial is below the cost");
        assert_eq!(remaining(denied, 9).0, 7);
    }

    proptest! {
        /// A single node returns the `remaining` of one exact bucket, up to the drain of a
        /// millisecond.
        #[test]
        fn remaining_is_that_of_one_bucket(
            burst in 1u64..900,
            steps in prop::collection::vec((0u64..400_000, 1u64..4, any::<bool>()), 1..60),
        ) {
            let limit = Limit::gcra(100, Duration::from_secs(1)).and_then(|limit| limit.with_burst(burst));
            let limit = limit.expect("in range").at_origin();
            let (mut now_us, mut level_us) = (1_000_000u64, 0u64);
            let update = GrantUpdate { sent_us: now_us, grant: 1 << 30, life_us: 60_000 * MS,
                free: burst, ..GrantUpdate::default() };
            let mut allowance = GrantState::default().apply_update(&limit, &update);
            for (gap_us, cost, reports) in steps {
                now_us += gap_us;
                level_us = level_us.saturating_sub(gap_us);
                if level_us + cost * 10_000 > burst * 10_000 {
                    continue;
                }
                if reports {
                    allowance = allowance.take_report(&limit, now_us, u64::MAX).1;
                }
                let (verdict, after) = allowance.decide(&limit, now_us, cost);
                prop_assert!(verdict.is_allowed());
                allowance = after;
                level_us += cost * 10_000;
                let exact = (burst * 10_000 - level_us) / 10_000;
                prop_assert!(u64::from(verdict.remaining()).abs_diff(exact) <= 1, "{} {exact}", verdict.remaining());
            }
        }

        #[test]
        fn compact_amount_is_rounded_down_by_at_most_a_thousandth(amount in 0u64..1 << 40) {
            let rounded = CompactUnits::of(amount).amount();
            prop_assert!(rounded <= amount && amount - rounded <= amount >> MANTISSA_BITS);
            prop_assert!(amount >= 1 << (MANTISSA_BITS + 1) || rounded == amount);
        }

        #[test]
        fn nothing_is_spent_beyond_the_grant(
            grant in 0u64..50, costs in prop::collection::vec((0u64..9, 4_900u64..6_200), 0..40)) {
            let mut allowance = granted(grant, 0);
            let mut spent = 0;
            for (cost, now_ms) in costs {
                let (retry, after) = passes(allowance, now_ms, cost);
                if retry.is_none() {
                    spent += cost;
                    allowance = after;
                }
            }
            prop_assert!(spent <= grant);
            prop_assert_eq!(u64::from(allowance.unreported), spent);
        }
    }
}
