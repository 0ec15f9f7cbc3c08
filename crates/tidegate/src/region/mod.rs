//! Regions: many nodes that act as one, around a shared origin.
//!
//! Each node holds grants: amounts that the region's [`Origin`] lets it spend without a call. A
//! request within a grant, or one that the origin's last reply denies, is decided from memory.
//! Other requests wait for the origin, by default for 20 ms at most; then the limit's [`Class`]
//! decides.
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
//! let region_decision = region.check(&[per_user.region_check("alice")]).await?;
//! assert!(region_decision.is_allowed());
//!
//! // Reports all usage and returns all grants.
//! region.leave().await;
//! # Ok(())
//! # }
//! ```

mod check;
mod driver;
mod fallback;
mod forward;
mod regions;

use std::fmt;
use std::sync::Arc;

use arrayvec::ArrayVec;
use tidegate_core::engine::{self, ChargeLocation, Resolution};
use tidegate_core::origin::{NEVER_US, NodeId};
use tidegate_core::{CheckOutcome, DecidingMeter, RequestVerdict, Retry, TooManyLimits, Verdict};
use tidegate_replication::ForwardAction;

use crate::decision::{Decision, LIMITS_INLINE_MAX, Outcome, Outcomes};
use crate::gate::Check;
use crate::limiter::{BuildError, Limiter, random_name};

pub(crate) use check::OriginLimit;
pub use check::{RegionCheck, RegionPolicy, join_parts};
pub use engine::{EngineSettings, EngineStats};
pub use regions::{MultiRegionConfig, REGIONS_MAX, WEIGHT_MAX};
pub use tidegate_core::origin::CallError;
pub use tidegate_core::{Class, DecisionSource, Regime, bound};
pub use tidegate_origin::{MemoryOrigin, Origin, OriginError, ProbeReply, redis};
pub use tidegate_replication::{
    PeerCertificates, PeerConfig, PeerCounts, PeerStatus, ReplicationStatus,
    ReplicatorError as MultiRegionError,
};

use driver::Driver;
use forward::{owner, roll_back_action};
use regions::PeerRegions;

/// A node of a region.
#[derive(Clone)]
pub struct Region {
    /// First part of the names of all its meters.
    name: Arc<str>,
    limiter: Arc<Limiter>,
    driver: Arc<Driver>,
    /// `None` for a region without peers.
    peer_regions: Option<Arc<PeerRegions>>,
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("limiter", &self.limiter).finish_non_exhaustive()
    }
}

/// A decision in a region, with its source.
#[derive(Clone, Debug)]
#[must_use = "an unread decision limits nothing"]
pub struct RegionDecision<'g> {
    /// The decision.
    pub decision: Decision<'g>,
    /// The decision source.
    pub source: DecisionSource,
    /// The reply that did not come in time, if the decision had to do without one.
    pub missing_reply: Option<MissingReply>,
}

/// A reply that a decision had to do without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingReply {
    /// Of the region's origin: it did not reply in time, or had no room for a new key.
    Origin,
    /// Of the owner region of a `strict` limit.
    Owner,
}

impl RegionDecision<'_> {
    /// Whether the request may pass.
    pub fn is_allowed(&self) -> bool {
        self.decision.is_allowed()
    }
}

impl Region {
    /// Joins the region of an origin, with default settings. Needs a runtime, because a task makes
    /// the calls to the origin.
    pub fn join(limiter: Arc<Limiter>, origin: Arc<dyn Origin>) -> Result<Self, BuildError> {
        Self::join_as("", limiter, origin, EngineSettings::default())
    }

    /// Joins with other settings and a name. Nodes share meters only under the same name.
    pub fn join_as(
        name: &str,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: EngineSettings,
    ) -> Result<Self, BuildError> {
        let node = NodeId(random_name()?);
        let driver = Driver::start(node, Arc::clone(&limiter), origin, settings);
        Ok(Self { name: name.into(), limiter, driver, peer_regions: None })
    }

    /// Joins one of several regions. The node exchanges nothing with peers before
    /// [`Region::start_replication`]. Until all peers are heard, it spends only its regional share
    /// of limits that they share. The origin belongs to this region alone.
    pub fn join_among(
        regions: MultiRegionConfig,
        limiter: Arc<Limiter>,
        origin: Arc<dyn Origin>,
        settings: EngineSettings,
    ) -> Result<Self, MultiRegionError> {
        let problems = regions.problems();
        if !problems.is_empty() {
            return Err(MultiRegionError { problems });
        }
        // A meter is called the same in every region.
        let alone = Self::join_as("", limiter, origin, settings);
        let alone = alone.map_err(|error| MultiRegionError { problems: vec![format!("region: {error}")] })?;
        Ok(Self { peer_regions: Some(Arc::new(PeerRegions::new(regions))), ..alone })
    }

    /// Decides a request under several limits as one: all are charged, or none is.
    ///
    /// # Panics
    /// If one of the gates has no origin.
    pub async fn check<'c, 'g: 'c, 'k: 'c>(
        &self,
        checks: impl IntoIterator<Item = &'c RegionCheck<'g, 'k>, IntoIter: Clone>,
    ) -> Result<RegionDecision<'g>, TooManyLimits> {
        let checks = checks.into_iter();
        let decision = self.by_memory(checks.clone().map(RegionCheck::node_check))?;
        if !needs_origin(&decision) {
            return Ok(RegionDecision { decision, source: self.source_of(checks), missing_reply: None });
        }
        let checks: Vec<_> = checks.collect();
        // Boxed, so that a decision from memory does not reserve space for this future.
        Box::pin(self.decide_by_placement(&checks)).await
    }

    /// Decides from the grants of this node. Allocates nothing for up to [`LIMITS_INLINE_MAX`]
    /// checks.
    fn by_memory<'g>(
        &self,
        mut checks: impl Iterator<Item = Check<'g>>,
    ) -> Result<Decision<'g>, TooManyLimits> {
        let first: ArrayVec<_, LIMITS_INLINE_MAX> = checks.by_ref().take(LIMITS_INLINE_MAX).collect();
        match checks.next() {
            None => self.limiter.check_all(&first),
            next => self.limiter.check_all(&first.into_iter().chain(next).chain(checks).collect::<Vec<_>>()),
        }
    }

    /// Decides a request that memory cannot, by one call for each placement, in sequence. If a
    /// later one denies, earlier charges are given back.
    async fn decide_by_placement<'g>(
        &self,
        checks: &[&RegionCheck<'g, '_>],
    ) -> Result<RegionDecision<'g>, TooManyLimits> {
        let mut groups = by_place(checks);
        if let [only] = &groups[..] {
            return match only.place {
                CheckOwner::Partition(_) => Ok(self.decide_at_origin(&only.checks).await?.region_decision),
                CheckOwner::PeerRegion(owner) => Ok(self.forward_checks(owner, &only.checks).await),
            };
        }
        let mut whole = undecided(checks);
        let mut charged = Vec::new();
        // Groups that memory decides come first, because their charges are given back at no cost.
        // Peer regions come last.
        groups.sort_by_key(|group| (group.is_cross_region(), self.is_undecided(group)));
        for group in &groups {
            let since_us = self.limiter.now().mono_us();
            let PlacementDecision { region_decision, charged_us } = match group.place {
                CheckOwner::Partition(_) => self.decide_group(&group.checks).await?,
                CheckOwner::PeerRegion(owner) => {
                    PlacementDecision::here(self.forward_checks(owner, &group.checks).await)
                }
            };
            whole.add(group, &region_decision);
            if !region_decision.is_allowed() {
                for (group, location) in charged {
                    self.roll_back(group, location);
                }
                break;
            }
            charged.push((
                group,
                charged_us
                    .map_or(ChargeLocation::OnNode { since_us }, |at_us| ChargeLocation::AtOrigin { at_us }),
            ));
        }
        Ok(whole)
    }

    /// Gives back the charges of one placement for a request that another denies.
    fn roll_back(&self, group: &PlacementGroup<'_, '_, '_>, location: ChargeLocation) {
        for check in &group.checks {
            match group.place {
                CheckOwner::Partition(partition) => {
                    self.driver.roll_back(partition, &check.charge(), location);
                }
                CheckOwner::PeerRegion(owner) => {
                    self.deliver_to_owner(owner, roll_back_action(location), check);
                }
            }
        }
    }

    /// Whether the grants of this node do not decide these checks, as far as a check of cost 0 can
    /// show.
    fn is_undecided(&self, group: &PlacementGroup<'_, '_, '_>) -> bool {
        let look =
            |check: &&RegionCheck<'_, '_>| self.limiter.check(check.node_check.cost(0)).verdict().retry();
        group.checks.iter().any(|check| look(check) == Some(Retry::AskOrigin))
    }

    async fn decide_group<'g>(
        &self,
        group: &[&RegionCheck<'g, '_>],
    ) -> Result<PlacementDecision<'g>, TooManyLimits> {
        let own: Vec<Check<'g>> = group.iter().map(|check| check.node_check).collect();
        let decision = self.limiter.check_all(&own)?;
        if !needs_origin(&decision) {
            return Ok(PlacementDecision::here(RegionDecision {
                decision,
                source: self.source_of(group.iter().copied()),
                missing_reply: None,
            }));
        }
        self.decide_at_origin(group).await
    }

    /// Decides one placement by a call to the origin.
    async fn decide_at_origin<'g>(
        &self,
        group: &[&RegionCheck<'g, '_>],
    ) -> Result<PlacementDecision<'g>, TooManyLimits> {
        let Some(partition) = group.first().map(|check| check.partition()) else {
            return Ok(PlacementDecision::here(RegionDecision {
                decision: allowed(Vec::new()),
                source: DecisionSource::Regional,
                missing_reply: None,
            }));
        };
        let charges = group.iter().map(|check| check.charge()).collect();
        let resolution = self.driver.request(partition, charges).await;
        let charged_us = match resolution {
            Resolution::Unanswered => return self.without_origin(group).map(PlacementDecision::here),
            Resolution::Allowed { charged_us, .. } => charged_us,
            Resolution::Denied { .. } => None,
        };
        let source = self.source_of(group.iter().copied());
        Ok(PlacementDecision {
            region_decision: RegionDecision {
                decision: resolved(group, &resolution),
                source,
                missing_reply: None,
            },
            charged_us,
        })
    }

    /// Returns the decision source of the origin's reply for these checks: the weakest of them.
    fn source_of<'c, 'g: 'c, 'k: 'c>(
        &self,
        checks: impl IntoIterator<Item = &'c RegionCheck<'g, 'k>>,
    ) -> DecisionSource {
        if self.peer_regions.is_none() {
            return DecisionSource::Regional;
        }
        let source = |check: &RegionCheck<'_, '_>| {
            let is_connected = || self.driver.is_connected(check.partition());
            if check.origin_limit().global().is_some() && is_connected() {
                DecisionSource::Global
            } else {
                DecisionSource::Regional
            }
        };
        checks.into_iter().map(source).max().unwrap_or(DecisionSource::Regional)
    }

    /// Charges costs that were spent already, without a check. The origin learns of them with the
    /// next report.
    pub fn charge<'c>(&self, checks: impl IntoIterator<Item = &'c RegionCheck<'c, 'c>>) {
        for check in checks {
            match owner(check) {
                None => self.driver.owe(check.partition(), &check.charge()),
                Some(owner) => self.deliver_to_owner(owner, ForwardAction::Charge, check),
            }
        }
    }

    /// Gives back charged costs in full, even if they have drained since. The origin learns of it
    /// with the next report. If it does not reply for more than half a second, units that drain
    /// meanwhile are not given back.
    pub fn refund<'c>(&self, checks: impl IntoIterator<Item = &'c RegionCheck<'c, 'c>>) {
        for check in checks {
            match owner(check) {
                None => self.driver.refund(check.partition(), &check.charge()),
                Some(owner) => self.deliver_to_owner(owner, ForwardAction::Refund, check),
            }
        }
    }

    /// Reports all usage and returns all grants; completes when the origin has acknowledged them.
    /// Another node of the region then becomes the replicator.
    pub async fn leave(&self) {
        self.driver.leave().await;
        if let Some(peer_regions) = &self.peer_regions {
            peer_regions.leave().await;
        }
    }

    /// Returns the counts of the engine.
    pub fn stats(&self) -> EngineStats {
        self.driver.stats()
    }

    /// Returns the lead of the origin's clock over this node's, µs, measured by replies. No
    /// decision depends on it.
    pub fn skew_us(&self) -> i64 {
        self.driver.skew_us()
    }

    /// Returns a watch on whether the origin replies.
    pub fn origin_up(&self) -> tokio::sync::watch::Receiver<bool> {
        self.driver.origin_up()
    }

    /// Checks that the origin accepts calls, before a request depends on it. Changes nothing.
    pub async fn probe(&self) -> Result<ProbeReply, OriginError> {
        self.driver.origin().probe().await
    }

    /// Returns a watch on the reason of the last refused call. The origin refuses none unless this
    /// library has a bug. [`EngineStats::refused`] counts them.
    pub fn refusal(&self) -> tokio::sync::watch::Receiver<Option<CallError>> {
        self.driver.refusal()
    }
}

/// The decision of one placement.
struct PlacementDecision<'g> {
    region_decision: RegionDecision<'g>,
    /// Time of the charge by the origin's clock, µs; `None` for a charge to a grant of this node.
    charged_us: Option<u64>,
}

impl<'g> PlacementDecision<'g> {
    fn here(region_decision: RegionDecision<'g>) -> Self {
        Self { region_decision, charged_us: None }
    }
}

/// The place that decides a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum CheckOwner {
    /// A partition of this region's origin.
    Partition(u16),
    /// A peer region, by its position among the regions.
    PeerRegion(usize),
}

/// Checks of one request that are decided at the same place, and their positions in it.
struct PlacementGroup<'c, 'g, 'k> {
    place: CheckOwner,
    places: Vec<usize>,
    checks: Vec<&'c RegionCheck<'g, 'k>>,
}

impl PlacementGroup<'_, '_, '_> {
    fn is_cross_region(&self) -> bool {
        matches!(self.place, CheckOwner::PeerRegion(_))
    }
}

/// Groups checks by the place that decides them.
fn by_place<'c, 'g, 'k>(checks: &[&'c RegionCheck<'g, 'k>]) -> Vec<PlacementGroup<'c, 'g, 'k>> {
    let mut groups: Vec<PlacementGroup<'c, 'g, 'k>> = Vec::with_capacity(1);
    for (at, &check) in checks.iter().enumerate() {
        let place =
            owner(check).map_or_else(|| CheckOwner::Partition(check.partition()), CheckOwner::PeerRegion);
        match groups.iter_mut().find(|group| group.place == place) {
            Some(group) => {
                group.places.push(at);
                group.checks.push(check);
            }
            None => groups.push(PlacementGroup { place, places: vec![at], checks: vec![check] }),
        }
    }
    groups
}

/// Returns the decision before any reply. A limit that is not checked, because another denied,
/// shows 0 units: never more than the truth.
fn undecided<'g>(checks: &[&RegionCheck<'g, '_>]) -> RegionDecision<'g> {
    let outcomes = checks.iter().map(|check| outcome_of(&check.node_check, 0, None)).collect();
    RegionDecision { decision: allowed(outcomes), source: DecisionSource::Global, missing_reply: None }
}

impl<'g> RegionDecision<'g> {
    /// Adds the decision of one placement.
    fn add(&mut self, group: &PlacementGroup<'_, 'g, '_>, other: &Self) {
        let Decision { outcomes: Outcomes::Many(outcomes), decided } = &mut self.decision else { return };
        for (place, outcome) in group.places.iter().zip(other.decision.outcomes()) {
            outcomes[*place] = *outcome;
        }
        if let RequestVerdict::Denied { by } = other.decision.decided {
            *decided = RequestVerdict::Denied { by: group.places[by] };
        }
        self.source = self.source.max(other.source);
        self.missing_reply = other.missing_reply.or(self.missing_reply);
    }
}

fn allowed(outcomes: Vec<Outcome<'_>>) -> Decision<'_> {
    Decision { outcomes: Outcomes::Many(outcomes), decided: RequestVerdict::Allowed }
}

/// Whether memory cannot decide the request.
fn needs_origin(decision: &Decision<'_>) -> bool {
    decision.denied_by().is_some_and(|outcome| outcome.verdict().retry() == Some(Retry::AskOrigin))
}

/// Converts the origin's resolution to a decision.
fn resolved<'g>(group: &[&RegionCheck<'g, '_>], resolution: &Resolution) -> Decision<'g> {
    let (remaining, denied) = match resolution {
        Resolution::Unanswered => (&[][..], None),
        Resolution::Allowed { remaining, .. } => (&remaining[..], None),
        Resolution::Denied { by, remaining, retry_us } => (&remaining[..], Some((*by, *retry_us))),
    };
    let outcome = |(place, check): (usize, &&RegionCheck<'g, '_>)| {
        let denied = denied.filter(|(by, _)| *by == place).map(|(_, retry_us)| retry_us);
        outcome_of(&check.node_check, remaining.get(place).copied().unwrap_or(0), denied)
    };
    let outcomes = Outcomes::Many(group.iter().enumerate().map(outcome).collect());
    let decided = denied.map_or(RequestVerdict::Allowed, |(by, _)| RequestVerdict::Denied { by });
    Decision { outcomes, decided }
}

/// Returns the outcome of one limit by the origin's reply: the remaining units, and the retry time
/// of a denial.
fn outcome_of<'g>(check: &Check<'g>, remaining: u32, denied_us: Option<u64>) -> Outcome<'g> {
    let limit = check.gate().limit();
    let remaining = remaining.min(limit.burst());
    let reset_after_us = limit.reset_after_us(remaining);
    let verdict = match denied_us {
        None => Verdict::Allow { remaining, reset_after_us },
        Some(us) => Verdict::Deny { remaining, reset_after_us, retry: retry(check, us) },
    };
    Outcome::new(check.gate(), CheckOutcome { verdict, source: DecidingMeter::Own })
}

/// Returns when a denied request would pass.
fn retry(check: &Check<'_>, retry_us: u64) -> Retry {
    if check.gate().limit().is_blocked() {
        Retry::Blocked
    } else if retry_us >= NEVER_US {
        Retry::CostAboveBurst
    } else {
        Retry::After(retry_us)
    }
}
