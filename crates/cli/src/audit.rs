//! `tidegate audit`: who changed what, and whether that record holds.

use std::fs::File;
use std::io::BufReader;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::{Value, json};
use tidegate_server::audit::{Checkpoint, verify_lines};
use tidegate_server::timestamp;

use crate::client::{self, Client};
use crate::out::{Reader, shown};
use crate::{CommandResult, Failure};

/// How many entries are asked for at once.
const PAGE: &str = "1000";

pub(crate) fn command() -> Command {
    Command::new("audit")
        .about("Shows who changed rules, and whether that record holds")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("show")
                .about("Shows the entries; with --json one on each line, as `verify --file` reads them, and where they end")
                .arg(
                    Arg::new("after")
                        .long("after")
                        .value_name("N")
                        .default_value("0")
                        .value_parser(value_parser!(u64))
                        .help("Those after this one"),
                )
                .args(client::args()),
        )
        .subcommand(
            Command::new("verify")
                .about("Follows the audit from its beginning, and exits with 1 if it does not hold")
                .arg(
                    Arg::new("file").long("file").value_name("FILE").help("An export, instead of a server's"),
                )
                .arg(
                    Arg::new("checkpoint")
                        .long("checkpoint")
                        .value_name("LINE")
                        .help("A line that was kept elsewhere, as this command prints it"),
                )
                .args(client::args()),
        )
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("show", matches)) => show(matches),
        Some(("verify", matches)) => verify(matches),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn show(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let first = matches.get_one::<u64>("after").copied().unwrap_or_default();
    let mut after = first.to_string();
    let end = loop {
        let body = client.get("/v1/audit", &[("after", &after), ("limit", PAGE)])?.decided(&[200])?.body;
        for entry in body["entries"].as_array().into_iter().flatten() {
            let reader = if matches.get_flag("json") { say!("{entry}") } else { print(entry) };
            if reader? == Reader::Gone {
                return Ok(ExitCode::SUCCESS);
            }
        }
        match body["next"].as_u64() {
            Some(next) => after = next.to_string(),
            None => break body,
        }
    };
    if matches.get_flag("json") && first == 0 {
        // Without it, nobody could tell an export whose end is cut off from a shorter one. One without a beginning holds for
        // nobody anyway.
        say!("{}", known_end(&end)?.to_line().map_err(Failure::failed)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Where the audit ends by what the store knows of it. What was printed says nothing of entries that somebody cut off there.
fn known_end(last_page: &Value) -> Result<Checkpoint, Failure> {
    let line = last_page["checkpoint"].as_str();
    let line = line.ok_or_else(|| Failure::failed("audit: the server does not say where it ends"))?;
    line.parse().map_err(Failure::failed)
}

fn print(entry: &Value) -> Result<Reader, Failure> {
    let text = |field: &str| entry[field].as_str().unwrap_or_default();
    let at = timestamp(entry["at_ms"].as_u64().unwrap_or_default());
    let (actor, action, detail) = (text("actor"), text("action"), text("detail"));
    say!("{}", shown(format_args!("{} {at} {actor} {action} {detail}", entry["sequence"])))
}

fn verify(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let found = if let Some(file) = text("file") {
        verify_file(file, text("checkpoint"))?
    } else {
        let query: Vec<(&str, &str)> =
            text("checkpoint").map(|line| ("checkpoint", line)).into_iter().collect();
        Client::new(matches)?.get("/v1/audit/verify", &query)?.decided(&[200])?.body
    };
    let holds = found["holds"] == true;
    if matches.get_flag("json") {
        say!("{found}")?;
        return Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if !holds {
        return Err(Failure::failed(found["problem"].as_str().unwrap_or("audit: does not hold")));
    }
    say!("holds: {} entries\n{}", found["entries"], found["checkpoint"].as_str().unwrap_or_default())?;
    Ok(ExitCode::SUCCESS)
}

fn verify_file(path: &str, checkpoint: Option<&str>) -> Result<Value, Failure> {
    let kept: Option<Checkpoint> = checkpoint.map(str::parse).transpose().map_err(Failure::usage)?;
    let file = File::open(path).map_err(|error| Failure::usage(format!("file: {path}: {error}")))?;
    Ok(match verify_lines(BufReader::new(file), kept.as_ref()) {
        Ok(end) => json!({ "holds": true, "entries": end.count, "checkpoint": end.to_string() }),
        Err(error) => json!({ "holds": false, "problem": error.to_string() }),
    })
}
