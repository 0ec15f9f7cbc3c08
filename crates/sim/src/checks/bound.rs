//! In no interval more is admitted than the limit and its allowance, in all regions together.

use tidegate_core::bound::Faults;
use tidegate_core::origin::{Lapse, Terms};

use super::{Checker, Ending};
use crate::scenario::Scenario;
use crate::store::EPOCH_US;

struct Bound;

pub(super) fn new(_scenario: &Scenario) -> Option<Box<dyn Checker>> {
    Some(Box::new(Bound))
}

impl Checker for Bound {
    fn promise(&self) -> &'static str {
        "bound"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        end.judged.iter().enumerate().find_map(|(key, judged)| {
            let ((excess, at_us), allowed) = (judged.worst(), allowed(end, key));
            let at_us = at_us.saturating_sub(EPOCH_US);
            (excess > allowed).then(|| {
                format!("key {key}: {excess} admitted above the limit at {at_us} us, the bound is {allowed}")
            })
        })
    }
}

/// Units that may be admitted above the limit of a meter, after all that went wrong.
pub(crate) fn allowed(end: &Ending<'_>, meter: usize) -> u64 {
    if end.scenario.regions.is_some() { printed(end, meter) } else { surplus(end, meter) }
}

/// The printed bound of several regions.
fn printed(end: &Ending<'_>, meter: usize) -> u64 {
    let Scenario { faults, .. } = end.scenario;
    let may_part = !end.scenario.link_faults().cuts.is_empty() || end.scenario.is_wan_bad();
    let partitions = end.history.isolations().max(u64::from(may_part)) as u32;
    let lapses = end.history.meters[meter].lapses as u32 + faults.crashes;
    let failovers = faults.losses + faults.wipes;
    end.scenario.bound(&Faults { lapses, failovers, partitions, ..Faults::NONE }).total()
}

/// The allowance of one region, by the faults that occurred.
fn surplus(end: &Ending<'_>, meter: usize) -> u64 {
    let Ending { scenario, history, .. } = end;
    let (faults, region) = (&scenario.faults, &end.regions[0]);
    let (bursts, units) = match scenario.lapse() {
        Lapse::Counted => (region.store.unnoticed[usize::from(scenario.partition_of(meter))], 0),
        Lapse::Forgiven => (u64::from(faults.losses + faults.wipes), history.meters[meter].written_off),
    };
    let units = units + history.above_alone(meter);
    let tolerance = region.rules.all(meter).iter().map(Terms::tolerance).max().unwrap_or(0);
    (bursts + u64::from(faults.origin_steps)) * region.rules.capacity(meter) + units + tolerance
}
