//! Emergencies: what goes before all rules for a while, on a way of its own.

use serde_json::json;

use super::database::Value;
use super::writing::Writing;
use super::{Act, Store, StoreError};
use crate::book::EmergencyRow;
use crate::change::{Invalid, check_body, check_name};

/// How far ahead an emergency may end, ms. Longer: fewer renewals; what was forgotten stays for longer.
pub const EMERGENCY_MS_MAX: u64 = 60 * 60 * 1_000;

impl Store {
    /// Puts an emergency in place of the one with its id. Gives the emergency revision.
    pub async fn put_emergency(&self, emergency: &EmergencyRow, act: Act<'_>) -> Result<u64, StoreError> {
        check_name("id", &emergency.id)?;
        check_body(&emergency.body)?;
        check_expiry(emergency.expires_ms, act.now_ms)?;
        let mut writing = self.begin(act).await?;
        writing.remove_expired().await?;
        let put = "INSERT INTO tidegate_emergencies (id, body, author, created_ms, expires_ms) \
             VALUES ($1, $2, $3, $4, $5) ON CONFLICT (id) DO UPDATE SET body = excluded.body, \
             author = excluded.author, created_ms = excluded.created_ms, expires_ms = excluded.expires_ms";
        let values = [
            Value::Text(&emergency.id),
            Value::Text(&emergency.body),
            Value::Text(act.by),
            Value::Number(act.now_ms),
            Value::Number(emergency.expires_ms),
        ];
        writing.transaction.execute(put, &values).await?;
        let detail =
            json!({ "id": emergency.id, "body": emergency.body, "expires_ms": emergency.expires_ms });
        writing.note("emergency.put", &detail).await?;
        self.commit_emergency(writing).await
    }

    /// Lets one that has not expired last for longer. Gives the emergency revision.
    pub async fn renew_emergency(&self, id: &str, expires_ms: u64, act: Act<'_>) -> Result<u64, StoreError> {
        check_expiry(expires_ms, act.now_ms)?;
        let mut writing = self.begin(act).await?;
        writing.remove_expired().await?;
        let renew = "UPDATE tidegate_emergencies SET expires_ms = $2 WHERE id = $1";
        let renewed =
            writing.transaction.execute(renew, &[Value::Text(id), Value::Number(expires_ms)]).await?;
        if renewed == 0 {
            return Err(StoreError::NotThere(format!("emergency {id:?}")));
        }
        writing.note("emergency.renew", &json!({ "id": id, "expires_ms": expires_ms })).await?;
        self.commit_emergency(writing).await
    }

    /// Ends one. Gives the emergency revision.
    pub async fn end_emergency(&self, id: &str, act: Act<'_>) -> Result<u64, StoreError> {
        let mut writing = self.begin(act).await?;
        let end = "DELETE FROM tidegate_emergencies WHERE id = $1";
        if writing.transaction.execute(end, &[Value::Text(id)]).await? == 0 {
            return Err(StoreError::NotThere(format!("emergency {id:?}")));
        }
        writing.note("emergency.end", &json!({ "id": id })).await?;
        self.commit_emergency(writing).await
    }

    /// Removes those that have expired, and says how many. Without any, nothing is locked: every server may ask often.
    pub async fn remove_expired_emergencies(&self, act: Act<'_>) -> Result<usize, StoreError> {
        let (_, emergencies) = self.emergencies().await?;
        if emergencies.iter().all(|emergency| emergency.expires_ms > act.now_ms) {
            return Ok(0);
        }
        let mut writing = self.begin(act).await?;
        let removed = writing.remove_expired().await?;
        if removed > 0 {
            self.commit_emergency(writing).await?;
        }
        Ok(removed)
    }

    async fn commit_emergency(&self, mut writing: Writing<'_>) -> Result<u64, StoreError> {
        writing.heads.emergency_revision += 1;
        let revision = writing.heads.emergency_revision;
        self.commit(writing).await?;
        Ok(revision)
    }
}

impl Writing<'_> {
    async fn remove_expired(&mut self) -> Result<usize, StoreError> {
        let remove = "DELETE FROM tidegate_emergencies WHERE expires_ms <= $1 RETURNING id";
        let mut removed =
            self.transaction.all(remove, &[Value::Number(self.act.now_ms)], |cells| cells.owned(0)).await?;
        removed.sort_unstable();
        if !removed.is_empty() {
            self.note("emergency.expire", &json!({ "ids": removed })).await?;
        }
        Ok(removed.len())
    }
}

fn check_expiry(expires_ms: u64, now_ms: u64) -> Result<(), Invalid> {
    let latest = now_ms.saturating_add(EMERGENCY_MS_MAX);
    if expires_ms > now_ms && expires_ms <= latest {
        return Ok(());
    }
    let earliest = now_ms.saturating_add(1);
    Err(Invalid(format!("expires_ms: {expires_ms} is outside {earliest} to {latest}, an hour from now")))
}
