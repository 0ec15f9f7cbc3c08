//! `tidegate emergency`: what goes before all rules, for an hour at most unless renewed.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use serde_json::{Map, Value, json};

use crate::client::{self, Client, segment};
use crate::out::shown;
use crate::rules::change::{ask, reason_arg, tell_not_in_force, yes_arg};
use crate::rules::unexpected;
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    let id = || Arg::new("id").value_name("ID").required(true).help("Its id, as `list` shows it");
    Command::new("emergency")
        .about("Declares what goes before all rules for a while, and looks at what was declared")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(Command::new("list").about("Lists emergencies that last").args(client::args()))
        .subcommand(declaration("block", "Lets nothing pass"))
        .subcommand(declaration("allow", "Lets everything pass"))
        .subcommand(
            declaration("limit", "Lets as much pass as is said")
                .arg(
                    Arg::new("limit")
                        .long("limit")
                        .value_name("N")
                        .required(true)
                        .value_parser(value_parser!(u64))
                        .help("How much may pass in each period"),
                )
                .arg(
                    Arg::new("period").long("period").value_name("PERIOD").required(true).help("Such as 1m"),
                ),
        )
        .subcommand(
            Command::new("renew")
                .about("Lets an emergency last from now on for as long as is said")
                .arg(id())
                .arg(for_arg())
                .args(client::args()),
        )
        .subcommand(Command::new("end").about("Ends an emergency").arg(id()).args(client::args()))
}

fn for_arg() -> Arg {
    Arg::new("for").long("for").value_name("PERIOD").default_value("1h").help("For how long, at most 1h")
}

fn declaration(name: &'static str, about: &'static str) -> Command {
    let text = |id: &'static str, value: &'static str, help: &'static str| {
        Arg::new(id).long(id).value_name(value).help(help)
    };
    Command::new(name)
        .about(about)
        .arg(text("rule", "RULE", "Only what this rule applies to"))
        .arg(
            text(
                "key",
                "KEY",
                "Only these keys of the rule: a value or pattern with * for each part, in order",
            )
            .requires("rule")
            .action(ArgAction::Append),
        )
        .arg(text("tenant", "NAME", "Only requests of this tenant"))
        .arg(text(
            "id",
            "ID",
            "What it is called; said again, it takes the place of the one before [default: random]",
        ))
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
    for emergency in body["emergencies"].as_array().ok_or_else(|| unexpected("emergencies"))? {
        let text = |field: &str| emergency[field].as_str().unwrap_or_default();
        let (id, expires) = (text("id"), text("expires"));
        say!("{}", shown(format_args!("{id} until {expires}: {}", emergency["body"])))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn declare(matches: &ArgMatches, action: &str) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let mut fields = Map::new();
    fields.insert("action".to_owned(), action.into());
    for id in ["rule", "tenant", "id", "for", "reason"] {
        fields.extend(text(id).map(|text| (id.to_owned(), Value::from(text))));
    }
    let key: Vec<&String> = matches.get_many("key").into_iter().flatten().collect();
    if !key.is_empty() {
        fields.insert("key".to_owned(), json!(key));
    }
    if action == "limit" {
        fields.insert("limit".to_owned(), json!(matches.get_one::<u64>("limit")));
        fields.insert("period".to_owned(), json!(text("period")));
    }
    let answer =
        ask(&Client::new(matches)?, "/v1/emergencies", Value::Object(fields), matches)?.decided(&[200])?;
    tell(matches, &answer.body, |body| {
        let text = |field: &str| body["emergency"][field].as_str().unwrap_or_default();
        format!("{} until {}: {action}", text("id"), text("expires"))
    })
}

fn path_of(matches: &ArgMatches) -> String {
    let id = matches.get_one::<String>("id").map_or("", String::as_str);
    format!("/v1/emergencies/{}", segment(id))
}

fn renew(matches: &ArgMatches) -> CommandResult {
    let question = json!({ "for": matches.get_one::<String>("for") });
    let answer = Client::new(matches)?.post(&format!("{}/renew", path_of(matches)), &question)?;
    tell(matches, &answer.decided(&[200])?.body, |body| {
        format!("lasts until {}", body["expires"].as_str().unwrap_or_default())
    })
}

fn end(matches: &ArgMatches) -> CommandResult {
    let answer = Client::new(matches)?.delete(&path_of(matches))?.decided(&[200])?;
    tell(matches, &answer.body, |_| "ended".to_owned())
}

fn tell(
    matches: &ArgMatches,
    body: &Value,
    words: impl FnOnce(&Value) -> String,
) -> Result<ExitCode, Failure> {
    if matches.get_flag("json") {
        say!("{body}")?;
    } else {
        say!("{}", shown(words(body)))?;
    }
    tell_not_in_force(body);
    Ok(ExitCode::SUCCESS)
}
