//! The decision pipeline, which all surfaces share: shed, decide, count, record.
//!
//! A surface parses its request, makes one check for each limit, calls the pipeline, and writes the
//! result in its protocol. [`RequestContext::admit`] sheds. Only the [`Admission`] that it returns
//! decides, counts and records:
//!
//! - [`Admission::decide`] decides a request under all its limits;
//!   [`MatchedRequest::decide`](rules::MatchedRequest::decide) calls it for the rules that match.
//! - [`Admission::decide_each`] decides many requests of one limit each from memory, without
//!   waiting, and counts them in a [`Tally`]. [`Admission::decide_now`] does so for one request,
//!   and [`Admission::decide_later`] decides those that need the origin.
//!
//! The shapes of a request on its way, at most twelve for each surface:
//!
//! | shape | content |
//! |---|---|
//! | request of the protocol | `CheckRequest`, `LimitRequest`, `RateLimitRequest`, `Throttle` |
//! | its properties, read | `Dimensions`, `LimitFields`, `RequestLimit` |
//! | all its limits | `MatchedRequest`, `DescriptorChecks` |
//! | one of its limits | `MatchedRule`, `DirectLimit`, `PendingCheck`: the reply needs it |
//! | [`RoleCheck`] | a check, and the role of its limit in the decision |
//! | [`RegionCheck`] | gate, key, placement and cost |
//! | `Check` | the same for the memory of this node, without the key |
//! | [`RegionDecision`] | a `Decision` of all limits that are charged as one, and its source |
//! | [`Outcome`] | the verdict of one limit |
//! | [`RequestDecision`] | an outcome for each check; outcome, source and reason of the request |
//! | [`RecordSubject`] | names of the request in its decision record, if it is logged |
//! | reply of the protocol | `CheckAnswer`, `LimitData`, `RateLimitResponse`, bytes |

mod memory;
mod record;
mod roles;
pub(crate) mod rules;

use tidegate::region::{RegionCheck, RegionDecision};
use tidegate::{Outcome, TooManyLimits};
use tidegate_core::DecisionSource;
use tidegate_rules::Class;

pub(crate) use self::memory::{MeterAction, Tally};
pub(crate) use self::record::RecordSubject;
use self::record::decisive;
use crate::auth::TenantIndex;
use crate::load;
use crate::metrics::{RequestOutcome, Surface};
use crate::reason::DecisionReason;
use crate::shared::Shared;

/// The origin of a request, and the class that it counts as.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestContext<'s> {
    pub(crate) shared: &'s Shared,
    pub(crate) tenant: TenantIndex,
    pub(crate) surface: Surface,
    /// The strictest class among the limits.
    pub(crate) class: Class,
}

/// A request that is not decided, because the server is overloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ShedRequest {
    class: Class,
}

impl ShedRequest {
    /// Whether the request passes: comfort does, the other classes do not.
    pub(crate) fn is_allowed(self) -> bool {
        self.class == Class::Comfort
    }
}

/// A request that is not shed, and may be decided.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission<'s> {
    context: RequestContext<'s>,
}

/// The role of a limit in the decision on a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CheckRole {
    /// All limits with this role are charged, or none is.
    Enforced,
    /// The request is denied if all limits with this role are over.
    Quota,
    /// The limit denies nothing. It is charged if the request passes.
    Shadow,
    /// The cost was spent already, so it is charged without a check. A limit that it exceeds
    /// denies.
    Always,
    /// The cost is refunded without a check.
    Refund,
}

/// The check of one limit of a request, and the limit's role in the decision.
#[derive(Debug)]
pub(crate) struct RoleCheck<'g, 'k> {
    pub(crate) check: RegionCheck<'g, 'k>,
    pub(crate) role: CheckRole,
    /// Whether the limit denies unless one more unit would pass. The cost of a probe is 0.
    pub(crate) is_probe: bool,
    /// Whether the limit is an emergency with the action `block`.
    pub(crate) is_block: bool,
    /// Microseconds until the limit ends, if it is that of an emergency.
    pub(crate) ends_us: Option<u64>,
}

impl<'g, 'k> RoleCheck<'g, 'k> {
    /// Makes a check that is enforced.
    pub(crate) fn enforced(check: RegionCheck<'g, 'k>) -> Self {
        Self { check, role: CheckRole::Enforced, is_probe: false, is_block: false, ends_us: None }
    }

    pub(crate) fn cost(&self) -> u64 {
        self.check.node_check().requested_cost()
    }
}

/// The decision on a request, under all its limits.
#[derive(Debug)]
pub(crate) struct RequestDecision<'g> {
    /// The decision that header fields describe: the last denial, or else the last decision that
    /// counts for the request. Its source is the weakest among the limits that decide. On the heap,
    /// because it is large, and a decision is moved several times.
    pub(crate) headline: Box<RegionDecision<'g>>,
    /// By check; `None` if all checks were charged as one, so that the headline has their outcomes.
    by_check: Option<Vec<Option<Outcome<'g>>>>,
    /// When the headline was decided, by the wall clock, µs: the instant of all times in the reply.
    pub(crate) wall_us: u64,
    pub(crate) outcome: RequestOutcome,
    pub(crate) reason: DecisionReason,
    /// Index of the check that decided: of those that denied or would have, otherwise the one with
    /// the least remaining.
    pub(crate) decided_by: Option<usize>,
}

impl<'g> RequestDecision<'g> {
    pub(crate) fn is_allowed(&self) -> bool {
        self.outcome != RequestOutcome::Denied
    }

    /// Whether a limit was decided without the meter that counts it.
    pub(crate) fn is_fallback(&self) -> bool {
        let RegionDecision { source, missing_reply, .. } = &*self.headline;
        missing_reply.is_some()
            || matches!(source, DecisionSource::Open | DecisionSource::Refused | DecisionSource::Closed)
    }

    /// Returns the outcome of a check, if the check was decided.
    pub(crate) fn outcome_of(&self, check: usize) -> Option<&Outcome<'g>> {
        match &self.by_check {
            Some(by_check) => by_check.get(check)?.as_ref(),
            None => self.headline.decision.outcomes().get(check),
        }
    }
}

impl<'s> RequestContext<'s> {
    /// Admits the request, unless the worker is overloaded. A shed request is counted and recorded.
    pub(crate) fn admit<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        self,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) -> Result<Admission<'s>, ShedRequest> {
        self.admit_batch().ok_or_else(|| {
            let shed = ShedRequest { class: self.class };
            let outcome = outcome_of(shed.is_allowed());
            self.shared.telemetry.metrics.tenants.shed(self.tenant);
            self.conclude(outcome, None, DecisionSource::Shed, DecisionReason::Shed, subject);
            shed
        })
    }

    /// Admits many requests, unless the worker is overloaded. Then each of them must be shed by
    /// [`RequestContext::admit`].
    #[inline]
    pub(crate) fn admit_batch(self) -> Option<Admission<'s>> {
        (!load::sheds(self.class, self.tenant)).then_some(Admission { context: self })
    }

    /// Resumes a request that was admitted, and then had to wait.
    pub(crate) fn resume(self) -> Admission<'s> {
        Admission { context: self }
    }

    /// Counts and records a decision.
    fn conclude<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        outcome: RequestOutcome,
        limit_outcome: Option<&Outcome<'_>>,
        source: DecisionSource,
        reason: DecisionReason,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) {
        self.shared.telemetry.metrics.decided(self.surface, self.class, outcome, source, 1);
        self.record(outcome, limit_outcome, source, reason, subject);
    }
}

impl Admission<'_> {
    /// Decides a request under all its limits, then counts and records the decision. `subject`
    /// names the request in its record, by the index of the deciding check.
    pub(crate) async fn decide<'g, 'd, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        checks: &[RoleCheck<'g, '_>],
        subject: impl FnOnce(Option<usize>) -> RecordSubject<'d, D>,
    ) -> Result<RequestDecision<'g>, TooManyLimits> {
        let decision = roles::decide(&self.context.shared.decider, checks).await?;
        let RequestDecision { outcome, reason, decided_by, .. } = decision;
        let limit_outcome = decided_by.and_then(|at| decision.outcome_of(at));
        let subject = || subject(decided_by);
        self.context.conclude(outcome, limit_outcome, decision.headline.source, reason, subject);
        Ok(decision)
    }

    /// Counts and records a denial without a decision, because too many limits apply.
    fn refuse<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) {
        let (outcome, source) = (RequestOutcome::Denied, DecisionSource::Refused);
        self.context.conclude(outcome, None, source, DecisionReason::NoRoom, subject);
    }
}

/// Returns the outcome of a request without limits in shadow mode.
#[inline]
fn outcome_of(is_allowed: bool) -> RequestOutcome {
    if is_allowed { RequestOutcome::Allowed } else { RequestOutcome::Denied }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::Path;
    use std::sync::Arc;
    use std::time::Duration;

    use ::http::{Request, StatusCode};
    use futures_util::FutureExt as _;
    use tidegate_record::RecordKind;

    use super::*;
    use crate::config::{Config, LogConfig};
    use crate::fuzzing::small_config;
    use crate::http::{HttpRequest, route};

    /// A server that records all decisions.
    pub(crate) fn recording(folder: &Path) -> Shared {
        let (sample_rate, retention) = (1.0, Duration::from_hours(1));
        let (bytes_max, evidence) = (1 << 20, Duration::ZERO);
        let log = LogConfig { sample_rate, retention, bytes_max, evidence, otlp: None };
        let mut config = Config { log: Some(log), ..small_config(None) };
        let mut shared = Shared::new(&mut config).expect("fits");
        shared.keep_log_in(folder, &config).expect("opens");
        shared
    }

    /// Runs `ask` while this worker is overloaded. Returns the number of shed requests, and of
    /// records in the end.
    pub(crate) fn overloaded(shared: Arc<Shared>, ask: impl FnOnce(Arc<Shared>)) -> (u64, u64) {
        (0..load::LATE_LOOKS).for_each(|_| load::note(Duration::from_secs(1)));
        ask(Arc::clone(&shared));
        load::note(Duration::ZERO);
        let shed = shared.decision_totals().shed;
        let recorder = Arc::clone(shared.telemetry.decision_log.as_ref().expect("a log").recorder());
        // The last reference closes the log, which then writes its records.
        drop(shared);
        let counts = recorder.counts();
        (shed, RecordKind::ALL.into_iter().map(|kind| counts.written(kind)).sum())
    }

    #[test]
    fn a_shed_request_of_any_surface_is_counted_and_recorded() {
        for (path, body) in [
            ("/v1/check", r#"{"dimensions":{"user":"a"}}"#),
            ("/v2/ratelimit.limit", r#"{"namespace":"n","identifier":"a","limit":1,"duration":60000}"#),
            ("/json", r#"{"domain":"a","descriptors":[{"entries":[{"key":"k","value":"v"}]}]}"#),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let counts = overloaded(Arc::new(recording(folder.path())), |shared| {
                let (parts, ()) = Request::post(path).body(()).expect("a request").into_parts();
                let req = HttpRequest::new(&shared, ([127, 0, 0, 1], 1).into(), parts, body.into());
                let answer = route(&req).now_or_never().expect("no origin");
                assert_eq!(answer.status(), StatusCode::OK, "{path}: comfort passes");
            });
            assert_eq!(counts, (1, 1), "{path}");
        }
    }
}
