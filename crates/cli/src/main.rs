//! The `tidegate` command.

mod serve;

use std::process::ExitCode;

use clap::{ArgMatches, Command};

/// Requests allocate small and short-lived buffers on every worker: this allocator keeps them on their thread.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Wrong usage, or a configuration that makes no sense (`EX_USAGE`).
const EXIT_USAGE: u8 = 64;

/// What went wrong, in words for the person at the terminal, and the status to exit with.
pub(crate) struct Failure {
    status: u8,
    words: String,
}

impl Failure {
    /// The caller asked for something that makes no sense.
    pub(crate) fn usage(words: impl ToString) -> Self {
        Self { status: EXIT_USAGE, words: words.to_string() }
    }

    /// It made sense and did not work.
    pub(crate) fn failed(words: impl ToString) -> Self {
        Self { status: 1, words: words.to_string() }
    }
}

struct Subcommand {
    command: fn() -> Command,
    run: fn(&ArgMatches) -> Result<(), Failure>,
}

const SUBCOMMANDS: &[Subcommand] = &[Subcommand { command: serve::command, run: serve::run }];

fn command() -> Command {
    Command::new("tidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A rate limiter that can state, and prove, how far it may over-admit")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(SUBCOMMANDS.iter().map(|subcommand| (subcommand.command)()))
}

fn main() -> ExitCode {
    let matches = match command().try_get_matches() {
        Ok(matches) => matches,
        Err(error) => {
            // Help and the version are no errors, and go to standard output.
            let status = if error.use_stderr() { EXIT_USAGE } else { 0 };
            let _ = error.print();
            return ExitCode::from(status);
        }
    };
    match dispatch(&matches) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            for line in failure.words.lines() {
                eprintln!("error: {line}");
            }
            ExitCode::from(failure.status)
        }
    }
}

fn dispatch(matches: &ArgMatches) -> Result<(), Failure> {
    let Some((name, matches)) = matches.subcommand() else { return Ok(()) };
    let subcommand = SUBCOMMANDS.iter().find(|subcommand| (subcommand.command)().get_name() == name);
    subcommand.map_or(Ok(()), |subcommand| (subcommand.run)(matches))
}
