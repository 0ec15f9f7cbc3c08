//! A node: the shipped engine and table, on a clock of its own.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::engine::{self, Effect, Engine, EngineRequest, EngineSettings, MeterRef};
use tidegate_core::origin::{Call, NodeId};
use tidegate_core::{
    Check, CheckOutcome, DecidingMeter, Digest, FallbackState, KeySpace, Limit, NodeShare, Now,
    RequestVerdict, Retry, Secret, Shares, Table, Verdict,
};

use crate::clock::SkewedClock;
use crate::rule_editions::Rule;
use crate::scenario::Charge;

/// Memory of a node's table: few keys live in it.
const TABLE_BYTES: usize = 1 << 16;

/// How many partitions the keys are spread over at most.
pub(crate) const PARTITIONS_MAX: usize = 4;

/// The most limits that a request is under.
const METERS_MAX: usize = 2;

/// The decision of a node's memory about a request.
pub(crate) enum SpendResult {
    Allowed,
    Denied,
    Asks,
}

/// A process.
pub(crate) struct Node {
    pub(crate) id: NodeId,
    /// Number of the process at this index. A message to an earlier process does not reach a later
    /// one.
    pub(crate) life: u32,
    pub(crate) engine: Engine,
    pub(crate) table: Table,
    pub(crate) clock: SkewedClock,
    space: KeySpace,
    /// Its own parts of limits.
    alone: KeySpace,
    /// Time until which no message reaches the node, µs.
    pub(crate) cut_until_us: u64,
    /// When it is to be woken, by the true time.
    pub(crate) wake_us: u64,
    /// Time until which the node is frozen, µs.
    pub(crate) frozen_until_us: u64,
    /// Whether it takes no more requests.
    pub(crate) closing: bool,
    /// The edition of the limits that it knows.
    pub(crate) edition: usize,
    /// The call in flight to each partition, and when it was first sent.
    pub(crate) in_flight: BTreeMap<u16, (Arc<Call>, u64)>,
    /// Whether it makes the mistake to keep a limit that counts in another way in another slot.
    pub(crate) slot_of_limit: bool,
}

impl Node {
    pub(crate) fn new(
        id: u64,
        life: u32,
        clock: SkewedClock,
        edition: usize,
        settings: EngineSettings,
    ) -> Option<Self> {
        let secret = Secret::from_bytes(u128::from(id).to_le_bytes());
        Some(Self {
            id: NodeId(id),
            life,
            engine: Engine::new(NodeId(id), settings),
            table: Table::new(TABLE_BYTES, &Shares::single()).ok()?,
            clock,
            space: KeySpace::new(&secret, Shares::FIRST, "key"),
            alone: KeySpace::new(&secret, Shares::FIRST, "alone"),
            cut_until_us: 0,
            wake_us: u64::MAX,
            frozen_until_us: 0,
            closing: false,
            edition,
            in_flight: BTreeMap::new(),
            slot_of_limit: false,
        })
    }

    pub(crate) fn now(&self, true_us: u64) -> Now {
        self.clock.read(true_us)
    }

    /// Decides by the grants of the node.
    pub(crate) fn spend(&self, now: Now, metered: &[MeteredCharge]) -> SpendResult {
        let ask =
            |metered: &'_ MeteredCharge| (metered.rule.limit, self.digest(metered), metered.charge.cost);
        let found: Vec<(Limit, Digest, u64)> = metered.iter().map(ask).collect();
        self.check(now, &self.space, &found)
    }

    fn check(&self, now: Now, space: &KeySpace, found: &[(Limit, Digest, u64)]) -> SpendResult {
        let checks: Vec<Check<'_>> = found
            .iter()
            .map(|(limit, digest, cost)| Check { limit, space, digest: *digest, cost: *cost })
            .collect();
        let verdict = Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::AskOrigin };
        let mut answers = [CheckOutcome { verdict, source: DecidingMeter::Own }; METERS_MAX];
        match self.table.check_all(now, &checks, &mut answers) {
            Ok(RequestVerdict::Allowed) => SpendResult::Allowed,
            Ok(RequestVerdict::Denied { by }) if answers[by].verdict.retry() == Some(Retry::AskOrigin) => {
                SpendResult::Asks
            }
            _ => SpendResult::Denied,
        }
    }

    fn digest(&self, MeteredCharge { charge, rule }: &MeteredCharge) -> Digest {
        let name = name(charge.meter);
        if self.slot_of_limit {
            let kind = [rule.limit.algorithm() as u64, rule.limit.period_us()].map(u64::to_le_bytes).concat();
            return self.space.digest(&[&name, &kind]);
        }
        self.space.digest(&[&name])
    }

    fn meter(&self, metered: &MeteredCharge) -> MeterRef {
        MeterRef {
            key: Arc::from(&name(metered.charge.meter)[..]),
            limit: metered.rule.limit,
            terms: metered.rule.terms,
            space: self.space,
            digest: self.digest(metered),
        }
    }

    /// Takes a request to the engine.
    pub(crate) fn ask(
        &mut self,
        now: Now,
        ticket: u64,
        partition: u16,
        metered: &[MeteredCharge],
        effects: &mut Vec<Effect>,
    ) {
        let charge = |metered: &MeteredCharge| engine::Charge {
            meter: self.meter(metered),
            cost: metered.charge.cost,
        };
        let charges = metered.iter().map(charge).collect();
        self.engine.on_request(now, EngineRequest { ticket, partition, charges }, effects);
    }

    /// Decides by this node's parts of the limits, because the origin does not.
    pub(crate) fn decide_alone(
        &self,
        now: Now,
        partition: u16,
        metered: &[MeteredCharge],
        fallback_state: impl Fn(FallbackState) -> FallbackState,
    ) -> bool {
        let part = |metered: &MeteredCharge| {
            let known = fallback_state(self.engine.fallback_state(now, partition, self.digest(metered)));
            let NodeShare { limit, spent } = NodeShare::new(&metered.rule.limit, known);
            let digest = self.alone.digest(&[&name(metered.charge.meter)]);
            if spent > 0 {
                let used = Check { limit: &limit, space: &self.alone, digest, cost: spent };
                self.table.merge(now, &used);
            }
            (limit, digest, metered.charge.cost)
        };
        let parts: Vec<(Limit, Digest, u64)> = metered.iter().map(part).collect();
        matches!(self.check(now, &self.alone, &parts), SpendResult::Allowed)
    }

    /// Charges a request without a check.
    pub(crate) fn owe(&mut self, now: Now, partition: u16, metered: &[MeteredCharge]) {
        for metered in metered {
            let meter = self.meter(metered);
            self.engine.owe(now, partition, &meter, metered.charge.cost);
        }
    }

    /// The sequence number of the call in flight to a partition.
    pub(crate) fn sequence_in_flight(&self, partition: u16) -> Option<u64> {
        self.in_flight.get(&partition).map(|(call, _)| call.sequence)
    }

    /// Stops in order: the node reports all usage, and keeps no grant from now on.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.engine.close();
    }
}

/// A limit that a request is under.
pub(crate) struct MeteredCharge {
    pub(crate) charge: Charge,
    pub(crate) rule: Rule,
}

pub(crate) fn name(meter: usize) -> [u8; 8] {
    (meter as u64).to_be_bytes()
}

/// The meter of this name.
pub(crate) fn meter_of(name: &[u8]) -> usize {
    name.iter().fold(0, |number, byte| number << 8 | usize::from(*byte))
}
