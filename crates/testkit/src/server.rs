//! A `tidegate serve` of a test's own.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::process::{ChildStdout, Command, Stdio};
use std::sync::mpsc;

use crate::process::Process;
use crate::wait::START_TIME_MAX;

/// Start of the first output line of a server, printed when all its listeners are open.
const READY: &str = "tidegate is ready: ";

/// Returns the command to run a program. It removes `TIDEGATE_` variables, so that only the test
/// configures the program.
pub fn tidegate(program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TIDEGATE_")) {
        command.env_remove(name);
    }
    command
}

/// A `tidegate serve` of its own, on ports that the system chose, stopped when the test is done
/// with it.
#[derive(Debug)]
pub struct Server {
    /// The process.
    pub process: Process,
    addresses: HashMap<String, SocketAddr>,
}

impl Server {
    /// Starts a server with these arguments besides its addresses, and waits until it is ready. It
    /// stores nothing unless they name a data directory.
    pub fn start(program: impl AsRef<OsStr>, arguments: &[&str]) -> Self {
        Self::start_as(tidegate(program, &[]), arguments)
    }

    /// The same, of a command with an environment of its own.
    pub fn start_as(mut command: Command, arguments: &[&str]) -> Self {
        command.arg("serve");
        for listener in ["http", "grpc", "resp", "admin"] {
            let flag = format!("--{listener}-listen");
            if !arguments.contains(&flag.as_str()) {
                command.args([flag.as_str(), "127.0.0.1:0"]);
            }
        }
        if !arguments.contains(&"--data-dir") {
            command.args(["--data-dir", "none"]);
        }
        let mut process = Process::spawn(command.args(arguments).stdout(Stdio::piped()));
        let line = first_line(process.stdout());
        let addresses = line.strip_prefix(READY).unwrap_or_else(|| panic!("not ready: {line:?}"));
        let addresses = addresses.split_whitespace().map(listener).collect();
        Self { process, addresses }
    }

    /// The address of a listener: `http`, `grpc`, `resp` or `admin`.
    pub fn address(&self, listener: &str) -> SocketAddr {
        self.addresses[listener]
    }

    /// Returns the URL of a path on a listener.
    pub fn url(&self, listener: &str, path: &str) -> String {
        format!("http://{}{path}", self.address(listener))
    }
}

/// Returns the first output line of a process. Fails after a timeout.
fn first_line(stdout: ChildStdout) -> String {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        // The receiver may have timed out.
        let _ = sender.send(read.map(|_| line));
    });
    receiver.recv_timeout(START_TIME_MAX).expect("a server that gets ready in time").expect("a line of text")
}

fn listener(pair: &str) -> (String, SocketAddr) {
    let (listener, address) = pair.split_once('=').expect("listener=address");
    (listener.to_owned(), address.parse().expect("an address"))
}
