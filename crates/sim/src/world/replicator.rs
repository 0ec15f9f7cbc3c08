//! Replicators: the shipped rounds, carried out over a network that loses, repeats and delays.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::origin::{MergeRequest, RoundReply, RoundRequest};
use tidegate_replication::{Ack, Batch, INTERVAL_US, PEER_TIMEOUT_DEFAULT_US, Rounds, RoundsConfig};

use super::{Event, RoundInTransit, World, region_id};
use crate::checks::{AppliedMerge, AppliedRound, Observation, is_connected, news, owed};
use crate::clock::SkewedClock;
use crate::network::hits;
use crate::node::meter_of;
use crate::scenario::SECOND_US;

/// How long a replicator is missed before another takes over, and how much longer at most.
const LEASE_US: u64 = 1_500_000;

/// How long a replicator waits for its origin, µs.
const ORIGIN_US_MAX: u64 = SECOND_US;

/// How long a replicator waits for a batch to be acknowledged, µs.
const ACK_US_MAX: u64 = 3 * SECOND_US;

/// How often a replicator tries to reach a peer, µs.
pub(super) const RECONNECT_US: u64 = SECOND_US / 2;

/// Largest extra delay of a message that the network sends again, µs.
const RESENT_US: u64 = SECOND_US;

/// Largest extra delay of a slow message or of a second copy, µs.
const SLOW_US: u64 = 2 * SECOND_US;

/// Lost messages out of four that the network itself sends again.
const RESENT_OF_FOUR: u8 = 3;

/// A step of a replicator, in the middle of which it may die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Ask,
    Gather,
    Send,
    Merge,
    Answer,
    Acknowledge,
}

impl Step {
    pub(super) const ALL: [Self; 6] =
        [Self::Ask, Self::Gather, Self::Send, Self::Merge, Self::Answer, Self::Acknowledge];
}

/// A link from a sending to a listening replicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) from: usize,
    pub(super) replicator: u64,
    pub(super) to: usize,
    /// The replicator that listens.
    peer: u64,
    /// Number of the connection. A message on a broken connection does not break another one.
    number: u64,
}

/// The network between regions.
pub(super) struct Links {
    /// Time of the last message from one end of a link, and its arrival times, µs.
    streams: BTreeMap<(u64, usize), (u64, Vec<u64>)>,
    /// Number of current cuts of the link from one region to another, by both.
    cuts: Vec<Vec<u32>>,
    /// When the last cut began.
    pub(super) cut_us: u64,
    /// The links of each cut that has begun.
    ways: BTreeMap<usize, Vec<(usize, usize)>>,
    /// The number of the last link.
    last: u64,
}

impl Links {
    pub(super) fn new(regions: usize) -> Self {
        let cuts = vec![vec![0; regions]; regions];
        Self { streams: BTreeMap::new(), cuts, cut_us: 0, ways: BTreeMap::new(), last: 0 }
    }

    pub(super) fn cut(&mut self, cut: usize, ways: &[(usize, usize)], now_us: u64) {
        for (from, to) in ways {
            self.cuts[*from][*to] += 1;
        }
        self.ways.insert(cut, ways.to_vec());
        self.cut_us = now_us;
    }

    /// Ends a cut, and returns the ways that it was of.
    pub(super) fn mend(&mut self, cut: usize) -> Vec<(usize, usize)> {
        let ways = self.ways.remove(&cut).unwrap_or_default();
        for (from, to) in &ways {
            self.cuts[*from][*to] -= 1;
        }
        ways
    }

    /// Ends all cuts.
    pub(super) fn heal(&mut self) {
        self.ways.clear();
        self.cuts.iter_mut().flatten().for_each(|cuts| *cuts = 0);
    }

    /// Whether no way is cut.
    pub(super) fn is_whole(&self) -> bool {
        self.cuts.iter().flatten().all(|cuts| *cuts == 0)
    }
}

/// A replicator.
pub(super) struct Replicator {
    pub(super) incarnation: u64,
    pub(super) rounds: Rounds,
    clock: SkewedClock,
    /// Whether the lease is another's, and it has only not noticed yet.
    pub(super) is_ending: bool,
    /// The current round, and the number of replies of the origin that it awaits.
    turn: u64,
    awaited: u32,
    /// The links that it sends on, by region.
    links: Vec<Option<Link>>,
    /// Batches that were sent to each region and are not acknowledged, and when.
    sent: Vec<BTreeMap<u64, u64>>,
}

impl Replicator {
    fn now_us(&self, true_us: u64) -> u64 {
        self.clock.read(true_us).mono_us()
    }
}

impl World<'_> {
    /// Starts a replicator after the lease of the last one has expired, unless another replicator
    /// holds the lease.
    pub(super) fn take_over_lease(&mut self, region: usize) {
        if self.regions[region].replicators.iter().all(|replicator| replicator.is_ending) {
            self.take_over(region);
        }
    }

    /// Starts a replicator in a region.
    pub(super) fn take_over(&mut self, region: usize) {
        let (incarnation, clock) = (self.new_id(), self.new_clock());
        let count = self.regions.len();
        let peers = (0..count).filter(|peer| *peer != region).map(region_id).collect();
        let config = RoundsConfig {
            peers,
            partitions: self.scenario.partitions() as u16,
            incarnation,
            peer_timeout_us: PEER_TIMEOUT_DEFAULT_US,
        };
        let rounds = Rounds::new(&config);
        self.trace.note([self.now_us, 11, region as u64, incarnation], || {
            format!("region {region}: replicator {incarnation} starts")
        });
        let (links, sent) = (vec![None; count], vec![BTreeMap::new(); count]);
        self.regions[region].replicators.push(Replicator {
            incarnation,
            rounds,
            clock,
            is_ending: false,
            turn: 0,
            awaited: 0,
            links,
            sent,
        });
        let at_us = self.now_us + self.rng.u64(0..INTERVAL_US);
        self.schedule(at_us, Event::Round { region, replicator: incarnation });
        for to in (0..count).filter(|to| *to != region) {
            self.schedule(self.now_us, Event::Connect { from: region, replicator: incarnation, to });
        }
    }

    fn replicator(&mut self, region: usize, incarnation: u64) -> Option<&mut Replicator> {
        self.regions[region].replicators.iter_mut().find(|replicator| replicator.incarnation == incarnation)
    }

    pub(super) fn replicator_ends(&mut self, region: usize, incarnation: u64) {
        self.regions[region].replicators.retain(|replicator| replicator.incarnation != incarnation);
    }

    /// Whether the replicator dies in the middle of this step. Another one takes over when its
    /// lease expires.
    fn dies(&mut self, region: usize, incarnation: u64, step: Step) -> bool {
        if self.regions[region].doom != Some(step) {
            return false;
        }
        self.regions[region].doom = None;
        self.trouble(&format!("region {region}: its replicator dies at {step:?}"));
        self.replicator_ends(region, incarnation);
        let at_us = self.now_us + LEASE_US + self.rng.u64(0..LEASE_US / 3);
        self.troubled_until(at_us + SECOND_US);
        self.schedule(at_us, Event::TakeOver { region });
        true
    }

    pub(super) fn begin_round(&mut self, region: usize, incarnation: u64) {
        let (now_us, partitions) = (self.now_us, self.scenario.partitions() as u16);
        let Some(replicator) = self.replicator(region, incarnation) else { return };
        let clock_us = replicator.now_us(now_us);
        let is_over = replicator.awaited == 0;
        let mut partition_rounds = Vec::new();
        if is_over {
            replicator.turn += 1;
            partition_rounds =
                (0..partitions).flat_map(|of| replicator.rounds.partition_rounds(clock_us, of)).collect();
            replicator.awaited = partition_rounds.len() as u32;
        }
        let turn = replicator.turn;
        for partition_round in partition_rounds {
            self.send_ask(RoundInTransit { region, replicator: incarnation, turn, partition_round });
        }
        self.schedule(now_us + INTERVAL_US, Event::Round { region, replicator: incarnation });
        if is_over {
            self.schedule(now_us + ORIGIN_US_MAX, Event::RoundLate { region, replicator: incarnation, turn });
            self.dies(region, incarnation, Step::Ask);
        }
    }

    fn send_ask(&mut self, round: RoundInTransit) {
        self.schedule(self.now_us + self.scenario.delay_us, Event::Ask(Box::new(round)));
    }

    pub(super) fn ask_arrives(&mut self, round: Box<RoundInTransit>) {
        let RoundInTransit { region, replicator, .. } = *round;
        let (now_us, origin_us) = (self.now_us, self.origin_us(region));
        let paused_until_us = self.regions[region].store.paused_until_us;
        if now_us < paused_until_us {
            self.schedule(paused_until_us, Event::Ask(round));
            return;
        }
        let partition = round.partition_round.partition;
        let place = usize::from(partition);
        self.forget(region, partition);
        let request = self.spoiled_round(region, replicator, &round.partition_round.round);
        self.look(region, place, origin_us);
        let store = &mut self.regions[region].store;
        let (id, here) = (store.id(now_us), &mut store.contents.partitions[place]);
        let marked: Vec<(u64, Box<[u8]>)> =
            here.dirty_meters().map(|(stamp, key)| (stamp, key.into())).collect();
        let mut gathered = here.round(origin_us, id, &request);
        self.spoiler.on_gathered(&mut gathered, region, here);
        self.look(region, place, origin_us);
        let applied = AppliedRound {
            regions: &self.regions,
            region,
            partition: place,
            marked: &marked,
            reply: &gathered,
        };
        self.watch.see(now_us, &Observation::Round(&applied));
        if !gathered.components.is_empty() {
            self.trace.note([now_us, 8, region as u64, gathered.upto], || {
                format!("region {region}: replicator {replicator} asks {request:?}: {gathered:?}")
            });
        }
        self.schedule(now_us + self.scenario.delay_us, Event::Gathered { round, gathered });
    }

    /// Records whether a region is connected. One partition is enough, because all of them receive
    /// the same state.
    fn look(&mut self, region: usize, place: usize, origin_us: u64) {
        if place == 0 {
            let is_connected =
                is_connected(&self.regions[region].store.contents.partitions[place], origin_us);
            self.see(&Observation::Connectivity { region, is_connected });
        }
    }

    fn spoiled_round(&mut self, region: usize, incarnation: u64, round: &RoundRequest) -> RoundRequest {
        let now_us = self.now_us;
        let last_heard_age_us = self.replicator(region, incarnation).and_then(|replicator| {
            let clock_us = replicator.now_us(now_us);
            replicator.rounds.last_heard_age_us(clock_us)
        });
        self.spoiler.round(region, round, last_heard_age_us)
    }

    pub(super) fn gathered(&mut self, round: &RoundInTransit, gathered: &RoundReply) {
        let RoundInTransit { region, replicator: incarnation, turn, partition_round } = round;
        let (region, incarnation, turn) = (*region, *incarnation, *turn);
        if self.dies(region, incarnation, Step::Gather) {
            return;
        }
        let now_us = self.now_us;
        let Some(replicator) =
            self.replicator(region, incarnation).filter(|replicator| replicator.turn == turn)
        else {
            return;
        };
        let clock_us = replicator.now_us(now_us);
        replicator.rounds.on_round_reply(clock_us, partition_round, gathered);
        if let Some(next) = replicator.rounds.next_partition_round(clock_us, partition_round, gathered) {
            self.send_ask(RoundInTransit { region, replicator: incarnation, turn, partition_round: next });
            return;
        }
        replicator.awaited = replicator.awaited.saturating_sub(1);
        if replicator.awaited == 0 {
            self.end_round(region, incarnation, turn);
        }
    }

    /// Ends a round: every partition has replied, or the timeout has passed.
    pub(super) fn end_round(&mut self, region: usize, incarnation: u64, turn: u64) {
        let Some(replicator) =
            self.replicator(region, incarnation).filter(|replicator| replicator.turn == turn)
        else {
            return;
        };
        // Late replies and the timeout of this round find another turn, and are ignored.
        replicator.turn += 1;
        replicator.awaited = 0;
        replicator.rounds.round_ended();
        for to in 0..self.regions.len() {
            self.send_batches(region, incarnation, to);
        }
    }

    /// Sends all that there is to be sent.
    fn send_batches(&mut self, region: usize, incarnation: u64, to: usize) {
        while self.send_batch(region, incarnation, to) {}
    }

    /// Sends a batch. Returns false if there is none to send, or if the replicator dies in this
    /// step.
    fn send_batch(&mut self, region: usize, incarnation: u64, to: usize) -> bool {
        let now_us = self.now_us;
        let Some(replicator) = self.replicator(region, incarnation) else { return false };
        let Some(link) = replicator.links[to] else { return false };
        let clock_us = replicator.now_us(now_us);
        let Some(batch) = replicator.rounds.next_batch(clock_us, region_id(to)) else { return false };
        let sequence = batch.id.sequence;
        replicator.sent[to].insert(sequence, now_us);
        let batch = Arc::new(batch);
        for at_us in self.wan_times_of(link, region, to) {
            self.schedule(at_us, Event::Batch { link, batch: Arc::clone(&batch) });
        }
        self.schedule(now_us + ACK_US_MAX, Event::AckLate { link, sequence });
        !self.dies(region, incarnation, Step::Send)
    }

    /// Returns the arrival times of a message on a link. All messages that one end sends at one
    /// moment are one byte stream, and arrive together.
    fn wan_times_of(&mut self, link: Link, from: usize, to: usize) -> Vec<u64> {
        let now_us = self.now_us;
        if let Some((said_us, times)) = self.links.streams.get(&(link.number, from))
            && *said_us == now_us
        {
            return times.clone();
        }
        let times = self.wan_times(from, to);
        self.links.streams.insert((link.number, from), (now_us, times.clone()));
        times
    }

    /// One way between two regions, µs.
    pub(super) fn wan_us(&self) -> u64 {
        self.scenario.regions.as_ref().map_or(0, |regions| regions.wan_us)
    }

    /// Returns the arrival times of the copies of a message between regions: none, one or two.
    fn wan_times(&mut self, from: usize, to: usize) -> Vec<u64> {
        if self.links.cuts[from][to] > 0 {
            return Vec::new();
        }
        let (faults, wan_us) = (self.scenario.link_faults(), self.wan_us());
        let (rng, is_bad) = (&mut self.rng, !self.closed);
        let mut at_us = self.now_us + wan_us + rng.u64(0..=wan_us / 4);
        if is_bad && hits(rng, faults.loss_ppm) {
            if rng.u8(0..4) >= RESENT_OF_FOUR {
                return Vec::new();
            }
            at_us += rng.u64(RESENT_US / 5..RESENT_US);
        }
        if is_bad && hits(rng, faults.slow_ppm) {
            at_us += rng.u64(0..SLOW_US);
        }
        let again = is_bad && hits(rng, faults.repeat_ppm);
        let later_us = at_us + rng.u64(0..SLOW_US);
        if again { vec![at_us, later_us] } else { vec![at_us] }
    }

    pub(super) fn connect(&mut self, from: usize, incarnation: u64, to: usize) {
        let Some(replicator) = self.replicator(from, incarnation) else { return };
        if replicator.links[to].is_some() {
            return;
        }
        for at_us in self.wan_times(from, to) {
            self.schedule(at_us, Event::Hello { from, replicator: incarnation, to });
        }
        self.schedule(self.now_us + RECONNECT_US, Event::Connect { from, replicator: incarnation, to });
    }

    pub(super) fn hello(&mut self, from: usize, incarnation: u64, to: usize) {
        let now_us = self.now_us;
        let listening = &self.regions[to].replicators;
        let Some(peer) = listening.last() else { return };
        let (peer, clock_us) = (peer.incarnation, peer.now_us(now_us));
        self.links.last += 1;
        let link = Link { from, replicator: incarnation, to, peer, number: self.links.last };
        for at_us in self.wan_times(to, from) {
            self.schedule(at_us, Event::Welcome { link, clock_us });
        }
    }

    pub(super) fn welcome(&mut self, link: Link, clock_us: u64) {
        let Some(replicator) = self.replicator(link.from, link.replicator) else { return };
        if replicator.links[link.to].is_some() {
            return;
        }
        replicator.links[link.to] = Some(link);
        replicator.rounds.connected(region_id(link.to), clock_us);
        self.send_batches(link.from, link.replicator, link.to);
    }

    pub(super) fn link_breaks(&mut self, link: Link) {
        let Some(replicator) = self.replicator(link.from, link.replicator) else { return };
        if replicator.links[link.to] != Some(link) {
            return;
        }
        replicator.links[link.to] = None;
        replicator.sent[link.to].clear();
        for end in [link.from, link.to] {
            self.links.streams.remove(&(link.number, end));
        }
        let Some(replicator) = self.replicator(link.from, link.replicator) else { return };
        replicator.rounds.disconnected(region_id(link.to));
        let (from, replicator, to) = (link.from, link.replicator, link.to);
        let at_us = self.now_us + self.rng.u64(RECONNECT_US / 10..RECONNECT_US);
        self.schedule(at_us, Event::Connect { from, replicator, to });
    }

    /// The replicators of a region notice that they do not reach another one any more.
    pub(super) fn reset_links(&mut self, from: usize, to: usize) {
        let links: Vec<Link> =
            self.regions[from].replicators.iter().filter_map(|replicator| replicator.links[to]).collect();
        for link in links {
            self.link_breaks(link);
        }
    }

    /// A batch was not acknowledged in time, unless it was.
    pub(super) fn ack_late(&mut self, link: Link, sequence: u64) {
        let now_us = self.now_us;
        let Some(replicator) = self.replicator(link.from, link.replicator) else { return };
        // It may have been sent again since, over the next link.
        if replicator.sent[link.to].get(&sequence).is_some_and(|sent_us| now_us >= sent_us + ACK_US_MAX) {
            self.link_breaks(link);
        }
    }

    pub(super) fn batch_arrives(&mut self, link: Link, batch: &Arc<Batch>) {
        let Link { from, to, peer, .. } = link;
        let origin_us = self.origin_us(to);
        let is_there = self.regions[to].replicators.iter().any(|replicator| replicator.incarnation == peer);
        if !is_there || self.now_us < self.regions[to].store.paused_until_us {
            for at_us in self.wan_times(to, from) {
                self.schedule(at_us, Event::Refused { link });
            }
            return;
        }
        let is_repeat = self.spoiler.is_repeat(to, batch);
        for group in &batch.groups {
            if self.dies(to, peer, Step::Merge) {
                if self.spoiler.acknowledges_early() {
                    self.answer(link, Ack { id: batch.id, clock_us: 0 });
                }
                return;
            }
            let sent = MergeRequest { from: region_id(from), components: group.components.clone() };
            self.forget(to, group.partition);
            let here = &mut self.regions[to].store.contents.partitions[usize::from(group.partition)];
            // A partition has one key in worlds of several regions.
            let name = group.components.first().map_or(&[][..], |component| &component.key[..]);
            let (news, before) = (news(here, &sent), owed(here.meter(name)));
            let request = self.spoiler.merge(&sent, here, is_repeat);
            let Ok(merged) = here.merge(origin_us, &request) else { continue };
            let owed = [before, owed(here.meter(name))];
            let (key, charged) = (meter_of(name), merged.charged);
            let merge = AppliedMerge { region: to, key, charged, news, owed };
            self.see(&Observation::Merged(merge));
            self.trace.note([self.now_us, 9, to as u64 * 8 + from as u64, merged.charged], || {
                format!("region {to}: of region {from}: {sent:?}: {merged:?}")
            });
        }
        self.tally.batches += 1;
        let now_us = self.now_us;
        if self.dies(to, peer, Step::Answer) {
            return;
        }
        let Some(replicator) = self.replicator(to, peer) else { return };
        let clock_us = replicator.now_us(now_us);
        let ack = replicator.rounds.merged(clock_us, region_id(from), batch);
        self.answer(link, ack);
    }

    fn answer(&mut self, link: Link, ack: Ack) {
        for at_us in self.wan_times_of(link, link.to, link.from) {
            self.schedule(at_us, Event::Ack { link, ack });
        }
    }

    pub(super) fn acknowledged(&mut self, link: Link, ack: &Ack) {
        let Link { from, replicator: incarnation, to, .. } = link;
        if self.dies(from, incarnation, Step::Acknowledge) {
            return;
        }
        let now_us = self.now_us;
        let Some(replicator) = self.replicator(from, incarnation) else { return };
        if replicator.links[to] != Some(link) {
            return;
        }
        let clock_us = replicator.now_us(now_us);
        if replicator.rounds.acknowledged(clock_us, region_id(to), ack) {
            replicator.sent[to].remove(&ack.id.sequence);
            self.send_batches(from, incarnation, to);
        }
    }
}
