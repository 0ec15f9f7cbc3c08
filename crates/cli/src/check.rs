//! `tidegate check`: makes one check on a running server.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use comfy_table::{Cell, Table};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::{self, Answer, Client};
use crate::out::{Reader, shown};
use crate::{CommandResult, Failure, notice, style, table};

/// Exit status of a denied check, distinct from an allowed check and from a failed command.
const EXIT_DENIED: u8 = 2;

pub(crate) fn command() -> Command {
    Command::new("check")
        .about("Check whether a request may pass")
        .long_about(
            "Check whether a request may pass, and charge it if so. Dimensions such as user=alice \
             endpoint=/x describe the request; the rules of the server select the limits.\n\nExit status: \
             0 if the request may pass, 2 if it is denied, 64 for wrong usage, 69 if the server is \
             unreachable, 1 if it returns no decision.",
        )
        .arg(
            Arg::new("dimensions")
                .value_name("NAME=VALUE")
                .action(ArgAction::Append)
                .help("Dimensions of the request"),
        )
        .arg(
            Arg::new("cost")
                .long("cost")
                .value_name("N")
                .default_value("1")
                .value_parser(value_parser!(u64))
                .help("Units to charge; 0 reads the meters without a charge"),
        )
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let cost = matches.get_one::<u64>("cost").copied().unwrap_or(1);
    let question = json!({ "dimensions": dimensions(matches)?, "cost": cost });
    let answer = client.post("/v1/check", &question)?.decided(&[200])?;
    let check_answer = CheckAnswer::read(&answer)?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        print(&check_answer, cost)?;
        notice::print_last_of(&client);
    }
    Ok(if check_answer.decision == "allow" { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DENIED) })
}

fn dimensions(matches: &ArgMatches) -> Result<Map<String, Value>, Failure> {
    let mut dimensions = Map::new();
    for pair in matches.get_many::<String>("dimensions").into_iter().flatten() {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(Failure::usage(format!(
                "dimensions: {pair:?} is not NAME=VALUE, such as user=alice"
            )));
        };
        if dimensions.insert(name.to_owned(), Value::from(value)).is_some() {
            return Err(Failure::usage(format!("dimensions: {name:?} is given twice")));
        }
    }
    Ok(dimensions)
}

/// The fields of the response that are printed.
#[derive(Deserialize)]
struct CheckAnswer {
    decision: String,
    denied_by: Option<String>,
    rules_version: String,
    source: String,
    reason: Option<String>,
    block: Option<BlockAnswer>,
    rules: Vec<RuleAnswer>,
    no_rule: Option<NoRuleAnswer>,
}

/// Why no rule applies.
#[derive(Deserialize)]
struct NoRuleAnswer {
    has_rules: bool,
    lacking: Vec<LackingAnswer>,
}

/// A rule, and the dimensions that it needs and the request lacks.
#[derive(Deserialize)]
struct LackingAnswer {
    rule: String,
    dimensions: Vec<String>,
}

/// The emergency that blocked the request.
#[derive(Deserialize)]
struct BlockAnswer {
    id: String,
    until: String,
}

#[derive(Deserialize)]
struct RuleAnswer {
    rule: String,
    class: String,
    mode: String,
    allowed: bool,
    limit: u64,
    remaining: u64,
    reset_after_ms: u64,
    retry_after_ms: Option<u64>,
    never: bool,
    #[serde(rename = "override", default)]
    override_name: String,
    #[serde(default)]
    emergency: String,
}

impl CheckAnswer {
    fn read(answer: &Answer) -> Result<Self, Failure> {
        Self::deserialize(&answer.body)
            .map_err(|error| Failure::failed(format!("the response is not a decision: {error}")))
    }
}

fn print(check_answer: &CheckAnswer, cost: u64) -> Result<Reader, Failure> {
    let style = if check_answer.decision == "allow" { style::GOOD } else { style::BAD };
    let decision = style::paint(style, shown(&check_answer.decision));
    match reason(check_answer, cost) {
        Some(reason) => say!("{decision}: {}", shown(reason))?,
        None => say!("{decision}")?,
    };
    if check_answer.rules.is_empty() {
        say!("{}", shown(no_rule(check_answer.no_rule.as_ref())))?;
    } else {
        say!("{}", rules_table(&check_answer.rules))?;
    }
    say!("rules {}, decision source: {}", shown(&check_answer.rules_version), shown(&check_answer.source))
}

/// Why no rule applies.
fn no_rule(no_rule: Option<&NoRuleAnswer>) -> String {
    let Some(NoRuleAnswer { has_rules, lacking }) = no_rule else { return "no rule applies".to_owned() };
    if !has_rules {
        return "no rule applies: the server has no rules".to_owned();
    }
    let needs = |lacking: &LackingAnswer| {
        let names: Vec<String> = lacking.dimensions.iter().map(|name| format!("{name:?}")).collect();
        format!("{} needs {}", lacking.rule, names.join(", "))
    };
    match lacking.iter().map(needs).collect::<Vec<_>>().join("; ") {
        needs if needs.is_empty() => "no rule applies".to_owned(),
        needs => format!("no rule applies: {needs}"),
    }
}

/// The reason of a decision. A request that passed by its limits needs none.
fn reason(check_answer: &CheckAnswer, cost: u64) -> Option<String> {
    let rule = check_answer.denied_by.as_deref();
    let of_rule = rule.map_or_else(String::new, |rule| format!(" of rule {rule:?}"));
    Some(match (check_answer.reason.as_deref().unwrap_or_default(), &check_answer.block, rule) {
        ("block", Some(BlockAnswer { id, until }), _) => format!("blocked until {until} by emergency {id:?}"),
        ("origin_unreachable", ..) => {
            outage(&check_answer.source, check_answer.decision == "allow", &of_rule)
        }
        ("owner_unreachable", ..) => {
            format!("the owner region{of_rule} did not reply; `strict` limits fail closed")
        }
        ("no_room", ..) => "no meter has room for the key".to_owned(),
        ("shed", ..) => "the server is overloaded and shed the check without a decision".to_owned(),
        (_, _, Some(rule)) => {
            at_limit(check_answer.rules.iter().find(|known| known.rule == rule), &of_rule, cost)
        }
        _ => return None,
    })
}

/// A decision without the origin, by its decision source.
pub(crate) fn outage(source: &str, is_allowed: bool, of_rule: &str) -> String {
    let consequence = match (source, is_allowed) {
        ("closed", _) => format!("the limit{of_rule} fails closed"),
        ("open", _) => "the limit fails open".to_owned(),
        (_, true) => "decided locally".to_owned(),
        (_, false) => format!("decided locally: the node share{of_rule} is used up"),
    };
    format!("the origin is unreachable; {consequence}")
}

fn at_limit(rule: Option<&RuleAnswer>, of_rule: &str, cost: u64) -> String {
    match rule {
        Some(RuleAnswer { limit: 0, .. }) => format!("the limit{of_rule} is 0"),
        Some(rule) if rule.never => format!("the cost of {cost} exceeds the burst{of_rule}"),
        Some(RuleAnswer { retry_after_ms: Some(ms), .. }) => {
            format!("the limit{of_rule} is reached; retry after {}", seconds(*ms))
        }
        _ => format!("the limit{of_rule} is reached"),
    }
}

fn rules_table(rules: &[RuleAnswer]) -> Table {
    let mut table = table::with_header([
        "rule",
        "class",
        "mode",
        "verdict",
        "set by",
        "limit",
        "remaining",
        "reset after",
        "retry after",
    ]);
    for rule in rules {
        table.add_row(row(rule));
    }
    table::align_right(&mut table, 5);
    table::hide_empty(&mut table);
    table
}

fn row(rule: &RuleAnswer) -> [Cell; 9] {
    let retry = match rule.retry_after_ms {
        _ if rule.never => "never".to_owned(),
        Some(ms) => seconds(ms),
        None => "-".to_owned(),
    };
    let set_by = match (rule.emergency.as_str(), rule.override_name.as_str()) {
        ("", "") => String::new(),
        ("", name) => format!("override {name}"),
        (id, _) => format!("emergency {id}"),
    };
    let text = |text: &str| Cell::new(shown(text));
    [
        text(&rule.rule),
        text(&rule.class),
        text(&rule.mode),
        table::verdict(if rule.allowed { "allow" } else { "deny" }),
        text(&set_by),
        text(&rule.limit.to_string()),
        text(&rule.remaining.to_string()),
        text(&seconds(rule.reset_after_ms)),
        text(&retry),
    ]
}

/// Milliseconds as seconds, exactly.
fn seconds(ms: u64) -> String {
    format!("{}.{:03} s", ms / 1_000, ms % 1_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(fields: &Value) -> CheckAnswer {
        let mut whole = json!({
            "decision": "deny", "denied_by": "per_user", "rules_version": "r1", "source": "local",
            "reason": "limit", "block": null,
            "rules": [{
                "rule": "per_user", "class": "comfort", "mode": "enforce", "allowed": false, "limit": 2,
                "remaining": 0, "reset_after_ms": 60_000, "retry_after_ms": 1_500, "never": false,
            }],
        });
        for (name, value) in fields.as_object().expect("an object") {
            whole[name] = value.clone();
        }
        CheckAnswer::deserialize(whole).expect("an answer")
    }

    #[test]
    fn a_limit_a_block_and_an_outage_have_different_reasons() {
        let until = "2026-11-18T10:00:00.000Z";
        for (fields, expected) in [
            (json!({}), "the limit of rule \"per_user\" is reached; retry after 1.500 s"),
            (
                json!({ "reason": "block", "block": { "id": "block:per_user:eve", "until": until } }),
                "blocked until 2026-11-18T10:00:00.000Z by emergency \"block:per_user:eve\"",
            ),
            (
                json!({ "reason": "origin_unreachable" }),
                "the origin is unreachable; decided locally: the node share of rule \"per_user\" is used up",
            ),
            (
                json!({ "reason": "origin_unreachable", "source": "closed" }),
                "the origin is unreachable; the limit of rule \"per_user\" fails closed",
            ),
            (
                json!({ "reason": "origin_unreachable", "decision": "allow", "denied_by": null }),
                "the origin is unreachable; decided locally",
            ),
            (
                json!({
                    "reason": "origin_unreachable", "decision": "allow", "denied_by": null,
                    "source": "open",
                }),
                "the origin is unreachable; the limit fails open",
            ),
            (
                json!({ "reason": "owner_unreachable", "source": "closed" }),
                "the owner region of rule \"per_user\" did not reply; `strict` limits fail closed",
            ),
            (json!({ "reason": "no_room", "source": "refused" }), "no meter has room for the key"),
            (
                json!({
                    "reason": "shed", "source": "shed", "decision": "allow", "denied_by": null,
                    "rules": [],
                }),
                "the server is overloaded and shed the check without a decision",
            ),
        ] {
            assert_eq!(reason(&answer(&fields), 1).as_deref(), Some(expected));
        }
        let allowed = json!({ "decision": "allow", "denied_by": null, "reason": null });
        assert_eq!(reason(&answer(&allowed), 1), None);
    }

    #[test]
    fn a_check_without_rules_names_the_dimensions_that_it_lacks() {
        let text = |answer: Value| no_rule(NoRuleAnswer::deserialize(answer).ok().as_ref());
        assert_eq!(
            text(json!({ "has_rules": false, "lacking": [] })),
            "no rule applies: the server has no rules"
        );
        let lacking = json!([
            { "rule": "per_user", "dimensions": ["user"] }, { "rule": "per_path", "dimensions": ["ip", "path"] },
        ]);
        assert_eq!(
            text(json!({ "has_rules": true, "lacking": lacking })),
            "no rule applies: per_user needs \"user\"; per_path needs \"ip\", \"path\""
        );
        assert_eq!(text(json!({ "has_rules": true, "lacking": [] })), "no rule applies");
        assert_eq!(text(Value::Null), "no rule applies");
    }

    #[test]
    fn never_allowed_request_states_the_reason() {
        let with = |field: &str, value: Value| {
            let mut rule = json!({
                "rule": "per_user", "class": "comfort", "mode": "enforce", "allowed": false, "limit": 2,
                "remaining": 0, "reset_after_ms": 1, "retry_after_ms": null, "never": true,
            });
            rule[field] = value;
            reason(&answer(&json!({ "rules": [rule] })), 3)
        };
        let exceeded = "the cost of 3 exceeds the burst of rule \"per_user\"";
        assert_eq!(with("limit", json!(2)).as_deref(), Some(exceeded));
        assert_eq!(with("limit", json!(0)).as_deref(), Some("the limit of rule \"per_user\" is 0"));
        let absent = reason(&answer(&json!({ "rules": [] })), 1);
        assert_eq!(absent.as_deref(), Some("the limit of rule \"per_user\" is reached"));
    }
}
