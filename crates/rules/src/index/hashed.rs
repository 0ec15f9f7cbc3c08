//! A hash table that is built once and read at random. A lookup usually touches one cache line.

use super::pages::{LINE_BYTES, Pages};

/// Items of a line. Those that find no room in theirs lie in the next.
const ITEMS_PER_LINE: usize = LINE_BYTES / ITEM_BYTES;
/// Items of a line on average. Higher: fewer bytes for each item, more of them in another line than
/// their own.
const ITEMS_PER_LINE_MEAN: usize = 6;
const _: () = assert!(ITEMS_PER_LINE_MEAN < ITEMS_PER_LINE, "a free slot ends every search");

/// Bytes of an item: the low half of the hash, which the choice of the line does not imply, and the
/// number.
const ITEM_BYTES: usize = 8;
/// In the place of an item, with those behind it: no number is that large.
const EMPTY: u64 = u64::MAX;

/// Numbers by hash. A lookup may find the number of another hash, so the caller has to compare.
#[derive(Debug, Default)]
pub(crate) struct HashIndex {
    lines: Pages,
    items: usize,
}

impl HashIndex {
    /// A table of numbers with their hashes. It serves best if no two hashes are the same.
    pub(crate) fn new(items: &[(u64, u32)]) -> Self {
        let lines = items.len().div_ceil(ITEMS_PER_LINE_MEAN);
        let fill = |bytes: &mut [u8]| {
            bytes.fill(u8::MAX);
            let (places, _) = bytes.as_chunks_mut::<ITEM_BYTES>();
            for (hash, number) in items {
                put(places, *hash, *number);
            }
        };
        Self { lines: Pages::filled(lines * LINE_BYTES, fill), items: items.len() }
    }

    /// Calls `look` for each number that may have this hash, and returns its first `Some`.
    #[inline]
    pub(crate) fn find<T>(&self, hash: u64, mut look: impl FnMut(u32) -> Option<T>) -> Option<T> {
        let (places, _) = self.lines.as_chunks::<ITEM_BYTES>();
        let own = line(hash, places.len() / ITEMS_PER_LINE) * ITEMS_PER_LINE;
        let (before, from_own) = places.split_at_checked(own)?;
        let items = from_own.iter().chain(before).map(|place| u64::from_le_bytes(*place));
        for item in items.take_while(|item| *item != EMPTY) {
            if low(item) == low(hash)
                && let Some(found) = look(low(item >> u32::BITS))
            {
                return Some(found);
            }
        }
        None
    }

    /// All items.
    pub(crate) fn len(&self) -> usize {
        self.items
    }
}

/// Into the first place that is free from its line on.
fn put(places: &mut [[u8; ITEM_BYTES]], hash: u64, number: u32) {
    let own = line(hash, places.len() / ITEMS_PER_LINE) * ITEMS_PER_LINE;
    let (before, from_own) = places.split_at_mut(own);
    let free = from_own.iter_mut().chain(before).find(|place| u64::from_le_bytes(**place) == EMPTY);
    if let Some(free) = free {
        *free = (u64::from(number) << u32::BITS | u64::from(low(hash))).to_le_bytes();
    }
}

/// Selects a line by the high bits of the hash. The low bits distinguish the items of a line.
fn line(hash: u64, lines: usize) -> usize {
    let scaled = u128::from(hash) * lines as u128;
    usize::try_from(scaled >> u64::BITS).unwrap_or_default()
}

#[expect(clippy::cast_possible_truncation, reason = "the caller uses the other half")]
fn low(both: u64) -> u32 {
    both as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn everything_is_found_by_its_hash(
            hashes in prop::collection::vec(prop_oneof![any::<u64>(), 0..4_u64, Just(u64::MAX)], 0..80),
            other: u64,
        ) {
            let items: Vec<(u64, u32)> = hashes.iter().copied().zip(0..).collect();
            let table = HashIndex::new(&items);
            prop_assert_eq!(table.len(), hashes.len());
            for hash in hashes.iter().chain([&other]) {
                let mut found = Vec::new();
                let none: Option<()> = table.find(*hash, |at| {
                    found.extend((hashes[at as usize] == *hash).then_some(at));
                    None
                });
                prop_assert_eq!(none, None);
                let expected: Vec<u32> = items.iter().filter(|(of, _)| of == hash).map(|(_, at)| *at).collect();
                prop_assert_eq!(found, expected);
            }
        }
    }
}
