//! The limiter: limits by name, tenants by name, one table of meters under them.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrayvec::ArrayVec;
use tidegate_core::{
    Algorithm, CheckOutcome, DecidingMeter, Home, KeySpace, Limit, Now, RequestVerdict, Secret, ShareId,
    ShareStats, Shares, Table, TableError, Timeline, TooManyLimits, Verdict,
};

use crate::clock::{Clock, SystemClock};
use crate::decision::{Decision, LIMITS_INLINE_MAX, LIMITS_PER_CHECK_MAX, Outcome, Outcomes};
use crate::gate::{Check, Gate};
use crate::reservation::{Ledger, Reservation, ReserveError, ReserveOutcome};

/// Memory of the table unless another amount is set: room for two million keys.
pub const MEMORY_BYTES_DEFAULT: usize = 64 << 20;

/// Bytes per key of a table that is sized by keys: half a line, and about half as much again that
/// stays free. Higher: more keys in their home line, so faster, and fewer evictions for lack of a
/// free slot; more memory.
const BYTES_PER_KEY: usize = 49;

/// How many meters of a batch are fetched from memory in one go, and how many checks share one
/// reading of the clock. Higher: more misses overlap, until the processor has no more buffers for
/// them.
const CHECKS_PER_GROUP: usize = 8;

/// Checks of a batch that are decided together, each with the home of its meter.
type CheckBatch<'g> = ArrayVec<(Home, Check<'g>), CHECKS_PER_GROUP>;

/// The same for requests under several limits, which have several meters each.
const REQUESTS_PER_GROUP: usize = 4;

/// Requests of a batch that are decided together, with the checks of all of them in sequence.
#[derive(Default)]
struct RequestBatch<'g> {
    checks: ArrayVec<Check<'g>, { REQUESTS_PER_GROUP * LIMITS_INLINE_MAX }>,
    /// Number of limits of each request. The batch stores no checks of a request with more than
    /// [`LIMITS_INLINE_MAX`].
    limits: ArrayVec<usize, REQUESTS_PER_GROUP>,
}

impl<'g> RequestBatch<'g> {
    fn clear(&mut self) {
        self.checks.clear();
        self.limits.clear();
    }

    #[inline]
    fn push(&mut self, request: impl IntoIterator<Item = Check<'g>>) {
        let (first, mut limits) = (self.checks.len(), 0);
        for check in request {
            limits += 1;
            if limits <= LIMITS_INLINE_MAX {
                self.checks.push(check);
            }
        }
        if limits > LIMITS_INLINE_MAX {
            self.checks.truncate(first);
        }
        self.limits.push(limits);
    }

    /// Returns the checks of each request.
    #[inline]
    fn iter(&self) -> impl Iterator<Item = Result<&[Check<'g>], TooManyLimits>> {
        let mut rest = self.checks.as_slice();
        self.limits.iter().map(move |&limits| {
            if limits > LIMITS_INLINE_MAX {
                return Err(too_many(limits));
            }
            let (checks, after) = rest.split_at(limits);
            rest = after;
            Ok(checks)
        })
    }
}

const fn too_many(limits: usize) -> TooManyLimits {
    TooManyLimits { limits, limits_max: LIMITS_INLINE_MAX }
}

/// The tenant of keys without a tenant.
const DEFAULT_TENANT: &str = "";

/// An outcome that is not decided yet.
const NOT_DECIDED: CheckOutcome =
    CheckOutcome { verdict: Verdict::Allow { remaining: 0, reset_after_us: 0 }, source: DecidingMeter::Own };

/// A rate limiter that decides from this process's memory. All threads share it; it needs no
/// runtime.
///
/// # Panics
/// Every call that takes a [`Check`] panics if its gate belongs to another limiter.
///
/// ```
/// use std::time::Duration;
/// use tidegate::{Limit, Limiter};
///
/// let minute = Duration::from_secs(60);
/// let limiter = Limiter::builder()
///     .limit("per_user", Limit::gcra(100, minute)?.with_burst(20)?)
///     .limit("per_address", Limit::sliding_window(1_000, minute)?)
///     .build()?;
/// let (per_user, per_address) = (limiter.gate("per_user")?, limiter.gate("per_address")?);
///
/// // One limit:
/// assert!(limiter.check(per_user.key("alice")).is_allowed());
///
/// // Several, all or nothing:
/// let decision = limiter.check_all(&[per_user.key("alice").cost(5), per_address.key("192.0.2.7")])?;
/// assert!(decision.is_allowed());
/// assert_eq!(decision.outcomes()[0].remaining(), 14);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Limiter {
    id: LimiterId,
    table: Table,
    clock: Box<dyn Clock>,
    timeline: Timeline,
    secret: Secret,
    limits: Vec<(Arc<str>, Limit)>,
    tenants: Vec<(String, ShareId)>,
    pub(crate) ledger: Ledger,
}

/// The identity of a limiter within its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LimiterId(u64);

impl LimiterId {
    fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// No limit, or no tenant, of that name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnknownName {
    /// The limiter has no such limit.
    Limit(String),
    /// The limiter has no such tenant.
    Tenant(String),
}

impl fmt::Display for UnknownName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limit(name) => write!(f, "limit: there is none called {name:?}"),
            Self::Tenant(name) => write!(f, "tenant: there is none called {name:?}"),
        }
    }
}

impl std::error::Error for UnknownName {}

impl Limiter {
    /// A limiter to be described.
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// The limit called `limit`.
    pub fn gate(&self, limit: &str) -> Result<Gate, UnknownName> {
        self.gate_of(DEFAULT_TENANT, limit)
    }

    /// The limit called `limit`, for the keys of `tenant` only.
    pub fn gate_of(&self, tenant: &str, limit: &str) -> Result<Gate, UnknownName> {
        let share = self.share_of(tenant)?;
        let found = self.limits.iter().find(|(name, _)| **name == *limit);
        let (name, limit) = found.ok_or_else(|| UnknownName::Limit(limit.to_owned()))?;
        Ok(Gate::new(self.id, Arc::clone(name), *limit, KeySpace::new(&self.secret, share, name)))
    }

    /// Returns the gate of a limit that the limiter was not built with, such as that of a later
    /// rule. A name and an algorithm always select the same meters, even if the limit has changed.
    /// The meters of a sliding window start anew when its period changes.
    pub fn gate_with(&self, tenant: &str, name: &str, limit: Limit) -> Result<Gate, UnknownName> {
        let share = self.share_of(tenant)?;
        let space = match limit.algorithm() {
            Algorithm::Gcra => format!("{name}\0gcra"),
            Algorithm::SlidingWindow => format!("{name}\0window\0{}", limit.period_us()),
        };
        Ok(Gate::new(self.id, name.into(), limit, KeySpace::new(&self.secret, share, &space)))
    }

    /// Returns the gate of a limit with meters at an origin; the table holds its grants. A name
    /// always selects the same slots, even if the limit, its algorithm or its period changes. The
    /// names of meters at the origin do the same. With two slots for one meter, a node would report
    /// usage of one slot against the grant of the other. A slot records the limit of its grant.
    #[cfg(feature = "region")]
    pub(crate) fn gate_with_grants(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
    ) -> Result<Gate, UnknownName> {
        let share = self.share_of(tenant)?;
        let space = KeySpace::new(&self.secret, share, &format!("{name}\0held"));
        Ok(Gate::new(self.id, name.into(), limit, space))
    }

    /// Decides one check.
    #[expect(clippy::inline_always, reason = "inlining removes results that the caller does not read")]
    #[inline(always)]
    pub fn check<'g>(&self, check: Check<'g>) -> Outcome<'g> {
        let table_check = check.of(self.id);
        let home = self.table.home(&table_check);
        // The clock is read while the meter is on its way.
        self.table.prefetch_wide(home);
        Outcome::new(check.gate, self.table.check_at(home, self.now(), &table_check))
    }

    /// Decides a request under several limits as one: all are charged, or none is.
    #[inline]
    pub fn check_all<'g>(&self, checks: &[Check<'g>]) -> Result<Decision<'g>, TooManyLimits> {
        // The clock is read while the meters are on their way.
        self.prefetch(checks);
        let now = self.now();
        self.prefetch_further(checks);
        self.decide_all(now, checks)
    }

    #[inline]
    fn decide_all<'g>(&self, now: Now, checks: &[Check<'g>]) -> Result<Decision<'g>, TooManyLimits> {
        self.decide_checks(checks, |own, outcomes| self.table.check_all(now, own, outcomes))
    }

    /// Prefetches the meters of checks that follow soon, while the caller does other work. This
    /// pays off if requests are known before they are decided, such as in a queue.
    #[inline]
    pub fn prefetch(&self, checks: &[Check<'_>]) {
        for check in checks {
            self.table.prefetch(self.table.home(&check.of(self.id)));
        }
    }

    /// Decides independent checks in order, and passes each outcome to `each` with the position of
    /// its check. Much cheaper than one by one: while one check is decided, the meters of the next
    /// are on their way from memory. The limiter takes checks as it needs them, so an iterator that
    /// creates them is best.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Limit, Limiter};
    /// # let limiter = Limiter::builder().limit("per_user", Limit::gcra(1, Duration::from_secs(60))?).build()?;
    /// # let per_user = limiter.gate("per_user")?;
    /// let users = ["alice", "bob", "alice"];
    /// let mut denied = Vec::new();
    /// limiter.check_each(users.iter().map(|user| per_user.key(user)), |at, outcome| {
    ///     if !outcome.is_allowed() {
    ///         denied.push(users[at]);
    ///     }
    /// });
    /// assert_eq!(denied, ["alice"]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn check_each<'g>(
        &self,
        checks: impl IntoIterator<Item = Check<'g>>,
        mut each: impl FnMut(usize, Outcome<'g>),
    ) {
        // Three groups are in progress: one is decided, one is in the cache, and one is on its way
        // from memory. A group is fetched at once, so that its cache misses overlap.
        let mut checks = checks.into_iter().fuse();
        let mut groups: [CheckBatch<'g>; 3] = std::array::from_fn(|_| CheckBatch::new());
        self.fetch(&mut checks, &mut groups[0]);
        self.fetch(&mut checks, &mut groups[1]);
        let (mut turn, mut at) = (0, 0);
        while !groups[turn % 3].is_empty() {
            self.fetch(&mut checks, &mut groups[(turn + 2) % 3]);
            for (home, check) in &groups[(turn + 1) % 3] {
                self.table.prefetch_further(*home, &check.table_check());
            }
            let now = self.now();
            for (home, check) in &groups[turn % 3] {
                each(at, Outcome::new(check.gate, self.table.check_at(*home, now, &check.table_check())));
                at += 1;
            }
            turn += 1;
        }
    }

    /// Fills a group with the next few checks, then prefetches their meters in sequence. By a
    /// profile, the processor waits at each prefetch, and adjacent ones wait together. With a
    /// digest between any two, a batch over ten million keys took half as long again.
    #[inline]
    fn fetch<'g>(&self, checks: &mut impl Iterator<Item = Check<'g>>, group: &mut CheckBatch<'g>) {
        group.clear();
        group.extend(checks.take(CHECKS_PER_GROUP).map(|check| (self.table.home(&check.of(self.id)), check)));
        group.iter().for_each(|(home, _)| self.table.prefetch(*home));
    }

    /// Decides independent requests under several limits, in order. It is to [`Limiter::check_all`]
    /// as [`Limiter::check_each`] is to [`Limiter::check`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Limit, Limiter};
    /// # let minute = Duration::from_secs(60);
    /// # let limiter = Limiter::builder()
    /// #     .limit("per_user", Limit::gcra(1, minute)?)
    /// #     .limit("per_address", Limit::gcra(9, minute)?)
    /// #     .build()?;
    /// # let (per_user, per_address) = (limiter.gate("per_user")?, limiter.gate("per_address")?);
    /// let queue = [("alice", "192.0.2.7"), ("bob", "192.0.2.7"), ("alice", "192.0.2.8")];
    /// let mut denied = Vec::new();
    /// let requests = queue.iter().map(|(user, address)| [per_user.key(user), per_address.key(address)]);
    /// limiter.check_all_each(requests, |at, decision| {
    ///     if !decision.is_ok_and(|decision| decision.is_allowed()) {
    ///         denied.push(queue[at]);
    ///     }
    /// });
    /// assert_eq!(denied, [("alice", "192.0.2.8")]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn check_all_each<'g, R: IntoIterator<Item = Check<'g>>>(
        &self,
        requests: impl IntoIterator<Item = R>,
        mut each: impl FnMut(usize, Result<Decision<'g>, TooManyLimits>),
    ) {
        // Three groups, as in `check_each`.
        let mut requests = requests.into_iter().fuse();
        let mut groups: [RequestBatch<'g>; 3] = std::array::from_fn(|_| RequestBatch::default());
        self.fetch_all(&mut requests, &mut groups[0]);
        self.fetch_all(&mut requests, &mut groups[1]);
        let (mut turn, mut at) = (0, 0);
        while !groups[turn % 3].limits.is_empty() {
            self.fetch_all(&mut requests, &mut groups[(turn + 2) % 3]);
            self.prefetch_further(&groups[(turn + 1) % 3].checks);
            let now = self.now();
            for checks in groups[turn % 3].iter() {
                each(at, checks.and_then(|checks| self.decide_all(now, checks)));
                at += 1;
            }
            turn += 1;
        }
    }

    #[inline]
    fn fetch_all<'g, R: IntoIterator<Item = Check<'g>>>(
        &self,
        requests: &mut impl Iterator<Item = R>,
        group: &mut RequestBatch<'g>,
    ) {
        group.clear();
        requests.take(REQUESTS_PER_GROUP).for_each(|checks| group.push(checks));
        self.prefetch(&group.checks);
    }

    /// Prefetches the meters that do not lie in their home line, which must be in the cache.
    #[inline]
    fn prefetch_further(&self, checks: &[Check<'_>]) {
        for check in checks {
            let table_check = check.table_check();
            self.table.prefetch_further(self.table.home(&table_check), &table_check);
        }
    }

    /// Sets the cost of a request aside under all its limits, or under none. The reservation counts
    /// against the limits until it is committed with the actual cost, or given back.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tidegate::{Limit, Limiter, ReserveOutcome};
    /// # let limiter = Limiter::builder().limit("tokens", Limit::gcra(1_000, Duration::from_secs(60))?).build()?;
    /// # let tokens = limiter.gate("tokens")?;
    /// // An estimate before the work, the truth after it.
    /// if let ReserveOutcome::Held(held) = limiter.reserve(&[tokens.key("alice").cost(400)])? {
    ///     held.commit_actual(250);
    /// }
    /// assert_eq!(limiter.check(tokens.key("alice").cost(0)).remaining(), 750);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserve<'l, 'g>(&'l self, checks: &[Check<'g>]) -> Result<ReserveOutcome<'l, 'g>, ReserveError> {
        if checks.len() > LIMITS_INLINE_MAX {
            return Err(too_many(checks.len()).into());
        }
        self.sweep();
        let now = self.now();
        let decision =
            self.decide_checks(checks, |own, outcomes| self.table.reserve_all(now, own, outcomes))?;
        if !decision.is_allowed() {
            return Ok(ReserveOutcome::Denied(decision));
        }
        Reservation::enter(self, checks, decision).map(ReserveOutcome::Held)
    }

    /// Gives back expired reservations. [`Limiter::reserve`] does so too; call it where
    /// reservations are rare.
    pub fn sweep(&self) {
        self.ledger.sweep(self.now(), &self.table);
    }

    /// Charges a cost that was spent already, without a check. The meter may go into debt.
    pub fn charge(&self, check: Check<'_>) {
        self.table.charge(self.now(), &check.of(self.id));
    }

    /// Gives a charged cost back. One that an overflow meter was charged stays there until it
    /// drains.
    pub fn refund(&self, check: Check<'_>) {
        self.table.refund(self.now(), &check.of(self.id));
    }

    /// Raises a meter to at least the cost of `check`: usage that another system, such as an
    /// upstream, reports.
    pub fn raise(&self, check: Check<'_>) {
        self.table.merge(self.now(), &check.of(self.id));
    }

    /// Clears the usage of a key.
    pub fn reset(&self, check: Check<'_>) {
        self.table.reset(self.now(), &check.of(self.id));
    }

    /// Returns the fill level, evictions and overflow of the default tenant's share of the table.
    pub fn stats(&self) -> ShareStats {
        self.table.stats(Shares::FIRST)
    }

    /// Returns the fill level, evictions and overflow of a tenant's share of the table.
    pub fn stats_of(&self, tenant: &str) -> Result<ShareStats, UnknownName> {
        self.share_of(tenant).map(|share| self.table.stats(share))
    }

    /// The memory of the table, in use or not.
    pub fn memory_bytes(&self) -> usize {
        self.table.bytes()
    }

    #[inline]
    pub(crate) fn now(&self) -> Now {
        self.timeline.now(|| self.clock.now())
    }

    pub(crate) fn id(&self) -> LimiterId {
        self.id
    }

    pub(crate) fn table(&self) -> &Table {
        &self.table
    }

    /// Returns the wall clock in microseconds since the Unix epoch, for responses that name an
    /// instant.
    #[cfg(feature = "http")]
    pub fn wall_us(&self) -> u64 {
        self.clock.now().wall_us()
    }

    fn share_of(&self, tenant: &str) -> Result<ShareId, UnknownName> {
        let found = self.tenants.iter().find(|(name, _)| name == tenant);
        found.map(|(_, share)| *share).ok_or_else(|| UnknownName::Tenant(tenant.to_owned()))
    }

    #[inline]
    fn decide_checks<'g>(
        &self,
        checks: &[Check<'g>],
        decide: impl FnOnce(
            &[tidegate_core::Check<'_>],
            &mut [CheckOutcome],
        ) -> Result<RequestVerdict, TooManyLimits>,
    ) -> Result<Decision<'g>, TooManyLimits> {
        if checks.len() > LIMITS_INLINE_MAX {
            return self.decide_many_checks(checks, decide);
        }
        // Filled in place: a collected `ArrayVec` would be copied here with its whole capacity.
        let mut table_checks = ArrayVec::<_, LIMITS_INLINE_MAX>::new();
        let mut table_outcomes = ArrayVec::<_, LIMITS_INLINE_MAX>::new();
        for check in checks {
            table_checks.push(check.of(self.id));
            table_outcomes.push(NOT_DECIDED);
        }
        let decided = decide(&table_checks, &mut table_outcomes)?;
        let mut outcomes = ArrayVec::new();
        for (check, outcome) in checks.iter().zip(&table_outcomes) {
            outcomes.push(Outcome::new(check.gate, *outcome));
        }
        Ok(Decision { outcomes: Outcomes::Few(outcomes), decided })
    }

    #[cold]
    fn decide_many_checks<'g>(
        &self,
        checks: &[Check<'g>],
        decide: impl FnOnce(
            &[tidegate_core::Check<'_>],
            &mut [CheckOutcome],
        ) -> Result<RequestVerdict, TooManyLimits>,
    ) -> Result<Decision<'g>, TooManyLimits> {
        if checks.len() > LIMITS_PER_CHECK_MAX {
            return Err(TooManyLimits { limits: checks.len(), limits_max: LIMITS_PER_CHECK_MAX });
        }
        let table_checks: Vec<_> = checks.iter().map(|check| check.of(self.id)).collect();
        let mut table_outcomes = vec![NOT_DECIDED; checks.len()];
        let decided = decide(&table_checks, &mut table_outcomes)?;
        let outcomes = checks
            .iter()
            .zip(table_outcomes)
            .map(|(check, outcome)| Outcome::new(check.gate, outcome))
            .collect();
        Ok(Decision { outcomes: Outcomes::Many(outcomes), decided })
    }
}

/// Describes a [`Limiter`].
#[derive(Debug)]
pub struct Builder {
    memory_bytes: usize,
    limits: Vec<(Arc<str>, Limit)>,
    tenants: Vec<(String, u32)>,
    clock: Option<Box<dyn Clock>>,
    secret: Option<Secret>,
}

/// Why a limiter cannot be built.
#[derive(Debug)]
pub enum BuildError {
    /// Two limits have the same name.
    LimitTwice(String),
    /// Two tenants have the same name.
    TenantTwice(String),
    /// The system gave no random bytes for the secret under which keys are hashed.
    Secret(String),
    /// The table cannot be made.
    Table(TableError),
}

impl fmt::Display for BuildError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LimitTwice(name) => write!(f, "limit: {name:?} is given twice"),
            Self::TenantTwice(name) => write!(f, "tenant: {name:?} is given twice"),
            Self::Secret(reason) => write!(f, "secret: the system has no random bytes: {reason}"),
            Self::Table(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for BuildError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Table(error) => Some(error),
            _ => None,
        }
    }
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            memory_bytes: MEMORY_BYTES_DEFAULT,
            limits: Vec::new(),
            tenants: Vec::new(),
            clock: None,
            secret: None,
        }
    }
}

impl Builder {
    /// Adds a limit under a name.
    #[must_use]
    pub fn limit(mut self, name: impl AsRef<str>, limit: Limit) -> Self {
        self.limits.push((name.as_ref().into(), limit));
        self
    }

    /// Adds a tenant with a share of the table of its own, `weight` parts of the sum of all. No
    /// traffic of one tenant changes a decision of another. Once there are tenants, keys of no
    /// tenant have a share of weight 1.
    #[must_use]
    pub fn tenant(mut self, name: impl Into<String>, weight: u32) -> Self {
        self.tenants.push((name.into(), weight));
        self
    }

    /// The memory of the table: all that it will ever take. More: more keys before any is
    /// forgotten.
    #[must_use]
    pub fn memory_bytes(mut self, bytes: usize) -> Self {
        self.memory_bytes = bytes;
        self
    }

    /// The memory of the table, as the number of keys that it holds comfortably.
    #[must_use]
    pub fn keys(self, keys: usize) -> Self {
        self.memory_bytes(keys.saturating_mul(BYTES_PER_KEY).saturating_add(1 << 16))
    }

    /// Another source of time than the system's.
    #[must_use]
    pub fn clock(mut self, clock: impl Clock + 'static) -> Self {
        self.clock = Some(Box::new(clock));
        self
    }

    /// The secret under which keys are hashed, instead of a random one. For runs that must repeat
    /// exactly.
    #[must_use]
    pub fn secret(mut self, secret: Secret) -> Self {
        self.secret = Some(secret);
        self
    }

    /// Takes the memory and builds the limiter.
    pub fn build(self) -> Result<Limiter, BuildError> {
        if let Some(name) = first_repeated(self.limits.iter().map(|(name, _)| &**name)) {
            return Err(BuildError::LimitTwice(name.to_owned()));
        }
        let names = self.tenants.iter().map(|(name, _)| name.as_str());
        if let Some(name) = first_repeated(std::iter::once(DEFAULT_TENANT).chain(names)) {
            return Err(BuildError::TenantTwice(name.to_owned()));
        }
        let mut shares = Shares::single();
        let mut tenants = vec![(DEFAULT_TENANT.to_owned(), Shares::FIRST)];
        tenants.extend(self.tenants.into_iter().map(|(name, weight)| (name, shares.add(weight))));
        Ok(Limiter {
            id: LimiterId::next(),
            table: Table::new(self.memory_bytes, &shares).map_err(BuildError::Table)?,
            clock: self.clock.unwrap_or_else(|| Box::new(SystemClock::new())),
            timeline: Timeline::new(),
            secret: self.secret.map_or_else(random_secret, Ok)?,
            limits: self.limits,
            tenants,
            ledger: Ledger::default(),
        })
    }
}

fn first_repeated<'a>(names: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut seen = std::collections::HashSet::new();
    names.into_iter().find(|name| !seen.insert(*name))
}

/// Returns a random number, as a unique name for a node.
#[cfg(feature = "region")]
pub(crate) fn random_name() -> Result<u64, BuildError> {
    getrandom::u64().map_err(|error| BuildError::Secret(error.to_string()))
}

#[expect(clippy::disallowed_methods, reason = "the seed is random unless one is given")]
fn random_secret() -> Result<Secret, BuildError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|error| BuildError::Secret(error.to_string()))?;
    Ok(Secret::from_bytes(bytes))
}
