//! A hostile tenant beside a victim, on one server: the decisions of the victim must be those that
//! it gets without the attack.

use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::clients::{Pace, Turns, now, run_clients};
use crate::http::{CheckReply, HttpConnection, HttpReply, check_body};

/// A configuration with both tenants, and a token for each. Operators have the token `known`.
pub const TENANTS_CONFIG: &str = "
[[tenants]]
name = 'hostile'
[[tenants]]
name = 'victim'
[[tokens]]
name = 'hostile'
tenant = 'hostile'
role = 'operator'
hash = 'sha256:8f383ccddc6f17eb57a96c711523e4a8072d8e791b4a773ea0153e0d993d03e1'
[[tokens]]
name = 'victim'
tenant = 'victim'
role = 'client'
hash = 'sha256:1bdd5b5b92e2d9f30a3b223bb359551d0da20e3702923e5f7b0a73889eba3d21'
[[tokens]]
name = 'known'
role = 'admin'
hash = 'sha256:7117fff2d0fd294462b3c802b7cb8753579f23f3946b99cf55f38e873f013f10'
";

/// The tokens of both tenants.
const HOSTILE: &str = "hostile";
const VICTIM: &str = "victim";

/// Rules of the victim. Its keys hardly drain while a workload runs.
pub const VICTIM_RULES: &str = "
[[rules]]
name = 'comfort of the victim'
tenant = 'victim'
key = ['user']
limit = 5
period = '1d'
class = 'comfort'

[[rules]]
name = 'security of the victim'
tenant = 'victim'
key = ['login']
limit = 5
period = '1d'
class = 'security'
";

/// The limit of both rules.
const VICTIM_LIMIT: u64 = 5;

/// Checks of one key: the last of them exceed the limit.
const CHECKS_PER_KEY: u64 = VICTIM_LIMIT + 2;

/// Dimensions that the rules count by.
const VICTIM_DIMENSIONS: [&str; 2] = ["user", "login"];

/// Longest time of a reply. A server under attack may be slow; a victim waits for it.
const REPLY_TIME_MAX: Duration = Duration::from_mins(2);

/// Longest time in which a victim checks.
const CHECK_TIME_MAX: Duration = Duration::from_hours(1);

/// Unexpected decisions that a report describes; the others are only counted.
const DESCRIBED_MAX: usize = 5;

/// Connections over which an attack is prepared.
const PREPARING_CONNECTIONS: usize = 16;

/// Overrides with a `*` in one namespace: as many as a server takes.
const WILDCARDS: u64 = 1_000;

/// Limits of one request: as many as a server takes.
const LIMITS_PER_REQUEST: usize = 100;

/// The way in which a hostile tenant uses up its server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TenantAttack {
    /// A thousand wildcard overrides of its own, and requests with a hundred long identifiers that
    /// each of them nearly matches.
    Wildcards,
}

/// A tenant that attacks a server with [`TENANTS_CONFIG`].
#[derive(Clone, Debug)]
pub struct HostileTenant {
    /// The listener for HTTP.
    pub address: SocketAddr,
    /// The attack.
    pub attack: TenantAttack,
    /// Connections that attack at the same time.
    pub connections: usize,
}

/// Replies to an attack so far.
#[derive(Debug, Default)]
pub struct AttackProgress {
    replies: AtomicU64,
    failures: AtomicU64,
    is_over: AtomicBool,
}

impl AttackProgress {
    /// Requests with a reply.
    pub fn replies(&self) -> u64 {
        self.replies.load(Ordering::Relaxed)
    }

    /// Requests without a reply.
    pub fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }
}

impl HostileTenant {
    /// Makes the server ready for the attack.
    pub fn prepare(&self) -> io::Result<()> {
        match self.attack {
            TenantAttack::Wildcards => self.set_wildcards(),
        }
    }

    /// Attacks while `during` runs. Returns its result, and the replies to the attack.
    pub fn attack<T>(&self, during: impl FnOnce(&AttackProgress) -> T) -> io::Result<(T, AttackProgress)> {
        let progress = AttackProgress::default();
        let (body, shared) = (self.attack.body(), &progress);
        let result = thread::scope(|scope| {
            for number in 0..self.connections {
                let name = format!("attack-{number}");
                let client =
                    thread::Builder::new().name(name).spawn_scoped(scope, || self.repeat(&body, shared));
                if let Err(error) = client {
                    shared.is_over.store(true, Ordering::Relaxed);
                    return Err(error);
                }
            }
            let result = during(shared);
            shared.is_over.store(true, Ordering::Relaxed);
            Ok(result)
        })?;
        Ok((result, progress))
    }

    /// Sends the same request again and again.
    fn repeat(&self, body: &str, progress: &AttackProgress) {
        let mut open = None;
        while !progress.is_over.load(Ordering::Relaxed) {
            let connection = open.take().map_or_else(|| self.connect(), Ok);
            let replied = connection.and_then(|mut connection| {
                connection.post(self.attack.path(), body)?;
                Ok(connection)
            });
            let count = if replied.is_ok() { &progress.replies } else { &progress.failures };
            count.fetch_add(1, Ordering::Relaxed);
            open = replied.ok();
        }
    }

    fn connect(&self) -> io::Result<HttpConnection> {
        Ok(HttpConnection::open(self.address, REPLY_TIME_MAX)?.with_token(HOSTILE))
    }

    fn set_wildcards(&self) -> io::Result<()> {
        let turns = Turns::new(WILDCARDS);
        run_clients(PREPARING_CONNECTIONS, |_| {
            let mut connection = self.connect()?;
            while let Some(turn) = turns.take() {
                let identifier = wildcard(turn);
                let limit =
                    OverrideBody { namespace: "n", identifier: &identifier, limit: 5, duration: 60_000 };
                let reply = connection.post("/v2/ratelimit.setOverride", &json(&limit))?;
                if reply.status != 200 {
                    let body = String::from_utf8_lossy(reply.body);
                    return Err(io::Error::other(format!("{identifier}: {} {body}", reply.status)));
                }
            }
            Ok(())
        })?;
        Ok(())
    }
}

impl TenantAttack {
    /// All attacks.
    pub const ALL: [Self; 1] = [Self::Wildcards];

    /// Returns its name in tables.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Wildcards => "wildcards",
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Wildcards => "/v2/ratelimit.multiLimit",
        }
    }

    fn body(self) -> String {
        match self {
            Self::Wildcards => {
                let identifiers: Vec<String> = (0..LIMITS_PER_REQUEST).map(long_identifier).collect();
                let limit = |identifier: &String| {
                    json(&OverrideBody { namespace: "n", identifier, limit: 5, duration: 60_000 })
                };
                format!("[{}]", identifiers.iter().map(limit).collect::<Vec<_>>().join(","))
            }
        }
    }
}

/// Returns a pattern that begins like every [`long_identifier`], and has texts between its stars
/// that are found in one, but for the last.
pub fn wildcard(number: u64) -> String {
    let run = |length: u64| "a".repeat(usize::try_from(length).unwrap_or_default());
    format!("a*{}*{}*{}b*", run(1 + number % 40), run(1 + number / 40), run(50))
}

/// Returns an identifier of 512 characters that no [`wildcard`] matches.
pub fn long_identifier(number: usize) -> String {
    let run = format!("{}b", "a".repeat(40));
    let mut identifier = run.repeat(13);
    identifier.truncate(509);
    identifier + &format!("{number:03}")
}

/// A limit of a request, and the same fields of an override.
#[derive(Serialize)]
struct OverrideBody<'a> {
    namespace: &'a str,
    identifier: &'a str,
    limit: u64,
    duration: u64,
}

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A tenant of a server with [`TENANTS_CONFIG`] and [`VICTIM_RULES`]. It checks each of its keys
/// until the limit has denied twice.
#[derive(Clone, Debug)]
pub struct VictimTenant {
    /// The listener for HTTP.
    pub address: SocketAddr,
    /// Connections that check at the same time, each with its own keys.
    pub connections: u32,
    /// Interval between two checks of a connection; without one, each follows the reply to the one
    /// before.
    pub every: Option<Duration>,
}

/// The decisions that a victim got, and their times.
#[derive(Clone, Debug, Default)]
pub struct VictimReport {
    /// Requests.
    pub checks: u64,
    /// Decisions other than those of a server without an attack.
    pub unexpected: u64,
    /// The first of those.
    pub described: Vec<String>,
    /// Requests by decision source; by status if there was no decision.
    pub sources: BTreeMap<String, u64>,
    /// From the time at which a request was due to its reply, in ascending order.
    pub latencies: Vec<Duration>,
}

impl VictimReport {
    /// Returns the latency that so many per mille of the checks did not exceed.
    pub fn latency(&self, per_mille: usize) -> Duration {
        let at = self.latencies.len().saturating_sub(1) * per_mille / 1_000;
        self.latencies.get(at).copied().unwrap_or_default()
    }

    fn add(&mut self, other: Self) {
        self.checks += other.checks;
        self.unexpected += other.unexpected;
        self.described.extend(other.described);
        self.described.truncate(DESCRIBED_MAX);
        for (source, count) in other.sources {
            *self.sources.entry(source).or_default() += count;
        }
        self.latencies.extend(other.latencies);
    }

    /// Notes a reply to a check that is the `nth` of its key.
    fn note(&mut self, due: Instant, reply: &HttpReply<'_>, nth: u64) {
        self.checks += 1;
        self.latencies.push(reply.answered.saturating_duration_since(due));
        let decided = serde_json::from_slice::<CheckReply<'_>>(reply.body).ok();
        let source = decided
            .as_ref()
            .map_or_else(|| format!("status {}", reply.status), |decided| decided.source.to_owned());
        let expected = nth < VICTIM_LIMIT;
        if decided.and_then(|decided| decided.is_allowed()) != Some(expected) {
            self.unexpected += 1;
            if self.described.len() < DESCRIBED_MAX {
                let (status, body) = (reply.status, String::from_utf8_lossy(reply.body));
                self.described.push(format!("check {nth} of a key: {status} {body}"));
            }
        }
        *self.sources.entry(source).or_default() += 1;
    }
}

impl VictimTenant {
    /// Checks keys that begin with `prefix`, on each connection for as long as `goes_on` returns
    /// true for its report. A key must not have been used before.
    pub fn check(
        &self,
        prefix: &str,
        goes_on: impl Fn(&VictimReport) -> bool + Sync,
    ) -> io::Result<VictimReport> {
        let started = now();
        let ends = started + CHECK_TIME_MAX;
        let reports = run_clients(self.connections as usize, |number| {
            let mut pace = Pace::new(self.every, small(number), self.connections, started);
            let connection = HttpConnection::open(self.address, REPLY_TIME_MAX)?;
            let mut connection = connection.with_token(VICTIM);
            let mut report = VictimReport::default();
            while goes_on(&report)
                && let Some(due) = pace.wait(ends)
            {
                let (round, nth) = (report.checks / CHECKS_PER_KEY, report.checks % CHECKS_PER_KEY);
                let dimension = VICTIM_DIMENSIONS[usize::from(round % 2 == 1)];
                let key = format!("{prefix}-{number}-{round}");
                let reply = connection.post("/v1/check", &check_body(&[(dimension, &key)], 1))?;
                report.note(due, &reply, nth);
            }
            Ok::<_, io::Error>(report)
        })?;
        let mut all = VictimReport::default();
        for report in reports {
            all.add(report);
        }
        all.latencies.sort_unstable();
        Ok(all)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noted(checks: &[(u16, &str)]) -> VictimReport {
        let mut report = VictimReport::default();
        for ((status, body), nth) in checks.iter().zip(0..) {
            let sent = now();
            let reply = HttpReply { status: *status, body: body.as_bytes(), sent, answered: sent };
            report.note(sent, &reply, nth);
        }
        report
    }

    #[test]
    fn a_report_tells_decisions_apart_that_a_calm_server_would_not_make() {
        let allow = (200, r#"{"decision":"allow","source":"local"}"#);
        let deny = (200, r#"{"decision":"deny","source":"local"}"#);
        let calm = noted(&[allow, allow, allow, allow, allow, deny, deny]);
        assert_eq!((calm.checks, calm.unexpected), (7, 0));
        assert_eq!(calm.sources, BTreeMap::from([("local".to_owned(), 7)]));
        let shed = (200, r#"{"decision":"allow","source":"shed"}"#);
        let attacked = noted(&[allow, deny, (503, "overloaded"), allow, allow, shed, deny]);
        assert_eq!((attacked.checks, attacked.unexpected), (7, 3));
        assert_eq!(attacked.described[1], "check 2 of a key: 503 overloaded");
        assert_eq!(attacked.sources["shed"] + attacked.sources["status 503"], 2);
    }

    #[test]
    fn reports_of_connections_add_up() {
        let mut all = noted(&[(503, ""), (503, ""), (503, "")]);
        all.add(noted(&[(500, ""), (500, ""), (500, "")]));
        assert_eq!((all.checks, all.unexpected, all.described.len()), (6, 6, DESCRIBED_MAX));
        all.latencies = (0..1_000).map(Duration::from_millis).collect();
        assert_eq!(all.latency(990), Duration::from_millis(989));
        assert_eq!(VictimReport::default().latency(990), Duration::ZERO);
    }

    #[test]
    fn wildcards_differ_and_are_as_long_as_a_server_takes() {
        let patterns: std::collections::BTreeSet<String> = (0..WILDCARDS).map(wildcard).collect();
        assert_eq!(patterns.len(), 1_000);
        assert!(patterns.iter().all(|pattern| pattern.matches('*').count() == 4));
        assert_eq!(long_identifier(7).len(), 512);
        assert!(!long_identifier(7).contains(&"a".repeat(41)));
    }
}
