//! Two rounds after regions hear each other again, and in the end, each knows the usage of all
//! others.

use tidegate_core::origin::ComponentTotals;

use super::knowledge::{KeyKnowledge, charged_for, to_publish};
use super::{Checker, Ending, Observation};
use crate::history::History;
use crate::scenario::Scenario;
use crate::world::Region;

struct Convergence;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(Convergence))
}

impl Checker for Convergence {
    fn promise(&self) -> &'static str {
        "convergence"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Healed { regions, known, begun_us } = seen else { return None };
        if history.troubled_us >= *begun_us { None } else { lacking(history, regions, known) }
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let known = to_publish(end.regions, end.scenario.keys);
        lacking(end.history, end.regions, &known)
    }
}

/// Returns the first region that lacks usage of another one, in words.
fn lacking(history: &History, regions: &[Region], known: &[KeyKnowledge]) -> Option<String> {
    let is_over = |usage: &KeyKnowledge| history.over.contains(&(usage.of, usage.key, usage.incarnation));
    known.iter().filter(|usage| !is_over(usage)).find_map(|usage| {
        let KeyKnowledge { of, key, .. } = usage;
        let has_lost = |region: usize| regions[region].losses + regions[*of].losses > 0;
        let mut peers = (0..regions.len()).filter(|peer| peer != of && !has_lost(*peer));
        let region = peers.find(|peer| !is_known(history, regions, *peer, usage))?;
        let at_us = history.now_us;
        Some(format!("region {region}, key {key}: usage of region {of} is incomplete at {at_us} us"))
    })
}

fn is_known(history: &History, regions: &[Region], observer: usize, usage: &KeyKnowledge) -> bool {
    let KeyKnowledge { of, key, incarnation, charged, cell, current } = *usage;
    match charged_for(history, regions, observer, (of, key, incarnation)) {
        None => charged == 0,
        Some(ComponentTotals::Drained { charged: known, .. }) => known >= charged,
        Some(ComponentTotals::Cells { cell: known, current: of_it, .. }) if known == cell => of_it >= current,
        Some(ComponentTotals::Cells { cell: known, previous, .. }) if known == cell + 1 => {
            previous >= current
        }
        Some(ComponentTotals::Cells { cell: known, .. }) => known > cell || current == 0,
    }
}
