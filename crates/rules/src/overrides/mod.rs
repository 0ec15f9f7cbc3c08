//! Overrides: other limits for some keys of a rule, or for some identifiers of a namespace of
//! direct limits.
//!
//! An [`OverrideIndex`] finds both kinds alike. To it, a namespace of one tenant is a target like a
//! rule, and an identifier is a key with one part.

mod index;
mod namespaces;
mod packed;

pub use index::{LOOSE_WILDCARDS_MAX, OVERRIDES_MAX, WILDCARDS_MAX, WILDCARDS_PER_TARGET_MAX};
pub(crate) use index::{
    OverrideDraft, OverrideIndex, OverrideIndexBuilder, OverrideKinds, OverrideMatch, literal_bytes,
};
pub use namespaces::{
    IDENTIFIER_STARS_MAX, NAMESPACE_TEXT_CHARS_MAX, NamespaceOverride, NamespaceOverrides,
    OVERRIDE_PERIOD_MS_MAX, OVERRIDE_PERIOD_MS_MIN, OVERRIDES_PER_TENANT_MAX,
};
pub(crate) use namespaces::{NamespaceDraft, NamespaceOverridesBuilder};
