//! A connection that is made again whenever it breaks, and never waited for longer than a call may
//! take.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use redis::aio::MultiplexedConnection;
use redis::cluster_async::ClusterConnection;
use redis::{AsyncConnectionConfig, Cmd, ErrorKind, FromRedisValue, RedisError, RedisResult};
use tidegate_core::Backoff;
use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::certificate::ca_as_server_certificate;
use super::config::{ConnectionSource, RedisConfig, Servers, sentinel_builder};

/// A connection that is made again whenever it breaks.
pub(super) struct Link {
    state: watch::Receiver<State>,
    /// The last life of the connection that was found to be over.
    over: watch::Sender<u64>,
    /// Whether a reply was late, and no reply has come since.
    late: Arc<AtomicBool>,
    keeper: JoinHandle<()>,
}

#[derive(Clone)]
enum State {
    Connecting,
    Open(ActiveConnection),
    Failed(Arc<str>),
}

/// One life of the connection.
#[derive(Clone)]
pub(super) struct ActiveConnection {
    connection: Connection,
    number: u64,
    answers: Arc<AtomicU64>,
    late: Arc<AtomicBool>,
}

#[derive(Clone)]
enum Connection {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Link {
    /// Begins to connect. Has to be called within a runtime, which keeps it connected from then on.
    pub(super) fn open(source: ConnectionSource, config: &RedisConfig, seed: u64) -> Self {
        let (states, state) = watch::channel(State::Connecting);
        let (over, seen_over) = watch::channel(0);
        let backoff = Backoff::new(config.backoff_min, config.backoff_max, seed);
        let (late, time_max) = (Arc::<AtomicBool>::default(), config.connect_time_max);
        let keeper = Reconnector {
            source,
            states,
            over: seen_over,
            late: Arc::clone(&late),
            backoff,
            time_max,
            uses_tls: config.servers.uses_tls(),
        };
        Self { state, over, late, keeper: tokio::spawn(keeper.run()) }
    }

    pub(super) fn is_late(&self) -> bool {
        self.late.load(Ordering::Relaxed)
    }

    /// Notes that a reply is late. If it arrives at this moment, calls avoid this link needlessly,
    /// until its next reply or until all other links are late.
    pub(super) fn note_late(&self) {
        self.late.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_connected(&self) -> bool {
        matches!(*self.state.borrow(), State::Open(_))
    }

    /// The connection, as soon as it is known whether there is one.
    pub(super) async fn connected(&self) -> Result<ActiveConnection, String> {
        let mut state = self.state.clone();
        let known = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match known.as_deref() {
            Ok(State::Open(connected)) => Ok(connected.clone()),
            Ok(State::Failed(why)) => Err(why.to_string()),
            Ok(State::Connecting) | Err(_) => Err("the connection is closed".to_owned()),
        }
    }

    /// Makes the connection again, unless that has been done since.
    pub(super) fn renew(&self, connected: &ActiveConnection) {
        self.over.send_if_modified(|over| {
            let is_news = *over < connected.number;
            *over = connected.number.max(*over);
            is_news
        });
    }

    /// Reconnects if no reply has come since the count was `answers`: the connection may be open at
    /// this end only.
    pub(super) fn renew_if_idle(&self, connected: &ActiveConnection, answers: u64) {
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

impl ActiveConnection {
    /// Returns the number of replies so far.
    pub(super) fn answers(&self) -> u64 {
        self.answers.load(Ordering::Relaxed)
    }

    pub(super) async fn ask<T: FromRedisValue>(&mut self, command: &Cmd) -> RedisResult<T> {
        let answer = match &mut self.connection {
            Connection::Single(connection) => command.query_async(connection).await,
            Connection::Cluster(connection) => command.query_async(connection).await,
        };
        let is_answer = answer.as_ref().err().is_none_or(|error: &redis::RedisError| error.code().is_some());
        if is_answer {
            self.answers.fetch_add(1, Ordering::Relaxed);
            self.late.store(false, Ordering::Relaxed);
        }
        answer
    }
}

/// The task that keeps a link connected.
struct Reconnector {
    source: ConnectionSource,
    states: watch::Sender<State>,
    over: watch::Receiver<u64>,
    late: Arc<AtomicBool>,
    backoff: Backoff,
    time_max: Duration,
    uses_tls: bool,
}

impl Reconnector {
    async fn run(mut self) {
        for number in 1.. {
            match self.connect().await {
                Ok(connection) => {
                    let late = Arc::clone(&self.late);
                    late.store(false, Ordering::Relaxed);
                    let connected = ActiveConnection { connection, number, answers: Arc::default(), late };
                    self.states.send_replace(State::Open(connected.clone()));
                    if self.over.wait_for(|over| *over >= number).await.is_err() {
                        return;
                    }
                    self.states.send_replace(State::Connecting);
                    if connected.answers() > 0 {
                        self.backoff.succeed();
                    }
                }
                Err(why) => {
                    self.states.send_replace(State::Failed(why.into()));
                }
            }
            self.pause().await;
        }
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "a delay between attempts: there is no condition to wait for"
    )]
    async fn pause(&mut self) {
        tokio::time::sleep(self.backoff.after_failure()).await;
    }

    async fn connect(&self) -> Result<Connection, String> {
        // The crate limits parts of an attempt, and not all of it.
        let Ok(connected) = tokio::time::timeout(self.time_max, self.source.connect(self.time_max)).await
        else {
            let advice = if self.uses_tls { NO_TLS } else { "" };
            return Err(format!("cannot connect: no reply within {:?}{advice}", self.time_max));
        };
        connected.map_err(|error| describe(&error, self.uses_tls))
    }
}

/// Describes a failure to connect, with advice for the usual causes.
fn describe(error: &RedisError, uses_tls: bool) -> String {
    let text = error.to_string();
    match ca_as_server_certificate(&text) {
        Some(remedy) => format!("cannot connect: {remedy} by `origin_ca`"),
        None => format!("cannot connect: {text}{}", advice(error, uses_tls)),
    }
}

/// Advice for a server that does not reply to a TLS handshake.
const NO_TLS: &str = "; a server without TLS does not reply to a TLS handshake: use redis:// for such a \
    server";

/// Returns advice for the usual causes of a failure to connect; empty for others.
fn advice(error: &RedisError, uses_tls: bool) -> &'static str {
    if error.kind() == ErrorKind::AuthenticationFailed {
        return "; check the user name and the password of the address";
    }
    match uses_tls {
        true if error.is_timeout() => NO_TLS,
        false if error.is_connection_dropped() && !error.is_connection_refusal() => {
            "; a server with TLS closes connections without it: use rediss:// for such a server"
        }
        _ => "",
    }
}

impl ConnectionSource {
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

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;

    #[test]
    fn ca_certificate_of_a_store_is_explained_instead_of_quoted() {
        let cause = "invalid peer certificate: Other(OtherError(CaUsedAsEndEntity))";
        let error = RedisError::from(io::Error::new(io::ErrorKind::InvalidData, cause));
        let text = describe(&error, true);
        assert!(
            text.contains("is a CA certificate") && text.ends_with("trust cert.pem by `origin_ca`"),
            "{text}"
        );
        assert!(!text.contains("OtherError"), "{text}");
    }

    #[test]
    fn advice_names_the_password_and_the_scheme() {
        let failed = RedisError::from((ErrorKind::AuthenticationFailed, "failed"));
        assert!(advice(&failed, false).contains("the password"));
        let timeout = || RedisError::from(io::Error::from(io::ErrorKind::TimedOut));
        assert!(advice(&timeout(), true).contains("use redis://"));
        assert_eq!(advice(&timeout(), false), "");
        let dropped = || RedisError::from(io::Error::from(io::ErrorKind::ConnectionReset));
        assert!(advice(&dropped(), false).contains("use rediss://"));
        assert_eq!(advice(&dropped(), true), "");
        let refused = RedisError::from(io::Error::from(io::ErrorKind::ConnectionRefused));
        assert_eq!(advice(&refused, false), "", "there is no server");
    }
}
