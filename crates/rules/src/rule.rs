//! A rule: a limit, and the requests it applies to.

use arrayvec::ArrayVec;
use ipnet::IpNet;
use tidegate_core::{Class, Limit};

use crate::dimensions::Dimensions;
use crate::pattern::Pattern;

/// Whether a rule's denials stop anyone.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
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

/// A limit, and the requests it applies to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// Unique within its set.
    pub name: String,
    /// Whose requests: every tenant's, each counted apart, or only this one's.
    pub tenant: Option<String>,
    /// Raised by whoever changes the rule; told with every decision.
    pub version: u64,
    /// What happens when something is gone.
    pub class: Class,
    /// Whether those it limits pay: then a rule of class [`Class::Cost`] fails open.
    pub paid: bool,
    /// How far it may be passed in a region, in millionths of its burst; what its class tolerates where nothing is said.
    pub tolerance_ppm: Option<u32>,
    /// Whether it stops anyone.
    pub mode: Mode,
    /// What may pass.
    pub limit: Limit,
    /// The dimensions whose values together are counted. A request without one of them is not counted.
    pub key: Vec<String>,
    /// Dimensions that must match.
    pub when: Vec<Condition>,
}

/// One dimension and the patterns and networks of which one must match.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Condition {
    /// The dimension.
    pub dimension: String,
    /// Any of these will do.
    pub any_of: Vec<Pattern>,
    /// Or an address in any of these; only for the dimension that holds one.
    pub networks: Vec<IpNet>,
}

impl Rule {
    /// Whether the rule applies to a request with these dimensions.
    pub fn applies(&self, request: &Dimensions<'_>) -> bool {
        self.key_of(request).is_some()
    }

    /// The parts of the key that a request is counted under, if the rule applies to it.
    pub fn key_of<'d>(&self, request: &'d Dimensions<'_>) -> Option<ArrayVec<&'d [u8], KEY_PARTS_MAX>> {
        if !self.when.iter().all(|condition| condition.holds(request)) {
            return None;
        }
        // A rule file with more parts than fit is refused.
        self.key.iter().take(KEY_PARTS_MAX).map(|name| request.get(name).map(str::as_bytes)).collect()
    }

    /// The dimensions that the rule looks at, some of them perhaps twice.
    pub fn dimensions_used(&self) -> impl Iterator<Item = &str> {
        self.when
            .iter()
            .map(|condition| condition.dimension.as_str())
            .chain(self.key.iter().map(String::as_str))
    }

    /// Whether the rule is for requests of `tenant`.
    pub fn is_for(&self, tenant: &str) -> bool {
        self.tenant.as_deref().is_none_or(|only| only == tenant)
    }
}

impl Condition {
    fn holds(&self, request: &Dimensions<'_>) -> bool {
        let value = request.get(&self.dimension);
        value.is_some_and(|value| self.any_of.iter().any(|pattern| pattern.matches(value)))
            || self.networks.iter().any(|network| request.is_within(network))
    }
}
