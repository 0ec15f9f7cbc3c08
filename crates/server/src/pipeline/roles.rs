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
        let headline = decider.check_all(checks.iter().map(|check| &check.check)).await?;
        return Ok(RequestDecision::new(headline, None, decider.limiter.wall_us(), checks));
    }
    // On the heap: most requests do not need this large future, and each would have room for it.
    Box::pin(decide_by_role(decider, checks)).await
}

/// Decides a request that has limits of different roles.
async fn decide_by_role<'g>(
    decider: &Decider,
    checks: &[RoleCheck<'g, '_>],
) -> Result<RequestDecision<'g>, TooManyLimits> {
    let mut decision = RoleDecisions {
        outcomes: vec![None; checks.len()],
        headline: decider.check_all([]).await?,
        wall_us: decider.limiter.wall_us(),
    };
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
    let RoleDecisions { outcomes, headline, wall_us } = decision;
    Ok(RequestDecision::new(headline, Some(outcomes), wall_us, checks))
}

/// The decisions so far on a request that has limits of different roles.
struct RoleDecisions<'g> {
    /// By check.
    outcomes: Vec<Option<Outcome<'g>>>,
    /// See [`RequestDecision::headline`].
    headline: RegionDecision<'g>,
    /// See [`RequestDecision::wall_us`].
    wall_us: u64,
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

impl<'g> RoleDecisions<'g> {
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
        let mut region_decision = decider.check_all(as_one().map(|(_, check)| &check.check)).await?;
        for ((at, _), outcome) in as_one().zip(region_decision.decision.outcomes()) {
            self.outcomes[at] = Some(*outcome);
        }
        region_decision.decision.set_ends(as_one().map(|(_, check)| check.ends_us));
        self.add(decider, region_decision);
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
}

impl<'g> RequestDecision<'g> {
    /// Concludes the outcome, the reason and the check that decided. Without outcomes by check, the
    /// headline has them.
    fn new(
        headline: RegionDecision<'g>,
        by_check: Option<Vec<Option<Outcome<'g>>>>,
        wall_us: u64,
        checks: &[RoleCheck<'g, '_>],
    ) -> Self {
        let RegionDecision { source, missing_reply, .. } = headline;
        let mut decision = Self {
            headline: Box::new(headline),
            by_check,
            wall_us,
            outcome: RequestOutcome::Allowed,
            reason: DecisionReason::of(source, missing_reply),
            decided_by: None,
        };
        decision.conclude(checks);
        decision
    }

    fn conclude(&mut self, checks: &[RoleCheck<'g, '_>]) {
        let decision = &*self;
        let of_role = move |is_shadow: bool| {
            checks.iter().enumerate().filter_map(move |(at, check)| {
                let decides =
                    check.role != CheckRole::Refund && (check.role == CheckRole::Shadow) == is_shadow;
                decides.then_some((at, decision.outcome_of(at)?))
            })
        };
        let outcome = match self.headline.is_allowed() {
            false => RequestOutcome::Denied,
            true if of_role(true).any(|(_, outcome)| !outcome.is_allowed()) => RequestOutcome::ShadowDenied,
            true => RequestOutcome::Allowed,
        };
        let decided_by = decisive(of_role(outcome == RequestOutcome::ShadowDenied));
        (self.outcome, self.decided_by) = (outcome, decided_by);
        if outcome == RequestOutcome::Denied && decided_by.is_some_and(|at| checks[at].is_block) {
            self.reason = DecisionReason::Block;
        }
        // After the choice of the deciding check: a block decides, however soon it ends.
        match &mut self.by_check {
            None => self.headline.decision.set_ends(checks.iter().map(|check| check.ends_us)),
            Some(by_check) => set_ends(by_check, checks),
        }
    }
}

/// States when the limits of emergencies end.
fn set_ends<'g>(by_check: &mut [Option<Outcome<'g>>], checks: &[RoleCheck<'g, '_>]) {
    for (check, outcome) in checks.iter().zip(by_check) {
        if let (Some(ends_us), Some(outcome)) = (check.ends_us, outcome) {
            outcome.set_end(ends_us);
        }
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
        let remaining = [0, 1].map(|at| decision.outcome_of(at).map(Outcome::remaining));
        assert_eq!(remaining, [Some(4), Some(4)]);
    }
}
