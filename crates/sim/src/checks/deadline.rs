//! No request waits beyond the deadline.

use super::{Checker, Observation};
use crate::history::History;
use crate::scenario::Scenario;

/// By how much more than its deadline a request may wait, in sixteenths of it: clocks may run slow.
const LATE_SIXTEENTHS: u64 = 1;

struct Deadline {
    wait_us_max: u64,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let deadline_us = scenario.settings().deadline_us;
    Some(Box::new(Deadline { wait_us_max: deadline_us + deadline_us * LATE_SIXTEENTHS / 16 }))
}

impl Checker for Deadline {
    fn promise(&self) -> &'static str {
        "deadline"
    }

    fn see(&mut self, seen: &Observation<'_>, _history: &History) -> Option<String> {
        let (Observation::Waited { us }, most_us) = (seen, self.wait_us_max) else { return None };
        (*us > most_us).then(|| format!("a request waited {us} us, the maximum is {most_us} us"))
    }
}
