//! A gate: one named limit of one tenant, and the questions asked of it.

use std::fmt;
use std::sync::Arc;

use tidegate_core::{Digest, KeySpace, Limit};

use crate::limiter::LimiterId;
#[cfg(feature = "region")]
use crate::region::OriginLimit;

/// One named limit of one tenant. Cheap to clone; get it once with [`Limiter::gate`](crate::Limiter::gate) and
/// keep it.
#[derive(Clone)]
pub struct Gate {
    /// The limiter it belongs to.
    limiter: LimiterId,
    name: Arc<str>,
    limit: Limit,
    space: KeySpace,
    /// What the origin knows of it, if one keeps it.
    #[cfg(feature = "region")]
    origin_limit: Option<Arc<OriginLimit>>,
}

impl Gate {
    pub(crate) fn new(limiter: LimiterId, name: Arc<str>, limit: Limit, space: KeySpace) -> Self {
        Self {
            limiter,
            name,
            limit,
            space,
            #[cfg(feature = "region")]
            origin_limit: None,
        }
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What may pass.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The same keys, and the same meters, under another limit: for limits that come with the request. What was spent
    /// under one counts under the other, as the time that it takes to drain. Cells of different windows do not compare:
    /// where the period of a sliding window comes with the request, it has to be a part of the key.
    ///
    /// # Panics
    /// If the limit counts by another algorithm: its meters would mean something else.
    #[must_use]
    pub fn with_limit(&self, limit: Limit) -> Self {
        assert!(self.limit.algorithm() == limit.algorithm(), "the algorithm of a gate cannot change");
        #[cfg(feature = "region")]
        let limit = self
            .origin_limit
            .as_ref()
            .map_or(limit, |origin_limit| origin_limit.limit_here(limit).at_origin());
        Self { limit, ..self.clone() }
    }

    /// The same gate, called something else in answers and headers.
    #[must_use]
    pub fn with_name(&self, name: impl Into<Arc<str>>) -> Self {
        // Not by cloning all of it: gates are shared, and so is the count of who holds their name.
        let Self { limiter, limit, space, .. } = self;
        Self {
            limiter: *limiter,
            name: name.into(),
            limit: *limit,
            space: *space,
            #[cfg(feature = "region")]
            origin_limit: self.origin_limit.clone(),
        }
    }

    /// Asks for one unit on `key`. The key is hashed, never stored: its length costs time only.
    #[inline]
    pub fn key(&self, key: impl AsRef<[u8]>) -> Check<'_> {
        self.check(self.space.digest(&[key.as_ref()]))
    }

    /// Asks for one unit on a key made of several parts, such as a user and an endpoint. Where one part ends and
    /// the next begins matters: (`a-b`, `c`) and (`a`, `b-c`) are different keys.
    #[inline]
    pub fn parts(&self, parts: &[&[u8]]) -> Check<'_> {
        self.check(self.space.digest(parts))
    }

    /// The same gate, kept by an origin.
    #[cfg(feature = "region")]
    pub(crate) fn with_origin_limit(&self, origin_limit: OriginLimit) -> Self {
        let limit = origin_limit.limit_here(self.limit).at_origin();
        Self { limit, origin_limit: Some(Arc::new(origin_limit)), ..self.clone() }
    }

    /// A limit that takes the place of this one, in meters of its own.
    #[cfg(feature = "region")]
    pub(crate) fn substitute(&self, limit: Limit, space: KeySpace) -> Self {
        Self { limit, space, origin_limit: None, ..self.clone() }
    }

    #[cfg(feature = "region")]
    pub(crate) fn origin_limit(&self) -> Option<&OriginLimit> {
        self.origin_limit.as_deref()
    }

    #[cfg(feature = "region")]
    pub(crate) fn space(&self) -> KeySpace {
        self.space
    }

    #[inline]
    fn check(&self, digest: Digest) -> Check<'_> {
        Check { gate: self, digest, cost: 1 }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("name", &self.name).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A question: may this much pass on this key of this gate?
#[derive(Clone, Copy, Debug)]
pub struct Check<'g> {
    pub(crate) gate: &'g Gate,
    pub(crate) digest: Digest,
    pub(crate) cost: u64,
}

impl<'g> Check<'g> {
    /// The same question for another cost. 0 looks without changing anything; a look at a key that the table does
    /// not hold tells of an empty meter, also where a check would find no room for one.
    #[inline]
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }

    /// What is asked for.
    #[inline]
    pub fn requested_cost(&self) -> u64 {
        self.cost
    }

    /// The gate that is asked.
    pub fn gate(&self) -> &'g Gate {
        self.gate
    }

    /// The question as the table of `limiter` takes it.
    #[inline]
    pub(crate) fn of(self, limiter: LimiterId) -> tidegate_core::Check<'g> {
        // In another limiter's table the key would be counted under a limit that is none of its own.
        assert!(self.gate.limiter == limiter, "this gate is of another limiter");
        self.table_check()
    }

    /// The question as a table takes it that is known to be its limiter's.
    #[inline]
    pub(crate) fn table_check(self) -> tidegate_core::Check<'g> {
        tidegate_core::Check {
            limit: &self.gate.limit,
            space: &self.gate.space,
            digest: self.digest,
            cost: self.cost,
        }
    }
}
