//! The lease, and the rounds of whoever holds it.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream;
use tidegate_origin::{Lease, PARTITIONS};
use tokio::time::{MissedTickBehavior, interval};

use super::shared::{LEASE_US, Shared};
use crate::rounds::{Asked, INTERVAL_US};

/// Calls to the own origin that are under way at once. Higher: shorter rounds; nodes wait longer for the same store.
const CALLS_AT_ONCE: usize = 16;

/// How often a partition is asked again in a round while it has more to tell. Higher: a partition in which much changes is
/// told sooner; others wait longer for their turn.
const GATHERS_PER_ROUND_MAX: usize = 8;

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
            let partitions = stream::iter(0..PARTITIONS);
            partitions
                .for_each_concurrent(CALLS_AT_ONCE, |partition| look(&shared, incarnation, partition))
                .await;
            shared.round_ended(incarnation, is_whole);
        }
    }
}

async fn look(shared: &Shared, incarnation: u64, partition: u16) {
    let asks = shared.during(incarnation, |rounds, now_us| rounds.asks(now_us, partition));
    for asked in asks.unwrap_or_default() {
        gather(shared, incarnation, asked).await;
    }
}

/// Asks a partition until it has told everything, or has had its turn.
async fn gather(shared: &Shared, incarnation: u64, first: Asked) {
    let mut next = Some(first);
    for _ in 0..GATHERS_PER_ROUND_MAX {
        let Some(asked) = next.take() else { return };
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
