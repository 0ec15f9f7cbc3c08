//! throttlecrab: its GCRA over the periodic store, sized in advance.

use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::Result;
use throttlecrab::{PeriodicStore, RateLimiter};

use super::{Batch, Contender, Contenders, Entry, KeyCost, Role, Variant};
use crate::workload::{Quota, Workload};

pub(super) const ENTRY: Entry = Entry {
    variants: &[Variant {
        contender: "throttlecrab",
        note: Some(
            "throttlecrab: needs &mut self, so at two threads each check takes a Mutex; at one thread none \
             does",
        ),
    }],
    role: Role::Peer,
    make,
    key_cost: Some(KeyCost { fill_ns: 900, bytes: 164 }),
};

struct Throttlecrab {
    limiter: Mutex<RateLimiter<PeriodicStore>>,
    quota: Quota,
}

/// Uses the periodic store, which scans all keys once a minute. The adaptive store scans them every
/// 100,000 checks, and on every check once it is three quarters full. The probabilistic store scans
/// them every 1,000 checks.
fn make(workload: &Workload) -> Result<Contenders> {
    let store = PeriodicStore::builder().capacity(usize::try_from(workload.keys)?).build();
    Ok(vec![Box::new(Throttlecrab { limiter: Mutex::new(RateLimiter::new(store)), quota: workload.quota })])
}

impl Contender for Throttlecrab {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let lock = || self.limiter.lock().unwrap_or_else(PoisonError::into_inner);
        if batch.contended {
            return batch.count_by_name(|name| self.allow(&mut lock(), name));
        }
        let mut limiter = lock();
        batch.count_by_name(|name| self.allow(&mut limiter, name))
    }
}

impl Throttlecrab {
    #[expect(clippy::disallowed_methods, reason = "its caller gives it the time")]
    fn allow(&self, limiter: &mut RateLimiter<PeriodicStore>, name: &str) -> bool {
        let (count, seconds) = (self.quota.count.into(), self.quota.seconds.into());
        limiter
            .rate_limit(name, count, count, seconds, 1, SystemTime::now())
            .is_ok_and(|(allowed, _)| allowed)
    }
}
