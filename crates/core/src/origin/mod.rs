//! The origin of a region: one pure transition that every store of meters implements.
//!
//! Nodes spend their grants without asking. A grant counts as used until it is reported, so a
//! region admits as much as one bucket, with any number of nodes. Whenever a grant is made, the
//! charged units and all grants together are within the limit. Late reports are safe: charging
//! later never results in a lower level.

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
pub use terms::{DROPS_MAX, LEVEL_MAX, Lapse, TOLERANCE_BURST_MIN, TOLERANCE_PPM_MAX, Terms};
