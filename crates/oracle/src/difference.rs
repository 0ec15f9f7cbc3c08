//! One disagreement, and the report that lets anyone repeat it.

use std::fmt::{self, Debug};
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::history::{Clock, Step};
use crate::ranges::Spec;

/// A compared value, with the results of the oracle and of the subject.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Name of the compared value.
    pub property: &'static str,
    /// Result of the oracle.
    pub expected: String,
    /// Result of the subject.
    pub got: String,
}

impl Difference {
    /// `got` must be `expected`.
    pub(crate) fn unless_equal<T: Debug + PartialEq>(
        property: &'static str,
        expected: &T,
        got: &T,
    ) -> Result<(), Self> {
        if expected == got { Ok(()) } else { Err(Self::new(property, expected, got)) }
    }

    pub(crate) fn new(property: &'static str, expected: &impl Debug, got: &impl Debug) -> Self {
        Self { property, expected: format!("{expected:?}"), got: format!("{got:?}") }
    }
}

/// Returns the result of `run`. A panic is a disagreement too, and its history is worth as much.
pub(crate) fn caught<T>(run: impl FnOnce() -> Result<T, Difference>) -> Result<T, Difference> {
    catch_unwind(AssertUnwindSafe(run))
        .unwrap_or_else(|_| Err(Difference::new("answer", &"no panic", &"a panic, see above")))
}

/// A disagreement with all that is needed to repeat it.
#[derive(Clone, Debug)]
pub struct Report {
    /// The seed of the whole comparison.
    pub seed: u64,
    /// The number of the history.
    pub history: u64,
    /// The limit.
    pub spec: Spec,
    /// The readings of the clocks at the start of the history.
    pub clock: Clock,
    /// How many operations the history had before it was shortened.
    pub played: usize,
    /// The shortest history found that still disagrees, from an empty meter.
    pub steps: Vec<Step>,
    /// How it disagrees.
    pub difference: Difference,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "MISMATCH: {}", self.difference.property)?;
        writeln!(f, "seed {}, history {}", self.seed, self.history)?;
        writeln!(f, "{}", self.spec)?;
        writeln!(f, "clocks start at mono {} us, wall {} us", self.clock.mono_us, self.clock.wall_us)?;
        writeln!(f, "operations, shortened from {} to {}:", self.played, self.steps.len())?;
        for step in &self.steps {
            writeln!(f, "  +{} us: {:?}", step.at_us, step.operation)?;
        }
        writeln!(f, "expected: {}", self.difference.expected)?;
        write!(f, "got:      {}", self.difference.got)
    }
}
