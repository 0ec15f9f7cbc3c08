//! The state that all sessions of a node share.

use super::hedges::HedgeBudget;
use super::pace::Pace;
use super::settings::EngineSettings;
use crate::origin::{CallReply, NodeId, REPORT_US_MIN, REPORTS_PER_BURST, Terms};
use crate::table::Table;
use crate::time::Now;

/// Work of a call for an origin on Redis besides its meters, in meters.
const CALL_WORTH: u64 = 3;

/// Moments in the shortest interval at which sessions report. Fewer: more calls leave together,
/// which costs this node and the store less than one by one; a waiting request has more calls
/// before it.
const FLUSHES_TOGETHER: u64 = 8;

/// Counters of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Calls that were sent, repeats not counted.
    pub calls: u64,
    /// Calls that were sent again.
    pub repeats: u64,
    /// Meter updates in all calls.
    pub updates: u64,
    /// Requests that waited.
    pub waited: u64,
    /// Requests that were not answered in time.
    pub unanswered: u64,
    /// Units that the origin charged for requests that had timed out, and that were refunded, under
    /// all limits together.
    pub returned: u64,
    /// Calls that the origin refused. Their waiting requests got no decision; later calls repeated
    /// their reports.
    pub refused: u64,
    /// Requests that did not wait, because [`EngineSettings::waiting_max`] did. They are among the
    /// unanswered.
    pub crowded: u64,
    /// Units that the origin never learns of, because too many meters were tracked: admitted
    /// without it, or not refunded. [`EngineSettings::tracked_max`].
    pub dropped: u64,
    /// Granted units of limits with `Lapse::Counted` that were reported so late that the origin may
    /// count them as used.
    pub lapsed: u64,
}

/// The replies of the origin to any call of this node.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReplyHistory {
    first_us: Option<u64>,
    last_us: u64,
    /// Latest send time of the calls that have a reply.
    pub(super) latest_sent_us: u64,
    /// Largest number of nodes ever reported with a grant of one meter, and at least the number in
    /// the settings.
    pub(super) processes: u32,
}

impl ReplyHistory {
    pub(super) fn note_reply(&mut self, now_us: u64, reply: &CallReply) {
        self.last_us = now_us;
        self.first_us.get_or_insert(now_us);
        let holders = reply.meters.iter().map(|meter_reply| meter_reply.holders);
        self.processes = holders.fold(self.processes, u32::max);
    }

    /// Whether no reply has come since `sent_us`.
    pub(super) fn is_silent_since(&self, sent_us: u64) -> bool {
        self.last_us < sent_us
    }
}

/// The state of a node besides its sessions.
#[derive(Debug)]
pub(super) struct NodeState {
    pub(super) id: NodeId,
    pub(super) settings: EngineSettings,
    pub(super) is_closing: bool,
    pub(super) replies: ReplyHistory,
    pub(super) hedges: HedgeBudget,
    pub(super) stats: EngineStats,
    pace: Pace,
}

impl NodeState {
    pub(super) fn new(id: NodeId, settings: EngineSettings) -> Self {
        let processes = settings.processes.max(1);
        Self {
            id,
            settings,
            is_closing: false,
            replies: ReplyHistory { first_us: None, last_us: 0, latest_sent_us: 0, processes },
            hedges: HedgeBudget::default(),
            stats: EngineStats::default(),
            pace: Pace::default(),
        }
    }

    /// Adapts the pace and the budget of hedges to the time that has passed.
    pub(super) fn advance(&mut self, now_us: u64) {
        self.hedges.advance(now_us);
        self.pace.measure(now_us, self.stats.updates + CALL_WORTH * self.stats.calls, &self.settings);
    }

    pub(super) fn context<'c>(&'c mut self, now: Now, table: &'c Table) -> Context<'c> {
        Context { now, table, settings: self.pace.of(&self.settings), calls_left: 0, node: self }
    }
}

/// The input of a step, and the shared state that a session reads and changes.
pub(super) struct Context<'c> {
    pub(super) now: Now,
    pub(super) table: &'c Table,
    /// The settings at the present pace.
    pub(super) settings: EngineSettings,
    /// Calls that sessions may still send in this step.
    pub(super) calls_left: usize,
    pub(super) node: &'c mut NodeState,
}

impl Context<'_> {
    pub(super) fn now_us(&self) -> u64 {
        self.now.mono_us()
    }

    /// Whether the node returns all grants.
    pub(super) fn is_closing(&self) -> bool {
        self.node.is_closing
    }

    /// Returns the flush interval while few updates are due.
    pub(super) fn flush_us_min(&self) -> u64 {
        self.node.settings.flush_us
    }

    /// For how long the origin has been known, µs.
    pub(super) fn known_us(&self) -> u64 {
        self.node.replies.first_us.map_or(0, |first_us| self.now_us().saturating_sub(first_us))
    }

    /// Returns the report interval of a meter: the origin's interval for its limit, at the present
    /// pace.
    pub(super) fn report_interval_us(&self, terms: &Terms) -> u64 {
        let (min_us, burst_us) = (self.flush_us_min(), terms.drain_us(terms.capacity()));
        let interval_us = (burst_us / REPORTS_PER_BURST).clamp(REPORT_US_MIN.min(min_us), min_us);
        interval_us * self.settings.flush_us / min_us.max(1)
    }

    /// Returns when a session flushes that should do so at `at_us`: at a moment that it shares with
    /// other sessions.
    pub(super) fn flush_with_others_us(&self, at_us: u64) -> u64 {
        let every_us = self.flush_slack_us().min(at_us.saturating_sub(self.now_us())).max(1);
        at_us / every_us * every_us
    }

    /// Returns how much earlier than its interval a session may flush, to do so together with
    /// others.
    pub(super) fn flush_slack_us(&self) -> u64 {
        self.flush_us_min() / FLUSHES_TOGETHER
    }
}
