//! `tidegate rules import`: what other limiters were told, as a change of rules.

use clap::{Arg, ArgMatches, Command};
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_server::{Imported, import_descriptors};

use super::change::{confirmed_args, make};
use super::validate;
use crate::{Done, Failure, client};

pub(super) fn command() -> Command {
    let file = |help: &'static str| Arg::new("file").value_name("FILE").required(true).help(help);
    Command::new("import")
        .about("Makes rules of what other limiters were told; shows what cannot be carried over")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("envoy")
                .about("Makes rules of a descriptor file of envoyproxy/ratelimit")
                .arg(file("The descriptor file (YAML)"))
                .args(confirmed_args())
                .args(client::args()),
        )
        .subcommand(
            Command::new("unkey")
                .about("Makes overrides of a rule of the overrides of a namespace of Unkey")
                .arg(file("What ratelimit.listOverrides answers (JSON), or the list in its `data`"))
                .arg(
                    Arg::new("rule")
                        .long("rule")
                        .value_name("RULE")
                        .required(true)
                        .help("The rule that stands for the namespace; its key has one part"),
                )
                .args(confirmed_args())
                .args(client::args()),
        )
}

pub(super) fn run(matches: &ArgMatches) -> Done {
    let Some((from, matches)) = matches.subcommand() else { return Ok(std::process::ExitCode::SUCCESS) };
    let path = matches.get_one::<String>("file").map_or("", String::as_str);
    let text = validate::read(path).map_err(|problem| Failure::usage(format!("{path}: {problem}")))?;
    let imported = match from {
        "envoy" => import_descriptors(&text).map_err(|problems| problems.join("\n")),
        _ => of_unkey(&text, matches.get_one::<String>("rule").map_or("", String::as_str)),
    };
    let Imported { operations, left_out } =
        imported.map_err(|problem| Failure::usage(format!("{path}: {problem}")))?;
    for words in left_out {
        eprintln!("left out: {words}");
    }
    make(matches, &operations)
}

/// An override as Unkey tells it.
#[derive(Deserialize)]
struct UnkeyOverride {
    identifier: String,
    limit: u64,
    /// In milliseconds.
    duration: u64,
}

fn of_unkey(text: &str, rule: &str) -> Result<Imported, String> {
    let mut answer: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let list = if answer.is_array() { answer } else { answer["data"].take() };
    let all: Vec<UnkeyOverride> = serde_json::from_value(list).map_err(|error| format!("data: {error}"))?;
    let operation = |UnkeyOverride { identifier, limit, duration }: UnkeyOverride| {
        let body =
            json!({ "rule": rule, "key": [identifier], "limit": limit, "period": format!("{duration}ms") });
        json!({ "do": "put", "kind": "override", "name": format!("{rule}:{identifier}"), "body": body })
    };
    Ok(Imported { operations: all.into_iter().map(operation).collect(), left_out: Vec::new() })
}
