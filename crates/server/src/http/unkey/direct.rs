//! The direct form: the limit is in the request, unless an override replaces it.

use std::borrow::Cow;
use std::time::Duration;

use serde::Deserialize;
use tidegate::{Gate, Limit, LimitError, Outcome, Retry};
use tidegate_record::RecordKey;
use tidegate_rules::{Class, NamespaceOverride, OVERRIDE_PERIOD_MS_MIN, RuleSet};
use utoipa::ToSchema;

use super::fields::{FieldValue, Problems};
use super::limit::LimitData;
use crate::auth::TenantIndex;
use crate::decider::check_of_parts;
use crate::http::{HttpRequest, Problem};
use crate::metrics::Surface;
use crate::pipeline::{Admission, RecordSubject, RequestContext, RequestDecision, RoleCheck};
use crate::search_turns;
use crate::shared::{Shared, Tenant};

/// The largest limit that a meter can count.
pub(super) const LIMIT_MAX: u64 = u32::MAX as u64;
/// The shortest window.
const DURATION_MS_MIN: u64 = 1_000;
const _: () = assert!(DURATION_MS_MIN == OVERRIDE_PERIOD_MS_MIN, "an override may have every window");
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

/// The fields of a limit.
#[derive(Debug)]
pub(super) struct LimitFields<'b> {
    namespace: Cow<'b, str>,
    identifier: Cow<'b, str>,
    limit: u64,
    duration_ms: u64,
    cost: u64,
}

/// A limit of a request, in range: the request's own, or that of an override.
#[derive(Debug)]
pub(super) struct DirectLimit<'b, 'r> {
    pub(super) namespace: Cow<'b, str>,
    pub(super) identifier: Cow<'b, str>,
    cost: u64,
    duration_ms: u64,
    gate: Gate,
    replaced_by: Option<NamespaceOverride<'r>>,
    placement: Vec<u8>,
}

impl<'b> LimitRequest<'b> {
    /// Reads the fields. Notes the problems of those that are out of range, and takes the least
    /// value instead.
    pub(super) fn read(self, problems: &mut Problems) -> LimitFields<'b> {
        LimitFields {
            namespace: problems.text("namespace", self.namespace),
            identifier: problems.text("identifier", self.identifier),
            limit: problems.number("limit", self.limit, 1, LIMIT_MAX),
            duration_ms: problems.number("duration", self.duration, DURATION_MS_MIN, DURATION_MS_MAX),
            cost: problems.number("cost", self.cost.or(Some(FieldValue::Whole(1))), 0, u64::MAX),
        }
    }
}

impl<'b> LimitFields<'b> {
    /// Finds the limit that applies to fields in range: the request's, or that of an override in
    /// force.
    fn resolve<'r>(
        self,
        shared: &Shared,
        in_force: Option<(&'r RuleSet, u64)>,
        tenant: TenantIndex,
    ) -> Result<DirectLimit<'b, 'r>, Problem> {
        let Self { namespace, identifier, limit, duration_ms, cost } = self;
        let tenant = shared.tenant(tenant);
        let replaced_by = in_force.and_then(|(rules, now_ms)| {
            rules.namespace_override(&tenant.name, &namespace, &identifier, now_ms)
        });
        let (limit, duration_ms) = match &replaced_by {
            None => (limit, duration_ms),
            Some(found) => (u64::from(found.limit), found.period_ms),
        };
        let gate = gate(shared, tenant, &namespace, limit, duration_ms)
            // Values in range always make a limit. This reports it if the ranges ever differ.
            .map_err(|error| Problem::bad_request(error.to_string()))?;
        // All limits of one identifier share their placement.
        let placement = shared.decider.placement(&[tenant.name.as_bytes(), identifier.as_bytes()]);
        Ok(DirectLimit { namespace, identifier, cost, duration_ms, gate, replaced_by, placement })
    }

    /// Names the request in its record, if it is shed before its limit is known.
    fn subject(&self) -> RecordSubject<'_, [(&str, &str); 2]> {
        let dimensions = [("namespace", &*self.namespace), ("identifier", &*self.identifier)];
        RecordSubject::new(RecordKey::of(&self.identifier), self.cost, dimensions)
    }
}

impl DirectLimit<'_, '_> {
    /// Returns the check. Windows of different durations do not compare, so the duration is a part
    /// of the key.
    fn check(&self) -> RoleCheck<'_, '_> {
        let duration = self.duration_ms.to_le_bytes();
        let parts = [self.namespace.as_bytes(), self.identifier.as_bytes(), &duration];
        let check = check_of_parts(&self.gate, &parts).placed_by(&self.placement).cost(self.cost);
        RoleCheck::enforced(check)
    }

    /// Returns the status of the limit. Without an outcome, as for a shed check, it passes as if
    /// nothing had been used.
    pub(super) fn status(&self, outcome: Option<&Outcome<'_>>, wall_us: u64) -> LimitData<'_> {
        let limit = self.gate.limit().amount();
        LimitData {
            success: outcome.is_none_or(Outcome::is_allowed),
            limit,
            remaining: outcome.map_or(limit, Outcome::remaining),
            reset: outcome.map_or_else(|| wall_us.div_ceil(1_000), |outcome| reset_ms(outcome, wall_us)),
            override_id: self.replaced_by.map(|replaced_by| replaced_by.name),
        }
    }

    fn subject(&self) -> RecordSubject<'_, [(&str, &str); 2]> {
        let dimensions = [("namespace", &*self.namespace), ("identifier", &*self.identifier)];
        RecordSubject {
            rule_version: self.replaced_by.map_or(0, |replaced_by| replaced_by.version.into()),
            replaced_by: self.replaced_by.map_or("", |replaced_by| replaced_by.name),
            ..RecordSubject::new(RecordKey::of(&self.identifier), self.cost, dimensions)
        }
    }
}

/// A request on its way from its fields to its limits.
pub(super) struct LimitSearch<'s, 'r> {
    context: RequestContext<'s>,
    /// `None` once the request is shed, which therefore passes.
    pub(super) admission: Option<Admission<'s>>,
    /// With the time for which overrides apply.
    in_force: (&'r RuleSet, u64),
    has_wildcards: bool,
}

impl<'s, 'r> LimitSearch<'s, 'r> {
    /// Admits a request before its overrides are searched. The record of a shed request names its
    /// `first` limit.
    pub(super) fn new(
        req: &HttpRequest<'s>,
        tenant: TenantIndex,
        rules: &'r RuleSet,
        first: &LimitFields<'_>,
    ) -> Self {
        let context = RequestContext { shared: req.shared, tenant, surface: Surface::Direct, class: CLASS };
        let admission = context.admit(|| first.subject()).ok();
        let in_force = (rules, req.shared.now_ms());
        Self { context, admission, in_force, has_wildcards: rules.wildcards() > 0 }
    }

    /// Finds the limit that applies to fields in range. If the tenant has searched often enough in
    /// this round of the worker, waits for the next one; the request may be shed meanwhile.
    pub(super) async fn limit<'b>(
        &mut self,
        fields: LimitFields<'b>,
    ) -> Result<DirectLimit<'b, 'r>, Problem> {
        let RequestContext { shared, tenant, .. } = self.context;
        while self.has_wildcards && self.admission.is_some() && !search_turns::take(tenant) {
            search_turns::next_round().await;
            self.admission = self.context.admit(|| fields.subject()).ok();
        }
        fields.resolve(shared, self.admission.map(|_| self.in_force), tenant)
    }
}

/// Decides a request under its limits; `None` if it is shed. A request has at least one limit, the
/// `first`.
pub(super) async fn decide<'l>(
    admission: Option<Admission<'_>>,
    first: &DirectLimit<'_, '_>,
    limits: &'l [DirectLimit<'_, '_>],
) -> Result<Option<RequestDecision<'l>>, Problem> {
    let Some(admission) = admission else { return Ok(None) };
    let (one, several);
    let checks = if let [only] = limits {
        // The usual case, which needs no allocation.
        one = [only.check()];
        &one[..]
    } else {
        several = limits.iter().map(DirectLimit::check).collect::<Vec<_>>();
        &several[..]
    };
    let decider = |at: Option<usize>| at.and_then(|at| limits.get(at)).unwrap_or(first);
    let decision = admission.decide(checks, |at| decider(at).subject()).await;
    decision.map(Some).map_err(|error| Problem::bad_request(error.to_string()))
}

/// Returns the instant of all times in a reply: that of the decision, or now without one.
pub(super) fn wall_us(req: &HttpRequest<'_>, decision: Option<&RequestDecision<'_>>) -> u64 {
    decision.map_or_else(|| req.shared.decider.limiter.wall_us(), |decision| decision.wall_us)
}

fn gate(
    shared: &Shared,
    tenant: &Tenant,
    namespace: &str,
    limit: u64,
    duration_ms: u64,
) -> Result<Gate, LimitError> {
    let period = Duration::from_millis(duration_ms);
    Ok(if shared.direct.gcra_namespaces.iter().any(|pattern| pattern.matches(namespace)) {
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

#[cfg(test)]
mod tests {
    use std::sync::Arc;

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
