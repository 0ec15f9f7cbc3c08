//! A server that starts on a store with a million rows: from its process to its rules in force,
//! with all that it does for it.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;
use serde::Serialize;
use tidegate_rules::change::{OPERATIONS_MAX, Operation, Proposal};
use tidegate_rules::rows::RuleRow;
use tidegate_rules::store::{Attribution, Store};
use tidegate_testkit::{Postgres, Server, tidegate};

use super::{Args, LOAD_BAR, MISSED, held, overridden_rows, plain_rows};
use crate::control::post;
use crate::{machine, servers};

/// The kind of rule store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum RowStore {
    /// A file.
    Sqlite,
    /// A server that is started for it.
    Postgres,
}

#[derive(Serialize)]
struct Report {
    set: &'static str,
    rows: usize,
    /// Wall time from the start of the process until it answers by these rules.
    start_s: f64,
    /// The same for a server with an empty rule store.
    start_empty_s: f64,
    start: &'static str,
    resident_bytes: u64,
    /// Resident memory of a server with an empty rule store.
    resident_empty_bytes: u64,
    /// Peak memory: the rule rows, the compiled rule set, and the memory used to compile it.
    peak_bytes: u64,
    /// Wall time from the request for a change of one row until it is in force, and the peak memory
    /// until then. The rule set is compiled to plan the change, and again to apply it, beside the
    /// one in force.
    change_s: f64,
    change_peak_bytes: u64,
}

pub(super) fn run(kept: RowStore, args: &Args) -> Result<()> {
    let program = servers::tidegate(args.tidegate.as_deref())?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let reports = [
        runtime.block_on(measure("overridden", kept, &program, overridden_rows(args.rows)))?,
        runtime.block_on(measure("plain", kept, &program, plain_rows(args.rows)))?,
    ];
    if args.json {
        println!("{}", serde_json::to_string(&reports)?);
    } else {
        reports.iter().for_each(print);
    }
    let missed = reports.iter().filter(|report| report.start == MISSED).count();
    ensure!(missed == 0, "{missed} bars were missed");
    Ok(())
}

fn print(report: &Report) {
    let Report { set, rows, start_s, start_empty_s, start, .. } = report;
    println!("{set}: {rows} rows in a store");
    println!(
        "  start  {start_s:>8.2} s  of {:>6.0} {start:<7} an empty store {start_empty_s:.2} s",
        LOAD_BAR.as_secs_f64()
    );
    let per_row = |bytes: u64| bytes.saturating_sub(report.resident_empty_bytes) as f64 / *rows as f64;
    println!("  change {:>8.2} s  of one row", report.change_s);
    for (label, bytes) in [
        ("keep  ", report.resident_bytes),
        ("peak  ", report.peak_bytes),
        ("change", report.change_peak_bytes),
    ] {
        println!(
            "  {label} {:>8.0} MB, {:.0} bytes/row more than an empty store",
            bytes as f64 / 1e6,
            per_row(bytes)
        );
    }
}

async fn measure(
    set: &'static str,
    kept: RowStore,
    program: &Path,
    rows: impl Iterator<Item = RuleRow>,
) -> Result<Report> {
    let folder = tempfile::tempdir()?;
    let postgres = (kept == RowStore::Postgres).then(Postgres::start);
    let url = |name: &str| match &postgres {
        Some(postgres) => postgres.url("postgres"),
        None => format!("sqlite:{}", folder.path().join(name).display()),
    };
    let data = |name: &str| folder.path().join(name).display().to_string();
    let empty = StartedServer::begin(program, &url("empty.db"), &data("empty"))?;
    let (start_empty_s, resident_empty_bytes) = (empty.took.as_secs_f64(), empty.resident_bytes);
    // The server would follow the rows that are filled in now.
    drop(empty);
    eprintln!("rules: filling a store with {set}");
    let filled = fill(&url("rules.db"), rows).await?;
    eprintln!("rules: starting a server on the store");
    let started = StartedServer::begin(program, &url("rules.db"), &data("full"))?;
    let base_revision = Store::open(&url("rules.db").parse()?).await?.revisions().await?.revision;
    let asked = machine::now();
    post(started.server.address("admin"), "/v1/rules/apply", &change(base_revision))?;
    let changed = machine::now() - asked;
    Ok(Report {
        set,
        rows: filled,
        start_s: started.took.as_secs_f64(),
        start_empty_s,
        start: held(started.took <= LOAD_BAR),
        resident_bytes: started.resident_bytes,
        resident_empty_bytes,
        peak_bytes: started.peak_bytes,
        change_s: changed.as_secs_f64(),
        change_peak_bytes: started.peak()?,
    })
}

/// Another limit for one rule.
fn change(base_revision: u64) -> String {
    format!(
        r#"{{"operations":[{{"do":"put","kind":"rule","name":"rule-0","body":{{"key":["user"],"limit":200,
            "period":"1m","when":{{"path":"/v1/service-0"}}}}}}],
            "base_revision":{base_revision},"reason":"a measurement","confirmed":true}}"#
    )
}

/// Puts all rows, in changes as large as may be; gives how many there are.
async fn fill(url: &str, mut rows: impl Iterator<Item = RuleRow>) -> Result<usize> {
    let store = Store::open(&url.parse()?).await?;
    let (mut revision, mut filled) = (0, 0);
    loop {
        let put = |row: RuleRow| Operation::Put { kind: row.kind, name: row.name, body: row.body };
        let operations: Vec<Operation> = rows.by_ref().take(OPERATIONS_MAX).map(put).collect();
        if operations.is_empty() {
            break;
        }
        filled += operations.len();
        let proposal = Proposal::new(revision, "a measurement", operations);
        let change = store.apply_new(&proposal, false, Attribution { by: "bench", now_ms: 1 }).await?;
        revision = change.revision.context("it was applied")?;
    }
    store.close().await;
    Ok(filled)
}

struct StartedServer {
    server: Server,
    took: Duration,
    resident_bytes: u64,
    peak_bytes: u64,
}

impl StartedServer {
    /// Starts a server, and looks at it. It ends with this.
    fn begin(program: &Path, url: &str, data: &str) -> Result<Self> {
        let mut command = tidegate(program, &[]);
        command.env("TIDEGATE_LOG", "error");
        let started = machine::now();
        let server = Server::start_as(command, &["--workers", "1", "--rules", url, "--data-dir", data]);
        let took = machine::now() - started;
        let resident_bytes = memory(&server, "VmRSS:")?;
        let peak_bytes = memory(&server, "VmHWM:")?;
        Ok(Self { server, took, resident_bytes, peak_bytes })
    }

    /// The most memory it has had by now.
    fn peak(&self) -> Result<u64> {
        memory(&self.server, "VmHWM:")
    }
}

fn memory(server: &Server, field: &str) -> Result<u64> {
    machine::kib_field(&format!("/proc/{}/status", server.process.id()), field)
}
