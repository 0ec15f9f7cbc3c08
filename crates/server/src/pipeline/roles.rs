//! Decides a request under limits with different roles.
//!
//! Limits that always charge come first, regardless of the others. Probes come before charges,
//! because a request that they deny must not cost anything. Then quotas and enforced limits decide.
//! Refunds, shadow mode and reads, which decide nothing, come last.

use futures_util::future::try_join_all;
use tidegate::region::RegionDecision;
use tidegate::{LIMITS_PER_CHECK_MAX, Outcome, TooManyLimits};

use super::{CheckRole, RequestDecision, RoleCheck, decisive};
use crate::decider::Decider;
use crate::metrics::RequestOutcome;
use crate::reason::DecisionReason;

/// Decides a request. All enforced limits are charged, or none is.
pub(super) async fn decide<'g>(
    decider: &Decider,
    checks: &[RoleCheck<'g, '_>],
) -> Result<RequestDecision<'g>, TooManyLimits> {
    // Counted before any charge, because a refused request must not cost anything.
    let limits = checks.iter().filter(|check| check.is_charged_as_one()).count();
    if limits > LIMITS_PER_CHECK_MAX {
        return Err(TooManyLimits { limits, limits_max: LIMITS_PER_CHECK_MAX });
    }
    if limits == checks.len() {
        let region_decision = decider.check_all(checks.iter().map(|check| &check.check)).await?;
        let outcomes = region_decision.decision.outcomes().iter().copied().map(Some).collect();
        let headline = with_ends(region_decision, checks.iter());
        return Ok(RequestDecision::new(decider, headline, outcomes).concluded(checks));
    }
    let nothing = decider.check_all([]).await?;
    let mut decision = RequestDecision::new(decider, nothing, vec![None; checks.len()]);
    let is_always = |check: &RoleCheck<'_, '_>| check.role == CheckRole::Always && !check.is_probe;
    decision.decide_each(decider, checks, is_always).await?;
    let is_probe = |check: &RoleCheck<'_, '_>| {
        check.is_probe && matches!(check.role, CheckRole::Enforced | CheckRole::Always)
    };
    decision.decide_each(decider, checks, is_probe).await?;
    if decision.passes() {
        let charged = decision.decide_quotas(decider, checks).await?;
        if decision.passes() {
            decision.charge_as_one(decider, checks).await?;
        }
        if !decision.passes() {
            // A denied request is not charged.
            for check in &charged {
                decider.refund(&check.check);
            }
        }
    }
    decision.decide_rest(decider, checks).await?;
    Ok(decision.concluded(checks))
}

/// States when the limits of emergencies end.
fn with_ends<'g, 'c, 'k: 'c>(
    region_decision: RegionDecision<'g>,
    checks: impl Iterator<Item = &'c RoleCheck<'g, 'k>>,
) -> RegionDecision<'g>
where
    'g: 'c,
{
    let decision = region_decision.decision.ending_after(checks.map(|check| check.ends_us));
    RegionDecision { decision, ..region_decision }
}

impl<'g> RoleCheck<'g, '_> {
    fn is_charged_as_one(&self) -> bool {
        self.role == CheckRole::Enforced && !self.is_probe
    }

    /// Decides the limit on its own. One that always charges is charged, and then read.
    async fn decide_alone(&self, decider: &Decider) -> Result<RegionDecision<'g>, TooManyLimits> {
        if self.role == CheckRole::Always && !self.is_probe {
            decider.charge(&self.check);
            return self.read(decider).await;
        }
        let seen = decider.check_all([&self.check]).await?;
        let has_room = || seen.decision.outcomes().first().is_some_and(|outcome| outcome.remaining() > 0);
        if !self.is_probe || has_room() {
            return Ok(seen);
        }
        let one = self.check.clone().cost(1);
        let retried = decider.check_all([&one]).await?;
        if retried.is_allowed() {
            // A unit drained between the two checks.
            decider.refund(&one);
        }
        Ok(retried)
    }

    /// Reads the meter, and charges nothing.
    async fn read(&self, decider: &Decider) -> Result<RegionDecision<'g>, TooManyLimits> {
        decider.check_all([&self.check.clone().cost(0)]).await
    }
}

impl<'g> RequestDecision<'g> {
    fn new(decider: &Decider, headline: RegionDecision<'g>, outcomes: Vec<Option<Outcome<'g>>>) -> Self {
        Self {
            outcomes,
            headline,
            wall_us: decider.limiter.wall_us(),
            outcome: RequestOutcome::Allowed,
            reason: DecisionReason::Limit,
            decided_by: None,
        }
    }

    /// Whether no limit has denied the request so far.
    fn passes(&self) -> bool {
        self.headline.is_allowed()
    }

    /// Decides some of the limits one after the other, whether or not the request passes so far.
    async fn decide_each(
        &mut self,
        decider: &Decider,
        checks: &[RoleCheck<'g, '_>],
        is_meant: impl Fn(&RoleCheck<'_, '_>) -> bool,
    ) -> Result<(), TooManyLimits> {
        for (at, check) in checks.iter().enumerate().filter(|(_, check)| is_meant(check)) {
            let region_decision = check.decide_alone(decider).await?;
            self.outcomes[at] = region_decision.decision.outcomes().first().copied();
            self.add(decider, region_decision);
        }
        Ok(())
    }

    /// Decides quotas: the request is denied if all of them are over. Returns those that were
    /// charged.
    async fn decide_quotas<'c, 'k>(
        &mut self,
        decider: &Decider,
        checks: &'c [RoleCheck<'g, 'k>],
    ) -> Result<Vec<&'c RoleCheck<'g, 'k>>, TooManyLimits> {
        let mut charged = Vec::new();
        let mut denied = None;
        let mut passed = None;
        for (at, check) in checks.iter().enumerate() {
            if check.role != CheckRole::Quota {
                continue;
            }
            let region_decision = check.decide_alone(decider).await?;
            self.outcomes[at] = region_decision.decision.outcomes().first().copied();
            if region_decision.is_allowed() {
                charged.push(check);
                passed.get_or_insert(region_decision);
            } else {
                denied.get_or_insert(region_decision);
            }
        }
        if let Some(region_decision) = passed.or(denied) {
            self.add(decider, region_decision);
        }
        Ok(charged)
    }

    async fn charge_as_one(
        &mut self,
        decider: &Decider,
        checks: &[RoleCheck<'g, '_>],
    ) -> Result<(), TooManyLimits> {
        let as_one = || checks.iter().enumerate().filter(|(_, check)| check.is_charged_as_one());
        let region_decision = decider.check_all(as_one().map(|(_, check)| &check.check)).await?;
        for ((at, _), outcome) in as_one().zip(region_decision.decision.outcomes()) {
            self.outcomes[at] = Some(*outcome);
        }
        self.add(decider, with_ends(region_decision, as_one().map(|(_, check)| check)));
        Ok(())
    }

    /// Handles the limits that decide nothing: refunds, shadow mode, and those that a denial left
    /// without a check. Their checks run concurrently, as many as one request may have enforced.
    /// Refunds come first, because one of the others may read the same meter.
    async fn decide_rest(
        &mut self,
        decider: &Decider,
        checks: &[RoleCheck<'g, '_>],
    ) -> Result<(), TooManyLimits> {
        for check in checks.iter().filter(|check| check.role == CheckRole::Refund) {
            decider.refund(&check.check);
        }
        let passes = self.passes();
        let decide_one = async |check: &RoleCheck<'g, '_>| match check.role {
            CheckRole::Shadow if passes => check.decide_alone(decider).await,
            _ => check.read(decider).await,
        };
        let rest: Vec<usize> = (0..checks.len()).filter(|at| self.outcomes[*at].is_none()).collect();
        for group in rest.chunks(LIMITS_PER_CHECK_MAX) {
            let region_decision = try_join_all(group.iter().map(|at| decide_one(&checks[*at]))).await?;
            for (at, region_decision) in group.iter().zip(region_decision) {
                self.outcomes[*at] = region_decision.decision.outcomes().first().copied();
            }
        }
        Ok(())
    }

    /// Adds a decision. The headline is a denial rather than a limit that passed, and a charged
    /// limit rather than one that was only read.
    fn add(&mut self, decider: &Decider, region_decision: RegionDecision<'g>) {
        // No limit has this role.
        if region_decision.decision.outcomes().is_empty() {
            return;
        }
        let before = &self.headline;
        let is_first = before.decision.outcomes().is_empty();
        let source =
            if is_first { region_decision.source } else { before.source.max(region_decision.source) };
        let missing_reply = region_decision.missing_reply.or(before.missing_reply);
        if !region_decision.is_allowed() || self.passes() {
            self.wall_us = decider.limiter.wall_us();
            self.headline = region_decision;
        }
        (self.headline.source, self.headline.missing_reply) = (source, missing_reply);
    }

    /// Adds the outcome, the reason, and the check that decided.
    fn concluded(mut self, checks: &[RoleCheck<'g, '_>]) -> Self {
        let of_role = |is_shadow: bool| {
            let by_check = checks.iter().zip(&self.outcomes).enumerate();
            by_check.filter_map(move |(at, (check, outcome))| {
                let decides =
                    check.role != CheckRole::Refund && (check.role == CheckRole::Shadow) == is_shadow;
                decides.then_some((at, outcome.as_ref()?))
            })
        };
        let outcome = match self.passes() {
            false => RequestOutcome::Denied,
            true if of_role(true).any(|(_, outcome)| !outcome.is_allowed()) => RequestOutcome::ShadowDenied,
            true => RequestOutcome::Allowed,
        };
        let decided_by = decisive(of_role(outcome == RequestOutcome::ShadowDenied));
        // After the choice of the deciding check: a block decides, however soon it ends.
        for (check, outcome) in checks.iter().zip(&mut self.outcomes) {
            if let (Some(ends_us), Some(ending)) = (check.ends_us, outcome.as_mut()) {
                *ending = ending.ending_after(ends_us);
            }
        }
        let is_block = !self.passes() && decided_by.is_some_and(|at| checks[at].is_block);
        let RegionDecision { source, missing_reply, .. } = self.headline;
        let reason = if is_block { DecisionReason::Block } else { DecisionReason::of(source, missing_reply) };
        Self { outcome, reason, decided_by, ..self }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tidegate::region::RegionCheck;
    use tidegate::{Limit, Limiter, ManualClock};

    use super::*;

    #[test]
    fn a_refund_comes_before_the_reads_of_its_meter() {
        let limit = Limit::gcra(5, Duration::from_mins(1)).expect("in range");
        let limiter = Limiter::builder().clock(ManualClock::new()).limit("a", limit);
        let decider = Decider { limiter: Arc::new(limiter.build().expect("a limiter")), region: None };
        let gate = decider.limiter.gate("a").expect("a gate");
        assert!(decider.limiter.check(gate.key("k").cost(3)).is_allowed());
        let check = |cost, role| {
            let check = RegionCheck::from(gate.key("k").cost(cost));
            RoleCheck { role, ..RoleCheck::enforced(check) }
        };
        let checks = [check(1, CheckRole::Shadow), check(3, CheckRole::Refund)];
        let decision = decide(&decider, &checks).now_or_never().expect("no origin").expect("two limits");
        let remaining: Vec<u32> = decision.outcomes.iter().flatten().map(Outcome::remaining).collect();
        assert_eq!(remaining, [4, 4]);
    }
}
