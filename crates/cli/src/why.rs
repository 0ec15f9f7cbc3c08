//! `tidegate why`: asks a running server's decision log why a key was denied.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;

use crate::client::{self, Answer, Client};
use crate::out::shown;
use crate::{CommandResult, Failure};

/// How a question ends to which the log has no answer: told apart from one that was not answered.
const EXIT_NOTHING: u8 = 2;

pub(crate) fn command() -> Command {
    Command::new("why")
        .about("Asks a running server why a key was denied")
        .long_about(
            "Asks a running server's decision log what was decided about a key around a moment: denials first, the nearest \
             of them at the top, each with the limit that decided, its counter at that moment and its rule's version. A key \
             is what a limit counts, or any dimension of the request, such as user:42.\n\nEvery denial is in the log, and \
             a sample of what passed.\n\nExits with 0 if there is a record, 2 if there is none, 64 if the question makes no \
             sense, 69 if the server is not there, 1 if it does not answer.",
        )
        .arg(arg("key", "KEY", "What was denied, such as user:42").required(true))
        .arg(
            arg(
                "at",
                "TIME",
                "When: RFC 3339, such as 2026-11-16T14:32:17Z, or the last 14:32:17 by UTC, or \"now\"",
            )
            .default_value("now"),
        )
        .arg(arg("window", "TIME", "How far before and after that to look, up to 1h").default_value("1m"))
        .arg(arg("records", "N", "How many records to show, 1 to 100").default_value("10"))
        .arg(tenant_arg())
        .args(client::args())
}

fn arg(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

/// The flag for whoever runs the server.
pub(crate) fn tenant_arg() -> Arg {
    arg("tenant", "NAME", "Whose, for a token without a tenant [default: the token's own]")
}

/// The flags that are given, as parameters.
pub(crate) fn query<'m>(matches: &'m ArgMatches, flags: &[&'static str]) -> Vec<(&'static str, &'m str)> {
    let given = |flag: &&'static str| Some((*flag, matches.get_one::<String>(flag)?.as_str()));
    flags.iter().filter_map(given).collect()
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let query = query(matches, &["key", "at", "window", "records", "tenant"]);
    let answer = client.get("/v1/why", &query)?.decided(&[200])?;
    let why_answer = WhyAnswer::read(&answer)?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
    } else {
        say!("{}", summary_line(&why_answer))?;
    }
    Ok(if why_answer.records.is_empty() { ExitCode::from(EXIT_NOTHING) } else { ExitCode::SUCCESS })
}

/// The parts of an answer that are shown.
#[derive(Deserialize)]
struct WhyAnswer {
    key: String,
    at: String,
    window_ms: u64,
    records: Vec<RecordAnswer>,
}

#[derive(Deserialize)]
struct RecordAnswer {
    at: String,
    verdict: String,
    surface: String,
    key: String,
    cost: u64,
    rule: String,
    rule_version: u64,
    set_version: String,
    #[serde(default)]
    replaced_by: String,
    limit: LimitAnswer,
    remaining: u64,
    level: u64,
    retry_ms: Option<u64>,
    source: String,
    region: String,
    node: String,
}

#[derive(Deserialize)]
pub(crate) struct LimitAnswer {
    amount: u64,
    burst: u64,
    period_ms: u64,
}

impl std::fmt::Display for LimitAnswer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { amount, burst, period_ms } = self;
        match period_ms {
            ms if ms % 1_000 == 0 => write!(f, "{amount} per {}s", ms / 1_000)?,
            ms => write!(f, "{amount} per {ms}ms")?,
        }
        if burst == amount { Ok(()) } else { write!(f, ", burst {burst}") }
    }
}

impl WhyAnswer {
    fn read(answer: &Answer) -> Result<Self, Failure> {
        Self::deserialize(&answer.body)
            .map_err(|error| Failure::failed(format!("the server's answer is not one of its log: {error}")))
    }
}

/// What the log says, in words.
fn summary_line(why_answer: &WhyAnswer) -> String {
    let [nearest, ..] = why_answer.records.as_slice() else {
        let WhyAnswer { key, at, window_ms, .. } = why_answer;
        return shown(format_args!("nothing in the log about {key} within {window_ms} ms of {at}"));
    };
    format!("{}\n{}", shown(sentence(nearest)), table(&why_answer.records))
}

/// The nearest record in words.
fn sentence(record: &RecordAnswer) -> String {
    let RecordAnswer { at, verdict, key, rule, limit, remaining, level, .. } = record;
    let retry = match record.retry_ms {
        Some(ms) => format!("; it would have passed {ms} ms later"),
        None => String::new(),
    };
    let replaced = match record.replaced_by.as_str() {
        "" => String::new(),
        name => format!(", replaced by {name}"),
    };
    let place = if record.region.is_empty() { String::new() } else { format!(", region {}", record.region) };
    format!(
        "{key} {} at {at} by {} (version {}, rules {}{replaced}): {limit}, {level} spent, {remaining} left, the request cost \
         {}{retry}. Decided from: {}, node {}{place}",
        verdict.replace('_', " "),
        or_dash(rule),
        record.rule_version,
        or_dash(&record.set_version),
        record.cost,
        record.source,
        record.node,
    )
}

fn table(records: &[RecordAnswer]) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([
        "at",
        "verdict",
        "surface",
        "key",
        "rule",
        "limit",
        "from",
        "cost",
        "level",
        "remaining",
        "retry ms",
    ]);
    for record in records {
        table.add_row(row(record).map(shown));
    }
    for column in table.column_iter_mut().skip(7) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn row(record: &RecordAnswer) -> [String; 11] {
    [
        record.at.clone(),
        record.verdict.clone(),
        record.surface.clone(),
        or_dash(&record.key).to_owned(),
        or_dash(&record.rule).to_owned(),
        record.limit.to_string(),
        record.source.clone(),
        record.cost.to_string(),
        record.level.to_string(),
        record.remaining.to_string(),
        record.retry_ms.map_or_else(|| "-".to_owned(), |ms| ms.to_string()),
    ]
}

pub(crate) fn or_dash(text: &str) -> &str {
    if text.is_empty() { "-" } else { text }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const WILD: &str = "\u{1b}[2Jx\nerror: y\u{9b}1A\u{202e}";
    const ACTING: [char; 3] = ['\u{1b}', '\u{9b}', '\u{202e}'];

    fn summary_line_of(key: &str, records: &Value) -> String {
        let why_answer = json!({ "key": key, "at": "now", "window_ms": 1, "records": records });
        summary_line(&WhyAnswer::deserialize(why_answer).expect("an answer"))
    }

    #[test]
    fn a_key_that_nothing_is_known_of_is_told_in_one_line() {
        let summary_line = summary_line_of(WILD, &json!([]));
        assert!(
            summary_line.starts_with("nothing in the log about \\u{1b}[2Jx\\nerror: y"),
            "{summary_line:?}"
        );
        assert!(!summary_line.contains(ACTING) && summary_line.lines().count() == 1, "{summary_line:?}");
    }

    #[test]
    fn no_text_of_a_record_reaches_the_terminal_raw() {
        let texts = [
            "at",
            "verdict",
            "surface",
            "key",
            "rule",
            "set_version",
            "replaced_by",
            "source",
            "region",
            "node",
        ];
        for field in texts {
            let mut record = json!({
                "cost": 1, "rule_version": 2, "remaining": 3, "level": 4, "retry_ms": 5,
                "limit": { "amount": 6, "burst": 7, "period_ms": 8 },
            });
            for text in texts {
                record[text] = "x".into();
            }
            record[field] = WILD.into();
            let summary_line = summary_line_of(WILD, &json!([record]));
            assert_eq!(summary_line.lines().count(), 3, "{field}: {summary_line:?}");
            assert!(!summary_line.contains(ACTING), "{field}: {summary_line:?}");
        }
    }
}
