//! Regions: many processes that act as one, around a shared store.
//!
//! Each process holds grants: amounts that the region's [`Origin`] lets it spend without asking. A request inside a grant, or
//! one that the origin's last word denies, is decided from memory like any other. Only what neither decides waits for the
//! origin, and no longer than a few milliseconds; then the limit's [`Class`] decides.
//!
//! ```
//! # use std::sync::Arc;
//! # use std::time::Duration;
//! # use tidegate::{Limit, Limiter};
//! use tidegate::region::{Class, MemoryOrigin, Region};
//! use tidegate::{Clock, SystemClock};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let minute = Duration::from_secs(60);
//! let limiter = Arc::new(Limiter::builder().limit("per_user", Limit::gcra(100, minute)?).build()?);
//! let clock = SystemClock::new();
//! let origin = Arc::new(MemoryOrigin::new(move || clock.now().wall_us()));
//! let region = Region::join(limiter, origin)?;
//! let per_user = region.gate("", "per_user", Class::Comfort)?;
//!
//! let ruling = region.check("alice", &[per_user.key("alice")], 1).await?;
//! assert!(ruling.is_allowed());
//!
//! // Everything that was spent is reported, and everything that is held is given back.
//! region.leave().await;
//! # Ok(())
//! # }
//! ```

mod driver;
mod gate;
mod ladder;

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;
use tidegate_core::engine::{self, Charge, Resolution};
use tidegate_core::origin::NodeId;
use tidegate_core::{Answer, Decided, Retry, Source, TooManyLimits, Verdict};
use tidegate_origin::partition_of;

use crate::decision::{Decision, LIMITS_INLINE_MAX, Outcome, Outcomes};
use crate::gate::Ask;
use crate::limiter::{BuildError, Limiter, random_name};

pub use engine::{EngineStats, Settings};
pub use gate::{RegionAsk, RegionGate};
pub use ladder::Rung;
pub use tidegate_core::Class;
pub use tidegate_origin::{MemoryOrigin, Origin, OriginError, redis::RedisOrigin};

use driver::Driver;

/// A process's place in a region.
#[derive(Clone)]
pub struct Region {
    limiter: Arc<Limiter>,
    driver: Arc<Driver>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("limiter", &self.limiter).finish_non_exhaustive()
    }
}

/// What was decided in a region, and what that rests on.
#[derive(Clone, Debug)]
#[must_use = "a denial that nobody looks at stops nobody"]
pub struct Ruling<'g> {
    /// What was decided.
    pub decision: Decision<'g>,
    /// What that rests on.
    pub rung: Rung,
}

impl Ruling<'_> {
    /// Whether the request may pass.
    pub fn is_allowed(&self) -> bool {
        self.decision.is_allowed()
    }
}

impl Region {
    /// Joins the region of an origin, under the settings that suit most. Needs a runtime: what has to be said to the origin is
    /// said by a task.
    pub fn join(limiter: Arc<Limiter>, origin: Arc<dyn Origin>) -> Result<Self, BuildError> {
        Self::join_with(limiter, origin, Settings::default())
    }

    /// The same, under other settings.
    pub fn join_with(
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: Settings,
    ) -> Result<Self, BuildError> {
        let node = NodeId(random_name()?);
        let driver = Driver::start(node, Arc::clone(&limiter), origin, settings);
        Ok(Self { limiter, driver })
    }

    /// Decides a request of `cost` under several limits as one. All of them are kept where `placement` says, which is for
    /// each request the same thing of it, such as its user or its tenant.
    pub async fn check<'g>(
        &self,
        placement: &str,
        asks: &[RegionAsk<'g, '_>],
        cost: u64,
    ) -> Result<Ruling<'g>, TooManyLimits> {
        let (few, many): (ArrayVec<Ask<'g>, LIMITS_INLINE_MAX>, Vec<Ask<'g>>);
        let questions = asks.iter().map(|ask| ask.held().cost(cost));
        // What memory decides allocates nothing.
        let held: &[Ask<'g>] = if asks.len() <= LIMITS_INLINE_MAX {
            few = questions.collect();
            &few
        } else {
            many = questions.collect();
            &many
        };
        let decision = self.limiter.check_all(held)?;
        if !asks_origin(&decision) {
            return Ok(Ruling { decision, rung: Rung::Regional });
        }
        let partition = partition_of(placement.as_bytes());
        let charges = asks.iter().map(|ask| Charge { meter: ask.meter(), cost }).collect();
        Ok(match self.driver.ask(partition, charges).await {
            Resolution::Unanswered => self.without_origin(partition, asks, cost)?,
            resolution => Ruling { decision: resolved(held, resolution, decision), rung: Rung::Regional },
        })
    }

    /// Reports everything that was spent and gives back everything that is held; done when the origin knows.
    pub async fn leave(&self) {
        self.driver.leave().await;
    }

    /// What the engine has seen.
    pub fn stats(&self) -> EngineStats {
        self.driver.stats()
    }
}

/// Whether nothing here decides the request.
fn asks_origin(decision: &Decision<'_>) -> bool {
    decision.denied_by().is_some_and(|outcome| outcome.verdict().retry() == Some(Retry::Ask))
}

/// The origin's word as a decision.
fn resolved<'g>(asks: &[Ask<'g>], resolution: Resolution, undecided: Decision<'g>) -> Decision<'g> {
    let allow = |ask: &Ask<'g>, remaining: u32| {
        let limit = ask.gate().limit();
        let remaining = remaining.min(limit.burst());
        Verdict::Allow { remaining, reset_after_us: limit.reset_after_us(remaining) }
    };
    let (verdicts, decided): (Vec<Verdict>, Decided) = match resolution {
        Resolution::Unanswered => return undecided,
        Resolution::Allowed { remaining } => {
            (asks.iter().zip(remaining).map(|(ask, left)| allow(ask, left)).collect(), Decided::Allowed)
        }
        Resolution::Denied { by, remaining, retry_us } => {
            let denial = |ask: &Ask<'g>, remaining: u32| Verdict::Deny {
                remaining,
                reset_after_us: ask.gate().limit().reset_after_us(remaining),
                retry: gate::retry(ask, retry_us),
            };
            let verdicts = asks.iter().zip(remaining).enumerate();
            let verdicts =
                verdicts.map(|(at, (ask, left))| if at == by { denial(ask, left) } else { allow(ask, left) });
            (verdicts.collect(), Decided::Denied { by })
        }
    };
    let outcomes = asks.iter().zip(verdicts);
    let outcomes =
        outcomes.map(|(ask, verdict)| Outcome::new(ask.gate(), Answer { verdict, source: Source::Own }));
    Decision { outcomes: Outcomes::Many(outcomes.collect()), decided }
}
