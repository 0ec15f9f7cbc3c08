//! `tidegate override`: other limits for some keys of a rule.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::{Map, Value, json};

use crate::client::{self, Client, text_arg};
use crate::naming::name_of;
use crate::rules::change::{confirmed_args, make};
use crate::rules::show::list_of;
use crate::{CommandResult, Failure, expiry, key_values};

pub(crate) fn command() -> Command {
    Command::new("override")
        .about("Set other limits for some keys of a rule")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(set_command())
        .subcommand(Command::new("list").about("List overrides").args(client::args()))
        .subcommand(
            Command::new("delete")
                .about("Delete an override")
                .arg(Arg::new("name").value_name("NAME").required(true).help("Name of the override"))
                .args(confirmed_args())
                .args(client::args()),
        )
}

fn set_command() -> Command {
    let [key, verbatim] = key_values::args();
    Command::new("set")
        .about("Set another limit for some keys of a rule")
        .arg(text_arg("rule", "RULE", "Rule to override").required(true))
        .args([key.required(true), verbatim])
        .arg(
            text_arg("limit", "N", "Units per period; 0 blocks")
                .required(true)
                .value_parser(value_parser!(u64)),
        )
        .arg(text_arg("period", "PERIOD", "Period of the limit, such as 1m [default: the rule's]"))
        .arg(text_arg("burst", "N", "Units that may pass at once").value_parser(value_parser!(u64)))
        .arg(
            text_arg("mode", "MODE", "enforce, or shadow: count and deny nothing [default: the rule's]")
                .value_parser(["enforce", "shadow"]),
        )
        .arg(text_arg("tenant", "NAME", "Tenant that it applies to [default: all tenants]"))
        .arg(
            text_arg(
                "priority",
                "N",
                "Of several patterns that match, the highest priority applies [default: 0]",
            )
            .allow_negative_numbers(true)
            .value_parser(value_parser!(i64)),
        )
        .arg(text_arg("expires", "TIME", expiry::EXPIRES_HELP).value_parser(expiry::parse))
        .arg(text_arg("name", "NAME", "Name of the override [default: the rule and the key]"))
        .args(confirmed_args())
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("set", matches)) => make(matches, &[set(matches)?]),
        Some(("list", matches)) => list_of(matches, Some("override"), false),
        Some(("delete", matches)) => {
            let name = matches.get_one::<String>("name");
            make(matches, &[json!({ "do": "delete", "kind": "override", "name": name })])
        }
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn set(matches: &ArgMatches) -> Result<Value, Failure> {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let number = |id: &str| matches.get_one::<u64>(id).copied();
    let key = key_values::values(matches);
    let rule = text("rule").ok_or_else(|| Failure::usage("rule: missing"))?;
    key_values::check(&Client::new(matches)?, rule, matches)?;
    let name = text("name").map_or_else(|| name_of("", rule, &key), str::to_owned);
    let mut body = Map::new();
    body.insert("rule".to_owned(), rule.into());
    body.insert("key".to_owned(), key.into());
    for id in ["limit", "burst", "expires"] {
        body.extend(number(id).map(|number| (id.to_owned(), Value::from(number))));
    }
    for id in ["period", "mode", "tenant"] {
        body.extend(text(id).map(|text| (id.to_owned(), Value::from(text))));
    }
    body.extend(
        matches.get_one::<i64>("priority").map(|priority| ("priority".to_owned(), (*priority).into())),
    );
    Ok(json!({ "do": "put", "kind": "override", "name": name, "body": body }))
}
