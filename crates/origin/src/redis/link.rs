//! A connection that is made again whenever it breaks, and never waited for longer than a call may take.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Cmd, RedisResult};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::config::{RedisConfig, Servers, Source, sentinel_builder};

/// A connection that is made again whenever it breaks.
pub(super) struct Link {
    state: watch::Receiver<State>,
    /// The last life of the connection that was found to be over.
    over: watch::Sender<u64>,
    keeper: JoinHandle<()>,
}

#[derive(Clone)]
enum State {
    Connecting,
    Connected(Connected),
    Failed(Arc<str>),
}

/// One life of the connection.
#[derive(Clone)]
pub(super) struct Connected {
    connection: Connection,
    number: u64,
    answers: Arc<AtomicU64>,
}

#[derive(Clone)]
enum Connection {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    /// Begins to connect. Has to be called within a runtime, which keeps it connected from then on.
    pub(super) fn open(source: Source, config: &RedisConfig, seed: u64) -> Self {
        let (states, state) = watch::channel(State::Connecting);
        let (over, seen_over) = watch::channel(0);
        let backoff = Backoff { least: config.backoff_min, most: config.backoff_max, failures: 0, seed };
        let keeper = Keeper { source, states, over: seen_over, backoff, time_max: config.connect_time_max };
        Self { state, over, keeper: tokio::spawn(keeper.run()) }
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(*self.state.borrow(), State::Connected(_))
    }

    /// The connection, as soon as it is known whether there is one.
    pub(super) async fn connected(&self) -> Result<Connected, String> {
        let mut state = self.state.clone();
        let known = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match known.as_deref() {
            Ok(State::Connected(connected)) => Ok(connected.clone()),
            Ok(State::Failed(why)) => Err(why.to_string()),
            Ok(State::Connecting) | Err(_) => Err("the connection is closed".to_owned()),
        }
    }

    /// Makes the connection again, unless that has been done since.
    pub(super) fn renew(&self, connected: &Connected) {
        self.over.send_if_modified(|over| {
            let is_news = *over < connected.number;
            *over = connected.number.max(*over);
            is_news
        });
    }

    /// Makes the connection again if nothing was answered on it since there were `answers`: it may be open at this end only.
    pub(super) fn renew_if_silent(&self, connected: &Connected, answers: u64) {
        if connected.answers() == answers {
            self.renew(connected);
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

impl Connected {
    /// How many answers have come.
    pub(super) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    pub(super) async fn ask(&mut self, command: &Cmd) -> RedisResult<Vec<u8>> {
        let answer = match &mut self.connection {
            Connection::Single(connection) => command.query_async(connection).await,
            Connection::Cluster(connection) => command.query_async(connection).await,
        };
        let is_answer = answer.as_ref().err().is_none_or(|error: &redis::RedisError| error.code().is_some());
        if is_answer {
            self.answers.fetch_add(1, Ordering::Relaxed);
        }
        answer
    }
}

/// What keeps a link connected.
struct Keeper {
    source: Source,
    states: watch::Sender<State>,
    over: watch::Receiver<u64>,
    backoff: Backoff,
    time_max: Duration,
}

impl Keeper {
    async fn run(mut self) {
        for number in 1.. {
            match self.connect().await {
                Ok(connection) => {
                    let connected = Connected { connection, number, answers: Arc::default() };
                    self.states.send_replace(State::Connected(connected.clone()));
                    if self.over.wait_for(|over| *over >= number).await.is_err() {
                        return;
                    }
                    self.states.send_replace(State::Connecting);
                    if connected.answers() > 0 {
                        self.backoff.failures = 0;
                    }
                }
                Err(why) => {
                    self.states.send_replace(State::Failed(why.into()));
                }
            }
            self.backoff.pause().await;
        }
    }

    async fn connect(&self) -> Result<Connection, String> {
        // The crate limits parts of an attempt, and not all of it.
        match tokio::time::timeout(self.time_max, self.source.connect(self.time_max)).await {
            Ok(connected) => connected.map_err(|error| format!("cannot connect: {error}")),
            Err(_) => Err(format!("cannot connect: nothing came back within {:?}", self.time_max)),
        }
    }
}

impl Source {
    async fn connect(&self, time_max: Duration) -> RedisResult<Connection> {
        // Calls have a time limit of their own, which does not end those that share the connection.
        let config =
            AsyncConnectionConfig::new().set_connection_timeout(Some(time_max)).set_response_timeout(None);
        match self {
            Self::Single(client) => {
                let connection = client.get_multiplexed_async_connection_with_config(&config).await?;
                Ok(Connection::Single(connection))
            }
            Self::Sentinel(settings) => {
                let Servers::Sentinel { sentinels, name, master } = &settings.servers else {
                    return Err((redis::ErrorKind::InvalidClientConfig, "no sentinels").into());
                };
                let builder = sentinel_builder(sentinels, name, master, &settings.certificates)?;
                let connection = builder.build()?.get_async_connection_with_config(&config).await?;
                Ok(Connection::Single(connection))
            }
            Self::Cluster(client) => Ok(Connection::Cluster(client.get_async_connection().await?)),
        }
    }
}

/// Waits that double, up to a bound, each varied by up to a half of it.
struct Backoff {
    least: Duration,
    most: Duration,
    failures: u32,
    seed: u64,
}

impl Backoff {
    fn next(&mut self) -> Duration {
        let doubled = self.least.saturating_mul(1 << self.failures.min(16)).min(self.most);
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
        let (least, most) = (Duration::from_millis(20), Duration::from_secs(5));
        let mut backoff = Backoff { least, most, failures: 0, seed: 1 };
        let mut other = Backoff { least, most, failures: 0, seed: 2 };
        let waits: Vec<_> = (0..40).map(|_| backoff.next()).collect();
        assert!(waits[0] >= least / 2 && waits[0] <= least);
        assert!(waits[30..].iter().all(|wait| *wait >= most / 2 && *wait <= most), "{waits:?}");
        assert_ne!(waits, (0..40).map(|_| other.next()).collect::<Vec<_>>());
    }
}
