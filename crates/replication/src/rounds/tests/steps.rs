//! One step after the other.

use tidegate_core::origin::{RegionId, RoundReply};

use super::super::{
    BATCH_BYTES_MAX, BATCH_COMPONENTS_MAX, BATCHES_IN_FLIGHT_MAX, GATHER_MAX, INTERVAL_US, OUTBOX_BYTES_MAX,
    PEER_TIMEOUT_DEFAULT_US, PartitionRound, Rounds,
};
use super::{component, gathered, rounds};
use crate::message::{Ack, Batch, BatchFreshness, BatchId};
use crate::wire::{COMPONENT_BYTES_MAX, FRAME_BYTES_MAX, Frame};

const NEAR: RegionId = RegionId(1);
const FAR: RegionId = RegionId(2);

fn only(partition_rounds: Vec<PartitionRound>) -> PartitionRound {
    let [partition_round] = <[PartitionRound; 1]>::try_from(partition_rounds).expect("one partition round");
    partition_round
}

fn ack(batch: &Batch, clock_us: u64) -> Ack {
    Ack { id: batch.id, clock_us }
}

/// One partition, one peer, one component that was gathered.
fn with_something_to_say() -> Rounds {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let partition_round = only(rounds.partition_rounds(0, 0));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![component(b"a", 5)], 9, false));
    rounds
}

#[test]
fn changes_are_sent_once_and_trimmed_when_acknowledged() {
    let mut rounds = with_something_to_say();
    let batch = rounds.next_batch(10, NEAR).expect("a batch");
    assert_eq!(batch.id, BatchId { incarnation: 7, sequence: 1 });
    assert_eq!(batch.components(), 1);
    let partition_round = only(rounds.partition_rounds(20, 0));
    assert_eq!(
        (partition_round.round.after, partition_round.round.trim),
        (9, 0),
        "gathered, but not acknowledged"
    );
    assert!(rounds.next_batch(20, NEAR).is_none(), "the batch is in flight");
    assert!(rounds.acknowledged(30, NEAR, &ack(&batch, 0)));
    assert_eq!(only(rounds.partition_rounds(40, 0)).round.trim, 9);
    assert!(rounds.next_batch(40, NEAR).is_none(), "no more changes");
}

#[test]
fn dirty_meters_are_trimmed_when_all_peers_acknowledge() {
    let mut rounds = rounds(&[1, 2], 1, 7);
    rounds.connected(NEAR, 0);
    let partition_round = only(rounds.partition_rounds(0, 0));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![component(b"a", 5)], 9, false));
    let batch = rounds.next_batch(0, NEAR).expect("a batch");
    rounds.acknowledged(0, NEAR, &ack(&batch, 0));
    rounds.connected(FAR, 0);
    let afters: Vec<(u64, u64)> = rounds
        .partition_rounds(0, 0)
        .iter()
        .map(|partition_round| (partition_round.round.after, partition_round.round.trim))
        .collect();
    assert_eq!(afters, [(9, 0), (0, 0)], "each partition is read from its own cursor");
}

#[test]
fn peers_that_are_equally_far_are_gathered_for_at_once() {
    let mut rounds = rounds(&[1, 2], 1, 7);
    rounds.connected(NEAR, 0);
    rounds.connected(FAR, 0);
    let partition_round = only(rounds.partition_rounds(0, 0));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![component(b"a", 5)], 9, false));
    for peer in [NEAR, FAR] {
        assert_eq!(rounds.next_batch(0, peer).map(|batch| batch.components()), Some(1));
    }
}

#[test]
fn origin_gets_the_connected_time_without_any_link() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.merged(1_000, NEAR, &empty_batch(1_000, 0));
    let round = only(rounds.partition_rounds(1_000, 0)).round;
    assert_eq!((round.most, round.connected_for_us), (0, PEER_TIMEOUT_DEFAULT_US));
}

#[test]
fn round_carries_a_lower_bound_of_the_origin_clock() {
    let mut rounds = rounds(&[1], 2, 7);
    let partition_round = only(rounds.partition_rounds(1_000, 0));
    assert_eq!(partition_round.round.clock_us, 0, "the partition has not replied yet");
    rounds.on_round_reply(
        1_500,
        &partition_round,
        &RoundReply { now_us: 77_000, ..gathered(vec![], 0, false) },
    );
    assert_eq!(
        only(rounds.partition_rounds(2_000, 0)).round.clock_us,
        77_500,
        "the reading may be as late as the reply"
    );
    assert_eq!(
        only(rounds.partition_rounds(2_000, 1)).round.clock_us,
        0,
        "each partition may be on another shard"
    );
}

#[test]
fn batch_of_a_broken_link_is_resent_with_new_freshness() {
    let mut rounds = with_something_to_say();
    let first = rounds.next_batch(10, NEAR).expect("a batch");
    rounds.disconnected(NEAR);
    assert!(rounds.next_batch(20, NEAR).is_none(), "the peer is disconnected");
    rounds.connected(NEAR, 555);
    let again = rounds.next_batch(30, NEAR).expect("the batch may not have arrived");
    assert_eq!((again.id, &again.groups), (first.id, &first.groups));
    assert_eq!(
        again.freshness,
        BatchFreshness {
            after: 0,
            echo_us: 555,
            age_us: Some(30),
            settled_age_us: Some(30),
            last_heard_age_us: None
        }
    );
}

/// A full batch, which is gathered and sent.
fn send_full(rounds: &mut Rounds, upto: u64) -> Batch {
    for part in 1..=BATCH_COMPONENTS_MAX as u64 / u64::from(GATHER_MAX) {
        let partition_round = only(rounds.partition_rounds(upto, 0));
        let components = (0..GATHER_MAX).map(|key| component(&key.to_be_bytes(), 1)).collect();
        rounds.on_round_reply(upto, &partition_round, &gathered(components, upto + part, false));
    }
    let batch = rounds.next_batch(upto, NEAR).expect("a full batch");
    assert_eq!(batch.components(), BATCH_COMPONENTS_MAX);
    batch
}

#[test]
fn batches_that_are_acknowledged_in_another_order_are_known_when_all_before_them_are() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let [first, second, third] = [100, 200, 300].map(|upto| send_full(&mut rounds, upto));
    assert_eq!(
        [&first, &second, &third].map(|batch| batch.freshness.after),
        [0, 0, 0],
        "no batch is acknowledged"
    );
    let trim = |rounds: &Rounds| only(rounds.partition_rounds(400, 0)).round.trim;
    assert!(rounds.acknowledged(400, NEAR, &ack(&second, 7)));
    assert_eq!(trim(&rounds), 0, "the first batch may be lost");
    assert!(!rounds.acknowledged(400, NEAR, &ack(&second, 7)), "a repeated acknowledgement");
    assert!(rounds.acknowledged(400, NEAR, &ack(&first, 5)));
    assert_eq!(trim(&rounds), 208);
    rounds.round_ended();
    let fourth = rounds.next_batch(400, NEAR).expect("a heartbeat");
    assert_eq!(
        (fourth.freshness.after, fourth.freshness.echo_us),
        (2, 7),
        "the echo is the later clock reading"
    );
    assert!(rounds.acknowledged(400, NEAR, &ack(&third, 8)));
    assert_eq!(trim(&rounds), 308);
}

#[test]
fn unacknowledged_batches_are_resent_in_order_on_the_next_link() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let [first, second, third] = [100, 200, 300].map(|upto| send_full(&mut rounds, upto));
    rounds.acknowledged(400, NEAR, &ack(&second, 0));
    rounds.disconnected(NEAR);
    rounds.connected(NEAR, 9);
    let again: Vec<Batch> = std::iter::from_fn(|| rounds.next_batch(500, NEAR)).collect();
    let ids: Vec<BatchId> = again.iter().map(|batch| batch.id).collect();
    let sign_of_life = BatchId { sequence: 4, ..first.id };
    assert_eq!(ids, [first.id, third.id, sign_of_life], "acknowledged batches are not resent");
}

/// One region uses many keys. The acknowledgements of the other take a round trip.
#[test]
fn as_many_components_are_carried_in_a_round_trip_as_may_be_under_way() {
    const ROUND_TRIP_US: u64 = 160_000;
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let (mut upto, mut carried) = (0, Vec::new());
    for trip in 0..3 {
        let now_us = trip * ROUND_TRIP_US;
        let mut batches = Vec::new();
        loop {
            while only(rounds.partition_rounds(now_us, 0)).round.most > 0 {
                let partition_round = only(rounds.partition_rounds(now_us, 0));
                upto += 1;
                let components = (0..GATHER_MAX).map(|key| component(&key.to_be_bytes(), upto)).collect();
                rounds.on_round_reply(now_us, &partition_round, &gathered(components, upto, true));
            }
            let Some(batch) = rounds.next_batch(now_us, NEAR) else { break };
            batches.push(batch);
        }
        assert_eq!(batches.len(), BATCHES_IN_FLIGHT_MAX, "batches in flight reach their maximum");
        carried.push(batches.iter().map(Batch::components).sum::<usize>());
        for batch in &batches {
            rounds.acknowledged(now_us + ROUND_TRIP_US, NEAR, &ack(batch, 0));
        }
    }
    assert_eq!(carried, [BATCHES_IN_FLIGHT_MAX * BATCH_COMPONENTS_MAX; 3]);
    let per_second = carried[0] as u64 * 1_000_000 / ROUND_TRIP_US;
    assert!(per_second > 166_667, "{per_second} a second: the worked example of docs/regions.md");
}

#[test]
fn an_acknowledgement_of_another_batch_or_replicator_changes_nothing() {
    let mut rounds = with_something_to_say();
    let batch = rounds.next_batch(10, NEAR).expect("a batch");
    for id in [BatchId { sequence: 2, ..batch.id }, BatchId { incarnation: 6, ..batch.id }] {
        assert!(!rounds.acknowledged(20, NEAR, &Ack { id, clock_us: 0 }));
    }
    assert_eq!(only(rounds.partition_rounds(20, 0)).round.trim, 0);
    assert!(rounds.acknowledged(20, NEAR, &ack(&batch, 0)));
    assert!(!rounds.acknowledged(20, NEAR, &ack(&batch, 0)), "a repeated acknowledgement");
}

#[test]
fn each_round_ends_with_a_sign_of_life() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 77);
    let first = rounds.next_batch(5, NEAR).expect("a heartbeat");
    assert_eq!((first.components(), first.freshness.age_us), (0, None), "no partition has been read yet");
    rounds.acknowledged(6, NEAR, &ack(&first, 78));
    let partition_round = only(rounds.partition_rounds(10, 0));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![], 0, false));
    assert!(rounds.next_batch(20, NEAR).is_none(), "the round has not ended");
    rounds.round_ended();
    let second = rounds.next_batch(30, NEAR).expect("a heartbeat");
    assert_eq!(
        second.freshness,
        BatchFreshness {
            after: 1,
            echo_us: 78,
            age_us: Some(20),
            settled_age_us: Some(20),
            last_heard_age_us: None
        }
    );
}

#[test]
fn queued_components_keep_a_batch_from_counting_as_fresh() {
    let mut rounds = rounds(&[1], 2, 7);
    rounds.connected(NEAR, 0);
    let full = || (0..GATHER_MAX).map(|key| component(&key.to_be_bytes(), 1)).collect::<Vec<_>>();
    let mut upto = 0;
    for _ in 0..=BATCH_COMPONENTS_MAX / usize::from(GATHER_MAX) {
        let partition_round = only(rounds.partition_rounds(100, 0));
        upto += 1_000;
        rounds.on_round_reply(0, &partition_round, &gathered(full(), upto, false));
    }
    let partition_round = only(rounds.partition_rounds(200, 1));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![], 0, false));
    let partition_round = only(rounds.partition_rounds(300, 0));
    rounds.on_round_reply(0, &partition_round, &gathered(vec![], upto, false));
    let first = rounds.next_batch(1_000, NEAR).expect("a full batch");
    assert_eq!((first.components(), first.freshness.age_us), (BATCH_COMPONENTS_MAX, Some(900)));
    rounds.acknowledged(1_000, NEAR, &ack(&first, 0));
    let second = rounds.next_batch(1_000, NEAR).expect("the rest");
    assert_eq!((second.components(), second.freshness.age_us), (usize::from(GATHER_MAX), Some(900)));
    rounds.acknowledged(1_000, NEAR, &ack(&second, 0));
    for partition in [0, 1] {
        let partition_round = only(rounds.partition_rounds(1_500, partition));
        rounds.on_round_reply(0, &partition_round, &gathered(vec![], upto, false));
    }
    rounds.round_ended();
    let last = rounds.next_batch(2_000, NEAR).expect("a heartbeat");
    assert_eq!(last.freshness.age_us, Some(500));
}

#[test]
fn more_is_asked_for_while_there_is_room_for_it() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let long = |key: u32| component(&[&key.to_be_bytes()[..], &vec![b'x'; 60_000]].concat(), 1);
    let mut partition_round = only(rounds.partition_rounds(0, 0));
    let mut components = 0;
    for turn in 1.. {
        let answer = gathered((0..10).map(long).collect(), turn, true);
        components += rounds.on_round_reply(0, &partition_round, &answer) + 10;
        match rounds.next_partition_round(0, &partition_round, &answer) {
            Some(on) => partition_round = on,
            None => break,
        }
        assert_eq!(partition_round.round.after, turn);
    }
    let bytes = components * 60_000;
    let most = OUTBOX_BYTES_MAX as u64;
    assert!((most..most + 700_000).contains(&bytes), "{bytes}");
    assert_eq!(only(rounds.partition_rounds(0, 0)).round.most, 0, "a full outbox stops gathering");
    let mut sent = 0;
    while let Some(batch) = rounds.next_batch(0, NEAR) {
        let bytes = Frame::Batch(batch.clone()).encode().len();
        assert!(bytes <= BATCH_BYTES_MAX + 1_000, "{bytes}");
        sent += batch.components() as u64;
        rounds.acknowledged(0, NEAR, &ack(&batch, 0));
    }
    assert_eq!(sent, components, "every gathered component is sent");
}

#[test]
fn oversized_component_is_counted_and_blocks_no_other() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let partition_round = only(rounds.partition_rounds(0, 0));
    let longest = component(&vec![b'x'; 512 << 10], u64::MAX >> 12);
    let longer = component(&vec![b'x'; COMPONENT_BYTES_MAX], 1);
    let components = vec![component(b"a", 1), longest, longer, component(b"b", 1)];
    assert_eq!(rounds.on_round_reply(0, &partition_round, &gathered(components, 4, false)), 1);
    let mut sent = 0;
    while let Some(batch) = rounds.next_batch(0, NEAR) {
        let bytes = Frame::Batch(batch.clone()).encode();
        assert!(bytes.len() <= FRAME_BYTES_MAX, "{}", bytes.len());
        assert_eq!(Frame::decode(&bytes[4..]), Ok(Frame::Batch(batch.clone())));
        sent += batch.components();
        rounds.acknowledged(0, NEAR, &ack(&batch, 0));
    }
    assert_eq!(sent, 3);
}

#[test]
fn of_a_store_that_lost_its_marks_no_page_is_passed_over() {
    let mut rounds = with_something_to_say();
    let partition_round = only(rounds.partition_rounds(0, 0));
    let first_page = gathered(vec![component(b"a", 1)], 3, true);
    rounds.on_round_reply(0, &partition_round, &first_page);
    assert!(
        rounds.next_partition_round(0, &partition_round, &first_page).is_none(),
        "the page was discarded"
    );
    assert_eq!(only(rounds.partition_rounds(0, 0)).round.after, 0);
}

#[test]
fn a_store_that_lost_its_marks_is_listened_to_from_the_beginning() {
    let mut rounds = with_something_to_say();
    let before = rounds.next_batch(0, NEAR).expect("a batch");
    let partition_round = only(rounds.partition_rounds(0, 0));
    assert_eq!(partition_round.round.after, 9);
    rounds.on_round_reply(0, &partition_round, &gathered(vec![], 3, false));
    rounds.acknowledged(0, NEAR, &ack(&before, 0));
    let round = only(rounds.partition_rounds(0, 0)).round;
    assert_eq!((round.after, round.trim), (0, 0), "stamps of an earlier incarnation are ignored");
}

#[test]
fn lag_is_half_a_round_trip_and_an_interval_and_grows_while_nothing_is_acknowledged() {
    let mut rounds = with_something_to_say();
    assert_eq!(rounds.peer_state(0, NEAR).expect("known").lag_us, None);
    let batch = rounds.next_batch(1_000, NEAR).expect("a batch");
    rounds.acknowledged(101_000, NEAR, &ack(&batch, 0));
    let lag_us = |now_us| rounds.peer_state(now_us, NEAR).expect("known").lag_us;
    assert_eq!(lag_us(101_000), Some(50_000 + INTERVAL_US));
    assert_eq!(lag_us(5_000_000), Some(5_000_000 - 50_000));
}

/// A batch without changes, from a sender that has heard all its peers.
fn empty_batch(echo_us: u64, last_heard_age_us: u64) -> Batch {
    let freshness = BatchFreshness {
        after: 0,
        echo_us,
        age_us: Some(0),
        settled_age_us: Some(0),
        last_heard_age_us: Some(last_heard_age_us),
    };
    Batch { id: BatchId { incarnation: 1, sequence: 1 }, freshness, groups: vec![] }
}

#[test]
fn region_is_connected_while_all_peers_are_fresh() {
    let mut rounds = rounds(&[1, 2], 1, 7);
    rounds.merged(1_000_000, NEAR, &empty_batch(1_000_000, 0));
    assert_eq!(rounds.connected_for_us(1_000_000), 0, "one peer has never been heard");
    assert_eq!(rounds.last_heard_age_us(1_000_000), None);
    rounds.merged(1_500_000, FAR, &empty_batch(1_500_000, 0));
    assert_eq!(rounds.last_heard_age_us(2_000_000), Some(1_000_000));
    assert_eq!(rounds.connected_for_us(2_000_000), PEER_TIMEOUT_DEFAULT_US - 1_000_000);
    assert_eq!(rounds.connected_for_us(1_000_000 + PEER_TIMEOUT_DEFAULT_US), 0);
}

#[test]
fn isolated_region_does_not_claim_to_be_settled() {
    let mut rounds = rounds(&[1], 2, 7);
    rounds.connected(NEAR, 0);
    let mut freshness_after = |now_us: u64, joined: [bool; 2]| {
        for (partition, joined) in (0..).zip(joined) {
            let partition_round = only(rounds.partition_rounds(now_us, partition));
            rounds.on_round_reply(
                now_us,
                &partition_round,
                &RoundReply { includes_isolated: joined, ..gathered(vec![], 0, false) },
            );
        }
        rounds.round_ended();
        let batch = rounds.next_batch(now_us, NEAR).expect("a heartbeat");
        rounds.acknowledged(now_us, NEAR, &ack(&batch, now_us));
        (batch.freshness.age_us, batch.freshness.settled_age_us)
    };
    assert_eq!(freshness_after(10, [false, false]), (Some(0), None));
    assert_eq!(freshness_after(20, [true, false]), (Some(0), None), "not every partition is settled");
    assert_eq!(freshness_after(30, [true, true]), (Some(0), Some(0)));
    assert_eq!(freshness_after(40, [false, true]), (Some(0), Some(10)), "one partition is isolated again");
}

#[test]
fn a_region_counts_on_the_whole_when_all_that_was_charged_to_parts_has_come_and_for_as_long() {
    let mut rounds = rounds(&[1, 2], 1, 7);
    let settled_batch = |settled_age_us| {
        let mut batch = empty_batch(10_000_000, 0);
        batch.freshness.settled_age_us = settled_age_us;
        batch
    };
    let stance = |rounds: &Rounds| (rounds.connected_for_us(10_000_000), rounds.is_settled(10_000_000));
    rounds.merged(10_000_000, NEAR, &settled_batch(Some(1_000)));
    rounds.merged(10_000_000, FAR, &settled_batch(None));
    assert_eq!(
        stance(&rounds),
        (PEER_TIMEOUT_DEFAULT_US, false),
        "all peers are heard, but one is not settled"
    );
    rounds.merged(10_000_000, FAR, &settled_batch(Some(PEER_TIMEOUT_DEFAULT_US)));
    assert_eq!(stance(&rounds), (PEER_TIMEOUT_DEFAULT_US, false), "the settled state is too old");
    rounds.merged(10_000_000, FAR, &settled_batch(Some(3_000)));
    assert_eq!(stance(&rounds), (PEER_TIMEOUT_DEFAULT_US - 3_000, true));
    assert!(
        rounds.partition_rounds(10_000_000, 0).iter().all(|partition_round| partition_round.round.settled)
    );
    let later_us = 10_000_000 + PEER_TIMEOUT_DEFAULT_US - 3_000;
    assert_eq!((rounds.connected_for_us(later_us), rounds.is_settled(later_us)), (3_000, false));
    assert!(
        rounds.partition_rounds(later_us, 0).iter().all(|partition_round| !partition_round.round.settled)
    );
}

#[test]
fn where_two_are_cut_from_each_other_all_three_fall_back_at_about_the_same_time() {
    // Regions 0, 1 and 2 with a batch from each to each other every interval; the link between 0
    // and 1 is cut at 10 s.
    let mut all: Vec<Rounds> = (0..3u64)
        .map(|own| {
            let peers: Vec<u64> = (0..3).filter(|peer| *peer != own).collect();
            rounds(&peers, 1, own)
        })
        .collect();
    let place = |region: u64| usize::try_from(region).expect("one of three");
    let mut fell_back_us = [None; 3];
    for turn in 0..100 {
        let now_us = turn * INTERVAL_US;
        for from in 0..3u64 {
            for to in (0..3u64).filter(|to| *to != from) {
                let is_cut = now_us >= 10_000_000 && from + to == 1;
                if is_cut {
                    continue;
                }
                // As between real replicators, the echoed clock is one interval old.
                let echo_us = now_us.saturating_sub(INTERVAL_US);
                let last_heard_age_us = all[place(from)].last_heard_age_us(now_us);
                let freshness = BatchFreshness {
                    after: turn,
                    echo_us,
                    age_us: Some(0),
                    settled_age_us: Some(0),
                    last_heard_age_us,
                };
                let batch =
                    Batch { id: BatchId { incarnation: 1, sequence: turn }, freshness, groups: vec![] };
                all[place(to)].merged(now_us, RegionId(from), &batch);
            }
        }
        for (region, fell_back_us) in all.iter().zip(&mut fell_back_us) {
            if now_us < 1_000_000 {
                continue;
            }
            if region.connected_for_us(now_us) == 0 {
                fell_back_us.get_or_insert(now_us);
            } else {
                assert_eq!(*fell_back_us, None, "an isolated region stays isolated");
            }
        }
    }
    for fell_back_us in fell_back_us {
        let fell_back_us = fell_back_us.expect("the partition lasts");
        let after_us = fell_back_us - 10_000_000;
        assert!(
            (PEER_TIMEOUT_DEFAULT_US - 5 * INTERVAL_US..=PEER_TIMEOUT_DEFAULT_US).contains(&after_us),
            "{after_us}"
        );
    }
}

#[test]
fn last_heard_age_stays_short_at_any_link_delay() {
    const STEP_US: u64 = 5_000;
    const PHASES_US: [u64; 3] = [0, 65_000, 130_000];
    for way_us in [0, 40_000, 150_000] {
        let peers_of = |own: u64| (0..3u64).filter(move |peer| *peer != own);
        let mut all: Vec<Rounds> =
            (0..3).map(|own| rounds(&peers_of(own).collect::<Vec<_>>(), 1, own)).collect();
        let place = |region: u64| usize::try_from(region).expect("one of three");
        for own in 0..3 {
            peers_of(own).for_each(|peer| all[place(own)].connected(RegionId(peer), 0));
        }
        // Messages in transit: arrival time, sender, receiver, message.
        let mut batches: Vec<(u64, u64, u64, Batch)> = Vec::new();
        let mut acks: Vec<(u64, u64, u64, Ack)> = Vec::new();
        let mut longest_us = 0;
        for now_us in (0..10_000_000).step_by(5_000) {
            for (_, from, to, batch) in batches.extract_if(.., |(at_us, ..)| *at_us <= now_us) {
                let ack = all[place(to)].merged(now_us, RegionId(from), &batch);
                acks.push((now_us + way_us, to, from, ack));
            }
            for (_, from, to, ack) in acks.extract_if(.., |(at_us, ..)| *at_us <= now_us) {
                all[place(to)].acknowledged(now_us, RegionId(from), &ack);
            }
            for own in 0..3u64 {
                if now_us % INTERVAL_US / STEP_US == PHASES_US[place(own)] / STEP_US {
                    let partition_round = only(all[place(own)].partition_rounds(now_us, 0));
                    all[place(own)].on_round_reply(0, &partition_round, &gathered(vec![], 0, false));
                    all[place(own)].round_ended();
                }
                for peer in peers_of(own) {
                    let next = all[place(own)].next_batch(now_us, RegionId(peer));
                    batches.extend(next.map(|batch| (now_us + way_us, own, peer, batch)));
                }
            }
            if now_us > 3_000_000 {
                let ages =
                    all.iter().map(|rounds| rounds.effective_age_us(now_us).expect("all peers are heard"));
                longest_us = longest_us.max(ages.max().expect("three"));
            }
        }
        let most_us = 4 * INTERVAL_US + 2 * (2 * way_us) + 4 * STEP_US;
        assert!(
            (2 * INTERVAL_US..=most_us).contains(&longest_us),
            "{longest_us} with a one-way delay of {way_us}"
        );
    }
}

#[test]
fn gather_is_acknowledged_with_its_last_batch() {
    let mut rounds = rounds(&[1], 1, 7);
    rounds.connected(NEAR, 0);
    let long = |key: u32| component(&[&key.to_be_bytes()[..], &vec![b'x'; 60_000]].concat(), 1);
    let partition_round = only(rounds.partition_rounds(0, 0));
    rounds.on_round_reply(0, &partition_round, &gathered((0..10).map(long).collect(), 9, false));
    let mut sent = 0;
    while let Some(batch) = rounds.next_batch(0, NEAR) {
        assert_eq!(only(rounds.partition_rounds(0, 0)).round.trim, 0, "{sent} of 10 are sent");
        sent += batch.components();
        assert_eq!(batch.freshness.age_us.is_some(), sent == 10);
        rounds.acknowledged(0, NEAR, &ack(&batch, 0));
    }
    assert_eq!((sent, only(rounds.partition_rounds(0, 0)).round.trim), (10, 9));
}
