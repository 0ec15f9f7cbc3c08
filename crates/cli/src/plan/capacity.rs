//! Estimates the resources for a described load from measurements.
//!
//! Every figure applies to one region. Constants are for one core of the machine that
//! `docs/benchmarks.md` names. A figure that was not measured is marked as such.

use serde::Serialize;

/// A measured or assumed value, and its source.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Constant {
    pub(super) name: &'static str,
    pub(super) value: u64,
    pub(super) unit: &'static str,
    pub(super) from: &'static str,
}

const fn constant(name: &'static str, value: u64, unit: &'static str, from: &'static str) -> Constant {
    Constant { name, value, unit, from }
}

/// A key of a process's table.
const TABLE_KEY: Constant =
    constant("a key in the meter table", 49, "bytes", "docs/benchmarks.md, How to read it");

/// A check by the SDK: four limits over a hundred million keys.
const CHECK: Constant = constant("a check by the SDK", 126, "CPU ns", "docs/benchmarks.md, SDK checks");

/// CPU time that an origin adds to a request of warm keys, half of them at their limit.
const JOINED: Constant =
    constant("an origin, per request", 290, "CPU ns", "docs/benchmarks.md, A region: 0.78 us, 0.49 without");

/// A request over HTTP, under one limit.
const HTTP: Constant =
    constant("a request over HTTP", 14_840, "CPU ns", "docs/benchmarks.md, Servers: 67.4 k/s");

/// The same over gRPC.
const GRPC: Constant =
    constant("a request over gRPC", 35_220, "CPU ns", "docs/benchmarks.md, Servers: 28.4 k/s");

/// The same over RESP, sixteen at a time.
const RESP: Constant =
    constant("a command over RESP", 938, "CPU ns", "docs/benchmarks.md, Servers: 1,067 k/s");

/// Calls for each million requests of warm keys.
const WARM_CALLS: Constant =
    constant("calls for warm keys", 2_800, "per million requests", "docs/benchmarks.md, A region");

/// A call about one cold key.
const CALL: Constant = constant("a call to Redis", 125, "CPU us", "docs/benchmarks.md, What an origin holds");

/// A meter in Redis, all overheads counted.
const METER: Constant =
    constant("a meter in Redis", 590, "bytes", "docs/benchmarks.md, What an origin holds");

/// Size of a component between regions, without its key.
const COMPONENT: Constant =
    constant("a component", 64, "bytes, plus the key", "docs/benchmarks.md, Several regions");

/// Maximum rate at which the component of a key is sent.
const ROUNDS: Constant = constant("replication rounds", 5, "per second", "one every 200 ms");

/// The replicator reads every partition in each round, even if nothing has changed.
const PARTITIONS: Constant = constant("partitions of an origin", 256, "reads per round", "fixed");

/// CPU time to read a partition without dirty meters.
const LOOK: Constant =
    constant("a read of a partition", 50, "CPU us", "docs/benchmarks.md, What replicators carry");

/// CPU time of a component that the region sends, and of one that it receives.
const GATHERED: Constant =
    constant("a component gathered, at Redis", 45, "CPU us", "docs/benchmarks.md, What replicators carry");
const MERGED: Constant =
    constant("a component merged, at Redis", 35, "CPU us", "docs/benchmarks.md, What replicators carry");

const NS_PER_S: u128 = 1_000_000_000;
const US_PER_S: u128 = 1_000_000;
const PERCENT: u128 = 100;
const BITS: u128 = 8;

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Surface {
    Sdk,
    Http,
    Grpc,
    Resp,
}

impl Surface {
    pub(super) const ALL: [Self; 4] = [Self::Sdk, Self::Http, Self::Grpc, Self::Resp];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Sdk => "sdk",
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Resp => "resp",
        }
    }

    /// A request under one limit, if it is more than a check.
    const fn request(self) -> Option<Constant> {
        match self {
            Self::Sdk => None,
            Self::Http => Some(HTTP),
            Self::Grpc => Some(GRPC),
            Self::Resp => Some(RESP),
        }
    }
}

/// A load that the user describes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Load {
    /// In all regions, which share them evenly.
    pub(super) requests_per_s: u64,
    pub(super) regions: u64,
    /// Live ones in each region, of all limits.
    pub(super) keys: u64,
    /// The part of `keys` that regions replicate.
    pub(super) global_keys: u64,
    /// The share of requests for such a key.
    pub(super) global_percent: u64,
    pub(super) limits: u64,
    pub(super) surface: Surface,
    pub(super) local_percent: u64,
    pub(super) key_bytes: u64,
    /// How busy a core or a shard may be.
    pub(super) busy_percent: u64,
    pub(super) cores: u64,
    /// `None`: computed from the cores.
    pub(super) nodes: Option<u64>,
}

/// Resources that the load needs in each region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Needs {
    pub(super) requests_per_s: u64,
    pub(super) checks_per_s: u64,
    /// Cores of servers, or the part of the callers' cores that the SDK uses.
    pub(super) cores: u64,
    pub(super) nodes: u64,
    /// If each key reaches every node.
    pub(super) table_bytes_per_node: u64,
    /// If each key reaches one node only.
    pub(super) table_bytes_per_node_sticky: u64,
    /// Requests that wait for a call.
    pub(super) waiting_per_s: u64,
    pub(super) origin_calls_per_s: u64,
    /// Reads of partitions by the replicator, to find dirty meters.
    pub(super) origin_looks_per_s: u64,
    pub(super) redis_shards: u64,
    pub(super) redis_bytes_per_shard: u64,
    /// Components that the region sends to each peer.
    pub(super) components_per_s: u64,
    /// Components that the region receives from all peers.
    pub(super) merged_per_s: u64,
    pub(super) wan_bits_per_s: u64,
}

impl Load {
    pub(super) fn needs(&self) -> Needs {
        let requests = u128::from(self.requests_per_s).div_ceil(self.regions.into());
        let cores = self.at_most_busy(requests * self.request_ns(), NS_PER_S);
        let nodes = self.nodes.map_or_else(|| cores.div_ceil(self.cores.into()), u128::from).max(1);
        let table = u128::from(self.keys) * u128::from(TABLE_KEY.value);
        let waiting = (requests * u128::from(100 - self.local_percent)).div_ceil(PERCENT);
        let warm = ((requests - waiting) * u128::from(WARM_CALLS.value)).div_ceil(US_PER_S);
        let calls = waiting + warm;
        let peers = u128::from(self.regions - 1);
        let looks = if peers == 0 { 0 } else { u128::from(PARTITIONS.value * ROUNDS.value) };
        let components = self.components(requests);
        // All regions use as much as this one.
        let merged = components * peers;
        let work = [(calls, CALL), (looks, LOOK), (components, GATHERED), (merged, MERGED)];
        let busy_us = work.iter().map(|(count, each)| count * u128::from(each.value)).sum();
        let shards = self.at_most_busy(busy_us, US_PER_S);
        let component_bytes = u128::from(COMPONENT.value + self.key_bytes);
        Needs {
            requests_per_s: short(requests),
            checks_per_s: short(requests * u128::from(self.limits)),
            cores: short(cores),
            nodes: short(nodes),
            table_bytes_per_node: short(table),
            table_bytes_per_node_sticky: short(table.div_ceil(nodes)),
            waiting_per_s: short(waiting),
            origin_calls_per_s: short(calls),
            origin_looks_per_s: short(looks),
            redis_shards: short(shards),
            redis_bytes_per_shard: short((u128::from(self.keys) * u128::from(METER.value)).div_ceil(shards)),
            components_per_s: short(components),
            merged_per_s: short(merged),
            wan_bits_per_s: short(components * component_bytes * BITS * peers),
        }
    }

    /// Returns the CPU time of a request: its surface with one limit, a check for each further
    /// limit, and the origin.
    fn request_ns(&self) -> u128 {
        let checks = match self.surface.request() {
            None => self.limits * CHECK.value,
            Some(request) => request.value + (self.limits - 1) * CHECK.value,
        };
        u128::from(checks + JOINED.value)
    }

    /// Components per second: one per key and round, if the key had a request since.
    fn components(&self, requests: u128) -> u128 {
        if self.regions == 1 {
            return 0;
        }
        let changes = (requests * u128::from(self.global_percent)).div_ceil(PERCENT);
        (u128::from(self.global_keys) * u128::from(ROUNDS.value)).min(changes)
    }

    /// Returns how many resources with capacity `each` per second keep every one of them within
    /// `busy_percent`.
    fn at_most_busy(&self, work: u128, each: u128) -> u128 {
        (work * PERCENT).div_ceil(each * u128::from(self.busy_percent)).max(1)
    }

    /// Returns the constants that the figures rest on.
    pub(super) fn constants(&self) -> Vec<Constant> {
        let always = [TABLE_KEY, CHECK, JOINED, WARM_CALLS, CALL, METER];
        let between = [COMPONENT, ROUNDS, PARTITIONS, LOOK, GATHERED, MERGED];
        let between = between.into_iter().filter(|_| self.regions > 1);
        self.surface.request().into_iter().chain(always).chain(between).collect()
    }
}

fn short(number: u128) -> u64 {
    u64::try_from(number).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load() -> Load {
        Load {
            requests_per_s: 3_000_000,
            regions: 3,
            keys: 1_000_000,
            global_keys: 10_000,
            global_percent: 10,
            limits: 1,
            surface: Surface::Sdk,
            local_percent: 95,
            key_bytes: 32,
            busy_percent: 50,
            cores: 4,
            nodes: None,
        }
    }

    #[test]
    fn a_region_takes_its_part_of_the_requests() {
        let needs = load().needs();
        assert_eq!((needs.requests_per_s, needs.waiting_per_s), (1_000_000, 50_000));
        assert_eq!(needs.origin_calls_per_s, 50_000 + 950_000 * 28 / 10_000);
        // A million times (126 + 290) ns, half busy.
        assert_eq!((needs.cores, needs.nodes), (1, 1));
        assert_eq!(needs.table_bytes_per_node, 49_000_000);
    }

    #[test]
    fn a_shard_is_no_busier_than_it_may_be() {
        let needs = load().needs();
        // Calls of nodes, and the replicator: it sends each component once and receives as many
        // from each of two peers.
        let busy_us = needs.origin_calls_per_s * CALL.value
            + 1_280 * LOOK.value
            + 50_000 * (GATHERED.value + 2 * MERGED.value);
        assert!(busy_us * 2 <= needs.redis_shards * 1_000_000, "{needs:?}");
        assert!(busy_us * 2 > (needs.redis_shards - 1) * 1_000_000, "{needs:?}");
    }

    #[test]
    fn key_is_published_once_per_round_to_each_peer() {
        let needs = load().needs();
        assert_eq!(
            (needs.components_per_s, needs.wan_bits_per_s),
            (50_000, 50_000 * (COMPONENT.value + 32) * 8 * 2)
        );
        let few = Load { requests_per_s: 3_000, ..load() }.needs();
        assert_eq!(few.components_per_s, 100, "not more often than it is asked for");
        assert_eq!((needs.merged_per_s, needs.origin_looks_per_s), (100_000, 1_280));
        let alone = Load { regions: 1, ..load() }.needs();
        assert_eq!((alone.components_per_s, alone.wan_bits_per_s), (0, 0));
        assert_eq!((alone.merged_per_s, alone.origin_looks_per_s), (0, 0), "it has no replicator");
    }

    #[test]
    fn the_largest_load_fits() {
        let most = u64::MAX;
        let needs = Load {
            requests_per_s: most,
            keys: most,
            global_keys: most,
            limits: 128,
            key_bytes: 1_024,
            busy_percent: 1,
            surface: Surface::Grpc,
            ..load()
        };
        assert_eq!(needs.needs().table_bytes_per_node, most);
    }
}
