//! Overrides of namespaces, as clients set and delete them: without a plan, many in one
//! transaction.
//!
//! They raise a revision of their own. So they are never in conflict with a planned change, and no
//! rollback undoes them.

use std::collections::HashSet;

use serde_json::json;
use sha2::{Digest as _, Sha256};
use sqlx::AssertSqlSafe;

use super::changes::places;
use super::database::{Cells, Value};
use super::rows::{change_of_override, read_heads};
use super::write_transaction::WriteTransaction;
use super::{Attribution, RowConflict, Store, StoreError, StoreRevisions};
use crate::audit::hexadecimal;
use crate::change::Operation;
use crate::overrides::{LOOSE_WILDCARDS_MAX, OVERRIDES_PER_TENANT_MAX, WILDCARDS_PER_TARGET_MAX};
use crate::pattern::Pattern;
use crate::rows::{NamespaceKey, OverrideChange, RowKind};

/// How many rows one statement is about. More: fewer statements, each longer.
const ROWS_AT_ONCE: usize = 500;

/// Digits of the key's digest in the name of a row: 128 bits.
const NAME_DIGITS: usize = 32;

const BY_TARGET: &str = "SELECT name FROM tidegate_rows WHERE target = $1";

const COUNT_OF_TENANT: &str = "SELECT COUNT(*) FROM tidegate_rows WHERE tenant = $1";

const COUNT_WILDCARDS: &str = "SELECT COUNT(*), COUNT(CASE WHEN wildcard = 2 THEN 1 END) FROM tidegate_rows \
     WHERE namespace = $1 AND wildcard > 0";

/// A deleted row of the same name goes on. A row with another key keeps its name.
const SET: &str = "INSERT INTO tidegate_rows (kind, name, body, version, revision, override_revision, target, \
     namespace, tenant, wildcard) VALUES ('override', $1, $2, 1, $3, $4, $5, $6, $7, $8) ON CONFLICT (kind, \
     name) DO UPDATE SET body = excluded.body, version = tidegate_rows.version + 1, override_revision = \
     excluded.override_revision, target = excluded.target, namespace = excluded.namespace, tenant = \
     excluded.tenant, wildcard = excluded.wildcard WHERE tidegate_rows.body IS NULL OR tidegate_rows.target = \
     excluded.target RETURNING version";

const DELETE: &str = "UPDATE tidegate_rows SET body = NULL, version = version + 1, override_revision = $2, \
     target = NULL, namespace = NULL, tenant = NULL, wildcard = 0 WHERE target = $1 RETURNING name";

const CHANGED: &str = "SELECT name, body, version FROM tidegate_rows WHERE kind = 'override' AND \
     override_revision > $1 AND override_revision > 0";

/// A write of a client to the override of one tenant, namespace and identifier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverrideWrite {
    /// The tenant of the client.
    pub tenant: String,
    /// Where the override applies.
    pub namespace: String,
    /// The identifiers that it applies to, with up to four `*`.
    pub identifier: String,
    /// The limit to set; `None` to delete the override.
    pub limit: Option<OverrideLimit>,
    /// The client, as named in the audit.
    pub by: String,
    /// When, in milliseconds since the Unix epoch.
    pub now_ms: u64,
}

/// The limit of a namespace override.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OverrideLimit {
    /// Units that may pass in each period; 0 blocks.
    pub amount: u32,
    /// The period in milliseconds.
    pub period_ms: u64,
}

/// The result of one write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OverrideOutcome {
    /// The override is set.
    Set {
        /// The name of its row, which stays the same when it is set again.
        name: String,
        /// The version of its row.
        version: u32,
    },
    /// The override is deleted.
    Deleted,
    /// There was no override to delete.
    NotThere,
    /// There is no room for another override.
    Full(OverrideQuota),
    /// A row of the rules has the name that the override would get.
    NameTaken(String),
}

/// A maximum that namespace overrides have reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideQuota {
    /// The tenant has [`OVERRIDES_PER_TENANT_MAX`].
    Tenant,
    /// The tenant has [`WILDCARDS_PER_TARGET_MAX`] with a `*` in the namespace.
    Wildcards,
    /// The tenant has [`LOOSE_WILDCARDS_MAX`] in the namespace that begin and end with a `*`.
    LooseWildcards,
}

impl std::fmt::Display for OverrideQuota {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Tenant => write!(
                f,
                "overrides: the tenant has reached the maximum of {OVERRIDES_PER_TENANT_MAX}: delete one"
            ),
            Self::Wildcards => write!(
                f,
                "overrides: the namespace has reached the maximum of {WILDCARDS_PER_TARGET_MAX} with a `*`: \
                 delete one"
            ),
            Self::LooseWildcards => write!(
                f,
                "overrides: the namespace has reached the maximum of {LOOSE_WILDCARDS_MAX} that begin and end \
                 with a `*`: delete one"
            ),
        }
    }
}

/// The digests and the kind of a namespace override, by which the store finds and counts its row.
#[derive(Debug)]
pub(super) struct NamespaceColumns {
    pub(super) target: String,
    pub(super) namespace: String,
    pub(super) tenant: String,
    pub(super) wildcard: u64,
}

impl NamespaceColumns {
    /// Returns the columns of a row with this body; `None` unless it is a namespace override.
    pub(super) fn of_body(body: &str) -> Option<Self> {
        let NamespaceKey { tenant, namespace, identifier, .. } = NamespaceKey::read(body)?;
        Some(Self::new(tenant.as_deref(), &namespace, &identifier))
    }

    fn new(tenant: Option<&str>, namespace: &str, identifier: &str) -> Self {
        let digest = |key: serde_json::Value| hexadecimal(&Sha256::digest(key.to_string()));
        Self {
            target: digest(json!([tenant, namespace, identifier])),
            namespace: digest(json!([tenant, namespace])),
            tenant: digest(json!([tenant])),
            wildcard: wildcard_kind(identifier),
        }
    }

    /// The name of a row that a client makes.
    fn row_name(&self) -> String {
        format!("ovr_{}", self.target.get(..NAME_DIGITS).unwrap_or(&self.target))
    }
}

fn wildcard_kind(identifier: &str) -> u64 {
    let pattern = Pattern::new(identifier);
    match (pattern.is_wild(), pattern.beginning().is_empty() && pattern.end().is_empty()) {
        (false, _) => 0,
        (true, false) => 1,
        (true, true) => 2,
    }
}

impl Store {
    /// Does writes of clients in order, in one transaction. A refused write does not affect the
    /// others. Returns the override revision since, and the outcome of each write.
    ///
    /// The transaction waits for others to end, so a change of another process is no conflict: of
    /// two writes to one override, the later stays.
    pub async fn write_overrides(
        &self,
        writes: &[OverrideWrite],
    ) -> Result<(u64, Vec<OverrideOutcome>), StoreError> {
        let Some(first) = writes.first() else {
            return Ok((self.revisions().await?.override_revision, Vec::new()));
        };
        let mut writing = self.begin(first.attribution()).await?;
        writing.revisions.override_revision += 1;
        let mut outcomes = Vec::with_capacity(writes.len());
        for write in writes {
            outcomes.push(writing.write_override(write).await?);
        }
        let is_change = |outcome: &OverrideOutcome| {
            matches!(outcome, OverrideOutcome::Set { .. } | OverrideOutcome::Deleted)
        };
        if !outcomes.iter().any(is_change) {
            return Ok((writing.revisions.override_revision - 1, outcomes));
        }
        let revision = writing.revisions.override_revision;
        self.commit(writing).await?;
        Ok((revision, outcomes))
    }

    /// Returns the overrides that clients wrote after an override revision, as of one moment with
    /// the revisions.
    pub async fn override_changes(
        &self,
        after: u64,
    ) -> Result<(StoreRevisions, Vec<OverrideChange>), StoreError> {
        self.aside(async move |store: &Self| {
            let mut reading = store.database.read().await?;
            let revisions = read_heads(&mut reading).await?;
            let changes = reading.all(CHANGED, &[Value::Number(after)], change_of_override).await?;
            Ok((revisions, changes))
        })
        .await
    }
}

impl OverrideWrite {
    fn attribution(&self) -> Attribution<'_> {
        Attribution { by: &self.by, now_ms: self.now_ms }
    }
}

impl<'a> WriteTransaction<'a> {
    async fn write_override(&mut self, write: &'a OverrideWrite) -> Result<OverrideOutcome, StoreError> {
        self.act_as(write.attribution())?;
        let columns = NamespaceColumns::new(Some(&write.tenant), &write.namespace, &write.identifier);
        match write.limit {
            Some(limit) => self.set_override(write, limit, &columns).await,
            None => self.delete_override(write, &columns).await,
        }
    }

    async fn set_override(
        &mut self,
        write: &OverrideWrite,
        limit: OverrideLimit,
        columns: &NamespaceColumns,
    ) -> Result<OverrideOutcome, StoreError> {
        let target = [Value::Text(&columns.target)];
        let name = match self.transaction.one(BY_TARGET, &target, |cells| cells.owned(0)).await? {
            Some(name) => name,
            None => match self.full(columns, 1).await? {
                Some(quota) => return Ok(OverrideOutcome::Full(quota)),
                None => columns.row_name(),
            },
        };
        let OverrideWrite { tenant, namespace, identifier, .. } = write;
        let OverrideLimit { amount, period_ms } = limit;
        let body = json!({
            "tenant": tenant,
            "namespace": namespace,
            "identifier": identifier,
            "limit": amount,
            "period": format!("{period_ms}ms"),
        });
        let text = body.to_string();
        let values = [
            Value::Text(&name),
            Value::Text(&text),
            Value::Number(self.revisions.revision),
            Value::Number(self.revisions.override_revision),
            Value::Text(&columns.target),
            Value::Text(&columns.namespace),
            Value::Text(&columns.tenant),
            Value::Number(columns.wildcard),
        ];
        let Some(version) = self.transaction.one(SET, &values, |cells| cells.number(0)).await? else {
            return Ok(OverrideOutcome::NameTaken(name));
        };
        let version = u32::try_from(version)
            .map_err(|_| StoreError::Foreign(format!("version {version} of an override")))?;
        let revision = self.revisions.override_revision;
        let detail =
            json!({ "override": name, "version": version, "override_revision": revision, "body": body });
        self.note("override.set", &detail).await?;
        Ok(OverrideOutcome::Set { name, version })
    }

    async fn delete_override(
        &mut self,
        write: &OverrideWrite,
        columns: &NamespaceColumns,
    ) -> Result<OverrideOutcome, StoreError> {
        let revision = self.revisions.override_revision;
        let values = [Value::Text(&columns.target), Value::Number(revision)];
        let Some(name) = self.transaction.one(DELETE, &values, |cells| cells.owned(0)).await? else {
            return Ok(OverrideOutcome::NotThere);
        };
        let OverrideWrite { tenant, namespace, identifier, .. } = write;
        let detail = json!({
            "override": name,
            "override_revision": revision,
            "tenant": tenant,
            "namespace": namespace,
            "identifier": identifier,
        });
        self.note("override.delete", &detail).await?;
        Ok(OverrideOutcome::Deleted)
    }

    /// Returns the maximum that so many more overrides would exceed.
    async fn full(
        &mut self,
        columns: &NamespaceColumns,
        more: u64,
    ) -> Result<Option<OverrideQuota>, StoreError> {
        let tenant = [Value::Text(&columns.tenant)];
        let count = self.transaction.one(COUNT_OF_TENANT, &tenant, |cells| cells.number(0)).await?;
        if count.unwrap_or(0) + more > OVERRIDES_PER_TENANT_MAX as u64 {
            return Ok(Some(OverrideQuota::Tenant));
        }
        if columns.wildcard == 0 {
            return Ok(None);
        }
        let read = |cells: &Cells<'_>| Ok((cells.number(0)?, cells.number(1)?));
        let namespace = [Value::Text(&columns.namespace)];
        let (wild, loose) =
            self.transaction.one(COUNT_WILDCARDS, &namespace, read).await?.unwrap_or_default();
        Ok(if wild + more > WILDCARDS_PER_TARGET_MAX as u64 {
            Some(OverrideQuota::Wildcards)
        } else if columns.wildcard == 2 && loose + more > LOOSE_WILDCARDS_MAX as u64 {
            Some(OverrideQuota::LooseWildcards)
        } else {
            None
        })
    }

    /// Frees the keys of the overrides that a change writes, and refuses the keys that another row
    /// has got since the change was planned.
    pub(super) async fn free_targets(&mut self, operations: &[Operation]) -> Result<(), StoreError> {
        let of_override = |operation: &&Operation| operation.row().0 == RowKind::Override;
        let overrides: Vec<&Operation> = operations.iter().filter(of_override).collect();
        for some in overrides.chunks(ROWS_AT_ONCE) {
            let free = format!(
                "UPDATE tidegate_rows SET target = NULL, namespace = NULL, tenant = NULL, wildcard = 0 WHERE \
                 kind = 'override' AND target IS NOT NULL AND name IN {}",
                places(1, some.len())
            );
            let names: Vec<Value<'_>> = some.iter().map(|operation| Value::Text(operation.row().1)).collect();
            self.transaction.execute(AssertSqlSafe(free), &names).await?;
        }
        let columns: Vec<NamespaceColumns> =
            overrides.iter().filter_map(|operation| NamespaceColumns::of_body(operation.body()?)).collect();
        let mut conflicts = Vec::new();
        for some in columns.chunks(ROWS_AT_ONCE) {
            let taken =
                format!("SELECT name, revision FROM tidegate_rows WHERE target IN {}", places(1, some.len()));
            let targets: Vec<Value<'_>> = some.iter().map(|columns| Value::Text(&columns.target)).collect();
            let conflict = |cells: &Cells<'_>| {
                let (name, revision) = (cells.owned(0)?, cells.number(1)?);
                Ok(RowConflict { kind: RowKind::Override, name, revision })
            };
            conflicts.extend(self.transaction.all(AssertSqlSafe(taken), &targets, conflict).await?);
        }
        if conflicts.is_empty() { Ok(()) } else { Err(StoreError::Conflict(conflicts)) }
    }

    /// Refuses a change after which a tenant has too many overrides of namespaces: clients may have
    /// set more since the change was planned.
    pub(super) async fn check_quotas(&mut self, operations: &[Operation]) -> Result<(), StoreError> {
        let of_override = |operation: &&Operation| operation.row().0 == RowKind::Override;
        let bodies = operations.iter().filter(of_override).filter_map(Operation::body);
        let mut seen = HashSet::new();
        for columns in bodies.filter_map(NamespaceColumns::of_body) {
            if seen.insert((columns.namespace.clone(), columns.wildcard))
                && let Some(quota) = self.full(&columns, 0).await?
            {
                return Err(StoreError::TooManyOverrides(quota));
            }
        }
        Ok(())
    }
}
