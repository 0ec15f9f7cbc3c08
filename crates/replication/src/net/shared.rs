//! State that the tasks of a replicator share.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tidegate_core::origin::RegionId;
use tidegate_origin::{LeaseRequest, Origin, OriginError, OriginFuture, PARTITIONS};
use tokio::sync::{Notify, watch};
use tokio::time::timeout;

use super::config::{ClockUs, ValidConfig, ValidPeer};
use super::deliver::DeliveryLog;
use super::status::{PeerCounts, PeerStatus, ReplicationStatus};
use super::tls::Tls;
use crate::forward::ForwardHandler;
use crate::message::{Ack, Batch};
use crate::rounds::{LAG_ALARM_US, Rounds, RoundsConfig};

/// Duration of the replicator lease, µs. The holder renews it every third of this time. Longer:
/// tolerates longer outages of the origin; a crashed replicator is replaced later.
pub(super) const LEASE_US: u64 = 1_500_000;

/// How long a call to the own origin may take.
const ORIGIN_TIME_MAX: Duration = Duration::from_secs(1);

/// Minimum time between two log messages about strangers, µs. Shorter: more detail; a longer log.
const LOG_EVERY_US: u64 = 1_000_000;

/// State that the tasks of a replicator share.
pub(super) struct Shared {
    pub(super) region: String,
    pub(super) peers: Vec<ValidPeer>,
    pub(super) tls: Option<Tls>,
    pub(super) origin: Arc<dyn Origin>,
    pub(super) seed: u64,
    pub(super) forward_handler: Option<Arc<dyn ForwardHandler>>,
    /// Deliveries received from nodes of other regions.
    pub(super) deliveries_seen: DeliveryLog,
    /// For each peer: notified when a batch may be ready.
    pub(super) stirred: Vec<Notify>,
    /// Notified when a round should start before its time.
    pub(super) hurry: Notify,
    /// Hash of the settings that must be the same in every region.
    pub(super) agreement: u64,
    /// The present incarnation, while this process is the replicator.
    pub(super) tenure: watch::Sender<Option<u64>>,
    peer_timeout_us: u64,
    clock_us: ClockUs,
    state: Mutex<State>,
}

struct State {
    rounds: Option<Tenure>,
    tenures: u64,
    counts: Vec<PeerCounts>,
    strangers: u64,
    origin_failures: u64,
    oversized: u64,
    logged_us: Option<u64>,
    /// Whether the region is connected, as last reported to its origin.
    is_connected: bool,
    /// Number of completed rounds, and its value when the region last became connected.
    rounds_done: u64,
    connected_since_round: Option<u64>,
    /// Lag to other regions as reported by the current replicator, µs.
    reported_lag_us: Option<u64>,
    /// Whether the lag of each peer is above the alarm threshold.
    late: Vec<bool>,
    /// Whether each peer has equal settings where all regions must agree. `None` before its first
    /// greeting.
    agrees: Vec<Option<bool>>,
}

/// The time in which this process is the replicator.
struct Tenure {
    rounds: Rounds,
    incarnation: u64,
    until_us: u64,
}

impl Shared {
    pub(super) fn new(checked: ValidConfig, origin: Arc<dyn Origin>) -> Self {
        let count = checked.peers.len();
        let state = State {
            rounds: None,
            tenures: 0,
            counts: vec![PeerCounts::default(); count],
            strangers: 0,
            origin_failures: 0,
            oversized: 0,
            logged_us: None,
            is_connected: false,
            rounds_done: 0,
            connected_since_round: None,
            reported_lag_us: None,
            late: vec![false; count],
            agrees: vec![None; count],
        };
        Self {
            region: checked.region,
            peers: checked.peers,
            tls: checked.tls,
            origin,
            seed: checked.seed,
            forward_handler: checked.forward_handler,
            deliveries_seen: DeliveryLog::default(),
            stirred: (0..count).map(|_| Notify::new()).collect(),
            hurry: Notify::new(),
            agreement: checked.agreement,
            tenure: watch::Sender::new(None),
            peer_timeout_us: checked.peer_timeout_us,
            clock_us: checked.now_us,
            state: Mutex::new(state),
        }
    }

    pub(super) fn now_us(&self) -> u64 {
        (self.clock_us)()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A thread that panicked with this lock left the rounds between two steps. No step is half
        // done.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs `act` on the rounds of a tenure. Returns `None` if the tenure is over.
    pub(super) fn during<T>(&self, incarnation: u64, act: impl FnOnce(&mut Rounds, u64) -> T) -> Option<T> {
        let now_us = self.now_us();
        let mut state = self.state();
        let tenure = state.rounds.as_mut()?;
        let is_on = tenure.incarnation == incarnation && now_us < tenure.until_us;
        is_on.then(|| act(&mut tenure.rounds, now_us))
    }

    /// The present tenure, if this process is the replicator.
    pub(super) fn incarnation(&self) -> Option<u64> {
        let incarnation = *self.tenure.borrow();
        self.during(incarnation?, |_, _| ()).and(incarnation)
    }

    /// Takes in that the lease is ours until then.
    pub(super) fn begin_or_extend(&self, until_us: u64) {
        let now_us = self.now_us();
        let mut state = self.state();
        if let Some(tenure) = state.rounds.as_mut().filter(|tenure| now_us < tenure.until_us) {
            tenure.until_us = until_us;
            return;
        }
        // After an expired lease the rounds start again: another node may have been the replicator
        // in between.
        state.tenures += 1;
        let incarnation = self.seed.wrapping_add(state.tenures);
        let rounds = Rounds::new(&self.rounds_config(incarnation));
        state.rounds = Some(Tenure { rounds, incarnation, until_us });
        drop(state);
        tracing::info!(region = self.region, "this node has become the replicator of its region");
        self.tenure.send_replace(Some(incarnation));
    }

    fn rounds_config(&self, incarnation: u64) -> RoundsConfig {
        RoundsConfig {
            peers: self.peers.iter().map(|peer| peer.id).collect(),
            partitions: PARTITIONS,
            incarnation,
            peer_timeout_us: self.peer_timeout_us,
        }
    }

    /// Returns the request to acquire or renew the lease.
    pub(super) fn lease_request(&self) -> LeaseRequest {
        let lag_us = self.status().lag_us.unwrap_or(0);
        LeaseRequest { holder: self.seed, for_us: LEASE_US, lag_us }
    }

    /// Records that another node holds the lease, and the lag which that node reports.
    pub(super) fn note_other_holder(&self, lag_us: u64) {
        self.end();
        self.state().reported_lag_us = Some(lag_us).filter(|lag_us| *lag_us > 0);
    }

    /// Ends the tenure: another node holds the lease, or it expired.
    pub(super) fn end(&self) {
        if self.state().rounds.take().is_some() {
            tracing::info!(region = self.region, "this node is no longer the replicator of its region");
            self.tenure.send_replace(None);
        }
    }

    pub(super) fn is_over(&self) -> bool {
        let now_us = self.now_us();
        self.state().rounds.as_ref().is_some_and(|tenure| now_us >= tenure.until_us)
    }

    /// Releases the lease if this node holds it.
    pub(super) async fn give_up_lease(&self) {
        if self.tenure.borrow().is_some() {
            self.end();
            // If that fails, the lease runs out.
            let _ =
                self.ask_origin(self.origin.lease(LeaseRequest { for_us: 0, ..self.lease_request() })).await;
        }
    }

    /// Awaits a call to the own origin with a timeout, and counts failures.
    pub(super) async fn ask_origin<T>(&self, answer: OriginFuture<'_, T>) -> Result<T, OriginError> {
        let late = || OriginError::Unknown(format!("the origin did not reply within {ORIGIN_TIME_MAX:?}"));
        let answer = timeout(ORIGIN_TIME_MAX, answer).await.unwrap_or_else(|_| Err(late()));
        if answer.is_err() {
            self.state().origin_failures += 1;
        }
        answer
    }

    pub(super) fn peer_named(&self, name: &str) -> Option<usize> {
        self.peers.iter().position(|peer| peer.name == name)
    }

    pub(super) fn id(&self, place: usize) -> Option<RegionId> {
        self.peers.get(place).map(|peer| peer.id)
    }

    pub(super) fn count(&self, place: usize, count: impl FnOnce(&mut PeerCounts)) {
        if let Some(counts) = self.state().counts.get_mut(place) {
            count(counts);
        }
    }

    /// Counts a stranger, and logs it unless one was logged within the last second.
    pub(super) fn note_stranger(&self, from: std::net::SocketAddr, why: &dyn std::fmt::Display) {
        let now_us = self.now_us();
        let mut state = self.state();
        state.strangers += 1;
        if state.logged_us.is_none_or(|logged_us| now_us >= logged_us + LOG_EVERY_US) {
            state.logged_us = Some(now_us);
            tracing::warn!(region = self.region, %from, "refused an incoming peer connection: {why}");
        }
    }

    pub(super) fn note_oversized(&self, oversized: u64) {
        if oversized > 0 {
            self.state().oversized += oversized;
            tracing::warn!(
                region = self.region,
                oversized,
                "keys too long for the wire format are not replicated: peers do not count their usage"
            );
        }
    }

    /// Records a merged batch. Returns its acknowledgement, or `None` if the tenure is over. If the
    /// region now hears all peers again, or is settled, peers and the own origin need not wait for
    /// the next round to know.
    pub(super) fn note_merged_batch(&self, incarnation: u64, from: RegionId, batch: &Batch) -> Option<Ack> {
        let (ack, is_news) = self.during(incarnation, |rounds, now_us| {
            let stance = |rounds: &Rounds| (rounds.connected_for_us(now_us) > 0, rounds.is_settled(now_us));
            let before = stance(rounds);
            let ack = rounds.merged(now_us, from, batch);
            (ack, stance(rounds) > before)
        })?;
        self.stirred.iter().for_each(Notify::notify_one);
        if is_news {
            self.hurry.notify_one();
        }
        Some(ack)
    }

    /// Whether the region counts with all others.
    pub(super) fn is_connected(&self, incarnation: u64) -> bool {
        self.during(incarnation, |rounds, now_us| rounds.is_settled(now_us)).unwrap_or(false)
    }

    /// Ends a round that reported to the origin whether the region is connected. Wakes all senders,
    /// and logs changes of connectivity and lag.
    pub(super) fn round_ended(&self, incarnation: u64, is_connected: bool) {
        let lags = self.during(incarnation, |rounds, now_us| {
            rounds.round_ended();
            let states = self.peers.iter().map(|peer| rounds.peer_state(now_us, peer.id));
            states.map(|state| state.and_then(|state| state.lag_us)).collect::<Vec<Option<u64>>>()
        });
        self.stirred.iter().for_each(Notify::notify_one);
        if let Some(lags) = lags {
            self.note_connected(is_connected);
            self.note_lags(&lags);
        }
    }

    fn note_connected(&self, is_connected: bool) {
        let mut state = self.state();
        state.rounds_done += 1;
        if std::mem::replace(&mut state.is_connected, is_connected) == is_connected {
            return;
        }
        state.connected_since_round = is_connected.then_some(state.rounds_done);
        drop(state);
        if is_connected {
            tracing::info!(region = self.region, "connected: this region counts the usage of all regions");
        } else {
            tracing::warn!(
                region = self.region,
                "isolated: a peer timed out or has not published its usage while isolated; global limits \
                 fall back to the regional share"
            );
        }
    }

    /// Records the settings hash of a peer, and warns if it differs from ours.
    pub(super) fn note_agreement(&self, place: usize, theirs: u64) {
        let agrees = theirs == self.agreement;
        let mut state = self.state();
        let Some(known) = state.agrees.get_mut(place) else { return };
        let is_news = known.replace(agrees) != Some(agrees);
        drop(state);
        if is_news && !agrees {
            let peer = self.peers.get(place).map_or("", |peer| &peer.name);
            tracing::warn!(
                region = self.region,
                peer,
                "this peer has a different region list, weights or `peer_timeout` than this node: regional \
                 shares may add up to more than the limit, and strict keys with different owners are refused"
            );
        }
    }

    fn note_lags(&self, lags: &[Option<u64>]) {
        let mut state = self.state();
        for ((late, lag_us), peer) in state.late.iter_mut().zip(lags).zip(&self.peers) {
            let is_late = lag_us.is_some_and(|lag_us| lag_us > LAG_ALARM_US);
            if std::mem::replace(late, is_late) == is_late {
                continue;
            }
            let lag_ms = lag_us.unwrap_or_default() / 1_000;
            if is_late {
                tracing::warn!(
                    peer = peer.name,
                    lag_ms,
                    "the replication lag to this peer is above the alarm threshold"
                );
            } else {
                tracing::info!(
                    peer = peer.name,
                    lag_ms,
                    "the replication lag to this peer is below the alarm threshold again"
                );
            }
        }
    }

    pub(super) fn status(&self) -> ReplicationStatus {
        let now_us = self.now_us();
        let state = self.state();
        let rounds =
            state.rounds.as_ref().filter(|tenure| now_us < tenure.until_us).map(|tenure| &tenure.rounds);
        let peer = |((peer, counts), agrees): ((&ValidPeer, &PeerCounts), &Option<bool>)| {
            let known = rounds.and_then(|rounds| rounds.peer_state(now_us, peer.id));
            PeerStatus {
                region: peer.name.clone(),
                has_link: known.is_some_and(|known| known.has_link),
                lag_us: known.and_then(|known| known.lag_us),
                last_heard_age_us: known.and_then(|known| known.last_heard_age_us),
                agrees: *agrees,
                counts: *counts,
            }
        };
        let peers: Vec<PeerStatus> =
            self.peers.iter().zip(&state.counts).zip(&state.agrees).map(peer).collect();
        let measured_us = || peers.iter().filter_map(|peer| peer.lag_us).max();
        ReplicationStatus {
            lag_us: if rounds.is_some() { measured_us() } else { state.reported_lag_us },
            is_replicator: rounds.is_some(),
            is_connected: state.is_connected && rounds.is_some_and(|rounds| rounds.is_settled(now_us)),
            last_heard_age_us: rounds.and_then(|rounds| rounds.effective_age_us(now_us)),
            strangers: state.strangers,
            origin_failures: state.origin_failures,
            oversized: state.oversized,
            rounds: state.rounds_done,
            connected_since_round: state.connected_since_round,
            peers,
        }
    }
}
