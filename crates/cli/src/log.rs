//! `tidegate log`: exports the decision log to a file, for queries that the other commands do not
//! support.

use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use serde_json::json;
use tidegate_server::{LogExport, LogExportError};

use crate::client::json_arg;
use crate::{CommandResult, Failure, expiry};

pub(crate) fn command() -> Command {
    Command::new("log")
        .about("Export the decision log of a local server")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("export")
                .about("Write the decision log as a Parquet file")
                .long_about(
                    "Write the decision log of a local server as a Parquet file, in order of time. It has \
                     every denial, and a sample of the allowed requests: each record stands for 1 / \
                     sample_rate requests. The command reads the data folder, whether or not the server \
                     runs.",
                )
                .arg(arg("out", "FILE", "File to write; an existing file is replaced").required(true))
                .arg(
                    arg(
                        "from",
                        "TIME",
                        "Start: RFC 3339, a duration before now (90d), Unix seconds or ms, a UTC time of day \
                         (14:32:17), or \"now\" [default: the first record]",
                    )
                    .value_parser(expiry::parse_past),
                )
                .arg(
                    arg("to", "TIME", "End, in the forms of --from [default: now]")
                        .value_parser(expiry::parse_past),
                )
                .arg(arg("tenant", "NAME", "Tenant of the records [default: all tenants]"))
                .arg(
                    arg("data-dir", "DIR", "data_dir of the server [default: the user's state folder]")
                        .env("TIDEGATE_DATA_DIR"),
                )
                .arg(json_arg()),
        )
}

fn arg(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.subcommand() {
        Some(("export", matches)) => export(matches),
        _ => Ok(ExitCode::SUCCESS),
    }
}

fn export(matches: &ArgMatches) -> CommandResult {
    let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
    let out = text("out").unwrap_or_default();
    let export = LogExport {
        data_dir: text("data-dir").map(Path::new),
        tenant: text("tenant"),
        from: text("from"),
        to: text("to"),
    };
    let records = export.write(Path::new(out)).map_err(|why| match why {
        LogExportError::Usage(problem) => Failure::usage(problem),
        LogExportError::Failed(problem) => Failure::failed(problem),
    })?;
    if matches.get_flag("json") {
        say!("{}", json!({ "records": records, "file": out }))?;
    } else {
        say!("{records} records written to {out}")?;
    }
    Ok(ExitCode::SUCCESS)
}
