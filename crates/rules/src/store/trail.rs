//! Reads the audit back, and follows its chain to the end that the heads know.

use super::database::{Cells, Transaction, Value};
use super::writing::no_heads;
use super::{Store, StoreError};
use crate::audit::{Checkpoint, Entry, Verifier};

/// How many entries one page of the audit has at most. Higher: fewer questions to the database, more memory.
pub const AUDIT_PAGE_MAX: u64 = 1_000;

/// In the order of their numbers. Entries that are out of place are found by whoever follows the chain.
const PAGE: &str = "SELECT sequence, at_ms, actor, action, detail, previous, hash FROM tidegate_audit \
     WHERE sequence > $1 ORDER BY sequence LIMIT $2";

impl Store {
    /// The entries after the one with a number, in order, and no more than [`AUDIT_PAGE_MAX`] of them.
    pub async fn audit(&self, after: u64, limit: u64) -> Result<Vec<Entry>, StoreError> {
        page(&mut self.database.read().await?, after, limit.min(AUDIT_PAGE_MAX)).await
    }

    /// The known end of the audit, as a line that an operator can keep elsewhere.
    pub async fn checkpoint(&self) -> Result<Checkpoint, StoreError> {
        audit_end(&mut self.database.read().await?).await
    }

    /// Follows the whole audit, through a checkpoint if one was kept, to its known end.
    pub async fn verify_audit(&self, checkpoint: Option<&Checkpoint>) -> Result<Checkpoint, StoreError> {
        let mut reading = self.database.read().await?;
        let end = audit_end(&mut reading).await?;
        let mut verifier = Verifier::new(checkpoint.cloned());
        let mut after = 0;
        loop {
            let entries = page(&mut reading, after, AUDIT_PAGE_MAX).await?;
            let Some(last) = entries.last() else { break };
            after = last.sequence;
            entries.iter().try_for_each(|entry| verifier.take(entry)).map_err(StoreError::Audit)?;
        }
        verifier.finish_at(&end).map_err(StoreError::Audit)
    }
}

async fn page(reading: &mut Transaction, after: u64, limit: u64) -> Result<Vec<Entry>, StoreError> {
    reading.all(PAGE, &[Value::Number(after), Value::Number(limit)], entry).await
}

async fn audit_end(reading: &mut Transaction) -> Result<Checkpoint, StoreError> {
    let select = "SELECT audit_count, audit_hash FROM tidegate_heads";
    let read = |cells: &Cells<'_>| Ok(Checkpoint { count: cells.number(0)?, hash: cells.owned(1)? });
    reading.one(select, &[], read).await?.ok_or_else(no_heads)
}

fn entry(cells: &Cells<'_>) -> Result<Entry, StoreError> {
    Ok(Entry {
        sequence: cells.number(0)?,
        at_ms: cells.number(1)?,
        actor: cells.owned(2)?,
        action: cells.owned(3)?,
        detail: cells.owned(4)?,
        previous: cells.owned(5)?,
        hash: cells.owned(6)?,
    })
}
