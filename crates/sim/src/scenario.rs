//! The parameters of a world: limits, load, regions and faults.

use std::ops::Deref;

use tidegate_core::engine::EngineSettings;
use tidegate_core::origin::Lapse;
use tidegate_core::{Algorithm, Class, Limit};

use crate::node::PARTITIONS_MAX;

pub(crate) const SECOND_US: u64 = 1_000_000;

/// One way between a node and the origin, µs: a call takes two milliseconds.
const DELAY_US: u64 = 1_000;

/// More meters than are ever due in a second.
pub(crate) const PLENTY_PER_S: u64 = 10_000;

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// Evenly, at random.
    Steady,
    /// The same, but each request is drawn when the previous one arrives: for loads of millions.
    Poisson,
    /// In sequence: each request follows the answer to the previous one after a pause.
    Sequence,
    /// In bursts with quiet between them.
    Bursts,
    /// All at the end of each period.
    Edges,
    /// As an attack on the first key in all regions at once. The second key has even demand within
    /// its regional shares, the third has occasional requests.
    Attack(Attack),
}

/// How requests come for the key that is attacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attack {
    /// At random, several times as often as the limit allows, in every region.
    Flood,
    /// As much as stays below the threshold, then a burst everywhere at once, and then all that
    /// passes within the lag.
    Lag,
    /// A burst everywhere just after regions were cut from each other, and all that passes after
    /// it.
    Cut,
    /// The same, and bursts everywhere when regions hear each other again, as often as it takes.
    Heal,
    /// A burst everywhere before regions notice that they are cut from each other, then no
    /// requests, so that debts may be dropped. Bursts everywhere follow when regions hear each
    /// other again, as often as it takes.
    Pause,
    /// At the end of each period, everywhere.
    Edges,
    /// A burst in a region each time that its origin has lost all data.
    Wipes,
    /// All requests that can pass everywhere, for a key unknown to peers, from a cut until regions
    /// have heard each other again. Then none until the known usage has drained, and the same again
    /// at the next cut.
    Rush,
}

/// The nodes that receive requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Spread {
    /// Any.
    Even,
    /// Nine in ten to the key's own node.
    Home,
    /// Most to the first few nodes, regardless of the key.
    Few,
    /// Half of them to the first node, the others to any.
    Half,
    /// To each node in turn.
    InTurn,
    /// By a Zipf distribution over nodes: the n-th node has 1/n of the first node's traffic.
    Zipf,
}

/// The faults inside the regions of a world. Fractions are in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Messages that get lost.
    pub loss_ppm: u32,
    /// Messages that arrive twice.
    pub duplicate_ppm: u32,
    /// Messages that take up to `slow_us` longer, and so overtake and are overtaken.
    pub slow_ppm: u32,
    /// How much longer those take.
    pub slow_us: u64,
    /// How many times nodes die and are replaced.
    pub crashes: u32,
    /// How many times nodes stop in an orderly way and are replaced.
    pub restarts: u32,
    /// How many times all nodes are replaced, one after another.
    pub deploys: u32,
    /// Times that a node freezes, and later continues.
    pub freezes: u32,
    /// Longest freeze of a node, µs.
    pub freeze_us: u64,
    /// How many times a node is cut off for a while.
    pub cuts: u32,
    /// Whether a cut blocks one direction only: calls arrive, and replies do not.
    pub one_way: bool,
    /// How long a cut lasts.
    pub cut_us: u64,
    /// Times that the origin returns with all its data after a pause.
    pub pauses: u32,
    /// Times that the origin returns without its last writes.
    pub losses: u32,
    /// Times that the origin returns without any data.
    pub wipes: u32,
    /// Largest deviation of the clock rates of nodes, millionths.
    pub skew_ppm: u32,
    /// How many times the wall clock of a node steps by an hour.
    pub node_steps: u32,
    /// How many times the origin's clock steps by an hour.
    pub origin_steps: u32,
    /// How many times the limit changes, and back.
    pub rule_changes: u32,
    /// The kind of that change.
    pub change: RuleChange,
}

/// A change of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuleChange {
    /// Half of it.
    #[default]
    Half,
    /// As much in the same time, counted by the other algorithm.
    Algorithm,
    /// As much in a longer time.
    Period,
}

/// The links of a cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CutKind {
    /// All of them.
    All,
    /// One region from all others.
    One,
    /// One pair of regions.
    Pair,
    /// One pair, one way only.
    OneWay,
    /// The region with the largest share hears no peer, and all peers hear it.
    Deaf,
}

/// Some links are cut for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// Its links.
    pub kind: CutKind,
    /// When, µs after the world began.
    pub at_us: u64,
    /// For how long.
    pub for_us: u64,
}

/// Faults between regions. Fractions are in millionths.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkFaults {
    /// Links that are cut.
    pub cuts: Vec<Cut>,
    /// Whether replicators notice a cut link at once, as when a device on the path resets the
    /// connection.
    pub resets: bool,
    /// Messages that get lost.
    pub loss_ppm: u32,
    /// Messages that arrive twice, or after later ones.
    pub repeat_ppm: u32,
    /// Messages that take up to two seconds longer.
    pub slow_ppm: u32,
    /// How many times a replicator dies, each time in the middle of another step.
    pub replicator_crashes: u32,
    /// How many times a region has two replicators for a while.
    pub two_replicators: u32,
}

/// Several regions that count together.
#[derive(Clone, Debug)]
pub struct Regions {
    /// The weight of each region, which sets its regional share.
    pub weights: Vec<u32>,
    /// One way between two regions, µs.
    pub wan_us: u64,
    /// The faults between regions.
    pub faults: LinkFaults,
}

static NO_LINK_FAULTS: LinkFaults = LinkFaults {
    cuts: Vec::new(),
    resets: false,
    loss_ppm: 0,
    repeat_ppm: 0,
    slow_ppm: 0,
    replicator_crashes: 0,
    two_replicators: 0,
};

/// A world before it begins.
#[derive(Clone, Debug)]
#[expect(clippy::struct_excessive_bools, reason = "the switches of a world are independent")]
pub struct Scenario {
    /// The seed that determines the world.
    pub seed: u64,
    /// The limit of every key.
    pub limit: Limit,
    /// Millionths tolerated above the burst.
    pub tolerance_ppm: u32,
    /// The class of the limit. It selects the fallback, and the treatment of a grant that was not
    /// reported in time.
    pub class: Class,
    /// The regions, if there are several.
    pub regions: Option<Regions>,
    /// Nodes in each region.
    pub nodes: usize,
    /// Keys, with request weights that fall like 1/n.
    pub keys: usize,
    /// Whether every request is also under a limit that all keys share, twice as wide.
    pub shared: bool,
    /// The nodes that receive requests.
    pub spread: Spread,
    /// Requests, all together; of an attack, the most for the first key.
    pub requests: u64,
    /// How long it lasts.
    pub length_us: u64,
    /// From when on [`Report::steady`](crate::Report::steady) counts: a load's first moments are a
    /// matter of bursts.
    pub steady_from_us: u64,
    /// Whether refused requests are recorded, to find those that one bucket would have admitted.
    pub keeps_refusals: bool,
    /// How requests come.
    pub shape: Shape,
    /// Largest cost of a request. The smallest is 1.
    pub cost_max: u64,
    /// Whether a request has another cost under the limit that all keys share: from 0 to a tenth of
    /// that limit's burst.
    pub uneven: bool,
    /// Requests that cost the full burst, in a million.
    pub large_ppm: u32,
    /// Requests that are charged without a check, in a million.
    pub charges_ppm: u32,
    /// One way between a node and the origin.
    pub delay_us: u64,
    /// The faults inside the regions.
    pub faults: Faults,
    /// Whether nodes decide without the origin, by the class of the limit. If not, requests without
    /// a reply are denied.
    pub has_fallback: bool,
    /// How many meters in a second may be due at a node before it takes longer for them.
    pub updates_per_s_max: u64,
}

impl Scenario {
    /// A world of one node and one key, with even requests of one unit and without faults.
    pub(crate) fn new(limit: Limit, class: Class) -> Self {
        Self {
            seed: 1,
            limit,
            tolerance_ppm: 0,
            class,
            regions: None,
            nodes: 1,
            keys: 1,
            shared: false,
            spread: Spread::Even,
            requests: 0,
            length_us: 0,
            steady_from_us: 0,
            keeps_refusals: false,
            shape: Shape::Steady,
            cost_max: 1,
            uneven: false,
            large_ppm: 0,
            charges_ppm: 0,
            delay_us: DELAY_US,
            faults: Faults::default(),
            has_fallback: true,
            updates_per_s_max: PLENTY_PER_S,
        }
    }

    /// The settings of every node.
    pub(crate) fn settings(&self) -> EngineSettings {
        let processes = u32::try_from(self.nodes).unwrap_or(u32::MAX);
        EngineSettings { updates_per_s_max: self.updates_per_s_max, processes, ..EngineSettings::default() }
    }

    /// How many regions there are.
    pub fn region_count(&self) -> usize {
        self.regions.as_ref().map_or(1, |regions| regions.weights.len())
    }

    /// The faults between regions; none in one region.
    pub fn link_faults(&self) -> &LinkFaults {
        self.regions.as_ref().map_or(&NO_LINK_FAULTS, |regions| &regions.faults)
    }

    /// Treatment of a grant that was not reported in time.
    pub(crate) fn lapse(&self) -> Lapse {
        self.class.lapse()
    }

    /// How many meters there are: one for each key, and the one that they share.
    pub(crate) fn meters(&self) -> usize {
        self.keys + usize::from(self.shared)
    }

    /// How many partitions the meters lie in.
    pub(crate) fn partitions(&self) -> usize {
        self.meters().min(PARTITIONS_MAX)
    }

    /// Meters of one request lie in one partition.
    pub(crate) fn partition_of(&self, meter: usize) -> u16 {
        if self.shared { 0 } else { (meter % PARTITIONS_MAX) as u16 }
    }

    /// How long these units take to drain, µs.
    pub(crate) fn drain_us(&self, units: u64) -> u64 {
        match self.limit.algorithm() {
            Algorithm::Gcra => units * self.limit.period_us() / u64::from(self.limit.amount()).max(1),
            Algorithm::SlidingWindow => 2 * self.limit.period_us(),
        }
    }

    /// Units that drain in this time.
    pub(crate) fn drained(&self, us: u64) -> u64 {
        (u128::from(us) * u128::from(self.limit.amount()) / u128::from(self.limit.period_us())) as u64
    }

    /// Whether messages between regions may be late without a cut.
    pub(crate) fn is_wan_bad(&self) -> bool {
        let links = self.link_faults();
        links.loss_ppm + links.slow_ppm > 0 || links.replicator_crashes + self.faults.pauses > 0
    }

    /// Whether all is well from a time on.
    pub(crate) fn is_well_from(&self, us: u64) -> bool {
        let links = self.link_faults();
        let is_over = |cut: &Cut| cut.at_us + cut.for_us < us;
        let are_replicators_well = links.two_replicators == 0 && !self.is_wan_bad();
        are_replicators_well && self.faults == Faults::default() && links.cuts.iter().all(is_over)
    }

    /// Returns the meters of a request for a key, with its cost under each.
    pub(crate) fn charges_of(&self, demand: Demand) -> Charges {
        let own = Charge { meter: demand.key, cost: demand.cost };
        let shared = Charge { meter: self.keys, cost: demand.shared_cost };
        Charges { all: [own, shared], count: 1 + usize::from(self.shared) }
    }
}

/// A request: its region, its key and its costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    pub(crate) region: usize,
    pub(crate) key: usize,
    /// Cost under the key's own limit, in units.
    pub(crate) cost: u64,
    /// Cost under the limit that all keys share, if there is one, in units.
    pub(crate) shared_cost: u64,
    /// Whether it passed already, and is only charged.
    pub(crate) is_charge: bool,
}

/// The cost of a request under one limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub(crate) meter: usize,
    pub(crate) cost: u64,
}

/// The costs of a request under all of its limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charges {
    all: [Charge; 2],
    count: usize,
}

impl Deref for Charges {
    type Target = [Charge];

    fn deref(&self) -> &[Charge] {
        &self.all[..self.count]
    }
}
