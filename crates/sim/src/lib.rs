//! A seeded simulator: the shipped engine, table and origin run in a world with faults.
//!
//! One seed determines a world: the same seed gives the same history, to the last message. Checkers
//! compare the admissions with the promises of the system.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    reason = "numbers of a simulated world are small"
)]

mod bucket;
mod bug;
mod clock;
mod matrix;
mod memory;
mod model;
mod network;
mod node;
mod plot;
mod regions;
mod report;
mod rule_editions;
mod scenario;
mod schedule;
mod sequence;
mod shrink;
mod spoil;
mod swarm;
mod sweep;
mod trace;
mod watch;
mod words;
mod world;

pub use bug::Bug;
pub use matrix::{FleetResult, LoadCase, LoadResult, load_cases};
pub use model::{Case, ModelMeasurement, cases};
pub use plot::plot;
pub use regions::{
    Attack, BoundReach, Cut, CutKind, Cuts, Kind, Reach, RegionBug, RegionFaults, RegionReport,
    RegionScenario, RegionSummary, RegionViolation, catch_in_regions, region_scenario_of, run_regions,
    shrink_regions, sweep_regions,
};
pub use report::{Curve, Report, Steady, Violation};
pub use scenario::{Faults, RuleChange, Scenario, Shape, Spread};
pub use sequence::{SequenceCase, SequenceResult, sequence_cases};
pub use shrink::shrink;
pub use swarm::scenario_of;
pub use sweep::{Size, Summary, catch, sweep};
pub use trace::Trace;
pub use world::run;
