//! Store of overrides: `SQLite`, in a file or in memory. A change to a file is on disk when its
//! call returns.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteLockingMode, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{ConnectOptions, Connection, Row, SqlSafeStr};

use super::Override;
use crate::pattern::Pattern;
use crate::private_files;

/// The name of the file in the data folder.
const FILE_NAME: &str = "tidegate.db";

/// Maximum wait while another process, such as a server being replaced, holds the file. Longer: the
/// start tolerates a slower predecessor, but reports a real conflict later.
const BUSY_TIMEOUT: Duration = Duration::from_secs(2);

/// `SQLite`'s primary result code for a file that another process holds.
const SQLITE_BUSY: i32 = 5;

/// Schema migrations, in order. Released migrations never change.
const MIGRATIONS: &[(i64, &str, &str)] =
    &[(1, "overrides", include_str!("../../migrations/0001_overrides.sql"))];

/// The store. It belongs to one process: a second one that opens the same file is refused.
#[derive(Debug)]
pub struct OverrideStore {
    connection: SqliteConnection,
}

/// Reason why an operation of the store failed.
#[derive(Debug)]
pub enum OverrideStoreError {
    /// The folder cannot be made.
    Folder(PathBuf, std::io::Error),
    /// Another server uses the same folder.
    InUse(PathBuf),
    /// The file cannot be opened, or is not a file of Tidegate.
    Unusable(PathBuf, sqlx::Error),
    /// It was made by a later version, or its schema was changed by hand.
    Schema(sqlx::migrate::MigrateError),
    /// A row that this version cannot have written.
    Row(String),
    /// The database failed.
    Database(sqlx::Error),
}

impl fmt::Display for OverrideStoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder, error) => write!(f, "data_dir: {}: {error}", folder.display()),
            Self::InUse(file) => {
                let folder = file.parent().unwrap_or(file).display();
                write!(
                    f,
                    "data_dir: {folder} is in use by another server: start this one with a folder of its \
                     own, --data-dir DIR"
                )
            }
            Self::Unusable(file, error) => write!(f, "data_dir: {}: {error}", file.display()),
            Self::Schema(error) => write!(f, "data_dir: {error}"),
            Self::Row(id) => write!(f, "data_dir: the override {id:?} is not one that this version writes"),
            Self::Database(error) => write!(f, "store: {error}"),
        }
    }
}

impl std::error::Error for OverrideStoreError {}

impl From<sqlx::Error> for OverrideStoreError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

impl OverrideStore {
    /// Opens the store in `folder`, and creates the folder if necessary. Without a folder, the
    /// store is in memory and lost when closed.
    pub async fn open(folder: Option<&Path>) -> Result<Self, OverrideStoreError> {
        let Some(folder) = folder else {
            return Self::connect(SqliteConnectOptions::new().in_memory(true)).await;
        };
        let file = folder.join(FILE_NAME);
        private_files::create_folder(folder)
            .and_then(|()| private_files::create_if_missing(&file))
            .map_err(|error| OverrideStoreError::Folder(folder.to_owned(), error))?;
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .create_if_missing(true)
            .locking_mode(SqliteLockingMode::Exclusive)
            .journal_mode(SqliteJournalMode::Wal)
            // An acknowledged write survives a power failure.
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT);
        Self::connect(options).await.map_err(|error| error.naming(file))
    }

    async fn connect(options: SqliteConnectOptions) -> Result<Self, OverrideStoreError> {
        let mut connection = options.disable_statement_logging().connect().await?;
        migrator().run(&mut connection).await.map_err(OverrideStoreError::Schema)?;
        Ok(Self { connection })
    }

    /// All overrides, each with the name of its tenant.
    pub async fn load(&mut self) -> Result<Vec<(String, Override)>, OverrideStoreError> {
        let rows = sqlx::query("SELECT * FROM overrides").fetch_all(&mut self.connection).await?;
        rows.iter().map(|row| Ok((row.try_get("tenant")?, read(row)?))).collect()
    }

    /// Stores an override. It replaces the one with its pattern and takes over that id. Returns the
    /// id.
    pub async fn set(
        &mut self,
        tenant: &str,
        new: &Override,
        now_ms: u64,
    ) -> Result<String, OverrideStoreError> {
        let query = sqlx::query(
            "INSERT INTO overrides (id, tenant, namespace, identifier, amount, duration_ms, created_ms, \
             updated_ms) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7) ON CONFLICT (tenant, namespace, identifier) \
             DO UPDATE SET amount = excluded.amount, duration_ms = excluded.duration_ms, updated_ms = \
             excluded.updated_ms RETURNING id",
        );
        let row = query
            .bind(new.id.as_str())
            .bind(tenant)
            .bind(new.namespace.as_str())
            .bind(new.identifier.as_str())
            .bind(i64::from(new.limit))
            .bind(signed(new.duration_ms))
            .bind(signed(now_ms))
            .fetch_one(&mut self.connection)
            .await?;
        Ok(row.try_get("id")?)
    }

    /// Deletes the override with this pattern. Returns whether there was one.
    pub async fn delete(
        &mut self,
        tenant: &str,
        namespace: &str,
        pattern: &str,
    ) -> Result<bool, OverrideStoreError> {
        let query =
            sqlx::query("DELETE FROM overrides WHERE tenant = ?1 AND namespace = ?2 AND identifier = ?3");
        let done = query.bind(tenant).bind(namespace).bind(pattern).execute(&mut self.connection).await?;
        Ok(done.rows_affected() > 0)
    }

    /// Closes the store, and leaves the file as small as possible. A store that is not closed loses
    /// nothing.
    pub async fn close(self) -> Result<(), OverrideStoreError> {
        Ok(self.connection.close().await?)
    }
}

impl OverrideStoreError {
    /// Adds the name of the file that another process holds, or that cannot be opened.
    fn naming(self, file: PathBuf) -> Self {
        let database = match &self {
            Self::Database(error) | Self::Schema(sqlx::migrate::MigrateError::Execute(error)) => {
                error.as_database_error()
            }
            _ => None,
        };
        let code = database.and_then(|error| error.code()?.parse::<i32>().ok());
        // The low byte is the primary code.
        match self {
            _ if code.is_some_and(|code| code & 0xff == SQLITE_BUSY) => Self::InUse(file),
            Self::Database(error) => Self::Unusable(file, error),
            other => other,
        }
    }
}

fn migrator() -> Migrator {
    let migration = |(version, description, sql): &(i64, &'static str, &'static str)| {
        Migration::new(*version, (*description).into(), MigrationType::Simple, (*sql).into_sql_str(), false)
    };
    Migrator::with_migrations(MIGRATIONS.iter().map(migration).collect())
}

fn read(row: &SqliteRow) -> Result<Override, OverrideStoreError> {
    let id: String = row.try_get("id")?;
    let (limit, duration_ms): (i64, i64) = (row.try_get("amount")?, row.try_get("duration_ms")?);
    let (Ok(limit), Ok(duration_ms)) = (u32::try_from(limit), u64::try_from(duration_ms)) else {
        return Err(OverrideStoreError::Row(id));
    };
    Ok(Override {
        id,
        namespace: row.try_get("namespace")?,
        identifier: Pattern::new(row.try_get::<String, _>("identifier")?),
        limit,
        duration_ms,
    })
}

/// Converts to `SQLite`'s signed integers. Stored values are far below the maximum.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pattern: &str, limit: u32) -> Override {
        Override {
            id: format!("ovr_{pattern}_{limit}"),
            namespace: "n".to_owned(),
            identifier: Pattern::new(pattern),
            limit,
            duration_ms: 1_000,
        }
    }

    #[tokio::test]
    async fn stored_overrides_are_loaded_after_reopening() {
        let folder = tempfile::tempdir().expect("a folder");
        let inner = folder.path().join("made");
        let mut store = OverrideStore::open(Some(&inner)).await.expect("opens");
        assert_eq!(store.set("t", &of("b*", 1), 5).await.expect("sets"), "ovr_b*_1");
        assert_eq!(store.set("t", &of("b*", 2), 6).await.expect("replaces"), "ovr_b*_1");
        store.set("u", &of("a", u32::MAX), 7).await.expect("sets");
        // As after a crash: the store is not closed.
        drop(store);
        let mut store = OverrideStore::open(Some(&inner)).await.expect("opens again");
        let mut all = store.load().await.expect("loads");
        all.sort_by(|a, b| a.0.cmp(&b.0));
        let kept = Override { id: "ovr_b*_1".to_owned(), ..of("b*", 2) };
        assert_eq!(all, [("t".to_owned(), kept), ("u".to_owned(), of("a", u32::MAX))]);
    }

    #[tokio::test]
    async fn a_second_server_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = OverrideStore::open(Some(folder.path())).await.expect("opens");
        let second = OverrideStore::open(Some(folder.path())).await.expect_err("in use");
        let (named, second) = (folder.path().display(), second.to_string());
        assert!(second.starts_with(&format!("data_dir: {named} is in use by another server")), "{second}");
        assert!(second.ends_with("--data-dir DIR"), "{second}");
        first.close().await.expect("closes");
        OverrideStore::open(Some(folder.path())).await.expect("free again");
    }

    #[tokio::test]
    async fn delete_returns_whether_the_override_existed() {
        let mut store = OverrideStore::open(None).await.expect("in memory");
        store.set("t", &of("a", 1), 1).await.expect("sets");
        assert!(!store.delete("u", "n", "a").await.expect("another tenant's"));
        assert!(store.delete("t", "n", "a").await.expect("deletes"));
        assert!(!store.delete("t", "n", "a").await.expect("nothing there"));
        assert_eq!(store.load().await.expect("loads"), []);
    }
}
