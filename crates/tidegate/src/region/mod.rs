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
//! let ruling = region.check(&[per_user.question("alice")]).await?;
//! assert!(ruling.is_allowed());
//!
//! // Everything that was spent is reported, and everything that is held is given back.
//! region.leave().await;
//! # Ok(())
//! # }
//! ```

mod driver;
mod ladder;
mod question;

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;
use tidegate_core::engine::{self, Resolution};
use tidegate_core::origin::{NEVER_US, NodeId};
use tidegate_core::{Answer, Decided, Retry, Source, TooManyLimits, Verdict};

use crate::decision::{Decision, LIMITS_INLINE_MAX, Outcome, Outcomes};
use crate::gate::Ask;
use crate::limiter::{BuildError, Limiter, random_name};

pub use engine::{EngineStats, Settings};
pub use ladder::Rung;
pub(crate) use question::Kept;
pub use question::{Policy, Question, joined};
pub use tidegate_core::Class;
pub use tidegate_origin::{MemoryOrigin, Origin, OriginError, redis};

use driver::Driver;

/// A process's place in a region.
#[derive(Clone)]
pub struct Region {
    /// What all its meters are called after.
    name: Arc<str>,
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
        Self::join_as("", limiter, origin, Settings::default())
    }

    /// The same, under other settings and by a name: what processes share is what they call alike.
    pub fn join_as(
        name: &str,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: Settings,
    ) -> Result<Self, BuildError> {
        let node = NodeId(random_name()?);
        let driver = Driver::start(node, Arc::clone(&limiter), origin, settings);
        Ok(Self { name: name.into(), limiter, driver })
    }

    /// Decides a request under several limits as one: either all are charged, or none is.
    ///
    /// # Panics
    /// If no origin keeps one of the gates.
    pub async fn check<'g>(&self, questions: &[Question<'g, '_>]) -> Result<Ruling<'g>, TooManyLimits> {
        let decision = self.by_memory(questions)?;
        if !asks_origin(&decision) {
            return Ok(Ruling { decision, rung: Rung::Regional });
        }
        // Boxed: what memory decides does not carry the room for what it does not.
        Box::pin(self.ask_origin(questions)).await
    }

    /// Decides by what is held here.
    fn by_memory<'g>(&self, questions: &[Question<'g, '_>]) -> Result<Decision<'g>, TooManyLimits> {
        let asks = questions.iter().map(|question| question.ask);
        // What memory decides allocates nothing.
        if questions.len() <= LIMITS_INLINE_MAX {
            return self.limiter.check_all(&asks.collect::<ArrayVec<Ask<'g>, LIMITS_INLINE_MAX>>());
        }
        self.limiter.check_all(&asks.collect::<Vec<Ask<'g>>>())
    }

    /// Decides what memory did not: by one call for each placement, one after the other. What an earlier one was charged is
    /// given back when a later one denies.
    async fn ask_origin<'g>(&self, questions: &[Question<'g, '_>]) -> Result<Ruling<'g>, TooManyLimits> {
        let mut groups = by_placement(questions);
        if let [only] = &groups[..] {
            return self.ask_one(&only.questions).await;
        }
        let mut whole = unasked(questions);
        let mut charged = Vec::new();
        // Where memory decides, what was charged is given back at no cost: those come first.
        groups.sort_by_key(|group| self.is_undecided(group));
        for group in &groups {
            let ruling = self.decide_group(&group.questions).await?;
            whole.add(group, &ruling);
            if !ruling.is_allowed() {
                self.refund(charged);
                break;
            }
            charged.extend(&group.questions);
        }
        Ok(whole)
    }

    /// Whether what is held here does not decide these, as far as a look can tell.
    fn is_undecided(&self, group: &Group<'_, '_, '_>) -> bool {
        let look = |question: &&Question<'_, '_>| self.limiter.check(question.ask.cost(0)).verdict().retry();
        group.questions.iter().any(|question| look(question) == Some(Retry::Ask))
    }

    async fn decide_group<'g>(&self, group: &[&Question<'g, '_>]) -> Result<Ruling<'g>, TooManyLimits> {
        let asks: Vec<Ask<'g>> = group.iter().map(|question| question.ask).collect();
        let decision = self.limiter.check_all(&asks)?;
        if !asks_origin(&decision) {
            return Ok(Ruling { decision, rung: Rung::Regional });
        }
        self.ask_one(group).await
    }

    /// Asks one placement.
    async fn ask_one<'g>(&self, group: &[&Question<'g, '_>]) -> Result<Ruling<'g>, TooManyLimits> {
        let Some(partition) = group.first().map(|question| question.partition()) else {
            return Ok(Ruling { decision: allowed(Vec::new()), rung: Rung::Regional });
        };
        let charges = group.iter().map(|question| question.charge()).collect();
        match self.driver.ask(partition, charges).await {
            Resolution::Unanswered => self.without_origin(group),
            resolution => Ok(Ruling { decision: resolved(group, &resolution), rung: Rung::Regional }),
        }
    }

    /// Adds costs that were spent already, without asking. The origin learns of them with the next report.
    pub fn charge<'q>(&self, questions: impl IntoIterator<Item = &'q Question<'q, 'q>>) {
        for question in questions {
            self.driver.owe(question.partition(), &question.charge());
        }
    }

    /// Gives charged costs back.
    pub fn refund<'q>(&self, questions: impl IntoIterator<Item = &'q Question<'q, 'q>>) {
        for question in questions {
            self.driver.refund(question.partition(), &question.charge());
        }
    }

    /// Reports everything that was spent and gives back everything that is held; done when the origin knows.
    pub async fn leave(&self) {
        self.driver.leave().await;
    }

    /// What the engine has seen.
    pub fn stats(&self) -> EngineStats {
        self.driver.stats()
    }

    /// How far the origin's clock is ahead of this process's, µs, as far as answers tell; nothing is decided by it.
    pub fn skew_us(&self) -> i64 {
        self.driver.skew_us()
    }

    /// Whether the origin answers, as it changes.
    pub fn answers(&self) -> tokio::sync::watch::Receiver<bool> {
        self.driver.answers()
    }
}

/// Questions of one request that have the same placement, and their places in it.
struct Group<'q, 'g, 'k> {
    partition: u16,
    places: Vec<usize>,
    questions: Vec<&'q Question<'g, 'k>>,
}

fn by_placement<'q, 'g, 'k>(questions: &'q [Question<'g, 'k>]) -> Vec<Group<'q, 'g, 'k>> {
    let mut groups: Vec<Group<'q, 'g, 'k>> = Vec::with_capacity(1);
    for (place, question) in questions.iter().enumerate() {
        let partition = question.partition();
        match groups.iter_mut().find(|group| group.partition == partition) {
            Some(group) => {
                group.places.push(place);
                group.questions.push(question);
            }
            None => groups.push(Group { partition, places: vec![place], questions: vec![question] }),
        }
    }
    groups
}

/// Before anyone said anything. Who is not asked, because another denied, is said to have nothing left: never more than the
/// truth.
fn unasked<'g>(questions: &[Question<'g, '_>]) -> Ruling<'g> {
    let outcomes = questions.iter().map(|question| told(&question.ask, 0, None)).collect();
    Ruling { decision: allowed(outcomes), rung: Rung::Regional }
}

impl<'g> Ruling<'g> {
    /// Takes in what one placement said.
    fn add(&mut self, group: &Group<'_, 'g, '_>, said: &Self) {
        let Decision { outcomes: Outcomes::Many(outcomes), decided } = &mut self.decision else { return };
        for (place, outcome) in group.places.iter().zip(said.decision.outcomes()) {
            outcomes[*place] = *outcome;
        }
        if let Decided::Denied { by } = said.decision.decided {
            *decided = Decided::Denied { by: group.places[by] };
        }
        self.rung = self.rung.max(said.rung);
    }
}

fn allowed(outcomes: Vec<Outcome<'_>>) -> Decision<'_> {
    Decision { outcomes: Outcomes::Many(outcomes), decided: Decided::Allowed }
}

/// Whether nothing here decides the request.
fn asks_origin(decision: &Decision<'_>) -> bool {
    decision.denied_by().is_some_and(|outcome| outcome.verdict().retry() == Some(Retry::Ask))
}

/// The origin's word as a decision.
fn resolved<'g>(group: &[&Question<'g, '_>], resolution: &Resolution) -> Decision<'g> {
    let (remaining, denied) = match resolution {
        Resolution::Unanswered => (&[][..], None),
        Resolution::Allowed { remaining } => (&remaining[..], None),
        Resolution::Denied { by, remaining, retry_us } => (&remaining[..], Some((*by, *retry_us))),
    };
    let outcome = |(place, question): (usize, &&Question<'g, '_>)| {
        let denied = denied.filter(|(by, _)| *by == place).map(|(_, retry_us)| retry_us);
        told(&question.ask, remaining.get(place).copied().unwrap_or(0), denied)
    };
    let outcomes = Outcomes::Many(group.iter().enumerate().map(outcome).collect());
    let decided = denied.map_or(Decided::Allowed, |(by, _)| Decided::Denied { by });
    Decision { outcomes, decided }
}

/// The origin's word on one limit: what is left under it, and when one that it denies would pass.
fn told<'g>(ask: &Ask<'g>, remaining: u32, denied_us: Option<u64>) -> Outcome<'g> {
    let limit = ask.gate().limit();
    let remaining = remaining.min(limit.burst());
    let reset_after_us = limit.reset_after_us(remaining);
    let verdict = match denied_us {
        None => Verdict::Allow { remaining, reset_after_us },
        Some(us) => Verdict::Deny { remaining, reset_after_us, retry: retry(ask, us) },
    };
    Outcome::new(ask.gate(), Answer { verdict, source: Source::Own })
}

/// When a denied request would pass.
fn retry(ask: &Ask<'_>, retry_us: u64) -> Retry {
    if ask.gate().limit().is_blocked() {
        Retry::Blocked
    } else if retry_us >= NEVER_US {
        Retry::CostAboveBurst
    } else {
        Retry::After(retry_us)
    }
}
