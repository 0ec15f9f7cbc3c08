//! A child process: runs schedules in its folder, and notes violations there.

use std::io::Write as _;
use std::path::Path;

use tidegate_testkit::FaultSwitch;
use tokio::runtime::{Builder, Runtime};

use crate::ledger::Ledger;
use crate::schedule::Schedule;
use crate::stores::verify;

/// Runs the schedules from `next` to `end`. A ledger that is there was left by a kill: its schedule
/// is not run again, only checked.
pub(crate) fn run(work: &Path) {
    let number = |name: &str| -> u64 {
        std::fs::read_to_string(work.join(name)).expect("a file").parse().expect("a number")
    };
    let (next, end) = (number("next"), number("end"));
    let (switch, ledger) = (FaultSwitch::open(&work.join("control")), work.join("ledger"));
    let mut first = next;
    if ledger.exists() {
        check(work, next, |runtime| runtime.block_on(verify(&disk(work, next), &Ledger::open(&ledger))));
        first += 1;
    }
    for seed in first..end {
        std::fs::write(work.join("next"), seed.to_string()).expect("a file");
        let schedule = Schedule::new(seed);
        check(work, seed, |runtime| {
            let disk = disk(work, seed);
            runtime.block_on(async {
                let run = schedule.run(&disk, Ledger::open(&ledger), &switch).await;
                // Also after a violation, for the next schedule.
                switch.end();
                switch.kill_in(0);
                switch.lose_unsynced(false);
                verify(&disk, &run?).await
            })
        });
    }
}

fn disk(work: &Path, seed: u64) -> std::path::PathBuf {
    work.join("disk").join(seed.to_string())
}

/// Does a part of a schedule and notes its violation, if any. Then nothing is left of the schedule.
fn check(work: &Path, seed: u64, part: impl FnOnce(&Runtime) -> Result<(), String>) {
    // A runtime of its own: it ends with all connections of the schedule.
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    let done = part(&runtime);
    drop(runtime);
    if let Err(violation) = done {
        let file = std::fs::File::options().append(true).create(true).open(work.join("violations"));
        writeln!(file.expect("a file"), "seed {seed}: {violation}").expect("a file");
    }
    // A connection that is being closed may still create a file. No other schedule has the folder.
    let _ = std::fs::remove_dir_all(disk(work, seed));
    std::fs::remove_file(work.join("ledger")).expect("a file");
}
