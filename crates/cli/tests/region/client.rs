//! A region of servers, and its clients.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value;
use tidegate_load::{HttpConnection, HttpReply, check_body};
use tidegate_testkit::{START_TIME_MAX, Server, ServerFleet, wait_until};

use crate::support::fleet;

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

/// Servers that are one limiter: so many of them, at an origin.
pub fn start_region(origin: &str, rules: &str, servers: usize) -> ServerFleet {
    let arguments = ["--origin", origin, "--region", "test", "--workers", "2"];
    fleet(rules, &arguments).with_servers(servers)
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
    connection: Option<HttpConnection>,
}

impl Client {
    pub fn new(address: SocketAddr) -> Self {
        Self { address, connection: None }
    }

    /// A client of a server.
    pub fn of(server: &Server) -> Self {
        Self::new(server.address("http"))
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Makes a check with these dimensions. Returns `None` if the server is gone.
    pub fn ask(&mut self, dimensions: &[(&str, &str)], cost: u64) -> Option<Answer> {
        let answer = self.exchange(&check_body(dimensions, cost));
        if answer.is_none() {
            self.connection = None;
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
        if self.connection.is_none() {
            self.connection = Some(HttpConnection::open(self.address, START_TIME_MAX).ok()?);
        }
        let HttpReply { status, body, .. } = self.connection.as_mut()?.post("/v1/check", body).ok()?;
        let body: Value = serde_json::from_slice(body).expect("JSON");
        let text = |name: &str| body[name].as_str().unwrap_or_default().to_owned();
        let (allowed, source) = (text("decision") == "allow", text("source"));
        Some(Answer { status, allowed, source, body })
    }
}
