//! Components and batches on their way to one peer.

use std::collections::VecDeque;
use std::sync::Arc;

use tidegate_core::origin::{Component, RoundReply};

use super::GATHER_MAX;
use crate::message::{Ack, Batch, BatchFreshness, BatchId, ComponentGroup};
use crate::wire;

/// Maximum components in a batch. Higher: fewer round trips while much changes; a peer works longer
/// before it acknowledges.
pub const BATCH_COMPONENTS_MAX: usize = 2_048;

/// A batch gets no further components when it has this many bytes. Higher: as above; more is sent
/// again when a link breaks.
pub const BATCH_BYTES_MAX: usize = 256 << 10;

/// Maximum batches in flight to one peer. A round trip carries at most this many: 65,536
/// components, or 400,000 a second at a round trip of 160 ms. Higher: more throughput over long
/// distances; more memory, up to [`BATCH_BYTES_MAX`] for each, and more to resend when a link
/// breaks.
pub const BATCHES_IN_FLIGHT_MAX: usize = 32;

/// Queued bytes of a peer at which gathering for it pauses. Higher: a briefly slow peer catches up
/// in fewer rounds; more memory while it is slow.
pub const OUTBOX_BYTES_MAX: usize = 4 << 20;

/// Maximum bytes of a piece. Components of a partition are split into pieces, so that batches fill
/// well.
const PIECE_BYTES_MAX: usize = 64 << 10;

const _: () =
    assert!(wire::COMPONENT_BYTES_MAX + BATCH_BYTES_MAX + wire::HEAD_BYTES_MAX <= wire::FRAME_BYTES_MAX);

/// Components and batches on their way to one peer. Each peer has its own outbox, so a slow peer
/// delays no other.
#[derive(Debug)]
pub(super) struct Outbox {
    partitions: Vec<Progress>,
    queue: VecDeque<Piece>,
    queued_bytes: usize,
    /// In order of sequence numbers. An acknowledged batch stays until all before it are
    /// acknowledged.
    in_flight: VecDeque<InFlightBatch>,
    sequence: u64,
    link: Option<Link>,
    /// Whether a round ended since the last batch was made: the peer waits for a sign of life.
    due: bool,
    /// How long the last batch took to be acknowledged.
    round_trip_us: Option<u64>,
    /// The peer has acknowledged everything that was marked dirty by this instant.
    known_us: Option<u64>,
}

/// How far a peer is in one partition.
#[derive(Clone, Debug, Default)]
struct Progress {
    /// The last stamp that was gathered for it.
    gathered_upto: u64,
    /// The stamp up to which the peer has acknowledged everything.
    acknowledged: u64,
    /// How many pieces wait in the queue.
    queued: u32,
    /// Everything that was marked dirty by this instant is in a batch.
    batched_us: Option<u64>,
    /// The same for all usage, including usage charged while isolated.
    settled_us: Option<u64>,
    /// Number of times that the origin lost its dirty meters. Stamps of an earlier life are
    /// meaningless in this one.
    life: u32,
}

#[derive(Debug)]
struct Piece {
    group: Arc<ComponentGroup>,
    bytes: usize,
    /// How far the gathered reply reaches; set on its last piece.
    end: Option<End>,
}

#[derive(Clone, Copy, Debug)]
struct End {
    partition: u16,
    life: u32,
    upto: u64,
    /// Time of the request, if the reply was complete.
    asked_us: Option<u64>,
    /// The same, if the reply also includes usage charged while isolated.
    settled_us: Option<u64>,
}

#[derive(Debug)]
struct InFlightBatch {
    id: BatchId,
    groups: Vec<Arc<ComponentGroup>>,
    /// Positions that the acknowledgement of this batch confirms.
    ends: Vec<End>,
    /// Everything that was marked dirty by this instant is in this batch or an earlier one.
    complete_us: Option<u64>,
    /// The same for all usage, including usage charged while isolated.
    settled_us: Option<u64>,
    /// When it was handed to the link that there is now.
    sent_us: Option<u64>,
    is_merged: bool,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    /// The peer's clock as last received.
    echo_us: u64,
}

impl Progress {
    /// Records that all components of a gathered reply, up to its end, are in batches.
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
        // It is unknown whether they arrived on the previous link. They are sent again, which is
        // harmless if they did.
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

    /// Queues the components gathered after the last stamp.
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
            // With an empty queue for the partition, everything marked dirty so far is in a batch.
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

    /// Restarts a partition after its store has lost its dirty meters: everything is sent again.
    pub(super) fn begin_anew(&mut self, partition: u16) {
        if let Some(progress) = self.partitions.get_mut(usize::from(partition)) {
            progress.life += 1;
            (progress.gathered_upto, progress.acknowledged) = (0, 0);
        }
    }

    pub(super) fn round_ended(&mut self) {
        self.due = true;
    }

    /// Returns the next batch to send, if any: first those to resend, then a new one while fewer
    /// than the maximum are in flight.
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
        // `None` sorts below everything: one partition that was never gathered leaves the whole age
        // unknown.
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
        // The positions in a batch are confirmed only once all batches before it are acknowledged.
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

    /// Returns the lag of the peer, if it has ever acknowledged everything: the time until it knows
    /// of a change, or more while acknowledgements are missing.
    pub(super) fn lag_us(&self, now_us: u64, interval_us: u64) -> Option<u64> {
        let way_us = self.round_trip_us? / 2;
        let waiting_us = now_us.saturating_sub(self.known_us?).saturating_sub(way_us);
        Some(waiting_us.max(way_us + interval_us))
    }
}

/// Splits gathered components into pieces that fit into batches. Also returns the number of
/// components that fit into none.
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
