//! The decision pipeline, which all surfaces share: shed, match, decide, count, record.
//!
//! A surface parses its request, plans one check for each limit, calls the pipeline, and writes the
//! result in its protocol. A [`RequestContext`] has the entries:
//!
//! - [`RequestContext::admit`] sheds. Only the [`Admission`] that it returns decides, counts and
//!   records: by [`Admission::decide`], under all limits of the request.
//! - [`MatchedRequest::decide`](rules::MatchedRequest::decide) does the same under the rules that
//!   match the dimensions of a request.
//! - [`RequestContext::decide_each`] decides many requests of one limit each from memory, without
//!   waiting, and counts them in a [`Tally`]. `decide_now` and `decide_later` serve the requests
//!   that are not plain, and those that need the origin.
//!
//! The shapes of a request on its way:
//!
//! | shape | content |
//! |---|---|
//! | request of the protocol | `CheckRequest`, `LimitRequest`, `RateLimitRequest`, `Throttle` |
//! | limit of the surface | `MatchedRule`, `DirectLimit`, `DescriptorLimit`: the reply needs it |
//! | [`PlannedCheck`] | gate, key, placement and cost, and the role of the limit in the decision |
//! | [`RequestDecision`] | an outcome for each check; outcome, source and reason of the request |
//! | [`RecordSubject`] | names of the request in its decision record, if it is logged |
//! | reply of the protocol | `CheckAnswer`, `LimitData`, `RateLimitResponse`, bytes |

mod memory;
mod record;
mod roles;
pub(crate) mod rules;

use tidegate::region::RegionCheck;
use tidegate::{Decision, Outcome as LimitOutcome, TooManyLimits};
use tidegate_rules::Class;

pub(crate) use self::memory::{MemoryDecision, Tally};
pub(crate) use self::record::RecordSubject;
use self::record::{RecordedDecision, decisive};
use crate::auth::TenantIndex;
use crate::load;
use crate::metrics::{DecisionSource, Outcome, Surface};
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
pub(crate) struct Shed {
    class: Class,
}

impl Shed {
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

/// One limit of a request, with the check of its key.
#[derive(Debug)]
pub(crate) struct PlannedCheck<'g, 'k> {
    pub(crate) check: RegionCheck<'g, 'k>,
    pub(crate) role: CheckRole,
    /// Whether the limit denies unless one more unit would pass. The cost of a probe is 0.
    pub(crate) is_probe: bool,
    /// Whether the limit is an emergency with the action `block`.
    pub(crate) is_block: bool,
    /// Microseconds until the limit ends, if it is that of an emergency.
    pub(crate) ends_us: Option<u64>,
}

impl<'g, 'k> PlannedCheck<'g, 'k> {
    /// Plans a check that is enforced.
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
    /// By check.
    pub(crate) outcomes: Vec<Option<LimitOutcome<'g>>>,
    /// The decision that header fields describe: the last denial, or else the last decision that
    /// counts for the request. `None` without one.
    pub(crate) headline: Option<Decision<'g>>,
    pub(crate) outcome: Outcome,
    /// The weakest source among the limits that decide.
    pub(crate) source: DecisionSource,
    pub(crate) reason: DecisionReason,
    /// Index of the check that decided: of those that denied or would have, otherwise the one with
    /// the least remaining.
    pub(crate) decided_by: Option<usize>,
}

impl RequestDecision<'_> {
    pub(crate) fn is_allowed(&self) -> bool {
        self.outcome != Outcome::Denied
    }
}

impl<'s> RequestContext<'s> {
    /// Admits the request, unless the worker is overloaded. A shed request is counted.
    pub(crate) fn admit(self) -> Result<Admission<'s>, Shed> {
        if !load::sheds(self.class) {
            return Ok(Admission { context: self });
        }
        let shed = Shed { class: self.class };
        self.count(outcome_of(shed.is_allowed()), DecisionSource::Shed);
        Err(shed)
    }

    fn count(&self, outcome: Outcome, source: DecisionSource) {
        self.shared.telemetry.metrics.decided(self.surface, self.class, outcome, source, 1);
    }
}

impl Admission<'_> {
    /// Decides a request under all its limits, then counts and records the decision. `subject`
    /// names the request in its record, by the index of the deciding check.
    pub(crate) async fn decide<'g, 'd, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        checks: &[PlannedCheck<'g, '_>],
        subject: impl FnOnce(Option<usize>) -> RecordSubject<'d, D>,
    ) -> Result<RequestDecision<'g>, TooManyLimits> {
        let decision = roles::decide(&self.context.shared.decider, checks).await?;
        self.context.count(decision.outcome, decision.source);
        self.context.record(&RecordedDecision::of_request(&decision), || subject(decision.decided_by));
        Ok(decision)
    }

    /// Counts and records a denial without a decision, because too many limits apply.
    fn refuse<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) {
        self.context.count(Outcome::Denied, DecisionSource::Refused);
        let recorded = RecordedDecision::of_limit(false, None, (DecisionSource::Refused, None));
        self.context.record(&recorded, subject);
    }
}

/// Returns the outcome of a request without limits in shadow mode.
#[inline]
fn outcome_of(is_allowed: bool) -> Outcome {
    if is_allowed { Outcome::Allowed } else { Outcome::Denied }
}
