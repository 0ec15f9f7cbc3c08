//! The worst-case over-admission of a limit: term by term, in whole units, each rounded up.
//!
//! One bucket admits at most `B + r * I` units in any interval `I`. Many nodes in several regions
//! admit that and a surplus. The surplus occurs once, however long the interval is; under a sliding
//! window it may occur in each window.
//!
//! Between regions, the surplus follows from the age of their knowledge of each other. Let `g` be
//! the last moment of a grant or decision behind the usage in `I`. Let `i` be the region of that
//! moment, and `K` the largest age of its knowledge of its peers. The usage that a peer admits in
//! `I` has two parts. The peer charged the first part by `g - K`, so that part counted at `i` as
//! well: at `g`, the level and the grants of `i` were together within the limit. The second part is
//! less than the peer itself admits from `g - K` on, `B + r * K`. By the peer's own count, its
//! charges and grants were together within the limit too. A grant counts as used from the moment it
//! is made, so the lives of grants do not matter, in either region.
//!
//! Two terms are added. First, `i` may never learn of usage that a peer keeps below the publish
//! threshold. Second, a part of a key's usage drains at the peer before its first component; at `i`
//! that part is unknown, and the same amount drains there as well. This is `r * K` once more.
//! During a network partition, the knowledge is at most as old as the peer timeout: from then on
//! each region spends only its regional share.
//!
//! ```
//! use std::time::Duration;
//! use tidegate_core::bound::{Faults, Fleet, Promise, bound};
//! use tidegate_core::{Class, Limit, Regime};
//!
//! let limit = Limit::gcra(100, Duration::from_secs(60))?;
//! let logins = Promise::new(&limit, Class::Security, Regime::Regional);
//! assert_eq!(bound(&logins, &Fleet::of(1), &Faults::ONE_OF_EACH).total(), 0);
//!
//! let global = Promise { regime: Regime::BestEffort, ..logins };
//! let surplus = bound(&global, &Fleet::of(3), &Faults::NONE);
//! assert!(surplus.total() >= 200, "two regions that have not heard of the first pass a burst each");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt;

use crate::class::Class;
use crate::limit::{Algorithm, Limit};
use crate::origin::{CROSS_REGION_LIFE_US_MAX, LAPSE_MARGIN_US, Lapse, Terms, share_of};
use crate::regime::Regime;
use crate::remote_clock::CLOCK_DRIFT_DIVISOR;

/// Interval between two replication rounds of a region, µs.
pub const REPLICATION_INTERVAL_US: u64 = 200_000;

/// The lag between two regions that raises an alarm, µs. A bound is computed with this lag by
/// default, so it holds while there is no alarm.
pub const LAG_ALARM_US: u64 = 500_000;

/// Last-heard age at which a peer counts as lost and regions spend only their regional shares, µs.
/// Higher: fewer short interruptions of a link isolate a region; more units pass before a real
/// network partition does.
pub const PEER_TIMEOUT_US: u64 = 5_000_000;

/// Publish threshold: the usage of a key below which a region does not publish its component, in
/// millionths of the burst. Higher: fewer components of keys far below their limits; each region
/// may hide that much.
pub const THRESHOLD_PPM: u32 = 62_500;

/// Default time for which an origin answers some nodes and not others, µs.
pub const OUTAGE_US: u64 = 30_000_000;

const PPM: u128 = 1_000_000;

/// A limit, with the properties that select its behaviour under faults.
#[derive(Clone, Copy, Debug)]
pub struct Promise<'l> {
    /// The limit.
    pub limit: &'l Limit,
    /// Class of the limit.
    pub class: Class,
    /// Whether those it limits pay: of class [`Class::Cost`], it is open without an origin.
    pub paid: bool,
    /// How far it may be passed in a region, in millionths of its burst.
    pub tolerance_ppm: u32,
    /// How far it reaches.
    pub regime: Regime,
}

impl<'l> Promise<'l> {
    /// Creates the promise of an unpaid limit without tolerance.
    pub fn new(limit: &'l Limit, class: Class, regime: Regime) -> Self {
        Self { limit, class, paid: false, tolerance_ppm: 0, regime }
    }

    fn terms(&self) -> Terms {
        Terms::new(self.limit, self.tolerance_ppm, self.class.lapse(), 1)
    }
}

/// The nodes that count together, and the delays between them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// Weights of the regional shares, one for each region.
    pub weights: Box<[u32]>,
    /// Processes in each region.
    pub nodes: u32,
    /// Whether those of a region share an origin. If not, each counts for itself.
    pub has_origin: bool,
    /// Interval between two replication rounds of a region, µs.
    pub replication_interval_us: u64,
    /// How long that is under way, µs.
    pub transit_us: u64,
    /// The longest that a grant of a limit of several regions lasts, µs, up to
    /// [`CROSS_REGION_LIFE_US_MAX`].
    pub grant_life_us: u64,
    /// Last-heard age at which a peer counts as lost and regions spend only their regional shares,
    /// µs.
    pub peer_timeout_us: u64,
    /// Publish threshold, in millionths of the burst.
    pub threshold_ppm: u32,
}

impl Fleet {
    /// Creates `regions` regions of the same weight, with one node each. 0 counts as 1.
    pub fn of(regions: u32) -> Self {
        Self {
            weights: vec![1; regions.max(1) as usize].into(),
            nodes: 1,
            has_origin: true,
            replication_interval_us: REPLICATION_INTERVAL_US,
            transit_us: LAG_ALARM_US - REPLICATION_INTERVAL_US,
            grant_life_us: CROSS_REGION_LIFE_US_MAX,
            peer_timeout_us: PEER_TIMEOUT_US,
            threshold_ppm: THRESHOLD_PPM,
        }
    }

    /// How many regions there are.
    pub fn regions(&self) -> u128 {
        self.weights.len().max(1) as u128
    }

    fn others(&self) -> u128 {
        self.regions() - 1
    }

    /// K: the largest age of an origin's knowledge of a peer region without a partition, µs.
    fn lag_us(&self) -> u64 {
        self.replication_interval_us.saturating_add(self.transit_us)
    }

    /// Returns the largest regional share of `units`.
    fn largest_part(&self, units: u128) -> u128 {
        let all: u128 = self.weights.iter().map(|weight| u128::from(*weight)).sum();
        let largest = self.weights.iter().max().map_or(1, |weight| u128::from(*weight));
        if all == 0 { units } else { (units * largest).div_ceil(all) }
    }

    /// Whether the regional share of `units` is 0 in some region.
    fn leaves_some_nothing(&self, units: u64) -> bool {
        (0..self.weights.len()).any(|own| share_of(units, &self.weights, own) == 0)
    }
}

/// The number of faults of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Faults {
    /// Nodes that did not report in time while they had a grant of the key, mostly after crashes.
    pub lapses: u32,
    /// Times that an origin came back without its last writes; without an origin, restarts of a
    /// process.
    pub failovers: u32,
    /// Outages of an origin.
    pub outages: u32,
    /// Time for which the origin answers other nodes of its region during an outage, µs.
    pub outage_us: u64,
    /// Network partitions between regions. Any number of them adds its terms once.
    pub partitions: u32,
}

impl Faults {
    /// No faults.
    pub const NONE: Self = Self { lapses: 0, failovers: 0, outages: 0, outage_us: OUTAGE_US, partitions: 0 };
    /// One fault of each kind.
    pub const ONE_OF_EACH: Self =
        Self { lapses: 1, failovers: 1, outages: 1, outage_us: OUTAGE_US, partitions: 1 };
}

/// When a term of a bound is paid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TermCondition {
    /// While all is well, too.
    Always,
    /// When a node does not report in time.
    Lapse,
    /// When writes were lost.
    FailOver,
    /// When an origin does not answer.
    Outage,
    /// During a network partition between regions.
    Partition,
}

impl TermCondition {
    /// Returns the name used in answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Always => "always",
            Self::Lapse => "lapse",
            Self::FailOver => "fail-over",
            Self::Outage => "outage",
            Self::Partition => "partition",
        }
    }
}

/// A part of a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Term {
    /// Cause of the over-admission.
    pub name: &'static str,
    /// Formula of the term: B the burst, L the amount of a sliding window, r the rate, e the
    /// tolerance, R the regions, N the nodes in each, K the lag between origins, S the peer
    /// timeout, h the publish threshold, q the largest grant, O the time for which an outage
    /// affects only some nodes.
    pub formula: &'static str,
    /// Units of the term.
    pub units: u64,
    /// When it is paid.
    pub condition: TermCondition,
}

/// How far a limit may be passed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    /// Terms of the bound.
    pub terms: Vec<Term>,
    /// Number of buckets of the limit: one for each node without an origin, one for each region of
    /// a regional limit, otherwise one. The terms do not include the units that the buckets
    /// themselves admit.
    pub buckets: u64,
    /// Whether the surplus may be paid in each window, not once.
    pub recurs: bool,
    /// D: the longest time until all nodes of a region count the usage of a peer region, µs. 0 if
    /// regions do not count each other's usage.
    pub lag_us: u64,
    /// q: the largest grant that a process may hold.
    pub largest_grant: u64,
    /// Whether the limit fails open while its origin is down. No bound exists for that time.
    pub is_open_without_origin: bool,
}

impl Bound {
    /// The most units that pass above the limit, if all went wrong that was counted.
    pub fn total(&self) -> u64 {
        self.sum(|_| true)
    }

    /// Returns the largest number of units above the limit without faults.
    pub fn steady(&self) -> u64 {
        self.sum(|term| term.condition == TermCondition::Always)
    }

    fn sum(&self, counts: impl Fn(&&Term) -> bool) -> u64 {
        self.terms.iter().filter(counts).fold(0, |sum, term| sum.saturating_add(term.units))
    }
}

/// Computes the worst-case over-admission of a limit in a fleet with these faults.
pub fn bound(promise: &Promise<'_>, fleet: &Fleet, faults: &Faults) -> Bound {
    let mut sum = BoundBuilder::new(promise, fleet);
    // Under a limit of 0 nothing passes on any node.
    if !promise.limit.is_blocked() {
        if fleet.has_origin {
            sum.between_regions(faults);
            sum.in_regions(faults);
        } else {
            sum.without_origin(faults);
        }
    }
    sum.finish()
}

/// Returns the largest debt of a limit of several regions beyond its capacity, in units. A limit
/// that forgives lapses drops the debt above it.
///
/// The debt is not the surplus, and does not shrink with it. A level counts the usage of peers when
/// their components arrive, and the lives of grants delay that as well. So the level may exceed the
/// surplus by the units that drain in that time. A lower cap would drop usage within the limit, and
/// the long-run rate would exceed the limit's.
pub fn debt_max(promise: &Promise<'_>, fleet: &Fleet) -> u64 {
    if promise.limit.is_blocked() {
        return 0;
    }
    short(BoundBuilder::new(promise, fleet).debt())
}

/// A bound in the making.
struct BoundBuilder<'a> {
    promise: &'a Promise<'a>,
    fleet: &'a Fleet,
    /// B, and e * B.
    burst: u128,
    tolerance: u128,
    terms: Vec<Term>,
}

impl<'a> BoundBuilder<'a> {
    fn new(promise: &'a Promise<'a>, fleet: &'a Fleet) -> Self {
        let terms = promise.terms();
        let (burst, tolerance) = (terms.burst().into(), terms.tolerance().into());
        Self { promise, fleet, burst, tolerance, terms: Vec::new() }
    }

    fn add(&mut self, condition: TermCondition, name: &'static str, formula: &'static str, units: u128) {
        self.terms.push(Term { name, formula, units: short(units), condition });
    }

    /// Adds the terms for units that regions admit before they know of each other's usage.
    fn between_regions(&mut self, faults: &Faults) {
        let others = self.fleet.others();
        if self.promise.regime != Regime::BestEffort || others == 0 {
            return;
        }
        match self.promise.limit.algorithm() {
            Algorithm::SlidingWindow => {
                self.add(TermCondition::Always, "windows of other regions", "(R-1) * L", others * self.burst);
            }
            Algorithm::Gcra => {
                self.add(TermCondition::Always, "bursts of other regions", "(R-1) * B", others * self.burst);
                self.add(
                    TermCondition::Always,
                    "below the publish threshold",
                    "(R-1) * h * B",
                    others * self.hidden(),
                );
                let (lag, silence) = (self.within_lag(), self.within_peer_timeout());
                self.add(TermCondition::Always, "passed within the lag", "(R-1) * r * K", others * lag);
                self.add(
                    TermCondition::Always,
                    "drained before the first component",
                    "(R-1) * r * K",
                    others * lag,
                );
                if faults.partitions > 0 {
                    let more = others * silence.saturating_sub(lag);
                    self.add(
                        TermCondition::Partition,
                        "passed within the peer timeout",
                        "(R-1) * r * (S-K)",
                        more,
                    );
                    self.add(
                        TermCondition::Partition,
                        "drained within the peer timeout",
                        "(R-1) * r * (S-K)",
                        more,
                    );
                }
            }
        }
    }

    /// Adds the terms for nodes of a region, which share an origin but no memory.
    fn in_regions(&mut self, faults: &Faults) {
        match self.promise.regime {
            _ if self.tolerance == 0 => {}
            Regime::Regional | Regime::BestEffort => {
                self.add(
                    TermCondition::Always,
                    "tolerance",
                    "R * e * B",
                    self.fleet.regions() * self.tolerance,
                );
            }
            // Each region has a tolerance of its part, of one unit at least.
            Regime::Share => {
                let least = self.fleet.regions().min(self.burst);
                self.add(TermCondition::Always, "tolerance", "max(R, e * B)", self.tolerance.max(least));
            }
            Regime::Strict => self.add(TermCondition::Always, "tolerance", "e * B", self.tolerance),
        }
        if self.promise.class.lapse() == Lapse::Forgiven {
            let grant = self.largest_grant();
            let (lapses, failovers) = (u128::from(faults.lapses), u128::from(faults.failovers));
            self.add(TermCondition::Lapse, "grants of lost nodes", "lapses * q", lapses * grant);
            self.add(TermCondition::FailOver, "lost writes", "fail-overs * q", failovers * grant);
        }
        if self.promise.class == Class::Comfort {
            self.node_shares(faults);
        }
    }

    /// Adds the terms for node shares while the origin does not answer. If the origin answers no
    /// node, all node shares together are the limit, once more from an empty level. If it answers
    /// other nodes, these admit the whole rate besides.
    fn node_shares(&mut self, faults: &Faults) {
        let (outages, nodes) = (u128::from(faults.outages), u128::from(self.fleet.nodes.max(1)));
        let rate = self.drained(faults.outage_us.into());
        let (burst, rate, [at_once, beside]) = match self.promise.regime {
            Regime::Regional | Regime::Strict => {
                (self.burst, rate, ["outages * max(B, N)", "outages * (N-1)/N * r * O"])
            }
            Regime::BestEffort | Regime::Share => (
                self.fleet.largest_part(self.burst),
                self.fleet.largest_part(rate),
                ["outages * max(largest share of B, N)", "outages * (N-1)/N * largest share of r * O"],
            ),
        };
        // Each process has a burst of at least one.
        self.add(
            TermCondition::Outage,
            "node shares without the origin",
            at_once,
            outages * burst.max(nodes),
        );
        if nodes > 1 {
            let beside_others = (rate * (nodes - 1)).div_ceil(nodes);
            self.add(TermCondition::Outage, "drain of the node shares", beside, outages * beside_others);
        }
    }

    /// Adds the term for nodes without an origin: each counts for itself and loses its meters at a
    /// restart.
    fn without_origin(&mut self, faults: &Faults) {
        let units = u128::from(faults.failovers) * self.burst;
        self.add(TermCondition::FailOver, "restarts", "fail-overs * B", units);
    }

    /// Returns q. An origin grants a node all there is if no other node wants any.
    fn largest_grant(&self) -> u128 {
        match self.promise.regime {
            Regime::Share => self.fleet.largest_part(self.burst),
            Regime::Regional | Regime::BestEffort | Regime::Strict => self.burst,
        }
    }

    /// Returns the units that drain in this time, rounded up.
    fn drained(&self, us: u128) -> u128 {
        (self.amount() * us).div_ceil(self.promise.limit.period_us().into())
    }

    fn amount(&self) -> u128 {
        self.promise.limit.amount().into()
    }

    /// Returns the units that drain within the lag between origins, rounded up.
    fn within_lag(&self) -> u128 {
        self.drained(self.fleet.lag_us().into())
    }

    /// Returns the units that drain before an isolated region spends only its regional share,
    /// rounded up. A replicator measures the peer timeout, and it expires at an origin; their
    /// clocks may drift apart.
    fn within_peer_timeout(&self) -> u128 {
        let peer_timeout_us = u128::from(self.fleet.peer_timeout_us);
        self.drained(peer_timeout_us + peer_timeout_us.div_ceil(CLOCK_DRIFT_DIVISOR.into()))
    }

    /// Returns the lag between nodes of two regions. It is the lag between the origins, plus a
    /// grant's life on each side. The writing nodes report their usage, or their grants lapse, when
    /// the grants end. The reading nodes may still spend their grants.
    fn lag_us(&self) -> u64 {
        let life_us = self.fleet.grant_life_us.min(CROSS_REGION_LIFE_US_MAX);
        let held_us = life_us + life_us.div_ceil(CLOCK_DRIFT_DIVISOR);
        self.fleet.lag_us().saturating_add(LAPSE_MARGIN_US + 2 * held_us)
    }

    /// Returns the largest debt between regions while nothing is lost.
    fn debt(&self) -> u128 {
        let unheard = match self.promise.limit.algorithm() {
            Algorithm::SlidingWindow => self.burst,
            Algorithm::Gcra => {
                let lag = self.drained(self.lag_us().into());
                self.burst + self.hidden() + lag + self.drained(self.fleet.peer_timeout_us.into())
            }
        };
        self.fleet.others() * unheard + self.fleet.regions() * self.tolerance
    }

    /// Returns the usage that a region does not publish, because it is below the publish threshold.
    fn hidden(&self) -> u128 {
        (self.burst * u128::from(self.fleet.threshold_ppm)).div_ceil(PPM)
    }

    fn finish(self) -> Bound {
        let Promise { limit, class, paid, regime, .. } = *self.promise;
        let (has_origin, regions) = (self.fleet.has_origin, self.fleet.regions());
        let goes_by_others = has_origin && regime == Regime::BestEffort && regions > 1;
        let buckets = match regime {
            _ if !has_origin => regions * u128::from(self.fleet.nodes),
            Regime::Regional => regions,
            Regime::BestEffort | Regime::Share | Regime::Strict => 1,
        };
        Bound {
            buckets: short(buckets),
            recurs: limit.algorithm() == Algorithm::SlidingWindow,
            lag_us: if goes_by_others { self.lag_us() } else { 0 },
            largest_grant: if has_origin { short(self.largest_grant()) } else { 0 },
            is_open_without_origin: has_origin && class == Class::Cost && paid,
            terms: self.terms,
        }
    }
}

fn short(units: u128) -> u64 {
    u64::try_from(units).unwrap_or(u64::MAX)
}

/// A property of a limit that its author may not intend.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Warning {
    /// A sliding window that all regions share.
    WindowIsGlobal,
    /// The lag between regions is too long for the period of the limit.
    RegionalInEffect {
        /// Its period, µs.
        period_us: u64,
        /// The lag between regions, µs.
        lag_us: u64,
    },
    /// The regional share of some region is 0.
    EmptyShare,
    /// The same for a limit that is divided only while regions are isolated.
    EmptyShareWhileIsolated,
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::WindowIsGlobal => f.write_str(
                "regime: a best_effort sliding window may admit its limit again for each other region, in \
                 every window; use gcra, which over-admits once",
            ),
            Self::RegionalInEffect { period_us, lag_us } => write!(
                f,
                "regime: in effect regional: its period of {} s is shorter than twice the lag between \
                 regions, {} s",
                Seconds(*period_us),
                Seconds(*lag_us)
            ),
            Self::EmptyShare => f.write_str(
                "regime: the regional share of some regions is 0: they deny every request; raise the limit \
                 or their weights",
            ),
            Self::EmptyShareWhileIsolated => f.write_str(
                "regime: the regional share of some regions is 0: they deny every request while isolated; \
                 raise the limit or their weights",
            ),
        }
    }
}

/// Microseconds as seconds with up to three decimals.
struct Seconds(u64);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.0.div_ceil(1_000);
        let text = format!("{}.{:03}", ms / 1_000, ms % 1_000);
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// Returns warnings for the author of a limit. The number of regions matters for shares only: the
/// author of a `best_effort` limit expects more than one region.
pub fn warnings(promise: &Promise<'_>, fleet: &Fleet) -> Vec<Warning> {
    let (limit, mut found) = (promise.limit, Vec::new());
    if limit.is_blocked() {
        return found;
    }
    if promise.regime == Regime::BestEffort {
        if limit.algorithm() == Algorithm::SlidingWindow {
            found.push(Warning::WindowIsGlobal);
        }
        let (period_us, lag_us) = (limit.period_us(), BoundBuilder::new(promise, fleet).lag_us());
        if period_us < lag_us.saturating_mul(2) {
            found.push(Warning::RegionalInEffect { period_us, lag_us });
        }
    }
    found.extend(nothing_left(promise, fleet));
    found
}

/// Returns a warning if the regional share of some region is 0 while the limit is divided.
fn nothing_left(promise: &Promise<'_>, fleet: &Fleet) -> Option<Warning> {
    let (limit, terms) = (promise.limit, promise.terms());
    let (warning, burst) = match promise.regime {
        Regime::Share => (Warning::EmptyShare, limit.burst().into()),
        Regime::BestEffort => (Warning::EmptyShareWhileIsolated, terms.capacity()),
        Regime::Regional | Regime::Strict => return None,
    };
    // If nothing drains, nothing passes, for any burst.
    let is_nothing = fleet.leaves_some_nothing(burst) || fleet.leaves_some_nothing(limit.amount().into());
    is_nothing.then_some(warning)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
