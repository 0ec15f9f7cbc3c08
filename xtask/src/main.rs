//! The project's own commands, run as `cargo xtask <command>`.

mod command;
mod docs;
mod edges;
mod gate;
mod metadata;
mod mutants;
mod programs;
mod stacks;
mod steps;
mod suites;
mod tally;
mod tools;
mod widths;

use std::process::ExitCode;

use crate::gate::Step;
use crate::metadata::Project;

/// An error message for the user at the terminal.
type Failure = String;

struct Subcommand {
    name: &'static str,
    about: &'static str,
    run: fn() -> Result<(), Failure>,
}

const SUBCOMMANDS: &[Subcommand] = &[
    Subcommand {
        name: "test",
        about: "Everything that must hold before a change is merged: tools, fmt, clippy, deny,\n\
                tests of every crate and target, doc tests and docs, loom, mutants. Stops at the\n\
                first step that fails and ends with the line `N passed, N failed, N skipped`.",
        run: || {
            run_gate(&[
                steps::TOOLS,
                steps::FMT,
                steps::CLIPPY,
                steps::DENY,
                steps::TEST,
                steps::DOC,
                steps::LOOM,
                steps::MUTANTS,
            ])
        },
    },
    Subcommand {
        name: "tools",
        about: "Installs missing tools of the tests: parts of the toolchain, and the real clients\n\
                and proxies of the tests. Debian packages need root or sudo; everything else goes\n\
                below the target folder.",
        run: || run_gate(&[steps::TOOLS]),
    },
    Subcommand {
        name: "lint",
        about: "The checks that run no test: fmt, clippy with warnings as errors, and cargo-deny\n\
                (licences, sources, bans; advisories when their database can be fetched).",
        run: || run_gate(&[steps::LINT_TOOLS, steps::FMT, steps::CLIPPY, steps::DENY]),
    },
    Subcommand {
        name: "loom",
        about: "The model-checked concurrency tests of tidegate-core, in a target directory of\n\
                their own so that their flags do not rebuild everything else.",
        run: || run_gate(&[steps::LOOM]),
    },
    Subcommand {
        name: "mutants",
        about: "Breaks the core on purpose, in a copy, one fault at a time, and fails if the\n\
                concurrency tests do not notice.",
        run: || run_gate(&[steps::MUTANTS]),
    },
    Subcommand {
        name: "long",
        about: "Runs the tests at full length, in one or two hours on an idle machine: a million calls\n\
                to the origin's script, 2,000 simulated worlds of either kind, known mutations, and\n\
                faults, attacks and partitions of real servers, a minute each.",
        run: || run_gate(&steps::LONG),
    },
    Subcommand {
        name: "docs",
        about: "Builds the book of docs/ into target/book with a pinned mdbook, and checks its links,\n\
                anchors and SUMMARY.md. `test` runs the same check as one of xtask's own tests.",
        run: || docs::run(&Project::load()?),
    },
    Subcommand {
        name: "edges",
        about: "Checks the dependencies between our crates against the table in xtask/src/edges.rs,\n\
                and writes that table into ARCHITECTURE.md. xtask's own tests run the same check.",
        run: report_edges,
    },
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("error: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<(), Failure> {
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["-h" | "--help" | "help"] => {
            println!("{}", help());
            Ok(())
        }
        [name] => match SUBCOMMANDS.iter().find(|subcommand| subcommand.name == name) {
            Some(subcommand) => (subcommand.run)(),
            None => Err(format!("there is no command `{name}`\n\n{}", help())),
        },
        [] => Err(format!("which command?\n\n{}", help())),
        [_, ..] => Err(format!("expected one command and nothing after it\n\n{}", help())),
    }
}

fn help() -> String {
    let commands: String = SUBCOMMANDS.iter().map(describe).collect();
    format!(
        "Usage: cargo xtask <command>\n\nCommands:\n{commands}\nEnvironment:\n  {}=1\n         \
         Makes an advisory database that cannot be fetched an error.",
        steps::REQUIRE_ADVISORIES
    )
}

fn describe(subcommand: &Subcommand) -> String {
    format!("  {:<7} {}\n", subcommand.name, subcommand.about.replace('\n', "\n          "))
}

fn run_gate(steps: &[Step]) -> Result<(), Failure> {
    gate::run(steps, &Project::load()?)
}

fn report_edges() -> Result<(), Failure> {
    let graph = metadata::Graph::load()?;
    let violations = edges::check(&graph);
    if violations.is_empty() {
        println!("edges: all {} crates match the table", graph.members().len());
        for edge in edges::unused(&graph) {
            println!("edges: {edge} is allowed but unused");
        }
        return write_table_of_crates(&Project::load()?);
    }
    for violation in &violations {
        println!("edges: {violation}");
    }
    Err(format!("edges: {} violations", violations.len()))
}

fn write_table_of_crates(project: &Project) -> Result<(), Failure> {
    let path = project.root.join("ARCHITECTURE.md");
    let failed = |error: std::io::Error| format!("{}: {error}", path.display());
    let page = std::fs::read_to_string(&path).map_err(failed)?;
    let written = edges::with_table(&page)?;
    if written == page { Ok(()) } else { std::fs::write(&path, written).map_err(failed) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(words: &[&str]) -> Vec<String> {
        words.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn help_names_every_subcommand() {
        let help = help();
        for subcommand in SUBCOMMANDS {
            assert!(
                help.contains(&format!("\n  {} ", subcommand.name)),
                "{} is missing:\n{help}",
                subcommand.name
            );
        }
        assert_eq!(dispatch(&arguments(&["--help"])), Ok(()));
    }

    #[test]
    fn anything_but_one_known_command_is_an_error() {
        for words in [&[][..], &["tset"], &["lint", "now"], &["--version"]] {
            assert!(dispatch(&arguments(words)).is_err(), "{words:?}");
        }
    }
}
