//! A gate: the handle of one named limit of one tenant, and the checks made through it.

use std::fmt;
use std::sync::Arc;

use tidegate_core::{Digest, KeySpace, Limit};

use crate::limiter::LimiterId;
#[cfg(feature = "region")]
use crate::region::OriginLimit;

/// One named limit of one tenant. Cheap to clone; get it once with
/// [`Limiter::gate`](crate::Limiter::gate) and keep it.
#[derive(Clone)]
pub struct Gate {
    /// The limiter it belongs to.
    limiter: LimiterId,
    name: Arc<str>,
    limit: Limit,
    space: KeySpace,
    /// The settings of the limit at its origin; `None` without an origin.
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

    /// Returns the limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Returns a gate with the same keys and meters under another limit, for limits that come with
    /// the request. Usage under one limit counts under the other, as the time that it takes to
    /// drain. Cells of different windows do not compare: if the period of a sliding window comes
    /// with the request, it must be part of the key.
    ///
    /// # Panics
    /// If the limit uses another algorithm, because its meters would have another meaning.
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

    /// Returns the same gate with another name in replies and headers.
    #[must_use]
    pub fn with_name(&self, name: impl Into<Arc<str>>) -> Self {
        // Not a full clone: it would touch the reference count of the old name, which all users of
        // the gate share.
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

    /// Makes a check of one unit on `key`. The gate hashes the key and never stores it, so its
    /// length costs time only.
    #[inline]
    pub fn key(&self, key: impl AsRef<[u8]>) -> Check<'_> {
        self.check(self.space.digest(&[key.as_ref()]))
    }

    /// Makes a check of one unit on a key of several parts, such as a user and an endpoint. The
    /// boundaries between parts matter: (`a-b`, `c`) and (`a`, `b-c`) are different keys.
    #[inline]
    pub fn parts(&self, parts: &[&[u8]]) -> Check<'_> {
        self.check(self.space.digest(parts))
    }

    /// Returns the same gate with its meters at an origin.
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

/// The question whether a cost may pass on a key of a gate.
#[derive(Clone, Copy, Debug)]
pub struct Check<'g> {
    pub(crate) gate: &'g Gate,
    pub(crate) digest: Digest,
    pub(crate) cost: u64,
}

impl<'g> Check<'g> {
    /// Returns the same check with another cost. A cost of 0 reads the meter and changes nothing.
    /// For a key that is not in the table it reads an empty meter, even if a check would find no
    /// room for one.
    #[inline]
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }

    /// Returns the cost of the check.
    #[inline]
    pub fn requested_cost(&self) -> u64 {
        self.cost
    }

    /// Returns the gate of the check.
    pub fn gate(&self) -> &'g Gate {
        self.gate
    }

    /// The check as the table of `limiter` takes it.
    #[inline]
    pub(crate) fn of(self, limiter: LimiterId) -> tidegate_core::Check<'g> {
        // In another limiter's table the key would count under an unrelated limit.
        assert!(self.gate.limiter == limiter, "this gate is of another limiter");
        self.table_check()
    }

    /// The check as a table takes it that is known to be its limiter's.
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
