//! What decides when the origin does not.

use std::time::Duration;

use tidegate_core::{Class, Decided, Limit, Retry, TooManyLimits, Verdict};

use super::question::{Policy, Question};
use super::{Region, Ruling};
use crate::decision::{Decision, Outcome, Outcomes};
use crate::gate::{Ask, Gate};
use crate::limiter::{Limiter, UnknownName};

/// When to ask again after a request was refused because nobody could decide it, µs: about when the origin may be back.
const CLOSED_RETRY_US: u64 = 1_000_000;

/// What passes of a tenant in each second and process when its limits fail open. Higher: less of what customers pay for is
/// ever turned away; more of what runs wild passes.
const OPEN_PER_SECOND: u64 = 10_000;

/// What a decision rests on, from the best to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// The region's origin, which counts what all regions use: its grant, its last word, or its answer.
    Global,
    /// The same, of a limit of this region alone, or on this region's part while another one is not heard of.
    Regional,
    /// This process's part of the limit, by the number of processes it last heard of.
    Local,
    /// A coarse meter that all requests of the tenant share: the limit fails open, or there is no room for its own meter.
    Open,
    /// Nothing: the class of the limit says that it does not pass then.
    Closed,
}

impl Rung {
    /// As answers and metrics name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Regional => "regional",
            Self::Local => "local",
            Self::Open => "open",
            Self::Closed => "closed",
        }
    }
}

impl Policy {
    /// The rung that a limit comes to when its origin is gone.
    const fn without_origin(&self) -> Rung {
        match self.class {
            Class::Comfort => Rung::Local,
            Class::Cost if self.paid => Rung::Open,
            Class::Cost | Class::Security => Rung::Closed,
        }
    }
}

/// The coarse meter of a tenant.
pub(super) fn open_gate(limiter: &Limiter, tenant: &str) -> Result<Gate, UnknownName> {
    let limit = Limit::gcra(OPEN_PER_SECOND, Duration::from_secs(1));
    let limit = limit.map_err(|error| UnknownName::Limit(error.to_string()))?;
    limiter.gate_with(tenant, "\0open", limit)
}

impl Region {
    /// Decides without the origin: the strictest class among the limits says whether at all.
    pub(super) fn without_origin<'g>(
        &self,
        questions: &[&Question<'g, '_>],
    ) -> Result<Ruling<'g>, TooManyLimits> {
        let rung = |question: &&Question<'_, '_>| question.kept().policy.without_origin();
        let last = questions.iter().map(rung).max().unwrap_or(Rung::Local);
        if last == Rung::Closed {
            return Ok(Ruling { decision: closed(questions), rung: last });
        }
        let gates: Vec<Gate> = questions.iter().map(|question| self.stand_in(question)).collect();
        let asks: Vec<Ask<'_>> =
            questions.iter().zip(&gates).map(|(question, gate)| stand_in_ask(question, gate)).collect();
        let alone = self.limiter.check_all(&asks)?;
        if alone.is_allowed() {
            // It counts all the same: the origin is told when it is back.
            self.charge(questions.iter().copied());
        }
        let crowded = alone.outcomes().iter().any(|o| o.source() != tidegate_core::Source::Own);
        let rung = if crowded { Rung::Open } else { last };
        Ok(Ruling { decision: as_asked(questions, &alone), rung })
    }

    /// What takes the place of a limit: this process's part of it, or the coarse meter of its tenant.
    fn stand_in(&self, question: &Question<'_, '_>) -> Gate {
        let (gate, kept) = (question.ask.gate(), question.kept());
        if kept.policy.without_origin() == Rung::Open {
            return kept.open.clone();
        }
        let (nodes, left) = self.driver.known(question.partition(), question.ask.digest);
        // Where regions cannot tell each other what passed, each has its own part and no more.
        let (limit, left) = match kept.global() {
            Some(layout) => (layout.part(gate.limit()), left.map(|left| layout.part_of(left))),
            None => (*gate.limit(), left),
        };
        let part = gate.part_in(&limit, kept.alone, nodes);
        if let Some(left) = left {
            // What all have used already is not there for each of them to use again.
            let spent = u64::from(part.limit().burst()).saturating_sub(left / u64::from(nodes));
            self.limiter.raise(part.key(question.key()).cost(spent));
        }
        part
    }
}

fn stand_in_ask<'s>(question: &Question<'_, '_>, gate: &'s Gate) -> Ask<'s> {
    let is_open = question.kept().policy.without_origin() == Rung::Open;
    gate.key(if is_open { b"" } else { question.key() }).cost(question.ask.cost)
}

/// The word of stand-ins as that of the limits they stand for.
fn as_asked<'g>(questions: &[&Question<'g, '_>], alone: &Decision<'_>) -> Decision<'g> {
    let outcomes = questions.iter().zip(alone.outcomes()).map(|(question, outcome)| {
        let answer = tidegate_core::Answer { verdict: outcome.verdict(), source: outcome.source() };
        Outcome::new(question.ask.gate(), answer)
    });
    Decision { outcomes: Outcomes::Many(outcomes.collect()), decided: alone.decided }
}

/// Refuses, since nobody can decide.
pub(super) fn closed<'g>(questions: &[&Question<'g, '_>]) -> Decision<'g> {
    let verdict =
        Verdict::Deny { remaining: 0, reset_after_us: CLOSED_RETRY_US, retry: Retry::After(CLOSED_RETRY_US) };
    let answer = tidegate_core::Answer { verdict, source: tidegate_core::Source::Own };
    let outcomes = questions.iter().map(|question| Outcome::new(question.ask.gate(), answer)).collect();
    let strictest = questions.iter().enumerate().max_by_key(|(_, q)| q.kept().policy.without_origin());
    Decision {
        outcomes: Outcomes::Many(outcomes),
        decided: Decided::Denied { by: strictest.map_or(0, |(at, _)| at) },
    }
}
