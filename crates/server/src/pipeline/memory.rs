//! Decides requests of one limit each from memory, without waiting, and counts them together.

use tidegate::region::RegionCheck;
use tidegate::{Check, Outcome as LimitOutcome, Retry, TooManyLimits};
use tidegate_rules::Class;

use super::record::RecordedDecision;
use super::{CheckRole, PlannedCheck, RecordSubject, RequestContext, Shed, outcome_of};
use crate::decider::SourcedDecision;
use crate::load;
use crate::metrics::{DecisionSource, Metrics, Outcome, Surface};

/// Decisions of one surface and class that are counted together, once for each batch.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    allowed: [u64; DecisionSource::ALL.len()],
    denied: [u64; DecisionSource::ALL.len()],
}

impl Tally {
    #[inline]
    fn count(&mut self, is_allowed: bool, source: DecisionSource) {
        let counts = if is_allowed { &mut self.allowed } else { &mut self.denied };
        counts[source as usize] += 1;
    }

    /// Moves the counts to the metrics. Returns the number of decisions.
    pub(crate) fn flush(&mut self, metrics: &Metrics, surface: Surface, class: Class) -> u64 {
        let counts = std::mem::take(self);
        let mut total = 0;
        for (outcome, counts) in [(Outcome::Allowed, counts.allowed), (Outcome::Denied, counts.denied)] {
            for (source, n) in DecisionSource::ALL.iter().zip(counts) {
                if n > 0 {
                    metrics.decided(surface, class, outcome, *source, n);
                    total += n;
                }
            }
        }
        total
    }
}

/// How far a check came without waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemoryDecision {
    Decided,
    /// Only the origin can decide it: see [`RequestContext::decide_later`].
    Pending,
    Shed(Shed),
}

impl RequestContext<'_> {
    /// Decides one check from memory. `answer` writes the reply, and returns whether the request
    /// passes.
    pub(crate) fn decide_now<'g>(
        &self,
        tally: &mut Tally,
        key: &[u8],
        planned: &PlannedCheck<'g, '_>,
        answer: impl FnOnce(&LimitOutcome<'g>) -> bool,
    ) -> MemoryDecision {
        if load::sheds(self.class) {
            let shed = Shed { class: self.class };
            tally.count(shed.is_allowed(), DecisionSource::Shed);
            return MemoryDecision::Shed(shed);
        }
        let decider = &self.shared.decider;
        let mut check = planned.check.node_check();
        if planned.role == CheckRole::Refund {
            decider.refund(&planned.check);
            check = check.cost(0);
        }
        let outcome = decider.limiter.check(check);
        if needs_origin(&outcome) {
            return MemoryDecision::Pending;
        }
        let (is_allowed, source) = (answer(&outcome), decider.source_of(&outcome));
        tally.count(is_allowed, source);
        let recorded = RecordedDecision::of_limit(is_allowed, Some(&outcome), (source, None));
        self.record(&recorded, || RecordSubject::of_key(key, check.requested_cost()));
        MemoryDecision::Decided
    }

    /// Decides checks from memory as they are read, up to the end of `checks`; none if the worker
    /// is overloaded. `answer` writes the reply to a check by its index; without an outcome only
    /// the origin can decide it. `find` returns the key and the check of an index again, for
    /// records.
    #[inline]
    pub(crate) fn decide_each<'g, C: Iterator<Item = Check<'g>>>(
        &self,
        tally: &mut Tally,
        checks: &mut C,
        mut answer: impl FnMut(usize, Option<&LimitOutcome<'g>>),
        find: impl for<'c> Fn(&'c mut C, usize) -> Option<(&'c [u8], Check<'g>)>,
    ) {
        if load::sheds(self.class) {
            return;
        }
        let decider = &self.shared.decider;
        let mut logged: Vec<(usize, LimitOutcome<'g>)> = Vec::new();
        decider.limiter.check_each(&mut *checks, |at, outcome| {
            if needs_origin(&outcome) {
                answer(at, None);
                return;
            }
            tally.count(outcome.is_allowed(), decider.source_of(&outcome));
            answer(at, Some(&outcome));
            if self.recorder_for(outcome_of(outcome.is_allowed())).is_some() {
                logged.push((at, outcome));
            }
        });
        for (at, outcome) in logged {
            let Some(recorder) = self.recorder() else { break };
            let Some((key, check)) = find(checks, at) else { continue };
            let source = decider.source_of(&outcome);
            let logged = RecordedDecision::of_limit(outcome.is_allowed(), Some(&outcome), (source, None));
            self.write_record(recorder, &logged, RecordSubject::of_key(key, check.requested_cost()));
        }
    }

    /// Decides a check that memory could not decide, and counts it. `answer` is that of
    /// [`RequestContext::decide_now`].
    pub(crate) async fn decide_later<'g>(
        &self,
        key: &[u8],
        check: &RegionCheck<'g, '_>,
        answer: impl FnOnce(&LimitOutcome<'g>) -> bool,
    ) -> Result<(), TooManyLimits> {
        let SourcedDecision { decision, source, missing_reply } =
            self.shared.decider.check_all([check]).await?;
        // One check has one outcome.
        let [outcome] = decision.outcomes() else { return Ok(()) };
        let is_allowed = answer(outcome);
        self.count(outcome_of(is_allowed), source);
        let recorded = RecordedDecision::of_limit(is_allowed, Some(outcome), (source, missing_reply));
        self.record(&recorded, || RecordSubject::of_key(key, check.node_check().requested_cost()));
        Ok(())
    }
}

/// Whether memory cannot decide a check.
#[inline]
fn needs_origin(outcome: &LimitOutcome<'_>) -> bool {
    outcome.verdict().retry() == Some(Retry::AskOrigin)
}
