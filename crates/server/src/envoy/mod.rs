//! Envoy's rate limit service, for gRPC and HTTP: the descriptor files of envoyproxy/ratelimit, and
//! decisions by them.

mod decide;
mod file;
mod import;
#[cfg(test)]
mod tests;
mod tree;

use std::path::{Path, PathBuf};

use crate::rules::read_text;
use crate::shared::Shared;

pub(crate) use self::decide::{DESCRIPTORS_MAX, Refusal, decide};
pub use self::import::{DescriptorImport, import_descriptors};
use self::tree::Domains;
pub(crate) use self::tree::{DOMAIN_BYTES_MAX, ENTRIES_MAX, KEY_BYTES_MAX, VALUE_BYTES_MAX};

/// The most files of a folder: a bound on how long a look at it takes.
const FILES_MAX: usize = 1_000;

/// The descriptors of all domains.
#[derive(Debug, Default)]
pub(crate) struct Descriptors {
    domains: Domains,
}

impl Descriptors {
    /// Reads the text of one descriptor file.
    pub(crate) fn parse(text: &str, shared: &Shared) -> Result<Self, Vec<String>> {
        let mut loaded = Self::default();
        loaded.domains.add(file::parse(text)?, shared)?;
        Ok(loaded)
    }

    /// Reads a descriptor file, or all of a folder.
    pub(crate) fn load(path: &Path, shared: &Shared) -> Result<Self, String> {
        let mut loaded = Self::default();
        let mut problems = Vec::new();
        for file in files(path)? {
            let text = match read_text(&file, file::FILE_BYTES_MAX) {
                Ok(text) => text,
                Err(problem) => {
                    problems.push(problem);
                    continue;
                }
            };
            let added = file::parse(&text).and_then(|parsed| loaded.domains.add(parsed, shared));
            let located = |problem: String| format!("{}: {problem}", file.display());
            problems.extend(added.err().unwrap_or_default().into_iter().map(located));
        }
        if problems.is_empty() { Ok(loaded) } else { Err(problems.join("\n")) }
    }
}

/// The file itself, or the descriptor files of a folder in the order of their names.
fn files(path: &Path) -> Result<Vec<PathBuf>, String> {
    if !path.is_dir() {
        return Ok(vec![path.to_owned()]);
    }
    let problem = |error: std::io::Error| format!("{}: {error}", path.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(problem)? {
        let file = entry.map_err(problem)?.path();
        if is_yaml(&file) && file.is_file() {
            files.push(file);
        }
    }
    files.sort();
    match files.len() {
        0 => Err(format!("{}: no .yaml or .yml file in it", path.display())),
        count if count > FILES_MAX => {
            Err(format!("{}: {count} files is outside 1 to {FILES_MAX}", path.display()))
        }
        _ => Ok(files),
    }
}

fn is_yaml(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml")
}
