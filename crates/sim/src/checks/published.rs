//! A region publishes only usage that it charged.

use tidegate_core::origin::OriginMeter;

use super::components::published_units;
use super::{AppliedRound, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::scenario::Scenario;

struct Published;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(Published))
}

impl Checker for Published {
    fn promise(&self) -> &'static str {
        "published"
    }

    fn see(&mut self, seen: &Observation<'_>, _history: &History) -> Option<String> {
        let Observation::Round(AppliedRound { regions, region, reply, .. }) = seen else { return None };
        let here = &regions[*region];
        let mut components = reply.components.iter().filter(|_| here.losses == 0);
        components.find_map(|component| {
            let key = meter_of(&component.key);
            let committed = here.store.contents.meter(key).map_or(0, OriginMeter::charged);
            let published = published_units(component);
            let is_above = published > committed;
            is_above
                .then(|| format!("region {region}, key {key}: {published} published and {committed} charged"))
        })
    }
}
