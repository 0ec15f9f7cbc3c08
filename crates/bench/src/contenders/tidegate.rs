//! Tidegate: the SDK as a gateway would call it, with the system's clock.

use std::sync::Arc;

use anyhow::Result;
use arrayvec::ArrayVec;
use tidegate::{Ask, Gate, Limit, Limiter};

use super::{Batch, Contender, Contenders, Entry, KeyCost, Role, Variant};
use crate::workload::Workload;

pub(super) const ENTRY: Entry = Entry {
    variants: &[
        Variant {
            who: "tidegate",
            note: Some(
                "tidegate: requests under one limit are asked in batches of 16, as a pipeline brings them",
            ),
        },
        Variant {
            who: "tidegate_single",
            note: Some("tidegate_single: one request at a time, the clock read for each"),
        },
    ],
    role: Role::Yardstick,
    make,
    key_cost: Some(KEY_COST),
};

const KEY_COST: KeyCost = KeyCost { fill_ns: 150, bytes: 50 };

/// Requests asked together: what a Redis client pipelines, and a fraction of what a busy socket brings.
const BATCH: usize = 16;

/// Limits of a request in the cases there are.
const LIMITS_MAX: usize = 4;

struct Tidegate {
    limiter: Arc<Limiter>,
    gates: Vec<Gate>,
    batched: bool,
}

fn make(workload: &Workload) -> Result<Contenders> {
    let limit = Limit::gcra(workload.quota.count.into(), workload.quota.period())?;
    let names: Vec<String> = (0..workload.limits).map(|at| format!("limit_{at}")).collect();
    let described = Limiter::builder().keys(usize::try_from(workload.keys)?);
    let limiter = names.iter().fold(described, |builder, name| builder.limit(name, limit)).build()?;
    let gates: Vec<Gate> = names.iter().map(|name| limiter.gate(name)).collect::<Result<_, _>>()?;
    let limiter = Arc::new(limiter);
    let batched = Tidegate { limiter: Arc::clone(&limiter), gates: gates.clone(), batched: true };
    Ok(vec![Box::new(batched), Box::new(Tidegate { limiter, gates, batched: false })])
}

impl Contender for Tidegate {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        match self.gates.as_slice() {
            [gate] if self.batched => self.check_each(gate, batch),
            [gate] => batch.count_by_name(|name| self.limiter.check(gate.key(name)).is_allowed()),
            gates => self.check_all(gates, batch),
        }
    }
}

impl Tidegate {
    fn check_each(&self, gate: &Gate, batch: &Batch<'_>) -> u64 {
        let mut names = batch.names();
        let mut allowed = 0;
        loop {
            let asks: ArrayVec<Ask<'_>, BATCH> =
                names.by_ref().take(BATCH).map(|name| gate.key(name)).collect();
            if asks.is_empty() {
                return allowed;
            }
            self.limiter.check_each(&asks, |_, outcome| allowed += u64::from(outcome.is_allowed()));
        }
    }

    fn check_all(&self, gates: &[Gate], batch: &Batch<'_>) -> u64 {
        let mut names = batch.names();
        let mut allowed = 0;
        for _ in 0..batch.numbers.len() / gates.len() {
            let mut asks = [gates[0].key(""); LIMITS_MAX];
            for ((ask, gate), name) in asks.iter_mut().zip(gates).zip(&mut names) {
                *ask = gate.key(name);
            }
            allowed += u64::from(self.is_allowed(&asks[..gates.len()]));
        }
        allowed
    }

    fn is_allowed(&self, asks: &[Ask<'_>]) -> bool {
        self.limiter.check_all(asks).is_ok_and(|decision| decision.is_allowed())
    }
}
