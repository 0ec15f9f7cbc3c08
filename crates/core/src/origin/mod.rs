//! The origin of a region: one pure transition that every store of meters makes.
//!
//! Nodes spend what they were granted without asking. What they hold counts as used until they report, so that a region
//! admits what one bucket would, whatever the number of its nodes: whenever a grant is made, what was charged and what is
//! held is together at most what the limit allows. A later charge never lowers a level that drains, so reporting late is
//! safe.

mod abroad;
mod call;
mod meter;
mod outward;
mod partition;
#[cfg(not(loom))]
#[cfg(test)]
mod several;
mod tank;
mod terms;

pub use abroad::{Abroad, Component, Gathered, Merge, Merged, RegionId, Round, Sums, part_of};
pub use call::{Ask, Call, Charge, Decided, NodeId, Reply, StoreId, Told, UNDECIDED, Update};
pub use meter::{
    ABROAD_LIFE_US_MAX, Holding, LAPSE_MARGIN_US, LAPSES_PER_CALL, LIFE_US_MAX, NEVER_US, OriginMeter,
    RECALL_US,
};
pub(crate) use meter::{REPORT_US_MIN, REPORTS_PER_BURST};
pub use partition::{
    CallError, LANE_RETENTION_US, MARK_RETENTION_US, MARKS_MAX, Partition, SEQUENCE_MAX,
    UPDATES_PER_CALL_MAX, WHOLE_US_MAX,
};
pub use terms::{DEBT_MAX, DROPS_MAX, Lapse, TOLERANCE_BURST_MIN, TOLERANCE_PPM_MAX, Terms};
