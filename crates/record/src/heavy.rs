//! Heavy keys: a summary of each minute, of bounded size, computed from the records that the log
//! receives.
//!
//! In a minute a key *was near* a limit if one of its records found more than [`NEAR_PERCENT`] of
//! the limit's burst used. It also was near if its samples show more than that share of the limit's
//! amount per minute. Levels alone are not enough: under GCRA, a key that steadily uses nine tenths
//! of the rate has an empty bucket.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher as _;

use foldhash::quality::RandomState;
use serde::Serialize;

use crate::entry::{DecisionEntry, LimitTerms, RecordVerdict};

/// Percentage of a limit from which on a key is near it.
const NEAR_PERCENT: u64 = 80;

/// Minimum number of samples in a minute to estimate a rate. With sixteen, the error is about a
/// quarter.
const SAMPLES_MIN: u64 = 16;

/// Maximum number of minutes that are stored and that a query can cover.
pub const MINUTES_MAX: u64 = 60;

/// Minutes that a record may be ahead of `now_ms`. The log reads the clock before it drains the
/// record.
const MINUTES_AHEAD_MAX: u64 = 1;

/// Minimum number of minutes of a query: shorter use is not sustained.
pub const MINUTES_MIN: u64 = 2;

/// Maximum number of keys of a minute. Beyond it, the rarer half is dropped. Higher: also keys with
/// few records are listed; some 300 bytes each, for each minute.
const KEYS_MAX: usize = 2_048;

/// Slots for new keys of a crowded minute. Each stores a hash only; the key is listed when it comes
/// again. Higher: rare keys are recognized; four bytes each, for each minute in which keys were
/// dropped.
const STRANGERS: usize = 4 * KEYS_MAX;

/// Maximum number of keys in one answer.
pub const HEAVY_MAX: usize = 1_000;

const MINUTE_MS: u64 = 60_000;

/// A key that has been near a limit for a while.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct HeavyKey {
    /// Tenant of the key.
    pub tenant: String,
    /// The limited key.
    pub key: String,
    /// Rule of the limit.
    pub rule: String,
    /// The limit.
    pub limit: LimitTerms,
    /// Number of minutes in which it was near the limit.
    pub minutes_near: u64,
    /// Highest level that one of its requests found, in percent of the burst.
    pub level_percent_max: u64,
    /// Highest use in one minute, in percent of the amount that the limit allows; `None` with too
    /// few samples.
    pub use_percent_max: Option<u64>,
    /// Number of its denied requests.
    pub denied: u64,
}

/// Heavy keys of a tenant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeavyKeys {
    /// Number of keys.
    pub of: usize,
    /// The keys that were near a limit most often.
    pub keys: Vec<HeavyKey>,
    /// The records of the tenant in the minutes of the query.
    pub counts: RecordCounts,
    /// Keys that were near a limit in at least one of the minutes.
    pub keys_near: usize,
    /// The most minutes that one of these keys was near a limit.
    pub minutes_near_max: u64,
}

/// Records of a tenant, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordCounts {
    /// All records.
    pub records: u64,
    /// Denials among them.
    pub denied: u64,
}

impl RecordCounts {
    fn note(&mut self, entry: &DecisionEntry<'_>) {
        self.records += 1;
        self.denied += u64::from(entry.verdict == RecordVerdict::Denied);
    }

    fn add(&mut self, other: Self) {
        self.records += other.records;
        self.denied += other.denied;
    }
}

/// Usage of a key in one minute.
#[derive(Clone, Debug)]
struct KeyUsage {
    /// Tenant, rule and key, concatenated: one allocation for each key, because new keys may arrive
    /// faster than the allocator could serve three.
    texts: Box<str>,
    tenant_end: usize,
    rule_end: usize,
    limit: LimitTerms,
    /// Records of the key, less the reductions by `make_room`.
    weight: u64,
    level_percent_max: u64,
    samples: u64,
    sampled_cost: u64,
    denied: u64,
}

/// The minutes that are remembered.
#[derive(Debug, Default)]
pub(crate) struct Minutes {
    known: BTreeMap<u64, Minute>,
    /// Random for each process, so that no client can choose a key that collides with another one.
    hasher: RandomState,
}

/// Keys seen in one minute.
#[derive(Debug, Default)]
struct Minute {
    /// By [`Minutes::id`].
    keys: HashMap<u64, KeyUsage, RandomState>,
    /// Hashes of new keys since keys were first dropped, each in its slot; empty before. Most keys
    /// never return, and would only displace others.
    strangers: Box<[u32]>,
    /// By tenant, of which a server has at most 1,000. Unlike keys, counts are never dropped.
    counts: HashMap<Box<str>, RecordCounts, RandomState>,
}

impl Minutes {
    /// Counts a record, at `now_ms`.
    pub(crate) fn see(&mut self, entry: &DecisionEntry<'_>, now_ms: u64) {
        let (minute, now) = (entry.at_ms / MINUTE_MS, now_ms / MINUTE_MS);
        self.forget_after(now + MINUTES_AHEAD_MAX);
        // A record from long ago, or from a clock far ahead, does not describe the present.
        let near = (now + 1).saturating_sub(MINUTES_MAX)..=now + MINUTES_AHEAD_MAX;
        if !near.contains(&minute) {
            return;
        }
        let id = self.id(entry);
        let minute = self.known.entry(minute).or_default();
        minute.count(entry);
        if entry.limit.burst > 0 {
            minute.note(id, entry);
        }
        while self.known.len() as u64 > MINUTES_MAX {
            self.known.pop_first();
        }
    }

    /// Drops minutes of the future, after the clock was set back: they would displace the next
    /// minutes.
    fn forget_after(&mut self, newest: u64) {
        while self.known.last_key_value().is_some_and(|(minute, _)| *minute > newest) {
            self.known.pop_last();
        }
    }

    /// A key under a rule, of a tenant. Two keys with one hash are listed as one.
    fn id(&self, entry: &DecisionEntry<'_>) -> u64 {
        self.hasher.hash_one((entry.tenant, entry.rule, entry.key))
    }

    /// Returns the keys of a tenant that were near a limit in at least half of the last `minutes`,
    /// including that of `now_ms`. Keys with the most such minutes come first; at most `most` are
    /// returned.
    pub(crate) fn heavy(
        &self,
        tenant: &str,
        minutes: u64,
        now_ms: u64,
        most: usize,
        sample_rate: f64,
    ) -> HeavyKeys {
        let minutes = minutes.clamp(MINUTES_MIN, MINUTES_MAX);
        let newest = now_ms / MINUTE_MS;
        let mut found: HashMap<u64, HeavyKey> = HashMap::new();
        let mut counts = RecordCounts::default();
        for (_, seen) in self.known.range((newest + 1).saturating_sub(minutes)..=newest) {
            counts.add(seen.counts.get(tenant).copied().unwrap_or_default());
            for (id, seen) in seen.keys.iter().filter(|(_, seen)| seen.tenant() == tenant) {
                found.entry(*id).or_insert_with(|| seen.heavy()).add(seen, sample_rate);
            }
        }
        let near = found.values().filter(|heavy| heavy.minutes_near > 0);
        let (keys_near, minutes_near_max) =
            near.fold((0, 0), |(keys, most), heavy| (keys + 1, heavy.minutes_near.max(most)));
        let mut found: Vec<_> =
            found.into_values().filter(|heavy| heavy.minutes_near >= minutes.div_ceil(2)).collect();
        found.sort_by(|a, b| (b.minutes_near, b.denied, &a.key).cmp(&(a.minutes_near, a.denied, &b.key)));
        let of = found.len();
        found.truncate(most.min(HEAVY_MAX));
        HeavyKeys { of, keys: found, counts, keys_near, minutes_near_max }
    }
}

impl Minute {
    fn count(&mut self, entry: &DecisionEntry<'_>) {
        match self.counts.get_mut(entry.tenant) {
            Some(counts) => counts.note(entry),
            None => self.counts.entry(entry.tenant.into()).or_default().note(entry),
        }
    }

    fn note(&mut self, id: u64, entry: &DecisionEntry<'_>) {
        if let Some(seen) = self.keys.get_mut(&id) {
            return seen.note(entry);
        }
        if self.is_stranger(id) {
            return;
        }
        if self.keys.len() >= KEYS_MAX {
            self.make_room();
        }
        let mut seen = KeyUsage::new(entry);
        seen.note(entry);
        self.keys.insert(id, seen);
    }

    /// Whether this is the first record of a new key in a crowded minute. Stores the key's hash, so
    /// that the next record counts.
    fn is_stranger(&mut self, id: u64) -> bool {
        if self.strangers.is_empty() {
            return false;
        }
        let [a, b, c, d, high @ ..] = id.to_le_bytes();
        let place = u32::from_le_bytes([a, b, c, d]) as usize % STRANGERS;
        let number = u32::from_le_bytes(high);
        std::mem::replace(&mut self.strangers[place], number) != number
    }

    /// Subtracts the median weight from all keys and drops those without weight. A listed key with
    /// more than one in [`KEYS_MAX`] / 2 records stays, however many new keys come.
    fn make_room(&mut self) {
        if self.strangers.is_empty() {
            self.strangers = vec![0; STRANGERS].into();
        }
        let mut weights: Vec<u64> = self.keys.values().map(|seen| seen.weight).collect();
        let middle = weights.len() / 2;
        let (_, median, _) = weights.select_nth_unstable(middle);
        let median = *median;
        self.keys.retain(|_, seen| {
            seen.weight = seen.weight.saturating_sub(median);
            seen.weight > 0
        });
    }
}

impl KeyUsage {
    fn new(entry: &DecisionEntry<'_>) -> Self {
        Self {
            texts: [entry.tenant, entry.rule, entry.key].concat().into(),
            tenant_end: entry.tenant.len(),
            rule_end: entry.tenant.len() + entry.rule.len(),
            limit: entry.limit,
            weight: 0,
            level_percent_max: 0,
            samples: 0,
            sampled_cost: 0,
            denied: 0,
        }
    }

    fn tenant(&self) -> &str {
        &self.texts[..self.tenant_end]
    }

    fn note(&mut self, entry: &DecisionEntry<'_>) {
        self.limit = entry.limit;
        self.weight += 1;
        self.level_percent_max = self.level_percent_max.max(found_percent(entry));
        match entry.verdict {
            RecordVerdict::Denied => self.denied += 1,
            RecordVerdict::Allowed => {
                self.samples += 1;
                self.sampled_cost = self.sampled_cost.saturating_add(entry.cost);
            }
            RecordVerdict::ShadowDenied => {}
        }
    }

    fn heavy(&self) -> HeavyKey {
        HeavyKey {
            tenant: self.tenant().to_owned(),
            key: self.texts[self.rule_end..].to_owned(),
            rule: self.texts[self.tenant_end..self.rule_end].to_owned(),
            limit: self.limit,
            minutes_near: 0,
            level_percent_max: 0,
            use_percent_max: None,
            denied: 0,
        }
    }

    /// Estimates the use in the minute, in percent of the amount that the limit allows per minute.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        reason = "an estimate of a value that is not negative"
    )]
    fn use_percent(&self, sample_rate: f64) -> Option<u64> {
        if self.samples < SAMPLES_MIN || self.limit.amount == 0 {
            return None;
        }
        let used = self.sampled_cost as f64 / sample_rate;
        let minutes = self.limit.period_ms.max(1) as f64 / MINUTE_MS as f64;
        Some((100.0 * used * minutes / f64::from(self.limit.amount)) as u64)
    }
}

impl HeavyKey {
    fn add(&mut self, seen: &KeyUsage, sample_rate: f64) {
        let used = seen.use_percent(sample_rate);
        let is_near = seen.level_percent_max > NEAR_PERCENT || used.is_some_and(|used| used > NEAR_PERCENT);
        self.minutes_near += u64::from(is_near);
        self.level_percent_max = self.level_percent_max.max(seen.level_percent_max);
        self.use_percent_max = self.use_percent_max.max(used);
        self.denied += seen.denied;
        self.limit = seen.limit;
    }
}

/// Returns the level that a request found before its own charge, in percent of the burst. A single
/// request does not use up a limit with a burst of one.
fn found_percent(entry: &DecisionEntry<'_>) -> u64 {
    let own = if entry.verdict == RecordVerdict::Denied { 0 } else { entry.cost };
    100 * u64::from(entry.level()).saturating_sub(own) / u64::from(entry.limit.burst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::tests::denied;

    const MINUTE: u64 = MINUTE_MS;

    fn keys(minutes: &Minutes, last: u64, now_ms: u64) -> Vec<String> {
        let HeavyKeys { of, keys, .. } = minutes.heavy("t", last, now_ms, HEAVY_MAX, 0.001);
        assert_eq!(of.min(HEAVY_MAX), keys.len());
        keys.into_iter().map(|heavy| heavy.key).collect()
    }

    /// Takes a record in when it was made.
    fn see(minutes: &mut Minutes, entry: &DecisionEntry<'_>) {
        minutes.see(entry, entry.at_ms);
    }

    fn allowed(key: &str, at_ms: u64, remaining: u32) -> DecisionEntry<'_> {
        DecisionEntry { verdict: RecordVerdict::Allowed, remaining, ..denied(key, at_ms) }
    }

    #[test]
    fn key_near_its_limit_in_half_of_the_minutes_is_heavy() {
        let mut minutes = Minutes::default();
        for minute in 0..10 {
            see(&mut minutes, &allowed("calm", minute * MINUTE, 50));
            // It found exactly 80 of 100 spent.
            see(&mut minutes, &allowed("edge", minute * MINUTE, 19));
            if minute % 2 == 0 {
                see(&mut minutes, &allowed("half", minute * MINUTE, 18));
            }
            if minute >= 6 {
                see(&mut minutes, &denied("late", minute * MINUTE));
            }
        }
        let now = 9 * MINUTE + 1;
        assert_eq!(keys(&minutes, 10, now), ["half"]);
        assert_eq!(keys(&minutes, 4, now), ["late", "half"]);
        assert!(keys(&minutes, 10, 30 * MINUTE).is_empty(), "the minute is out of the window");
        assert_eq!(minutes.heavy("another", 4, now, HEAVY_MAX, 0.001), HeavyKeys::default());
        let first = minutes.heavy("t", 4, now, 1, 0.001);
        assert_eq!((first.of, first.keys.len(), first.keys[0].key.as_str()), (2, 1, "late"));
    }

    #[test]
    fn records_are_counted_whether_or_not_a_key_is_heavy() {
        let mut minutes = Minutes::default();
        for at in 0..5 {
            see(&mut minutes, &denied("short", 9 * MINUTE + at));
        }
        see(&mut minutes, &allowed("calm", 9 * MINUTE, 50));
        let limit = LimitTerms { amount: 0, burst: 0, period_ms: 1_000 };
        see(&mut minutes, &DecisionEntry { limit, ..denied("blocked", 8 * MINUTE) });
        see(&mut minutes, &DecisionEntry { tenant: "another", ..denied("short", 9 * MINUTE) });
        let found = minutes.heavy("t", 10, 9 * MINUTE + 9, HEAVY_MAX, 0.001);
        assert_eq!((found.of, found.keys_near, found.minutes_near_max), (0, 1, 1));
        assert_eq!(found.counts, RecordCounts { records: 7, denied: 6 });
        let found = minutes.heavy("t", 10, 29 * MINUTE, HEAVY_MAX, 0.001);
        assert_eq!(found, HeavyKeys::default(), "out of the window");
    }

    #[test]
    fn a_limit_of_one_at_a_time_is_not_used_up_by_one() {
        let mut minutes = Minutes::default();
        let limit = LimitTerms { amount: 10, burst: 1, period_ms: 1_000 };
        for minute in 0..4 {
            see(&mut minutes, &DecisionEntry { limit, ..allowed("one", minute * MINUTE, 0) });
            see(&mut minutes, &DecisionEntry { limit, ..denied("more", minute * MINUTE) });
        }
        assert_eq!(keys(&minutes, 4, 4 * MINUTE - 1), ["more"]);
    }

    #[test]
    fn steady_use_is_seen_where_the_bucket_is_empty() {
        let mut minutes = Minutes::default();
        let limit = LimitTerms { amount: 20_000, burst: 20_000, period_ms: 60_000 };
        for at in 0..4 * 19 {
            // 19 samples a minute, of a thousand each: 19,000 of 20,000.
            see(&mut minutes, &DecisionEntry { limit, ..allowed("steady", at * MINUTE / 19, 19_990) });
            if at % 2 == 0 {
                see(&mut minutes, &DecisionEntry { limit, ..allowed("seldom", at * MINUTE / 19, 19_990) });
            }
        }
        let heavy = minutes.heavy("t", 4, 4 * MINUTE - 1, HEAVY_MAX, 0.001).keys;
        assert_eq!(heavy.len(), 1, "{heavy:?}");
        assert_eq!((heavy[0].key.as_str(), heavy[0].minutes_near), ("steady", 4));
        assert!(heavy[0].use_percent_max.is_some_and(|used| (90..=100).contains(&used)), "{heavy:?}");
    }

    #[test]
    fn many_one_time_keys_take_bounded_memory_and_hide_no_heavy_key() {
        let mut minutes = Minutes::default();
        for at in 0..200_000_u64 {
            see(&mut minutes, &denied(&format!("stranger:{at}"), at % 2 * MINUTE));
            if at % 100 < 2 {
                see(&mut minutes, &denied("offender", at % 2 * MINUTE));
            }
        }
        assert!(minutes.known.values().all(|seen| seen.keys.len() <= KEYS_MAX));
        assert_eq!(keys(&minutes, 2, MINUTE).iter().filter(|key| *key == "offender").count(), 1);
    }

    #[test]
    fn no_more_minutes_are_remembered_than_can_be_asked_for() {
        let mut minutes = Minutes::default();
        for minute in 0..10 * MINUTES_MAX {
            see(&mut minutes, &denied("a", minute * MINUTE));
        }
        minutes.see(&denied("old", 0), 10 * MINUTES_MAX * MINUTE - 1);
        assert_eq!(minutes.known.len() as u64, MINUTES_MAX);
        assert_eq!(keys(&minutes, MINUTES_MAX, 10 * MINUTES_MAX * MINUTE - 1), ["a"]);
    }

    #[test]
    fn record_from_the_far_future_hides_no_heavy_key() {
        let mut minutes = Minutes::default();
        minutes.see(&denied("ahead", 1_000 * MINUTE), 0);
        for minute in 0..4 {
            see(&mut minutes, &denied("now", minute * MINUTE));
            // A record may be one minute ahead, because the log reads the clock first.
            minutes.see(&denied("next", (minute + 1) * MINUTE), minute * MINUTE);
            minutes.see(&denied("ahead", (minute + 2) * MINUTE), minute * MINUTE);
        }
        assert_eq!(keys(&minutes, 4, 4 * MINUTE - 1), ["now", "next"]);
    }

    #[test]
    fn clock_set_back_hides_no_heavy_key() {
        let mut minutes = Minutes::default();
        for minute in 1_000..1_000 + MINUTES_MAX {
            see(&mut minutes, &denied("ahead", minute * MINUTE));
        }
        for minute in 0..4 {
            see(&mut minutes, &denied("now", minute * MINUTE));
        }
        assert_eq!(keys(&minutes, 4, 4 * MINUTE - 1), ["now"]);
    }
}
