//! Emergencies: they take precedence over all rules and overrides for a limited time.

use std::cmp::Reverse;
use std::sync::Arc;

use tidegate_core::{Algorithm, Limit};

use crate::dimensions::Dimensions;
use crate::overrides::literal_bytes;
use crate::pattern::Pattern;
use crate::rule::{Condition, Mode};
use crate::set::EmergencyTerms;

/// The most emergencies at once. Each is looked at for each rule that applies to a request.
pub const EMERGENCIES_MAX: usize = 256;

/// An emergency as it was read and checked.
#[derive(Clone, Debug)]
pub(crate) struct Emergency {
    pub(crate) id: Box<str>,
    /// Position of its rule; `None` for all rules.
    pub(crate) rule: Option<u32>,
    pub(crate) tenant: Option<Arc<str>>,
    /// One for each part of the rule's key; empty if it is about every key.
    pub(crate) key: Box<[Pattern]>,
    pub(crate) when: Arc<[Condition]>,
    pub(crate) action: Action,
    pub(crate) expires_ms: u64,
}

/// Effect of an emergency.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    /// No request passes.
    Block(EmergencyLimits),
    /// Every request passes, and is counted as before.
    Allow,
    /// So much passes.
    Limit(EmergencyLimits),
}

/// One limit, for rules of either algorithm.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmergencyLimits {
    pub(crate) gcra: Limit,
    pub(crate) sliding_window: Limit,
}

impl EmergencyLimits {
    fn of(&self, algorithm: Algorithm) -> Limit {
        match algorithm {
            Algorithm::Gcra => self.gcra,
            Algorithm::SlidingWindow => self.sliding_window,
        }
    }
}

impl Emergency {
    /// The limit that takes the place of one of a rule, if another one does.
    pub(crate) fn limit(&self, algorithm: Algorithm) -> Option<Limit> {
        match &self.action {
            Action::Allow => None,
            Action::Block(limits) | Action::Limit(limits) => Some(limits.of(algorithm)),
        }
    }

    /// Returns the emergency as decisions have it.
    pub(crate) fn terms(&self) -> EmergencyTerms<'_> {
        let is_block = matches!(self.action, Action::Block(_));
        EmergencyTerms { id: &self.id, is_block, expires_ms: self.expires_ms }
    }

    /// Returns whether denials are enforced.
    pub(crate) fn mode(&self) -> Mode {
        match self.action {
            Action::Allow => Mode::Shadow,
            Action::Block(_) | Action::Limit(_) => Mode::Enforce,
        }
    }

    fn applies(
        &self,
        rule: u32,
        tenant: &str,
        keys: &[&[&str]],
        request: &Dimensions<'_>,
        now_ms: u64,
    ) -> bool {
        let describes =
            |key: &&[&str]| self.key.iter().zip(*key).all(|(pattern, value)| pattern.matches(value));
        now_ms < self.expires_ms
            && self.rule.is_none_or(|only| only == rule)
            && self.tenant.as_deref().is_none_or(|only| only == tenant)
            && keys.iter().any(describes)
            && self.when.iter().all(|condition| condition.holds(request))
    }
}

/// All emergencies, in the order in which they apply: those that block, then those about one rule,
/// then those that spell out most, then by id.
#[derive(Clone, Debug, Default)]
pub(crate) struct Emergencies(Box<[Emergency]>);

impl Emergencies {
    pub(crate) fn new(mut all: Vec<Emergency>) -> Self {
        all.sort_by(|a, b| rank(a).cmp(&rank(b)));
        Self(all.into())
    }

    /// Returns the emergency in force for a rule and a request, whose key may have several forms.
    pub(crate) fn find(
        &self,
        rule: u32,
        tenant: &str,
        keys: &[&[&str]],
        request: &Dimensions<'_>,
        now_ms: u64,
    ) -> Option<&Emergency> {
        self.0.iter().find(|emergency| emergency.applies(rule, tenant, keys, request, now_ms))
    }

    /// The dimensions that emergencies look at for requests of `tenant`.
    pub(crate) fn dimensions_used(&self, tenant: &str) -> impl Iterator<Item = &str> {
        let about =
            move |emergency: &&Emergency| emergency.tenant.as_deref().is_none_or(|only| only == tenant);
        self.0
            .iter()
            .filter(about)
            .flat_map(|emergency| &*emergency.when)
            .map(|condition| &*condition.dimension)
    }

    /// All of them.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Emergency> {
        self.0.iter()
    }
}

/// Returns the sort key of an emergency among others.
fn rank(emergency: &Emergency) -> impl Ord + use<'_> {
    let blocks = matches!(emergency.action, Action::Block(_));
    let patterns = emergency.when.iter().flat_map(|condition| &condition.any_of);
    let spelled_out = literal_bytes(&emergency.key) + patterns.map(Pattern::literal_bytes).sum::<usize>();
    (Reverse(blocks), Reverse(emergency.rule.is_some()), Reverse(spelled_out), &emergency.id)
}
