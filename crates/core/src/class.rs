//! Classes: the purpose of a limit, which selects its behaviour when something that it needs is
//! gone.

use std::fmt;

use crate::origin::Lapse;
use crate::regime::Regime;

/// The purpose of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Keeps a service pleasant. Shed first, and then the request passes. Without the origin each
    /// node continues with its node share.
    #[default]
    Comfort,
    /// Keeps a bill small. Shed second, and then the request is refused. Without the origin it
    /// fails closed, or open for paying callers.
    Cost,
    /// Keeps attackers out. Shed last, and then the request is refused. A lapsed grant counts as
    /// used. Without the origin it fails closed.
    Security,
}

impl Class {
    /// All classes, in the order in which their checks are shed.
    pub const ALL: [Self; 3] = [Self::Comfort, Self::Cost, Self::Security];

    /// Returns the name of the class in rules, answers and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Comfort => "comfort",
            Self::Cost => "cost",
            Self::Security => "security",
        }
    }

    /// Returns the default regime of a limit. A security limit must hold, so one region decides
    /// each key.
    pub const fn regime(self) -> Regime {
        match self {
            Self::Comfort | Self::Cost => Regime::BestEffort,
            Self::Security => Regime::Strict,
        }
    }

    /// Returns the treatment of a grant after its node failed to report in time.
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
