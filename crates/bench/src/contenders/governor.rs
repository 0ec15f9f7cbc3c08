//! governor: a keyed limiter on its default `DashMap`, sized in advance, with its default clock.

use std::hash::Hash;
use std::num::NonZeroU32;

use anyhow::{Context, Result};
use governor::clock::DefaultClock;
use governor::state::keyed::DefaultKeyedStateStore;
use governor::{DefaultKeyedRateLimiter, Quota, RateLimiter};

use super::{Batch, Contender, Entry, KeyCost, Role, Variant};
use crate::workload::Workload;

pub(super) const BY_STRING: Entry = Entry {
    variants: &[Variant {
        contender: "governor_string",
        note: Some(
            "governor_string: the key is copied into one reused String, since check_key takes &String",
        ),
    }],
    role: Role::Peer,
    make: |workload| Ok(vec![Box::new(ByString(limiter(workload)?))]),
    key_cost: Some(KeyCost { fill_ns: 900, bytes: 87 }),
};

pub(super) const BY_NUMBER: Entry = Entry {
    variants: &[Variant { contender: "governor_u64", note: None }],
    role: Role::Peer,
    make: |workload| Ok(vec![Box::new(ByNumber(limiter(workload)?))]),
    key_cost: Some(KeyCost { fill_ns: 450, bytes: 29 }),
};

struct ByString(DefaultKeyedRateLimiter<String>);

impl Contender for ByString {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let mut key = String::new();
        batch.count_by_name(|name| {
            key.clear();
            key.push_str(name);
            self.0.check_key(&key).is_ok()
        })
    }
}

struct ByNumber(DefaultKeyedRateLimiter<u64>);

impl Contender for ByNumber {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        batch.count_by_number(|number| self.0.check_key(&number).is_ok())
    }
}

/// As `RateLimiter::keyed` makes it, but with room for all keys: growing would only lengthen the
/// fill.
fn limiter<K: Hash + Eq + Clone>(workload: &Workload) -> Result<DefaultKeyedRateLimiter<K>> {
    let store = DefaultKeyedStateStore::with_capacity(usize::try_from(workload.keys)?);
    Ok(RateLimiter::new(quota(workload)?, store, DefaultClock::default()))
}

fn quota(workload: &Workload) -> Result<Quota> {
    let burst = NonZeroU32::new(workload.quota.count).context("a quota of nothing")?;
    let quota = Quota::with_period(workload.quota.interval()).context("a quota without a period")?;
    Ok(quota.allow_burst(burst))
}
