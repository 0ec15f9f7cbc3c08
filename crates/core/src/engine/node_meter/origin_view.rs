//! The origin's view of a meter, as of its last reply.

use crate::origin::{MeterReply, Terms};

/// There is plenty of room while the other nodes use at most this part of the capacity, and this
/// node has at most as much of the rest: one half.
const PLENTY_SHARE: u64 = 2;

/// The free units of a meter and the nodes that share them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OriginView {
    /// When the reply came; 0 before the first.
    replied_us: u64,
    /// Units that were neither used nor granted.
    room: u64,
    /// Nodes that have or want a grant.
    pub(super) holders: u32,
    /// Units that the node may have beyond its near demand; 0 unless there is plenty of room. The
    /// grant of a dead node includes them, but no other node misses them.
    pub(super) spare: u64,
}

impl OriginView {
    pub(super) fn new(now_us: u64, terms: &Terms, reply: &MeterReply) -> Self {
        let MeterReply { room, holders, grant, .. } = *reply;
        let free = room.saturating_add(grant);
        let is_plenty =
            !reply.exhausted && free >= terms.capacity() / PLENTY_SHARE && grant <= free / PLENTY_SHARE;
        let spare = if is_plenty { free / PLENTY_SHARE / u64::from(holders.max(1)) } else { 0 };
        Self { replied_us: now_us, room, holders, spare }
    }

    /// Returns the room at `now_us`, grown by the drain since the reply; `None` before the first
    /// reply.
    pub(super) fn room_at(&self, now_us: u64, terms: &Terms) -> Option<u64> {
        let ticks = now_us.saturating_sub(self.replied_us) / terms.tick_us();
        let drained = ticks.saturating_mul(terms.amount()) / terms.period();
        let room = self.room.saturating_add(drained).min(terms.capacity());
        (self.replied_us > 0).then_some(room)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::tests::{MS, meter_reply, terms};
    use super::*;

    #[test]
    fn nodes_share_half_of_the_free_units_while_there_is_plenty() {
        let spare = |reply: MeterReply| OriginView::new(MS, &terms(100), &reply).spare;
        assert_eq!(spare(MeterReply { holders: 4, ..meter_reply(20, 60) }), 10);
        assert_eq!(spare(meter_reply(10, 39)), 0, "other nodes use more than half");
        assert_eq!(spare(meter_reply(41, 39)), 0, "the grant is more than half of the rest");
        assert_eq!(spare(MeterReply { exhausted: true, ..meter_reply(20, 60) }), 0);
    }

    #[test]
    fn room_grows_by_the_drain_up_to_the_capacity() {
        assert_eq!(OriginView::default().room_at(MS, &terms(10)), None, "no reply has arrived");
        let view = OriginView::new(MS, &terms(10), &meter_reply(2, 3));
        let rooms = [1, 501, 60_001].map(|ms| view.room_at(ms * MS, &terms(10)));
        assert_eq!(rooms, [Some(3), Some(8), Some(10)]);
    }
}
