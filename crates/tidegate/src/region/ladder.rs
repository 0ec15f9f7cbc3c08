//! What decides when the origin does not.

use std::time::Duration;

use tidegate_core::{Alone, Decided, Limit, Retry, Rung, Standing, TooManyLimits, Verdict};

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

impl Policy {
    /// The rung that a limit comes to when its origin is gone.
    const fn without_origin(&self) -> Rung {
        self.class.without_origin(self.paid)
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
        Ok(Ruling { decision: as_asked(questions, &alone), rung: last })
    }

    /// What takes the place of a limit: this process's part of it, or the coarse meter of its tenant.
    fn stand_in(&self, question: &Question<'_, '_>) -> Gate {
        let (gate, kept) = (question.ask.gate(), question.kept());
        if kept.policy.without_origin() == Rung::Open {
            return kept.open.clone();
        }
        let Standing { processes, left } = self.driver.standing(question.partition(), question.ask.digest);
        // Where regions cannot tell each other what passed, each has its own part and no more.
        let (limit, left) = match kept.global() {
            Some(layout) => (layout.part(gate.limit()), left.map(|left| layout.part_of(left))),
            None => (*gate.limit(), left),
        };
        let Alone { limit, spent } = Alone::new(&limit, Standing { processes, left });
        let part = gate.stand_in(limit, kept.alone);
        if spent > 0 {
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
