//! The node's engine: what a process does about meters that an origin keeps.
//!
//! The table decides what it can by itself: inside a grant, or by a denial that the origin told. What it cannot decide comes
//! here ([`Engine::ask`]), and waits for the lane of its partition. A lane has one call under way, carries all that is to be
//! said about its meters, and is called again with the same words until it is answered: whatever the network does, a call
//! is applied once.
//!
//! Nothing here does anything. Requests, answers, failures and time come in; what is to be done goes out as [`Effect`]s.

mod demand;
mod hedges;
mod lane;
mod pace;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;
mod tracked;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::digest::{Digest, KeySpace};
use crate::limit::Limit;
use crate::origin::{Call, NodeId, Reply, StoreId, Terms};
use crate::table::Table;
use crate::time::Now;

use hedges::Hedges;
use lane::Lane;
use pace::Pace;

/// A request that waits: whatever its owner calls it.
pub type Ticket = u64;

/// What an engine may take its time for. Every length is in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// How often what was spent is reported. Shorter: fresher counts; more calls.
    pub flush_us: u64,
    /// How long a grant may be spent. Longer: a node goes on longer without the origin; what a dead node held is longer lost.
    pub life_us: u64,
    /// The same for a key that was denied of late.
    pub strict_life_us: u64,
    /// How long after a denial a key counts as denied of late.
    pub strict_us: u64,
    /// How long a request waits for the origin. Longer: fewer decisions without it; longer answers when it is slow.
    pub deadline_us: u64,
    /// After how long a call that someone waits for is sent a second time, for the tail; one in twenty, and twenty
    /// in a second, at most.
    pub hedge_us: u64,
    /// After how long a call without an answer is sent again; doubled each time up to `retry_us_max`.
    pub retry_us: u64,
    /// The longest time between two attempts.
    pub retry_us_max: u64,
    /// How many meters in a second it may speak of, where a call counts as three. Beyond, intervals and lives are stretched,
    /// up to five times as long. Higher: fresher counts; more work for the origin. A Redis does 20,000 to 40,000 in a second, for
    /// all nodes together.
    pub updates_per_s_max: u64,
    /// How many calls may be under way and not late. More: partitions that are far wait less for each other; a longer queue at
    /// a store that has too much to do, where nobody can leave it any more.
    pub calls_max: usize,
    /// How many meters are kept track of. Beyond, requests are decided at the origin one by one.
    pub tracked_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            flush_us: 100_000,
            life_us: 1_000_000,
            strict_life_us: 300_000,
            strict_us: 5_000_000,
            deadline_us: 20_000,
            hedge_us: 3_000,
            retry_us: 100_000,
            retry_us_max: 1_000_000,
            updates_per_s_max: 5_000,
            calls_max: 16,
            tracked_max: 1 << 18,
        }
    }
}

/// A meter of a request, spelled out.
#[derive(Clone, Debug)]
pub struct MeterRef {
    /// Its name at the origin, unambiguous within its partition.
    pub key: Arc<[u8]>,
    /// The limit, marked [`Limit::at_origin`].
    pub limit: Limit,
    /// The limit as the origin counts it.
    pub terms: Terms,
    /// Whose key it is here.
    pub space: KeySpace,
    /// Its name here.
    pub digest: Digest,
}

/// A request that the table could not decide.
#[derive(Clone, Debug)]
pub struct Request {
    /// Whatever its owner calls it.
    pub ticket: Ticket,
    /// Where its meters are kept.
    pub partition: u16,
    /// All limits that it is under, with what it costs under each.
    pub charges: Vec<Charge>,
}

/// What a request costs under one limit.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The meter of the limit.
    pub meter: MeterRef,
    /// Units.
    pub cost: u64,
}

/// What a call costs an origin on Redis beside its meters, in meters.
const CALL_WORTH: u64 = 3;

/// What is to be done.
#[derive(Clone, Debug)]
pub enum Effect {
    /// Send this call. It may have been sent before.
    Call {
        /// To this partition.
        partition: u16,
        /// With these words.
        call: Arc<Call>,
        /// Whether it is a second attempt beside the first, better sent another way.
        hedge: bool,
    },
    /// Tell whoever waits.
    Answer {
        /// Who waits.
        ticket: Ticket,
        /// What became of it.
        resolution: Resolution,
    },
}

/// What became of a request that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// It passes, and is charged.
    Allowed {
        /// What is left under each of its limits, in their order: never more than there was when it was decided.
        remaining: Box<[u32]>,
    },
    /// It does not pass.
    Denied {
        /// By this of its limits.
        by: usize,
        /// What is left under each of its limits, as above.
        remaining: Box<[u32]>,
        /// When it would pass, if nothing else came, µs from now.
        retry_us: u64,
    },
    /// The origin did not say in time: the request's class decides.
    Unanswered,
}

/// What is known of a meter without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Known {
    /// How many nodes were last heard to hold a part of it, this one included.
    pub holders: u32,
    /// What is left of it at the origin, with what has drained since it was heard of, if nobody used any.
    pub left: u64,
}

/// How a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// It was not applied, or nobody knows: it is sent again.
    Unanswered,
    /// A later call of this lane was applied: this one never will be.
    Outdated {
        /// The last call that was applied.
        sequence: u64,
    },
}

/// What an engine has seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Calls that were made, repeats not counted.
    pub calls: u64,
    /// Calls that were sent again.
    pub repeats: u64,
    /// Meters spoken of in all calls.
    pub updates: u64,
    /// Requests that waited.
    pub waited: u64,
    /// Requests that were not answered in time.
    pub unanswered: u64,
    /// Units that passed at the origin for requests that had been given up, and were given back, under all limits together.
    pub returned: u64,
}

/// The node's engine.
#[derive(Debug)]
pub struct Engine {
    node: NodeId,
    settings: Settings,
    lanes: BTreeMap<u16, Lane>,
    tracked: usize,
    last_reply_us: u64,
    /// When the last of the calls was sent that have been answered.
    answered_sent_us: u64,
    closing: bool,
    pace: Pace,
    hedges: Hedges,
    /// The first partition that had something to say the last time and could not.
    turn: u16,
    stats: EngineStats,
}

impl Engine {
    /// The engine of a process that calls itself `node`: a name that no process had before.
    pub fn new(node: NodeId, settings: Settings) -> Self {
        Self {
            node,
            settings,
            lanes: BTreeMap::new(),
            tracked: 0,
            last_reply_us: 0,
            answered_sent_us: 0,
            closing: false,
            pace: Pace::default(),
            hedges: Hedges::default(),
            turn: 0,
            stats: EngineStats::default(),
        }
    }

    /// What it has seen so far.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Takes in a request that the table could not decide. Its answer comes as an [`Effect`], now or later.
    pub fn ask(&mut self, now: Now, request: Request, effects: &mut Vec<Effect>) {
        self.stats.waited += 1;
        let stalled = self.is_stalled(now);
        let lane = self.lanes.entry(request.partition).or_default();
        if stalled || lane.is_stalled(now, &self.settings) {
            self.stats.unanswered += 1;
            effects.push(Effect::Answer { ticket: request.ticket, resolution: Resolution::Unanswered });
            return;
        }
        self.tracked += lane.wait(now, request, self.settings.tracked_max.saturating_sub(self.tracked));
    }

    /// Notes that a request was let through without the origin, to be reported when it is back.
    pub fn owe(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        let room = self.settings.tracked_max.saturating_sub(self.tracked);
        self.tracked += self.lanes.entry(partition).or_default().owe(now, meter, cost, room);
    }

    /// Gives back what was charged at the origin already.
    pub fn refund(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        let room = self.settings.tracked_max.saturating_sub(self.tracked);
        self.tracked += self.lanes.entry(partition).or_default().refund(now, meter, cost, room);
    }

    /// Does what time asks for, and says when to come again at the latest.
    pub fn poll(&mut self, now: Now, table: &Table, effects: &mut Vec<Effect>) -> Option<u64> {
        self.hedges.pass(now.mono_us());
        self.pace.measure(now.mono_us(), self.stats.updates + CALL_WORTH * self.stats.calls, &self.settings);
        let mut cx = Context {
            node: self.node,
            now,
            table,
            settings: &self.pace.of(&self.settings),
            flush_us_min: self.settings.flush_us,
            hedges: &mut self.hedges,
            stats: &mut self.stats,
            closing: self.closing,
            calls_left: 0,
            answered_sent_us: self.answered_sent_us,
        };
        let mut look = Look::at(&self.lanes, &cx, self.turn);
        cx.calls_left = self.settings.calls_max.max(1).saturating_sub(look.calls);
        let mut crowded = false;
        for (_, at) in look.awake {
            let partition = at.wrapping_add(look.turn);
            let Some(lane) = self.lanes.get_mut(&partition) else { continue };
            self.tracked -= lane.poll(&mut cx, partition, effects);
            look.wake_us = look.wake_us.into_iter().chain(lane.wake_us()).min();
            if !crowded && lane.is_held_up() {
                (crowded, self.turn) = (true, partition);
            }
        }
        let room_us = if crowded { look.late_us } else { None };
        look.wake_us.into_iter().chain(room_us).min()
    }

    /// Takes in the answer to a call.
    pub fn on_reply(
        &mut self,
        now: Now,
        table: &Table,
        partition: u16,
        sequence: u64,
        reply: &Reply,
        effects: &mut Vec<Effect>,
    ) {
        let Some(lane) = self.lanes.get_mut(&partition) else { return };
        self.last_reply_us = now.mono_us();
        let mut cx = Context {
            node: self.node,
            now,
            table,
            settings: &self.pace.of(&self.settings),
            flush_us_min: self.settings.flush_us,
            hedges: &mut self.hedges,
            stats: &mut self.stats,
            closing: self.closing,
            calls_left: 0,
            answered_sent_us: self.answered_sent_us,
        };
        lane.on_reply(&mut cx, sequence, reply, effects);
        self.answered_sent_us = cx.answered_sent_us;
    }

    /// Takes in that a call failed.
    pub fn on_failure(&mut self, now: Now, partition: u16, sequence: u64, failure: Failure) {
        if let Some(lane) = self.lanes.get_mut(&partition) {
            lane.on_failure(now, sequence, failure);
        }
    }

    /// From now on nothing is kept: everything is reported and given back. Done when [`Engine::is_idle`].
    pub fn close(&mut self) {
        self.closing = true;
    }

    /// Whether there is nothing to report and nobody waits.
    pub fn is_idle(&self) -> bool {
        self.lanes.values().all(Lane::is_idle)
    }

    /// What the origin last said of a meter; nothing if it was not asked about of late.
    pub fn known(&self, now: Now, partition: u16, digest: Digest) -> Option<Known> {
        self.lanes.get(&partition)?.known(now, digest)
    }

    /// Whether the origin is not answering anyone: a call is overdue and nothing was heard since it was sent.
    pub fn is_stalled(&self, now: Now) -> bool {
        let overdue_us = self.lanes.values().filter_map(|lane| lane.overdue_since(now, &self.settings)).min();
        overdue_us.is_some_and(|sent_us| self.last_reply_us < sent_us)
    }
}

/// All lanes at a glance, looked at once: there are hundreds, and this is done for every answer.
struct Look {
    turn: u16,
    /// Those that have something to do, in the order in which they do it, by how far they are from the turn.
    awake: Vec<(bool, u16)>,
    /// When the first of the others has something to do.
    wake_us: Option<u64>,
    /// How many calls are under way that are not late, and when the first of them will be.
    calls: usize,
    late_us: Option<u64>,
}

impl Look {
    fn at(lanes: &BTreeMap<u16, Lane>, cx: &Context<'_>, turn: u16) -> Self {
        let mut look = Self { turn, awake: Vec::new(), wake_us: None, calls: 0, late_us: None };
        for (partition, lane) in lanes {
            if let Some(late_us) = lane.late_us(cx.settings).filter(|late_us| *late_us > cx.now_us()) {
                look.calls += 1;
                look.late_us = look.late_us.into_iter().chain([late_us]).min();
            }
            if lane.is_awake(cx.now, cx.closing) {
                look.awake.push((!lane.is_waited_for(), partition.wrapping_sub(turn)));
            } else {
                look.wake_us = look.wake_us.into_iter().chain(lane.wake_us()).min();
            }
        }
        // Whoever waits comes first; then those that came last the time before.
        look.awake.sort_unstable();
        look
    }
}

/// What a lane needs to know and to reach.
struct Context<'c> {
    node: NodeId,
    now: Now,
    table: &'c Table,
    /// At the present pace.
    settings: &'c Settings,
    /// How often is reported when little is due.
    flush_us_min: u64,
    hedges: &'c mut Hedges,
    stats: &'c mut EngineStats,
    closing: bool,
    /// How many more calls may be made now.
    calls_left: usize,
    /// When the last of the calls was sent that have been answered.
    answered_sent_us: u64,
}

impl Context<'_> {
    fn now_us(&self) -> u64 {
        self.now.mono_us()
    }
}

/// Filled in by whoever sends the call.
const STORE_UNKNOWN: StoreId = StoreId { lineage: 0, boot: 0, parent: 0 };
