//! Proves that a store has the rows, changes, emergencies and credentials that its audit records.

use super::StoreError;
use super::database::{Cells, Value};
use super::overrides::NamespaceColumns;
use super::replay::{AuditReplay, ReplayedChange, ReplayedRow, StoredOperations, sha256};
use super::rows::read_heads;
use super::transaction::Transaction;
use crate::alteration::{Alteration, AlterationWay, Alterations, StorePart};
use crate::change::{Operation, kind_of};
use crate::rows::RowKind;

const ROWS: &str = "SELECT kind, name, body, version, revision, override_revision, target, namespace, tenant, \
     wildcard FROM tidegate_rows";

const EMERGENCIES: &str = "SELECT id, body, author, created_ms, expires_ms FROM tidegate_emergencies";

const CREDENTIALS: &str = "SELECT hash, name, tenant, role, created_ms, expires_ms FROM tidegate_credentials";

const MAKERS: &str = "SELECT name, made_by, change_count FROM tidegate_makers";

const CHANGES: &str = "SELECT id, state, needs, base_revision, author, reason, created_ms, operation_count, \
     operations, effect, undoes, approver, approved_ms, revision FROM tidegate_changes WHERE id > $1 \
     ORDER BY id LIMIT $2";

const OPERATIONS: &str = "SELECT operations, restores FROM tidegate_changes WHERE id = $1";

/// Changes of one statement. More: fewer statements; each change has up to 16 MiB.
const CHANGES_AT_ONCE: u64 = 16;

/// Columns that may differ, each with whether it does.
type Columns<'c> = &'c [(&'static str, bool)];

fn edited(columns: Columns<'_>) -> Option<AlterationWay> {
    let names: Vec<&str> = columns.iter().filter(|(_, differs)| *differs).map(|(name, _)| *name).collect();
    (!names.is_empty()).then_some(AlterationWay::Edited(names))
}

/// Reads the operations of a change. An unreadable text is no operation.
pub(super) async fn stored_operations(
    reading: &mut Transaction,
    change: u64,
) -> Result<StoredOperations, StoreError> {
    let read = |cells: &Cells<'_>| {
        Ok(StoredOperations {
            operations: cells.owned(0).unwrap_or_default(),
            restores: cells.owned(1).unwrap_or_default(),
        })
    };
    Ok(reading.one(OPERATIONS, &[Value::Number(change)], read).await?.unwrap_or_default())
}

/// Compares a store with its audit, and names all that differs.
pub(super) struct StoreProof {
    replay: AuditReplay,
    found: Alterations,
}

impl StoreProof {
    pub(super) fn new(replay: AuditReplay) -> Self {
        Self { replay, found: Alterations::default() }
    }

    /// Compares everything, as of the moment of the transaction.
    pub(super) async fn compare(mut self, reading: &mut Transaction) -> Result<Alterations, StoreError> {
        self.compare_heads(reading).await?;
        self.compare_changes(reading).await?;
        self.compare_rows(reading).await?;
        self.compare_emergencies(reading).await?;
        self.compare_credentials(reading).await?;
        self.compare_makers(reading).await?;
        self.found.sort();
        Ok(self.found)
    }

    fn add(&mut self, kind: StorePart, name: impl Into<String>, revision: Option<u64>, way: AlterationWay) {
        self.found.add(Alteration { kind, name: name.into(), revision, way });
    }

    async fn compare_heads(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let heads = read_heads(reading).await?;
        let count = "SELECT change_count FROM tidegate_heads";
        let changes = reading.one(count, &[], |cells| cells.number(0)).await?;
        let proposed = self.replay.changes.last_key_value().map_or(0, |(id, _)| *id);
        let columns = [
            ("revision", heads.revision != self.replay.revision),
            ("emergency_revision", heads.emergency_revision != self.replay.emergency_revision),
            ("credential_revision", heads.credential_revision != self.replay.credential_revision),
            ("override_revision", heads.override_revision != self.replay.override_revision),
            ("change_count", changes != Some(proposed)),
        ];
        if let Some(way) = edited(&columns) {
            self.add(StorePart::Heads, "heads", Some(self.replay.revision), way);
        }
        Ok(())
    }

    async fn compare_changes(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let mut after = 0;
        loop {
            let values = [Value::Number(after), Value::Number(CHANGES_AT_ONCE)];
            let before = after;
            let take = |cells: Cells<'_>| {
                after = cells.number(0)?;
                self.compare_change(after, &cells);
                Ok(())
            };
            reading.each(CHANGES, &values, take).await?;
            if after == before {
                break;
            }
        }
        for (id, change) in std::mem::take(&mut self.replay.changes) {
            self.add(StorePart::Change, id.to_string(), change.revision, AlterationWay::Removed);
        }
        Ok(())
    }

    fn compare_change(&mut self, id: u64, cells: &Cells<'_>) {
        let Some(change) = self.replay.changes.remove(&id) else {
            let revision = cells.optional_number(13).ok().flatten();
            return self.add(StorePart::Change, id.to_string(), revision, AlterationWay::Added);
        };
        let columns = change_columns(&change, cells);
        if let Some(way) = edited(&columns) {
            self.add(StorePart::Change, id.to_string(), change.revision, way);
        }
    }

    async fn compare_rows(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let take = |cells: Cells<'_>| {
            let (kind, name) = (cells.text(0)?, cells.owned(1)?);
            let kind =
                kind_of(kind).ok_or_else(|| StoreError::Foreign(format!("a row that is a {kind:?}")))?;
            self.compare_row(kind, name, &cells);
            Ok(())
        };
        reading.each(ROWS, &[], take).await?;
        for ((kind, name), row) in std::mem::take(&mut self.replay.rows) {
            let way = self.unproven(&row).unwrap_or(AlterationWay::Removed);
            self.add(part(kind), name, Some(row.number()), way);
        }
        Ok(())
    }

    fn compare_row(&mut self, kind: RowKind, name: String, cells: &Cells<'_>) {
        let key = (kind, name);
        let Some(row) = self.replay.rows.remove(&key) else {
            // Only the operations state the rows of a change.
            let change = cells.number(4).ok().and_then(|revision| self.replay.unproven.get(&revision));
            let way = change.map_or(AlterationWay::Added, |change| AlterationWay::Unproven(*change));
            let revision = cells.number(4).ok().filter(|_| change.is_some());
            return self.add(part(kind), key.1, revision, way);
        };
        // A version counts all changes of a row, also those without their operations.
        let has_version = self.replay.unproven.is_empty();
        let columns = row_columns(&row, cells)
            .map(|(name, differs)| (name, differs && (has_version || name != "version")));
        if let Some(way) = self.unproven(&row).or_else(|| edited(&columns)) {
            self.add(part(kind), key.1, Some(row.number()), way);
        }
    }

    /// Whether a row was written by a change whose operations are not those of the audit.
    fn unproven(&self, row: &ReplayedRow) -> Option<AlterationWay> {
        let change = self.replay.unproven.get(&row.revision).filter(|_| row.override_revision == 0)?;
        Some(AlterationWay::Unproven(*change))
    }

    async fn compare_emergencies(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let take = |cells: Cells<'_>| {
            let id = cells.owned(0)?;
            let Some(emergency) = self.replay.emergencies.remove(&id) else {
                self.add(StorePart::Emergency, id, None, AlterationWay::Added);
                return Ok(());
            };
            let columns = [
                ("body", !cells.text(1).is_ok_and(|body| emergency.body.is_of(body))),
                ("author", !cells.text(2).is_ok_and(|author| author == emergency.author)),
                ("created_ms", cells.number(3).ok() != Some(emergency.created_ms)),
                ("expires_ms", cells.number(4).ok() != Some(emergency.expires_ms)),
            ];
            if let Some(way) = edited(&columns) {
                self.add(StorePart::Emergency, id, Some(emergency.revision), way);
            }
            Ok(())
        };
        reading.each(EMERGENCIES, &[], take).await?;
        for (id, emergency) in std::mem::take(&mut self.replay.emergencies) {
            self.add(StorePart::Emergency, id, Some(emergency.revision), AlterationWay::Removed);
        }
        Ok(())
    }

    async fn compare_credentials(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let take = |cells: Cells<'_>| {
            let Some(credential) = self.replay.credentials.remove(cells.text(0)?) else {
                self.add(StorePart::Credential, cells.owned(1)?, None, AlterationWay::Added);
                return Ok(());
            };
            let is = |column, text: &str| cells.text(column).is_ok_and(|found| found == text);
            let created_ms = credential.created_ms.or(cells.number(4).ok());
            let columns = [
                ("name", !is(1, &credential.name)),
                ("tenant", !is(2, &credential.tenant)),
                ("role", !is(3, &credential.role)),
                ("created_ms", cells.number(4).ok() != created_ms),
                ("expires_ms", cells.optional_number(5).ok() != Some(credential.expires_ms)),
            ];
            if let Some(way) = edited(&columns) {
                self.add(StorePart::Credential, credential.name, Some(credential.revision), way);
            }
            Ok(())
        };
        reading.each(CREDENTIALS, &[], take).await?;
        for credential in std::mem::take(&mut self.replay.credentials).into_values() {
            let revision = Some(credential.revision);
            self.add(StorePart::Credential, credential.name, revision, AlterationWay::Removed);
        }
        Ok(())
    }

    async fn compare_makers(&mut self, reading: &mut Transaction) -> Result<(), StoreError> {
        let name = |(name, made_by): &(String, String)| format!("{name} by {made_by}");
        let take = |cells: Cells<'_>| {
            let key = (cells.owned(0)?, cells.owned(1)?);
            let way = match self.replay.makers.remove(&key) {
                Some(maker) => edited(&[("change_count", cells.number(2).ok() != Some(maker.change_count))]),
                None => Some(AlterationWay::Added),
            };
            if let Some(way) = way {
                self.add(StorePart::Maker, name(&key), None, way);
            }
            Ok(())
        };
        reading.each(MAKERS, &[], take).await?;
        let missing = std::mem::take(&mut self.replay.makers);
        for (key, _) in missing.iter().filter(|(_, maker)| maker.is_certain) {
            self.add(StorePart::Maker, name(key), None, AlterationWay::Removed);
        }
        Ok(())
    }
}

fn part(kind: RowKind) -> StorePart {
    match kind {
        RowKind::Template => StorePart::Template,
        RowKind::Rule => StorePart::Rule,
        RowKind::Override => StorePart::Override,
    }
}

impl ReplayedRow {
    /// The revision that wrote the row last: of the rules, or of the overrides of clients.
    fn number(&self) -> u64 {
        if self.override_revision > 0 { self.override_revision } else { self.revision }
    }
}

fn row_columns(row: &ReplayedRow, cells: &Cells<'_>) -> [(&'static str, bool); 8] {
    let body = cells.optional_text(2).ok();
    let is_body = match (&row.body, &body) {
        (Some(digest), Some(Some(body))) => digest.is_of(body),
        (None, Some(None)) => true,
        _ => false,
    };
    let columns = body.flatten().and_then(|body| NamespaceColumns::of_body(&body));
    let differs = |column, of: fn(&NamespaceColumns) -> &String| {
        is_body
            && cells.optional_text(column).ok().as_ref() != Some(&columns.as_ref().map(|all| of(all).clone()))
    };
    let wildcard = columns.as_ref().map_or(0, |columns| columns.wildcard);
    [
        ("body", !is_body),
        ("version", cells.number(3).ok() != Some(row.version)),
        ("revision", cells.number(4).ok() != Some(row.revision)),
        ("override_revision", cells.number(5).ok() != Some(row.override_revision)),
        ("target", differs(6, |columns| &columns.target)),
        ("namespace", differs(7, |columns| &columns.namespace)),
        ("tenant", differs(8, |columns| &columns.tenant)),
        ("wildcard", is_body && cells.number(9).ok() != Some(wildcard)),
    ]
}

fn change_columns(change: &ReplayedChange, cells: &Cells<'_>) -> Vec<(&'static str, bool)> {
    let is = |column, text: &str| cells.text(column).is_ok_and(|found| found == text);
    let has_digest = |column, digest: &str| cells.text(column).is_ok_and(|found| sha256(found) == digest);
    let effect = cells.optional_text(9).ok().flatten().unwrap_or_default();
    let is_effect = change.effect_sha256.as_ref().is_none_or(|digest| sha256(&effect) == *digest);
    let undoes = cells.text(10).ok().and_then(|text| serde_json::from_str::<Vec<u64>>(text).ok());
    let approver = cells.optional_text(11).ok().flatten();
    let approval = approver.zip(cells.optional_number(12).ok().flatten());
    let is_operations = has_digest(8, &change.operations_sha256);
    let operations = cells.text(8).ok().and_then(|text| serde_json::from_str::<Vec<Operation>>(text).ok());
    let count = operations.map(|operations| operations.len() as u64);
    vec![
        ("state", !is(1, change.state.word())),
        ("needs", !is(2, &change.needs)),
        ("base_revision", cells.number(3).ok() != Some(change.base_revision)),
        ("author", !is(4, &change.author)),
        ("reason", !has_digest(5, &change.reason_sha256)),
        ("created_ms", cells.number(6).ok() != Some(change.created_ms)),
        ("operation_count", is_operations && cells.number(7).ok() != count),
        ("operations", !is_operations),
        ("effect", !is_effect),
        ("undoes", undoes.as_ref() != Some(&change.undoes)),
        ("approver", approval != change.approval),
        ("revision", cells.optional_number(13).ok() != Some(change.revision)),
        ("restores", !change.restores_rows),
    ]
}
