//! `tidegate bound`: how far each rule may be passed, term by term.

use std::fmt::Write as _;
use std::process::ExitCode;

use clap::builder::RangedU64ValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Command};
use comfy_table::Table;
use serde::Deserialize;
use serde_json::{Value, json};
use tidegate_server::bounds::{PARAMETERS, Parameter, Situation, situation_json};
use tidegate_server::{Fleet, RuleSet};

use crate::client::{self, Client};
use crate::rules::read;
use crate::{CommandResult, Failure, style, table};

/// Bounds per request.
const PAGE: &str = "1000";

pub(crate) fn command() -> Command {
    Command::new("bound")
        .about("Print the worst-case over-admission of each rule, term by term")
        .long_about(
            "Print the worst-case over-admission of each rule, term by term: the units above its limit in \
             any interval. The rules are those in force on a server, or with --rules those of a \
             file.\n\nFlags replace the deployment of the server. The default for a file is one region \
             with one node. Each kind of fault counts once by default.",
        )
        .arg(Arg::new("rules").long("rules").value_name("FILE").help(
            "Rules file (TOML), instead of a \
                                                                      server",
        ))
        .arg(
            Arg::new("no_origin")
                .long("no-origin")
                .action(ArgAction::SetTrue)
                .requires("rules")
                .help("Nodes of a region share no origin, so each counts alone"),
        )
        .args(PARAMETERS.iter().map(parameter_arg))
        .arg(
            Arg::new("weights")
                .long("weights")
                .value_name("N,N,...")
                .conflicts_with("regions")
                .help("Weights of the regional shares, one for each region, such as 3,1,1"),
        )
        .args(client::args())
}

fn parameter_arg(parameter: &Parameter) -> Arg {
    let flag = parameter.name.trim_end_matches("_ms").replace('_', "-");
    let unit = if parameter.name.ends_with("_ms") { "MS" } else { "N" };
    let default = (parameter.get)(&Situation::new(Fleet::of(1)));
    Arg::new(parameter.name)
        .long(flag)
        .value_name(unit)
        .value_parser(RangedU64ValueParser::<u64>::new().range(parameter.least..=parameter.most))
        .help(format!("{} [default: {default}]", parameter.about))
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let answer = match matches.get_one::<String>("rules") {
        Some(file) => of_file(matches, file)?,
        None => of_server(matches)?,
    };
    if matches.get_flag("json") {
        say!("{answer}")?;
        return Ok(ExitCode::SUCCESS);
    }
    let word = BoundAnswer::deserialize(&answer)
        .map_err(|error| Failure::failed(format!("the response has no bounds: {error}")))?;
    crate::out::print(word.to_text().as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// Returns the parameters that flags set, with their values.
fn said(matches: &ArgMatches) -> impl Iterator<Item = (&'static Parameter, u64)> {
    let value = |parameter: &'static Parameter| {
        let value = matches.get_one::<u64>(parameter.name).copied();
        value.map(|value| (parameter, value))
    };
    PARAMETERS.iter().filter_map(value)
}

fn of_file(matches: &ArgMatches, file: &str) -> Result<Value, Failure> {
    // With both flags, the server would be ignored without notice.
    if matches.value_source("server") == Some(ValueSource::CommandLine) {
        return Err(Failure::usage("--rules, --server: name a file or a server, not both"));
    }
    let text = read(file).map_err(|problem| Failure::usage(format!("{file}: {problem}")))?;
    let set = RuleSet::parse(&text).map_err(|problems| {
        let lines = problems.0.iter().flat_map(|problem| problem.lines());
        Failure::usage(lines.map(|line| format!("{file}: {line}")).collect::<Vec<_>>().join("\n"))
    })?;
    let mut situation = Situation::new(Fleet { has_origin: !matches.get_flag("no_origin"), ..Fleet::of(1) });
    for (parameter, value) in said(matches) {
        (parameter.set)(&mut situation, value);
    }
    if let Some(weights) = matches.get_one::<String>("weights") {
        situation.set_weights(weights).map_err(Failure::usage)?;
    }
    let bounds: Vec<_> = set.rules().iter().map(|rule| situation.report(rule)).collect();
    let of = situation_json(&situation);
    Ok(json!({ "rules_version": set.version(), "of": of, "bounds": bounds, "next": null }))
}

/// All bounds of a server, page by page.
fn of_server(matches: &ArgMatches) -> Result<Value, Failure> {
    let client = Client::new(matches)?;
    let numbers: Vec<(&str, String)> =
        said(matches).map(|(parameter, value)| (parameter.name, value.to_string())).collect();
    let mut whole: Option<Value> = None;
    let mut from = "0".to_owned();
    loop {
        let mut query = vec![("limit", PAGE), ("from", &from)];
        query.extend(numbers.iter().map(|(name, value)| (*name, value.as_str())));
        query.extend(matches.get_one::<String>("weights").map(|weights| ("weights", weights.as_str())));
        let page = client.get("/v1/bounds", &query)?.decided(&[200])?.body;
        let next = page["next"].as_u64();
        let joined = match whole.take() {
            None => page,
            Some(before) => join(before, page)?,
        };
        match next {
            None => return Ok(joined),
            Some(next) => (whole, from) = (Some(joined), next.to_string()),
        }
    }
}

fn join(mut before: Value, mut page: Value) -> Result<Value, Failure> {
    if before["rules_version"] != page["rules_version"] {
        return Err(Failure::failed(
            "rules_version: the rules changed between two pages: run the command again",
        ));
    }
    if let (Some(all), Value::Array(more)) = (before["bounds"].as_array_mut(), page["bounds"].take()) {
        all.extend(more);
    }
    before["next"] = page["next"].take();
    Ok(before)
}

/// The fields of the response that are printed.
#[derive(Deserialize)]
struct BoundAnswer {
    rules_version: String,
    of: BoundSituation,
    bounds: Vec<RuleBound>,
}

#[derive(Deserialize)]
struct BoundSituation {
    weights: Vec<u64>,
    nodes: u64,
    lag_ms: u64,
    origin: bool,
}

#[derive(Deserialize)]
struct RuleBound {
    rule: String,
    regime: String,
    class: String,
    limit: u64,
    period_us: u64,
    burst: u64,
    buckets: u64,
    steady: u64,
    total: u64,
    each_window: bool,
    terms: Vec<BoundTerm>,
    lag_ms: u64,
    open_without_origin: bool,
    warnings: Vec<String>,
}

#[derive(Deserialize)]
struct BoundTerm {
    name: String,
    formula: String,
    units: u64,
    when: String,
}

impl BoundAnswer {
    fn to_text(&self) -> String {
        let mut text = String::new();
        for bound in &self.bounds {
            // Writing to a string does not fail.
            let _ = writeln!(text, "{}", bound.to_text());
        }
        let (regions, nodes) = (self.of.weights.len(), self.of.nodes);
        let origin = if self.of.origin { "an origin in each" } else { "no origin" };
        let lag = period(self.of.lag_ms * 1_000);
        let lag = if regions > 1 { format!(", a lag of {lag} between them") } else { String::new() };
        let _ = writeln!(
            text,
            "rules {}; R = {regions} regions, N = {nodes} nodes in each, {origin}{lag}",
            self.rules_version
        );
        text
    }
}

impl RuleBound {
    fn to_text(&self) -> String {
        let Self { rule, regime, class, limit, burst, buckets, .. } = self;
        let mut text =
            format!("{rule}: {limit} per {}, burst {burst}; {class}, {regime}", period(self.period_us));
        if *buckets > 1 {
            let _ = write!(text, ", {buckets} times");
        }
        if self.lag_ms > 0 {
            let _ = write!(text, "; D = {}", period(self.lag_ms * 1_000));
        }
        let _ = writeln!(text, "\n{}", self.table());
        if self.each_window && self.total > 0 {
            text.push_str("in each window, not once in total\n");
        }
        if self.open_without_origin {
            text.push_str("the rule fails open while an origin is down: it has no bound then\n");
        }
        for warning in &self.warnings {
            let _ = writeln!(text, "{} {warning}", style::paint(style::WARNING, "warning:"));
        }
        text
    }

    fn table(&self) -> Table {
        let mut table = table::with_header(["term", "formula", "when", "units"]);
        for term in &self.terms {
            table.add_row([&term.name, &term.formula, &term.when, &term.units.to_string()]);
        }
        table.add_row(["without faults", "", "", &self.steady.to_string()]);
        table.add_row(["in total, at most", "", "", &self.total.to_string()]);
        table::align_right(&mut table, 3);
        table
    }
}

/// Formats a time in the largest unit that divides it, as rules write it.
fn period(us: u64) -> String {
    let units =
        [("d", 86_400_000_000), ("h", 3_600_000_000), ("m", 60_000_000), ("s", 1_000_000), ("ms", 1_000)];
    let fits = units.iter().find(|(_, length)| us.is_multiple_of(*length));
    fits.map_or_else(|| format!("{us}us"), |(unit, length)| format!("{}{unit}", us / length))
}

#[cfg(test)]
mod tests {
    use super::period;

    #[test]
    fn periods_are_printed_in_configuration_syntax() {
        let cases = [
            (60_000_000, "1m"),
            (86_400_000_000, "1d"),
            (90_000_000, "90s"),
            (22_050_000, "22050ms"),
            (7, "7us"),
        ];
        for (us, text) in cases {
            assert_eq!(period(us), text);
        }
    }
}
