//! Shares: each tenant's own part of the table, where no other tenant's keys can ever be.

use std::fmt;

use super::line::BYTES_PER_LINE;
use super::place::LINES_PER_WINDOW;
use crate::sync::{AtomicU64, Ordering};

/// Lines of a share set aside for meters that decide for many keys at once. Each limit of the
/// tenant that runs out of room takes one slot here.
#[cfg(not(loom))]
const SPILL_LINES: usize = 32;
/// Loom explores every schedule, which few lines keep finite.
#[cfg(loom)]
const SPILL_LINES: usize = LINES_PER_WINDOW;

/// The smallest share: a window of lines to place keys in, and the lines set aside.
const SHARE_LINES_MIN: usize = SPILL_LINES + LINES_PER_WINDOW;

/// Which share of the table a key belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShareId(pub(crate) u32);

/// How the table is divided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    weights: Vec<u32>,
}

impl Shares {
    /// The first share: the only one of an undivided table.
    pub const FIRST: ShareId = ShareId(0);

    /// One share: the whole table for one tenant.
    pub fn single() -> Self {
        Self { weights: vec![1] }
    }

    /// The same division with one more share, `weight` parts of the sum of all. A weight of 0
    /// counts as 1.
    pub fn add(&mut self, weight: u32) -> ShareId {
        self.weights.push(weight.max(1));
        ShareId((self.weights.len() - 1) as u32)
    }
}

/// Why a table cannot be made.
#[derive(Debug)]
pub enum TableError {
    /// The memory is too small for the requested shares.
    TooSmall {
        /// Bytes given.
        bytes: usize,
        /// The least that would do.
        bytes_min: usize,
    },
    /// The system did not give the memory.
    Memory {
        /// Bytes requested.
        bytes: usize,
        /// Error of the system.
        error: std::io::Error,
    },
}

impl fmt::Display for TableError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooSmall { bytes, bytes_min } => {
                write!(f, "table memory: {bytes} bytes is too little, these shares need at least {bytes_min}")
            }
            Self::Memory { bytes, error } => {
                write!(f, "table memory: the system gave no {bytes} bytes: {error}")
            }
        }
    }
}

impl std::error::Error for TableError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::TooSmall { .. } => None,
            Self::Memory { error, .. } => Some(error),
        }
    }
}

/// A run of lines in which keys of one kind are placed. Homes end early enough for every window to
/// stay inside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineRange {
    first: usize,
    homes: u64,
}

impl LineRange {
    fn new(first: usize, lines: usize) -> Self {
        Self { first, homes: (lines - LINES_PER_WINDOW + 1) as u64 }
    }

    /// The home line of a digest: its high bits scaled to the number of homes.
    #[inline]
    pub(crate) fn home(&self, place: u64) -> usize {
        self.first + ((u128::from(place) * u128::from(self.homes)) >> 64) as usize
    }
}

/// One tenant's part of the table. Aligned, so that counters of one tenant do not slow another.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Share {
    pub(crate) keys: LineRange,
    pub(crate) spill: LineRange,
    lines: usize,
    pub(crate) counts: Counts,
}

/// Counters of a share. Written when a meter is created, dropped or refused room, never on an
/// ordinary check.
#[derive(Debug)]
pub(crate) struct Counts {
    pub(crate) live: AtomicU64,
    pub(crate) evicted_clean: AtomicU64,
    pub(crate) evicted_in_use: AtomicU64,
    pub(crate) spilled: AtomicU64,
    pub(crate) refused: AtomicU64,
}

/// The fill of a tenant's share, its evictions and its decisions without room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShareStats {
    /// Meters held now.
    pub live: u64,
    /// Meters that could be held.
    pub slots: u64,
    /// Evicted meters without usage: no decision changed.
    pub evicted_clean: u64,
    /// Evicted meters with usage, not at their limit.
    pub evicted_in_use: u64,
    /// Decisions made by an overflow meter, because every slot in reach held a key at its limit.
    pub spilled: u64,
    /// Decisions refused because even the overflow meters had no room.
    pub refused: u64,
}

impl Share {
    fn new(first: usize, lines: usize) -> Self {
        let zero = || AtomicU64::new(0);
        Self {
            keys: LineRange::new(first, lines - SPILL_LINES),
            spill: LineRange::new(first + lines - SPILL_LINES, SPILL_LINES),
            lines,
            counts: Counts {
                live: zero(),
                evicted_clean: zero(),
                evicted_in_use: zero(),
                spilled: zero(),
                refused: zero(),
            },
        }
    }

    pub(crate) fn stats(&self) -> ShareStats {
        let read = |count: &AtomicU64| count.load(Ordering::Relaxed);
        ShareStats {
            live: read(&self.counts.live),
            slots: (self.lines * super::SLOTS_PER_LINE) as u64,
            evicted_clean: read(&self.counts.evicted_clean),
            evicted_in_use: read(&self.counts.evicted_in_use),
            spilled: read(&self.counts.spilled),
            refused: read(&self.counts.refused),
        }
    }
}

/// Adds one to a count.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Divides `bytes` of memory by weight.
pub(crate) fn divide(bytes: usize, shares: &Shares) -> Result<Box<[Share]>, TableError> {
    let lines = (bytes / BYTES_PER_LINE) as u128;
    let total: u128 = shares.weights.iter().map(|&w| u128::from(w)).sum();
    let lightest = shares.weights.iter().min().copied().unwrap_or(1);
    let lines_min = (SHARE_LINES_MIN as u128 * total).div_ceil(u128::from(lightest));
    if lines < lines_min {
        return Err(TableError::TooSmall { bytes, bytes_min: lines_min as usize * BYTES_PER_LINE });
    }
    let mut first = 0;
    let shares = shares.weights.iter().map(|&weight| {
        let part = (lines * u128::from(weight) / total) as usize;
        let share = Share::new(first, part);
        first += part;
        share
    });
    Ok(shares.collect())
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_disjoint_and_by_weight() {
        let mut shares = Shares::single();
        shares.add(3);
        let divided = divide(1 << 20, &shares).expect("large enough");
        assert_eq!(divided.iter().map(|s| s.lines).collect::<Vec<_>>(), [4096, 12_288]);
        let last_home = divided[0].keys.home(u64::MAX) + LINES_PER_WINDOW - 1;
        assert!(last_home < divided[0].spill.first);
        assert!(divided[0].spill.home(u64::MAX) + LINES_PER_WINDOW - 1 < divided[1].keys.first);
        assert!(divided[1].spill.home(u64::MAX) + LINES_PER_WINDOW - 1 < (1 << 20) / BYTES_PER_LINE);
    }

    #[test]
    fn too_little_memory_reports_the_required_size() {
        let mut shares = Shares::single();
        shares.add(9);
        let error = divide(1_000, &shares).expect_err("too small");
        let TableError::TooSmall { bytes_min, .. } = error else { panic!("{error}") };
        assert!(divide(bytes_min, &shares).is_ok());
        assert!(divide(bytes_min - 1, &shares).is_err());
    }
}
