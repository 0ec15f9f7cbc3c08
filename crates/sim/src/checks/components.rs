//! A published component never falls, and does not grow after its incarnation was given up.

use std::collections::BTreeMap;

use tidegate_core::origin::{Component, ComponentTotals};

use super::{AppliedRound, Checker, Observation};
use crate::history::History;
use crate::node::meter_of;
use crate::scenario::Scenario;

/// The last published totals of a component.
#[derive(Clone, Copy)]
struct PublishedTotals {
    /// The sum, or the cell and its sum.
    totals: (u64, u64),
    /// How often the region had lost data by then.
    losses: u32,
    /// Whether it fell because data was lost: then its incarnation is given up.
    is_given_up: bool,
}

#[derive(Default)]
struct Components {
    /// By region, key and incarnation.
    published: BTreeMap<(usize, usize, u64), PublishedTotals>,
}

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(Components::default()))
}

impl Checker for Components {
    fn promise(&self) -> &'static str {
        "components"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Round(AppliedRound { regions, region, reply, .. }) = seen else { return None };
        let at_us = history.now_us;
        let mut broken = None;
        for component in &reply.components {
            let key = meter_of(&component.key);
            if self.falls((*region, key), component, regions[*region].losses) {
                broken = Some(format!(
                    "region {region}, key {key}: a published component decreased at {at_us} us"
                ));
            }
        }
        broken
    }
}

impl Components {
    fn falls(&mut self, (region, key): (usize, usize), component: &Component, losses: u32) -> bool {
        let [first, second, _] = component.totals.numbers();
        let totals = match component.totals {
            ComponentTotals::Drained { .. } => (first, 0),
            ComponentTotals::Cells { .. } => (first, second),
        };
        let now = PublishedTotals { totals, losses, is_given_up: false };
        let before = self.published.entry((region, key, component.incarnation)).or_insert(now);
        let fell = totals < before.totals;
        let is_lost = fell && losses > before.losses;
        let grew = totals > before.totals && before.is_given_up;
        *before = PublishedTotals { is_given_up: before.is_given_up || is_lost, ..now };
        (fell && !is_lost) || grew
    }
}

/// Units that a component publishes.
pub(super) fn published_units(component: &Component) -> u64 {
    let [first, second, third] = component.totals.numbers();
    match component.totals {
        ComponentTotals::Drained { .. } => first,
        ComponentTotals::Cells { .. } => second + third,
    }
}
