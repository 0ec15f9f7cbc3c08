//! Reads all rule rows, as of one moment.

use std::pin::pin;

use futures_util::future::{Either, select};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::database::Cells;
use super::transaction::Transaction;
use super::write_transaction::{no_heads, revisions};
use super::{Store, StoreError, StoreRevisions};
use crate::change::kind_of;
use crate::rows::{EmergencyRow, OverrideChange, RuleRow, RuleRows};

const HEADS: &str =
    "SELECT revision, emergency_revision, credential_revision, override_revision FROM tidegate_heads";
const ROWS: &str = "SELECT kind, name, body, version FROM tidegate_rows WHERE body IS NOT NULL";
/// All that there is but overrides, of which there may be a million.
pub(super) const RULES: &str = "SELECT kind, name, body, version FROM tidegate_rows WHERE body IS NOT NULL \
     AND kind IN ('template', 'rule')";
pub(super) const EMERGENCIES: &str = "SELECT id, body, expires_ms FROM tidegate_emergencies ORDER BY id";

impl Store {
    /// How far the store is.
    pub async fn revisions(&self) -> Result<StoreRevisions, StoreError> {
        read_heads(&mut self.urgent.read().await?).await
    }

    /// Loads all rule rows, in the order of kind and name, and all emergencies, including expired
    /// ones. The read uses its own thread: there may be a million rows, and the caller's thread has
    /// other work. It stops when the caller no longer waits.
    pub async fn load(&self) -> Result<RuleRows, StoreError> {
        self.aside(async |store: &Self| store.read_rule_rows().await).await
    }

    /// Runs a long read on its own thread, as long as the caller waits.
    pub(super) async fn aside<T: Send + 'static>(
        &self,
        read: impl AsyncFnOnce(&Self) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let (store, runtime) = (self.clone(), Handle::current());
        let (waiting, caller_stopped) = oneshot::channel::<()>();
        let reading = tokio::task::spawn_blocking(move || {
            runtime.block_on(async {
                match select(pin!(read(&store)), caller_stopped).await {
                    Either::Left((read, _)) => read,
                    Either::Right(_) => Err(not_read("the caller no longer waits")),
                }
            })
        });
        let read = reading.await;
        drop(waiting);
        read.unwrap_or_else(|error| Err(not_read(error)))
    }

    async fn read_rule_rows(&self) -> Result<RuleRows, StoreError> {
        let mut reading = self.database.read().await?;
        let revisions = read_heads(&mut reading).await?;
        let mut rows = Vec::new();
        let take = |cells: Cells<'_>| {
            rows.push(row(&cells)?);
            Ok(())
        };
        reading.each(ROWS, &[], take).await?;
        let emergencies = reading.all(EMERGENCIES, &[], emergency).await?;
        reading.commit().await?;
        // Sorted here, because the order of a database depends on its locale.
        rows.sort_unstable_by(|a: &RuleRow, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        let StoreRevisions { revision, emergency_revision, override_revision, .. } = revisions;
        Ok(RuleRows { revision, emergency_revision, override_revision, rows: rows.into(), emergencies })
    }

    /// Loads only the emergencies, with their revision: they must not wait for a large rule set.
    pub async fn emergencies(&self) -> Result<(u64, Vec<EmergencyRow>), StoreError> {
        let mut reading = self.urgent.read().await?;
        let revisions = read_heads(&mut reading).await?;
        let emergencies = reading.all(EMERGENCIES, &[], emergency).await?;
        Ok((revisions.emergency_revision, emergencies))
    }
}

fn not_read(why: impl std::fmt::Display) -> StoreError {
    StoreError::Unreachable(format!("it was not read to the end: {why}"))
}

pub(super) async fn read_heads(reading: &mut Transaction) -> Result<StoreRevisions, StoreError> {
    reading.one(HEADS, &[], revisions).await?.ok_or_else(no_heads)
}

pub(super) fn row(cells: &Cells<'_>) -> Result<RuleRow, StoreError> {
    let (kind, version) = (cells.text(0)?, cells.number(3)?);
    let (Some(kind), Ok(version)) = (kind_of(kind), u32::try_from(version)) else {
        return Err(StoreError::Foreign(format!("version {version} of a {kind}")));
    };
    Ok(RuleRow { kind, name: cells.owned(1)?, body: cells.owned(2)?, version })
}

/// A row that a client set, or deleted.
pub(super) fn change_of_override(cells: &Cells<'_>) -> Result<OverrideChange, StoreError> {
    let version = cells.number(2)?;
    let version = u32::try_from(version)
        .map_err(|_| StoreError::Foreign(format!("version {version} of an override")))?;
    Ok(OverrideChange { name: cells.owned(0)?, body: cells.optional_text(1)?, version })
}

pub(super) fn emergency(cells: &Cells<'_>) -> Result<EmergencyRow, StoreError> {
    Ok(EmergencyRow { id: cells.owned(0)?, body: cells.owned(1)?, expires_ms: cells.number(2)? })
}
