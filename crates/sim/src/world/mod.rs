//! The world: one event queue that drives the simulation.

mod attack;
mod exchange;
mod plan;
mod replicator;
mod traffic;
mod trouble;
mod verdict;

use std::collections::BTreeMap;
use std::sync::Arc;

use fastrand::Rng;
use tidegate_core::origin::{Call, CallError, CallReply, RegionId, RoundReply};
use tidegate_replication::{Ack, Batch, PartitionRound};

pub(crate) use attack::{ATTACK_KEYS, ATTACKED, ORDINARY};

use crate::bug::Bug;
use crate::checks::{KeyKnowledge, Observation, Watch};
use crate::clock::SkewedClock;
use crate::node::Node;
use crate::report::Report;
use crate::rule_editions::RuleEditions;
use crate::scenario::{Demand, Faults, SECOND_US, Scenario, Shape, Spread};
use crate::schedule::Schedule;
use crate::spoil::Spoiler;
use crate::store::{EPOCH_US, Store};
use crate::trace::Trace;
use replicator::{Link, Links, Replicator, Step};

/// Interval between the snapshots of an origin that will lose data, µs. Lost writes are at most
/// this old.
const SNAPSHOT_US: u64 = SECOND_US / 2;

/// Time for which the world continues after its nodes are closed, µs, so that all usage is reported
/// and all lapses are over. With several regions, whose nodes have fewer faults, it is shorter.
const SETTLE_US: u64 = 120 * SECOND_US;
const REGIONS_SETTLE_US: u64 = 30 * SECOND_US;

/// The longest pause of an origin.
const PAUSE_US_MAX: u64 = 20 * SECOND_US;

/// Longest time until a node learns of a changed limit, µs.
const RULE_LAG_US: u64 = SECOND_US;

/// Clocks of machines in several regions: the least reading when the world begins, µs, and the
/// least range of their rates, millionths. Time synchronization keeps rates close.
const REGIONS_CLOCK: (u64, u32) = (SECOND_US, 50);

/// A process: a node at its place in a region. A message to an earlier process does not reach a
/// later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
    region: usize,
    node: usize,
    life: u32,
}

/// A reply in flight to a node.
#[derive(Debug)]
struct ReplyInTransit {
    to: Process,
    partition: u16,
    sequence: u64,
    answer: Result<CallReply, CallError>,
    /// When the origin decided, by the true time.
    decided_us: u64,
}

/// A replication round under way between a replicator and its origin.
#[derive(Debug)]
struct RoundInTransit {
    region: usize,
    replicator: u64,
    turn: u64,
    partition_round: PartitionRound,
}

#[derive(Debug)]
enum Event {
    Request(Demand),
    Wake(Process),
    CallArrives { from: Process, partition: u16, call: Arc<Call> },
    Answered(Box<ReplyInTransit>),
    Crash,
    Restart { process: Option<Process> },
    Deploy,
    Freeze,
    Cut,
    Pause,
    Lose,
    Wipe,
    ChangeRule,
    LearnRule { process: Process, edition: usize },
    StepNode,
    StepOrigin,
    Snapshot,
    Close,
    Round { region: usize, replicator: u64 },
    Ask(Box<RoundInTransit>),
    Gathered { round: Box<RoundInTransit>, gathered: RoundReply },
    RoundLate { region: usize, replicator: u64, turn: u64 },
    Connect { from: usize, replicator: u64, to: usize },
    Hello { from: usize, replicator: u64, to: usize },
    Welcome { link: Link, clock_us: u64 },
    Batch { link: Link, batch: Arc<Batch> },
    Ack { link: Link, ack: Ack },
    Refused { link: Link },
    AckLate { link: Link, sequence: u64 },
    CutBegins { cut: usize },
    CutEnds { cut: usize },
    Healed { known: Vec<KeyKnowledge>, begun_us: u64 },
    Settled { begun_us: u64 },
    ReplicatorDies,
    TakeOver { region: usize },
    SecondReplicator,
    ReplicatorEnds { region: usize, replicator: u64 },
}

/// A request that waits for its node's engine.
struct WaitingRequest {
    at: Process,
    demand: Demand,
    since_us: u64,
}

/// A region: its nodes, its origin and its replicators.
pub(crate) struct Region {
    pub(crate) rules: RuleEditions,
    pub(crate) nodes: Vec<Node>,
    pub(crate) store: Store,
    /// How often the store lost data.
    pub(crate) losses: u32,
    /// The replicators, the latest last. There may be two for a while, or none.
    replicators: Vec<Replicator>,
    /// In the middle of which step the replicator dies next.
    doom: Option<Step>,
}

/// Counters for the report.
#[derive(Default)]
pub(crate) struct WorldTally {
    tickets: u64,
    /// Requests of an attack.
    attacks: u64,
    passed: u64,
    pub(crate) waited: u64,
    unanswered: u64,
    alone: u64,
    calls: u64,
    updates: u64,
    pub(crate) faults: u64,
    batches: u64,
    longest_wait_us: u64,
    passed_before_denial: Option<u64>,
}

impl WorldTally {
    /// Adds the calls of a node that is gone.
    fn count(&mut self, node: &Node) {
        let stats = node.engine.stats();
        self.calls += stats.calls;
        self.updates += stats.updates;
    }
}

struct World<'s> {
    scenario: &'s Scenario,
    spoiler: Spoiler,
    rng: Rng,
    now_us: u64,
    events: Schedule<Event>,
    regions: Vec<Region>,
    links: Links,
    next_process: u64,
    waiting: BTreeMap<u64, WaitingRequest>,
    watch: Watch,
    tally: WorldTally,
    closed: bool,
    trace: Trace,
    /// When the last request of a Poisson process came, with the fraction of a microsecond.
    arrival_us: f64,
    /// Requests that came to a node.
    drawn: u64,
    /// Whether no faults occur inside regions, so that all nodes take requests until the end.
    is_faultless: bool,
    /// Cumulative weights of nodes, where these follow a Zipf distribution.
    zipf: Vec<f64>,
}

/// Runs a world to its end, with a known mistake in it if one is given.
pub fn run(scenario: &Scenario, bug: Option<Bug>, keeps_trace: bool) -> Report {
    let mut world = World::new(scenario, bug, keeps_trace);
    world.plan();
    while let Some((at_us, event)) = world.events.next() {
        world.now_us = at_us;
        world.happen(event);
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
        let mut world = Self {
            scenario,
            spoiler: Spoiler::new(bug),
            rng: Rng::with_seed(scenario.seed ^ 0x5eed),
            now_us: 0,
            events: Schedule::new(),
            regions: Vec::new(),
            links: Links::new(scenario.region_count()),
            next_process: 1,
            watch: Watch::new(scenario),
            waiting: BTreeMap::new(),
            tally: WorldTally::default(),
            closed: false,
            trace: Trace::new(keeps_trace),
            arrival_us: 0.0,
            drawn: 0,
            is_faultless: scenario.faults == Faults::default(),
            zipf: zipf(scenario),
        };
        world.regions = (0..scenario.region_count()).map(|region| world.new_region(region)).collect();
        world
    }

    fn new_region(&mut self, region: usize) -> Region {
        let rules = RuleEditions::new(self.scenario, region, self.spoiler.bug);
        Region {
            nodes: (0..self.scenario.nodes).filter_map(|_| self.new_node(0, rules.current)).collect(),
            rules,
            store: Store::new(self.scenario),
            losses: 0,
            replicators: Vec::new(),
            doom: None,
        }
    }

    fn new_node(&mut self, life: u32, edition: usize) -> Option<Node> {
        // The order of draws is a part of the history of a seed, and differs between the worlds.
        let first_id = if self.scenario.regions.is_some() { Some(self.new_id()) } else { None };
        let clock = self.new_clock();
        let id = first_id.unwrap_or_else(|| self.new_id());
        let mut node = Node::new(id, life, clock, edition, self.scenario.settings())?;
        node.slot_of_limit = self.spoiler.bug == Some(Bug::SlotOfLimit);
        Some(node)
    }

    /// A number that no process had before.
    fn new_id(&mut self) -> u64 {
        self.next_process += 1;
        self.next_process ^ self.rng.u64(..) << 16
    }

    fn new_clock(&mut self) -> SkewedClock {
        let (least_us, least_ppm) = if self.scenario.regions.is_some() { REGIONS_CLOCK } else { (0, 0) };
        let skew = i64::from(self.scenario.faults.skew_ppm.max(least_ppm));
        SkewedClock {
            offset_us: self.rng.u64(least_us..1_000 * SECOND_US),
            rate_ppm: self.rng.i64(-skew..=skew),
            wall_offset_us: EPOCH_US,
        }
    }

    /// The true time, in a day like ours.
    fn true_us(&self) -> u64 {
        EPOCH_US + self.now_us
    }

    fn schedule(&mut self, at_us: u64, event: Event) {
        self.events.add(at_us, event);
    }

    /// Shows an observation to the checkers.
    fn see(&mut self, seen: &Observation<'_>) {
        self.watch.see(self.now_us, seen);
    }

    fn node(&mut self, at: Process) -> &mut Node {
        &mut self.regions[at.region].nodes[at.node]
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request(demand) => {
                self.request(demand);
                if self.scenario.shape == Shape::Poisson {
                    self.schedule_next_request();
                }
            }
            Event::Wake(at) => self.wake(at),
            Event::CallArrives { from, partition, call } => self.call_arrives(from, partition, call),
            Event::Answered(answered) => self.answered(answered),
            Event::Round { region, replicator } => self.begin_round(region, replicator),
            Event::Ask(round) => self.ask_arrives(round),
            Event::Gathered { round, gathered } => self.gathered(&round, &gathered),
            Event::RoundLate { region, replicator, turn } => self.end_round(region, replicator, turn),
            Event::Connect { from, replicator, to } => self.connect(from, replicator, to),
            Event::Hello { from, replicator, to } => self.hello(from, replicator, to),
            Event::Welcome { link, clock_us } => self.welcome(link, clock_us),
            Event::Batch { link, batch } => self.batch_arrives(link, &batch),
            Event::Ack { link, ack } => self.acknowledged(link, &ack),
            Event::Refused { link } => self.link_breaks(link),
            Event::AckLate { link, sequence } => self.ack_late(link, sequence),
            Event::Snapshot => self.take_snapshots(),
            Event::Close => self.close(),
            fault => self.go_wrong(fault),
        }
    }

    fn take_snapshots(&mut self) {
        for Region { store, .. } in &mut self.regions {
            store.snapshot.clone_from(&store.contents);
        }
        if !self.closed {
            self.schedule(self.now_us + SNAPSHOT_US, Event::Snapshot);
        }
    }

    /// Draws a region, if there are several.
    fn any_region(&mut self) -> usize {
        if self.regions.len() == 1 { 0 } else { self.rng.usize(0..self.regions.len()) }
    }

    /// The process at a place.
    fn process(&self, region: usize, node: usize) -> Process {
        Process { region, node, life: self.regions[region].nodes[node].life }
    }

    /// The nodes of a region that take requests.
    fn open_nodes(&self, region: usize) -> Vec<Process> {
        let nodes = &self.regions[region].nodes;
        let open = (0..nodes.len()).filter(|node| !nodes[*node].closing);
        open.map(|node| self.process(region, node)).collect()
    }

    /// Draws a node of a region.
    fn any_node(&mut self, region: usize) -> Option<Process> {
        let open = self.open_nodes(region);
        let chosen = self.rng.usize(0..open.len().max(1));
        open.get(chosen).copied()
    }

    /// Ends the world: faults stop, and all nodes report.
    fn close(&mut self) {
        if self.closed {
            self.events.clear();
            return;
        }
        self.closed = true;
        self.links.heal();
        for region in 0..self.regions.len() {
            for node in 0..self.regions[region].nodes.len() {
                let (at, now_us) = (self.process(region, node), self.now_us);
                let here = self.node(at);
                here.frozen_until_us = here.frozen_until_us.min(now_us);
                here.close();
                self.poll(at);
            }
        }
        let settle_us = if self.scenario.regions.is_some() { REGIONS_SETTLE_US } else { SETTLE_US };
        self.schedule(self.now_us + settle_us, Event::Close);
    }
}

/// The id of the region at a place.
pub(crate) fn region_id(place: usize) -> RegionId {
    RegionId(place as u64 + 1)
}
