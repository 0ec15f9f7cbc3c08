//! Decides checks: by this node's memory alone, or in a region.

use std::sync::Arc;

use tidegate::region::{self, Region, RegionCheck, RegionDecision, RegionPolicy};
use tidegate::{Decision, Gate, LIMITS_INLINE_MAX, Limit, Limiter, Outcome, TooManyLimits, UnknownName};
use tidegate_core::DecisionSource;

/// Decides checks, alone or as a node of a region.
#[derive(Debug)]
pub(crate) struct Decider {
    pub(crate) limiter: Arc<Limiter>,
    /// `None` if the server counts for itself.
    pub(crate) region: Option<Region>,
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
    pub(crate) async fn check_all<'c, 'g: 'c, 'k: 'c>(
        &self,
        checks: impl IntoIterator<Item = &'c RegionCheck<'g, 'k>, IntoIter: Clone>,
    ) -> Result<RegionDecision<'g>, TooManyLimits> {
        let checks = checks.into_iter();
        match &self.region {
            None => self.check_here(checks),
            Some(region) => region.check(checks).await,
        }
    }

    fn check_here<'c, 'g: 'c, 'k: 'c>(
        &self,
        checks: impl Iterator<Item = &'c RegionCheck<'g, 'k>> + Clone,
    ) -> Result<RegionDecision<'g>, TooManyLimits> {
        let count = checks.clone().count();
        let mut checks = checks.map(RegionCheck::node_check);
        let decision = match (count, checks.next()) {
            // The usual case, which needs no transaction.
            (1, Some(check)) => Decision::from(self.limiter.check(check)),
            (..=LIMITS_INLINE_MAX, first) => {
                let checks = first.into_iter().chain(checks);
                self.limiter.check_all(&checks.collect::<arrayvec::ArrayVec<_, LIMITS_INLINE_MAX>>())?
            }
            (_, first) => self.limiter.check_all(&first.into_iter().chain(checks).collect::<Vec<_>>())?,
        };
        let sources = decision.outcomes().iter().map(|outcome| DecisionSource::from(outcome.source()));
        let source = sources.max().unwrap_or(DecisionSource::Local);
        Ok(RegionDecision { decision, source, missing_reply: None })
    }

    /// Returns the source of an outcome that memory gave.
    #[inline]
    pub(crate) fn source_of(&self, outcome: &Outcome<'_>) -> DecisionSource {
        if self.region.is_some() { DecisionSource::Regional } else { DecisionSource::from(outcome.source()) }
    }

    /// Adds a cost that was spent already.
    pub(crate) fn charge(&self, check: &RegionCheck<'_, '_>) {
        match &self.region {
            None => self.limiter.charge(check.node_check()),
            Some(region) => region.charge([check]),
        }
    }

    /// Gives a charged cost back.
    pub(crate) fn refund(&self, check: &RegionCheck<'_, '_>) {
        match &self.region {
            None => self.limiter.refund(check.node_check()),
            Some(region) => region.refund([check]),
        }
    }
}

/// Returns the check of a key of several parts, placed by the key itself. The key is joined from
/// its parts only for an origin.
pub(crate) fn check_of_parts<'g, 'k>(gate: &'g Gate, parts: &[&[u8]]) -> RegionCheck<'g, 'k> {
    if gate.has_origin() { gate.region_check_of(parts) } else { RegionCheck::from(gate.parts(parts)) }
}
