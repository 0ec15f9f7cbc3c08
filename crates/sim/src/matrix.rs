//! Load without faults over many fleets and limits: the share of a single bucket that a region
//! admits, and the requests that it denies although the limit has room.

use std::time::Duration;

use tidegate_core::Class;

use crate::scenario::{SECOND_US, Scenario, Shape, Spread};
use crate::swarm::bucket;
use crate::world::run;

/// Requests of a case, where its limit is not too slow or too fast for that.
const REQUESTS: f64 = 60_000.0;

/// The shortest and the longest measured time of a case, s.
const SECONDS_MIN: f64 = 1.0;
const SECONDS_MAX: f64 = 1_200.0;

/// The most requests of a case. A limit of a million per second is measured for a second at ten
/// times its rate, after a warm-up of 1.6 s.
const REQUESTS_MAX: f64 = 30_000_000.0;

/// The shortest time before a load counts as steady, s.
const WARM_UP_S: f64 = 1.5;

/// Rate per period in seconds, and burst.
const LIMITS: [(u64, u64, u64); 11] = [
    (10, 60, 1),
    (10, 60, 10),
    (10, 1, 1),
    (100, 1, 10),
    (100, 1, 100),
    (400, 1, 40),
    (1_000, 1, 200),
    (1_000, 60, 1_000),
    (100_000, 60, 100_000),
    (1_000_000, 1, 100_000),
    (1_000_000, 1, 1_000_000),
];

const NODES: [usize; 5] = [4, 12, 16, 100, 1_000];

const SPREADS: [(Spread, &str); 3] = [(Spread::Even, "even"), (Spread::Half, "half"), (Spread::Zipf, "zipf")];

/// Offered load in tenths of the limit's rate.
const LOADS: [u64; 4] = [5, 10, 20, 100];

const COSTS_MAX: [u64; 2] = [1, 20];

/// One fleet under one load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadCase {
    /// Units per period.
    pub amount: u64,
    /// Seconds of a period.
    pub period_s: u64,
    /// Units that may pass at once.
    pub burst: u64,
    /// Nodes of the region.
    pub nodes: usize,
    /// Which nodes requests come to.
    pub spread: Spread,
    /// The name of that spread.
    pub spread_name: &'static str,
    /// Offered load, in tenths of the limit's rate.
    pub load_tenths: u64,
    /// Requests cost 1 to this.
    pub cost_max: u64,
}

/// The outcome of a case.
#[derive(Clone, Copy, Debug)]
pub struct LoadResult {
    /// Units admitted in steady load, relative to a single bucket.
    pub share: f64,
    /// Requests denied beyond those that a single bucket denies, relative to all; 0 for loads above
    /// the limit.
    pub net_denials: f64,
    /// Requests denied while more than 3 % of the limit was free, relative to all; 0 for loads
    /// above the limit.
    pub false_denials: f64,
    /// Requests that waited for the origin, relative to all.
    pub waited: f64,
    /// Calls to the origin per request.
    pub calls: f64,
    /// Promises that were broken: an admission above the limit is one.
    pub violations: usize,
}

/// Every combination of limit, fleet, spread, load and cost.
pub fn load_cases() -> Vec<LoadCase> {
    let mut cases = Vec::new();
    for (amount, period_s, burst) in LIMITS {
        for nodes in NODES {
            for (spread, spread_name) in SPREADS {
                for load_tenths in LOADS {
                    for cost_max in COSTS_MAX.into_iter().filter(|cost_max| *cost_max <= burst) {
                        cases.push(LoadCase {
                            amount,
                            period_s,
                            burst,
                            nodes,
                            spread,
                            spread_name,
                            load_tenths,
                            cost_max,
                        });
                    }
                }
            }
        }
    }
    cases
}

/// Worlds of twelve uneven nodes at half of the limit.
pub(crate) fn half_loads() -> Vec<Scenario> {
    let is_uneven =
        |case: &LoadCase| case.nodes == 12 && case.load_tenths == 5 && case.spread != Spread::Even;
    let is_short = |case: &LoadCase| case.cost_max == 1 && case.burst >= 40 && case.burst < case.amount;
    let mut cases = load_cases();
    cases.retain(|case| is_uneven(case) && is_short(case) && case.amount <= 1_000);
    cases.iter().map(LoadCase::scenario).collect()
}

impl LoadCase {
    /// Whether a single bucket admits the full load in the long run.
    pub fn is_within_limit(&self) -> bool {
        self.load_tenths <= 10
    }

    /// Requests in a second.
    fn per_second(&self) -> f64 {
        let units = self.amount as f64 / self.period_s as f64 * self.load_tenths as f64 / 10.0;
        units / f64::midpoint(1.0, self.cost_max as f64)
    }

    /// Seconds before the load counts as steady: [`WARM_UP_S`], and as long as the bucket takes to
    /// fill above its rate.
    fn warm_up_s(&self) -> f64 {
        let drain_s = self.burst as f64 * self.period_s as f64 / self.amount as f64;
        let excess = self.load_tenths as f64 / 10.0 - 1.0;
        let fill_s = if excess > 0.0 { drain_s / excess } else { 0.0 };
        WARM_UP_S + fill_s
    }

    /// Requests of the case, the warm-up included.
    pub fn requests(&self) -> u64 {
        self.scenario().requests
    }

    fn scenario(&self) -> Scenario {
        let limit = bucket(self.amount, Duration::from_secs(self.period_s), self.burst);
        let (per_second, warm_up_s) = (self.per_second(), self.warm_up_s());
        let seconds = (REQUESTS / per_second).clamp(SECONDS_MIN, SECONDS_MAX);
        let seconds = (warm_up_s + seconds).min(REQUESTS_MAX / per_second);
        Scenario {
            nodes: self.nodes,
            spread: self.spread,
            requests: (per_second * seconds) as u64,
            length_us: (seconds * SECOND_US as f64) as u64,
            steady_from_us: (warm_up_s * SECOND_US as f64) as u64,
            keeps_refusals: self.is_within_limit(),
            shape: Shape::Poisson,
            cost_max: self.cost_max,
            ..Scenario::new(limit, Class::Security)
        }
    }

    /// Runs the case with the shipped engine.
    pub fn measure(&self) -> LoadResult {
        let report = run(&self.scenario(), None, false);
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        LoadResult {
            share: share(report.steady.admitted, report.steady.ideal),
            net_denials: if self.is_within_limit() {
                share(report.steady.ideal.saturating_sub(report.steady.admitted), report.steady.offered)
            } else {
                0.0
            },
            false_denials: share(report.steady.false_denials, report.steady.requests),
            waited: share(report.waited, report.requests),
            calls: share(report.calls, report.requests),
            violations: report.violations.len(),
        }
    }
}

/// The least share of a single bucket in steady load.
const SHARE_MIN: f64 = 0.97;

/// The most requests denied beyond those of a single bucket, relative to all, in each load up to
/// the limit.
const DENIED_MAX: f64 = 0.003;

/// The outcome of one limit on one fleet, over all spreads and loads.
#[derive(Clone, Copy, Debug)]
pub struct FleetResult {
    /// One of its cases: limit, nodes and costs are those of all.
    pub case: LoadCase,
    /// The least share of a single bucket.
    pub share_least: f64,
    /// The most requests that one load up to the limit was denied beyond those of a single bucket,
    /// relative to all.
    pub denied_most: f64,
    /// The most requests that one load up to the limit was denied while more than 3 % of the limit
    /// was free, relative to all.
    pub false_denials_most: f64,
    /// Requests that waited for the origin, relative to all, over all loads.
    pub waited: f64,
    /// Calls to the origin per request, over all loads.
    pub calls: f64,
    /// Promises that were broken.
    pub violations: usize,
}

impl FleetResult {
    /// The results of each limit on each fleet, by rate, burst, cost and nodes.
    pub fn of(results: &[(LoadCase, LoadResult)]) -> Vec<Self> {
        let is_alike =
            |one: &(LoadCase, LoadResult), other: &(LoadCase, LoadResult)| one.0.fleet() == other.0.fleet();
        let mut in_order = results.to_vec();
        in_order.sort_by_key(|(case, _)| case.fleet());
        in_order.chunk_by(is_alike).filter_map(Self::of_fleet).collect()
    }

    fn of_fleet(results: &[(LoadCase, LoadResult)]) -> Option<Self> {
        let mean = |of: fn(&LoadResult) -> f64| {
            results.iter().map(|(_, result)| of(result)).sum::<f64>() / results.len().max(1) as f64
        };
        // A mean over several loads would hide a load that is denied too much.
        let most_within_limit = |of: fn(&LoadResult) -> f64| {
            let within_limit = results.iter().filter(|(case, _)| case.is_within_limit());
            within_limit.map(|(_, result)| of(result)).fold(0.0, f64::max)
        };
        Some(Self {
            case: results.first()?.0,
            share_least: results.iter().map(|(_, result)| result.share).fold(f64::INFINITY, f64::min),
            denied_most: most_within_limit(|result| result.net_denials),
            false_denials_most: most_within_limit(|result| result.false_denials),
            waited: mean(|result| result.waited),
            calls: mean(|result| result.calls),
            violations: results.iter().map(|(_, result)| result.violations).sum(),
        })
    }

    /// Whether no promise was broken, and the requests got their share in each case.
    pub fn holds(&self) -> bool {
        self.violations == 0 && self.share_least >= SHARE_MIN && self.denied_most <= DENIED_MAX
    }
}

impl LoadCase {
    /// Rate per minute, burst, cost and nodes. Results with the same values are combined over all
    /// spreads and loads.
    fn fleet(&self) -> (u64, u64, u64, usize) {
        (self.amount * 60 / self.period_s, self.burst, self.cost_max, self.nodes)
    }
}
