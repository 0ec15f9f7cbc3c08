//! One key, twice: every operation goes to the oracle and to the subject, and all their results
//! must be the same.

use tidegate_core::{Limit, Now, Verdict};

use crate::difference::Difference;
use crate::history::{Clock, Operation, Step};
use crate::level::Level;
use crate::model::Model;
use crate::probe::Probe;
use crate::subject::Subject;
use crate::totals::Totals;

/// The oracle and the subject side by side.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pair<L, S> {
    limit: Limit,
    clock: Clock,
    model: Model<L>,
    subject: S,
    pub(crate) totals: Totals,
}

impl<L: Level, S: Subject> Pair<L, S> {
    pub(crate) fn new(limit: Limit, clock: Clock) -> Self {
        Self {
            limit,
            clock,
            model: Model::empty(&limit),
            subject: S::empty(&limit),
            totals: Totals::default(),
        }
    }

    /// Makes one step on both sides. Gives the verdict if it was a decision.
    pub(crate) fn apply(&mut self, step: Step) -> Result<Option<Verdict>, Difference> {
        let now = self.clock.now(step.at_us);
        let verdict = match step.operation {
            Operation::Decide { cost } => Some(self.decide(step.at_us, cost)?),
            Operation::Reserve { cost } => Some(self.reserve(step.at_us, cost)?),
            change => {
                self.change(now, change);
                None
            }
        };
        Difference::unless_equal("reserved", &self.model.reserved(), &self.subject.reserved())?;
        if verdict.is_none() {
            let got = self.subject.used(&self.limit, now);
            Difference::unless_equal("used", &self.model.used(now), &got)?;
        }
        Ok(verdict)
    }

    fn decide(&mut self, at_us: u64, cost: u64) -> Result<Verdict, Difference> {
        let now = self.clock.now(at_us);
        let expected = self.model.decide(now, cost);
        let (got, after) = self.subject.decide(&self.limit, now, cost);
        Difference::unless_equal("verdict of decide", &expected, &got)?;
        self.probe(at_us, cost, expected, after)?;
        self.subject = after;
        Ok(expected)
    }

    fn reserve(&mut self, at_us: u64, cost: u64) -> Result<Verdict, Difference> {
        let now = self.clock.now(at_us);
        let expected = self.model.reserve(now, cost);
        let (got, after) = self.subject.reserve(&self.limit, now, cost);
        Difference::unless_equal("verdict of reserve", &expected, &got)?;
        // The verdict is about the cost as charged, so the probe needs the charged meter.
        let (_, charged) = self.subject.decide(&self.limit, now, cost);
        self.probe(at_us, cost, expected, charged)?;
        self.subject = after;
        Ok(expected)
    }

    fn probe(&mut self, at_us: u64, cost: u64, verdict: Verdict, after: S) -> Result<(), Difference> {
        let commits_in_full = self.model.commits_in_full();
        let probe = Probe { limit: &self.limit, clock: self.clock, at_us, cost, after, commits_in_full };
        self.totals.count(verdict, probe.all(verdict)?);
        Ok(())
    }

    fn change(&mut self, now: Now, operation: Operation) {
        let (model, subject, limit) = (&mut self.model, self.subject, &self.limit);
        self.subject = match operation {
            Operation::Commit { reserved, actual } => {
                model.commit(now, reserved, actual);
                subject.commit(limit, now, reserved, actual)
            }
            Operation::Rollback { reserved } => {
                model.rollback(reserved);
                subject.rollback(reserved)
            }
            Operation::Charge { cost } => {
                model.charge(now, cost);
                subject.charge(limit, now, cost)
            }
            Operation::Refund { cost } => {
                model.refund(now, cost);
                subject.refund(limit, now, cost)
            }
            Operation::Merge { used } => {
                model.merge(now, used);
                subject.merge(limit, now, used)
            }
            Operation::Reset => {
                model.reset(limit);
                subject.reset(limit)
            }
            Operation::Decide { .. } | Operation::Reserve { .. } | Operation::Used => subject,
        };
    }
}
