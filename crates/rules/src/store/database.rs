//! `SQLite` and `PostgreSQL` behind one face: the same statements, with `$1` for the first value,
//! on either.

use std::fmt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use sqlx::migrate::{Migration, MigrationType, Migrator};
use sqlx::postgres::{PgConnectOptions, PgConnection, PgPool, PgPoolOptions, PgRow};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqliteLockingMode, SqlitePool, SqlitePoolOptions, SqliteRow,
    SqliteSynchronous,
};
use sqlx::{ConnectOptions as _, Connection as _, Error, Row as _, SqlSafeStr as _};

use super::StoreError;
use super::address::{Address, StoreLocation};
use super::transaction::{Access, PooledConnection, Transaction, WriteHealth};
use crate::private_files;

/// Maximum wait for a connection, and for other changes to end. Longer: tolerates a busy or
/// restarting store, but reports an unreachable store later.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(5);

/// Timeout of one statement, with all its results. Longer: loads larger rule sets from slower
/// stores, but reports a hanging store later.
const STATEMENT_TIME_MAX: Duration = Duration::from_mins(1);

/// Maximum wait for the embedded store while a server that is being replaced still holds it.
/// Longer: the start tolerates a slower predecessor, but reports a real conflict later.
const EMBEDDED_WAIT_MAX: Duration = Duration::from_secs(2);

/// The file of the embedded store in the data folder.
const EMBEDDED_FILE: &str = "tidegate.db";

/// Connections of one process, besides the listening and the urgent ones. More: more concurrent
/// calls, but the store still applies changes one by one.
pub(super) const CONNECTIONS_MAX: u32 = 4;

/// Connections for urgent calls: one to change emergencies, one to read the revisions.
const URGENT_CONNECTIONS_MAX: u32 = 2;

/// Maximum time for which the transaction of a hanging process can block all changes.
const IDLE_TRANSACTION_MAX: &str = "30s";

/// How many rows `SQLite`'s thread reads ahead. More: fewer handovers between threads, more memory.
const ROWS_AHEAD: usize = 1_024;

/// Table of applied migrations. It has its own name, so that several products may share a database.
const MIGRATIONS_TABLE: &str = "tidegate_migrations";

/// Schema migrations, in order. Released migrations never change.
const MIGRATIONS: &[(i64, &str, &str)] = &[
    (1, "rules", include_str!("../../migrations/control/0001_rules.sql")),
    (2, "makers", include_str!("../../migrations/control/0002_makers.sql")),
    (3, "waiting", include_str!("../../migrations/control/0003_waiting.sql")),
    (4, "namespaces", include_str!("../../migrations/control/0004_namespaces.sql")),
    (5, "related", include_str!("../../migrations/control/0005_related.sql")),
];

/// Attempts to migrate a file. Higher: more servers may start on a new store at once; a store that
/// cannot be migrated is reported later.
const MIGRATION_ATTEMPTS_MAX: u32 = 100;

/// Pause before another attempt. A migration takes a few milliseconds.
const MIGRATION_PAUSE: Duration = Duration::from_millis(20);

/// A parameter of a statement.
#[derive(Clone, Copy, Debug)]
pub(super) enum Value<'a> {
    Number(u64),
    OptionalNumber(Option<u64>),
    Text(&'a str),
    OptionalText(Option<&'a str>),
}

/// A row that a statement found.
pub(super) enum Cells<'r> {
    Sqlite(&'r SqliteRow),
    Postgres(&'r PgRow),
}

#[derive(Clone)]
pub(super) struct Database {
    pool: Pool,
    /// Shared by all connections to the store.
    health: Arc<WriteHealth>,
}

#[derive(Clone)]
enum Pool {
    /// `SQLite` in memory, which ends with its only connection.
    Memory(SqlitePool),
    Sqlite(SqlitePool),
    Postgres(PgPool),
}

impl Database {
    pub(super) async fn open(address: &Address) -> Result<Self, StoreError> {
        let pool = match &address.0 {
            StoreLocation::Memory => Pool::Memory(memory().await?),
            StoreLocation::File(file) => Pool::Sqlite(file_pool(file, CONNECTIONS_MAX).await?),
            StoreLocation::Embedded(folder) => Pool::Sqlite(embedded(folder).await?),
            StoreLocation::Postgres(options) => Pool::Postgres(postgres_pool(options, CONNECTIONS_MAX)),
        };
        let database = Self { pool, health: Arc::default() };
        database.migrate().await?;
        Ok(database)
    }

    /// The same by other connections. Of a memory, and of an embedded store, there is one, which
    /// all share.
    pub(super) async fn beside(&self, address: &Address) -> Result<Self, StoreError> {
        let pool = match &address.0 {
            StoreLocation::Memory | StoreLocation::Embedded(_) => self.pool.clone(),
            StoreLocation::File(file) => Pool::Sqlite(file_pool(file, URGENT_CONNECTIONS_MAX).await?),
            StoreLocation::Postgres(options) => {
                Pool::Postgres(postgres_pool(options, URGENT_CONNECTIONS_MAX))
            }
        };
        Ok(Self { pool, health: Arc::clone(&self.health) })
    }

    /// Whether the last write to the store failed, and for which reason.
    pub(super) fn health(&self) -> &WriteHealth {
        &self.health
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        let migrator = migrator();
        let mut done = self.run_migrations(&migrator).await;
        // `SQLite` has no lock around all migrations. Of several servers that start on a new store,
        // one may find it locked, or a table that another has just made. A later attempt finds the
        // table recorded.
        for _ in 1..MIGRATION_ATTEMPTS_MAX {
            if done.is_ok() || matches!(self.pool, Pool::Postgres(_)) {
                break;
            }
            pause().await;
            done = self.run_migrations(&migrator).await;
        }
        match done {
            Err(sqlx::migrate::MigrateError::Execute(error)) => Err(self.explain(error).await),
            done => done.map_err(StoreError::Schema),
        }
    }

    async fn run_migrations(&self, migrator: &Migrator) -> Result<(), sqlx::migrate::MigrateError> {
        match &self.pool {
            Pool::Memory(pool) | Pool::Sqlite(pool) => migrator.run(pool).await,
            Pool::Postgres(pool) => migrator.run(pool).await,
        }
    }

    /// Begins to read: all that is read is of one moment.
    pub(super) async fn read(&self) -> Result<Transaction, StoreError> {
        let begin = match &self.pool {
            Pool::Memory(_) | Pool::Sqlite(_) => "BEGIN",
            Pool::Postgres(_) => "BEGIN ISOLATION LEVEL REPEATABLE READ, READ ONLY",
        };
        Transaction::begin(self.connection().await?, begin, Access::Read).await
    }

    /// Begins to write. The first statement must lock the heads.
    pub(super) async fn write(&self) -> Result<Transaction, StoreError> {
        let begin = match &self.pool {
            // A lock taken only at the first write would be refused if another connection wrote in
            // between.
            Pool::Memory(_) | Pool::Sqlite(_) => "BEGIN IMMEDIATE",
            Pool::Postgres(_) => "BEGIN ISOLATION LEVEL READ COMMITTED",
        };
        let connection = self.connection().await.inspect_err(|error| self.health.note_error(error))?;
        Transaction::begin(connection, begin, Access::Write(Arc::clone(&self.health))).await
    }

    async fn connection(&self) -> Result<PooledConnection, StoreError> {
        let connected = Box::pin(async {
            match &self.pool {
                Pool::Memory(pool) => pool.acquire().await.map(PooledConnection::Memory),
                Pool::Sqlite(pool) => pool.acquire().await.map(PooledConnection::Sqlite),
                Pool::Postgres(pool) => pool.acquire().await.map(PooledConnection::Postgres),
            }
        });
        let explained = async {
            match connected.await {
                Ok(connection) => Ok(connection),
                Err(error) => Err(self.explain(error).await),
            }
        };
        in_time(explained).await
    }

    /// A pool reports only that it got no connection. This connects once more to find the reason.
    pub(super) async fn explain(&self, error: Error) -> StoreError {
        let (Error::PoolTimedOut, Pool::Postgres(pool)) = (&error, &self.pool) else { return error.into() };
        let options = pool.connect_options();
        let reason = match tokio::time::timeout(WAIT_MAX, PgConnection::connect_with(&options)).await {
            Ok(Err(reason)) => reason.to_string(),
            Ok(Ok(_)) => "all connections to the store are in use".to_owned(),
            Err(_) => "it does not answer".to_owned(),
        };
        StoreError::Unreachable(format!("{reason}, tried for {} s", WAIT_MAX.as_secs()))
    }

    pub(super) async fn close(&self) {
        match &self.pool {
            Pool::Memory(pool) | Pool::Sqlite(pool) => pool.close().await,
            Pool::Postgres(pool) => pool.close().await,
        }
    }
}

/// Connections are made when they are needed.
pub(super) fn postgres_pool(options: &PgConnectOptions, connections_max: u32) -> PgPool {
    let lock_timeout = format!("{}s", WAIT_MAX.as_secs());
    let options = options
        .clone()
        .options([
            ("lock_timeout", lock_timeout.as_str()),
            ("idle_in_transaction_session_timeout", IDLE_TRANSACTION_MAX),
        ])
        .disable_statement_logging();
    PgPoolOptions::new().max_connections(connections_max).acquire_timeout(WAIT_MAX).connect_lazy_with(options)
}

async fn file_pool(file: &Path, connections_max: u32) -> Result<SqlitePool, Error> {
    private_files::create_if_missing(file)?;
    let options = SqliteConnectOptions::new()
        .filename(file)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        // An acknowledged write survives a power failure.
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(connections_max).acquire_timeout(WAIT_MAX);
    pool.connect_with(sqlite_options(options)).await
}

/// Opens one permanent connection, which locks the file: a second server is refused.
async fn embedded(folder: &Path) -> Result<SqlitePool, Error> {
    let file = folder.join(EMBEDDED_FILE);
    private_files::create_folder(folder)?;
    private_files::create_if_missing(&file)?;
    let options = SqliteConnectOptions::new()
        .filename(&file)
        .create_if_missing(true)
        .locking_mode(SqliteLockingMode::Exclusive)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Full);
    let pool = SqlitePoolOptions::new().max_connections(1).acquire_timeout(WAIT_MAX);
    let pool = pool.idle_timeout(None).max_lifetime(None);
    pool.connect_with(sqlite_options(options).busy_timeout(EMBEDDED_WAIT_MAX)).await
}

/// Opens one permanent connection, because each connection to memory has its own database.
async fn memory() -> Result<SqlitePool, Error> {
    let pool = SqlitePoolOptions::new().max_connections(1).acquire_timeout(WAIT_MAX);
    let pool = pool.idle_timeout(None).max_lifetime(None);
    pool.connect_with(sqlite_options(SqliteConnectOptions::new().in_memory(true))).await
}

fn sqlite_options(options: SqliteConnectOptions) -> SqliteConnectOptions {
    options.busy_timeout(WAIT_MAX).row_buffer_size(ROWS_AHEAD).disable_statement_logging()
}

#[expect(clippy::disallowed_methods, reason = "no event tells that another server has migrated the file")]
async fn pause() {
    tokio::time::sleep(MIGRATION_PAUSE).await;
}

fn migrator() -> Migrator {
    let migration = |(version, description, sql): &(i64, &'static str, &'static str)| {
        Migration::new(*version, (*description).into(), MigrationType::Simple, (*sql).into_sql_str(), false)
    };
    let mut migrator = Migrator::with_migrations(MIGRATIONS.iter().map(migration).collect());
    migrator.dangerous_set_table_name(MIGRATIONS_TABLE);
    migrator
}

/// Applies the timeout. The future is on the heap: it is large, and would be part of every future
/// that awaits it.
pub(super) fn in_time<T>(
    doing: impl Future<Output = Result<T, StoreError>>,
) -> impl Future<Output = Result<T, StoreError>> {
    let doing = tokio::time::timeout(STATEMENT_TIME_MAX, Box::pin(doing));
    async {
        doing.await.unwrap_or_else(|_| {
            let seconds = STATEMENT_TIME_MAX.as_secs();
            Err(StoreError::Unreachable(format!("it did not answer within {seconds} s")))
        })
    }
}

impl Cells<'_> {
    pub(super) fn number(&self, column: usize) -> Result<u64, StoreError> {
        let number: i64 = match self {
            Self::Sqlite(row) => row.try_get(column)?,
            Self::Postgres(row) => row.try_get(column)?,
        };
        unsigned(number)
    }

    pub(super) fn optional_number(&self, column: usize) -> Result<Option<u64>, StoreError> {
        let number: Option<i64> = match self {
            Self::Sqlite(row) => row.try_get(column)?,
            Self::Postgres(row) => row.try_get(column)?,
        };
        number.map(unsigned).transpose()
    }

    pub(super) fn text(&self, column: usize) -> Result<&str, StoreError> {
        let text = match self {
            Self::Sqlite(row) => row.try_get(column)?,
            Self::Postgres(row) => row.try_get(column)?,
        };
        Ok(text)
    }

    pub(super) fn owned(&self, column: usize) -> Result<String, StoreError> {
        self.text(column).map(str::to_owned)
    }

    pub(super) fn optional_text(&self, column: usize) -> Result<Option<String>, StoreError> {
        let text: Option<&str> = match self {
            Self::Sqlite(row) => row.try_get(column)?,
            Self::Postgres(row) => row.try_get(column)?,
        };
        Ok(text.map(str::to_owned))
    }
}

impl fmt::Debug for Database {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match &self.pool {
            Pool::Memory(_) => "Memory",
            Pool::Sqlite(_) => "Sqlite",
            Pool::Postgres(_) => "Postgres",
        })
    }
}

/// Converts to the databases' signed integers. Stored values are far below the maximum.
pub(super) fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn unsigned(value: i64) -> Result<u64, StoreError> {
    u64::try_from(value).map_err(|_| StoreError::Foreign(format!("the number {value}")))
}
