//! An origin in the memory of one process: for tests, and for a region of one node.

use std::sync::{Mutex, PoisonError};

use tidegate_core::origin::{Call, Partition, StoreId};

use crate::{Answer, OriginError, PARTITIONS};

/// How many calls to a partition are made before what is over is dropped from it. Higher: less work in each call; more that
/// is over and still takes memory.
const CALLS_BETWEEN_EXPIRIES: u32 = 1_024;

/// The same while there is no room: a flood of newcomers must not make each call look through everything.
const CALLS_BETWEEN_EXPIRIES_WHEN_FULL: u32 = 64;

/// The most meters in a partition, unless told otherwise. Higher: more keys; more memory when a flood of them comes.
pub const METERS_PER_PARTITION_MAX: usize = 65_536;

/// The store never loses anything while it lives, and nothing of it outlives it.
const STORE: StoreId = StoreId { lineage: 1, boot: 1, parent: 0 };

/// An origin in the memory of one process.
pub struct MemoryOrigin {
    now_us: Box<dyn Fn() -> u64 + Send + Sync>,
    meters_max: usize,
    parts: Vec<Mutex<Part>>,
}

#[derive(Default)]
struct Part {
    partition: Partition,
    calls: u32,
}

impl MemoryOrigin {
    /// An empty origin with this clock: µs since the Unix epoch.
    pub fn new(now_us: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self::with_meters_max(now_us, METERS_PER_PARTITION_MAX)
    }

    /// The same with room for another number of meters in each partition.
    pub fn with_meters_max(now_us: impl Fn() -> u64 + Send + Sync + 'static, meters_max: usize) -> Self {
        let parts = (0..PARTITIONS).map(|_| Mutex::default()).collect();
        Self { now_us: Box::new(now_us), meters_max, parts }
    }

    /// Looks at a partition.
    pub fn look<T>(&self, partition: u16, look: impl FnOnce(&Partition) -> T) -> Option<T> {
        let part = self.parts.get(usize::from(partition))?;
        Some(look(&part.lock().unwrap_or_else(PoisonError::into_inner).partition))
    }

    fn apply(&self, partition: u16, call: &Call) -> Result<tidegate_core::origin::Reply, OriginError> {
        let Some(part) = self.parts.get(usize::from(partition)) else {
            return Err(OriginError::NotApplied(format!(
                "partition: {partition} is outside 0 to {}",
                PARTITIONS - 1
            )));
        };
        let mut part = part.lock().unwrap_or_else(PoisonError::into_inner);
        let now_us = (self.now_us)();
        part.make_room(now_us, call, self.meters_max)?;
        let call = Call { store: STORE, ..call.clone() };
        Ok(part.partition.apply(now_us, &call)?)
    }
}

impl Part {
    /// Drops what is over, now and then, and refuses newcomers that there is no room for.
    fn make_room(&mut self, now_us: u64, call: &Call, meters_max: usize) -> Result<(), OriginError> {
        self.calls += 1;
        let mut is_full = self.is_full(call, meters_max);
        let calls_max = if is_full { CALLS_BETWEEN_EXPIRIES_WHEN_FULL } else { CALLS_BETWEEN_EXPIRIES };
        if self.calls >= calls_max {
            self.calls = 0;
            self.partition.expire(now_us);
            is_full = self.is_full(call, meters_max);
        }
        if is_full {
            return Err(OriginError::NotApplied(format!(
                "the partition has {meters_max} meters and no room for more"
            )));
        }
        Ok(())
    }

    fn is_full(&self, call: &Call, meters_max: usize) -> bool {
        let newcomers = call.updates.iter().filter(|update| self.partition.meter(&update.key).is_none());
        let newcomers = newcomers.count();
        newcomers > 0 && self.partition.meters().len() + newcomers > meters_max
    }
}

impl crate::Origin for MemoryOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> Answer<'a> {
        Box::pin(std::future::ready(self.apply(partition, call)))
    }
}
