//! Requests to the engine, and their charges.

use std::sync::Arc;

use crate::digest::{Digest, KeySpace};
use crate::limit::Limit;
use crate::origin::Terms;
use crate::table::Check;

/// Identifier of a waiting request, chosen by the caller.
pub type Ticket = u64;

/// A meter of a request, in full.
#[derive(Clone, Debug)]
pub struct MeterRef {
    /// Its name at the origin, unambiguous within its partition.
    pub key: Arc<[u8]>,
    /// The limit, marked [`Limit::at_origin`].
    pub limit: Limit,
    /// The limit as the origin counts it.
    pub terms: Terms,
    /// Its key space on this node.
    pub space: KeySpace,
    /// Its name on this node.
    pub digest: Digest,
}

/// A request that the table could not decide.
#[derive(Clone, Debug)]
pub struct EngineRequest {
    /// Identifier chosen by the caller.
    pub ticket: Ticket,
    /// Partition of its meters.
    pub partition: u16,
    /// All limits of the request, with its cost under each.
    pub charges: Vec<Charge>,
}

/// The cost of a request under one limit.
#[derive(Clone, Debug)]
pub struct Charge {
    /// The meter of the limit.
    pub meter: MeterRef,
    /// Units.
    pub cost: u64,
}

/// The place of a charge, for a request that is denied in the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChargeLocation {
    /// At the origin.
    AtOrigin {
        /// Time of the charge, by the origin's clock.
        at_us: u64,
    },
    /// On this node: from a grant, or as usage that the origin does not know of yet.
    OnNode {
        /// Earliest time of the charge, by this node's clock.
        since_us: u64,
    },
}

impl MeterRef {
    /// Returns the check of a cost on the node's slot of the meter.
    pub(super) fn check(&self, cost: u64) -> Check<'_> {
        let Self { limit, space, digest, .. } = self;
        Check { limit, space, digest: *digest, cost }
    }
}

impl Charge {
    /// Returns the check of the charge on the node's slot of the meter.
    pub fn check(&self) -> Check<'_> {
        self.meter.check(self.cost)
    }
}
