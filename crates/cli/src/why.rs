//! `tidegate why`: searches a running server's decision log for the reason why a key was denied.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use comfy_table::{Cell, Table};
use serde::Deserialize;
use tidegate_server::timestamp;

use crate::check::outage;
use crate::client::{self, Answer, Client};
use crate::out::shown;
use crate::{CommandResult, Failure, expiry, notice, style, table};

/// Exit status if the log has no record, distinct from a failed request.
const EXIT_NOTHING: u8 = 2;

pub(crate) fn command() -> Command {
    Command::new("why")
        .about("Explain why a key was denied")
        .long_about(
            "Print the decision records of a key around a point in time: denials first, the nearest at the \
             top. Each record has the limit, its meter at that time and the version of its rule. A key is \
             the key of a limit, or any dimension of the request, such as user:42.\n\nThe decision log has \
             every denial, and a sample of the allowed requests.\n\nExit status: 0 if there is a record, 2 \
             if there is none, 64 for wrong usage, 69 if the server is unreachable, 1 if it returns an \
             error.",
        )
        .arg(
            arg("key", "KEY", "Key of a limit, or a dimension of the request, such as user:42")
                .required(true),
        )
        .arg(
            arg(
                "at",
                "TIME",
                "Time: RFC 3339, a duration before now (90d), Unix seconds or ms, a UTC time of day \
                 (14:32:17), or \"now\"",
            )
            .value_parser(expiry::parse_past)
            .default_value("now"),
        )
        .arg(arg("window", "TIME", "Time to search before and after it, up to 1h").default_value("1m"))
        .arg(arg("records", "N", "Number of records to print, 1 to 100").default_value("10"))
        .arg(tenant_arg())
        .args(client::args())
}

fn arg(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

/// The flag for operators: their tokens have no tenant.
pub(crate) fn tenant_arg() -> Arg {
    arg("tenant", "NAME", "Tenant to query; only for tokens without a tenant [default: the token's]")
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
        for notice in &why_answer.notices {
            notice::print(&notice.message);
        }
    }
    Ok(if why_answer.records.is_empty() { ExitCode::from(EXIT_NOTHING) } else { ExitCode::SUCCESS })
}

/// The fields of the response that are printed.
#[derive(Deserialize)]
struct WhyAnswer {
    key: String,
    at: String,
    window_ms: u64,
    records: Vec<RecordAnswer>,
    /// Keys with records that resemble the requested one.
    #[serde(default)]
    similar: Vec<String>,
    #[serde(default)]
    notices: Vec<NoticeAnswer>,
}

#[derive(Deserialize)]
struct NoticeAnswer {
    message: String,
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
    reason: Option<String>,
    /// End of the emergency in `replaced_by`.
    until_ms: Option<u64>,
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
        write!(f, "{amount} per {}", period(*period_ms))?;
        if burst == amount { Ok(()) } else { write!(f, ", burst {burst}") }
    }
}

/// A time in seconds, or in milliseconds if it is no whole number of seconds.
fn period(ms: u64) -> String {
    if ms.is_multiple_of(1_000) { format!("{}s", ms / 1_000) } else { format!("{ms}ms") }
}

impl WhyAnswer {
    fn read(answer: &Answer) -> Result<Self, Failure> {
        Self::deserialize(&answer.body)
            .map_err(|error| Failure::failed(format!("the response has no decision records: {error}")))
    }
}

/// The nearest record in a sentence, and all records in a table.
fn summary_line(why_answer: &WhyAnswer) -> String {
    let [nearest, ..] = why_answer.records.as_slice() else {
        let WhyAnswer { key, at, window_ms, .. } = why_answer;
        let window = period(*window_ms);
        let nothing = shown(format_args!("no records of key {key} within {window} of {at}"));
        return if why_answer.similar.is_empty() {
            nothing
        } else {
            format!("{nothing}\n{}", similar_line(&why_answer.similar))
        };
    };
    let style = if nearest.verdict == "allowed" { style::GOOD } else { style::BAD };
    let verdict = style::paint(style, shown(nearest.verdict.replace('_', " ")));
    let RecordAnswer { key, at, .. } = nearest;
    format!(
        "{} {verdict} at {}: {}\n{}",
        shown(or_dash(key)),
        shown(at),
        shown(sentence(nearest)),
        records_table(&why_answer.records)
    )
}

fn similar_line(similar: &[String]) -> String {
    let flags: Vec<String> = similar.iter().map(|key| format!("--key {}", shown(key))).collect();
    format!("records exist for similar keys: {}", flags.join(", "))
}

/// The reason of a decision, and the state that it rests on.
fn sentence(record: &RecordAnswer) -> String {
    let place = if record.region.is_empty() { String::new() } else { format!(", region {}", record.region) };
    format!("{}. Decision source: {}, node {}{place}", reason(record), record.source, record.node)
}

fn reason(record: &RecordAnswer) -> String {
    let versions = format!("version {}, rules {}", record.rule_version, or_dash(&record.set_version));
    let rule = format!("(rule {}, {versions})", or_dash(&record.rule));
    match (record.reason.as_deref().unwrap_or_default(), record.replaced_by.as_str()) {
        ("block", id) => {
            let until = record.until_ms.map_or_else(String::new, |ms| format!(" until {}", timestamp(ms)));
            format!("blocked{until} by emergency {id:?} {rule}")
        }
        ("origin_unreachable", _) => {
            format!("{} {rule}", outage(&record.source, record.verdict == "allowed", ""))
        }
        ("owner_unreachable", _) => {
            format!("the owner region did not reply; `strict` limits fail closed {rule}")
        }
        ("no_room", _) => format!("no meter has room for the key {rule}"),
        ("shed", _) => format!("the server is overloaded and shed the check {rule}"),
        (_, replaced_by) => of_limit(record, replaced_by, &versions),
    }
}

fn of_limit(record: &RecordAnswer, replaced_by: &str, versions: &str) -> String {
    let RecordAnswer { limit, level, remaining, cost, .. } = record;
    let replaced = match replaced_by {
        "" => String::new(),
        name => format!(", replaced by {name:?}"),
    };
    let retry =
        record.retry_ms.map_or_else(String::new, |ms| format!("; a retry {ms} ms later would have passed"));
    format!(
        "limit of rule {} ({versions}{replaced}): {limit}, {level} used, {remaining} remaining, cost \
         {cost}{retry}",
        or_dash(&record.rule)
    )
}

fn records_table(records: &[RecordAnswer]) -> Table {
    let mut table = table::with_header([
        "at",
        "verdict",
        "reason",
        "surface",
        "key",
        "rule",
        "limit",
        "source",
        "cost",
        "level",
        "remaining",
        "retry ms",
    ]);
    for record in records {
        table.add_row(row(record));
    }
    table::align_right(&mut table, 8);
    table::hide_empty(&mut table);
    table
}

fn row(record: &RecordAnswer) -> [Cell; 12] {
    let text = |text: &str| Cell::new(shown(text));
    [
        text(&record.at),
        table::verdict(&record.verdict),
        text(record.reason.as_deref().unwrap_or("-")),
        text(&record.surface),
        text(or_dash(&record.key)),
        text(or_dash(&record.rule)),
        text(&record.limit.to_string()),
        text(&record.source),
        text(&record.cost.to_string()),
        text(&record.level.to_string()),
        text(&record.remaining.to_string()),
        text(&record.retry_ms.map_or_else(|| "-".to_owned(), |ms| ms.to_string())),
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
    fn unknown_key_is_reported_in_one_line() {
        let summary_line = summary_line_of(WILD, &json!([]));
        assert!(summary_line.starts_with("no records of key \\u{1b}[2Jx\\nerror: y"), "{summary_line:?}");
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
            "reason",
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

    fn record(fields: &Value) -> Value {
        let mut record = json!({
            "at": "2026-11-16T14:32:16.981Z", "verdict": "denied", "surface": "check", "key": "user:42",
            "cost": 1, "rule": "per_user", "rule_version": 3, "set_version": "r3", "replaced_by": "",
            "limit": { "amount": 100, "burst": 100, "period_ms": 60_000 }, "remaining": 0, "level": 100,
            "retry_ms": 412, "source": "local", "region": "", "node": "web-3", "reason": "limit",
            "until_ms": null,
        });
        for (name, value) in fields.as_object().expect("an object") {
            record[name] = value.clone();
        }
        record
    }

    #[test]
    fn a_limit_a_block_and_an_outage_have_different_sentences() {
        for (fields, expected) in [
            (
                json!({}),
                "user:42 denied at 2026-11-16T14:32:16.981Z: limit of rule per_user (version 3, rules r3): \
                 100 per 60s, 100 used, 0 remaining, cost 1; a retry 412 ms later would have passed. \
                 Decision source: local, node web-3\n",
            ),
            (
                json!({ "reason": "block", "replaced_by": "block:42", "until_ms": 1_794_996_000_000_u64 }),
                "user:42 denied at 2026-11-16T14:32:16.981Z: blocked until 2026-11-18T10:00:00.000Z by \
                 emergency \"block:42\" (rule per_user, version 3, rules r3). Decision source: \
                 local, node web-3\n",
            ),
            (
                json!({ "reason": "origin_unreachable", "source": "closed", "region": "eu" }),
                "user:42 denied at 2026-11-16T14:32:16.981Z: the origin is unreachable; the limit fails \
                 closed (rule per_user, version 3, rules r3). Decision source: closed, node web-3, region \
                 eu\n",
            ),
        ] {
            let summary_line = summary_line_of("user:42", &json!([record(&fields)]));
            assert!(summary_line.starts_with(expected), "{expected}\n{summary_line}");
        }
    }

    #[test]
    fn an_allowed_request_has_no_reason() {
        let summary_line =
            summary_line_of("user:42", &json!([record(&json!({ "verdict": "allowed", "reason": null }))]));
        assert!(summary_line.contains("  allowed  -       check "), "{summary_line}");
    }

    #[test]
    fn similar_keys_are_a_hint_where_there_is_no_record() {
        let why_answer = json!({
            "key": "mallory", "at": "now", "window_ms": 1, "records": [], "similar": ["user:mallory", WILD],
        });
        let summary_line = summary_line(&WhyAnswer::deserialize(why_answer).expect("an answer"));
        let expected = "no records of key mallory within 1ms of now\n\
                        records exist for similar keys: --key user:mallory, --key \\u{1b}";
        assert!(summary_line.starts_with(expected) && !summary_line.contains(ACTING), "{summary_line:?}");
    }
}
