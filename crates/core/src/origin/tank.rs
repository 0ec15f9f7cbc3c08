//! Usage that still counts, under either algorithm.

use super::terms::{LEVEL_MAX, SHARES, Terms};
use crate::limit::Algorithm;

/// Usage that still counts. The meter keeps its time: it has the clock and the number of the cell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tank {
    /// GCRA: undrained usage, in drops.
    pub(super) level: u64,
    /// Sliding window: units charged in the present cell and in the one before.
    pub(super) current: u64,
    pub(super) previous: u64,
}

/// The step from the last cell of a meter to the present one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CellStep {
    Next,
    Later,
    Back,
}

impl Tank {
    /// Charges units of the present cell, of the one before it, or of another one, which is over.
    pub(super) fn charge(&mut self, terms: &Terms, units: u64, cells_ago: u64) {
        let most = terms.units_max();
        match (terms.algorithm(), cells_ago) {
            (Algorithm::Gcra, _) => self.level = (self.level + terms.drops(units)).min(LEVEL_MAX),
            (Algorithm::SlidingWindow, 0) => self.current = (self.current + units).min(most),
            (Algorithm::SlidingWindow, 1) => self.previous = (self.previous + units).min(most),
            (Algorithm::SlidingWindow, _) => {}
        }
    }

    /// Gives back drops, or units of a cell, as far as they are left.
    pub(super) fn give_back(&mut self, drops: u64, units: u64, cells_ago: u64) {
        self.level = self.level.saturating_sub(drops);
        match cells_ago {
            0 => self.current = self.current.saturating_sub(units),
            1 => self.previous = self.previous.saturating_sub(units),
            _ => {}
        }
    }

    pub(super) fn drain(&mut self, ticks: u64, amount: u64) {
        if amount > 0 {
            let drained = ticks.min(self.level.div_ceil(amount)) * amount;
            self.level = self.level.saturating_sub(drained);
        }
    }

    pub(super) fn turn(&mut self, turn: CellStep) {
        match turn {
            CellStep::Next => (self.previous, self.current) = (self.current, 0),
            CellStep::Later => (self.previous, self.current) = (0, 0),
            CellStep::Back => {}
        }
    }

    /// Converts the level to drops of another size, rounded up: rounding forgives no usage.
    pub(super) fn resize(&mut self, before: &Terms, terms: &Terms) {
        self.level = terms.drops(self.level.div_ceil(before.period()));
    }

    /// Returns all usage in units, rounded up.
    pub(super) fn units(&self, terms: &Terms) -> u64 {
        match terms.algorithm() {
            Algorithm::Gcra => self.level.div_ceil(terms.period()),
            Algorithm::SlidingWindow => self.current + self.previous,
        }
    }

    /// Returns the part that counts against a regional share, rounded up.
    pub(super) fn shared(&self, share: u64) -> Self {
        let of = |whole: u64| whole / SHARES * share + (whole % SHARES * share).div_ceil(SHARES);
        Self { level: of(self.level), current: of(self.current), previous: of(self.previous) }
    }

    /// No less of it than the other has.
    pub(super) fn at_least(&self, other: &Self) -> Self {
        Self {
            level: self.level.max(other.level),
            current: self.current.max(other.current),
            previous: self.previous.max(other.previous),
        }
    }

    /// Both together, as far as a meter holds them.
    pub(super) fn with(&self, terms: &Terms, other: &Self) -> Self {
        let most = terms.units_max();
        Self {
            level: (self.level + other.level).min(LEVEL_MAX),
            current: (self.current + other.current).min(most),
            previous: (self.previous + other.previous).min(most),
        }
    }
}
