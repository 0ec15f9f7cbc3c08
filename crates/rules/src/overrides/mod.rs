//! Overrides: limits that replace the limit stated by a request, for identifiers that match a
//! pattern.
//!
//! An [`OverrideStore`] persists them. An [`OverrideIndex`] holds all of them in memory for
//! lookups.

mod index;
mod store;

pub use index::{OverrideIndex, OverridesFull};
pub use store::{OverrideStore, OverrideStoreError};

use crate::pattern::Pattern;

/// The most overrides of one tenant. Higher: more memory, some 500 bytes each, and a slower start.
pub const OVERRIDES_MAX: usize = 100_000;

/// Maximum wildcards of one namespace. A check without an exact override compares its identifier
/// with each of them.
pub const WILDCARDS_MAX: usize = 1_000;

/// One override.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// Unique.
    pub id: String,
    /// Where it applies.
    pub namespace: String,
    /// Pattern of the identifiers that it applies to.
    pub identifier: Pattern,
    /// How much may pass; 0 blocks.
    pub limit: u32,
    /// In how long.
    pub duration_ms: u64,
}

impl Override {
    /// Returns the sort key among the wildcards of a namespace: the most literal text first, then
    /// text order.
    fn rank(&self) -> (std::cmp::Reverse<usize>, &str) {
        (std::cmp::Reverse(self.identifier.literal_bytes()), self.identifier.as_str())
    }
}
