//! The load of a benchmark and the server that receives it.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::time::Duration;

use clap::ArgMatches;
use tidegate_server::parse_period;
use ureq::http::Uri;

use crate::Failure;

/// The most connections. Higher: more file descriptors here than a user usually has.
pub(super) const CONNECTIONS_MAX: u64 = 1_000;
/// Maximum of requests sent together. Higher: the benchmark measures the length of a queue.
pub(super) const PIPELINE_MAX: u64 = 256;
/// Maximum of keys to draw from: ten times as many as any table is measured with.
pub(super) const KEYS_MAX: u64 = 1_000_000_000;

const DURATION_MIN: Duration = Duration::from_secs(1);
const DURATION_MAX: Duration = Duration::from_hours(1);

/// Timeout for the first connection to the server.
const REACH_TIME_MAX: Duration = Duration::from_secs(5);

/// The surface that receives the requests.
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

/// The load of a benchmark and the server that receives it.
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
                "pipeline: only the surface resp has a pipeline; use more --connections",
            ));
        }
        if self.token.as_ref().is_some_and(|token| token.chars().any(char::is_control)) {
            return Err(Failure::usage("token: it has control characters"));
        }
        if !allow_remote && !self.address.ip().is_loopback() {
            return Err(Failure::usage(format!(
                "server: {} is on another machine: pass --allow-remote if you may put load on it",
                self.address
            )));
        }
        Ok(())
    }

    /// Checks that the server accepts a connection.
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
        Failure::usage(format!(
            "server: {server:?} is not an address with a port, such as localhost:8080 or {example}"
        ))
    };
    let url =
        if server.contains("://") { server.to_owned() } else { format!("{}://{server}", surface.scheme()) };
    let url: Uri = url.parse().map_err(|_| wrong())?;
    if url.scheme_str() != Some(surface.scheme()) || !matches!(url.path(), "" | "/") {
        return Err(wrong());
    }
    let (Some(host), Some(port)) = (url.host(), url.port_u16()) else { return Err(wrong()) };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let found: Vec<SocketAddr> = (host, port)
        .to_socket_addrs()
        .map_err(|error| Failure::unreachable(format!("server: {host}: {error}")))?
        .collect();
    first_open(&found).ok_or_else(|| Failure::unreachable(format!("server: {host}: the name has no address")))
}

/// The first address that accepts a connection, or else the first one. A name such as `localhost`
/// has an address of each family, and the server may listen on one of them.
fn first_open(addresses: &[SocketAddr]) -> Option<SocketAddr> {
    let is_open = |address: &&SocketAddr| TcpStream::connect_timeout(address, REACH_TIME_MAX).is_ok();
    let is_local = addresses.iter().all(|address| address.ip().is_loopback());
    let open = addresses.iter().find(|address| is_local && addresses.len() > 1 && is_open(address));
    open.or(addresses.first()).copied()
}

fn duration(text: &str) -> Result<Duration, Failure> {
    match parse_period(text) {
        Ok(time) if (DURATION_MIN..=DURATION_MAX).contains(&time) => Ok(time),
        Ok(time) => Err(Failure::usage(format!("duration: {time:?} is outside 1s to 1h"))),
        Err(problem) => Err(Failure::usage(format!("duration: {problem}"))),
    }
}
