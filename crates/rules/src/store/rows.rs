//! Reads the book, whole and of one moment.

use super::database::{Cells, Transaction};
use super::writing::{heads, no_heads};
use super::{Heads, Store, StoreError};
use crate::book::{Book, EmergencyRow, Row};
use crate::change::kind_of;

const HEADS: &str = "SELECT revision, emergency_revision, credential_revision FROM tidegate_heads";
const ROWS: &str = "SELECT kind, name, body, version FROM tidegate_rows WHERE body IS NOT NULL";
const EMERGENCIES: &str = "SELECT id, body, expires_ms FROM tidegate_emergencies ORDER BY id";

impl Store {
    /// How far the store is.
    pub async fn heads(&self) -> Result<Heads, StoreError> {
        read_heads(&mut self.database.read().await?).await
    }

    /// All rules, in the order of kind and name, and all emergencies, also those that have expired.
    pub async fn load(&self) -> Result<Book, StoreError> {
        let mut reading = self.database.read().await?;
        let heads = read_heads(&mut reading).await?;
        let mut rows = Vec::new();
        let take = |cells: Cells<'_>| {
            rows.push(row(&cells)?);
            Ok(())
        };
        reading.each(ROWS, &[], take).await?;
        let emergencies = reading.all(EMERGENCIES, &[], emergency).await?;
        reading.commit().await?;
        // Here and not in the database, whose order depends on its locale.
        rows.sort_unstable_by(|a: &Row, b| (a.kind, &a.name).cmp(&(b.kind, &b.name)));
        Ok(Book { revision: heads.revision, emergency_revision: heads.emergency_revision, rows, emergencies })
    }

    /// The emergencies alone, with their revision: they must not wait until a large book is read.
    pub async fn emergencies(&self) -> Result<(u64, Vec<EmergencyRow>), StoreError> {
        let mut reading = self.database.read().await?;
        let heads = read_heads(&mut reading).await?;
        let emergencies = reading.all(EMERGENCIES, &[], emergency).await?;
        Ok((heads.emergency_revision, emergencies))
    }
}

async fn read_heads(reading: &mut Transaction) -> Result<Heads, StoreError> {
    reading.one(HEADS, &[], heads).await?.ok_or_else(no_heads)
}

fn row(cells: &Cells<'_>) -> Result<Row, StoreError> {
    let (kind, version) = (cells.text(0)?, cells.number(3)?);
    let (Some(kind), Ok(version)) = (kind_of(kind), u32::try_from(version)) else {
        return Err(StoreError::Foreign(format!("version {version} of a {kind}")));
    };
    Ok(Row { kind, name: cells.owned(1)?, body: cells.owned(2)?, version })
}

fn emergency(cells: &Cells<'_>) -> Result<EmergencyRow, StoreError> {
    Ok(EmergencyRow { id: cells.owned(0)?, body: cells.owned(1)?, expires_ms: cells.number(2)? })
}
