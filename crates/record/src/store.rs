//! The store of blocks: `SQLite`, in its own file. A row per record would cost 14 µs of a core with
//! distinct keys, so at most 70,000 records a second. A row for hundreds of records keeps up with
//! all decisions.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::sqlite::{SqliteConnectOptions, SqliteConnection, SqliteJournalMode, SqliteSynchronous};
use sqlx::{ConnectOptions, Connection, Row, SqlSafeStr};

use crate::block::Block;
use crate::private_files;

/// The name of the file in the data folder.
const FILE_NAME: &str = "decisions.db";

/// How long a reader and the writer wait for each other, which they hardly ever do.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// Blocks are long: large pages keep them in few pieces.
const PAGE_BYTES: u32 = 16 << 10;

/// Bytes of a row besides its block.
const ROW_BYTES: u64 = 256;

/// Blocks that are forgotten in one go, when there are too many bytes.
const FORGET_AT_ONCE: i64 = 16;

/// Migrations of the schema, in order. Released ones never change.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "blocks", include_str!("../migrations/0001_blocks.sql")),
    (2, "settings", include_str!("../migrations/0002_settings.sql")),
    (3, "reasons", include_str!("../migrations/0003_reasons.sql")),
];

/// The reason why the log cannot be written or read.
#[derive(Debug)]
pub enum LogError {
    /// The folder cannot be made.
    Folder(PathBuf, std::io::Error),
    /// The file cannot be opened, or is not a decision log.
    Unusable(PathBuf, sqlx::Error),
    /// It was made by a later version, or its schema was changed by hand.
    Schema(sqlx::migrate::MigrateError),
    /// The database failed.
    Database(sqlx::Error),
    /// A block that this version cannot have written.
    Block(i64),
    /// There is no connection to the file after a failed write.
    Lost,
    /// The system gave no thread.
    Thread(std::io::Error),
}

impl fmt::Display for LogError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder, error) => write!(f, "data_dir: {}: {error}", folder.display()),
            Self::Unusable(file, error) => write!(f, "data_dir: {}: {error}", file.display()),
            Self::Schema(error) => write!(f, "data_dir: {FILE_NAME}: {error}"),
            Self::Database(error) => write!(f, "decision log: {error}"),
            Self::Lost => f.write_str("decision log: no connection to the file after a failed write"),
            Self::Block(id) => write!(f, "decision log: the block {id} is damaged"),
            Self::Thread(error) => write!(f, "the thread of the decision log: {error}"),
        }
    }
}

impl std::error::Error for LogError {}

impl From<sqlx::Error> for LogError {
    fn from(error: sqlx::Error) -> Self {
        Self::Database(error)
    }
}

/// Maximum age and size of the stored records.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retention {
    pub(crate) time: Duration,
    pub(crate) bytes_max: u64,
}

/// Region, node and sample rate of the writer, the same for all records of a block.
#[derive(Clone, Debug)]
pub(crate) struct BlockOrigin {
    pub(crate) region: String,
    pub(crate) node: String,
    pub(crate) sample_rate: f64,
}

/// The store, opened for writing.
#[derive(Debug)]
pub(crate) struct Store {
    folder: PathBuf,
    /// `None` after a failed write, until the next one. The failed transaction may not have ended,
    /// and writes within it would never be committed.
    connection: Option<SqliteConnection>,
    writer: BlockOrigin,
    next_id: i64,
    bytes: u64,
    /// The block that is written again with more in it, and how many bytes it has now.
    open: (i64, u64),
}

impl Store {
    /// Opens the store in `folder`, which is made if need be.
    pub(crate) async fn open(folder: &Path, writer: BlockOrigin) -> Result<Self, LogError> {
        private_files::create_folder(folder)
            .and_then(|()| private_files::create_if_missing(&folder.join(FILE_NAME)))
            .map_err(|error| LogError::Folder(folder.to_owned(), error))?;
        let mut connection = connect_to_write(folder).await?;
        migrator().run(&mut connection).await.map_err(LogError::Schema)?;
        let (next_id, bytes) = end_of(&mut connection).await?;
        let folder = folder.to_owned();
        Ok(Self { folder, connection: Some(connection), writer, next_id, bytes, open: (0, 0) })
    }

    /// Writes blocks, all or none. With `first_is_open`, the first replaces the open block. The
    /// last stays open. After an error, the open block must not be written again.
    pub(crate) async fn write(&mut self, blocks: &mut [Block], first_is_open: bool) -> Result<(), LogError> {
        let written = self.try_write(blocks, first_is_open).await;
        self.keep_connection_after(written).await
    }

    async fn try_write(&mut self, blocks: &mut [Block], first_is_open: bool) -> Result<(), LogError> {
        self.connect().await?;
        let Self { connection: Some(connection), writer, next_id, bytes, open, .. } = self else {
            return Err(LogError::Lost);
        };
        let (mut new_next_id, mut new_bytes, mut new_open) = (*next_id, *bytes, *open);
        let mut transaction = connection.begin().await?;
        for (at, block) in blocks.iter_mut().enumerate() {
            let (terms, body) = (block.packed_terms(), block.packed_records());
            let size = (terms.len() + body.len()) as u64 + ROW_BYTES;
            if at == 0 && first_is_open {
                new_bytes = new_bytes.saturating_sub(new_open.1);
            } else {
                new_open.0 = new_next_id;
                new_next_id += 1;
            }
            new_open.1 = size;
            new_bytes += size;
            sqlx::query("INSERT OR REPLACE INTO blocks VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)")
                .bind(new_open.0)
                .bind(signed(block.from_ms))
                .bind(signed(block.to_ms))
                .bind(signed(block.records()))
                .bind(signed(size))
                .bind(writer.region.as_str())
                .bind(writer.node.as_str())
                .bind(writer.sample_rate)
                .bind(terms)
                .bind(body)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        (*next_id, *bytes, *open) = (new_next_id, new_bytes, new_open);
        Ok(())
    }

    /// Writes something that changes no record, to find whether the store takes writes again.
    pub(crate) async fn write_nothing(&mut self) -> Result<(), LogError> {
        let written = match self.connect().await {
            Ok(connection) => sqlx::query("PRAGMA user_version = 0").execute(connection).await.map(drop),
            Err(error) => return Err(error),
        };
        self.keep_connection_after(written.map_err(LogError::from)).await
    }

    /// Connects again after a failed write. The outcome of its commit is unknown, so the ids and
    /// sizes are read again.
    async fn connect(&mut self) -> Result<&mut SqliteConnection, LogError> {
        if self.connection.is_none() {
            let mut connection = connect_to_write(&self.folder).await?;
            (self.next_id, self.bytes) = end_of(&mut connection).await?;
            self.connection = Some(connection);
        }
        self.connection.as_mut().ok_or(LogError::Lost)
    }

    /// Closes the connection after a failed write.
    async fn keep_connection_after<T>(&mut self, written: Result<T, LogError>) -> Result<T, LogError> {
        if written.is_err()
            && let Some(connection) = self.connection.take()
        {
            // Its locks must be gone before the next one opens. Its own error adds nothing.
            let _ = connection.close().await;
        }
        written
    }

    /// Forgets the oldest blocks while there are too many bytes, but for the last one.
    pub(crate) async fn forget_bytes(&mut self, retention: Retention) -> Result<(), LogError> {
        while self.bytes > retention.bytes_max {
            let oldest = sqlx::query(
                "DELETE FROM blocks WHERE id IN (SELECT id FROM blocks WHERE id < ?1 ORDER BY id LIMIT ?2) \
                 RETURNING bytes",
            );
            if self.forget(oldest.bind(self.open.0).bind(FORGET_AT_ONCE)).await? == 0 {
                break;
            }
        }
        Ok(())
    }

    /// Forgets blocks that are too old.
    pub(crate) async fn forget_time(&mut self, retention: Retention, now_ms: u64) -> Result<(), LogError> {
        let kept_ms = u64::try_from(retention.time.as_millis()).unwrap_or(u64::MAX);
        let old = sqlx::query("DELETE FROM blocks WHERE to_ms < ?1 AND id <> ?2 RETURNING bytes");
        self.forget(old.bind(signed(now_ms.saturating_sub(kept_ms))).bind(self.open.0)).await?;
        Ok(())
    }

    /// Runs a query that deletes rows and returns their bytes. Returns the number of rows.
    async fn forget(
        &mut self,
        query: sqlx::query::Query<'_, sqlx::Sqlite, sqlx::sqlite::SqliteArguments>,
    ) -> Result<usize, LogError> {
        let rows = match self.connect().await {
            // Reads to the end: an error of the commit comes after the rows.
            Ok(connection) => query.fetch_all(connection).await.map_err(LogError::from),
            Err(error) => Err(error),
        };
        let rows = self.keep_connection_after(rows).await?;
        for row in &rows {
            self.bytes = self.bytes.saturating_sub(unsigned(row.try_get(0)?));
        }
        Ok(rows.len())
    }

    pub(crate) async fn close(self) -> Result<(), LogError> {
        match self.connection {
            Some(connection) => Ok(connection.close().await?),
            None => Ok(()),
        }
    }
}

/// Opens the file for writing.
async fn connect_to_write(folder: &Path) -> Result<SqliteConnection, LogError> {
    let options = options(folder)
        .create_if_missing(true)
        .page_size(PAGE_BYTES)
        .journal_mode(SqliteJournalMode::Wal)
        // A power failure may lose the last writes; a crash of the server loses none.
        .synchronous(SqliteSynchronous::Normal);
    connect(folder, options).await
}

/// The id of the next block, and the bytes of all blocks.
async fn end_of(connection: &mut SqliteConnection) -> Result<(i64, u64), LogError> {
    let sums = sqlx::query("SELECT coalesce(max(id), 0), coalesce(sum(bytes), 0) FROM blocks");
    let row = sums.fetch_one(connection).await?;
    let (last_id, bytes): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
    Ok((last_id + 1, unsigned(bytes)))
}

/// Opens the store in `folder` for reading, beside the writer.
pub(crate) async fn open_to_read(folder: &Path) -> Result<SqliteConnection, LogError> {
    connect(folder, options(folder).read_only(true)).await
}

fn options(folder: &Path) -> SqliteConnectOptions {
    SqliteConnectOptions::new()
        .filename(folder.join(FILE_NAME))
        .busy_timeout(BUSY_TIMEOUT)
        .disable_statement_logging()
}

async fn connect(folder: &Path, options: SqliteConnectOptions) -> Result<SqliteConnection, LogError> {
    options.connect().await.map_err(|error| LogError::Unusable(folder.join(FILE_NAME), error))
}

fn migrator() -> Migrator {
    let migration = |(version, description, sql): &(i64, &'static str, &'static str)| {
        Migration::new(*version, (*description).into(), MigrationType::Simple, (*sql).into_sql_str(), false)
    };
    Migrator::with_migrations(MIGRATIONS.iter().map(migration).collect())
}

/// Converts to the signed integers of `SQLite`. Times and sizes are far below the maximum; larger
/// values become the maximum.
pub(crate) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

pub(crate) fn unsigned(value: i64) -> u64 {
    u64::try_from(value).unwrap_or_default()
}
