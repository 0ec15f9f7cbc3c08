//! What is on its way to one peer.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::origin::{Component, RoundReply};

use super::GATHER_MAX;
use crate::message::{Ack, Batch, BatchFreshness, BatchId, ComponentGroup};
use crate::wire;

/// The most components in a batch. Higher: fewer round trips while there is much to say; a peer works longer before it
/// acknowledges.
pub const BATCH_COMPONENTS_MAX: usize = 2_048;

/// A batch gets no further components when it has this many bytes. Higher: as above; more is sent again when a link breaks.
pub const BATCH_BYTES_MAX: usize = 256 << 10;

/// Batches to one peer that are under way at once. What is carried in a round trip is this many batches at most: 65,536
/// components, which is 400,000 a second where a round trip takes 160 ms. Higher: more is carried over a long way; more memory,
/// up to [`BATCH_BYTES_MAX`] for each, and more is sent again when a link breaks.
pub const BATCHES_IN_FLIGHT_MAX: usize = 32;

/// Nothing more is gathered for a peer while this much waits for it. Higher: a peer that is slow for a moment catches up in
/// fewer rounds; more memory while it is slow.
pub const OUTBOX_BYTES_MAX: usize = 4 << 20;

/// Components of a partition are put into pieces of this size, so that batches are filled well.
const PIECE_BYTES_MAX: usize = 64 << 10;

const _: () =
    assert!(wire::COMPONENT_BYTES_MAX + BATCH_BYTES_MAX + wire::HEAD_BYTES_MAX <= wire::FRAME_BYTES_MAX);

/// What is on its way to one peer. Each has one of its own, so that a slow one slows nobody but itself.
#[derive(Debug)]
pub(super) struct Outbox {
    partitions: Vec<Progress>,
    queue: VecDeque<Piece>,
    queued_bytes: usize,
    /// In the order of their numbers. What is acknowledged stays until everything before it is.
    in_flight: VecDeque<InFlightBatch>,
    sequence: u64,
    link: Option<Link>,
    /// Whether a round ended since the last batch was made: the peer waits for a sign of life.
    due: bool,
    /// How long the last batch took to be acknowledged.
    round_trip_us: Option<u64>,
    /// Everything that was marked by then, the peer has acknowledged.
    known_us: Option<u64>,
}

/// How far a peer is in one partition.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// The last stamp that was gathered for it.
    gathered_upto: u64,
    /// The last stamp up to which it has acknowledged everything.
    acknowledged: u64,
    /// How many pieces wait in the queue.
    queued: u32,
    /// Everything that was marked by then is in the batches that were made.
    batched_us: Option<u64>,
    /// The same of all that was charged, also to standing parts.
    settled_us: Option<u64>,
    /// How often the store has lost its marks: stamps of an earlier life say nothing about this one.
    life: u32,
}

#[derive(Debug)]
struct Piece {
    group: Arc<ComponentGroup>,
    bytes: usize,
    /// The last piece of what was gathered at once says how far that goes.
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    partition: u16,
    life: u32,
    upto: u64,
    /// When it was asked for, if it was all there was.
    asked_us: Option<u64>,
    /// The same, if what was charged to standing parts was among it.
    settled_us: Option<u64>,
}

#[derive(Debug)]
struct InFlightBatch {
    id: BatchId,
    groups: Vec<Arc<ComponentGroup>>,
    /// What is acknowledged with it.
    ends: Vec<End>,
    /// Everything that was marked by then is in it, or was in one before it.
    complete_us: Option<u64>,
    /// The same of all that was charged, also to standing parts.
    settled_us: Option<u64>,
    /// When it was handed to the link that there is now.
    sent_us: Option<u64>,
    is_merged: bool,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    /// The peer's clock as it was last told.
    echo_us: u64,
}

impl Progress {
    /// Takes in that what was gathered is in the batches that were made, to its end.
    fn note_batched(&mut self, end: &End) {
        self.batched_us = self.batched_us.max(end.asked_us);
        self.settled_us = self.settled_us.max(end.settled_us);
    }
}

impl Outbox {
    pub(super) fn new(partitions: u16) -> Self {
        Self {
            partitions: vec![Progress::default(); usize::from(partitions)],
            queue: VecDeque::new(),
            queued_bytes: 0,
            in_flight: VecDeque::new(),
            sequence: 0,
            link: None,
            due: false,
            round_trip_us: None,
            known_us: None,
        }
    }

    pub(super) fn connect(&mut self, echo_us: u64) {
        self.link = Some(Link { echo_us });
        // Nobody knows whether they arrived on the link before: they are said again, which changes nothing if they did.
        self.in_flight.iter_mut().for_each(|in_flight| in_flight.sent_us = None);
        self.due = true;
    }

    pub(super) fn disconnect(&mut self) {
        self.link = None;
    }

    pub(super) fn has_link(&self) -> bool {
        self.link.is_some()
    }

    /// Whether more should be gathered for the peer.
    pub(super) fn has_room(&self) -> bool {
        self.has_link() && self.queued_bytes < OUTBOX_BYTES_MAX
    }

    pub(super) fn gathered_upto(&self, partition: u16) -> u64 {
        self.partitions.get(usize::from(partition)).map_or(0, |progress| progress.gathered_upto)
    }

    pub(super) fn acknowledged(&self, partition: u16) -> u64 {
        self.partitions.get(usize::from(partition)).map_or(0, |progress| progress.acknowledged)
    }

    /// Takes in what was gathered behind the last stamp that was taken.
    pub(super) fn take(
        &mut self,
        asked_us: u64,
        partition: u16,
        gathered: &RoundReply,
        pieces: &[Arc<ComponentGroup>],
    ) {
        let Some(progress) = self.partitions.get_mut(usize::from(partition)) else { return };
        progress.gathered_upto = progress.gathered_upto.max(gathered.upto);
        let asked_us = (!gathered.more).then_some(asked_us);
        let settled_us = asked_us.filter(|_| gathered.includes_isolated);
        let end = End { partition, life: progress.life, upto: gathered.upto, asked_us, settled_us };
        if pieces.is_empty() {
            // With nothing of the partition in the queue, everything that was marked until now has been said.
            if progress.queued == 0 {
                progress.note_batched(&end);
            }
            return;
        }
        for (place, group) in pieces.iter().enumerate() {
            let end = (place + 1 == pieces.len()).then_some(end);
            let bytes = wire::group_len(group);
            progress.queued += 1;
            self.queued_bytes += bytes;
            self.queue.push_back(Piece { group: Arc::clone(group), bytes, end });
        }
    }

    /// Takes in that the store has lost its marks: everything is said again.
    pub(super) fn begin_anew(&mut self, partition: u16) {
        if let Some(progress) = self.partitions.get_mut(usize::from(partition)) {
            progress.life += 1;
            (progress.gathered_upto, progress.acknowledged) = (0, 0);
        }
    }

    pub(super) fn round_ended(&mut self) {
        self.due = true;
    }

    /// What is to be sent now, if anything: what has to be said again first, then what is new while there is room for it.
    pub(super) fn next(
        &mut self,
        now_us: u64,
        incarnation: u64,
        last_heard_age_us: Option<u64>,
    ) -> Option<Batch> {
        let link = self.link?;
        let is_unsaid = |in_flight: &InFlightBatch| in_flight.sent_us.is_none() && !in_flight.is_merged;
        if !self.in_flight.iter().any(is_unsaid) {
            let has_room = self.in_flight.len() < BATCHES_IN_FLIGHT_MAX;
            if !has_room || (!self.due && self.queue.is_empty()) {
                return None;
            }
            self.make(incarnation);
        }
        let after = self.merged_upto();
        let in_flight = self.in_flight.iter_mut().find(|in_flight| is_unsaid(in_flight))?;
        in_flight.sent_us = Some(now_us);
        let age_us = |then_us: Option<u64>| then_us.map(|then_us| now_us.saturating_sub(then_us));
        let (age_us, settled_age_us) = (age_us(in_flight.complete_us), age_us(in_flight.settled_us));
        let freshness =
            BatchFreshness { after, echo_us: link.echo_us, age_us, settled_age_us, last_heard_age_us };
        Some(Batch { id: in_flight.id, freshness, groups: in_flight.groups.clone() })
    }

    /// Every batch up to this one is acknowledged.
    fn merged_upto(&self) -> u64 {
        self.in_flight.front().map_or(self.sequence, |first| first.id.sequence - 1)
    }

    fn make(&mut self, incarnation: u64) {
        self.due = false;
        self.sequence += 1;
        let (mut groups, mut ends) = (Vec::new(), Vec::new());
        let (mut bytes, mut components) = (0, 0);
        while let Some(piece) = self.queue.front() {
            bytes += piece.bytes;
            components += piece.group.components.len();
            if !groups.is_empty() && (bytes > BATCH_BYTES_MAX || components > BATCH_COMPONENTS_MAX) {
                break;
            }
            let Some(piece) = self.queue.pop_front() else { break };
            self.queued_bytes -= piece.bytes;
            let Some(progress) = self.partitions.get_mut(usize::from(piece.group.partition)) else {
                continue;
            };
            progress.queued -= 1;
            if let Some(end) = piece.end {
                progress.note_batched(&end);
                ends.push(end);
            }
            groups.push(piece.group);
        }
        let id = BatchId { incarnation, sequence: self.sequence };
        // `None` is below everything: one partition that was not looked at leaves the whole unknown.
        let complete_us = self.partitions.iter().map(|progress| progress.batched_us).min().flatten();
        let settled_us = self.partitions.iter().map(|progress| progress.settled_us).min().flatten();
        let in_flight =
            InFlightBatch { id, groups, ends, complete_us, settled_us, sent_us: None, is_merged: false };
        self.in_flight.push_back(in_flight);
    }

    /// Takes in that a batch was merged; whether it is one that is under way.
    pub(super) fn acknowledge(&mut self, now_us: u64, ack: &Ack) -> bool {
        let is_meant = |in_flight: &&mut InFlightBatch| in_flight.id == ack.id && !in_flight.is_merged;
        let Some(in_flight) = self.in_flight.iter_mut().find(is_meant) else { return false };
        in_flight.is_merged = true;
        let took_us = in_flight.sent_us.map(|sent_us| now_us.saturating_sub(sent_us));
        self.round_trip_us = took_us.or(self.round_trip_us);
        if let Some(link) = &mut self.link {
            link.echo_us = link.echo_us.max(ack.clock_us);
        }
        // What a batch says of its partitions is true of those that have everything before it as well.
        while let Some(known) = self.in_flight.pop_front_if(|first| first.is_merged) {
            self.note_known(&known);
        }
        true
    }

    /// Takes in that the peer has a batch, and all before it.
    fn note_known(&mut self, known: &InFlightBatch) {
        for End { partition, life, upto, .. } in &known.ends {
            let progress = self.partitions.get_mut(usize::from(*partition));
            if let Some(progress) = progress.filter(|progress| progress.life == *life) {
                progress.acknowledged = progress.acknowledged.max(*upto);
            }
        }
        self.known_us = self.known_us.max(known.complete_us);
    }

    /// How far the peer is behind, if it has ever acknowledged everything: what a change takes to be known there, or more
    /// while nothing is acknowledged.
    pub(super) fn lag_us(&self, now_us: u64, interval_us: u64) -> Option<u64> {
        let way_us = self.round_trip_us? / 2;
        let waiting_us = now_us.saturating_sub(self.known_us?).saturating_sub(way_us);
        Some(waiting_us.max(way_us + interval_us))
    }
}

/// What was gathered, in pieces that fit into batches, and how many components fit into none.
pub(super) fn pieces(partition: u16, components: &[Component]) -> (Vec<Arc<ComponentGroup>>, u64) {
    let (mut pieces, mut oversized) = (Vec::new(), 0);
    let (mut piece, mut bytes) = (Vec::new(), 0);
    for component in components {
        let len = wire::component_len(component);
        if len > wire::COMPONENT_BYTES_MAX {
            oversized += 1;
            continue;
        }
        let is_full = bytes + len > PIECE_BYTES_MAX || piece.len() == usize::from(GATHER_MAX);
        if is_full && !piece.is_empty() {
            pieces.push(Arc::new(ComponentGroup { partition, components: std::mem::take(&mut piece) }));
            bytes = 0;
        }
        bytes += len;
        piece.push(component.clone());
    }
    if !piece.is_empty() {
        pieces.push(Arc::new(ComponentGroup { partition, components: piece }));
    }
    (pieces, oversized)
}
