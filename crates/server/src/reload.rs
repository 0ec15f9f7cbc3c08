//! Files that are reloaded when they change. An invalid file is refused as a whole, and the last
//! valid one stays.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use arc_swap::ArcSwapOption;
use tidegate_record::timestamp;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::config::{Config, RulesConfig};
use crate::envoy::Descriptors;
use crate::metrics::{RELOADS, ReloadedFile};
use crate::origin_monitor::Audience;
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

/// Maximum characters of a problem in the state of the server. The log has all of it.
const PROBLEM_CHARS_MAX: usize = 500;

/// The reloaded files whose last edit was refused.
#[derive(Debug, Default)]
pub(crate) struct RefusedEdits([ArcSwapOption<RefusedEdit>; RELOADS]);

/// An edit of a file that was refused. The last valid file stays in force.
#[derive(Debug, PartialEq, Eq)]
struct RefusedEdit {
    path: PathBuf,
    /// Time of the first refusal since the last valid edit, in milliseconds since the Unix epoch.
    since_ms: u64,
    /// The first problem of the last edit, without the path.
    problem: String,
}

impl RefusedEdits {
    /// Notes the result of a reload; `problems` is `None` for a valid file.
    fn note(&self, what: ReloadedFile, path: &Path, problems: Option<&str>, now_ms: u64) {
        let current = &self.0[what as usize];
        let since_ms = current.load().as_ref().map_or(now_ms, |edit| edit.since_ms);
        let edit = |problems| RefusedEdit {
            path: path.to_owned(),
            since_ms,
            problem: first_problem(path, problems),
        };
        current.store(problems.map(|problems| Arc::new(edit(problems))));
    }

    /// Returns a sentence for each refused edit. Readers without a credential get no folder.
    pub(crate) fn degraded(&self, audience: Audience) -> Vec<String> {
        let sentence = |(what, edit): (&ReloadedFile, &ArcSwapOption<RefusedEdit>)| {
            let edit = edit.load_full()?;
            let path = match audience {
                Audience::Public => edit.path.file_name().map_or(edit.path.as_path(), Path::new),
                Audience::Operators => &edit.path,
            };
            Some(format!(
                "the last edit of the {} file {} is refused since {}: {}; the last valid file stays in force",
                what.as_str(),
                path.display(),
                timestamp(edit.since_ms),
                edit.problem
            ))
        };
        ReloadedFile::ALL.iter().zip(&self.0).filter_map(sentence).collect()
    }
}

/// Returns the first problem of a file, without the path of the file or folder.
fn first_problem(path: &Path, problems: &str) -> String {
    let first = problems.lines().next().unwrap_or_default();
    let path = path.display().to_string();
    let rest = first.strip_prefix(&path).and_then(|rest| rest.strip_prefix(": ").or(rest.strip_prefix('/')));
    rest.unwrap_or(first).chars().take(PROBLEM_CHARS_MAX).collect()
}

fn reload(source: &FileSource, shared: &Shared) {
    let result = (source.load)(&source.path, shared);
    shared.telemetry.metrics.reloaded(source.what, result.is_ok());
    let problems = result.as_ref().err().map(String::as_str);
    shared.rules.refused_edits.note(source.what, &source.path, problems, shared.now_ms());
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
    fn refused_edits_keep_the_first_time_and_the_last_problem() {
        let (edits, path) = (RefusedEdits::default(), Path::new("/etc/tide/limits"));
        let note = |problems, now_ms| edits.note(ReloadedFile::Descriptors, path, problems, now_ms);
        note(Some("/etc/tide/limits/a.yaml: bad"), 1);
        note(Some("/etc/tide/limits/a.yaml: worse\nmore"), 2);
        let rest =
            "is refused since 1970-01-01T00:00:00.001Z: a.yaml: worse; the last valid file stays in force";
        let expected = |name: &str| vec![format!("the last edit of the descriptors file {name} {rest}")];
        assert_eq!(edits.degraded(Audience::Operators), expected("/etc/tide/limits"));
        assert_eq!(edits.degraded(Audience::Public), expected("limits"));
        note(None, 3);
        assert!(edits.degraded(Audience::Operators).is_empty());
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
