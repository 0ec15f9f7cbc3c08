//! A region of servers, with the rules that they share.

use std::collections::BTreeMap;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;
use tidegate_testkit::{START_TIME_MAX, Server, wait_until};

use crate::support::{serve, write};

/// Maximum time for any condition of a test, on a busy machine.
pub const TIME_MAX: Duration = Duration::from_mins(1);

/// A period so long that no unit drains during a test.
pub const FOR_EVER: &str = "366d";

/// Whether the long forms of tests are wanted.
pub fn is_long() -> bool {
    std::env::var_os("TIDEGATE_REGION_LONG").is_some()
}

/// Lets a fault last for this time. No assertion depends on the time.
#[expect(clippy::disallowed_methods, reason = "a fault has a length, and there is no condition to wait for")]
pub fn lasts(time: Duration) {
    std::thread::sleep(time);
}

/// Servers that are one limiter.
pub struct Field {
    dir: TempDir,
    rules: String,
    origin: String,
    pub nodes: Vec<Server>,
}

impl Field {
    /// A region at an origin, of so many servers.
    pub fn start(origin: &str, rules: &str, nodes: usize) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let rules = write(dir.path(), "rules.toml", rules);
        let mut field = Self { dir, rules, origin: origin.to_owned(), nodes: Vec::new() };
        for _ in 0..nodes {
            field.join();
        }
        field
    }

    /// Starts another server.
    pub fn join(&mut self) -> usize {
        self.nodes.push(self.another());
        self.nodes.len() - 1
    }

    /// A server of the region that is not in the list of nodes yet.
    pub fn another(&self) -> Server {
        let place = ["--origin", &self.origin, "--region", "test", "--rules", &self.rules];
        serve(&[&place[..], &["--workers", "2"]].concat())
    }

    /// Replaces the rules as a whole.
    pub fn rewrite(&self, rules: &str) {
        let next = write(self.dir.path(), "next.toml", rules);
        std::fs::rename(next, &self.rules).expect("renamed");
    }

    pub fn client(&self, node: usize) -> Client {
        Client::new(self.nodes[node].address("http"))
    }

    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.address("http")).collect()
    }

    /// Stops every server in order. Each has then reported all its usage.
    pub fn stop(&mut self) {
        for node in &self.nodes {
            node.process.signal(tidegate_testkit::Signal::TERM);
        }
        for mut node in self.nodes.drain(..) {
            assert_eq!(node.process.exit_status(), Some(0));
        }
    }
}

/// The value of a metric without labels.
pub fn metric(server: &Server, name: &str) -> u64 {
    let mut answer = ureq::get(server.url("admin", "/metrics")).call().expect("metrics");
    let text = answer.body_mut().read_to_string().expect("text");
    let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.and_then(|value| value.trim().parse().ok()).unwrap_or_else(|| panic!("no {name} in {text}"))
}

/// A reply to a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub allowed: bool,
    pub source: String,
    pub body: Value,
}

impl Answer {
    /// Whether the region decided.
    pub fn is_regional(&self) -> bool {
        self.source == "regional"
    }
}

/// A client with its own connection, which it reopens when it is lost. It never repeats a request,
/// and only replies that it received count as admitted.
pub struct Client {
    address: SocketAddr,
    stream: Option<BufReader<TcpStream>>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, stream: None }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes a check with these dimensions. Returns `None` if the server is gone.
    pub fn ask(&mut self, dimensions: &[(&str, &str)], cost: u64) -> Option<Answer> {
        let dimensions: BTreeMap<&str, &str> = dimensions.iter().copied().collect();
        let body = json!({"dimensions": dimensions, "cost": cost}).to_string();
        let answer = self.exchange(&body);
        if answer.is_none() {
            self.stream = None;
        }
        answer
    }

    /// The same, of a server that is there.
    pub fn check(&mut self, dimensions: &[(&str, &str)], cost: u64) -> Answer {
        self.ask(dimensions, cost).expect("the server is there")
    }

    /// Makes checks until a reply meets the condition.
    pub fn check_until(
        &mut self,
        what: &str,
        mut dimensions: impl FnMut() -> (String, String),
        is_it: impl Fn(&Answer) -> bool,
    ) -> Answer {
        let mut last = None;
        wait_until(what, TIME_MAX, || {
            let (name, value) = dimensions();
            let answer = self.check(&[(&name, &value)], 1);
            assert!(answer.status < 500, "{answer:?}");
            let found = is_it(&answer);
            last = Some(answer);
            found
        });
        last.expect("asked")
    }

    fn exchange(&mut self, body: &str) -> Option<Answer> {
        if self.stream.is_none() {
            let stream = TcpStream::connect(self.address).ok()?;
            stream.set_nodelay(true).ok()?;
            stream.set_read_timeout(Some(START_TIME_MAX)).ok()?;
            self.stream = Some(BufReader::new(stream));
        }
        let stream = self.stream.as_mut()?;
        let head =
            format!("POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.get_mut().write_all(format!("{head}{body}").as_bytes()).ok()?;
        read(stream)
    }
}

/// Reads a whole reply.
fn read(stream: &mut BufReader<TcpStream>) -> Option<Answer> {
    let (mut status, mut length) = (None, 0);
    loop {
        let mut line = String::new();
        stream.read_line(&mut line).ok().filter(|count| *count > 0)?;
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if status.is_none() {
            status = line.split(' ').nth(1)?.parse().ok();
        }
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).ok()?;
    let body: Value = serde_json::from_slice(&body).expect("JSON");
    let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
    let (allowed, source) = (text("decision") == "allow", text("source"));
    Some(Answer { status: status?, allowed, source, body })
}
