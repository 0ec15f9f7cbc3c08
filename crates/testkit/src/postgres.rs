//! A `PostgreSQL` server of a test's own.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tempfile::TempDir;

use crate::process::{Process, Signal};
use crate::wait::{START_TIME_MAX, free_port, wait_until};

/// The folder in which Debian keeps the releases. It is on no PATH.
const RELEASES: &str = "/usr/lib/postgresql";

/// Users to run the server as if the test runs as root, which the server refuses. The first one
/// that exists is used.
const USERS: [&str; 2] = ["postgres", "nobody"];

/// Superuser of the databases, as clients name it.
const OWNER: &str = "tidegate";

/// Index of the status line in `postmaster.pid`.
const STATUS_LINE: usize = 7;

/// A server on a free port of this machine, stopped when the test is done with it. It trusts
/// everyone.
#[derive(Debug)]
pub struct Postgres {
    process: Process,
    port: u16,
    dir: TempDir,
}

/// The user and the group that it runs as, if not those of the test.
type Identity = Option<(u32, u32)>;

impl Postgres {
    /// Makes an empty server, and starts it.
    pub fn start() -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let identity = identity();
        if let Some((user, group)) = identity {
            chown(dir.path(), Some(user), Some(group)).expect("given away");
        }
        let mut make = command("initdb", &dir, identity);
        let arguments = ["--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C", "--username", OWNER];
        make.args(arguments).arg("--pgdata").arg(data(&dir)).stdout(Stdio::null());
        assert!(make.status().expect("initdb runs").success(), "initdb");
        let port = free_port();
        let process = spawn(port, &dir);
        let mut postgres = Self { process, port, dir };
        postgres.wait_until_ready();
        postgres
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The address of a database on it; `postgres` is there from the beginning.
    pub fn url(&self, database: &str) -> String {
        format!("postgres://{OWNER}:secret@127.0.0.1:{}/{database}", self.port)
    }

    /// Kills it on the spot, as a power cut does.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// Stops it: disconnects its clients and keeps all committed data.
    pub fn stop(&mut self) {
        self.process.signal(Signal::INT);
        self.process.exit_status();
    }

    /// Starts it again on the same port, with its stored data.
    pub fn restart(&mut self) {
        self.process = spawn(self.port, &self.dir);
        self.wait_until_ready();
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Waits until the server is ready, and restarts it if it exits. After a kill, leftover
    /// processes run for a moment and prevent a new start.
    fn wait_until_ready(&mut self) {
        wait_until("postgres to be ready", START_TIME_MAX, || {
            if !self.process.is_running() {
                self.process = spawn(self.port, &self.dir);
            }
            let status = std::fs::read_to_string(data(&self.dir).join("postmaster.pid")).unwrap_or_default();
            let mut lines = status.lines().map(str::trim);
            let own = lines.next() == Some(&self.process.id().to_string());
            own && lines.nth(STATUS_LINE - 1) == Some("ready")
        });
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        if self.process.is_running() {
            // A halted process does not handle signals until CONT. QUIT ends it at once, and leaves
            // no shared memory behind.
            self.process.signal(Signal::CONT);
            self.process.signal(Signal::QUIT);
            self.process.exit_status();
        }
    }
}

fn data(dir: &TempDir) -> PathBuf {
    dir.path().join("data")
}

fn spawn(port: u16, dir: &TempDir) -> Process {
    let mut command = command("postgres", dir, identity());
    command.arg("-D").arg(data(dir)).args(["-p", &port.to_string(), "-h", "127.0.0.1", "-k", ""]);
    // A test is too short for these settings to matter. Data on disk at a kill does matter, so
    // fsync stays on.
    command.args(["-c", "shared_buffers=16MB", "-c", "dynamic_shared_memory_type=mmap"]);
    Process::spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))
}

fn command(name: &str, dir: &TempDir, identity: Identity) -> Command {
    let mut command = Command::new(program(name));
    command.current_dir(dir.path()).env("LC_ALL", "C");
    if let Some((user, group)) = identity {
        command.uid(user).gid(group);
    }
    command
}

/// A program on the PATH, or of the latest release that Debian has.
fn program(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut releases: Vec<PathBuf> =
        std::fs::read_dir(RELEASES).into_iter().flatten().flatten().map(|release| release.path()).collect();
    let number = |release: &PathBuf| release.file_name()?.to_str()?.parse::<u32>().ok();
    releases.sort_by_key(|release| std::cmp::Reverse(number(release)));
    let folders = std::env::split_paths(&path).chain(releases.into_iter().map(|release| release.join("bin")));
    let found = folders.map(|folder| folder.join(name)).find(|program| program.is_file());
    found.unwrap_or_else(|| panic!("{name} is not installed: it comes with the Debian package postgresql"))
}

/// Returns the user to run as if the test runs as root.
fn identity() -> Identity {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = std::fs::read_to_string(Path::new("/etc/passwd")).expect("users");
    let found = USERS.iter().find_map(|user| users.lines().find_map(|line| identity_in(line, user)));
    Some(found.expect("a user to run postgres as"))
}

fn identity_in(line: &str, user: &str) -> Identity {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, user_id, group_id, ..] = fields[..] else { return None };
    if name == user { Some((user_id.parse().ok()?, group_id.parse().ok()?)) } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_killed_started_again_and_gone_with_its_test() {
        let mut postgres = Postgres::start();
        postgres.kill();
        postgres.restart();
        postgres.stop();
        postgres.restart();
        let (process, dir) = (postgres.process.id(), postgres.dir.path().to_owned());
        drop(postgres);
        assert!(!std::fs::exists(format!("/proc/{process}")).expect("looks"));
        assert!(!std::fs::exists(dir).expect("looks"));
    }

    #[test]
    fn users_are_found_by_their_whole_name() {
        assert_eq!(identity_in("postgres:x:101:104:x:/var:/bin/sh", "postgres"), Some((101, 104)));
        assert_eq!(identity_in("postgres2:x:101:104:x:/var:/bin/sh", "postgres"), None);
        assert_eq!(identity_in("", "postgres"), None);
    }
}
