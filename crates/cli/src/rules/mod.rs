//! `tidegate rules`: looks at rules files, and at the rules of a server that keeps them in a store.

pub(crate) mod change;
mod import;
mod operations;
pub(crate) mod show;
mod validate;

pub(crate) use validate::read;

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use serde_json::json;

use crate::client::{self, Client, segment};
use crate::{CommandResult, Failure};
use change::{confirmed_args, make, print_change, reason_arg, send};

pub(crate) fn command() -> Command {
    Command::new("rules")
        .about("Looks at rules, plans changes of them, and makes them")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(validate::command())
        .subcommand(
            Command::new("list")
                .about("Lists templates, rules and overrides of a store")
                .arg(show::kind_arg())
                .arg(show::file_arg())
                .args(client::args()),
        )
        .subcommand(
            Command::new("get")
                .about("Shows one row of a store")
                .arg(Arg::new("row").value_name("KIND/NAME").required(true).help("Such as rule/per_user"))
                .args(client::args()),
        )
        .subcommand(import::command())
        .subcommand(plan_command())
        .subcommand(apply_command())
        .subcommand(
            Command::new("history")
                .about("Lists changes, the latest first; with a number, all about one")
                .arg(
                    Arg::new("change")
                        .value_name("CHANGE")
                        .value_parser(value_parser!(u64))
                        .help("Its number"),
                )
                .args(client::args()),
        )
        .subcommand(rollback_command())
        .subcommand(of_change("approve", "Approves a change of somebody else; it can be applied then"))
        .subcommand(of_change("reject", "Ends a change that was not applied").arg(reason_arg()))
        .subcommand(of_rule("shadow", "Lets a rule only count what it would deny"))
        .subcommand(of_rule("enforce", "Lets a rule deny again"))
}

fn plan_command() -> Command {
    Command::new("plan")
        .about("Shows what a change would do, and what it takes; changes nothing")
        .args(operations::args())
        .args(client::args())
}

fn apply_command() -> Command {
    Command::new("apply")
        .about("Makes a change: from a file, or one that was approved")
        .long_about(
            "Makes a change: from a file, or one that was approved. A change that would deny more than 5 % of recent \
             requests asks whether that is meant; above 50 % it waits for somebody else to approve it.\n\nExits with 0 if \
             it applies, 3 if it waits, 1 if it was refused, 64 if it makes no sense.",
        )
        .args(operations::args())
        .arg(
            Arg::new("change")
                .long("change")
                .value_name("CHANGE")
                .value_parser(value_parser!(u64))
                .conflicts_with_all(["file", "delete"])
                .help("The number of a change that was approved"),
        )
        .args(confirmed_args())
        .args(client::args())
}

fn rollback_command() -> Command {
    Command::new("rollback")
        .about("Restores what was there before a change, or at a revision")
        .long_about(
            "Restores what was there before a change, or at a revision. That is a change like any other: if it would deny \
             more than 5 % of recent requests it asks whether that is meant; above 50 % it waits for somebody else to approve it.",
        )
        .arg(
            Arg::new("change")
                .long("change")
                .value_name("CHANGE")
                .value_parser(value_parser!(u64))
                .required_unless_present("to_revision")
                .conflicts_with("to_revision")
                .help("The number of the change to undo"),
        )
        .arg(
            Arg::new("to_revision")
                .long("to-revision")
                .value_name("REVISION")
                .value_parser(value_parser!(u64))
                .help("Undoes all changes after this revision"),
        )
        .args(confirmed_args())
        .args(client::args())
}

fn of_change(name: &'static str, about: &'static str) -> Command {
    let change = Arg::new("change").value_name("CHANGE").required(true).value_parser(value_parser!(u64));
    Command::new(name).about(about).arg(change.help("Its number")).args(client::args())
}

fn of_rule(name: &'static str, about: &'static str) -> Command {
    let rule = Arg::new("name").value_name("RULE").required(true).help("Its name");
    Command::new(name).about(about).arg(rule).args(confirmed_args()).args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let Some((name, matches)) = matches.subcommand() else { return Ok(ExitCode::SUCCESS) };
    match name {
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
        Some(id) => send(&Client::new(matches)?, "/v1/rules/apply", json!({ "change": id }), matches),
    }
}

fn rollback(matches: &ArgMatches) -> CommandResult {
    let number = |id: &str| matches.get_one::<u64>(id);
    let question = match (number("change"), number("to_revision")) {
        (Some(id), _) => json!({ "change": id }),
        (None, revision) => json!({ "to_revision": revision }),
    };
    send(&Client::new(matches)?, "/v1/rules/rollback", with_reason(question, matches), matches)
}

fn set_mode(matches: &ArgMatches, mode: &str) -> CommandResult {
    let name = matches.get_one::<String>("name").map_or("", String::as_str);
    let path = format!("/v1/rules/{}/{mode}", segment(name));
    send(&Client::new(matches)?, &path, with_reason(json!({}), matches), matches)
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
        say!("apply it with: tidegate rules apply --change {id}")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// A change, or part of one, that is missing from an answer.
pub(crate) fn unexpected(what: &str) -> Failure {
    Failure::failed(format!("the server's answer has no {what}: is it of another version?"))
}
