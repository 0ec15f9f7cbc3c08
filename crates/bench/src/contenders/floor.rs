//! The floors: one compare-and-swap per check in a flat table, the least that any exact limiter can
//! do.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use anyhow::Result;

use super::{Batch, Contender, Contenders, Entry, KeyCost, Role, Variant};
use crate::flat_table::{FlatTable, LINE_BYTES};
use crate::machine;
use crate::workload::{Quota, Workload};

pub(super) const ENTRY: Entry = Entry {
    variants: &[
        Variant {
            contender: "floor",
            note: Some("floor: keys by number, no names, no hash of them, clock read once per batch"),
        },
        Variant { contender: "floor_prefetch", note: None },
    ],
    role: Role::Yardstick,
    make,
    key_cost: Some(KEY_COST),
};

const KEY_COST: KeyCost = KeyCost { fill_ns: 30, bytes: 46 };

/// Keys per cache line, as in Tidegate's own table.
const KEYS_PER_LINE: f64 = 1.4;

/// Checks between the prefetch of a line and its use: enough to cover a cache miss, few enough for
/// the core's line-fill buffers.
const PREFETCH_AHEAD: usize = 12;

fn make(workload: &Workload) -> Result<Contenders> {
    let meters = Arc::new(Meters::new(workload)?);
    Ok(vec![Box::new(Plain(Arc::clone(&meters))), Box::new(PrefetchFloor(meters))])
}

struct Plain(Arc<Meters>);

impl Contender for Plain {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let now = self.0.now();
        batch.count_by_number(|key| self.0.allow(key, now))
    }
}

struct PrefetchFloor(Arc<Meters>);

impl Contender for PrefetchFloor {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        let now = self.0.now();
        let (first, later) = batch.numbers.split_at(PREFETCH_AHEAD.min(batch.numbers.len()));
        for &key in first {
            self.0.table.prefetch(key);
        }
        let mut later = later.iter();
        batch.count_by_number(|key| {
            if let Some(&key) = later.next() {
                self.0.table.prefetch(key);
            }
            self.0.allow(key, now)
        })
    }
}

/// A GCRA that finds its meters without comparing keys: two keys may share one.
struct Meters {
    table: FlatTable,
    started: Instant,
    interval_ns: u64,
    burst_ns: u64,
}

impl Meters {
    fn new(workload: &Workload) -> Result<Self> {
        let Quota { count, .. } = workload.quota;
        let interval_ns = workload.quota.interval().as_nanos() as u64;
        let lines = (workload.keys as f64 / KEYS_PER_LINE).ceil() as usize;
        let burst_ns = interval_ns * u64::from(count);
        Ok(Self { table: FlatTable::new(lines)?, started: machine::now(), interval_ns, burst_ns })
    }

    fn now(&self) -> u64 {
        (machine::now() - self.started).as_nanos() as u64
    }

    fn allow(&self, key: u64, now: u64) -> bool {
        let step = |arrival: u64| {
            let next = arrival.max(now) + self.interval_ns;
            (next - now <= self.burst_ns).then_some(next)
        };
        self.table.meter(key).fetch_update(Ordering::Relaxed, Ordering::Relaxed, step).is_ok()
    }
}

const _: () = assert!(KEY_COST.bytes as f64 > LINE_BYTES as f64 / KEYS_PER_LINE);
