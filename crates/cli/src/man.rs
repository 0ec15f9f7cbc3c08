//! `tidegate man`: manual pages.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};
use clap_mangen::Man;

use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("man").about("Print the manual page, or write the pages of all commands").arg(
        Arg::new("dir")
            .long("dir")
            .value_name("DIR")
            .help("Folder for one page per command, instead of printing the first page"),
    )
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    match matches.get_one::<String>("dir") {
        None => print(),
        Some(dir) => write_all(dir),
    }
}

fn print() -> CommandResult {
    let mut page = Vec::new();
    Man::new(crate::command()).render(&mut page).map_err(Failure::failed)?;
    crate::out::print(&page)?;
    Ok(ExitCode::SUCCESS)
}

fn write_all(dir: &str) -> CommandResult {
    let failed = |error: std::io::Error| Failure::failed(format!("dir: {dir}: {error}"));
    std::fs::create_dir_all(dir).map_err(failed)?;
    clap_mangen::generate_to(crate::command(), dir).map_err(failed)?;
    Ok(ExitCode::SUCCESS)
}
