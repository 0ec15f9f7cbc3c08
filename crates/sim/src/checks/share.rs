//! A region without faults admits nearly as much as one bucket would.

use tidegate_core::Algorithm;

use super::{Checker, Ending};
use crate::report::Steady;
use crate::scenario::{Faults, PLENTY_PER_S, Scenario, Shape};

/// Least admissions, in hundredths of the admissions of one bucket.
const WELL_PERCENT: u64 = 97;

/// The smallest burst of a limit that is well. Of a smaller one, a unit that is on its way is a
/// large part.
const BURST_MIN: u32 = 10;

struct Share;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if is_well(scenario) { Some(Box::new(Share)) } else { None }
}

/// Whether there is one region without faults, requests come steadily and cost one unit, and the
/// limit is a bucket of ten units or more.
pub(super) fn is_well(scenario: &Scenario) -> bool {
    let limit = &scenario.limit;
    scenario.regions.is_none()
        && scenario.faults == Faults::default()
        && matches!(scenario.shape, Shape::Steady | Shape::Poisson)
        && scenario.updates_per_s_max == PLENTY_PER_S
        && (scenario.cost_max, scenario.large_ppm + scenario.charges_ppm) == (1, 0)
        && !scenario.shared
        && limit.burst() >= BURST_MIN
        && limit.algorithm() == Algorithm::Gcra
}

impl Checker for Share {
    fn promise(&self) -> &'static str {
        "share"
    }

    /// A world with a warm-up is judged by its steady load.
    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let Steady { admitted, ideal, .. } = end.steady;
        let (admitted, ideal) =
            if end.scenario.steady_from_us > 0 { (admitted, ideal) } else { end.admitted_and_ideal() };
        let is_starved = admitted * 100 < ideal * WELL_PERCENT;
        is_starved.then(|| format!("{admitted} admitted, where one bucket would have admitted {ideal}"))
    }
}
