//! Servers of one region, on a store of their own, and what they and the store counted.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tempfile::TempDir;
use tidegate_testkit::{Redis, Server, ask, tidegate};

use super::case::rules_file;
use crate::scrape::{Metrics, cpu_time};

/// The table of each server: more than the keys of all cases need.
const MEMORY: &str = "256MB";

/// Servers that decide together, or each for itself if they have no store.
pub(super) struct Fleet {
    pub(super) servers: Vec<Server>,
    pub(super) redis: Option<Redis>,
    _folder: TempDir,
}

impl Fleet {
    /// Starts servers that share a store.
    pub(super) fn start(program: &Path, nodes: usize) -> Result<Self> {
        let redis = Redis::start(&[]);
        let url = redis.url();
        let mut fleet = Self::start_with(program, nodes, &["--origin", &url, "--region", "bench"])?;
        fleet.redis = Some(redis);
        Ok(fleet)
    }

    /// Starts servers that know nothing of each other.
    pub(super) fn start_apart(program: &Path, nodes: usize) -> Result<Self> {
        Self::start_with(program, nodes, &[])
    }

    fn start_with(program: &Path, nodes: usize, arguments: &[&str]) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let rules = folder.path().join("rules.toml");
        std::fs::write(&rules, rules_file())?;
        let rules = rules.to_str().context("a folder whose name is text")?;
        let common = ["--workers", "1", "--memory", MEMORY, "--grpc-listen", "off", "--rules", rules];
        let arguments = [&common[..], arguments].concat();
        let start = |_| {
            let mut command = tidegate(program, &[]);
            // That the origin is late now and then is in the table.
            command.env("TIDEGATE_LOG", "error");
            Server::start_as(command, &arguments)
        };
        let servers = (0..nodes).map(start).collect();
        Ok(Self { servers, redis: None, _folder: folder })
    }

    pub(super) fn addresses(&self, listener: &str) -> Vec<SocketAddr> {
        self.servers.iter().map(|server| server.address(listener)).collect()
    }

    /// What was counted so far, all servers together.
    pub(super) fn counts(&self) -> Result<Counts> {
        let mut all = Counts::default();
        for server in &self.servers {
            let metrics = Metrics::read(server.address("admin"))?;
            // A server that let nothing pass undecided tells of none.
            all.shed += metrics.sum("tidegate_decisions_total", "rung=\"shed\"")?.unwrap_or(0);
            if self.redis.is_some() {
                let told = |counter| -> Result<u64> {
                    metrics.sum(counter, "")?.with_context(|| format!("the server does not count {counter}"))
                };
                all.waited += told("tidegate_origin_waited_total")?;
                all.calls += told("tidegate_origin_calls_total")?;
                all.updates += told("tidegate_origin_updates_total")?;
            }
            all.cpu += cpu_time(server.process.id())?;
        }
        all.scripts = self.redis.as_ref().map_or(Ok(0), |redis| {
            let stats: String = ask(redis, &["INFO", "commandstats"]);
            scripts(&stats).with_context(|| format!("this tells of no scripts: {stats}"))
        })?;
        Ok(all)
    }
}

/// What servers and their store counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Questions that nobody had the time to decide.
    pub(super) shed: u64,
    /// Decisions that waited for a call.
    pub(super) waited: u64,
    /// Calls to the origin, as the servers count them.
    pub(super) calls: u64,
    /// What those calls were about: one for each meter in each call.
    pub(super) updates: u64,
    /// Scripts, as the store counts them.
    pub(super) scripts: u64,
    /// CPU time of the servers.
    pub(super) cpu: Duration,
}

impl Counts {
    pub(super) fn since(self, before: Self) -> Self {
        Self {
            shed: self.shed - before.shed,
            waited: self.waited - before.waited,
            calls: self.calls - before.calls,
            updates: self.updates - before.updates,
            scripts: self.scripts - before.scripts,
            cpu: self.cpu.saturating_sub(before.cpu),
        }
    }

    pub(super) fn plus(self, other: Self) -> Self {
        Self {
            shed: self.shed + other.shed,
            waited: self.waited + other.waited,
            calls: self.calls + other.calls,
            updates: self.updates + other.updates,
            scripts: self.scripts + other.scripts,
            cpu: self.cpu + other.cpu,
        }
    }
}

/// How many scripts a store has run; nothing if this is not about commands at all.
fn scripts(stats: &str) -> Option<u64> {
    stats.strip_prefix("# Commandstats")?;
    let lines = stats.lines().filter_map(|line| {
        line.strip_prefix("cmdstat_evalsha:").or_else(|| line.strip_prefix("cmdstat_eval:"))
    });
    let mut calls = lines.map(|rest| rest.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok());
    calls.try_fold(0, |sum, calls| Some(sum + calls?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scripts_are_counted_however_they_were_sent() {
        let stats = "# Commandstats\r\ncmdstat_ping:calls=9,usec=1\r\ncmdstat_evalsha:calls=40,usec=1,failed_calls=1\r\n\
                     cmdstat_eval:calls=2,usec=1\r\n";
        assert_eq!(scripts(stats), Some(42));
        assert_eq!(scripts("# Commandstats\r\n"), Some(0));
        assert_eq!(scripts("# Memory\r\n"), None);
    }
}
