//! Decides a request under limits with different roles.
//!
//! Limits that always charge come first, regardless of the others. Probes come before charges,
//! because a request that they deny must not cost anything. Then quotas and enforced limits decide.
//! Shadow mode and refunds, which decide nothing, come last.

use futures_util::future::try_join_all;
use tidegate::{LIMITS_PER_CHECK_MAX, Outcome as LimitOutcome, TooManyLimits};

use super::{CheckRole, PlannedCheck, RequestDecision, decisive};
use crate::decider::{Decider, SourcedDecision};
use crate::metrics::Outcome;
use crate::reason::DecisionReason;

/// The decision on a request, as far as it has come.
struct Progress<'p, 'g, 'k> {
    decider: &'p Decider,
    checks: &'p [PlannedCheck<'g, 'k>],
    outcomes: Vec<Option<LimitOutcome<'g>>>,
    /// See [`RequestDecision::headline`]. Holds the weakest source so far, too.
    headline: Option<SourcedDecision<'g>>,
}

/// Decides a request. All enforced limits are charged, or none is.
pub(super) async fn decide<'g>(
    decider: &Decider,
    checks: &[PlannedCheck<'g, '_>],
) -> Result<RequestDecision<'g>, TooManyLimits> {
    // Counted before any charge, because a refused request must not cost anything.
    let limits = checks.iter().filter(|planned| planned.is_charged_as_one()).count();
    if limits > LIMITS_PER_CHECK_MAX {
        return Err(TooManyLimits { limits, limits_max: LIMITS_PER_CHECK_MAX });
    }
    let mut progress = Progress { decider, checks, outcomes: vec![None; checks.len()], headline: None };
    if limits == checks.len() {
        progress.charge_as_one().await?;
        return Ok(progress.into_decision());
    }
    progress.charge_always().await?;
    progress.probe().await?;
    if progress.is_allowed() {
        let charged = progress.decide_quotas().await?;
        if progress.is_allowed() {
            progress.charge_as_one().await?;
        }
        if !progress.is_allowed() {
            // A denied request is not charged.
            for planned in &charged {
                decider.refund(&planned.check);
            }
        }
    }
    progress.decide_rest().await?;
    Ok(progress.into_decision())
}

impl<'g> PlannedCheck<'g, '_> {
    fn is_charged_as_one(&self) -> bool {
        self.role == CheckRole::Enforced && !self.is_probe
    }

    /// Decides the limit on its own.
    async fn decide_alone(&self, decider: &Decider) -> Result<SourcedDecision<'g>, TooManyLimits> {
        let seen = decider.check_all([&self.check]).await?;
        let has_room = || seen.decision.outcomes().first().is_some_and(|outcome| outcome.remaining() > 0);
        if !self.is_probe || has_room() {
            return Ok(seen);
        }
        let one = self.check.clone().cost(1);
        let retried = decider.check_all([&one]).await?;
        if retried.decision.is_allowed() {
            // A unit drained between the two checks.
            decider.refund(&one);
        }
        Ok(retried)
    }

    /// Reads the meter, and charges nothing.
    async fn read(&self, decider: &Decider) -> Result<SourcedDecision<'g>, TooManyLimits> {
        decider.check_all([&self.check.clone().cost(0)]).await
    }

    /// Decides the limit after the decision on the request.
    async fn decide_last(
        &self,
        decider: &Decider,
        is_allowed: bool,
    ) -> Result<Option<LimitOutcome<'g>>, TooManyLimits> {
        let sourced = match self.role {
            CheckRole::Shadow if is_allowed => self.decide_alone(decider).await?,
            CheckRole::Refund => {
                decider.refund(&self.check);
                self.read(decider).await?
            }
            _ => self.read(decider).await?,
        };
        Ok(sourced.decision.outcomes().first().copied())
    }
}

impl<'p, 'g, 'k> Progress<'p, 'g, 'k> {
    fn is_allowed(&self) -> bool {
        self.headline.as_ref().is_none_or(|headline| headline.decision.is_allowed())
    }

    /// Charges the limits that always charge, whether or not the request passes, and then reads
    /// them.
    async fn charge_always(&mut self) -> Result<(), TooManyLimits> {
        for (at, planned) in self.checks.iter().enumerate() {
            if planned.role == CheckRole::Always && !planned.is_probe {
                self.decider.charge(&planned.check);
                let decided = planned.read(self.decider).await?;
                self.add_at(at, decided);
            }
        }
        Ok(())
    }

    async fn probe(&mut self) -> Result<(), TooManyLimits> {
        for (at, planned) in self.checks.iter().enumerate() {
            if planned.is_probe && matches!(planned.role, CheckRole::Enforced | CheckRole::Always) {
                let decided = planned.decide_alone(self.decider).await?;
                self.add_at(at, decided);
            }
        }
        Ok(())
    }

    /// Decides quotas: the request is denied if all of them are over. Returns those that were
    /// charged.
    async fn decide_quotas(&mut self) -> Result<Vec<&'p PlannedCheck<'g, 'k>>, TooManyLimits> {
        let mut charged = Vec::new();
        let mut denied = None;
        let mut passed = None;
        for (at, planned) in self.checks.iter().enumerate() {
            if planned.role != CheckRole::Quota {
                continue;
            }
            let decided = planned.decide_alone(self.decider).await?;
            self.outcomes[at] = decided.decision.outcomes().first().copied();
            if decided.decision.is_allowed() {
                charged.push(planned);
                passed.get_or_insert(decided);
            } else {
                denied.get_or_insert(decided);
            }
        }
        if let Some(decided) = passed.or(denied) {
            self.add(decided);
        }
        Ok(charged)
    }

    async fn charge_as_one(&mut self) -> Result<(), TooManyLimits> {
        let checks = self.checks;
        let as_one = || checks.iter().enumerate().filter(|(_, planned)| planned.is_charged_as_one());
        if as_one().next().is_none() {
            return Ok(());
        }
        let decided = self.decider.check_all(as_one().map(|(_, planned)| &planned.check)).await?;
        for ((at, _), outcome) in as_one().zip(decided.decision.outcomes()) {
            self.outcomes[at] = Some(*outcome);
        }
        let ends_us = as_one().map(|(_, planned)| planned.ends_us);
        self.add(SourcedDecision { decision: decided.decision.ending_after(ends_us), ..decided });
        Ok(())
    }

    /// Handles the limits that decide nothing: shadow mode, refunds, and those that a denial left
    /// without a check. Their checks run concurrently, as many as one request may have enforced.
    async fn decide_rest(&mut self) -> Result<(), TooManyLimits> {
        let is_allowed = self.is_allowed();
        let is_open = |at: &usize| self.outcomes[*at].is_none();
        let rest: Vec<usize> = (0..self.checks.len()).filter(is_open).collect();
        for group in rest.chunks(LIMITS_PER_CHECK_MAX) {
            let decide = |at: &usize| self.checks[*at].decide_last(self.decider, is_allowed);
            let decided = try_join_all(group.iter().map(decide)).await?;
            for (at, outcome) in group.iter().zip(decided) {
                self.outcomes[*at] = outcome;
            }
        }
        Ok(())
    }

    /// Adds the decision on one limit.
    fn add_at(&mut self, at: usize, decided: SourcedDecision<'g>) {
        self.outcomes[at] = decided.decision.outcomes().first().copied();
        self.add(decided);
    }

    /// Adds a decision. The headline is a denial rather than a limit that passed, and a charged
    /// limit rather than one that was only read.
    fn add(&mut self, decided: SourcedDecision<'g>) {
        let Some(before) = self.headline.take() else {
            self.headline = Some(decided);
            return;
        };
        let source = before.source.worse(decided.source);
        let missing_reply = decided.missing_reply.or(before.missing_reply);
        let is_denial = !decided.decision.is_allowed();
        let headline = if is_denial || before.decision.is_allowed() { decided } else { before };
        self.headline = Some(SourcedDecision { source, missing_reply, ..headline });
    }

    fn into_decision(self) -> RequestDecision<'g> {
        let is_allowed = self.is_allowed();
        let Self { decider, checks, mut outcomes, headline } = self;
        let of_role = |is_shadow: bool| {
            let by_check = checks.iter().zip(&outcomes).enumerate();
            by_check.filter_map(move |(at, (planned, outcome))| {
                let decides =
                    planned.role != CheckRole::Refund && (planned.role == CheckRole::Shadow) == is_shadow;
                decides.then_some((at, outcome.as_ref()?))
            })
        };
        let outcome = match is_allowed {
            false => Outcome::Denied,
            true if of_role(true).any(|(_, outcome)| !outcome.is_allowed()) => Outcome::ShadowDenied,
            true => Outcome::Allowed,
        };
        let decided_by = decisive(of_role(outcome == Outcome::ShadowDenied));
        // After the choice of the deciding check: a block decides, however soon it ends.
        for (planned, outcome) in checks.iter().zip(&mut outcomes) {
            if let (Some(ends_us), Some(ending)) = (planned.ends_us, outcome.as_mut()) {
                *ending = ending.ending_after(ends_us);
            }
        }
        let is_block = !is_allowed && decided_by.is_some_and(|at| checks[at].is_block);
        let (source, missing_reply, headline) = match headline {
            Some(SourcedDecision { decision, source, missing_reply }) => {
                (source, missing_reply, Some(decision))
            }
            None => (decider.source_without_checks(), None, None),
        };
        let reason = if is_block { DecisionReason::Block } else { DecisionReason::of(source, missing_reply) };
        RequestDecision { outcomes, headline, outcome, source, reason, decided_by }
    }
}
