//! Records that wait to be sent: bounded, and never waited for by the log.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::entry::{RecordContext, RecordKind};
use crate::layout::{put_again, put_setting};

/// Maximum size of the waiting records, in bytes. Higher: longer pauses of the collector lose
/// nothing; more memory during a pause.
const QUEUE_BYTES_MAX: usize = 16 << 20;

/// The part of it, in quarters, that samples and denials in shadow may fill. The rest is for
/// denials.
const QUARTERS_FOR_SAMPLES: usize = 3;

/// The records that are sent together. Higher: fewer requests; larger ones, at up to two kilobytes
/// of JSON for a record.
const BATCH_RECORDS: u64 = 500;

/// Records that are sent together, as the log has them.
#[derive(Debug, Default)]
pub(crate) struct Batch {
    pub(crate) bytes: Vec<u8>,
    pub(crate) records: u64,
}

impl Batch {
    /// Adds a record with its setting, unless they take more than `most` bytes. Returns their size.
    fn add(&mut self, setting: &RecordContext<'_>, frame: &[u8], most: usize) -> usize {
        let before = self.bytes.len();
        put_setting(&mut self.bytes, setting);
        // Each record has a setting, so the number of records before it is the number of its own.
        put_again(&mut self.bytes, frame, u32::try_from(self.records).unwrap_or(u32::MAX));
        let added = self.bytes.len() - before;
        if added > most {
            self.bytes.truncate(before);
            return 0;
        }
        self.records += 1;
        added
    }
}

#[derive(Debug, Default)]
struct QueueState {
    batches: VecDeque<Batch>,
    bytes: usize,
    is_closed: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Queue {
    waiting: Mutex<QueueState>,
    changed: Condvar,
    sent: AtomicU64,
    dropped: AtomicU64,
}

/// Numbers of records sent and dropped so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Records that the collector acknowledged.
    pub sent: u64,
    /// Records without room, or that the collector refused.
    pub dropped: u64,
}

impl Queue {
    /// Adds a record with its setting, if there is room. The caller wakes the sender afterwards
    /// with [`Queue::notify`].
    pub(crate) fn push(&self, kind: RecordKind, setting: &RecordContext<'_>, frame: &[u8]) {
        let mut waiting = self.lock();
        if waiting.batches.back().is_none_or(|batch| batch.records == BATCH_RECORDS) {
            waiting.batches.push_back(Batch::default());
        }
        let bytes = waiting.bytes;
        let Some(batch) = waiting.batches.back_mut() else { return };
        let added = batch.add(setting, frame, room(kind).saturating_sub(bytes));
        if batch.records == 0 {
            waiting.batches.pop_back();
        }
        waiting.bytes += added;
        drop(waiting);
        if added == 0 {
            self.count(0, 1);
        }
    }

    /// Wakes the sending thread.
    pub(crate) fn notify(&self) {
        self.changed.notify_one();
    }

    /// Waits for the next batch; `None` once the queue is closed and empty.
    pub(super) fn next(&self) -> Option<Batch> {
        let is_idle = |waiting: &mut QueueState| waiting.batches.is_empty() && !waiting.is_closed;
        let waiting = self.changed.wait_while(self.lock(), is_idle);
        let mut waiting = waiting.unwrap_or_else(PoisonError::into_inner);
        let batch = waiting.batches.pop_front()?;
        waiting.bytes -= batch.bytes.len();
        Some(batch)
    }

    /// Waits for this time, or until the queue is closed. Returns whether it is closed.
    pub(super) fn wait_closed(&self, time: Duration) -> bool {
        let open = |waiting: &mut QueueState| !waiting.is_closed;
        let (waiting, _) =
            self.changed.wait_timeout_while(self.lock(), time, open).unwrap_or_else(PoisonError::into_inner);
        waiting.is_closed
    }

    /// Closes the queue. The log adds no record afterwards.
    pub(super) fn close(&self) {
        self.lock().is_closed = true;
        self.changed.notify_one();
    }

    pub(super) fn is_closed(&self) -> bool {
        self.lock().is_closed
    }

    pub(super) fn count(&self, sent: u64, dropped: u64) {
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.dropped.fetch_add(dropped, Ordering::Relaxed);
    }

    pub(crate) fn delivery(&self) -> Delivery {
        Delivery { sent: self.sent.load(Ordering::Relaxed), dropped: self.dropped.load(Ordering::Relaxed) }
    }

    /// Locks the queue. Batches are consistent between any two records, also after a panic.
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the size up to which the queue takes a record of this kind.
fn room(kind: RecordKind) -> usize {
    match kind {
        RecordKind::Denial => QUEUE_BYTES_MAX,
        RecordKind::Shadow | RecordKind::Sample => QUEUE_BYTES_MAX / 4 * QUARTERS_FOR_SAMPLES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::tests::denied;

    #[test]
    fn denials_have_room_that_samples_cannot_take() {
        let queue = Queue::default();
        let (entry, frame) = (denied("key", 0), vec![0; 1_000]);
        let setting = RecordContext::of(&entry);
        let size = Batch::default().add(&setting, &frame, QUEUE_BYTES_MAX);
        let pushed = QUEUE_BYTES_MAX / size + 1;
        let fill = |kind| {
            let before = queue.delivery().dropped;
            (0..pushed).for_each(|_| queue.push(kind, &setting, &frame));
            pushed as u64 - (queue.delivery().dropped - before)
        };
        let (samples, denials) = (fill(RecordKind::Sample), fill(RecordKind::Denial));
        assert_eq!(samples, (QUEUE_BYTES_MAX / 4 * 3 / size) as u64);
        assert_eq!(samples + denials, (QUEUE_BYTES_MAX / size) as u64);
        queue.close();
        let mut taken = 0;
        while let Some(batch) = queue.next() {
            assert!(batch.records <= BATCH_RECORDS);
            taken += batch.records;
        }
        assert_eq!(taken, samples + denials);
        // A taken batch frees its room.
        queue.push(RecordKind::Sample, &setting, &frame);
        assert_eq!(queue.next().map(|batch| batch.records), Some(1));
    }
}
