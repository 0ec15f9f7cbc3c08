//! `tidegate audit`: prints the audit, and verifies its hash chain.

use std::fmt::Write as _;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use comfy_table::Table;
use serde_json::{Map, Value, json};
use tidegate_server::audit::{Checkpoint, verify_lines};
use tidegate_server::snapshot;
use tidegate_server::timestamp;

use crate::client::{self, Client};
use crate::out::{self, Reader, shown};
use crate::table::{self, cell_text};
use crate::{CommandResult, Failure};

/// Entries per request.
const PAGE: &str = "1000";

/// Digits of a hash in the table.
const HASH_DIGITS: usize = 12;

pub(crate) fn command() -> Command {
    Command::new("audit")
        .about("Show and verify the audit of all changes")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("show")
                .about("Show the entries of the audit")
                .long_about(
                    "Show the entries of the audit. With --json, each line is an entry, and the last line \
                     is the checkpoint: an export for `audit verify --file`.",
                )
                .arg(
                    Arg::new("after")
                        .long("after")
                        .value_name("N")
                        .default_value("0")
                        .value_parser(value_parser!(u64))
                        .help("Number of an entry; print the entries after it"),
                )
                .args(client::args()),
        )
        .subcommand(
            Command::new("verify")
                .about("Verify the audit, and the rules against it")
                .long_about(
                    "Verify the hash chain of the audit, and that the rule store has the rows, changes, \
                     emergencies and credentials that the audit tells. Prints the checkpoint. A checkpoint \
                     kept elsewhere detects a rewritten end: each snapshot has one, and the log of each \
                     server.\n\nExit status: 0 if all of it holds, 1 if not.",
                )
                .arg(Arg::new("file").long("file").value_name("FILE").help(
                    "Export of `audit show --json`, \
                                                                           instead of a server",
                ))
                .arg(
                    Arg::new("checkpoint")
                        .long("checkpoint")
                        .value_name("LINE")
                        .help("Checkpoint of an earlier verification, or of a server's log"),
                )
                .arg(
                    Arg::new("snapshot")
                        .long("snapshot")
                        .value_name("PATH")
                        .conflicts_with("checkpoint")
                        .help("Snapshot with the checkpoint, or a folder of them"),
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
    let mut is_empty = true;
    let end = loop {
        let body = client.get("/v1/audit", &[("after", &after), ("limit", PAGE)])?.decided(&[200])?.body;
        is_empty &= body["entries"].as_array().is_none_or(Vec::is_empty);
        if print_page(&body["entries"], matches.get_flag("json"))? == Reader::Gone {
            return Ok(ExitCode::SUCCESS);
        }
        match body["next"].as_u64() {
            Some(next) => after = next.to_string(),
            None => break body,
        }
    };
    if is_empty && !matches.get_flag("json") {
        say!("no entries")?;
    }
    if matches.get_flag("json") && first == 0 {
        // Without the checkpoint, a truncated export looks like a shorter one. An export without
        // its first entries never verifies anyway.
        say!("{}", known_end(&end)?.to_line().map_err(Failure::failed)?)?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the end of the audit as the store records it. The printed entries alone cannot show that
/// the last ones were cut off.
fn known_end(last_page: &Value) -> Result<Checkpoint, Failure> {
    let line = last_page["checkpoint"].as_str();
    let line = line.ok_or_else(|| Failure::failed("audit: the response has no `checkpoint`"))?;
    line.parse().map_err(Failure::failed)
}

/// Prints a page of entries: one per line as JSON, or as a table.
fn print_page(entries: &Value, as_json: bool) -> Result<Reader, Failure> {
    let entries = entries.as_array().map(Vec::as_slice).unwrap_or_default();
    if as_json {
        let mut lines = String::new();
        for entry in entries {
            // Writing to a string does not fail.
            let _ = writeln!(lines, "{entry}");
        }
        return out::print(lines.as_bytes());
    }
    if entries.is_empty() { Ok(Reader::There) } else { say!("{}", entries_table(entries)) }
}

fn entries_table(entries: &[Value]) -> Table {
    let mut table = table::with_header(["entry", "at", "actor", "action", "detail"]);
    for entry in entries {
        let at = entry["at_ms"].as_u64().map(timestamp).unwrap_or_default();
        let detail = entry["detail"].as_str().unwrap_or_default();
        let detail =
            serde_json::from_str(detail).map_or_else(|_| shown(detail), |fields| detail_text(&fields));
        let text = |field: &str| cell_text(&entry[field]);
        table.add_row([text("sequence"), at, text("actor"), text("action"), detail]);
    }
    table
}

/// The fields of a detail that have a value. Hashes are shortened; --json has all digits.
fn detail_text(fields: &Map<String, Value>) -> String {
    let pairs = fields.iter().filter_map(|(name, value)| {
        let text = cell_text(value);
        let digits = if name.ends_with("_sha256") { HASH_DIGITS } else { text.len() };
        let text: String = text.chars().take(digits).collect();
        (!text.is_empty()).then(|| format!("{}={text}", shown(name)))
    });
    pairs.collect::<Vec<_>>().join(" ")
}

fn verify(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let checkpoint = match text("snapshot") {
        Some(path) => Some(checkpoint_of(Path::new(path))?.to_string()),
        None => text("checkpoint").map(str::to_owned),
    };
    let found = if let Some(file) = text("file") {
        verify_file(file, checkpoint.as_deref())?
    } else {
        let query: Vec<(&str, &str)> =
            checkpoint.as_deref().map(|line| ("checkpoint", line)).into_iter().collect();
        Client::new(matches)?.get("/v1/audit/verify", &query)?.decided(&[200])?.body
    };
    let holds = found["holds"] == true;
    if matches.get_flag("json") {
        say!("{found}")?;
        return Ok(if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    }
    if !holds {
        return Err(Failure::failed(found["problem"].as_str().unwrap_or("audit: the hash chain is broken")));
    }
    say!("intact: {} entries\n{}", found["entries"], found["checkpoint"].as_str().unwrap_or_default())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the checkpoint of a snapshot, or of the last good one of a folder.
fn checkpoint_of(path: &Path) -> Result<Checkpoint, Failure> {
    let problem =
        |problem: &dyn std::fmt::Display| Failure::usage(format!("snapshot: {}: {problem}", path.display()));
    let found = if path.is_dir() {
        snapshot::load_last_good(path).map_err(|error| problem(&error))?.snapshot
    } else {
        let bytes = std::fs::read(path).map_err(|error| problem(&error))?;
        Some(snapshot::decode(&bytes).map_err(|damage| problem(&damage))?)
    };
    let found = found.ok_or_else(|| problem(&"there is no snapshot in it"))?;
    found.checkpoint.ok_or_else(|| problem(&"it has no checkpoint: an earlier version wrote it"))
}

fn verify_file(path: &str, checkpoint: Option<&str>) -> Result<Value, Failure> {
    let kept: Option<Checkpoint> = checkpoint.map(str::parse).transpose().map_err(Failure::usage)?;
    let file = File::open(path).map_err(|error| Failure::usage(format!("file: {path}: {error}")))?;
    Ok(match verify_lines(BufReader::new(file), kept.as_ref()) {
        Ok(end) => json!({ "holds": true, "entries": end.count, "checkpoint": end.to_string() }),
        Err(error) => json!({ "holds": false, "problem": error.to_string() }),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_an_aligned_table() {
        let entries = [
            json!({ "sequence": 9, "at_ms": 0, "actor": "ann", "action": "change.apply",
                    "detail": r#"{"approver":null,"change":1,"body_sha256":"a709911c43718"}"# }),
            json!({ "sequence": 10, "at_ms": 1_500, "actor": "token:ci\u{1b}[2J", "action": "credential.put",
                    "detail": "no\nobject" }),
        ];
        assert_eq!(
            entries_table(&entries).trim_fmt(),
            " entry  at                        actor              action          detail\n \
             9      1970-01-01T00:00:00.000Z  ann                change.apply    body_sha256=a709911c4371 change=1\n \
             10     1970-01-01T00:00:01.500Z  token:ci\\u{1b}[2J  credential.put  no\\nobject"
        );
    }
}
