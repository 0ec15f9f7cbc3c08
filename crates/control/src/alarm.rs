//! Alarms: changes and emergencies that newly deny many keys and are never undone automatically.
//! The audit has them, so that every server shows them.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use serde::Deserialize;
use tidegate_record::timestamp;
use tidegate_rules::audit::AuditEntry;
use tidegate_rules::store::{AlarmSubject, StoreError};

use crate::control::Control;
use crate::denials::{AlarmCause, DenialJump, EmergencyJump};
use crate::node::{ControlEvent, Node};
use crate::plan::PlanError;
use crate::rollback::AUTOMATIC;

/// Number of the last alarms that answers have at most.
const ALARMS_MAX: u64 = 100;

/// An alarm about a change or an emergency, which stays in force.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Alarm {
    /// The change, if it is about one.
    pub change: Option<u64>,
    /// The emergency, if it is about one.
    pub emergency: Option<String>,
    /// As people read it.
    pub at: String,
    /// Milliseconds since the Unix epoch.
    pub at_ms: u64,
    /// The rule, its newly denied keys, and why nothing is undone.
    pub reason: String,
}

#[derive(Deserialize)]
struct Detail {
    change: Option<u64>,
    emergency: Option<String>,
    reason: String,
}

impl Alarm {
    fn of(entry: &AuditEntry) -> Option<Self> {
        let Detail { change, emergency, reason } = serde_json::from_str(&entry.detail).ok()?;
        Some(Self { change, emergency, at: timestamp(entry.at_ms), at_ms: entry.at_ms, reason })
    }
}

/// The subject of an alarm in words.
fn subject_text(subject: AlarmSubject<'_>) -> String {
    match subject {
        AlarmSubject::Change(id) => format!("change {id}"),
        AlarmSubject::Emergency(id, _) => format!("emergency {id:?}"),
    }
}

impl<N: Node> Control<N> {
    /// Returns the last alarm of the store, by any server.
    pub fn last_alarm(&self) -> Option<Arc<Alarm>> {
        self.last_alarm.load_full()
    }

    /// Reads the last alarms from the store, the latest first.
    pub async fn alarms(&self) -> Result<Vec<Alarm>, StoreError> {
        Ok(self.store.alarms(ALARMS_MAX).await?.iter().filter_map(Alarm::of).collect())
    }

    /// Reads the last alarm from the store.
    pub(super) async fn take_last_alarm(&self) -> Result<(), StoreError> {
        let last = self.store.alarms(1).await?.first().and_then(Alarm::of);
        self.last_alarm.store(last.map(Arc::new));
        Ok(())
    }

    /// Does so if the audit has new entries, since any server may have raised an alarm.
    pub(super) async fn follow_alarms(&self) -> Result<(), StoreError> {
        let count = self.store.audit_count().await?;
        if self.alarms_read.load(Ordering::Relaxed) != count {
            self.take_last_alarm().await?;
            self.alarms_read.store(count, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Raises an alarm about a change. Without the store, every look retries.
    pub(super) async fn alarm_of_change(self: &Arc<Self>, jump: &DenialJump, cause: &AlarmCause) {
        let reason = format!("{jump}; it is not rolled back automatically, because {cause}");
        let change = jump.change;
        if self.raise_alarm(AlarmSubject::Change(change), &reason).await {
            self.with_denials(move |denials| denials.note_alarm(change)).await;
        }
    }

    /// Raises an alarm about an emergency. Without the store, every look retries.
    pub(super) async fn alarm_of_emergency(self: &Arc<Self>, jump: EmergencyJump) {
        let subject = AlarmSubject::Emergency(&jump.emergency, jump.created_ms);
        if self.raise_alarm(subject, &jump.to_string()).await {
            self.with_denials(move |denials| denials.note_emergency_alarm(&jump.emergency)).await;
        }
    }

    /// Stores an alarm, once for all servers. Returns whether it is stored.
    async fn raise_alarm(&self, subject: AlarmSubject<'_>, reason: &str) -> bool {
        let of = subject_text(subject);
        match self.try_alarm(subject, reason).await {
            Ok(true) => {
                tracing::error!(of, reason, "alarm");
                self.count(ControlEvent::Alarmed);
            }
            Ok(false) => tracing::info!(of, reason, "alarm, raised by another server"),
            Err(PlanError::Store(error)) => {
                tracing::error!(of, reason, %error, "alarm, not stored yet: tried again");
                return false;
            }
            // The server stops.
            Err(PlanError::Wrong(_)) => return false,
        }
        true
    }

    /// Stores an alarm. Returns whether it is new.
    async fn try_alarm(&self, subject: AlarmSubject<'_>, reason: &str) -> Result<bool, PlanError> {
        let is_new = self.store.put_alarm(subject, reason, self.attribution(AUTOMATIC)?).await?;
        self.take_last_alarm().await?;
        Ok(is_new)
    }
}
