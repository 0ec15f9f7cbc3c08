//! A node: the shipped engine and table, on a clock of its own.

use std::sync::Arc;

use tidegate_core::engine::{Effect, Engine, MeterRef, Request, Settings};
use tidegate_core::origin::{NodeId, Terms};
use tidegate_core::{
    Answer, Ask, Decided, KeySpace, Limit, Now, Retry, Secret, Shares, Source, Table, Verdict,
};

use crate::clock::SkewedClock;

/// Memory of a node's table: few keys live in it.
const TABLE_BYTES: usize = 1 << 16;

/// How many partitions the keys are spread over.
pub(crate) const PARTITIONS: u16 = 4;

/// What a node makes of a request by itself.
pub(crate) enum Spent {
    Allowed,
    Denied,
    Asks,
}

/// A process.
pub(crate) struct Node {
    /// Which process of this place it is: what was meant for an earlier one is not for it.
    pub(crate) life: u32,
    pub(crate) engine: Engine,
    pub(crate) table: Table,
    pub(crate) clock: SkewedClock,
    space: KeySpace,
    /// Until when nothing reaches it.
    pub(crate) cut_until_us: u64,
    /// When it is to be woken, by the true time.
    pub(crate) wake_us: u64,
    /// Which version of the limit it knows.
    pub(crate) version: usize,
}

impl Node {
    pub(crate) fn new(id: u64, life: u32, clock: SkewedClock, version: usize) -> Option<Self> {
        let secret = Secret::from_bytes(u128::from(id).to_le_bytes());
        Some(Self {
            life,
            engine: Engine::new(NodeId(id), Settings::default()),
            table: Table::new(TABLE_BYTES, &Shares::single()).ok()?,
            clock,
            space: KeySpace::new(&secret, Shares::FIRST, "key"),
            cut_until_us: 0,
            wake_us: u64::MAX,
            version,
        })
    }

    pub(crate) fn now(&self, true_us: u64) -> Now {
        self.clock.read(true_us)
    }

    /// Decides by what it holds.
    pub(crate) fn spend(&self, now: Now, limit: &Limit, key: usize, cost: u64) -> Spent {
        let ask = Ask { limit, space: &self.space, digest: self.space.digest(&[&name(key)]), cost };
        let verdict = Verdict::Deny { remaining: 0, reset_after_us: 0, retry: Retry::Ask };
        let mut answers = [Answer { verdict, source: Source::Own }];
        match self.table.check_all(now, &[ask], &mut answers) {
            Ok(Decided::Allowed) => Spent::Allowed,
            _ if answers[0].verdict.retry() == Some(Retry::Ask) => Spent::Asks,
            _ => Spent::Denied,
        }
    }

    /// Takes a request to the engine.
    pub(crate) fn ask(&mut self, now: Now, asked: &Asking, effects: &mut Vec<Effect>) {
        let key = name(asked.key);
        let digest = self.space.digest(&[&key]);
        let (limit, terms) = (asked.limit, asked.terms);
        let meter = MeterRef { key: Arc::from(&key[..]), limit, terms, space: self.space, digest };
        let partition = partition_of(asked.key);
        let request = Request { ticket: asked.ticket, partition, meters: vec![meter], cost: asked.cost };
        self.engine.ask(now, request, effects);
    }
}

/// A request on its way to the engine.
pub(crate) struct Asking {
    pub(crate) ticket: u64,
    pub(crate) key: usize,
    pub(crate) cost: u64,
    pub(crate) limit: Limit,
    pub(crate) terms: Terms,
}

pub(crate) fn name(key: usize) -> [u8; 8] {
    (key as u64).to_be_bytes()
}

pub(crate) fn partition_of(key: usize) -> u16 {
    (key % usize::from(PARTITIONS)) as u16
}
