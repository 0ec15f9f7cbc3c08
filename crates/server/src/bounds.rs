//! The bounds of rules, as the admin API and the command line print them.

use serde::Serialize;
use tidegate_core::Algorithm;
use tidegate_core::bound::{Faults, Fleet, REPLICATION_INTERVAL_US, bound};
use tidegate_rules::Rule;

/// Largest number of regions in a query: the number that can count together.
pub const REGIONS_MAX: u64 = tidegate::region::REGIONS_MAX as u64;

/// The largest weight of a region.
const WEIGHT_MAX: u32 = 1_000_000;

/// A fleet and the faults that it suffers.
#[derive(Clone, Debug)]
pub struct Situation {
    /// The processes that count together.
    pub fleet: Fleet,
    /// The faults that occur.
    pub faults: Faults,
}

impl Situation {
    /// Returns a situation in which every fault occurs once.
    pub fn new(fleet: Fleet) -> Self {
        Self { fleet, faults: Faults::ONE_OF_EACH }
    }

    /// Sets the regions by the weights of their regional shares, separated by commas.
    pub fn set_weights(&mut self, text: &str) -> Result<(), String> {
        let weight = |text: &str| text.trim().parse().ok().filter(|weight| (1..=WEIGHT_MAX).contains(weight));
        let weights: Option<Box<[u32]>> = text.split(',').map(weight).collect();
        let weights = weights.filter(|weights| weights.len() as u64 <= REGIONS_MAX).ok_or_else(|| {
            format!("weights: {text:?} is not 1 to {REGIONS_MAX} numbers from 1 to {WEIGHT_MAX}, separated by commas")
        })?;
        self.fleet.weights = weights;
        Ok(())
    }

    /// How far a rule may be passed.
    pub fn report<'r>(&self, rule: &'r Rule) -> BoundReport<'r> {
        let promise = rule.promise(&rule.limit);
        let found = bound(&promise, &self.fleet, &self.faults);
        let terms = found.terms.iter().map(|term| TermReport {
            name: term.name,
            formula: term.formula,
            units: term.units,
            when: term.condition.as_str(),
        });
        BoundReport {
            rule: &rule.name,
            regime: rule.regime().as_str(),
            class: rule.class.as_str(),
            algorithm: match rule.limit.algorithm() {
                Algorithm::Gcra => "gcra",
                Algorithm::SlidingWindow => "sliding_window",
            },
            limit: rule.limit.amount(),
            period_us: rule.limit.period_us(),
            burst: rule.limit.burst(),
            buckets: found.buckets,
            steady: found.steady(),
            total: found.total(),
            each_window: found.recurs,
            terms: terms.collect(),
            lag_ms: found.lag_us.div_ceil(US_PER_MS),
            largest_grant: found.largest_grant,
            open_without_origin: found.is_open_without_origin,
            warnings: rule.warnings(&self.fleet).iter().map(ToString::to_string).collect(),
        }
    }
}

/// The bound of a rule: its over-admission in units above the limit.
#[derive(Debug, Serialize)]
pub struct BoundReport<'r> {
    rule: &'r str,
    regime: &'static str,
    class: &'static str,
    algorithm: &'static str,
    limit: u32,
    period_us: u64,
    burst: u32,
    /// How many buckets of the limit there are.
    buckets: u64,
    /// The over-admission without faults, in units.
    steady: u64,
    /// If all went wrong that was counted.
    total: u64,
    /// Whether that may be so in each window; once otherwise.
    each_window: bool,
    terms: Vec<TermReport>,
    /// The longest time until a region takes the usage of another one into account, in
    /// milliseconds.
    lag_ms: u64,
    largest_grant: u64,
    /// Whether the rule fails open while its origin is down.
    open_without_origin: bool,
    warnings: Vec<String>,
}

#[derive(Debug, Serialize)]
struct TermReport {
    name: &'static str,
    formula: &'static str,
    units: u64,
    when: &'static str,
}

/// A parameter of a bound, for queries and flags.
#[derive(Clone, Copy, Debug)]
pub struct Parameter {
    /// The name in a query. The flag omits the unit.
    pub name: &'static str,
    /// The description.
    pub about: &'static str,
    /// From.
    pub least: u64,
    /// To.
    pub most: u64,
    /// Returns the value.
    pub get: fn(&Situation) -> u64,
    /// Sets the value, which must be in range.
    pub set: fn(&mut Situation, u64),
}

const US_PER_MS: u64 = 1_000;
/// Largest number of faults of a kind, and of nodes in a region.
const COUNT_MAX: u64 = 1_000_000;
/// Longest lag, peer timeout and outage: one day, in milliseconds.
const TIME_MS_MAX: u64 = 86_400_000;

/// All of them but for the weights of regions.
pub const PARAMETERS: [Parameter; 11] = [
    Parameter {
        name: "regions",
        about: "Regions, of the same weight, up to the 16 that can count together",
        least: 1,
        most: REGIONS_MAX,
        get: |of| of.fleet.weights.len() as u64,
        set: |of, value| of.fleet.weights = Fleet::of(small(value)).weights,
    },
    Parameter {
        name: "nodes",
        about: "Processes in each region",
        least: 1,
        most: COUNT_MAX,
        get: |of| of.fleet.nodes.into(),
        set: |of, value| of.fleet.nodes = small(value),
    },
    Parameter {
        name: "lag_ms",
        about: "Replication lag: a round of the replicator and the network delay",
        least: 0,
        most: TIME_MS_MAX,
        get: |of| (of.fleet.replication_interval_us + of.fleet.transit_us).div_ceil(US_PER_MS),
        set: |of, value| {
            of.fleet.replication_interval_us = REPLICATION_INTERVAL_US.min(value * US_PER_MS);
            of.fleet.transit_us = value * US_PER_MS - of.fleet.replication_interval_us;
        },
    },
    Parameter {
        name: "grant_life_ms",
        about: "Longest life of a grant; a value below the requests of a busy server is your own promise",
        least: 0,
        most: tidegate_core::origin::CROSS_REGION_LIFE_US_MAX / US_PER_MS,
        get: |of| of.fleet.grant_life_us.div_ceil(US_PER_MS),
        set: |of, value| of.fleet.grant_life_us = value * US_PER_MS,
    },
    Parameter {
        name: "peer_timeout_ms",
        about: "Peer timeout: the last-heard age at which regions spend only their regional shares",
        least: 0,
        most: TIME_MS_MAX,
        get: |of| of.fleet.peer_timeout_us.div_ceil(US_PER_MS),
        set: |of, value| of.fleet.peer_timeout_us = value * US_PER_MS,
    },
    Parameter {
        name: "threshold_ppm",
        about: "Unpublished usage of a key in a region, in millionths of the burst",
        least: 0,
        most: 1_000_000,
        get: |of| of.fleet.threshold_ppm.into(),
        set: |of, value| of.fleet.threshold_ppm = small(value),
    },
    Parameter {
        name: "lapses",
        about: "Nodes that die, or report too late, with a grant of the key",
        least: 0,
        most: COUNT_MAX,
        get: |of| of.faults.lapses.into(),
        set: |of, value| of.faults.lapses = small(value),
    },
    Parameter {
        name: "failovers",
        about: "Losses of an origin's last writes; without an origin, restarts",
        least: 0,
        most: COUNT_MAX,
        get: |of| of.faults.failovers.into(),
        set: |of, value| of.faults.failovers = small(value),
    },
    Parameter {
        name: "outages",
        about: "Outages of an origin",
        least: 0,
        most: COUNT_MAX,
        get: |of| of.faults.outages.into(),
        set: |of, value| of.faults.outages = small(value),
    },
    Parameter {
        name: "outage_ms",
        about: "Length of an outage during which the origin replies to some nodes and not to others",
        least: 0,
        most: TIME_MS_MAX,
        get: |of| of.faults.outage_us.div_ceil(US_PER_MS),
        set: |of, value| of.faults.outage_us = value * US_PER_MS,
    },
    Parameter {
        name: "partitions",
        about: "Times that regions do not hear of each other",
        least: 0,
        most: COUNT_MAX,
        get: |of| of.faults.partitions.into(),
        set: |of, value| of.faults.partitions = small(value),
    },
];

/// Converts a value in range, which always fits.
fn small(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

/// Converts the situation of the bounds in a response.
pub fn situation_json(of: &Situation) -> serde_json::Value {
    let numbers = PARAMETERS.iter().map(|parameter| (parameter.name.to_owned(), (parameter.get)(of).into()));
    let mut report: serde_json::Map<String, serde_json::Value> = numbers.collect();
    report.insert("weights".to_owned(), of.fleet.weights.to_vec().into());
    report.insert("origin".to_owned(), of.fleet.has_origin.into());
    report.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameter_returns_the_value_set() {
        for parameter in PARAMETERS {
            let mut situation = Situation::new(Fleet::of(1));
            for value in [parameter.least, parameter.most] {
                (parameter.set)(&mut situation, value);
                assert_eq!((parameter.get)(&situation), value, "{}", parameter.name);
            }
        }
    }

    #[test]
    fn weights_are_numbers_for_each_region() {
        let mut situation = Situation::new(Fleet::of(1));
        situation.set_weights("3, 1,1").expect("good");
        assert_eq!(*situation.fleet.weights, [3, 1, 1]);
        for wrong in ["", "1,,1", "0", "1,x", "-1", "1000001", &"1,".repeat(65)] {
            let problem = situation.set_weights(wrong).expect_err("refused");
            assert!(problem.starts_with("weights: "), "{problem}");
        }
        assert_eq!(*situation.fleet.weights, [3, 1, 1], "what is wrong changes nothing");
    }
}
