//! A Redis cluster of three masters with a replica each.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};

use super::{Redis, ask};
use crate::wait::{START_TIME_MAX, wait_until};

/// Masters and replicas together.
const SERVERS: usize = 6;

/// Number of keys to move at once. With one at a time, the keys of one script would be on two
/// servers for longer.
const MOVED_AT_ONCE: &str = "2";

/// Three masters, each with a replica.
#[derive(Debug)]
pub struct Cluster {
    /// Its servers, in no order of roles.
    pub servers: Vec<Redis>,
}

impl Cluster {
    /// Starts the servers and joins them.
    pub fn start() -> Self {
        let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes"];
        let servers: Vec<Redis> = (0..SERVERS).map(|_| Redis::start(&arguments)).collect();
        let addresses: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
        let mut create = vec!["create"];
        create.extend(addresses.iter().map(String::as_str));
        create.extend(["--cluster-replicas", "1"]);
        let cluster = Self { servers };
        Self::manage(&create);
        cluster.wait_until_whole();
        cluster
    }

    /// Returns the URLs of all servers, for clients.
    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Redis::url).collect()
    }

    /// Returns the cluster as one URL, for servers of a region.
    pub fn url(&self) -> String {
        let hosts: Vec<String> = self.servers.iter().map(|server| server.address().to_string()).collect();
        format!("redis-cluster://{}", hosts.join(","))
    }

    /// Runs a command of `redis-cli --cluster`.
    pub fn manage(arguments: &[&str]) {
        let mut command = Command::new("redis-cli");
        command.arg("--cluster").args(arguments).arg("--cluster-yes").stdout(Stdio::null());
        assert!(command.status().expect("redis-cli runs").success(), "{arguments:?}");
    }

    /// Waits until all servers agree on the owners of slots.
    pub fn wait_until_agreed(&self) {
        let address = self.servers[0].address().to_string();
        wait_until("the nodes of the cluster to agree", START_TIME_MAX, || {
            let mut command = Command::new("redis-cli");
            command.args(["--cluster", "check", &address]).stdout(Stdio::null());
            command.status().expect("redis-cli runs").success()
        });
    }

    /// Waits until all servers see an owner for every slot, and every replica is connected to its
    /// master.
    pub fn wait_until_whole(&self) {
        wait_until("the cluster to serve all slots", START_TIME_MAX, || {
            self.servers.iter().all(|server| {
                let info: String = ask(server, &["CLUSTER", "INFO"]);
                let replication: String = ask(server, &["INFO", "replication"]);
                let hears = replication.contains("master_link_status:up");
                info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_assigned:16384")
                    && info.contains(&format!("cluster_known_nodes:{SERVERS}"))
                    && (replication.contains("connected_slaves:1") || hears)
            })
        });
    }

    /// Returns the cluster's id of a server.
    pub fn id(&self, server: usize) -> String {
        ask(&self.servers[server], &["CLUSTER", "MYID"])
    }

    /// Whether a server is a master now.
    pub fn is_master(&self, server: usize) -> bool {
        ask::<String>(&self.servers[server], &["INFO", "replication"]).contains("role:master")
    }

    /// The servers that are masters now.
    pub fn masters(&self) -> Vec<usize> {
        (0..SERVERS).filter(|server| self.is_master(*server)).collect()
    }

    /// The slots of keys.
    pub fn slots(&self, keys: &[String]) -> Vec<u64> {
        let mut slots = redis::pipe();
        for key in keys {
            slots.cmd("CLUSTER").arg("KEYSLOT").arg(key);
        }
        slots.query(&mut self.servers[0].connection()).expect("slots")
    }

    /// Moves a slot with all its keys to another master, as `redis-cli --cluster` does, while
    /// clients use them.
    pub fn move_slot(&self, slot: u64, to: usize) {
        let masters = self.masters();
        // A server with a stale view of the last move may cede its slots to one that no longer owns
        // them.
        wait_until("all masters to report the same slots", START_TIME_MAX, || {
            let mut views = masters.iter().map(|master| view(&self.servers[*master]));
            let first = views.next();
            views.all(|view| first.as_ref() == Some(&view))
        });
        let from = masters.iter().copied().find(|master| owns(&self.servers[*master], slot));
        let from = from.expect("an owner");
        if from == to {
            return;
        }
        let (from_id, to_id, number) = (self.id(from), self.id(to), slot.to_string());
        let set = |server: usize, state: &str, id: &str| {
            ask::<String>(&self.servers[server], &["CLUSTER", "SETSLOT", &number, state, id]);
        };
        set(to, "IMPORTING", &from_id);
        set(from, "MIGRATING", &to_id);
        let port = self.servers[to].port().to_string();
        loop {
            // Names of meters are bytes.
            let keys: Vec<Vec<u8>> =
                ask(&self.servers[from], &["CLUSTER", "GETKEYSINSLOT", &number, MOVED_AT_ONCE]);
            if keys.is_empty() {
                break;
            }
            let mut migrate = redis::cmd("MIGRATE");
            migrate.arg(&["127.0.0.1", &port, "", "0", "10000", "KEYS"]).arg(keys);
            migrate.exec(&mut self.servers[from].connection()).expect("moves");
        }
        // The new owner comes first, so that the slot always has an owner.
        set(to, "NODE", &to_id);
        for master in masters.into_iter().filter(|master| *master != to) {
            set(master, "NODE", &to_id);
        }
    }

    /// Returns the running master that owns a key.
    pub fn owner(&self, key: &str) -> Option<usize> {
        let running: Vec<usize> =
            (0..SERVERS).filter(|server| self.servers[*server].try_connection().is_ok()).collect();
        let slot: u64 = ask(&self.servers[*running.first()?], &["CLUSTER", "KEYSLOT", key]);
        running.into_iter().find(|server| self.is_master(*server) && owns(&self.servers[*server], slot))
    }

    /// The master that owns a key, and its replica.
    pub fn owner_and_replica(&self, key: &str) -> (usize, usize) {
        let master = self.owner(key).expect("an owner");
        let follows = format!("master_port:{}", self.servers[master].port());
        let replica = (0..SERVERS).find(|server| {
            ask::<String>(&self.servers[*server], &["INFO", "replication"]).contains(&follows)
        });
        (master, replica.expect("a replica"))
    }
}

/// Returns the slot assignment as a server sees it: id, configuration epoch and slots of each
/// master.
fn view(server: &Redis) -> BTreeSet<Vec<String>> {
    let nodes: String = ask(server, &["CLUSTER", "NODES"]);
    let masters = nodes.lines().filter(|line| line.contains("master"));
    // Moving slots are in brackets, and only in the views of the servers involved.
    let known = |line: &str| {
        let fields = line
            .split(' ')
            .enumerate()
            .filter(|(at, field)| matches!(at, 0 | 6) || (*at >= 8 && !field.starts_with('[')));
        fields.map(|(_, field)| field.to_owned()).collect()
    };
    masters.map(known).collect()
}

fn owns(server: &Redis, slot: u64) -> bool {
    let nodes: String = ask(server, &["CLUSTER", "NODES"]);
    let myself = nodes.lines().find(|line| line.contains("myself")).expect("knows itself");
    myself.split(' ').skip(8).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        matches!((first.parse::<u64>(), last.parse::<u64>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
    })
}
