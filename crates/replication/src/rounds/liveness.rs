//! Freshness of the state known of a peer.

use std::collections::{BTreeSet, VecDeque};

use super::BATCHES_IN_FLIGHT_MAX;
use crate::message::{Batch, BatchFreshness, BatchId};

/// Freshness of the state known of a peer. All instants are on our own clock. They stay true once
/// learned, so they only grow.
#[derive(Clone, Debug, Default)]
pub(super) struct PeerLiveness {
    /// The replicators that last spoke, the latest last: for a while there may be two.
    replicators: VecDeque<ReceivedBatches>,
    /// Every component that the peer had marked dirty by this instant is merged here.
    heard_us: Option<u64>,
    /// All usage that the peer had charged by this instant is merged here, including usage charged
    /// while isolated.
    settled_us: Option<u64>,
    /// At this instant the peer was up to date with each of its own peers.
    peers_heard_us: Option<u64>,
}

/// Number of replicators to track for a peer: the outgoing one and its successor.
const REPLICATORS_MAX: usize = 2;

/// Batches received from one replicator.
#[derive(Clone, Debug)]
struct ReceivedBatches {
    incarnation: u64,
    /// Every batch up to this one is merged here.
    upto: u64,
    /// Those behind it that are merged too, while one before them is missing.
    ahead: BTreeSet<u64>,
}

impl PeerLiveness {
    /// Records a merged batch. Applies its freshness only if no earlier batch is missing; a missing
    /// batch is still in flight.
    pub(super) fn take_in(&mut self, now_us: u64, batch: &Batch) {
        let BatchId { incarnation, sequence } = batch.id;
        let place = self.replicators.iter().position(|spoken| spoken.incarnation == incarnation);
        let known = place.and_then(|place| self.replicators.remove(place));
        let mut spoken =
            known.unwrap_or_else(|| ReceivedBatches { incarnation, upto: 0, ahead: BTreeSet::new() });
        spoken.merge(sequence, batch.freshness.after);
        if sequence <= spoken.upto {
            self.update_freshness(now_us, &batch.freshness);
        }
        self.replicators.push_back(spoken);
        if self.replicators.len() > REPLICATORS_MAX {
            self.replicators.pop_front();
        }
    }

    fn update_freshness(&mut self, now_us: u64, freshness: &BatchFreshness) {
        // The peer wrote the batch after we sent it this clock reading. Its statements are true of
        // that instant or a later one. The minimum excludes future instants, which only a faulty
        // peer sends.
        let written_us = freshness.echo_us.min(now_us);
        let before = |age_us: Option<u64>| age_us.and_then(|age_us| written_us.checked_sub(age_us));
        self.heard_us = self.heard_us.max(before(freshness.age_us));
        self.settled_us = self.settled_us.max(before(freshness.settled_age_us));
        self.peers_heard_us = self.peers_heard_us.max(before(freshness.last_heard_age_us));
    }

    /// Returns the last-heard age of the peer itself.
    pub(super) fn last_heard_age_us(&self, now_us: u64) -> Option<u64> {
        self.heard_us.map(|heard_us| now_us.saturating_sub(heard_us))
    }

    /// Returns the age of the newest state that includes the peer's usage while isolated. It equals
    /// the last-heard age while the peer charges no such usage.
    pub(super) fn isolated_age_us(&self, now_us: u64) -> Option<u64> {
        self.settled_us.map(|settled_us| now_us.saturating_sub(settled_us))
    }

    /// Returns the last-heard age of the peer, or that of the peer's own peers as it reported it,
    /// if higher.
    pub(super) fn effective_age_us(&self, now_us: u64) -> Option<u64> {
        let peers_heard_us = now_us.saturating_sub(self.peers_heard_us?);
        self.last_heard_age_us(now_us).map(|own_us| own_us.max(peers_heard_us))
    }
}

impl ReceivedBatches {
    /// Records a merged batch, and that its replicator knows of all batches up to `after`. A
    /// correct peer has at most as many in flight as `ahead` can store. Further batches of a faulty
    /// peer are ignored until `after` covers them.
    fn merge(&mut self, sequence: u64, after: u64) {
        self.upto = self.upto.max(after);
        if sequence > self.upto && self.ahead.len() < BATCHES_IN_FLIGHT_MAX {
            self.ahead.insert(sequence);
        }
        self.ahead = self.ahead.split_off(&self.upto.saturating_add(1));
        while self.ahead.remove(&self.upto.saturating_add(1)) {
            self.upto += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND_US: u64 = 1_000_000;

    /// The next batch of a peer that has one under way at a time.
    fn freshness(echo_us: u64, age_us: u64, last_heard_age_us: u64) -> Batch {
        batch(
            1,
            BatchFreshness {
                after: 0,
                echo_us,
                age_us: Some(age_us),
                settled_age_us: Some(age_us),
                last_heard_age_us: Some(last_heard_age_us),
            },
        )
    }

    fn batch(sequence: u64, freshness: BatchFreshness) -> Batch {
        Batch { id: BatchId { incarnation: 1, sequence }, freshness, groups: vec![] }
    }

    #[test]
    fn a_batch_that_was_under_way_for_long_is_as_old_as_it_is() {
        let mut liveness = PeerLiveness::default();
        liveness.take_in(60 * SECOND_US, &freshness(50 * SECOND_US, SECOND_US, 0));
        assert_eq!(liveness.last_heard_age_us(60 * SECOND_US), Some(11 * SECOND_US));
    }

    #[test]
    fn older_batch_does_not_lower_freshness() {
        let mut liveness = PeerLiveness::default();
        liveness.take_in(10 * SECOND_US, &freshness(10 * SECOND_US, 0, 0));
        liveness.take_in(11 * SECOND_US, &freshness(5 * SECOND_US, 0, 3 * SECOND_US));
        let none = BatchFreshness {
            after: 0,
            echo_us: 11 * SECOND_US,
            age_us: None,
            settled_age_us: None,
            last_heard_age_us: None,
        };
        liveness.take_in(11 * SECOND_US, &batch(1, none));
        assert_eq!(liveness.effective_age_us(11 * SECOND_US), Some(SECOND_US));
    }

    #[test]
    fn effective_age_includes_last_heard_age_at_the_peer() {
        let mut liveness = PeerLiveness::default();
        liveness.take_in(10 * SECOND_US, &freshness(10 * SECOND_US, 0, 4 * SECOND_US));
        assert_eq!(liveness.last_heard_age_us(12 * SECOND_US), Some(2 * SECOND_US));
        assert_eq!(liveness.effective_age_us(12 * SECOND_US), Some(6 * SECOND_US));
    }

    #[test]
    fn last_heard_time_is_within_the_range_of_the_clock() {
        let mut liveness = PeerLiveness::default();
        liveness.take_in(SECOND_US, &freshness(SECOND_US, 2 * SECOND_US, 2 * SECOND_US));
        assert_eq!(
            liveness.last_heard_age_us(SECOND_US),
            None,
            "the report is older than the clock: its age is unknown"
        );
        liveness.take_in(SECOND_US, &freshness(u64::MAX, 0, 0));
        assert_eq!(liveness.last_heard_age_us(3 * SECOND_US), Some(2 * SECOND_US));
    }

    /// However many are under way when the next one is made.
    #[test]
    fn freshness_resumes_when_the_missing_batch_arrives() {
        let of = |sequence: u64, after| {
            batch(
                sequence,
                BatchFreshness {
                    after,
                    echo_us: sequence * 1_000,
                    age_us: Some(0),
                    settled_age_us: Some(0),
                    last_heard_age_us: Some(0),
                },
            )
        };
        let heard_us = |liveness: &PeerLiveness| {
            liveness.last_heard_age_us(90_000).map(|last_heard_age_us| 90_000 - last_heard_age_us)
        };
        let mut liveness = PeerLiveness::default();
        for (sequence, after) in [(1, 0), (4, 1), (5, 1)] {
            liveness.take_in(90_000, &of(sequence, after));
        }
        assert_eq!(heard_us(&liveness), Some(1_000), "batches 2 and 3 have not arrived");
        liveness.take_in(90_000, &of(2, 1));
        liveness.take_in(90_000, &of(3, 1));
        assert_eq!(heard_us(&liveness), Some(3_000));
        for sequence in 6..40 {
            liveness.take_in(90_000, &of(sequence, sequence - 3));
            assert_eq!(heard_us(&liveness), Some(sequence * 1_000));
        }
        assert!(liveness.replicators.iter().all(|spoken| spoken.ahead.is_empty()));
    }

    #[test]
    fn two_replicators_of_a_peer_are_tracked_independently() {
        let mut liveness = PeerLiveness::default();
        for sequence in 1..20_u64 {
            for incarnation in [1, 2] {
                let echo_us = sequence * 1_000 + incarnation;
                let after = sequence.saturating_sub(3);
                let freshness = BatchFreshness {
                    after,
                    echo_us,
                    age_us: Some(0),
                    settled_age_us: Some(0),
                    last_heard_age_us: Some(0),
                };
                let id = BatchId { incarnation, sequence };
                liveness.take_in(90_000, &Batch { id, freshness, groups: vec![] });
                assert_eq!(liveness.last_heard_age_us(90_000), Some(90_000 - echo_us));
            }
        }
        let stranger = BatchId { incarnation: 3, sequence: 1 };
        liveness.take_in(90_000, &Batch { id: stranger, ..freshness(80_000, 0, 0) });
        assert_eq!(
            (liveness.last_heard_age_us(90_000), liveness.replicators.len()),
            (Some(10_000), REPLICATORS_MAX)
        );
    }

    #[test]
    fn batch_after_a_gap_does_not_advance_freshness() {
        let of = |sequence, after, echo_us| {
            batch(
                sequence,
                BatchFreshness {
                    after,
                    echo_us,
                    age_us: Some(0),
                    settled_age_us: Some(0),
                    last_heard_age_us: Some(0),
                },
            )
        };
        let heard_us = |liveness: &PeerLiveness| {
            liveness.last_heard_age_us(9_000).map(|last_heard_age_us| 9_000 - last_heard_age_us)
        };
        let mut liveness = PeerLiveness::default();
        liveness.take_in(9_000, &of(2, 0, 2_000));
        assert_eq!(heard_us(&liveness), None, "batch 1 has not arrived");
        liveness.take_in(9_000, &of(1, 0, 1_000));
        assert_eq!(heard_us(&liveness), Some(1_000));
        liveness.take_in(9_000, &of(3, 0, 3_000));
        assert_eq!(heard_us(&liveness), Some(3_000), "batch 2 has arrived already");
        liveness.take_in(9_000, &of(5, 3, 5_000));
        assert_eq!(heard_us(&liveness), Some(3_000), "batch 4 has not arrived");
        liveness.take_in(9_000, &of(6, 4, 6_000));
        assert_eq!(heard_us(&liveness), Some(6_000), "the sender has the acknowledgement of batch 4");
        let mut other = of(7, 0, 7_000);
        other.id.incarnation = 2;
        liveness.take_in(9_000, &other);
        assert_eq!(heard_us(&liveness), Some(6_000), "another replicator has its own sequence");
    }
}
