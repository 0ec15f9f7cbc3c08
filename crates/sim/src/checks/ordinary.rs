//! A user within the shares of all regions is not denied for long.

use tidegate_core::Algorithm;
use tidegate_replication::PEER_TIMEOUT_DEFAULT_US;

use super::{Checker, Observation};
use crate::history::History;
use crate::rule_editions::RuleEditions;
use crate::scenario::{Faults, SECOND_US, Scenario, Shape};
use crate::world::ORDINARY;

/// Longest denial of the ordinary user: this time in µs, and this many requests in a row. At the
/// end of a cut, the usage that all regions admitted before they noticed it is charged at once.
pub(super) const ORDINARY_US: u64 = 10 * SECOND_US;
const ORDINARY_REQUESTS: u64 = 4;

struct Ordinary {
    /// The longest denial in each region, µs.
    denied_us_max: Vec<u64>,
}

/// The longest denial in a region, µs.
fn denied_us_max(scenario: &Scenario, region: usize) -> u64 {
    let limit = &scenario.limit;
    let terms = RuleEditions::new(scenario, region, None).first(0);
    let own = terms.cross_region().map_or(0, |of| of.share_amount).max(1);
    let every_us = limit.period_us() * 2 / own;
    // An excess in a sliding window counts until the window is over.
    let patience_us = match limit.algorithm() {
        Algorithm::Gcra => ORDINARY_US,
        Algorithm::SlidingWindow => ORDINARY_US + limit.period_us(),
    };
    // Usage of peers during the absence of a replicator arrives at once. If the peers continue to
    // use their shares, the region pays it off at the rate of its own share.
    let dies = scenario.link_faults().replicator_crashes > 0;
    let late_us = if dies { PEER_TIMEOUT_DEFAULT_US * terms.amount().saturating_sub(own) / own } else { 0 };
    patience_us + late_us + ORDINARY_REQUESTS * every_us
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let applies = scenario.faults == Faults::default() && matches!(scenario.shape, Shape::Attack(_));
    scenario.regions.as_ref().filter(|_| applies)?;
    let regions = 0..scenario.region_count();
    Some(Box::new(Ordinary { denied_us_max: regions.map(|of| denied_us_max(scenario, of)).collect() }))
}

impl Checker for Ordinary {
    fn promise(&self) -> &'static str {
        "ordinary"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let &Observation::Denied { region, key: ORDINARY, .. } = seen else { return None };
        let (at_us, passed_us) = (history.now_us, history.meters[ORDINARY].passed_us[region]);
        let is_long = at_us > passed_us + self.denied_us_max[region];
        is_long.then(|| {
            format!("region {region}, key {ORDINARY}: denied at {at_us} us, and since {passed_us} us")
        })
    }
}
