//! Runs test programs, several at a time: most of them wait for other processes most of the time.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::Value;

use crate::Failure;
use crate::command::{self, TimedExit};
use crate::gate::timed;
use crate::metadata::Project;
use crate::tally::TestTally;

/// How many programs run at once. More: less waiting; tests with deadlines get less of the machine
/// each.
const AT_ONCE: usize = 2;

/// Time limit of a test program. The longest takes two minutes on two cores. A program that exceeds
/// the limit hangs: it fails, and its stacks show where.
const TIME_LIMIT: Duration = Duration::from_mins(10);

/// The longest programs start first, so that the others fit beside them.
const LONGEST_FIRST: &[&str] = &[
    "origin lib tidegate_origin",
    "cli test region",
    "cli test control_plane",
    "cli test regions",
    "sim test mutants",
    "rules test store",
];

/// A test program, and the folder that its tests expect to be started in.
#[derive(Debug, PartialEq, Eq)]
struct Suite {
    name: String,
    program: PathBuf,
    folder: PathBuf,
}

/// Builds with `cargo test` in one of its forms, runs all that it would, and adds the results to
/// `tally`. Every failing program is named.
pub(crate) fn run(form: &[&str], project: &Project, tally: &mut TestTally) -> Result<(), Failure> {
    let mut build = command::cargo();
    build.args(form).args(["--no-run", "--message-format=json-render-diagnostics"]);
    let mut suites = parse(&String::from_utf8_lossy(&command::capture(&mut build)?))?;
    suites.sort_by_key(|suite| place(&suite.name));
    let count = suites.len();
    println!("{count} test programs, {AT_ONCE} at a time");
    let notes = project.target_dir.join("test-output");
    std::fs::create_dir_all(&notes).map_err(|error| format!("cannot make {}: {error}", notes.display()))?;
    let waiting = Mutex::new(suites.into_iter());
    let results = Mutex::new((tally, Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(count) {
            scope.spawn(|| {
                while let Some(suite) = next(&waiting) {
                    let (output, taken) = timed(|| run_suite(&suite, &notes, TIME_LIMIT));
                    report(&suite, taken, output, &results);
                }
            });
        }
    });
    let (_, failed) =
        results.into_inner().map_err(|_| "a test thread panicked before it reported its result")?;
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// Returns the rank of a program. Programs that are not listed keep their build order.
fn place(name: &str) -> usize {
    LONGEST_FIRST.iter().position(|long| *long == name).unwrap_or(LONGEST_FIRST.len())
}

fn next(waiting: &Mutex<impl Iterator<Item = Suite>>) -> Option<Suite> {
    waiting.lock().ok()?.next()
}

/// Variable that informs tests that the workspace's programs are in the target folder, built
/// together with the tests.
const IS_BUILT: &str = "TIDEGATE_IS_BUILT";

/// Output of a program, and how it ended.
struct ProgramOutput {
    text: String,
    is_success: bool,
}

/// Runs a program with its output in a file until it ends, so that the outputs of two programs do
/// not mix. A pipe would stay open until its last process ends, and a failing test may leave one
/// behind.
fn run_suite(suite: &Suite, notes: &Path, limit: Duration) -> Result<ProgramOutput, Failure> {
    let note = notes.join(suite.name.replace(['/', ' '], "-"));
    let ended = File::create(&note)
        .and_then(|out| Ok((out.try_clone()?, out)))
        .map_err(|error| format!("cannot write {}: {error}", note.display()))
        .and_then(|(out, err)| {
            let mut program = Command::new(&suite.program);
            program.current_dir(&suite.folder).env("CARGO_MANIFEST_DIR", &suite.folder).env(IS_BUILT, "1");
            command::run_group_within(limit, program.stdout(out).stderr(err))
        })?;
    let text = std::fs::read(&note).map_err(|error| format!("cannot read {}: {error}", note.display()))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    Ok(match ended {
        TimedExit::Ended(output) => ProgramOutput { text, is_success: output.status.success() },
        TimedExit::OutOfTime { stacks } => {
            let text = format!("{text}\nHUNG: not done within {limit:?}\n{stacks}");
            ProgramOutput { text, is_success: false }
        }
    })
}

fn report(
    suite: &Suite,
    taken: Duration,
    output: Result<ProgramOutput, Failure>,
    results: &Mutex<(&mut TestTally, Vec<String>)>,
) {
    let Ok(mut results) = results.lock() else { return };
    let output =
        output.unwrap_or_else(|failure| ProgramOutput { text: format!("{failure}\n"), is_success: false });
    println!("\n     Running {} ({:.1}s)", suite.name, taken.as_secs_f64());
    output.text.lines().for_each(|line| results.0.count_line(line));
    print!("{}", output.text);
    if !output.is_success {
        results.1.push(suite.name.clone());
    }
}

/// Parses the test programs from cargo's build messages, one JSON object per line.
fn parse(output: &str) -> Result<Vec<Suite>, Failure> {
    let lines = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = lines.filter(|line| line["profile"]["test"] == true && line["executable"].is_string());
    tests.map(|line| suite(&line)).collect()
}

fn suite(line: &Value) -> Result<Suite, Failure> {
    let text = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or(format!("unexpected line from cargo: {line}"))
    };
    let manifest = text(&line["manifest_path"])?;
    let folder = Path::new(&manifest).parent().ok_or("a manifest lies in a folder")?.to_owned();
    let package = folder.file_name().unwrap_or_default().to_string_lossy();
    let name = format!(
        "{package} {} {}",
        line["target"]["kind"][0].as_str().unwrap_or("test"),
        text(&line["target"]["name"])?
    );
    Ok(Suite { name, program: text(&line["executable"])?.into(), folder })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_programs_are_parsed_from_cargo_output() {
        let output = concat!(
            r#"{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","#,
            r#""target":{"kind":["lib"],"name":"a"},"profile":{"test":false},"executable":null}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","#,
            r#""target":{"kind":["test"],"name":"t"},"profile":{"test":true},"executable":"/p/target/t-1"}"#,
            "\n",
            r#"{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","#,
            r#""target":{"kind":["bin"],"name":"b"},"profile":{"test":false},"executable":"/p/target/b"}"#,
            "\n",
            r#"{"reason":"build-finished","success":true}"#,
        );
        let expected =
            Suite { name: "a test t".into(), program: "/p/target/t-1".into(), folder: "/p/crates/a".into() };
        assert_eq!(parse(output), Ok(vec![expected]));
    }

    #[test]
    fn slowest_suites_start_first() {
        let mut names = ["core lib tidegate_core", "cli test region", "a", "origin lib tidegate_origin"];
        names.sort_by_key(|name| place(name));
        assert_eq!(names, ["origin lib tidegate_origin", "cli test region", "core lib tidegate_core", "a"]);
    }

    fn program(folder: &Path, script: &str) -> Suite {
        use std::os::unix::fs::PermissionsExt;

        let name = format!("suite {}", script.len());
        let program = folder.join(&name);
        std::fs::write(&program, format!("#!/bin/sh\n{script}\n")).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Suite { name, program, folder: folder.to_owned() }
    }

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("tidegate-xtask-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    #[test]
    fn failed_suites_are_named_and_all_tests_counted() {
        let folder = folder("fails");
        let no_such = Suite { name: "none".into(), program: folder.join("none"), folder: folder.clone() };
        let suites = [
            program(&folder, "echo 'test result: ok. 2 passed; 0 failed; 1 ignored'"),
            program(&folder, "exit 101"),
            no_such,
        ];
        let mut tally = TestTally::default();
        let results = Mutex::new((&mut tally, Vec::new()));
        for suite in &suites {
            report(suite, Duration::ZERO, run_suite(suite, &folder, TIME_LIMIT), &results);
        }
        assert_eq!(results.into_inner().unwrap().1, [&suites[1].name[..], "none"]);
        assert_eq!(tally, TestTally { passed: 2, failed: 0, skipped: 1 });
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn hanging_suite_fails_with_its_output_and_stacks() {
        let folder = folder("hangs");
        let suite = program(&folder, "echo begun; exec tail -f /dev/null");
        let output = run_suite(&suite, &folder, Duration::from_millis(300)).unwrap();
        assert!(!output.is_success);
        assert!(output.text.starts_with("begun\n"), "{}", output.text);
        assert!(
            output.text.contains("HUNG") && output.text.contains("--- stacks of process"),
            "{}",
            output.text
        );
        std::fs::remove_dir_all(folder).unwrap();
    }

    /// The remaining process would keep a pipe open, and would not end.
    #[test]
    #[expect(clippy::disallowed_methods, reason = "waits for another process, which can only be looked at")]
    fn leftover_process_of_a_suite_is_killed_without_blocking() {
        let folder = folder("leaves");
        let suite = program(&folder, "tail -f /dev/null & echo $!");
        let output = run_suite(&suite, &folder, TIME_LIMIT).unwrap();
        let left = Path::new("/proc").join(output.text.trim()).join("cmdline");
        // A killed process stays in the process list without a command line, until its new parent
        // reaps it.
        let is_there = || std::fs::read(&left).is_ok_and(|line| !line.is_empty());
        assert!(output.is_success);
        let looks = std::iter::repeat_with(|| std::thread::sleep(Duration::from_millis(10))).take(1_000);
        assert!(looks.into_iter().any(|()| !is_there()), "the process still runs after ten seconds");
        std::fs::remove_dir_all(folder).unwrap();
    }
}
