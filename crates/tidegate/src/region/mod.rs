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
mod forward;
mod ladder;
mod question;
mod regions;

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;
use tidegate_core::engine::{self, Paid, Resolution};
use tidegate_core::origin::{NEVER_US, NodeId};
use tidegate_core::{Answer, Decided, Retry, Source, TooManyLimits, Verdict};
use tidegate_courier::Act;

use crate::decision::{Decision, LIMITS_INLINE_MAX, Outcome, Outcomes};
use crate::gate::Ask;
use crate::limiter::{BuildError, Limiter, random_name};

pub use engine::{EngineStats, Settings};
pub(crate) use question::Kept;
pub use question::{Policy, Question, joined};
pub use regions::{REGIONS_MAX, Regions, WEIGHT_MAX};
pub use tidegate_core::origin::CallError;
pub use tidegate_core::{Class, Regime, Rung, bound};
pub use tidegate_courier::{
    Certificates, CourierError as RegionsError, CourierStatus, PeerConfig, PeerCounts, PeerStatus,
};
pub use tidegate_origin::{MemoryOrigin, Origin, OriginError, redis};

use driver::Driver;
use forward::{owner, rolled_back};
use regions::Neighbours;

/// A process's place in a region.
#[derive(Clone)]
pub struct Region {
    /// What all its meters are called after.
    name: Arc<str>,
    limiter: Arc<Limiter>,
    driver: Arc<Driver>,
    /// Nothing for a region that is alone.
    neighbours: Option<Arc<Neighbours>>,
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
        Ok(Self { name: name.into(), limiter, driver, neighbours: None })
    }

    /// Joins a region that is one of several. It says nothing to the others before [`Region::meet`]; until it has heard of
    /// them, it goes on with its standing part of limits that they share. The origin is this region's alone.
    pub fn join_among(
        regions: Regions,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: Settings,
    ) -> Result<Self, RegionsError> {
        let problems = regions.problems();
        if !problems.is_empty() {
            return Err(RegionsError { problems });
        }
        // A meter is called the same in every region.
        let alone = Self::join_as("", limiter, origin, settings);
        let alone = alone.map_err(|error| RegionsError { problems: vec![format!("region: {error}")] })?;
        Ok(Self { neighbours: Some(Arc::new(Neighbours::new(regions))), ..alone })
    }

    /// Decides a request under several limits as one: either all are charged, or none is.
    ///
    /// # Panics
    /// If no origin keeps one of the gates.
    pub async fn check<'g>(&self, questions: &[Question<'g, '_>]) -> Result<Ruling<'g>, TooManyLimits> {
        let decision = self.by_memory(questions)?;
        if !asks_origin(&decision) {
            return Ok(Ruling { decision, rung: self.rung_of(questions) });
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
        let mut groups = by_place(questions);
        if let [only] = &groups[..] {
            return match only.place {
                Place::Here(_) => Ok(self.ask_one(&only.questions).await?.ruling),
                Place::Abroad(owner) => Ok(self.ask_abroad(owner, &only.questions).await),
            };
        }
        let mut whole = unasked(questions);
        let mut charged = Vec::new();
        // Where memory decides, what was charged is given back at no cost: those come first, and what is far comes last.
        groups.sort_by_key(|group| (group.is_abroad(), self.is_undecided(group)));
        for group in &groups {
            let since_us = self.limiter.now().mono_us();
            let Said { ruling, charged_us } = match group.place {
                Place::Here(_) => self.decide_group(&group.questions).await?,
                Place::Abroad(owner) => Said::here(self.ask_abroad(owner, &group.questions).await),
            };
            whole.add(group, &ruling);
            if !ruling.is_allowed() {
                for (group, paid) in charged {
                    self.roll_back(group, paid);
                }
                break;
            }
            charged.push((group, charged_us.map_or(Paid::Here { since_us }, |at_us| Paid::There { at_us })));
        }
        Ok(whole)
    }

    /// Gives back what was charged at one placement for a request that another denies.
    fn roll_back(&self, group: &Group<'_, '_, '_>, paid: Paid) {
        for question in &group.questions {
            match group.place {
                Place::Here(partition) => self.driver.roll_back(partition, &question.charge(), paid),
                Place::Abroad(owner) => self.tell_abroad(owner, rolled_back(paid), question),
            }
        }
    }

    /// Whether what is held here does not decide these, as far as a look can tell.
    fn is_undecided(&self, group: &Group<'_, '_, '_>) -> bool {
        let look = |question: &&Question<'_, '_>| self.limiter.check(question.ask.cost(0)).verdict().retry();
        group.questions.iter().any(|question| look(question) == Some(Retry::Ask))
    }

    async fn decide_group<'g>(&self, group: &[&Question<'g, '_>]) -> Result<Said<'g>, TooManyLimits> {
        let asks: Vec<Ask<'g>> = group.iter().map(|question| question.ask).collect();
        let decision = self.limiter.check_all(&asks)?;
        if !asks_origin(&decision) {
            return Ok(Said::here(Ruling { decision, rung: self.rung_of(group.iter().copied()) }));
        }
        self.ask_one(group).await
    }

    /// Asks one placement.
    async fn ask_one<'g>(&self, group: &[&Question<'g, '_>]) -> Result<Said<'g>, TooManyLimits> {
        let Some(partition) = group.first().map(|question| question.partition()) else {
            return Ok(Said::here(Ruling { decision: allowed(Vec::new()), rung: Rung::Regional }));
        };
        let charges = group.iter().map(|question| question.charge()).collect();
        let resolution = self.driver.ask(partition, charges).await;
        let charged_us = match resolution {
            Resolution::Unanswered => return self.without_origin(group).map(Said::here),
            Resolution::Allowed { charged_us, .. } => charged_us,
            Resolution::Denied { .. } => None,
        };
        let rung = self.rung_of(group.iter().copied());
        Ok(Said { ruling: Ruling { decision: resolved(group, &resolution), rung }, charged_us })
    }

    /// What the origin's word on these rests on: the least that any of them does.
    fn rung_of<'q, 'g: 'q, 'k: 'q>(&self, questions: impl IntoIterator<Item = &'q Question<'g, 'k>>) -> Rung {
        if self.neighbours.is_none() {
            return Rung::Regional;
        }
        let rung = |question: &Question<'_, '_>| {
            let is_whole = || self.driver.is_whole(question.partition());
            if question.kept().global().is_some() && is_whole() { Rung::Global } else { Rung::Regional }
        };
        questions.into_iter().map(rung).max().unwrap_or(Rung::Regional)
    }

    /// Adds costs that were spent already, without asking. The origin learns of them with the next report.
    pub fn charge<'q>(&self, questions: impl IntoIterator<Item = &'q Question<'q, 'q>>) {
        for question in questions {
            match owner(question) {
                None => self.driver.owe(question.partition(), &question.charge()),
                Some(owner) => self.tell_abroad(owner, Act::Charge, question),
            }
        }
    }

    /// Gives back costs that were charged at some time, all of it, whatever has drained since; the origin learns of it with the next
    /// report. What drains while the origin does not answer for longer than half a second is not given back.
    pub fn refund<'q>(&self, questions: impl IntoIterator<Item = &'q Question<'q, 'q>>) {
        for question in questions {
            match owner(question) {
                None => self.driver.refund(question.partition(), &question.charge()),
                Some(owner) => self.tell_abroad(owner, Act::Refund, question),
            }
        }
    }

    /// Reports everything that was spent and gives back everything that is held; done when the origin knows. Another process
    /// of the region tells the other regions then.
    pub async fn leave(&self) {
        self.driver.leave().await;
        if let Some(neighbours) = &self.neighbours {
            neighbours.leave().await;
        }
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

    /// Why the origin would not take the last of the calls that it would not: none, unless there is a mistake in this library.
    /// They are counted in [`EngineStats::refused`].
    pub fn refusal(&self) -> tokio::sync::watch::Receiver<Option<CallError>> {
        self.driver.refusal()
    }
}

/// What one placement said.
struct Said<'g> {
    ruling: Ruling<'g>,
    /// When the origin charged it, by its clock; nothing for what was taken from what is held here.
    charged_us: Option<u64>,
}

impl<'g> Said<'g> {
    fn here(ruling: Ruling<'g>) -> Self {
        Self { ruling, charged_us: None }
    }
}

/// Who decides a question.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// This partition of the own origin.
    Here(u16),
    /// This one of the regions.
    Abroad(usize),
}

/// Questions of one request that are decided at the same place, and their places in it.
struct Group<'q, 'g, 'k> {
    place: Place,
    places: Vec<usize>,
    questions: Vec<&'q Question<'g, 'k>>,
}

impl Group<'_, '_, '_> {
    fn is_abroad(&self) -> bool {
        matches!(self.place, Place::Abroad(_))
    }
}

/// Questions by who decides them.
fn by_place<'q, 'g, 'k>(questions: &'q [Question<'g, 'k>]) -> Vec<Group<'q, 'g, 'k>> {
    let mut groups: Vec<Group<'q, 'g, 'k>> = Vec::with_capacity(1);
    for (at, question) in questions.iter().enumerate() {
        let place = owner(question).map_or_else(|| Place::Here(question.partition()), Place::Abroad);
        match groups.iter_mut().find(|group| group.place == place) {
            Some(group) => {
                group.places.push(at);
                group.questions.push(question);
            }
            None => groups.push(Group { place, places: vec![at], questions: vec![question] }),
        }
    }
    groups
}

/// Before anyone said anything. Who is not asked, because another denied, is said to have nothing left: never more than the
/// truth.
fn unasked<'g>(questions: &[Question<'g, '_>]) -> Ruling<'g> {
    let outcomes = questions.iter().map(|question| told(&question.ask, 0, None)).collect();
    Ruling { decision: allowed(outcomes), rung: Rung::Global }
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
        Resolution::Allowed { remaining, .. } => (&remaining[..], None),
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
