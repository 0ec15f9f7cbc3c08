//! A region without faults admits a load that one bucket would admit in full.

use super::share::is_well;
use super::{Checker, Ending};
use crate::report::Steady;
use crate::scenario::Scenario;

/// The largest denied share of such a load, in thousandths.
const FALSE_DENIALS_PER_MILLE: u64 = 3;

struct FalseDenials;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    if is_well(scenario) { Some(Box::new(FalseDenials)) } else { None }
}

impl Checker for FalseDenials {
    fn promise(&self) -> &'static str {
        "false denials"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let Steady { offered, ideal, admitted, .. } = end.steady;
        let denied = offered.saturating_sub(admitted);
        let is_false = ideal == offered && denied * 1_000 > offered * FALSE_DENIALS_PER_MILLE;
        is_false.then(|| format!("{denied} of {offered} denied, where one bucket would have admitted all"))
    }
}
