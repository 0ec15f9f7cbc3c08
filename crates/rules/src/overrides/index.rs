//! The overrides of one tenant in memory: found without a lock, listed in order, changed one at a
//! time.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Bound;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use arc_swap::ArcSwap;

use super::{OVERRIDES_MAX, Override, WILDCARDS_MAX};

/// Parts that are replaced as one. Higher: less to copy for each change, more memory for each
/// tenant with overrides.
const PARTS: usize = 256;

/// By namespace, then by identifier.
type Exact = HashMap<Arc<str>, HashMap<Arc<str>, Arc<Override>>>;
/// By namespace, in the order in which a lookup tries them.
type Wild = HashMap<Arc<str>, Vec<Arc<Override>>>;
/// By namespace, then by pattern, wild or not.
type OrderedOverrides = BTreeMap<Arc<str>, BTreeMap<Arc<str>, Arc<Override>>>;

/// Overrides with a hash that selects the same part.
#[derive(Clone, Debug, Default)]
struct Part {
    exact: Exact,
    wild: Wild,
}

/// The overrides of one tenant. A lookup takes no lock, and copies only the reference to the
/// result. A change copies one part of many. Changes must come one at a time; the store ensures
/// that with a single writer thread.
#[derive(Debug, Default)]
pub struct OverrideIndex {
    count: AtomicUsize,
    /// Most tenants have no overrides and need no parts.
    parts: OnceLock<Box<[ArcSwap<Part>]>>,
    /// All of them once more, for lists only: no check ever waits for this lock.
    ordered: Mutex<OrderedOverrides>,
}

/// There is no room for another override.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverridesFull {
    /// The tenant has [`OVERRIDES_MAX`].
    Tenant,
    /// The namespace has [`WILDCARDS_MAX`] wildcards.
    Wildcards,
}

impl fmt::Display for OverridesFull {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tenant => write!(f, "overrides: the maximum of {OVERRIDES_MAX} is reached: delete one"),
            Self::Wildcards => write!(
                f,
                "overrides: the namespace has reached the maximum of {WILDCARDS_MAX} with a `*`: delete one"
            ),
        }
    }
}

impl std::error::Error for OverridesFull {}

impl OverrideIndex {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether the tenant has no overrides.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The override that applies to `identifier`: its own, or the most specific wildcard that
    /// matches it.
    #[inline]
    pub fn applying(&self, namespace: &str, identifier: &str) -> Option<Arc<Override>> {
        if self.is_empty() {
            return None;
        }
        self.exact(namespace, identifier)
            .or_else(|| self.wildcard(namespace, |wildcard| wildcard.identifier.matches(identifier)))
    }

    /// The override with exactly this pattern.
    pub fn get(&self, namespace: &str, pattern: &str) -> Option<Arc<Override>> {
        if is_wild(pattern) {
            self.wildcard(namespace, |wildcard| wildcard.identifier.as_str() == pattern)
        } else {
            self.exact(namespace, pattern)
        }
    }

    /// At most `most` overrides of a namespace, in the order of their patterns, from the one that
    /// follows `after`.
    pub fn list(&self, namespace: &str, after: Option<&str>, most: usize) -> Vec<Arc<Override>> {
        // No pattern is empty.
        let after = Bound::Excluded(after.unwrap_or_default());
        let ordered = self.ordered();
        let Some(patterns) = ordered.get(namespace) else { return Vec::new() };
        patterns.range::<str, _>((after, Bound::Unbounded)).take(most).map(|(_, of)| Arc::clone(of)).collect()
    }

    /// Whether there is room for an override with this pattern; there always is in place of one
    /// that it replaces.
    pub fn room_for(&self, namespace: &str, pattern: &str) -> Result<(), OverridesFull> {
        if self.get(namespace, pattern).is_some() {
            return Ok(());
        }
        if self.len() >= OVERRIDES_MAX {
            return Err(OverridesFull::Tenant);
        }
        if is_wild(pattern) && self.wildcards(namespace) >= WILDCARDS_MAX {
            return Err(OverridesFull::Wildcards);
        }
        Ok(())
    }

    /// Adds an override, or replaces the one with its pattern.
    pub fn set(&self, new: Override) {
        let new = Arc::new(new);
        let replaced = self.change(place_of(&new.namespace, new.identifier.as_str()), |part| part.set(&new));
        put_in_order(&mut self.ordered(), &new);
        if !replaced {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Forgets the override with this pattern.
    pub fn remove(&self, namespace: &str, pattern: &str) {
        let removed = self.change(place_of(namespace, pattern), |part| part.remove(namespace, pattern));
        if !removed {
            return;
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
        let mut ordered = self.ordered();
        if let Some(patterns) = ordered.get_mut(namespace) {
            patterns.remove(pattern);
            if patterns.is_empty() {
                ordered.remove(namespace);
            }
        }
    }

    fn exact(&self, namespace: &str, identifier: &str) -> Option<Arc<Override>> {
        let part = self.part(exact_place(namespace, identifier))?.load();
        part.exact.get(namespace)?.get(identifier).cloned()
    }

    fn wildcard(&self, namespace: &str, is_it: impl Fn(&Override) -> bool) -> Option<Arc<Override>> {
        let part = self.part(wild_place(namespace))?.load();
        part.wild.get(namespace)?.iter().find(|wildcard| is_it(wildcard)).cloned()
    }

    fn wildcards(&self, namespace: &str) -> usize {
        let part = self.part(wild_place(namespace)).map(ArcSwap::load);
        part.and_then(|part| part.wild.get(namespace).map(Vec::len)).unwrap_or(0)
    }

    fn part(&self, place: usize) -> Option<&ArcSwap<Part>> {
        self.parts.get()?.get(place)
    }

    /// Ignores a poisoned lock: an incomplete change shows only in a list.
    fn ordered(&self) -> MutexGuard<'_, OrderedOverrides> {
        self.ordered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change<T>(&self, place: usize, change: impl FnOnce(&mut Part) -> T) -> T {
        let parts = self.parts.get_or_init(|| (0..PARTS).map(|_| ArcSwap::default()).collect());
        let mut part = Part::clone(&parts[place].load());
        let result = change(&mut part);
        parts[place].store(Arc::new(part));
        result
    }
}

impl FromIterator<Override> for OverrideIndex {
    /// All at once: each part is made once, not anew for each override in it.
    fn from_iter<I: IntoIterator<Item = Override>>(all: I) -> Self {
        let mut parts: Vec<Part> = Vec::new();
        let mut ordered = OrderedOverrides::default();
        let mut count = 0;
        for new in all {
            parts.resize_with(PARTS, Part::default);
            let new = Arc::new(new);
            let place = place_of(&new.namespace, new.identifier.as_str());
            count += usize::from(!parts[place].set(&new));
            put_in_order(&mut ordered, &new);
        }
        let index =
            Self { count: AtomicUsize::new(count), parts: OnceLock::new(), ordered: Mutex::new(ordered) };
        if count > 0 {
            index.parts.get_or_init(|| parts.into_iter().map(ArcSwap::from_pointee).collect());
        }
        index
    }
}

fn put_in_order(ordered: &mut OrderedOverrides, new: &Arc<Override>) {
    let patterns = ordered.entry(Arc::from(new.namespace.as_str())).or_default();
    patterns.insert(Arc::from(new.identifier.as_str()), Arc::clone(new));
}

impl Part {
    /// Whether another one was replaced.
    fn set(&mut self, new: &Arc<Override>) -> bool {
        let (namespace, pattern) = (Arc::from(new.namespace.as_str()), new.identifier.as_str());
        if !new.identifier.is_wild() {
            let identifiers = self.exact.entry(namespace).or_default();
            return identifiers.insert(Arc::from(pattern), Arc::clone(new)).is_some();
        }
        let wildcards = self.wild.entry(namespace).or_default();
        match wildcards.binary_search_by(|wildcard| wildcard.rank().cmp(&new.rank())) {
            Ok(at) => wildcards[at] = Arc::clone(new),
            Err(at) => {
                wildcards.insert(at, Arc::clone(new));
                return false;
            }
        }
        true
    }

    /// Whether there was one.
    fn remove(&mut self, namespace: &str, pattern: &str) -> bool {
        if is_wild(pattern) {
            let Some(wildcards) = self.wild.get_mut(namespace) else { return false };
            let before = wildcards.len();
            wildcards.retain(|wildcard| wildcard.identifier.as_str() != pattern);
            let after = wildcards.len();
            if after == 0 {
                self.wild.remove(namespace);
            }
            return after < before;
        }
        let Some(identifiers) = self.exact.get_mut(namespace) else { return false };
        let removed = identifiers.remove(pattern).is_some();
        if identifiers.is_empty() {
            self.exact.remove(namespace);
        }
        removed
    }
}

fn is_wild(pattern: &str) -> bool {
    pattern.contains('*')
}

fn place_of(namespace: &str, pattern: &str) -> usize {
    if is_wild(pattern) { wild_place(namespace) } else { exact_place(namespace, pattern) }
}

fn exact_place(namespace: &str, identifier: &str) -> usize {
    place((namespace, identifier))
}

fn wild_place(namespace: &str) -> usize {
    place(namespace)
}

/// Returns the part of a key. The hash has no secret seed: every tenant has its own parts, so
/// colliding keys gain nothing.
fn place(key: impl Hash) -> usize {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    usize::try_from(hasher.finish() % PARTS as u64).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Pattern;
    use proptest::prelude::*;

    fn of(namespace: &str, pattern: &str, limit: u32) -> Override {
        Override {
            id: format!("{namespace}/{pattern}/{limit}"),
            namespace: namespace.to_owned(),
            identifier: Pattern::new(pattern),
            limit,
            duration_ms: 1_000,
        }
    }

    #[test]
    fn its_own_comes_before_wildcards_and_the_most_specific_wildcard_first() {
        let index = OverrideIndex::default();
        assert_eq!(index.applying("n", "a"), None);
        for (limit, pattern) in ["*", "a*", "*c", "ab*", "*bc", "abc", "a*c*"].into_iter().enumerate() {
            index.set(of("n", pattern, u32::try_from(limit).expect("few")));
        }
        let applying = |identifier: &str| {
            index.applying("n", identifier).map(|found| found.identifier.as_str().to_owned())
        };
        assert_eq!(applying("abc").as_deref(), Some("abc"));
        // With equal literal length, text order decides: `*` comes before letters.
        assert_eq!(applying("abbc").as_deref(), Some("*bc"));
        assert_eq!(applying("abd").as_deref(), Some("ab*"));
        assert_eq!(applying("axc").as_deref(), Some("a*c*"));
        assert_eq!(applying("xc").as_deref(), Some("*c"));
        assert_eq!(applying("").as_deref(), Some("*"));
        assert_eq!(index.applying("other", "abc"), None);
        assert_eq!(index.len(), 7);
    }

    #[test]
    fn there_is_a_most_of_everything() {
        let index = OverrideIndex::default();
        for at in 0..WILDCARDS_MAX {
            index.set(of("n", &format!("{at}*"), 1));
        }
        assert_eq!(index.room_for("n", "x*"), Err(OverridesFull::Wildcards));
        assert_eq!(index.room_for("n", "0*"), Ok(()));
        assert_eq!(index.room_for("m", "x*"), Ok(()));
        for at in WILDCARDS_MAX..OVERRIDES_MAX {
            index.set(of("n", &at.to_string(), 1));
        }
        assert_eq!(index.room_for("m", "x"), Err(OverridesFull::Tenant));
        index.remove("n", "1000");
        assert_eq!(index.room_for("m", "x"), Ok(()));
    }

    fn patterns(index: &OverrideIndex, after: Option<&str>, most: usize) -> Vec<String> {
        let found = index.list("n", after, most);
        found.iter().map(|found| found.identifier.as_str().to_owned()).collect()
    }

    #[test]
    fn pages_follow_each_other_even_if_the_last_one_is_gone() {
        let index: OverrideIndex =
            ["d", "*", "c", "a*"].map(|pattern| of("n", pattern, 1)).into_iter().collect();
        index.set(of("m", "b", 1));
        assert_eq!(patterns(&index, None, 2), ["*", "a*"]);
        index.remove("n", "a*");
        assert_eq!(patterns(&index, Some("a*"), 2), ["c", "d"]);
        assert_eq!(patterns(&index, Some("d"), 2), Vec::<String>::new());
    }

    proptest! {
        /// After any sets and removals, the index applies the override that the definition selects.
        #[test]
        fn the_index_agrees_with_a_plain_list(
            changes in prop::collection::vec(("[ab]", "[ab*]{1,3}", any::<bool>()), 0..40),
            asked in prop::collection::vec(("[ab]", "[ab]{0,3}"), 8),
        ) {
            let index = OverrideIndex::default();
            let mut list: Vec<Override> = Vec::new();
            for (at, (namespace, pattern, set)) in changes.iter().enumerate() {
                list.retain(|known| (&known.namespace, known.identifier.as_str()) != (namespace, pattern));
                if *set {
                    let new = of(namespace, pattern, u32::try_from(at).expect("few"));
                    index.set(new.clone());
                    list.push(new);
                } else {
                    index.remove(namespace, pattern);
                }
                prop_assert_eq!(index.len(), list.len());
            }
            for (namespace, identifier) in &asked {
                let mut matching: Vec<&Override> = list
                    .iter()
                    .filter(|known| known.namespace == *namespace && known.identifier.matches(identifier))
                    .collect();
                matching.sort_by_key(|known| (known.identifier.is_wild(), known.rank()));
                let expected = matching.first().copied().cloned();
                prop_assert_eq!(index.applying(namespace, identifier).map(|found| (*found).clone()), expected);
            }
            list.sort_by(|a, b| a.identifier.as_str().cmp(b.identifier.as_str()));
            for namespace in ["a", "b"] {
                let expected: Vec<&Override> = list.iter().filter(|known| known.namespace == namespace).collect();
                let listed = index.list(namespace, None, list.len());
                prop_assert_eq!(listed.iter().map(Arc::as_ref).collect::<Vec<_>>(), expected);
            }
            for known in &list {
                let got = index.get(&known.namespace, known.identifier.as_str());
                prop_assert_eq!(got.as_deref(), Some(known));
            }
        }
    }
}
