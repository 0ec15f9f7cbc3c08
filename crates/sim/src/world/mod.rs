//! The world: one event queue that drives the simulation.

mod exchange;
mod plan;
mod traffic;
mod trouble;
mod verdict;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use fastrand::Rng;
use tidegate_core::origin::{Call, CallError, CallReply, Partition, StoreId};

use crate::bug::Bug;
use crate::clock::SkewedClock;
use crate::node::{Node, PARTITIONS, name, partition_of};
use crate::report::Report;
use crate::rule_editions::RuleEditions;
use crate::scenario::{Demand, Faults, Scenario, Shape, Spread};
use crate::schedule::ScheduledEvent;
use crate::spoil::Spoiler;
use crate::trace::Trace;
use crate::watch::Watch;

/// Reading of the origin's clock when the world begins, µs: a realistic date.
pub(crate) const EPOCH_US: u64 = 1_800_000_000_000_000;

const SECOND_US: u64 = 1_000_000;

/// Interval between the snapshots of an origin that will lose data, µs. Lost writes are at most
/// this old.
const SNAPSHOT_US: u64 = SECOND_US / 2;

/// Time for which the world continues after its nodes are closed, µs, so that all usage is reported
/// and all lapses are over.
const SETTLE_US: u64 = 120 * SECOND_US;

/// The longest pause of an origin.
const PAUSE_US_MAX: u64 = 20 * SECOND_US;

/// Longest time until a node learns of a changed limit, µs.
const RULE_LAG_US: u64 = SECOND_US;

/// A reply in flight to a node.
#[derive(Debug)]
struct ReplyInTransit {
    node: usize,
    life: u32,
    partition: u16,
    sequence: u64,
    answer: Result<CallReply, CallError>,
    /// When the origin decided, by the true time.
    decided_us: u64,
}

#[derive(Debug)]
enum Event {
    Request(Demand),
    Wake { node: usize, life: u32 },
    CallArrives { node: usize, life: u32, partition: u16, call: Arc<Call> },
    Answered(Box<ReplyInTransit>),
    Crash,
    Restart { node: Option<usize> },
    Deploy,
    Freeze,
    Cut,
    Pause,
    Lose,
    Wipe,
    ChangeRule,
    LearnRule { node: usize, edition: usize },
    StepNode,
    StepOrigin,
    Snapshot,
    Close,
}

/// A request that waits for its node's engine.
struct WaitingRequest {
    node: usize,
    demand: Demand,
    since_us: u64,
}

/// The life of the store in which the world begins.
pub(crate) const FIRST_BOOT: u64 = 1;

/// The contents of a store, as a snapshot copies them.
#[derive(Clone)]
struct StoreContents {
    partitions: Vec<Partition>,
    /// Which of them were called since they were empty.
    called: Vec<bool>,
    /// Totals of expired meters: units charged, with written-off grants that count as used, and
    /// units given back.
    forgotten: BTreeMap<usize, [u64; 2]>,
}

impl StoreContents {
    fn nothing() -> Self {
        let count = usize::from(PARTITIONS);
        Self {
            partitions: vec![Partition::default(); count],
            called: vec![false; count],
            forgotten: BTreeMap::new(),
        }
    }

    /// Returns the total charges of a meter, the units given back, and the units that nodes hold in
    /// grants.
    fn counts(&self, meter: usize, shared: bool) -> [u64; 3] {
        let partition = &self.partitions[usize::from(partition_of(meter, shared))];
        let [charged, back] = self.forgotten.get(&meter).copied().unwrap_or_default();
        let Some(meter) = partition.meter(&name(meter)) else { return [charged, back, 0] };
        [charged + meter.charged(), back + meter.refunded(), meter.held()]
    }
}

/// The store of the region.
struct Store {
    kept: StoreContents,
    /// Time of the last expiry in each partition, µs by the origin's clock.
    forgot_us: Vec<u64>,
    paused_until_us: u64,
    boot: u64,
    /// When this life of it began.
    booted_us: u64,
    /// Offset of the store's clock from the time since the world began, µs.
    epoch_us: u64,
}

impl Store {
    /// Which life of it this is.
    fn id(&self, now_us: u64) -> StoreId {
        StoreId { lineage: 1, boot: self.boot, parent: 0, up_us: now_us - self.booted_us }
    }

    fn begin_anew(&mut self, now_us: u64) {
        (self.boot, self.booted_us) = (self.boot + 1, now_us);
    }
}

/// Counters for the report.
#[derive(Default)]
struct Tally {
    tickets: u64,
    passed: u64,
    waited: u64,
    unanswered: u64,
    alone: u64,
    calls: u64,
    updates: u64,
    faults: u64,
    longest_wait_us: u64,
    passed_before_denial: Option<u64>,
}

struct World<'s> {
    scenario: &'s Scenario,
    spoiler: Spoiler,
    rng: Rng,
    now_us: u64,
    order: u64,
    queue: BinaryHeap<Reverse<ScheduledEvent<Event>>>,
    nodes: Vec<Node>,
    next_node: u64,
    store: Store,
    snapshot: StoreContents,
    /// Times that each partition returned without data and its first caller could not notice.
    unnoticed: Vec<u64>,
    rule_editions: RuleEditions,
    waiting: BTreeMap<u64, WaitingRequest>,
    watch: Watch,
    tally: Tally,
    closed: bool,
    trace: Trace,
    /// When the last request of a Poisson process came, with the fraction of a microsecond.
    arrival_us: f64,
    /// Requests that came to a node.
    drawn: u64,
    /// Whether the world has no faults, so that all nodes take requests until the end.
    is_faultless: bool,
    /// Cumulative weights of nodes, where these follow a Zipf distribution.
    zipf: Vec<f64>,
}

/// Runs a world to its end, with a known mistake in it if one is given.
pub fn run(scenario: &Scenario, bug: Option<Bug>, keeps_trace: bool) -> Report {
    let mut world = World::new(scenario, bug, keeps_trace);
    world.plan();
    while let Some(Reverse(next)) = world.queue.pop() {
        world.now_us = next.at_us;
        world.happen(next.event);
    }
    world.judge()
}

/// The sums of 1/n over the nodes; empty unless the scenario spreads requests by them.
fn zipf(scenario: &Scenario) -> Vec<f64> {
    let nodes = if scenario.spread == Spread::Zipf { scenario.nodes } else { 0 };
    let weights = (1..=nodes).map(|n| 1.0 / n as f64);
    weights
        .scan(0.0, |sum, weight| {
            *sum += weight;
            Some(*sum)
        })
        .collect()
}

impl<'s> World<'s> {
    fn new(scenario: &'s Scenario, bug: Option<Bug>, keeps_trace: bool) -> Self {
        let rule_editions = RuleEditions::new(scenario);
        let mut world = Self {
            scenario,
            spoiler: Spoiler::new(bug),
            rng: Rng::with_seed(scenario.seed ^ 0x5eed),
            now_us: 0,
            order: 0,
            queue: BinaryHeap::new(),
            nodes: Vec::new(),
            next_node: 1,
            snapshot: StoreContents::nothing(),
            unnoticed: vec![0; usize::from(PARTITIONS)],
            store: Store {
                kept: StoreContents::nothing(),
                forgot_us: vec![0; usize::from(PARTITIONS)],
                paused_until_us: 0,
                boot: FIRST_BOOT,
                booted_us: 0,
                epoch_us: EPOCH_US,
            },
            watch: Watch::new(scenario, &rule_editions, scenario.settings().deadline_us),
            rule_editions,
            waiting: BTreeMap::new(),
            tally: Tally::default(),
            closed: false,
            trace: Trace::new(keeps_trace),
            arrival_us: 0.0,
            drawn: 0,
            is_faultless: scenario.faults == Faults::default(),
            zipf: zipf(scenario),
        };
        world.nodes = (0..scenario.nodes).filter_map(|_| world.new_node(0)).collect();
        world
    }

    fn new_node(&mut self, life: u32) -> Option<Node> {
        let skew = i64::from(self.scenario.faults.skew_ppm);
        let clock = SkewedClock {
            offset_us: self.rng.u64(0..1_000 * SECOND_US),
            rate_ppm: self.rng.i64(-skew..=skew),
            wall_offset_us: EPOCH_US,
        };
        self.next_node += 1;
        let id = self.next_node ^ self.rng.u64(..) << 16;
        let mut node = Node::new(id, life, clock, self.rule_editions.current, self.scenario.settings())?;
        node.slot_of_limit = self.spoiler.bug == Some(Bug::SlotOfLimit);
        Some(node)
    }

    /// The true time, in a day like ours.
    fn true_us(&self) -> u64 {
        EPOCH_US + self.now_us
    }

    fn schedule(&mut self, at_us: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(ScheduledEvent { at_us, order: self.order, event }));
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request(demand) => {
                self.request(demand);
                if self.scenario.shape == Shape::Poisson {
                    self.schedule_next_request();
                }
            }
            Event::Wake { node, life } => self.wake(node, life),
            Event::CallArrives { node, life, partition, call } => {
                self.call_arrives(node, life, partition, call);
            }
            Event::Answered(answered) => self.answered(answered),
            Event::Crash => self.crash(),
            Event::Restart { node } => self.restart(node),
            Event::Deploy => self.deploy(),
            Event::Freeze => self.freeze(),
            Event::Cut => self.cut(),
            Event::Pause => self.pause(),
            Event::Lose => self.lose(),
            Event::Wipe => self.wipe(),
            Event::ChangeRule => self.change_rule(),
            Event::LearnRule { node, edition } => self.nodes[node].edition = edition,
            Event::StepNode => self.step_node(),
            Event::StepOrigin => self.step_origin(),
            Event::Snapshot => self.take_snapshot(),
            Event::Close => self.close(),
        }
    }

    fn take_snapshot(&mut self) {
        self.snapshot.clone_from(&self.store.kept);
        if !self.closed {
            self.schedule(self.now_us + SNAPSHOT_US, Event::Snapshot);
        }
    }

    /// The nodes that take requests.
    fn open_nodes(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|node| !self.nodes[*node].closing).collect()
    }

    fn any_node(&mut self) -> Option<usize> {
        let open = self.open_nodes();
        let chosen = self.rng.usize(0..open.len().max(1));
        open.get(chosen).copied()
    }

    /// Ends the world: faults stop, and all nodes report.
    fn close(&mut self) {
        if self.closed {
            self.queue.clear();
            return;
        }
        self.closed = true;
        for node in 0..self.nodes.len() {
            let thawed_us = self.nodes[node].frozen_until_us.min(self.now_us);
            self.nodes[node].frozen_until_us = thawed_us;
            self.nodes[node].close();
            self.poll(node);
        }
        self.schedule(self.now_us + SETTLE_US, Event::Close);
    }

    fn count(&mut self, node: &Node) {
        let stats = node.engine.stats();
        self.tally.calls += stats.calls;
        self.tally.updates += stats.updates;
    }
}
