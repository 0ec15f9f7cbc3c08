//! Exports the decision log of a server to a file for other tools. It reads the log in place, even
//! while a server writes it.

use std::fs::File;
use std::io::BufWriter;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use tidegate::{Clock, SystemClock};
use tidegate_record::{Archive, ExportError, moment};
use tokio::runtime::Builder;

use crate::config::state_dir;

/// The selection of records to export.
#[derive(Clone, Copy, Debug)]
pub struct LogExport<'e> {
    /// The data folder of the server; `None` for the default folder.
    pub data_dir: Option<&'e Path>,
    /// The tenant of the decisions; `None` for all tenants.
    pub tenant: Option<&'e str>,
    /// The first moment, as [`moment`] reads it; `None` for the beginning.
    pub from: Option<&'e str>,
    /// The last moment; `None` for now.
    pub to: Option<&'e str>,
}

/// The reason why an export failed.
#[derive(Debug)]
pub enum LogExportError {
    /// The request is invalid.
    Usage(String),
    /// The log cannot be read, or the file not written.
    Failed(String),
}

impl LogExport<'_> {
    /// Writes a Parquet file, whole or not at all, and replaces an existing one. Returns the number
    /// of records.
    pub fn write(&self, out: &Path) -> Result<usize, LogExportError> {
        let (from_ms, to_ms) = self.span()?;
        let folder = self.data_dir.map(Path::to_owned).or_else(state_dir).ok_or_else(|| {
            LogExportError::Usage("data-dir: there is no home folder with one: name it".to_owned())
        })?;
        let part = beside(out);
        let failed = |problem: String| LogExportError::Failed(format!("out: {}: {problem}", part.display()));
        // The export holds keys and addresses, so only its owner may read it.
        let file = File::options().write(true).create(true).truncate(true).mode(0o600).open(&part);
        let file = file.map_err(|error| failed(error.to_string()))?;
        let written = export(&folder, self.tenant, (from_ms, to_ms), &file).and_then(|count| {
            file.sync_all()
                .and_then(|()| std::fs::rename(&part, out))
                .map_err(|error| failed(error.to_string()))?;
            Ok(count)
        });
        if written.is_err() {
            let _ = std::fs::remove_file(&part);
        }
        written
    }

    fn span(&self) -> Result<(u64, u64), LogExportError> {
        let now_ms = SystemClock::new().now().wall_us() / 1_000;
        let read = |flag: &str, text: Option<&str>, otherwise: u64| {
            let problem = |problem| LogExportError::Usage(format!("{flag}: {problem}"));
            text.map_or(Ok(otherwise), |text| moment(text, now_ms)).map_err(problem)
        };
        let (from_ms, to_ms) = (read("from", self.from, 0)?, read("to", self.to, now_ms)?);
        if from_ms > to_ms {
            return Err(LogExportError::Usage("from: is after --to".to_owned()));
        }
        Ok((from_ms, to_ms))
    }
}

/// Returns the temporary name of a file until it is complete.
fn beside(out: &Path) -> PathBuf {
    let mut name = out.file_name().unwrap_or_default().to_owned();
    name.push(".part");
    out.with_file_name(name)
}

fn export(
    folder: &Path,
    tenant: Option<&str>,
    span: (u64, u64),
    file: &File,
) -> Result<usize, LogExportError> {
    let failed = |error: &dyn std::fmt::Display| LogExportError::Failed(error.to_string());
    let runtime = Builder::new_current_thread().build().map_err(|error| failed(&error))?;
    let exported: Result<usize, ExportError> = runtime.block_on(async {
        let mut archive = Archive::open(folder).await?;
        let count = archive.export(tenant, span, BufWriter::new(file)).await?;
        archive.close().await?;
        Ok(count)
    });
    exported.map_err(|error| failed(&error))
}
