//! `control`: the time from a change at one server until all servers of a rule store decide by it.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tidegate_load::{HttpConnection, check_body};
use tidegate_rules::change::{Operation, Proposal};
use tidegate_rules::rows::RowKind;
use tidegate_rules::store::{Attribution, Store};
use tidegate_testkit::{Postgres, Server, tidegate};

use crate::{machine, servers};

/// Longest p50 and p99 of a change, and the longest time of any emergency.
const CHANGE_P50_BAR: Duration = Duration::from_secs(1);
const CHANGE_P99_BAR: Duration = Duration::from_secs(5);
const EMERGENCY_BAR: Duration = Duration::from_secs(1);

/// Timeout of a change. A change that is not in force everywhere by then never will be.
const TIME_MAX: Duration = Duration::from_mins(1);

/// Timeout of a reply. A change of one row of a million compiles all of them twice.
const REPLY_TIME_MAX: Duration = Duration::from_mins(10);

/// Rules that one change of the beginning puts.
const RULES_AT_ONCE: usize = 5_000;

/// Servers that follow the store.
const NODES: u64 = 5;

/// Changes, and as many emergencies.
const CHANGES: u64 = 200;

#[derive(clap::Args)]
pub(crate) struct Args {
    /// Rules that the store holds.
    #[arg(long, value_name = "N", default_value_t = 1_000,
        value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    rules: u64,
    /// Run this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE")]
    tidegate: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    nodes: u64,
    rules: u64,
    changes: Spread,
    emergencies: Spread,
    bars: Vec<Bar>,
}

/// Milliseconds from the change at one server until the last server decides by it.
#[derive(Serialize)]
struct Spread {
    count: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

#[derive(Serialize)]
struct Bar {
    name: &'static str,
    most_ms: f64,
    found_ms: f64,
    held: bool,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let program = servers::tidegate(args.tidegate.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let report = runtime.block_on(measure(args, &program))?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        tell(&report);
    }
    let missed = report.bars.iter().filter(|bar| !bar.held).count();
    ensure!(missed == 0, "{missed} of {} bars were missed", report.bars.len());
    Ok(())
}

async fn measure(args: &Args, program: &Path) -> Result<Report> {
    let postgres = Postgres::start();
    let store = Store::open(&postgres.url("postgres").parse()?).await?;
    let folder = tempfile::tempdir()?;
    let mut revision = fill(&store, args.rules).await?;
    let servers: Result<Vec<Server>> = (0..NODES)
        .map(|node| start(program, &postgres.url("postgres"), &folder.path().join(node.to_string())))
        .collect();
    let servers = servers?;
    let addresses: Vec<SocketAddr> = servers.iter().map(|server| server.address("http")).collect();
    // The servers receive the changes in turn.
    let asked: Vec<SocketAddr> = servers.iter().map(|server| server.address("admin")).collect();
    let mut asked = asked.iter().cycle();
    let mut apply = |path: &str, body: &str, version: &str| {
        let (address, started) = (asked.next().context("a server")?, machine::now());
        post(*address, path, body)?;
        until_all_hold(&addresses, version, started)
    };
    let mut changes = Vec::new();
    for number in 1..=CHANGES {
        let change = change(1_000_000 + number, revision);
        revision += 1;
        changes.push(apply("/v1/rules/apply", &change, &format!("r{revision}e0"))?);
    }
    let mut emergencies = Vec::new();
    for number in 1..=CHANGES {
        let version = format!("r{revision}e{number}");
        emergencies.push(apply("/v1/emergencies", &emergency(number), &version)?);
    }
    let (changes, emergencies) = (spread(changes), spread(emergencies));
    let bars = vec![
        bar("a change, p50", CHANGE_P50_BAR, changes.p50_ms),
        bar("a change, p99", CHANGE_P99_BAR, changes.p99_ms),
        bar("an emergency, max", EMERGENCY_BAR, emergencies.max_ms),
    ];
    Ok(Report { nodes: NODES, rules: args.rules, changes, emergencies, bars })
}

fn start(program: &Path, url: &str, folder: &Path) -> Result<Server> {
    let data = folder.to_str().context("the folder name is not UTF-8")?;
    let mut command = tidegate(program, &[]);
    command.env("TIDEGATE_LOG", "error");
    let arguments = ["--workers", "1", "--rules", url, "--data-dir", data];
    Ok(Server::start_as(command, &arguments))
}

/// Returns the body of a change to the checked rule, for an admin listener.
fn change(limit: u64, base_revision: u64) -> String {
    let (name, body) = (name(0), body(0, limit));
    format!(
        r#"{{"operations":[{{"do":"put","kind":"rule","name":"{name}","body":{body}}}],
            "base_revision":{base_revision},"reason":"a measurement","confirmed":true}}"#
    )
}

/// The same emergency with another limit.
fn emergency(limit: u64) -> String {
    let rule = name(0);
    format!(
        r#"{{"id":"emergency","action":"limit","limit":{limit},"period":"1m",
            "rule":"{rule}","for":"30m","confirmed":true}}"#
    )
}

/// Puts all rules; gives the revision.
async fn fill(store: &Store, rules: u64) -> Result<u64> {
    let all: Vec<u64> = (0..rules).collect();
    let mut revision = 0;
    for some in all.chunks(RULES_AT_ONCE) {
        revision = apply(store, some.iter().map(|at| rule(*at, 1_000_000)).collect()).await?;
    }
    Ok(revision)
}

async fn apply(store: &Store, operations: Vec<Operation>) -> Result<u64> {
    let base_revision = store.revisions().await?.revision;
    let proposal = Proposal::new(base_revision, "a measurement", operations);
    let change = store.apply_new(&proposal, false, by()).await?;
    change.revision.context("it was applied")
}

fn name(at: u64) -> String {
    format!("rule-{at}")
}

fn body(at: u64, limit: u64) -> String {
    format!(r#"{{"key":["user"],"limit":{limit},"period":"1m","when":{{"path":"/v1/service-{at}"}}}}"#)
}

fn rule(at: u64, limit: u64) -> Operation {
    Operation::Put { kind: RowKind::Rule, name: name(at), body: body(at, limit) }
}

#[expect(clippy::disallowed_methods, reason = "servers compare changes by their time")]
fn by() -> Attribution<'static> {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Attribution { by: "bench", now_ms: now.as_millis() as u64 }
}

/// Checks all servers in turn until each decides by `version`. Returns the time since `started`.
fn until_all_hold(addresses: &[SocketAddr], version: &str, started: Instant) -> Result<Duration> {
    let expected = format!(r#""rules_version":"{version}""#);
    for address in addresses {
        while !decide(*address)?.contains(&expected) {
            ensure!(machine::now() - started < TIME_MAX, "{address} does not apply version {version}");
        }
    }
    Ok(machine::now() - started)
}

/// One decision under the rule that changes.
fn decide(address: SocketAddr) -> Result<String> {
    Ok(ask(address, "/v1/check", &check_body(&[("user", "a"), ("path", "/v1/service-0")], 1))?.1)
}

/// Posts to an admin listener, which must accept the request.
pub(crate) fn post(address: SocketAddr, path: &str, body: &str) -> Result<()> {
    let (status, answer) = ask(address, path, body)?;
    ensure!(status == 200, "{path}: {status}: {answer}");
    ensure!(answer.contains(r#""not_in_force":null"#), "{path}: {answer}");
    Ok(())
}

/// Posts over a connection of its own. Returns the status and the body of the reply.
fn ask(address: SocketAddr, path: &str, body: &str) -> Result<(u16, String)> {
    let mut connection = HttpConnection::open(address, REPLY_TIME_MAX)?;
    let reply = connection.post(path, body)?;
    Ok((reply.status, String::from_utf8_lossy(reply.body).into_owned()))
}

fn spread(mut all: Vec<Duration>) -> Spread {
    all.sort_unstable();
    let at = |part: f64| {
        let place = ((all.len() as f64 * part).ceil() as usize).clamp(1, all.len());
        all.get(place - 1).map_or(0.0, |took| took.as_secs_f64() * 1e3)
    };
    Spread { count: all.len(), p50_ms: at(0.5), p99_ms: at(0.99), max_ms: at(1.0) }
}

fn bar(name: &'static str, bar: Duration, found_ms: f64) -> Bar {
    let most_ms = bar.as_secs_f64() * 1e3;
    Bar { name, most_ms, found_ms, held: found_ms < most_ms }
}

fn tell(report: &Report) {
    let Report { nodes, rules, changes, emergencies, bars } = report;
    println!(
        "{nodes} servers, {rules} rules: time from a change at one server until the last server applies it"
    );
    for (label, Spread { count, p50_ms, p99_ms, max_ms }) in
        [("changes", changes), ("emergencies", emergencies)]
    {
        println!("  {count} {label:<12} p50 {p50_ms:>8.1} ms  p99 {p99_ms:>8.1} ms  max {max_ms:>8.1} ms");
    }
    for Bar { name, most_ms, found_ms, held } in bars {
        let held = if *held { "held" } else { "MISSED" };
        println!("  {name:<18} {found_ms:>8.1} ms of {most_ms:>6.0} {held}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spread_is_computed_from_measured_durations() {
        let found = spread((1..=200).map(Duration::from_millis).collect());
        assert_eq!((found.count, found.p50_ms, found.p99_ms, found.max_ms), (200, 100.0, 198.0, 200.0));
        let one = spread(vec![Duration::from_millis(3)]);
        assert_eq!((one.p50_ms, one.p99_ms), (3.0, 3.0));
    }
}
