//! Changes: plans them, asks for confirmation if they deny many requests, and applies them.

use std::fmt;
use std::io::IsTerminal as _;
use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches};
use serde_json::{Value, json};
use tidegate_server::timestamp;

use super::unexpected;
use crate::client::{Answer, Client};
use crate::out::{self, Reader, shown};
use crate::{CommandResult, Failure, style};

/// Exit status of a change that waits for approval, distinct from an applied and from a refused
/// change.
const EXIT_WAITING: u8 = 3;

/// Prefix of a refusal by which the server asks for confirmation.
const ASKS: &str = "confirmed: ";

/// The rows or changes that a question names.
const NAMES_MAX: usize = 5;

/// The flags of every command that changes rules.
pub(crate) fn confirmed_args() -> [Arg; 2] {
    let help = "Confirm without a question; an approval by another person is still required";
    [reason_arg(), yes_arg().help(help)]
}

pub(crate) fn yes_arg() -> Arg {
    let yes = Arg::new("yes").long("yes").short('y').action(ArgAction::SetTrue);
    yes.help("Confirm without a question")
}

pub(crate) fn reason_arg() -> Arg {
    Arg::new("reason")
        .long("reason")
        .value_name("TEXT")
        .default_value("")
        .hide_default_value(true)
        .help("Reason, for the history and the audit")
}

/// Prints the plan of a change.
pub(super) fn plan(matches: &ArgMatches, operations: &[Value]) -> CommandResult {
    let plan = request_plan(&Client::new(matches)?, &json!({ "operations": operations }))?;
    if matches.get_flag("json") {
        say!("{plan}")?;
    } else {
        print_plan(&plan)?;
        print_watch(&plan)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn request_plan(client: &Client, body: &Value) -> Result<Value, Failure> {
    Ok(client.post("/v1/rules/plan", body)?.decided(&[200])?.body)
}

/// Prints the plan of a change, and applies it.
pub(crate) fn make(matches: &ArgMatches, operations: &[Value]) -> CommandResult {
    make_from(matches, operations, &Value::Null)
}

/// The same for operations that were computed from rows at a revision. A later change of these rows
/// is a conflict.
pub(super) fn make_from(matches: &ArgMatches, operations: &[Value], revision: &Value) -> CommandResult {
    let planned = json!({ "operations": operations });
    let question = json!({ "operations": operations, "base_revision": revision });
    plan_and_send(matches, &planned, "/v1/rules/apply", question)
}

/// Prints the plan of a rollback, and applies it.
pub(super) fn roll_back(matches: &ArgMatches, target: &Value) -> CommandResult {
    plan_and_send(matches, &json!({ "rollback": target }), "/v1/rules/rollback", target.clone())
}

fn plan_and_send(matches: &ArgMatches, planned: &Value, path: &str, mut question: Value) -> CommandResult {
    let client = Client::new(matches)?;
    let plan = request_plan(&client, planned)?;
    if is_unchanged(&plan) {
        return print_unchanged(matches);
    }
    let is_printed = !matches.get_flag("json");
    if is_printed {
        print_plan(&plan)?;
    }
    if question["base_revision"].is_null() {
        // A change since the plan was shown causes a conflict.
        question["base_revision"] = plan["base_revision"].clone();
    }
    question["reason"] = matches.get_one::<String>("reason").map_or("", String::as_str).into();
    let removal = removal(&plan);
    let short = removal.as_ref().map_or_else(|| "Apply?".to_owned(), Removal::question);
    // The printed plan has the effect, so the question does not repeat it.
    let short = is_printed.then_some(short);
    // The server asks about the removal of a rule itself. An override is as easy to mistype.
    if !matches.get_flag("yes")
        && plan["effect"]["needs"] == "nothing"
        && let Some(removal) = removal
    {
        confirm(&removal.to_string(), short.as_deref())?;
    }
    // A server that asks against its plan has measured again, and its reason is new.
    let short = short.filter(|_| plan["effect"]["needs"] != "nothing");
    send(&client, path, question, matches, short.as_deref())
}

/// Whether a plan leaves all rows as they are. A rollback is a change all the same.
fn is_unchanged(plan: &Value) -> bool {
    let rows = list(&plan["diff"]);
    !rows.is_empty() && rows.iter().all(|row| row["does"] == "keep") && list(&plan["undoes"]).is_empty()
}

/// Prints that a request changes no row. No revision is made.
pub(super) fn print_unchanged(matches: &ArgMatches) -> CommandResult {
    if matches.get_flag("json") {
        say!("{}", json!({ "change": null }))?;
    } else {
        say!("nothing to change")?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The rows that a plan deletes, or the changes that it undoes.
enum Removal {
    Rows(String),
    Changes(String),
}

impl Removal {
    fn question(&self) -> String {
        match self {
            Self::Rows(names) => format!("Remove {names}?"),
            Self::Changes(names) => format!("Undo {names}?"),
        }
    }
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Rows(names) => write!(f, "the change deletes {names}"),
            Self::Changes(names) => write!(f, "the rollback undoes {names}"),
        }
    }
}

/// Names the rows that a plan deletes, or the changes that it undoes.
fn removal(plan: &Value) -> Option<Removal> {
    let deleted = list(&plan["diff"]).iter().filter(|row| row["does"] == "delete");
    let deleted: Vec<String> =
        deleted.map(|row| format!("{} {}", row["kind"].as_str().unwrap_or("row"), row["name"])).collect();
    if !deleted.is_empty() {
        return Some(Removal::Rows(first_of(&deleted)));
    }
    let undone: Vec<String> = list(&plan["undoes"]).iter().map(|id| format!("change {id}")).collect();
    (!undone.is_empty()).then(|| Removal::Changes(first_of(&undone)))
}

/// Joins the first names, and counts the others.
fn first_of(names: &[String]) -> String {
    let (first, others) = names.split_at(names.len().min(NAMES_MAX));
    let others = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
    format!("{}{others}", first.join(", "))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// Sends a request. If the server asks for confirmation and the user confirms, sends it again.
/// `short` is the question after a printed plan. Otherwise the question has the server's reason.
pub(crate) fn ask(
    client: &Client,
    path: &str,
    mut question: Value,
    matches: &ArgMatches,
    short: Option<&str>,
) -> Result<Answer, Failure> {
    question["confirmed"] = matches.get_flag("yes").into();
    let answer = client.post(path, &question)?;
    let asks =
        answer.body["detail"].as_str().filter(|detail| answer.status == 409 && detail.starts_with(ASKS));
    let Some(asks) = asks else { return Ok(answer) };
    // The last part of the text explains how to confirm in JSON.
    let words = asks.trim_start_matches(ASKS);
    confirm(words.rsplit_once(';').map_or(words, |(words, _)| words), short)?;
    question["confirmed"] = true.into();
    client.post(path, &question)
}

/// Requests a change, and prints the outcome.
pub(crate) fn send(
    client: &Client,
    path: &str,
    question: Value,
    matches: &ArgMatches,
    short: Option<&str>,
) -> CommandResult {
    let answer = ask(client, path, question, matches, short)?.decided(&[200, 202])?;
    let change = &answer.body["change"];
    if change.is_null() {
        return print_unchanged(matches);
    }
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        print_change(change)?;
        print_watch(&answer.body)?;
    }
    print_not_in_force(&answer.body);
    if answer.status == 200 {
        return Ok(ExitCode::SUCCESS);
    }
    if !matches.get_flag("json") {
        let (id, author) = (&change["id"], change["author"].as_str().unwrap_or_default());
        say!(
            "the change waits for an approval by another person than {}: tidegate rules approve {id}",
            shown(author)
        )?;
    }
    Ok(ExitCode::from(EXIT_WAITING))
}

/// Prints the reason why a stored change is not yet in force on this server.
pub(crate) fn print_not_in_force(answer: &Value) {
    if let Some(problem) = answer["not_in_force"].as_str() {
        let lines: Vec<String> = problem.lines().map(shown).collect();
        let warning = style::paint_aside(style::WARNING, "warning:");
        aside!("{warning} stored, but not yet in force on this server: {}", lines.join("\n"));
    }
}

/// Asks the user at the terminal to confirm. Without a terminal, nothing is confirmed.
fn confirm(reason: &str, short: Option<&str>) -> Result<(), Failure> {
    if !std::io::stdin().is_terminal() {
        return Err(Failure::failed(format!("not applied: {reason}; confirm with --yes")));
    }
    let question = short.map_or_else(|| format!("{}. Continue?", shown(reason)), shown);
    out::ask(&format!("{question} [y/N] "))?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map_err(Failure::failed)?;
    if matches!(line.trim(), "y" | "Y" | "yes") { Ok(()) } else { Err(Failure::failed("not applied")) }
}

/// Prints a plan for a reviewer: the changes field by field, then their effect.
fn print_plan(plan: &Value) -> Result<(), Failure> {
    let rows = plan["diff"].as_array().map(Vec::as_slice).unwrap_or_default();
    for row in rows {
        let text = |field: &str| row[field].as_str().unwrap_or_default();
        let does = if row["does"] == "delete" {
            style::paint(style::BAD, text("does"))
        } else {
            text("does").to_owned()
        };
        say!("{does} {} {:?}", text("kind"), text("name"))?;
        for field in row["fields"].as_array().into_iter().flatten() {
            let name = field["field"].as_str().unwrap_or_default();
            for (sign, value) in [('-', &field["before"]), ('+', &field["after"])] {
                if !value.is_null() {
                    say!("  {sign} {}", shown(format_args!("{name} = {value}{}", time_of(name, value))))?;
                }
            }
        }
    }
    print_effect(&plan["effect"])?;
    for warning in plan["warnings"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        say!("{} {}", style::paint(style::WARNING, "warning:"), shown(warning))?;
    }
    Ok(())
}

/// The time of an expiry, which rows have in milliseconds.
fn time_of(field: &str, value: &Value) -> String {
    let at_ms = value.as_u64().filter(|_| field == "expires");
    at_ms.map_or_else(String::new, |at_ms| format!(" ({})", timestamp(at_ms)))
}

fn print_effect(effect: &Value) -> Result<Reader, Failure> {
    say!("effect: {}", shown(effect["because"].as_str().unwrap_or("unknown")))?;
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
    say!("needs: {}", effect["needs"].as_str().unwrap_or("unknown"))
}

/// Prints the rules that the server watches after a change, and the rules that it does not watch.
fn print_watch(answer: &Value) -> Result<(), Failure> {
    let watch = &answer["watch"];
    if !watch.is_null() {
        say!("{}", shown(watch_line(watch)))?;
        let event = if watch["action"] == "alarm" { "an alarm" } else { "an automatic rollback" };
        say!("{event} shows in `tidegate check`, `rules list`, `rules history`, `status` and `why`")?;
    }
    if let Some(reason) = answer["not_watched"].as_str() {
        say!("not watched: {}", shown(reason))?;
    }
    Ok(())
}

fn watch_line(watch: &Value) -> String {
    let number = |field: &str| watch[field].as_u64().unwrap_or_default();
    let rules: Vec<String> = list(&watch["rules"]).iter().map(Value::to_string).collect();
    let more = number("rule_count").saturating_sub(rules.len() as u64);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    let (least, percent) = (number("keys_min"), number("keys_percent_min"));
    let tenant = watch["tenant"].as_str().map_or_else(String::new, |tenant| format!(" of tenant {tenant:?}"));
    let then = match watch["alarm_because"].as_str() {
        None => "The change rolls back if".to_owned(),
        Some(because) => format!("The change is never rolled back, because {because}. An alarm is raised if"),
    };
    format!(
        "watched for {} s: rule {}{more}. {then} a rule newly denies {least} distinct keys{tenant} or more, \
         {percent} % of its keys, and {} times as many as before",
        number("seconds"),
        rules.join(", "),
        number("keys_times"),
    )
}

/// A change in a line.
pub(crate) fn print_change(change: &Value) -> Result<Reader, Failure> {
    let text = |field: &str| change[field].as_str().unwrap_or_default();
    let revision =
        change["revision"].as_u64().map_or_else(String::new, |revision| format!(", revision {revision}"));
    let (id, state, author) = (&change["id"], text("state").replace('_', " "), text("author"));
    let at =
        change["created_ms"].as_u64().map_or_else(String::new, |at_ms| format!(", {}", timestamp(at_ms)));
    let alarm = &change["alarm"];
    let reason = alarm["reason"].as_str().map_or_else(String::new, |reason| format!(", alarm: {reason}"));
    say!("change {id}: {state}{revision}, by {}{at}{}", shown(author), shown(reason))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_watch_names_its_rules_and_its_conditions() {
        let mut watch = json!({
            "seconds": 300, "rules": ["a", "b"], "rule_count": 2, "keys_times": 10,
            "keys_min": 10, "keys_percent_min": 5, "tenant": null, "action": "rollback",
        });
        assert_eq!(
            watch_line(&watch),
            "watched for 300 s: rule \"a\", \"b\". The change rolls back if a rule newly denies 10 distinct \
             keys or more, 5 % of its keys, and 10 times as many as before"
        );
        watch["tenant"] = "acme".into();
        watch["alarm_because"] = "another person approved it".into();
        let told = watch_line(&watch);
        let alarm =
            "The change is never rolled back, because another person approved it. An alarm is raised if";
        assert!(told.contains(alarm) && told.contains("keys of tenant \"acme\" or more"), "{told}");
        watch["rule_count"] = 25.into();
        assert!(watch_line(&watch).starts_with("watched for 300 s: rule \"a\", \"b\" and 23 more."));
    }

    #[test]
    fn deletions_and_rollbacks_are_asked_about_and_other_changes_are_not() {
        let plan = |does: &str, undoes: Value| {
            let row = json!({ "does": does, "kind": "override", "name": "vip" });
            removal(&json!({ "diff": [row], "undoes": undoes }))
        };
        let texts = |does: &str, undoes: Value| {
            plan(does, undoes).map(|removal| (removal.to_string(), removal.question()))
        };
        let of = |reason: &str, question: &str| Some((reason.to_owned(), question.to_owned()));
        assert_eq!(texts("update", json!([])), None);
        assert_eq!(
            texts("delete", json!([])),
            of("the change deletes override \"vip\"", "Remove override \"vip\"?")
        );
        assert_eq!(texts("update", json!([7])), of("the rollback undoes change 7", "Undo change 7?"));
        let (many, _) = texts("update", json!([1, 2, 3, 4, 5, 6, 7])).expect("a question");
        assert!(many.ends_with("change 4, change 5 and 2 more"), "{many}");
    }
}
