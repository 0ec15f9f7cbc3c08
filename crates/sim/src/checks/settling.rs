//! Soon after regions hear each other again, and in the end, all are connected and have published
//! the usage of their shares.

use tidegate_core::origin::{OriginMeter, Partition};

use super::{Checker, Ending, Observation};
use crate::history::History;
use crate::memory::{IS_SETTLING, ON_PART};
use crate::scenario::Scenario;
use crate::world::Region;

struct Settling {
    keys: usize,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(Settling { keys: scenario.keys }))
}

impl Checker for Settling {
    fn promise(&self) -> &'static str {
        "settling"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Settled { regions, begun_us } = seen else { return None };
        if history.troubled_us >= *begun_us { None } else { self.unsettled(regions, history.now_us) }
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        self.unsettled(end.regions, end.history.now_us)
    }
}

impl Settling {
    /// Returns the first region and key that is not connected, or that is connected and has
    /// unpublished usage of its regional share, in words. After lost writes that usage is not
    /// required: the next call publishes it under another incarnation.
    fn unsettled(&self, regions: &[Region], at_us: u64) -> Option<String> {
        let places = (0..regions.len()).flat_map(|region| (0..self.keys).map(move |key| (region, key)));
        places.into_iter().find_map(|(region, key)| {
            let Region { store, losses, .. } = &regions[region];
            let partition = store.contents.partition_of(key);
            if !is_connected(partition, store.epoch_us + at_us) {
                return Some(format!("region {region}, key {key}: still isolated at {at_us} us"));
            }
            let is_untold = *losses == 0 && has_untold(partition, store.contents.meter(key));
            is_untold.then(|| {
                format!("region {region}, key {key}: share usage is not fully published at {at_us} us")
            })
        })
    }
}

/// Whether a partition is connected, and counts all regions together.
pub(crate) fn is_connected(partition: &Partition, origin_us: u64) -> bool {
    let (connected_until_us, _, _, settled) = partition.connectivity_and_stamp();
    settled && connected_until_us > origin_us
}

/// Whether usage charged to the regional share of a meter is not published yet.
fn has_untold(partition: &Partition, meter: Option<&OriginMeter>) -> bool {
    let numbers = meter.and_then(OriginMeter::region_state_numbers);
    let is_isolated = numbers.is_some_and(|[_, _, _, _, _, _, _, level, current, previous, flags, _]| {
        flags & (ON_PART | IS_SETTLING) == ON_PART && level + current + previous > 0
    });
    is_isolated || partition.isolated_meters().next().is_some()
}

#[cfg(test)]
mod tests {
    use tidegate_core::origin::RoundRequest;

    use super::*;
    use crate::memory::tests::{START_US, STORE, ask, shared_gcra};
    use crate::node::name;
    use crate::scenario::SECOND_US;

    #[test]
    fn share_charges_are_unpublished_until_reconnected() {
        let terms = shared_gcra(40, 1_000, 4);
        let mut partition = Partition::default();
        let round = |settled, clock_us| RoundRequest {
            connected_for_us: SECOND_US,
            settled,
            clock_us,
            trim: 0,
            after: 0,
            most: 8,
        };
        ask(&mut partition, START_US, terms, (2, 0));
        assert!(has_untold(&partition, partition.meter(&name(0))) && !is_connected(&partition, START_US));
        partition.round(START_US, STORE, &round(false, START_US));
        assert!(!has_untold(&partition, partition.meter(&name(0))), "the meter is dirty");
        assert!(!is_connected(&partition, START_US), "usage of the peers has not arrived");
        partition.round(START_US, STORE, &round(true, START_US));
        assert!(!has_untold(&partition, partition.meter(&name(0))) && is_connected(&partition, START_US));
        let later_us = START_US + 2 * SECOND_US;
        assert!(!is_connected(&partition, later_us), "all peers have timed out");
        ask(&mut partition, later_us, terms, (2, 0));
        assert!(has_untold(&partition, partition.meter(&name(0))));
    }
}
