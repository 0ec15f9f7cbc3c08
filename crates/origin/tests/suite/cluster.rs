//! A Redis cluster of three masters with a replica each.

use std::process::{Command, Stdio};

use tidegate_origin::PARTITIONS;

use crate::support::{START_TIME_MAX, Server, wait_until};

pub struct Cluster {
    pub servers: Vec<Server>,
}

impl Cluster {
    pub fn start() -> Self {
        let arguments = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--appendonly", "yes"];
        let servers: Vec<Server> = (0..6).map(|_| Server::start(&arguments)).collect();
        let addresses: Vec<String> = servers.iter().map(|server| server.address().to_string()).collect();
        let mut create = vec!["create"];
        create.extend(addresses.iter().map(String::as_str));
        create.extend(["--cluster-replicas", "1"]);
        let cluster = Self { servers };
        Self::manage(&create);
        cluster.wait_until_whole();
        cluster
    }

    pub fn urls(&self) -> Vec<String> {
        self.servers.iter().map(Server::url).collect()
    }

    /// Runs a command of `redis-cli --cluster`.
    pub fn manage(arguments: &[&str]) {
        let mut command = Command::new("redis-cli");
        command.arg("--cluster").args(arguments).arg("--cluster-yes").stdout(Stdio::null());
        assert!(command.status().expect("redis-cli runs").success(), "{arguments:?}");
    }

    /// Everyone agrees on who owns what.
    pub fn wait_until_agreed(&self) {
        let address = self.servers[0].address().to_string();
        wait_until("the cluster to agree", START_TIME_MAX, || {
            let mut command = Command::new("redis-cli");
            command.args(["--cluster", "check", &address]).stdout(Stdio::null());
            command.status().expect("redis-cli runs").success()
        });
    }

    /// Every slot has an owner, in everyone's eyes, and every replica hears its master.
    pub fn wait_until_whole(&self) {
        wait_until("the cluster to be whole", START_TIME_MAX, || {
            self.servers.iter().all(|server| {
                let info: String = ask(server, &["CLUSTER", "INFO"]);
                let replication: String = ask(server, &["INFO", "replication"]);
                let hears = replication.contains("master_link_status:up");
                info.contains("cluster_state:ok")
                    && info.contains("cluster_slots_assigned:16384")
                    && info.contains("cluster_known_nodes:6")
                    && (replication.contains("connected_slaves:1") || hears)
            })
        });
    }

    pub fn id(&self, server: usize) -> String {
        ask(&self.servers[server], &["CLUSTER", "MYID"])
    }

    pub fn is_master(&self, server: usize) -> bool {
        ask::<String>(&self.servers[server], &["INFO", "replication"]).contains("role:master")
    }

    /// The partitions whose slots are below `end`.
    pub fn partitions_below(&self, end: u64) -> Vec<u16> {
        let mut connection = self.servers[0].connection();
        let mut slots = redis::pipe();
        for partition in 0..PARTITIONS {
            slots.cmd("CLUSTER").arg("KEYSLOT").arg(format!("tg:{{{partition}}}:s"));
        }
        let slots: Vec<u64> = slots.query(&mut connection).expect("slots");
        (0..PARTITIONS).zip(slots).filter(|(_, slot)| *slot < end).map(|(partition, _)| partition).collect()
    }

    /// The master that owns a partition, of those that run.
    pub fn owner(&self, partition: u16) -> Option<usize> {
        let running: Vec<usize> =
            (0..6).filter(|server| self.servers[*server].try_connection().is_ok()).collect();
        let key = format!("tg:{{{partition}}}:s");
        let slot: u64 = ask(&self.servers[*running.first()?], &["CLUSTER", "KEYSLOT", &key]);
        running.into_iter().find(|server| self.is_master(*server) && owns(&self.servers[*server], slot))
    }

    /// The master that owns a partition, and its replica.
    pub fn of_partition(&self, partition: u16) -> (usize, usize) {
        let master = self.owner(partition).expect("an owner");
        let port = self.servers[master].port().to_string();
        let replica = (0..6).find(|server| {
            let info: String = ask(&self.servers[*server], &["INFO", "replication"]);
            info.contains(&format!("master_port:{port}"))
        });
        (master, replica.expect("a replica"))
    }
}

fn owns(server: &Server, slot: u64) -> bool {
    let nodes: String = ask(server, &["CLUSTER", "NODES"]);
    let myself = nodes.lines().find(|line| line.contains("myself")).expect("knows itself");
    myself.split(' ').skip(8).any(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        matches!((first.parse::<u64>(), last.parse::<u64>()), (Ok(first), Ok(last)) if (first..=last).contains(&slot))
    })
}

pub fn ask<T: redis::FromRedisValue>(server: &Server, command: &[&str]) -> T {
    redis::cmd(command[0]).arg(&command[1..]).query(&mut server.connection()).expect("an answer")
}
