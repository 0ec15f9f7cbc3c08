//! The assembly of a call from meter updates and waiting requests.

use std::collections::BTreeMap;

use super::super::{Charge, EngineRequest};
use super::WaitingRequest;
use super::group::{Waiter, WaitingGroup};
use crate::digest::Digest;
use crate::origin::{self, Call, CheckGroup, MeterUpdate, NodeId, StoreId, UPDATES_PER_CALL_MAX};

/// Placeholder: the sender of the call fills it in.
const STORE_UNKNOWN: StoreId = StoreId { lineage: 0, boot: 0, parent: 0, up_us: 0 };

/// A call before it is sent.
#[derive(Debug)]
pub(super) struct CallDraft {
    pub(super) call: Call,
    pub(super) meters: Vec<Digest>,
    pub(super) groups: Vec<WaitingGroup>,
    /// Position of each meter in the call.
    places: BTreeMap<Digest, u16>,
}

impl Default for CallDraft {
    fn default() -> Self {
        let (updates, checks) = (Vec::new(), Vec::new());
        let node = NodeId(0);
        let call =
            Call { node, sequence: 0, acknowledged: 0, known_us: 0, store: STORE_UNKNOWN, updates, checks };
        Self { call, meters: Vec::new(), groups: Vec::new(), places: BTreeMap::new() }
    }
}

impl CallDraft {
    /// Returns the position of a meter, if the call has an update of it.
    pub(super) fn place(&self, digest: Digest) -> Option<u16> {
        self.places.get(&digest).copied()
    }

    /// Whether the call has room for this request. An origin accepts as many check groups as
    /// meters.
    pub(super) fn has_room_for(&self, request: &EngineRequest, meters_max: usize) -> bool {
        let is_small = self.meters.len() + request.charges.len() <= meters_max;
        self.meters.is_empty() || is_small && self.call.checks.len() < UPDATES_PER_CALL_MAX
    }

    pub(super) fn push(&mut self, digest: Digest, update: MeterUpdate) -> u16 {
        // A call has far fewer updates than sixteen bits can name.
        let place = self.call.updates.len() as u16;
        self.call.updates.push(update);
        self.meters.push(digest);
        self.places.insert(digest, place);
        place
    }

    /// Adds a request. Equal requests in sequence form one check group: as many pass as there is
    /// room for.
    pub(super) fn add_check(&mut self, waiting: WaitingRequest, places: Vec<u16>) {
        let WaitingRequest { request, since_us } = waiting;
        let waiter = Some(Waiter { ticket: request.ticket, since_us });
        let charges = charges_at(&places, &request.charges);
        let last = self.call.checks.last_mut().zip(self.groups.last_mut());
        let is_equal = |checks: &CheckGroup, waiting: &WaitingGroup| {
            checks.charges == charges && waiting.places == places
        };
        if let Some((checks, waiting)) = last.filter(|(checks, waiting)| is_equal(checks, waiting)) {
            checks.count += 1;
            waiting.waiters.push(waiter);
            return;
        }
        self.call.checks.push(CheckGroup { charges, count: 1 });
        self.groups.push(WaitingGroup { waiters: vec![waiter], places });
    }
}

/// Returns the cost of a request at each place of a call. A meter that occurs twice in the request
/// is charged the sum of both costs.
fn charges_at(places: &[u16], charges: &[Charge]) -> Vec<origin::Charge> {
    let mut at: Vec<origin::Charge> = Vec::with_capacity(places.len());
    for (&meter, &Charge { cost, .. }) in places.iter().zip(charges) {
        match at.iter_mut().find(|earlier| earlier.meter == meter) {
            Some(earlier) => earlier.cost = earlier.cost.saturating_add(cost),
            None => at.push(origin::Charge { meter, cost }),
        }
    }
    at
}
