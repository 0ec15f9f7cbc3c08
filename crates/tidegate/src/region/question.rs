//! Limits that an origin keeps, and the questions asked of them.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use tidegate_core::engine::{Charge, MeterRef};
use tidegate_core::origin::Terms;
use tidegate_core::{Class, KeySpace, Limit, Regime};
use tidegate_origin::partition_of;

use super::Region;
use super::ladder::open_gate;
use super::regions::Layout;
use crate::gate::{Ask, Gate};
use crate::limiter::UnknownName;

/// How a region treats a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
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

impl Policy {
    /// What a class asks for, of the first version of a limit.
    pub const fn of(class: Class) -> Self {
        Self { class, paid: false, tolerance_ppm: 0, regime: class.regime(), version: 1 }
    }
}

/// What an origin needs to know of a gate that it keeps, and what takes its place while the origin is gone.
pub(crate) struct Kept {
    pub(super) policy: Policy,
    /// The regions that have a part in it; nothing for a limit of this one alone.
    pub(super) layout: Option<Arc<Layout>>,
    tenant: Box<str>,
    name: Box<str>,
    /// What the names of its meters begin with.
    prefix: Box<[u8]>,
    /// Meters of this process's part of the limit.
    pub(super) alone: KeySpace,
    /// What is left of all limits of the tenant when they fail open.
    pub(super) open: Gate,
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept").field("policy", &self.policy).finish_non_exhaustive()
    }
}

impl Kept {
    fn terms(&self, limit: &Limit) -> Terms {
        let Policy { class, tolerance_ppm, version, .. } = self.policy;
        let terms = Terms::new(limit, tolerance_ppm, class.lapse(), version);
        match self.global() {
            Some(layout) => terms.with_abroad(layout.abroad(limit, &terms, &self.policy)),
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
    pub(super) fn global(&self) -> Option<&Layout> {
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
        self.gate_with(tenant, name, limit, Policy::of(class))
    }

    /// A limit that the limiter was not built with. Questions to it are asked by [`Region::check`]; the limiter alone knows
    /// only what is held of it.
    pub fn gate_with(
        &self,
        tenant: &str,
        name: &str,
        limit: Limit,
        policy: Policy,
    ) -> Result<Gate, UnknownName> {
        let alone = self.limiter.gate_with(tenant, &format!("{name}\0alone"), limit)?.space();
        let prefix = joined(&[self.name.as_bytes(), tenant.as_bytes(), name.as_bytes()]).into_boxed_slice();
        let open = open_gate(&self.limiter, tenant)?;
        let layout = self.neighbours.as_ref().filter(|_| policy.regime != Regime::Regional);
        let layout = layout.map(|neighbours| Arc::clone(&neighbours.layout));
        if let (Regime::Strict, Some(neighbours)) = (policy.regime, &self.neighbours) {
            neighbours.will_forward();
        }
        let (held, tenant) = (self.limiter.gate_held(tenant, name, limit)?, tenant.into());
        Ok(held.kept_as(Kept { policy, layout, tenant, name: name.into(), prefix, alone, open }))
    }
}

impl Gate {
    /// Asks for one unit on `key` in a region. Unless it is said otherwise, the key also says where the meter is kept.
    pub fn question<'g, 'k>(&'g self, key: &'k (impl AsRef<[u8]> + ?Sized)) -> Question<'g, 'k> {
        let key = key.as_ref();
        Question { ask: self.key(key), key: Cow::Borrowed(key), placement: None }
    }

    /// The same on a key made of several parts.
    pub fn question_of<'g, 'k>(&'g self, parts: &[&[u8]]) -> Question<'g, 'k> {
        let key = joined(parts);
        Question { ask: self.key(&key), key: Cow::Owned(key), placement: None }
    }

    /// Whether an origin keeps its meters.
    pub fn is_kept(&self) -> bool {
        self.kept().is_some()
    }
}

/// A question that an origin can be asked as well: its key is spelled out.
#[derive(Clone, Debug)]
pub struct Question<'g, 'k> {
    pub(super) ask: Ask<'g>,
    key: Cow<'k, [u8]>,
    placement: Option<&'k [u8]>,
}

impl<'g> From<Ask<'g>> for Question<'g, '_> {
    /// A question that only this process is asked: of a gate that no origin keeps.
    fn from(ask: Ask<'g>) -> Self {
        Self { ask, key: Cow::Borrowed(&[]), placement: None }
    }
}

impl<'g, 'k> Question<'g, 'k> {
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
    pub fn ask(&self) -> Ask<'g> {
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
    pub(super) fn kept(&self) -> &'g Kept {
        let gate = self.ask.gate();
        let Some(kept) = gate.kept() else { panic!("no origin keeps the gate {:?}", gate.name()) };
        kept
    }

    /// The meter and what is asked of it, spelled out for the origin.
    pub(super) fn charge(&self) -> Charge {
        let (gate, kept) = (self.ask.gate(), self.kept());
        let mut key = kept.prefix.to_vec();
        key.extend_from_slice(&self.key);
        let meter = MeterRef {
            key: key.into(),
            limit: *gate.limit(),
            terms: kept.terms(gate.limit()),
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
pub fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut key = Vec::with_capacity(parts.iter().map(|part| part.len() + 4).sum());
    for part in parts {
        key.extend_from_slice(part.len().to_string().as_bytes());
        key.push(b':');
        key.extend_from_slice(part);
    }
    key
}
