//! How a question is decided: by this process's memory alone, or in a region.

use std::sync::Arc;

use tidegate::region::{self, Policy, Question, Region};
use tidegate::{Ask, Decision, Gate, LIMITS_INLINE_MAX, Limit, Limiter, Outcome, TooManyLimits, UnknownName};

use crate::metrics::Rung;

/// What decides.
#[derive(Debug)]
pub(crate) struct Decider {
    pub(crate) limiter: Arc<Limiter>,
    /// Nothing where every process counts for itself.
    pub(crate) region: Option<Region>,
}

/// What was decided, and what that rests on.
#[derive(Debug)]
pub(crate) struct Decided<'g> {
    pub(crate) decision: Decision<'g>,
    pub(crate) rung: Rung,
}

impl Decider {
    /// The gate of a limit: kept by the origin, if there is one.
    pub(crate) fn gate(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
        policy: Policy,
    ) -> Result<Gate, UnknownName> {
        match &self.region {
            None => self.limiter.gate_with(tenant, name, limit),
            Some(region) => region.gate_with(tenant, name, limit, policy),
        }
    }

    /// Where the meters of a request are kept together: nothing where nobody asks.
    pub(crate) fn placement(&self, parts: &[&[u8]]) -> Vec<u8> {
        if self.region.is_some() { region::joined(parts) } else { Vec::new() }
    }

    /// Decides a request under several limits as one. Waits only where an origin has to be asked.
    pub(crate) async fn check_all<'g>(
        &self,
        questions: &[Question<'g, '_>],
    ) -> Result<Decided<'g>, TooManyLimits> {
        match &self.region {
            None => self.check_here(questions),
            Some(region) => region.check(questions).await.map(Decided::from),
        }
    }

    /// Decides under one limit.
    pub(crate) async fn check<'g>(
        &self,
        question: Question<'g, '_>,
    ) -> Result<(Outcome<'g>, Rung), TooManyLimits> {
        if self.region.is_none() {
            let outcome = self.limiter.check(question.ask());
            return Ok((outcome, Rung::from(outcome.source())));
        }
        let Decided { decision, rung } = self.check_all(&[question]).await?;
        let [outcome] = decision.outcomes() else { unreachable!("one question has one outcome") };
        Ok((*outcome, rung))
    }

    fn check_here<'g>(&self, questions: &[Question<'g, '_>]) -> Result<Decided<'g>, TooManyLimits> {
        let asks = questions.iter().map(Question::ask);
        let decision = if questions.len() <= LIMITS_INLINE_MAX {
            self.limiter.check_all(&asks.collect::<arrayvec::ArrayVec<Ask<'g>, LIMITS_INLINE_MAX>>())?
        } else {
            self.limiter.check_all(&asks.collect::<Vec<_>>())?
        };
        let rung = Rung::of_all(decision.outcomes());
        Ok(Decided { decision, rung })
    }

    /// What an outcome rests on that memory gave.
    #[inline]
    pub(crate) fn rung_of(&self, outcome: &Outcome<'_>) -> Rung {
        if self.region.is_some() { Rung::Regional } else { Rung::from(outcome.source()) }
    }

    /// Adds a cost that was spent already.
    pub(crate) fn charge(&self, question: &Question<'_, '_>) {
        match &self.region {
            None => self.limiter.charge(question.ask()),
            Some(region) => region.charge([question]),
        }
    }

    /// Gives a charged cost back.
    pub(crate) fn refund(&self, question: &Question<'_, '_>) {
        match &self.region {
            None => self.limiter.refund(question.ask()),
            Some(region) => region.refund([question]),
        }
    }
}

impl<'g> From<region::Ruling<'g>> for Decided<'g> {
    fn from(ruling: region::Ruling<'g>) -> Self {
        Self { decision: ruling.decision, rung: ruling.rung.into() }
    }
}

/// Asks about a key of several parts, kept where the key itself says. It is spelled out only for an origin.
pub(crate) fn question<'g, 'k>(gate: &'g Gate, parts: &[&[u8]]) -> Question<'g, 'k> {
    if gate.is_kept() { gate.question_of(parts) } else { Question::from(gate.parts(parts)) }
}
