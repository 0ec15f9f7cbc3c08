//! A merge charges the new usage, and nothing else.

use super::{AppliedMerge, Checker, Observation};
use crate::history::History;
use crate::scenario::Scenario;

struct Import;

pub(super) fn new(scenario: &Scenario) -> Option<Box<dyn Checker>> {
    scenario.regions.as_ref()?;
    Some(Box::new(Import))
}

impl Checker for Import {
    fn promise(&self) -> &'static str {
        "import"
    }

    fn see(&mut self, seen: &Observation<'_>, history: &History) -> Option<String> {
        let Observation::Merged(AppliedMerge { region, charged, news: Some(news), .. }) = seen else {
            return None;
        };
        let at_us = history.now_us;
        let is_other = news != charged;
        is_other.then(|| format!("region {region}: {charged} charged for components of {news} at {at_us} us"))
    }
}
