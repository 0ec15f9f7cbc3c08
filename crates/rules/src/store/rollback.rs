//! Rollbacks: changes that restore earlier rows.

use std::collections::BTreeMap;

use super::changes::{change, current_rows, operations};
use super::database::{Cells, Value};
use super::transaction::Transaction;
use super::{Store, StoreError};
use crate::change::{ChangeState, InvalidInput, Operation, Proposal};
use crate::rows::RowKind;

/// How many changes one rollback undoes at most. Higher: more memory; further back in one step.
const UNDONE_MAX: u64 = 1_000;

/// Extent of a rollback.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rollback {
    /// One change. Rows that no longer hold the body it wrote are conflicts.
    Change(u64),
    /// All changes after a revision.
    ToRevision(u64),
}

impl Store {
    /// Returns the change that performs a rollback, to be inspected, applied, or proposed with the
    /// required consent.
    pub async fn restoring(&self, rollback: Rollback, reason: &str) -> Result<Proposal, StoreError> {
        let mut reading = self.database.read().await?;
        let select = "SELECT revision FROM tidegate_heads";
        let revision = reading.one(select, &[], |cells| cells.number(0)).await?;
        restoring(&mut reading, revision.unwrap_or(0), rollback, reason).await
    }
}

/// Builds the change that performs a rollback, as of the current revision.
async fn restoring(
    transaction: &mut Transaction,
    revision: u64,
    rollback: Rollback,
    reason: &str,
) -> Result<Proposal, StoreError> {
    let (base_revision, undone) = match rollback {
        Rollback::Change(id) => {
            let change = change(transaction, id).await?;
            let (ChangeState::Applied, Some(applied)) = (change.state, change.revision) else {
                return Err(StoreError::State(id, change.state));
            };
            (unless_changed(transaction, id, applied).await?, applied..=applied)
        }
        Rollback::ToRevision(to) if to > revision => {
            let message = format!("to_revision: {to} is outside 0 to {revision}, the latest revision");
            return Err(InvalidInput(message).into());
        }
        Rollback::ToRevision(to) => (revision, to + 1..=revision),
    };
    let (bodies, undoes) = bodies_before(transaction, *undone.start(), *undone.end()).await?;
    let wanted: Vec<Operation> =
        bodies.into_iter().map(|((kind, name), body)| Operation::leaving(kind, name, body)).collect();
    let rows = current_rows(transaction, &wanted).await?;
    let differs = |operation: &Operation| {
        let (kind, name) = operation.row();
        let current = rows.get(&(kind, name.to_owned()));
        // An override that a client set or deleted since stays as it is: it was no part of a
        // change.
        !current.is_some_and(|current| current.is_set_by_client)
            && current.and_then(|current| current.body.as_deref()) != operation.body()
    };
    let operations: Vec<Operation> = wanted.into_iter().filter(differs).collect();
    if operations.is_empty() {
        return Err(StoreError::NothingToRestore);
    }
    Ok(Proposal { undoes, ..Proposal::new(base_revision, reason, operations) })
}

type Bodies = BTreeMap<(RowKind, String), Option<String>>;

/// Returns the bodies of rows before a range of revisions, and the changes of that range still
/// applied.
async fn bodies_before(
    transaction: &mut Transaction,
    first: u64,
    last: u64,
) -> Result<(Bodies, Vec<u64>), StoreError> {
    if last.saturating_sub(first) >= UNDONE_MAX {
        let message = format!("revision: more than {UNDONE_MAX} changes lie between: go back in steps");
        return Err(InvalidInput(message).into());
    }
    let select =
        "SELECT id, state, restores FROM tidegate_changes WHERE revision BETWEEN $1 AND $2 ORDER BY revision";
    let (mut bodies, mut undoes) = (Bodies::new(), Vec::new());
    let take = |cells: Cells<'_>| {
        if cells.text(1)? == ChangeState::Applied.word() {
            undoes.push(cells.number(0)?);
        }
        for operation in serde_json::from_str::<Vec<Operation>>(cells.text(2)?)? {
            let (kind, name) = operation.row();
            // The earliest change has the body from before all of them.
            bodies.entry((kind, name.to_owned())).or_insert_with(|| operation.body().map(str::to_owned));
        }
        Ok(())
    };
    transaction.each(select, &[Value::Number(first), Value::Number(last)], take).await?;
    Ok((bodies, undoes))
}

/// Returns the base revision for undoing a change that was applied at revision `applied`. If every
/// row holds the body that the change wrote, later changes were undone, and must not prevent this
/// rollback. Otherwise, rows changed since are conflicts.
async fn unless_changed(transaction: &mut Transaction, id: u64, applied: u64) -> Result<u64, StoreError> {
    let written = operations(transaction, id).await?;
    let rows = current_rows(transaction, &written).await?;
    let mut latest = applied;
    for operation in &written {
        let (kind, name) = operation.row();
        let Some(current) = rows.get(&(kind, name.to_owned())) else { return Ok(applied) };
        if current.is_set_by_client {
            continue;
        }
        if current.body.as_deref() != operation.body() {
            return Ok(applied);
        }
        latest = latest.max(current.revision);
    }
    Ok(latest)
}
