//! Reads all files that a configuration names, before a port opens.

use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};

use crate::config::{Config, ConfigProblems, MEMORY_BYTES_STAND_IN};
use crate::origin_monitor::{self, OriginProbe};
use crate::reload::{self, WatchedFile};
use crate::shared::{Shared, StartError};
use crate::tls::Tls;

/// A valid configuration, with the contents of its files.
pub struct PreparedServer {
    pub(crate) config: Config,
    pub(crate) shared: Shared,
    pub(crate) tls: Option<Tls>,
    pub(crate) watched: Vec<WatchedFile>,
    pub(crate) data_dir: Option<PathBuf>,
}

impl PreparedServer {
    /// Returns the address of the origin, without credentials; `None` without an origin.
    pub fn origin(&self) -> Option<String> {
        self.config.region.origin.address()
    }

    /// Probes the origin once. Returns a description of its state, and whether it can be used as
    /// configured. `None` without an origin.
    pub async fn probe_origin(&self) -> Option<OriginProbe> {
        origin_monitor::probe_once(&self.shared).await
    }

    /// Reads the files of the configuration; `problems` are those of the configuration itself.
    /// Opens neither a port nor the store, because they may belong to a running server.
    pub fn read(mut config: Config, mut problems: Vec<String>) -> Result<Self, ConfigProblems> {
        let data_dir = config.data_dir.take();
        problems.extend(data_dir.as_deref().and_then(|folder| look_at(folder).err()));
        let tls = Tls::new(config.tls.as_ref()).unwrap_or_else(|found| {
            problems.extend(found);
            None
        });
        let Some(shared) = shared(&mut config, &mut problems) else { return Err(ConfigProblems(problems)) };
        let watched = reload::load_all(&config, &shared).unwrap_or_else(|found| {
            problems.extend(found);
            Vec::new()
        });
        if problems.is_empty() {
            Ok(Self { config, shared, tls, watched, data_dir })
        } else {
            Err(ConfigProblems(problems))
        }
    }
}

/// With overrides in memory. If the table cannot be had, one of another size serves to look for
/// further problems.
fn shared(config: &mut Config, problems: &mut Vec<String>) -> Option<Shared> {
    let problem = match Shared::new(config) {
        Ok(shared) => return Some(shared),
        Err(StartError::Limiter(error)) => format!("memory: {error}"),
        Err(other) => other.to_string(),
    };
    problems.push(problem);
    config.memory_bytes = MEMORY_BYTES_STAND_IN;
    Shared::new(config).ok()
}

/// Checks the data folder without opening it: it exists or can be created, and is writable.
fn look_at(folder: &Path) -> Result<(), String> {
    let there = folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("."));
    let problem = |why: &dyn std::fmt::Display| format!("data_dir: {}: {why}", folder.display());
    if !there.is_dir() {
        return Err(problem(&format!("{} is not a folder", there.display())));
    }
    let writable = access(there, Access::WRITE_OK | Access::EXEC_OK);
    writable.map_err(|error| problem(&format!("{} cannot be written to: {error}", there.display())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_data_folder_is_one_or_can_be_made() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        std::fs::write(&file, "").expect("written");
        assert_eq!(look_at(folder.path()), Ok(()));
        assert_eq!(look_at(&folder.path().join("not/yet")), Ok(()));
        assert!(!folder.path().join("not").exists(), "looking makes nothing");
        assert_eq!(look_at(Path::new("relative")), Ok(()));
        for wrong in [file.clone(), file.join("below")] {
            let problem = look_at(&wrong).expect_err("not a folder");
            assert!(
                problem.starts_with("data_dir: ") && problem.ends_with("file is not a folder"),
                "{problem}"
            );
        }
    }
}
