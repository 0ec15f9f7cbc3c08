//! Three regions, and the way between them.

use std::time::Duration;

use serde_json::Value;
use tidegate_testkit::{Proxy, REGIONS, Regions, ServerFleet, Traffic, wait_until};

use crate::client::{Client, TIME_MAX, lasts};
use crate::support::{fleet, tidegate};

/// One-way delay between two regions.
const WAY: Duration = Duration::from_millis(80);

/// One reply in this many is lost, with its connection.
const LOST_ONE_IN: u32 = 50;

/// Interval at which the test reads lags.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Regions that count together.
pub struct World {
    pub ground: Regions,
}

impl World {
    /// Three regions of so many servers each, with these rules and these arguments besides.
    pub fn start(rules: &str, count: usize, arguments: &[&str]) -> Self {
        let traffic = Traffic::Far(WAY, LOST_ONE_IN);
        Self { ground: Regions::start(servers(rules, arguments), count, traffic) }
    }

    /// The same without delay. The test can hold back all traffic of a server to peer regions and
    /// to its Redis.
    pub fn start_on_wires(rules: &str, count: usize, arguments: &[&str]) -> Self {
        Self { ground: Regions::start_on_wires(servers(rules, arguments), count) }
    }

    /// Replaces each server that is gone.
    pub fn replace_gone(&mut self) {
        for place in self.ground.places() {
            if !self.ground.regions[place.0].servers[place.1].process.is_running() {
                self.ground.replace(place);
            }
        }
    }

    /// Cuts all traffic between `region` and its peers, or restores it with the former delay and
    /// losses.
    pub fn cut_off(&self, region: usize, is_cut: bool) {
        self.set(region, if is_cut { Traffic::HalfOpen } else { Traffic::Far(WAY, LOST_ONE_IN) });
    }

    /// The same, without losses while the links are up.
    pub fn flap(&self, region: usize, is_cut: bool) {
        self.set(region, if is_cut { Traffic::HalfOpen } else { Traffic::Far(WAY, u32::MAX) });
    }

    fn set(&self, region: usize, traffic: Traffic) {
        self.ground.set(|from, to| from == region || to == region, traffic);
    }

    /// Waits for this time. Returns the longest lag that a replicator reported meanwhile, ms.
    pub fn watch_lags(&self, time: Duration) -> u64 {
        let mut longest = 0;
        for _ in 0..time.as_millis() / LOOK_EVERY.as_millis() {
            lasts(LOOK_EVERY);
            for place in self.ground.places() {
                let peers = self.abroad(place)["peers"].as_array().cloned().unwrap_or_default();
                longest = peers.iter().filter_map(|peer| peer["lag_ms"].as_u64()).fold(longest, u64::max);
            }
        }
        longest
    }

    pub fn client(&self, at: (usize, usize)) -> Client {
        Client::of(self.ground.server(at))
    }

    /// Returns the replication status of a server.
    pub fn abroad(&self, at: (usize, usize)) -> Value {
        let mut answer =
            ureq::get(self.ground.server(at).url("admin", "/v1/regions")).call().expect("regions");
        let text = answer.body_mut().read_to_string().expect("text");
        serde_json::from_str::<Value>(&text).expect("JSON")["replication"].clone()
    }

    /// The server of a region that is its replicator, once one is.
    pub fn replicator(&self, region: usize) -> usize {
        let mut found = None;
        wait_until("a replicator", TIME_MAX, || {
            let servers = 0..self.ground.regions[region].servers.len();
            found = servers.into_iter().find(|server| self.abroad((region, *server))["replicator"] == true);
            found.is_some()
        });
        found.expect("waited for")
    }

    /// Waits until the replicator of each region is connected to those of all others.
    pub fn wait_for_links(&self) {
        let is_linked = |region: usize| {
            let peers = self.abroad((region, self.replicator(region)))["peers"].clone();
            peers.as_array().is_some_and(|peers| peers.iter().all(|peer| peer["linked"] == true))
        };
        wait_until("replicators to be connected", TIME_MAX, || (0..REGIONS.len()).all(is_linked));
    }

    /// Returns how many replies of peers were lost, each with its connection.
    pub fn lost(&self) -> u32 {
        let ways = |from| (0..REGIONS.len()).flat_map(move |to| self.ground.ways(from, to));
        let lost: u64 = self.ground.places().into_iter().flat_map(ways).map(Proxy::lost).sum();
        u32::try_from(lost).expect("few")
    }

    /// Waits until all regions are connected, or until none is.
    pub fn wait_for_connected(&self, is_connected: bool) {
        let is_so =
            |region: usize| self.abroad((region, self.replicator(region)))["connected"] == is_connected;
        wait_until("the regions to be whole, or not", TIME_MAX, || (0..REGIONS.len()).all(is_so));
    }

    /// Returns the output of `tidegate bound --json` for a rule, with further arguments.
    pub fn bound(&self, rule: &str, arguments: &[&str]) -> Value {
        let server = format!("http://{}", self.ground.server((0, 0)).address("admin"));
        let said =
            tidegate(&["bound", "--json", "--server", &server]).args(arguments).output().expect("runs");
        assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        let answer: Value = serde_json::from_slice(&said.stdout).expect("JSON");
        let bounds = answer["bounds"].as_array().expect("bounds");
        bounds.iter().find(|bound| bound["rule"] == rule).expect("the rule").clone()
    }

    /// Returns the remaining units of a key and the decision source, as a server replies.
    pub fn remaining(&self, at: (usize, usize), dimension: &str, key: &str) -> (u64, String) {
        let answer = self.client(at).check(&[(dimension, key)], 0);
        (answer.body["rules"][0]["remaining"].as_u64().expect("a number"), answer.source)
    }
}

/// Servers with these rules and these arguments besides their place.
fn servers(rules: &str, arguments: &[&str]) -> ServerFleet {
    // The tests examine traffic between regions, so a busy machine may delay the origins.
    fleet(rules, &[&["--workers", "1", "--origin-timeout", "2s"], arguments].concat())
}
