//! How long a node denies requests for a meter without asking the origin.

use super::super::Context;
use crate::origin::{MeterReply, REPORTS_PER_BURST, Terms};

/// The first denial after an exhausted reply lasts one part in so many of a report interval; each
/// further one lasts twice as long. Higher: fewer false denials of keys at their limit; more calls
/// for keys above it.
const FIRST_DENIAL_PARTS: u64 = 16;

/// Recent exhausted replies after which a node denies while the origin has room. The origin granted
/// less than the node wants, but a request may still fit in the room. Higher: fewer false denials
/// of keys near their limit; more calls for keys above it. A limit of several regions is denied at
/// once: while peers use the whole rate, a region in debt recovers only by the units that they
/// leave.
const REPLIES_WITH_ROOM: u8 = 4;

/// The longest drain time that a node waits for while other nodes have grants, µs: they may return
/// some before anything drains.
const RETRY_US: u64 = 200_000;

/// Largest number of exhausted replies that count.
const EXHAUSTED_REPLIES_MAX: u8 = 8;

/// The recent denials of a meter.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DenialState {
    /// Until when the meter counts as recently denied: a request was denied, or the origin was
    /// exhausted and granted nothing. Grants are short until then.
    denied_until_us: u64,
    /// The same for the second cause only. Usage is not worth a call of its own until then.
    strict_until_us: u64,
    /// Recent exhausted replies: one more counts 1, any other reply halves the count.
    exhausted_replies: u8,
    /// Earliest time at which the origin may have units again.
    refills_us: u64,
}

/// Times after an exhausted reply, µs from the moment at which its call was sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct DenialTimes {
    /// How long requests are denied once the grant is spent.
    deny_us: u64,
    /// When a flush asks again.
    refill_us: u64,
}

impl DenialState {
    /// Notes that the node denied a request.
    pub(super) fn note_denied(&mut self, cx: &Context<'_>) {
        self.denied_until_us = cx.now_us() + cx.settings.strict_us;
    }

    pub(super) fn is_recently_denied(&self, now_us: u64) -> bool {
        now_us < self.denied_until_us
    }

    pub(super) fn is_strict(&self, now_us: u64) -> bool {
        now_us < self.strict_until_us
    }

    /// Whether the origin may have units again for a call that is sent now.
    pub(super) fn may_have_refilled(&self, cx: &Context<'_>) -> bool {
        cx.now_us() + cx.settings.hedge_us >= self.refills_us
    }

    /// Applies the reply to a call sent at `sent_us`. Returns how long after `sent_us` requests are
    /// denied once the grant is spent.
    pub(super) fn apply_reply(
        &mut self,
        cx: &Context<'_>,
        sent_us: u64,
        terms: &Terms,
        reply: &MeterReply,
    ) -> u64 {
        self.exhausted_replies = if reply.exhausted {
            (self.exhausted_replies + 1).min(EXHAUSTED_REPLIES_MAX)
        } else {
            self.exhausted_replies / 2
        };
        if reply.exhausted && reply.grant == 0 {
            self.note_denied(cx);
            self.strict_until_us = self.denied_until_us;
        }
        let DenialTimes { deny_us, refill_us } = self.times(cx, sent_us, terms, reply);
        self.refills_us = sent_us + refill_us;
        deny_us
    }

    /// Returns the times of a denial. A node denies by itself only after an exhausted reply. The
    /// first denial is short, because the load may be below the limit. While the origin stays
    /// exhausted, denials last until a flush has asked for the denied requests. A burst of one unit
    /// cannot accumulate the units that drain during a denial, so that denial ends with the drain.
    fn times(&self, cx: &Context<'_>, sent_us: u64, terms: &Terms, reply: &MeterReply) -> DenialTimes {
        if !reply.exhausted {
            return DenialTimes::default();
        }
        let others_have_grants = reply.remaining > reply.room + reply.grant;
        let wait_us = if others_have_grants { reply.wait_us.min(RETRY_US) } else { reply.wait_us };
        let refill_us = turn_us(cx, terms, reply.holders).max(wait_us);
        if reply.grant == 0 && terms.capacity() == 1 {
            // `wait_us` counts from the decision at the origin. A request that leaves the node
            // `wait_us` after `sent_us` reaches the origin when the unit has drained.
            return DenialTimes { deny_us: wait_us, refill_us };
        }
        let interval_us = cx.report_interval_us(terms);
        let until_reply_us = refill_us + cx.flush_slack_us().min(interval_us) + cx.settings.hedge_us;
        let doublings = self.exhausted_replies.saturating_sub(1);
        let deny_us = ((interval_us / FIRST_DENIAL_PARTS) << doublings).min(until_reply_us);
        let is_doubtful =
            reply.room > 0 && terms.cross_region().is_none() && self.exhausted_replies < REPLIES_WITH_ROOM;
        let deny_us = if is_doubtful { 0 } else { deny_us };
        let deny_us = if reply.grant == 0 { deny_us.max(wait_us) } else { deny_us };
        DenialTimes { deny_us: cx.now_us().saturating_sub(sent_us) + deny_us, refill_us }
    }
}

/// Returns the interval at which a node asks for an exhausted meter: twice in the time in which a
/// unit drains for each of `holders` nodes. No unit is lost meanwhile, because at most an eighth of
/// the burst drains.
fn turn_us(cx: &Context<'_>, terms: &Terms, holders: u32) -> u64 {
    let interval_us = cx.report_interval_us(terms);
    let turn_us = terms.drain_us(1).saturating_mul(u64::from(holders.max(1))) / 2;
    let burst_us = terms.drain_us(terms.capacity());
    turn_us.min(burst_us / REPORTS_PER_BURST).clamp(interval_us, cx.settings.life_us.max(interval_us))
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::tests::{MS, meter_reply, terms};
    use super::super::super::{EngineSettings, NodeState};
    use super::*;
    use crate::origin::{CrossRegionTerms, NodeId};
    use crate::table::{Shares, Table};
    use crate::time::Now;

    const NOW_US: u64 = 10_000 * MS;

    /// Calls `test` with the context of a step at `NOW_US`.
    fn with_context<R>(test: impl FnOnce(&Context<'_>) -> R) -> R {
        let table = Table::new(1 << 12, &Shares::single()).expect("a few lines");
        let mut node = NodeState::new(NodeId(7), EngineSettings::default());
        test(&node.context(Now::from_micros(NOW_US, NOW_US), &table))
    }

    fn exhausted(wait_us: u64) -> MeterReply {
        MeterReply { exhausted: true, wait_us, ..meter_reply(0, 0) }
    }

    #[test]
    fn each_exhausted_reply_doubles_the_denial_and_others_halve_the_count() {
        let deny_us = with_context(|cx| {
            let mut denials = DenialState::default();
            let replies = [exhausted(0), exhausted(0), exhausted(0), meter_reply(0, 9), exhausted(0)];
            replies.map(|reply| denials.apply_reply(cx, NOW_US, &terms(10), &reply))
        });
        assert_eq!(deny_us, [6_250, 12_500, 25_000, 0, 12_500]);
    }

    #[test]
    fn a_node_asks_again_while_the_origin_has_room_except_between_regions() {
        let region = terms(10);
        let shares =
            CrossRegionTerms { publish_threshold: 1, share_amount: 5, share_capacity: 5, debt_max: 20 };
        let deny_us = |terms: Terms, room: u64| {
            let reply = MeterReply { exhausted: true, ..meter_reply(1, room) };
            with_context(|cx| {
                let mut denials = DenialState::default();
                [(); 5].map(|()| denials.apply_reply(cx, NOW_US, &terms, &reply))
            })
        };
        let doubled = [6_250, 12_500, 25_000, 50_000, 100_000];
        assert_eq!(deny_us(region, 0), doubled);
        assert_eq!(deny_us(region, 1), [0, 0, 0, 50_000, 100_000]);
        for room in [0, 1] {
            assert_eq!(deny_us(region.with_cross_region(shares), room), doubled, "room {room}");
        }
    }

    #[test]
    fn denial_lasts_for_the_drain_unless_other_nodes_may_return_grants() {
        let deny_us = |remaining| {
            let reply = MeterReply { remaining, ..exhausted(900 * MS) };
            with_context(|cx| DenialState::default().apply_reply(cx, NOW_US, &terms(10), &reply))
        };
        assert_eq!([0, 1].map(deny_us), [900 * MS, RETRY_US]);
    }

    #[test]
    fn meter_is_strict_only_without_a_grant() {
        let states = with_context(|cx| {
            [0, 1].map(|grant| {
                let mut denials = DenialState::default();
                let reply = MeterReply { grant, ..exhausted(0) };
                denials.apply_reply(cx, NOW_US, &terms(10), &reply);
                [denials.is_strict(NOW_US), denials.is_recently_denied(NOW_US)]
            })
        });
        assert_eq!(states, [[true; 2], [false; 2]]);
    }
}
