//! A seeded world in which the shipped engine, table and origin run under faults.
//!
//! Everything that happens is drawn from one seed: the same seed gives the same history, to the last message. Checkers watch
//! what is admitted against what was promised.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a simulated world is small"
)]

mod bucket;
mod bug;
mod clock;
mod network;
mod node;
mod report;
mod scenario;
mod swarm;
mod trace;
mod world;

pub use bug::Bug;
pub use report::{Report, Violation};
pub use scenario::{Faults, Scenario, Shape};
pub use swarm::scenario_of;
pub use trace::Trace;
pub use world::run;
