//! The replication rounds: what to ask the own origin for, what to send to whom, and how well others are heard. Nothing here
//! waits, reads a clock or opens a socket; whoever carries it out says what time it is.
//!
//! ```text
//! own origin  --partition_rounds, gathered-->  Rounds  --next_batch, acknowledge-->  each peer
//! peers       --merged---------->  Rounds  --connected_for_us, settled---->  own origin, with each ask
//! ```
//!
//! What changed is marked at the origin, in order. A peer's place in that order moves on when the origin has answered, and
//! what a peer has acknowledged when it has merged a batch, and all before it, into an origin of its own; only what every peer
//! has acknowledged is dropped from the marks. Several batches are under way to a peer at once, and may be merged and
//! acknowledged in any order. All of this is in memory: a new replicator begins at the oldest mark and says again what its
//! predecessor may have said. Components are merged by their maximum, so that saying something twice, late or in another
//! order changes nothing.

mod liveness;
mod outbox;

use tidegate_core::bound::{PEER_TIMEOUT_US, REPLICATION_INTERVAL_US};
use tidegate_core::origin::{RegionId, RoundReply, RoundRequest};

use crate::message::{Ack, Batch};
use liveness::PeerLiveness;
use outbox::Outbox;

pub use tidegate_core::bound::LAG_ALARM_US;

pub use outbox::{BATCH_BYTES_MAX, BATCH_COMPONENTS_MAX, BATCHES_IN_FLIGHT_MAX, OUTBOX_BYTES_MAX};

/// The most components that an origin is asked for at once. Higher: fewer calls while much changes; a store is busy with each
/// for longer.
pub const GATHER_MAX: u16 = 256;

/// The most regions beside the own one. Each costs its part of every batch sent, and a cursor for each partition.
pub const PEERS_MAX: usize = 15;

/// How often a replicator goes its round, µs: as bounds count with it.
pub const INTERVAL_US: u64 = REPLICATION_INTERVAL_US;

/// For how long others may be silent before a region falls back to its own part, unless told otherwise, µs: as bounds count with it.
pub const PEER_TIMEOUT_DEFAULT_US: u64 = PEER_TIMEOUT_US;

/// What a replicator has to know.
#[derive(Clone, Debug)]
pub struct RoundsConfig {
    /// The other regions, each once.
    pub peers: Vec<RegionId>,
    /// How many partitions an origin has.
    pub partitions: u16,
    /// The replicator: a number that nobody before it had.
    pub incarnation: u64,
    /// For how long others may be silent, µs: [`PEER_TIMEOUT_DEFAULT_US`] unless there is a reason.
    pub peer_timeout_us: u64,
}

/// The replication rounds, from when it became one until it is none any more.
#[derive(Debug)]
pub struct Rounds {
    incarnation: u64,
    peer_timeout_us: u64,
    peers: Vec<Peer>,
    /// For each partition what its clock read when it last answered, and ours then.
    clocks_us: Vec<Option<(u64, u64)>>,
}

#[derive(Debug)]
struct Peer {
    region: RegionId,
    outbox: Outbox,
    liveness: PeerLiveness,
}

/// Something to ask of one partition of the own origin. Of several, one after the other, in any order.
#[derive(Clone, Debug)]
pub struct PartitionRound {
    /// The partition.
    pub partition: u16,
    /// What is asked.
    pub round: RoundRequest,
    since_us: u64,
    /// For whom: places among the peers.
    peers: Vec<usize>,
}

/// How it stands with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerState {
    /// Whether there is a link to it.
    pub has_link: bool,
    /// What a change here takes to be known there, µs, measured; it grows while nothing is acknowledged. Nothing before the
    /// peer has acknowledged everything once.
    pub lag_us: Option<u64>,
    /// For how long nothing was heard of it, µs. Nothing if it never was.
    pub last_heard_age_us: Option<u64>,
}

impl Rounds {
    /// The rounds of a new replicator, which knows nothing of its predecessor.
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
            clocks_us: vec![None; usize::from(config.partitions)],
        }
    }

    /// What to ask of a partition in this round: for peers that are equally far, once. With no peer to gather for, there is
    /// still to be said for how long the region is whole.
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

    /// What to ask next, if there was more than an answer could hold and somebody waits for it. Of a store that has lost its marks
    /// everything is asked for in the next round, from the beginning.
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

    /// What the clock of a partition reads by now, at least; 0 if it has never answered.
    fn clock_us(&self, now_us: u64, partition: u16) -> u64 {
        let known = self.clocks_us.get(usize::from(partition)).copied().flatten();
        known.map_or(0, |(clock_us, then_us)| clock_us.saturating_add(now_us.saturating_sub(then_us)))
    }

    /// Takes in an answer of the own origin. One that never came is asked for again in the next round. How many components are
    /// too large to be carried: others do not count them.
    pub fn on_round_reply(
        &mut self,
        now_us: u64,
        partition_round: &PartitionRound,
        gathered: &RoundReply,
    ) -> u64 {
        if let Some(clock) = self.clocks_us.get_mut(usize::from(partition_round.partition)) {
            *clock = Some((gathered.now_us, now_us));
        }
        if gathered.upto < partition_round.round.after {
            // The store has lost writes, and its marks with them.
            self.peers.iter_mut().for_each(|peer| peer.outbox.begin_anew(partition_round.partition));
            return 0;
        }
        let (pieces, oversized) = outbox::pieces(partition_round.partition, &gathered.components);
        for place in &partition_round.peers {
            let Some(peer) = self.peers.get_mut(*place) else { continue };
            // Answers that overlap are no harm: what is in both is said twice.
            peer.outbox.take(partition_round.since_us, partition_round.partition, gathered, &pieces);
        }
        oversized
    }

    /// Takes in that every partition was asked: each peer gets a sign of life, also where nothing changed.
    pub fn round_ended(&mut self) {
        self.peers.iter_mut().for_each(|peer| peer.outbox.round_ended());
    }

    /// Takes in that there is a link to a peer, which said what its clock reads.
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

    /// What to send to a peer now, if anything: it has to be sent, or the link taken as broken.
    pub fn next_batch(&mut self, now_us: u64, peer: RegionId) -> Option<Batch> {
        let (incarnation, last_heard_age_us) = (self.incarnation, self.last_heard_age_us(now_us));
        self.peer_mut(peer)?.outbox.next(now_us, incarnation, last_heard_age_us)
    }

    /// Takes in that a peer merged a batch; false if that is none of those under way: an old one, or a predecessor's.
    pub fn acknowledged(&mut self, now_us: u64, peer: RegionId, ack: &Ack) -> bool {
        self.peer_mut(peer).is_some_and(|peer| peer.outbox.acknowledge(now_us, ack))
    }

    /// Takes in that a batch of a peer was merged into the own origin, whole; what to answer.
    /// Where it ends a silence, the others wait to hear of that.
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

    /// Whether a peer has been silent for too long, or was never heard of.
    fn has_lost_peer(&self, now_us: u64) -> bool {
        self.last_heard_age_us(now_us)
            .is_none_or(|last_heard_age_us| last_heard_age_us >= self.peer_timeout_us)
    }

    /// For how long the most silent peer has been silent, µs; nothing while one was never heard of.
    pub fn last_heard_age_us(&self, now_us: u64) -> Option<u64> {
        most(self.peers.iter().map(|peer| peer.liveness.last_heard_age_us(now_us)))
    }

    /// The same, counting whom peers have not heard of: where two regions are cut from each other and both see a third, all
    /// three know.
    pub fn effective_age_us(&self, now_us: u64) -> Option<u64> {
        most(self.peers.iter().map(|peer| peer.liveness.effective_age_us(now_us)))
    }

    /// For how long from now on all regions count as heard of, µs. Once said it stays true, whoever says less later. Where the region
    /// counts on the whole, as long as it may.
    pub fn connected_for_us(&self, now_us: u64) -> u64 {
        let heard_for_us = self.rest_us(self.effective_age_us(now_us));
        match self.settled_for_us(now_us) {
            0 => heard_for_us,
            settled_for_us => heard_for_us.min(settled_for_us),
        }
    }

    /// Whether the region may count on the whole: all that the others charged is here, also to their standing parts, but for what they
    /// charged of late.
    pub fn is_settled(&self, now_us: u64) -> bool {
        self.settled_for_us(now_us) > 0 && self.connected_for_us(now_us) > 0
    }

    fn settled_for_us(&self, now_us: u64) -> u64 {
        self.rest_us(most(self.peers.iter().map(|peer| peer.liveness.isolated_age_us(now_us))))
    }

    /// What is left of the longest silence allowed.
    fn rest_us(&self, last_heard_age_us: Option<u64>) -> u64 {
        last_heard_age_us
            .map_or(0, |last_heard_age_us| self.peer_timeout_us.saturating_sub(last_heard_age_us))
    }

    /// How it stands with a peer.
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

/// The longest of several silences; nothing if one of them is not known.
fn most(ages: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    ages.collect::<Option<Vec<u64>>>()?.into_iter().max()
}

#[cfg(test)]
mod tests;
