//! A minimal client of `POST /v1/check` over one connection. It keeps the times between which each
//! answer was decided.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::time::{ClockId, clock_gettime};
use serde::Deserialize;

use crate::machine;

/// Timeout of an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

const DECIDED: u16 = 200;

/// The status of a server that had no time to decide, for rules that refuse then.
const TOO_BUSY: u16 = 503;

/// Most bytes of an answer's head.
const HEAD_BYTES_MAX: usize = 16_384;

/// One clock for all threads: the wall clock at the start, plus the time since then. Redis uses the
/// wall clock of the same machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Timeline {
    started: Instant,
    started_wall_us: u64,
}

impl Timeline {
    pub(crate) fn new() -> Self {
        let wall = clock_gettime(ClockId::Realtime);
        let started_wall_us = wall.tv_sec as u64 * 1_000_000 + wall.tv_nsec as u64 / 1_000;
        Self { started: machine::now(), started_wall_us }
    }

    /// The microsecond that has begun.
    pub(crate) fn now_us(self) -> u64 {
        self.started_wall_us + (machine::now() - self.started).as_micros() as u64
    }
}

/// Decision sources, as far as the benchmark distinguishes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SourceKind {
    /// The region's origin, alone or with those of other regions.
    Region,
    /// The memory of one server: the origin did not answer in time.
    Alone,
    /// No state: the request was allowed or refused without regard to the limit.
    Nothing,
}

impl SourceKind {
    fn of(source: &str) -> Self {
        match source {
            "global" | "regional" => Self::Region,
            "local" | "overflow" => Self::Alone,
            _ => Self::Nothing,
        }
    }
}

/// An answer, and the times between which it was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) allowed: bool,
    pub(crate) source_kind: SourceKind,
    pub(crate) status: u16,
    pub(crate) sent_us: u64,
    pub(crate) answered_us: u64,
}

impl Answer {
    /// Whether the status is 5xx: the server failed, or reports overload.
    pub(crate) fn is_of_trouble(&self) -> bool {
        self.status >= 500
    }

    /// Whether it is one that servers may give, however much they have to do.
    pub(crate) fn is_in_order(&self) -> bool {
        matches!(self.status, DECIDED | TOO_BUSY)
    }
}

#[derive(Deserialize)]
struct DecisionBody<'a> {
    decision: &'a str,
    source: &'a str,
}

/// The status of a reply, and where its body lies.
#[derive(Debug, PartialEq, Eq)]
struct Head {
    status: u16,
    body: std::ops::Range<usize>,
}

/// A complete reply, and the instants between which the server decided it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply<'a> {
    pub(crate) status: u16,
    pub(crate) body: &'a [u8],
    pub(crate) sent_us: u64,
    pub(crate) answered_us: u64,
}

impl<'a> Reply<'a> {
    /// The body of a reply with status 200, as JSON.
    pub(crate) fn json<T: Deserialize<'a>>(self) -> Result<T> {
        let text = || self.body.escape_ascii().to_string();
        ensure!(self.status == DECIDED, "the status is {}: {}", self.status, text());
        serde_json::from_slice(self.body).with_context(|| format!("the answer is not a decision: {}", text()))
    }
}

/// A connection that stays open.
pub(crate) struct Connection {
    stream: TcpStream,
    timeline: Timeline,
    bytes: Vec<u8>,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr, timeline: Timeline) -> Result<Self> {
        let stream = TcpStream::connect(address).with_context(|| address.to_string())?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(ANSWER_TIME_MAX))?;
        Ok(Self { stream, timeline, bytes: Vec::new() })
    }

    /// Checks a key under a rule. A reply with status 5xx counts as refused; the caller judges it.
    pub(crate) fn check(&mut self, rule: &str, key: &str, cost: u64) -> Result<Answer> {
        let body = format!(r#"{{"dimensions":{{"rule":"{rule}","key":"{key}"}},"cost":{cost}}}"#);
        let reply = self.post("/v1/check", &body)?;
        let Reply { status, sent_us, answered_us, .. } = reply;
        let refused =
            Answer { allowed: false, source_kind: SourceKind::Nothing, status, sent_us, answered_us };
        if refused.is_of_trouble() {
            return Ok(refused);
        }
        let decided: DecisionBody<'_> = reply.json()?;
        let allowed = match decided.decision {
            "allow" => true,
            "deny" => false,
            other => bail!("the decision is {other:?}"),
        };
        Ok(Answer { allowed, source_kind: SourceKind::of(decided.source), ..refused })
    }

    /// Sends a JSON body to a path, and waits for the reply.
    pub(crate) fn post(&mut self, path: &str, body: &str) -> Result<Reply<'_>> {
        let length = body.len();
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        );
        let sent_us = self.timeline.now_us();
        self.stream.write_all(request.as_bytes())?;
        let Head { status, body } = self.read_answer()?;
        // An answer within the same microsecond counts as decided at its end.
        let answered_us = self.timeline.now_us() + 1;
        Ok(Reply { status, body: &self.bytes[body], sent_us, answered_us })
    }

    /// Reads one complete answer.
    fn read_answer(&mut self) -> Result<Head> {
        self.bytes.clear();
        loop {
            if let Some(head) = head(&self.bytes)?
                && self.bytes.len() >= head.body.end
            {
                return Ok(head);
            }
            let mut part = [0; 4_096];
            let count = self.stream.read(&mut part).context("an answer")?;
            ensure!(count > 0, "the server closed the connection");
            self.bytes.extend_from_slice(&part[..count]);
        }
    }
}

/// The head of a reply, once all of it is there.
fn head(bytes: &[u8]) -> Result<Option<Head>> {
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        ensure!(bytes.len() <= HEAD_BYTES_MAX, "an answer without an end to its head");
        return Ok(None);
    };
    let text = std::str::from_utf8(&bytes[..end])?;
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3)?.parse().ok());
    let status = status.with_context(|| format!("the answer is {}", bytes.escape_ascii()))?;
    let mut fields = text.lines().filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length: usize = length.context("an answer without a length")?.1.trim().parse()?;
    Ok(Some(Head { status, body: end + 4..end + 4 + length }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_known_once_its_head_is_there() {
        let answer = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}";
        let found = head(answer).unwrap().unwrap();
        assert_eq!((found.status, &answer[found.body]), (200, &b"{}"[..]));
        assert_eq!(head(&answer[..40]).unwrap(), None);
        let busy = head(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n").unwrap().unwrap();
        assert_eq!((busy.status, busy.body.is_empty()), (TOO_BUSY, true));
        assert!(head(b"HTTP/1.1 200 OK\r\n\r\n").is_err());
        assert!(head(b"SMTP\r\ncontent-length: 0\r\n\r\n").is_err());
        assert!(head(&vec![b'x'; HEAD_BYTES_MAX + 1]).is_err());
    }

    #[test]
    fn a_busy_server_is_in_trouble_and_in_order_and_a_broken_one_is_not() {
        let of = |status| {
            let answer = Answer {
                allowed: false,
                source_kind: SourceKind::Nothing,
                status,
                sent_us: 1,
                answered_us: 2,
            };
            (answer.is_of_trouble(), answer.is_in_order())
        };
        assert_eq!([200, 503, 500].map(of), [(false, true), (true, true), (true, false)]);
    }

    #[test]
    fn undecided_requests_are_counted_separately() {
        for (source, source_kind) in [
            ("global", SourceKind::Region),
            ("regional", SourceKind::Region),
            ("local", SourceKind::Alone),
            ("shed", SourceKind::Nothing),
            ("open", SourceKind::Nothing),
            ("closed", SourceKind::Nothing),
        ] {
            assert_eq!(SourceKind::of(source), source_kind, "{source}");
        }
    }
}
