//! A set of rules, read as one and replaced as one.

use std::collections::BTreeSet;
use std::fmt::Write;

use sha2::{Digest, Sha256};

use crate::dimensions::Dimensions;
use crate::file::{Problems, parse_rules};
use crate::rule::Rule;

/// The most rules of a set. Every request looks at each of them, so more would be slow.
pub const RULES_MAX: usize = 10_000;

/// Hexadecimal digits of a set's version: enough to tell sets apart, few enough to read out.
const VERSION_DIGITS: usize = 12;

/// An immutable set of rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleSet {
    rules: Vec<Rule>,
    version: String,
    placement: Option<String>,
}

impl Default for RuleSet {
    fn default() -> Self {
        Self { rules: Vec::new(), version: version_of(""), placement: None }
    }
}

impl RuleSet {
    /// Reads a set from the text of a rules file. It is taken whole or not at all, with every problem named.
    pub fn parse(text: &str) -> Result<Self, Problems> {
        let (rules, placement) = parse_rules(text)?;
        Ok(Self { rules, version: version_of(text), placement })
    }

    /// The rules that apply to a request, in the order of the file.
    pub fn matching<'r>(&'r self, request: &'r Dimensions<'_>) -> impl Iterator<Item = &'r Rule> {
        self.rules.iter().filter(|rule| rule.applies(request))
    }

    /// The dimensions that the rules for `tenant` look at: a request needs no others.
    pub fn dimensions_used(&self, tenant: &str) -> BTreeSet<&str> {
        let rules = self.rules.iter().filter(|rule| rule.is_for(tenant));
        let used: BTreeSet<&str> = rules.flat_map(Rule::dimensions_used).collect();
        // Where nothing is counted, nothing has to be found.
        if used.is_empty() { used } else { used.into_iter().chain(self.placement()).collect() }
    }

    /// The dimension that says where in a region a request's meters are kept; all those of a tenant are kept together where
    /// nothing is said.
    pub fn placement(&self) -> Option<&str> {
        self.placement.as_deref()
    }

    /// Whether requests of different placements share meters of a rule.
    pub fn crosses(&self, rule: &Rule) -> bool {
        self.placement.as_ref().is_some_and(|dimension| !rule.key.contains(dimension))
    }

    /// All rules, in the order of the file.
    pub fn rules(&self) -> &[Rule] {
        &self.rules
    }

    /// What tells this set from others: the beginning of a digest of its text.
    pub fn version(&self) -> &str {
        &self.version
    }
}

fn version_of(text: &str) -> String {
    let mut version = String::new();
    for byte in Sha256::digest(text.as_bytes()).iter().take(VERSION_DIGITS / 2) {
        // Writing to a string does not fail.
        let _ = write!(version, "{byte:02x}");
    }
    version
}
