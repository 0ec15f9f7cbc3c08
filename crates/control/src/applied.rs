//! Changes that recently came into force on this server, as the audit lists them.

use serde::Deserialize;
use tidegate_rules::audit::AuditEntry;
use tidegate_rules::store::StoreError;

use crate::control::Control;
use crate::node::Node;

/// Number of the last entries that are read. Higher: more changes at once are noticed one by one;
/// more is read after each.
const ENTRIES_MAX: u64 = 200;

/// A change that was applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AppliedChange {
    pub(super) change: u64,
    pub(super) revision: u64,
    pub(super) at_ms: u64,
    pub(super) by: String,
}

#[derive(Deserialize)]
struct Detail {
    change: u64,
    revision: u64,
}

impl<N: Node> Control<N> {
    /// Returns the changes above `revision`, up to the revision in force, in order.
    pub(super) async fn applied_after(&self, revision: u64) -> Result<Vec<AppliedChange>, StoreError> {
        let in_force = self.rule_rows().revision;
        let news = |applied: &AppliedChange| revision < applied.revision && applied.revision <= in_force;
        Ok(self.last_entries().await?.iter().filter_map(applied).filter(news).collect())
    }

    /// When emergencies were changed last.
    pub(super) async fn emergencies_changed_ms(&self) -> Result<Option<u64>, StoreError> {
        let entries = self.last_entries().await?;
        let last = entries.iter().rev().find(|entry| entry.action.starts_with("emergency."));
        Ok(last.map(|entry| entry.at_ms))
    }

    async fn last_entries(&self) -> Result<Vec<AuditEntry>, StoreError> {
        let end = self.store.checkpoint().await?.count;
        self.store.audit(end.saturating_sub(ENTRIES_MAX), ENTRIES_MAX).await
    }
}

fn applied(entry: &AuditEntry) -> Option<AppliedChange> {
    if entry.action != "change.apply" {
        return None;
    }
    let Detail { change, revision } = serde_json::from_str(&entry.detail).ok()?;
    Some(AppliedChange { change, revision, at_ms: entry.at_ms, by: entry.actor.clone() })
}
