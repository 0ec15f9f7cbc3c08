//! Lost writes of a store.

use super::super::call::{Call, StoreId};
use crate::remote_clock::shortest_us;

/// Margin of the test for lost writes of an empty store, µs. The store has lost everything if the
/// node has known the origin for longer than the store is up, by more than this. A sixteenth is
/// added for clocks of different rates. Stores report their uptime in whole seconds.
const LOST_MARGIN_US: u64 = 2_000_000;

/// The store of a partition, and its last loss of writes.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Losses {
    store: Option<StoreId>,
    /// When the last loss was noticed, which identifies it; 0 if there was none.
    pub(super) loss_us: u64,
    /// The same by a clock that may have been set back since.
    pub(super) at_us: u64,
}

impl Losses {
    /// Notes lost writes, and returns whether any were lost since the last reply in the session of
    /// a call. The store has `stored` as the session's last sequence number, and `reported_us` as
    /// the last loss before that reply.
    ///
    /// The store may have a lower sequence number than the node. It may be a restart of the earlier
    /// store, or a promoted replica that had not received all writes. Or it is empty and younger
    /// than the one that the node knows.
    pub(super) fn note(&mut self, now_us: u64, call: &Call, stored: u64, reported_us: u64) -> bool {
        let forgot = call.acknowledged > stored;
        let took_over = self.took_over(call.store);
        let began_anew = self.store.is_none() && began_anew(call.known_us, call.store.up_us);
        self.store = Some(call.store);
        // If the clock was set back to before a loss, the loss counts as just now. A loss in the
        // future would keep the assumed usage from draining.
        self.at_us = self.at_us.min(now_us);
        if forgot || took_over {
            (self.loss_us, self.at_us) = (now_us, now_us);
        } else if began_anew {
            let booted_us = now_us.saturating_sub(call.store.up_us);
            (self.loss_us, self.at_us) = (booted_us, booted_us);
        }
        forgot || took_over || began_anew || (call.acknowledged > 0 && self.loss_us != reported_us)
    }

    /// Whether the store was restarted or promoted since the last call.
    pub(super) fn took_over(&self, store: StoreId) -> bool {
        self.store.is_some_and(|before| {
            before.boot != store.boot && (before.lineage == store.lineage || before.boot == store.parent)
        })
    }
}

/// Whether an empty store replaced the one that the node first knew.
const fn began_anew(known_us: u64, up_us: u64) -> bool {
    shortest_us(known_us) > up_us.saturating_add(LOST_MARGIN_US)
}
