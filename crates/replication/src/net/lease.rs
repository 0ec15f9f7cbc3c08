//! The replicator lease, and the rounds of its holder.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tidegate_core::origin::DIRTY_METERS_MAX;
use tidegate_origin::{LeaseReply, PARTITIONS};
use tokio::time::{MissedTickBehavior, interval};

use super::shared::{LEASE_US, Shared};
use crate::rounds::{GATHER_MAX, INTERVAL_US, PartitionRound};

/// Calls to the own origin that are under way at once. Higher: shorter rounds; nodes wait longer
/// for the same store.
const CALLS_AT_ONCE: usize = 16;

/// Maximum calls to one partition in a round: enough for all dirty meters that a partition stores.
/// While one partition has a backlog, peers see no progress of the whole region. The backlog must
/// not take more rounds than a slow origin makes necessary.
const GATHERS_MAX: usize = DIRTY_METERS_MAX.div_ceil(GATHER_MAX as usize);

/// The same maximum once the next round is due. Higher: a busy partition catches up sooner while
/// the origin is slow; other partitions wait longer.
const GATHERS_MIN: usize = 8;

/// Acquires or renews the replicator lease three times in each lease time.
pub(super) async fn keep_lease(shared: Arc<Shared>) {
    let mut ticks = interval(Duration::from_micros(LEASE_US / 3));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // From before the call: the origin's time begins later, and never ends before ours.
        let until_us = shared.now_us() + LEASE_US;
        match shared.ask_origin(shared.origin.lease(shared.lease_request())).await {
            Ok(LeaseReply { is_held: true, .. }) => shared.begin_or_extend(until_us),
            Ok(LeaseReply { lag_us, .. }) => shared.note_other_holder(lag_us),
            Err(_) if shared.is_over() => shared.end(),
            Err(_) => {}
        }
    }
}

/// Runs a replication round at each interval, or earlier on request, while this node is the
/// replicator.
pub(super) async fn run_rounds(shared: Arc<Shared>) {
    let mut ticks = interval(Duration::from_micros(INTERVAL_US));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shared.hurry.notified() => ticks.reset(),
        }
        if let Some(incarnation) = shared.incarnation() {
            let is_connected = shared.is_connected(incarnation);
            let next_us = shared.now_us() + INTERVAL_US;
            let partitions = stream::iter(0..PARTITIONS);
            partitions
                .for_each_concurrent(CALLS_AT_ONCE, |partition| {
                    look(&shared, incarnation, partition, next_us)
                })
                .await;
            shared.round_ended(incarnation, is_connected);
        }
    }
}

async fn look(shared: &Shared, incarnation: u64, partition: u16, next_us: u64) {
    let partition_rounds =
        shared.during(incarnation, |rounds, now_us| rounds.partition_rounds(now_us, partition));
    for partition_round in partition_rounds.unwrap_or_default() {
        gather(shared, incarnation, partition_round, next_us).await;
    }
}

/// Gathers from a partition until it has no more components, or has used its calls of this round.
/// The next round is due at `next_us`.
async fn gather(shared: &Shared, incarnation: u64, first: PartitionRound, next_us: u64) {
    let mut next = Some(first);
    for times in 0.. {
        let Some(partition_round) = next.take().filter(|_| gathers_again(times, shared.now_us() >= next_us))
        else {
            return;
        };
        let answer = shared.origin.round(partition_round.partition, &partition_round.round);
        // The next round requests the missing components again.
        let Ok(gathered) = shared.ask_origin(answer).await else { return };
        let on = shared.during(incarnation, |rounds, now_us| {
            (
                rounds.on_round_reply(now_us, &partition_round, &gathered),
                rounds.next_partition_round(now_us, &partition_round, &gathered),
            )
        });
        let Some((oversized, on)) = on else { return };
        shared.note_oversized(oversized);
        next = on;
    }
}

/// Whether to call a partition again after `times` calls in this round. If the next round is due,
/// the partition gets fewer calls.
const fn gathers_again(times: usize, is_next_due: bool) -> bool {
    times < if is_next_due { GATHERS_MIN } else { GATHERS_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partition_sends_its_backlog_in_one_round_unless_others_wait() {
        let partition_round =
            |is_next_due| (0..1_000).take_while(|times| gathers_again(*times, is_next_due)).count();
        assert_eq!(partition_round(false) * usize::from(GATHER_MAX), DIRTY_METERS_MAX);
        assert_eq!(partition_round(true), GATHERS_MIN);
    }
}
