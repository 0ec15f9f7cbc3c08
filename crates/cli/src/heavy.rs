//! `tidegate heavy`: asks a running server who has been near a limit for a while.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use comfy_table::{CellAlignment, Table, presets};
use serde::Deserialize;

use crate::client::{self, Client};
use crate::out::shown;
use crate::why::{LimitAnswer, or_dash, query, tenant_arg};
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("heavy")
        .about("Asks a running server who has been near a limit for a while")
        .long_about(
            "Asks a running server which keys were near a limit in at least half of the last minutes. In a minute a key is \
             near a limit if one of its logged requests found more than 80 % of the burst spent, or if its samples, of \
             which there have to be 16, say that it used more than 80 % of what the limit lets pass in a minute.",
        )
        .arg(
            Arg::new("minutes")
                .long("minutes")
                .value_name("N")
                .default_value("10")
                .help("How many of the last minutes to look at, 2 to 60"),
        )
        .arg(
            Arg::new("limit")
                .long("limit")
                .value_name("N")
                .default_value("100")
                .help("How many keys to list, 1 to 1000"),
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
    let word = HeavyAnswer::deserialize(&answer.body)
        .map_err(|error| Failure::failed(format!("the server's answer is not one of its log: {error}")))?;
    if word.keys.is_empty() {
        say!("nobody was near a limit in half of the last {} minutes", word.minutes)?;
    } else {
        say!("{}", table(&word))?;
        let more = word.of.saturating_sub(word.keys.len());
        if more > 0 {
            say!("and {more} more: see --limit")?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The parts of an answer that are shown.
#[derive(Deserialize)]
struct HeavyAnswer {
    minutes: u64,
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

fn table(word: &HeavyAnswer) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header(["key", "rule", "limit", "minutes", "level %", "use %", "denied"]);
    for key in &word.keys {
        table.add_row([
            shown(or_dash(&key.key)),
            shown(or_dash(&key.rule)),
            key.limit.to_string(),
            format!("{} of {}", key.minutes_near, word.minutes),
            key.level_percent_max.to_string(),
            key.use_percent_max.map_or_else(|| "-".to_owned(), |percent| percent.to_string()),
            key.denied.to_string(),
        ]);
    }
    for column in table.column_iter_mut().skip(3) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn no_text_of_a_key_reaches_the_terminal_raw() {
        let wild = "\u{1b}[2Jx\nnobody\u{9b}1A";
        let word = json!({
            "minutes": 2,
            "of": 1,
            "keys": [{
                "key": wild, "rule": wild, "minutes_near": 2, "level_percent_max": 90, "denied": 0,
                "limit": { "amount": 6, "burst": 7, "period_ms": 8 },
            }],
        });
        let table = table(&HeavyAnswer::deserialize(word).expect("an answer")).to_string();
        assert_eq!(table.lines().count(), 2, "{table:?}");
        assert!(!table.contains(['\u{1b}', '\u{9b}']), "{table:?}");
    }
}
