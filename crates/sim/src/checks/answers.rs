//! Every request is answered.

use super::{Checker, Ending};
use crate::scenario::Scenario;

struct Answers;

pub(super) fn new(_scenario: &Scenario) -> Option<Box<dyn Checker>> {
    Some(Box::new(Answers))
}

impl Checker for Answers {
    fn promise(&self) -> &'static str {
        "answers"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        (end.waiting > 0).then(|| format!("{} requests were never answered", end.waiting))
    }
}
