//! One bucket that sees everything: what was admitted against what the limit allows, in any interval at once.

use tidegate_core::Algorithm;
use tidegate_core::origin::Terms;

/// A bucket that is filled without a test. Its highest level is the most that was admitted beyond the rate in any interval.
#[derive(Clone, Debug)]
pub(crate) struct Bucket {
    terms: Terms,
    level: u128,
    at_us: u64,
    highest: u128,
    /// When it was at its highest.
    highest_us: u64,
    /// Units, all together.
    pub(crate) filled: u64,
}

impl Bucket {
    pub(crate) fn new(terms: Terms) -> Self {
        Self { terms, level: 0, at_us: 0, highest: 0, highest_us: 0, filled: 0 }
    }

    fn drain(&mut self, now_us: u64) {
        let ticks = u128::from(now_us.saturating_sub(self.at_us) / self.terms.tick_us());
        self.level = self.level.saturating_sub(ticks * u128::from(self.terms.amount()));
        self.at_us = self.at_us.max(now_us);
    }

    /// Fills in what was admitted.
    pub(crate) fn fill(&mut self, now_us: u64, units: u64) {
        self.drain(now_us);
        self.level += u128::from(units) * u128::from(self.terms.period());
        if self.level > self.highest {
            (self.highest, self.highest_us) = (self.level, now_us);
        }
        self.filled += units;
    }

    /// Fills in a request if there is room: what one bucket would have admitted.
    fn offer(&mut self, now_us: u64, units: u64) {
        self.drain(now_us);
        let cost = u128::from(units) * u128::from(self.terms.period());
        if self.level + cost <= u128::from(self.terms.full()) {
            self.fill(now_us, units);
        }
    }

    /// Units by which the highest level was above what the limit allows, rounded up.
    pub(crate) fn excess(&self) -> u64 {
        let above = self.highest.saturating_sub(u128::from(self.terms.full()));
        above.div_ceil(u128::from(self.terms.period())) as u64
    }
}

/// What may have been admitted in a window, by the limit's own way of counting.
#[derive(Clone, Debug)]
pub(crate) enum Judge {
    /// In any interval at most the burst and what drains.
    Bucket(Bucket),
    /// In any cell, with the part of the cell before that the window still covers, at most the amount.
    Cells(Cells),
}

/// The two cells of a sliding window that sees everything.
#[derive(Clone, Debug)]
pub(crate) struct Cells {
    terms: Terms,
    cell: u64,
    current: u64,
    previous: u64,
    /// What counted when something was last admitted.
    last_drops: u64,
    excess_drops: u64,
    /// When that was.
    excess_us: u64,
    filled: u64,
}

impl Cells {
    /// What counts at a time, in drops.
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
        let excess = weighted.saturating_sub(self.terms.full());
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
            Algorithm::SlidingWindow => Self::Cells(Cells {
                terms,
                cell: 0,
                current: 0,
                previous: 0,
                last_drops: 0,
                excess_drops: 0,
                excess_us: 0,
                filled: 0,
            }),
        }
    }

    /// Takes in what was admitted at a true time.
    pub(crate) fn fill(&mut self, now_us: u64, units: u64) {
        match self {
            Self::Bucket(bucket) => bucket.fill(now_us, units),
            Self::Cells(cells) => cells.fill(now_us, units),
        }
    }

    /// Takes in a request if there is room: what one that sees everything would have admitted.
    pub(crate) fn offer(&mut self, now_us: u64, units: u64) {
        match self {
            Self::Bucket(bucket) => bucket.offer(now_us, units),
            Self::Cells(cells) => cells.offer(now_us, units),
        }
    }

    /// Units by which more was admitted than the limit allows, at worst.
    pub(crate) fn excess(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.excess(),
            Self::Cells(cells) => cells.excess_drops.div_ceil(cells.terms.period()),
        }
    }

    /// What counts against the limit just now, in units, rounded up.
    pub(crate) fn level(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.level.div_ceil(u128::from(bucket.terms.period())) as u64,
            Self::Cells(cells) => cells.last_drops.div_ceil(cells.terms.period()),
        }
    }

    /// When most was admitted above the limit.
    pub(crate) fn worst_us(&self) -> u64 {
        match self {
            Self::Bucket(bucket) => bucket.highest_us,
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
