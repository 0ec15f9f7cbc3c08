//! The control plane of a node: its rules come from a rule store, and changes of them are guarded.
//!
//! [`StoreFollower`] puts the content of the store in force, and the last good [`Snapshots`] while
//! the store is unreachable. [`Control`] plans changes, asks for consent, and watches the keys that
//! are denied after a change: a change that was a mistake is rolled back, or raises an alarm.
//!
//! The crate decides no check and delays none. A server is a [`Node`]: it puts rule sets in force,
//! tells the time and counts. Long work runs on blocking threads of the runtime that follows the
//! store.

mod alarm;
mod applied;
mod audit_watch;
mod bucket;
mod changes;
mod consent;
mod control;
mod credentials;
mod denials;
mod emergency_consent;
mod follow;
mod guardrail;
mod key_baseline;
mod log_replay;
mod node;
mod overrides;
mod plan;
mod review;
mod rollback;
mod row_tenants;
mod rule_keys;
#[cfg(test)]
mod series_tests;
mod snapshots;
#[cfg(test)]
mod test_node;
#[cfg(test)]
mod tests;
mod watch;

pub use alarm::Alarm;
pub use bucket::Bucket;
pub use changes::{ChangeError, ChangeOutcome, StoredChange};
pub use consent::ChangeKind;
pub use control::{Control, Stopping};
pub use denials::LOOK_EVERY;
pub use follow::{StoreConfig, StoreFollower};
pub use guardrail::{ChangeEffect, Consent};
pub use log_replay::LogReplay;
pub use node::{ControlEvent, CredentialTarget, Node, NodeRules, RuleTarget};
pub use overrides::OverrideWriteError;
pub use plan::{PlanError, PlanResult};
pub use rollback::AutomaticRollback;
pub use rule_keys::{EmergencyTag, KeyMemory, KeyOutcome, RuleKeys};
pub use snapshots::Snapshots;
pub use watch::WatchForecast;
