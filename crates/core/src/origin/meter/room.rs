//! The room of a meter, and the wait for more.

use super::super::call::NodeId;
use super::{Moment, OriginMeter};
use crate::limit::Algorithm;

/// The wait of a request that no wait helps: it costs more than the burst, or the limit is 0.
pub const NEVER_US: u64 = 1 << 52;

/// Retry time after a denial by a regional share with a rate of 0, µs: the region may be connected
/// again by then.
const ISOLATED_RETRY_US: u64 = 1_000_000;

impl OriginMeter {
    /// How many requests of `cost` units still pass.
    pub(in crate::origin) fn passes(&self, node: NodeId, cost: u64, count: u32) -> u32 {
        if cost > self.terms.burst() || self.amount() == 0 {
            return 0;
        }
        if cost == 0 {
            return count;
        }
        let most = self.room_to_pass(node) / (cost * self.terms.period());
        u32::try_from(most).unwrap_or(u32::MAX).min(count)
    }

    /// Returns when a request of `units` that did not pass should retry, µs from now; 0 if this
    /// meter did not deny it. Recalls grants of other nodes that it needs.
    pub(in crate::origin) fn denial_us(&mut self, moment: Moment, units: u64) -> u64 {
        if self.passes(moment.node, units, 1) == 1 {
            return 0;
        }
        if units > self.terms.burst() || self.terms.amount() == 0 {
            return NEVER_US;
        }
        self.keep_for(moment, units).unwrap_or_else(|| self.wait_us(moment.node, units))
    }

    /// Notes that a request was refused which may pass after `wait_us`.
    pub(in crate::origin) fn note_refusal(&mut self, wait_us: u64) {
        self.refused |= (1..NEVER_US).contains(&wait_us);
    }

    /// Returns when `units` will fit for `node` without further usage, µs from now.
    pub(super) fn wait_us(&self, node: NodeId, units: u64) -> u64 {
        if self.terms.amount() == 0 {
            return NEVER_US;
        }
        if self.amount() == 0 {
            return ISOLATED_RETRY_US;
        }
        let need = units * self.terms.period();
        let (taken, full, amount) = (self.taken(node), self.full(), self.amount());
        if taken + need <= full {
            return 0;
        }
        let ticks = match self.terms.algorithm() {
            Algorithm::Gcra => (taken + need - full).div_ceil(amount),
            Algorithm::SlidingWindow => self.ticks_until_faded(node, need),
        };
        self.terms.ticks_us(ticks, NEVER_US)
    }

    fn ticks_until_faded(&self, node: NodeId, need: u64) -> u64 {
        let (period, elapsed) = (self.terms.period(), self.elapsed());
        let standing = self.standing(node) + need;
        if standing > self.full() {
            return period - elapsed;
        }
        let overlap = (self.full() - standing) / self.fading().max(1);
        period.saturating_sub(overlap).saturating_sub(elapsed)
    }

    /// Returns the room for `node`, in drops.
    pub(super) fn room(&self, node: NodeId) -> u64 {
        self.full().saturating_sub(self.taken(node))
    }

    /// The room for a waiting request of `node`, in drops. The request may over-commit unspent
    /// grants of other nodes by the tolerance. It never over-commits used units or the grant of its
    /// own node.
    fn room_to_pass(&self, node: NodeId) -> u64 {
        if self.terms.tolerance() == 0 || self.is_isolated() {
            return self.room(node);
        }
        let own = self.grants.get(node).map_or(0, |node_grant| node_grant.amount);
        let (taken, full) = (self.taken(node), self.full());
        let others = self.terms.drops(self.grants.present.saturating_sub(own));
        let tolerated = full + self.terms.drops(self.terms.tolerance());
        tolerated.saturating_sub(taken).min((full + others).saturating_sub(taken))
    }

    /// Units that are not charged, rounded down.
    pub(super) fn remaining(&self) -> u64 {
        self.full().saturating_sub(self.charged_drops()) / self.terms.period()
    }

    /// Returns the drops that are not free for `node`: charged, granted, or kept for another node.
    pub(super) fn taken(&self, node: NodeId) -> u64 {
        let draining = match self.terms.algorithm() {
            Algorithm::Gcra => self.used().level,
            Algorithm::SlidingWindow => self.fading() * (self.terms.period() - self.elapsed()),
        };
        self.standing(node) + draining
    }

    /// Returns the part of the taken drops that changes only with a report or at the end of the
    /// cell.
    fn standing(&self, node: NodeId) -> u64 {
        let wanted = self.recall.filter(|wanted| wanted.node != node).map_or(0, |wanted| wanted.units);
        let charged = match self.terms.algorithm() {
            Algorithm::Gcra => self.grants.earlier,
            Algorithm::SlidingWindow => self.used().current,
        };
        self.terms.drops(self.grants.present) + self.terms.drops(charged) + self.terms.drops(wanted)
    }

    /// Returns the units charged in the previous cell or granted in earlier ones. Their weight
    /// fades during the present cell.
    fn fading(&self) -> u64 {
        (self.used().previous + self.grants.earlier).min(self.terms.units_max())
    }

    pub(super) fn charged_drops(&self) -> u64 {
        let used = self.used();
        match self.terms.algorithm() {
            Algorithm::Gcra => used.level,
            Algorithm::SlidingWindow => {
                let previous = used.previous.min(self.terms.units_max());
                self.terms.drops(used.current) + previous * (self.terms.period() - self.elapsed())
            }
        }
    }

    /// Returns the units that may be used at once: of the limit, or of the regional share unless
    /// connected.
    pub(super) fn capacity(&self) -> u64 {
        match self.terms.cross_region() {
            Some(cross_region) if self.is_isolated() => cross_region.share_capacity,
            _ => self.terms.capacity(),
        }
    }

    pub(super) fn full(&self) -> u64 {
        self.capacity() * self.terms.period()
    }

    /// Returns the drops that drain per tick: of the limit, or of the regional share unless
    /// connected.
    pub(super) fn amount(&self) -> u64 {
        match self.terms.cross_region() {
            Some(cross_region) if self.is_isolated() => cross_region.share_amount,
            _ => self.terms.amount(),
        }
    }

    /// Ticks of the present cell that have passed.
    pub(super) fn elapsed(&self) -> u64 {
        self.at - self.cell * self.terms.period()
    }
}
