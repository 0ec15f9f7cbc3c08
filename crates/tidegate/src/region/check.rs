//! Limits that an origin keeps, and the questions asked of them.

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
    /// What depends on the limit.
    pub class: Class,
    /// Whether those it limits pay: then a limit of class [`Class::Cost`] fails open and not closed.
    pub paid: bool,
    /// How far it may be passed, in millionths of its burst.
    pub tolerance_ppm: u32,
    /// How far it reaches. In a region that knows of no other they are all the same.
    pub regime: Regime,
    /// Of two versions of a limit that processes know, the higher holds.
    pub version: u32,
}

impl RegionPolicy {
    /// What a class asks for, of the first version of a limit.
    pub const fn of(class: Class) -> Self {
        Self { class, paid: false, tolerance_ppm: 0, regime: class.regime(), version: 1 }
    }
}

/// What an origin needs to know of a gate that it keeps, and what takes its place while the origin is gone.
pub(crate) struct OriginLimit {
    pub(super) policy: RegionPolicy,
    /// The regions that have a part in it; nothing for a limit of this one alone.
    pub(super) layout: Option<Arc<RegionLayout>>,
    tenant: Box<str>,
    name: Box<str>,
    /// What the names of its meters begin with.
    prefix: Box<[u8]>,
    /// Meters of this process's part of the limit.
    pub(super) alone: KeySpace,
    /// What is left of all limits of the tenant when they fail open.
    pub(super) open: Gate,
}

impl fmt::Debug for OriginLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("policy", &self.policy).finish_non_exhaustive()
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

    /// As whoever made it calls it; in answers it may be called otherwise.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn prefix(&self) -> &[u8] {
        &self.prefix
    }

    /// The regions that it is counted with.
    pub(super) fn global(&self) -> Option<&RegionLayout> {
        self.layout.as_deref().filter(|_| self.policy.regime == Regime::BestEffort)
    }

    /// What of a limit is for this region to let pass.
    pub(crate) fn limit_here(&self, limit: Limit) -> Limit {
        let shared = self.layout.as_deref().filter(|_| self.policy.regime == Regime::Share);
        shared.map_or(limit, |layout| layout.part(&limit))
    }
}

impl Region {
    /// The limit called `name` of a tenant, kept by the origin.
    pub fn gate(&self, tenant: &str, name: &str, class: Class) -> Result<Gate, UnknownName> {
        let limit = *self.limiter.gate_of(tenant, name)?.limit();
        self.gate_with(tenant, name, limit, RegionPolicy::of(class))
    }

    /// A limit that the limiter was not built with. Questions to it are asked by [`Region::check`]; the limiter alone knows
    /// only what is held of it.
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
        let (held, tenant) = (self.limiter.gate_with_grants(tenant, name, limit)?, tenant.into());
        Ok(held.with_origin_limit(OriginLimit {
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
    /// Asks for one unit on `key` in a region. Unless it is said otherwise, the key also says where the meter is kept.
    pub fn region_check<'g, 'k>(&'g self, key: &'k (impl AsRef<[u8]> + ?Sized)) -> RegionCheck<'g, 'k> {
        let key = key.as_ref();
        RegionCheck { ask: self.key(key), key: Cow::Borrowed(key), placement: None }
    }

    /// The same on a key made of several parts.
    pub fn region_check_of<'g, 'k>(&'g self, parts: &[&[u8]]) -> RegionCheck<'g, 'k> {
        let key = join_parts(parts);
        RegionCheck { ask: self.key(&key), key: Cow::Owned(key), placement: None }
    }

    /// Whether an origin keeps its meters.
    pub fn has_origin(&self) -> bool {
        self.origin_limit().is_some()
    }
}

/// A question that an origin can be asked as well: its key is spelled out.
#[derive(Clone, Debug)]
pub struct RegionCheck<'g, 'k> {
    pub(super) ask: Check<'g>,
    key: Cow<'k, [u8]>,
    placement: Option<&'k [u8]>,
}

impl<'g> From<Check<'g>> for RegionCheck<'g, '_> {
    /// A question that only this process is asked: of a gate that no origin keeps.
    fn from(ask: Check<'g>) -> Self {
        Self { ask, key: Cow::Borrowed(&[]), placement: None }
    }
}

impl<'g, 'k> RegionCheck<'g, 'k> {
    /// The same question for another cost. 0 looks without changing anything.
    #[must_use]
    pub fn cost(self, cost: u64) -> Self {
        Self { ask: self.ask.cost(cost), ..self }
    }

    /// Has the meter kept where `placement` says. The limits of one request that have the same placement are decided by one
    /// call; each of them must have this placement in every request that it is a part of.
    #[must_use]
    pub fn placed_by(self, placement: &'k (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { placement: Some(placement.as_ref()), ..self }
    }

    /// The question as what is held here answers it.
    pub fn ask(&self) -> Check<'g> {
        self.ask
    }

    /// Where its meter is kept.
    pub(super) fn partition(&self) -> u16 {
        partition_of(self.placement.unwrap_or(&self.key))
    }

    /// How its limit is treated.
    ///
    /// # Panics
    /// If no origin keeps the gate: whoever asks by a region meant another one.
    #[expect(
        clippy::panic,
        reason = "to go on would be to count for this process alone what was meant for all"
    )]
    pub(super) fn origin_limit(&self) -> &'g OriginLimit {
        let gate = self.ask.gate();
        let Some(origin_limit) = gate.origin_limit() else {
            panic!("no origin keeps the gate {:?}", gate.name())
        };
        origin_limit
    }

    /// The meter and what is asked of it, spelled out for the origin.
    pub(super) fn charge(&self) -> Charge {
        let (gate, origin_limit) = (self.ask.gate(), self.origin_limit());
        let mut key = origin_limit.prefix.to_vec();
        key.extend_from_slice(&self.key);
        let meter = MeterRef {
            key: key.into(),
            limit: *gate.limit(),
            terms: origin_limit.terms(gate.limit()),
            space: gate.space(),
            digest: self.ask.digest,
        };
        Charge { meter, cost: self.ask.cost }
    }

    pub(super) fn key(&self) -> &[u8] {
        &self.key
    }

    pub(super) fn placement(&self) -> Option<&[u8]> {
        self.placement
    }
}

/// Parts after their lengths, as keys and placements are spelled: no two lists of parts are spelled alike.
pub fn join_parts(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::with_capacity(parts.iter().map(|part| part.len() + 4).sum());
    for part in parts {
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}
