//! Overrides: limits that replace the one a request brings, for identifiers that match a pattern.
//!
//! They are kept in a [`OverrideStore`] and looked up in an [`OverrideIndex`], which holds all of them in memory.

mod index;
mod store;

pub use index::{OverrideIndex, OverridesFull};
pub use store::{OverrideStore, OverrideStoreError};

use crate::pattern::Pattern;

/// The most overrides of one tenant. Higher: more memory, some 500 bytes each, and a slower start.
pub const OVERRIDES_MAX: usize = 100_000;

/// The most wildcards of one namespace. A check whose identifier has no override of its own looks at each of them.
pub const WILDCARDS_MAX: usize = 1_000;

/// One override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Unique.
    pub id: String,
    /// Where it applies.
    pub namespace: String,
    /// To whom it applies.
    pub identifier: Pattern,
    /// How much may pass; 0 blocks.
    pub limit: u32,
    /// In how long.
    pub duration_ms: u64,
}

impl Override {
    /// What places it among the wildcards of its namespace: the more text a pattern spells out, the sooner it is
    /// asked; among equals, the order of the text decides.
    fn rank(&self) -> (std::cmp::Reverse<usize>, &str) {
        (std::cmp::Reverse(self.identifier.literal_bytes()), self.identifier.as_str())
    }
}
