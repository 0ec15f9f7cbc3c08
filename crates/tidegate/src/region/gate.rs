//! Limits that an origin keeps, and the questions asked of them.

use std::sync::Arc;

use tidegate_core::engine::MeterRef;
use tidegate_core::origin::{NEVER_US, Terms};
use tidegate_core::{Class, Limit, Retry};

use super::Region;
use crate::gate::{Ask, Gate};
use crate::limiter::UnknownName;

/// One named limit of one tenant, kept by an origin.
#[derive(Clone, Debug)]
pub struct RegionGate {
    /// What is held of it.
    pub(super) held: Gate,
    /// What decides while the origin is gone.
    pub(super) alone: Gate,
    pub(super) class: Class,
    terms: Terms,
    /// What its keys at the origin begin with.
    prefix: Arc<[u8]>,
}

impl Region {
    /// The limit called `name` of a tenant, kept by the origin.
    pub fn gate(&self, tenant: &str, name: &str, class: Class) -> Result<RegionGate, UnknownName> {
        let limit = *self.limiter.gate_of(tenant, name)?.limit();
        self.gate_with(tenant, name, limit, class, 1)
    }

    /// A limit that the limiter was not built with, at the `version` of its rule: of two versions that processes know, the
    /// higher holds.
    pub fn gate_with(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
        class: Class,
        version: u32,
    ) -> Result<RegionGate, UnknownName> {
        let space = |kind: &str| self.limiter.gate_with(tenant, &format!("{name}\0{kind}"), limit);
        let (held, alone) = (space("held")?, space("alone")?);
        let prefix = Arc::from(joined(&[tenant.as_bytes(), name.as_bytes()]));
        let held = held.at_origin(held.space()).with_name(name);
        let terms = Terms::new(&limit, class.tolerance_ppm(), class.lapse(), version);
        Ok(RegionGate { held, alone: alone.with_name(name), class, terms, prefix })
    }
}

impl RegionGate {
    /// Asks about `key`.
    pub fn key<'g, 'k>(&'g self, key: &'k str) -> RegionAsk<'g, 'k> {
        RegionAsk { gate: self, key: key.as_bytes() }
    }

    /// What may pass.
    pub fn limit(&self) -> &Limit {
        self.held.limit()
    }
}

/// A question: may a request pass on this key?
#[derive(Clone, Copy, Debug)]
pub struct RegionAsk<'g, 'k> {
    pub(super) gate: &'g RegionGate,
    pub(super) key: &'k [u8],
}

impl<'g> RegionAsk<'g, '_> {
    /// The question as what is held here answers it.
    pub(super) fn held(&self) -> Ask<'g> {
        self.gate.held.key(self.key)
    }

    /// The meter, spelled out for the origin.
    pub(super) fn meter(&self) -> MeterRef {
        let RegionGate { held, terms, prefix, .. } = self.gate;
        let mut key = prefix.to_vec();
        key.extend_from_slice(self.key);
        let digest = self.held().digest;
        MeterRef { key: key.into(), limit: *held.limit(), terms: *terms, space: held.space(), digest }
    }
}

/// Parts after their lengths: no two lists of parts are spelled alike.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::new();
    for part in parts {
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}

/// When a denied request would pass.
pub(super) fn retry(ask: &Ask<'_>, retry_us: u64) -> Retry {
    let limit = ask.gate().limit();
    if limit.is_blocked() {
        Retry::Blocked
    } else if retry_us >= NEVER_US {
        Retry::CostAboveBurst
    } else {
        Retry::After(retry_us)
    }
}
