//! A meter: the live state of one key under one limit, as a value and as the words of a slot.

use crate::gcra::{self, Arrival};
use crate::grant::{CompactUnits, GrantState, GrantUpdate, UsageReport};
use crate::limit::{Algorithm, FINGERPRINT_BITS, Limit};
use crate::minifloat;
use crate::time::Now;
use crate::verdict::Verdict;
use crate::window::{self, Cells};

/// Usage, in the terms of the limit's algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Gcra(Arrival),
    Window(Cells),
    Grant(GrantState),
}

/// The state of one meter. Every change makes a new value; the table swaps values atomically.
///
/// Spent and reserved units are separate. A reservation counts against the limit but is never
/// visible as use, and giving it back cannot undo a merge that came meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    level: Level,
    reserved: u32,
}

impl Meter {
    /// Returns a meter without usage.
    #[inline]
    pub fn empty(limit: &Limit) -> Self {
        let level = match limit.algorithm() {
            _ if limit.is_at_origin() => Level::Grant(GrantState::default()),
            Algorithm::Gcra => Level::Gcra(Arrival::ZERO),
            Algorithm::SlidingWindow => Level::Window(Cells::default()),
        };
        Self { level, reserved: 0 }
    }

    /// Decides a request of `cost`, and gives the meter after it: charged if allowed, as it was if
    /// not.
    #[inline(always)]
    pub fn decide(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        match self.level {
            Level::Gcra(before) => {
                let (verdict, after) = gcra::decide(limit, before, self.reserved, now.mono_us(), cost);
                (verdict, Self { level: Level::Gcra(after), ..self })
            }
            Level::Window(before) => {
                let (verdict, after) = window::decide(limit, before, self.reserved, now, cost);
                (verdict, Self { level: Level::Window(after), ..self })
            }
            Level::Grant(before) => {
                let (verdict, after) = before.decide(limit, now.mono_us(), cost);
                (verdict, Self { level: Level::Grant(after), ..self })
            }
        }
    }

    /// The report for the origin, and the meter after it: see [`GrantState::take_report`].
    pub(crate) fn take_report(self, limit: &Limit, now: Now, keep: u64) -> (UsageReport, Self) {
        let (taken, after) = self.allowance().take_report(limit, now.mono_us(), keep);
        (taken, self.with_level(Level::Grant(after)))
    }

    /// The same, marked as denied by the origin's last reply.
    #[must_use]
    pub(crate) fn missed(self, now: Now) -> Self {
        match self.level {
            Level::Grant(before) => self.with_level(Level::Grant(before.missed(now.mono_us()))),
            Level::Gcra(_) | Level::Window(_) => self,
        }
    }

    /// Applies the origin's reply on its limit.
    #[must_use]
    pub(crate) fn apply_update(self, limit: &Limit, update: &GrantUpdate) -> Self {
        let after = self.allowance().apply_update(limit, update);
        self.with_level(Level::Grant(after))
    }

    /// Refunds `cost` from unreported usage. Returns the rest, which the origin has to refund.
    pub(crate) fn give_back(self, cost: u64) -> (u64, Self) {
        let (rest, after) = self.allowance().refund(cost);
        (rest, self.with_level(Level::Grant(after)))
    }

    /// Returns the grant of this meter: an empty one if no origin has the meter.
    fn allowance(&self) -> GrantState {
        match self.level {
            Level::Grant(allowance) => allowance,
            Level::Gcra(_) | Level::Window(_) => GrantState::default(),
        }
    }

    /// Decides like [`Meter::decide`], but an allowed cost is set aside instead of charged.
    ///
    /// From a grant it is spent at once, because units that the origin counts as used must cover a
    /// reservation.
    pub fn reserve(self, limit: &Limit, now: Now, cost: u64) -> (Verdict, Self) {
        let (verdict, after) = self.decide(limit, now, cost);
        if let Level::Grant(_) = self.level {
            return (verdict, after);
        }
        let cost = if verdict.is_allowed() { saturate(cost) } else { 0 };
        (verdict, Self { reserved: self.reserved.saturating_add(cost), ..self })
    }

    /// Turns `reserved` into a charge of `actual`, which may be less or more than was set aside.
    #[must_use]
    pub fn commit(self, limit: &Limit, now: Now, reserved: u64, actual: u64) -> Self {
        if let Level::Grant(_) = self.level {
            return if actual > reserved {
                self.charge(limit, now, actual - reserved)
            } else {
                self.give_back(reserved - actual).1
            };
        }
        self.rollback(reserved).charge(limit, now, actual)
    }

    /// Gives `reserved` back. Spent and merged usage stays.
    #[must_use]
    pub fn rollback(self, reserved: u64) -> Self {
        if let Level::Grant(_) = self.level {
            return self.give_back(reserved).1;
        }
        Self { reserved: self.reserved.saturating_sub(saturate(reserved)), ..self }
    }

    /// Adds `cost` without a test.
    #[must_use]
    pub fn charge(self, limit: &Limit, now: Now, cost: u64) -> Self {
        self.with_level(match self.level {
            Level::Gcra(before) => Level::Gcra(gcra::charge(limit, before, now.mono_us(), cost)),
            Level::Window(before) => Level::Window(window::charge(limit, before, now, cost)),
            Level::Grant(before) => Level::Grant(before.charge(cost)),
        })
    }

    /// Gives spent `cost` back, down to an empty meter.
    #[must_use]
    pub fn refund(self, limit: &Limit, now: Now, cost: u64) -> Self {
        self.with_level(match self.level {
            Level::Gcra(before) => Level::Gcra(gcra::refund(limit, before, now.mono_us(), cost)),
            Level::Window(before) => Level::Window(window::refund(limit, before, now, cost)),
            Level::Grant(before) => Level::Grant(before.refund(cost).1),
        })
    }

    /// Merges usage that another party knows: at least `used` units are spent. Reservations stay as
    /// they are.
    #[must_use]
    pub fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {
        self.with_level(match self.level {
            Level::Gcra(before) => Level::Gcra(gcra::raise(limit, before, now.mono_us(), used)),
            Level::Window(before) => Level::Window(window::raise(limit, before, now, used)),
            // The origin's reply includes the usage of others.
            Level::Grant(before) => Level::Grant(before),
        })
    }

    /// Clears the usage. Reservations stay: their owners still commit them or give them back.
    #[must_use]
    pub fn reset(self, limit: &Limit) -> Self {
        Self { reserved: self.reserved, ..Self::empty(limit) }
    }

    /// Returns the spent units, rounded up. No other usage is ever visible outside.
    pub fn used(&self, limit: &Limit, now: Now) -> u64 {
        match self.level {
            Level::Gcra(before) => gcra::used(limit, before, now.mono_us()),
            Level::Window(before) => window::used(limit, before, now),
            Level::Grant(before) => u64::from(before.unreported),
        }
    }

    /// Whether the meter has no usage and no reservations.
    pub fn is_idle(&self, limit: &Limit, now: Now) -> bool {
        self.reserved == 0 && self.used(limit, now) == 0
    }

    /// Returns the units that are set aside and neither committed nor given back.
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    fn with_level(self, level: Level) -> Self {
        Self { level, ..self }
    }
}

fn saturate(cost: u64) -> u32 {
    u32::try_from(cost).unwrap_or(u32::MAX)
}

/// The layout of a meter in its slot, 28 bytes with its tag.
///
/// | word | of | bits |
/// |---|---|---|
/// | `head` | all but grants | 48 tag, 8 [`Limit::keep_above`], 8 period |
/// | | grant | 48 tag, 16 free |
/// | `time` | all | 1 window, 1 grant, 1 missed, 9 mark, 52 arrival or start, µs |
/// | `count` | GCRA | 32 amount of the limit, 32 fraction of the arrival |
/// | | window | 32 current, 32 previous |
/// | | grant | 32 left, 32 unreported |
/// | `held` | all but grants | 32 reserved |
/// | | grant | 16 life, 16 denial, ms |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub(crate) struct Slot {
    pub(crate) head: u64,
    pub(crate) time: u64,
    pub(crate) count: u64,
    pub(crate) held: u32,
}

const TAG_SHIFT: u32 = 16;
const TIME_MASK: u64 = (1 << 52) - 1;
const WINDOW_BIT: u64 = 1 << 63;
const GRANT_BIT: u64 = 1 << 62;
const MISSED_BIT: u64 = 1 << 61;
const FINGERPRINT_SHIFT: u32 = 52;
const AMOUNT_SHIFT: u32 = 32;
const FINGERPRINT_MASK: u64 = (1 << FINGERPRINT_BITS) - 1;

const _: () = assert!(
    FINGERPRINT_SHIFT + FINGERPRINT_BITS <= MISSED_BIT.trailing_zeros(),
    "a mark fits between time and flags"
);

impl Slot {
    /// The tag of a digest: never 0, which marks a free slot.
    #[inline]
    pub(crate) const fn tag_of(digest_half: u64) -> u64 {
        let tag = digest_half >> TAG_SHIFT;
        if tag == 0 { 1 } else { tag }
    }

    #[inline]
    pub(crate) const fn tag_in(head: u64) -> u64 {
        head >> TAG_SHIFT
    }

    #[inline]
    pub(crate) fn pack(tag: u64, limit: &Limit, meter: &Meter) -> Self {
        if let Level::Grant(allowance) = meter.level {
            return Self::pack_grant(tag, &allowance);
        }
        let head = tag << TAG_SHIFT | u64::from(limit.keep_above) << 8 | u64::from(limit.period_code);
        let (time, count) = match meter.level {
            Level::Gcra(arrival) => {
                (arrival.whole, u64::from(limit.amount()) << AMOUNT_SHIFT | u64::from(arrival.frac))
            }
            Level::Window(cells) => {
                let (start, current, previous) = cells.parts();
                (start | WINDOW_BIT, u64::from(current) << 32 | u64::from(previous))
            }
            Level::Grant(_) => (0, 0),
        };
        Self { head, time, count, held: meter.reserved }
    }

    #[inline]
    fn pack_grant(tag: u64, allowance: &GrantState) -> Self {
        let missed = if allowance.missed { MISSED_BIT } else { 0 };
        let fingerprint = u64::from(allowance.fingerprint) << FINGERPRINT_SHIFT;
        Self {
            head: tag << TAG_SHIFT | u64::from(allowance.free.0),
            time: allowance.since_us & TIME_MASK | fingerprint | GRANT_BIT | missed,
            count: u64::from(allowance.unspent) << 32 | u64::from(allowance.unreported),
            held: u32::from(allowance.life_ms) << 16 | u32::from(allowance.deny_ms),
        }
    }

    #[inline]
    fn unpack_grant(&self) -> GrantState {
        GrantState {
            since_us: self.time & TIME_MASK,
            unspent: (self.count >> 32) as u32,
            unreported: self.count as u32,
            life_ms: (self.held >> 16) as u16,
            deny_ms: self.held as u16,
            free: CompactUnits(self.head as u16),
            missed: self.time & MISSED_BIT != 0,
            fingerprint: (self.time >> FINGERPRINT_SHIFT & FINGERPRINT_MASK) as u16,
        }
    }

    #[inline]
    pub(crate) fn unpack(&self) -> Meter {
        if self.time & GRANT_BIT != 0 {
            return Meter { level: Level::Grant(self.unpack_grant()), reserved: 0 };
        }
        let time = self.time & TIME_MASK;
        let level = if self.time & WINDOW_BIT == 0 {
            Level::Gcra(Arrival { whole: time, frac: self.count as u32 })
        } else {
            Level::Window(Cells::from_parts(time, (self.count >> 32) as u32, self.count as u32))
        };
        Meter { level, reserved: self.held }
    }

    /// Whether a limit of another amount or period wrote this GCRA meter, and `limit` keeps units.
    /// The arrival time then stands for another number of units: see [`Slot::converted`].
    #[inline]
    pub(crate) const fn is_of_other_rate(&self, limit: &Limit) -> bool {
        limit.keeps_units()
            && !limit.is_blocked()
            && self.time & (WINDOW_BIT | GRANT_BIT) == 0
            && ((self.count >> AMOUNT_SHIFT) as u32 != limit.amount() || self.head as u8 != limit.period_code)
    }

    /// The meter in the terms of `limit`: the units that have not drained stay the same.
    ///
    /// The slot has the former amount exactly, and the former period in eight bits. Of the periods
    /// that these stand for, the shortest counts, so that the meter never loses use.
    pub(crate) fn converted(&self, limit: &Limit, now: Now) -> Meter {
        let meter = self.unpack();
        let Level::Gcra(before) = meter.level else { return meter };
        let code = self.head as u8;
        let period_us = if code == limit.period_code {
            limit.period_us()
        } else {
            minifloat::decode(code.saturating_sub(1)).saturating_add(1)
        };
        let rate = ((self.count >> AMOUNT_SHIFT) as u32, period_us);
        meter.with_level(Level::Gcra(gcra::converted(limit, before, rate, now.mono_us())))
    }

    /// How much would be lost by forgetting this meter at `now`.
    pub(crate) fn eviction_rank(&self, now: Now) -> EvictionRank {
        if Self::tag_in(self.head) == 0 {
            return EvictionRank::Free;
        }
        if self.time & GRANT_BIT != 0 {
            let allowance = self.unpack_grant();
            // A live grant, unreported usage or an active denial is never evicted.
            let is_over = allowance.is_over(now.mono_us());
            return if is_over {
                EvictionRank::Clean { since: allowance.since_us }
            } else {
                EvictionRank::Pinned
            };
        }
        let keep_above = minifloat::decode((self.head >> 8) as u8);
        let level = self.level(now);
        if self.held > 0 || level > keep_above {
            return EvictionRank::Pinned;
        }
        let since = self.last_use();
        if level == 0 {
            EvictionRank::Clean { since }
        } else {
            EvictionRank::InUse { share: level * 255 / keep_above, since }
        }
    }

    /// When the meter was last charged, roughly: good enough to let the longest idle go first.
    fn last_use(&self) -> u64 {
        let time = self.time & TIME_MASK;
        if self.time & WINDOW_BIT == 0 { time } else { Cells::began_us(time) }
    }

    /// Returns an upper bound of the level, in the unit of `keep_above`: µs to drain for GCRA, cost
    /// for a window.
    fn level(&self, now: Now) -> u64 {
        let time = self.time & TIME_MASK;
        if self.time & WINDOW_BIT == 0 {
            let partial = u64::from(self.count > 0);
            return (time + partial).saturating_sub(now.mono_us());
        }
        let period_us = minifloat::decode(self.head as u8);
        if Cells::are_over(time, now.mono_us(), period_us) {
            return 0;
        }
        (self.count >> 32) + (self.count & u64::from(u32::MAX))
    }
}

/// The loss from evicting a meter, in the order in which new keys take slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EvictionRank {
    /// The slot is empty.
    Free,
    /// A level of 0: eviction changes no decision. The longest idle goes first.
    Clean { since: u64 },
    /// A level above 0, but the key is not at its limit. The lowest level, relative to the limit,
    /// goes first.
    InUse { share: u64, since: u64 },
    /// At its limit, or with a reservation, a live grant, unreported usage or an active denial:
    /// never evicted.
    Pinned,
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::time::Duration;

    fn limits() -> impl Strategy<Value = Limit> {
        (1u64..5_000, 1u64..100_000_000, 1u64..5_000, any::<bool>()).prop_map(
            |(amount, period, burst, gcra)| {
                let period = Duration::from_micros(period);
                if gcra {
                    let limit = Limit::gcra(amount, period).expect("in range");
                    limit.with_burst(burst).unwrap_or(limit)
                } else {
                    Limit::sliding_window(amount, period).expect("in range")
                }
            },
        )
    }

    #[test]
    fn a_slot_holds_a_grant_unchanged() {
        let second = Duration::from_secs(1);
        let update = GrantUpdate {
            sent_us: TIME_MASK,
            grant: 7,
            life_us: 9_000,
            deny_us: 8_000,
            free: 3,
            counted: false,
        };
        for amount in 1..2_000 {
            let limit = Limit::gcra(amount, second).expect("in range").at_origin();
            let meter =
                Meter::empty(&limit).apply_update(&limit, &update).missed(Now::from_micros(TIME_MASK, 0));
            assert_eq!(Slot::pack(1, &limit, &meter).unpack(), meter);
        }
    }

    proptest! {
        #[test]
        fn a_slot_holds_a_meter_unchanged(
            limit in limits(), now in 0u64..1 << 50, cost in 0u64..9_000, held in 0u64..99) {
            let now = Now::from_micros(now, now);
            let (_, meter) = Meter::empty(&limit).charge(&limit, now, cost).reserve(&limit, now, held);
            let slot = Slot::pack(0xABCD, &limit, &meter);
            prop_assert_eq!(slot.unpack(), meter);
            prop_assert_eq!(Slot::tag_in(slot.head), 0xABCD);
        }

        #[test]
        fn key_at_its_limit_is_pinned(
            limit in limits(), start in 0u64..1 << 50, cost in 0u64..9_000, later in 0u64..200_000_000) {
            let spent = Meter::empty(&limit).charge(&limit, Now::from_micros(start, start), cost);
            let now = Now::from_micros(start + later, start + later);
            let (verdict, _) = spent.decide(&limit, now, 1);
            let eviction_rank = Slot::pack(1, &limit, &spent).eviction_rank(now);
            prop_assert!(verdict.is_allowed() || eviction_rank == EvictionRank::Pinned,
                "{:?} {:?}", verdict, eviction_rank);
        }

        #[test]
        fn a_clean_meter_loses_nothing_by_being_forgotten(
            limit in limits(), start in 0u64..1 << 50, cost in 0u64..9_000, later in 0u64..200_000_000) {
            let spent = Meter::empty(&limit).charge(&limit, Now::from_micros(start, start), cost);
            let now = Now::from_micros(start + later, start + later);
            if let EvictionRank::Clean { .. } = Slot::pack(1, &limit, &spent).eviction_rank(now) {
                prop_assert_eq!(spent.decide(&limit, now, 1).0, Meter::empty(&limit).decide(&limit, now, 1).0);
            }
        }
    }

    #[test]
    fn slots_are_evicted_in_order_of_lost_state() {
        let order = [
            EvictionRank::Free,
            EvictionRank::Clean { since: 5 },
            EvictionRank::Clean { since: 6 },
            EvictionRank::InUse { share: 1, since: 9 },
            EvictionRank::InUse { share: 2, since: 1 },
            EvictionRank::Pinned,
        ];
        assert!(order.is_sorted());
    }

    #[test]
    fn a_reservation_is_never_visible_as_use() {
        let limit = Limit::gcra(10, Duration::from_secs(1)).expect("in range");
        let now = Now::from_micros(0, 0);
        let (_, held) = Meter::empty(&limit).reserve(&limit, now, 7);
        assert_eq!((held.used(&limit, now), held.reserved()), (0, 7));
        let merged = held.merge(&limit, now, 9);
        assert_eq!(merged.rollback(7).used(&limit, now), 9);
        assert_eq!(merged.commit(&limit, now, 7, 2).used(&limit, now), 11);
        assert_eq!(held.reset(&limit).reserved(), 7);
    }
}
