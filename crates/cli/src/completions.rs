//! `tidegate completions`: prints the completion script of a shell.

use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command, value_parser};
use clap_complete::Shell;

use crate::{CommandResult, Failure};

pub(crate) fn command() -> Command {
    Command::new("completions")
        .about("Print completions for a shell")
        .long_about(
            "Print completions for a shell, such as:\n\n  tidegate completions bash > \
             ~/.local/share/bash-completion/completions/tidegate",
        )
        .arg(
            Arg::new("shell")
                .value_name("SHELL")
                .required(true)
                .value_parser(value_parser!(Shell))
                .help("Name of the shell"),
        )
}

pub(crate) fn run(matches: &ArgMatches) -> CommandResult {
    let Some(shell) = matches.get_one::<Shell>("shell") else {
        return Err(Failure::usage("shell: missing"));
    };
    let mut script = Vec::new();
    clap_complete::generate(*shell, &mut crate::command(), "tidegate", &mut script);
    crate::out::print(&script)?;
    Ok(ExitCode::SUCCESS)
}
