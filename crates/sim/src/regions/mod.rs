//! Worlds of several regions: origins, nodes and replicators as they are shipped, far from each
//! other.

mod bug;
mod check;
mod exchange;
mod plan;
mod replicator;
mod report;
mod scenario;
mod spoil;
mod sweep;
mod trouble;
mod verdict;
mod world;

pub use bug::RegionBug;
pub use report::{Reach, RegionReport, RegionViolation};
pub use scenario::{Attack, Cut, CutKind, Cuts, Kind, RegionFaults, RegionScenario, region_scenario_of};
pub use sweep::{BoundReach, RegionSummary, catch_in_regions, shrink_regions, sweep_regions};
pub use world::run_regions;
