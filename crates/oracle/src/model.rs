//! The oracle: every operation on one key, from the definitions.

use tidegate_core::{Limit, Now, Retry, Verdict};

use crate::exact::Exact;
use crate::level::Level;
use crate::search::smallest;

/// One key under one limit. Time must not step back from one operation to the next.
#[derive(Clone, Copy, Debug)]
pub struct Model<L> {
    amount: u32,
    burst: u32,
    level: L,
    reserved: Exact,
}

impl<L: Level> Model<L> {
    /// Returns a key without usage or reservations.
    pub fn empty(limit: &Limit) -> Self {
        Self { amount: limit.amount(), burst: limit.burst(), level: L::empty(limit), reserved: Exact::ZERO }
    }

    /// Decides a request of `cost`, and charges it if it may pass.
    pub fn decide(&mut self, now: Now, cost: u64) -> Verdict {
        self.advance(now);
        let verdict = self.judge(cost);
        if verdict.is_allowed() {
            self.level = self.level.plus(cost.into());
        }
        verdict
    }

    /// Decides a request of `cost`, and sets it aside if it may pass.
    pub fn reserve(&mut self, now: Now, cost: u64) -> Verdict {
        self.advance(now);
        let verdict = self.judge(cost);
        if verdict.is_allowed() {
            self.reserved = self.reserved + cost.into();
        }
        verdict
    }

    /// Gives `reserved` back and charges `actual`.
    pub fn commit(&mut self, now: Now, reserved: u64, actual: u64) {
        self.rollback(reserved);
        self.charge(now, actual);
    }

    /// Gives `reserved` back.
    pub fn rollback(&mut self, reserved: u64) {
        self.reserved = self.reserved.without(reserved.into());
    }

    /// Adds `cost` without a test.
    pub fn charge(&mut self, now: Now, cost: u64) {
        self.advance(now);
        self.level = self.level.plus(cost.into());
    }

    /// Refunds `cost`, down to zero.
    pub fn refund(&mut self, now: Now, cost: u64) {
        self.advance(now);
        self.level = self.level.minus(cost.into());
    }

    /// At least `used` is spent.
    pub fn merge(&mut self, now: Now, used: u64) {
        self.advance(now);
        self.level = self.level.at_least(used.into());
    }

    /// Clears the usage; reservations stay.
    pub fn reset(&mut self, limit: &Limit) {
        self.level = L::empty(limit);
    }

    /// Returns the spent units, rounded up.
    pub fn used(&mut self, now: Now) -> u64 {
        self.advance(now);
        // The largest level of a fast limit has more units than 64 bits can count.
        self.level.used().min(u64::MAX.into()).to_u64()
    }

    /// Returns the reserved units.
    pub fn reserved(&self) -> u32 {
        self.reserved.to_u32()
    }

    /// Whether committing all reservations now would stay below the cap.
    pub fn commits_in_full(&self) -> bool {
        self.level.plus(self.reserved) == self.level.with_reserved(self.reserved)
    }

    fn advance(&mut self, now: Now) {
        self.level = self.level.at(L::reading(now));
    }

    fn judge(&self, cost: u64) -> Verdict {
        if self.amount == 0 {
            return Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::Blocked };
        }
        if cost > u64::from(self.burst) {
            return self.denial(Retry::CostAboveBurst);
        }
        if !self.level.fits(self.reserved + cost.into()) {
            return self.denial(Retry::After(self.passes_after(cost.into())));
        }
        let after = self.level.plus(cost.into());
        Verdict::Allow {
            remaining: after.remaining(self.reserved).to_u32(),
            reset_after_us: empty_after(after),
        }
    }

    fn denial(&self, retry: Retry) -> Verdict {
        Verdict::Deny {
            remaining: self.level.remaining(self.reserved).to_u32(),
            reset_after_us: empty_after(self.level),
            retry,
        }
    }

    /// How long until `cost` fits, if all that is reserved were committed now.
    fn passes_after(&self, cost: Exact) -> u64 {
        let committed = self.level.with_reserved(self.reserved);
        smallest(|wait_us| committed.after(wait_us).fits(cost))
    }
}

/// Returns the time until `level` is empty, in microseconds.
fn empty_after<L: Level>(level: L) -> u64 {
    smallest(|wait_us| level.after(wait_us).is_empty())
}
