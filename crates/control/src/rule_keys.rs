//! The recent keys of rules: which of them were allowed and which denied, look by look.
//!
//! A change is judged by distinct keys, so a key leaves one mark per look, however many requests it
//! sends. Each rule has a [`KeySample`] for each tenant. Decisions write it, and the watch over
//! changes reads it.
//!
//! A sample is bounded. Beyond its slots it keeps the keys whose hash has enough leading zeros,
//! its `level`. The hash is keyed, so a client cannot choose keys that stay in a sample or crowd
//! others out.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, DefaultHasher, Hasher as _, RandomState};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use arc_swap::{ArcSwap, ArcSwapOption};

use crate::denials::LOOKS_PER_MINUTE;
use crate::key_baseline::{KeyTally, PriorMarks};

/// Slots of all samples of a node, 32 bytes each. Tenants have equal shares. Higher: more memory;
/// larger samples when many rules or tenants have requests.
pub(crate) const SLOTS_MAX: usize = 1 << 20;

/// Slots of the smallest sample.
const SAMPLE_SLOTS_MIN: usize = 16;

/// Slots of the largest sample. Higher: more memory for a rule with many keys; a smaller share of
/// denied keys is noticed.
pub(crate) const SAMPLE_SLOTS_MAX: usize = 1_024;

/// The part of a tenant's slots that is reserved for the smallest samples: one in so many. Lower:
/// more rules are watched; rules with many keys have smaller samples.
const RESERVED_PART: usize = 4;

/// Factor by which a sample grows.
const GROWTH: usize = 4;

/// Looks that a sample remembers, the present one included.
pub(crate) const LOOKS_KEPT: u32 = u64::BITS;

/// The level beyond which a sample is not thinned further.
const LEVEL_MAX: u32 = 48;

/// The outcome of a request for its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyOutcome {
    /// The rule let it pass, in either mode.
    Allowed,
    /// The rule denied it.
    Denied,
    /// The rule would have denied it. A rule that is enforced later then denies no more keys than
    /// expected. After a change it counts for nothing, because the request passed.
    DeniedInShadow,
    /// An emergency denied it. That counts against the emergency, and against no change.
    DeniedByEmergency(EmergencyTag),
}

/// Identifies an emergency in the marks of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EmergencyTag(u64);

impl EmergencyTag {
    /// Low bits of a mark that are looks: more than a minute has.
    const LOOKS: u64 = u16::MAX as u64;

    /// The tag of an emergency with this id.
    pub fn of(id: &str) -> Self {
        let mut hasher = DefaultHasher::new();
        hasher.write(id.as_bytes());
        Self(hasher.finish() & !Self::LOOKS)
    }
}

/// The hash of a key, under the secret of its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyHash(u64);

/// The memory for samples of keys, and the secret that keys are hashed with.
#[derive(Debug)]
pub struct KeyMemory {
    secret: RandomState,
    /// The shares of the tenants, in order of their names.
    shares: Box<[(Box<str>, Arc<SlotShare>)]>,
}

/// The slots that a tenant may still use.
#[derive(Debug)]
struct SlotShare {
    free: AtomicUsize,
    /// Slots that no sample grows into: a part for the smallest samples of other rules.
    reserved: usize,
}

impl SlotShare {
    fn new(slots: usize) -> Self {
        Self { free: AtomicUsize::new(slots), reserved: slots / RESERVED_PART }
    }

    fn take(&self, slots: usize) -> bool {
        self.take_leaving(slots, 0)
    }

    /// Takes slots to grow a sample.
    fn take_to_grow(&self, slots: usize) -> bool {
        self.take_leaving(slots, self.reserved)
    }

    fn take_leaving(&self, slots: usize, left_min: usize) -> bool {
        let left = |free: usize| free.checked_sub(slots).filter(|left| *left >= left_min);
        self.free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, left).is_ok()
    }

    fn give_back(&self, slots: usize) {
        self.free.fetch_add(slots, Ordering::Relaxed);
    }
}

impl KeyMemory {
    /// Memory for these tenants; without any, nothing is noted. The secret of the hash is random.
    #[expect(clippy::disallowed_methods, reason = "no caller must know the secret")]
    pub fn new<'t>(tenants: impl IntoIterator<Item = &'t str>) -> Self {
        let mut names: Vec<&str> = tenants.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        let slots = SLOTS_MAX / names.len().max(1);
        let share = |name: &str| (name.into(), Arc::new(SlotShare::new(slots)));
        Self { secret: RandomState::new(), shares: names.into_iter().map(share).collect() }
    }

    fn share(&self, tenant: &str) -> Option<&Arc<SlotShare>> {
        let at = self.shares.binary_search_by(|(name, _)| (**name).cmp(tenant)).ok()?;
        Some(&self.shares.get(at)?.1)
    }

    /// Hashes the parts of a key, each with its length: (`a-b`, `c`) and (`a`, `b-c`) differ.
    #[inline]
    pub(crate) fn hash<'p>(&self, parts: impl IntoIterator<Item = &'p str>) -> KeyHash {
        let mut hasher = self.secret.build_hasher();
        for part in parts {
            hasher.write(part.as_bytes());
            hasher.write(&(part.len() as u64).to_le_bytes());
        }
        // 0 marks an empty slot.
        KeyHash(hasher.finish().max(1))
    }

    /// Slots that no sample uses.
    #[cfg(test)]
    pub(crate) fn free(&self, tenant: &str) -> usize {
        self.share(tenant).map_or(0, |share| share.free.load(Ordering::Relaxed))
    }
}

/// The recent keys of a rule, by tenant. It has no memory until the first request.
#[derive(Debug, Default)]
pub struct RuleKeys {
    /// In order of the tenants' names.
    tenants: ArcSwapOption<Vec<TenantKeys>>,
    /// Whether the share of a tenant had no room for a sample.
    is_without_memory: AtomicBool,
}

/// The recent keys of a rule in one tenant.
#[derive(Clone, Debug)]
pub(crate) struct TenantKeys {
    pub(crate) tenant: Arc<str>,
    pub(crate) sample: Arc<KeySample>,
}

impl RuleKeys {
    /// Notes the outcome of a request. Another request of the same key within a look writes
    /// nothing.
    #[inline]
    pub fn note<'p>(
        &self,
        memory: &KeyMemory,
        (tenant, parts): (&str, impl IntoIterator<Item = &'p str>),
        outcome: KeyOutcome,
    ) {
        if memory.shares.is_empty() {
            return;
        }
        let hash = memory.hash(parts);
        if let Some(known) = self.tenants.load().as_deref().and_then(|all| find(all, tenant)) {
            return known.sample.note(hash, outcome);
        }
        if let Some(sample) = self.begin(memory, tenant) {
            sample.note(hash, outcome);
        }
    }

    /// Returns the sample of a tenant, a new one if need be; `None` if its share is used up.
    fn begin(&self, memory: &KeyMemory, tenant: &str) -> Option<Arc<KeySample>> {
        let new = KeySample::new(Arc::clone(memory.share(tenant)?));
        if self.is_without_memory.load(Ordering::Relaxed) != new.is_none() {
            self.is_without_memory.store(new.is_none(), Ordering::Relaxed);
        }
        let new = Arc::new(new?);
        let new = TenantKeys { tenant: tenant.into(), sample: new };
        self.tenants.rcu(|known| {
            let mut all = known.as_deref().cloned().unwrap_or_default();
            if let Err(at) = all.binary_search_by(|known| (*known.tenant).cmp(tenant)) {
                all.insert(at, new.clone());
            }
            Some(Arc::new(all))
        });
        // Another thread may have been first.
        let all = self.tenants.load();
        Some(Arc::clone(&find(all.as_deref()?, tenant)?.sample))
    }

    /// Returns the tenants with recent keys.
    pub(crate) fn tenants(&self) -> Vec<TenantKeys> {
        self.tenants.load().as_deref().cloned().unwrap_or_default()
    }

    /// Whether the share of a tenant has no room for a sample.
    pub(crate) fn is_without_memory(&self) -> bool {
        self.is_without_memory.load(Ordering::Relaxed)
    }

    /// Whether no request left a mark.
    pub(crate) fn is_empty(&self) -> bool {
        self.tenants.load().is_none()
    }

    /// Continues the samples of a rule that this one replaces.
    pub(crate) fn adopt(&self, replaced: &Self) {
        self.tenants.store(replaced.tenants.load_full());
        self.is_without_memory.store(replaced.is_without_memory(), Ordering::Relaxed);
    }

    /// Ends a look, and drops samples without marks.
    pub(crate) fn end_look(&self) {
        let Some(known) = self.tenants.load_full() else { return };
        let idle = known.iter().filter(|known| known.sample.end_look()).count();
        if idle > 0 {
            self.tenants.rcu(|known| {
                let mut all = known.as_deref().cloned().unwrap_or_default();
                all.retain(|known| !known.sample.is_idle());
                (!all.is_empty()).then(|| Arc::new(all))
            });
        }
    }

    /// Moves the marks of the present look to the one before: later marks belong to new rules.
    pub(crate) fn fold_look(&self) {
        for known in self.tenants.load().iter().flat_map(|all| all.iter()) {
            known.sample.slots().used().for_each(KeySlot::fold);
        }
    }

    /// Sets a mark of an earlier look.
    pub(crate) fn recall(
        &self,
        memory: &KeyMemory,
        (tenant, hash): (&str, KeyHash),
        outcome: KeyOutcome,
        ago: u32,
    ) {
        let known =
            self.tenants.load().as_deref().and_then(|all| Some(Arc::clone(&find(all, tenant)?.sample)));
        if let Some(sample) = known.or_else(|| self.begin(memory, tenant)) {
            sample.recall(hash, outcome, ago);
        }
    }

    /// Returns the number of sampled keys that were allowed and denied in the present look.
    pub fn of_present_look(&self) -> (usize, usize) {
        let count = |is_marked: fn(&KeySlot) -> bool| {
            let all = self.tenants();
            all.iter().map(|known| known.sample.slots().used().filter(|slot| is_marked(slot)).count()).sum()
        };
        (count(|slot| slot.allowed() & 1 == 1), count(|slot| slot.denied() & 1 == 1))
    }
}

fn find<'a>(all: &'a [TenantKeys], tenant: &str) -> Option<&'a TenantKeys> {
    all.get(all.binary_search_by(|known| (*known.tenant).cmp(tenant)).ok()?)
}

/// A bounded sample of the recent keys of a rule in one tenant.
#[derive(Debug)]
pub(crate) struct KeySample {
    slots: ArcSwap<KeySlots>,
    /// Locked while keys are added, and while slots are replaced.
    adding: Mutex<()>,
    /// Number of baselines that refer to the slots. Meanwhile no key is added or dropped, so that a
    /// flood of new keys cannot push out the keys that a change is judged by.
    baselines: AtomicUsize,
    share: Arc<SlotShare>,
}

/// The slots of a sample, probed from the low bits of a hash on. At least a quarter is empty.
#[derive(Debug)]
pub(crate) struct KeySlots {
    /// Leading zeros of the hashes that are admitted.
    level: u32,
    used: AtomicUsize,
    slots: Box<[KeySlot]>,
}

/// A key, with one bit for each look, the present one lowest.
#[derive(Debug, Default)]
pub(crate) struct KeySlot {
    /// 0 if the slot is empty.
    hash: AtomicU64,
    allowed: AtomicU64,
    denied: AtomicU64,
    /// Denied by an emergency, the last one: its tag, and the looks in the low bits.
    blocked: AtomicU64,
}

impl KeySample {
    /// Takes the memory of a smallest sample; `None` if the share has none.
    fn new(share: Arc<SlotShare>) -> Option<Self> {
        let is_taken = share.take(SAMPLE_SLOTS_MIN);
        let slots = ArcSwap::from_pointee(KeySlots::new(SAMPLE_SLOTS_MIN, 0));
        is_taken.then(|| Self { slots, adding: Mutex::default(), baselines: AtomicUsize::new(0), share })
    }

    fn slots(&self) -> Arc<KeySlots> {
        self.slots.load_full()
    }

    #[inline]
    fn note(&self, hash: KeyHash, outcome: KeyOutcome) {
        if outcome == KeyOutcome::DeniedInShadow && self.is_watched() {
            return;
        }
        let slots = self.slots.load();
        if !slots.admits(hash) {
            return;
        }
        match slots.find(hash) {
            Some(slot) => slot.mark(outcome, 1),
            // Only keys that the rule let pass before are of interest.
            None if matches!(outcome, KeyOutcome::DeniedByEmergency(_)) => {}
            None => self.add(hash, outcome, 1),
        }
    }

    fn recall(&self, hash: KeyHash, outcome: KeyOutcome, ago: u32) {
        let Some(bit) = 1_u64.checked_shl(ago) else { return };
        match self.slots().find(hash) {
            Some(slot) => slot.mark(outcome, bit),
            None => self.add(hash, outcome, bit),
        }
    }

    /// Adds a key. If another thread is adding one, this key waits for its next request.
    #[cold]
    fn add(&self, hash: KeyHash, outcome: KeyOutcome, bit: u64) {
        // Before the lock, so that requests during a watch write no shared memory.
        if self.is_watched() {
            return;
        }
        let Ok(_adding) = self.adding.try_lock() else { return };
        if self.is_watched() {
            return;
        }
        let mut slots = self.slots();
        if slots.is_full() {
            slots = self.make_room(&slots);
        }
        if slots.admits(hash) {
            slots.insert(hash, outcome, bit);
        }
    }

    /// Grows the slots, or drops the keys of the next level.
    fn make_room(&self, slots: &KeySlots) -> Arc<KeySlots> {
        let capacity = slots.slots.len();
        let larger = (capacity * GROWTH).min(SAMPLE_SLOTS_MAX);
        let roomy = if larger > capacity && self.share.take_to_grow(larger - capacity) {
            slots.rebuilt(larger, slots.level)
        } else {
            let mut thinned = slots.rebuilt(capacity, slots.level + 1);
            while thinned.is_full() && thinned.level < LEVEL_MAX {
                thinned = slots.rebuilt(capacity, thinned.level + 1);
            }
            thinned
        };
        let roomy = Arc::new(roomy);
        self.slots.store(Arc::clone(&roomy));
        roomy
    }

    /// Ends a look. Returns whether no key has a mark.
    fn end_look(&self) -> bool {
        let slots = self.slots();
        slots.used().for_each(KeySlot::shift);
        if self.is_watched() {
            return false;
        }
        let live = slots.used().filter(|slot| slot.is_marked()).count();
        if live * 2 < slots.used.load(Ordering::Relaxed) {
            self.shrink(live);
        }
        live == 0
    }

    /// Drops the keys without marks. A sample that becomes small admits more keys again.
    fn shrink(&self, live: usize) {
        let _adding = self.lock();
        if self.is_watched() {
            return;
        }
        let slots = self.slots();
        let capacity = slots.slots.len();
        let mut smaller = SAMPLE_SLOTS_MIN;
        while smaller < capacity && smaller < live * 2 {
            smaller *= GROWTH;
        }
        let smaller = smaller.min(capacity);
        let level = if live < capacity / GROWTH { slots.level.saturating_sub(1) } else { slots.level };
        self.slots.store(Arc::new(slots.rebuilt(smaller, level)));
        self.share.give_back(capacity - smaller);
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        // Slots are replaced as a whole, so a panic leaves them as they were.
        self.adding.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_watched(&self) -> bool {
        self.baselines.load(Ordering::Acquire) > 0
    }

    fn is_idle(&self) -> bool {
        !self.is_watched() && !self.slots().used().any(KeySlot::is_marked)
    }

    /// Holds the keys as they are, until [`release`](Self::release), and returns them.
    pub(crate) fn hold(&self) -> Arc<KeySlots> {
        let _adding = self.lock();
        self.baselines.fetch_add(1, Ordering::AcqRel);
        self.slots()
    }

    pub(crate) fn release(&self) {
        self.baselines.fetch_sub(1, Ordering::AcqRel);
    }

    /// Returns the marks of the looks before the last `looks`.
    pub(crate) fn prior_marks(&self, looks: u32) -> PriorMarks {
        PriorMarks::of(&self.slots(), looks)
    }
}

impl KeySample {
    /// Counts the keys that an emergency denied in the last minute, of those that were allowed
    /// before the last `looks` looks.
    pub(crate) fn blocked(&self, emergency: EmergencyTag, looks: u32) -> KeyTally {
        let before = u64::MAX.checked_shl(looks).unwrap_or(0);
        let minute = (1_u64 << looks.min(LOOKS_PER_MINUTE)) - 1;
        let mut tally = KeyTally::default();
        let slots = self.slots();
        for slot in slots.used().filter(|slot| slot.allowed() & before != 0) {
            let (tag, blocked) = slot.blocked();
            tally.active += usize::from((slot.allowed() | slot.denied() | blocked) & minute != 0);
            tally.denied += usize::from(tag == emergency && blocked & minute != 0);
        }
        tally
    }

    /// Adds the number of keys that each emergency denied in the last minute.
    pub(crate) fn count_blocked(&self, counts: &mut HashMap<EmergencyTag, usize>) {
        for (tag, blocked) in self.slots().used().map(KeySlot::blocked) {
            if blocked != 0 {
                *counts.entry(tag).or_default() += 1;
            }
        }
    }
}

impl Drop for KeySample {
    fn drop(&mut self) {
        self.share.give_back(self.slots().slots.len());
    }
}

impl KeySlots {
    fn new(capacity: usize, level: u32) -> Self {
        let slots = std::iter::repeat_with(KeySlot::default).take(capacity).collect();
        Self { level, used: AtomicUsize::new(0), slots }
    }

    #[inline]
    fn admits(&self, hash: KeyHash) -> bool {
        hash.0.leading_zeros() >= self.level
    }

    fn is_full(&self) -> bool {
        self.used.load(Ordering::Relaxed) >= self.slots.len() / 4 * 3
    }

    /// All slots, in the order in which a hash looks for its own. Their number is a power of two.
    #[inline]
    fn probe(&self, hash: KeyHash) -> impl Iterator<Item = &KeySlot> {
        #[expect(clippy::cast_possible_truncation, reason = "the low bits select a slot")]
        let start = hash.0 as usize & self.slots.len().saturating_sub(1);
        let (behind, from) = self.slots.split_at(start);
        from.iter().chain(behind)
    }

    #[inline]
    fn find(&self, hash: KeyHash) -> Option<&KeySlot> {
        for slot in self.probe(hash) {
            match slot.hash.load(Ordering::Acquire) {
                0 => return None,
                known if known == hash.0 => return Some(slot),
                _ => {}
            }
        }
        None
    }

    /// Inserts a key. Its mark is there before its hash, which other threads look for.
    fn insert(&self, hash: KeyHash, outcome: KeyOutcome, bit: u64) {
        if let Some(slot) = self.find(hash) {
            return slot.mark(outcome, bit);
        }
        let Some(slot) = self.probe(hash).find(|slot| slot.hash.load(Ordering::Acquire) == 0) else { return };
        slot.mark(outcome, bit);
        slot.hash.store(hash.0, Ordering::Release);
        self.used.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the keys with marks that a level admits, in new slots. A mark that another thread
    /// sets meanwhile may be lost.
    fn rebuilt(&self, capacity: usize, level: u32) -> Self {
        let rebuilt = Self::new(capacity, level);
        for slot in self.used().filter(|slot| slot.is_marked()) {
            let hash = KeyHash(slot.hash.load(Ordering::Acquire));
            if rebuilt.admits(hash) && !rebuilt.is_full() {
                rebuilt.insert(hash, KeyOutcome::Allowed, slot.allowed());
                rebuilt.insert(hash, KeyOutcome::Denied, slot.denied());
                let (tag, blocked) = slot.blocked();
                rebuilt.insert(hash, KeyOutcome::DeniedByEmergency(tag), blocked);
            }
        }
        rebuilt
    }

    fn used(&self) -> impl Iterator<Item = &KeySlot> {
        self.slots.iter().filter(|slot| slot.hash.load(Ordering::Acquire) != 0)
    }

    /// All slots, by position.
    pub(crate) fn all(&self) -> &[KeySlot] {
        &self.slots
    }
}

impl KeySlot {
    pub(crate) fn allowed(&self) -> u64 {
        self.allowed.load(Ordering::Relaxed)
    }

    pub(crate) fn denied(&self) -> u64 {
        self.denied.load(Ordering::Relaxed)
    }

    /// The last emergency that denied the key, and the looks in which it did.
    fn blocked(&self) -> (EmergencyTag, u64) {
        let blocked = self.blocked.load(Ordering::Relaxed);
        (EmergencyTag(blocked & !EmergencyTag::LOOKS), blocked & EmergencyTag::LOOKS)
    }

    fn is_marked(&self) -> bool {
        self.allowed() | self.denied() | self.blocked().1 != 0
    }

    #[inline]
    fn mark(&self, outcome: KeyOutcome, bit: u64) {
        let marks = match outcome {
            KeyOutcome::Allowed => &self.allowed,
            KeyOutcome::Denied | KeyOutcome::DeniedInShadow => &self.denied,
            KeyOutcome::DeniedByEmergency(tag) => return self.mark_blocked(tag, bit),
        };
        // Most are set already: their cache lines are not written.
        if marks.load(Ordering::Relaxed) & bit != bit {
            marks.fetch_or(bit, Ordering::Relaxed);
        }
    }

    fn mark_blocked(&self, tag: EmergencyTag, bits: u64) {
        let (known, looks) = self.blocked();
        let looks = if known == tag { looks } else { 0 };
        self.set_blocked(tag, looks | bits);
    }

    /// Another thread may set a mark of another emergency meanwhile: one of both is lost.
    fn set_blocked(&self, EmergencyTag(tag): EmergencyTag, looks: u64) {
        let looks = looks & EmergencyTag::LOOKS;
        let blocked = if looks == 0 { 0 } else { tag | looks };
        if self.blocked.load(Ordering::Relaxed) != blocked {
            self.blocked.store(blocked, Ordering::Relaxed);
        }
    }

    fn shift(&self) {
        for marks in [&self.allowed, &self.denied] {
            let before = marks.swap(0, Ordering::Relaxed);
            marks.fetch_or(before << 1, Ordering::Relaxed);
        }
        let (tag, looks) = self.blocked();
        self.set_blocked(tag, looks << 1);
    }

    fn fold(&self) {
        for marks in [&self.allowed, &self.denied] {
            if marks.fetch_and(!1, Ordering::Relaxed) & 1 == 1 {
                marks.fetch_or(2, Ordering::Relaxed);
            }
        }
        let (tag, looks) = self.blocked();
        if looks & 1 == 1 {
            self.set_blocked(tag, looks & !1 | 2);
        }
    }
}

#[cfg(test)]
mod tests;
