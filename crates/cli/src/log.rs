//! `tidegate log`: the decision log as a file, for questions that the other commands do not ask.

use std::path::Path;
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use serde_json::json;
use tidegate_server::{LogExport, LogExportError};

use crate::client::json_arg;
use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("log")
        .about("Exports the decision log of a server on this machine")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(
            Command::new("export")
                .about("Writes the decision log as a Parquet file")
                .long_about(
                    "Writes the decision log of a server on this machine as a Parquet file, in the order of its times: every \
                     denial, and the sample of what passed, in which a record stands for 1 / sample_rate requests. The \
                     server may run meanwhile, or not. Whoever may read its data folder may export it.",
                )
                .arg(arg("out", "FILE", "Where to write it; a file that is there is replaced").required(true))
                .arg(arg("from", "TIME", "The first moment: RFC 3339, a time of day by UTC, or milliseconds since 1970 [default: the beginning]"))
                .arg(arg("to", "TIME", "The last moment [default: now]"))
                .arg(arg("tenant", "NAME", "Only decisions of this tenant [default: those of all]"))
                .arg(
                    arg("data-dir", "DIR", "The server's data_dir [default: the user's state folder]")
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
        say!("{records} records in {out}")?;
    }
    Ok(ExitCode::SUCCESS)
}
