//! `tidegate rules validate`: looks at a rules file without a server.

use std::io::Read;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use serde::Serialize;
use tidegate_server::{Fleet, RULES_FILE_BYTES_MAX, RuleSet};

use crate::client::json_arg;
use crate::{CommandResult, EXIT_USAGE, Failure, style};

pub(super) fn command() -> Command {
    Command::new("validate")
        .about("Check a rules file without a server")
        .long_about("Check a rules file without a server.\n\nExit status: 0 if the file is valid, 64 if not.")
        .arg(Arg::new("file").value_name("FILE").required(true).help("Rules file (TOML)"))
        .arg(json_arg())
}

/// The result of validating a file.
#[derive(Serialize)]
struct Finding<'f> {
    file: &'f str,
    valid: bool,
    rules: usize,
    overrides: usize,
    version: Option<String>,
    problems: Vec<String>,
    warnings: Vec<String>,
}

pub(super) fn run(matches: &ArgMatches) -> CommandResult {
    let file = matches.get_one::<String>("file").map_or("", String::as_str);
    let finding = look_at(file);
    if matches.get_flag("json") {
        say!("{}", serde_json::to_string(&finding).map_err(Failure::failed)?)?;
        return Ok(if finding.valid { ExitCode::SUCCESS } else { ExitCode::from(EXIT_USAGE) });
    }
    if !finding.valid {
        return Err(refused(file, &finding.problems));
    }
    for warning in &finding.warnings {
        aside!("{} {file}: {warning}", style::paint_aside(style::WARNING, "warning:"));
    }
    let version = finding.version.unwrap_or_default();
    let valid = style::paint(style::GOOD, "valid");
    let noun = if finding.rules == 1 { "rule" } else { "rules" };
    let overrides = match finding.overrides {
        0 => String::new(),
        1 => ", 1 override".to_owned(),
        count => format!(", {count} overrides"),
    };
    say!("{file}: {valid}: {} {noun}{overrides}, version {version}", finding.rules)?;
    Ok(ExitCode::SUCCESS)
}

/// The error that lists the problems of a file, each in a line of its own.
pub(super) fn refused(file: &str, problems: &[String]) -> Failure {
    let lines = problems.iter().flat_map(|problem| problem.lines());
    Failure::usage(lines.map(|line| format!("{file}: {line}")).collect::<Vec<_>>().join("\n"))
}

fn look_at(file: &str) -> Finding<'_> {
    let read = read(file).map_err(|problem| vec![problem]);
    match read.and_then(|text| RuleSet::parse(&text).map_err(|problems| problems.0)) {
        Ok(set) => Finding {
            file,
            valid: true,
            rules: set.rules().len(),
            overrides: set.overrides(),
            version: Some(set.version().to_owned()),
            problems: Vec::new(),
            warnings: set.warnings(&Fleet::of(1)),
        },
        Err(problems) => Finding {
            file,
            valid: false,
            rules: 0,
            overrides: 0,
            version: None,
            problems,
            warnings: Vec::new(),
        },
    }
}

/// The text of a file, of which no more is read than may be there.
pub(crate) fn read(path: &str) -> Result<String, String> {
    let file = std::fs::File::open(path).map_err(|error| error.to_string())?;
    let mut text = String::new();
    let most = RULES_FILE_BYTES_MAX as u64 + 1;
    file.take(most).read_to_string(&mut text).map_err(|error| error.to_string())?;
    Ok(text)
}
