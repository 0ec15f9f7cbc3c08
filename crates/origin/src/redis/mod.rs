//! An origin on Redis, or on what speaks its protocol and runs its scripts.
//!
//! A call is one script on one slot: it is applied whole or not at all, in one round trip, and the expiry of everything it
//! writes is set with it. The script tells the time by the store's clock, and looks by itself which store it runs on, so
//! that a restart or a promotion is noticed whatever way a call took.
//!
//! A store must not evict (`maxmemory-policy noeviction`): a meter that is gone is one that allows everything. Its user needs
//! the keys `tg:*` and the commands `EVAL`, `EVALSHA`, `INFO`, `CLUSTER MYID`, `TIME`, `MGET`, `SET`, `PEXPIRE`, `HGET`, `HMGET`,
//! `HSET`, `HDEL`, `ZADD`, `ZREM`, `ZRANGE` and `ZREVRANGEBYSCORE`; the client of a cluster also `CLUSTER SLOTS`.
//!
//! A store that was promoted counts as one that may have lost writes, also when it was handed over in good order, since
//! nobody can tell. So does one whose replicas were all gone for an hour, when Redis begins its history anew. Two
//! hand-overs in a row of a partition that nobody calls in between are not noticed, except by nodes whose writes were lost.
//!
//! A store takes part with everything that it says for itself: whoever may write to it may grant anything. It is reached
//! over TLS, or over a network that nobody else is on.

mod config;
#[cfg(test)]
mod equality;
mod link;
mod script;
mod wire;

use redis::{ErrorKind, RedisError, ServerErrorKind};
use tidegate_core::origin::{Call, Reply};
use tokio::sync::Semaphore;

pub use config::{Certificates, RedisConfig, Servers};

use crate::{Answer, Origin, OriginError, PARTITIONS};
use config::Source;
use link::{Connected, Link};
use script::{SOURCE, Script};
use wire::{Answered, Words};

/// Errors of a store that come before the script has written anything, beside those that the client knows by kind.
const BEFORE_ANYTHING: [&str; 7] =
    ["BUSY", "MISCONF", "NOAUTH", "NOREPLICAS", "OOM", "UNBLOCKED", "WRONGTYPE"];

/// An origin on Redis.
pub struct RedisOrigin {
    config: RedisConfig,
    script: Script,
    main: Link,
    /// For calls that are late on the other one: a connection answers in order, so one that is stuck holds up all after it.
    spare: Link,
    under_way: Semaphore,
}

impl RedisOrigin {
    /// Begins to connect, and goes on with it in the background: an origin that is not there yet is no error. Has to be
    /// called within a runtime. Fails where an address or a certificate makes no sense.
    pub fn open(config: RedisConfig) -> Result<Self, String> {
        choose_crypto();
        let link = |seed: u64| -> Result<Link, String> {
            let source = Source::new(&config).map_err(|error| format!("servers: {error}"))?;
            Ok(Link::open(source, &config, seed))
        };
        let (main, spare) = (link(config.seed)?, link(config.seed.wrapping_add(1))?);
        let under_way = Semaphore::new(config.calls_max);
        Ok(Self { script: Script::new(SOURCE), main, spare, under_way, config })
    }

    async fn perform(&self, link: &Link, partition: u16, call: &Call) -> Result<Reply, OriginError> {
        call.check()?;
        if partition >= PARTITIONS {
            let why = format!("partition: {partition} is outside 0 to {}", PARTITIONS - 1);
            return Err(OriginError::NotApplied(why));
        }
        let Ok(_permit) = self.under_way.try_acquire() else {
            let why = format!("{} calls are under way", self.config.calls_max);
            return Err(OriginError::NotApplied(why));
        };
        let mut sent = None;
        let exchange = async {
            let connected = link.connected().await.map_err(OriginError::NotApplied)?;
            sent = Some((connected.clone(), connected.answers()));
            self.exchange(link, connected, partition, call).await
        };
        match tokio::time::timeout(self.config.call_time_max, exchange).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.too_late(link, sent)),
        }
    }

    fn too_late(&self, link: &Link, sent: Option<(Connected, u64)>) -> OriginError {
        let limit = self.config.call_time_max;
        let Some((connected, answers)) = sent else {
            return OriginError::NotApplied(format!("there was no connection within {limit:?}"));
        };
        link.renew_if_silent(&connected, answers);
        OriginError::Unknown(format!("no answer within {limit:?}"))
    }

    async fn exchange(
        &self,
        link: &Link,
        mut connected: Connected,
        partition: u16,
        call: &Call,
    ) -> Result<Reply, OriginError> {
        let words = Words::of(partition, call, self.config.is_cluster());
        let answers = connected.answers();
        let mut answer = connected.ask(&command("EVALSHA", &self.script.hash, &words)).await;
        if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answer = connected.ask(&command("EVAL", &self.script.text, &words)).await;
        }
        match answer {
            Ok(said) => match wire::read(call, &said) {
                Some(Answered::Reply(reply)) => Ok(reply),
                Some(Answered::Refused(error)) => Err(error.into()),
                None => Err(OriginError::Unknown("the answer makes no sense".to_owned())),
            },
            Err(error) => {
                if self.config.is_cluster() {
                    // It mends what leads to each of its servers by itself, and the others go on meanwhile.
                    link.renew_if_silent(&connected, answers);
                } else if needs_another_connection(&error) {
                    link.renew(&connected);
                }
                Err(self.classify(&error))
            }
        }
    }

    /// Whether a call that failed so was certainly not applied. The client of a cluster tries again on its own when a
    /// connection breaks, so what came last says nothing about what came before.
    fn classify(&self, error: &RedisError) -> OriginError {
        if is_before_anything(error) && !self.config.is_cluster() {
            OriginError::NotApplied(error.to_string())
        } else {
            OriginError::Unknown(error.to_string())
        }
    }
}

impl Origin for RedisOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> Answer<'a> {
        Box::pin(self.perform(first_of(&self.main, &self.spare), partition, call))
    }

    fn hedge<'a>(&'a self, partition: u16, call: &'a Call) -> Answer<'a> {
        Box::pin(self.perform(first_of(&self.spare, &self.main), partition, call))
    }
}

/// The link that is there, if one of them is.
fn first_of<'a>(first: &'a Link, second: &'a Link) -> &'a Link {
    if !first.is_connected() && second.is_connected() { second } else { first }
}

fn command(name: &str, script: &str, of: &Words) -> redis::Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(of.keys.len()).arg(&of.keys).arg(&of.arguments[0]).arg(&of.arguments[1]);
    command
}

/// The script writes only after it has read everything: what a store refuses to begin, it has not done in part.
fn is_before_anything(error: &RedisError) -> bool {
    match error.kind() {
        ErrorKind::Server(kind) => matches!(
            kind,
            ServerErrorKind::BusyLoading
                | ServerErrorKind::NoScript
                | ServerErrorKind::Moved
                | ServerErrorKind::Ask
                | ServerErrorKind::TryAgain
                | ServerErrorKind::ClusterDown
                | ServerErrorKind::CrossSlot
                | ServerErrorKind::MasterDown
                | ServerErrorKind::ReadOnly
                | ServerErrorKind::NoPerm
        ),
        _ => error.code().is_some_and(|code| BEFORE_ANYTHING.contains(&code)),
    }
}

/// A server that became a replica goes on answering, and another is the master now.
fn needs_another_connection(error: &RedisError) -> bool {
    let is_replica = error.kind() == ErrorKind::Server(ServerErrorKind::ReadOnly);
    is_replica || error.is_io_error() || error.is_unrecoverable_error()
}

/// Two providers may be linked, and then neither is chosen unless someone does.
fn choose_crypto() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Losing the race means that another was chosen, which is as good.
        let _ = rustls::crypto::ring::default_provider().install_default();
    }
}
