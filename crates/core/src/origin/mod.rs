//! The origin of a region: one pure transition that every store of meters makes.
//!
//! Nodes spend what they were granted without asking. What they hold counts as used until they report, so that a region
//! admits what one bucket would, whatever the number of its nodes: whenever a grant is made, what was charged and what is
//! held is together at most what the limit allows. A later charge never lowers a level that drains, so reporting late is
//! safe.

mod call;
mod meter;
mod partition;
mod region_state;
#[cfg(not(loom))]
#[cfg(test)]
mod region_tests;
mod replication;
mod tank;
mod terms;

pub use call::{
    Call, CallReply, Charge, CheckGroup, CheckReply, MeterReply, MeterUpdate, NodeId, StoreId, UNDECIDED,
};
pub use meter::{
    CROSS_REGION_LIFE_US_MAX, LAPSE_MARGIN_US, LAPSES_PER_CALL_MAX, LIFE_US_MAX, NEVER_US, NodeGrant,
    OriginMeter, RECALL_US,
};
pub(crate) use meter::{REPORT_US_MIN, REPORTS_PER_BURST};
pub use partition::{
    CONNECTED_US_MAX, CallError, DIRTY_METERS_MAX, DIRTY_RETENTION_US, Partition, SEQUENCE_MAX,
    SESSION_RETENTION_US, UPDATES_PER_CALL_MAX,
};
pub use replication::{
    Component, ComponentTotals, CrossRegionTerms, MergeReply, MergeRequest, RegionId, RoundReply,
    RoundRequest, share_of,
};
pub use terms::{DEBT_MAX, DROPS_MAX, Lapse, TOLERANCE_BURST_MIN, TOLERANCE_PPM_MAX, Terms};
