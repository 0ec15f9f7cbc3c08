//! `tidegate heavy`: lists the heavy keys of a running server.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use comfy_table::Table;
use serde::Deserialize;

use crate::client::{self, Client};
use crate::out::shown;
use crate::why::{LimitAnswer, or_dash, query, tenant_arg};
use crate::{CommandResult, Failure, table};

pub(crate) fn command() -> Command {
    Command::new("heavy")
        .about("List keys that stayed near a limit")
        .long_about(
            "List the keys that were near a limit in at least half of the last minutes.\n\nA key is near a \
             limit in a minute if one of its records found more than 80 % of the burst used. It is also \
             near if its samples, 16 or more, indicate more than 80 % of the rate.",
        )
        .arg(
            Arg::new("minutes")
                .long("minutes")
                .value_name("N")
                .default_value("10")
                .help("Number of the last minutes to search, 2 to 60"),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .default_value("100")
                .help("Number of keys to list, 1 to 1000"),
        )
        .arg(tenant_arg())
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let client = Client::new(matches)?;
    let answer =
        client.get("/v1/heavy", &query(matches, &["minutes", "limit", "tenant"]))?.decided(&[200])?;
    if matches.get_flag("json") {
        say!("{}", answer.body)?;
        return Ok(ExitCode::SUCCESS);
    }
    let heavy_answer = HeavyAnswer::deserialize(&answer.body)
        .map_err(|error| Failure::failed(format!("the response has no heavy keys: {error}")))?;
    if heavy_answer.keys.is_empty() {
        say!("{}", nothing_found(&heavy_answer))?;
    } else {
        say!("{}", keys_table(&heavy_answer))?;
        let more = heavy_answer.of.saturating_sub(heavy_answer.keys.len());
        if more > 0 {
            say!("and {more} more keys: raise --limit")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The fields of the response that are printed.
#[derive(Deserialize)]
struct HeavyAnswer {
    minutes: u64,
    #[serde(default)]
    minutes_required: u64,
    #[serde(default)]
    records: u64,
    #[serde(default)]
    denied: u64,
    #[serde(default)]
    keys_near: u64,
    #[serde(default)]
    minutes_near_max: u64,
    of: usize,
    keys: Vec<HeavyKey>,
}

#[derive(Deserialize)]
struct HeavyKey {
    key: String,
    rule: String,
    limit: LimitAnswer,
    minutes_near: u64,
    level_percent_max: u64,
    use_percent_max: Option<u64>,
    denied: u64,
}

/// States why no key is listed: the records of the window, and the condition that no key met.
fn nothing_found(heavy_answer: &HeavyAnswer) -> String {
    let HeavyAnswer { minutes, minutes_required, records, denied, .. } = heavy_answer;
    if *records == 0 {
        return format!("no heavy keys: the decision log has no records of the last {minutes} minutes");
    }
    let condition = match (heavy_answer.keys_near, heavy_answer.minutes_near_max) {
        (0, _) => "no key used more than 80 % of a limit in any minute".to_owned(),
        (keys, most) => {
            let [keys, most] = [(keys, "key"), (most, "minute")]
                .map(|(count, noun)| format!("{count} {noun}{}", if count == 1 { "" } else { "s" }));
            format!("near a limit: {keys}, for at most {most}. With `--minutes 2`, 1 minute is enough")
        }
    };
    format!(
        "no heavy keys: no key was near a limit in {minutes_required} of the last {minutes} minutes. These \
         have {records} records, of which {denied} are denials; {condition}"
    )
}

fn keys_table(heavy_answer: &HeavyAnswer) -> Table {
    let mut table = table::with_header(["key", "rule", "limit", "minutes", "level %", "use %", "denied"]);
    for key in &heavy_answer.keys {
        table.add_row([
            shown(or_dash(&key.key)),
            shown(or_dash(&key.rule)),
            key.limit.to_string(),
            format!("{} of {}", key.minutes_near, heavy_answer.minutes),
            key.level_percent_max.to_string(),
            key.use_percent_max.map_or_else(|| "-".to_owned(), |percent| percent.to_string()),
            key.denied.to_string(),
        ]);
    }
    table::align_right(&mut table, 3);
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_text_of_a_key_reaches_the_terminal_raw() {
        let wild = "\u{1b}[2Jx\nnobody\u{9b}1A";
        let heavy_answer = json!({
            "minutes": 2,
            "of": 1,
            "keys": [{
                "key": wild, "rule": wild, "minutes_near": 2, "level_percent_max": 90, "denied": 0,
                "limit": { "amount": 6, "burst": 7, "period_ms": 8 },
            }],
        });
        let table = keys_table(&HeavyAnswer::deserialize(heavy_answer).expect("an answer")).to_string();
        assert_eq!(table.lines().count(), 2, "{table:?}");
        assert!(!table.contains(['\u{1b}', '\u{9b}']), "{table:?}");
    }

    #[test]
    fn an_empty_list_has_its_reason() {
        let told = |fields: &serde_json::Value| {
            let mut heavy_answer = json!({ "minutes": 10, "minutes_required": 5, "of": 0, "keys": [] });
            for (name, value) in fields.as_object().expect("an object") {
                heavy_answer[name] = value.clone();
            }
            nothing_found(&HeavyAnswer::deserialize(heavy_answer).expect("an answer"))
        };
        let counted = "no heavy keys: no key was near a limit in 5 of the last 10 minutes. These have \
                       26301 records, of which 26301 are denials; ";
        for (fields, reason) in [
            (json!({ "keys_near": 1, "minutes_near_max": 1 }), "near a limit: 1 key, for at most 1 minute. "),
            (
                json!({ "keys_near": 7, "minutes_near_max": 4 }),
                "near a limit: 7 keys, for at most 4 minutes. ",
            ),
            (json!({}), "no key used more than 80 % of a limit in any minute"),
        ] {
            let mut fields = fields;
            fields["records"] = 26_301.into();
            fields["denied"] = 26_301.into();
            let told = told(&fields);
            assert!(told.starts_with(&format!("{counted}{reason}")), "{told}");
        }
        let none = "no heavy keys: the decision log has no records of the last 10 minutes";
        assert_eq!(told(&json!({})), none);
    }
}
