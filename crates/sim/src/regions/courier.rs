//! Couriers: the shipped rounds, carried out over a network that loses, repeats and delays.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::origin::{Gathered, Merge, Round};
use tidegate_courier::{Ack, Asked, Batch, INTERVAL_US, Rounds, RoundsConfig, SILENCE_MAX_US};

use super::check;
use super::scenario::{KEYS, ORDINARY, SECOND_US};
use super::world::{Event, Link, World, region_id};
use crate::clock::SkewedClock;
use crate::network::hits;

/// How long a courier is missed before another takes over, and how much longer at most.
const LEASE_US: u64 = 1_500_000;

/// How long a courier waits for its origin, µs.
const ORIGIN_US_MAX: u64 = SECOND_US;

/// How long a courier waits for a batch to be acknowledged, µs.
const ACK_US_MAX: u64 = 3 * SECOND_US;

/// How often a courier tries to reach a peer, µs.
pub(super) const RECONNECT_US: u64 = SECOND_US / 2;

/// How much later something comes that had to be sent again.
const RESENT_US: u64 = SECOND_US;

/// How much later something comes that is slow, or comes twice.
const SLOW_US: u64 = 2 * SECOND_US;

/// How many in four of what is lost is sent again by the network itself.
const RESENT_OF_FOUR: u8 = 3;

/// A step of a courier, in the middle of which it may die.
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

/// A courier.
pub(super) struct Courier {
    pub(super) incarnation: u64,
    pub(super) rounds: Rounds,
    clock: SkewedClock,
    /// Whether the lease is another's, and it has only not noticed yet.
    pub(super) is_ending: bool,
    /// Which round it is in, and how many answers of the origin are awaited.
    turn: u64,
    awaited: u32,
    /// The links that it sends on, by region.
    links: Vec<Option<Link>>,
    /// Batches that were sent to each region and are not acknowledged, and when.
    sent: Vec<BTreeMap<u64, u64>>,
}

impl Courier {
    fn now_us(&self, true_us: u64) -> u64 {
        self.clock.read(true_us).mono_us()
    }
}

impl World<'_> {
    /// Somebody becomes the courier of a region, where the lease of the last one is over: unless somebody else has it.
    pub(super) fn take_over_lease(&mut self, region: usize) {
        if self.regions[region].couriers.iter().all(|courier| courier.is_ending) {
            self.take_over(region);
        }
    }

    /// Somebody becomes the courier of a region.
    pub(super) fn take_over(&mut self, region: usize) {
        let (incarnation, clock) = (self.new_process(), self.new_clock());
        let count = self.regions.len();
        let peers = (0..count).filter(|peer| *peer != region).map(region_id).collect();
        let config =
            RoundsConfig { peers, partitions: KEYS as u16, incarnation, silence_max_us: SILENCE_MAX_US };
        let rounds = Rounds::new(&config);
        self.trace.note([self.now_us, 7, region as u64, incarnation], || {
            format!("region {region}: courier {incarnation} begins")
        });
        let (links, sent) = (vec![None; count], vec![BTreeMap::new(); count]);
        self.regions[region].couriers.push(Courier {
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
        self.schedule(at_us, Event::Round { region, courier: incarnation });
        for to in (0..count).filter(|to| *to != region) {
            self.schedule(self.now_us, Event::Connect { from: region, courier: incarnation, to });
        }
    }

    fn courier(&mut self, region: usize, incarnation: u64) -> Option<&mut Courier> {
        self.regions[region].couriers.iter_mut().find(|courier| courier.incarnation == incarnation)
    }

    pub(super) fn courier_ends(&mut self, region: usize, incarnation: u64) {
        self.regions[region].couriers.retain(|courier| courier.incarnation != incarnation);
    }

    /// Whether the courier dies in the middle of this step. Somebody else takes over when its lease is over.
    fn dies(&mut self, region: usize, incarnation: u64, step: Step) -> bool {
        if self.regions[region].doom != Some(step) {
            return false;
        }
        self.regions[region].doom = None;
        self.trouble(&format!("region {region}: its courier dies at {step:?}"));
        self.courier_ends(region, incarnation);
        let at_us = self.now_us + LEASE_US + self.rng.u64(0..LEASE_US / 3);
        self.check.troubled(at_us + SECOND_US);
        self.schedule(at_us, Event::TakeOver { region });
        true
    }

    pub(super) fn begin_round(&mut self, region: usize, incarnation: u64) {
        let now_us = self.now_us;
        let Some(courier) = self.courier(region, incarnation) else { return };
        let clock_us = courier.now_us(now_us);
        let is_over = courier.awaited == 0;
        let mut asks = Vec::new();
        if is_over {
            courier.turn += 1;
            asks = (0..KEYS as u16).flat_map(|of| courier.rounds.asks(clock_us, of)).collect();
            courier.awaited = asks.len() as u32;
        }
        let turn = courier.turn;
        for asked in asks {
            self.send_ask(region, incarnation, turn, asked);
        }
        self.schedule(now_us + INTERVAL_US, Event::Round { region, courier: incarnation });
        if is_over {
            self.schedule(now_us + ORIGIN_US_MAX, Event::RoundLate { region, courier: incarnation, turn });
            self.dies(region, incarnation, Step::Ask);
        }
    }

    fn send_ask(&mut self, region: usize, courier: u64, turn: u64, asked: Asked) {
        let at_us = self.now_us + self.scenario.delay_us;
        self.schedule(at_us, Event::Ask { region, courier, turn, asked: Box::new(asked) });
    }

    pub(super) fn ask_arrives(&mut self, region: usize, incarnation: u64, turn: u64, asked: Box<Asked>) {
        let (now_us, origin_us) = (self.now_us, self.origin_us());
        if now_us < self.regions[region].paused_until_us {
            let at_us = self.regions[region].paused_until_us;
            self.schedule(at_us, Event::Ask { region, courier: incarnation, turn, asked });
            return;
        }
        let place = usize::from(asked.partition);
        self.forget(region, place);
        let round = self.spoiled_round(region, incarnation, &asked.round);
        let marks = self.regions[region].partitions[place].marks();
        let marked: Vec<(u64, Box<[u8]>)> = marks.map(|(stamp, key)| (stamp, key.into())).collect();
        self.look(region, place);
        let store = self.regions[region].store(self.now_us);
        let mut gathered = self.regions[region].partitions[place].round(origin_us, store, &round);
        self.look(region, place);
        self.check.trimmed(&self.regions, region, place, &marked, now_us);
        self.spoiler.on_gathered(&mut gathered, region, &self.regions[region].partitions[place]);
        self.check.published(region, &self.regions[region], &gathered, now_us);
        if !gathered.components.is_empty() {
            self.trace.note([now_us, 8, region as u64, gathered.upto], || {
                format!("region {region}: courier {incarnation} asks {round:?}: {gathered:?}")
            });
        }
        let event = Event::Gathered { region, courier: incarnation, turn, asked, gathered };
        self.schedule(now_us + self.scenario.delay_us, event);
    }

    /// Looks whether a region counts on the whole: all of its partitions hear the same.
    fn look(&mut self, region: usize, place: usize) {
        if place == ORDINARY {
            let is_whole = check::is_whole(&self.regions[region].partitions[place], self.origin_us());
            self.check.stands(region, is_whole, self.now_us);
        }
    }

    fn spoiled_round(&mut self, region: usize, incarnation: u64, round: &Round) -> Round {
        let now_us = self.now_us;
        let silence_us = self.courier(region, incarnation).map(|courier| {
            let clock_us = courier.now_us(now_us);
            courier.rounds.silence_us(clock_us)
        });
        self.spoiler.round(region, round, silence_us.flatten())
    }

    pub(super) fn gathered(
        &mut self,
        region: usize,
        incarnation: u64,
        turn: u64,
        asked: &Asked,
        gathered: &Gathered,
    ) {
        if self.dies(region, incarnation, Step::Gather) {
            return;
        }
        let now_us = self.now_us;
        let Some(courier) = self.courier(region, incarnation).filter(|courier| courier.turn == turn) else {
            return;
        };
        let clock_us = courier.now_us(now_us);
        courier.rounds.gathered(clock_us, asked, gathered);
        if let Some(next) = courier.rounds.ask_on(clock_us, asked, gathered) {
            self.send_ask(region, incarnation, turn, next);
            return;
        }
        courier.awaited = courier.awaited.saturating_sub(1);
        if courier.awaited == 0 {
            self.end_round(region, incarnation, turn);
        }
    }

    /// Every partition was asked, or has had its time.
    pub(super) fn end_round(&mut self, region: usize, incarnation: u64, turn: u64) {
        let Some(courier) = self.courier(region, incarnation).filter(|courier| courier.turn == turn) else {
            return;
        };
        // So that what comes late, and the end of the time, find another turn.
        courier.turn += 1;
        courier.awaited = 0;
        courier.rounds.round_ended();
        for to in 0..self.regions.len() {
            self.send_batches(region, incarnation, to);
        }
    }

    /// Sends all that there is to be sent.
    fn send_batches(&mut self, region: usize, incarnation: u64, to: usize) {
        while self.send_batch(region, incarnation, to) {}
    }

    /// Sends a batch; false when there is none, or the courier died of it.
    fn send_batch(&mut self, region: usize, incarnation: u64, to: usize) -> bool {
        let now_us = self.now_us;
        let Some(courier) = self.courier(region, incarnation) else { return false };
        let Some(link) = courier.links[to] else { return false };
        let clock_us = courier.now_us(now_us);
        let Some(batch) = courier.rounds.next_batch(clock_us, region_id(to)) else { return false };
        let sequence = batch.id.sequence;
        courier.sent[to].insert(sequence, now_us);
        let batch = Arc::new(batch);
        for at_us in self.wan_times_of(link, region, to) {
            self.schedule(at_us, Event::Batch { link, batch: Arc::clone(&batch) });
        }
        self.schedule(now_us + ACK_US_MAX, Event::AckLate { link, sequence });
        !self.dies(region, incarnation, Step::Send)
    }

    /// The same of a message on a link: what is said there at one moment is one stream of bytes, and arrives together.
    fn wan_times_of(&mut self, link: Link, from: usize, to: usize) -> Vec<u64> {
        let now_us = self.now_us;
        if let Some((said_us, times)) = self.streams.get(&(link.number, from))
            && *said_us == now_us
        {
            return times.clone();
        }
        let times = self.wan_times(from, to);
        self.streams.insert((link.number, from), (now_us, times.clone()));
        times
    }

    /// When the copies of a message from one region to another arrive: none, one or two.
    fn wan_times(&mut self, from: usize, to: usize) -> Vec<u64> {
        if self.cut[from][to] > 0 {
            return Vec::new();
        }
        let faults = &self.scenario.faults;
        let is_bad = !self.closed;
        let (rng, wan_us) = (&mut self.rng, self.scenario.wan_us);
        let mut at_us = self.now_us + wan_us + rng.u64(0..=wan_us / 4);
        if is_bad && hits(rng, faults.wan_loss_ppm) {
            if rng.u8(0..4) >= RESENT_OF_FOUR {
                return Vec::new();
            }
            at_us += rng.u64(RESENT_US / 5..RESENT_US);
        }
        if is_bad && hits(rng, faults.wan_slow_ppm) {
            at_us += rng.u64(0..SLOW_US);
        }
        let again = is_bad && hits(rng, faults.wan_repeat_ppm);
        let later_us = at_us + rng.u64(0..SLOW_US);
        if again { vec![at_us, later_us] } else { vec![at_us] }
    }

    pub(super) fn connect(&mut self, from: usize, incarnation: u64, to: usize) {
        let Some(courier) = self.courier(from, incarnation) else { return };
        if courier.links[to].is_some() {
            return;
        }
        for at_us in self.wan_times(from, to) {
            self.schedule(at_us, Event::Hello { from, courier: incarnation, to });
        }
        self.schedule(self.now_us + RECONNECT_US, Event::Connect { from, courier: incarnation, to });
    }

    pub(super) fn hello(&mut self, from: usize, incarnation: u64, to: usize) {
        let now_us = self.now_us;
        let listening = &self.regions[to].couriers;
        let Some(peer) = listening.last() else { return };
        let (peer, clock_us) = (peer.incarnation, peer.now_us(now_us));
        let link = Link { from, courier: incarnation, to, peer, number: self.new_link() };
        for at_us in self.wan_times(to, from) {
            self.schedule(at_us, Event::Welcome { link, clock_us });
        }
    }

    pub(super) fn welcome(&mut self, link: Link, clock_us: u64) {
        let Some(courier) = self.courier(link.from, link.courier) else { return };
        if courier.links[link.to].is_some() {
            return;
        }
        courier.links[link.to] = Some(link);
        courier.rounds.connected(region_id(link.to), clock_us);
        self.send_batches(link.from, link.courier, link.to);
    }

    pub(super) fn link_breaks(&mut self, link: Link) {
        let Some(courier) = self.courier(link.from, link.courier) else { return };
        if courier.links[link.to] != Some(link) {
            return;
        }
        courier.links[link.to] = None;
        courier.sent[link.to].clear();
        for end in [link.from, link.to] {
            self.streams.remove(&(link.number, end));
        }
        let Some(courier) = self.courier(link.from, link.courier) else { return };
        courier.rounds.disconnected(region_id(link.to));
        let (from, courier, to) = (link.from, link.courier, link.to);
        let at_us = self.now_us + self.rng.u64(RECONNECT_US / 10..RECONNECT_US);
        self.schedule(at_us, Event::Connect { from, courier, to });
    }

    /// The couriers of a region notice that they do not reach another one any more.
    pub(super) fn reset_links(&mut self, from: usize, to: usize) {
        let links: Vec<Link> =
            self.regions[from].couriers.iter().filter_map(|courier| courier.links[to]).collect();
        for link in links {
            self.link_breaks(link);
        }
    }

    /// A batch was not acknowledged in time, unless it was.
    pub(super) fn ack_late(&mut self, link: Link, sequence: u64) {
        let now_us = self.now_us;
        let Some(courier) = self.courier(link.from, link.courier) else { return };
        // It may have been sent again since, over the next link.
        if courier.sent[link.to].get(&sequence).is_some_and(|sent_us| now_us >= sent_us + ACK_US_MAX) {
            self.link_breaks(link);
        }
    }

    pub(super) fn batch_arrives(&mut self, link: Link, batch: &Arc<Batch>) {
        let Link { from, to, peer, .. } = link;
        let origin_us = self.origin_us();
        let is_there = self.regions[to].couriers.iter().any(|courier| courier.incarnation == peer);
        if !is_there || self.now_us < self.regions[to].paused_until_us {
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
            let place = usize::from(group.partition);
            let said = Merge { from: region_id(from), components: group.components.clone() };
            self.forget(to, place);
            let here = &mut self.regions[to].partitions[place];
            let news = check::news(here, &said);
            let before = check::owed(here, place);
            let heard = self.spoiler.merge(&said, here, is_repeat);
            let Ok(merged) = here.merge(origin_us, &heard) else { continue };
            let owed = check::owed(here, place);
            self.check.merged(to, merged.charged, news, self.now_us);
            self.check.owes(to, place, before, owed, self.now_us);
            self.trace.note([self.now_us, 9, to as u64 * 8 + from as u64, merged.charged], || {
                format!("region {to}: of region {from}: {said:?}: {merged:?}")
            });
        }
        self.tally.batches += 1;
        let now_us = self.now_us;
        if self.dies(to, peer, Step::Answer) {
            return;
        }
        let Some(courier) = self.courier(to, peer) else { return };
        let clock_us = courier.now_us(now_us);
        let ack = courier.rounds.merged(clock_us, region_id(from), batch);
        self.answer(link, ack);
    }

    fn answer(&mut self, link: Link, ack: Ack) {
        for at_us in self.wan_times_of(link, link.to, link.from) {
            self.schedule(at_us, Event::Ack { link, ack });
        }
    }

    pub(super) fn acknowledged(&mut self, link: Link, ack: &Ack) {
        let Link { from, courier: incarnation, to, .. } = link;
        if self.dies(from, incarnation, Step::Acknowledge) {
            return;
        }
        let now_us = self.now_us;
        let Some(courier) = self.courier(from, incarnation) else { return };
        if courier.links[to] != Some(link) {
            return;
        }
        let clock_us = courier.now_us(now_us);
        if courier.rounds.acknowledged(clock_us, region_id(to), ack) {
            courier.sent[to].remove(&ack.id.sequence);
            self.send_batches(from, incarnation, to);
        }
    }
}
