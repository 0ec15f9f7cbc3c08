//! Whenever the origin makes a grant, charges and grants together are within the limit.

use tidegate_core::Algorithm;

use super::{AppliedCall, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::scenario::Scenario;

struct Invariant;

/// Usage of peers is charged without a test, so this holds in one region only.
pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if scenario.regions.is_some() { None } else { Some(Box::new(Invariant)) }
}

impl Checker for Invariant {
    fn promise(&self) -> &'static str {
        "invariant"
    }

    fn see(&mut self, seen: &Observation<'_>, _history: &History) -> Option<String> {
        let Observation::Applied(AppliedCall { is_fresh: true, received, reply, after, .. }) = seen else {
            return None;
        };
        received.updates.iter().zip(&reply.meters).find_map(|(update, meter_reply)| {
            let meter = after.meter(&update.key).filter(|_| meter_reply.grant > update.keep)?;
            let of_cell = |cell| meter.terms().algorithm() == Algorithm::Gcra || cell == meter_reply.cell;
            let grants = meter.holders().filter(|(_, node_grant)| of_cell(node_grant.cell));
            let held: u64 = grants.map(|(_, node_grant)| node_grant.amount).sum();
            let is_above = meter.level() + held * meter.terms().period() > meter.terms().full();
            is_above.then(|| format!("key {}: granted more than the free units", meter_of(&update.key)))
        })
    }
}
