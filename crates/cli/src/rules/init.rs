//! `tidegate rules init`: writes an example rules file.

use std::fs::OpenOptions;
use std::io::{ErrorKind, Write as _};
use std::process::ExitCode;

use clap::{Arg, ArgMatches, Command};

use crate::{CommandResult, Failure, out};

const EXAMPLE: &str = include_str!("example.toml");

const DEFAULT_FILE: &str = "rules.toml";

pub(super) fn command() -> Command {
    Command::new("init").about("Write an example rules file with comments").arg(
        Arg::new("file")
            .value_name("FILE")
            .default_value(DEFAULT_FILE)
            .help("File to create; an existing file stays as it is. `-` prints the example"),
    )
}

pub(super) fn run(matches: &ArgMatches) -> CommandResult {
    let file = matches.get_one::<String>("file").map_or(DEFAULT_FILE, String::as_str);
    if file == "-" {
        out::print(EXAMPLE.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    }
    let mut created =
        OpenOptions::new().write(true).create_new(true).open(file).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => {
                Failure::failed(format!("{file}: the file exists, and was not changed: name another file"))
            }
            _ => Failure::failed(format!("{file}: {error}")),
        })?;
    if let Err(error) = created.write_all(EXAMPLE.as_bytes()) {
        // A part of an example would be refused, or mean something else.
        let _ = std::fs::remove_file(file);
        return Err(Failure::failed(format!("{file}: {error}")));
    }
    say!("{file} created. Check it with: tidegate rules validate {file}")?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use tidegate_server::{Fleet, RuleSet};

    use super::*;

    #[test]
    fn the_example_is_valid_and_has_no_warnings() {
        let set = RuleSet::parse(EXAMPLE).unwrap_or_else(|problems| panic!("{:?}", problems.0));
        assert_eq!(set.rules().len(), 3);
        assert_eq!(set.warnings(&Fleet::of(1)), Vec::<String>::new());
    }
}
