//! Runs other programs: passed through, counted, captured, or under a time limit.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use crate::Failure;
use crate::stacks;
use crate::tally::TestTally;

/// Prefixes of variables that `cargo run` sets about the package of the program it starts. Build
/// scripts of dependencies watch some of these, so they must not leak into the builds started from
/// here.
const SET_BY_CARGO_RUN: [&str; 3] = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"];

/// The cargo that started this program, or else the one on the path.
pub(crate) fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| SET_BY_CARGO_RUN.iter().any(|prefix| name.starts_with(prefix))) {
            command.env_remove(name);
        }
    }
    // The gate builds everything once, so incremental data would only take gigabytes.
    command.env("CARGO_INCREMENTAL", "0");
    command
}

/// Runs to the end with our own input and output.
pub(crate) fn run(command: &mut Command) -> Result<(), Failure> {
    let status = command.status().map_err(|error| cannot_start(command, &error))?;
    must_succeed(command, status)
}

/// Runs to the end and returns the standard output.
pub(crate) fn capture(command: &mut Command) -> Result<Vec<u8>, Failure> {
    let output = command.stderr(Stdio::inherit()).output().map_err(|error| cannot_start(command, &error))?;
    must_succeed(command, output.status)?;
    Ok(output.stdout)
}

/// Whether the program starts and succeeds; its output is of no interest.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    let quiet = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    quiet.status().is_ok_and(|status| status.success())
}

/// Runs `cargo test` in one of its forms, passes its output through and adds its results to
/// `tally`.
pub(crate) fn run_tests(command: &mut Command, tally: &mut TestTally) -> Result<(), Failure> {
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| cannot_start(command, &error))?;
    if let Some(output) = child.stdout.take() {
        pass_through(output, &mut std::io::stdout(), tally)
            .map_err(|error| format!("lost the output of {}: {error}", spelled(command)))?;
    }
    let status = child.wait().map_err(|error| cannot_start(command, &error))?;
    must_succeed(command, status)
}

fn pass_through(from: impl Read, to: &mut impl Write, tally: &mut TestTally) -> std::io::Result<()> {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while from.read_until(b'\n', &mut line)? > 0 {
        to.write_all(&line)?;
        tally.count_line(&String::from_utf8_lossy(&line));
        line.clear();
    }
    to.flush()
}

/// Time for a program to end after a signal.
const GRACE: Duration = Duration::from_secs(30);

/// How a program under a time limit ended.
pub(crate) enum TimedExit {
    Ended(Output),
    OutOfTime { stacks: String },
}

/// Runs quietly, and ends the program and all it has started when `limit` has passed.
pub(crate) fn run_within(limit: Duration, command: &mut Command) -> Result<TimedExit, Failure> {
    run_group_within(limit, command.stdout(Stdio::piped()).stderr(Stdio::piped()))
}

/// Runs with the given output. Ends all remaining processes of the group when the program has ended
/// or `limit` has passed.
pub(crate) fn run_group_within(limit: Duration, command: &mut Command) -> Result<TimedExit, Failure> {
    // A process group of its own, so that the programs it starts can be ended with it.
    let child = command
        .process_group(0)
        .stdin(Stdio::null())
        .spawn()
        .map_err(|error| cannot_start(command, &error))?;
    wait_within(limit, child).map_err(|error| format!("cannot wait for {}: {error}", spelled(command)))
}

fn wait_within(limit: Duration, child: Child) -> std::io::Result<TimedExit> {
    let group = child.id();
    let (ended, end) = mpsc::channel();
    std::thread::spawn(move || {
        // The send fails if the program does not end even when killed, because the receiver is then
        // gone.
        let _ = ended.send(child.wait_with_output());
    });
    if let Ok(output) = end.recv_timeout(limit) {
        signal_group(group, "KILL")?;
        return output.map(TimedExit::Ended);
    }
    let stacks = stacks::of_group(group);
    // SIGTERM first: a `git clone` then removes its partial files.
    for signal in ["TERM", "KILL"] {
        signal_group(group, signal)?;
        if end.recv_timeout(GRACE).is_ok() {
            return Ok(TimedExit::OutOfTime { stacks });
        }
    }
    Err(std::io::Error::other("the process does not end after SIGKILL"))
}

fn signal_group(group: u32, signal: &str) -> std::io::Result<()> {
    // Fails when the group has ended by itself, which is as good.
    let mut kill = Command::new("sh");
    kill.arg("-c").arg(format!("kill -s {signal} -- -{group}")).stderr(Stdio::null());
    kill.status().map(drop)
}

fn must_succeed(command: &Command, status: ExitStatus) -> Result<(), Failure> {
    if status.success() { Ok(()) } else { Err(format!("{} ended with {status}", spelled(command))) }
}

fn cannot_start(command: &Command, error: &std::io::Error) -> Failure {
    format!("cannot run {}: {error}", spelled(command))
}

/// The command as one would type it, without the directory of the program.
fn spelled(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program());
    let name = program.file_name().unwrap_or(command.get_program());
    let words = std::iter::once(name).chain(command.get_args()).map(|word| word.to_string_lossy());
    format!("`{}`", words.collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        command
    }

    #[test]
    fn passes_output_through_unchanged_and_counts_it() {
        let output = b"\xffnot UTF-8\n\
            test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out\n\
            no newline at the end";
        let (mut copy, mut tally) = (Vec::new(), TestTally::default());
        pass_through(&output[..], &mut copy, &mut tally).unwrap();
        assert_eq!(copy, output);
        assert_eq!(tally, TestTally { passed: 2, failed: 0, skipped: 1 });
    }

    #[test]
    fn a_failing_program_is_named_with_its_arguments() {
        let failure = run(&mut shell("exit 3")).unwrap_err();
        assert_eq!(failure, "`sh -c exit 3` ended with exit status: 3");
        assert!(
            run(&mut Command::new("no-such-program"))
                .unwrap_err()
                .starts_with("cannot run `no-such-program`")
        );
    }

    #[test]
    fn a_program_within_its_limit_hands_over_its_output() {
        let ended =
            run_within(Duration::from_hours(1), &mut shell("echo out; echo err >&2; exit 1")).unwrap();
        let TimedExit::Ended(output) = ended else { panic!("out of time") };
        assert_eq!((&output.stdout[..], &output.stderr[..]), (&b"out\n"[..], &b"err\n"[..]));
        assert!(!output.status.success());
    }

    /// The grandchild keeps the output open, so the call succeeds only if the whole group is ended.
    #[test]
    fn a_program_out_of_time_is_ended_with_all_it_started() {
        let ended = run_within(Duration::ZERO, &mut shell("tail -f /dev/null & wait")).unwrap();
        assert!(matches!(ended, TimedExit::OutOfTime { .. }));
    }
}
