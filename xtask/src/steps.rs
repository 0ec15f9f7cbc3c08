//! The steps of the gate, each a thin wrapper of one tool.

use std::path::PathBuf;
use std::process::{Command, Output};
use std::time::Duration;

use crate::Failure;
use crate::command::{self, TimedExit};
use crate::gate::Step;
use crate::metadata::Project;
use crate::mutants;
use crate::suites;
use crate::tally::TestTally;
use crate::tools;
use crate::widths;

/// Set to `1`, an advisory database that cannot be fetched fails the gate instead of being skipped.
pub(crate) const REQUIRE_ADVISORIES: &str = "TIDEGATE_REQUIRE_ADVISORIES";

/// A few megabytes are to be fetched: ample on a slow line, bearable on a machine without one.
const ADVISORIES_TIME_LIMIT: Duration = Duration::from_mins(1);

pub(crate) const TOOLS: Step = Step { name: "tools", run: |project, _| tools::install_all(project) };
/// Checks that run no test need no other programs.
pub(crate) const LINT_TOOLS: Step = Step { name: "tools", run: |project, _| tools::install(project) };
pub(crate) const FMT: Step = Step { name: "fmt", run: |project, _| fmt(project) };
pub(crate) const CLIPPY: Step = Step { name: "clippy", run: |_, _| clippy() };
pub(crate) const DENY: Step = Step { name: "deny", run: deny };
pub(crate) const TEST: Step = Step { name: "test", run: test };
pub(crate) const DOC: Step = Step { name: "doc", run: |_, tally| doc(tally) };
pub(crate) const LOOM: Step = Step { name: "loom", run: loom };
pub(crate) const MUTANTS: Step = Step { name: "mutants", run: mutants::run };

/// The long forms of checks that the gate runs in short form.
pub(crate) const LONG: [Step; 5] = [
    Step { name: "equality", run: |_, tally| equality(tally) },
    Step { name: "disk faults", run: |_, tally| disk_faults(tally) },
    Step { name: "sim", run: |_, _| sim(&[&["--seeds", "2000"], &["--mutants"]]) },
    Step { name: "sim of regions", run: |_, _| sim(&[&["--regions", "--seeds", "2000"]]) },
    Step { name: "regions", run: |_, tally| regions(tally) },
];

/// The origin's script against the pure transition, on a million calls.
fn equality(tally: &mut TestTally) -> Result<(), Failure> {
    let test = [
        "test",
        "--package",
        "tidegate-origin",
        "--all-features",
        "--lib",
        "--",
        "the_script_is_the_pure_transition",
    ];
    command::run_tests(command::cargo().args(test).env("TIDEGATE_EQUALITY_CALLS", "1000000"), tally)
}

/// The stores on a disk that fails, in many schedules.
fn disk_faults(tally: &mut TestTally) -> Result<(), Failure> {
    let test = ["test", "--package", "tidegate-control", "--test", "disk_faults"];
    command::run_tests(command::cargo().args(test).env("TIDEGATE_DISK_SCHEDULES", "10000"), tally)
}

fn sim(runs: &[&[&str]]) -> Result<(), Failure> {
    for run in runs {
        let program = ["run", "--release", "--quiet", "--package", "tidegate-cli", "--", "sim"];
        command::run(command::cargo().args(program).args(*run))?;
    }
    Ok(())
}

/// Faults, attacks and cuts that last as long as they are promised for, one at a time.
fn regions(tally: &mut TestTally) -> Result<(), Failure> {
    for test in ["region", "regions"] {
        let package = ["test", "--release", "--package", "tidegate-cli", "--test", test];
        // Promises about time apply to release builds.
        let test = package.into_iter().chain(["--", "--nocapture", "--test-threads", "1"]);
        command::run_tests(command::cargo().args(test).env("TIDEGATE_REGION_LONG", "1"), tally)?;
    }
    Ok(())
}

fn fmt(project: &Project) -> Result<(), Failure> {
    command::run(command::cargo().args(["fmt", "--all", "--check"]))
        .map_err(|failure| format!("{failure}; run `cargo fmt --all`"))?;
    widths::check(&project.root)
}

/// Lints the default features and all features: code can be wrong in only one of the two.
fn clippy() -> Result<(), Failure> {
    for features in [&[][..], &["--all-features"]] {
        let mut clippy = command::cargo();
        clippy.args(["clippy", "--workspace", "--all-targets"]).args(features).args(["--", "-D", "warnings"]);
        command::run(&mut clippy)?;
    }
    Ok(())
}

fn test(project: &Project, tally: &mut TestTally) -> Result<(), Failure> {
    // Without all features, cargo silently skips the tests that require one.
    suites::run(&["test", "--workspace", "--all-targets", "--all-features"], project, tally)?;
    must_have_run_tests(tally)
}

fn doc(tally: &mut TestTally) -> Result<(), Failure> {
    let doc_tests = ["test", "--workspace", "--doc", "--all-features", "--no-fail-fast"];
    command::run_tests(command::cargo().args(doc_tests), tally)?;
    let docs = ["doc", "--workspace", "--no-deps", "--all-features"];
    command::run(command::cargo().args(docs).env("RUSTDOCFLAGS", "-D warnings"))
}

fn loom(project: &Project, tally: &mut TestTally) -> Result<(), Failure> {
    if project.loom_tests.is_empty() {
        return Err("tidegate-core has no test named loom*: its concurrency would go unchecked".into());
    }
    command::run_tests(loom_test(project, "loom").args(["--test", "loom*", "--no-fail-fast"]), tally)?;
    must_have_run_tests(tally)
}

/// Returns `cargo test` of the core under loom. It is optimised, because it explores millions of
/// interleavings. Settings that cost more build time than they save are off.
pub(crate) fn loom_test(project: &Project, folder: &str) -> Command {
    let mut cargo = command::cargo();
    cargo
        .args(["test", "--package", "tidegate-core", "--release"])
        // A target directory of its own: with other flags in a shared one, each run would rebuild
        // everything.
        .arg("--target-dir")
        .arg(project.target_dir.join(folder))
        .env("RUSTFLAGS", "--cfg loom")
        .env("CARGO_PROFILE_RELEASE_LTO", "off")
        .env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16")
        .env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    cargo
}

/// A mistaken `cfg` empties a test program without a word.
fn must_have_run_tests(tally: &TestTally) -> Result<(), Failure> {
    if tally.passed > 0 { Ok(()) } else { Err("not a single test ran".into()) }
}

fn deny(project: &Project, tally: &mut TestTally) -> Result<(), Failure> {
    let program = tools::cargo_deny(project).ok_or("cargo-deny is not installed")?;
    let cargo_deny = CargoDeny { program, project };
    let checks = ["check", "--hide-inclusion-graph", "bans", "licenses", "sources"];
    command::run(cargo_deny.command().args(checks))?;
    cargo_deny.check_advisories(tally)
}

struct CargoDeny<'a> {
    program: PathBuf,
    project: &'a Project,
}

impl CargoDeny<'_> {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command.current_dir(&self.project.root);
        command
    }

    fn check_advisories(&self, tally: &mut TestTally) -> Result<(), Failure> {
        match self.fetch_advisories()? {
            // Offline, because a second attempt to fetch would have no time limit.
            FetchResult::Yes => command::run(self.command().args(["--offline", "check", "advisories"])),
            FetchResult::No { why } => skip_advisories(&why, is_set(REQUIRE_ADVISORIES), tally),
        }
    }

    fn fetch_advisories(&self) -> Result<FetchResult, Failure> {
        let mut fetch = self.command();
        // No user is present to answer when git asks for a name and a password.
        fetch.args(["fetch", "db"]).env("GIT_TERMINAL_PROMPT", "0");
        Ok(match command::run_within(ADVISORIES_TIME_LIMIT, &mut fetch)? {
            TimedExit::Ended(output) if output.status.success() => FetchResult::Yes,
            TimedExit::Ended(output) => FetchResult::No { why: last_error_line(&output) },
            TimedExit::OutOfTime { .. } => {
                FetchResult::No { why: format!("not done within {ADVISORIES_TIME_LIMIT:?}") }
            }
        })
    }
}

enum FetchResult {
    Yes,
    No { why: String },
}

fn skip_advisories(why: &str, required: bool, tally: &mut TestTally) -> Result<(), Failure> {
    if required {
        return Err(format!(
            "advisories: the database could not be fetched, and {REQUIRE_ADVISORIES} is set: {why}"
        ));
    }
    println!("advisories: {why}");
    println!("skipped: advisories: the database could not be fetched");
    tally.skipped += 1;
    Ok(())
}

fn last_error_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr);
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty());
    line.map_or_else(|| output.status.to_string(), str::to_owned)
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_advisories_count_as_skipped_unless_required() {
        let mut tally = TestTally::default();
        assert_eq!(skip_advisories("no network", false, &mut tally), Ok(()));
        assert_eq!(tally, TestTally { passed: 0, failed: 0, skipped: 1 });

        let failure = skip_advisories("no network", true, &mut tally).unwrap_err();
        assert!(failure.ends_with("no network"), "{failure}");
        assert_eq!(tally.skipped, 1);
    }

    #[test]
    fn a_project_without_loom_tests_is_an_error() {
        let failure = loom(&Project::default(), &mut TestTally::default()).unwrap_err();
        assert!(failure.contains("no test named loom*"), "{failure}");
    }

    #[test]
    fn a_test_run_without_a_test_is_an_error() {
        assert!(must_have_run_tests(&TestTally { passed: 0, failed: 0, skipped: 4 }).is_err());
        assert!(must_have_run_tests(&TestTally { passed: 1, failed: 0, skipped: 0 }).is_ok());
    }
}
