//! Regimes: how far a limit reaches where there are several regions.

use std::fmt;

use crate::class::Class;

/// How far a limit reaches where there are several regions. With one region they are all the same, but for what
/// [`Regime::requires`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Regime {
    /// Each region has the limit for itself.
    Regional,
    /// All regions together have it, as far as they have heard of each other.
    BestEffort,
    /// Each region has a standing part of it.
    Share,
    /// One region decides for each key, and the others ask it.
    Strict,
}

impl Regime {
    /// All regimes.
    pub const ALL: [Self; 4] = [Self::Regional, Self::BestEffort, Self::Share, Self::Strict];

    /// The regime as it is written in rules and answers.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Regional => "regional",
            Self::BestEffort => "best_effort",
            Self::Share => "share",
            Self::Strict => "strict",
        }
    }

    /// The one class that a limit of this regime can be of, if it cannot be of any: who waits for another region rather than
    /// pass too much does not let pass what nobody decided.
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
