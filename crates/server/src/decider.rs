//! How a question is decided: by this process's memory alone, or in a region.

use std::sync::Arc;

use tidegate::region::{self, MissingReply, Region, RegionCheck, RegionPolicy};
use tidegate::{
    Check, Decision, Gate, LIMITS_INLINE_MAX, Limit, Limiter, Outcome, TooManyLimits, UnknownName,
};

use crate::metrics::DecisionSource;

/// Decides checks, alone or as a node of a region.
#[derive(Debug)]
pub(crate) struct Decider {
    pub(crate) limiter: Arc<Limiter>,
    /// `None` if the server counts for itself.
    pub(crate) region: Option<Region>,
}

/// A decision and its source.
#[derive(Debug)]
pub(crate) struct SourcedDecision<'g> {
    pub(crate) decision: Decision<'g>,
    pub(crate) source: DecisionSource,
    /// The reply that the decision had to do without.
    pub(crate) missing_reply: Option<MissingReply>,
}

impl Decider {
    /// Returns the gate of a limit. Its meters are in the origin, if there is one.
    pub(crate) fn gate(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
        policy: RegionPolicy,
    ) -> Result<Gate, UnknownName> {
        match &self.region {
            None => self.limiter.gate_with(tenant, name, limit),
            Some(region) => region.gate_with(tenant, name, limit, policy),
        }
    }

    /// Returns the placement of a request's meters; empty without an origin.
    pub(crate) fn placement(&self, parts: &[&[u8]]) -> Vec<u8> {
        if self.region.is_some() { region::join_parts(parts) } else { Vec::new() }
    }

    /// Decides a request under several limits as one. Waits only for calls to an origin.
    pub(crate) async fn check_all<'g>(
        &self,
        questions: &[RegionCheck<'g, '_>],
    ) -> Result<SourcedDecision<'g>, TooManyLimits> {
        match &self.region {
            None => self.check_here(questions),
            Some(region) => region.check(questions).await.map(SourcedDecision::from),
        }
    }

    /// Decides under one limit.
    pub(crate) async fn check<'g>(
        &self,
        question: RegionCheck<'g, '_>,
    ) -> Result<(Outcome<'g>, DecisionSource), TooManyLimits> {
        if self.region.is_none() {
            let outcome = self.limiter.check(question.ask());
            return Ok((outcome, DecisionSource::from(outcome.source())));
        }
        let SourcedDecision { decision, source, .. } = self.check_all(&[question]).await?;
        let [outcome] = decision.outcomes() else { unreachable!("one question has one outcome") };
        Ok((*outcome, source))
    }

    fn check_here<'g>(
        &self,
        questions: &[RegionCheck<'g, '_>],
    ) -> Result<SourcedDecision<'g>, TooManyLimits> {
        let asks = questions.iter().map(RegionCheck::ask);
        let decision = if questions.len() <= LIMITS_INLINE_MAX {
            self.limiter.check_all(&asks.collect::<arrayvec::ArrayVec<Check<'g>, LIMITS_INLINE_MAX>>())?
        } else {
            self.limiter.check_all(&asks.collect::<Vec<_>>())?
        };
        let source = DecisionSource::of_all(decision.outcomes());
        Ok(SourcedDecision { decision, source, missing_reply: None })
    }

    /// Returns the source of an outcome that memory gave.
    #[inline]
    pub(crate) fn source_of(&self, outcome: &Outcome<'_>) -> DecisionSource {
        if self.region.is_some() { DecisionSource::Regional } else { DecisionSource::from(outcome.source()) }
    }

    /// Adds a cost that was spent already.
    pub(crate) fn charge(&self, question: &RegionCheck<'_, '_>) {
        match &self.region {
            None => self.limiter.charge(question.ask()),
            Some(region) => region.charge([question]),
        }
    }

    /// Gives a charged cost back.
    pub(crate) fn refund(&self, question: &RegionCheck<'_, '_>) {
        match &self.region {
            None => self.limiter.refund(question.ask()),
            Some(region) => region.refund([question]),
        }
    }
}

impl<'g> From<region::RegionDecision<'g>> for SourcedDecision<'g> {
    fn from(region_decision: region::RegionDecision<'g>) -> Self {
        let region::RegionDecision { decision, source, missing_reply } = region_decision;
        Self { decision, source: source.into(), missing_reply }
    }
}

/// Returns the check of a key of several parts, placed by the key itself. The key is joined from
/// its parts only for an origin.
pub(crate) fn question<'g, 'k>(gate: &'g Gate, parts: &[&[u8]]) -> RegionCheck<'g, 'k> {
    if gate.has_origin() { gate.region_check_of(parts) } else { RegionCheck::from(gate.parts(parts)) }
}
