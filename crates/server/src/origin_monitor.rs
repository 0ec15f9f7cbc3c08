//! The state of the origin: probed from the start on, logged when it changes, with the last cause.

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use serde::Serialize;
use tidegate::region::{OriginError, ProbeReply};
use tidegate_record::timestamp;
use utoipa::ToSchema;

use crate::shared::Shared;

/// Interval between probes of an origin that is up. Shorter: an idle server notices an outage
/// earlier; more calls.
const PROBE_EVERY: Duration = Duration::from_secs(10);

/// Interval between probes of an origin that is down.
const RETRY_EVERY: Duration = Duration::from_secs(1);

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
    pub(crate) fn degraded(&self) -> Vec<String> {
        let (OriginStatus { state, since_ms, cause, eviction_policy }, address) =
            (&*self.status(), &self.address);
        let mut reasons = Vec::new();
        if *state == OriginState::Down {
            let cause = cause.as_ref().map_or("the cause is not known", |(cause, _)| cause);
            reasons.push(format!("the origin {address} is down since {}: {cause}", timestamp(*since_ms)));
        }
        if let Some(policy) = eviction_policy {
            reasons.push(format!(
                "the origin {address} may evict meters, and an evicted meter counts as unused: its \
                 maxmemory-policy is {policy}, expected noeviction"
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

/// Probes the origin at once, after a stall, and at intervals, as long as the server runs.
pub(crate) async fn watch(shared: Arc<Shared>) {
    let (Some(region), Some(monitor)) = (&shared.decider.region, &shared.origin) else { return };
    let mut answers = region.origin_up();
    loop {
        let is_answered = *answers.borrow_and_update();
        monitor.note(region.probe().await, is_answered, shared.now_ms());
        let is_up = monitor.status().state == OriginState::Up;
        let wait = if is_up { PROBE_EVERY } else { RETRY_EVERY };
        // A change of the answers ends the wait early.
        if let Ok(Err(_)) = tokio::time::timeout(wait, answers.changed()).await {
            return;
        }
    }
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
        assert!(monitor.degraded().is_empty());
        monitor.note(failed("cannot connect: WRONGPASS"), true, 2);
        monitor.note(failed("cannot connect: refused"), true, 3);
        let refused = Some(("cannot connect: refused".to_owned(), 3));
        assert_eq!(seen(), (OriginState::Down, 2, refused.clone()));
        assert_eq!(
            monitor.degraded(),
            ["the origin redis://h:1 is down since 1970-01-01T00:00:00.002Z: cannot connect: refused"]
        );
        monitor.note(Ok(ProbeReply::default()), true, 4);
        assert_eq!(seen(), (OriginState::Up, 4, refused));
        assert!(monitor.degraded().is_empty());
        monitor.note(Ok(ProbeReply::default()), false, 5);
        assert_eq!(seen().0, OriginState::Down, "requests get no answers");
    }

    #[test]
    fn an_origin_that_may_evict_is_up_and_degraded() {
        let monitor = OriginMonitor::new("redis://h:1".to_owned(), 1);
        let reply = |policy: Option<&str>| Ok(ProbeReply { eviction_policy: policy.map(str::to_owned) });
        monitor.note(reply(Some("allkeys-lru")), true, 2);
        assert_eq!(monitor.status().state, OriginState::Up);
        let reasons = monitor.degraded();
        assert!(reasons.len() == 1 && reasons[0].contains("maxmemory-policy is allkeys-lru"), "{reasons:?}");
        monitor.note(reply(None), true, 3);
        assert!(monitor.degraded().is_empty());
    }
}
