//! The origin answers every request except just after a fault, if calls are quick and none is lost.

use super::lock_out::{LOCKED_OUT_US, is_reachable};
use super::{Checker, Observation};
use crate::history::History;
use crate::scenario::Scenario;

/// One way between a node and the origin that is quick, µs: to wait for a call that is under way,
/// and then for one's own, takes less than the deadline.
const QUICK_US: u64 = 1_000;

struct Reachability;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let applies = is_reachable(scenario) && scenario.delay_us <= QUICK_US;
    if applies { Some(Box::new(Reachability)) } else { None }
}

impl Checker for Reachability {
    fn promise(&self) -> &'static str {
        "reachability"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Unanswered { key } = seen else { return None };
        let (at_us, since_us) = (history.now_us, history.troubled_us);
        (at_us > since_us + LOCKED_OUT_US).then(|| {
            format!("key {key}: no reply at {at_us} us, although no fault was active since {since_us} us")
        })
    }
}
