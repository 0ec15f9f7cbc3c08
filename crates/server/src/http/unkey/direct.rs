//! The direct form: the limit is in the request, unless an override replaces it.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use tidegate::region::RegionCheck;
use tidegate::{Gate, Limit, LimitError, Outcome, Retry};
use tidegate_record::RecordKey;
use tidegate_rules::Class;
use tidegate_rules::overrides::Override;
use utoipa::ToSchema;

use super::fields::{FieldValue, Problems};
use crate::auth::TenantIndex;
use crate::decider::question;
use crate::decision_log::{RecordDraft, decisive};
use crate::http::{HttpRequest, Problem};
use crate::load;
use crate::metrics::{self, DecisionSource, Surface};
use crate::reason::DecisionReason;
use crate::rules::shed_outcome;
use crate::shared::Shared;

/// The largest limit that a meter can count.
pub(super) const LIMIT_MAX: u64 = u32::MAX as u64;
/// The shortest window.
pub(super) const DURATION_MS_MIN: u64 = 1_000;
/// The longest window: 30 days.
const DURATION_MS_MAX: u64 = 2_592_000_000;

/// The class of all direct checks, because a request does not state one.
const CLASS: Class = Class::Comfort;

/// One limit to be checked.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(in crate::http) struct LimitRequest<'b> {
    /// The resource that is limited. Identifiers of different namespaces are counted separately.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    namespace: Option<FieldValue<'b>>,
    /// The user or client that is limited.
    #[serde(borrow)]
    #[schema(value_type = String, min_length = 1, max_length = 512, required = true)]
    identifier: Option<FieldValue<'b>>,
    /// Units that may pass in each window, unless an override applies.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 1, maximum = 4_294_967_295u64, required = true)]
    limit: Option<FieldValue<'b>>,
    /// The window in milliseconds.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 1_000, maximum = 2_592_000_000u64, required = true)]
    duration: Option<FieldValue<'b>>,
    /// The cost of the request in units. A cost of 0 reads without a charge.
    #[serde(borrow)]
    #[schema(value_type = u64, minimum = 0, default = 1, required = false)]
    cost: Option<FieldValue<'b>>,
}

/// A limit to be checked, in range.
#[derive(Debug)]
pub(super) struct ValidLimitRequest<'b> {
    pub(super) namespace: Cow<'b, str>,
    pub(super) identifier: Cow<'b, str>,
    limit: u64,
    duration_ms: u64,
    cost: u64,
}

impl<'b> LimitRequest<'b> {
    /// The request in range, or with its problems noted.
    pub(super) fn checked(self, problems: &mut Problems) -> ValidLimitRequest<'b> {
        ValidLimitRequest {
            namespace: problems.text("namespace", self.namespace),
            identifier: problems.text("identifier", self.identifier),
            limit: problems.number("limit", self.limit, 1, LIMIT_MAX),
            duration_ms: problems.number("duration", self.duration, DURATION_MS_MIN, DURATION_MS_MAX),
            cost: problems.number("cost", self.cost.or(Some(FieldValue::Whole(1))), 0, u64::MAX),
        }
    }
}

/// The limit that applies to a request.
#[derive(Debug)]
pub(super) struct ResolvedLimit<'w, 'b> {
    pub(super) wanted: &'w ValidLimitRequest<'b>,
    applied: Option<Arc<Override>>,
    gate: Gate,
    duration_ms: u64,
}

impl<'w, 'b> ResolvedLimit<'w, 'b> {
    /// The limit that applies: an override's, or the request's own.
    pub(super) fn find(
        shared: &Shared,
        tenant: TenantIndex,
        wanted: &'w ValidLimitRequest<'b>,
    ) -> Result<Self, Problem> {
        let applied = shared.overrides.of(tenant).applying(&wanted.namespace, &wanted.identifier);
        let (limit, duration_ms) = match &applied {
            None => (wanted.limit, wanted.duration_ms),
            Some(found) => (u64::from(found.limit), found.duration_ms),
        };
        let gate = gate(shared, tenant, &wanted.namespace, limit, duration_ms)
            // Values in range always make a limit. This reports it if the ranges ever differ.
            .map_err(|error| Problem::bad_request(error.to_string()))?;
        Ok(Self { wanted, applied, gate, duration_ms })
    }

    /// The question. Windows of different durations do not compare, so the duration is a part of the key.
    pub(super) fn region_check<'q>(&'q self, placement: &'q [u8]) -> RegionCheck<'q, 'q> {
        let duration = self.duration_ms.to_le_bytes();
        let parts = [self.wanted.namespace.as_bytes(), self.wanted.identifier.as_bytes(), &duration];
        question(&self.gate, &parts).placed_by(placement).cost(self.wanted.cost)
    }

    /// Returns the placement that all limits of one identifier share.
    pub(super) fn placement(&self, req: &HttpRequest<'_>, tenant: TenantIndex) -> Vec<u8> {
        let tenant = req.shared.tenant(tenant).name.as_bytes();
        req.shared.decider.placement(&[tenant, self.wanted.identifier.as_bytes()])
    }

    /// Returns the status of the limit after its decision.
    pub(super) fn decided(&self, outcome: &Outcome<'_>, wall_us: u64) -> LimitStatus<'_> {
        LimitStatus {
            passed: outcome.is_allowed(),
            remaining: outcome.remaining(),
            reset_ms: reset_ms(outcome, wall_us),
            ..self.untouched(wall_us)
        }
    }

    /// Returns the status of the limit without a decision. A shed check passes, as if nothing had
    /// been used.
    pub(super) fn untouched(&self, wall_us: u64) -> LimitStatus<'_> {
        let limit = self.limit();
        LimitStatus {
            passed: true,
            limit,
            remaining: limit,
            reset_ms: wall_us.div_ceil(1_000),
            override_id: self.applied.as_ref().map(|applied| applied.id.as_str()),
        }
    }

    /// How much may pass in a window.
    fn limit(&self) -> u32 {
        self.gate.limit().amount()
    }
}

/// The status of a limit for a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitStatus<'g> {
    pub(super) passed: bool,
    pub(super) limit: u32,
    pub(super) remaining: u32,
    pub(super) reset_ms: u64,
    pub(super) override_id: Option<&'g str>,
}

fn gate(
    shared: &Shared,
    tenant: TenantIndex,
    namespace: &str,
    limit: u64,
    duration_ms: u64,
) -> Result<Gate, LimitError> {
    let period = Duration::from_millis(duration_ms);
    let tenant = shared.tenant(tenant);
    Ok(if shared.gcra_namespaces.iter().any(|pattern| pattern.matches(namespace)) {
        tenant.direct_gcra.with_name(namespace).with_limit(Limit::gcra(limit, period)?)
    } else {
        tenant.direct_window.with_name(namespace).with_limit(Limit::sliding_window(limit, period)?)
    })
}

/// Returns the reset time in milliseconds since the Unix epoch. For a denial it is the first
/// instant at which the same request would pass, otherwise the time at which the meter is empty. If
/// the cost is above the burst, it is the time at which a smaller request has the whole limit. For
/// a limit of 0 it is one window from now, because the limit may have been changed by then.
fn reset_ms(outcome: &Outcome<'_>, wall_us: u64) -> u64 {
    let verdict = outcome.verdict();
    let wait_us = match verdict.retry() {
        None | Some(Retry::CostAboveBurst) => verdict.reset_after_us(),
        Some(Retry::After(us)) => us,
        Some(Retry::Blocked) => outcome.gate().limit().period_us(),
        // Only the origin knows, so the client may retry at once.
        Some(Retry::AskOrigin) => 0,
    };
    wall_us.saturating_add(wait_us).div_ceil(1_000)
}

/// Whether there is no time to decide; that is counted then.
pub(super) fn sheds(req: &HttpRequest<'_>) -> bool {
    let sheds = load::sheds(CLASS);
    if sheds {
        req.shared.metrics.decided(Surface::Direct, CLASS, shed_outcome(CLASS), DecisionSource::Shed, 1);
    }
    sheds
}

/// Counts a decision in the metrics, and logs it if it is due.
pub(super) fn count(
    req: &HttpRequest<'_>,
    tenant: TenantIndex,
    gated: &[ResolvedLimit<'_, '_>],
    limit_outcome: &[Outcome<'_>],
    source: DecisionSource,
) {
    let is_allowed = limit_outcome.iter().all(Outcome::is_allowed);
    let outcome = if is_allowed { metrics::Outcome::Allowed } else { metrics::Outcome::Denied };
    req.shared.metrics.decided(Surface::Direct, CLASS, outcome, source, 1);
    let Some(recorder) = req.shared.recorder_for(outcome) else { return };
    let Some((gated, limit_outcome)) =
        decisive(limit_outcome).and_then(|at| gated.get(at).zip(limit_outcome.get(at)))
    else {
        return;
    };
    let ValidLimitRequest { namespace, identifier, cost, .. } = gated.wanted;
    let draft = RecordDraft {
        tenant,
        surface: Surface::Direct,
        key: RecordKey::of(identifier),
        cost: *cost,
        outcome,
        limit_outcome: Some(*limit_outcome),
        source,
        reason: DecisionReason::of_source(source, req.shared.decider.region.is_some()),
        until_ms: None,
        rule_version: 0,
        set_version: "",
        replaced_by: gated.applied.as_ref().map_or("", |applied| applied.id.as_str()),
    };
    let known_by = [("namespace", &**namespace), ("identifier", &**identifier)];
    req.shared.record_decision(recorder, &draft, known_by);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidegate::{Limiter, ManualClock};

    const HOUR: Duration = Duration::from_hours(1);
    /// Somewhere within a window and within a millisecond.
    const STARTED_US: u64 = 1_800_000_000_123_456;

    fn limiter() -> (Arc<ManualClock>, Limiter) {
        let clock = Arc::new(ManualClock::new());
        clock.set(1, STARTED_US);
        let limiter = Limiter::builder().clock(Arc::clone(&clock)).build().expect("a limiter");
        (clock, limiter)
    }

    #[test]
    fn a_denied_request_passes_at_its_reset_and_not_a_millisecond_earlier() {
        for limit in [Limit::gcra(7, HOUR), Limit::sliding_window(7, HOUR)] {
            let (clock, limiter) = limiter();
            let gate = limiter.gate_with("", "direct", limit.expect("in range")).expect("a tenant");
            assert!(limiter.check(gate.key("a").cost(5)).is_allowed());
            let denied = limiter.check(gate.key("a").cost(4));
            assert!(!denied.is_allowed());
            let wait_us = reset_ms(&denied, limiter.wall_us()) * 1_000 - STARTED_US;
            clock.advance(Duration::from_micros(wait_us - 1_000));
            assert!(!limiter.check(gate.key("a").cost(4)).is_allowed());
            clock.advance(Duration::from_millis(1));
            assert!(limiter.check(gate.key("a").cost(4)).is_allowed());
        }
    }

    #[test]
    fn never_allowed_request_has_a_reset_time() {
        let (_clock, limiter) = limiter();
        let gate = |amount| {
            let limit = Limit::sliding_window(amount, HOUR).expect("in range");
            limiter.gate_with("", "direct", limit).expect("a tenant")
        };
        let now_ms = STARTED_US.div_ceil(1_000);
        let (small, blocked) = (gate(1), gate(0));
        let dear = limiter.check(small.key("a").cost(2));
        assert_eq!(reset_ms(&dear, STARTED_US), now_ms);
        let never = limiter.check(blocked.key("a"));
        assert_eq!(reset_ms(&never, STARTED_US), now_ms + 3_600_000);
    }
}
