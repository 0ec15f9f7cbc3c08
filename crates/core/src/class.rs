//! Classes: what depends on a limit, and so what becomes of it when something it needs is gone.

use std::fmt;

use crate::origin::Lapse;
use crate::regime::Regime;

/// What depends on a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Keeps a service pleasant. Shed first, and then let through; without the origin each process
    /// goes on with its part.
    #[default]
    Comfort,
    /// Keeps a bill small. Shed second, and then refused; without the origin it fails closed, or
    /// open for who pays.
    Cost,
    /// Keeps attackers out. Shed last, and then refused; what a lost process held counts as used;
    /// without the origin it fails closed.
    Security,
}

impl Class {
    /// All classes, in the order in which their checks are shed.
    pub const ALL: [Self; 3] = [Self::Comfort, Self::Cost, Self::Security];

    /// The class as it is written in rules, answers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Comfort => "comfort",
            Self::Cost => "cost",
            Self::Security => "security",
        }
    }

    /// How far a limit reaches unless it says otherwise: what must hold is decided in one place.
    pub const fn regime(self) -> Regime {
        match self {
            Self::Comfort | Self::Cost => Regime::BestEffort,
            Self::Security => Regime::Strict,
        }
    }

    /// What becomes of a grant whose holder was not heard of in time.
    pub const fn lapse(self) -> Lapse {
        match self {
            Self::Comfort | Self::Cost => Lapse::Forgiven,
            Self::Security => Lapse::Counted,
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
