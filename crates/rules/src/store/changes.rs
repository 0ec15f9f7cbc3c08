//! Changes: stored when proposed, applied as a whole, undone by restoring the earlier rows.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use sqlx::AssertSqlSafe;

use super::database::{Cells, Value};
use super::overrides::NamespaceColumns;
use super::transaction::Transaction;
use super::write_transaction::WriteTransaction;
use super::{ApplyConditions, Attribution, CheckedRevision, RowConflict, Store, StoreError, StoreRevisions};
use crate::audit::hexadecimal;
use crate::change::{
    Change, ChangeNeeds, ChangeState, Operation, Proposal, check_effect, check_text, kind_name, kind_of,
};
use crate::rows::RowKind;

/// How many changes one look at the history gives at most. Higher: more memory.
pub const HISTORY_MAX: u64 = 100;

/// Maximum changes that wait for an approver at the same time. Higher: approvers have more to
/// review, each change up to the maximum size. Lower: a careless proposer sooner blocks other
/// proposals, until a change is approved or rejected. Authors may also reject their changes.
pub const WAITING_MAX: u64 = 100;

/// How many rows one statement is about. More: fewer statements, each longer.
const ROWS_AT_ONCE: usize = 500;

/// How many values a written row has.
const ROW_COLUMNS: usize = 9;
const _: () = assert!(ROWS_AT_ONCE * ROW_COLUMNS <= 32_766, "SQLite takes no more values of a statement");

const CHANGE: &str = "SELECT id, state, needs, base_revision, author, reason, created_ms, operation_count, \
    effect, undoes, approver, approved_ms, revision FROM tidegate_changes WHERE id = $1";

const HISTORY: &str = "SELECT id, state, needs, base_revision, author, reason, created_ms, operation_count, \
    effect, undoes, approver, approved_ms, revision FROM tidegate_changes WHERE id < $1 ORDER BY id DESC \
    LIMIT $2";

/// The last applied change of an author, among the latest 1,000 changes: the query does not scan
/// all changes ever made.
const LAST_APPLIED_BY: &str = "SELECT id, state, needs, base_revision, author, reason, created_ms, \
    operation_count, effect, undoes, approver, approved_ms, revision FROM tidegate_changes WHERE author = $1 \
    AND revision IS NOT NULL AND id > (SELECT COALESCE(MAX(id), 0) FROM tidegate_changes) - 1000 ORDER BY id \
    DESC LIMIT 1";

/// Same condition as its index, so that the query does not scan all changes ever made.
const WAITING: &str = "SELECT COUNT(*) FROM tidegate_changes WHERE state = 'waiting'";

/// A row as it is, before a change.
pub(super) struct CurrentRow {
    pub(super) body: Option<String>,
    version: u64,
    pub(super) revision: u64,
    /// Whether a client wrote it last, without a change.
    pub(super) is_set_by_client: bool,
}

pub(super) type Rows = HashMap<(RowKind, String), CurrentRow>;

impl Store {
    /// Keeps a change that is not to be applied yet. If it needs an approver, it waits for one.
    pub async fn propose(&self, proposal: &Proposal, act: Attribution<'_>) -> Result<Change, StoreError> {
        proposal.check()?;
        let mut writing = self.begin(act).await?;
        let id = writing.keep(proposal).await?;
        self.commit_change(writing, id).await
    }

    /// Applies a proposed change, as a whole or not at all.
    pub async fn apply(
        &self,
        id: u64,
        conditions: impl Into<ApplyConditions>,
        act: Attribution<'_>,
    ) -> Result<Change, StoreError> {
        let mut writing = self.begin(act).await?;
        writing.apply(id, conditions.into()).await?;
        self.commit_change(writing, id).await
    }

    /// Proposes and applies a change in one step, as a whole or not at all.
    pub async fn apply_new(
        &self,
        proposal: &Proposal,
        conditions: impl Into<ApplyConditions>,
        act: Attribution<'_>,
    ) -> Result<Change, StoreError> {
        proposal.check()?;
        let mut writing = self.begin(act).await?;
        let id = writing.keep(proposal).await?;
        writing.apply(id, conditions.into()).await?;
        self.commit_change(writing, id).await
    }

    /// Approves a change that waits for a person other than its author. Does not apply it.
    pub async fn approve(&self, id: u64, act: Attribution<'_>) -> Result<Change, StoreError> {
        let mut writing = self.begin(act).await?;
        let change = writing.change(id).await?;
        if change.state != ChangeState::Waiting {
            return Err(StoreError::State(id, change.state));
        }
        if change.author == act.by {
            return Err(StoreError::OwnApproval(id));
        }
        writing.check_approver(&change).await?;
        let approve = "UPDATE tidegate_changes SET state = $2, approver = $3, approved_ms = $4 WHERE id = $1";
        let state = Value::Text(ChangeState::Proposed.word());
        let values = [Value::Number(id), state, Value::Text(act.by), Value::Number(act.now_ms)];
        writing.transaction.execute(approve, &values).await?;
        let digest = writing.operations_digest(id).await?;
        writing.note("change.approve", &json!({ "change": id, "operations_sha256": digest })).await?;
        self.commit_change(writing, id).await
    }

    /// Returns a change that could be applied to the waiting state, because its effect has changed:
    /// no approver has seen the new effect.
    pub async fn wait_again(
        &self,
        id: u64,
        effect: &str,
        act: Attribution<'_>,
    ) -> Result<Change, StoreError> {
        check_effect(effect)?;
        let mut writing = self.begin(act).await?;
        let state = writing.change(id).await?.state;
        if state != ChangeState::Proposed {
            return Err(StoreError::State(id, state));
        }
        writing.check_room_to_wait().await?;
        let wait = "UPDATE tidegate_changes SET state = $2, needs = $3, effect = $4, approver = NULL, \
            approved_ms = NULL WHERE id = $1";
        let (state, needs) =
            (Value::Text(ChangeState::Waiting.word()), Value::Text(ChangeNeeds::Approver.word()));
        writing.transaction.execute(wait, &[Value::Number(id), state, needs, Value::Text(effect)]).await?;
        let detail = json!({
            "change": id,
            "needs": ChangeNeeds::Approver.word(),
            "effect_sha256": effect_digest(Some(effect)),
        });
        writing.note("change.wait", &detail).await?;
        self.commit_change(writing, id).await
    }

    /// Ends a change that was not applied. Its author may do that too.
    pub async fn reject(&self, id: u64, reason: &str, act: Attribution<'_>) -> Result<Change, StoreError> {
        check_text("reason", reason)?;
        let mut writing = self.begin(act).await?;
        let state = writing.change(id).await?.state;
        if !matches!(state, ChangeState::Proposed | ChangeState::Waiting) {
            return Err(StoreError::State(id, state));
        }
        writing.set_state(id, ChangeState::Rejected).await?;
        writing.note("change.reject", &json!({ "change": id, "reason": reason })).await?;
        self.commit_change(writing, id).await
    }

    /// A change.
    pub async fn change(&self, id: u64) -> Result<Change, StoreError> {
        change(&mut self.database.read().await?, id).await
    }

    /// Returns the operations of a change.
    pub async fn operations(&self, id: u64) -> Result<Vec<Operation>, StoreError> {
        operations(&mut self.database.read().await?, id).await
    }

    /// The latest changes, or those before one, the latest first, and no more than [`HISTORY_MAX`]
    /// of them.
    pub async fn history(&self, limit: u64, before: Option<u64>) -> Result<Vec<Change>, StoreError> {
        let values = [Value::Number(before.unwrap_or(u64::MAX)), Value::Number(limit.min(HISTORY_MAX))];
        self.database.read().await?.all(HISTORY, &values, read_change).await
    }

    /// Returns the last change of an author that was applied, if it is among the latest 1,000.
    pub async fn last_applied_by(&self, author: &str) -> Result<Option<Change>, StoreError> {
        self.database.read().await?.one(LAST_APPLIED_BY, &[Value::Text(author)], read_change).await
    }

    pub(super) async fn commit_change(
        &self,
        mut writing: WriteTransaction<'_>,
        id: u64,
    ) -> Result<Change, StoreError> {
        let change = writing.change(id).await?;
        self.commit(writing).await?;
        Ok(change)
    }
}

impl WriteTransaction<'_> {
    async fn change(&mut self, id: u64) -> Result<Change, StoreError> {
        change(&mut self.transaction, id).await
    }

    /// Keeps a proposal, and gives its id.
    pub(super) async fn keep(&mut self, proposal: &Proposal) -> Result<u64, StoreError> {
        let Proposal { base_revision, needs, .. } = *proposal;
        if base_revision > self.revisions.revision {
            return Err(StoreError::Ahead { base_revision, revision: self.revisions.revision });
        }
        let state = if needs == ChangeNeeds::Approver { ChangeState::Waiting } else { ChangeState::Proposed };
        if state == ChangeState::Waiting {
            self.check_room_to_wait().await?;
        }
        self.change_count += 1;
        let id = self.change_count;
        let operations = serde_json::to_string(&proposal.operations)?;
        let undoes = serde_json::to_string(&proposal.undoes)?;
        let insert = "INSERT INTO tidegate_changes (id, state, needs, base_revision, author, reason, \
            created_ms, operation_count, operations, effect, undoes) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, \
            $9, $10, $11)";
        let values = [
            Value::Number(id),
            Value::Text(state.word()),
            Value::Text(needs.word()),
            Value::Number(base_revision),
            Value::Text(self.act.by),
            Value::Text(&proposal.reason),
            Value::Number(self.act.now_ms),
            Value::Number(proposal.operations.len() as u64),
            Value::Text(&operations),
            Value::OptionalText(proposal.effect.as_deref()),
            Value::Text(&undoes),
        ];
        self.transaction.execute(insert, &values).await?;
        let detail = json!({
            "change": id,
            "base_revision": base_revision,
            "reason": proposal.reason,
            "needs": needs.word(),
            "operations_sha256": hexadecimal(&Sha256::digest(&operations)),
            "effect_sha256": effect_digest(proposal.effect.as_deref()),
            "undoes": proposal.undoes,
        });
        self.note("change.propose", &detail).await?;
        Ok(id)
    }

    async fn check_room_to_wait(&mut self) -> Result<(), StoreError> {
        let waiting = self.transaction.one(WAITING, &[], |cells| cells.number(0)).await?;
        if waiting.is_some_and(|waiting| waiting < WAITING_MAX) {
            Ok(())
        } else {
            Err(StoreError::TooManyWaiting)
        }
    }

    pub(super) async fn apply(&mut self, id: u64, conditions: ApplyConditions) -> Result<(), StoreError> {
        let ApplyConditions { confirmed, checked } = conditions;
        let change = self.change(id).await?;
        check_ready(&change, confirmed)?;
        let operations = operations(&mut self.transaction, id).await?;
        let rows = current_rows(&mut self.transaction, &operations).await?;
        check_conflicts(&operations, &rows, change.base_revision)?;
        self.check_emergencies(&operations).await?;
        self.check_moved(checked)?;
        self.revisions.revision += 1;
        self.free_targets(&operations).await?;
        write_rows(&mut self.transaction, &operations, &rows, self.revisions.revision).await?;
        self.check_quotas(&operations).await?;
        self.mark_applied(id, &restore_operations(&operations, rows)).await?;
        for undone in &change.undoes {
            self.mark_undone(*undone).await?;
        }
        let detail = json!({
            "change": id,
            "revision": self.revisions.revision,
            "author": change.author,
            "approver": change.approval.map(|(by, _)| by),
            "confirmed": confirmed,
            "operations_sha256": self.operations_digest(id).await?,
        });
        self.note("change.apply", &detail).await
    }

    /// Refuses a change that was checked against earlier revisions: two changes may each be valid,
    /// but not together.
    fn check_moved(&self, checked: Option<CheckedRevision>) -> Result<(), StoreError> {
        let StoreRevisions { revision, emergency_revision, .. } = self.revisions;
        let now = CheckedRevision { revision, emergency_revision };
        match checked {
            Some(checked) if checked != now => Err(StoreError::Moved { checked, now }),
            _ => Ok(()),
        }
    }

    /// Stores the operations that restore the rows. A rollback omits deletions of rows that do not
    /// exist.
    async fn mark_applied(&mut self, id: u64, restores: &[Operation]) -> Result<(), StoreError> {
        let restores = serde_json::to_string(restores)?;
        let mark = "UPDATE tidegate_changes SET state = $2, revision = $3, restores = $4 WHERE id = $1";
        let state = Value::Text(ChangeState::Applied.word());
        let values =
            [Value::Number(id), state, Value::Number(self.revisions.revision), Value::Text(&restores)];
        self.transaction.execute(mark, &values).await?;
        Ok(())
    }

    async fn mark_undone(&mut self, id: u64) -> Result<(), StoreError> {
        match self.change(id).await?.state {
            ChangeState::Applied => self.set_state(id, ChangeState::RolledBack).await,
            state => Err(StoreError::State(id, state)),
        }
    }

    async fn set_state(&mut self, id: u64, state: ChangeState) -> Result<(), StoreError> {
        let set = "UPDATE tidegate_changes SET state = $2 WHERE id = $1";
        self.transaction.execute(set, &[Value::Number(id), Value::Text(state.word())]).await?;
        Ok(())
    }

    /// Returns the digest that ties the audit to a change's operations, which are stored elsewhere.
    async fn operations_digest(&mut self, id: u64) -> Result<String, StoreError> {
        let text = operations_text(&mut self.transaction, id).await?;
        Ok(hexadecimal(&Sha256::digest(text)))
    }
}

/// Returns the digest that ties the audit to the effect which approvers see. No effect is an empty
/// text, which is no JSON.
fn effect_digest(effect: Option<&str>) -> String {
    hexadecimal(&Sha256::digest(effect.unwrap_or_default()))
}

fn check_ready(change: &Change, confirmed: bool) -> Result<(), StoreError> {
    match change.state {
        ChangeState::Proposed => {}
        ChangeState::Waiting => return Err(StoreError::Needs(change.id, ChangeNeeds::Approver)),
        state => return Err(StoreError::State(change.id, state)),
    }
    let approved = change.approval.as_ref().is_some_and(|(by, _)| *by != change.author);
    let ready = match change.needs {
        ChangeNeeds::Nothing => true,
        ChangeNeeds::Confirmation => confirmed,
        ChangeNeeds::Approver => approved,
    };
    if ready { Ok(()) } else { Err(StoreError::Needs(change.id, change.needs)) }
}

fn check_conflicts(operations: &[Operation], rows: &Rows, base_revision: u64) -> Result<(), StoreError> {
    let row_of = |operation: &Operation| {
        let (kind, name) = operation.row();
        (kind, name.to_owned())
    };
    let conflicts: Vec<RowConflict> = operations
        .iter()
        .map(row_of)
        .filter_map(|row| Some((rows.get(&row)?.revision, row)))
        .filter(|(revision, _)| *revision > base_revision)
        .map(|(revision, (kind, name))| RowConflict { kind, name, revision })
        .collect();
    if !conflicts.is_empty() {
        return Err(StoreError::Conflict(conflicts));
    }
    let is_there = |row: &(RowKind, String)| rows.get(row).is_some_and(|current| current.body.is_some());
    let deleted = operations.iter().filter(|operation| operation.body().is_none());
    let missing: Vec<_> = deleted.map(row_of).filter(|row| !is_there(row)).collect();
    if missing.is_empty() { Ok(()) } else { Err(StoreError::Missing(missing)) }
}

/// Returns the operations that restore the rows before a change.
fn restore_operations(operations: &[Operation], mut rows: Rows) -> Vec<Operation> {
    let restore = |operation: &Operation| {
        let (kind, name) = operation.row();
        let name = name.to_owned();
        let before = rows.remove(&(kind, name.clone())).and_then(|current| current.body);
        Operation::leaving(kind, name, before)
    };
    operations.iter().map(restore).collect()
}

/// The rows that operations are about, also those that were deleted.
pub(super) async fn current_rows(
    transaction: &mut Transaction,
    operations: &[Operation],
) -> Result<Rows, StoreError> {
    let mut rows = Rows::with_capacity(operations.len());
    for some in operations.chunks(ROWS_AT_ONCE) {
        let sql = format!(
            "SELECT kind, name, body, version, revision, override_revision FROM tidegate_rows \
             WHERE (kind, name) IN (VALUES {})",
            places(some.len(), 2)
        );
        let values: Vec<Value<'_>> = some
            .iter()
            .map(Operation::row)
            .flat_map(|(kind, name)| [Value::Text(kind_name(kind)), Value::Text(name)])
            .collect();
        let take = |cells: Cells<'_>| {
            let kind = cells.text(0)?;
            let kind =
                kind_of(kind).ok_or_else(|| StoreError::Foreign(format!("a row that is a {kind:?}")))?;
            let current = CurrentRow {
                body: cells.optional_text(2)?,
                version: cells.number(3)?,
                revision: cells.number(4)?,
                is_set_by_client: cells.number(5)? > 0,
            };
            rows.insert((kind, cells.owned(1)?), current);
            Ok(())
        };
        transaction.each(AssertSqlSafe(sql), &values, take).await?;
    }
    Ok(rows)
}

async fn write_rows(
    transaction: &mut Transaction,
    operations: &[Operation],
    rows: &Rows,
    revision: u64,
) -> Result<(), StoreError> {
    for some in operations.chunks(ROWS_AT_ONCE) {
        let sql = format!(
            "INSERT INTO tidegate_rows (kind, name, body, version, revision, target, namespace, tenant, \
             wildcard) VALUES {} ON CONFLICT (kind, name) DO UPDATE SET body = excluded.body, version = \
             excluded.version, revision = excluded.revision, override_revision = 0, target = \
             excluded.target, namespace = excluded.namespace, tenant = excluded.tenant, wildcard = \
             excluded.wildcard",
            places(some.len(), ROW_COLUMNS)
        );
        let columns: Vec<Option<NamespaceColumns>> =
            some.iter().map(|operation| NamespaceColumns::of_body(operation.body()?)).collect();
        let mut values = Vec::with_capacity(some.len() * ROW_COLUMNS);
        for (operation, columns) in some.iter().zip(&columns) {
            let text = |of: fn(&NamespaceColumns) -> &String| {
                Value::OptionalText(columns.as_ref().map(|columns| of(columns).as_str()))
            };
            let (kind, name) = operation.row();
            let version = rows.get(&(kind, name.to_owned())).map_or(0, |current| current.version) + 1;
            values.extend([
                Value::Text(kind_name(kind)),
                Value::Text(name),
                Value::OptionalText(operation.body()),
                Value::Number(version),
                Value::Number(revision),
                text(|columns| &columns.target),
                text(|columns| &columns.namespace),
                text(|columns| &columns.tenant),
                Value::Number(columns.as_ref().map_or(0, |columns| columns.wildcard)),
            ]);
        }
        transaction.execute(AssertSqlSafe(sql), &values).await?;
    }
    Ok(())
}

/// `($1, $2), ($3, $4)`: the places of the values of some rows.
pub(super) fn places(rows: usize, columns: usize) -> String {
    let mut text = String::with_capacity(rows * columns * 7);
    for row in 0..rows {
        text.push_str(if row == 0 { "(" } else { ", (" });
        for column in 0..columns {
            let separator = if column == 0 { "" } else { ", " };
            // Writing to a text cannot fail.
            let _ = write!(text, "{separator}${}", row * columns + column + 1);
        }
        text.push(')');
    }
    text
}

pub(super) async fn change(transaction: &mut Transaction, id: u64) -> Result<Change, StoreError> {
    let found = transaction.one(CHANGE, &[Value::Number(id)], read_change).await?;
    found.ok_or_else(|| no_change(id))
}

pub(super) async fn operations(transaction: &mut Transaction, id: u64) -> Result<Vec<Operation>, StoreError> {
    Ok(serde_json::from_str(&operations_text(transaction, id).await?)?)
}

async fn operations_text(transaction: &mut Transaction, id: u64) -> Result<String, StoreError> {
    let select = "SELECT operations FROM tidegate_changes WHERE id = $1";
    let found = transaction.one(select, &[Value::Number(id)], |cells| cells.owned(0)).await?;
    found.ok_or_else(|| no_change(id))
}

fn no_change(id: u64) -> StoreError {
    StoreError::NotThere(format!("change {id}"))
}

fn read_change(cells: &Cells<'_>) -> Result<Change, StoreError> {
    let (id, state, needs) = (cells.number(0)?, cells.text(1)?, cells.text(2)?);
    let (Some(state), Some(needs)) = (ChangeState::parse_name(state), ChangeNeeds::parse_name(needs)) else {
        return Err(StoreError::Foreign(format!("change {id} that is {state:?} and needs {needs:?}")));
    };
    Ok(Change {
        id,
        state,
        needs,
        base_revision: cells.number(3)?,
        author: cells.owned(4)?,
        reason: cells.owned(5)?,
        created_ms: cells.number(6)?,
        operation_count: cells.number(7)?,
        effect: cells.optional_text(8)?,
        undoes: serde_json::from_str(cells.text(9)?)?,
        approval: cells.optional_text(10)?.zip(cells.optional_number(11)?),
        revision: cells.optional_number(12)?,
    })
}
