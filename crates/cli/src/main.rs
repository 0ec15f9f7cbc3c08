//! The `tidegate` command.

#![warn(clippy::print_stdout, clippy::print_stderr, reason = "they panic if the pipe is closed: see `out`")]

#[macro_use]
mod out;

mod audit;
mod bench;
mod block;
mod bound;
mod check;
mod client;
mod completions;
mod credential;
mod demo;
mod emergency;
mod environment;
mod expiry;
mod heavy;
#[cfg(feature = "parquet")]
mod key_values;
mod log;
mod man;
mod naming;
mod notice;
mod overrides;
mod plan;
mod rules;
mod serve;
mod sim;
mod status;
mod style;
mod table;
mod tls_failure;
mod token;
mod why;

use std::fmt::Display;
use std::process::ExitCode;

use clap::{ArgMatches, Command};

/// Requests allocate small and short-lived buffers on every worker. This allocator keeps them on
/// their thread.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// It made sense and did not work.
const EXIT_FAILED: u8 = 1;

/// Wrong usage, or a configuration that makes no sense (`EX_USAGE`).
const EXIT_USAGE: u8 = 64;

/// The server is unreachable (`EX_UNAVAILABLE`).
const EXIT_UNREACHABLE: u8 = 69;

/// The exit status of a command that worked: 0, or another status with more detail for a script.
pub(crate) type CommandResult = Result<ExitCode, Failure>;

/// An error message for the user at the terminal, and the exit status.
pub(crate) struct Failure {
    status: u8,
    words: String,
}

impl Failure {
    fn new(status: u8, words: &dyn Display) -> Self {
        Self { status, words: words.to_string() }
    }

    /// The arguments or the configuration are invalid.
    pub(crate) fn usage(words: impl Display) -> Self {
        Self::new(EXIT_USAGE, &words)
    }

    /// The server is unreachable.
    pub(crate) fn unreachable(words: impl Display) -> Self {
        Self::new(EXIT_UNREACHABLE, &words)
    }

    /// It made sense and did not work.
    pub(crate) fn failed(words: impl Display) -> Self {
        Self::new(EXIT_FAILED, &words)
    }
}

struct Subcommand {
    command: fn() -> Command,
    run: fn(&ArgMatches) -> CommandResult,
}

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand { command: serve::command, run: serve::run },
    Subcommand { command: status::command, run: status::run },
    Subcommand { command: check::command, run: check::run },
    Subcommand { command: why::command, run: why::run },
    Subcommand { command: heavy::command, run: heavy::run },
    #[cfg(feature = "parquet")]
    Subcommand { command: log::command, run: log::run },
    Subcommand { command: rules::command, run: rules::run },
    Subcommand { command: bound::command, run: bound::run },
    Subcommand { command: plan::command, run: plan::run },
    Subcommand { command: overrides::command, run: overrides::run },
    Subcommand { command: block::command, run: block::run },
    Subcommand { command: block::unblock_command, run: block::run_unblock },
    Subcommand { command: emergency::command, run: emergency::run },
    Subcommand { command: credential::command, run: credential::run },
    Subcommand { command: audit::command, run: audit::run },
    Subcommand { command: token::command, run: token::run },
    Subcommand { command: bench::command, run: bench::run },
    Subcommand { command: sim::command, run: sim::run },
    Subcommand { command: demo::command, run: demo::run },
    Subcommand { command: completions::command, run: completions::run },
    Subcommand { command: man::command, run: man::run },
];

/// The whole command line. Completions and man pages are generated from it.
pub(crate) fn command() -> Command {
    Command::new("tidegate")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A distributed rate limiter with a stated bound on over-admission")
        .arg(style::arg())
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommands(SUBCOMMANDS.iter().map(|subcommand| (subcommand.command)()))
}

fn main() -> ExitCode {
    style::init(std::env::args_os());
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
        Ok(status) => status,
        Err(failure) => {
            for line in failure.words.lines() {
                aside!("{} {}", style::paint_aside(style::BAD, "error:"), out::shown(line));
            }
            ExitCode::from(failure.status)
        }
    }
}

fn dispatch(matches: &ArgMatches) -> CommandResult {
    let Some((name, matches)) = matches.subcommand() else { return Ok(ExitCode::SUCCESS) };
    let subcommand = SUBCOMMANDS.iter().find(|subcommand| (subcommand.command)().get_name() == name);
    subcommand.map_or(Ok(ExitCode::SUCCESS), |subcommand| (subcommand.run)(matches))
}
