//! A history of one key as data: it can be played again without the chance that made it.

use tidegate_core::Now;

/// The readings of both clocks at the start of a history. They advance together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// The monotonic reading at the start.
    pub mono_us: u64,
    /// The wall clock at the start.
    pub wall_us: u64,
}

impl Clock {
    /// Both readings `at_us` after the start.
    pub fn now(&self, at_us: u64) -> Now {
        Now::from_micros(self.mono_us + at_us, self.wall_us + at_us)
    }
}

/// One operation on a meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "each is the method of `Meter` of the same name, with its arguments")]
pub enum Operation {
    Decide { cost: u64 },
    Reserve { cost: u64 },
    Commit { reserved: u64, actual: u64 },
    Rollback { reserved: u64 },
    Charge { cost: u64 },
    Refund { cost: u64 },
    Merge { used: u64 },
    Reset,
    Used,
}

/// An operation and its time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Microseconds since the start of the history.
    pub at_us: u64,
    /// The operation.
    pub operation: Operation,
}
