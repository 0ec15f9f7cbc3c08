//! A server in a process of its own: started, watched, and stopped by its id.

use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use tempfile::TempDir;
use tidegate_testkit::free_port;

use crate::machine;
use crate::scrape::{self, Metrics};

/// How long a server may take until it listens.
const START_TIME_MAX: Duration = Duration::from_secs(30);

/// Between two looks whether it does.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// A running server.
pub(super) struct Server {
    child: Child,
    port: u16,
    /// The port of its metrics, if it has one.
    metrics_port: Option<u16>,
    /// Its files, removed with it.
    _folder: TempDir,
}

impl Server {
    /// Starts a server that `command` makes for a port and a folder, and waits until it listens.
    pub(super) fn start(command: impl FnOnce(u16, &Path) -> Command) -> Result<Self> {
        let (port, folder) = (free_port(), tempfile::tempdir()?);
        let mut command = command(port, folder.path());
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().context(name.clone())?;
        let mut server = Self { child, port, metrics_port: None, _folder: folder };
        let started = machine::now();
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            if let Some(status) = server.child.try_wait()? {
                bail!("{name} ended with {status} before it listened");
            }
            if machine::now() - started > START_TIME_MAX {
                bail!("{name} does not listen after {START_TIME_MAX:?}");
            }
            std::thread::park_timeout(LOOK_EVERY);
        }
        Ok(server)
    }

    /// Sets the port of the server's metrics.
    pub(super) fn with_metrics_at(mut self, port: u16) -> Self {
        self.metrics_port = Some(port);
        self
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// CPU time that the server has used so far, all its threads together.
    pub(super) fn cpu_time(&self) -> Result<Duration> {
        scrape::cpu_time(self.child.id())
    }

    /// Returns the checks that the server has shed so far; 0 for a server without metrics.
    pub(super) fn shed(&self) -> Result<u64> {
        let Some(port) = self.metrics_port else { return Ok(0) };
        let metrics = Metrics::read(SocketAddr::from(([127, 0, 0, 1], port)))?;
        // An absent counter means 0.
        Ok(metrics.sum("tidegate_decisions_total", "source=\"shed\"")?.unwrap_or(0))
    }

    /// Memory that the server holds now.
    pub(super) fn resident_bytes(&self) -> Result<u64> {
        machine::kib_field(&format!("/proc/{}/status", self.child.id()), "VmRSS:")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or by this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
