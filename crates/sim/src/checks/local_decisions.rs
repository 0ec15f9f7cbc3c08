//! In a region without faults, nodes decide a busy key by their grants while at most half of a
//! roomy limit is used.

use super::share::is_well;
use super::{Checker, Ending};
use crate::scenario::{SECOND_US, Scenario, Shape};

/// The largest share of requests that wait, in hundredths; and the fleets and limits that this is
/// promised for.
const WAITED_PERCENT: u64 = 15;
const NODES_MAX: usize = 16;
const BUSY_PER_S: u64 = 100;

struct LocalDecisions;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let Scenario { limit, nodes, requests, length_us, .. } = scenario;
    let per_second = u64::from(limit.amount()) * SECOND_US / limit.period_us();
    let is_half = 2 * requests * SECOND_US <= per_second * length_us;
    let is_roomy = *nodes <= NODES_MAX && u64::from(limit.burst()) >= 10 * *nodes as u64;
    let is_busy = scenario.shape == Shape::Poisson && per_second >= BUSY_PER_S;
    let applies = is_well(scenario) && is_half && is_roomy && is_busy;
    if applies { Some(Box::new(LocalDecisions)) } else { None }
}

impl Checker for LocalDecisions {
    fn promise(&self) -> &'static str {
        "local decisions"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let (requests, waited) = (end.scenario.requests, end.tally.waited);
        let is_slow = waited * 100 > requests * WAITED_PERCENT;
        is_slow.then(|| format!("{waited} of {requests} waited for the origin at half of the limit or less"))
    }
}
