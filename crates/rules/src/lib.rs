//! Rules: which limits apply to a request, read from a file, checked whole, and matched by the request's dimensions.
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
//! let applies: Vec<_> = rules.matching(&request).map(|rule| rule.name.as_str()).collect();
//! assert_eq!(applies, ["writes_per_user"]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

pub mod audit;
pub mod book;
pub mod change;
mod dimensions;
mod file;
mod network;
pub mod overrides;
pub mod pattern;
mod period;
mod rule;
mod set;
pub mod snapshot;
pub mod store;

pub use dimensions::{
    ADDRESS, DIMENSIONS_MAX, Dimensions, DimensionsError, HEADER_PREFIX, NAME_BYTES_MAX, VALUE_BYTES_MAX,
};
pub use file::{FILE_BYTES_MAX, Problems, syntax_problem};
pub use network::{canonical, parse_network};
pub use period::parse_period;
pub use rule::{KEY_PARTS_MAX, Mode, Rule};
pub use set::{RULES_MAX, RuleSet};
pub use tidegate_core::Class;
