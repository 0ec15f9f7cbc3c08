//! Regions become isolated together, also where only two of them are cut from each other.

use super::{Checker, Observation};
use crate::history::History;
use crate::scenario::{SECOND_US, Scenario};

/// Longest time for which one region may be connected while another is isolated, µs. The loss of a
/// peer soon reaches the region that learns of it last.
const PARTED_US: u64 = 5 * SECOND_US;

/// Message loss between regions from which on isolation is a matter of chance, millionths. Links
/// are then dead for three seconds again and again, and last-heard ages stay close to the peer
/// timeout.
const UNFAIR_PPM: u32 = 10_000;

/// Whether a region is connected, as observed in the last round of its replicator.
#[derive(Clone, Copy, Default)]
struct RegionConnectivity {
    is_connected: bool,
    since_us: u64,
    last_round_us: u64,
}

struct Isolation {
    regions: Vec<RegionConnectivity>,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    let regions = scenario.regions.as_ref().filter(|regions| regions.faults.loss_ppm < UNFAIR_PPM)?;
    Some(Box::new(Isolation { regions: vec![RegionConnectivity::default(); regions.weights.len()] }))
}

impl Checker for Isolation {
    fn promise(&self) -> &'static str {
        "isolation"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let &Observation::Connectivity { region, is_connected } = seen else { return None };
        let at_us = history.now_us;
        let here = &mut self.regions[region];
        if here.is_connected != is_connected {
            *here = RegionConnectivity { is_connected, since_us: at_us, last_round_us: at_us };
        }
        here.last_round_us = at_us;
        let is_settled = is_connected && here.since_us + PARTED_US <= at_us;
        if !is_settled || history.troubled_us >= at_us.saturating_sub(2 * PARTED_US) {
            return None;
        }
        let is_isolated = |other: &RegionConnectivity| {
            let is_recent = other.last_round_us + SECOND_US >= at_us;
            !other.is_connected && is_recent && other.since_us + PARTED_US <= other.last_round_us
        };
        self.regions.iter().position(is_isolated).map(|other| {
            format!("region {region}: connected at {at_us} us, while region {other} is isolated")
        })
    }
}
