//! Alarms about changes and emergencies, as entries of the audit.

use super::database::{Cells, Value};
use super::{Attribution, Store, StoreError, trail};
use crate::audit::AuditEntry;
use crate::change::check_text;

/// The last alarms.
const ALARMS: &str = "SELECT sequence, at_ms, actor, action, detail, previous, hash FROM tidegate_audit \
     WHERE action = 'alarm.raise' ORDER BY sequence DESC LIMIT $1";

/// The alarms about a subject, which begins their detail.
const ALARMS_ABOUT: &str = "SELECT count(*) FROM tidegate_audit \
     WHERE action = 'alarm.raise' AND substr(detail, 1, length($1)) = $1";

/// The subject of an alarm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AlarmSubject<'a> {
    /// The change with this number.
    Change(u64),
    /// The emergency with this id that was declared at this time. It may be declared again.
    Emergency(&'a str, u64),
}

impl AlarmSubject<'_> {
    /// Returns the fields of the subject in the detail of an alarm, before all others.
    fn fields(self) -> String {
        match self {
            Self::Change(id) => format!(r#"{{"change":{id},"#),
            Self::Emergency(id, created_ms) => {
                let id = serde_json::Value::from(id);
                format!(r#"{{"created_ms":{created_ms},"emergency":{id},"#)
            }
        }
    }
}

impl Store {
    /// Adds an alarm to the audit, unless there is one about the same subject. Returns whether it
    /// is new. Only one of several servers adds it, because writers wait for each other. No row
    /// changes, and no revision.
    pub async fn put_alarm(
        &self,
        subject: AlarmSubject<'_>,
        reason: &str,
        act: Attribution<'_>,
    ) -> Result<bool, StoreError> {
        check_text("reason", reason)?;
        let fields = subject.fields();
        let mut writing = self.begin(act).await?;
        let count = |cells: &Cells<'_>| cells.number(0);
        let known = writing.transaction.one(ALARMS_ABOUT, &[Value::Text(&fields)], count).await?;
        if known.is_some_and(|known| known > 0) {
            return Ok(false);
        }
        let reason = serde_json::Value::from(reason);
        writing.note_text("alarm.raise", format!(r#"{fields}"reason":{reason}}}"#)).await?;
        self.commit(writing).await?;
        Ok(true)
    }

    /// The last alarms, the latest first. Their detail has `reason`, and `change` or `emergency`.
    pub async fn alarms(&self, limit: u64) -> Result<Vec<AuditEntry>, StoreError> {
        self.urgent.read().await?.all(ALARMS, &[Value::Number(limit)], trail::entry).await
    }
}
