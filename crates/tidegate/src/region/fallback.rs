//! The fallback: decisions without the origin.

use std::time::Duration;

use tidegate_core::{
    DecisionSource, FallbackState, Limit, NodeShare, RequestVerdict, Retry, TooManyLimits, Verdict,
};

use super::check::{RegionCheck, RegionPolicy};
use super::{MissingReply, Region, RegionDecision};
use crate::decision::{Decision, Outcome, Outcomes};
use crate::gate::{Check, Gate};
use crate::limiter::{Limiter, UnknownName};

/// Retry time of a request that is refused without a decision, µs: about when the origin may be
/// back.
const CLOSED_RETRY_US: u64 = 1_000_000;

/// Units that pass per second for each tenant and node when limits fail open. Higher: fewer paid
/// requests are denied; more runaway traffic passes.
const OPEN_PER_SECOND: u64 = 10_000;

impl RegionPolicy {
    /// Returns the decision source of a limit without its origin.
    const fn without_origin(&self) -> DecisionSource {
        self.class.without_origin(self.paid)
    }
}

/// Returns the gate of a tenant's coarse meter.
pub(super) fn open_gate(limiter: &Limiter, tenant: &str) -> Result<Gate, UnknownName> {
    let limit = Limit::gcra(OPEN_PER_SECOND, Duration::from_secs(1));
    let limit = limit.map_err(|error| UnknownName::Limit(error.to_string()))?;
    limiter.gate_with(tenant, "\0open", limit)
}

impl Region {
    /// Decides without the origin. The strictest class among the limits prevails: if one fails
    /// closed, the request is denied.
    pub(super) fn without_origin<'g>(
        &self,
        checks: &[&RegionCheck<'g, '_>],
    ) -> Result<RegionDecision<'g>, TooManyLimits> {
        let source = |check: &&RegionCheck<'_, '_>| check.origin_limit().policy.without_origin();
        let last = checks.iter().map(source).max().unwrap_or(DecisionSource::Local);
        let missing_reply = Some(MissingReply::Origin);
        if last == DecisionSource::Closed {
            return Ok(RegionDecision { decision: closed(checks), source: last, missing_reply });
        }
        let gates: Vec<Gate> = checks.iter().map(|check| self.substitute(check)).collect();
        let substitutes: Vec<Check<'_>> =
            checks.iter().zip(&gates).map(|(check, gate)| substitute_check(check, gate)).collect();
        let alone = self.limiter.check_all(&substitutes)?;
        if alone.is_allowed() {
            // The usage still counts: the node reports it when the origin is back.
            self.charge(checks.iter().copied());
        }
        Ok(RegionDecision { decision: as_checked(checks, &alone), source: last, missing_reply })
    }

    /// Returns the substitute of a limit: the node share, or the coarse meter of its tenant.
    fn substitute(&self, check: &RegionCheck<'_, '_>) -> Gate {
        let (gate, origin_limit) = (check.node_check.gate(), check.origin_limit());
        if origin_limit.policy.without_origin() == DecisionSource::Open {
            return origin_limit.open.clone();
        }
        let FallbackState { processes, remaining: left } =
            self.driver.fallback_state(check.partition(), check.node_check.digest);
        // While regions cannot exchange their usage, each spends only its regional share.
        let (limit, left) = match origin_limit.global() {
            Some(layout) => (layout.part(gate.limit()), left.map(|left| layout.share_of(left))),
            None => (*gate.limit(), left),
        };
        let NodeShare { limit, spent } = NodeShare::new(&limit, FallbackState { processes, remaining: left });
        let part = gate.substitute(limit, origin_limit.alone);
        if spent > 0 {
            self.limiter.raise(part.key(check.key()).cost(spent));
        }
        part
    }
}

fn substitute_check<'s>(check: &RegionCheck<'_, '_>, gate: &'s Gate) -> Check<'s> {
    let is_open = check.origin_limit().policy.without_origin() == DecisionSource::Open;
    gate.key(if is_open { b"" } else { check.key() }).cost(check.node_check.cost)
}

/// Returns the outcomes of substitutes as those of the original limits.
fn as_checked<'g>(checks: &[&RegionCheck<'g, '_>], alone: &Decision<'_>) -> Decision<'g> {
    let outcomes = checks.iter().zip(alone.outcomes()).map(|(check, outcome)| {
        let (verdict, source) = (outcome.verdict(), outcome.source());
        Outcome::new(check.node_check.gate(), tidegate_core::CheckOutcome { verdict, source })
    });
    Decision { outcomes: Outcomes::Many(outcomes.collect()), decided: alone.decided }
}

/// Denies a request without a decision.
pub(super) fn closed<'g>(checks: &[&RegionCheck<'g, '_>]) -> Decision<'g> {
    let verdict =
        Verdict::Deny { remaining: 0, reset_after_us: CLOSED_RETRY_US, retry: Retry::After(CLOSED_RETRY_US) };
    let closed = tidegate_core::CheckOutcome { verdict, source: tidegate_core::DecidingMeter::Own };
    let outcomes = checks.iter().map(|check| Outcome::new(check.node_check.gate(), closed)).collect();
    let strictest =
        checks.iter().enumerate().max_by_key(|(_, check)| check.origin_limit().policy.without_origin());
    Decision {
        outcomes: Outcomes::Many(outcomes),
        decided: RequestVerdict::Denied { by: strictest.map_or(0, |(at, _)| at) },
    }
}
