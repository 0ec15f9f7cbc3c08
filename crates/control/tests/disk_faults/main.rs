//! The rule store, the embedded store and the decision log on a disk that fails: full, with errors
//! of writes, reads and syncs, with writes that reach the file by half, with kills, and with losses
//! of power, which take all writes that are not synced.
//! Acknowledged writes are there afterwards, and the stores work again soon after the faults end.
//!
//! The test starts itself again as child processes, with the library of disk faults. A child runs
//! seeded schedules until one of them kills it; the next child checks the files.
//!
//! `TIDEGATE_DISK_SCHEDULES` is the number of schedules, and `TIDEGATE_DISK_FIRST` the first seed.

#![cfg(target_os = "linux")]
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

mod child;
mod ledger;
mod schedule;
mod stores;

use std::fs::File;
use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tidegate_testkit::{DiskFault, FaultLibrary, FaultSwitch, Signal};

/// Schedules of a usual run: some seconds.
const SCHEDULES: u64 = 300;

/// Child processes at a time. They wait for each other's disk and for recoveries most of the time.
const LANES: u64 = 4;

/// The folder of a child.
const WORK: &str = "TIDEGATE_DISK_WORK";

/// The outcome of some schedules.
#[derive(Debug, Default)]
struct Outcome {
    kills: u64,
    faults: [u64; DiskFault::ALL.len()],
    violations: String,
}

#[test]
fn stores_survive_disk_faults() {
    if let Some(work) = std::env::var_os(WORK) {
        return child::run(Path::new(&work));
    }
    let number = |name: &str| Some(std::env::var(name).ok()?.parse().expect("a number"));
    let schedules: u64 = number("TIDEGATE_DISK_SCHEDULES").unwrap_or(SCHEDULES);
    let first: u64 = number("TIDEGATE_DISK_FIRST").unwrap_or(1);
    let folder = tempfile::tempdir().expect("a folder");
    let library = FaultLibrary::build(folder.path());
    let outcomes: Vec<Outcome> = std::thread::scope(|scope| {
        let start = |lane: u64| {
            let work = folder.path().join(lane.to_string());
            let seeds = (first + lane * schedules / LANES)..(first + (lane + 1) * schedules / LANES);
            let library = &library;
            scope.spawn(move || Lane::new(work, seeds).run(library))
        };
        let lanes: Vec<_> = (0..LANES).map(start).collect();
        lanes.into_iter().map(|lane| lane.join().expect("a lane")).collect()
    });
    let kills: u64 = outcomes.iter().map(|outcome| outcome.kills).sum();
    let faults: Vec<String> = DiskFault::ALL
        .into_iter()
        .map(|kind| {
            let count: u64 = outcomes.iter().map(|outcome| outcome.faults[kind as usize]).sum();
            assert!(count > 0 || schedules < SCHEDULES, "no schedule had a fault of the kind {kind:?}");
            format!("{kind:?} {count}")
        })
        .collect();
    let violations: String = outcomes.iter().map(|outcome| outcome.violations.as_str()).collect();
    // Past the capture of the test harness, so that each run shows it.
    let (faults, count) = (faults.join(", "), violations.lines().count());
    let summary =
        format!("disk faults: {schedules} schedules, {kills} kills, faults: {faults}, violations: {count}\n");
    std::io::stdout().write_all(summary.as_bytes()).expect("an output");
    assert!(violations.is_empty(), "{violations}");
    assert!(kills > 0 || schedules < SCHEDULES, "no schedule killed its process");
}

/// The schedules of some seeds, one after the other.
struct Lane {
    work: PathBuf,
}

impl Lane {
    fn new(work: PathBuf, seeds: std::ops::Range<u64>) -> Self {
        std::fs::create_dir_all(work.join("disk")).expect("a folder");
        std::fs::write(work.join("next"), seeds.start.to_string()).expect("a file");
        std::fs::write(work.join("end"), seeds.end.to_string()).expect("a file");
        Self { work }
    }

    /// Starts a child again after each kill, until one has run the last schedule.
    fn run(&self, library: &FaultLibrary) -> Outcome {
        let switch = FaultSwitch::create(&self.work.join("control"));
        let mut outcome = Outcome::default();
        loop {
            switch.end();
            switch.kill_in(0);
            switch.lose_unsynced(false);
            let errors = File::create(self.work.join("errors")).expect("a file");
            let mut child = Command::new(std::env::current_exe().expect("a path"));
            child.args(["stores_survive_disk_faults", "--exact", "--nocapture"]);
            child.env(WORK, &self.work).stdout(Stdio::null()).stderr(errors);
            // The decision log is not synced at each write: a loss of power may take its last
            // records.
            FaultLibrary::except(&mut child, "/decisions.db");
            library.preload(&mut child, &self.work.join("disk"), &self.work.join("control"));
            let ended = child.status().expect("a child");
            if ended.success() {
                break;
            }
            let errors = std::fs::read_to_string(self.work.join("errors")).expect("a file");
            let is_killed = ended.signal() == Some(Signal::KILL.as_raw());
            assert!(is_killed, "a child ended with {ended}: {errors}");
            outcome.kills += 1;
        }
        outcome.faults = switch.counts();
        outcome.violations = std::fs::read_to_string(self.work.join("violations")).unwrap_or_default();
        outcome
    }
}
