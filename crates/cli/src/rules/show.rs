//! What is in a store of rules, and how it came to be.

use std::process::ExitCode;

use clap::{Arg, ArgMatches};
use comfy_table::{Table, presets};
use serde_json::{Value, json};

use super::{change, unexpected};
use crate::client::{Client, segment};
use crate::{Done, Failure};

/// How many rows are asked for at once.
const PAGE: &str = "1000";

/// How many changes of the history are shown.
const CHANGES: &str = "50";

pub(super) fn kind_arg() -> Arg {
    let kinds = ["template", "rule", "override"];
    Arg::new("kind").long("kind").value_name("KIND").value_parser(kinds).help("Only these")
}

pub(super) fn list(matches: &ArgMatches) -> Done {
    list_of(matches, matches.get_one::<String>("kind").map(String::as_str))
}

/// Lists all rows of a kind, page by page.
pub(crate) fn list_of(matches: &ArgMatches, kind: Option<&str>) -> Done {
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
            print_rows(matches, &answer["revision"], &rows);
            return Ok(ExitCode::SUCCESS);
        }
    }
}

fn print_rows(matches: &ArgMatches, revision: &Value, rows: &[Value]) {
    if matches.get_flag("json") {
        println!("{}", json!({ "revision": revision, "rows": rows }));
        return;
    }
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["kind", "name", "version", "says"]);
    for row in rows {
        let text = |field: &str| row[field].as_str().unwrap_or_default().to_owned();
        table.add_row([text("kind"), text("name"), row["version"].to_string(), row["body"].to_string()]);
    }
    println!("{table}\nrevision {revision}");
}

pub(super) fn get(matches: &ArgMatches) -> Done {
    let row = matches.get_one::<String>("row").map_or("", String::as_str);
    let (kind, name) = row
        .split_once('/')
        .ok_or_else(|| Failure::usage(format!("{row:?} is not KIND/NAME, such as rule/per_user")))?;
    let path = format!("/v1/rules/{}/{}", segment(kind), segment(name));
    let answer = Client::new(matches)?.get(&path, &[])?.decided(&[200])?;
    if matches.get_flag("json") {
        println!("{}", answer.body);
        return Ok(ExitCode::SUCCESS);
    }
    let row = &answer.body["row"];
    println!("{kind} {name:?}, version {}", row["version"]);
    for (field, value) in row["body"].as_object().ok_or_else(|| unexpected("body"))? {
        println!("{field} = {value}");
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn history(matches: &ArgMatches) -> Done {
    let client = Client::new(matches)?;
    let answer = match matches.get_one::<u64>("change") {
        Some(id) => client.get(&format!("/v1/rules/changes/{id}"), &[])?,
        None => client.get("/v1/rules/history", &[("limit", CHANGES)])?,
    };
    let body = answer.decided(&[200])?.body;
    if matches.get_flag("json") {
        println!("{body}");
        return Ok(ExitCode::SUCCESS);
    }
    match body["changes"].as_array() {
        None => change::print_whole(&body)?,
        Some(changes) => changes.iter().for_each(|change| {
            change::print_change(change);
            if let Some(reason) = change["reason"].as_str().filter(|reason| !reason.is_empty()) {
                println!("  {reason}");
            }
        }),
    }
    Ok(ExitCode::SUCCESS)
}
