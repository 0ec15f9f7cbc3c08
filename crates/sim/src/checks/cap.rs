//! The debt to peers has a maximum, if the limit forgives.

use tidegate_core::origin::Lapse;

use super::{AppliedMerge, Checker, Observation};
use crate::history::History;
use crate::rule_editions::RuleEditions;
use crate::scenario::Scenario;

struct Cap {
    /// The most that may count of a key.
    owed_max: u64,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref().filter(|_| scenario.lapse() == Lapse::Forgiven)?;
    let capacity = RuleEditions::new(scenario, 0, None).capacity(0);
    Some(Box::new(Cap { owed_max: capacity + scenario.debt_max(&scenario.limit) }))
}

impl Checker for Cap {
    fn promise(&self) -> &'static str {
        "cap"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Merged(AppliedMerge { region, key, owed: [before, owed], .. }) = seen else {
            return None;
        };
        let (most, at_us) = (self.owed_max, history.now_us);
        let is_above = *owed > most.max(*before);
        is_above
            .then(|| format!("region {region}, key {key}: {owed} owed at {at_us} us, the maximum is {most}"))
    }
}
