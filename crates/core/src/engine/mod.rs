//! The node's engine: grants and reports of the meters that an origin counts.
//!
//! The table decides a request by itself within a grant, or by a denial that the origin sent. Other
//! requests come here ([`Engine::on_request`]) and wait for the session of their partition. A
//! session has one call in flight, which carries the reports of its meters. The session repeats the
//! call until the origin replies. The origin applies a call once, unless the node is cut off for
//! longer than the origin retains its session.
//!
//! The engine does no I/O. Requests, replies, failures and time come in; [`Effect`]s go out.

mod context;
mod effect;
mod hedges;
mod node_meter;
mod pace;
mod request;
mod session;
mod settings;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use crate::digest::Digest;
use crate::fallback::FallbackState;
use crate::origin::{CallReply, NodeId};
use crate::table::Table;
use crate::time::Now;

pub use context::EngineStats;
pub use effect::{CallFailure, Effect, Resolution};
pub use request::{Charge, ChargeLocation, EngineRequest, MeterRef, Ticket};
pub use settings::EngineSettings;

use context::{Context, NodeState};
use node_meter::NodeMeter;
use session::Session;

/// The node's engine.
#[derive(Debug)]
pub struct Engine {
    node: NodeState,
    sessions: BTreeMap<u16, Session>,
    /// Tracked meters of all sessions.
    tracked: usize,
    /// Waiting requests of all sessions.
    waiting: usize,
    /// The first partition that had a call due and could not send it, the last time there was one.
    turn: u16,
}

impl Engine {
    /// Creates the engine of the process `node`: a name that no process had before.
    pub fn new(node: NodeId, settings: EngineSettings) -> Self {
        let node = NodeState::new(node, settings);
        Self { node, sessions: BTreeMap::new(), tracked: 0, waiting: 0, turn: 0 }
    }

    /// Returns the counters so far.
    pub fn stats(&self) -> EngineStats {
        self.node.stats
    }

    /// Limits the life of grants of cross-region limits, from the next call on.
    pub fn limit_cross_region_life(&mut self, life_us: u64) {
        self.node.settings.cross_region_life_us = life_us;
    }

    /// Accepts a request that the table could not decide. Its answer comes as an [`Effect`], now or
    /// later.
    pub fn on_request(&mut self, now: Now, request: EngineRequest, effects: &mut Vec<Effect>) {
        let is_stalled = self.is_stalled(now);
        let Self { node, sessions, waiting, tracked, .. } = self;
        let session = sessions.entry(request.partition).or_default();
        let is_crowded = *waiting >= node.settings.waiting_max;
        node.stats.waited += 1;
        node.stats.crowded += u64::from(is_crowded);
        if is_crowded || is_stalled || session.is_stalled(now, &node.settings) {
            node.stats.unanswered += 1;
            effects.push(Effect::Answer { ticket: request.ticket, resolution: Resolution::Unanswered });
            return;
        }
        *waiting += 1;
        *tracked += session.wait(now, request, node.settings.tracked_max.saturating_sub(*tracked));
    }

    /// Adds usage that was admitted without the origin, for the next report.
    pub fn owe(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        self.track(now, partition, meter, cost, NodeMeter::owe);
    }

    /// Refunds a charge of unknown time in full, as a single bucket would. Only units that drain
    /// while the origin is stalled are not refunded, because a bucket would have drained them
    /// meanwhile.
    pub fn refund(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        let origin_us = self.session(partition).origin_us(now.mono_us());
        self.track(now, partition, meter, cost, |node_meter, cost, now_us| {
            node_meter.refund_request(cost, origin_us, now_us);
        });
    }

    /// Refunds the charge of a request that is denied in the end. Units that have drained since are
    /// not refunded: other requests may have used them by then, and they would pass twice.
    pub fn roll_back(
        &mut self,
        now: Now,
        table: &Table,
        partition: u16,
        charge: &Charge,
        location: ChargeLocation,
    ) {
        let session = self.session(partition);
        let (rest, charged_us) = match location {
            ChargeLocation::AtOrigin { at_us } => (charge.cost, Some(at_us)),
            ChargeLocation::OnNode { since_us } => {
                (session.take_unreported(now, table, charge, since_us), session.origin_us(since_us))
            }
        };
        if rest > 0 {
            self.track(now, partition, &charge.meter, rest, |node_meter, rest, now_us| {
                node_meter.refund(rest, charged_us, now_us);
            });
        }
    }

    fn session(&mut self, partition: u16) -> &mut Session {
        self.sessions.entry(partition).or_default()
    }

    /// Applies `change` to a meter, or counts the cost as dropped if no more meters can be tracked.
    fn track(
        &mut self,
        now: Now,
        partition: u16,
        meter: &MeterRef,
        cost: u64,
        change: impl FnOnce(&mut NodeMeter, u64, u64),
    ) {
        let session = self.sessions.entry(partition).or_default();
        let before = session.tracked();
        let most = before + self.node.settings.tracked_max.saturating_sub(self.tracked);
        match session.track(now, meter, most) {
            Some(node_meter) => change(node_meter, cost, now.mono_us()),
            None => self.node.stats.dropped += cost,
        }
        self.tracked += session.tracked() - before;
    }

    /// Does the work that is due, and returns the latest time for the next poll.
    pub fn poll(&mut self, now: Now, table: &Table, effects: &mut Vec<Effect>) -> Option<u64> {
        let before = effects.len();
        self.node.advance(now.mono_us());
        let mut cx = self.node.context(now, table);
        let mut scan = SessionScan::at(&self.sessions, &cx, self.turn);
        cx.calls_left = cx.settings.calls_max.max(1).saturating_sub(scan.calls);
        let mut is_crowded = false;
        for (_, distance) in scan.awake {
            let partition = distance.wrapping_add(scan.turn);
            let Some(session) = self.sessions.get_mut(&partition) else { continue };
            self.tracked -= session.poll(&mut cx, partition, effects);
            scan.wake_us = scan.wake_us.into_iter().chain(session.wake_us()).min();
            if !is_crowded && session.is_held_up() {
                (is_crowded, self.turn) = (true, partition);
            }
        }
        self.note_answered(effects, before);
        let room_us = if is_crowded { scan.late_us } else { None };
        scan.wake_us.into_iter().chain(room_us).min()
    }

    /// Processes the reply to a call.
    pub fn on_reply(
        &mut self,
        now: Now,
        table: &Table,
        partition: u16,
        sequence: u64,
        reply: &CallReply,
        effects: &mut Vec<Effect>,
    ) {
        let before = effects.len();
        let Some(session) = self.sessions.get_mut(&partition) else { return };
        self.node.replies.note_reply(now.mono_us(), reply);
        session.on_reply(&mut self.node.context(now, table), sequence, reply, effects);
        self.note_answered(effects, before);
    }

    /// Processes the failure of a call. If the call is never applied, its waiting requests are
    /// answered now.
    pub fn on_failure(
        &mut self,
        now: Now,
        partition: u16,
        sequence: u64,
        failure: CallFailure,
        effects: &mut Vec<Effect>,
    ) {
        let before = effects.len();
        if let Some(session) = self.sessions.get_mut(&partition) {
            session.on_failure(now, sequence, failure, &mut self.node.stats, effects);
        }
        self.note_answered(effects, before);
    }

    /// Subtracts the requests answered since effect number `before` from the waiting ones.
    fn note_answered(&mut self, effects: &[Effect], before: usize) {
        let new = effects.get(before..).unwrap_or_default();
        let answered = new.iter().filter(|effect| matches!(effect, Effect::Answer { .. })).count();
        self.waiting = self.waiting.saturating_sub(answered);
    }

    /// From now on the engine keeps no grants: it reports all usage and returns all grants. Done
    /// when [`Engine::is_idle`].
    pub fn close(&mut self) {
        self.node.is_closing = true;
    }

    /// Whether no usage is left to report and no request waits.
    pub fn is_idle(&self) -> bool {
        self.sessions.values().all(Session::is_idle)
    }

    /// Returns the state for a decision without the origin. The remaining units have grown by the
    /// drain since the last reply, as if no request had used any.
    pub fn fallback_state(&self, now: Now, partition: u16, digest: Digest) -> FallbackState {
        let left = self.sessions.get(&partition).and_then(|session| session.left(now, digest));
        FallbackState { processes: self.node.replies.processes, remaining: left }
    }

    /// Returns the known number of nodes that share the origin.
    pub fn processes(&self) -> u32 {
        self.node.replies.processes
    }

    /// Whether the origin answers no call: a call is overdue, and no reply has come since it was
    /// sent.
    pub fn is_stalled(&self, now: Now) -> bool {
        let sessions = self.sessions.values();
        let mut overdue_us = sessions.filter_map(|session| session.overdue_since(now, &self.node.settings));
        overdue_us.any(|sent_us| self.node.replies.is_silent_since(sent_us))
    }
}

/// A summary of all sessions, made in one pass: there are hundreds, and every poll needs one.
struct SessionScan {
    turn: u16,
    /// Sessions with work to do, in the order of that work: whether no request waits, and the
    /// distance of the partition from `turn`.
    awake: Vec<(bool, u16)>,
    /// When the first of the other sessions has work to do.
    wake_us: Option<u64>,
    /// Calls in flight that are not late, and when the first of them will be.
    calls: usize,
    late_us: Option<u64>,
}

impl SessionScan {
    fn at(sessions: &BTreeMap<u16, Session>, cx: &Context<'_>, turn: u16) -> Self {
        let mut scan = Self { turn, awake: Vec::new(), wake_us: None, calls: 0, late_us: None };
        for (partition, session) in sessions {
            if let Some(late_us) = session.late_us(&cx.settings).filter(|late_us| *late_us > cx.now_us()) {
                scan.calls += 1;
                scan.late_us = scan.late_us.into_iter().chain([late_us]).min();
            }
            if session.is_awake(cx.now, cx.is_closing()) {
                scan.awake.push((!session.has_waiting(), partition.wrapping_sub(turn)));
            } else {
                scan.wake_us = scan.wake_us.into_iter().chain(session.wake_us()).min();
            }
        }
        // Sessions with waiting requests come first; then those that came last at the previous
        // poll.
        scan.awake.sort_unstable();
        scan
    }
}
