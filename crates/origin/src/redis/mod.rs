//! An origin on Redis, or on a server that speaks its protocol and runs its scripts.
//!
//! A call is one script on one slot. It is applied whole or not at all, in one round trip, and sets
//! the expiry of every key that it writes. The script uses the store's clock. It reads the identity
//! of its store itself, so it notices a restart or a promotion on any connection.
//!
//! A store must not evict (`maxmemory-policy noeviction`): an evicted meter counts as unused.
//! `docs/servers.md` lists the permissions of the store's user, in a line that the tests of this
//! crate apply to their stores.
//!
//! A promoted store counts as one that may have lost writes, even after an orderly failover,
//! because the origin cannot tell the difference. So does a store that had no replica for an hour,
//! because Redis then starts a new replication history. Two failovers without a call to a partition
//! in between go unnoticed there, except by nodes with lost writes.
//!
//! The origin trusts its store: a client that may write to it may grant anything. Connect to it
//! over TLS, or over a private network.

mod certificate;
mod config;
#[cfg(test)]
mod equality;
mod link;
mod script;
mod wire;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use redis::{ErrorKind, FromRedisValue, RedisError, RedisResult, ServerErrorKind};
use tidegate_core::origin::{Call, CallReply, MergeReply, MergeRequest, RoundReply, RoundRequest};
use tokio::sync::Semaphore;

pub use certificate::ca_as_server_certificate;
pub use config::{RedisCertificates, RedisConfig, Servers};

use crate::{LeaseReply, LeaseRequest, Origin, OriginError, OriginFuture, PARTITIONS, ProbeReply};
use config::ConnectionSource;
use link::{ActiveConnection, Link};
use script::{Script, Scripts};
use wire::{RoundScriptReply, ScriptInput, ScriptReply};

/// Error codes that a store returns before the script has written anything, beside those that the
/// client knows by kind.
const BEFORE_ANYTHING: [&str; 7] =
    ["BUSY", "MISCONF", "NOAUTH", "NOREPLICAS", "OOM", "UNBLOCKED", "WRONGTYPE"];

/// How many connections there are to each server. More: calls find one that is prompt while others
/// are stuck; more connections at a store that many nodes share.
pub const LINKS: usize = 3;

/// How many partitions of a cluster one probe tries. More: a dead shard is seen after fewer probes;
/// more calls for each probe. 16 probes reach all partitions, and so every shard that has any.
const PROBED_PARTITIONS: u16 = 16;
const _: () = assert!(PARTITIONS.is_multiple_of(PROBED_PARTITIONS), "probes reach all partitions in turn");

/// An origin on Redis.
pub struct RedisOrigin {
    config: RedisConfig,
    scripts: Scripts,
    /// Calls use the first prompt link: a connection replies in order, so a late reply delays all
    /// later ones.
    links: [Link; LINKS],
    /// The link that carried the last call to each partition.
    carriers: Box<[AtomicU8]>,
    in_flight: Semaphore,
    probes: Mutex<Probes>,
}

/// The progress of probes over the partitions.
#[derive(Default)]
struct Probes {
    /// The first partition of the next probe. A partition whose probe failed stays first, so that a
    /// dead shard does not seem to recover when the next probe tries another one.
    next: u16,
    /// The eviction policies other than `noeviction`, by the partition that found them.
    policies: BTreeMap<u16, String>,
}

impl RedisOrigin {
    /// Starts to connect, and continues in the background: an origin that is not reachable yet is
    /// no error. Must be called within a runtime. Fails if an address or a certificate is invalid.
    pub fn open(config: RedisConfig) -> Result<Self, String> {
        choose_crypto();
        let link = |seed: u64| -> Result<Link, String> {
            let source = ConnectionSource::new(&config).map_err(|error| format!("servers: {error}"))?;
            Ok(Link::open(source, &config, seed))
        };
        let seed = config.seed;
        let links = [link(seed)?, link(seed.wrapping_add(1))?, link(seed.wrapping_add(2))?];
        let carriers = (0..PARTITIONS).map(|_| AtomicU8::new(0)).collect();
        let in_flight = Semaphore::new(config.calls_max);
        let probes = Mutex::default();
        Ok(Self { scripts: Scripts::new(), links, carriers, in_flight, probes, config })
    }

    fn prompt(&self, partition: u16, avoid: Option<usize>) -> usize {
        let links = self.links.each_ref().map(|link| (link.is_connected(), link.is_late()));
        choose(links, usize::from(partition) % LINKS, avoid)
    }

    fn carrier(&self, partition: u16) -> Option<&AtomicU8> {
        self.carriers.get(usize::from(partition))
    }

    /// The link for a call, which is remembered, in case it has to be made a second time.
    #[expect(clippy::cast_possible_truncation, reason = "there are few links")]
    fn link(&self, partition: u16, avoid: Option<usize>) -> &Link {
        let chosen = self.prompt(partition, avoid);
        if let Some(carrier) = self.carrier(partition) {
            carrier.store(chosen as u8, Ordering::Relaxed);
        }
        &self.links[chosen]
    }

    /// Returns the link of the partition's last call, and marks it as late: other calls avoid it
    /// until it replies.
    fn late(&self, partition: u16) -> Option<usize> {
        let at = usize::from(self.carrier(partition)?.load(Ordering::Relaxed));
        self.links[at].note_late();
        Some(at)
    }

    async fn perform(&self, link: &Link, partition: u16, call: &Call) -> Result<CallReply, OriginError> {
        call.check()?;
        check_partition(partition)?;
        self.in_time(link, |connected| self.exchange(link, connected, partition, call)).await
    }

    /// Runs an exchange with the store, within the timeout of a call. Fails at once if `calls_max`
    /// calls are in flight.
    async fn in_time<T, F>(
        &self,
        link: &Link,
        exchange: impl FnOnce(ActiveConnection) -> F,
    ) -> Result<T, OriginError>
    where
        F: Future<Output = Result<T, OriginError>>,
    {
        let Ok(_permit) = self.in_flight.try_acquire() else {
            let why = format!("{} calls are in flight, the maximum", self.config.calls_max);
            return Err(OriginError::NotApplied(why));
        };
        let mut sent = None;
        let exchange = async {
            let connected = link.connected().await.map_err(OriginError::NotApplied)?;
            sent = Some((connected.clone(), connected.answers()));
            exchange(connected).await
        };
        match tokio::time::timeout(self.config.call_time_max, exchange).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.too_late(link, sent)),
        }
    }

    fn too_late(&self, link: &Link, sent: Option<(ActiveConnection, u64)>) -> OriginError {
        let limit = self.config.call_time_max;
        let Some((connected, answers)) = sent else {
            return OriginError::NotApplied(format!("no connection within {limit:?}"));
        };
        link.renew_if_idle(&connected, answers);
        OriginError::Unknown(format!("no reply within {limit:?}"))
    }

    async fn exchange(
        &self,
        link: &Link,
        mut connected: ActiveConnection,
        partition: u16,
        call: &Call,
    ) -> Result<CallReply, OriginError> {
        let is_cluster = self.config.is_cluster();
        let mut words = ScriptInput::of(partition, call, is_cluster, wire::is_cross_region(call));
        loop {
            let script = if words.is_wide { &self.scripts.call_cross_region } else { &self.scripts.call };
            let bytes: Vec<u8> = self.run(link, &mut connected, script, &words).await?;
            return match wire::read(call, &bytes) {
                Some(ScriptReply::Reply(reply)) => Ok(reply),
                Some(ScriptReply::Refused(error)) => Err(error.into()),
                // Others know of a limit of several regions that this node does not know as one
                // yet.
                Some(ScriptReply::NeedsCrossRegion) if !words.is_wide => {
                    words = ScriptInput::of(partition, call, is_cluster, true);
                    continue;
                }
                _ => Err(senseless()),
            };
        }
    }

    /// Runs a script, which the store may know already.
    async fn run<T: FromRedisValue>(
        &self,
        link: &Link,
        connected: &mut ActiveConnection,
        script: &Script,
        words: &ScriptInput,
    ) -> Result<T, OriginError> {
        let answers = connected.answers();
        let mut answer: RedisResult<T> = connected.ask(&command("EVALSHA", &script.hash, words)).await;
        if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)) {
            answer = connected.ask(&command("EVAL", &script.text, words)).await;
        }
        answer.map_err(|error| {
            if self.config.is_cluster() {
                // The cluster client repairs its connection to each server by itself, and calls to
                // other servers continue meanwhile.
                link.renew_if_idle(connected, answers);
            } else if needs_another_connection(&error) {
                link.renew(connected);
            }
            self.classify(&error)
        })
    }

    async fn gather(
        &self,
        link: &Link,
        mut connected: ActiveConnection,
        partition: u16,
        round: &RoundRequest,
    ) -> Result<RoundReply, OriginError> {
        let words = ScriptInput::of_round(partition, round);
        let marked: Vec<Vec<u8>> = self.run(link, &mut connected, &self.scripts.round, &words).await?;
        let RoundScriptReply { mut gathered, names, isolated_meters } =
            wire::read_round(&marked).ok_or_else(senseless)?;
        if !names.is_empty() {
            let words = ScriptInput::of_meters(partition, names);
            let found: Vec<Vec<u8>> = self.run(link, &mut connected, &self.scripts.gather, &words).await?;
            gathered.components = wire::read_components(names, &found).ok_or_else(senseless)?;
        }
        if !isolated_meters.is_empty() {
            let words = ScriptInput::of_join(partition, isolated_meters, self.config.is_cluster());
            let _: Vec<Vec<u8>> = self.run(link, &mut connected, &self.scripts.join, &words).await?;
        }
        Ok(gathered)
    }

    fn probes(&self) -> MutexGuard<'_, Probes> {
        // Each write leaves the progress valid.
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Probes one partition, and notes the result: a probe that fails is first the next time.
    async fn probe_partition(&self, partition: u16) -> Result<(), OriginError> {
        self.probes().next = partition;
        let link = &self.links[self.prompt(partition, None)];
        let words = ScriptInput::of_probe(partition);
        let exchange = async |mut connected: ActiveConnection| {
            self.run(link, &mut connected, &self.scripts.probe, &words).await
        };
        let policy: String = self.in_time(link, exchange).await?;
        let mut probes = self.probes();
        if self.config.is_cluster() {
            probes.next = (partition + 1) % PARTITIONS;
        }
        if matches!(policy.as_str(), "" | "noeviction") {
            probes.policies.remove(&partition);
        } else {
            probes.policies.insert(partition, policy);
        }
        Ok(())
    }

    /// Returns whether a failed call was certainly not applied, or may have been. The cluster
    /// client retries by itself after a broken connection, so the last error does not describe
    /// earlier attempts.
    fn classify(&self, error: &RedisError) -> OriginError {
        if is_before_anything(error) && !self.config.is_cluster() {
            OriginError::NotApplied(error.to_string())
        } else {
            OriginError::Unknown(error.to_string())
        }
    }
}

impl Origin for RedisOrigin {
    fn call<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        Box::pin(self.perform(self.link(partition, None), partition, call))
    }

    fn hedge<'a>(&'a self, partition: u16, call: &'a Call) -> OriginFuture<'a> {
        let late = self.late(partition);
        Box::pin(self.perform(self.link(partition, late), partition, call))
    }

    fn round<'a>(&'a self, partition: u16, round: &'a RoundRequest) -> OriginFuture<'a, RoundReply> {
        let link = &self.links[self.prompt(partition, None)];
        Box::pin(async move {
            check_partition(partition)?;
            self.in_time(link, |connected| self.gather(link, connected, partition, round)).await
        })
    }

    fn merge<'a>(&'a self, partition: u16, merge: &'a MergeRequest) -> OriginFuture<'a, MergeReply> {
        let link = &self.links[self.prompt(partition, None)];
        Box::pin(async move {
            merge.check()?;
            check_partition(partition)?;
            let words = ScriptInput::of_merge(partition, merge);
            let exchange = async |mut connected: ActiveConnection| {
                self.run(link, &mut connected, &self.scripts.merge, &words).await
            };
            let bytes: Vec<u8> = self.in_time(link, exchange).await?;
            wire::read_merged(merge, &bytes).ok_or_else(senseless)
        })
    }

    fn lease(&self, request: LeaseRequest) -> OriginFuture<'_, LeaseReply> {
        let link = &self.links[self.prompt(0, None)];
        Box::pin(async move {
            let words = ScriptInput::of_lease(request);
            let exchange = async |mut connected: ActiveConnection| {
                self.run(link, &mut connected, &self.scripts.lease, &words).await
            };
            let text: String = self.in_time(link, exchange).await?;
            wire::read_lease(&text).ok_or_else(senseless)
        })
    }

    /// Runs a script that needs the permissions of a call. A cluster runs it in the next
    /// `PROBED_PARTITIONS` partitions, because each shard has some of them. Other stores have one
    /// server for all partitions, so one partition is enough.
    fn probe(&self) -> OriginFuture<'_, ProbeReply> {
        Box::pin(async move {
            let first = self.probes().next;
            // An attempt to connect that fails at its limit reports its cause first.
            let limit = self.config.connect_time_max + self.config.call_time_max;
            let link = &self.links[self.prompt(first, None)];
            let connected = tokio::time::timeout(limit, link.connected()).await;
            let late = |_| OriginError::NotApplied(format!("cannot connect within {limit:?}"));
            connected.map_err(late)?.map_err(OriginError::NotApplied)?;
            let count = if self.config.is_cluster() { PROBED_PARTITIONS } else { 1 };
            for partition in (first..).take(usize::from(count)).map(|partition| partition % PARTITIONS) {
                self.probe_partition(partition).await?;
            }
            let eviction_policy = self.probes().policies.values().next().cloned();
            Ok(ProbeReply { eviction_policy })
        })
    }
}

fn check_partition(partition: u16) -> Result<(), OriginError> {
    if partition < PARTITIONS {
        return Ok(());
    }
    Err(OriginError::NotApplied(format!("partition: {partition} is outside 0 to {}", PARTITIONS - 1)))
}

fn senseless() -> OriginError {
    OriginError::Unknown("the store sent an invalid reply".to_owned())
}

/// Returns the link to use, given whether each is connected and late. Prefers a connected link,
/// then one other than `avoid`, then a prompt one. Partitions start at different links, so that a
/// late reply delays few of them.
fn choose(links: [(bool, bool); LINKS], first: usize, avoid: Option<usize>) -> usize {
    let rank = |&at: &usize| {
        let (is_connected, is_late) = links[at];
        (!is_connected, Some(at) == avoid, is_late)
    };
    (0..LINKS).map(|at| (first + at) % LINKS).min_by_key(rank).unwrap_or(first)
}

fn command(name: &str, script: &str, of: &ScriptInput) -> redis::Cmd {
    let mut command = redis::cmd(name);
    command.arg(script).arg(of.keys.len()).arg(&of.keys).arg(&of.arguments);
    command
}

/// Whether the store refused the script before it wrote anything. The script writes only after all
/// its reads, so a refused script has no partial effect.
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

/// Whether the link must reconnect. A server that became a replica still replies, but another
/// server is the master now.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_takes_the_next_link_that_is_there_and_prompt() {
        let (prompt, late, gone) = ((true, false), (true, true), (false, false));
        assert_eq!([0, 1, 2].map(|first| choose([prompt, prompt, prompt], first, None)), [0, 1, 2]);
        assert_eq!([0, 1, 2].map(|first| choose([late, prompt, prompt], first, None)), [1, 1, 2]);
        assert_eq!(choose([late, gone, prompt], 0, None), 2);
        assert_eq!(choose([gone, late, gone], 0, None), 1, "a slow link is better than none");
        assert_eq!(choose([late, late, late], 2, None), 2);
    }

    #[test]
    fn a_call_that_is_made_again_takes_another_link_if_there_is_one() {
        let (prompt, late, gone) = ((true, false), (true, true), (false, false));
        assert_eq!([0, 1, 2].map(|first| choose([prompt, prompt, prompt], first, Some(first))), [1, 2, 0]);
        assert_eq!(choose([late, late, prompt], 0, Some(0)), 2);
        assert_eq!(
            choose([late, late, gone], 1, Some(1)),
            0,
            "another slow link is better than the same link"
        );
        assert_eq!(choose([gone, late, gone], 1, Some(1)), 1);
    }
}
