//! Changes: shown before they are made, asked about where they deny much, and made.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::{Value, json};
use tidegate_server::timestamp;

use super::unexpected;
use crate::client::{Answer, Client};
use crate::out::{self, Reader, shown};
use crate::{CommandResult, Failure};

/// How a change that waits for somebody else ends: told apart from one that applies, and from one that was refused.
const EXIT_WAITING: u8 = 3;

/// What the server's refusal begins with where it asks whether something is meant.
const ASKS: &str = "confirmed: ";

/// The flags of every command that changes rules.
pub(crate) fn confirmed_args() -> [Arg; 2] {
    let help = "Confirm what would be asked; never stands for the approval of somebody else";
    [reason_arg(), yes_arg().help(help)]
}

pub(crate) fn yes_arg() -> Arg {
    let yes = Arg::new("yes").long("yes").short('y').action(ArgAction::SetTrue);
    yes.help("Confirm what would be asked")
}

pub(crate) fn reason_arg() -> Arg {
    Arg::new("reason")
        .long("reason")
        .value_name("TEXT")
        .default_value("")
        .help("Why, for the history and the audit")
}

/// Shows what a change would do.
pub(super) fn plan(matches: &ArgMatches, operations: &[Value]) -> CommandResult {
    let answer = ask_for_plan(&Client::new(matches)?, operations)?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        print_plan(&answer.body)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ask_for_plan(client: &Client, operations: &[Value]) -> Result<Answer, Failure> {
    client.post("/v1/rules/plan", &json!({ "operations": operations }))?.decided(&[200])
}

/// Shows what a change would do, and makes it.
pub(crate) fn make(matches: &ArgMatches, operations: &[Value]) -> CommandResult {
    let client = Client::new(matches)?;
    let plan = ask_for_plan(&client, operations)?;
    if !matches.get_flag("json") {
        print_plan(&plan.body)?;
    }
    // What changed since the plan was shown is a conflict.
    let question = json!({
        "operations": operations,
        "base_revision": plan.body["base_revision"],
        "reason": matches.get_one::<String>("reason"),
    });
    send(&client, "/v1/rules/apply", question, matches)
}

/// Asks for something, once more if the server wants to know whether it is meant and somebody says so.
pub(crate) fn ask(
    client: &Client,
    path: &str,
    mut question: Value,
    matches: &ArgMatches,
) -> Result<Answer, Failure> {
    question["confirmed"] = matches.get_flag("yes").into();
    let answer = client.post(path, &question)?;
    let asks =
        answer.body["detail"].as_str().filter(|detail| answer.status == 409 && detail.starts_with(ASKS));
    let Some(asks) = asks else { return Ok(answer) };
    confirm(asks)?;
    question["confirmed"] = true.into();
    client.post(path, &question)
}

/// Asks for a change, and tells what became of it.
pub(crate) fn send(client: &Client, path: &str, question: Value, matches: &ArgMatches) -> CommandResult {
    let answer = ask(client, path, question, matches)?.decided(&[200, 202])?;
    let change = &answer.body["change"];
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        print_change(change)?;
    }
    tell_not_in_force(&answer.body);
    if answer.status == 200 {
        return Ok(ExitCode::SUCCESS);
    }
    if !matches.get_flag("json") {
        let (id, author) = (&change["id"], change["author"].as_str().unwrap_or_default());
        say!("it waits for somebody other than {}: tidegate rules approve {id}", shown(author))?;
    }
    Ok(ExitCode::from(EXIT_WAITING))
}

/// Says what a server could not put in force at once.
pub(crate) fn tell_not_in_force(answer: &Value) {
    if let Some(problem) = answer["not_in_force"].as_str() {
        let lines: Vec<String> = problem.lines().map(shown).collect();
        aside!("it is in the store, and not yet in force on this server: {}", lines.join("\n"));
    }
}

/// Asks the person at the terminal. Nobody there has not said yes.
fn confirm(asks: &str) -> Result<(), Failure> {
    // How to say so in JSON comes last.
    let words = asks.trim_start_matches(ASKS);
    let words = words.rsplit_once(';').map_or(words, |(words, _)| words);
    if !std::io::stdin().is_terminal() {
        return Err(Failure::failed(format!("not applied: {words}; --yes says that it is meant")));
    }
    out::ask(&format!("{}. Is that meant? [y/N] ", shown(words)))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(Failure::failed)?;
    if matches!(line.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::failed("not applied")) }
}

/// A plan as a reviewer wants it: what changes, field by field, then what that does.
fn print_plan(plan: &Value) -> Result<(), Failure> {
    let rows = plan["diff"].as_array().map(Vec::as_slice).unwrap_or_default();
    for row in rows {
        let text = |field: &str| row[field].as_str().unwrap_or_default();
        say!("{} {} {:?}", text("does"), text("kind"), text("name"))?;
        for field in row["fields"].as_array().into_iter().flatten() {
            let name = field["field"].as_str().unwrap_or_default();
            for (sign, value) in [('-', &field["before"]), ('+', &field["after"])] {
                if !value.is_null() {
                    say!("  {sign} {}", shown(format_args!("{name} = {value}")))?;
                }
            }
        }
    }
    print_effect(&plan["effect"])?;
    for warning in plan["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        say!("warning: {}", shown(warning))?;
    }
    Ok(())
}

fn print_effect(effect: &Value) -> Result<Reader, Failure> {
    say!("effect: {}", shown(effect["because"].as_str().unwrap_or("not known")))?;
    let measured = &effect["measured"];
    if !measured.is_null() {
        let number = |field: &str| measured[field].as_f64().unwrap_or_default();
        say!(
            "  of {:.0} requests of the last hour (from {} records): {:.0} newly denied, {:.0} newly allowed",
            number("requests"),
            measured["records"],
            number("newly_denied"),
            number("newly_allowed"),
        )?;
    }
    say!("needs: {}", effect["needs"].as_str().unwrap_or("not known"))
}

/// A change in a line.
pub(crate) fn print_change(change: &Value) -> Result<Reader, Failure> {
    let text = |field: &str| change[field].as_str().unwrap_or_default();
    let revision =
        change["revision"].as_u64().map_or_else(String::new, |revision| format!(", revision {revision}"));
    let (id, state, author) = (&change["id"], text("state").replace('_', " "), text("author"));
    let at =
        change["created_ms"].as_u64().map_or_else(String::new, |at_ms| format!(", {}", timestamp(at_ms)));
    say!("change {id}: {state}{revision}, by {}{at}", shown(author))
}

/// All about a change.
pub(super) fn print_whole(answer: &Value) -> Result<(), Failure> {
    let change = answer.get("change").ok_or_else(|| unexpected("change"))?;
    print_change(change)?;
    if let Some(approver) = change["approver"].as_str() {
        say!("approved by {}", shown(approver))?;
    }
    if let Some(reason) = change["reason"].as_str().filter(|reason| !reason.is_empty()) {
        say!("reason: {}", shown(reason))?;
    }
    for operation in answer["operations"].as_array().into_iter().flatten() {
        let text = |field: &str| operation[field].as_str().unwrap_or_default();
        say!("{} {} {:?} {}", text("do"), text("kind"), text("name"), shown(body_of(operation)))?;
    }
    if !change["effect"].is_null() {
        print_effect(&change["effect"])?;
    }
    Ok(())
}

fn body_of(operation: &Value) -> String {
    operation.get("body").map_or_else(String::new, Value::to_string)
}
