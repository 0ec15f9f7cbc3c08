//! A gate: one named limit of one tenant, and the questions asked of it.

use std::fmt;
use std::sync::Arc;

use tidegate_core::{Digest, KeySpace, Limit};

/// One named limit of one tenant. Cheap to clone; get it once with [`Limiter::gate`](crate::Limiter::gate) and
/// keep it.
#[derive(Clone)]
pub struct Gate {
    name: Arc<str>,
    limit: Limit,
    space: KeySpace,
}

impl Gate {
    pub(crate) fn new(name: Arc<str>, limit: Limit, space: KeySpace) -> Self {
        Self { name, limit, space }
    }

    /// The limit's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What may pass.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// Asks for one unit on `key`. The key is hashed, never stored: its length costs time only.
    #[inline]
    pub fn key(&self, key: impl AsRef<[u8]>) -> Ask<'_> {
        self.ask(self.space.digest(&[key.as_ref()]))
    }

    /// Asks for one unit on a key made of several parts, such as a user and an endpoint. Where one part ends and
    /// the next begins matters: (`a-b`, `c`) and (`a`, `b-c`) are different keys.
    #[inline]
    pub fn parts(&self, parts: &[&[u8]]) -> Ask<'_> {
        self.ask(self.space.digest(parts))
    }

    #[inline]
    fn ask(&self, digest: Digest) -> Ask<'_> {
        Ask { gate: self, digest, cost: 1 }
    }
}

impl fmt::Debug for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gate").field("name", &self.name).field("limit", &self.limit).finish_non_exhaustive()
    }
}

/// A question: may this much pass on this key of this gate?
#[derive(Clone, Copy, Debug)]
pub struct Ask<'g> {
    pub(crate) gate: &'g Gate,
    pub(crate) digest: Digest,
    pub(crate) cost: u64,
}

impl<'g> Ask<'g> {
    /// The same question for another cost. 0 looks without changing anything.
    #[inline]
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Self { cost, ..self }
    }

    /// The gate that is asked.
    pub fn gate(&self) -> &'g Gate {
        self.gate
    }

    #[inline]
    pub(crate) fn to_core(self) -> tidegate_core::Ask<'g> {
        tidegate_core::Ask {
            limit: &self.gate.limit,
            space: &self.gate.space,
            digest: self.digest,
            cost: self.cost,
        }
    }
}
