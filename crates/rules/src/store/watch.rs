//! Signals that a store may have changed: at once if the store sends notifications, and by polling
//! in any case.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPool};
use tidegate_core::Backoff;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::address::{Address, StoreLocation};
use super::database::postgres_pool;
use super::{Store, StoreError, StoreRevisions};

/// Notification channel of `PostgreSQL`. A message names the raised head and its new number, such
/// as `revision 7`.
pub const CHANNEL: &str = "tidegate_rules";

/// Polling interval of a file, because another process sends no notification. Shorter: its changes
/// are seen earlier, for one small read each time.
const LOOK_AT_FILE_EVERY: Duration = Duration::from_millis(250);

/// Polling interval of a server that sends notifications, because a connection may be dead
/// unnoticed. Shorter: changes are then seen earlier, for one small query of every process each
/// time.
const LOOK_AT_SERVER_EVERY: Duration = Duration::from_secs(5);

/// First wait after a lost connection, or before a retry of an unreachable store. Shorter: changes
/// are seen earlier after a restart of the store. Longer: fewer processes query a starting store at
/// once.
const RETRY_MIN: Duration = Duration::from_millis(100);
/// The longest such wait for a server.
const SERVER_RETRY_MAX: Duration = Duration::from_secs(10);
/// The longest such wait for a file, which only the processes of one machine read. Shorter: its
/// changes come into force earlier after its disk has room again.
const FILE_RETRY_MAX: Duration = Duration::from_secs(1);

/// A signal to a watcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signal {
    /// The store may have changed: compare the heads, and load the changed parts.
    MayHaveChanged,
    /// The same while the store takes no writes, with the reason. The watch retries a write, and
    /// signals a possible change once it succeeds.
    ReadOnly(String),
    /// The store is unreachable, with the reason. The watch retries, and signals a possible change
    /// once it succeeds.
    Lost(String),
}

/// Watches a store until it is dropped. Changes between two reads give one signal.
#[derive(Debug)]
pub struct Watch {
    signals: watch::Receiver<Signal>,
    looking: AbortHandle,
}

impl Watch {
    /// Waits for the next signal.
    pub async fn next(&mut self) -> Signal {
        if self.signals.changed().await.is_err() {
            // Only the end of the runtime ends the poller.
            std::future::pending::<()>().await;
        }
        self.signals.borrow_and_update().clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.looking.abort();
    }
}

impl Address {
    /// Returns the waits between attempts to reach the store. The seed spreads those of many
    /// processes.
    pub fn retries(&self, seed: u64) -> Backoff {
        let retry_max = match &self.0 {
            StoreLocation::Memory | StoreLocation::File(_) | StoreLocation::Embedded(_) => FILE_RETRY_MAX,
            StoreLocation::Postgres(_) => SERVER_RETRY_MAX,
        };
        Backoff::new(RETRY_MIN, retry_max, seed)
    }
}

impl Store {
    /// Starts a watch. A caller that loads the rules after this call misses no change. The seed
    /// spreads the retries of many processes.
    pub fn watch(&self, seed: u64) -> Watch {
        self.watch_looking(seed, None)
    }

    /// Starts a watch with a given polling interval, beside the notifications of the store.
    pub fn watch_looking(&self, seed: u64, look_every: Option<Duration>) -> Watch {
        let look_every = look_every.unwrap_or(match &self.address.0 {
            StoreLocation::Memory | StoreLocation::File(_) | StoreLocation::Embedded(_) => LOOK_AT_FILE_EVERY,
            StoreLocation::Postgres(_) => LOOK_AT_SERVER_EVERY,
        });
        let (sender, signals) = watch::channel(Signal::MayHaveChanged);
        let looker = StorePoller {
            store: self.clone(),
            committed: self.committed.subscribe(),
            sender,
            revisions: None,
            write_problem: None,
            look_every,
        };
        let looking = tokio::spawn(looker.run(self.address.retries(seed))).abort_handle();
        Watch { signals, looking }
    }
}

struct StorePoller {
    store: Store,
    committed: watch::Receiver<()>,
    sender: watch::Sender<Signal>,
    /// As they were last seen.
    revisions: Option<StoreRevisions>,
    /// Why the store takes no writes; `None` if it does.
    write_problem: Option<String>,
    look_every: Duration,
}

impl StorePoller {
    async fn run(mut self, mut backoff: Backoff) {
        loop {
            let problem = match &self.store.address.0 {
                StoreLocation::Memory | StoreLocation::File(_) | StoreLocation::Embedded(_) => {
                    self.look_at_file(&mut backoff).await
                }
                StoreLocation::Postgres(options) => {
                    let pool = postgres_pool(options, 1);
                    self.listen(&pool, &mut backoff).await
                }
            };
            self.sender.send_replace(Signal::Lost(problem.to_string()));
            (self.revisions, self.write_problem) = (None, None);
            pause(&mut backoff).await;
        }
    }

    /// Looks until that fails.
    async fn look_at_file(&mut self, backoff: &mut Backoff) -> StoreError {
        loop {
            if let Err(problem) = self.look().await {
                return problem;
            }
            backoff.succeed();
            // Either is a reason to look.
            let _ = tokio::time::timeout(self.look_every, self.committed.changed()).await;
        }
    }

    /// Listens until the connection is lost. Notifications are then missed until the next
    /// connection.
    async fn listen(&mut self, pool: &PgPool, backoff: &mut Backoff) -> StoreError {
        let mut listener = match connect(pool).await {
            Ok(listener) => listener,
            Err(error) => return self.store.database.explain(error).await,
        };
        loop {
            if let Err(problem) = self.look().await {
                return problem;
            }
            backoff.succeed();
            if let Err(problem) = self.forward_notifications(&mut listener).await {
                return problem;
            }
        }
    }

    /// Forwards notifications until the next poll is due.
    async fn forward_notifications(&mut self, listener: &mut PgListener) -> Result<(), StoreError> {
        let look_every = self.look_every;
        let listening = async {
            loop {
                match listener.try_recv().await {
                    Ok(Some(notification)) => self.note_notification(notification.payload()),
                    Ok(None) => return StoreError::Unreachable("the connection was closed".to_owned()),
                    Err(error) => return error.into(),
                }
            }
        };
        match tokio::time::timeout(look_every, listening).await {
            Ok(problem) => Err(problem),
            Err(_) => Ok(()),
        }
    }

    fn note_notification(&mut self, message: &str) {
        let known = self.revisions.as_mut().zip(RevisionKind::read(message));
        if let Some((revisions, (head, number))) = known {
            *head.of_mut(revisions) = number;
        }
        self.signal_change();
    }

    /// Compares the heads with those that were last seen, then retries a failed write. Changes of
    /// other processes come into force also while this one cannot write.
    async fn look(&mut self) -> Result<(), StoreError> {
        let revisions = self.store.revisions().await?;
        if self.revisions.replace(revisions) != Some(revisions) {
            self.signal_change();
        }
        let problem = self.store.retry_failed_write().await.err().map(|problem| problem.to_string());
        let was_read_only = std::mem::replace(&mut self.write_problem, problem).is_some();
        if was_read_only != self.write_problem.is_some() {
            self.signal_change();
        }
        Ok(())
    }

    fn signal_change(&self) {
        self.sender.send_replace(match &self.write_problem {
            None => Signal::MayHaveChanged,
            Some(problem) => Signal::ReadOnly(problem.clone()),
        });
    }
}

async fn connect(pool: &PgPool) -> Result<PgListener, sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    // Without automatic reconnection: a new listener follows a wait and a poll, so that no
    // notification is missed silently.
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    Ok(listener)
}

/// One of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RevisionKind {
    Rules,
    Emergencies,
    Credentials,
    Overrides,
}

impl RevisionKind {
    pub(super) const ALL: [Self; 4] = [Self::Rules, Self::Emergencies, Self::Credentials, Self::Overrides];

    fn word(self) -> &'static str {
        match self {
            Self::Rules => "revision",
            Self::Emergencies => "emergency_revision",
            Self::Credentials => "credential_revision",
            Self::Overrides => "override_revision",
        }
    }

    fn of_mut(self, revisions: &mut StoreRevisions) -> &mut u64 {
        match self {
            Self::Rules => &mut revisions.revision,
            Self::Emergencies => &mut revisions.emergency_revision,
            Self::Credentials => &mut revisions.credential_revision,
            Self::Overrides => &mut revisions.override_revision,
        }
    }

    pub(super) fn of(self, revisions: &StoreRevisions) -> u64 {
        *self.of_mut(&mut revisions.clone())
    }

    /// Returns the notification of a raised head.
    pub(super) fn message(self, number: u64) -> String {
        format!("{} {number}", self.word())
    }

    fn read(message: &str) -> Option<(Self, u64)> {
        let (word, number) = message.split_once(' ')?;
        let head = Self::ALL.into_iter().find(|head| head.word() == word)?;
        Some((head, number.parse().ok()?))
    }
}

#[expect(clippy::disallowed_methods, reason = "a delay between attempts: there is no condition to wait for")]
async fn pause(backoff: &mut Backoff) {
    tokio::time::sleep(backoff.after_failure()).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notification_names_its_revision_kind_and_number() {
        for head in RevisionKind::ALL {
            assert_eq!(RevisionKind::read(&head.message(7)), Some((head, 7)));
        }
        for message in ["", "revision", "revision x", "revisions 7"] {
            assert_eq!(RevisionKind::read(message), None, "{message}");
        }
    }
}
