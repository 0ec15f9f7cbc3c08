//! Runs test programs, several at a time: most of them wait for other processes most of the time.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::time::Duration;

use serde_json::Value;

use crate::Failure;
use crate::command;
use crate::gate::timed;
use crate::tally::Tally;

/// How many programs run at once. More: less waiting; tests with deadlines get less of the machine each.
const AT_ONCE: usize = 2;

/// What takes longest begins first, so that the rest fits beside it.
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

/// Builds with `cargo test` in one of its forms, runs all that it would, and adds the results to `tally`. Every failing program
/// is named.
pub(crate) fn run(form: &[&str], tally: &mut Tally) -> Result<(), Failure> {
    let mut build = command::cargo();
    build.args(form).args(["--no-run", "--message-format=json-render-diagnostics"]);
    let mut suites = parse(&String::from_utf8_lossy(&command::capture(&mut build)?))?;
    suites.sort_by_key(|suite| place(&suite.name));
    let count = suites.len();
    println!("{count} test programs, {AT_ONCE} at a time");
    let waiting = Mutex::new(suites.into_iter());
    let told = Mutex::new((tally, Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..AT_ONCE.min(count) {
            scope.spawn(|| {
                while let Some(suite) = next(&waiting) {
                    let (ended, taken) = timed(|| run_suite(&suite));
                    tell(&suite, taken, &ended, &told);
                }
            });
        }
    });
    let (_, failed) = told.into_inner().map_err(|_| "a test program could not be told of")?;
    if failed.is_empty() { Ok(()) } else { Err(format!("failed: {}", failed.join(", "))) }
}

/// When a program's turn comes: those that nobody named keep the order in which they were built.
fn place(name: &str) -> usize {
    LONGEST_FIRST.iter().position(|long| *long == name).unwrap_or(LONGEST_FIRST.len())
}

fn next(waiting: &Mutex<impl Iterator<Item = Suite>>) -> Option<Suite> {
    waiting.lock().ok()?.next()
}

/// Tells tests that the workspace's programs are in the target folder, as all of the tests were built with.
const IS_BUILT: &str = "TIDEGATE_IS_BUILT";

/// What it says is kept until it has ended, so that what two of them say does not mix.
fn run_suite(suite: &Suite) -> std::io::Result<Output> {
    let mut program = Command::new(&suite.program);
    program.current_dir(&suite.folder).env("CARGO_MANIFEST_DIR", &suite.folder).env(IS_BUILT, "1").output()
}

fn tell(
    suite: &Suite,
    taken: Duration,
    ended: &std::io::Result<Output>,
    told: &Mutex<(&mut Tally, Vec<String>)>,
) {
    let Ok(mut told) = told.lock() else { return };
    println!("\n     Running {} ({:.1}s)", suite.name, taken.as_secs_f64());
    let succeeded = match ended {
        Ok(output) => {
            for text in [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes)) {
                text.lines().for_each(|line| told.0.count_line(line));
                print!("{text}");
            }
            output.status.success()
        }
        Err(error) => {
            println!("cannot be run: {error}");
            false
        }
    };
    if !succeeded {
        told.1.push(suite.name.clone());
    }
}

/// The programs among what cargo says of a build: each is a line of JSON.
fn parse(said: &str) -> Result<Vec<Suite>, Failure> {
    let lines = said.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tests = lines.filter(|line| line["profile"]["test"] == true && line["executable"].is_string());
    tests.map(|line| suite(&line)).collect()
}

fn suite(line: &Value) -> Result<Suite, Failure> {
    let text = |value: &Value| value.as_str().map(str::to_owned).ok_or(format!("cargo said {line}"));
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
    fn programs_are_found_among_what_cargo_says() {
        let said = r#"{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","target":{"kind":["lib"],"name":"a"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","target":{"kind":["test"],"name":"t"},"profile":{"test":true},"executable":"/p/target/t-1"}
{"reason":"compiler-artifact","manifest_path":"/p/crates/a/Cargo.toml","target":{"kind":["bin"],"name":"b"},"profile":{"test":false},"executable":"/p/target/b"}
{"reason":"build-finished","success":true}"#;
        let expected =
            Suite { name: "a test t".into(), program: "/p/target/t-1".into(), folder: "/p/crates/a".into() };
        assert_eq!(parse(said), Ok(vec![expected]));
    }

    #[test]
    fn what_takes_longest_begins_first() {
        let mut names = ["core lib tidegate_core", "cli test region", "a", "origin lib tidegate_origin"];
        names.sort_by_key(|name| place(name));
        assert_eq!(names, ["origin lib tidegate_origin", "cli test region", "core lib tidegate_core", "a"]);
    }

    #[test]
    fn what_fails_is_named_and_all_is_counted() {
        let suite = |name: &str| Suite { name: name.into(), program: name.into(), folder: "/".into() };
        let mut tally = Tally::default();
        let told = Mutex::new((&mut tally, Vec::new()));
        for name in ["/bin/true", "/bin/false", "/bin/no-such-program"] {
            tell(&suite(name), Duration::ZERO, &run_suite(&suite(name)), &told);
        }
        let mut echo = Command::new("echo");
        let said = echo.arg("test result: ok. 2 passed; 0 failed; 1 ignored").output();
        tell(&suite("echo"), Duration::ZERO, &said, &told);
        assert_eq!(told.into_inner().unwrap().1, ["/bin/false", "/bin/no-such-program"]);
        assert_eq!(tally, Tally { passed: 2, failed: 0, skipped: 1 });
    }
}
