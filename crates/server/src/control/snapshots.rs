//! Copies of the rules in a folder of the server's own, to start from when their store is gone.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use tidegate_rules::book::Book;
use tidegate_rules::snapshot;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use super::Control;

/// How often a copy is written, if anything changed. More often: a server that starts without its store starts with newer
/// rules; more is written.
const WRITE_EVERY: Duration = Duration::from_mins(1);

/// Writes what is in force when it changes, until told to stop; what changed last before that is written too.
pub(super) async fn keep(control: Arc<Control>, folder: Arc<Path>, stop: CancellationToken) {
    let mut ticks = interval(WRITE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut written = None;
    while !stop.is_cancelled() {
        tokio::select! {
            () = stop.cancelled() => {}
            _ = ticks.tick() => {}
        }
        let book = control.book();
        let version = (book.revision, book.emergency_revision);
        if written != Some(version) && write(&folder, book).await {
            written = Some(version);
        }
    }
}

async fn write(folder: &Arc<Path>, book: Arc<Book>) -> bool {
    let to = Arc::clone(folder);
    let written = tokio::task::spawn_blocking(move || snapshot::write(&to, &book)).await;
    let problem = match written {
        Ok(Ok(_)) => return true,
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    tracing::error!(folder = %folder.display(), problem, "rules_snapshots: no snapshot was written");
    false
}

/// The last good book of a folder, and when it was written, in milliseconds since the Unix epoch, if that can be told.
pub(super) fn read(folder: &Path) -> Result<(Book, Option<u64>), String> {
    let found = snapshot::load_last_good(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
    for skipped in &found.skipped {
        tracing::error!(%skipped, "passed over");
    }
    let book = found.book.ok_or_else(|| format!("there is no snapshot in {}", folder.display()))?;
    let written = found.file.and_then(|file| std::fs::metadata(file).and_then(|meta| meta.modified()).ok());
    let written = written.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
    Ok((book, written.and_then(|at| u64::try_from(at.as_millis()).ok())))
}
