//! A world in words.

use std::fmt;

use tidegate_core::Algorithm;
use tidegate_core::origin::Lapse;

use crate::scenario::{
    Attack, CutKind, Faults, LinkFaults, PLENTY_PER_S, Regions, RuleChange, SECOND_US, Scenario, Shape,
    Spread,
};

const MS_US: u64 = 1_000;

impl fmt::Display for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, nodes, keys, requests, cost_max, .. } = self;
        let seconds = limit.period_us() as f64 / SECOND_US as f64;
        match limit.algorithm() {
            Algorithm::Gcra => {
                write!(f, "{} in {seconds} s with a burst of {}", limit.amount(), limit.burst())?;
            }
            Algorithm::SlidingWindow => write!(f, "{} in a sliding window of {seconds} s", limit.amount())?,
        }
        f.write_str(match self.lapse() {
            Lapse::Counted => ", lapsed grants counted",
            Lapse::Forgiven => ", lapsed grants forgiven",
        })?;
        write!(f, ", of class {}", self.class)?;
        if self.tolerance_ppm > 0 {
            write!(f, ", {} % tolerated", percent(self.tolerance_ppm))?;
        }
        let length_s = self.length_us / SECOND_US;
        if let Some(Regions { weights, wan_us, .. }) = &self.regions {
            write!(f, "; regions of weights {weights:?}, {} ms apart", wan_us / MS_US)?;
        }
        write!(f, "; {nodes} nodes, {keys} keys, {requests} requests")?;
        if !matches!(self.shape, Shape::Attack(_)) {
            write!(f, " of up to {cost_max}")?;
        }
        write!(f, " in {length_s} s")?;
        if self.large_ppm > 0 {
            write!(f, ", {} % of them of a whole burst", percent(self.large_ppm))?;
        }
        if self.charges_ppm > 0 {
            write!(f, ", {} % of them charged without a check", percent(self.charges_ppm))?;
        }
        if self.shared {
            f.write_str(", under a shared limit as well")?;
            f.write_str(if self.uneven { " at a cost of its own" } else { "" })?;
        }
        f.write_str(match self.shape {
            Shape::Steady | Shape::Poisson => ", evenly",
            Shape::Sequence => ", one after the other",
            Shape::Bursts => ", in bursts",
            Shape::Edges => ", at the ends of periods",
            Shape::Attack(Attack::Flood) => ", as a flood",
            Shape::Attack(Attack::Lag) => ", as an attack within the lag",
            Shape::Attack(Attack::Cut) => ", as an attack at partitions",
            Shape::Attack(Attack::Heal) => ", as an attack at partitions and at their ends",
            Shape::Attack(Attack::Pause) => ", as an attack before a partition is noticed and at its end",
            Shape::Attack(Attack::Edges) => ", as an attack at the ends of periods",
            Shape::Attack(Attack::Wipes) => ", as an attack after origins have lost all data",
            Shape::Attack(Attack::Rush) => ", as two attacks before a partition is noticed",
        })?;
        f.write_str(match self.spread {
            Spread::Even => " over all nodes",
            Spread::Home => ", each key mostly at one node",
            Spread::Few => ", most at the first nodes",
            Spread::InTurn => ", at each node in turn",
            Spread::Half => ", half of them at one node",
            Spread::Zipf => ", at nodes by a Zipf distribution",
        })?;
        if self.updates_per_s_max < PLENTY_PER_S {
            write!(f, ", each reports about {} meters per second", self.updates_per_s_max)?;
        }
        let faults = [self.link_faults().words(), self.faults.words()].concat().join(", ");
        let faults = if faults.is_empty() { "no faults" } else { &faults };
        write!(f, "; {} ms to the origin; {faults}", self.delay_us as f64 / MS_US as f64)
    }
}

/// The words for the faults that occur.
fn active<const N: usize>(faults: [(u32, String); N]) -> Vec<String> {
    faults.into_iter().filter(|(count, _)| *count > 0).map(|(_, words)| words).collect()
}

fn percent(ppm: u32) -> f64 {
    f64::from(ppm) / 10_000.0
}

impl LinkFaults {
    fn words(&self) -> Vec<String> {
        let cuts = self.cuts.iter().map(|cut| {
            let cause = match cut.kind {
                CutKind::All => "all regions partitioned from each other",
                CutKind::One => "one region partitioned",
                CutKind::Pair => "one pair partitioned",
                CutKind::OneWay => "one pair partitioned in one direction",
                CutKind::Deaf => "the largest region receives nothing",
            };
            format!("{cause} at {} s for {} s", cut.at_us / SECOND_US, cut.for_us / SECOND_US)
        });
        let others = active([
            (u32::from(self.resets), "partitions noticed at once".to_owned()),
            (self.loss_ppm, format!("{} % lost between regions", percent(self.loss_ppm))),
            (self.repeat_ppm, format!("{} % repeated between regions", percent(self.repeat_ppm))),
            (self.slow_ppm, format!("{} % slow between regions", percent(self.slow_ppm))),
            (self.replicator_crashes, format!("{} replicators die", self.replicator_crashes)),
            (self.two_replicators, format!("two replicators {} times", self.two_replicators)),
        ]);
        cuts.chain(others).collect()
    }
}

impl Faults {
    fn words(&self) -> Vec<String> {
        let seconds = |us: u64| us as f64 / SECOND_US as f64;
        let way = if self.one_way { ", in one direction" } else { "" };
        let changed = match self.change {
            RuleChange::Half => "the limit",
            RuleChange::Algorithm => "the limit's algorithm",
            RuleChange::Period => "the limit's period",
        };
        active([
            (self.loss_ppm, format!("{} % of messages lost", percent(self.loss_ppm))),
            (self.duplicate_ppm, format!("{} % doubled", percent(self.duplicate_ppm))),
            (self.slow_ppm, format!("{} % up to {} s slower", percent(self.slow_ppm), seconds(self.slow_us))),
            (self.crashes, format!("{} crashes", self.crashes)),
            (self.restarts, format!("{} restarts", self.restarts)),
            (self.deploys, format!("{} rolling deploys", self.deploys)),
            (
                self.freezes,
                format!("{} nodes that stall for up to {} s", self.freezes, seconds(self.freeze_us)),
            ),
            (self.cuts, format!("{} partitions of up to {} s{way}", self.cuts, seconds(self.cut_us))),
            (self.pauses, format!("{} pauses of the origin", self.pauses)),
            (self.losses, format!("{} losses of data", self.losses)),
            (self.wipes, format!("{} losses of all data", self.wipes)),
            (self.skew_ppm, format!("clocks up to {} % apart", percent(self.skew_ppm))),
            (self.node_steps, format!("{} steps of nodes' clocks", self.node_steps)),
            (self.origin_steps, format!("{} steps of the origin's clock", self.origin_steps)),
            (self.rule_changes, format!("{} changes of {changed}", self.rule_changes)),
        ])
    }
}
