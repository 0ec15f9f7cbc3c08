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
    /// They are counted and shown, and stop nobody.
    Shadow,
}

impl Mode {
    /// The mode as it is written in rules and answers.
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

/// A limit, and the requests it applies to. What many rules say alike is kept once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Unique within its set.
    pub name: Box<str>,
    /// Whose requests: every tenant's, each counted apart, or only this one's.
    pub tenant: Option<Arc<str>>,
    /// Raised by whoever changes the rule; told with every decision. Fits into 32 bits.
    pub version: u64,
    /// Rules of higher priority come first.
    pub priority: i32,
    /// What happens when something is gone.
    pub class: Class,
    /// Whether those it limits pay: then a rule of class [`Class::Cost`] fails open.
    pub paid: bool,
    /// How far it may be passed in a region, in millionths of its burst; what its class tolerates where nothing is said.
    pub tolerance_ppm: Option<u32>,
    /// How far it reaches where there are several regions; what its class asks for where nothing is said.
    pub regime: Option<Regime>,
    /// Whether it stops anyone.
    pub mode: Mode,
    /// What may pass.
    pub limit: Limit,
    /// The dimensions whose values together are counted. A request without one of them is not counted.
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
    /// What is promised of it, under its own limit or another one in its place.
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

    /// What its author had better know, if the regions are such. Where there is one, who said nothing of regions is told
    /// nothing of them.
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

    /// The dimensions that the rule looks at, some of them perhaps twice.
    pub fn dimensions_used(&self) -> impl Iterator<Item = &str> {
        self.when.iter().map(|condition| &*condition.dimension).chain(self.key.iter().map(|name| &**name))
    }
}

impl Condition {
    pub(crate) fn holds(&self, request: &Dimensions<'_>) -> bool {
        let value = request.get(&self.dimension);
        value.is_some_and(|value| self.any_of.iter().any(|pattern| pattern.matches(value)))
            || self.networks.iter().any(|network| request.is_within(network))
    }
}
