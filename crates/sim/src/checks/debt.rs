//! No key is denied for longer than its largest debt takes to drain.

use tidegate_replication::PEER_TIMEOUT_DEFAULT_US;

use super::ordinary::ORDINARY_US;
use super::{Checker, Observation};
use crate::history::History;
use crate::rule_editions::RuleEditions;
use crate::scenario::Scenario;

struct Debt {
    drain_us: u64,
    burst: u64,
    share_capacity: Vec<u64>,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    let terms = |region| RuleEditions::new(scenario, region, None).first(0);
    let share_capacity = |region| terms(region).cross_region().map_or(0, |of| of.share_capacity);
    let (capacity, debt_max) = (terms(0).capacity(), scenario.debt_max(&scenario.limit));
    Some(Box::new(Debt {
        drain_us: scenario.drain_us(capacity + debt_max)
            + scenario.drain_us(capacity)
            + PEER_TIMEOUT_DEFAULT_US
            + ORDINARY_US,
        burst: terms(0).burst(),
        share_capacity: (0..scenario.region_count()).map(share_capacity).collect(),
    }))
}

impl Checker for Debt {
    fn promise(&self) -> &'static str {
        "debt"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let &Observation::Denied { region, key, charges } = seen else { return None };
        let (cost, at_us) = (charges.first()?.cost, history.now_us);
        let is_small = cost <= self.share_capacity[region] && cost * 2 <= self.burst;
        let passed_us = history.meters[key].last_passed_us();
        let is_long = at_us > passed_us.max(history.troubled_us) + self.drain_us;
        (is_small && is_long).then(|| {
            format!("region {region}, key {key}: denied at {at_us} us, longer than the largest debt drains")
        })
    }
}
