//! A region does not publish a key below the publish threshold if no peer counts it.

use tidegate_core::origin::OriginMeter;

use super::components::published_units;
use super::{AppliedRound, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::rule_editions::RuleEditions;
use crate::scenario::Scenario;

struct Threshold {
    /// Unpublished units from which on a region publishes a key that no peer counts.
    publish_threshold: u64,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let terms = RuleEditions::new(scenario, 0, None).first(0);
    let publish_threshold = terms.cross_region()?.publish_threshold;
    Some(Box::new(Threshold { publish_threshold }))
}

impl Checker for Threshold {
    fn promise(&self) -> &'static str {
        "threshold"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Round(AppliedRound { regions, region, reply, .. }) = seen else { return None };
        let here = &regions[*region];
        let mut components = reply.components.iter().filter(|_| here.losses == 0);
        components.find_map(|component| {
            let key = meter_of(&component.key);
            let (published, at_us) = (published_units(component), history.now_us);
            let is_too_little = is_too_little(here.store.contents.meter(key)?, self.publish_threshold);
            is_too_little.then(|| {
                format!(
                    "region {region}, key {key}: {published} published at {at_us} us, below the threshold"
                )
            })
        })
    }
}

/// Whether a region counted less than the publish threshold of a key that no peer has published.
fn is_too_little(meter: &OriginMeter, publish_threshold: u64) -> bool {
    let counted = meter.region_state_numbers().map_or(0, |[_, charged, refunded, ..]| charged + refunded);
    counted < publish_threshold && meter.seen().next().is_none()
}
