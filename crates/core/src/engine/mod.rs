//! The node's engine: grants and reports of the meters that an origin counts.
//!
//! The table decides a request by itself within a grant, or by a denial that the origin sent. Other
//! requests come here ([`Engine::on_request`]) and wait for the session of their partition. A
//! session has one call in flight, which carries the reports of its meters. The session repeats the
//! call until the origin replies. The origin applies a call once, unless the node is cut off for
//! longer than the origin retains its session.
//!
//! The engine does no I/O. Requests, replies, failures and time come in; [`Effect`]s go out.

mod demand;
mod hedges;
mod node_meter;
mod pace;
mod session;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::digest::{Digest, KeySpace};
use crate::fallback::FallbackState;
use crate::limit::Limit;
use crate::origin::{CROSS_REGION_LIFE_US_MAX, Call, CallError, CallReply, NodeId, StoreId, Terms};
use crate::table::Table;
use crate::time::Now;

use hedges::HedgeBudget;
use node_meter::{ChargeTime, NodeMeter};
use pace::Pace;
use session::Session;

/// Identifier of a waiting request, chosen by the caller.
pub type Ticket = u64;

/// Times and sizes of an engine. Every time is in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct EngineSettings {
    /// Interval between reports of usage. Shorter: fresher counts; more calls.
    pub flush_us: u64,
    /// Life of a grant. Longer: a node continues longer without the origin; the grant of a dead
    /// node is lost for longer.
    pub life_us: u64,
    /// The same for a key that was denied of late.
    pub strict_life_us: u64,
    /// Upper bound of both lives for a limit that several regions count together. Shorter: fewer
    /// units pass before the regions know of each other's usage; more calls.
    pub cross_region_life_us: u64,
    /// How long after a denial a key counts as denied of late.
    pub strict_us: u64,
    /// Time that a request waits for the origin. Longer: fewer decisions without the origin; slower
    /// answers when it is slow.
    pub deadline_us: u64,
    /// After how long a call that someone waits for is sent a second time, for the tail; one in
    /// ten, and twenty in a second, at most.
    pub hedge_us: u64,
    /// Time after which a call without a reply is sent again; doubled each time up to
    /// `retry_us_max`.
    pub retry_us: u64,
    /// The longest time between two attempts.
    pub retry_us_max: u64,
    /// How many meters in a second it may speak of, where a call counts as three. Beyond, intervals
    /// and lives are stretched, up to five times as long. Higher: fresher counts; more work for the
    /// origin. A Redis does 20,000 to 40,000 in a second, for all nodes together.
    pub updates_per_s_max: u64,
    /// Calls that may be in flight and not late. More: distant partitions wait less for each other;
    /// a longer queue at an overloaded store, where no call can leave it any more.
    pub calls_max: usize,
    /// Meters that the engine tracks. Beyond this, the origin decides requests one by one; refunds,
    /// and units admitted without the origin, are dropped and counted. Higher: more memory.
    pub tracked_max: usize,
    /// How many requests wait for the origin. Beyond, their class decides at once. Higher: more of
    /// a sudden crowd is decided by the origin; more memory, about a kilobyte for each.
    pub waiting_max: usize,
    /// Smallest number of nodes for a node share, used before this node knows of the others.
    pub processes: u32,
}

impl Default for EngineSettings {
    fn default() -> Self {
        Self {
            flush_us: 100_000,
            life_us: 1_000_000,
            strict_life_us: 300_000,
            cross_region_life_us: CROSS_REGION_LIFE_US_MAX,
            strict_us: 5_000_000,
            deadline_us: 20_000,
            hedge_us: 3_000,
            retry_us: 100_000,
            retry_us_max: 1_000_000,
            updates_per_s_max: 5_000,
            calls_max: 16,
            tracked_max: 1 << 18,
            waiting_max: 1 << 15,
            processes: 1,
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
    /// Its key space on this node.
    pub space: KeySpace,
    /// Its name here.
    pub digest: Digest,
}

/// A request that the table could not decide.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// Identifier chosen by the caller.
    pub ticket: Ticket,
    /// Partition of its meters.
    pub partition: u16,
    /// All limits of the request, with its cost under each.
    pub charges: Vec<Charge>,
}

/// The cost of a request under one limit.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The meter of the limit.
    pub meter: MeterRef,
    /// Units.
    pub cost: u64,
}

/// Work of a call for an origin on Redis besides its meters, in meters.
const CALL_WORTH: u64 = 3;

/// An action for the caller to execute.
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
    /// Answer a waiting request.
    Answer {
        /// The request.
        ticket: Ticket,
        /// Its result.
        resolution: Resolution,
    },
}

/// The result of a request that waited.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resolution {
    /// It passes, and is charged.
    Allowed {
        /// Units that remain under each of its limits, in their order, as of the last reply of the
        /// origin.
        remaining: Box<[u32]>,
        /// When the origin charged it, by the origin's clock; `None` if a grant of this node paid
        /// for it.
        charged_us: Option<u64>,
    },
    /// It does not pass.
    Denied {
        /// By this of its limits.
        by: usize,
        /// Units that remain under each of its limits, as above.
        remaining: Box<[u32]>,
        /// Time until it would pass if no other request came, µs.
        retry_us: u64,
    },
    /// The origin did not decide in time: the class of the limit decides.
    Unanswered,
}

/// Where a request was charged that does not pass in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeLocation {
    /// At the origin.
    AtOrigin {
        /// When, by the origin's clock.
        at_us: u64,
    },
    /// On this node: from a grant, or as usage that the origin does not know of yet.
    OnNode {
        /// Not before this, by the clock here.
        since_us: u64,
    },
}

/// How a call failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallFailure {
    /// The origin did not apply it, or the result is unknown: it is sent again.
    Unanswered,
    /// The origin applied a later call of this session, so it never applies this one.
    Outdated {
        /// The last call that was applied.
        sequence: u64,
    },
    /// The call makes no sense: no origin applies it, however often it is sent.
    Refused,
}

impl From<CallError> for CallFailure {
    fn from(error: CallError) -> Self {
        match error {
            CallError::Outdated { sequence } => Self::Outdated { sequence },
            _ => Self::Refused,
        }
    }
}

/// Counters of an engine.
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
    /// Units that passed at the origin for requests that had been given up, and were given back,
    /// under all limits together.
    pub returned: u64,
    /// Calls that the origin refused. Their waiting requests got no decision; later calls repeated
    /// their reports.
    pub refused: u64,
    /// Requests that did not wait, since too many did: [`EngineSettings::waiting_max`]. They are
    /// among the unanswered.
    pub crowded: u64,
    /// Units that the origin never learns of, because too many meters were tracked: admitted
    /// without it, or not refunded. [`EngineSettings::tracked_max`].
    pub dropped: u64,
    /// Units that were held of limits that must hold, and reported so late that the origin may have
    /// written them off: then they count as used.
    pub lapsed: u64,
}

/// The node's engine.
#[derive(Debug)]
pub struct Engine {
    node: NodeId,
    settings: EngineSettings,
    sessions: BTreeMap<u16, Session>,
    tracked: usize,
    /// Waiting requests of all sessions.
    waiting: usize,
    last_reply_us: u64,
    /// Latest send time of the calls that have a reply.
    answered_sent_us: u64,
    /// Time of the origin's first reply to any call.
    first_reply_us: Option<u64>,
    /// Largest number of nodes ever reported with a grant of one meter, and at least the number in
    /// the settings.
    processes: u32,
    closing: bool,
    pace: Pace,
    hedges: HedgeBudget,
    /// The first partition that had a call due and could not send it, the last time there was one.
    turn: u16,
    stats: EngineStats,
}

impl Engine {
    /// The engine of a process that calls itself `node`: a name that no process had before.
    pub fn new(node: NodeId, settings: EngineSettings) -> Self {
        Self {
            node,
            settings,
            sessions: BTreeMap::new(),
            tracked: 0,
            waiting: 0,
            last_reply_us: 0,
            answered_sent_us: 0,
            first_reply_us: None,
            processes: settings.processes.max(1),
            closing: false,
            pace: Pace::default(),
            hedges: HedgeBudget::default(),
            turn: 0,
            stats: EngineStats::default(),
        }
    }

    /// Returns the counters so far.
    pub fn stats(&self) -> EngineStats {
        self.stats
    }

    /// Has grants of limits that several regions count together last this long at most, from the
    /// next call on.
    pub fn limit_cross_region_life(&mut self, life_us: u64) {
        self.settings.cross_region_life_us = life_us;
    }

    /// Accepts a request that the table could not decide. Its answer comes as an [`Effect`], now or
    /// later.
    pub fn on_request(&mut self, now: Now, request: EngineRequest, effects: &mut Vec<Effect>) {
        self.stats.waited += 1;
        let stalled = self.is_stalled(now);
        let session = self.sessions.entry(request.partition).or_default();
        let crowded = self.waiting >= self.settings.waiting_max;
        self.stats.crowded += u64::from(crowded);
        if crowded || stalled || session.is_stalled(now, &self.settings) {
            self.stats.unanswered += 1;
            effects.push(Effect::Answer { ticket: request.ticket, resolution: Resolution::Unanswered });
            return;
        }
        self.waiting += 1;
        self.tracked += session.wait(now, request, self.settings.tracked_max.saturating_sub(self.tracked));
    }

    /// Notes that a request was let through without the origin, to be reported when it is back.
    pub fn owe(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        self.note(now, partition, meter, cost, NodeMeter::note_owed);
    }

    /// Refunds a charge of unknown time: all of it, like a bucket that is asked directly. Only
    /// units that drain while the origin is stalled are not refunded, because a bucket would have
    /// drained them meanwhile.
    pub fn refund(&mut self, now: Now, partition: u16, meter: &MeterRef, cost: u64) {
        let asked_us = self.session(partition).origin_us(now.mono_us());
        self.note(now, partition, meter, cost, |tracked, cost, now_us| {
            let rest = tracked.forgive(cost);
            tracked.note_refund(rest, ChargeTime::of_request(asked_us, tracked), now_us);
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
        paid: ChargeLocation,
    ) {
        let session = self.session(partition);
        let (rest, charged_us) = match paid {
            ChargeLocation::AtOrigin { at_us } => (charge.cost, Some(at_us)),
            ChargeLocation::OnNode { since_us } => {
                (session.take_unreported(now, table, charge, since_us), session.origin_us(since_us))
            }
        };
        if rest > 0 {
            self.note(now, partition, &charge.meter, rest, |tracked, rest, now_us| {
                tracked.note_refund(rest, ChargeTime::charged(charged_us, tracked), now_us);
            });
        }
    }

    fn session(&mut self, partition: u16) -> &mut Session {
        self.sessions.entry(partition).or_default()
    }

    /// Applies `note` to a meter, or counts the cost as dropped if no more meters can be tracked.
    fn note(
        &mut self,
        now: Now,
        partition: u16,
        meter: &MeterRef,
        cost: u64,
        note: impl FnOnce(&mut NodeMeter, u64, u64),
    ) {
        let session = self.sessions.entry(partition).or_default();
        let before = session.tracked();
        let most = before + self.settings.tracked_max.saturating_sub(self.tracked);
        match session.track(now, meter, most) {
            Some(tracked) => note(tracked, cost, now.mono_us()),
            None => self.stats.dropped += cost,
        }
        self.tracked += session.tracked() - before;
    }

    /// Does the work that is due, and returns the latest time for the next poll.
    pub fn poll(&mut self, now: Now, table: &Table, effects: &mut Vec<Effect>) -> Option<u64> {
        let before = effects.len();
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
            first_reply_us: self.first_reply_us,
        };
        let mut look = SessionScan::at(&self.sessions, &cx, self.turn);
        cx.calls_left = self.settings.calls_max.max(1).saturating_sub(look.calls);
        let mut crowded = false;
        for (_, at) in look.awake {
            let partition = at.wrapping_add(look.turn);
            let Some(session) = self.sessions.get_mut(&partition) else { continue };
            self.tracked -= session.poll(&mut cx, partition, effects);
            look.wake_us = look.wake_us.into_iter().chain(session.wake_us()).min();
            if !crowded && session.is_held_up() {
                (crowded, self.turn) = (true, partition);
            }
        }
        self.note_answered(effects, before);
        let room_us = if crowded { look.late_us } else { None };
        look.wake_us.into_iter().chain(room_us).min()
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
        self.last_reply_us = now.mono_us();
        self.first_reply_us.get_or_insert(now.mono_us());
        self.processes =
            reply.meters.iter().map(|meter_reply| meter_reply.holders).fold(self.processes, u32::max);
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
            first_reply_us: self.first_reply_us,
        };
        session.on_reply(&mut cx, sequence, reply, effects);
        self.answered_sent_us = cx.answered_sent_us;
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
            session.on_failure(now, sequence, failure, &mut self.stats, effects);
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
        self.closing = true;
    }

    /// Whether no usage is left to report and no request waits.
    pub fn is_idle(&self) -> bool {
        self.sessions.values().all(Session::is_idle)
    }

    /// Returns the state for a decision without the origin. The remaining units have grown by the
    /// drain since the last reply, as if no request had used any.
    pub fn fallback_state(&self, now: Now, partition: u16, digest: Digest) -> FallbackState {
        let left = self.sessions.get(&partition).and_then(|session| session.left(now, digest));
        FallbackState { processes: self.processes, remaining: left }
    }

    /// How many processes there are, for all that is known.
    pub fn processes(&self) -> u32 {
        self.processes
    }

    /// Whether the origin answers no call: a call is overdue, and no reply has come since it was
    /// sent.
    pub fn is_stalled(&self, now: Now) -> bool {
        let mut overdue_us =
            self.sessions.values().filter_map(|session| session.overdue_since(now, &self.settings));
        overdue_us.any(|sent_us| self.last_reply_us < sent_us)
    }
}

/// A summary of all sessions, made in one pass: there are hundreds, and every reply needs one.
struct SessionScan {
    turn: u16,
    /// Sessions with work to do, in the order of that work, by their distance from `turn`.
    awake: Vec<(bool, u16)>,
    /// When the first of the other sessions has work to do.
    wake_us: Option<u64>,
    /// How many calls are under way that are not late, and when the first of them will be.
    calls: usize,
    late_us: Option<u64>,
}

impl SessionScan {
    fn at(sessions: &BTreeMap<u16, Session>, cx: &Context<'_>, turn: u16) -> Self {
        let mut look = Self { turn, awake: Vec::new(), wake_us: None, calls: 0, late_us: None };
        for (partition, session) in sessions {
            if let Some(late_us) = session.late_us(cx.settings).filter(|late_us| *late_us > cx.now_us()) {
                look.calls += 1;
                look.late_us = look.late_us.into_iter().chain([late_us]).min();
            }
            if session.is_awake(cx.now, cx.closing) {
                look.awake.push((!session.is_waited_for(), partition.wrapping_sub(turn)));
            } else {
                look.wake_us = look.wake_us.into_iter().chain(session.wake_us()).min();
            }
        }
        // Sessions with waiting requests come first; then those that came last at the previous
        // poll.
        look.awake.sort_unstable();
        look
    }
}

/// The shared state that a session reads and changes.
struct Context<'c> {
    node: NodeId,
    now: Now,
    table: &'c Table,
    /// At the present pace.
    settings: &'c EngineSettings,
    /// How often is reported when little is due.
    flush_us_min: u64,
    hedges: &'c mut HedgeBudget,
    stats: &'c mut EngineStats,
    closing: bool,
    /// How many more calls may be made now.
    calls_left: usize,
    /// Latest send time of the calls that have a reply.
    answered_sent_us: u64,
    first_reply_us: Option<u64>,
}

impl Context<'_> {
    fn now_us(&self) -> u64 {
        self.now.mono_us()
    }

    /// For how long the origin has been known, µs.
    fn known_us(&self) -> u64 {
        self.first_reply_us.map_or(0, |first_us| self.now_us().saturating_sub(first_us))
    }

    /// Returns when a session reports that should do so at `at_us`: at a moment that it shares with
    /// other sessions.
    fn flush_with_others_us(&self, at_us: u64) -> u64 {
        let every_us = self.flush_slack_us().min(at_us.saturating_sub(self.now_us())).max(1);
        at_us / every_us * every_us
    }

    /// Returns how much earlier than its interval a session may report, to do so together with
    /// others.
    fn flush_slack_us(&self) -> u64 {
        self.flush_us_min / FLUSHES_TOGETHER
    }
}

/// Moments in the shortest interval at which sessions report. Fewer: more calls leave together,
/// which costs this node and the store less than one by one; a waiting request has more calls
/// before it.
const FLUSHES_TOGETHER: u64 = 8;

/// Placeholder: the sender of the call fills it in.
const STORE_UNKNOWN: StoreId = StoreId { lineage: 0, boot: 0, parent: 0, up_us: 0 };
