//! The limits of a world, and how they change.

use std::time::Duration;

use tidegate_core::bound::THRESHOLD_PPM;
use tidegate_core::origin::{CrossRegionTerms, Lapse, Terms, share_of};
use tidegate_core::{Algorithm, Limit};

use crate::bug::Bug;
use crate::scenario::{RuleChange, Scenario};

const PPM: u64 = 1_000_000;

/// How many times as long a period is after it was changed: no multiple of the cells before are
/// those after.
const LONGER: u32 = 3;

/// A limit as nodes know it and as the origin counts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) limit: Limit,
    pub(crate) terms: Terms,
}

impl Rule {
    /// The rule as the nodes of a region know it.
    fn new(scenario: &Scenario, region: usize, bug: Option<Bug>, limit: &Limit) -> Self {
        let terms = Terms::new(limit, scenario.tolerance_ppm, scenario.lapse(), 1);
        let terms = match cross_region(scenario, region, bug, limit, &terms) {
            Some(cross_region) => terms.with_cross_region(cross_region),
            None => terms,
        };
        Self { limit: limit.at_origin(), terms }
    }

    /// Returns the terms as another version of the limit.
    pub(crate) fn with_version(&self, scenario: &Scenario, version: u64) -> Terms {
        self.with(scenario, scenario.lapse(), version)
    }

    /// Returns the terms with another treatment of lapsed grants.
    pub(crate) fn with_lapse(&self, scenario: &Scenario, lapse: Lapse) -> Terms {
        self.with(scenario, lapse, self.terms.version())
    }

    fn with(&self, scenario: &Scenario, lapse: Lapse, version: u64) -> Terms {
        let version = u32::try_from(version).unwrap_or(u32::MAX);
        let terms = Terms::new(&self.limit, scenario.tolerance_ppm, lapse, version);
        self.terms.cross_region().map_or(terms, |cross_region| terms.with_cross_region(*cross_region))
    }
}

/// How a region counts a limit together with the others, if there are others.
fn cross_region(
    scenario: &Scenario,
    region: usize,
    bug: Option<Bug>,
    limit: &Limit,
    terms: &Terms,
) -> Option<CrossRegionTerms> {
    let weights = &scenario.regions.as_ref()?.weights;
    let share = |whole| match bug {
        Some(Bug::PartIsWhole) => whole,
        _ => share_of(whole, weights, region),
    };
    let publish_threshold = match bug {
        Some(Bug::NoThreshold) => 1,
        _ => (terms.burst() * u64::from(THRESHOLD_PPM) / PPM).max(1),
    };
    let debt_max = match bug {
        Some(Bug::ForgivesAll) => 0,
        Some(Bug::ForgivesNothing) => u64::MAX,
        _ => scenario.debt_max(limit),
    };
    let (share_amount, share_capacity) = (share(terms.amount()), share(terms.capacity()));
    Some(CrossRegionTerms { publish_threshold, share_amount, share_capacity, debt_max })
}

/// An edition of the limits: that of each key, and the one that all keys share.
#[derive(Clone, Copy, Debug)]
struct Edition {
    key: Rule,
    shared: Rule,
}

/// The limits of a region: as they were at first, and as they are after a change.
#[derive(Clone, Debug)]
pub(crate) struct RuleEditions {
    editions: [Edition; 2],
    keys: usize,
    version: u64,
    /// The edition that holds.
    pub(crate) current: usize,
}

impl RuleEditions {
    pub(crate) fn new(scenario: &Scenario, region: usize, bug: Option<Bug>) -> Self {
        let rule = |limit: &Limit| Rule::new(scenario, region, bug, limit);
        let edition = |limit: &Limit| Edition { key: rule(limit), shared: rule(&scaled(limit, 2, 1)) };
        let editions = [edition(&scenario.limit), edition(&changed(scenario))];
        Self { editions, keys: scenario.keys, version: 1, current: 0 }
    }

    /// The limit of a meter in an edition.
    pub(crate) fn rule(&self, edition: usize, meter: usize) -> Rule {
        let Edition { key, shared } = self.editions[edition];
        if meter < self.keys { key } else { shared }
    }

    /// The limit that a meter is under at first.
    pub(crate) fn first(&self, meter: usize) -> Terms {
        self.rule(0, meter).terms
    }

    /// Returns the edition of a version. Changes alternate between the two editions.
    pub(crate) fn edition_of(version: u64) -> usize {
        usize::from(version.is_multiple_of(2))
    }

    /// Returns the terms of a meter in each edition.
    pub(crate) fn all(&self, meter: usize) -> [Terms; 2] {
        [0, 1].map(|edition| self.rule(edition, meter).terms)
    }

    /// The most that a meter ever allows at once.
    pub(crate) fn capacity(&self, meter: usize) -> u64 {
        self.all(meter).iter().map(Terms::capacity).max().unwrap_or(0)
    }

    /// The rule that has these terms.
    pub(crate) fn of_terms(&self, terms: &Terms) -> Option<Rule> {
        let rules = self.editions.iter().flat_map(|edition| [edition.key, edition.shared]);
        rules.into_iter().find(|rule| rule.terms == *terms)
    }

    /// The other edition holds from now on.
    pub(crate) fn turn(&mut self, scenario: &Scenario) {
        self.version += 1;
        self.current = 1 - self.current;
        let Edition { key, shared } = &mut self.editions[self.current];
        key.terms = key.with_version(scenario, self.version);
        shared.terms = shared.with_version(scenario, self.version);
    }
}

/// Whether two limits count in the same way, and differ by how much they allow at most.
pub(crate) fn is_alike(one: &Terms, other: &Terms) -> bool {
    let kind = |terms: &Terms| (terms.algorithm(), terms.period() * terms.tick_us());
    kind(one) == kind(other)
}

/// Whether two limits allow the same, regardless of their versions and their treatment of lapsed
/// grants.
pub(crate) fn is_same(one: &Terms, other: &Terms) -> bool {
    is_alike(one, other)
        && (one.amount(), one.burst(), one.capacity()) == (other.amount(), other.burst(), other.capacity())
}

/// Returns the changed limit of a world, or the limit itself if the change is not valid.
fn changed(scenario: &Scenario) -> Limit {
    let limit = &scenario.limit;
    let (amount, period) = (u64::from(limit.amount()), Duration::from_micros(limit.period_us()));
    let longer = period * LONGER;
    let other = match (scenario.faults.change, limit.algorithm()) {
        (RuleChange::Half, _) => return scaled(limit, 1, 2),
        (RuleChange::Algorithm, Algorithm::Gcra) => Limit::sliding_window(amount, period),
        (RuleChange::Algorithm, Algorithm::SlidingWindow) => Limit::gcra(amount, period),
        (RuleChange::Period, Algorithm::SlidingWindow) => Limit::sliding_window(amount, longer),
        (RuleChange::Period, Algorithm::Gcra) => {
            Limit::gcra(amount, longer).and_then(|other| other.with_burst(u64::from(limit.burst())))
        }
    };
    other.unwrap_or(*limit)
}

/// A limit times a fraction, or the limit itself if that makes no sense.
fn scaled(limit: &Limit, times: u64, over: u64) -> Limit {
    let scale = |number: u32| (u64::from(number) * times / over).max(1);
    let period = Duration::from_micros(limit.period_us());
    let other = match limit.algorithm() {
        Algorithm::Gcra => Limit::gcra(scale(limit.amount()), period)
            .and_then(|other| other.with_burst(scale(limit.burst()))),
        Algorithm::SlidingWindow => Limit::sliding_window(scale(limit.amount()), period),
    };
    other.unwrap_or(*limit)
}
