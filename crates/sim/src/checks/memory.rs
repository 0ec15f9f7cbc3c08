//! An origin expires a meter only when it no longer counts.

use super::{Checker, Observation};
use crate::history::History;
use crate::memory::still_counts;
use crate::scenario::Scenario;

struct Memory;

pub(super) fn new(_scenario: &Scenario) -> Option<Box<dyn Checker>> {
    Some(Box::new(Memory))
}

impl Checker for Memory {
    fn promise(&self) -> &'static str {
        "memory"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Expired { region, meter, was, origin_us } = seen else { return None };
        let at_us = history.now_us;
        still_counts(was, *origin_us)
            .then(|| format!("region {region}, key {meter}: forgotten at {at_us} us, with undrained usage"))
    }
}
