//! Reads the audit back, and follows its chain to the end that the heads know.

use super::database::{Cells, Value};
use super::proof::{StoreProof, stored_operations};
use super::replay::AuditReplay;
use super::transaction::Transaction;
use super::write_transaction::no_heads;
use super::{Store, StoreError};
use crate::audit::{AuditEntry, ChainBreak, Checkpoint, Verifier};

/// How many entries one page of the audit has at most. Higher: fewer questions to the database,
/// more memory.
pub const AUDIT_PAGE_MAX: u64 = 1_000;

/// An entry as it lies there: or, if it cannot be read any more, its number, as far as that can.
type TrailEntry = Result<AuditEntry, Option<u64>>;

/// Entries by sequence number. The verifier detects misplaced entries.
const PAGE: &str = "SELECT sequence, at_ms, actor, action, detail, previous, hash FROM tidegate_audit \
     WHERE sequence > $1 ORDER BY sequence LIMIT $2";

impl Store {
    /// The entries after the one with a number, in order, and no more than [`AUDIT_PAGE_MAX`] of
    /// them. One that cannot be read is named.
    pub async fn audit(&self, after: u64, limit: u64) -> Result<Vec<AuditEntry>, StoreError> {
        Ok(self.audit_and_end(after, limit).await?.0)
    }

    /// Returns the same entries, with the recorded end of the audit at that moment. Only this end
    /// reveals that the last entries were cut off.
    pub async fn audit_and_end(
        &self,
        after: u64,
        limit: u64,
    ) -> Result<(Vec<AuditEntry>, Checkpoint), StoreError> {
        let (end, found) = self.end_and_page(after, limit.min(AUDIT_PAGE_MAX)).await?;
        let mut last = after;
        let entry = |found: TrailEntry| {
            let entry =
                found.map_err(|sequence| ChainBreak::Changed { sequence: sequence.unwrap_or(last + 1) });
            entry.inspect(|entry| last = entry.sequence)
        };
        let entries = found.into_iter().map(entry).collect::<Result<_, _>>().map_err(StoreError::Audit)?;
        Ok((entries, end))
    }

    /// The known end of the audit, as a line that an operator can keep elsewhere.
    pub async fn checkpoint(&self) -> Result<Checkpoint, StoreError> {
        audit_end(&mut self.database.read().await?).await
    }

    /// Returns the recorded number of audit entries.
    pub async fn audit_count(&self) -> Result<u64, StoreError> {
        Ok(audit_end(&mut self.urgent.read().await?).await?.count)
    }

    /// Returns the known end of the audit, if the audit still has that entry and the one of an
    /// earlier checkpoint. This reads two entries, so it can be done often. It does not notice an
    /// entry that was changed between them.
    pub async fn checkpoint_after(&self, known: &Checkpoint) -> Result<Checkpoint, StoreError> {
        let mut reading = self.urgent.read().await?;
        let end = audit_end(&mut reading).await?;
        if end.count < known.count {
            let cut_off = ChainBreak::CutOff { missing: end.count + 1, count: known.count };
            return Err(StoreError::Audit(cut_off));
        }
        for checkpoint in [known, &end] {
            check_entry(&mut reading, checkpoint, end.count).await?;
        }
        Ok(end)
    }

    /// Verifies the whole audit, through an optional checkpoint, to its recorded end, and that the
    /// store has the rows and changes that the audit records. This uses its own thread: the audit
    /// may be long, and the caller's thread has other work.
    pub async fn verify_audit(&self, checkpoint: Option<&Checkpoint>) -> Result<Checkpoint, StoreError> {
        let verifier = Verifier::new(checkpoint.cloned());
        self.aside(async |store: &Self| store.follow_audit(verifier).await).await
    }

    /// Takes a connection for each page, not for all pages, because other calls need it too.
    /// Entries appended meanwhile are verified as well. The recorded end is that of the moment
    /// without further entries.
    async fn follow_audit(&self, mut verifier: Verifier) -> Result<Checkpoint, StoreError> {
        let (mut after, mut replay) = (0, AuditReplay::default());
        loop {
            let mut reading = self.database.read().await?;
            let end = audit_end(&mut reading).await?;
            let found = page(&mut reading, after, AUDIT_PAGE_MAX).await?;
            if found.is_empty() {
                let end = verifier.finish_at(&end).map_err(StoreError::Audit)?;
                let altered = StoreProof::new(replay).compare(&mut reading).await?;
                return if altered.count() == 0 { Ok(end) } else { Err(StoreError::Altered(altered)) };
            }
            after = follow(&mut verifier, &mut replay, found, &mut reading).await?;
        }
    }

    async fn end_and_page(
        &self,
        after: u64,
        limit: u64,
    ) -> Result<(Checkpoint, Vec<TrailEntry>), StoreError> {
        let mut reading = self.database.read().await?;
        let end = audit_end(&mut reading).await?;
        Ok((end, page(&mut reading, after, limit).await?))
    }
}

async fn page(reading: &mut Transaction, after: u64, limit: u64) -> Result<Vec<TrailEntry>, StoreError> {
    let found = |cells: &Cells<'_>| Ok(found(cells));
    reading.all(PAGE, &[Value::Number(after), Value::Number(limit)], found).await
}

/// Follows the chain through a page, and gives the number of its last entry.
async fn follow(
    verifier: &mut Verifier,
    replay: &mut AuditReplay,
    page: Vec<TrailEntry>,
    reading: &mut Transaction,
) -> Result<u64, StoreError> {
    let mut last = 0;
    for found in page {
        let entry = found.map_err(|sequence| StoreError::Audit(verifier.damaged(sequence)))?;
        verifier.take(&entry).map_err(StoreError::Audit)?;
        last = entry.sequence;
        if let Some(change) = replay.take(&entry) {
            replay.apply(change, &stored_operations(reading, change).await?);
        }
    }
    Ok(last)
}

/// Checks that the entry of a checkpoint is still there.
async fn check_entry(
    reading: &mut Transaction,
    checkpoint: &Checkpoint,
    count: u64,
) -> Result<(), StoreError> {
    let sequence = checkpoint.count;
    if sequence == 0 {
        return Ok(());
    }
    let select = "SELECT hash FROM tidegate_audit WHERE sequence = $1";
    // An unreadable hash is another one.
    let hash = |cells: &Cells<'_>| Ok(cells.owned(0).unwrap_or_default());
    match reading.one(select, &[Value::Number(sequence)], hash).await? {
        Some(hash) if hash == checkpoint.hash => Ok(()),
        Some(_) => Err(StoreError::Audit(ChainBreak::Rewritten { sequence })),
        None => Err(StoreError::Audit(ChainBreak::CutOff { missing: sequence, count })),
    }
}

async fn audit_end(reading: &mut Transaction) -> Result<Checkpoint, StoreError> {
    let select = "SELECT audit_count, audit_hash FROM tidegate_heads";
    let read = |cells: &Cells<'_>| Ok(Checkpoint { count: cells.number(0)?, hash: cells.owned(1)? });
    reading.one(select, &[], read).await?.ok_or_else(no_heads)
}

/// Reports an unreadable entry as damaged, like one with a wrong hash, not as a failure of the
/// store: a server writes nothing that it cannot read.
fn found(cells: &Cells<'_>) -> TrailEntry {
    entry(cells).map_err(|_| cells.number(0).ok())
}

pub(super) fn entry(cells: &Cells<'_>) -> Result<AuditEntry, StoreError> {
    Ok(AuditEntry {
        sequence: cells.number(0)?,
        at_ms: cells.number(1)?,
        actor: cells.owned(2)?,
        action: cells.owned(3)?,
        detail: cells.owned(4)?,
        previous: cells.owned(5)?,
        hash: cells.owned(6)?,
    })
}
