//! What decides when the origin does not.

use tidegate_core::{Class, Decided, Retry, TooManyLimits, Verdict};

use super::{Region, RegionAsk, Ruling};
use crate::decision::{Decision, Outcome, Outcomes};
use crate::gate::Gate;

/// When to ask again after a request was refused because nobody could decide it, µs: about when the origin may be back.
const CLOSED_RETRY_US: u64 = 1_000_000;

/// What a decision rests on, from the best to the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Rung {
    /// The region's origin: its grant, its last word, or its answer.
    Regional,
    /// This process's part of the limit, by the number of processes it last heard of.
    Local,
    /// Nothing: the class of the limit says that it does not pass then.
    Closed,
}

impl Rung {
    /// As answers and metrics name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Regional => "regional",
            Self::Local => "local",
            Self::Closed => "closed",
        }
    }
}

impl Region {
    /// Decides without the origin: by the strictest class among the limits.
    pub(super) fn without_origin<'g>(
        &self,
        partition: u16,
        asks: &[RegionAsk<'g, '_>],
        cost: u64,
    ) -> Result<Ruling<'g>, TooManyLimits> {
        let strictest = asks.iter().map(|ask| ask.gate.class).max().unwrap_or_default();
        if strictest != Class::Comfort {
            return Ok(Ruling { decision: closed(asks), rung: Rung::Closed });
        }
        let decision = self.alone(partition, asks, cost)?;
        if decision.is_allowed() && cost > 0 {
            // It counts all the same: the origin is told when it is back.
            self.driver.owe(partition, asks.iter().map(RegionAsk::meter), cost);
        }
        Ok(Ruling { decision, rung: Rung::Local })
    }

    /// Decides by this process's part of each limit.
    fn alone<'g>(
        &self,
        partition: u16,
        asks: &[RegionAsk<'g, '_>],
        cost: u64,
    ) -> Result<Decision<'g>, TooManyLimits> {
        let gates: Vec<Gate> = asks.iter().map(|ask| self.part(partition, ask)).collect();
        let questions: Vec<_> =
            asks.iter().zip(&gates).map(|(ask, gate)| gate.key(ask.key).cost(cost)).collect();
        let decision = self.limiter.check_all(&questions)?;
        let outcomes = asks.iter().zip(decision.outcomes()).map(|(ask, outcome)| {
            Outcome::new(
                &ask.gate.alone,
                tidegate_core::Answer { verdict: outcome.verdict(), source: outcome.source() },
            )
        });
        Ok(Decision { outcomes: Outcomes::Many(outcomes.collect()), decided: decision.decided })
    }

    fn part(&self, partition: u16, ask: &RegionAsk<'_, '_>) -> Gate {
        let nodes = self.driver.holders(partition, ask);
        ask.gate.alone.with_limit(ask.gate.alone.limit().part(nodes))
    }
}

/// Refuses, since nobody can decide.
fn closed<'g>(asks: &[RegionAsk<'g, '_>]) -> Decision<'g> {
    let verdict =
        Verdict::Deny { remaining: 0, reset_after_us: CLOSED_RETRY_US, retry: Retry::After(CLOSED_RETRY_US) };
    let answer = tidegate_core::Answer { verdict, source: tidegate_core::Source::Own };
    let outcomes = asks.iter().map(|ask| Outcome::new(&ask.gate.held, answer)).collect();
    let strictest = asks.iter().enumerate().max_by_key(|(_, ask)| ask.gate.class);
    Decision {
        outcomes: Outcomes::Many(outcomes),
        decided: Decided::Denied { by: strictest.map_or(0, |(at, _)| at) },
    }
}
