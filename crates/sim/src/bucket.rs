//! The reference that judges admissions: one bucket that sees all of them, compared with the limit
//! in every interval at once.

use tidegate_core::origin::{LAPSE_MARGIN_US, LIFE_US_MAX, Terms};
use tidegate_core::{Algorithm, longest_us};

use crate::rule_editions::is_alike;

/// Longest time from the making of a grant to its last spend, µs, with clock rates that differ by a
/// sixteenth.
const HELD_US_MAX: u64 = longest_us(LIFE_US_MAX) + LAPSE_MARGIN_US;

/// A limit in force at the origin: its start, and the units that nodes hold in grants at that
/// moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Era {
    pub(crate) from_us: u64,
    pub(crate) terms: Terms,
    pub(crate) held: u64,
}

/// Usage that may exceed a changed limit for a while, in drops: the level at the change, and the
/// outstanding grants.
#[derive(Clone, Copy, Debug, Default)]
struct CarriedUsage {
    level: u128,
    held: u128,
    until_us: u64,
    /// Whether the origin counts outstanding grants at less than their amount. Cells
    /// that are counted again do not know to which old cell a grant belongs.
    is_recounted: bool,
}

impl CarriedUsage {
    fn new(level: u128, era: &Era, is_recounted: bool) -> Self {
        let held = u128::from(era.held) * u128::from(era.terms.period());
        Self { level, held, until_us: era.from_us + HELD_US_MAX, is_recounted }
    }

    /// Returns the most that may count at a time, for a limit that allows `full`. Nodes may spend
    /// earlier grants until these end. Grants made after the change are within the new limit.
    fn ceiling(&self, full: u64, now_us: u64) -> u128 {
        let full = u128::from(full);
        match self.is_recounted {
            _ if now_us > self.until_us => full,
            true => full.max(self.level) + self.held,
            false => full.max(self.level + self.held),
        }
    }
}

/// A bucket that is filled without a test. Its highest level is the most that was admitted beyond
/// the rate in any interval.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    terms: Terms,
    carried: CarriedUsage,
    level: u128,
    at_us: u64,
    /// Largest excess above the ceiling, in drops.
    excess: u128,
    /// When that was.
    excess_us: u64,
    /// Units, all together.
    filled: u64,
}

impl Bucket {
    fn new(terms: Terms) -> Self {
        let carried = CarriedUsage::default();
        Self { terms, carried, level: 0, at_us: 0, excess: 0, excess_us: 0, filled: 0 }
    }

    /// Converts the bucket to another limit, and keeps its level.
    fn turned(mut self, era: &Era) -> Self {
        self.drain(era.from_us);
        let (before, after) = (u128::from(self.terms.period()), u128::from(era.terms.period()));
        // In drops of another size.
        let level = self.level * after / before;
        let carried = CarriedUsage::new(level, era, false);
        Self { carried, level, at_us: era.from_us, ..Self::new(era.terms) }
    }

    fn drain(&mut self, now_us: u64) {
        let ticks = u128::from(now_us.saturating_sub(self.at_us) / self.terms.tick_us());
        self.level = self.level.saturating_sub(ticks * u128::from(self.terms.amount()));
        self.at_us = self.at_us.max(now_us);
    }

    /// Adds admitted units.
    fn fill(&mut self, now_us: u64, units: u64) {
        self.drain(now_us);
        self.level += u128::from(units) * u128::from(self.terms.period());
        let excess = self.level.saturating_sub(self.carried.ceiling(self.terms.full(), now_us));
        if excess > self.excess {
            (self.excess, self.excess_us) = (excess, now_us);
        }
        self.filled += units;
    }

    /// Adds a request if it fits, as one bucket would decide.
    fn offer(&mut self, now_us: u64, units: u64) {
        self.drain(now_us);
        let cost = u128::from(units) * u128::from(self.terms.period());
        if self.level + cost <= u128::from(self.terms.full()) {
            self.fill(now_us, units);
        }
    }

    /// Units above the limit at worst, rounded up.
    fn excess(&self) -> u64 {
        self.excess.div_ceil(u128::from(self.terms.period())) as u64
    }
}

/// The reference for the admissions of a limit, by the limit's own algorithm.
#[derive(Clone, Debug)]
pub(crate) enum Judge {
    /// In any interval: at most the burst and the units that drain.
    Bucket(Bucket),
    /// In any cell, with the part of the cell before that the window still covers, at most the
    /// amount.
    Cells(Cells),
}

/// Admissions under a limit that changes. Each is judged by the limit in force, together with the
/// earlier admissions.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct JudgedUsage {
    excess: u64,
    excess_us: u64,
    filled: u64,
}

impl JudgedUsage {
    /// Judges admissions in the order in which they were, under limits that held from these times
    /// on, the first from the beginning.
    pub(crate) fn new(first: Terms, later: &[Era], admissions: &[(u64, u64)]) -> Self {
        let (mut judge, mut judged) = (Judge::new(first), Self::default());
        let mut later = later.iter().peekable();
        for (at_us, cost) in admissions {
            while let Some(era) = later.next_if(|era| era.from_us <= *at_us) {
                judged.take(&judge);
                judge = judge.turned(era);
            }
            judge.fill(*at_us, *cost);
        }
        judged.take(&judge);
        judged
    }

    fn take(&mut self, judge: &Judge) {
        self.filled += judge.filled();
        if judge.excess() > self.excess {
            (self.excess, self.excess_us) = (judge.excess(), judge.worst_us());
        }
    }

    /// Units by which more was admitted than the limit allows, at worst, and when.
    pub(crate) fn worst(&self) -> (u64, u64) {
        (self.excess, self.excess_us)
    }

    /// Units, all together.
    pub(crate) fn filled(&self) -> u64 {
        self.filled
    }
}

/// The two cells of a sliding window that sees all admissions.
#[derive(Clone, Debug)]
pub(crate) struct Cells {
    terms: Terms,
    carried: CarriedUsage,
    cell: u64,
    current: u64,
    previous: u64,
    /// Weighted count after the last admission, in drops.
    last_drops: u64,
    excess_drops: u64,
    /// When that was.
    excess_us: u64,
    filled: u64,
}

impl Cells {
    fn new(terms: Terms) -> Self {
        Self {
            terms,
            carried: CarriedUsage::default(),
            cell: 0,
            current: 0,
            previous: 0,
            last_drops: 0,
            excess_drops: 0,
            excess_us: 0,
            filled: 0,
        }
    }

    /// Converts the cells to another limit with the same cell length, and keeps their counts.
    fn turned(mut self, era: &Era) -> Self {
        let carried = CarriedUsage::new(self.weighted(era.from_us).into(), era, false);
        let Self { cell, current, previous, .. } = self;
        Self { carried, cell, current, previous, ..Self::new(era.terms) }
    }

    /// Returns the weighted count at a time, in drops.
    fn weighted(&mut self, now_us: u64) -> u64 {
        let tick = self.terms.tick(now_us);
        let (cell, elapsed) = (tick / self.terms.period(), tick % self.terms.period());
        match cell.saturating_sub(self.cell) {
            0 => {}
            1 => (self.previous, self.current) = (self.current, 0),
            _ => (self.previous, self.current) = (0, 0),
        }
        self.cell = self.cell.max(cell);
        self.current * self.terms.period() + self.previous * (self.terms.period() - elapsed)
    }

    fn fill(&mut self, now_us: u64, units: u64) {
        let weighted = self.weighted(now_us) + units * self.terms.period();
        self.current += units;
        self.filled += units;
        self.last_drops = weighted;
        let ceiling = self.carried.ceiling(self.terms.full(), now_us);
        let excess = u128::from(weighted).saturating_sub(ceiling) as u64;
        if excess > self.excess_drops {
            (self.excess_drops, self.excess_us) = (excess, now_us);
        }
    }

    fn offer(&mut self, now_us: u64, units: u64) {
        if self.weighted(now_us) + units * self.terms.period() <= self.terms.full() {
            self.fill(now_us, units);
        }
    }
}

impl Judge {
    pub(crate) fn new(terms: Terms) -> Self {
        match terms.algorithm() {
            Algorithm::Gcra => Self::Bucket(Bucket::new(terms)),
            Algorithm::SlidingWindow => Self::Cells(Cells::new(terms)),
        }
    }

    /// Continues with another limit. Earlier admissions that have not drained under the old limit
    /// still count. If the algorithm or the cell length changes, only later admissions count.
    fn turned(self, era: &Era) -> Self {
        let terms = &era.terms;
        match self {
            Self::Bucket(bucket) if terms.algorithm() == Algorithm::Gcra => Self::Bucket(bucket.turned(era)),
            Self::Cells(cells) if is_alike(&cells.terms, terms) => Self::Cells(cells.turned(era)),
            before => before.anew(era),
        }
    }

    fn anew(&self, era: &Era) -> Self {
        let is_recounted =
            self.algorithm() != era.terms.algorithm() || era.terms.algorithm() != Algorithm::Gcra;
        let carried = CarriedUsage::new(0, era, is_recounted);
        match Self::new(era.terms) {
            Self::Bucket(bucket) => Self::Bucket(Bucket { carried, at_us: era.from_us, ..bucket }),
            Self::Cells(cells) => Self::Cells(Cells { carried, ..cells }),
        }
    }

    fn algorithm(&self) -> Algorithm {
        match self {
            Self::Bucket(_) => Algorithm::Gcra,
            Self::Cells(_) => Algorithm::SlidingWindow,
        }
    }

    /// Adds units that were admitted at a true time.
    pub(crate) fn fill(&mut self, now_us: u64, units: u64) {
        match self {
            Self::Bucket(bucket) => bucket.fill(now_us, units),
            Self::Cells(cells) => cells.fill(now_us, units),
        }
    }

    /// Adds a request if it fits, as a limiter that sees all requests would decide.
    pub(crate) fn offer(&mut self, now_us: u64, units: u64) {
        match self {
            Self::Bucket(bucket) => bucket.offer(now_us, units),
            Self::Cells(cells) => cells.offer(now_us, units),
        }
    }

    /// Whether a request fits and more than 3 % of the limit is free.
    pub(crate) fn has_room(&mut self, now_us: u64, units: u64) -> bool {
        let (terms, level) = match self {
            Self::Bucket(bucket) => {
                bucket.drain(now_us);
                (&bucket.terms, bucket.level)
            }
            Self::Cells(cells) => {
                let level = cells.weighted(now_us);
                (&cells.terms, level.into())
            }
        };
        let full = u128::from(terms.burst()) * u128::from(terms.period());
        let cost = u128::from(units) * u128::from(terms.period());
        level + cost <= full && level * 100 <= full * 97
    }

    /// Units by which more was admitted than the limit allows, at worst.
    pub(crate) fn excess(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.excess(),
            Self::Cells(cells) => cells.excess_drops.div_ceil(cells.terms.period()),
        }
    }

    /// Units that count against the limit at the last admission, rounded up.
    pub(crate) fn level(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.level.div_ceil(u128::from(bucket.terms.period())) as u64,
            Self::Cells(cells) => cells.last_drops.div_ceil(cells.terms.period()),
        }
    }

    /// When most was admitted above the limit.
    pub(crate) fn worst_us(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.excess_us,
            Self::Cells(cells) => cells.excess_us,
        }
    }

    /// Units, all together.
    pub(crate) fn filled(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.filled,
            Self::Cells(cells) => cells.filled,
        }
    }
}
