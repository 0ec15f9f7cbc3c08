//! Alarms about changes and emergencies, as entries of the audit.

use serde_json::json;

use super::database::Value;
use super::{Attribution, Store, StoreError, trail};
use crate::audit::AuditEntry;
use crate::change::check_text;

/// Alarms among the last 10,000 entries, so that the query does not scan the whole audit.
const ALARMS: &str = "SELECT sequence, at_ms, actor, action, detail, previous, hash FROM tidegate_audit \
     WHERE action = 'alarm.raise' AND sequence > (SELECT audit_count FROM tidegate_heads) - 10000 \
     ORDER BY sequence DESC LIMIT $1";

/// The subject of an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlarmSubject<'a> {
    /// The change with this number.
    Change(u64),
    /// The emergency with this id.
    Emergency(&'a str),
}

impl Store {
    /// Adds an alarm to the audit. No row changes, and no revision.
    pub async fn put_alarm(
        &self,
        subject: AlarmSubject<'_>,
        reason: &str,
        act: Attribution<'_>,
    ) -> Result<(), StoreError> {
        check_text("reason", reason)?;
        let detail = match subject {
            AlarmSubject::Change(id) => json!({ "change": id, "reason": reason }),
            AlarmSubject::Emergency(id) => json!({ "emergency": id, "reason": reason }),
        };
        let mut writing = self.begin(act).await?;
        writing.note("alarm.raise", &detail).await?;
        self.commit(writing).await
    }

    /// The last alarms, the latest first. Their detail has `reason`, and `change` or `emergency`.
    pub async fn alarms(&self, limit: u64) -> Result<Vec<AuditEntry>, StoreError> {
        self.database.read().await?.all(ALARMS, &[Value::Number(limit)], trail::entry).await
    }
}
