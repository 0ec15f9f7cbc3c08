//! Files that are reloaded when they change. An invalid file is refused as a whole, and the last
//! valid one stays.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, RulesConfig};
use crate::envoy::Descriptors;
use crate::metrics::ReloadedFile;
use crate::rules::{ActiveRules, warn_of};
use crate::shared::Shared;

/// Interval at which the files are checked. A check is cheap, and works also without file events,
/// such as for mounted volumes with swapped links.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// A file or folder that is loaded.
struct FileSource {
    what: ReloadedFile,
    /// The setting that names it.
    key: &'static str,
    path: PathBuf,
    load: fn(&Path, &Shared) -> Result<(), String>,
}

fn sources(config: &Config) -> Vec<FileSource> {
    let rules = match &config.rules {
        Some(RulesConfig::File(path)) => Some(path.clone()),
        Some(RulesConfig::Store(_)) | None => None,
    };
    let rules =
        rules.map(|path| FileSource { what: ReloadedFile::Rules, key: "rules", path, load: load_rules });
    let descriptors = config.envoy_descriptors.clone();
    let descriptors = descriptors.map(|path| FileSource {
        what: ReloadedFile::Descriptors,
        key: "envoy_descriptors",
        path,
        load: load_descriptors,
    });
    rules.into_iter().chain(descriptors).collect()
}

fn load_rules(path: &Path, shared: &Shared) -> Result<(), String> {
    let rules = ActiveRules::load(path, shared)?;
    shared.rules.store_file(&rules);
    Ok(())
}

fn load_descriptors(path: &Path, shared: &Shared) -> Result<(), String> {
    let descriptors = Descriptors::load(path, shared)?;
    shared.rules.descriptors.store(Arc::new(descriptors));
    Ok(())
}

/// Loads all files for the first time, and returns them for [`watch`]. At the start, an invalid
/// file is an error.
pub(crate) fn load_all(config: &Config, shared: &Shared) -> Result<Vec<WatchedFile>, Vec<String>> {
    let mut watched = Vec::new();
    let mut problems = Vec::new();
    for source in sources(config) {
        let key = source.key;
        match WatchedFile::load(source, shared) {
            Ok(one) => watched.push(one),
            Err(found) => problems.extend(found.lines().map(|problem| format!("{key}: {problem}"))),
        }
    }
    if problems.is_empty() { Ok(watched) } else { Err(problems) }
}

/// Logs the warnings about rules that were loaded before logging began.
pub(crate) fn warn(watched: &[WatchedFile], shared: &Shared) {
    for one in watched {
        warn_of_rules(&one.source, shared);
    }
}

fn warn_of_rules(source: &FileSource, shared: &Shared) {
    if matches!(source.what, ReloadedFile::Rules) {
        warn_of(shared.rules.load().set(), &shared.fleet.configured);
    }
}

/// Reloads files that change, until the server stops.
pub(crate) async fn watch(mut watched: Vec<WatchedFile>, shared: Arc<Shared>, stop: CancellationToken) {
    let mut ticks = interval(LOOK_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = ticks.tick() => {}
        }
        let shared = Arc::clone(&shared);
        // Files may be large and disks slow: connections are accepted meanwhile.
        let looked = tokio::task::spawn_blocking(move || {
            for one in &mut watched {
                one.look(&shared);
            }
            watched
        });
        match looked.await {
            Ok(back) => watched = back,
            Err(error) => return tracing::error!(%error, "files are no longer read again"),
        }
    }
}

/// A file source and its last stamps.
pub(crate) struct WatchedFile {
    source: FileSource,
    /// Stamps from before the file was read, so that a change during the read causes another one.
    loaded: Vec<FileStamp>,
    last: Vec<FileStamp>,
}

impl WatchedFile {
    fn load(source: FileSource, shared: &Shared) -> Result<Self, String> {
        let now = prints(&source.path);
        (source.load)(&source.path, shared)?;
        Ok(Self { source, loaded: now.clone(), last: now })
    }

    /// Reloads a changed file once its stamp is the same at two checks. A file that is being
    /// written differs.
    fn look(&mut self, shared: &Shared) {
        let now = prints(&self.source.path);
        if now != self.loaded && now == self.last {
            self.loaded.clone_from(&now);
            reload(&self.source, shared);
        }
        self.last = now;
    }
}

fn reload(source: &FileSource, shared: &Shared) {
    let result = (source.load)(&source.path, shared);
    shared.telemetry.metrics.reloaded(source.what, result.is_ok());
    match result {
        Ok(()) => {
            tracing::info!(file = source.what.as_str(), path = %source.path.display(), "read again");
            warn_of_rules(source, shared);
        }
        Err(problems) => {
            tracing::error!(file = source.what.as_str(), %problems, "refused; the last good one stays in force");
        }
    }
}

/// The stamp of a file, which differs if the file changes or is replaced: modification time, status
/// change time, length and inode.
type FileStamp = (PathBuf, Option<(SystemTime, i64, i64, u64, u64)>);

/// The print of a file, or of all files of a folder.
fn prints(path: &Path) -> Vec<FileStamp> {
    let print = |path: PathBuf| {
        let meta = std::fs::metadata(&path).ok();
        let seen = |meta: std::fs::Metadata| {
            Some((meta.modified().ok()?, meta.ctime(), meta.ctime_nsec(), meta.len(), meta.ino()))
        };
        (path, meta.and_then(seen))
    };
    match std::fs::read_dir(path) {
        Err(_) => vec![print(path.to_owned())],
        Ok(entries) => {
            let mut all: Vec<FileStamp> = entries.flatten().map(|entry| print(entry.path())).collect();
            all.sort();
            all
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Shared {
        Shared::new(&mut crate::fuzzing::small_config(None)).expect("fits")
    }

    /// Simulates a write during a read: each read appends a line.
    fn read_while_it_grows(path: &Path, _: &Shared) -> Result<(), String> {
        let text = std::fs::read_to_string(path).map_err(|error| error.to_string())?;
        std::fs::write(path, format!("{text}read\n")).map_err(|error| error.to_string())
    }

    #[test]
    fn file_changed_while_read_is_read_again() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let times_read = || std::fs::read_to_string(file.path()).expect("text").lines().count();
        let shared = server();
        let source = FileSource {
            what: ReloadedFile::Rules,
            key: "rules",
            path: file.path().to_owned(),
            load: read_while_it_grows,
        };
        let mut watched = WatchedFile::load(source, &shared).expect("can be read");
        assert_eq!(times_read(), 1);
        watched.look(&shared);
        assert_eq!(times_read(), 1, "it may still be being written");
        watched.look(&shared);
        assert_eq!(times_read(), 2, "it looks the same twice");
    }

    #[test]
    fn another_file_of_the_same_age_and_length_is_another() {
        let folder = tempfile::tempdir().expect("a folder");
        let (file, other) = (folder.path().join("rules"), folder.path().join("other"));
        std::fs::write(&file, "a").expect("written");
        std::fs::write(&other, "b").expect("written");
        let written = std::fs::metadata(&file).and_then(|meta| meta.modified()).expect("a time");
        std::fs::File::options()
            .write(true)
            .open(&other)
            .and_then(|other| other.set_modified(written))
            .expect("set");
        let before = prints(&file);
        std::fs::rename(&other, &file).expect("in place of the first");
        assert_ne!(prints(&file), before);
    }
}
