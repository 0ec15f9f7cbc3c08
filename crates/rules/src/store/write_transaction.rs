//! A write transaction of the store. It locks the heads until the commit, and nothing of it is
//! visible before.

use super::database::{Cells, Database, Value};
use super::transaction::Transaction;
use super::watch::{CHANNEL, RevisionKind};
use super::{Attribution, Store, StoreError, StoreRevisions};
use crate::audit::{AuditEntry, Checkpoint};
use crate::change::{InvalidInput, check_name};

/// Locks the row on either database, and returns its columns.
const LOCK: &str = "UPDATE tidegate_heads SET id = id RETURNING \
     revision, emergency_revision, credential_revision, override_revision, change_count, audit_count, audit_hash";

const UNLOCK: &str = "UPDATE tidegate_heads SET revision = $1, emergency_revision = $2, credential_revision \
    = $3, override_revision = $4, change_count = $5, audit_count = $6, audit_hash = $7";

pub(super) struct WriteTransaction<'a> {
    pub(super) transaction: Transaction,
    pub(super) revisions: StoreRevisions,
    /// Revisions at the start, to find those that were raised.
    before: StoreRevisions,
    pub(super) change_count: u64,
    audit_end: Checkpoint,
    pub(super) act: Attribution<'a>,
}

impl Store {
    /// Begins a change, once all others have ended.
    pub(super) async fn begin<'a>(&self, act: Attribution<'a>) -> Result<WriteTransaction<'a>, StoreError> {
        self.begin_on(&self.database, act).await
    }

    /// Begins a change that does not wait for readers.
    pub(super) async fn begin_urgently<'a>(
        &self,
        act: Attribution<'a>,
    ) -> Result<WriteTransaction<'a>, StoreError> {
        self.begin_on(&self.urgent, act).await
    }

    async fn begin_on<'a>(
        &self,
        database: &Database,
        act: Attribution<'a>,
    ) -> Result<WriteTransaction<'a>, StoreError> {
        check_attribution(act)?;
        let mut transaction = database.write().await?;
        let read = |cells: &Cells<'_>| {
            let audit_end = Checkpoint { count: cells.number(5)?, hash: cells.owned(6)? };
            Ok((revisions(cells)?, cells.number(4)?, audit_end))
        };
        let found = transaction.one(LOCK, &[], read).await?;
        let (revisions, change_count, audit_end) = found.ok_or_else(no_heads)?;
        Ok(WriteTransaction { transaction, revisions, before: revisions, change_count, audit_end, act })
    }

    /// Commits a change, and notifies the watchers.
    pub(super) async fn commit(&self, writing: WriteTransaction<'_>) -> Result<(), StoreError> {
        writing.finish().await?.commit().await?;
        self.committed.send_replace(());
        Ok(())
    }

    /// Whether the last write of this process failed for a reason of the store, such as a full
    /// disk, and not for one of the write.
    pub fn has_failed_write(&self) -> bool {
        self.urgent.health().has_failed()
    }

    /// After a failed write, writes something that changes nothing. Its result shows whether the
    /// store takes writes again, also if no client writes.
    pub async fn retry_failed_write(&self) -> Result<(), StoreError> {
        if !self.has_failed_write() {
            return Ok(());
        }
        let mut writing = self.urgent.write().await?;
        writing.write_nothing().await?;
        writing.commit().await
    }
}

/// The heads, from the first four columns.
pub(super) fn revisions(cells: &Cells<'_>) -> Result<StoreRevisions, StoreError> {
    Ok(StoreRevisions {
        revision: cells.number(0)?,
        emergency_revision: cells.number(1)?,
        credential_revision: cells.number(2)?,
        override_revision: cells.number(3)?,
    })
}

pub(super) fn no_heads() -> StoreError {
    StoreError::Foreign("no heads".to_owned())
}

fn check_attribution(act: Attribution<'_>) -> Result<(), InvalidInput> {
    check_name("by", act.by)?;
    // The audit seals the very number that the database keeps.
    if i64::try_from(act.now_ms).is_err() {
        return Err(InvalidInput(format!("now_ms: {} is outside 0 to {}", act.now_ms, i64::MAX)));
    }
    Ok(())
}

impl<'a> WriteTransaction<'a> {
    /// Attributes all that follows to another actor.
    pub(super) fn act_as(&mut self, act: Attribution<'a>) -> Result<(), InvalidInput> {
        check_attribution(act)?;
        self.act = act;
        Ok(())
    }

    /// Adds an entry to the audit.
    pub(super) async fn note(&mut self, action: &str, detail: &serde_json::Value) -> Result<(), StoreError> {
        self.note_text(action, detail.to_string()).await
    }

    /// Adds an entry whose detail is JSON already.
    pub(super) async fn note_text(&mut self, action: &str, detail: String) -> Result<(), StoreError> {
        let entry = AuditEntry::following(&self.audit_end, self.act.now_ms, self.act.by, action, detail);
        let insert = "INSERT INTO tidegate_audit (sequence, at_ms, actor, action, detail, previous, hash) \
             VALUES ($1, $2, $3, $4, $5, $6, $7)";
        let values = [
            Value::Number(entry.sequence),
            Value::Number(entry.at_ms),
            Value::Text(&entry.actor),
            Value::Text(&entry.action),
            Value::Text(&entry.detail),
            Value::Text(&entry.previous),
            Value::Text(&entry.hash),
        ];
        self.transaction.execute(insert, &values).await?;
        self.audit_end = Checkpoint { count: entry.sequence, hash: entry.hash };
        Ok(())
    }

    async fn finish(mut self) -> Result<Transaction, StoreError> {
        let values = [
            Value::Number(self.revisions.revision),
            Value::Number(self.revisions.emergency_revision),
            Value::Number(self.revisions.credential_revision),
            Value::Number(self.revisions.override_revision),
            Value::Number(self.change_count),
            Value::Number(self.audit_end.count),
            Value::Text(&self.audit_end.hash),
        ];
        self.transaction.execute(UNLOCK, &values).await?;
        for head in RevisionKind::ALL {
            let number = head.of(&self.revisions);
            if number != head.of(&self.before) {
                self.transaction.notify(CHANNEL, &head.message(number)).await?;
            }
        }
        Ok(self.transaction)
    }
}
