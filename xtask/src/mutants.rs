//! Breaks the core on purpose, one fault at a time, and checks that the concurrency tests notice.
//!
//! A test that cannot fail proves nothing. Each fault is one that other limiters have had, or one
//! that the table's protocol exists to prevent. It is made in a copy of the core, never in the
//! sources.

use std::fs;
use std::path::Path;

use crate::Failure;
use crate::command;
use crate::metadata::Project;
use crate::steps;
use crate::tally::TestTally;

/// One fault: a unique piece of source, its replacement, and the test that must fail.
struct Mutant {
    fault: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    caught_by: &'static str,
}

const MUTANTS: &[Mutant] = &[
    Mutant {
        fault: "a merge takes the maximum with reservations in it, and the rollback subtracts them",
        file: "src/meter.rs",
        from: "pub fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {",
        to: "pub fn merge(self, limit: &Limit, now: Now, used: u64) -> Self {\n        \
             let used = used.saturating_sub(u64::from(self.reserved));",
        caught_by: "a_rollback_never_takes_a_merge_away",
    },
    Mutant {
        fault: "reported usage includes reservations",
        file: "src/meter.rs",
        from: "Level::Gcra(before) => gcra::used(limit, before, now.mono_us()),",
        to: "Level::Gcra(before) => gcra::used(limit, before, now.mono_us()) + u64::from(self.reserved),",
        caught_by: "a_reservation_is_never_visible_as_use",
    },
    Mutant {
        fault: "a writer locks the present version, not the one it decided on",
        file: "src/table/line.rs",
        from: "pub(crate) fn lock_at(&self, head: Head) -> Option<LineGuard<'_>> {",
        to: "pub(crate) fn lock_at(&self, _: Head) -> Option<LineGuard<'_>> {\n        let head = \
             self.head();",
        caught_by: "the_last_unit_goes_to_one_of_two",
    },
    Mutant {
        fault: "a reader does not check the version again",
        file: "src/table/line.rs",
        from: "self.head.load(Ordering::Relaxed) == head.0",
        to: "self.head.load(Ordering::Relaxed) == head.0 || true",
        caught_by: "a_look_during_a_charge_sees_it_whole_or_not_at_all",
    },
    Mutant {
        fault: "a writer's stores may be seen before its lock",
        file: "src/table/line.rs",
        from: "fence(Ordering::Release);",
        to: "",
        caught_by: "a_look_during_a_charge_sees_it_whole_or_not_at_all",
    },
    Mutant {
        fault: "a new key is placed without a check whether it exists by now",
        file: "src/table/place.rs",
        from: "return InsertResult::Already;",
        to: "",
        caught_by: "a_key_that_two_threads_make_at_once_has_one_meter",
    },
    Mutant {
        fault: "any meter may be forgotten to make room",
        file: "src/table/place.rs",
        from: "best.filter(|choice| choice.eviction_rank < EvictionRank::Pinned)",
        to: "best",
        caught_by: "a_key_at_its_limit_survives_newcomers",
    },
    Mutant {
        fault: "a new key takes the slot it chose, although the slot has changed",
        file: "src/table/place.rs",
        from: "if line.slot(choice.slot) != choice.words {",
        to: "if false {",
        caught_by: "a_newcomer_does_not_take_the_place_of_a_meter_that_changed_meanwhile",
    },
    Mutant {
        fault: "a home line does not know how far its keys lie",
        file: "src/table/place.rs",
        from: "home.extend_reach(choice.line - spot.home);",
        to: "",
        caught_by: "a_key_that_lies_away_from_home_has_one_meter",
    },
];

/// Runs all mutants and prints which were caught.
pub(crate) fn run(project: &Project, tally: &mut TestTally) -> Result<(), Failure> {
    let copy = project.target_dir.join("mutants");
    let mut missed = Vec::new();
    for mutant in MUTANTS {
        lay_out(project, &copy)?;
        mutate(&copy.join("crates/core"), mutant)?;
        let caught = is_caught(project, &copy, mutant)?;
        println!("mutant: {}: {}", mutant.fault, if caught { "caught" } else { "MISSED" });
        if caught {
            tally.passed += 1;
        } else {
            tally.failed += 1;
            missed.push(mutant.fault);
        }
    }
    println!("mutants: {} of {} caught", MUTANTS.len() - missed.len(), MUTANTS.len());
    if missed.is_empty() {
        Ok(())
    } else {
        Err(format!("mutants that no test noticed: {}", missed.join("; ")))
    }
}

/// A workspace of the core alone, as the sources have it.
fn lay_out(project: &Project, copy: &Path) -> Result<(), Failure> {
    let manifest = read(&project.root.join("Cargo.toml"))?;
    let manifest: Vec<&str> = manifest
        .lines()
        .map(|line| if line.starts_with("members =") { r#"members = ["crates/core"]"# } else { line })
        .filter(|line| !line.starts_with("default-members ="))
        .collect();
    let core = copy.join("crates/core");
    if core.exists() {
        fs::remove_dir_all(&core).map_err(|error| format!("{}: {error}", core.display()))?;
    }
    copy_folder(&project.root.join("crates/core"), &core)?;
    write(&copy.join("Cargo.toml"), &manifest.join("\n"))?;
    write(&copy.join("Cargo.lock"), &read(&project.root.join("Cargo.lock"))?)
}

fn mutate(core: &Path, mutant: &Mutant) -> Result<(), Failure> {
    let path = core.join(mutant.file);
    let source = read(&path)?;
    if source.matches(mutant.from).count() != 1 {
        return Err(format!(
            "{}: the code to mutate does not occur exactly once: {}",
            mutant.file, mutant.from
        ));
    }
    write(&path, &source.replace(mutant.from, mutant.to))
}

/// Whether the expected test fails. The test is built first, because code that does not compile
/// would look caught.
fn is_caught(project: &Project, copy: &Path, mutant: &Mutant) -> Result<bool, Failure> {
    let test = |last: &[&str]| {
        // A target folder apart from the intact core: in one folder, cargo confuses two sources of
        // one package.
        let mut cargo = steps::loom_test(project, "loom-mutants");
        cargo.current_dir(copy).args(["--offline", "--quiet", "--test", "loom"]).args(last);
        cargo
    };
    command::run(&mut test(&["--no-run"]))?;
    Ok(!command::succeeds(&mut test(&["--", "--exact", mutant.caught_by])))
}

fn copy_folder(from: &Path, to: &Path) -> Result<(), Failure> {
    let fault = |error: std::io::Error| format!("{}: {error}", from.display());
    fs::create_dir_all(to).map_err(fault)?;
    for entry in fs::read_dir(from).map_err(fault)? {
        let entry = entry.map_err(fault)?;
        let target = to.join(entry.file_name());
        if entry.file_type().map_err(fault)?.is_dir() {
            copy_folder(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).map_err(fault)?;
        }
    }
    Ok(())
}

fn read(path: &Path) -> Result<String, Failure> {
    fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fault_can_be_made_and_names_a_test_that_exists() {
        let core = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/core");
        let tests = read(&core.join("tests/loom.rs")).unwrap();
        for mutant in MUTANTS {
            let source = read(&core.join(mutant.file)).unwrap();
            assert_eq!(source.matches(mutant.from).count(), 1, "{}", mutant.fault);
            assert!(tests.contains(&format!("fn {}()", mutant.caught_by)), "{}", mutant.caught_by);
        }
    }
}
