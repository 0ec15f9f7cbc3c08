//! Insertion: the slot for a new meter, and the meter that it may replace.

use super::line::LineGuard;
use super::share::count;
use super::{SLOTS_PER_LINE, Spot, Table};
use crate::meter::{EvictionRank, Slot};
use crate::sync::Ordering;
use crate::time::Now;

/// Lines in which a key may lie, its home first. Higher: fewer keys are forgotten in a full table,
/// and a look for a key that is not there may touch more lines.
#[cfg(not(loom))]
pub(crate) const LINES_PER_WINDOW: usize = 16;
/// Loom explores every schedule, which few lines keep finite.
#[cfg(loom)]
pub(crate) const LINES_PER_WINDOW: usize = 2;

const _: () = assert!(LINES_PER_WINDOW <= 16, "a header has four bits for how far its keys lie");

/// How often another thread may take a chosen slot before the insertion fails with `NoRoom`.
const CHOICES_MAX: usize = 8;

/// The result of an insertion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum InsertResult {
    Here,
    /// Another thread placed the same key first.
    Already,
    /// Every slot of the window holds a key that must not be forgotten.
    NoRoom,
}

/// A slot picked for a newcomer, as it was when it was picked.
struct Choice {
    line: usize,
    slot: usize,
    words: Slot,
    eviction_rank: EvictionRank,
}

impl Table {
    /// Inserts a meter that was not found. The home line stays locked meanwhile. Another thread
    /// needs that lock to insert the same key, so no key ever has two meters. Lines are locked in
    /// ascending order only.
    ///
    /// `spare` selects the tags that must not be evicted: the other keys of the same request.
    #[cold]
    pub(super) fn place(
        &self,
        now: Now,
        spot: Spot,
        words: Slot,
        spare: impl Fn(u64) -> bool,
    ) -> InsertResult {
        let mut home = self.line(spot.home).lock();
        if home.find(spot.tag).is_some() || self.find_further(spot, home.head().reach()).is_some() {
            return InsertResult::Already;
        }
        for _ in 0..CHOICES_MAX {
            let Some(choice) = self.choose(now, spot, &home, &spare) else { return InsertResult::NoRoom };
            if self.take(&mut home, spot, &choice, words) {
                self.count_taken(spot, &choice);
                return InsertResult::Here;
            }
        }
        InsertResult::NoRoom
    }

    /// Returns the slot of the window that matters least: the nearest free one, or the one with the
    /// lowest `EvictionRank` below `Pinned`.
    fn choose(
        &self,
        now: Now,
        spot: Spot,
        home: &LineGuard<'_>,
        spare: &impl Fn(u64) -> bool,
    ) -> Option<Choice> {
        let mut best: Option<Choice> = None;
        for line in spot.home..spot.home + LINES_PER_WINDOW {
            for slot in 0..SLOTS_PER_LINE {
                let words = if line == spot.home { home.slot(slot) } else { self.settled_slot(line, slot) };
                if spare(Slot::tag_in(words.head)) {
                    continue;
                }
                let eviction_rank = words.eviction_rank(now);
                if best.as_ref().is_none_or(|best| eviction_rank < best.eviction_rank) {
                    best = Some(Choice { line, slot, words, eviction_rank });
                }
                if eviction_rank == EvictionRank::Free {
                    return best;
                }
            }
        }
        best.filter(|choice| choice.eviction_rank < EvictionRank::Pinned)
    }

    /// A slot of a line that others may be writing to, of one version.
    fn settled_slot(&self, line: usize, slot: usize) -> Slot {
        let line = self.line(line);
        loop {
            let head = line.head();
            let words = line.slot(slot);
            if line.is_still(head) {
                return words;
            }
        }
    }

    /// Writes the newcomer over the chosen slot, unless that has changed since.
    fn take(&self, home: &mut LineGuard<'_>, spot: Spot, choice: &Choice, words: Slot) -> bool {
        if choice.line == spot.home {
            home.write(choice.slot, words);
            return true;
        }
        let mut line = self.line(choice.line).lock();
        if line.slot(choice.slot) != choice.words {
            return false;
        }
        line.write(choice.slot, words);
        home.extend_reach(choice.line - spot.home);
        true
    }

    fn count_taken(&self, spot: Spot, choice: &Choice) {
        let counts = self.counts(spot);
        match choice.eviction_rank {
            EvictionRank::Free => {
                counts.live.fetch_add(1, Ordering::Relaxed);
            }
            EvictionRank::Clean { .. } => count(&counts.evicted_clean),
            EvictionRank::InUse { .. } => count(&counts.evicted_in_use),
            EvictionRank::Pinned => {}
        }
    }
}
