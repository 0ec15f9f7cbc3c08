//! The limits of a world, and how they change.

use std::time::Duration;

use tidegate_core::origin::{Lapse, Terms};
use tidegate_core::{Algorithm, Limit};

use crate::scenario::Scenario;

/// A limit as nodes know it and as the origin counts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rule {
    pub(crate) limit: Limit,
    pub(crate) terms: Terms,
}

impl Rule {
    fn new(scenario: &Scenario, limit: &Limit) -> Self {
        let terms = Terms::new(limit, scenario.tolerance_ppm, scenario.lapse, 1);
        Self { limit: limit.at_origin(), terms }
    }

    fn set_version(&mut self, scenario: &Scenario, version: u32) {
        self.terms = Terms::new(&self.limit, scenario.tolerance_ppm, scenario.lapse, version);
    }

    /// The same, with what becomes of lapsed grants changed.
    pub(crate) fn with_lapse(&self, scenario: &Scenario, lapse: Lapse) -> Terms {
        let version = u32::try_from(self.terms.version()).unwrap_or(u32::MAX);
        Terms::new(&self.limit, scenario.tolerance_ppm, lapse, version)
    }
}

/// An edition of the limits: that of each key, and the one that all keys share.
#[derive(Clone, Copy, Debug)]
struct Edition {
    key: Rule,
    shared: Rule,
}

/// The limits of a world: as they were at first, and halved.
#[derive(Clone, Debug)]
pub(crate) struct Rulebook {
    editions: [Edition; 2],
    keys: usize,
    version: u32,
    /// The edition that holds.
    pub(crate) current: usize,
}

impl Rulebook {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let edition = |limit: &Limit| Edition {
            key: Rule::new(scenario, limit),
            shared: Rule::new(scenario, &scaled(limit, 2, 1)),
        };
        let editions = [edition(&scenario.limit), edition(&scaled(&scenario.limit, 1, 2))];
        Self { editions, keys: scenario.keys, version: 1, current: 0 }
    }

    /// The limit of a meter in an edition.
    pub(crate) fn rule(&self, edition: usize, meter: usize) -> Rule {
        let Edition { key, shared } = self.editions[edition];
        if meter < self.keys { key } else { shared }
    }

    /// The widest limit that a meter is ever under: what it is judged by.
    pub(crate) fn widest(&self, meter: usize) -> Terms {
        self.rule(0, meter).terms
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
        key.set_version(scenario, self.version);
        shared.set_version(scenario, self.version);
    }
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
