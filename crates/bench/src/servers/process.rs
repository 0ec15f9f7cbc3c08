//! A server in a process of its own: started, watched, and stopped by its id.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::machine;

/// How long a server may take until it listens.
const START_TIME_MAX: Duration = Duration::from_secs(30);

/// Between two looks whether it does.
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How long a server may take to tell what it counted.
const METRICS_TIME_MAX: Duration = Duration::from_secs(30);

/// A running server.
pub(super) struct Server {
    child: Child,
    port: u16,
    /// Where it tells what it counted, if it does.
    metrics_port: Option<u16>,
    /// Its files; gone when it is.
    _folder: Folder,
}

impl Server {
    /// Starts a server that `command` makes for a port and a folder, and waits until it listens.
    pub(super) fn start(command: impl FnOnce(u16, &Path) -> Command) -> Result<Self> {
        let (port, folder) = (free_port()?, Folder::new()?);
        let mut command = command(port, &folder.0);
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

    /// The same server, which tells what it counted at another port.
    pub(super) fn with_metrics_at(mut self, port: u16) -> Self {
        self.metrics_port = Some(port);
        self
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// CPU time that the server has used so far, all its threads together.
    pub(super) fn cpu_time(&self) -> Result<Duration> {
        let path = format!("/proc/{}/stat", self.child.id());
        let stat = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let ticks = ticks(&stat).with_context(|| format!("{path} has no CPU times"))?;
        let per_second = rustix::param::clock_ticks_per_second();
        Ok(Duration::from_secs_f64(ticks as f64 / per_second as f64))
    }

    /// How many questions the server has let pass undecided so far; none, if it is not one that does.
    pub(super) fn shed(&self) -> Result<u64> {
        let Some(port) = self.metrics_port else { return Ok(0) };
        let mut stream = TcpStream::connect(("127.0.0.1", port)).context("the port for metrics")?;
        stream.set_read_timeout(Some(METRICS_TIME_MAX))?;
        stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).context("metrics")?;
        shed(&answer).with_context(|| format!("these are no metrics: {answer}"))
    }

    /// Memory that the server holds now.
    pub(super) fn resident_bytes(&self) -> Result<u64> {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(&path).with_context(|| path.clone())?;
        let kilobytes = resident(&status).with_context(|| format!("{path} has no resident size"))?;
        Ok(kilobytes << 10)
    }
}

/// The sum of all decisions with the rung `shed`. A server that decided nothing so far tells of none.
fn shed(answer: &str) -> Option<u64> {
    let (head, metrics) = answer.split_once("\r\n\r\n")?;
    let decisions = metrics.lines().filter(|line| line.starts_with("tidegate_decisions_total{"));
    let mut counts = decisions.filter(|line| line.contains("rung=\"shed\"")).map(|line| {
        let (_, count) = line.rsplit_once(' ')?;
        count.parse::<u64>().ok()
    });
    head.starts_with("HTTP/1.1 200").then(|| counts.try_fold(0, |sum, count| Some(sum + count?)))?
}

/// The amount behind `VmRSS:`, which is told in kB.
fn resident(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().strip_suffix(" kB")?.trim().parse().ok()
}

/// The program's name, in parentheses, may hold anything: what counts begins after the last one.
fn ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split_whitespace().skip(11);
    let (user, system): (u64, u64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some(user + system)
}

impl Drop for Server {
    fn drop(&mut self) {
        // Ended already, or by this.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A folder that is removed when it is no longer needed.
pub(super) struct Folder(pub(super) std::path::PathBuf);

impl Folder {
    pub(super) fn new() -> Result<Self> {
        let name = format!("tidegate-bench-{}-{}", std::process::id(), free_port()?);
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir(&folder).with_context(|| folder.display().to_string())?;
        Ok(Self(folder))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(super) fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_shed_is_summed_over_all_else() {
        let metrics = "# TYPE tidegate_decisions counter\n\
            tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",rung=\"local\"} 7\n\
            tidegate_decisions_total{surface=\"resp\",class=\"comfort\",outcome=\"allowed\",rung=\"shed\"} 40\n\
            tidegate_decisions_total{surface=\"direct\",class=\"comfort\",outcome=\"allowed\",rung=\"shed\"} 2\n";
        assert_eq!(shed(&format!("HTTP/1.1 200 OK\r\n\r\n{metrics}")), Some(42));
        assert_eq!(shed("HTTP/1.1 200 OK\r\n\r\n# EOF\n"), Some(0));
        assert_eq!(shed(&format!("HTTP/1.1 403 Forbidden\r\n\r\n{metrics}")), None);
    }

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "17 (a) b (c)) S 1 2 3 4 5 6 7 8 9 10 41 1 13 14 15";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("17 (x) S 1"), None);
    }
}
