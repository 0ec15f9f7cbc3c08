//! Transactions on pooled connections. A connection goes back to its pool only after a commit or a
//! rollback that succeeded.
//!
//! `sqlx` has transactions of its own, which count their depth. A full disk makes that count wrong:
//! `SQLite` rolls back by itself, or a commit fails. Later transactions on such a connection would
//! be savepoints of one that never ends. So `BEGIN`, `COMMIT` and `ROLLBACK` are statements here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::TryStreamExt as _;
use sqlx::error::ErrorKind;
use sqlx::pool::PoolConnection;
use sqlx::{Postgres, SqlSafeStr, Sqlite};

use super::StoreError;
use super::database::{Cells, Value, in_time, signed};

/// A connection of one of the pools.
pub(super) enum PooledConnection {
    Memory(PoolConnection<Sqlite>),
    Sqlite(PoolConnection<Sqlite>),
    Postgres(PoolConnection<Postgres>),
}

/// The use of a transaction.
#[derive(Clone, Debug)]
pub(super) enum Access {
    Read,
    /// With the place for its result.
    Write(Arc<WriteHealth>),
}

/// Whether the last write of this process to a store failed, for a reason of the store.
#[derive(Debug, Default)]
pub(super) struct WriteHealth {
    has_failed: AtomicBool,
}

impl WriteHealth {
    pub(super) fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Relaxed)
    }

    pub(super) fn note_error(&self, error: &StoreError) {
        if is_outage(error) {
            self.has_failed.store(true, Ordering::Relaxed);
        }
    }

    fn note_commit(&self) {
        self.has_failed.store(false, Ordering::Relaxed);
    }
}

/// Whether the store failed. It also refuses writes of this process, which says nothing about it.
fn is_outage(error: &StoreError) -> bool {
    match error {
        StoreError::Database(sqlx::Error::Database(error)) => matches!(error.kind(), ErrorKind::Other),
        StoreError::Database(_) | StoreError::Unreachable(_) => true,
        _ => false,
    }
}

/// Several statements that take effect together. Without a commit, none does.
pub(super) struct Transaction {
    /// `None` only after the connection is back in its pool, or is being closed.
    connection: Option<PooledConnection>,
    /// Whether all statements so far have run to their end. A statement in progress has not, so a
    /// timeout or a dropped future leaves `false`.
    is_sound: bool,
    access: Access,
}

macro_rules! bound {
    ($database:ty, $sql:expr, $values:expr) => {{
        let mut query = sqlx::query::<$database>($sql);
        for value in $values {
            query = match *value {
                Value::Number(number) => query.bind(signed(number)),
                Value::OptionalNumber(number) => query.bind(number.map(signed)),
                Value::Text(text) => query.bind(text),
                Value::OptionalText(text) => query.bind(text),
            };
        }
        query
    }};
}

impl Transaction {
    pub(super) async fn begin(
        connection: PooledConnection,
        begin: &'static str,
        access: Access,
    ) -> Result<Self, StoreError> {
        let mut transaction = Self { connection: Some(connection), is_sound: true, access };
        transaction.execute(begin, &[]).await?;
        Ok(transaction)
    }

    /// Runs a statement, and returns the number of changed rows.
    pub(super) async fn execute(
        &mut self,
        sql: impl SqlSafeStr,
        values: &[Value<'_>],
    ) -> Result<u64, StoreError> {
        let connection = self.for_statement()?;
        let done = async {
            Ok(match connection {
                PooledConnection::Memory(connection) | PooledConnection::Sqlite(connection) => {
                    bound!(Sqlite, sql, values).execute(&mut **connection).await?.rows_affected()
                }
                PooledConnection::Postgres(connection) => {
                    bound!(Postgres, sql, values).execute(&mut **connection).await?.rows_affected()
                }
            })
        };
        let done = in_time(done).await;
        self.conclude(done)
    }

    /// Reads the results of a statement, row by row as they arrive.
    pub(super) async fn each(
        &mut self,
        sql: impl SqlSafeStr,
        values: &[Value<'_>],
        mut take: impl FnMut(Cells<'_>) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        self.each_while(sql, values, |cells| take(cells).map(|()| true)).await
    }

    /// Does the same until `take` returns `false`.
    pub(super) async fn each_while(
        &mut self,
        sql: impl SqlSafeStr,
        values: &[Value<'_>],
        mut take: impl FnMut(Cells<'_>) -> Result<bool, StoreError>,
    ) -> Result<(), StoreError> {
        let connection = self.for_statement()?;
        let done = async {
            match connection {
                PooledConnection::Memory(connection) | PooledConnection::Sqlite(connection) => {
                    let mut rows = bound!(Sqlite, sql, values).fetch(&mut **connection);
                    while let Some(row) = rows.try_next().await?
                        && take(Cells::Sqlite(&row))?
                    {}
                }
                PooledConnection::Postgres(connection) => {
                    let mut rows = bound!(Postgres, sql, values).fetch(&mut **connection);
                    while let Some(row) = rows.try_next().await?
                        && take(Cells::Postgres(&row))?
                    {}
                }
            }
            Ok(())
        };
        let done = in_time(done).await;
        self.conclude(done)
    }

    /// All that a statement finds.
    pub(super) async fn all<T>(
        &mut self,
        sql: impl SqlSafeStr,
        values: &[Value<'_>],
        read: impl Fn(&Cells<'_>) -> Result<T, StoreError>,
    ) -> Result<Vec<T>, StoreError> {
        let mut found = Vec::new();
        let take = |cells: Cells<'_>| {
            found.push(read(&cells)?);
            Ok(())
        };
        self.each(sql, values, take).await?;
        Ok(found)
    }

    /// Returns the result of a statement that finds at most one row. The statement runs to its end:
    /// an error of a write may come after its row.
    pub(super) async fn one<T>(
        &mut self,
        sql: impl SqlSafeStr,
        values: &[Value<'_>],
        read: impl Fn(&Cells<'_>) -> Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        Ok(self.all(sql, values, read).await?.pop())
    }

    /// Notifies the listeners when the transaction commits.
    pub(super) async fn notify(&mut self, channel: &str, message: &str) -> Result<(), StoreError> {
        if matches!(self.connection, Some(PooledConnection::Postgres(_))) {
            self.execute("SELECT pg_notify($1, $2)", &[Value::Text(channel), Value::Text(message)]).await?;
        }
        Ok(())
    }

    /// Writes something that changes no row, to find whether the store takes writes.
    pub(super) async fn write_nothing(&mut self) -> Result<(), StoreError> {
        let write = match self.connection {
            // `SQLite` skips an update that changes no byte of a row, and writes this number.
            Some(PooledConnection::Memory(_) | PooledConnection::Sqlite(_)) => "PRAGMA user_version = 0",
            Some(PooledConnection::Postgres(_)) | None => "UPDATE tidegate_heads SET id = id",
        };
        self.execute(write, &[]).await.map(|_| ())
    }

    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        self.execute("COMMIT", &[]).await?;
        if let Access::Write(health) = &self.access {
            health.note_commit();
        }
        // Back to its pool.
        self.connection = None;
        Ok(())
    }

    /// Rolls back a transaction that was dropped, which is not sound before: a runtime that stops
    /// drops it without a rollback.
    async fn roll_back(mut self) {
        self.is_sound = true;
        // After an error, the drop closes the connection.
        if self.execute("ROLLBACK", &[]).await.is_ok() {
            self.connection = None;
        }
    }

    /// The connection, for a statement that begins.
    fn for_statement(&mut self) -> Result<&mut PooledConnection, StoreError> {
        match &mut self.connection {
            Some(connection) if std::mem::replace(&mut self.is_sound, false) => Ok(connection),
            // PostgreSQL would reply to the commit as if it had succeeded.
            _ => Err(StoreError::Unreachable("an earlier statement of the transaction failed".to_owned())),
        }
    }

    fn conclude<T>(&mut self, done: Result<T, StoreError>) -> Result<T, StoreError> {
        match (&done, &self.access) {
            (Ok(_), _) => self.is_sound = true,
            (Err(error), Access::Write(health)) => health.note_error(error),
            (Err(_), Access::Read) => {}
        }
        done
    }
}

impl Drop for Transaction {
    /// Rolls back. Closes the connection if a statement failed or did not end, or if the rollback
    /// fails.
    fn drop(&mut self) {
        match self.connection.take() {
            None => {}
            Some(PooledConnection::Memory(mut connection)) => {
                // To close it would delete the store. Memory has no disk that fails, so only a
                // dropped future leaves a statement behind. Without a transaction, it is an error.
                drop(tokio::spawn(async move {
                    let _ = sqlx::raw_sql("ROLLBACK").execute(&mut *connection).await;
                }));
            }
            connection @ Some(_) if self.is_sound => {
                let access = self.access.clone();
                drop(tokio::spawn(Self { connection, is_sound: false, access }.roll_back()));
            }
            Some(PooledConnection::Sqlite(mut connection)) => connection.close_on_drop(),
            Some(PooledConnection::Postgres(mut connection)) => connection.close_on_drop(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::store::Store;

    /// Sets the revision in a transaction that ends in several ways, but for the last without a
    /// commit.
    async fn ends(address: &str) {
        let store = Store::open(&address.parse().expect("an address")).await.expect("opens");
        let revision = async || store.revisions().await.expect("heads").revision;
        let raise = "UPDATE tidegate_heads SET revision = revision + 1";

        let mut dropped = store.database.write().await.expect("begins");
        assert_eq!(dropped.execute(raise, &[]).await.expect("runs"), 1);
        drop(dropped);
        assert_eq!(revision().await, 0);

        let mut failed = store.database.write().await.expect("begins");
        failed.execute(raise, &[]).await.expect("runs");
        failed.execute("SELECT nothing FROM nowhere", &[]).await.expect_err("no such table");
        let refused = failed.commit().await.expect_err("a statement failed").to_string();
        assert!(refused.ends_with("an earlier statement of the transaction failed"), "{refused}");
        assert!(store.has_failed_write());
        assert_eq!(revision().await, 0);

        let mut aborted = store.database.write().await.expect("begins");
        let writing = tokio::spawn(async move {
            loop {
                aborted.execute(raise, &[]).await.expect("runs");
            }
        });
        tokio::task::yield_now().await;
        writing.abort();
        assert!(writing.await.expect_err("aborted").is_cancelled());
        assert_eq!(revision().await, 0);

        store.retry_failed_write().await.expect("takes writes");
        assert!(!store.has_failed_write());
        let mut committed = store.database.write().await.expect("begins");
        committed.execute(raise, &[]).await.expect("runs");
        committed.commit().await.expect("commits");
        assert_eq!(revision().await, 1);
    }

    #[tokio::test]
    async fn only_a_commit_has_an_effect_whatever_happens_to_the_transaction() {
        let folder = tempfile::tempdir().expect("a folder");
        ends(&format!("sqlite:{}", folder.path().join("rules.db").display())).await;
        ends("sqlite::memory:").await;
    }
}
