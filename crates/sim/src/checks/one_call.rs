//! A session has one call in flight.

use super::{Checker, Observation};
use crate::history::History;
use crate::scenario::Scenario;

struct OneCall;

pub(super) fn new(_scenario: &Scenario) -> Option<Box<dyn Checker>> {
    Some(Box::new(OneCall))
}

impl Checker for OneCall {
    fn promise(&self) -> &'static str {
        "one call"
    }

    fn see(&mut self, seen: &Observation<'_>, _history: &History) -> Option<String> {
        let Observation::Sent { node, sequence, in_flight: Some(before) } = seen else { return None };
        let is_other = before != sequence;
        is_other.then(|| format!("node {node}: more than one call in flight in a session"))
    }
}
