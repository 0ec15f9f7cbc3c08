//! A rule: a limit, and the requests it applies to.

use std::sync::Arc;

use arrayvec::ArrayVec;
use ipnet::IpNet;
use tidegate_core::bound::{Fleet, Promise, Warning, warnings};
use tidegate_core::{Class, Limit, Regime};

use crate::dimensions::Dimensions;
use crate::pattern::Pattern;

/// Whether a rule's denials stop anyone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// They do.
    #[default]
    Enforce,
    /// Denials are counted and shown, but requests pass.
    Shadow,
}

impl Mode {
    /// Returns the name of the mode in rules and replies.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Enforce => "enforce",
            Self::Shadow => "shadow",
        }
    }
}

/// The most dimensions of a key.
pub const KEY_PARTS_MAX: usize = 8;

/// The values of a request that a rule counts it under, one for each part of the rule's key.
pub type Key<'d> = ArrayVec<&'d str, KEY_PARTS_MAX>;

/// A limit, and the requests it applies to. Rules share equal texts, keys and conditions in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Unique within its set.
    pub name: Box<str>,
    /// Tenant of the requests. `None`: every tenant, each counted separately.
    pub tenant: Option<Arc<str>>,
    /// Version of the rule, within 32 bits. Authors raise it in a file; the rule store raises it
    /// itself. Every decision carries it.
    pub version: u64,
    /// Rules of higher priority come first.
    pub priority: i32,
    /// Behaviour of the rule under failures.
    pub class: Class,
    /// Whether those it limits pay: then a rule of class [`Class::Cost`] fails open.
    pub paid: bool,
    /// Tolerated over-admission within a region, in millionths of the burst. `None`: 0.
    pub tolerance_ppm: Option<u32>,
    /// Reach of the limit across several regions. `None`: the regime of its class.
    pub regime: Option<Regime>,
    /// Whether it stops anyone.
    pub mode: Mode,
    /// The limit.
    pub limit: Limit,
    /// Dimensions of the key: their values together select the meter. The rule does not count a
    /// request without one of them.
    pub key: Arc<[Arc<str>]>,
    /// Dimensions that must match.
    pub when: Arc<[Condition]>,
}

/// One dimension and the patterns and networks of which one must match.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Condition {
    /// The dimension.
    pub dimension: Arc<str>,
    /// Any of these will do.
    pub any_of: Box<[Pattern]>,
    /// Or an address in any of these; only for the dimension that holds one.
    pub networks: Box<[IpNet]>,
}

impl Rule {
    /// Returns the guarantees of the rule, under its own limit or a replacement.
    pub fn promise<'l>(&self, limit: &'l Limit) -> Promise<'l> {
        let Self { class, paid, tolerance_ppm, .. } = *self;
        let regime = self.regime();
        let tolerance_ppm = tolerance_ppm.unwrap_or(0);
        Promise { limit, class, paid, tolerance_ppm, regime }
    }

    /// How far it reaches where there are several regions.
    pub fn regime(&self) -> Regime {
        self.regime.unwrap_or(self.class.regime())
    }

    /// Returns warnings for the rule's author about these regions. With one region, a rule without
    /// a `regime` has none.
    pub fn warnings(&self, fleet: &Fleet) -> Vec<Warning> {
        if self.regime.is_none() && fleet.regions() == 1 {
            return Vec::new();
        }
        warnings(&self.promise(&self.limit), fleet)
    }

    /// The same in words, with the rule's name.
    pub fn warned(&self, fleet: &Fleet) -> impl Iterator<Item = String> {
        let message = |warning| format!("rules[{:?}].{warning}", self.name);
        self.warnings(fleet).into_iter().map(message)
    }

    /// Whether the rule is for requests of `tenant`.
    pub fn is_for(&self, tenant: &str) -> bool {
        self.tenant.as_deref().is_none_or(|only| only == tenant)
    }

    /// Returns the key of a request with credentials as the client sent them; `None` if the key has
    /// none.
    pub(crate) fn clear_key<'d>(&self, request: &'d Dimensions<'_>) -> Option<Key<'d>> {
        if !self.key.iter().any(|name| request.clear(name).is_some()) {
            return None;
        }
        // A rule with more parts than fit is refused.
        let names = self.key.iter().take(KEY_PARTS_MAX);
        names.map(|name| request.clear(name).or_else(|| request.get(name))).collect()
    }

    /// The dimensions that the rule looks at, some of them perhaps twice.
    pub fn dimensions_used(&self) -> impl Iterator<Item = &str> {
        self.when.iter().map(|condition| &*condition.dimension).chain(self.key.iter().map(|name| &**name))
    }
}

impl Condition {
    pub(crate) fn holds(&self, request: &Dimensions<'_>) -> bool {
        let matches = |value: &str| self.any_of.iter().any(|pattern| pattern.matches(value));
        let forms = request.forms(&self.dimension);
        forms.is_some_and(|(value, clear)| matches(value) || clear.is_some_and(matches))
            || self.networks.iter().any(|network| request.is_within(network))
    }
}
