//! Tidegate: the SDK as a gateway would call it, with the system's clock.

use std::sync::Arc;

use anyhow::Result;
use arrayvec::ArrayVec;
use tidegate::{Check, Decision, Gate, Limit, Limiter};

use super::{Batch, Contender, Contenders, Entry, KeyCost, Role, Variant};
use crate::workload::Workload;

pub(super) const ENTRY: Entry = Entry {
    variants: &[
        Variant {
            contender: "tidegate",
            note: Some(
                "tidegate: at least 16 checks, or 8 requests of several limits, are known ahead, as in a \
                 pipeline or a queue, their meters fetched meanwhile; the clock is read for every 8 checks, \
                 or every 4 requests",
            ),
        },
        Variant {
            contender: "tidegate_single",
            note: Some("tidegate_single: one request at a time, the clock read for each"),
        },
    ],
    role: Role::Yardstick,
    make,
    key_cost: Some(KEY_COST),
};

const KEY_COST: KeyCost = KeyCost { fill_ns: 150, bytes: 50 };

/// The most limits per request of any case.
const LIMITS_MAX: usize = 4;

type Checks<'a> = ArrayVec<Check<'a>, LIMITS_MAX>;

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
            [gate] if self.batched => {
                let mut allowed = 0;
                let asks = batch.names().map(|name| gate.key(name));
                self.limiter.check_each(asks, |_, outcome| allowed += u64::from(outcome.is_allowed()));
                allowed
            }
            [gate] => batch.count_by_name(|name| self.limiter.check(gate.key(name)).is_allowed()),
            gates => self.check_all(gates, batch),
        }
    }
}

impl Tidegate {
    /// Requests of several limits.
    fn check_all(&self, gates: &[Gate], batch: &Batch<'_>) -> u64 {
        let requests =
            batch.requests().map(|names| gates.iter().zip(names).map(|(gate, name)| gate.key(name)));
        let is_allowed = |decision: Result<Decision<'_>, _>| decision.is_ok_and(|it| it.is_allowed());
        if self.batched {
            let mut allowed = 0;
            self.limiter.check_all_each(requests, |_, decision| allowed += u64::from(is_allowed(decision)));
            return allowed;
        }
        let ask = |asks: Checks<'_>| is_allowed(self.limiter.check_all(&asks));
        requests.map(|asks| u64::from(ask(asks.collect()))).sum()
    }
}
