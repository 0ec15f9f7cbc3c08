//! A slow, exact model of every decision, and the comparison of the product's arithmetic with it.
//!
//! The model ([`Model`]) is written from the definitions, in another form than the product: levels
//! in cost units as exact rationals, and times found by search. The comparison ([`campaign`]) plays
//! seeded random histories on both and stops at the first difference.

mod bucket;
mod campaign;
mod cells;
mod compare;
mod difference;
mod draw;
mod exact;
mod history;
mod level;
mod model;
mod play;
mod probe;
mod ranges;
mod rng;
mod script;
mod search;
mod subject;
mod totals;

pub use bucket::Bucket;
pub use campaign::{Plan, campaign};
pub use cells::Cells;
pub use difference::{Difference, Report};
pub use exact::Exact;
pub use history::{Clock, Operation, Step};
pub use level::Level;
pub use model::Model;
pub use ranges::Spec;
pub use subject::Subject;
pub use totals::Totals;
