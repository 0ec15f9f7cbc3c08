//! An admission at the origin is charged to all of its meters, each with its cost.

use tidegate_core::origin::{Call, CheckGroup, OriginMeter, Partition};

use super::{AppliedCall, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::scenario::Scenario;

struct Atomicity;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if scenario.shared { Some(Box::new(Atomicity)) } else { None }
}

impl Checker for Atomicity {
    fn promise(&self) -> &'static str {
        "atomicity"
    }

    /// The reference is the same call without its checks. The costs are those of the call as it was
    /// sent, even if the origin received others.
    fn see(&mut self, seen: &Observation<'_>, _history: &History) -> Option<String> {
        let Observation::Applied(call) = seen else { return None };
        let AppliedCall { is_fresh: true, sent, received, reply, after, .. } = call else { return None };
        let mut before = call.whole_before?.clone();
        let silent = Call { checks: Vec::new(), ..Call::clone(received) };
        before.apply(reply.now_us, &silent).ok()?;
        sent.updates.iter().enumerate().find_map(|(place, update)| {
            let charged =
                |partition: &Partition| partition.meter(&update.key).map_or(0, OriginMeter::charged);
            let costs = |ask: &CheckGroup| {
                let here = ask.charges.iter().filter(|charge| usize::from(charge.meter) == place);
                here.map(|charge| charge.cost).sum::<u64>()
            };
            let checks = sent.checks.iter().zip(&reply.checks);
            let passed: u64 = checks.map(|(ask, decided)| u64::from(decided.passed) * costs(ask)).sum();
            let is_torn = charged(after) - charged(&before) != passed;
            is_torn.then(|| format!("key {}: charged to some of its limits only", meter_of(&update.key)))
        })
    }
}
