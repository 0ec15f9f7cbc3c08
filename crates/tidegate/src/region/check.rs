//! Limits with meters at an origin, and the checks on them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use tidegate_core::engine::{Charge, MeterRef};
use tidegate_core::origin::Terms;
use tidegate_core::{Class, KeySpace, Limit, Regime};
use tidegate_origin::partition_of;

use super::Region;
use super::fallback::open_gate;
use super::regions::RegionLayout;
use crate::gate::{Check, Gate};
use crate::limiter::UnknownName;

/// How a region treats a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPolicy {
    /// Class of the limit: selects its behaviour without the origin.
    pub class: Class,
    /// Whether the limited clients pay: then a limit of class [`Class::Cost`] fails open instead of
    /// closed.
    pub paid: bool,
    /// How far requests may exceed the limit, in millionths of its burst.
    pub tolerance_ppm: u32,
    /// How far the limit reaches. Without peer regions, all regimes are equal.
    pub regime: Regime,
    /// Version of the limit: if nodes have different ones, the highest applies.
    pub version: u32,
}

impl RegionPolicy {
    /// Returns the default policy of a class, for version 1 of a limit.
    pub const fn of(class: Class) -> Self {
        Self { class, paid: false, tolerance_ppm: 0, regime: class.regime(), version: 1 }
    }
}

/// The settings of a gate at its origin, and its substitutes while the origin is down.
pub(crate) struct OriginLimit {
    pub(super) policy: RegionPolicy,
    /// Regions that share the limit; `None` for a limit of this region alone.
    pub(super) layout: Option<Arc<RegionLayout>>,
    tenant: Box<str>,
    name: Box<str>,
    /// Prefix of the names of its meters.
    prefix: Box<[u8]>,
    /// Meters of the node share.
    pub(super) alone: KeySpace,
    /// Coarse meter that replaces all limits of the tenant that fail open.
    pub(super) open: Gate,
}

impl fmt::Debug for OriginLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OriginLimit").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl OriginLimit {
    fn terms(&self, limit: &Limit) -> Terms {
        let RegionPolicy { class, tolerance_ppm, version, .. } = self.policy;
        let terms = Terms::new(limit, tolerance_ppm, class.lapse(), version);
        match self.global() {
            Some(layout) => terms.with_cross_region(layout.cross_region(limit, &terms, &self.policy)),
            None => terms,
        }
    }

    pub(super) fn tenant(&self) -> &str {
        &self.tenant
    }

    /// Returns the name that the limit was created with; replies may show another.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// Returns the regions that count the limit together, if its regime is `best_effort`.
    pub(super) fn global(&self) -> Option<&RegionLayout> {
        self.layout.as_deref().filter(|_| self.policy.regime == Regime::BestEffort)
    }

    /// Returns the part of a limit that this region may spend.
    pub(crate) fn limit_here(&self, limit: Limit) -> Limit {
        let shared = self.layout.as_deref().filter(|_| self.policy.regime == Regime::Share);
        shared.map_or(limit, |layout| layout.part(&limit))
    }
}

impl Region {
    /// Returns the gate of the limit `name` of a tenant, with meters at the origin.
    pub fn gate(&self, tenant: &str, name: &str, class: Class) -> Result<Gate, UnknownName> {
        let limit = *self.limiter.gate_of(tenant, name)?.limit();
        self.gate_with(tenant, name, limit, RegionPolicy::of(class))
    }

    /// Returns the gate of a limit that the limiter was not built with. Its checks go through
    /// [`Region::check`]; the limiter alone knows only the grants of this node.
    pub fn gate_with(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
        policy: RegionPolicy,
    ) -> Result<Gate, UnknownName> {
        let alone = self.limiter.gate_with(tenant, &format!("{name}\0alone"), limit)?.space();
        let prefix =
            join_parts(&[self.name.as_bytes(), tenant.as_bytes(), name.as_bytes()]).into_boxed_slice();
        let open = open_gate(&self.limiter, tenant)?;
        let layout = self.peer_regions.as_ref().filter(|_| policy.regime != Regime::Regional);
        let layout = layout.map(|peer_regions| Arc::clone(&peer_regions.layout));
        if let (Regime::Strict, Some(peer_regions)) = (policy.regime, &self.peer_regions) {
            peer_regions.will_forward();
        }
        let (gate, tenant) = (self.limiter.gate_with_grants(tenant, name, limit)?, tenant.into());
        Ok(gate.with_origin_limit(OriginLimit {
            policy,
            layout,
            tenant,
            name: name.into(),
            prefix,
            alone,
            open,
        }))
    }
}

impl Gate {
    /// Makes a check of one unit on `key` in a region. By default, the key is also the placement.
    pub fn region_check<'g, 'k>(&'g self, key: &'k (impl AsRef<[u8]> + ?Sized)) -> RegionCheck<'g, 'k> {
        let key = key.as_ref();
        RegionCheck { node_check: self.key(key), key: Cow::Borrowed(key), placement: None }
    }

    /// The same on a key of several parts.
    pub fn region_check_of<'g, 'k>(&'g self, parts: &[&[u8]]) -> RegionCheck<'g, 'k> {
        let key = join_parts(parts);
        RegionCheck { node_check: self.key(&key), key: Cow::Owned(key), placement: None }
    }

    /// Whether its meters are at an origin.
    pub fn has_origin(&self) -> bool {
        self.origin_limit().is_some()
    }
}

/// A check that the origin can decide too: it includes the full key.
#[derive(Clone, Debug)]
pub struct RegionCheck<'g, 'k> {
    pub(super) node_check: Check<'g>,
    key: Cow<'k, [u8]>,
    placement: Option<&'k [u8]>,
}

impl<'g> From<Check<'g>> for RegionCheck<'g, '_> {
    /// Makes a check that only this node decides, on a gate without an origin.
    fn from(check: Check<'g>) -> Self {
        Self { node_check: check, key: Cow::Borrowed(&[]), placement: None }
    }
}

impl<'g, 'k> RegionCheck<'g, 'k> {
    /// Returns the same check with another cost. A cost of 0 reads the meter and changes nothing.
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Self { node_check: self.node_check.cost(cost), ..self }
    }

    /// Sets the placement of the meter. One call decides all limits of a request that have the same
    /// placement. Each meter must have the same placement in every request.
    #[must_use]
    pub fn placed_by(self, placement: &'k (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { placement: Some(placement.as_ref()), ..self }
    }

    /// Returns the check as the memory of this node decides it.
    pub fn node_check(&self) -> Check<'g> {
        self.node_check
    }

    /// Returns the partition of its meter.
    pub(super) fn partition(&self) -> u16 {
        partition_of(self.placement.unwrap_or(&self.key))
    }

    /// Returns the settings of its limit at the origin.
    ///
    /// # Panics
    /// If the gate has no origin: the caller used the wrong gate.
    #[expect(clippy::panic, reason = "without an origin the limit would count for this node alone")]
    pub(super) fn origin_limit(&self) -> &'g OriginLimit {
        let gate = self.node_check.gate();
        let Some(origin_limit) = gate.origin_limit() else {
            panic!("gate {:?} has no origin: create it with `Region::gate_with`", gate.name())
        };
        origin_limit
    }

    /// Returns the meter and the cost in full, for the origin.
    pub(super) fn charge(&self) -> Charge {
        let (gate, origin_limit) = (self.node_check.gate(), self.origin_limit());
        let mut key = origin_limit.prefix.to_vec();
        key.extend_from_slice(&self.key);
        let meter = MeterRef {
            key: key.into(),
            limit: *gate.limit(),
            terms: origin_limit.terms(gate.limit()),
            space: gate.space(),
            digest: self.node_check.digest,
        };
        Charge { meter, cost: self.node_check.cost }
    }

    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    pub(super) fn placement(&self) -> Option<&[u8]> {
        self.placement
    }
}

/// Encodes the parts of a key or placement, each after its length: different lists of parts have
/// different encodings.
pub fn join_parts(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::with_capacity(parts.iter().map(|part| part.len() + 4).sum());
    for part in parts {
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}
