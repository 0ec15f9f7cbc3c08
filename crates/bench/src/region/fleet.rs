//! The servers of one region with their own origin, and the counts of both.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};
use tidegate_testkit::{Redis, Server, ask};

use super::case::rules_file;
use crate::scrape::{Metrics, cpu_time};

/// The table of each server: more than the keys of all cases need.
const MEMORY: &str = "256MB";

/// The table of each server of a larger fleet, which has a few hundred keys.
const SMALL_MEMORY: &str = "64MB";

/// Arguments of servers that serve HTTP and RESP only.
const CASE_ARGUMENTS: [&str; 4] = ["--memory", MEMORY, "--grpc-listen", "off"];

/// The sources of decisions that the region's origin had a part in.
const REGION_SOURCES: [&str; 2] = ["=\"global\"", "=\"regional\""];

/// Servers that decide together, or each for itself if they have no store.
pub(super) struct BenchFleet {
    fleet: tidegate_testkit::ServerFleet,
    pub(super) redis: Option<Redis>,
}

impl BenchFleet {
    /// Starts servers that share a store.
    pub(super) fn start(program: &Path, nodes: usize) -> Self {
        Self::start_joined(program, nodes, &rules_file(), &CASE_ARGUMENTS)
    }

    /// Starts servers that share a store and wait for it as long as `origin_timeout` states.
    pub(super) fn start_with_timeout(program: &Path, nodes: usize, origin_timeout: Option<&str>) -> Self {
        let mut arguments = CASE_ARGUMENTS.to_vec();
        arguments.extend(origin_timeout.into_iter().flat_map(|timeout| ["--origin-timeout", timeout]));
        Self::start_joined(program, nodes, &rules_file(), &arguments)
    }

    /// Starts servers that share a store, with other rules and every listener.
    pub(super) fn start_with_rules(program: &Path, nodes: usize, rules: &str) -> Self {
        Self::start_joined(program, nodes, rules, &["--memory", SMALL_MEMORY])
    }

    /// Starts servers without an origin.
    pub(super) fn start_apart(program: &Path, nodes: usize) -> Self {
        Self { fleet: start_servers(program, nodes, &rules_file(), &CASE_ARGUMENTS), redis: None }
    }

    fn start_joined(program: &Path, nodes: usize, rules: &str, arguments: &[&str]) -> Self {
        let redis = Redis::start(&[]);
        let url = redis.url();
        let arguments = [arguments, &["--origin", &url, "--region", "bench"]].concat();
        Self { fleet: start_servers(program, nodes, rules, &arguments), redis: Some(redis) }
    }

    pub(super) fn servers(&self) -> &[Server] {
        &self.fleet.servers
    }

    pub(super) fn addresses(&self, listener: &str) -> Vec<SocketAddr> {
        self.fleet.addresses(listener)
    }

    /// Returns the counts so far, all servers together.
    pub(super) fn counts(&self) -> Result<Counts> {
        let mut all = Counts::default();
        for server in self.servers() {
            let metrics = Metrics::read(server.address("admin"))?;
            // An absent counter means 0.
            all.shed += metrics.sum("tidegate_decisions_total", "source=\"shed\"")?.unwrap_or(0);
            all.elsewhere += decided_elsewhere(&metrics)?;
            if self.redis.is_some() {
                let count = |counter| -> Result<u64> {
                    metrics.sum(counter, "")?.with_context(|| format!("the server has no counter {counter}"))
                };
                all.waited += count("tidegate_origin_waited_total")?;
                all.calls += count("tidegate_origin_calls_total")?;
                all.updates += count("tidegate_origin_updates_total")?;
            }
            all.cpu += cpu_time(server.process.id())?;
        }
        if let Some(redis) = &self.redis {
            let stats: String = ask(redis, &["INFO", "commandstats"]);
            all.scripts = scripts(&stats).with_context(|| format!("Redis reports no scripts: {stats}"))?;
            let usage: String = ask(redis, &["INFO", "cpu"]);
            all.origin_cpu =
                redis_cpu(&usage).with_context(|| format!("Redis reports no CPU times: {usage}"))?;
        }
        Ok(all)
    }
}

fn start_servers(
    program: &Path,
    nodes: usize,
    rules: &str,
    arguments: &[&str],
) -> tidegate_testkit::ServerFleet {
    let arguments = [&["--workers", "1"], arguments].concat();
    // The report shows how often the origin was late, so the servers need not log it.
    tidegate_testkit::ServerFleet::new(program, rules, &arguments).with_errors_only().with_servers(nodes)
}

/// Decisions of a server that the region's origin had no part in.
fn decided_elsewhere(metrics: &Metrics) -> Result<u64> {
    let decisions =
        |label| -> Result<u64> { Ok(metrics.sum("tidegate_decisions_total", label)?.unwrap_or(0)) };
    let mut elsewhere = decisions("")?;
    for source in REGION_SOURCES {
        elsewhere -= decisions(source)?;
    }
    Ok(elsewhere)
}

/// Counts of the servers and their origin.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    /// Checks that overloaded servers shed.
    pub(super) shed: u64,
    /// Decisions that the region's origin had no part in, `shed` among them.
    pub(super) elsewhere: u64,
    /// Decisions that waited for a call.
    pub(super) waited: u64,
    /// Calls to the origin, as the servers count them.
    pub(super) calls: u64,
    /// Meters in those calls: one for each meter in each call.
    pub(super) updates: u64,
    /// Scripts, as the store counts them.
    pub(super) scripts: u64,
    /// CPU time of the servers.
    pub(super) cpu: Duration,
    /// CPU time of the store.
    pub(super) origin_cpu: Duration,
}

impl Counts {
    pub(super) fn since(self, before: Self) -> Self {
        self.combine(before, |one, other| one - other, Duration::saturating_sub)
    }

    pub(super) fn plus(self, other: Self) -> Self {
        self.combine(other, |one, other| one + other, |one, other| one + other)
    }

    fn combine(
        self,
        other: Self,
        count: fn(u64, u64) -> u64,
        time: fn(Duration, Duration) -> Duration,
    ) -> Self {
        Self {
            shed: count(self.shed, other.shed),
            elsewhere: count(self.elsewhere, other.elsewhere),
            waited: count(self.waited, other.waited),
            calls: count(self.calls, other.calls),
            updates: count(self.updates, other.updates),
            scripts: count(self.scripts, other.scripts),
            cpu: time(self.cpu, other.cpu),
            origin_cpu: time(self.origin_cpu, other.origin_cpu),
        }
    }
}

/// Returns the number of scripts that Redis has run; `None` if `stats` is not the section of
/// commands.
fn scripts(stats: &str) -> Option<u64> {
    stats.strip_prefix("# Commandstats")?;
    let lines = stats.lines().filter_map(|line| {
        line.strip_prefix("cmdstat_evalsha:").or_else(|| line.strip_prefix("cmdstat_eval:"))
    });
    let mut calls = lines.map(|rest| rest.strip_prefix("calls=")?.split(',').next()?.parse::<u64>().ok());
    calls.try_fold(0, |sum, calls| Some(sum + calls?))
}

/// The CPU time of Redis, user and system, by its `INFO cpu`.
fn redis_cpu(usage: &str) -> Option<Duration> {
    let seconds = |name: &str| {
        let value = usage.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        Duration::try_from_secs_f64(value.trim().parse().ok()?).ok()
    };
    Some(seconds("used_cpu_user")? + seconds("used_cpu_sys")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_time_of_redis_is_that_of_its_process_and_not_of_its_children() {
        let usage = "# CPU\r\nused_cpu_sys:1.250000\r\nused_cpu_user:2.500000\r\n\
                     used_cpu_sys_children:7.000000\r\nused_cpu_user_children:8.000000\r\n";
        assert_eq!(redis_cpu(usage), Some(Duration::from_millis(3_750)));
        assert_eq!(redis_cpu("# CPU\r\nused_cpu_sys:1.25\r\n"), None);
    }

    #[test]
    fn scripts_are_counted_however_they_were_sent() {
        let stats = "# Commandstats\r\ncmdstat_ping:calls=9,usec=1\r\n\
                     cmdstat_evalsha:calls=40,usec=1,failed_calls=1\r\n\
                     cmdstat_eval:calls=2,usec=1\r\n";
        assert_eq!(scripts(stats), Some(42));
        assert_eq!(scripts("# Commandstats\r\n"), Some(0));
        assert_eq!(scripts("# Memory\r\n"), None);
    }
}
