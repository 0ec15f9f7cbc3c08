//! Overrides: other limits for some keys of a rule, or for some identifiers of a namespace of
//! direct limits.
//!
//! An [`OverrideIndex`] finds both kinds alike. To it, a namespace of one tenant is a target like a
//! rule, and an identifier is a key with one part.

mod index;
mod namespaces;
mod packed;
mod wildcards;

pub use index::{OVERRIDES_MAX, WILDCARDS_MAX};
pub(crate) use index::{OverrideDraft, OverrideIndex, OverrideIndexBuilder, OverrideKinds, OverrideMatch};
pub use namespaces::{
    NAMESPACE_TEXT_CHARS_MAX, NamespaceOverride, NamespaceOverrides, OVERRIDE_PERIOD_MS_MAX,
    OVERRIDE_PERIOD_MS_MIN, OVERRIDES_PER_TENANT_MAX,
};
pub(crate) use namespaces::{NamespaceDraft, NamespaceOverridesBuilder};
pub(crate) use wildcards::literal_bytes;
pub use wildcards::{
    LOOSE_WILDCARDS_MAX, MIDDLE_BYTES_MAX, STARS_MAX, WILDCARDS_PER_TARGET_MAX, check_stars,
};
