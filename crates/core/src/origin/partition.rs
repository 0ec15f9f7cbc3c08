//! A partition of an origin: the meters that are decided together, and the sessions of the calling
//! nodes.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;

use super::call::{Call, CallReply, Charge, CheckGroup, CheckReply, NodeId, StoreId};
use super::meter::{Moment, OriginMeter, TOTAL_MAX};
use super::region_state::Connectivity;
use super::replication::{Component, MergeReply, MergeRequest, RegionId, RoundReply, RoundRequest};
use super::terms::Terms;
use crate::remote_clock::shortest_us;

/// Retention of a session after its last call, µs. A node starts a session anew after half of this
/// time without a reply.
pub const SESSION_RETENTION_US: u64 = 3_600_000_000;

/// Maximum number of meters, and of check groups, in one call. Higher: fewer calls under load;
/// longer waits for other callers.
pub const UPDATES_PER_CALL_MAX: usize = 256;

/// Longest time for which all peers count as heard without another round, µs. Higher: a replicator
/// may be absent for longer; regions may admit usage unknown to peers for that much longer.
pub const CONNECTED_US_MAX: u64 = 60_000_000;

/// Retention of a dirty meter that not all peers have acknowledged, µs: a week. Higher: a peer
/// receives every meter even after a longer absence; more memory until then.
pub const DIRTY_RETENTION_US: u64 = 604_800_000_000;

/// Maximum number of dirty meters of a partition, and of meters with isolated usage to publish
/// later. The oldest are dropped first. Higher: more keys may be used while a peer is lost; more
/// memory until it returns.
pub const DIRTY_METERS_MAX: usize = 16_384;

/// Largest lead of the replicator's estimate over the origin's clock, µs, before the clock counts
/// as set back. Lower: a clock that is slewed while its store receives few calls keeps its region
/// from settling. Higher: no harm, since the earlier connected time is cut by the lead.
const AHEAD_US_MAX: u64 = 250_000;

/// Margin of the test for lost writes of an empty store, µs. The store has lost everything if the
/// node has known the origin for longer than the store is up, by more than this. A sixteenth is
/// added for clocks of different rates. Stores report their uptime in whole seconds.
const LOST_MARGIN_US: u64 = 2_000_000;

/// The highest number of a call: a script's numbers are exact up to here.
pub const SEQUENCE_MAX: u64 = (1 << 53) - 1;

/// Why a call was not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallError {
    /// A later call of this session was applied before, so the node no longer waits for this one.
    Outdated {
        /// The last call that was applied.
        sequence: u64,
    },
    /// A check group names a meter without an update in the call.
    NoSuchMeter {
        /// The place that was named.
        meter: u16,
    },
    /// A meter is in the call twice.
    Twice {
        /// The place of one of the two.
        meter: usize,
    },
    /// A check group names a meter twice: it would pass with room for only one of the two charges.
    ChargedTwice {
        /// The place that was named.
        meter: u16,
    },
    /// The call has more meters or check groups than [`UPDATES_PER_CALL_MAX`].
    TooMany {
        /// How many there are.
        given: usize,
    },
    /// The sequence number of the call, or the acknowledged one, is above [`SEQUENCE_MAX`].
    Sequence {
        /// The number.
        given: u64,
    },
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outdated { sequence } => write!(
                f,
                "sequence: the call is older than call {sequence}, which this session has already applied"
            ),
            Self::NoSuchMeter { meter } => {
                write!(f, "checks: a check refers to meter {meter}, which is not in this call")
            }
            Self::Twice { meter } => write!(f, "updates: meter {meter} occurs twice in this call"),
            Self::ChargedTwice { meter } => write!(f, "checks: one check charges meter {meter} twice"),
            Self::TooMany { given } => {
                write!(f, "updates and checks: {given} is outside 0 to {UPDATES_PER_CALL_MAX}")
            }
            Self::Sequence { given } => write!(f, "sequence: {given} is outside 0 to {SEQUENCE_MAX}"),
        }
    }
}

impl std::error::Error for CallError {}

impl Call {
    /// Validates the call independently of the origin's state. Every origin does this first.
    pub fn check(&self) -> Result<(), CallError> {
        if let Some(given) =
            [self.sequence, self.acknowledged].into_iter().find(|given| *given > SEQUENCE_MAX)
        {
            return Err(CallError::Sequence { given });
        }
        let given = self.updates.len().max(self.checks.len());
        if given > UPDATES_PER_CALL_MAX {
            return Err(CallError::TooMany { given });
        }
        let mut meters: Vec<usize> = (0..self.updates.len()).collect();
        meters.sort_unstable_by_key(|meter| &self.updates[*meter].key);
        let twice = meters.windows(2).find(|pair| self.updates[pair[0]].key == self.updates[pair[1]].key);
        if let Some(pair) = twice {
            return Err(CallError::Twice { meter: pair[0] });
        }
        self.checks.iter().try_for_each(|ask| ask.check(self.updates.len()))
    }
}

impl CheckGroup {
    /// Whether it makes sense in a call with this many updates.
    fn check(&self, updates: usize) -> Result<(), CallError> {
        for (at, &Charge { meter, .. }) in self.charges.iter().enumerate() {
            if usize::from(meter) >= updates {
                return Err(CallError::NoSuchMeter { meter });
            }
            if self.charges[..at].iter().any(|earlier| earlier.meter == meter) {
                return Err(CallError::ChargedTwice { meter });
            }
        }
        Ok(())
    }
}

/// The last call of a node's session, and its reply.
#[derive(Clone, Debug)]
struct StoredSession {
    sequence: u64,
    reply: CallReply,
    seen_us: u64,
    /// The partition's last loss of writes at the time of the reply.
    loss_us: u64,
}

/// A partition of an origin, as pure state: the store in memory, and the reference for every other
/// store.
#[derive(Clone, Debug, Default)]
pub struct Partition {
    meters: HashMap<Box<[u8]>, OriginMeter>,
    sessions: BTreeMap<NodeId, StoredSession>,
    store: Option<StoreId>,
    /// The last loss of writes, known by when it was noticed; and when that was by a clock that may
    /// have been set back since.
    loss_us: u64,
    loss_at_us: u64,
    /// Until when all peers count as heard, and since when without a break.
    connected_until_us: u64,
    connected_since_us: u64,
    /// Whether the isolated usage of all peers has arrived since then.
    settled: bool,
    /// The last mark that was made, and those that are left: by their order, and by their meters.
    stamp: u64,
    dirty_meters: BTreeMap<u64, Box<[u8]>>,
    stamps: HashMap<Box<[u8]>, u64>,
    /// Meters with isolated usage, by the time of its last charge. It is published when all peers
    /// are heard again, even without further calls.
    isolated_meters: BTreeSet<(u64, Box<[u8]>)>,
    isolated_us: HashMap<Box<[u8]>, u64>,
}

impl Partition {
    /// Applies a call at `now_us`, the origin's clock: as a whole or not at all, and at most once
    /// while its session is stored.
    pub fn apply(&mut self, now_us: u64, call: &Call) -> Result<CallReply, CallError> {
        call.check()?;
        if let Some(session) = self.sessions.get_mut(&call.node) {
            if call.sequence == session.sequence {
                // Every attempt extends the retention. Otherwise a repeated call could be applied
                // again.
                session.seen_us = now_us;
                return Ok(session.reply.clone());
            }
            if call.sequence < session.sequence {
                return Err(CallError::Outdated { sequence: session.sequence });
            }
        }
        let lost = self.note_loss(now_us, call);
        let reply = self.transition(now_us, call, lost);
        let (sequence, loss_us) = (call.sequence, self.loss_us);
        let session = StoredSession { sequence, reply: reply.clone(), seen_us: now_us, loss_us };
        self.sessions.insert(call.node, session);
        Ok(reply)
    }

    /// Applies a replication round at `now_us`, in this boot of the store: updates how long all
    /// peers count as heard, and gathers the components of dirty meters.
    pub fn round(&mut self, now_us: u64, store: StoreId, round: &RoundRequest) -> RoundReply {
        self.update_connectivity(now_us, round);
        // A stamp that was never issued comes from an earlier state of this store: the replicator
        // starts again at 0.
        let known = |stamp: u64| if stamp > self.stamp { 0 } else { stamp };
        let (trim, after) = (known(round.trim), known(round.after));
        self.trim(trim.max(now_us.saturating_sub(DIRTY_RETENTION_US)));
        while self.dirty_meters.len() > DIRTY_METERS_MAX {
            self.dirty_meters.pop_first().map(|(_, key)| self.stamps.remove(&key));
        }
        let most = usize::from(round.most).clamp(1, UPDATES_PER_CALL_MAX);
        let mut dirty_meters = self.dirty_meters.range(after + 1..);
        let found: Vec<(u64, Box<[u8]>)> =
            dirty_meters.by_ref().take(most).map(|(stamp, key)| (*stamp, key.clone())).collect();
        let more_dirty = dirty_meters.next().is_some();
        let upto = found.last().filter(|_| more_dirty).map_or(self.stamp, |(stamp, _)| *stamp);
        let moment = self.moment(NodeId(0), now_us, false);
        let component = |key: &[u8]| self.meters.get(key).and_then(|meter| meter.component(key, moment));
        let components = found.iter().filter_map(|(_, key)| component(key)).collect();
        // These meters get stamps after all gathered ones.
        let more = more_dirty | self.mark_isolated(moment, store, most);
        RoundReply {
            components,
            upto,
            more,
            includes_isolated: moment.connectivity != Connectivity::Isolated,
            now_us,
        }
    }

    /// Marks up to `most` meters with isolated usage as dirty, once the region is no longer
    /// isolated. Returns whether there were any. A meter that may have lost writes is not published
    /// under its old incarnation: the next call starts a new one.
    fn mark_isolated(&mut self, moment: Moment, store: StoreId, most: usize) -> bool {
        let oldest_us = moment.now_us.saturating_sub(DIRTY_RETENTION_US);
        while self.isolated_meters.first().is_some_and(|(since_us, _)| *since_us <= oldest_us)
            || self.isolated_meters.len() > DIRTY_METERS_MAX
        {
            self.isolated_meters.pop_first().map(|(_, key)| self.isolated_us.remove(&key));
        }
        if moment.connectivity == Connectivity::Isolated {
            return false;
        }
        let some = !self.isolated_meters.is_empty();
        let is_lost = self.took_over(store);
        for _ in 0..most {
            let Some((_, key)) = self.isolated_meters.pop_first() else { break };
            self.isolated_us.remove(&key);
            let meter = self.meters.get_mut(&key).filter(|meter| !is_lost && meter.loss_us() == self.loss_us);
            if let Some(meter) = meter {
                meter.look(moment);
                self.mark_dirty_if_due(moment.now_us, &key);
            }
        }
        some
    }

    /// Records that a meter has isolated usage to publish later.
    fn note_isolated(&mut self, now_us: u64, key: &[u8]) {
        if !self.meters.get(key).is_some_and(OriginMeter::has_isolated_usage) {
            return;
        }
        if let Some(before_us) = self.isolated_us.insert(key.into(), now_us) {
            self.isolated_meters.remove(&(before_us, key.into()));
        }
        self.isolated_meters.insert((now_us, key.into()));
    }

    /// Extends the time for which all peers count as heard. A new replicator that has heard fewer
    /// peers does not shorten it. The time counts from the replicator's clock estimate, so a store
    /// that stood still does not lengthen it.
    fn update_connectivity(&mut self, now_us: u64, round: &RoundRequest) {
        let said_us = round.clock_us.min(now_us);
        // With a clock that was set back, the earlier time would last longer. If the clock only
        // runs slower than the replicator's, the estimate is a little ahead, and the earlier time
        // is cut by that lead.
        let ahead_us = round.clock_us - said_us;
        let is_set_back = ahead_us > AHEAD_US_MAX || self.connected_until_us > now_us + CONNECTED_US_MAX;
        let before_us = if is_set_back { 0 } else { self.connected_until_us.saturating_sub(ahead_us) };
        let was_isolated = before_us <= now_us;
        self.settled &= !was_isolated;
        let until_us = said_us + round.connected_for_us.min(CONNECTED_US_MAX);
        self.connected_until_us = match (self.settled, round.settled && until_us > now_us) {
            // Only a round with `settled` extends the time of a connected region.
            (true, false) => before_us,
            // The time of this round applies, because the time while settling may be longer.
            (false, true) => until_us,
            (true, true) | (false, false) => before_us.max(until_us),
        };
        self.settled |= round.settled && until_us > now_us;
        if was_isolated || self.connected_since_us > now_us {
            self.connected_since_us = now_us;
        }
    }

    fn trim(&mut self, upto: u64) {
        let kept = self.dirty_meters.split_off(&(upto + 1));
        for key in std::mem::replace(&mut self.dirty_meters, kept).into_values() {
            self.stamps.remove(&key);
        }
    }

    /// Merges components of a peer region at `now_us`: charges the new usage in them, and none of
    /// it twice.
    pub fn merge(&mut self, now_us: u64, merge: &MergeRequest) -> Result<MergeReply, CallError> {
        merge.check()?;
        let mut merged = MergeReply { charged: 0, stale: 0, now_us };
        let moment = self.moment(NodeId(0), now_us, false);
        for component in &merge.components {
            let (charged, is_new) = self.import(moment, merge.from, component);
            merged.charged = (merged.charged + charged).min(TOTAL_MAX);
            merged.stale += u32::from(!is_new);
            self.mark_dirty_if_due(now_us, &component.key);
        }
        Ok(merged)
    }

    /// Merges one component. A meter unknown here is created with the peer's terms, so that usage
    /// there counts when a node here calls. It gets version 0: the first call brings this region's
    /// share, with any version of the limit.
    fn import(&mut self, moment: Moment, from: RegionId, component: &Component) -> (u64, bool) {
        if component.terms.cross_region().is_none() {
            return (0, false);
        }
        let terms = component.terms.unversioned();
        self.meter_mut(&component.key, terms, moment.now_us).import(moment, from, component)
    }

    /// Whether a peer counts as lost. A clock that was set back does not extend the connected time.
    fn is_isolated(&self, now_us: u64) -> bool {
        !(now_us + 1..=now_us + CONNECTED_US_MAX).contains(&self.connected_until_us)
    }

    /// Returns the connectivity of cross-region limits.
    fn connectivity(&self, now_us: u64) -> Connectivity {
        if self.is_isolated(now_us) {
            return Connectivity::Isolated;
        }
        if self.settled { Connectivity::Connected } else { Connectivity::Settling }
    }

    fn moment(&self, node: NodeId, now_us: u64, lost: bool) -> Moment {
        let (loss_us, loss_at_us) = (self.loss_us, self.loss_at_us);
        let (connectivity, connected_since_us) = (self.connectivity(now_us), self.connected_since_us);
        Moment { node, now_us, loss_us, loss_at_us, lost, connectivity, connected_since_us }
    }

    fn mark_dirty_if_due(&mut self, now_us: u64, key: &[u8]) {
        if !self.meters.get_mut(key).is_some_and(OriginMeter::is_due) {
            return;
        }
        // Stamps are times if possible, so that a store that has lost the last stamps issues higher
        // ones.
        self.stamp = now_us.max(self.stamp + 1);
        if let Some(before) = self.stamps.insert(key.into(), self.stamp) {
            self.dirty_meters.remove(&before);
        }
        self.dirty_meters.insert(self.stamp, key.into());
    }

    /// Returns until when all peers count as heard, the last stamp, since when the peers count as
    /// heard, and whether their isolated usage has arrived since.
    pub fn connectivity_and_stamp(&self) -> (u64, u64, u64, bool) {
        (self.connected_until_us, self.stamp, self.connected_since_us, self.settled)
    }

    /// Returns the dirty meters with their stamps, in the order in which they last became due.
    pub fn dirty_meters(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.dirty_meters.iter().map(|(stamp, key)| (*stamp, &**key))
    }

    /// Returns the meters with isolated usage, in the order of its last charge.
    pub fn isolated_meters(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.isolated_meters.iter().map(|(since_us, key)| (*since_us, &**key))
    }

    /// Returns a meter, if the partition has it.
    pub fn meter(&self, key: &[u8]) -> Option<&OriginMeter> {
        self.meters.get(key)
    }

    /// Every meter with its name.
    pub fn meters(&self) -> impl ExactSizeIterator<Item = (&[u8], &OriginMeter)> {
        self.meters.iter().map(|(key, meter)| (&**key, meter))
    }

    /// Drops expired state.
    pub fn expire(&mut self, now_us: u64) {
        self.meters.retain(|_, meter| !meter.is_over(now_us));
        self.sessions.retain(|_, session| session.seen_us + SESSION_RETENTION_US > now_us);
        self.dirty_meters.retain(|_, key| self.meters.contains_key(key));
        self.stamps.retain(|key, _| self.meters.contains_key(key));
        self.isolated_meters.retain(|(_, key)| self.meters.contains_key(key));
        self.isolated_us.retain(|key, _| self.meters.contains_key(key));
    }

    /// Notes lost writes, and returns whether any were lost since the last reply in this session.
    /// The store may have a lower sequence number than the node. It may be a restart of the earlier
    /// store, or a promoted replica that had not received all writes. Or it is empty and younger
    /// than the one that the node knows.
    fn note_loss(&mut self, now_us: u64, call: &Call) -> bool {
        let (answered, told_us) =
            self.sessions.get(&call.node).map_or((0, 0), |session| (session.sequence, session.loss_us));
        let forgot = call.acknowledged > answered;
        let took_over = self.took_over(call.store);
        let began_anew = self.store.is_none() && began_anew(call.known_us, call.store.up_us);
        self.store = Some(call.store);
        // If the clock was set back to before a loss, the loss counts as just now. A loss in the
        // future would keep the assumed usage from draining.
        self.loss_at_us = self.loss_at_us.min(now_us);
        if forgot || took_over {
            (self.loss_us, self.loss_at_us) = (now_us, now_us);
        } else if began_anew {
            let booted_us = now_us.saturating_sub(call.store.up_us);
            (self.loss_us, self.loss_at_us) = (booted_us, booted_us);
        }
        forgot || took_over || began_anew || (call.acknowledged > 0 && self.loss_us != told_us)
    }

    /// Whether this is another life of the store than that which the last call found.
    fn took_over(&self, store: StoreId) -> bool {
        self.store.is_some_and(|before| {
            before.boot != store.boot && (before.lineage == store.lineage || before.boot == store.parent)
        })
    }

    fn transition(&mut self, now_us: u64, call: &Call, lost: bool) -> CallReply {
        let moment = self.moment(call.node, now_us, lost);
        let mut lapsed = Vec::with_capacity(call.updates.len());
        for update in &call.updates {
            let meter = self.meter_mut(&update.key, update.terms, now_us);
            lapsed.push(meter.settle(moment, update));
        }
        let checks = call.checks.iter().map(|ask| self.decide(moment, call, ask)).collect();
        let meter_reply = call.updates.iter().zip(lapsed).map(|(update, lapsed)| {
            let meter = self.meter_mut(&update.key, update.terms, now_us);
            meter.grant(moment, update, lapsed)
        });
        let meter_reply = meter_reply.collect();
        for update in &call.updates {
            self.mark_dirty_if_due(now_us, &update.key);
            self.note_isolated(now_us, &update.key);
        }
        CallReply { meters: meter_reply, checks, now_us, lost }
    }

    fn meter_mut(&mut self, key: &[u8], terms: Terms, now_us: u64) -> &mut OriginMeter {
        self.meters.entry(key.into()).or_insert_with(|| OriginMeter::new(terms, now_us))
    }

    /// Decides requests of one kind: as many pass as every one of their meters has room for, and
    /// each of those charges all.
    fn decide(&mut self, moment: Moment, call: &Call, ask: &CheckGroup) -> CheckReply {
        let key = |charge: &Charge| call.updates.get(usize::from(charge.meter)).map(|update| &update.key);
        let (mut passed, mut denied_by, mut retry_us) = (ask.count, 0, 0);
        for charge in &ask.charges {
            if let Some(meter) = key(charge).and_then(|key| self.meters.get(key)) {
                passed = passed.min(meter.passes(moment.node, charge.cost, ask.count));
            }
        }
        for charge in &ask.charges {
            let Some(meter) = key(charge).and_then(|key| self.meters.get_mut(key)) else { continue };
            meter.admit(moment.node, u64::from(passed) * charge.cost);
            if passed == ask.count {
                continue;
            }
            let wait_us = meter.denial_us(moment, charge.cost);
            meter.note_refusal(wait_us);
            if wait_us > retry_us {
                (denied_by, retry_us) = (charge.meter, wait_us);
            }
        }
        CheckReply { passed, denied_by, retry_us }
    }
}

/// Whether an empty store replaced the one that the node first knew.
const fn began_anew(known_us: u64, up_us: u64) -> bool {
    shortest_us(known_us) > up_us.saturating_add(LOST_MARGIN_US)
}

#[cfg(not(loom))]
#[cfg(test)]
mod tests;
