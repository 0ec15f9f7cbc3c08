//! Decides requests of one limit each from memory, without waiting, and counts them together.

use tidegate::region::{RegionCheck, RegionDecision};
use tidegate::{Check, Outcome, Retry};
use tidegate_core::DecisionSource;
use tidegate_rules::Class;

use super::{Admission, RecordSubject, outcome_of};
use crate::metrics::{Metrics, RequestOutcome, Surface};
use crate::reason::DecisionReason;

/// Decisions of one surface and class that are counted together, once for each batch.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    allowed: [u64; DecisionSource::ALL.len()],
    denied: [u64; DecisionSource::ALL.len()],
    /// Shed requests, which are in the metrics already.
    shed: u64,
}

impl Tally {
    #[inline]
    fn count(&mut self, is_allowed: bool, source: DecisionSource) {
        let counts = if is_allowed { &mut self.allowed } else { &mut self.denied };
        counts[source as usize] += 1;
    }

    /// Notes a request that [`RequestContext::admit`](super::RequestContext::admit) shed.
    pub(crate) fn note_shed(&mut self) {
        self.shed += 1;
    }

    /// Moves the counts to the metrics. Returns the number of decided and shed requests.
    pub(crate) fn flush(&mut self, metrics: &Metrics, surface: Surface, class: Class) -> u64 {
        let counts = std::mem::take(self);
        let mut total = counts.shed;
        for (outcome, counts) in
            [(RequestOutcome::Allowed, counts.allowed), (RequestOutcome::Denied, counts.denied)]
        {
            for (source, n) in DecisionSource::ALL.into_iter().zip(counts) {
                if n > 0 {
                    metrics.decided(surface, class, outcome, source, n);
                    total += n;
                }
            }
        }
        total
    }
}

/// The effect of a check on its meter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MeterAction {
    /// The cost is charged, if it passes.
    Charge,
    /// The cost is refunded without a check.
    Refund,
}

impl Admission<'_> {
    /// Decides one check from memory. `answer` writes the reply, and returns whether the request
    /// passes. Returns false if only the origin can decide: see [`Admission::decide_later`].
    #[must_use]
    pub(crate) fn decide_now<'g>(
        &self,
        tally: &mut Tally,
        key: &[u8],
        check: &RegionCheck<'g, '_>,
        action: MeterAction,
        answer: impl FnOnce(&Outcome<'g>) -> bool,
    ) -> bool {
        let decider = &self.context.shared.decider;
        let mut node_check = check.node_check();
        if action == MeterAction::Refund {
            decider.refund(check);
            node_check = node_check.cost(0);
        }
        let outcome = decider.limiter.check(node_check);
        if needs_origin(&outcome) {
            return false;
        }
        let (is_allowed, source) = (answer(&outcome), decider.source_of(&outcome));
        tally.count(is_allowed, source);
        let reason = DecisionReason::of(source, None);
        let subject = || RecordSubject::of_key(key, node_check.requested_cost());
        self.context.record(outcome_of(is_allowed), Some(&outcome), source, reason, subject);
        true
    }

    /// Decides checks from memory as they are read, up to the end of `checks`. `answer` writes the
    /// reply to a check by its index; without an outcome only the origin can decide it. `find`
    /// returns the key and the check of an index again, for records.
    #[inline]
    pub(crate) fn decide_each<'g, C: Iterator<Item = Check<'g>>>(
        &self,
        tally: &mut Tally,
        checks: &mut C,
        mut answer: impl FnMut(usize, Option<&Outcome<'g>>),
        find: impl for<'c> Fn(&'c mut C, usize) -> Option<(&'c [u8], Check<'g>)>,
    ) {
        let (context, decider) = (&self.context, &self.context.shared.decider);
        let mut logged: Vec<(usize, Outcome<'g>)> = Vec::new();
        decider.limiter.check_each(&mut *checks, |at, outcome| {
            if needs_origin(&outcome) {
                answer(at, None);
                return;
            }
            tally.count(outcome.is_allowed(), decider.source_of(&outcome));
            answer(at, Some(&outcome));
            if context.recorder_for(outcome_of(outcome.is_allowed())).is_some() {
                logged.push((at, outcome));
            }
        });
        for (at, outcome) in logged {
            let Some(recorder) = context.recorder() else { break };
            let Some((key, check)) = find(checks, at) else { continue };
            let source = decider.source_of(&outcome);
            let (request_outcome, reason) =
                (outcome_of(outcome.is_allowed()), DecisionReason::of(source, None));
            let subject = RecordSubject::of_key(key, check.requested_cost());
            context.write_record(recorder, request_outcome, Some(&outcome), source, reason, subject);
        }
    }

    /// Decides a check that memory could not decide. `answer` writes the reply, and returns whether
    /// the request passes; without an outcome the request is refused.
    pub(crate) async fn decide_later<'g>(
        &self,
        key: &[u8],
        check: &RegionCheck<'g, '_>,
        answer: impl FnOnce(Option<&Outcome<'g>>) -> bool,
    ) {
        let decided = self.context.shared.decider.check_all([check]).await;
        let subject = || RecordSubject::of_key(key, check.node_check().requested_cost());
        self.conclude_later(decided.as_ref().ok(), answer, subject);
    }

    /// Answers, counts and records the decision on one check, or that there is none.
    fn conclude_later<'g, 'd, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        decided: Option<&RegionDecision<'g>>,
        answer: impl FnOnce(Option<&Outcome<'g>>) -> bool,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) {
        let outcome = decided.and_then(|decided| decided.decision.outcomes().first());
        let state = decided.map(|decided| (decided.source, decided.missing_reply));
        let (source, missing_reply) = state.unwrap_or((DecisionSource::Refused, None));
        let (decided, reason) = (outcome_of(answer(outcome)), DecisionReason::of(source, missing_reply));
        self.context.conclude(decided, outcome, source, reason, subject);
    }
}

/// Whether memory cannot decide a check.
#[inline]
fn needs_origin(outcome: &Outcome<'_>) -> bool {
    outcome.verdict().retry() == Some(Retry::AskOrigin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fuzzing::small_config;
    use crate::pipeline::RequestContext;
    use crate::shared::Shared;

    #[test]
    fn a_check_without_a_decision_is_answered_and_counted() {
        let shared = Shared::new(&mut small_config(None)).expect("fits");
        let (surface, class) = (Surface::Resp, Class::Comfort);
        let context = RequestContext { shared: &shared, tenant: 0, surface, class };
        let mut answers = 0;
        let answer = |outcome: Option<&Outcome<'_>>| {
            answers += 1;
            outcome.is_some()
        };
        context.resume().conclude_later(None, answer, || RecordSubject::of_key(b"a", 1));
        let totals = shared.decision_totals();
        assert_eq!((answers, totals.all, totals.denied), (1, 1, 1));
    }
}
