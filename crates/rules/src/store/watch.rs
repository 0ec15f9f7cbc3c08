//! Tells when a store may have changed: at once where it can say so itself, and by looking now and then everywhere.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPool};
use tokio::sync::watch;
use tokio::task::AbortHandle;

use super::address::Place;
use super::database::postgres_pool;
use super::{Heads, Store, StoreError};

/// The channel on which `PostgreSQL` tells of changes: which head moved, and to what number, such as `revision 7`.
pub const CHANNEL: &str = "tidegate_rules";

/// How often a file is looked at. Another process says nothing when it changes it. More often: its changes are seen
/// earlier, for one small read each time.
const LOOK_AT_FILE_EVERY: Duration = Duration::from_millis(250);

/// How often a server is looked at that tells of changes itself: a connection may be dead without either end knowing.
/// More often: changes are seen earlier then, for one small question of every process each time.
const LOOK_AT_SERVER_EVERY: Duration = Duration::from_secs(5);

/// The first wait after a connection is lost, and the longest. Shorter: changes are seen earlier after a restart of
/// the store; longer: a store that comes up is asked by fewer at once.
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(10);

/// What a watcher is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Something may have changed: compare the heads, and load what moved.
    MayHaveChanged,
    /// The store is out of sight, and why. It is looked for; when it is found, something may have changed.
    Lost(String),
}

/// Watches a store until it is dropped. What happens before somebody looks is told once.
#[derive(Debug)]
pub struct Watch {
    signals: watch::Receiver<Signal>,
    looking: AbortHandle,
}

impl Watch {
    /// Waits for the next signal.
    pub async fn next(&mut self) -> Signal {
        if self.signals.changed().await.is_err() {
            // Only the end of the runtime ends whoever looks.
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

impl Store {
    /// Begins to watch. Watch first and load then, and nothing is missed. The seed spreads the times at which many
    /// processes look for a store that is gone.
    pub fn watch(&self, seed: u64) -> Watch {
        let (sender, signals) = watch::channel(Signal::MayHaveChanged);
        let looker =
            Looker { store: self.clone(), committed: self.committed.subscribe(), sender, heads: None };
        let looking = tokio::spawn(looker.run(Backoff { failures: 0, seed })).abort_handle();
        Watch { signals, looking }
    }
}

struct Looker {
    store: Store,
    committed: watch::Receiver<()>,
    sender: watch::Sender<Signal>,
    /// As they were last seen.
    heads: Option<Heads>,
}

impl Looker {
    async fn run(mut self, mut backoff: Backoff) {
        loop {
            let problem = match &self.store.address.0 {
                Place::Memory | Place::File(_) => self.look_at_file(&mut backoff).await,
                Place::Postgres(options) => {
                    let pool = postgres_pool(options, 1);
                    self.listen(&pool, &mut backoff).await
                }
            };
            self.sender.send_replace(Signal::Lost(problem.to_string()));
            self.heads = None;
            backoff.pause().await;
        }
    }

    /// Looks until that fails.
    async fn look_at_file(&mut self, backoff: &mut Backoff) -> StoreError {
        loop {
            if let Err(problem) = self.look().await {
                return problem;
            }
            backoff.failures = 0;
            // Either is a reason to look.
            let _ = tokio::time::timeout(LOOK_AT_FILE_EVERY, self.committed.changed()).await;
        }
    }

    /// Listens until the connection is lost. What was said in between is not known then.
    async fn listen(&mut self, pool: &PgPool, backoff: &mut Backoff) -> StoreError {
        let mut listener = match connect(pool).await {
            Ok(listener) => listener,
            Err(error) => return self.store.database.explain(error).await,
        };
        loop {
            if let Err(problem) = self.look().await {
                return problem;
            }
            backoff.failures = 0;
            if let Err(problem) = self.hear(&mut listener).await {
                return problem;
            }
        }
    }

    /// Passes on what a server says, until it is time to look.
    async fn hear(&mut self, listener: &mut PgListener) -> Result<(), StoreError> {
        let listening = async {
            loop {
                match listener.try_recv().await {
                    Ok(Some(notification)) => self.heard(notification.payload()),
                    Ok(None) => return StoreError::Unreachable("the connection was closed".to_owned()),
                    Err(error) => return error.into(),
                }
            }
        };
        match tokio::time::timeout(LOOK_AT_SERVER_EVERY, listening).await {
            Ok(problem) => Err(problem),
            Err(_) => Ok(()),
        }
    }

    fn heard(&mut self, message: &str) {
        let known = self.heads.as_mut().zip(Head::read(message));
        if let Some((heads, (head, number))) = known {
            *head.of_mut(heads) = number;
        }
        self.sender.send_replace(Signal::MayHaveChanged);
    }

    /// Compares the heads with those that were last seen.
    async fn look(&mut self) -> Result<(), StoreError> {
        let heads = self.store.heads().await?;
        if self.heads.replace(heads) != Some(heads) {
            self.sender.send_replace(Signal::MayHaveChanged);
        }
        Ok(())
    }
}

async fn connect(pool: &PgPool) -> Result<PgListener, sqlx::Error> {
    let mut listener = PgListener::connect_with(pool).await?;
    // A new listener is made, after a wait and a look, rather than one that silently missed something.
    listener.eager_reconnect(false);
    listener.listen(CHANNEL).await?;
    Ok(listener)
}

/// One of the heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    Rules,
    Emergencies,
    Credentials,
}

impl Head {
    pub(super) const ALL: [Self; 3] = [Self::Rules, Self::Emergencies, Self::Credentials];

    fn word(self) -> &'static str {
        match self {
            Self::Rules => "revision",
            Self::Emergencies => "emergency_revision",
            Self::Credentials => "credential_revision",
        }
    }

    fn of_mut(self, heads: &mut Heads) -> &mut u64 {
        match self {
            Self::Rules => &mut heads.revision,
            Self::Emergencies => &mut heads.emergency_revision,
            Self::Credentials => &mut heads.credential_revision,
        }
    }

    pub(super) fn of(self, heads: &Heads) -> u64 {
        *self.of_mut(&mut heads.clone())
    }

    /// What is told of it.
    pub(super) fn message(self, number: u64) -> String {
        format!("{} {number}", self.word())
    }

    fn read(message: &str) -> Option<(Self, u64)> {
        let (word, number) = message.split_once(' ')?;
        let head = Self::ALL.into_iter().find(|head| head.word() == word)?;
        Some((head, number.parse().ok()?))
    }
}

/// Waits that double, up to a bound, each varied by up to a half of it.
struct Backoff {
    failures: u32,
    seed: u64,
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let doubled = RETRY_MIN.saturating_mul(1 << self.failures.min(16)).min(RETRY_MAX);
        self.failures = self.failures.saturating_add(1);
        // One step of a linear congruential generator: nothing but a spread is asked of it.
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let share = u32::from((self.seed >> 48) as u16);
        doubled / 2 + (doubled / 2 / u32::from(u16::MAX)).saturating_mul(share)
    }

    #[expect(clippy::disallowed_methods, reason = "no condition to wait for: a store is not asked too often")]
    async fn pause(&mut self) {
        tokio::time::sleep(self.next()).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_a_bound_and_differ() {
        let waits = |seed| {
            let mut backoff = Backoff { failures: 0, seed };
            (0..40).map(|_| backoff.next()).collect::<Vec<_>>()
        };
        assert!(waits(1)[0] >= RETRY_MIN / 2 && waits(1)[0] <= RETRY_MIN);
        assert!(waits(1)[30..].iter().all(|wait| *wait >= RETRY_MAX / 2 && *wait <= RETRY_MAX));
        assert_ne!(waits(1), waits(2));
    }

    #[test]
    fn a_message_says_which_head_moved_and_where() {
        for head in Head::ALL {
            assert_eq!(Head::read(&head.message(7)), Some((head, 7)));
        }
        for message in ["", "revision", "revision x", "revisions 7"] {
            assert_eq!(Head::read(message), None, "{message}");
        }
    }
}
