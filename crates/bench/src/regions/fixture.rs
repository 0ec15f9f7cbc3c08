//! The regions, the links between them, and their counts.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tidegate_testkit::{REGIONS, Regions, START_TIME_MAX, ServerFleet, Traffic, wait_until};

use crate::scrape::Metrics;

/// One-way delay between two regions. A round trip takes twice as long.
pub(super) const WAY: Duration = Duration::from_millis(80);

/// A link that is up: the delay, and no losses.
const APART: Traffic = Traffic::Far(WAY, u32::MAX);

/// The table of each server: more than all keys need.
const MEMORY: &str = "256MB";

/// The pairs of regions.
pub(super) const PAIRS: [(usize, usize); 3] = [(0, 1), (0, 2), (1, 2)];

pub(super) fn pair_name((one, other): (usize, usize)) -> String {
    format!("{}-{}", REGIONS[one], REGIONS[other])
}

/// Three regions of one server each.
pub(super) struct RegionsFixture {
    regions: Regions,
}

impl RegionsFixture {
    /// Starts the regions with these rules, and waits until all are connected.
    pub(super) fn start(program: &Path, rules: &str) -> Self {
        let arguments = ["--workers", "1", "--memory", MEMORY, "--grpc-listen", "off"];
        // Late and refused requests are in the table.
        let fleet = ServerFleet::new(program, rules, &arguments).with_errors_only();
        let fixture = Self { regions: Regions::start(fleet, 1, APART) };
        wait_until("all regions to be connected", START_TIME_MAX, || fixture.is_connected());
        fixture
    }

    fn is_connected(&self) -> bool {
        let whole = |region| self.metrics(region)?.sum("tidegate_region_connected", "");
        (0..REGIONS.len()).all(|region| matches!(whole(region), Ok(Some(1))))
    }

    pub(super) fn address(&self, region: usize) -> SocketAddr {
        self.regions.server((region, 0)).address("http")
    }

    /// Cuts a pair of regions from each other, or joins them again.
    pub(super) fn cut(&self, (one, other): (usize, usize), is_cut: bool) {
        let traffic = if is_cut { Traffic::HalfOpen } else { APART };
        self.regions.set(|from, to| (from, to) == (one, other) || (to, from) == (one, other), traffic);
    }

    fn metrics(&self, region: usize) -> Result<Metrics> {
        Metrics::read(self.regions.server((region, 0)).address("admin"))
    }

    /// Returns the counts so far.
    pub(super) fn counts(&self) -> Result<Counts> {
        let mut counts = Counts::default();
        for region in 0..REGIONS.len() {
            let metrics = self.metrics(region)?;
            let source = |label| metrics.sum("tidegate_decisions_total", label);
            let (all, global) = (source("")?.unwrap_or(0), source("source=\"global\"")?.unwrap_or(0));
            counts.decided += all;
            counts.odd += all - global;
            for (pair, of) in PAIRS.iter().zip(&mut counts.pairs) {
                let peer = match *pair {
                    (one, other) if one == region => other,
                    (one, other) if other == region => one,
                    _ => continue,
                };
                let label = format!("peer=\"{}\"", REGIONS[peer]);
                let sum = |counter: &str| -> Result<u64> {
                    metrics
                        .sum(counter, &label)?
                        .with_context(|| format!("the server has no counter {counter}"))
                };
                of.bytes += sum("tidegate_peer_sent_bytes_total")?;
                of.published += sum("tidegate_peer_components_sent_total")?;
            }
        }
        Ok(counts)
    }
}

/// Counts of all servers together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) decided: u64,
    /// Decisions with a source other than `global`.
    pub(super) odd: u64,
    /// Of each of [`PAIRS`], in both directions.
    pub(super) pairs: [ReplicationTraffic; PAIRS.len()],
}

/// The replication traffic between two regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ReplicationTraffic {
    pub(super) bytes: u64,
    /// Components: a key that is published again counts again.
    pub(super) published: u64,
}

impl Counts {
    pub(super) fn since(self, before: Self) -> Self {
        let mut pairs = self.pairs;
        for (pair, before) in pairs.iter_mut().zip(before.pairs) {
            *pair = ReplicationTraffic {
                bytes: pair.bytes - before.bytes,
                published: pair.published - before.published,
            };
        }
        Self { decided: self.decided - before.decided, odd: self.odd - before.odd, pairs }
    }

    /// Of all pairs together.
    pub(super) fn all(&self) -> ReplicationTraffic {
        let sum = |of: fn(&ReplicationTraffic) -> u64| self.pairs.iter().map(of).sum();
        ReplicationTraffic { bytes: sum(|pair| pair.bytes), published: sum(|pair| pair.published) }
    }
}
