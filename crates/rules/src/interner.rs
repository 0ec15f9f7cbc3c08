//! Interner: stores texts, keys and conditions that many rules share only once.

use std::borrow::Borrow;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{BuildHasher as _, Hash as _, Hasher as _};
use std::sync::Arc;

use foldhash::quality::RandomState;

use crate::rule::Condition;

/// Texts and lists that were seen already, by their hashes: a table that grows does not look at a
/// million of them again, each in a place of its own.
#[derive(Debug, Default)]
pub(crate) struct Interner {
    hasher: RandomState,
    texts: HashMap<u64, Arc<str>, RandomState>,
    keys: HashMap<u64, Arc<[Arc<str>]>, RandomState>,
    conditions: HashMap<u64, Arc<[Condition]>, RandomState>,
}

impl Interner {
    pub(crate) fn text(&mut self, text: &str) -> Arc<str> {
        shared(&mut self.texts, self.hasher.hash_one(text), text)
    }

    pub(crate) fn key(&mut self, key: Vec<Arc<str>>) -> Arc<[Arc<str>]> {
        shared(&mut self.keys, self.hasher.hash_one(&key), key)
    }

    /// Interns conditions. All their texts must come from this interner.
    pub(crate) fn conditions(&mut self, conditions: Vec<Condition>) -> Arc<[Condition]> {
        let hash = self.hash(&conditions);
        shared(&mut self.conditions, hash, conditions)
    }

    /// By where the texts lie, which is the same for those that are the same.
    fn hash(&self, conditions: &[Condition]) -> u64 {
        let mut hasher = self.hasher.build_hasher();
        for Condition { dimension, any_of, networks } in conditions {
            hasher.write_usize(dimension.as_ptr().addr());
            hasher.write_usize(any_of.len());
            any_of.iter().for_each(|pattern| hasher.write_usize(pattern.as_str().as_ptr().addr()));
            networks.hash(&mut hasher);
        }
        hasher.finish()
    }
}

fn shared<T, N>(known: &mut HashMap<u64, Arc<T>, RandomState>, hash: u64, new: N) -> Arc<T>
where
    T: ?Sized + Eq,
    N: Borrow<T> + Into<Arc<T>>,
{
    match known.entry(hash) {
        Entry::Vacant(free) => Arc::clone(free.insert(new.into())),
        Entry::Occupied(known) if **known.get() == *new.borrow() => Arc::clone(known.get()),
        // A hash collision: the value is correct, but not shared.
        Entry::Occupied(_) => new.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Pattern;

    #[test]
    fn equal_values_are_interned_once() {
        let mut texts = Interner::default();
        let mut conditions = |dimension: &str, patterns: &[&str]| {
            let any_of = patterns.iter().map(|pattern| Pattern::new(texts.text(pattern))).collect();
            let condition = Condition { dimension: texts.text(dimension), any_of, networks: Box::default() };
            texts.conditions(vec![condition])
        };
        let one = conditions("path", &["/a", "/b*"]);
        assert!(Arc::ptr_eq(&one, &conditions("path", &["/a", "/b*"])));
        for (dimension, patterns) in [("host", &["/a", "/b*"]), ("path", &["/b*", "/a"])] {
            let other = conditions(dimension, patterns);
            assert!(!Arc::ptr_eq(&one, &other) && one != other);
        }
        let mut keys = |parts: &[&str]| {
            let parts = parts.iter().map(|part| texts.text(part)).collect();
            texts.key(parts)
        };
        assert!(Arc::ptr_eq(&keys(&["user"]), &keys(&["user"])));
        assert!(!Arc::ptr_eq(&keys(&["user"]), &keys(&["user", "path"])));
    }

    #[test]
    fn another_text_of_the_same_hash_is_itself() {
        let mut known = HashMap::default();
        let one: Arc<str> = shared(&mut known, 7, "a");
        assert_eq!(*shared(&mut known, 7, "b"), *"b");
        assert!(Arc::ptr_eq(&one, &shared(&mut known, 7, "a")));
    }
}
