//! Regimes: how far a limit reaches where there are several regions.

use std::fmt;

use crate::class::Class;

/// How far a limit reaches where there are several regions. With one region all regimes are the
/// same, except for [`Regime::requires`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Each region has the limit for itself.
    Regional,
    /// All regions share the limit, as far as they know of each other's usage.
    BestEffort,
    /// Each region has its regional share of the limit.
    Share,
    /// One region decides each key, and the others forward their checks to it.
    Strict,
}

impl Regime {
    /// All regimes.
    pub const ALL: [Self; 4] = [Self::Regional, Self::BestEffort, Self::Share, Self::Strict];

    /// Returns the name of the regime in rules and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Regional => "regional",
            Self::BestEffort => "best_effort",
            Self::Share => "share",
            Self::Strict => "strict",
        }
    }

    /// Returns the only class that a limit of this regime can have; `None` if it can have any. A
    /// strict limit waits for another region rather than over-admit, so it must not pass undecided
    /// requests.
    pub const fn requires(self) -> Option<Class> {
        match self {
            Self::Regional | Self::BestEffort | Self::Share => None,
            Self::Strict => Some(Class::Security),
        }
    }
}

impl fmt::Display for Regime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
