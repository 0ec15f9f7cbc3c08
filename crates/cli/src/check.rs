//! `tidegate check`: asks a running server about one request.

use std::process::ExitCode;

use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::client::{self, Answer, Client};
use crate::out::{Reader, shown};
use crate::{CommandResult, Failure};

/// How a check that was denied ends: told apart from a check that did not come about, and from one that passed.
const EXIT_DENIED: u8 = 2;

pub(crate) fn command() -> Command {
    Command::new("check")
        .about("Asks a running server whether a request may pass")
        .long_about(
            "Asks a running server whether a request may pass, and charges it if so. The request is described by its \
             dimensions, such as user=alice endpoint=/x; the server's rules say which limits apply.\n\nExits with 0 if \
             it may pass, 2 if not, 64 if the question makes no sense, 69 if the server is not there, 1 if it gives no \
             decision.",
        )
        .arg(
            Arg::new("dimensions")
                .value_name("NAME=VALUE")
                .action(ArgAction::Append)
                .help("What the request is known by"),
        )
        .arg(
            Arg::new("cost")
                .long("cost")
                .value_name("N")
                .default_value("1")
                .value_parser(value_parser!(u64))
                .help("What the request costs; 0 looks without charging"),
        )
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let cost = matches.get_one::<u64>("cost").copied().unwrap_or(1);
    let question = json!({ "dimensions": dimensions(matches)?, "cost": cost });
    let answer = client.post("/v1/check", &question)?.decided(&[200])?;
    let word = CheckAnswer::read(&answer)?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        print(&word)?;
    }
    Ok(if word.decision == "allow" { ExitCode::SUCCESS } else { ExitCode::from(EXIT_DENIED) })
}

fn dimensions(matches: &ArgMatches) -> Result<Map<String, Value>, Failure> {
    let mut dimensions = Map::new();
    for pair in matches.get_many::<String>("dimensions").into_iter().flatten() {
        let Some((name, value)) = pair.split_once('=') else {
            return Err(Failure::usage(format!("{pair:?} is not NAME=VALUE, such as user=alice")));
        };
        if dimensions.insert(name.to_owned(), Value::from(value)).is_some() {
            return Err(Failure::usage(format!("{name}: given twice")));
        }
    }
    Ok(dimensions)
}

/// The parts of an answer that are shown.
#[derive(Deserialize)]
struct CheckAnswer {
    decision: String,
    denied_by: Option<String>,
    rules_version: String,
    source: String,
    rules: Vec<RuleAnswer>,
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
}

impl CheckAnswer {
    fn read(answer: &Answer) -> Result<Self, Failure> {
        Self::deserialize(&answer.body)
            .map_err(|error| Failure::failed(format!("the server's answer is not one to a check: {error}")))
    }
}

fn print(word: &CheckAnswer) -> Result<Reader, Failure> {
    match &word.denied_by {
        Some(rule) => say!("{}, by {}", word.decision, shown(rule))?,
        None => say!("{}", word.decision)?,
    };
    if word.rules.is_empty() {
        say!("no rule applies")?;
    } else {
        say!("{}", table(&word.rules))?;
    }
    say!("rules {}, decided from: {}", word.rules_version, word.source)
}

fn table(rules: &[RuleAnswer]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["rule", "class", "mode", "says", "limit", "remaining", "reset after", "retry after"]);
    for rule in rules {
        table.add_row(row(rule).map(shown));
    }
    for column in table.column_iter_mut().skip(4) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn row(rule: &RuleAnswer) -> [String; 8] {
    let says = if rule.allowed { "allow" } else { "deny" };
    let retry = match rule.retry_after_ms {
        _ if rule.never => "never".to_owned(),
        Some(ms) => seconds(ms),
        None => "-".to_owned(),
    };
    [
        rule.rule.clone(),
        rule.class.clone(),
        rule.mode.clone(),
        says.to_owned(),
        rule.limit.to_string(),
        rule.remaining.to_string(),
        seconds(rule.reset_after_ms),
        retry,
    ]
}

/// Milliseconds as seconds, exactly.
fn seconds(ms: u64) -> String {
    format!("{}.{:03} s", ms / 1_000, ms % 1_000)
}
