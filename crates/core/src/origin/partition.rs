//! A partition of an origin: the meters that are decided together, and the sessions of the calling
//! nodes.

mod connected_time;
mod losses;
mod stamped_keys;
#[cfg(not(loom))]
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use self::connected_time::ConnectedTime;
use self::losses::Losses;
use self::stamped_keys::StampedKeys;
use super::call::{Call, CallReply, Charge, CheckGroup, CheckReply, NodeId, StoreId};
use super::meter::{Moment, OriginMeter, TOTAL_MAX};
use super::region_state::Connectivity;
use super::replication::{Component, MergeReply, MergeRequest, RegionId, RoundReply, RoundRequest};
use super::terms::Terms;

pub use self::connected_time::CONNECTED_US_MAX;

/// Retention of a session after its last call, µs. A node starts a session anew after half of this
/// time without a reply.
pub const SESSION_RETENTION_US: u64 = 3_600_000_000;

/// Maximum number of meters, and of check groups, in one call. Higher: fewer calls under load;
/// longer waits for other callers.
pub const UPDATES_PER_CALL_MAX: usize = 256;

/// Retention of a dirty meter that not all peers have acknowledged, µs: a week. Higher: a peer
/// receives every meter even after a longer absence; more memory until then.
pub const DIRTY_RETENTION_US: u64 = 604_800_000_000;

/// Maximum number of dirty meters of a partition, and of meters with isolated usage to publish
/// later. The oldest are dropped first. Higher: more keys may be used while a peer is lost; more
/// memory until it returns.
pub const DIRTY_METERS_MAX: usize = 16_384;

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
    losses: Losses,
    connected: ConnectedTime,
    /// The last stamp of a dirty meter.
    stamp: u64,
    dirty_meters: StampedKeys,
    /// Meters with isolated usage, by the time of its last charge. It is published when all peers
    /// are heard again, even without further calls.
    isolated_meters: StampedKeys,
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
        let session = self.sessions.get(&call.node);
        let (stored, reported_us) = session.map_or((0, 0), |session| (session.sequence, session.loss_us));
        let lost = self.losses.note(now_us, call, stored, reported_us);
        let reply = self.transition(now_us, call, lost);
        let (sequence, loss_us) = (call.sequence, self.losses.loss_us);
        let session = StoredSession { sequence, reply: reply.clone(), seen_us: now_us, loss_us };
        self.sessions.insert(call.node, session);
        Ok(reply)
    }

    /// Applies a replication round at `now_us`, in this boot of the store: updates how long all
    /// peers count as heard, and gathers the components of dirty meters.
    pub fn round(&mut self, now_us: u64, store: StoreId, round: &RoundRequest) -> RoundReply {
        self.connected.extend(now_us, round);
        // A stamp that was never issued comes from an earlier state of this store: the replicator
        // starts again at 0.
        let known = |stamp: u64| if stamp > self.stamp { 0 } else { stamp };
        let (trim, after) = (known(round.trim), known(round.after));
        self.dirty_meters.trim(trim.max(now_us.saturating_sub(DIRTY_RETENTION_US)), DIRTY_METERS_MAX);
        let most = usize::from(round.most).clamp(1, UPDATES_PER_CALL_MAX);
        let mut found: Vec<(u64, &[u8])> = self.dirty_meters.after(after).take(most + 1).collect();
        let more_dirty = found.len() > most;
        found.truncate(most);
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
        let expired_us = moment.now_us.saturating_sub(DIRTY_RETENTION_US);
        self.isolated_meters.trim(expired_us, DIRTY_METERS_MAX);
        if moment.connectivity == Connectivity::Isolated {
            return false;
        }
        let some = self.isolated_meters.len() > 0;
        let is_lost = self.losses.took_over(store);
        for _ in 0..most {
            let Some(key) = self.isolated_meters.pop_first() else { break };
            let loss_us = self.losses.loss_us;
            let meter = self.meters.get_mut(&key);
            if let Some(meter) = meter.filter(|meter| !is_lost && meter.loss_us() == loss_us) {
                meter.look(moment);
                self.mark_dirty_if_due(moment.now_us, &key);
            }
        }
        some
    }

    /// Records that a meter has isolated usage to publish later.
    fn note_isolated(&mut self, now_us: u64, key: &[u8]) {
        if self.meters.get(key).is_some_and(OriginMeter::has_isolated_usage) {
            self.isolated_meters.insert(now_us, key);
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

    fn moment(&self, node: NodeId, now_us: u64, lost: bool) -> Moment {
        let Losses { loss_us, at_us: loss_at_us, .. } = self.losses;
        let connected_since_us = self.connected.since_us;
        let connectivity = self.connected.connectivity(now_us);
        Moment { node, now_us, loss_us, loss_at_us, lost, connectivity, connected_since_us }
    }

    fn mark_dirty_if_due(&mut self, now_us: u64, key: &[u8]) {
        if !self.meters.get_mut(key).is_some_and(OriginMeter::is_due) {
            return;
        }
        // Stamps are times if possible, so that a store that has lost the last stamps issues higher
        // ones.
        self.stamp = now_us.max(self.stamp + 1);
        self.dirty_meters.insert(self.stamp, key);
    }

    /// Returns until when all peers count as heard, the last stamp, since when the peers count as
    /// heard, and whether their isolated usage has arrived since.
    pub fn connectivity_and_stamp(&self) -> (u64, u64, u64, bool) {
        let ConnectedTime { until_us, since_us, is_settled } = self.connected;
        (until_us, self.stamp, since_us, is_settled)
    }

    /// Returns the dirty meters with their stamps, in the order in which they last became due.
    pub fn dirty_meters(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.dirty_meters.iter()
    }

    /// Returns the meters with isolated usage, in the order of its last charge.
    pub fn isolated_meters(&self) -> impl Iterator<Item = (u64, &[u8])> {
        self.isolated_meters.iter()
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
        self.dirty_meters.retain(|key| self.meters.contains_key(key));
        self.isolated_meters.retain(|key| self.meters.contains_key(key));
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
