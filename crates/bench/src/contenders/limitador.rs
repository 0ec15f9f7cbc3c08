//! limitador: its in-memory store, with the key as the one variable of one limit.

use std::collections::HashMap;

use anyhow::{Context as _, Result};
use limitador::RateLimiter;
use limitador::limit::{Context, Expression, Limit, Namespace};

use super::{Batch, Contender, Contenders, Entry, KeyCost, Role, Variant};
use crate::workload::Workload;

pub(super) const ENTRY: Entry = Entry {
    variants: &[Variant {
        contender: "limitador",
        note: Some("limitador: each check makes the context of values that its API asks for"),
    }],
    role: Role::Peer,
    make,
    key_cost: Some(KeyCost { fill_ns: 9_000, bytes: 1_076 }),
};

const NAMESPACE: &str = "bench";
const VARIABLE: &str = "key";

struct Limitador {
    limiter: RateLimiter,
    namespace: Namespace,
}

fn make(workload: &Workload) -> Result<Contenders> {
    // A tenth more than the keys, so that its cache has no reason to evict one.
    let limiter = RateLimiter::new(workload.keys + workload.keys / 10 + 1);
    let variable = Expression::try_from(VARIABLE.to_owned()).context("the limit's variable")?;
    let (count, seconds) = (workload.quota.count.into(), workload.quota.seconds.into());
    limiter.add_limit(Limit::new(NAMESPACE, count, seconds, [], [variable]));
    Ok(vec![Box::new(Limitador { limiter, namespace: NAMESPACE.into() })])
}

impl Contender for Limitador {
    fn check(&self, batch: &Batch<'_>) -> u64 {
        batch.count_by_name(|name| {
            let values = Context::from(HashMap::from([(VARIABLE.to_owned(), name.to_owned())]));
            let answer = self.limiter.check_rate_limited_and_update(&self.namespace, &values, 1);
            answer.is_ok_and(|answer| !answer.limited)
        })
    }
}
