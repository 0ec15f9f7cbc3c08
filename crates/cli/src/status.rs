//! `tidegate status`: the state of a running server.

use std::process::ExitCode;

use clap::{ArgMatches, Command};
use comfy_table::Table;
use serde_json::Value;

use crate::client::{self, Client};
use crate::notice::{alarm_text, rollback_text};
use crate::out::{Reader, shown};
use crate::{CommandResult, EXIT_FAILED, Failure, style, table};

pub(crate) fn command() -> Command {
    Command::new("status")
        .about("Show the state of a running server")
        .long_about(
            "Show the version, listeners, origin, region, rules and request rates of a running \
             server.\n\nExit status: 0 if the server is healthy, 1 if it is degraded, 69 if it is \
             unreachable.",
        )
        .args(client::args())
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let status = Client::new(matches)?.get("/v1/status", &[])?.decided(&[200])?.body;
    let reasons: Vec<&str> = list(&status["degraded"]).iter().filter_map(Value::as_str).collect();
    if matches.get_flag("json") {
        say!("{status}")?;
    } else {
        print(&status, &reasons)?;
    }
    Ok(if reasons.is_empty() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_FAILED) })
}

fn print(status: &Value, reasons: &[&str]) -> Result<Reader, Failure> {
    if reasons.is_empty() {
        say!("{}", style::paint(style::GOOD, "healthy"))?;
    }
    for reason in reasons {
        say!("{} {}", style::paint(style::BAD, "degraded:"), shown(reason))?;
    }
    say!("{}", status_table(status))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or("unknown")
}

fn status_table(status: &Value) -> Table {
    let mut rows = vec![
        ("version".to_owned(), text(status, "version").to_owned()),
        ("node".to_owned(), text(status, "node").to_owned()),
        ("uptime".to_owned(), uptime(status)),
        ("listeners".to_owned(), listeners(status)),
        ("origin".to_owned(), origin(&status["origin"])),
    ];
    rows.extend(last_failure(&status["origin"]).map(|failure| (String::new(), failure)));
    rows.push(("region".to_owned(), region(&status["region"])));
    for peer in list(&status["region"]["peers"]) {
        rows.push((format!("peer {}", text(peer, "region")), peer_state(peer)));
    }
    let rules = &status["rules"];
    rows.push(("rules".to_owned(), rules_line(rules)));
    let rollback = &rules["last_automatic_rollback"];
    if !rollback.is_null() {
        rows.push(("rollback".to_owned(), rollback_text(rollback)));
    }
    if !rules["last_alarm"].is_null() {
        rows.push(("alarm".to_owned(), alarm_text(&rules["last_alarm"])));
    }
    rows.push(("rates".to_owned(), rates(&status["rates"])));
    let mut table = table::without_header();
    for (name, value) in rows {
        table.add_row([shown(name), shown(value)]);
    }
    table
}

fn uptime(status: &Value) -> String {
    let Some(seconds) = status["uptime_seconds"].as_u64() else { return "unknown".to_owned() };
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    let time = match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m {}s", seconds % 60),
        (0, ..) => format!("{hours}h {minutes}m"),
        _ => format!("{days}d {hours}h {minutes}m"),
    };
    let state = if status["ready"] == false { ", draining" } else { "" };
    format!("{time}, since {}{state}", text(status, "started"))
}

fn listeners(status: &Value) -> String {
    let one = |listener: &Value| {
        let tls = if listener["tls"] == true { " (TLS)" } else { "" };
        format!("{} {}{tls}", text(listener, "name"), text(listener, "address"))
    };
    list(&status["listeners"]).iter().map(one).collect::<Vec<_>>().join(", ")
}

fn origin(origin: &Value) -> String {
    if origin.is_null() {
        return "none: the node counts alone".to_owned();
    }
    let (address, state) = (text(origin, "address"), text(origin, "state"));
    let since = origin["since"].as_str().map_or_else(String::new, |since| format!(" since {since}"));
    format!("{address}: {state}{since}")
}

/// The last failure of the origin. It stays in the status after the origin has recovered.
fn last_failure(origin: &Value) -> Option<String> {
    let cause = origin["cause"].as_str()?;
    let at = origin["cause_at"].as_str().map_or_else(String::new, |at| format!(" at {at}"));
    Some(format!("last failure{at}: {cause}"))
}

fn region(region: &Value) -> String {
    if region.is_null() {
        return "none: the server has no origin".to_owned();
    }
    let mut parts = vec![text(region, "name").to_owned()];
    parts
        .extend(region["connected"].as_bool().map(|is| if is { "connected" } else { "isolated" }.to_owned()));
    parts.extend((region["replicator"] == true).then(|| "replicator".to_owned()));
    parts.extend(region["lag_ms"].as_u64().map(|ms| format!("lag {ms} ms")));
    if list(&region["peers"]).is_empty() {
        parts.push("no peers".to_owned());
    }
    parts.join(", ")
}

fn peer_state(peer: &Value) -> String {
    let mut parts = vec![if peer["linked"] == true { "linked" } else { "not linked" }.to_owned()];
    parts.push(
        peer["last_heard_age_ms"]
            .as_u64()
            .map_or_else(|| "never heard".to_owned(), |ms| format!("last heard {ms} ms ago")),
    );
    parts.extend(peer["lag_ms"].as_u64().map(|ms| format!("lag {ms} ms")));
    parts.join(", ")
}

fn rules_line(rules: &Value) -> String {
    let source = match (text(rules, "source"), rules["location"].as_str()) {
        (source, Some(location)) => format!("{source} {location}"),
        (source, None) => source.to_owned(),
    };
    let mut parts = vec![source];
    if rules["reachable"] == false {
        parts.push("unreachable".to_owned());
    }
    parts.extend(rules["revision"].as_u64().map(|revision| format!("revision {revision}")));
    parts.extend(rules["version"].as_str().map(|version| format!("version {version}")));
    for (field, one, many) in [
        ("rules", "rule", "rules"),
        ("overrides", "override", "overrides"),
        ("emergencies", "emergency", "emergencies"),
    ] {
        let counted = |count| format!("{count} {}", if count == 1 { one } else { many });
        parts.extend(rules[field].as_u64().map(counted));
    }
    parts.join(", ")
}

fn rates(rates: &Value) -> String {
    let rate = |field: &str| rates[field].as_f64().unwrap_or_default();
    format!(
        "{:.1} requests/s, {:.1} denied/s, {:.1} without the origin/s, over {:.0} s",
        rate("requests_per_second"),
        rate("denied_per_second"),
        rate("without_origin_per_second"),
        rate("seconds"),
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_status_names_every_part() {
        let status = json!({
            "version": "0.1.0", "node": "web-3", "ready": true,
            "started": "2026-11-18T09:00:00.000Z", "uptime_seconds": 93_784,
            "listeners": [
                { "name": "http", "address": "127.0.0.1:8080", "tls": true },
                { "name": "admin", "address": "127.0.0.1:8090", "tls": false },
            ],
            "origin": {
                "address": "redis://127.0.0.1:6379", "state": "down", "since": "2026-11-18T10:00:00.000Z",
                "cause": "cannot connect: refused", "cause_at": "2026-11-18T10:00:01.000Z",
            },
            "region": {
                "name": "eu", "replicator": true, "connected": false, "lag_ms": 120,
                "peers": [{ "region": "us", "linked": true, "last_heard_age_ms": 80, "lag_ms": 90 }],
            },
            "rules": {
                "source": "store", "location": "sqlite:rules.db", "reachable": true, "revision": 8,
                "version": "r8", "rules": 1, "overrides": 2, "emergencies": 0,
                "last_automatic_rollback": { "change": 6, "at": "2026-11-18T09:30:00.000Z" },
            },
            "rates": {
                "seconds": 10, "requests_per_second": 12.34, "denied_per_second": 0.5,
                "without_origin_per_second": 3.0,
            },
        });
        let table = status_table(&status).to_string();
        for part in [
            "0.1.0",
            "web-3",
            "1d 2h 3m, since 2026-11-18T09:00:00.000Z",
            "http 127.0.0.1:8080 (TLS), admin 127.0.0.1:8090",
            "redis://127.0.0.1:6379: down since 2026-11-18T10:00:00.000Z",
            "last failure at 2026-11-18T10:00:01.000Z: cannot connect: refused",
            "eu, isolated, replicator, lag 120 ms",
            "peer us    linked, last heard 80 ms ago, lag 90 ms",
            "store sqlite:rules.db, revision 8, version r8, 1 rule, 2 overrides, 0 emergencies",
            "change 6 was rolled back automatically at 2026-11-18T09:30:00.000Z",
            "12.3 requests/s, 0.5 denied/s, 3.0 without the origin/s, over 10 s",
        ] {
            assert!(table.contains(part), "{part}:\n{table}");
        }
    }

    #[test]
    fn absent_fields_are_tolerated_and_no_text_reaches_the_terminal_raw() {
        let table = status_table(&json!({ "version": "\u{1b}[2J", "node": "a\nb" })).to_string();
        assert!(!table.contains('\u{1b}') && table.lines().count() == 8, "{table:?}");
        assert!(table.contains("none: the node counts alone"), "{table}");
    }
}
