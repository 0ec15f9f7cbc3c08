//! An origin in the memory of one process: for tests, and for a region of one node.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tidegate_core::origin::{
    Call, CallReply, Charge, CheckGroup, CheckReply, MergeReply, MergeRequest, MeterReply, MeterUpdate,
    NodeId, Partition, RoundReply, RoundRequest, SESSION_RETENTION_US, StoreId, UNDECIDED,
};

use crate::{LeaseReply, LeaseRequest, OriginError, OriginFuture, PARTITIONS};

/// Interval at which a partition drops expired state, µs. Shorter: expired state takes less memory;
/// more work, because each pass scans the whole partition.
const EXPIRES_EVERY_US: u64 = 10_000_000;

/// The same interval while the partition is full. A rejected key finds room soon after there is
/// some, and a flood of new keys does not make each call scan the partition.
const EXPIRES_EVERY_US_WHEN_FULL: u64 = 1_000_000;

/// Default maximum of meters in a partition. Further keys stay undecided here until other meters
/// expire; known keys are decided as before. Higher: more keys; more memory during a flood of keys.
pub const METERS_PER_PARTITION_MAX: usize = 65_536;

/// The identity of this store. It loses no writes while the process lives, and its state ends with
/// the process.
const STORE: StoreId = StoreId { lineage: 1, boot: 1, parent: 0, up_us: u64::MAX };

/// An origin in the memory of one process.
pub struct MemoryOrigin {
    now_us: Box<dyn Fn() -> u64 + Send + Sync>,
    meters_max: usize,
    parts: Vec<Mutex<MemoryPartition>>,
    /// The holder of the replicator lease, the end of the lease, and the lag that the holder
    /// measured.
    lease: Mutex<Option<(u64, u64, u64)>>,
}

/// The reply to a call with new meters that had no room.
struct OverflowReply {
    sequence: u64,
    reply: CallReply,
    since_us: u64,
}

#[derive(Default)]
struct MemoryPartition {
    partition: Partition,
    /// Time of the last expiry pass, µs.
    expired_us: u64,
    /// The last reply to each node with new meters without room in its last call. The partition
    /// stores this reply without those meters.
    turned_away: BTreeMap<NodeId, OverflowReply>,
}

impl MemoryOrigin {
    /// An empty origin with this clock: µs since the Unix epoch.
    pub fn new(now_us: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self::with_meters_max(now_us, METERS_PER_PARTITION_MAX)
    }

    /// The same with room for another number of meters in each partition.
    pub fn with_meters_max(now_us: impl Fn() -> u64 + Send + Sync + 'static, meters_max: usize) -> Self {
        let parts = (0..PARTITIONS).map(|_| Mutex::default()).collect();
        Self { now_us: Box::new(now_us), meters_max, parts, lease: Mutex::default() }
    }

    /// Looks at a partition.
    pub fn look<T>(&self, partition: u16, look: impl FnOnce(&Partition) -> T) -> Option<T> {
        let part = self.parts.get(usize::from(partition))?;
        Some(look(&part.lock().unwrap_or_else(PoisonError::into_inner).partition))
    }

    fn part(&self, partition: u16) -> Result<MutexGuard<'_, MemoryPartition>, OriginError> {
        let part = self.parts.get(usize::from(partition)).ok_or_else(|| {
            OriginError::NotApplied(format!("partition: {partition} is outside 0 to {}", PARTITIONS - 1))
        })?;
        Ok(part.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn apply(&self, partition: u16, call: &Call) -> Result<CallReply, OriginError> {
        let mut part = self.part(partition)?;
        let now_us = (self.now_us)();
        call.check()?;
        part.call(now_us, &Call { store: STORE, ..call.clone() }, self.meters_max)
    }

    fn take_in(&self, partition: u16, merge: &MergeRequest) -> Result<MergeReply, OriginError> {
        let mut part = self.part(partition)?;
        let now_us = (self.now_us)();
        merge.check()?;
        part.merge(now_us, merge, self.meters_max)
    }
}

impl MemoryPartition {
    /// Applies a call to all meters that are known or have room. Checks on other meters stay
    /// undecided: their class decides, as if there was no origin.
    fn call(&mut self, now_us: u64, call: &Call, meters_max: usize) -> Result<CallReply, OriginError> {
        let last = self.turned_away.get_mut(&call.node);
        if let Some(last) = last.filter(|last| last.sequence == call.sequence) {
            // A repeat renews the retention of the reply, here and in the partition.
            last.since_us = now_us;
            self.partition
                .apply(now_us, &Call { updates: Vec::new(), checks: Vec::new(), ..call.clone() })?;
            return Ok(last.reply.clone());
        }
        let has_room = self.room_for(now_us, call.updates.iter().map(|update| &*update.key), meters_max);
        if has_room.iter().all(|has_room| *has_room) {
            let reply = self.partition.apply(now_us, call)?;
            self.turned_away.remove(&call.node);
            return Ok(reply);
        }
        let reply = self.partition.apply(now_us, &without(call, &has_room))?;
        let reply = with_turned_away(call, &has_room, reply);
        let last = OverflowReply { sequence: call.sequence, reply: reply.clone(), since_us: now_us };
        self.turned_away.insert(call.node, last);
        Ok(reply)
    }

    /// Charges a peer's usage to all meters that are known or have room. Other components are
    /// ignored, as if their meters had been evicted: the next component of such a meter carries the
    /// full totals again.
    fn merge(
        &mut self,
        now_us: u64,
        merge: &MergeRequest,
        meters_max: usize,
    ) -> Result<MergeReply, OriginError> {
        let keys = merge.components.iter().map(|component| &*component.key);
        let mut has_room = self.room_for(now_us, keys, meters_max).into_iter();
        let mut known = merge.clone();
        known.components.retain(|_| has_room.next().unwrap_or(false));
        Ok(self.partition.merge(now_us, &known)?)
    }

    /// Of each meter, whether it is known or there is room for it.
    fn room_for<'k>(
        &mut self,
        now_us: u64,
        keys: impl Iterator<Item = &'k [u8]> + Clone,
        meters_max: usize,
    ) -> Vec<bool> {
        let newcomers = keys.clone().filter(|key| self.partition.meter(key).is_none()).count();
        let is_full = newcomers > 0 && self.partition.meters().len() + newcomers > meters_max;
        self.expire(now_us, if is_full { EXPIRES_EVERY_US_WHEN_FULL } else { EXPIRES_EVERY_US });
        let mut room = meters_max.saturating_sub(self.partition.meters().len());
        let mut has_room = |key: &[u8]| {
            let is_known = self.partition.meter(key).is_some();
            let is_let_in = !is_known && room > 0;
            room -= usize::from(is_let_in);
            is_known || is_let_in
        };
        keys.map(&mut has_room).collect()
    }

    /// Drops expired state, unless the last pass is less than `every_us` away. A clock that was set
    /// back does not delay it.
    fn expire(&mut self, now_us: u64, every_us: u64) {
        if now_us.abs_diff(self.expired_us) >= every_us {
            self.expired_us = now_us;
            self.partition.expire(now_us);
            self.turned_away.retain(|_, last| last.since_us + SESSION_RETENTION_US > now_us);
        }
    }
}

/// Returns the call without the meters that have no room, and without the checks that need them.
fn without(call: &Call, has_room: &[bool]) -> Call {
    // The new position of each meter that is left.
    let mut next = 0;
    let places: Vec<Option<u16>> = has_room
        .iter()
        .map(|has_room| {
            next += u16::from(*has_room);
            has_room.then(|| next - 1)
        })
        .collect();
    let place = |charge: &Charge| {
        let meter = places.get(usize::from(charge.meter)).copied().flatten()?;
        Some(Charge { meter, ..*charge })
    };
    let checks = call.checks.iter().filter_map(|ask| {
        let charges: Option<Vec<Charge>> = ask.charges.iter().map(place).collect();
        Some(CheckGroup { charges: charges?, ..ask.clone() })
    });
    let updates = call.updates.iter().zip(has_room).filter(|(_, has_room)| **has_room);
    let updates = updates.map(|(update, _)| update.clone()).collect();
    Call { updates, checks: checks.collect(), ..call.clone() }
}

/// Extends the reply to a reduced call to the full call.
fn with_turned_away(call: &Call, has_room: &[bool], reply: CallReply) -> CallReply {
    let (mut meter_reply, mut checks) = (reply.meters.into_iter(), reply.checks.into_iter());
    let tell = |(update, has_room): (&MeterUpdate, &bool)| {
        let known = if *has_room { meter_reply.next() } else { None };
        known.unwrap_or_else(|| nothing_known(update))
    };
    let has_room_for = |charge: &Charge| has_room.get(usize::from(charge.meter)).is_some_and(|has| *has);
    // Position in the full call of each meter that had room.
    let places: Vec<u16> = (0..).zip(has_room).filter(|(_, has_room)| **has_room).map(|(at, _)| at).collect();
    let place = |left: u16| places.get(usize::from(left)).copied().unwrap_or(left);
    let decide = |ask: &CheckGroup| {
        let decided = if ask.charges.iter().all(has_room_for) { checks.next() } else { None };
        match decided {
            Some(decided) => CheckReply { denied_by: place(decided.denied_by), ..decided },
            None => CheckReply { passed: 0, denied_by: UNDECIDED, retry_us: 0 },
        }
    };
    let meter_reply = call.updates.iter().zip(has_room).map(tell).collect();
    let checks = call.checks.iter().map(decide).collect();
    CallReply { meters: meter_reply, checks, ..reply }
}

/// Returns the reply for a meter without usage and without a grant.
fn nothing_known(update: &MeterUpdate) -> MeterReply {
    MeterReply {
        grant: 0,
        life_us: 0,
        room: update.terms.capacity(),
        remaining: update.terms.capacity(),
        wait_us: 0,
        cell: update.cell,
        holders: 1,
        exhausted: false,
        lapsed: false,
        recall: false,
        is_global: false,
    }
}

impl crate::Origin for MemoryOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        Box::pin(std::future::ready(self.apply(partition, call)))
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        let now_us = (self.now_us)();
        let gathered = self.part(partition).map(|mut part| part.partition.round(now_us, STORE, round));
        Box::pin(std::future::ready(gathered))
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        Box::pin(std::future::ready(self.take_in(partition, merge)))
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        let LeaseRequest { holder, for_us, lag_us } = request;
        let now_us = (self.now_us)();
        let mut lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        let is_free = lease.is_none_or(|(of, until_us, _)| of == holder || until_us <= now_us);
        if is_free {
            *lease = (for_us > 0).then_some((holder, now_us.saturating_add(for_us), lag_us));
        }
        let lag_us = lease.map_or(0, |(.., lag_us)| lag_us);
        Box::pin(std::future::ready(Ok(LeaseReply { is_held: is_free && for_us > 0, lag_us })))
    }
}
