//! The time for which all peer regions count as heard.

use super::super::region_state::Connectivity;
use super::super::replication::RoundRequest;

/// Longest time for which all peers count as heard without another round, µs. Higher: a replicator
/// may be absent for longer; regions may admit usage unknown to peers for that much longer.
pub const CONNECTED_US_MAX: u64 = 60_000_000;

/// Largest lead of the replicator's estimate over the origin's clock, µs, before the clock counts
/// as set back. Lower: a clock that is slewed while its store receives few calls keeps its region
/// from settling. Higher: no harm, since the earlier connected time is cut by the lead.
const AHEAD_US_MAX: u64 = 250_000;

/// Until when all peers count as heard, and since when without a break.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ConnectedTime {
    pub(super) until_us: u64,
    pub(super) since_us: u64,
    /// Whether the isolated usage of all peers has arrived since then.
    pub(super) is_settled: bool,
}

impl ConnectedTime {
    /// Extends the time for which all peers count as heard. A new replicator that has heard fewer
    /// peers does not shorten it. The time counts from the replicator's clock estimate, so a store
    /// that stood still does not lengthen it.
    pub(super) fn extend(&mut self, now_us: u64, round: &RoundRequest) {
        let estimate_us = round.clock_us.min(now_us);
        // With a clock that was set back, the earlier time would last longer. If the clock only
        // runs slower than the replicator's, the estimate is a little ahead, and the earlier time
        // is cut by that lead.
        let ahead_us = round.clock_us - estimate_us;
        let is_set_back = ahead_us > AHEAD_US_MAX || self.until_us > now_us + CONNECTED_US_MAX;
        let before_us = if is_set_back { 0 } else { self.until_us.saturating_sub(ahead_us) };
        let was_isolated = before_us <= now_us;
        self.is_settled &= !was_isolated;
        let until_us = estimate_us + round.connected_for_us.min(CONNECTED_US_MAX);
        self.until_us = match (self.is_settled, round.settled && until_us > now_us) {
            // Only a round with `settled` extends the time of a connected region.
            (true, false) => before_us,
            // The time of this round applies, because the time while settling may be longer.
            (false, true) => until_us,
            (true, true) | (false, false) => before_us.max(until_us),
        };
        self.is_settled |= round.settled && until_us > now_us;
        if was_isolated || self.since_us > now_us {
            self.since_us = now_us;
        }
    }

    /// Whether a peer counts as lost. A clock that was set back does not extend the connected time.
    fn is_isolated(&self, now_us: u64) -> bool {
        !(now_us + 1..=now_us + CONNECTED_US_MAX).contains(&self.until_us)
    }

    /// Returns the connectivity of cross-region limits.
    pub(super) fn connectivity(&self, now_us: u64) -> Connectivity {
        if self.is_isolated(now_us) {
            return Connectivity::Isolated;
        }
        if self.is_settled { Connectivity::Connected } else { Connectivity::Settling }
    }
}
