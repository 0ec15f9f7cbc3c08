//! The replication rounds: requests to the own origin, batches to each peer, and the last-heard age
//! of each peer. This module does no I/O and reads no clock; its caller passes the time.
//!
//! ```text
//! own origin  --partition_rounds, gathered-->  Rounds  --next_batch, acknowledge-->  each peer
//! peers       --merged---------->  Rounds  --connected_for_us, settled---->  own origin, with each ask
//! ```
//!
//! The origin stamps dirty meters in order. For each peer and partition, `Rounds` keeps two
//! positions in that order. The gathered position advances with each reply of the origin. The
//! acknowledged position advances when the peer has merged a batch and all before it. A meter is
//! dirty until all peers have acknowledged it.
//!
//! Several batches are in flight to a peer, and the peer may merge and acknowledge them in any
//! order. All of this state is in memory: a new replicator starts at the oldest dirty meter and
//! repeats batches of its predecessor. Components are merged by their maximum, so repeated, late or
//! reordered batches change nothing.

mod liveness;
mod outbox;

use tidegate_core::RemoteClock;
use tidegate_core::bound::{PEER_TIMEOUT_US, REPLICATION_INTERVAL_US};
use tidegate_core::origin::{RegionId, RoundReply, RoundRequest};

use crate::message::{Ack, Batch};
use liveness::PeerLiveness;
use outbox::Outbox;

pub use tidegate_core::bound::LAG_ALARM_US;

pub use outbox::{BATCH_BYTES_MAX, BATCH_COMPONENTS_MAX, BATCHES_IN_FLIGHT_MAX, OUTBOX_BYTES_MAX};

/// Maximum components in one reply of the origin. Higher: fewer calls while much changes; each call
/// occupies the origin for longer.
pub const GATHER_MAX: u16 = 256;

/// The most regions beside the own one. Each costs its part of every batch sent, and a cursor for
/// each partition.
pub const PEERS_MAX: usize = 15;

/// Interval of replication rounds, µs, as used in bounds.
pub const INTERVAL_US: u64 = REPLICATION_INTERVAL_US;

/// Default peer timeout, µs, as used in bounds.
pub const PEER_TIMEOUT_DEFAULT_US: u64 = PEER_TIMEOUT_US;

/// Configuration of the replication rounds.
#[derive(Clone, Debug)]
pub struct RoundsConfig {
    /// The other regions, each once.
    pub peers: Vec<RegionId>,
    /// How many partitions an origin has.
    pub partitions: u16,
    /// Number of the replicator, different from that of every predecessor.
    pub incarnation: u64,
    /// Peer timeout, µs. The default is [`PEER_TIMEOUT_DEFAULT_US`].
    pub peer_timeout_us: u64,
}

/// The replication rounds of one tenure: from the start of a replicator until it loses its lease.
#[derive(Debug)]
pub struct Rounds {
    incarnation: u64,
    peer_timeout_us: u64,
    peers: Vec<Peer>,
    /// For each partition: its clock in the last reply.
    clocks: Vec<Option<RemoteClock>>,
}

#[derive(Debug)]
struct Peer {
    region: RegionId,
    outbox: Outbox,
    liveness: PeerLiveness,
}

/// A request to one partition of the own origin. Several requests are sent one after the other, in
/// any order.
#[derive(Clone, Debug)]
pub struct PartitionRound {
    /// The partition.
    pub partition: u16,
    /// The request itself.
    pub round: RoundRequest,
    since_us: u64,
    /// Indices of the peers that receive the gathered components.
    peers: Vec<usize>,
}

/// Replication state of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerState {
    /// Whether there is a link to it.
    pub has_link: bool,
    /// Measured time until the peer knows of a change here, µs. It grows while acknowledgements are
    /// missing. `None` until the peer has acknowledged everything once.
    pub lag_us: Option<u64>,
    /// Age of the newest state known of the peer, µs. `None` if it was never heard.
    pub last_heard_age_us: Option<u64>,
}

impl Rounds {
    /// Creates the rounds of a new replicator, without any state of its predecessor.
    pub fn new(config: &RoundsConfig) -> Self {
        let peer = |region: &RegionId| Peer {
            region: *region,
            outbox: Outbox::new(config.partitions),
            liveness: PeerLiveness::default(),
        };
        Self {
            incarnation: config.incarnation,
            peer_timeout_us: config.peer_timeout_us,
            peers: config.peers.iter().map(peer).collect(),
            clocks: vec![None; usize::from(config.partitions)],
        }
    }

    /// Returns the requests to a partition in this round. Peers at the same position share one
    /// request. Without a peer to gather for, one request still reports for how long the region is
    /// connected.
    pub fn partition_rounds(&self, now_us: u64, partition: u16) -> Vec<PartitionRound> {
        let mut partition_rounds: Vec<PartitionRound> = Vec::with_capacity(1);
        let ready = self.peers.iter().enumerate().filter(|(_, peer)| peer.outbox.has_room());
        for (place, peer) in ready {
            let after = peer.outbox.gathered_upto(partition);
            match partition_rounds.iter_mut().find(|partition_round| partition_round.round.after == after) {
                Some(partition_round) => partition_round.peers.push(place),
                None => partition_rounds.push(self.ask(now_us, partition, after, GATHER_MAX, vec![place])),
            }
        }
        if partition_rounds.is_empty() {
            partition_rounds.push(self.ask(now_us, partition, 0, 0, Vec::new()));
        }
        partition_rounds
    }

    /// Returns the next request, if the reply has more to follow and a peer has room for it. If the
    /// origin has lost its dirty meters, the next round starts again from the beginning.
    pub fn next_partition_round(
        &self,
        now_us: u64,
        partition_round: &PartitionRound,
        gathered: &RoundReply,
    ) -> Option<PartitionRound> {
        let is_ready = |place: &&usize| self.peers.get(**place).is_some_and(|peer| peer.outbox.has_room());
        let peers: Vec<usize> = partition_round.peers.iter().filter(is_ready).copied().collect();
        let goes_on = gathered.more && gathered.upto >= partition_round.round.after;
        (goes_on && !peers.is_empty())
            .then(|| self.ask(now_us, partition_round.partition, gathered.upto, GATHER_MAX, peers))
    }

    fn ask(&self, now_us: u64, partition: u16, after: u64, most: u16, peers: Vec<usize>) -> PartitionRound {
        let acknowledged = self.peers.iter().map(|peer| peer.outbox.acknowledged(partition));
        let trim = acknowledged.min().unwrap_or(0);
        let (connected_for_us, settled) = (self.connected_for_us(now_us), self.is_settled(now_us));
        let clock_us = self.clock_us(now_us, partition);
        PartitionRound {
            partition,
            round: RoundRequest { connected_for_us, settled, clock_us, trim, after, most },
            since_us: now_us,
            peers,
        }
    }

    /// Returns a lower bound of a partition's clock now, or 0 if it has never replied.
    fn clock_us(&self, now_us: u64, partition: u16) -> u64 {
        let known = self.clocks.get(usize::from(partition)).copied().flatten();
        known.map_or(0, |clock| clock.at_us(now_us))
    }

    /// Applies a reply of the own origin. If a reply is lost, the next round repeats the request.
    /// Returns the number of components that are too large to send, which peers do not count.
    pub fn on_round_reply(
        &mut self,
        now_us: u64,
        partition_round: &PartitionRound,
        gathered: &RoundReply,
    ) -> u64 {
        if let Some(clock) = self.clocks.get_mut(usize::from(partition_round.partition)) {
            *clock = Some(RemoteClock::new(gathered.now_us, now_us));
        }
        if gathered.upto < partition_round.round.after {
            // The store has lost writes, and its marks with them.
            self.peers.iter_mut().for_each(|peer| peer.outbox.begin_anew(partition_round.partition));
            return 0;
        }
        let (pieces, oversized) = outbox::pieces(partition_round.partition, &gathered.components);
        for place in &partition_round.peers {
            let Some(peer) = self.peers.get_mut(*place) else { continue };
            // Overlapping replies do no harm: their common components are sent twice.
            peer.outbox.take(partition_round.since_us, partition_round.partition, gathered, &pieces);
        }
        oversized
    }

    /// Records that all partitions were called. A batch to each peer is now due, as a heartbeat if
    /// there are no changes.
    pub fn round_ended(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.outbox.round_ended());
    }

    /// Records a new link to a peer, and the peer's clock in its welcome.
    pub fn connected(&mut self, peer: RegionId, echo_us: u64) {
        if let Some(peer) = self.peer_mut(peer) {
            peer.outbox.connect(echo_us);
        }
    }

    /// Takes in that the link to a peer broke.
    pub fn disconnected(&mut self, peer: RegionId) {
        if let Some(peer) = self.peer_mut(peer) {
            peer.outbox.disconnect();
        }
    }

    /// Returns the next batch to a peer, if one is ready. If the caller cannot send it, it must
    /// treat the link as broken.
    pub fn next_batch(&mut self, now_us: u64, peer: RegionId) -> Option<Batch> {
        let (incarnation, last_heard_age_us) = (self.incarnation, self.last_heard_age_us(now_us));
        self.peer_mut(peer)?.outbox.next(now_us, incarnation, last_heard_age_us)
    }

    /// Records an acknowledgement. Returns false if its batch is not in flight: an old one, or a
    /// predecessor's.
    pub fn acknowledged(&mut self, now_us: u64, peer: RegionId, ack: &Ack) -> bool {
        self.peer_mut(peer).is_some_and(|peer| peer.outbox.acknowledge(now_us, ack))
    }

    /// Records that a peer's batch is completely merged into the own origin, and returns its
    /// acknowledgement. If it ends the loss of a peer, batches to all peers are due at once: they
    /// wait for this state.
    pub fn merged(&mut self, now_us: u64, peer: RegionId, batch: &Batch) -> Ack {
        let was_silent = self.has_lost_peer(now_us);
        if let Some(peer) = self.peer_mut(peer) {
            peer.liveness.take_in(now_us, batch);
        }
        if was_silent && !self.has_lost_peer(now_us) {
            self.round_ended();
        }
        Ack { id: batch.id, clock_us: now_us }
    }

    /// Whether a peer has reached the peer timeout, or was never heard.
    fn has_lost_peer(&self, now_us: u64) -> bool {
        self.last_heard_age_us(now_us)
            .is_none_or(|last_heard_age_us| last_heard_age_us >= self.peer_timeout_us)
    }

    /// Returns the highest last-heard age of all peers, µs. `None` while one was never heard.
    pub fn last_heard_age_us(&self, now_us: u64) -> Option<u64> {
        most(self.peers.iter().map(|peer| peer.liveness.last_heard_age_us(now_us)))
    }

    /// The same, including the ages that peers report of their own peers. If two regions lose each
    /// other and both reach a third, all three know.
    pub fn effective_age_us(&self, now_us: u64) -> Option<u64> {
        most(self.peers.iter().map(|peer| peer.liveness.effective_age_us(now_us)))
    }

    /// Returns for how long from now all regions count as heard, µs. A value stays valid even if a
    /// later one is smaller. While the region is settled, the value is at most the time for which
    /// it stays settled.
    pub fn connected_for_us(&self, now_us: u64) -> u64 {
        let heard_for_us = self.rest_us(self.effective_age_us(now_us));
        match self.settled_for_us(now_us) {
            0 => heard_for_us,
            settled_for_us => heard_for_us.min(settled_for_us),
        }
    }

    /// Whether the region may count all regions together. All usage of peers is merged, including
    /// usage charged while isolated, except that of the last peer timeout.
    pub fn is_settled(&self, now_us: u64) -> bool {
        self.settled_for_us(now_us) > 0 && self.connected_for_us(now_us) > 0
    }

    fn settled_for_us(&self, now_us: u64) -> u64 {
        self.rest_us(most(self.peers.iter().map(|peer| peer.liveness.isolated_age_us(now_us))))
    }

    /// Returns the time left until the peer timeout, µs.
    fn rest_us(&self, last_heard_age_us: Option<u64>) -> u64 {
        last_heard_age_us
            .map_or(0, |last_heard_age_us| self.peer_timeout_us.saturating_sub(last_heard_age_us))
    }

    /// Returns the replication state of a peer.
    pub fn peer_state(&self, now_us: u64, peer: RegionId) -> Option<PeerState> {
        let peer = self.peers.iter().find(|known| known.region == peer)?;
        Some(PeerState {
            has_link: peer.outbox.has_link(),
            lag_us: peer.outbox.lag_us(now_us, INTERVAL_US),
            last_heard_age_us: peer.liveness.last_heard_age_us(now_us),
        })
    }

    fn peer_mut(&mut self, region: RegionId) -> Option<&mut Peer> {
        self.peers.iter_mut().find(|peer| peer.region == region)
    }
}

/// Returns the highest of several ages, or `None` if one is unknown.
fn most(ages: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    ages.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

#[cfg(test)]
mod tests;
