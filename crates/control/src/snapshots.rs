//! Snapshots of the rules in a folder of the server or in a bucket, for a start without the rule
//! store. Each has a checkpoint of the audit, so that checkpoints leave the store by themselves.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, UNIX_EPOCH};

use tidegate_rules::audit::Checkpoint;
use tidegate_rules::rows::{EmergencyRow, RuleRow, RuleRows};
use tidegate_rules::snapshot::{self, Snapshot};
use tidegate_rules::store::Credential;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::bucket::Bucket;
use crate::control::Control;
use crate::node::Node;

/// A snapshot, and the time it was written in milliseconds since the Unix epoch, if known.
pub(super) type DatedSnapshot = (Snapshot, Option<u64>);

/// Location of the snapshots.
#[derive(Clone, Debug)]
pub enum Snapshots {
    /// In a folder of this server's own.
    Folder(PathBuf),
    /// In a bucket of an object store.
    Bucket(Box<Bucket>),
}

impl fmt::Display for Snapshots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            Self::Bucket(bucket) => bucket.fmt(f),
        }
    }
}

impl Snapshots {
    fn write(&self, snapshot: &Snapshot, now_ms: u64) -> Result<(), String> {
        match self {
            Self::Folder(folder) => {
                snapshot::write(folder, snapshot).map(drop).map_err(|error| error.to_string())
            }
            Self::Bucket(bucket) => bucket.write(snapshot, now_ms),
        }
    }

    /// The last good one. Waits for the disk or the network.
    pub(super) fn read(&self, now_ms: u64) -> Result<DatedSnapshot, String> {
        match self {
            Self::Folder(folder) => read(folder),
            Self::Bucket(bucket) => bucket.read(now_ms),
        }
    }
}

/// Interval between snapshots, if anything changed, and between checkpoints in the log. Shorter: a
/// server that starts without its store has newer rules, and fewer audit entries can be cut off
/// unnoticed; more writes.
const WRITE_EVERY: Duration = Duration::from_mins(1);

/// Writes the rules in force when they or the audit differ from the last snapshot, until `stop` is
/// cancelled; the last change before is written too. Rules from a snapshot are not written again:
/// they may be older than a snapshot that was briefly unreadable. Without a place for snapshots,
/// checkpoints of the audit still go to the log.
pub(super) async fn keep<N: Node>(
    control: Arc<Control<N>>,
    to: Option<Arc<Snapshots>>,
    mut written: Option<LastWrite>,
    stop: CancellationToken,
) {
    if let Some(to) = &to {
        tokio::select! {
            () = stop.cancelled() => {}
            last = last_checkpoint(to, &control) => control.audit_watch.expect(last),
        }
    }
    let mut ticks = interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => {}
            _ = ticks.tick() => {}
        }
        let is_last = stop.is_cancelled();
        let checkpoint = control.look_at_audit().await;
        let (rule_rows, credentials) = (control.rule_rows(), control.credentials.load_full());
        let new = LastWrite::of(&rule_rows, &credentials, checkpoint.clone());
        if let Some(to) = &to
            && written.as_ref().is_none_or(|written| !written.covers(&new))
        {
            let Ok(now_ms) = control.now_ms() else { return };
            if write(to, &rule_rows, &credentials, checkpoint, now_ms).await {
                written = Some(new);
            }
        }
        if is_last {
            return;
        }
    }
}

/// Returns the checkpoint of the last good snapshot.
async fn last_checkpoint<N: Node>(from: &Arc<Snapshots>, control: &Control<N>) -> Option<Checkpoint> {
    let (from, now_ms) = (Arc::clone(from), control.now_ms().ok()?);
    // Reads from a disk or a network.
    let read = tokio::task::spawn_blocking(move || from.read(now_ms)).await.ok()?;
    match read {
        Ok((snapshot, _)) => snapshot.checkpoint,
        Err(problem) => {
            tracing::debug!(problem, "the audit is not compared with a snapshot");
            None
        }
    }
}

/// Identity of a snapshot. Another store may reach the same revisions with other
/// rows.
pub(super) struct LastWrite {
    revisions: (u64, u64),
    /// By where they are: rows in force never change, and are replaced only by others.
    rows: Weak<[RuleRow]>,
    emergencies: Vec<EmergencyRow>,
    credentials: Arc<Vec<Credential>>,
    /// `None`: any.
    checkpoint: Option<Checkpoint>,
}

impl LastWrite {
    pub(super) fn of(
        rule_rows: &RuleRows,
        credentials: &Arc<Vec<Credential>>,
        checkpoint: Option<Checkpoint>,
    ) -> Self {
        Self {
            revisions: (rule_rows.revision, rule_rows.emergency_revision),
            rows: Arc::downgrade(&rule_rows.rows),
            emergencies: rule_rows.emergencies.clone(),
            credentials: Arc::clone(credentials),
            checkpoint,
        }
    }

    /// Whether another snapshot would have nothing new.
    fn covers(&self, new: &Self) -> bool {
        self.revisions == new.revisions
            && self.rows.ptr_eq(&new.rows)
            && self.emergencies == new.emergencies
            && self.credentials == new.credentials
            && (self.checkpoint.is_none() || self.checkpoint == new.checkpoint)
    }
}

async fn write(
    to: &Arc<Snapshots>,
    rule_rows: &Arc<RuleRows>,
    credentials: &Arc<Vec<Credential>>,
    checkpoint: Option<Checkpoint>,
    now_ms: u64,
) -> bool {
    let (there, rule_rows, credentials) = (Arc::clone(to), Arc::clone(rule_rows), Arc::clone(credentials));
    let written = tokio::task::spawn_blocking(move || {
        let credentials = credentials.as_slice().into();
        let snapshot = Snapshot { rule_rows: (*rule_rows).clone(), credentials, checkpoint };
        there.write(&snapshot, now_ms)
    });
    let written = written.await;
    let problem = match written {
        Ok(Ok(())) => return true,
        Ok(Err(problem)) => problem,
        Err(error) => error.to_string(),
    };
    tracing::error!(%to, problem, "rules_snapshots: no snapshot was written");
    false
}

fn read(folder: &Path) -> Result<DatedSnapshot, String> {
    let found = snapshot::load_last_good(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for skipped in &found.skipped {
        tracing::error!(%skipped, "passed over");
    }
    let snapshot = found.snapshot.ok_or_else(|| format!("there is no snapshot in {}", folder.display()))?;
    let written = found.file.and_then(|file| std::fs::metadata(file).and_then(|meta| meta.modified()).ok());
    let written = written.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Ok((snapshot, written.and_then(|at| u64::try_from(at.as_millis()).ok())))
}

#[cfg(test)]
mod tests {
    use tidegate_rules::rows::RowKind;

    use super::*;

    fn rule_rows(body: &str) -> RuleRows {
        let row = RuleRow { kind: RowKind::Rule, name: "a".to_owned(), body: body.to_owned(), version: 1 };
        RuleRows { revision: 7, rows: [row].into(), ..RuleRows::default() }
    }

    #[test]
    fn different_rows_at_equal_revisions_are_written() {
        let credential = Credential {
            hash: "0a".repeat(32),
            name: "ci".to_owned(),
            tenant: String::new(),
            role: "viewer".to_owned(),
            created_ms: 1,
            expires_ms: None,
        };
        let (known, nobody) = (rule_rows("{}"), Arc::default());
        let end = Some(Checkpoint::default());
        let written = LastWrite::of(&known, &nobody, end.clone());
        let covers = |rule_rows: &RuleRows, credentials: &Arc<Vec<Credential>>| {
            written.covers(&LastWrite::of(rule_rows, credentials, end.clone()))
        };
        assert!(covers(&known.clone(), &nobody));
        assert!(!covers(&rule_rows(r#"{"limit": 1}"#), &nobody), "of another store");
        assert!(!covers(&known, &Arc::new(vec![credential])));
        let emergency = EmergencyRow { id: "e".to_owned(), body: "{}".to_owned(), expires_ms: 1 };
        assert!(!covers(&known.under(0, vec![emergency]), &nobody));
        assert!(!covers(&known.under(1, Vec::new()), &nobody));
        let later = Some(Checkpoint { count: 1, hash: "0a".repeat(32) });
        assert!(!written.covers(&LastWrite::of(&known, &nobody, later)), "the audit has grown");
    }
}
