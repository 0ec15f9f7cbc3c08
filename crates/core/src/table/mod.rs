//! The table of meters: fixed memory, one line touched per check in the common case, every change
//! atomic.
//!
//! A key's digest selects its home line. Its meter is there or in one of the few lines that follow.
//! Memory is allocated at the start and never grows. A new key without a free slot in its window
//! replaces the meter that matters least. If all of them are pinned, the overflow meter of the
//! limit decides the new key. It is never admitted without a decision.

mod line;
mod memory;
mod place;
mod request;
mod share;

pub use line::{BYTES_PER_LINE, SLOTS_PER_LINE};
pub use request::{LIMITS_PER_REQUEST_MAX, RequestVerdict, TooManyLimits};
pub use share::{ShareId, ShareStats, Shares, TableError};

use crate::digest::{Digest, KeySpace};
use crate::grant::{GrantUpdate, UsageReport};
use crate::limit::Limit;
use crate::meter::{Meter, Slot};
use crate::sync::Ordering;
use crate::time::Now;
use crate::verdict::{Retry, Verdict};
use line::{Head, Line};
use memory::{Memory, prefetch};
use place::InsertResult;
use share::{Counts, Share, count, divide};

/// Lines after the home line that are prefetched for a key that is not at home. Higher: fewer keys
/// wait for memory twice; more lines are fetched in vain.
const LINES_FURTHER: usize = 2;

/// One question: may `cost` pass on this key under this limit?
#[derive(Clone, Copy, Debug)]
pub struct Check<'a> {
    /// The limit.
    pub limit: &'a Limit,
    /// The key space: the keys of one limit of one tenant.
    pub space: &'a KeySpace,
    /// The key, from [`KeySpace::digest`].
    pub digest: Digest,
    /// Cost of the request, in units. 0 reads the meter and changes nothing.
    pub cost: u64,
}

/// The verdict on one check, and the meter that gave it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckOutcome {
    /// The verdict.
    pub verdict: Verdict,
    /// Which meter decided.
    pub source: DecidingMeter,
}

/// Which meter decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidingMeter {
    /// The key's own.
    Own,
    /// The overflow meter that the limit's keys share while their tenant has no room for more.
    Overflow,
    /// None: even the overflow meters had no room, and the request was refused.
    Refused,
}

/// The change of a meter by a decision.
enum Change {
    Keep,
    Write(Meter),
    Forget,
}

/// The treatment of an allowed cost.
#[derive(Clone, Copy)]
enum Intent {
    Charge,
    Reserve,
}

impl Intent {
    /// Decides on a meter. A denial and a cost of 0 change nothing, so they write nothing. Only the
    /// first denial after the origin's last reply is written, as a mark that there is demand to ask
    /// for again.
    #[inline(always)]
    fn apply(self, now: Now, check: &Check<'_>, before: Meter) -> (Verdict, Change) {
        let (verdict, after) = self.decide(now, check, before);
        let writes = verdict.is_allowed() && check.cost > 0;
        let marks = !writes && check.limit.is_at_origin() && after != before;
        (verdict, if writes || marks { Change::Write(after) } else { Change::Keep })
    }

    #[inline(always)]
    fn decide(self, now: Now, check: &Check<'_>, before: Meter) -> (Verdict, Meter) {
        match self {
            Self::Charge => before.decide(check.limit, now, check.cost),
            Self::Reserve => before.reserve(check.limit, now, check.cost),
        }
    }
}

/// A fixed number of meters in a fixed amount of memory, shared by all threads.
#[derive(Debug)]
pub struct Table {
    lines: Memory,
    shares: Box<[Share]>,
}

/// The home line of a check's meter. It is computed once, to prefetch the meter and then to decide
/// on it. It is valid only with the check and the table that it was computed from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Home(usize);

/// Where a meter is looked for: its home line, and the tag it carries.
#[derive(Clone, Copy, Debug)]
struct Spot {
    share: ShareId,
    home: usize,
    tag: u64,
}

/// A meter as it was found, and the version of its line at that moment.
#[derive(Clone, Copy, Debug)]
struct MeterLocation<'t> {
    line: usize,
    here: &'t Line,
    slot: usize,
    head: Head,
    words: Slot,
}

impl Table {
    /// A table of `bytes` of memory, divided into `shares`.
    pub fn new(bytes: usize, shares: &Shares) -> Result<Self, TableError> {
        let shares = divide(bytes, shares)?;
        let lines = bytes / BYTES_PER_LINE;
        let lines = Memory::new(lines).map_err(|error| TableError::Memory { bytes, error })?;
        Ok(Self { lines, shares })
    }

    /// Decides one question.
    #[inline(always)]
    pub fn check(&self, now: Now, check: &Check<'_>) -> CheckOutcome {
        self.check_at(self.home(check), now, check)
    }

    /// Decides one check with a known home line.
    #[inline(always)]
    pub fn check_at(&self, home: Home, now: Now, check: &Check<'_>) -> CheckOutcome {
        self.decide(home, now, check, Intent::Charge)
    }

    /// Reserves `cost` if it fits, to be committed or rolled back later with the outcome's
    /// `source`. Until then it counts against the limit, is not visible as usage, and pins its
    /// meter.
    pub fn reserve(&self, now: Now, check: &Check<'_>) -> CheckOutcome {
        self.decide(self.home(check), now, check, Intent::Reserve)
    }

    /// Turns the reservation of `check.cost` into a charge of `actual`.
    pub fn commit(&self, now: Now, check: &Check<'_>, source: DecidingMeter, actual: u64) {
        self.adjust(now, check, source, |meter| meter.commit(check.limit, now, check.cost, actual));
    }

    /// Gives the reservation of `check.cost` back.
    pub fn rollback(&self, now: Now, check: &Check<'_>, source: DecidingMeter) {
        self.adjust(now, check, source, |meter| meter.rollback(check.cost));
    }

    /// Adds `check.cost` without a test: it was spent already.
    pub fn charge(&self, now: Now, check: &Check<'_>) {
        self.adjust(now, check, DecidingMeter::Own, |meter| meter.charge(check.limit, now, check.cost));
    }

    /// Gives `check.cost` back after it was charged.
    pub fn refund(&self, now: Now, check: &Check<'_>) {
        self.adjust(now, check, DecidingMeter::Own, |meter| meter.refund(check.limit, now, check.cost));
    }

    /// Merges usage known elsewhere: at least `check.cost` is used on this key.
    pub fn merge(&self, now: Now, check: &Check<'_>) {
        self.adjust(now, check, DecidingMeter::Own, |meter| meter.merge(check.limit, now, check.cost));
    }

    /// Takes the unreported usage of a grant, and keeps at most `keep` of the unspent units to
    /// spend meanwhile.
    pub fn take_report(&self, now: Now, check: &Check<'_>, keep: u64) -> UsageReport {
        let step = |meter: Meter| {
            let (taken, after) = meter.take_report(check.limit, now, keep);
            (taken, if after == meter { Change::Keep } else { Change::Write(after) })
        };
        self.change(now, self.own_spot(check), check.limit, step).unwrap_or_default()
    }

    /// Returns the report that [`Table::take_report`] would take, without taking it.
    pub fn peek_report(&self, now: Now, check: &Check<'_>) -> UsageReport {
        let look = |meter: Meter| (meter.take_report(check.limit, now, u64::MAX).0, Change::Keep);
        self.change(now, self.own_spot(check), check.limit, look).unwrap_or_default()
    }

    /// Applies an origin's reply on a key. Returns false if there is no room for its meter: then
    /// the node keeps no grant.
    pub fn apply_grant(&self, now: Now, check: &Check<'_>, word: &GrantUpdate) -> bool {
        // A reply without a grant or a denial creates no meter.
        let says_nothing = word.grant == 0 && word.deny_us == 0;
        let step = |meter: Meter| {
            let is_made = !says_nothing || meter != Meter::empty(check.limit);
            ((), if is_made { Change::Write(meter.apply_update(check.limit, word)) } else { Change::Keep })
        };
        self.change(now, self.own_spot(check), check.limit, step).is_some()
    }

    /// Refunds `check.cost` from the unreported usage of a grant. Returns the rest, which the
    /// origin has to refund.
    pub fn give_back(&self, now: Now, check: &Check<'_>) -> u64 {
        let step = |meter: Meter| {
            let (rest, after) = meter.give_back(check.cost);
            (rest, if after == meter { Change::Keep } else { Change::Write(after) })
        };
        self.change(now, self.own_spot(check), check.limit, step).unwrap_or(check.cost)
    }

    /// Drops the usage of a key. Reservations stay.
    pub fn reset(&self, now: Now, check: &Check<'_>) {
        let forget = |meter: Meter| match meter.reserved() {
            0 => ((), Change::Forget),
            _ => ((), Change::Write(meter.reset(check.limit))),
        };
        self.change(now, self.own_spot(check), check.limit, forget);
    }

    /// Returns the usage of a key in whole units, as it may be reported to others.
    pub fn used(&self, now: Now, check: &Check<'_>) -> u64 {
        let look = |meter: Meter| (meter.used(check.limit, now), Change::Keep);
        self.change(now, self.own_spot(check), check.limit, look).unwrap_or(0)
    }

    /// How full a share is.
    ///
    /// # Panics
    /// If the share is one of another table's.
    pub fn stats(&self, share: ShareId) -> ShareStats {
        self.share(share).stats()
    }

    /// The memory of the table, whether in use or not.
    pub fn bytes(&self) -> usize {
        self.lines.len() * BYTES_PER_LINE
    }

    /// The line where the meter of a question is at home.
    ///
    /// # Panics
    /// If the question's share is one of another table's.
    #[inline]
    pub fn home(&self, check: &Check<'_>) -> Home {
        Home(self.share(check.space.share()).keys.home(check.digest.place))
    }

    /// Prefetches a home line while the caller does other work.
    #[inline]
    pub fn prefetch(&self, home: Home) {
        prefetch(self.line(home.0));
    }

    /// Prefetches the home line and the next one, which has most of the keys that are not at home.
    /// For a single check, which would wait for memory twice otherwise. In a batch it would fetch
    /// too many lines in vain.
    #[inline]
    pub fn prefetch_wide(&self, home: Home) {
        prefetch(self.line(home.0));
        prefetch(self.line(home.0 + 1));
    }

    /// For a home line that has arrived: if the key does not lie there, brings the lines near where
    /// it may be. One key in seven lies away from home, and without this it waits for memory twice.
    #[inline]
    pub fn prefetch_further(&self, home: Home, check: &Check<'_>) {
        self.fetch_further(Spot::own(home, check));
    }

    #[inline]
    fn fetch_further(&self, spot: Spot) {
        let home = self.line(spot.home);
        if home.find(spot.tag).is_none() {
            let further = spot.home + 1..=spot.home + home.reach_now().min(LINES_FURTHER);
            further.for_each(|line| prefetch(self.line(line)));
        }
    }

    /// Decides on the key's own meter, or on the overflow meter if there is no room for one.
    ///
    /// Most meters are in their home line, and no other thread changes them at the same time. The
    /// code for that case is short and straight, so the processor can begin the next check while
    /// this one waits for memory.
    #[inline(always)]
    fn decide(&self, home: Home, now: Now, check: &Check<'_>, intent: Intent) -> CheckOutcome {
        let spot = Spot::own(home, check);
        let found = self.find_at_home(spot);
        let decided = found.and_then(|found| self.decide_on(&found, spot, now, check, intent));
        decided.unwrap_or_else(|| self.decide_further(spot, now, check, intent))
    }

    /// Decides on a meter away from home: one in seven.
    #[inline(never)]
    fn decide_further(&self, spot: Spot, now: Now, check: &Check<'_>, intent: Intent) -> CheckOutcome {
        let found = self.find_further(spot, self.line(spot.home).head().reach());
        let decided = found.and_then(|found| self.decide_on(&found, spot, now, check, intent));
        decided.unwrap_or_else(|| self.decide_elsewhere(spot, now, check, intent))
    }

    /// Decides on a meter as it was found. Returns none if its line has changed since, or if the
    /// meter must be converted first: [`Table::change`] does both. This path only compares, and
    /// passes nothing to a call, so that a meter stays in registers.
    #[inline(always)]
    fn decide_on(
        &self,
        found: &MeterLocation<'_>,
        spot: Spot,
        now: Now,
        check: &Check<'_>,
        intent: Intent,
    ) -> Option<CheckOutcome> {
        if found.words.is_of_other_rate(check.limit) {
            return None;
        }
        let (verdict, change) = intent.apply(now, check, found.words.unpack());
        let settled = self.settle(spot, check.limit, found, &change);
        settled.then_some(CheckOutcome { verdict, source: DecidingMeter::Own })
    }

    /// Every other case: the meter has to be made, or was changed meanwhile.
    #[cold]
    fn decide_elsewhere(&self, spot: Spot, now: Now, check: &Check<'_>, intent: Intent) -> CheckOutcome {
        let step = |before: Meter| intent.apply(now, check, before);
        if let Some(verdict) = self.change(now, spot, check.limit, step) {
            return CheckOutcome { verdict, source: DecidingMeter::Own };
        }
        let spot = self.spill_spot(check);
        count(&self.counts(spot).spilled);
        if let Some(verdict) = self.change(now, spot, check.limit, step) {
            return CheckOutcome { verdict, source: DecidingMeter::Overflow };
        }
        count(&self.counts(spot).refused);
        refusal(check.limit)
    }

    /// Changes a meter without a verdict.
    fn adjust(&self, now: Now, check: &Check<'_>, source: DecidingMeter, rule: impl Fn(Meter) -> Meter) {
        let step = |before: Meter| {
            let after = rule(before);
            // A meter without usage decides like no meter, so none is created for it.
            let is_nothing = before == Meter::empty(check.limit) && after.is_idle(check.limit, now);
            ((), if after == before || is_nothing { Change::Keep } else { Change::Write(after) })
        };
        let done = match source {
            DecidingMeter::Own => self.change(now, self.own_spot(check), check.limit, step),
            DecidingMeter::Overflow => None,
            DecidingMeter::Refused => Some(()),
        };
        if done.is_none() {
            // If the overflow meter has no room either, its next decision is a refusal anyway.
            self.change(now, self.spill_spot(check), check.limit, step);
        }
    }

    /// Changes a meter: decides on a version, then replaces exactly that version. Returns none if
    /// there is no room for a new meter.
    fn change<T>(
        &self,
        now: Now,
        spot: Spot,
        limit: &Limit,
        step: impl Fn(Meter) -> (T, Change),
    ) -> Option<T> {
        loop {
            let Some(found) = self.find(spot) else {
                let (out, change) = step(Meter::empty(limit));
                let Change::Write(meter) = change else { return Some(out) };
                match self.place(now, spot, Slot::pack(spot.tag, limit, &meter), |_| false) {
                    InsertResult::Here => return Some(out),
                    InsertResult::NoRoom => return None,
                    InsertResult::Already => continue,
                }
            };
            if found.words.is_of_other_rate(limit) {
                self.convert(found, spot, limit, now);
                continue;
            }
            let (out, change) = step(found.words.unpack());
            if self.settle(spot, limit, &found, &change) {
                return Some(out);
            }
        }
    }

    /// Rewrites a meter in the terms of the limit that its rule has now, unless its line has moved
    /// on.
    #[cold]
    fn convert(&self, found: MeterLocation<'_>, spot: Spot, limit: &Limit, now: Now) {
        self.settle(spot, limit, &found, &Change::Write(found.words.converted(limit, now)));
    }

    /// Makes a change to a meter that was found, unless its line has moved on.
    #[inline(always)]
    fn settle(&self, spot: Spot, limit: &Limit, found: &MeterLocation<'_>, change: &Change) -> bool {
        let words = match change {
            Change::Keep => return found.here.is_still(found.head),
            Change::Write(meter) => Slot::pack(spot.tag, limit, meter),
            Change::Forget => Slot::default(),
        };
        let Some(mut locked) = found.here.lock_at(found.head) else { return false };
        locked.write(found.slot, words);
        if matches!(change, Change::Forget) {
            self.counts(spot).live.fetch_sub(1, Ordering::Relaxed);
        }
        true
    }

    /// The meter of a spot. Its words may be torn until the line proves still.
    #[inline]
    fn find(&self, spot: Spot) -> Option<MeterLocation<'_>> {
        self.find_at_home(spot).or_else(|| self.find_further(spot, self.line(spot.home).head().reach()))
    }

    #[inline(always)]
    fn find_at_home(&self, spot: Spot) -> Option<MeterLocation<'_>> {
        self.find_in(spot.home, spot.tag)
    }

    #[inline]
    fn find_further(&self, spot: Spot, reach: usize) -> Option<MeterLocation<'_>> {
        (spot.home + 1..=spot.home + reach).find_map(|line| self.find_in(line, spot.tag))
    }

    #[inline(always)]
    fn find_in(&self, line: usize, tag: u64) -> Option<MeterLocation<'_>> {
        let here = self.line(line);
        let head = here.head();
        here.find(tag).map(|slot| MeterLocation { line, here, slot, head, words: here.slot(slot) })
    }

    #[inline]
    fn own_spot(&self, check: &Check<'_>) -> Spot {
        Spot::own(self.home(check), check)
    }

    fn spill_spot(&self, check: &Check<'_>) -> Spot {
        let (share, digest) = (check.space.share(), check.space.spill());
        Spot { share, home: self.share(share).spill.home(digest.place), tag: Slot::tag_of(digest.tag) }
    }

    #[inline]
    fn share(&self, id: ShareId) -> &Share {
        &self.shares[id.0 as usize]
    }

    fn counts(&self, spot: Spot) -> &Counts {
        &self.share(spot.share).counts
    }

    #[inline]
    fn line(&self, at: usize) -> &Line {
        &self.lines[at]
    }
}

impl Spot {
    #[inline]
    fn own(home: Home, check: &Check<'_>) -> Self {
        Self { share: check.space.share(), home: home.0, tag: Slot::tag_of(check.digest.tag) }
    }
}

/// Returns the outcome for a key without room in any meter. Room appears as meters drain, and most
/// drain within a period.
fn refusal(limit: &Limit) -> CheckOutcome {
    let retry = Retry::After(limit.period_us());
    CheckOutcome {
        verdict: Verdict::Deny { remaining: 0, reset_after_us: limit.period_us(), retry },
        source: DecidingMeter::Refused,
    }
}
