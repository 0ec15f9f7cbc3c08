//! The world: one event queue that drives the simulation.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

use fastrand::Rng;
use tidegate_core::engine::EngineSettings;
use tidegate_core::origin::{Call, CallError, CallReply, Partition, RegionId, RoundReply, StoreId};
use tidegate_replication::{Ack, Batch, PartitionRound};

use super::bug::RegionBug;
use super::check::{KeyKnowledge, RegionChecker};
use super::replicator::Replicator;
use super::report::RegionReport;
use super::scenario::{KEYS, RegionScenario, SECOND_US};
use super::spoil::Spoiler;
use crate::clock::SkewedClock;
use crate::node::Node;
use crate::rule_editions::Rule;
use crate::schedule::ScheduledEvent;
use crate::swarm::PLENTY_PER_S;
use crate::trace::Trace;

/// Reading of the origins' clocks when the world begins, µs: a realistic date.
pub(super) const EPOCH_US: u64 = 1_800_000_000_000_000;

/// Interval between the snapshots of an origin that will lose data, µs. Lost writes are at most
/// this old.
const SNAPSHOT_US: u64 = SECOND_US / 2;

/// Time for which the world continues after its nodes are closed, µs, so that all usage is reported
/// and all lapses are over.
const SETTLE_US: u64 = 30 * SECOND_US;

/// The longest pause of an origin.
pub(super) const PAUSE_US_MAX: u64 = 20 * SECOND_US;

/// Largest deviation of the clock rates of machines, millionths. Time synchronization keeps it
/// small.
const SKEW_PPM: i64 = 50;

/// A reply in flight to a node.
#[derive(Debug)]
pub(super) struct ReplyInTransit {
    pub(super) region: usize,
    pub(super) node: usize,
    pub(super) life: u32,
    pub(super) partition: u16,
    pub(super) sequence: u64,
    pub(super) answer: Result<CallReply, CallError>,
}

/// A link from a sending to a listening replicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) from: usize,
    pub(super) replicator: u64,
    pub(super) to: usize,
    /// The replicator that listens.
    pub(super) peer: u64,
    /// Number of the connection. A message on a broken connection does not break another one.
    pub(super) number: u64,
}

#[derive(Debug)]
pub(super) enum Event {
    Request {
        region: usize,
        key: usize,
        cost: u64,
    },
    Wake {
        region: usize,
        node: usize,
        life: u32,
    },
    CallArrives {
        region: usize,
        node: usize,
        life: u32,
        partition: u16,
        call: Arc<Call>,
    },
    Answered(Box<ReplyInTransit>),
    Round {
        region: usize,
        replicator: u64,
    },
    Ask {
        region: usize,
        replicator: u64,
        turn: u64,
        partition_round: Box<PartitionRound>,
    },
    Gathered {
        region: usize,
        replicator: u64,
        turn: u64,
        partition_round: Box<PartitionRound>,
        gathered: RoundReply,
    },
    RoundLate {
        region: usize,
        replicator: u64,
        turn: u64,
    },
    Connect {
        from: usize,
        replicator: u64,
        to: usize,
    },
    Hello {
        from: usize,
        replicator: u64,
        to: usize,
    },
    Welcome {
        link: Link,
        clock_us: u64,
    },
    Batch {
        link: Link,
        batch: Arc<Batch>,
    },
    Ack {
        link: Link,
        ack: Ack,
    },
    Refused {
        link: Link,
    },
    AckLate {
        link: Link,
        sequence: u64,
    },
    CutBegins {
        cut: usize,
    },
    CutEnds {
        cut: usize,
    },
    Healed {
        known: Vec<KeyKnowledge>,
        begun_us: u64,
    },
    Settled {
        begun_us: u64,
    },
    ReplicatorDies,
    TakeOver {
        region: usize,
    },
    SecondReplicator,
    ReplicatorEnds {
        region: usize,
        replicator: u64,
    },
    Pause,
    Lose,
    Wipe,
    Crash,
    Snapshot,
    Close,
}

/// A request that waits for its node's engine.
pub(super) struct WaitingRequest {
    pub(super) region: usize,
    pub(super) node: usize,
    pub(super) key: usize,
    pub(super) cost: u64,
}

/// A region: its nodes, its origin and its replicators.
pub(super) struct Region {
    pub(super) rule: Rule,
    pub(super) nodes: Vec<Node>,
    pub(super) partitions: Vec<Partition>,
    pub(super) snapshot: Vec<Partition>,
    /// Time of the last expiry in each partition, µs.
    pub(super) forgot_us: Vec<u64>,
    pub(super) boot: u64,
    /// When this life of its origin began.
    pub(super) booted_us: u64,
    pub(super) paused_until_us: u64,
    /// The replicators, the latest last. There may be two for a while, or none.
    pub(super) replicators: Vec<Replicator>,
    /// In the middle of which step the replicator dies next.
    pub(super) doom: Option<super::replicator::Step>,
    /// How often it lost data.
    pub(super) losses: u32,
}

impl Region {
    /// Which life of its store this is.
    pub(super) fn store(&self, now_us: u64) -> StoreId {
        StoreId { lineage: 1, boot: self.boot, parent: 0, up_us: now_us - self.booted_us }
    }
}

/// Counters for the report.
#[derive(Default)]
pub(super) struct Tally {
    pub(super) tickets: u64,
    pub(super) requests: u64,
    pub(super) passed: u64,
    pub(super) faults: u64,
    pub(super) batches: u64,
}

pub(super) struct World<'s> {
    pub(super) scenario: &'s RegionScenario,
    pub(super) spoiler: Spoiler,
    pub(super) rng: Rng,
    pub(super) now_us: u64,
    order: u64,
    queue: BinaryHeap<Reverse<ScheduledEvent<Event>>>,
    pub(super) regions: Vec<Region>,
    next_process: u64,
    /// Time of the last message from one end of a link, and its arrival times, µs.
    pub(super) streams: BTreeMap<(u64, usize), (u64, Vec<u64>)>,
    /// How many cuts there are just now of the way from one region to another.
    pub(super) cut: Vec<Vec<u32>>,
    /// When the last cut began.
    pub(super) cut_us: u64,
    /// Which ways each cut that has begun is of.
    pub(super) ways: BTreeMap<usize, Vec<(usize, usize)>>,
    pub(super) waiting: BTreeMap<u64, WaitingRequest>,
    pub(super) check: RegionChecker,
    pub(super) tally: Tally,
    pub(super) closed: bool,
    pub(super) trace: Trace,
}

/// Runs a world of several regions to its end, with a known mistake in it if one is given.
pub fn run_regions(scenario: &RegionScenario, bug: Option<RegionBug>, keeps_trace: bool) -> RegionReport {
    let mut world = World::new(scenario, bug, keeps_trace);
    world.plan();
    while let Some(Reverse(next)) = world.queue.pop() {
        world.now_us = next.at_us;
        world.happen(next.event);
    }
    world.judge()
}

impl<'s> World<'s> {
    fn new(scenario: &'s RegionScenario, bug: Option<RegionBug>, keeps_trace: bool) -> Self {
        let count = scenario.regions();
        let mut world = Self {
            scenario,
            spoiler: Spoiler::new(bug),
            rng: Rng::with_seed(scenario.seed ^ 0x5eed),
            now_us: 0,
            order: 0,
            queue: BinaryHeap::new(),
            regions: Vec::new(),
            next_process: 1,
            streams: BTreeMap::new(),
            cut: vec![vec![0; count]; count],
            cut_us: 0,
            ways: BTreeMap::new(),
            waiting: BTreeMap::new(),
            check: RegionChecker::new(scenario),
            tally: Tally::default(),
            closed: false,
            trace: Trace::new(keeps_trace),
        };
        world.regions = (0..count).map(|place| world.new_region(place, bug)).collect();
        world
    }

    fn new_region(&mut self, place: usize, bug: Option<RegionBug>) -> Region {
        let partitions = vec![Partition::default(); KEYS];
        let nodes = (0..self.scenario.nodes).filter_map(|_| self.new_node(0)).collect();
        Region {
            rule: self.scenario.rule(place, bug),
            nodes,
            snapshot: partitions.clone(),
            forgot_us: vec![0; KEYS],
            partitions,
            boot: 1,
            booted_us: 0,
            paused_until_us: 0,
            replicators: Vec::new(),
            doom: None,
            losses: 0,
        }
    }

    pub(super) fn new_node(&mut self, life: u32) -> Option<Node> {
        let (id, clock) = (self.new_process(), self.new_clock());
        let settings = EngineSettings { updates_per_s_max: PLENTY_PER_S, ..EngineSettings::default() };
        Node::new(id, life, clock, 0, settings)
    }

    /// A number that no process had before.
    pub(super) fn new_process(&mut self) -> u64 {
        self.next_process += 1;
        self.next_process ^ self.rng.u64(..) << 16
    }

    pub(super) fn new_link(&mut self) -> u64 {
        self.next_process += 1;
        self.next_process
    }

    pub(super) fn new_clock(&mut self) -> SkewedClock {
        SkewedClock {
            offset_us: self.rng.u64(SECOND_US..1_000 * SECOND_US),
            rate_ppm: self.rng.i64(-SKEW_PPM..=SKEW_PPM),
            wall_offset_us: EPOCH_US,
        }
    }

    pub(super) fn schedule(&mut self, at_us: u64, event: Event) {
        self.order += 1;
        self.queue.push(Reverse(ScheduledEvent { at_us, order: self.order, event }));
    }

    /// Reading of the origins' clocks, µs. It is the same for all, so that the cells of windows are
    /// the same.
    pub(super) fn origin_us(&self) -> u64 {
        EPOCH_US + self.now_us
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Request { region, key, cost } => self.request(region, key, cost),
            Event::Wake { region, node, life } => self.wake(region, node, life),
            Event::CallArrives { region, node, life, partition, call } => {
                self.call_arrives(region, node, life, partition, call);
            }
            Event::Answered(answered) => self.answered(*answered),
            Event::Round { region, replicator } => self.begin_round(region, replicator),
            Event::Ask { region, replicator, turn, partition_round } => {
                self.ask_arrives(region, replicator, turn, partition_round);
            }
            Event::Gathered { region, replicator, turn, partition_round, gathered } => {
                self.gathered(region, replicator, turn, &partition_round, &gathered);
            }
            Event::RoundLate { region, replicator, turn } => self.end_round(region, replicator, turn),
            Event::Connect { from, replicator, to } => self.connect(from, replicator, to),
            Event::Hello { from, replicator, to } => self.hello(from, replicator, to),
            Event::Welcome { link, clock_us } => self.welcome(link, clock_us),
            Event::Batch { link, batch } => self.batch_arrives(link, &batch),
            Event::Ack { link, ack } => self.acknowledged(link, &ack),
            Event::Refused { link } => self.link_breaks(link),
            Event::AckLate { link, sequence } => self.ack_late(link, sequence),
            Event::CutBegins { cut } => self.cut_begins(cut),
            Event::CutEnds { cut } => self.cut_ends(cut),
            Event::Healed { known, begun_us } => self.healed(&known, begun_us),
            Event::Settled { begun_us } => self.settled(begun_us),
            Event::ReplicatorDies => self.doom_replicator(),
            Event::TakeOver { region } => self.take_over_lease(region),
            Event::SecondReplicator => self.second_replicator(),
            Event::ReplicatorEnds { region, replicator } => self.replicator_ends(region, replicator),
            Event::Pause => self.pause(),
            Event::Lose => self.lose(),
            Event::Wipe => self.wipe(),
            Event::Crash => self.crash(),
            Event::Snapshot => self.take_snapshot(),
            Event::Close => self.close(),
        }
    }

    fn take_snapshot(&mut self) {
        for region in &mut self.regions {
            region.snapshot.clone_from(&region.partitions);
        }
        if !self.closed {
            self.schedule(self.now_us + SNAPSHOT_US, Event::Snapshot);
        }
    }

    /// Ends the world: faults stop, and all nodes report.
    fn close(&mut self) {
        if self.closed {
            self.queue.clear();
            return;
        }
        self.closed = true;
        self.ways.clear();
        self.cut.iter_mut().flatten().for_each(|cuts| *cuts = 0);
        for region in 0..self.regions.len() {
            for node in 0..self.regions[region].nodes.len() {
                self.regions[region].nodes[node].close();
                self.poll(region, node);
            }
        }
        self.schedule(self.now_us + SETTLE_US, Event::Close);
    }
}

/// The id of the region at a place.
pub(super) fn region_id(place: usize) -> RegionId {
    RegionId(place as u64 + 1)
}
