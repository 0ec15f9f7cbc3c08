//! What the tests with real stores share: processes on free ports, stopped by id, and conditions with deadlines.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How long a process may take to get ready, on a machine that has much else to do.
pub const START_TIME_MAX: Duration = Duration::from_mins(1);

/// A redis-server of its own, on a free port and on a socket file, stopped when the test is done with it.
pub struct Server {
    child: Child,
    port: u16,
    dir: TempDir,
    arguments: Vec<String>,
}

impl Server {
    /// Starts a server with these arguments besides its address. It keeps nothing unless told to.
    pub fn start(arguments: &[&str]) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let arguments: Vec<String> = arguments.iter().map(ToString::to_string).collect();
        let port = free_port();
        let child = spawn(port, &dir, &arguments);
        let server = Self { child, port, dir, arguments };
        server.wait_until_ready();
        server
    }

    /// Starts a sentinel with this configuration.
    pub fn start_sentinel(configuration: &Path) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let port = free_port();
        let mut command = Command::new("redis-server");
        command.arg(configuration).args([
            "--sentinel",
            "--port",
            &port.to_string(),
            "--unixsocket",
            "socket",
        ]);
        let child =
            command.current_dir(dir.path()).stdout(Stdio::null()).spawn().expect("redis-server starts");
        let server = Self { child, port, dir, arguments: Vec::new() };
        server.wait_until_ready();
        server
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    pub fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.port))
    }

    pub fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    /// A connection of the test's own, through the socket file.
    pub fn connection(&self) -> redis::Connection {
        self.try_connection().expect("a connection")
    }

    pub fn try_connection(&self) -> redis::RedisResult<redis::Connection> {
        let url = format!("redis+unix://{}", self.dir.path().join("socket").display());
        redis::Client::open(url)?.get_connection_with_timeout(START_TIME_MAX)
    }

    /// Kills it on the spot.
    pub fn kill(&mut self) {
        self.child.kill().expect("its own child");
        self.child.wait().expect("its own child");
    }

    /// Starts it again where it was, with what it kept.
    pub fn restart(&mut self) {
        self.child = spawn(self.port, &self.dir, &self.arguments);
        self.wait_until_ready();
    }

    /// Sends it a signal, by its id.
    pub fn signal(&self, signal: &str) {
        let id = self.id().to_string();
        let status = Command::new("kill").args([signal, &id]).status().expect("kill runs");
        assert!(status.success());
    }

    fn wait_until_ready(&self) {
        wait_until("redis-server to be ready", START_TIME_MAX, || {
            let Ok(mut connection) = self.try_connection() else { return false };
            redis::cmd("PING").query::<String>(&mut connection).is_ok()
        });
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn spawn(port: u16, dir: &TempDir, arguments: &[String]) -> Child {
    let port = port.to_string();
    let mut command = Command::new("redis-server");
    command.args(["--port", &port, "--bind", "127.0.0.1", "--unixsocket", "socket"]);
    command.args(["--save", "", "--appendonly", "no"]);
    command.args(arguments).current_dir(dir.path()).stdout(Stdio::null());
    command.spawn().unwrap_or_else(|error| panic!("redis-server does not start: {error}"))
}

/// A port that was free a moment ago. A cluster also needs the one that is 10,000 higher.
pub fn free_port() -> u16 {
    loop {
        let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let port = socket.local_addr().expect("bound").port();
        let bus = port.checked_add(10_000).map(|bus| TcpListener::bind(("127.0.0.1", bus)));
        if matches!(bus, Some(Ok(_))) {
            return port;
        }
    }
}

/// Waits for a condition, and fails when it does not come true in time.
pub fn wait_until(what: &str, time_max: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + time_max;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {time_max:?} for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
