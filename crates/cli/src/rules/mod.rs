//! `tidegate rules`: looks at rules files, and at the rules of a server that keeps them in a store.

pub(crate) mod change;
mod import;
mod init;
mod listing;
mod operations;
pub(crate) mod show;
mod validate;

pub(crate) use listing::limit_text;
pub(crate) use validate::read;

use std::process::ExitCode;

use clap::{Arg, ArgGroup, ArgMatches, Command, value_parser};
use serde_json::json;

use crate::client::{self, Client, segment};
use crate::{CommandResult, Failure};
use change::{confirmed_args, make, print_change, reason_arg, roll_back, send};

pub(crate) fn command() -> Command {
    Command::new("rules")
        .about("Validate, plan, apply and roll back rules")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(init::command())
        .subcommand(validate::command())
        .subcommand(
            Command::new("list")
                .about("List templates, rules and overrides of a store")
                .arg(show::kind_arg())
                .arg(show::file_arg())
                .args(client::args()),
        )
        .subcommand(
            Command::new("get")
                .about("Show one row of a store")
                .arg(
                    Arg::new("row").value_name("KIND/NAME").required(true).help("Row, such as rule/per_user"),
                )
                .args(client::args()),
        )
        .subcommand(import::command())
        .subcommand(plan_command())
        .subcommand(apply_command())
        .subcommand(
            Command::new("history")
                .about("List changes, latest first, or show one change")
                .arg(
                    Arg::new("change")
                        .value_name("CHANGE")
                        .value_parser(value_parser!(u64))
                        .help("Number of the change to show"),
                )
                .args(client::args()),
        )
        .subcommand(rollback_command())
        .subcommand(of_change("approve", "Approve a change of another person, so that it can be applied"))
        .subcommand(of_change("reject", "Reject a change that was not applied").arg(reason_arg()))
        .subcommand(of_rule("shadow", "Set a rule to shadow mode: it counts and denies nothing"))
        .subcommand(of_rule("enforce", "Set a rule to enforce mode: it denies"))
}

fn plan_command() -> Command {
    Command::new("plan")
        .about("Show the effect of a change, and the consent that it requires; change nothing")
        .args(operations::args())
        .args(client::args())
}

fn apply_command() -> Command {
    Command::new("apply")
        .about("Apply a rules file, deletions, or an approved change")
        .long_about(
            "Apply a rules file, deletions, or an approved change. The command prints the plan first. A \
             change that newly denies more than 5 % of recent requests, or deletes a row, requires a \
             confirmation. Above 50 % it waits for an approval by another person. So does a change that \
             weakens a security rule, or blocks more addresses than a /8. Your changes of the last 24 hours \
             are judged together: the plan names the time and the limits.\n\nExit status: 0 if the change \
             is applied, 3 if it waits, 1 if it is refused, 64 for wrong usage or invalid rules.",
        )
        .args(operations::args())
        .arg(
            Arg::new("change")
                .long("change")
                .value_name("CHANGE")
                .value_parser(value_parser!(u64))
                .conflicts_with_all(["file", "delete"])
                .help("Number of an approved change to apply"),
        )
        .args(confirmed_args())
        .args(client::args())
}

fn rollback_command() -> Command {
    Command::new("rollback")
        .about("Restore the rules before a change, or at a revision")
        .long_about(
            "Restore the rules before a change, or at a revision. The command prints the plan first and \
             requires a confirmation. A rollback that newly denies more than 50 % of recent requests waits \
             for an approval by another person.\n\nExit status: 0 if the rollback is applied, 3 if it \
             waits, 1 if it is refused.",
        )
        .arg(
            Arg::new("change")
                .long("change")
                .value_name("CHANGE")
                .value_parser(value_parser!(u64))
                .help("Number of the change to undo"),
        )
        .arg(
            Arg::new("to_revision")
                .long("to-revision")
                .value_name("REVISION")
                .value_parser(value_parser!(u64))
                .help("Undo all changes after this revision; 0 removes all rows"),
        )
        .group(ArgGroup::new("extent").args(["change", "to_revision"]).required(true))
        .args(confirmed_args())
        .args(client::args())
}

fn of_change(name: &'static str, about: &'static str) -> Command {
    let change = Arg::new("change").value_name("CHANGE").required(true).value_parser(value_parser!(u64));
    Command::new(name).about(about).arg(change.help("Number of the change")).args(client::args())
}

fn of_rule(name: &'static str, about: &'static str) -> Command {
    let rule = Arg::new("name").value_name("RULE").required(true).help("Name of the rule");
    Command::new(name).about(about).arg(rule).args(confirmed_args()).args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let Some((name, matches)) = matches.subcommand() else { return Ok(ExitCode::SUCCESS) };
    match name {
        "init" => init::run(matches),
        "validate" => validate::run(matches),
        "import" => import::run(matches),
        "list" => show::list(matches),
        "get" => show::get(matches),
        "history" => show::history(matches),
        "plan" => change::plan(matches, &operations::read(matches)?),
        "apply" => apply(matches),
        "rollback" => rollback(matches),
        "approve" | "reject" => decide(matches, name),
        _ => set_mode(matches, name),
    }
}

fn apply(matches: &ArgMatches) -> CommandResult {
    match matches.get_one::<u64>("change") {
        None => make(matches, &operations::read(matches)?),
        Some(id) => send(&Client::new(matches)?, "/v1/rules/apply", json!({ "change": id }), matches, None),
    }
}

fn rollback(matches: &ArgMatches) -> CommandResult {
    let number = |id: &str| matches.get_one::<u64>(id);
    let target = match (number("change"), number("to_revision")) {
        (Some(id), _) => json!({ "change": id }),
        (None, revision) => json!({ "to_revision": revision }),
    };
    roll_back(matches, &target)
}

fn set_mode(matches: &ArgMatches, mode: &str) -> CommandResult {
    let name = matches.get_one::<String>("name").map_or("", String::as_str);
    let client = Client::new(matches)?;
    let answer = client.get(&format!("/v1/rules/rule/{}", segment(name)), &[])?.decided(&[200])?;
    let row = &answer.body["row"];
    let mut body = row["body"].as_object().cloned().ok_or_else(|| unexpected("row"))?;
    if row["mode"] == mode {
        return change::print_unchanged(matches);
    }
    body.insert("mode".to_owned(), mode.into());
    let operations = [json!({ "do": "put", "kind": "rule", "name": name, "body": body })];
    change::make_from(matches, &operations, &answer.body["revision"])
}

fn with_reason(mut question: serde_json::Value, matches: &ArgMatches) -> serde_json::Value {
    question["reason"] = matches.get_one::<String>("reason").map_or("", String::as_str).into();
    question
}

fn decide(matches: &ArgMatches, verb: &str) -> CommandResult {
    let id = matches.get_one::<u64>("change").copied().unwrap_or_default();
    let question = if verb == "reject" { with_reason(json!({}), matches) } else { json!({}) };
    let answer = Client::new(matches)?.post(&format!("/v1/rules/changes/{id}/{verb}"), &question)?;
    let answer = answer.decided(&[200])?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
        return Ok(ExitCode::SUCCESS);
    }
    print_change(&answer.body["change"])?;
    if verb == "approve" {
        say!("apply the change with: tidegate rules apply --change {id}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The error for a response that lacks a change, or a part of one.
pub(crate) fn unexpected(what: &str) -> Failure {
    Failure::failed(format!("the response has no `{what}`: does the server have another version?"))
}
