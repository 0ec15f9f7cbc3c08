//! `tidegate rules import`: what other limiters were told, as a change of rules.

use clap::{Arg, ArgMatches, Command};
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_server::import_descriptors;

use super::change::{confirmed_args, make};
use super::validate;
use crate::naming::name_of;
use crate::out::shown;
use crate::{CommandResult, Failure, client};

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
                .arg(
                    file("What ratelimit.listOverrides answers (JSON), or the list in its `data`; all pages of it")
                        .num_args(1..),
                )
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

pub(super) fn run(matches: &ArgMatches) -> CommandResult {
    let Some((from, matches)) = matches.subcommand() else { return Ok(std::process::ExitCode::SUCCESS) };
    let paths: Vec<&str> =
        matches.get_many::<String>("file").into_iter().flatten().map(String::as_str).collect();
    let wrong = |path: &str, problem: String| Failure::usage(format!("{path}: {problem}"));
    let (mut operations, mut pages_before_others) = (Vec::new(), 0);
    for path in &paths {
        let text = validate::read(path).map_err(|problem| wrong(path, problem))?;
        if from == "envoy" {
            let imported = import_descriptors(&text).map_err(|problems| wrong(path, problems.join("\n")))?;
            for words in imported.left_out {
                aside!("left out: {}", shown(words));
            }
            operations.extend(imported.operations);
        } else {
            let rule = matches.get_one::<String>("rule").map_or("", String::as_str);
            let page = of_unkey(&text, rule).map_err(|problem| wrong(path, problem))?;
            pages_before_others += usize::from(page.has_more);
            operations.extend(page.operations);
        }
    }
    // Each page but the last says that there is another.
    if pages_before_others == paths.len() {
        return Err(Failure::usage(
            "file: every page says that another follows: one with its cursor is missing",
        ));
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

/// Overrides of a page, as operations.
struct UnkeyPage {
    operations: Vec<Value>,
    /// Whether Unkey says that another page follows.
    has_more: bool,
}

fn of_unkey(text: &str, rule: &str) -> Result<UnkeyPage, String> {
    let mut answer: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let has_more = answer.pointer("/pagination/hasMore") == Some(&Value::Bool(true));
    let list = if answer.is_array() { answer } else { answer["data"].take() };
    let all: Vec<UnkeyOverride> = serde_json::from_value(list).map_err(|error| format!("data: {error}"))?;
    let operation = |UnkeyOverride { identifier, limit, duration }: UnkeyOverride| {
        let name = name_of("", rule, &[&identifier]);
        let body =
            json!({ "rule": rule, "key": [identifier], "limit": limit, "period": format!("{duration}ms") });
        json!({ "do": "put", "kind": "override", "name": name, "body": body })
    };
    Ok(UnkeyPage { operations: all.into_iter().map(operation).collect(), has_more })
}
