//! The lease, and the rounds of whoever holds it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tidegate_core::origin::MARKS_MAX;
use tidegate_origin::{Lease, PARTITIONS};
use tokio::time::{MissedTickBehavior, interval};

use super::shared::{LEASE_US, Shared};
use crate::rounds::{Asked, GATHER_MAX, INTERVAL_US};

/// Calls to the own origin that are under way at once. Higher: shorter rounds; nodes wait longer for the same store.
const CALLS_AT_ONCE: usize = 16;

/// How often a partition is asked in a round at most while it has more to tell: as often as it takes to tell all marks that it keeps. While
/// anything is left to tell in one partition, nobody hears of any: what changes in one must not wait for more rounds than the store
/// makes it.
const GATHERS_MAX: usize = MARKS_MAX.div_ceil(GATHER_MAX as usize);

/// How often at least, also when the next round is due. Higher: a partition in which much changes is told sooner while the store is slow;
/// others wait longer for their turn.
const GATHERS_MIN: usize = 8;

/// Says again and again that this process would be the courier.
pub(super) async fn keep_lease(shared: Arc<Shared>) {
    let mut ticks = interval(Duration::from_micros(LEASE_US / 3));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // From before the call: the origin's time begins later, and never ends before ours.
        let until_us = shared.now_us() + LEASE_US;
        match shared.ask_origin(shared.origin.lease(shared.bid())).await {
            Ok(Lease { is_held: true, .. }) => shared.begin_or_extend(until_us),
            Ok(Lease { lag_us, .. }) => shared.end_where(lag_us),
            Err(_) if shared.is_over() => shared.end(),
            Err(_) => {}
        }
    }
}

/// Goes a round each time that one is due, or that somebody waits for one, while this process is the courier.
pub(super) async fn go_rounds(shared: Arc<Shared>) {
    let mut ticks = interval(Duration::from_micros(INTERVAL_US));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shared.hurry.notified() => ticks.reset(),
        }
        if let Some(incarnation) = shared.incarnation() {
            let is_whole = shared.is_whole(incarnation);
            let next_us = shared.now_us() + INTERVAL_US;
            let partitions = stream::iter(0..PARTITIONS);
            partitions
                .for_each_concurrent(CALLS_AT_ONCE, |partition| {
                    look(&shared, incarnation, partition, next_us)
                })
                .await;
            shared.round_ended(incarnation, is_whole);
        }
    }
}

async fn look(shared: &Shared, incarnation: u64, partition: u16, next_us: u64) {
    let asks = shared.during(incarnation, |rounds, now_us| rounds.asks(now_us, partition));
    for asked in asks.unwrap_or_default() {
        gather(shared, incarnation, asked, next_us).await;
    }
}

/// Asks a partition until it has told everything, or has had its turn in a round after which the next is due then.
async fn gather(shared: &Shared, incarnation: u64, first: Asked, next_us: u64) {
    let mut next = Some(first);
    for times in 0.. {
        let Some(asked) = next.take().filter(|_| is_asked_on(times, shared.now_us() >= next_us)) else {
            return;
        };
        let answer = shared.origin.round(asked.partition, &asked.round);
        // What was not told is asked for in the next round.
        let Ok(gathered) = shared.ask_origin(answer).await else { return };
        let on = shared.during(incarnation, |rounds, now_us| {
            (rounds.gathered(now_us, &asked, &gathered), rounds.ask_on(now_us, &asked, &gathered))
        });
        let Some((oversized, on)) = on else { return };
        shared.note_oversized(oversized);
        next = on;
    }
}

/// Whether a partition is asked again that has more to tell, was asked so often in this round, and may be keeping the next one waiting.
const fn is_asked_on(times: usize, is_next_due: bool) -> bool {
    times < if is_next_due { GATHERS_MIN } else { GATHERS_MAX }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_partition_tells_all_that_it_keeps_in_one_round_unless_others_wait() {
        let asked = |is_next_due| (0..1_000).take_while(|times| is_asked_on(*times, is_next_due)).count();
        assert_eq!(asked(false) * usize::from(GATHER_MAX), MARKS_MAX);
        assert_eq!(asked(true), GATHERS_MIN);
    }
}
