//! A seeded simulator: the shipped engine, table, origin and replication rounds run in a world with
//! faults.
//!
//! One seed determines a world: the same seed gives the same history, to the last message. A world
//! has one region or several. Checkers compare its history with the promises of the system.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "numbers of a simulated world are small"
)]

mod bucket;
mod bug;
mod checks;
mod clock;
mod history;
mod kind;
mod matrix;
mod memory;
mod model;
mod network;
mod node;
mod plot;
mod report;
mod rule_editions;
mod scenario;
mod schedule;
mod sequence;
mod shrink;
mod spoil;
mod store;
mod swarm;
mod sweep;
mod trace;
mod words;
mod world;

pub use bug::Bug;
pub use kind::{Cuts, Kind};
pub use matrix::{FleetResult, LoadCase, LoadResult, load_cases};
pub use model::{Case, ModelMeasurement, cases};
pub use plot::plot;
pub use report::{Curve, Reach, Report, Steady, Violation};
pub use scenario::{Attack, Cut, CutKind, Faults, LinkFaults, Regions, RuleChange, Scenario, Shape, Spread};
pub use sequence::{SequenceCase, SequenceResult, sequence_cases};
pub use shrink::shrink;
pub use swarm::{Size, Worlds};
pub use sweep::{BoundReach, Summary, catch, sweep};
pub use trace::Trace;
pub use world::run;
