//! Keys in the order of their stamps.

use std::collections::{BTreeSet, HashMap};

/// Keys, each with its last stamp.
#[derive(Clone, Debug, Default)]
pub(super) struct StampedKeys {
    by_stamp: BTreeSet<(u64, Box<[u8]>)>,
    stamps: HashMap<Box<[u8]>, u64>,
}

impl StampedKeys {
    /// Adds a key, or moves it to a new stamp.
    pub(super) fn insert(&mut self, stamp: u64, key: &[u8]) {
        if let Some(before) = self.stamps.insert(key.into(), stamp) {
            self.by_stamp.remove(&(before, key.into()));
        }
        self.by_stamp.insert((stamp, key.into()));
    }

    pub(super) fn pop_first(&mut self) -> Option<Box<[u8]>> {
        let (_, key) = self.by_stamp.pop_first()?;
        self.stamps.remove(&key);
        Some(key)
    }

    /// Drops the keys with stamps up to `upto`, and the oldest above `most` keys.
    pub(super) fn trim(&mut self, upto: u64, most: usize) {
        while self.len() > most || self.by_stamp.first().is_some_and(|(stamp, _)| *stamp <= upto) {
            self.pop_first();
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&[u8]) -> bool) {
        self.by_stamp.retain(|(_, key)| keep(key));
        self.stamps.retain(|key, _| keep(key));
    }

    /// Returns the keys with stamps above `after`, in their order.
    pub(super) fn after(&self, after: u64) -> impl Iterator<Item = (u64, &[u8])> {
        let keys = self.by_stamp.range((after + 1, Box::default())..);
        keys.map(|(stamp, key)| (*stamp, &**key))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.by_stamp.iter().map(|(stamp, key)| (*stamp, &**key))
    }

    pub(super) fn len(&self) -> usize {
        self.by_stamp.len()
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::*;

    fn stamps(keys: &StampedKeys) -> Vec<(u64, &[u8])> {
        keys.iter().collect()
    }

    #[test]
    fn key_has_its_last_stamp_only() {
        let mut keys = StampedKeys::default();
        for (stamp, key) in [(1, b"a"), (1, b"b"), (2, b"a")] {
            keys.insert(stamp, key);
        }
        assert_eq!(stamps(&keys), [(1, &b"b"[..]), (2, b"a")]);
        assert_eq!(keys.after(1).collect::<Vec<_>>(), [(2, &b"a"[..])]);
        assert_eq!(keys.pop_first().as_deref(), Some(&b"b"[..]));
    }

    #[test]
    fn trimmed_keys_are_the_oldest() {
        let mut keys = StampedKeys::default();
        for (stamp, key) in (1..).zip([b"a", b"b", b"c", b"d"]) {
            keys.insert(stamp, key);
        }
        keys.trim(1, 4);
        assert_eq!(keys.len(), 3);
        keys.trim(1, 2);
        assert_eq!(stamps(&keys), [(3, &b"c"[..]), (4, b"d")]);
        keys.retain(|key| key == b"d");
        keys.insert(5, b"d");
        assert_eq!(stamps(&keys), [(5, &b"d"[..])]);
    }
}
