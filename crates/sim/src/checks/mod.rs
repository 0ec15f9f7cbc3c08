//! The promises of the system: one checker for each.
//!
//! A checker sees every observation of a running world, and the history until then. In the end it
//! compares the history with the state of all regions.

#![allow(
    clippy::unnecessary_wraps,
    reason = "`new` of a checker that applies to all worlds never returns None"
)]

mod answers;
mod atomicity;
mod bound;
mod cap;
mod components;
mod conservation;
mod convergence;
mod deadline;
mod debt;
mod dirty_meters;
mod false_denials;
mod import;
mod invariant;
mod isolation;
mod knowledge;
mod local_decisions;
mod lock_out;
mod memory;
mod node_share;
mod one_call;
mod ordinary;
mod published;
mod rate;
mod reachability;
mod settling;
mod share;
mod threshold;

use tidegate_core::Now;
use tidegate_core::origin::{Call, CallReply, NodeId, OriginMeter, Partition, RoundReply};

pub(crate) use bound::allowed;
pub(crate) use knowledge::{KeyKnowledge, news, owed, to_publish};
pub(crate) use rate::is_rated;
pub(crate) use settling::is_connected;

use crate::bucket::JudgedUsage;
use crate::history::{History, MeterBefore};
use crate::report::{Steady, Violation};
use crate::scenario::{Charge, Scenario};
use crate::world::{Region, WorldTally};

/// A checker of one promise.
pub(crate) trait Checker {
    /// The promise, in a word or two.
    fn promise(&self) -> &'static str;

    /// Looks at an observation. Returns how it breaks the promise, if it does.
    fn see(&mut self, _seen: &Observation<'_>, _history: &History) -> Option<String> {
        None
    }

    /// Looks at the end of the world. Returns how the promise is broken, if it is.
    fn end(&mut self, _end: &Ending<'_>) -> Option<String> {
        None
    }
}

/// Creates a checker for a world, if its promise applies there.
type NewChecker = fn(&Scenario) -> Option<Box<dyn Checker>>;

const CHECKERS: &[NewChecker] = &[
    memory::new,
    invariant::new,
    atomicity::new,
    one_call::new,
    deadline::new,
    reachability::new,
    lock_out::new,
    dirty_meters::new,
    published::new,
    threshold::new,
    components::new,
    import::new,
    cap::new,
    isolation::new,
    ordinary::new,
    debt::new,
    bound::new,
    conservation::new,
    node_share::new,
    share::new,
    false_denials::new,
    local_decisions::new,
    answers::new,
    rate::new,
    convergence::new,
    settling::new,
];

/// A call, as an origin applied it.
pub(crate) struct AppliedCall<'a> {
    pub(crate) region: usize,
    pub(crate) partition: u16,
    /// The call as the node sent it, and as the origin received it.
    pub(crate) sent: &'a Call,
    pub(crate) received: &'a Call,
    pub(crate) reply: &'a CallReply,
    /// Whether it was decided just now. If not, the reply is the stored one.
    pub(crate) is_fresh: bool,
    /// The partition before the call, if the call has checks under several limits.
    pub(crate) whole_before: Option<&'a Partition>,
    /// The meters before the call, and the partition after it.
    pub(crate) before: &'a [MeterBefore],
    pub(crate) after: &'a Partition,
    /// The life of the store.
    pub(crate) boot: u64,
    /// When it was decided, and when it was applied by the origin's clock, µs.
    pub(crate) true_us: u64,
    pub(crate) origin_us: u64,
}

/// A merge of components of a peer into a partition.
#[derive(Clone, Copy)]
pub(crate) struct AppliedMerge {
    pub(crate) region: usize,
    pub(crate) key: usize,
    /// Units that it charged, and units that were new, if that is known.
    pub(crate) charged: u64,
    pub(crate) news: Option<u64>,
    /// Units of the key that counted before and after.
    pub(crate) owed: [u64; 2],
}

/// A replication round of a partition.
pub(crate) struct AppliedRound<'a> {
    pub(crate) regions: &'a [Region],
    pub(crate) region: usize,
    pub(crate) partition: usize,
    /// The dirty meters before it.
    pub(crate) marked: &'a [(u64, Box<[u8]>)],
    pub(crate) reply: &'a RoundReply,
}

/// An event of a world, as the history and the checkers see it. Times called `true_us` are by the
/// true time, others by the time since the world began.
///
/// - `Refused`: a request did not pass, because it was denied or not decided.
/// - `Owed`: a node charged a request without a check.
/// - `PassedAlone`: a node let a request pass by its node share.
/// - `Heard`: a node received the admission of a request by the origin.
/// - `Sent`: a node sent a call in a session that had `in_flight` in flight.
/// - `Lost`: a store lost charges and grants.
/// - `Connectivity`: a replicator learned whether its region is connected.
/// - `Healed`: regions hear each other since `begun_us`, and two rounds have passed.
/// - `Settled`: regions also had time to publish the usage of their shares.
pub(crate) enum Observation<'a> {
    Offered { charges: &'a [Charge], true_us: u64 },
    Admitted { region: usize, charges: &'a [Charge], true_us: u64 },
    Denied { region: usize, key: usize, charges: &'a [Charge] },
    Refused { key: usize, cost: u64, true_us: u64 },
    Owed { node: NodeId, charges: &'a [Charge] },
    Unanswered { key: usize },
    PassedAlone { node: NodeId, now: Now, charges: &'a [Charge] },
    Heard { node: NodeId, charges: &'a [Charge] },
    Waited { us: u64 },
    Crashed { node: NodeId },
    Troubled { until_us: u64 },
    Sent { node: usize, sequence: u64, in_flight: Option<u64> },
    Applied(&'a AppliedCall<'a>),
    Expired { region: usize, meter: usize, was: &'a OriginMeter, origin_us: u64 },
    ExpiredSessions { region: usize, partition: u16, origin_us: u64 },
    Lost { meter: usize, units: u64 },
    Round(&'a AppliedRound<'a>),
    Merged(AppliedMerge),
    Connectivity { region: usize, is_connected: bool },
    Healed { regions: &'a [Region], known: &'a [KeyKnowledge], begun_us: u64 },
    Settled { regions: &'a [Region], begun_us: u64 },
}

/// The end of a world.
pub(crate) struct Ending<'a> {
    pub(crate) scenario: &'a Scenario,
    pub(crate) regions: &'a [Region],
    pub(crate) history: &'a History,
    pub(crate) tally: &'a WorldTally,
    /// Requests that still wait.
    pub(crate) waiting: usize,
    /// The admissions of each meter, judged.
    pub(crate) judged: Vec<JudgedUsage>,
    pub(crate) steady: Steady,
}

impl Ending<'_> {
    /// Units of all keys that were admitted, and that one bucket for each would have admitted.
    pub(crate) fn admitted_and_ideal(&self) -> (u64, u64) {
        let keys = self.judged.iter().zip(&self.history.meters).take(self.scenario.keys);
        let sums = keys.map(|(judged, seen)| (judged.filled(), seen.ideal()));
        sums.fold((0, 0), |(admitted, ideal), key| (admitted + key.0, ideal + key.1))
    }
}

/// The history of a world, and the checkers that look on.
pub(crate) struct Watch {
    pub(crate) history: History,
    pub(crate) checks: Checks,
}

impl Watch {
    pub(crate) fn new(scenario: &Scenario) -> Self {
        let checkers = CHECKERS.iter().filter_map(|new| new(scenario)).collect();
        Self { history: History::new(scenario), checks: Checks { checkers, violations: Vec::new() } }
    }

    /// Shows an observation to the history and to all checkers.
    pub(crate) fn see(&mut self, now_us: u64, seen: &Observation<'_>) {
        self.history.now_us = now_us;
        self.history.record(seen);
        self.checks.run(|checker| checker.see(seen, &self.history));
    }
}

/// The checkers of a world, and the promises that they found broken.
pub(crate) struct Checks {
    checkers: Vec<Box<dyn Checker>>,
    violations: Vec<Violation>,
}

impl Checks {
    /// Checks all promises at the end, and returns the broken ones.
    pub(crate) fn end(&mut self, end: &Ending<'_>) -> Vec<Violation> {
        self.run(|checker| checker.end(end));
        std::mem::take(&mut self.violations)
    }

    /// Runs all checkers. The first violation of each promise is enough, because it is the most
    /// informative.
    fn run(&mut self, check: impl Fn(&mut dyn Checker) -> Option<String>) {
        for checker in &mut self.checkers {
            let Some(words) = check(checker.as_mut()) else { continue };
            let promise = checker.promise();
            if self.violations.iter().all(|known| known.promise != promise) {
                self.violations.push(Violation { promise, words });
            }
        }
    }
}
