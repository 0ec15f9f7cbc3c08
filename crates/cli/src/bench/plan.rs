//! What load to put on which server.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use clap::ArgMatches;
use tidegate_server::parse_period;
use ureq::http::Uri;

use crate::Failure;

/// The most connections. Higher: more file descriptors here than a user usually has.
pub(super) const CONNECTIONS_MAX: u64 = 1_000;
/// The most questions sent together. Higher: what is measured is how long a queue is.
pub(super) const PIPELINE_MAX: u64 = 256;
/// The most keys to draw from: ten times what any table is measured with.
pub(super) const KEYS_MAX: u64 = 1_000_000_000;

const DURATION_MIN: Duration = Duration::from_secs(1);
const DURATION_MAX: Duration = Duration::from_hours(1);

/// How long to try to reach the server at all.
const REACH_TIME_MAX: Duration = Duration::from_secs(5);

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Surface {
    Http,
    Check,
    Resp,
}

impl Surface {
    pub(super) const ALL: [Self; 3] = [Self::Http, Self::Check, Self::Resp];

    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Check => "check",
            Self::Resp => "resp",
        }
    }

    const fn local_server(self) -> &'static str {
        match self {
            Self::Http | Self::Check => "http://127.0.0.1:8080",
            Self::Resp => "redis://127.0.0.1:6380",
        }
    }

    const fn scheme(self) -> &'static str {
        match self {
            Self::Http | Self::Check => "http",
            Self::Resp => "redis",
        }
    }
}

/// What load to put on which server.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) surface: Surface,
    pub(super) address: SocketAddr,
    pub(super) token: Option<String>,
    pub(super) connections: u64,
    pub(super) pipeline: u64,
    pub(super) duration: Duration,
    pub(super) keys: u64,
    pub(super) limit: u64,
    /// Questions per second, all connections together.
    pub(super) rate: Option<u64>,
}

impl Plan {
    pub(super) fn read(matches: &ArgMatches) -> Result<Self, Failure> {
        let text = |id: &str| matches.get_one::<String>(id).map(String::as_str);
        let number = |id: &str| matches.get_one::<u64>(id).copied().unwrap_or(1);
        let named = text("surface").unwrap_or_default();
        let surface =
            Surface::ALL.into_iter().find(|surface| surface.as_str() == named).unwrap_or(Surface::Http);
        let plan = Self {
            surface,
            address: address(surface, text("server").unwrap_or(surface.local_server()))?,
            token: text("token").filter(|token| !token.is_empty()).map(str::to_owned),
            connections: number("connections"),
            pipeline: number("pipeline"),
            duration: duration(text("duration").unwrap_or_default())?,
            keys: number("keys"),
            limit: number("limit"),
            rate: matches.get_one::<u64>("rate").copied(),
        };
        plan.check(matches.get_flag("allow_remote"))?;
        Ok(plan)
    }

    fn check(&self, allow_remote: bool) -> Result<(), Failure> {
        if self.pipeline > 1 && self.surface != Surface::Resp {
            return Err(Failure::usage(
                "pipeline: only resp sends questions together; more --connections do the same",
            ));
        }
        if self.token.as_ref().is_some_and(|token| token.chars().any(char::is_control)) {
            return Err(Failure::usage("token: has control characters in it"));
        }
        if !allow_remote && !self.address.ip().is_loopback() {
            return Err(Failure::usage(format!(
                "server: {} is not on this machine: --allow-remote, if you may put load on it",
                self.address
            )));
        }
        Ok(())
    }

    /// Whether anybody is there at all.
    pub(super) fn reach(&self) -> io::Result<()> {
        TcpStream::connect_timeout(&self.address, REACH_TIME_MAX).map(drop)
    }

    /// How long each connection waits from one batch to the next, if it is to wait.
    pub(super) fn every(&self) -> Option<Duration> {
        let rate = u32::try_from(self.rate?).ok()?;
        let at_once = u32::try_from(self.connections * self.pipeline).ok()?;
        Some(Duration::from_secs(1) * at_once / rate)
    }
}

fn address(surface: Surface, server: &str) -> Result<SocketAddr, Failure> {
    let wrong = || {
        let example = surface.local_server();
        Failure::usage(format!("server: {server:?} is not a URL with a port, such as {example}"))
    };
    let url: Uri = server.parse().map_err(|_| wrong())?;
    if url.scheme_str() != Some(surface.scheme()) || !matches!(url.path(), "" | "/") {
        return Err(wrong());
    }
    let (Some(host), Some(port)) = (url.host(), url.port_u16()) else { return Err(wrong()) };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let mut found = (host, port)
        .to_socket_addrs()
        .map_err(|error| Failure::unreachable(format!("server: {host}: {error}")))?;
    found.next().ok_or_else(|| Failure::unreachable(format!("server: {host}: has no address")))
}

fn duration(text: &str) -> Result<Duration, Failure> {
    match parse_period(text) {
        Ok(time) if (DURATION_MIN..=DURATION_MAX).contains(&time) => Ok(time),
        Ok(time) => Err(Failure::usage(format!("duration: {time:?} is outside 1s to 1h"))),
        Err(problem) => Err(Failure::usage(format!("duration: {problem}"))),
    }
}
