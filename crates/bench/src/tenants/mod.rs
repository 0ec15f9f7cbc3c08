//! `tenants`: a tenant with a comfort limit and a security rule, alone and beside a hostile tenant
//! of the same server.

mod lookups;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::Serialize;
use tidegate_load::{HostileTenant, TENANTS_CONFIG, TenantAttack, VICTIM_RULES, VictimReport, VictimTenant};
use tidegate_testkit::{Server, tidegate};

use self::lookups::LookupCost;
use crate::scrape::Metrics;
use crate::{machine, servers};

/// Most times the p99 of the victim may grow under an attack.
const GROWTH_BAR: f64 = 1.5;

/// Connections of the victim, and the interval between two checks of each.
const VICTIM_CONNECTIONS: u32 = 4;
const VICTIM_EVERY: Duration = Duration::from_millis(10);

#[derive(clap::Args)]
pub(crate) struct Args {
    /// How long the victim checks, alone and under each attack.
    #[arg(long, value_name = "N", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..=300))]
    seconds: u64,
    /// Connections of the hostile tenant.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    attackers: u64,
    /// Measure lookups only, without a server.
    #[arg(long)]
    lookups: bool,
    /// Run this build of tidegate, instead of the one of this checkout.
    #[arg(long, value_name = "FILE")]
    tidegate: Option<PathBuf>,
    /// Print one JSON object.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    lookups: Vec<LookupCost>,
    rows: Vec<Row>,
}

/// The decisions and latencies of the victim, alone or under an attack.
#[derive(Serialize)]
struct Row {
    attack: &'static str,
    checks: u64,
    /// Decisions that differ from those of a calm server.
    unexpected: u64,
    /// Checks that were shed, failed closed, or had no decision.
    without_meter: u64,
    p50_ms: f64,
    p99_ms: f64,
    /// The p99 in units of that without an attack.
    growth: f64,
    /// Requests of the hostile tenant, those of them that were shed, and its part of the workers'
    /// time.
    hostile_requests: u64,
    hostile_shed: u64,
    hostile_time: f64,
}

/// The counters of both tenants.
struct TenantCounters {
    hostile_shed: u64,
    hostile_s: f64,
    victim_s: f64,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut report = Report { lookups: LookupCost::all()?, rows: Vec::new() };
    if !args.lookups {
        let program = servers::tidegate(args.tidegate.as_deref())?;
        report.rows = measure(args, &program)?;
    }
    if args.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        report.print();
    }
    let missed = report.missed();
    ensure!(missed == 0, "{missed} bars were missed");
    Ok(())
}

fn measure(args: &Args, program: &Path) -> Result<Vec<Row>> {
    let mut rows = vec![alone(args, program)?];
    let calm_ms = rows.first().map_or(0.0, |row| row.p99_ms);
    for attack in TenantAttack::ALL {
        rows.push(attacked(args, program, attack, calm_ms)?);
    }
    Ok(rows)
}

fn alone(args: &Args, program: &Path) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let server = start(program, folder.path())?;
    let report = check(args, &server)?;
    Ok(Row::new("none", &report, None))
}

fn attacked(args: &Args, program: &Path, attack: TenantAttack, calm_ms: f64) -> Result<Row> {
    let folder = tempfile::tempdir()?;
    let server = start(program, folder.path())?;
    let (address, connections) = (server.address("http"), args.attackers as usize);
    let hostile = HostileTenant { address, attack, connections };
    hostile.prepare()?;
    let before = TenantCounters::read(&server)?;
    let (report, progress) = hostile.attack(|_| check(args, &server))?;
    let after = TenantCounters::read(&server)?;
    let report = report?;
    let mut row = Row::new(attack.as_str(), &report, Some(calm_ms));
    let (hostile_s, victim_s) = (after.hostile_s - before.hostile_s, after.victim_s - before.victim_s);
    row.hostile_requests = progress.replies();
    row.hostile_shed = after.hostile_shed - before.hostile_shed;
    row.hostile_time = hostile_s / (hostile_s + victim_s).max(f64::MIN_POSITIVE);
    Ok(row)
}

fn start(program: &Path, folder: &Path) -> Result<Server> {
    let (config, rules) = (folder.join("tidegate.toml"), folder.join("rules.toml"));
    std::fs::write(&config, TENANTS_CONFIG)?;
    std::fs::write(&rules, VICTIM_RULES)?;
    let path = |path: &'_ Path| path.to_str().map(str::to_owned).context("the folder name is not UTF-8");
    let (config, rules) = (path(&config)?, path(&rules)?);
    let mut command = tidegate(program, &[]);
    command.env("TIDEGATE_LOG", "error");
    Ok(Server::start_as(command, &["--config", &config, "--rules", &rules]))
}

/// Lets the victim check for the time of a row.
fn check(args: &Args, server: &Server) -> Result<VictimReport> {
    let (connections, every) = (VICTIM_CONNECTIONS, Some(VICTIM_EVERY));
    let victim = VictimTenant { address: server.address("http"), connections, every };
    let ends = machine::now() + Duration::from_secs(args.seconds);
    Ok(victim.check("key", |_| machine::now() < ends)?)
}

impl TenantCounters {
    fn read(server: &Server) -> Result<Self> {
        let metrics = Metrics::read_as("known", server.address("admin"))?;
        let time = |tenant: &str| metrics.number("tidegate_tenant_time_seconds_total", tenant);
        Ok(Self {
            // A build without these counters has no sheds of a tenant to report.
            hostile_shed: metrics.sum("tidegate_tenant_shed_total", "\"hostile\"")?.unwrap_or(0),
            hostile_s: time("\"hostile\"")?,
            victim_s: time("\"victim\"")?,
        })
    }
}

impl Row {
    fn new(attack: &'static str, report: &VictimReport, calm_ms: Option<f64>) -> Self {
        let ms = |per_mille| report.latency(per_mille).as_secs_f64() * 1e3;
        let by_meters = report.sources.get("local").copied().unwrap_or(0);
        Self {
            attack,
            checks: report.checks,
            unexpected: report.unexpected,
            without_meter: report.checks - by_meters,
            p50_ms: ms(500),
            p99_ms: ms(990),
            growth: calm_ms.map_or(1.0, |calm_ms| ms(990) / calm_ms),
            hostile_requests: 0,
            hostile_shed: 0,
            hostile_time: 0.0,
        }
    }

    fn bars(&self) -> [bool; 2] {
        [self.unexpected == 0 && self.without_meter == 0, self.growth <= GROWTH_BAR]
    }
}

impl Report {
    fn missed(&self) -> usize {
        let of_rows = self.rows.iter().flat_map(Row::bars).filter(|held| !held).count();
        of_rows + self.lookups.iter().filter(|lookup| !lookup.is_held()).count()
    }

    fn print(&self) {
        println!("1,000 overrides with a `*`: CPU time for 100 identifiers of 512 characters, and for one");
        self.lookups.iter().for_each(LookupCost::print);
        if self.rows.is_empty() {
            return;
        }
        println!("a victim with a comfort limit and a security rule, beside a hostile tenant");
        println!(
            "  {:<10} {:>7} {:>10} {:>13} {:>8} {:>8} {:>6}  {:>9} {:>9} {:>5}",
            "attack",
            "checks",
            "unexpected",
            "without meter",
            "p50 ms",
            "p99 ms",
            "p99 x",
            "attacks",
            "shed",
            "time"
        );
        for row in &self.rows {
            let [decisions, growth] = row.bars().map(|held| if held { "" } else { " MISSED" });
            println!(
                "  {:<10} {:>7} {:>10} {:>13} {:>8.2} {:>8.2} {:>6.2}  {:>9} {:>9} {:>4.0}%{decisions}{growth}",
                row.attack,
                row.checks,
                row.unexpected,
                row.without_meter,
                row.p50_ms,
                row.p99_ms,
                row.growth,
                row.hostile_requests,
                row.hostile_shed,
                row.hostile_time * 100.0
            );
        }
    }
}
