//! The parameters of a world: limits, load and faults.

use tidegate_core::engine::EngineSettings;
use tidegate_core::origin::Lapse;
use tidegate_core::{Class, Limit};

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
}

/// Which nodes requests come to.
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

/// The faults of a world. Fractions are in millionths.
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

/// A world before it begins.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed that determines the world.
    pub seed: u64,
    /// The limit of every key.
    pub limit: Limit,
    /// Millionths tolerated above the burst.
    pub tolerance_ppm: u32,
    /// Treatment of a grant that was not reported in time.
    pub lapse: Lapse,
    /// The class of the limit, which selects the fallback.
    pub class: Class,
    /// Nodes.
    pub nodes: usize,
    /// Keys, with request weights that fall like 1/n.
    pub keys: usize,
    /// Whether every request is also under a limit that all keys share, twice as wide.
    pub shared: bool,
    /// Which nodes requests come to.
    pub spread: Spread,
    /// Requests, all together.
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
    /// The faults of the world.
    pub faults: Faults,
    /// How many meters in a second may be due at a node before it takes longer for them.
    pub updates_per_s_max: u64,
}

impl Scenario {
    /// The settings of every node.
    pub(crate) fn settings(&self) -> EngineSettings {
        let processes = u32::try_from(self.nodes).unwrap_or(u32::MAX);
        EngineSettings { updates_per_s_max: self.updates_per_s_max, processes, ..EngineSettings::default() }
    }

    /// How many meters there are: one for each key, and the one that they share.
    pub(crate) fn meters(&self) -> usize {
        self.keys + usize::from(self.shared)
    }

    /// Returns the meters of a request for a key, with its cost under each.
    pub(crate) fn charges_of(&self, demand: Demand) -> impl Iterator<Item = Charge> + use<> {
        let own = Charge { meter: demand.key, cost: demand.cost };
        let shared = Charge { meter: self.keys, cost: demand.shared_cost };
        std::iter::once(own).chain(self.shared.then_some(shared))
    }
}

/// A request: its key and its costs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
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
