//! Builds the decision record of a request, if its decision is logged.

use tidegate::{Outcome, Retry};
use tidegate_core::DecisionSource;
use tidegate_record::{DecisionEntry, LimitTerms, RecordKey, RecordVerdict, Recorder};

use super::RequestContext;
use crate::metrics::{self, RequestOutcome};
use crate::reason::DecisionReason;

/// The request in its decision record, as its surface names it.
#[derive(Debug)]
pub(crate) struct RecordSubject<'d, D> {
    /// The key under the limit that decided.
    pub(crate) key: RecordKey,
    pub(crate) cost: u64,
    pub(crate) rule_version: u64,
    pub(crate) set_version: &'d str,
    /// The override or emergency in place of the rule's limit.
    pub(crate) replaced_by: &'d str,
    /// When the emergency in force ends, in milliseconds since the Unix epoch.
    pub(crate) until_ms: Option<u64>,
    /// Names and values of the request.
    pub(crate) dimensions: D,
}

impl<D> RecordSubject<'_, D> {
    /// Names a request that no rule applies to.
    #[expect(clippy::large_types_passed_by_value, reason = "the subject takes the key")]
    pub(crate) fn new(key: RecordKey, cost: u64, dimensions: D) -> Self {
        Self { key, cost, rule_version: 0, set_version: "", replaced_by: "", until_ms: None, dimensions }
    }
}

impl<'d> RecordSubject<'d, [(&'d str, &'d str); 0]> {
    /// Names a request that has nothing but a key.
    pub(crate) fn of_key(key: &[u8], cost: u64) -> Self {
        Self::new(RecordKey::of_bytes(key), cost, [])
    }
}

impl RequestContext<'_> {
    /// Records a decision, if it is to be logged. `limit_outcome` is that of the limit that
    /// decided; `None` if no limit did.
    pub(super) fn record<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        outcome: RequestOutcome,
        limit_outcome: Option<&Outcome<'_>>,
        source: DecisionSource,
        reason: DecisionReason,
        subject: impl FnOnce() -> RecordSubject<'d, D>,
    ) {
        if let Some(recorder) = self.recorder_for(outcome) {
            self.write_record(recorder, outcome, limit_outcome, source, reason, subject());
        }
    }

    /// Returns the recorder if this decision is to be logged. Must be called once for each
    /// decision, because it samples.
    #[inline]
    pub(super) fn recorder_for(&self, outcome: RequestOutcome) -> Option<&Recorder> {
        self.recorder().filter(|recorder| recorder.wants(metrics::this_worker(), verdict(outcome)))
    }

    #[inline]
    pub(super) fn recorder(&self) -> Option<&Recorder> {
        self.shared.telemetry.decision_log.as_ref().map(|log| &**log.recorder())
    }

    pub(super) fn write_record<'d, D: IntoIterator<Item = (&'d str, &'d str)>>(
        &self,
        recorder: &Recorder,
        outcome: RequestOutcome,
        limit_outcome: Option<&Outcome<'_>>,
        source: DecisionSource,
        reason: DecisionReason,
        subject: RecordSubject<'d, D>,
    ) {
        let limit = limit_outcome.map(|limit_outcome| limit_outcome.gate().limit());
        let entry = DecisionEntry {
            at_ms: self.shared.now_ms(),
            tenant: &self.shared.tenant(self.tenant).name,
            surface: self.surface.as_str(),
            key: subject.key.as_str(),
            cost: subject.cost,
            verdict: verdict(outcome),
            rule: limit_outcome.map_or("", |limit_outcome| limit_outcome.gate().name()),
            rule_version: subject.rule_version,
            set_version: subject.set_version,
            replaced_by: subject.replaced_by,
            limit: limit.map_or_else(LimitTerms::default, |limit| LimitTerms {
                amount: limit.amount(),
                burst: limit.burst(),
                period_ms: limit.period_us().div_ceil(1_000),
            }),
            remaining: limit_outcome.map_or(0, Outcome::remaining),
            retry_ms: limit_outcome.and_then(retry_us).map(|us| us.div_ceil(1_000)),
            source: source.as_str(),
            reason: reason.unless_passed(outcome == RequestOutcome::Allowed).unwrap_or_default(),
            until_ms: subject.until_ms,
        };
        recorder.write(metrics::this_worker(), &entry, subject.dimensions);
    }
}

fn verdict(outcome: RequestOutcome) -> RecordVerdict {
    match outcome {
        RequestOutcome::Allowed => RecordVerdict::Allowed,
        RequestOutcome::Denied => RecordVerdict::Denied,
        RequestOutcome::ShadowDenied => RecordVerdict::ShadowDenied,
    }
}

fn retry_us(limit_outcome: &Outcome<'_>) -> Option<u64> {
    limit_outcome.verdict().retry().and_then(Retry::after_us)
}

/// Returns the index of the limit that decided: the denial with the longest retry time, or without
/// denials the limit with the least remaining.
pub(super) fn decisive<'o, 'g: 'o>(
    outcomes: impl IntoIterator<Item = (usize, &'o Outcome<'g>)>,
) -> Option<usize> {
    let rank = |(_, limit_outcome): &(usize, &Outcome<'_>)| {
        let burst = u64::from(limit_outcome.gate().limit().burst()).max(1);
        if limit_outcome.is_allowed() {
            (1, (u64::from(limit_outcome.remaining()) << 32) / burst)
        } else {
            (0, u64::MAX - retry_us(limit_outcome).unwrap_or(u64::MAX))
        }
    };
    outcomes.into_iter().min_by_key(rank).map(|(at, _)| at)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tidegate::{Limit, Limiter, ManualClock};

    use super::*;

    #[test]
    fn the_longest_denial_decides_or_else_the_limit_with_the_least_left() {
        let mut builder = Limiter::builder().clock(ManualClock::new());
        for (name, amount, period_s) in
            [("short", 1, 1), ("long", 1, 60), ("wide", 100, 60), ("blocked", 0, 1)]
        {
            builder =
                builder.limit(name, Limit::gcra(amount, Duration::from_secs(period_s)).expect("in range"));
        }
        let limiter = builder.build().expect("a limiter");
        let gates = ["short", "long", "wide", "blocked"].map(|name| limiter.gate(name).expect("a gate"));
        let [short, long, wide, blocked] = &gates;
        let decisive = |outcomes: &[Outcome<'_>]| super::decisive(outcomes.iter().enumerate());
        let first = [short, long, wide].map(|gate| limiter.check(gate.key("a")));
        assert_eq!(decisive(&[first[2], first[0]]), Some(1));
        let second = [short, long, wide].map(|gate| limiter.check(gate.key("a")));
        assert_eq!(decisive(&second), Some(1));
        assert_eq!(decisive(&[second[1], limiter.check(blocked.key("a")), second[0]]), Some(1));
        assert_eq!(decisive(&[]), None);
    }
}
