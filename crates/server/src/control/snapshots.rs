//! Copies of the rules in a folder of the server's own, or in a bucket, to start from when their store is gone.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, UNIX_EPOCH};

use tidegate_rules::book::{Book, EmergencyRow, Row};
use tidegate_rules::snapshot::{self, Snapshot};
use tidegate_rules::store::Credential;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Control;
use super::bucket::Bucket;

/// A snapshot, and when it was written, in milliseconds since the Unix epoch, if that can be told.
pub(super) type Kept = (Snapshot, Option<u64>);

/// Where copies are kept.
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
    pub(super) fn read(&self, now_ms: u64) -> Result<Kept, String> {
        match self {
            Self::Folder(folder) => read(folder),
            Self::Bucket(bucket) => bucket.read(now_ms),
        }
    }
}

/// How often a copy is written, if anything changed. More often: a server that starts without its store starts with newer
/// rules; more is written.
const WRITE_EVERY: Duration = Duration::from_mins(1);

/// Writes what is in force when it is another than was written, until told to stop; what changed last before that is written too. What came
/// from there is not written again: it may be older than one that could not be read for a moment.
pub(super) async fn keep(
    control: Arc<Control>,
    to: Arc<Snapshots>,
    mut written: Option<Written>,
    stop: CancellationToken,
) {
    let mut ticks = interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => {}
            _ = ticks.tick() => {}
        }
        let (book, credentials) = (control.book(), control.credentials.load_full());
        let is_written = written.as_ref().is_some_and(|written| written.is_of(&book, &credentials));
        if !is_written {
            let new = Written::of(&book, &credentials);
            if write(&to, &book, &credentials, control.now_ms()).await {
                written = Some(new);
            }
        }
    }
}

/// What was written last. Another store may have come to the same revisions with other rows.
pub(super) struct Written {
    revisions: (u64, u64),
    /// By where they are: rows in force never change, and are replaced only by others.
    rows: Weak<[Row]>,
    emergencies: Vec<EmergencyRow>,
    credentials: Arc<Vec<Credential>>,
}

impl Written {
    pub(super) fn of(book: &Book, credentials: &Arc<Vec<Credential>>) -> Self {
        Self {
            revisions: (book.revision, book.emergency_revision),
            rows: Arc::downgrade(&book.rows),
            emergencies: book.emergencies.clone(),
            credentials: Arc::clone(credentials),
        }
    }

    fn is_of(&self, book: &Book, credentials: &Arc<Vec<Credential>>) -> bool {
        self.revisions == (book.revision, book.emergency_revision)
            && self.rows.ptr_eq(&Arc::downgrade(&book.rows))
            && self.emergencies == book.emergencies
            && self.credentials == *credentials
    }
}

async fn write(
    to: &Arc<Snapshots>,
    book: &Arc<Book>,
    credentials: &Arc<Vec<Credential>>,
    now_ms: u64,
) -> bool {
    let (there, book, credentials) = (Arc::clone(to), Arc::clone(book), Arc::clone(credentials));
    let written = tokio::task::spawn_blocking(move || {
        let snapshot = Snapshot { book: (*book).clone(), credentials: credentials.as_slice().into() };
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

fn read(folder: &Path) -> Result<Kept, String> {
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
    use tidegate_rules::book::Kind;

    use super::*;

    fn book(body: &str) -> Book {
        let row = Row { kind: Kind::Rule, name: "a".to_owned(), body: body.to_owned(), version: 1 };
        Book { revision: 7, rows: [row].into(), ..Book::default() }
    }

    #[test]
    fn what_differs_is_written_though_it_has_the_same_revisions() {
        let credential = Credential {
            hash: "0a".repeat(32),
            name: "ci".to_owned(),
            tenant: String::new(),
            role: "viewer".to_owned(),
            created_ms: 1,
            expires_ms: None,
        };
        let (known, nobody) = (book("{}"), Arc::default());
        let written = Written::of(&known, &nobody);
        assert!(written.is_of(&known.clone(), &nobody));
        assert!(!written.is_of(&book(r#"{"limit": 1}"#), &nobody), "of another store");
        assert!(!written.is_of(&known, &Arc::new(vec![credential])));
        let emergency = EmergencyRow { id: "e".to_owned(), body: "{}".to_owned(), expires_ms: 1 };
        assert!(!written.is_of(&known.under(0, vec![emergency]), &nobody));
        assert!(!written.is_of(&known.under(1, Vec::new()), &nobody));
    }
}
