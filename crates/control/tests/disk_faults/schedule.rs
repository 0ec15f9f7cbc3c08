//! A seeded schedule: writes and reads, with faults from one step to another and perhaps a kill.

use std::ops::Range;
use std::path::Path;
use std::time::Duration;

use fastrand::Rng;
use tidegate_record::RecordKind;
use tidegate_rules::store::Store;
use tidegate_testkit::{ALWAYS, DiskFault, FaultSwitch};
use tokio::time::{interval, timeout};

use crate::ledger::{Ledger, RECORDS};
use crate::stores::{STALE, Stores, Target};

/// The time after the end of the faults in which everything must work again.
const RECOVERY_MAX: Duration = Duration::from_secs(5);

/// Interval between two attempts in that time.
const ATTEMPT_EVERY: Duration = Duration::from_millis(5);

const TARGETS: [Target; 7] = [
    Target::Rule(0),
    Target::Rule(1),
    Target::Override(0),
    Target::Override(1),
    Target::Emergency(0),
    Target::Emergency(1),
    Target::Embedded,
];

/// Denials of a step: a part of an open block, or more than one takes.
const DENIALS: [u64; 3] = [3, 40, 600];

#[derive(Debug)]
pub(crate) struct Schedule {
    rng: Rng,
    steps: u64,
    kinds: Vec<DiskFault>,
    per_1024: u32,
    /// The steps with faults.
    faulty: Range<u64>,
    /// From this step on, the process is killed at the given change of a file.
    kill: Option<(u64, u64)>,
    /// Whether the kill takes all writes with it that are not synced.
    loses_unsynced: bool,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut kinds = DiskFault::ALL.to_vec();
        rng.shuffle(&mut kinds);
        kinds.truncate(*rng.choice(&[1, 1, 1, 2, 5]).unwrap_or(&1));
        let begin = rng.u64(1..6);
        let end = begin + rng.u64(1..10);
        let steps = end + rng.u64(0..6);
        let per_1024 = *rng.choice(&[ALWAYS, ALWAYS, 256, 64]).unwrap_or(&ALWAYS);
        let kill = (rng.u8(0..4) == 0).then(|| (rng.u64(0..steps), rng.u64(1..60)));
        let loses_unsynced = kill.is_some() && rng.bool();
        Self { rng, steps, kinds, per_1024, faulty: begin..end, kill, loses_unsynced }
    }

    /// Runs the steps, and waits until everything works again. Returns an error if a step fails
    /// without faults, or a reader is stale.
    pub(crate) async fn run(
        mut self,
        disk: &Path,
        mut ledger: Ledger,
        switch: &FaultSwitch,
    ) -> Result<Ledger, String> {
        switch.lose_unsynced(self.loses_unsynced);
        let stores = Stores::open(disk).await;
        for step in 0..self.steps {
            if step == self.faulty.start {
                switch.begin(&self.kinds, self.per_1024, self.rng.u64(..));
            } else if step == self.faulty.end {
                switch.end();
                recover(&stores, &mut ledger).await?;
            }
            if let Some((_, changes)) = self.kill.filter(|(at, _)| *at == step) {
                switch.kill_in(changes);
            }
            let done = self.step(step, &stores, &mut ledger).await;
            let is_faulty = self.faulty.contains(&step);
            if let Err(error) = done
                && (!is_faulty || error.starts_with(STALE))
            {
                return Err(format!("step {step} of {self:?}: {error}"));
            }
        }
        switch.end();
        recover(&stores, &mut ledger).await?;
        switch.kill_in(0);
        self.close(stores, &mut ledger).await.map(|()| ledger)
    }

    async fn step(&mut self, step: u64, stores: &Stores, ledger: &mut Ledger) -> Result<(), String> {
        let server = self.rng.usize(0..2);
        let key = format!("user:{step}");
        let denials = *self.rng.choice(&DENIALS).unwrap_or(&1);
        stores.record(&key, denials, ledger);
        stores.pass_minute();
        let done = match self.rng.u8(0..10) {
            0 => stores.read_revision(server, ledger).await.map(|_| ()),
            1 => stores.read_rows(server, ledger).await,
            2 => {
                stores.abandon(self.rng.u32(0..12), ledger).await;
                Ok(())
            }
            _ => {
                let target = *self.rng.choice(&TARGETS).unwrap_or(&Target::Embedded);
                stores.write(target, ledger).await
            }
        };
        stores.note_written(&key, ledger);
        done
    }

    /// Closes the stores, or leaves them to the end of the runtime. All records are accounted for.
    async fn close(&mut self, stores: Stores, ledger: &mut Ledger) -> Result<(), String> {
        let Stores { rules, embedded, log, .. } = stores;
        let recorder = std::sync::Arc::clone(log.recorder());
        drop(log);
        let (counts, tried) = (recorder.counts(), ledger.tried.get(RECORDS).copied().unwrap_or(0));
        let [written, dropped] = [counts.written(RecordKind::Denial), counts.dropped(RecordKind::Denial)];
        ledger.note_acknowledged(RECORDS, written);
        if written + dropped != tried {
            return Err(format!("of {tried} records, {written} are written and {dropped} dropped"));
        }
        // The embedded store has the lock of its folder, which the check needs.
        embedded.close().await;
        if self.rng.bool() {
            for store in rules {
                store.close().await;
            }
        }
        Ok(())
    }
}

/// Waits until every write and read succeeds, without faults.
async fn recover(stores: &Stores, ledger: &mut Ledger) -> Result<(), String> {
    let mut last = String::new();
    let mut ticks = interval(ATTEMPT_EVERY);
    let recovered = timeout(RECOVERY_MAX, async {
        for target in TARGETS {
            while let Err(error) = stores.write(target, ledger).await {
                last = format!("{target:?}: {error}");
                ticks.tick().await;
            }
        }
        for server in 0..2 {
            while let Err(error) = all_read(stores, server, ledger).await {
                last = error;
                ticks.tick().await;
            }
        }
        "the decision log takes no record".clone_into(&mut last);
        let written = || stores.log.recorder().counts().written(RecordKind::Denial);
        let before = written();
        while written() == before || !stores.log.recorder().is_log_up() {
            stores.record("user:after", 1, ledger);
            ticks.tick().await;
        }
        "the store counts as failed".clone_into(&mut last);
        while stores.rules.iter().chain([&stores.embedded]).any(Store::has_failed_write) {
            ticks.tick().await;
        }
    })
    .await;
    recovered.map_err(|_| format!("not back within {RECOVERY_MAX:?}: {last}"))
}

async fn all_read(stores: &Stores, server: usize, ledger: &mut Ledger) -> Result<(), String> {
    stores.read_revision(server, ledger).await?;
    stores.read_rows(server, ledger).await
}
