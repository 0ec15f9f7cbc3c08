//! A client of `POST /v1/check` that keeps the times between which each answer was decided.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::time::{ClockId, clock_gettime};
use tidegate_load::{CheckReply, HttpConnection, HttpReply, check_body};

use crate::machine;

/// Timeout of an answer.
pub(super) const ANSWER_TIME_MAX: Duration = Duration::from_secs(30);

const DECIDED: u16 = 200;

/// The status of a server that had no time to decide, for rules that refuse then.
const TOO_BUSY: u16 = 503;

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
        self.us(machine::now())
    }

    /// The microsecond of an instant.
    fn us(self, at: Instant) -> u64 {
        self.started_wall_us + (at - self.started).as_micros() as u64
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

/// A connection to `POST /v1/check` that stays open.
pub(crate) struct Connection {
    http: HttpConnection,
    timeline: Timeline,
}

impl Connection {
    pub(crate) fn open(address: SocketAddr, timeline: Timeline) -> Result<Self> {
        let http = HttpConnection::open(address, ANSWER_TIME_MAX).with_context(|| address.to_string())?;
        Ok(Self { http, timeline })
    }

    /// Checks a key under a rule. A reply with status 5xx counts as refused; the caller judges it.
    pub(crate) fn check(&mut self, rule: &str, key: &str, cost: u64) -> Result<Answer> {
        let body = check_body(&[("rule", rule), ("key", key)], cost);
        let HttpReply { status, body, sent, answered } = self.http.post("/v1/check", &body)?;
        // An answer within the same microsecond counts as decided at its end.
        let (sent_us, answered_us) = (self.timeline.us(sent), self.timeline.us(answered) + 1);
        let refused =
            Answer { allowed: false, source_kind: SourceKind::Nothing, status, sent_us, answered_us };
        if refused.is_of_trouble() {
            return Ok(refused);
        }
        let text = || body.escape_ascii().to_string();
        ensure!(status == DECIDED, "the status is {status}: {}", text());
        let reply: CheckReply<'_> = serde_json::from_slice(body)
            .with_context(|| format!("the answer is not a decision: {}", text()))?;
        let allowed = reply.is_allowed().with_context(|| format!("the decision is {:?}", reply.decision))?;
        Ok(Answer { allowed, source_kind: SourceKind::of(reply.source), ..refused })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
