//! Rules: the limits that apply to a request, read from a file, validated as a whole, and matched
//! by the request's dimensions.
//!
//! ```
//! use tidegate_rules::{Dimensions, RuleSet};
//!
//! let rules = RuleSet::parse(r#"
//!     [[rules]]
//!     name = "writes_per_user"
//!     when = { method = ["POST", "PUT"], path = "/v1/*" }
//!     key = ["user"]
//!     limit = 100
//!     period = "1m"
//! "#)?;
//! let request = Dimensions::new([("method", "POST"), ("path", "/v1/orders"), ("user", "alice")])?;
//! let applies: Vec<_> = rules.matching("", &request, 0).map(|found| &*found.rule.name).collect();
//! assert_eq!(applies, ["writes_per_user"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod alteration;
pub mod audit;
pub mod change;
mod compile;
mod dimensions;
mod emergency;
mod expiry;
mod fields;
mod file;
mod index;
mod interner;
mod lines;
mod match_table;
mod network;
mod overrides;
pub mod pattern;
mod period;
mod problems;
pub mod rows;
mod rule;
mod secrets;
mod set;
pub mod snapshot;
pub mod store;
mod template;

pub use dimensions::{
    ADDRESS, DIMENSIONS_MAX, Dimensions, DimensionsError, HEADER_PREFIX, NAME_BYTES_MAX, VALUE_BYTES_MAX,
};
pub use emergency::EMERGENCIES_MAX;
pub use expiry::read_expiry;
pub use file::{FILE_BYTES_MAX, check_part};
pub use lines::TomlLines;
pub use network::{AddressCover, canonical, parse_network};
pub use overrides::{
    LOOSE_WILDCARDS_MAX, MIDDLE_BYTES_MAX, NAMESPACE_TEXT_CHARS_MAX, NamespaceOverride, NamespaceOverrides,
    OVERRIDE_PERIOD_MS_MAX, OVERRIDE_PERIOD_MS_MIN, OVERRIDES_MAX, OVERRIDES_PER_TENANT_MAX, STARS_MAX,
    WILDCARDS_MAX, WILDCARDS_PER_TARGET_MAX, check_stars,
};
pub use period::parse_period;
pub use problems::{PROBLEMS_MAX, Problems};
pub use rule::{Condition, KEY_PARTS_MAX, Key, Mode, Rule};
pub use secrets::{
    SECRET_HEADERS_MAX, SecretHeaders, digest as secret_digest, is_digest as is_secret_digest,
};
pub use set::{
    EffectiveTerms, EmergencyTerms, InheritedTerms, LOOKED_AT_RULES_MAX, RULES_MAX, RuleMatch, RuleSet,
    SCANNED_RULES_MAX,
};
pub use template::TEMPLATES_MAX;
pub use tidegate_core::{Class, Regime};
use tidegate_private_files as private_files;
