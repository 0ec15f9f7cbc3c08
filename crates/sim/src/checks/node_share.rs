//! A node without the origin admits at most its node share.

use super::{Checker, Ending};
use crate::scenario::Scenario;

struct NodeShare;

pub(super) fn new(_scenario: &Scenario) -> Option<Box<dyn Checker>> {
    Some(Box::new(NodeShare))
}

impl Checker for NodeShare {
    fn promise(&self) -> &'static str {
        "node share"
    }

    fn end(&mut self, end: &Ending<'_>) -> Option<String> {
        let mut parts = end.history.parts.iter().flatten();
        parts.find(|(_, judge)| judge.excess() > 0).map(|((_, key), judge)| {
            let excess = judge.excess();
            format!("key {key}: a node without the origin admitted {excess} more than its node share")
        })
    }
}
