//! The state of the origin: probed from the start on, logged when it changes, with the last cause.
//!
//! On a Redis Cluster, a probe tries 16 of the 256 partitions, in turn. So probes reach every shard
//! within 16 [`PROBE_EVERY`], and stay with a partition that fails until it replies again. Requests
//! to a dead shard are noticed earlier: a stall starts a probe at once.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::Serialize;
use tidegate::region::{OriginError, ProbeReply};
use tidegate_record::timestamp;
use tokio::sync::watch::Receiver;
use utoipa::ToSchema;

use crate::shared::Shared;

/// Interval between probes of an origin that is up. Shorter: an idle server notices an outage
/// earlier; more calls.
const PROBE_EVERY: Duration = Duration::from_secs(10);

/// Interval between probes of an origin that is down.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// Longest time of the probe for a configuration check. Longer: a slower origin counts as usable.
pub const SINGLE_PROBE_TIME_MAX: Duration = Duration::from_secs(2);

/// Minimum time between the end of a probe and the next one. Without it, an origin that stalls and
/// recovers in quick succession gets a probe for each change, in addition to its overload. Longer:
/// a second change is noticed later.
const PROBE_GAP_MIN: Duration = Duration::from_millis(250);
const _: () = assert!(PROBE_GAP_MIN.as_millis() < RETRY_EVERY.as_millis(), "a gap is part of an interval");

/// Causes of a failure for readers without a credential, by a part of the full text. The full text
/// may contain host names, ports and user names, so none of it is shown. The first match counts.
const PUBLIC_CAUSES: [(&str, &str); 19] = [
    ("the password of the address", "the origin refused the user name or the password"),
    ("wrongpass", "the origin refused the user name or the password"),
    ("noauth", "the origin requires a password"),
    ("noperm", "the user of the origin lacks a permission"),
    ("no permissions", "the user of the origin lacks a permission"),
    ("lookup address", "the host name has no address"),
    ("use redis://", "the origin does not reply to a TLS handshake"),
    ("use rediss://", "the origin closed a connection without TLS"),
    ("certificate", "the TLS certificate is not accepted"),
    ("connection refused", "the origin refused the connection"),
    ("unreachable", "the network has no route to the origin"),
    ("read only", "the origin is read-only"),
    ("readonly", "the origin is read-only"),
    ("clusterdown", "the cluster is down"),
    ("loading", "the origin loads its data"),
    ("oom", "the origin has no free memory"),
    ("in flight", "too many calls are in flight"),
    ("origin_timeout", "calls are not answered within origin_timeout"),
    ("within", "the origin does not reply in time"),
];

/// Returns the public cause of a failure. An unknown one leads to the full text.
fn public_cause(cause: &str) -> &'static str {
    let cause = cause.to_lowercase();
    let known = PUBLIC_CAUSES.iter().find(|(part, _)| cause.contains(part));
    known.map_or("calls fail", |(_, public)| public)
}

/// The readers of a text about the state of the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// Clients without a credential: texts contain no address.
    Public,
    /// Operators, who need the addresses.
    Operators,
}

/// Whether the origin accepts calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum OriginState {
    /// No probe has ended yet.
    Connecting,
    Up,
    Down,
}

/// The last known state of the origin.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OriginStatus {
    pub(crate) state: OriginState,
    /// Time of the last change of state, in milliseconds since the Unix epoch.
    pub(crate) since_ms: u64,
    /// The last failure and its time. It stays after the origin is up again.
    pub(crate) cause: Option<(Arc<str>, u64)>,
    /// The eviction policy of the store, if it may evict meters.
    pub(crate) eviction_policy: Option<String>,
}

/// The origin of this server, and its state.
#[derive(Debug)]
pub(crate) struct OriginMonitor {
    /// The address, without credentials.
    pub(crate) address: String,
    status: ArcSwap<OriginStatus>,
}

impl OriginMonitor {
    pub(crate) fn new(address: String, now_ms: u64) -> Self {
        let status = OriginStatus {
            state: OriginState::Connecting,
            since_ms: now_ms,
            cause: None,
            eviction_policy: None,
        };
        Self { address, status: ArcSwap::from_pointee(status) }
    }

    pub(crate) fn status(&self) -> Arc<OriginStatus> {
        self.status.load_full()
    }

    pub(crate) fn is_down(&self) -> bool {
        self.status.load().state == OriginState::Down
    }

    /// Returns sentences about an origin that does not work as it should.
    pub(crate) fn degraded(&self, audience: Audience) -> Vec<String> {
        let OriginStatus { state, since_ms, cause, eviction_policy } = &*self.status();
        let origin = match audience {
            Audience::Public => "the origin".to_owned(),
            Audience::Operators => format!("the origin {}", self.address),
        };
        let mut reasons = Vec::new();
        if *state == OriginState::Down {
            let cause = match (audience, cause) {
                (_, None) => "the cause is not known",
                (Audience::Public, Some((cause, _))) => public_cause(cause),
                (Audience::Operators, Some((cause, _))) => cause,
            };
            reasons.push(format!("{origin} is down since {}: {cause}", timestamp(*since_ms)));
        }
        if let Some(policy) = eviction_policy {
            reasons.push(format!(
                "{origin} may evict meters, and an evicted meter counts as unused: its maxmemory-policy \
                 is {policy}, expected noeviction"
            ));
        }
        reasons
    }

    /// Takes the result of a probe. `answers` is whether the last calls of requests were answered.
    fn note(&self, probed: Result<ProbeReply, OriginError>, answers: bool, now_ms: u64) {
        let before = self.status();
        let mut status = OriginStatus::clone(&before);
        let failure = match probed {
            Ok(ProbeReply { eviction_policy }) => {
                status.eviction_policy = eviction_policy;
                (!answers).then(|| "calls are not answered within origin_timeout".to_owned())
            }
            Err(OriginError::NotApplied(why) | OriginError::Unknown(why)) => Some(why),
            Err(OriginError::Refused(error)) => Some(error.to_string()),
        };
        status.state = if failure.is_some() { OriginState::Down } else { OriginState::Up };
        if let Some(failure) = failure {
            status.cause = Some((failure.into(), now_ms));
        }
        if status.state != before.state {
            status.since_ms = now_ms;
        }
        self.log(&before, &status);
        self.status.store(Arc::new(status));
    }

    /// Logs a change of state, and an eviction policy that was not known before.
    fn log(&self, before: &OriginStatus, now: &OriginStatus) {
        let origin = self.address.as_str();
        if now.state != before.state {
            if let (OriginState::Down, Some((cause, _))) = (now.state, &now.cause) {
                tracing::warn!(
                    origin,
                    %cause,
                    "the origin is down: comfort limits continue with the node share, limits of paid \
                     cost fail open, and all others fail closed"
                );
            } else {
                tracing::info!(origin, "the origin is up: limits are those of the region");
            }
        }
        if let Some(policy) =
            now.eviction_policy.as_ref().filter(|_| now.eviction_policy != before.eviction_policy)
        {
            tracing::warn!(
                origin,
                maxmemory_policy = policy,
                "the origin may evict meters, and an evicted meter counts as unused: set \
                 maxmemory-policy to noeviction"
            );
        }
    }
}

/// The state of an origin, by a single probe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OriginProbe {
    /// The state, with the cause of a failure.
    pub state: String,
    /// Whether the origin works as configured.
    pub is_usable: bool,
}

impl OriginProbe {
    fn new(status: &OriginStatus) -> Self {
        let state = match (status.state, &status.cause, &status.eviction_policy) {
            (OriginState::Down, Some((cause, _)), _) => format!("down: {cause}"),
            (OriginState::Down | OriginState::Connecting, ..) => "down".to_owned(),
            (OriginState::Up, _, Some(policy)) => {
                format!("up, but maxmemory-policy is {policy}, expected noeviction")
            }
            (OriginState::Up, _, None) => "up".to_owned(),
        };
        Self { is_usable: state == "up", state }
    }
}

/// Probes the origin of a server that does not run. Returns `None` without an origin.
pub(crate) async fn probe_once(shared: &Shared) -> Option<OriginProbe> {
    let (region, monitor) = (shared.decider.region.as_ref()?, shared.fleet.origin.as_ref()?);
    let late = |_| {
        Err(OriginError::NotApplied(format!("the origin does not reply within {SINGLE_PROBE_TIME_MAX:?}")))
    };
    let probed = tokio::time::timeout(SINGLE_PROBE_TIME_MAX, region.probe()).await.unwrap_or_else(late);
    monitor.note(probed, true, shared.now_ms());
    Some(OriginProbe::new(&monitor.status()))
}

/// Probes the origin at once, after a stall, and at intervals, as long as the server runs.
pub(crate) async fn watch(shared: Arc<Shared>) {
    let (Some(region), Some(monitor)) = (&shared.decider.region, &shared.fleet.origin) else { return };
    let mut answers = region.origin_up();
    loop {
        let is_answered = *answers.borrow_and_update();
        monitor.note(region.probe().await, is_answered, shared.now_ms());
        let is_up = monitor.status().state == OriginState::Up;
        if !is_next_probe_due(&mut answers, if is_up { PROBE_EVERY } else { RETRY_EVERY }).await {
            return;
        }
    }
}

/// Waits for the next probe. A change of the answers ends the wait early, but not before the
/// minimum gap. Returns false if there are no more answers.
#[expect(clippy::disallowed_methods, reason = "a minimum gap has no condition to wait for")]
async fn is_next_probe_due(answers: &mut Receiver<bool>, every: Duration) -> bool {
    tokio::time::sleep(PROBE_GAP_MIN).await;
    let rest = every.saturating_sub(PROBE_GAP_MIN);
    !matches!(tokio::time::timeout(rest, answers.changed()).await, Ok(Err(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(why: &str) -> Result<ProbeReply, OriginError> {
        Err(OriginError::NotApplied(why.to_owned()))
    }

    #[test]
    fn the_state_has_the_time_of_its_change_and_the_last_cause() {
        let monitor = OriginMonitor::new("redis://h:1".to_owned(), 1);
        let seen = || {
            let OriginStatus { state, since_ms, cause, .. } = (*monitor.status()).clone();
            (state, since_ms, cause.map(|(cause, at_ms)| (cause.to_string(), at_ms)))
        };
        assert_eq!(seen(), (OriginState::Connecting, 1, None));
        assert!(monitor.degraded(Audience::Operators).is_empty());
        monitor.note(failed("cannot connect: WRONGPASS"), true, 2);
        monitor.note(failed("cannot connect: refused"), true, 3);
        let refused = Some(("cannot connect: refused".to_owned(), 3));
        assert_eq!(seen(), (OriginState::Down, 2, refused.clone()));
        assert_eq!(
            monitor.degraded(Audience::Operators),
            ["the origin redis://h:1 is down since 1970-01-01T00:00:00.002Z: cannot connect: refused"]
        );
        assert_eq!(
            monitor.degraded(Audience::Public),
            ["the origin is down since 1970-01-01T00:00:00.002Z: calls fail"]
        );
        monitor.note(Ok(ProbeReply::default()), true, 4);
        assert_eq!(seen(), (OriginState::Up, 4, refused));
        assert!(monitor.degraded(Audience::Operators).is_empty());
        monitor.note(Ok(ProbeReply::default()), false, 5);
        assert_eq!(seen().0, OriginState::Down, "requests get no answers");
    }

    #[test]
    fn an_origin_that_may_evict_is_up_and_degraded() {
        let monitor = OriginMonitor::new("redis://h:1".to_owned(), 1);
        let reply = |policy: Option<&str>| Ok(ProbeReply { eviction_policy: policy.map(str::to_owned) });
        monitor.note(reply(Some("allkeys-lru")), true, 2);
        assert_eq!(monitor.status().state, OriginState::Up);
        let reasons = monitor.degraded(Audience::Operators);
        assert!(reasons.len() == 1 && reasons[0].contains("maxmemory-policy is allkeys-lru"), "{reasons:?}");
        monitor.note(reply(None), true, 3);
        assert!(monitor.degraded(Audience::Operators).is_empty());
    }

    #[test]
    fn public_texts_contain_no_part_of_the_address() {
        for (cause, public) in [
            (
                "cannot connect: Failed to connect to each cluster node (db.internal:7001: Connection refused)",
                "the origin refused the connection",
            ),
            (
                "cannot connect: invalid peer certificate: not valid for name \"db.internal\"",
                "the TLS certificate is not accepted",
            ),
            (
                "An error was signalled by the server - NoPerm: User tide has no permissions",
                "the user of the origin lacks a permission",
            ),
            ("cannot connect: db.internal:7001 is odd", "calls fail"),
        ] {
            let monitor = OriginMonitor::new("redis://db.internal:7001".to_owned(), 1);
            monitor.note(failed(cause), true, 2);
            let expected = format!("the origin is down since 1970-01-01T00:00:00.002Z: {public}");
            assert_eq!(monitor.degraded(Audience::Public), [expected]);
            assert!(monitor.degraded(Audience::Operators)[0].ends_with(cause));
        }
        let monitor = OriginMonitor::new("redis://db.internal:7001".to_owned(), 1);
        monitor.note(Ok(ProbeReply { eviction_policy: Some("allkeys-lru".to_owned()) }), true, 2);
        assert!(monitor.degraded(Audience::Public)[0].starts_with("the origin may evict meters"));
    }

    /// The clock of the runtime stands still, and moves to the next timer when all tasks wait.
    #[tokio::test(start_paused = true)]
    async fn change_of_answers_starts_a_probe_after_the_gap_and_not_before() {
        let (sender, mut answers) = tokio::sync::watch::channel(true);
        let just_before = PROBE_GAP_MIN.saturating_sub(Duration::from_millis(1));
        sender.send(false).expect("a receiver");
        let early = tokio::time::timeout(just_before, is_next_probe_due(&mut answers, PROBE_EVERY)).await;
        assert!(early.is_err(), "within the gap");
        let soon = PROBE_GAP_MIN + Duration::from_millis(1);
        let due = tokio::time::timeout(soon, is_next_probe_due(&mut answers, PROBE_EVERY)).await;
        assert_eq!(due, Ok(true), "the change is not lost");
        let idle = tokio::time::timeout(soon, is_next_probe_due(&mut answers, PROBE_EVERY)).await;
        assert!(idle.is_err(), "nothing changed");
        drop(sender);
        assert!(!is_next_probe_due(&mut answers, PROBE_EVERY).await, "the region is gone");
    }
}
