//! The rule store: the rules, the history of their changes, and the actors. `SQLite` or
//! `PostgreSQL`, one schema.
//!
//! Every change locks the heads first, so changes happen one after the other. Each commits in one
//! transaction with its audit entries and its raised revision. Reads never wait for changes.

mod address;
mod alarms;
mod author_changes;
mod changes;
mod credentials;
mod database;
mod emergencies;
mod overrides;
mod proof;
mod replay;
mod rollback;
mod rows;
mod trail;
mod transaction;
mod watch;
mod write_transaction;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use address::{Address, InvalidAddress};
pub use alarms::AlarmSubject;
pub use author_changes::{AUTHOR_CHANGES_MAX, AuthorChanges, EarlierRow};
pub use changes::{HISTORY_MAX, WAITING_MAX};
pub use credentials::{CREDENTIALS_MAX, CREDENTIALS_PAGE_MAX, Credential};
pub use emergencies::{EMERGENCY_MS_MAX, in_emergency};
pub use overrides::{OverrideLimit, OverrideOutcome, OverrideQuota, OverrideWrite};
pub use rollback::Rollback;
pub use trail::AUDIT_PAGE_MAX;
pub use watch::{CHANNEL, Signal, Watch};

use crate::audit::{Alterations, ChainBreak};
use crate::change::{ChangeNeeds, ChangeState, InvalidInput, kind_name};
use crate::emergency::EMERGENCIES_MAX;
use crate::rows::{RowKind, RuleRows};
use address::StoreLocation;
use database::Database;

/// The store of rules. Copies of it share its connections.
#[derive(Clone, Debug)]
pub struct Store {
    address: Address,
    database: Database,
    /// The same store, on connections that each call uses briefly. Emergencies and reads of the
    /// revisions do not wait for calls that load all rows.
    urgent: Database,
    /// Notifies the watchers in this process of a commit.
    committed: Arc<tokio::sync::watch::Sender<()>>,
}

/// Actor and time of an action.
#[derive(Clone, Copy, Debug)]
pub struct Attribution<'a> {
    /// Actor, as named in the audit.
    pub by: &'a str,
    /// When, in milliseconds since the Unix epoch.
    pub now_ms: u64,
}

/// Revisions of a store. Every change of the named rows raises its revision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreRevisions {
    /// Of templates, rules and overrides.
    pub revision: u64,
    /// Of emergencies.
    pub emergency_revision: u64,
    /// Of credentials.
    pub credential_revision: u64,
    /// Of namespace overrides, as far as clients set them.
    pub override_revision: u64,
}

/// Conditions under which a change is applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ApplyConditions {
    /// Whether the caller has confirmed the effect of the change.
    pub confirmed: bool,
    /// Revisions of the rules that it was compiled with, if it was. With other rules, the change
    /// may be invalid.
    pub checked: Option<CheckedRevision>,
}

impl From<bool> for ApplyConditions {
    fn from(confirmed: bool) -> Self {
        Self { confirmed, checked: None }
    }
}

/// Revisions of the rules that a change was checked against.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckedRevision {
    /// Of its rows.
    pub revision: u64,
    /// Of its emergencies.
    pub emergency_revision: u64,
}

impl From<&RuleRows> for CheckedRevision {
    fn from(rule_rows: &RuleRows) -> Self {
        Self { revision: rule_rows.revision, emergency_revision: rule_rows.emergency_revision }
    }
}

/// A row that changed after the revision that a change was made for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowConflict {
    /// Kind of the row.
    pub kind: RowKind,
    /// Its name.
    pub name: String,
    /// The revision that changed it last.
    pub revision: u64,
}

/// Reason why a call to the store failed. The call had no effect; after a lost connection, its
/// outcome is unknown.
#[derive(Debug)]
pub enum StoreError {
    /// There is no way to it.
    Unreachable(String),
    /// Another server uses the same data folder.
    InUse(PathBuf),
    /// Others were changing it all the while.
    Busy,
    /// It was made by a later version, or its schema was changed by hand.
    Schema(sqlx::migrate::MigrateError),
    /// It holds data that this version does not write.
    Foreign(String),
    /// The audit does not hold.
    Audit(ChainBreak),
    /// The audit holds, but parts of the store are not as it has them.
    Altered(Alterations),
    /// The database failed.
    Database(sqlx::Error),
    /// The input is invalid.
    Invalid(InvalidInput),
    /// The named item does not exist.
    NotThere(String),
    /// Rows changed in the meantime.
    Conflict(Vec<RowConflict>),
    /// Rows that are to be deleted do not exist.
    Missing(Vec<(RowKind, String)>),
    /// Rules that are to be deleted, each with an emergency that is about it.
    InEmergency(Vec<(String, String)>),
    /// There are as many emergencies as may be.
    TooManyEmergencies,
    /// There are as many credentials as may be.
    TooManyCredentials,
    /// A tenant would have more namespace overrides than may be.
    TooManyOverrides(OverrideQuota),
    /// As many changes wait for an approver as may.
    TooManyWaiting,
    /// The rules have changed since the change was checked.
    Moved {
        /// Against which it was checked.
        checked: CheckedRevision,
        /// The latest.
        now: CheckedRevision,
    },
    /// The change was made for a revision that is yet to come.
    Ahead {
        /// For which it was made.
        base_revision: u64,
        /// The latest.
        revision: u64,
    },
    /// The change lacks a required confirmation or approval.
    Needs(u64, ChangeNeeds),
    /// Its author cannot be its approver.
    OwnApproval(u64),
    /// The credentials of the author and of the approver are related by their makers.
    RelatedApproval(u64),
    /// The approver's credential was made after the change was proposed.
    LaterApproval(u64),
    /// The change is in a state in which this cannot be done.
    State(u64, ChangeState),
    /// All rows are already in the state to restore.
    NothingToRestore,
}

fn conflict_text(row: &RowConflict) -> String {
    format!("{} {:?} (revision {})", kind_name(row.kind), row.name, row.revision)
}

fn row_text((kind, name): &(RowKind, String)) -> String {
    format!("{} {name:?}", kind_name(*kind))
}

fn emergency_text((rule, id): &(String, String)) -> String {
    format!("rule {rule:?} (emergency {id:?})")
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unreachable(why) => write!(f, "rules: the store cannot be reached: {why}"),
            Self::InUse(folder) => write!(
                f,
                "data_dir: {} is in use by another server: start this one with a folder of its own, \
                 --data-dir DIR",
                folder.display()
            ),
            Self::Busy => f.write_str("rules: the store is busy with other changes: try again"),
            Self::Schema(error) => write!(f, "rules: the store's schema: {error}"),
            Self::Foreign(object) => {
                write!(
                    f,
                    "rules: the store contains {object}, which this version does not support: upgrade this \
                     node"
                )
            }
            Self::Audit(found) => found.fmt(f),
            Self::Altered(found) => found.fmt(f),
            Self::Database(error) => write!(f, "rules: the store failed: {error}"),
            Self::Invalid(problem) => problem.fmt(f),
            Self::NotThere(object) => write!(f, "there is no {object}"),
            Self::Conflict(rows) => write!(
                f,
                "conflict: changed in the meantime: {}; plan the change again, and send its `base_revision`",
                listed(rows, conflict_text)
            ),
            Self::Missing(rows) => {
                write!(f, "cannot delete rows that do not exist: {}", listed(rows, row_text))
            }
            Self::TooManyEmergencies => {
                write!(f, "emergencies: the maximum of {EMERGENCIES_MAX} is reached: end one")
            }
            Self::TooManyCredentials => {
                write!(f, "credentials: the maximum of {CREDENTIALS_MAX} is reached: revoke one")
            }
            Self::TooManyOverrides(quota) => quota.fmt(f),
            Self::TooManyWaiting => write!(
                f,
                "changes: the maximum of {WAITING_MAX} waiting changes is reached: approve or reject one"
            ),
            Self::InEmergency(rules) => write!(
                f,
                "cannot delete rules with an active emergency, end it first: {}",
                listed(rules, emergency_text)
            ),
            Self::Moved { checked, now } => write!(
                f,
                "conflict: planned against revision {} (emergencies {}), but the latest is {} (emergencies \
                 {}): plan the change again",
                checked.revision, checked.emergency_revision, now.revision, now.emergency_revision
            ),
            Self::Ahead { base_revision, revision } => {
                write!(
                    f,
                    "base_revision: {base_revision} is outside 0 to {revision}, the latest revision; plan \
                     the change again, and send its `base_revision`"
                )
            }
            Self::Needs(id, ChangeNeeds::Approver) => {
                write!(f, "change {id} needs the approval of another person than its author")
            }
            Self::Needs(id, needs) => write!(f, "change {id} needs a {needs}"),
            Self::OwnApproval(id) => write!(f, "change {id} cannot be approved by its author"),
            Self::RelatedApproval(id) => write!(
                f,
                "change {id} cannot be approved by this actor: the credentials of approver and author are \
                 related, by one maker or one of the other"
            ),
            Self::LaterApproval(id) => {
                write!(
                    f,
                    "change {id} cannot be approved with a credential that was made after it was proposed"
                )
            }
            Self::State(id, state) => write!(f, "change {id} is {state}"),
            Self::NothingToRestore => f.write_str("nothing to roll back: every row is unchanged"),
        }
    }
}

/// How many rows an error names. More: longer messages.
const NAMED_MAX: usize = 10;

fn listed<T>(rows: &[T], name: impl Fn(&T) -> String) -> String {
    let mut names: Vec<String> = rows.iter().take(NAMED_MAX).map(name).collect();
    if rows.len() > NAMED_MAX {
        names.push(format!("and {} more", rows.len() - NAMED_MAX));
    }
    names.join(", ")
}

impl std::error::Error for StoreError {}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        match (error, code.as_deref()) {
            (_, Some(code)) if is_busy(code) => Self::Busy,
            (error, Some(code)) if is_unreachable(code) => Self::Unreachable(error.to_string()),
            (sqlx::Error::Io(error), _) => Self::Unreachable(error.to_string()),
            (sqlx::Error::PoolTimedOut, _) => Self::Busy,
            (error, _) => Self::Database(error),
        }
    }
}

/// `PostgreSQL`'s states have five characters; `SQLite`'s codes are smaller numbers.
const STATE_CHARACTERS: usize = 5;

/// Whether another writer holds the lock.
fn is_busy(code: &str) -> bool {
    /// Of `SQLite`, the low byte: the file is locked.
    const SQLITE_BUSY: u32 = 5;
    /// Of `PostgreSQL`: a lock was not to be had in time.
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    if code.len() < STATE_CHARACTERS {
        return code.parse::<u32>().is_ok_and(|code| code & 0xff == SQLITE_BUSY);
    }
    code == LOCK_NOT_AVAILABLE
}

/// Whether a `PostgreSQL` server lost or refuses connections: it starts, stops, or crashed.
fn is_unreachable(code: &str) -> bool {
    code.len() == STATE_CHARACTERS && (code.starts_with("08") || code.starts_with("57P"))
}

impl From<InvalidInput> for StoreError {
    fn from(problem: InvalidInput) -> Self {
        Self::Invalid(problem)
    }
}

impl From<serde_json::Error> for StoreError {
    fn from(error: serde_json::Error) -> Self {
        Self::Foreign(format!("text that is no JSON ({error})"))
    }
}

impl Store {
    /// Opens a store, and makes or upgrades its tables if need be.
    pub async fn open(address: &Address) -> Result<Self, StoreError> {
        let named = |error| match error {
            StoreError::Unreachable(why) => StoreError::Unreachable(format!("{address}: {why}")),
            StoreError::Database(error) => StoreError::Unreachable(format!("{address}: {error}")),
            other => other,
        };
        let database = Database::open(address).await.map_err(named)?;
        let urgent = database.beside(address).await.map_err(named)?;
        Ok(Self {
            address: address.clone(),
            database,
            urgent,
            committed: Arc::new(tokio::sync::watch::Sender::new(())),
        })
    }

    /// Opens the store that a server keeps in its data folder, for itself alone; without a folder,
    /// in memory.
    pub async fn open_embedded(folder: Option<&Path>) -> Result<Self, StoreError> {
        let Some(folder) = folder else {
            return Self::open(&Address(StoreLocation::Memory)).await;
        };
        Self::open(&Address(StoreLocation::Embedded(folder.to_owned()))).await.map_err(|error| match error {
            StoreError::Busy => StoreError::InUse(folder.to_owned()),
            other => other,
        })
    }

    /// Where it is.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Closes all connections. A store that is not closed loses nothing.
    pub async fn close(&self) {
        self.database.close().await;
        self.urgent.close().await;
    }
}

#[cfg(test)]
mod tests {
    use super::database::CONNECTIONS_MAX;
    use super::*;
    use crate::rows::EmergencyRow;

    #[tokio::test]
    async fn servers_that_start_at_once_make_one_new_store() {
        for _ in 0..20 {
            let folder = tempfile::tempdir().expect("a folder");
            let address = format!("sqlite:{}", folder.path().join("rules.db").display());
            let address: Address = address.parse().expect("an address");
            let opened: Vec<_> = (0..8)
                .map(|_| {
                    let address = address.clone();
                    tokio::spawn(async move { Store::open(&address).await })
                })
                .collect();
            for store in opened {
                store.await.expect("no panic").expect("opens");
            }
        }
    }

    #[tokio::test]
    async fn emergency_does_not_wait_for_readers() {
        let folder = tempfile::tempdir().expect("a folder");
        let address = format!("sqlite:{}", folder.path().join("rules.db").display());
        let store = Store::open(&address.parse().expect("an address")).await.expect("opens");
        let mut held = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            held.push(store.database.read().await.expect("a connection"));
        }
        let body = r#"{"action":"block"}"#.to_owned();
        let row = EmergencyRow { id: "stop".to_owned(), body, expires_ms: 2 };
        let act = Attribution { by: "ada", now_ms: 1 };
        assert_eq!(store.put_emergency(&row, act).await.expect("put"), 1);
        assert_eq!(store.revisions().await.expect("heads").emergency_revision, 1);
        assert_eq!(store.emergencies().await.expect("read"), (1, vec![row]));
        store.end_emergency("stop", act).await.expect("ended");
        drop(held);
    }
}
