//! A table that is built once: found by a hash, in the order of hashes, with nothing left empty.

use super::small;

/// Items of one bucket, about. Higher: fewer bytes for each item, more to look through.
const ITEMS_PER_BUCKET: usize = 4;

/// Items by hash. What is found may be another item of the same hash: whoever looks has to compare.
#[derive(Debug)]
pub(crate) struct Hashed<T> {
    /// By bucket: where its items begin; one more than there are buckets.
    starts: Box<[u32]>,
    /// With the part of the hash that the bucket does not tell.
    items: Box<[(u32, T)]>,
}

impl<T> Default for Hashed<T> {
    fn default() -> Self {
        Self { starts: Box::default(), items: Box::default() }
    }
}

impl<T> Hashed<T> {
    /// A table of items with their hashes, which are in order.
    pub(crate) fn of_ordered(items: Vec<(u64, T)>) -> Self {
        let buckets = (items.len() / ITEMS_PER_BUCKET).next_power_of_two();
        let mut starts = Vec::with_capacity(buckets + 1);
        for (at, (hash, _)) in items.iter().enumerate() {
            starts.resize(starts.len().max(bucket(*hash, buckets) + 1), small(at));
        }
        starts.resize(buckets + 1, small(items.len()));
        let items = items.into_iter().map(|(hash, item)| (tag(hash), item)).collect();
        Self { starts: starts.into(), items }
    }

    /// The items that may be the one with this hash.
    pub(crate) fn find(&self, hash: u64) -> impl Iterator<Item = &T> {
        let bucket = bucket(hash, self.starts.len().saturating_sub(1));
        let range = self.starts.get(bucket).zip(self.starts.get(bucket + 1));
        let items = range.map(|(start, end)| &self.items[*start as usize..*end as usize]).unwrap_or_default();
        items.iter().filter(move |(of, _)| *of == tag(hash)).map(|(_, item)| item)
    }

    /// All items.
    pub(crate) fn len(&self) -> usize {
        self.items.len()
    }
}

/// By the first bits, so that items in the order of hashes are in the order of buckets.
fn bucket(hash: u64, buckets: usize) -> usize {
    let scaled = u128::from(hash) * buckets as u128;
    usize::try_from(scaled >> u64::BITS).unwrap_or_default()
}

/// By the last bits.
fn tag(hash: u64) -> u32 {
    u32::try_from(hash & u64::from(u32::MAX)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn everything_is_found_by_its_hash(
            mut hashes in prop::collection::vec(prop_oneof![any::<u64>(), 0..4_u64, Just(u64::MAX)], 0..40),
            other: u64,
        ) {
            hashes.sort_unstable();
            let table = Hashed::of_ordered(hashes.iter().map(|hash| (*hash, *hash)).collect());
            for hash in hashes.iter().chain([&other]) {
                let found = table.find(*hash).filter(|item| *item == hash).count();
                prop_assert_eq!(found, hashes.iter().filter(|known| *known == hash).count());
            }
        }
    }
}
