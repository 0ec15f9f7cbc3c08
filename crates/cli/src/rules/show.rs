//! Prints the rows of a rule store, and the history of its changes.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::{Value, json};

use super::operations::LISTS;
use super::{change, listing, unexpected};
use crate::client::{Client, segment};
use crate::out::{self, Reader, shown};
use crate::{CommandResult, Failure, notice};

/// Rows per request.
const PAGE: &str = "1000";

/// How many changes of the history are shown.
const CHANGES: &str = "50";

pub(super) fn kind_arg() -> Arg {
    let kinds = ["template", "rule", "override"];
    Arg::new("kind")
        .long("kind")
        .value_name("KIND")
        .value_parser(kinds)
        .help("Kind of rows to list [default: all]")
}

pub(super) fn file_arg() -> Arg {
    Arg::new("toml")
        .long("toml")
        .action(ArgAction::SetTrue)
        .conflicts_with("json")
        .help("Print a rules file for `rules apply`")
}

pub(super) fn list(matches: &ArgMatches) -> CommandResult {
    list_of(matches, matches.get_one::<String>("kind").map(String::as_str), matches.get_flag("toml"))
}

/// Lists all rows of a kind, page by page, or writes the rules file that would put them.
pub(crate) fn list_of(matches: &ArgMatches, kind: Option<&str>, as_file: bool) -> CommandResult {
    let client = Client::new(matches)?;
    let (mut rows, mut after): (Vec<Value>, Option<String>) = (Vec::new(), None);
    loop {
        let mut query = vec![("limit", PAGE)];
        query.extend(kind.map(|kind| ("kind", kind)));
        query.extend(after.as_deref().map(|after| ("after", after)));
        let mut answer = client.get("/v1/rules", &query)?.decided(&[200])?.body;
        let Value::Array(page) = answer["rows"].take() else { return Err(unexpected("rows")) };
        rows.extend(page);
        after = answer["next"].as_str().map(str::to_owned);
        if after.is_none() {
            if as_file {
                print_file(&rows)?;
            } else {
                print_rows(matches, &answer, &rows, kind)?;
            }
            if !matches.get_flag("json") {
                notice::print_last(&answer);
            }
            return Ok(ExitCode::SUCCESS);
        }
    }
}

/// The rows as the rules file that would put them.
fn print_file(rows: &[Value]) -> Result<Reader, Failure> {
    let mut file = toml::Table::new();
    for (list, kind) in LISTS {
        let of_kind = rows.iter().filter(|row| row["kind"] == *kind);
        let written: Result<Vec<toml::Value>, _> = of_kind.map(written).collect();
        let written = written.map_err(|error| Failure::failed(format!("{list}: {error}")))?;
        if !written.is_empty() {
            file.insert(list.to_owned(), written.into());
        }
    }
    out::print(toml::to_string(&file).map_err(Failure::failed)?.as_bytes())
}

/// A row as a rules file has it.
fn written(row: &Value) -> Result<toml::Value, toml::ser::Error> {
    let mut body = row["body"].clone();
    body["name"] = row["name"].clone();
    toml::Value::try_from(body)
}

fn print_rows(
    matches: &ArgMatches,
    answer: &Value,
    rows: &[Value],
    kind: Option<&str>,
) -> Result<Reader, Failure> {
    let revision = &answer["revision"];
    if matches.get_flag("json") {
        let rollback = &answer["last_automatic_rollback"];
        return say!(
            "{}",
            json!({ "revision": revision, "rows": rows, "last_automatic_rollback": rollback })
        );
    }
    if let Some(kind) = kind.filter(|_| rows.is_empty()) {
        return say!("no {kind}s");
    }
    for table in listing::tables(rows) {
        say!("{table}\n")?;
    }
    say!("revision {revision}: {}", listing::counts(rows))
}

pub(super) fn get(matches: &ArgMatches) -> CommandResult {
    let row = matches.get_one::<String>("row").map_or("", String::as_str);
    let (kind, name) = row
        .split_once('/')
        .ok_or_else(|| Failure::usage(format!("row: {row:?} is not KIND/NAME, such as rule/per_user")))?;
    let path = format!("/v1/rules/{}/{}", segment(kind), segment(name));
    let answer = Client::new(matches)?.get(&path, &[])?.decided(&[200])?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
        return Ok(ExitCode::SUCCESS);
    }
    let row = &answer.body["row"];
    say!("{kind} {name:?}, version {}", row["version"])?;
    for (field, value) in row["body"].as_object().ok_or_else(|| unexpected("body"))? {
        say!("{}", shown(format_args!("{field} = {value}")))?;
    }
    if let (Some(regime), Some(total)) = (row["bound"]["regime"].as_str(), row["bound"]["total"].as_u64()) {
        say!("{regime}: over-admits at most {total} units; `tidegate bound` prints the terms")?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn history(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let answer = match matches.get_one::<u64>("change") {
        Some(id) => client.get(&format!("/v1/rules/changes/{id}"), &[])?,
        None => client.get("/v1/rules/history", &[("limit", CHANGES)])?,
    };
    let body = answer.decided(&[200])?.body;
    if matches.get_flag("json") {
        say!("{body}")?;
        return Ok(ExitCode::SUCCESS);
    }
    match body["changes"].as_array() {
        None => change::print_whole(&body)?,
        Some(changes) if changes.is_empty() => drop(say!("no changes")?),
        Some(changes) => {
            for change in changes {
                change::print_change(change)?;
                if let Some(reason) = change["reason"].as_str().filter(|reason| !reason.is_empty()) {
                    say!("  {}", shown(reason))?;
                }
            }
            say!("`tidegate rules history CHANGE` prints the rows of a change")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
