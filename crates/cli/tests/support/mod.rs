//! What the tests with real programs share: processes on free ports, stopped by id, and conditions with deadlines.

#![allow(unreachable_pub, reason = "a module of test programs")]
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::disallowed_methods, reason = "waits for other processes, which have no injected clock")]

pub mod raw;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// How long a process may take to get ready, on a machine that has much else to do.
pub const START_TIME_MAX: Duration = Duration::from_mins(1);

/// Between two looks at a condition. It decides nothing: shorter, the processes that are waited for get less of the
/// machine; longer, a test ends that much after its condition came true.
const LOOK_EVERY: Duration = Duration::from_millis(10);

/// A process that is stopped when the test is done with it.
pub struct Process {
    child: Child,
    name: String,
}

impl Process {
    /// Starts a program.
    pub fn spawn(command: &mut Command) -> Self {
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command.spawn().unwrap_or_else(|error| panic!("{name} does not start: {error}"));
        Self { child, name }
    }

    /// Its id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal, such as `TERM`.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([&format!("-{name}"), &self.id().to_string()]).status();
        assert!(sent.expect("kill runs").success(), "{} is not there", self.name);
    }

    /// Asks it to stop, and gives its exit status.
    pub fn terminate(&mut self) -> Option<i32> {
        self.signal("TERM");
        self.exit_status()
    }

    /// Waits for its end, and gives its exit status.
    pub fn exit_status(&mut self) -> Option<i32> {
        let name = self.name.clone();
        let mut status = None;
        wait_until(&format!("{name} to stop"), START_TIME_MAX, || {
            status = self.child.try_wait().expect("its own child");
            status.is_some()
        });
        status.and_then(|status| status.code())
    }

    /// Whether it still runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The program. What a test says is all that is said: nothing comes in from the environment.
pub fn tidegate(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    command.args(arguments);
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("TIDEGATE_")) {
        command.env_remove(name);
    }
    command
}

/// A `tidegate serve` of its own, on ports that the system chose.
pub struct Server {
    pub process: Process,
    addresses: HashMap<String, SocketAddr>,
}

impl Server {
    /// Starts a server with these arguments besides its addresses. It keeps nothing unless told where.
    pub fn start(arguments: &[&str]) -> Self {
        let mut command = tidegate(&["serve"]);
        for listener in ["http", "grpc", "resp", "admin"] {
            let flag = format!("--{listener}-listen");
            if !arguments.contains(&flag.as_str()) {
                command.args([flag.as_str(), "127.0.0.1:0"]);
            }
        }
        if !arguments.contains(&"--data-dir") {
            command.args(["--data-dir", "none"]);
        }
        command.args(arguments).stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command);
        let stdout = process.child.stdout.take().expect("piped");
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line).expect("a line of text");
        let addresses =
            line.strip_prefix("tidegate is ready: ").unwrap_or_else(|| panic!("not ready: {line:?}"));
        let address = |pair: &str| {
            let (listener, address) = pair.split_once('=').expect("listener=address");
            (listener.to_owned(), address.parse().expect("an address"))
        };
        Self { process, addresses: addresses.split_whitespace().map(address).collect() }
    }

    /// Where a listener is: `http`, `grpc`, `resp` or `admin`.
    pub fn address(&self, listener: &str) -> SocketAddr {
        self.addresses[listener]
    }

    /// The URL of something on a listener.
    pub fn url(&self, listener: &str, path: &str) -> String {
        format!("http://{}{path}", self.address(listener))
    }
}

/// A file of the test's own, for as long as its folder lives. Gives its path.
pub fn write(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).expect("a file");
    path.to_string_lossy().into_owned()
}

/// The entry of a configuration for a token, which is also called that.
pub fn token_entry(token: &str, tenant: &str, role: &str) -> String {
    let hash = tidegate_server::auth::TokenHash::of(token.as_bytes());
    format!("[[tokens]]\nname = '{token}'\nhash = '{hash}'\ntenant = '{tenant}'\nrole = '{role}'\n")
}

/// A port that was free a moment ago, for programs that cannot be told to choose one.
pub fn free_port() -> u16 {
    let socket = TcpListener::bind("127.0.0.1:0").expect("a free port");
    socket.local_addr().expect("bound").port()
}

/// Waits for a condition, and fails when it does not come true in time. What other processes do can only be looked at
/// again and again; this is the one place where tests do so.
pub fn wait_until(what: &str, time_max: Duration, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + time_max;
    while !condition() {
        assert!(Instant::now() < deadline, "waited {time_max:?} for {what}");
        std::thread::sleep(LOOK_EVERY);
    }
}

/// Waits until something listens at `address`.
pub fn wait_for_port(name: &str, address: SocketAddr) {
    wait_until(&format!("{name} at {address}"), START_TIME_MAX, || {
        std::net::TcpStream::connect(address).is_ok()
    });
}

/// A program that the tests use: what `cargo xtask tools` installed, or what is on the path.
pub fn tool(name: &str) -> PathBuf {
    let installed = tools_dir().join("py/bin").join(name);
    let path = std::env::var_os("PATH").unwrap_or_default();
    let on_path =
        std::env::split_paths(&path).chain([PathBuf::from("/usr/sbin")]).map(|folder| folder.join(name));
    std::iter::once(installed)
        .chain(on_path)
        .find(|path| path.is_file())
        .unwrap_or_else(|| panic!("{name} is not installed: run `cargo xtask tools`"))
}

/// The folder with the packages of npm.
pub fn node_dir() -> PathBuf {
    let folder = tools_dir().join("node");
    assert!(
        folder.join("node_modules").is_dir(),
        "the npm packages are not installed: run `cargo xtask tools`"
    );
    folder
}

fn tools_dir() -> PathBuf {
    // The folder of this program's temporary files is below the target folder.
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().expect("below the target folder");
    target.join("tools")
}
