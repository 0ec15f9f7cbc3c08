//! The demand for a meter on a node, and the grant that it requires.

use crate::UsageReport;
use crate::origin::Terms;

/// Units per second are counted in thousandths.
const MILLI: u64 = 1_000;

const US_PER_SECOND: u64 = 1_000_000;

/// Thousandths of a new measurement that count against those before.
const WEIGHT: u64 = 400;

/// Flush intervals that a grant should last while other nodes may need the rest.
const INTERVALS: u64 = 3;

/// Least burst that nodes divide, in multiples of the largest recent cost. Each node strands up to
/// one cost in a grant too small for its next request. Higher: fewer false denials where several
/// nodes serve large costs; more requests wait for the origin. `tidegate sim --loads` compares
/// both.
const COSTS_PER_BURST: u64 = 40;

/// Each call lowers the largest recent cost by one part in so many. Higher: grants return later
/// after a large request.
const COST_DECAY_PARTS: u64 = 8;

/// The measured rate of a meter's usage, and the requests since the last measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Demand {
    milli_per_s: u64,
    /// Units of requests to the origin since the last call, whether they still wait or not.
    requested: u64,
    /// Largest recent cost of a request that passed, in thousandths of a unit.
    cost_milli: u64,
    /// Largest cost of the requests to the origin since the last call.
    requested_cost: u64,
    /// The same of the requests that the last call carried.
    carried_cost: u64,
}

impl Demand {
    pub(super) fn note_request(&mut self, cost: u64) {
        self.requested_cost = self.requested_cost.max(cost);
        self.requested = self.requested.saturating_add(cost.max(1));
    }

    pub(super) fn note_answered(&mut self, cost: u64) {
        self.requested = self.requested.saturating_sub(cost.max(1));
    }

    /// Notes that a request passed. A denied one says nothing about the grant that later requests
    /// need: its client pays nothing for the size of it.
    pub(super) fn note_passed(&mut self, cost: u64) {
        self.cost_milli = self.cost_milli.max(cost.saturating_mul(MILLI));
    }

    pub(super) fn has_requests(&self) -> bool {
        self.requested > 0
    }

    /// Measures the interval that a call ends: the usage that it reports, and its requests.
    pub(super) fn end_interval(&mut self, report: UsageReport, elapsed_us: u64, has_spare: bool) {
        let requested = std::mem::take(&mut self.requested);
        self.carried_cost = std::mem::take(&mut self.requested_cost);
        self.cost_milli -= self.cost_milli.div_ceil(COST_DECAY_PARTS);
        let seen = report.used.saturating_add(requested);
        self.measure(seen, elapsed_us, report.missed);
        if requested > 0 && has_spare {
            self.catch_up(seen, elapsed_us);
        }
    }

    /// Adds a measurement: requests needed `seen` units within `elapsed_us`. Requests that the node
    /// denies are not seen, so the rate does not fall while it denies.
    fn measure(&mut self, seen: u64, elapsed_us: u64, has_denials: bool) {
        let rate = seen.saturating_mul(MILLI * US_PER_SECOND) / elapsed_us.max(1);
        let mixed = (self.milli_per_s.saturating_mul(MILLI - WEIGHT) + rate.saturating_mul(WEIGHT)) / MILLI;
        self.milli_per_s = if has_denials { mixed.max(self.milli_per_s) } else { mixed };
    }

    /// Raises the rate at once for a key with plenty of room, when a request had to ask the origin
    /// although the node had a grant. That grant was far too small, and an average would adapt too
    /// slowly.
    fn catch_up(&mut self, seen: u64, elapsed_us: u64) {
        self.milli_per_s =
            self.milli_per_s.max(seen.saturating_mul(MILLI * US_PER_SECOND) / elapsed_us.max(1));
    }

    /// Returns the grant that the node should have: for the next few flush intervals, or for the
    /// life of a grant as far as there are `spare` units. Returns 0 if the origin should decide
    /// each request: for a key with hardly any requests, and where a grant would only strand units
    /// that no request fits in.
    pub(super) fn want(self, terms: &Terms, flush_us: u64, life_us: u64, spare: u64) -> u64 {
        if self.milli_per_s.saturating_mul(life_us).saturating_mul(2) < MILLI * US_PER_SECOND {
            return 0;
        }
        let least = self.within(life_us.min(INTERVALS * flush_us));
        let expected = self.within(life_us);
        // Requests do not come evenly: twice the usual deviation is seldom exceeded.
        let most = expected + 2 * expected.isqrt();
        let want = most.min(spare).max(least).min(terms.capacity());
        if self.is_stranded_in(want, terms) { 0 } else { want }
    }

    /// Whether requests of the largest recent cost, or of the call that is made, hardly fit into a
    /// grant, or into the parts of a divided burst. Between regions they may not: while peers use
    /// the whole rate, a region in debt recovers only by the units that they leave.
    fn is_stranded_in(self, grant: u64, terms: &Terms) -> bool {
        let cost_milli = self.cost_milli.max(self.carried_cost.saturating_mul(MILLI));
        let burst_least_milli = COSTS_PER_BURST.saturating_mul(cost_milli);
        cost_milli > MILLI
            && terms.cross_region().is_none()
            && (grant.saturating_mul(MILLI) < cost_milli
                || terms.capacity().saturating_mul(MILLI) < burst_least_milli)
    }

    /// Returns the time in which requests need `units`, µs.
    pub(super) fn time_for_us(self, units: u64) -> u64 {
        let milli_us = units.saturating_mul(MILLI * US_PER_SECOND);
        milli_us.checked_div(self.milli_per_s).unwrap_or(u64::MAX)
    }

    /// Returns the units that requests need in this time, rounded up.
    pub(super) fn within(self, us: u64) -> u64 {
        self.milli_per_s.saturating_mul(us).div_ceil(MILLI * US_PER_SECOND)
    }
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests {
    use super::super::super::tests::terms;
    use super::*;

    #[test]
    fn the_first_hit_of_a_cold_key_wants_nothing_and_the_second_does() {
        let mut demand = Demand::default();
        demand.measure(1, 10 * US_PER_SECOND, false);
        assert_eq!(demand.want(&terms(10_000), 100_000, US_PER_SECOND, 0), 0);
        demand.measure(1, US_PER_SECOND / 2, false);
        assert_eq!(demand.want(&terms(10_000), 100_000, US_PER_SECOND, 0), 1);
    }

    #[test]
    fn demand_of_an_idle_key_is_raised_at_once() {
        let mut demand = Demand::default();
        demand.measure(1, 10 * US_PER_SECOND, false);
        demand.catch_up(10, 100_000);
        assert_eq!(demand.within(US_PER_SECOND), 100);
        demand.catch_up(1, 100_000);
        assert_eq!(demand.within(US_PER_SECOND), 100, "a later small demand does not lower the estimate");
    }

    #[test]
    fn measured_demand_predicts_the_time_to_use_units() {
        let mut demand = Demand::default();
        assert_eq!(demand.time_for_us(1), u64::MAX, "units without demand are never used up");
        for _ in 0..60 {
            demand.measure(100, 100_000, false);
        }
        assert_eq!((demand.within(250_000), demand.time_for_us(250)), (250, 250_000));
    }

    #[test]
    fn a_steady_rate_wants_three_intervals_of_it() {
        let mut demand = Demand::default();
        for _ in 0..40 {
            demand.measure(100, 100_000, false);
        }
        assert_eq!(demand.want(&terms(10_000), 100_000, US_PER_SECOND, 0), 300);
        assert_eq!(
            demand.want(&terms(10_000), 100_000, US_PER_SECOND, 700),
            700,
            "demand wants the spare units, if they are more"
        );
        assert_eq!(
            demand.want(&terms(10_000), 100_000, US_PER_SECOND, 7_000),
            1_062,
            "the want is capped at the demand of one grant life and a margin"
        );
        for _ in 0..40 {
            demand.measure(0, 100_000, true);
        }
        assert_eq!(
            demand.want(&terms(10_000), 100_000, US_PER_SECOND, 0),
            300,
            "a denial hides demand, so the estimate stays"
        );
        for _ in 0..40 {
            demand.measure(0, 100_000, false);
        }
        assert_eq!(demand.want(&terms(10_000), 100_000, US_PER_SECOND, 0), 0);
    }

    /// The want of 100 units, wherever the burst allows it.
    fn want_after(demand: Demand, burst: u64) -> u64 {
        demand.want(&terms(burst), 100_000, US_PER_SECOND, 0)
    }

    /// The demand of 100 units in 300 ms, after requests of these costs passed.
    fn passed(costs: &[u64]) -> Demand {
        let mut demand = Demand::default();
        for _ in 0..40 {
            demand.measure(100, 300_000, false);
        }
        for cost in costs {
            demand.note_passed(*cost);
        }
        demand
    }

    #[test]
    fn a_burst_of_few_requests_is_not_divided() {
        assert_eq!(want_after(passed(&[1]), 39), 39, "a grant of any size serves requests of cost 1");
        for cost in [2, 20, 100] {
            let burst = COSTS_PER_BURST * cost;
            let wants = [burst - 1, burst].map(|burst| want_after(passed(&[cost]), burst));
            assert_eq!(wants, [0, burst.min(100)], "cost {cost}");
        }
    }

    #[test]
    fn a_grant_serves_the_largest_recent_cost() {
        assert_eq!([[100], [101]].map(|costs| want_after(passed(&costs), 10_000)), [100, 0]);
        let mut demand = passed(&[101]);
        demand.end_interval(UsageReport { used: 100, ..UsageReport::default() }, 300_000, false);
        assert_eq!(want_after(demand, 10_000), 100, "a large request is forgotten");
    }

    #[test]
    fn a_request_that_did_not_pass_changes_the_want_of_its_own_call_only() {
        let mut demand = passed(&[1]);
        demand.note_request(10_000);
        let report = UsageReport { used: 100, ..UsageReport::default() };
        demand.end_interval(report, 300_000, false);
        assert_eq!(want_after(demand, 10_000), 0, "the origin decides it on all units");
        demand.end_interval(report, 300_000, false);
        assert!(want_after(demand, 10_000) >= 100);
    }
}
