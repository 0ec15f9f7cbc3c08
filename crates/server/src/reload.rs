//! Files that are read again when they change. A bad one is refused whole, and the last good one stays.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::envoy::Descriptors;
use crate::metrics::Reloaded;
use crate::rules::GatedRules;
use crate::shared::{Shared, StartError};

/// How often the files are looked at. Looking is cheap and also works where file events do not, such as for mounted
/// volumes whose links are swapped.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Something that is read from a path.
struct Source {
    what: Reloaded,
    path: PathBuf,
    load: fn(&Path, &Shared) -> Result<(), String>,
}

fn sources(config: &Config) -> Vec<Source> {
    let rules = config.rules.clone();
    let rules = rules.map(|path| Source { what: Reloaded::Rules, path, load: load_rules });
    let descriptors = config.envoy_descriptors.clone();
    let descriptors =
        descriptors.map(|path| Source { what: Reloaded::Descriptors, path, load: load_descriptors });
    rules.into_iter().chain(descriptors).collect()
}

fn load_rules(path: &Path, shared: &Shared) -> Result<(), String> {
    let rules = GatedRules::load(path, shared)?;
    shared.rules.store(Arc::new(rules));
    Ok(())
}

fn load_descriptors(path: &Path, shared: &Shared) -> Result<(), String> {
    let descriptors = Descriptors::load(path, shared)?;
    shared.descriptors.store(Arc::new(descriptors));
    Ok(())
}

/// Reads everything once; at the start a bad file is an error.
pub(crate) fn load_all(config: &Config, shared: &Shared) -> Result<(), StartError> {
    let problems: Vec<String> =
        sources(config).iter().filter_map(|source| (source.load)(&source.path, shared).err()).collect();
    if problems.is_empty() { Ok(()) } else { Err(StartError::File(problems.join("\n"))) }
}

/// Reads again what changes, until told to stop.
pub(crate) async fn watch(config: Config, shared: Arc<Shared>, stop: CancellationToken) {
    let mut watched: Vec<Watched> = sources(&config).into_iter().map(Watched::new).collect();
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

/// A source, and what it looked like.
struct Watched {
    source: Source,
    loaded: Vec<Print>,
    last: Vec<Print>,
}

impl Watched {
    fn new(source: Source) -> Self {
        let now = prints(&source.path);
        Self { source, loaded: now.clone(), last: now }
    }

    /// Reads what changed, once it looks the same at two looks: a file in the middle of being written does not.
    fn look(&mut self, shared: &Shared) {
        let now = prints(&self.source.path);
        if now != self.loaded && now == self.last {
            self.loaded.clone_from(&now);
            reload(&self.source, shared);
        }
        self.last = now;
    }
}

fn reload(source: &Source, shared: &Shared) {
    let result = (source.load)(&source.path, shared);
    shared.metrics.reloaded(source.what, result.is_ok());
    match result {
        Ok(()) => tracing::info!(file = source.what.as_str(), path = %source.path.display(), "read again"),
        Err(problems) => {
            tracing::error!(file = source.what.as_str(), %problems, "refused; the last good one stays in force");
        }
    }
}

/// What changes when a file does.
type Print = (PathBuf, Option<(SystemTime, u64)>);

/// The print of a file, or of all files of a folder.
fn prints(path: &Path) -> Vec<Print> {
    let print = |path: PathBuf| {
        let meta = std::fs::metadata(&path).ok();
        let seen = meta.and_then(|meta| Some((meta.modified().ok()?, meta.len())));
        (path, seen)
    };
    match std::fs::read_dir(path) {
        Err(_) => vec![print(path.to_owned())],
        Ok(entries) => {
            let mut all: Vec<Print> = entries.flatten().map(|entry| print(entry.path())).collect();
            all.sort();
            all
        }
    }
}
