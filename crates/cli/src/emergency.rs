//! `tidegate emergency`: declarations that take precedence over all rules, for one hour at most
//! unless renewed.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use comfy_table::Table;
use serde_json::{Map, Value, json};
use tidegate_server::UNRULED_REQUESTS;

use crate::client::{self, Client, segment, text_arg};
use crate::out::shown;
use crate::rules::change::{ask, print_not_in_force, reason_arg, yes_arg};
use crate::rules::{limit_text, unexpected};
use crate::table::{self, cell_text};
use crate::{CommandResult, key_values};

pub(crate) fn command() -> Command {
    let id = || Arg::new("id").value_name("ID").required(true).help("Id of the emergency; see `list`");
    Command::new("emergency")
        .about("Block, allow or limit requests for a limited time, before all rules")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(Command::new("list").about("List emergencies in force").args(client::args()))
        .subcommand(declaration("block", "Deny all requests under rules"))
        .subcommand(declaration("allow", "Allow all requests under rules"))
        .subcommand(
            declaration("limit", "Set a limit")
                .arg(
                    Arg::new("limit")
                        .long("limit")
                        .value_name("N")
                        .required(true)
                        .value_parser(value_parser!(u64))
                        .help("Units per period"),
                )
                .arg(
                    Arg::new("period")
                        .long("period")
                        .value_name("PERIOD")
                        .required(true)
                        .help("Period of the limit, such as 1m"),
                ),
        )
        .subcommand(
            Command::new("renew")
                .about("Start the time of an emergency again")
                .arg(id())
                .arg(for_arg())
                .args(client::args()),
        )
        .subcommand(Command::new("end").about("End an emergency").arg(id()).args(client::args()))
}

fn for_arg() -> Arg {
    Arg::new("for").long("for").value_name("PERIOD").default_value("1h").help("Duration from now, at most 1h")
}

fn declaration(name: &'static str, about: &'static str) -> Command {
    Command::new(name)
        .about(about)
        .arg(text_arg("rule", "RULE", "Rule that it applies to; required with --key [default: all rules]"))
        .args(key_values::args().map(|arg| arg.requires("rule")))
        .arg(text_arg("tenant", "NAME", "Tenant that it applies to [default: all tenants]"))
        .arg(text_arg("id", "ID", "Id; an existing emergency with this id is replaced [default: random]"))
        .arg(for_arg())
        .args([reason_arg(), yes_arg()])
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("list", matches)) => list(matches),
        Some(("renew", matches)) => renew(matches),
        Some(("end", matches)) => end(matches),
        Some((action, matches)) => declare(matches, action),
        None => Ok(ExitCode::SUCCESS),
    }
}

fn list(matches: &ArgMatches) -> CommandResult {
    let body = Client::new(matches)?.get("/v1/emergencies", &[])?.decided(&[200])?.body;
    if matches.get_flag("json") {
        say!("{body}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let emergencies = body["emergencies"].as_array().ok_or_else(|| unexpected("emergencies"))?;
    if emergencies.is_empty() {
        say!("no emergencies")?;
    } else {
        say!("{}", emergencies_table(emergencies))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn emergencies_table(emergencies: &[Value]) -> Table {
    let header = ["id", "action", "limit", "rule", "key", "when", "tenant", "until", "by", "reason"];
    let mut table = table::with_header(header);
    for emergency in emergencies {
        let body = &emergency["body"];
        let field = |name: &str| cell_text(&body[name]);
        table.add_row([
            cell_text(&emergency["id"]),
            field("action"),
            limit_text(body),
            field("rule"),
            field("key"),
            field("when"),
            field("tenant"),
            cell_text(&emergency["expires"]),
            field("by"),
            field("reason"),
        ]);
    }
    table::hide_empty(&mut table);
    table
}

fn declare(matches: &ArgMatches, action: &str) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let mut fields = Map::new();
    fields.insert("action".to_owned(), action.into());
    for id in ["rule", "tenant", "id", "for", "reason"] {
        fields.extend(text(id).map(|text| (id.to_owned(), Value::from(text))));
    }
    let key = key_values::values(matches);
    if !key.is_empty() {
        fields.insert("key".to_owned(), json!(key));
    }
    if action == "limit" {
        fields.insert("limit".to_owned(), json!(matches.get_one::<u64>("limit")));
        fields.insert("period".to_owned(), json!(text("period")));
    }
    let client = Client::new(matches)?;
    if let Some(rule) = text("rule") {
        key_values::check(&client, rule, matches)?;
    }
    let answer = ask(&client, "/v1/emergencies", Value::Object(fields), matches, None)?.decided(&[200])?;
    tell(matches, &answer.body, |body| {
        let text = |field: &str| body["emergency"][field].as_str().unwrap_or_default();
        let scope = scope_line(body).map_or_else(String::new, |scope| format!("; {scope}"));
        format!("emergency {:?} in force until {}: {action}{scope}", text("id"), text("expires"))
    })
}

/// Names the requests beyond an emergency of all rules. An emergency of one rule needs no such
/// line.
pub(crate) fn scope_line(body: &Value) -> Option<String> {
    body["emergency"]["body"]["rule"].is_null().then(|| format!("not affected: {UNRULED_REQUESTS}"))
}

fn path_of(matches: &ArgMatches) -> String {
    let id = matches.get_one::<String>("id").map_or("", String::as_str);
    format!("/v1/emergencies/{}", segment(id))
}

fn renew(matches: &ArgMatches) -> CommandResult {
    let question = json!({ "for": matches.get_one::<String>("for") });
    let answer = Client::new(matches)?.post(&format!("{}/renew", path_of(matches)), &question)?;
    tell(matches, &answer.decided(&[200])?.body, |body| {
        format!("in force until {}", body["expires"].as_str().unwrap_or_default())
    })
}

fn end(matches: &ArgMatches) -> CommandResult {
    let answer = Client::new(matches)?.delete(&path_of(matches))?.decided(&[200])?;
    tell(matches, &answer.body, |_| "ended".to_owned())
}

/// Prints the reply to a change of emergencies, as JSON or in words.
pub(crate) fn tell(
    matches: &ArgMatches,
    body: &Value,
    words: impl FnOnce(&Value) -> String,
) -> CommandResult {
    if matches.get_flag("json") {
        say!("{body}")?;
    } else {
        say!("{}", shown(words(body)))?;
    }
    print_not_in_force(body);
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn emergencies_are_a_table_without_empty_columns() {
        let emergencies = [
            json!({
                "id": "block:per_user:eve", "expires": "2026-11-18T10:00:00.000Z", "expires_ms": 1,
                "body": { "action": "block", "rule": "per_user", "key": ["eve"], "by": "ann" },
            }),
            json!({
                "id": "calm\u{1b}[2J", "expires": "2026-11-18T10:30:00.000Z",
                "body": { "action": "limit", "limit": 5, "period": "1m", "by": "local" },
            }),
        ];
        assert_eq!(
            emergencies_table(&emergencies).trim_fmt(),
            " id                  action  limit     rule      key  until                     by\n \
             block:per_user:eve  block             per_user  eve  2026-11-18T10:00:00.000Z  ann\n \
             calm\\u{1b}[2J       limit   5 per 1m                 2026-11-18T10:30:00.000Z  local"
        );
    }
}
